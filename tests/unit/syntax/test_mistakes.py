"""Syntax errors list the expected tokens, at the exact position."""

from __future__ import annotations

import re

import pytest

from kcdsl.diagnostics import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax.errors import TERMINALS
from kcdsl.syntax.parser import parse_budget, parse_expression, parse_quantity
from kcdsl_grammar import FILES, text


def only(expression: str, parse: object = parse_expression) -> Diagnostic:
    """Return the only diagnostic of an expression that fills a whole file."""
    sink = Sink()
    scalar = Scalar(expression, expression, "plain", Span(0, len(expression)))
    assert callable(parse)
    assert parse(SourceFile("x", expression), scalar, sink) is None
    (diagnostic,) = sink
    return diagnostic


@pytest.mark.parametrize(
    ("marked", "help"),
    [
        ("a «=» 3", "write `==` for equality"),
        ("a «&&» b", "write `and`"),
        ("a «||» b", "write `or`"),
        ("a «≤» b", "write `<=`"),
        ("«!»a", "write `not`"),
        ("a «=>» b", "write `>=`"),
        ("a «^» 2 <= 3", "there are no powers"),
        ("max(a«» ", "close the bracket with `)`"),
        ("f(a)«)» <= 2", "there is no `(` to this `)`"),
        ("has(trace, [a, b«»", "close the list with `]`"),
        ("a < «=» 3", "write `==`"),
        ("forall x in points(s) «f»(x)", "put `:` after the region"),
        ("forall x in points(s)«,» f(x)", "write `:` after the region, not `,`"),
        ("forall x in all«:» f(x) <= 1", "hull(all) or rows(all, LONGEST)"),
        ("forall x«,» y in points(s): f(x)", "a quantifier binds one variable"),
        ("p99 «kl» <= 1", "write `p99(kl)`"),
        ("p99«.9»(kl) <= 1", "write quantile(0.999, METRIC)"),
        ("kl«.»p99 <= 1", "a statistic is p99(kl)"),
        ("a < 1 and forall «x» in points(s): f(x)", "in parentheses"),
        ("not exists «x» in points(s): f(x)", "in parentheses"),
        ("f(a «b») <= 3", None),
        ("a >= «>» 3", "write `<=` or `>=`"),
        ("a <= 3 «:» b", "a `:` follows only the region"),
        ("“a” == b", "use straight quotation marks"),
    ],
)
def test_common_syntax_errors(marked: str, help: str | None) -> None:
    marks = [marked.index(c) for c in "«»" if c in marked]
    start, end = (marks[0], marks[1] - 1) if marks else (0, 1)
    expression = marked.replace("«", "").replace("»", "")
    diagnostic = only(expression)
    assert diagnostic.code.id == "KC010"
    assert diagnostic.span is not None
    if start == end:
        end = diagnostic.span.end
    assert (diagnostic.span.start, diagnostic.span.end) == (start, end)
    if help is not None:
        assert help in (diagnostic.help or "")


def test_unexpected_end_is_at_the_end_of_the_text() -> None:
    diagnostic = only("max(a, b")
    assert diagnostic.span == Span(8, 8)
    assert "`)`" in diagnostic.message


def test_expected_tokens_are_described_in_words() -> None:
    message = only("p99(kl) <=").message
    assert (
        message
        == (
            "the expression ends too early; expected `forall`, `exists`, `not`, a name, a number "
            "or `(`"
        )
        or "a name, a number or `(`" in message
    )
    assert "__ANON" not in only("a b").message
    assert not re.search(r"\b[A-Z]{2,}\b", only("a b").message)


def test_every_terminal_has_a_description() -> None:
    grammar = text("expression.lark")
    named = set(re.findall(r"^([A-Z]+)(?:\.1)?:", grammar, re.MULTILINE)) - {"WHITE"}
    assert named == TERMINALS
    rules = [line.split("//")[0] for line in grammar.splitlines() if re.match(r"[a-z_]+:", line)]
    assert [line for line in rules if '"' in line] == []


@pytest.mark.parametrize("expression", ["", "   "])
def test_empty_expression_is_refused(expression: str) -> None:
    assert only(expression).message == "the expression is empty"


def test_hostile_input_is_refused_without_a_crash() -> None:
    assert only("(" * 5000 + "a" + ")" * 5000).code.id == "KC012"
    assert only("-" * 5000 + "a").code.id == "KC012"
    assert only("a + " * 4000 + "a").code.id == "KC012"
    assert only("not " * 20_000).code.id == "KC012"
    assert only("a <= 1e99999999999").code.id == "KC014"


def test_syntax_errors_in_budgets_and_quantities() -> None:
    assert "of requests" in (only("1%", parse_budget).help or "")
    assert only("of requests", parse_budget).span == Span(0, 2)
    assert only("0.1 0.2", parse_quantity).span == Span(4, 7)


def test_grammar_package_serves_only_its_files() -> None:
    assert all(text(name) for name in FILES)
    with pytest.raises(FileNotFoundError):
        text("__init__.py")
