"""Parsing a printed expression gives the same tree, and spans delimit what they name."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.printer import print_expression
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax import ast
from kcdsl.syntax.parser import parse_budget, parse_expression

KEYWORDS = {"forall", "exists", "in", "of", "and", "or", "not", "implies", "true", "false"}
NAMES = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda n: n not in KEYWORDS)
NAME = st.builds(ast.Name, NAMES)
UNITS = st.sampled_from([None, "ms", "s", "GiB", "tok/s", "nats", "%", "min"])
VALUES = st.builds(lambda n, e: Fraction(n) / 10**e, st.integers(0, 10**9), st.integers(0, 14))
NUMBER = st.builds(ast.Num, VALUES, UNITS)
TEXT = st.builds(ast.Text, st.text(st.characters(exclude_characters="\n\r", codec="utf-8")))
TRUTH = st.builds(ast.Truth, st.booleans())
LIST = st.builds(ast.ListOf, st.lists(st.one_of(NAME, NUMBER, TEXT, TRUTH), max_size=3).map(tuple))
LEAF = st.one_of(NUMBER, NAME, TEXT, TRUTH, LIST)
COMPARE = st.sampled_from(["<=", ">=", "<", ">", "==", "!="])


def grow(inner: st.SearchStrategy[ast.Expression]) -> st.SearchStrategy[ast.Expression]:
    """Build every kind of node over smaller expressions."""
    calls = st.builds(ast.Call, NAME, st.lists(inner, max_size=3).map(tuple))
    comparisons = st.integers(1, 2).flatmap(
        lambda n: st.builds(
            ast.ComparisonChain,
            st.tuples(*[COMPARE] * n),
            st.tuples(*[inner] * (n + 1)),
        )
    )
    return st.one_of(
        calls,
        st.builds(ast.Minus, inner),
        st.builds(ast.Binary, st.sampled_from("+-*/"), inner, inner),
        comparisons,
        st.builds(ast.Membership, inner, LIST),
        st.builds(ast.Negation, inner),
        st.builds(ast.Logic, st.just("implies"), st.tuples(inner, inner)),
        st.builds(
            ast.Logic,
            st.sampled_from(["and", "or"]),
            st.lists(inner, min_size=2, max_size=3).map(tuple),
        ),
        st.builds(ast.Quantifier, st.sampled_from(["forall", "exists"]), NAME, calls, inner),
    )


EXPRESSIONS = st.recursive(LEAF, grow, max_leaves=12)


HEADER = "|1+\n "


def written(text: str) -> str:
    """Return a text as a literal block scalar, which needs no escapes."""
    return HEADER + text.replace("\n", "\n ")


def parsed(text: str) -> tuple[ast.Expression | None, Sink]:
    """Parse a text as a literal scalar that fills the whole file."""
    source, sink = SourceFile("text", written(text)), Sink()
    scalar = Scalar(text, text, "|", Span(0, len(source.text)))
    return parse_expression(source, scalar, sink), sink


@pytest.mark.full
@settings(max_examples=150)
@given(EXPRESSIONS)
def test_parsing_inverts_printing(expression: ast.Expression) -> None:
    text = print_expression(expression)
    again, sink = parsed(text)
    assert again == expression, (text, [d.message for d in sink])
    assert print_expression(again) == text


TOKEN = re.compile(
    r"""(?P<text>"(?:[^"\\]|\\.)*")|(?P<word>[A-Za-z_][\w]*(?:/[A-Za-z]+)?|%)"""
    r"""|(?P<number>[\d.]+(?:e[-+]?\d+)?)|(?P<sign><=|>=|==|!=|[^\w\s])""",
    re.VERBOSE,
)


@pytest.mark.full
@settings(max_examples=150)
@given(EXPRESSIONS, st.randoms(use_true_random=False))
def test_white_space_between_tokens_does_not_matter(
    expression: ast.Expression, random: Random
) -> None:
    text = print_expression(expression)
    spaced, end = "", 0
    for token in TOKEN.finditer(text):
        gap = text[end : token.start()]
        assert not gap.strip(), (text, gap)
        glue = gap or token[0] != "%"
        spaced += random.choice((" ", "  ", "\n", "\t ")) if glue else ""
        spaced, end = spaced + token[0], token.end()
    again, sink = parsed(spaced)
    assert again == expression, (spaced, [d.message for d in sink])


@pytest.mark.full
@settings(max_examples=100)
@given(EXPRESSIONS)
def test_redundant_brackets_do_not_matter(expression: ast.Expression) -> None:
    text = print_expression(expression)
    again, _ = parsed(f"(( {text}))")
    assert again == expression
    assert print_expression(again) == text


STATEMENTS = sorted(
    {
        " ".join(match[1].split())
        for path in Path(__file__).resolve().parents[2].glob("grammar/corpus/*/*.kc.yaml")
        for match in re.finditer(r"require: ([^\"'{\[>|\n]*)", path.read_text(encoding="utf-8"))
    }
)


@pytest.mark.parametrize("text", STATEMENTS)
def test_printing_is_idempotent(text: str) -> None:
    tree, _ = parsed(text)
    if tree is None:  # an invalid document of the corpus
        return
    printed = print_expression(tree)
    again, _ = parsed(printed)
    assert again == tree
    assert print_expression(again) == printed


def nodes(value: object) -> list[ast.Expression]:
    """Return every node of a tree."""
    if isinstance(value, tuple):
        return [node for item in value for node in nodes(item)]
    if not isinstance(value, ast.Expression):
        return []
    fields = (getattr(value, name) for name in value.__dataclass_fields__)
    return [value, *(node for field in fields for node in nodes(field))]


@pytest.mark.full
@settings(max_examples=100)
@given(EXPRESSIONS)
def test_text_of_a_span_parses_to_its_node(expression: ast.Expression) -> None:
    text = print_expression(expression)
    root, _ = parsed(text)
    assert root is not None
    for node in nodes(root):
        again, _ = parsed(written(text)[node.span.start : node.span.end])
        assert again == node


@pytest.mark.full
@given(VALUES, st.sampled_from([None, "%"]), st.sampled_from(["requests", "windows"]))
def test_printed_budgets_are_parsed(rate: Fraction, unit: str | None, counted: str) -> None:
    budget = ast.BudgetText(ast.Num(rate, unit), ast.Name(counted))
    text = f"{print_expression(budget.rate)} of {counted}"
    scalar = Scalar(text, text, "plain", Span(0, len(text)))
    assert parse_budget(SourceFile("text", text), scalar, Sink()) == budget


@settings(max_examples=300)
@given(st.text(st.sampled_from("ab1.()[],:<=>!&|+-*/%\"' \nforalin"), max_size=30))
def test_any_text_gives_a_tree_or_one_diagnostic_inside_it(text: str) -> None:
    tree, sink = parsed(text)
    assert (tree is None) == sink.has_errors
    for diagnostic in sink:
        assert diagnostic.span is not None
        first = len(HEADER) if text.strip() else 0
        assert first <= diagnostic.span.start <= diagnostic.span.end <= len(written(text))
