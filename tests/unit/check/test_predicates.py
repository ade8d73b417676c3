"""Slice predicates."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kcdsl.check.expressions.fields import predicate
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.report import Reporter
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, NoneOf, Predicate
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax.parser import parse_expression

LONG = FieldTest("length", ">", Fraction(128))
SAFE = FieldTest("category", "==", "safety")


def typed(text: str) -> tuple[Predicate | None, list[str]]:
    """Type a predicate; return it with the codes that were reported."""
    source, sink = SourceFile("x", text), Sink()
    tree = parse_expression(source, Scalar(text, text, "plain", Span(0, len(text))), sink)
    found = predicate(tree, Reporter(source, sink)) if tree is not None else None
    return found, [d.code.id for d in sink]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("length > 128", LONG),
        ("128 < length", LONG),
        ('category == "safety"', SAFE),
        ("category == 'safety'", SAFE),
        ('length > 128 and category == "safety"', AllOf((LONG, SAFE))),
        ('length > 128 or not category == "safety"', AnyOf((LONG, NoneOf(SAFE)))),
        ('length > 128 implies category == "safety"', AnyOf((NoneOf(LONG), SAFE))),
        ("flagged != true", FieldTest("flagged", "!=", True)),
        ("score >= -0.5", FieldTest("score", ">=", Fraction(-1, 2))),
        (
            'category in ["safety", "tools"]',
            AnyOf((SAFE, FieldTest("category", "==", "tools"))),
        ),
        (
            '(length > 128 or category == "safety") and length > 128',
            AllOf((AnyOf((LONG, SAFE)), LONG)),
        ),
    ],
)
def test_valid_predicates_are_accepted(text: str, expected: Predicate) -> None:
    assert typed(text) == (expected, [])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("length", "KC207"),
        ("length > 1 ms", "KC207"),
        ("length > other", "KC207"),
        ('length < "abc"', "KC207"),
        ("flagged < true", "KC207"),
        ("1 < 2", "KC404"),
        ("0 < length < 9", "KC207"),
        ("mean(kl) < 3", "KC207"),
        ("length in []", "KC404"),
        ("1 in [1]", "KC207"),
        ("forall x in points(all): length > 1", "KC207"),
        ("length + 1 > 3", "KC207"),
    ],
)
def test_invalid_predicates_are_rejected(text: str, code: str) -> None:
    assert typed(text) == (None, [code])
