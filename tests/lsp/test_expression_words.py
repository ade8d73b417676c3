"""Tokens of expressions and admissible next tokens, compared with the parser and with Lark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lark.exceptions import UnexpectedInput

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.lsp.text.lexemes import OpenBracket, Role, Start, lexemes, next_terminals, open_frames
from kcdsl.lsp.text.nodes import NameKind, expressions, fields, language, occurrences
from kcdsl.metrics import BUILT_IN
from kcdsl.source.files import read_source
from kcdsl.source.yaml_nodes import Scalar, parse_yaml
from kcdsl.syntax import ast
from kcdsl.syntax.errors import build_lark
from kcdsl.syntax.parser import parse_expression

CORPUS = Path(__file__).parents[2] / "grammar" / "corpus"
METRIC = lambda name: BUILT_IN.find(name) is not None  # noqa: E731


def texts() -> list[tuple[Start, str]]:
    """Return every expression of the corpus with its language."""
    found: set[tuple[Start, str]] = set()
    for file in sorted(CORPUS.rglob("*.kc.yaml")):
        root = parse_yaml(read_source(file), Sink())
        for field in fields(root):
            start = language(field.path, field.value)
            if start is not None and isinstance(field.value, Scalar):
                found.add((start, field.value.text))
    return sorted(found)


LARK = build_lark()
EXPRESSIONS = texts()


def test_corpus_contains_expressions() -> None:
    assert len(EXPRESSIONS) > 80


@pytest.mark.sample(21)
@pytest.mark.parametrize(("start", "text"), EXPRESSIONS)
def test_next_terminals_equal_those_of_lark(start: Start, text: str) -> None:
    for cut in range(len(text) + 1):
        prefix = text[:cut]
        try:
            parser: Any = LARK.parse_interactive(prefix, start=start)
            parser.exhaust_lexer()
        except UnexpectedInput:
            continue
        words = lexemes(prefix, start, METRIC)
        assert next_terminals(words, start) == parser.accepts(), prefix


ROLES = {
    "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.1": (
        "keyword variable keyword function bracket slice bracket bracket function bracket function "
        "bracket block bracket variable bracket bracket operator number"
    ),
    "p95(latency) <= 250 ms and kl > 1%": (
        "function bracket metric bracket operator number unit keyword metric operator number unit"
    ),
    "throughput >= 4 tok/s": "metric operator number unit",
    "mean(kl) <= table(kl)": (
        "function bracket metric bracket operator function bracket table bracket"
    ),
    'has(trace, [rng_seed, "kl"])': (
        "function bracket keyword bracket bracket field bracket text bracket bracket"
    ),
    "forall kl in ball(kl, 1e-3): no_flip(model, kl, 5)": (
        "keyword variable keyword function bracket slice bracket number bracket bracket function "
        "bracket block bracket variable bracket number bracket"
    ),
    "p99(nothing) <=": "function bracket word bracket operator",
}


@pytest.mark.parametrize("text", ROLES)
def test_roles_of_words_in_expressions(text: str) -> None:
    found = lexemes(text, "requirement", METRIC)
    assert " ".join(word.role for word in found) == ROLES[text]
    assert all(text[word.start : word.end] == word.text for word in found)


def test_roles_of_predicates_and_budgets() -> None:
    words = lexemes('length > 5 and kl in ["a", true]', "predicate", METRIC)
    assert [w.text for w in words if w.role is Role.FIELD] == ["length", "kl"]
    words = lexemes("1% of requests", "budget")
    assert [w.role for w in words] == [Role.NUMBER, Role.UNIT, Role.KEYWORD, Role.KEYWORD]


def test_variables_are_bound_to_their_quantifier() -> None:
    text = (
        "(forall x in points(a): no_flip(model, x)) and (forall x in points(b): no_flip(model, x))"
    )
    first, second = text.index("x in"), text.rindex("x in")
    bound = [(w.start, w.binder) for w in lexemes(text) if w.role is Role.VARIABLE]
    assert [binder for _, binder in bound] == [first, first, second, second]
    outside = lexemes("(forall x in points(a): no_flip(model, x)) and no_flip(model, x)")
    assert outside[-2].binder is None


def test_open_brackets_are_counted() -> None:
    assert open_frames(lexemes("ball(all, 1e-3")) == [OpenBracket("ball", 1)]
    assert open_frames(lexemes("has(trace, [a, b, c")) == [
        OpenBracket("has", 1),
        OpenBracket("[", 2),
    ]
    assert open_frames(lexemes("(p99(kl) <= 1 and mean(abs(")) == [
        OpenBracket(""),
        OpenBracket("mean"),
        OpenBracket("abs"),
    ]
    assert open_frames(lexemes("mean(kl))")) == []


# --- roles against the syntax tree ---------------------------------------------------------------


def names(expression: ast.Expression, bound: dict[str, Span]) -> Iterator[tuple[str, Span, str]]:
    """Yield the slices, variables and functions of the parse tree: kind, place, name."""
    match expression:
        case ast.Quantifier(variable=variable, region=region, body=body):
            yield "variable", variable.span, variable.id
            yield from names(region, bound)
            yield from names(body, {**bound, variable.id: variable.span})
        case ast.Call(function=function, arguments=arguments):
            yield "function", function.span, function.id
            for number, argument in enumerate(arguments):
                if number == 0 and function.id in {"points", "ball", "hull", "rows"}:
                    assert isinstance(argument, ast.Name)
                    yield "slice", argument.span, argument.id
                elif isinstance(argument, ast.Name) and argument.id in bound:
                    yield "variable", argument.span, argument.id
                else:
                    yield from names(argument, bound)
        case ast.Logic(parts=parts):
            for part in parts:
                yield from names(part, bound)
        case ast.Negation(of=of) | ast.Minus(of=of):
            yield from names(of, bound)
        case ast.ComparisonChain(operands=operands):
            for operand in operands:
                yield from names(operand, bound)
        case ast.Binary(left=left, right=right):
            yield from names(left, bound)
            yield from names(right, bound)
        case _:
            return


@pytest.mark.parametrize(
    "file", sorted((CORPUS / "accepted").glob("*.kc.yaml")), ids=lambda f: f.name
)
def test_word_roles_equal_those_of_the_parser(file: Path) -> None:
    source = read_source(file)
    analysis = analyse(source, Sink(), file.parent)
    checked = 0
    for expression in expressions(analysis):
        if expression.start != "requirement":
            continue
        parsed = parse_expression(source, expression.scalar, Sink())
        assert parsed is not None
        found = {(w.lexeme.role.value, w.span, w.lexeme.text) for w in expression.words}
        for item in names(parsed, {}):
            assert item in found
            checked += 1
    assert checked or file.name == "predicates.kc.yaml" or "record" in file.name


def test_occurrences_of_a_document() -> None:
    text = (
        "slices: {all: {}, 'long': {where: length > 1}}\n"
        "tables: {tau: {unit: nats, rows: [{where: length > 5, value: 1}], otherwise: 2}}\n"
        "clauses:\n"
        '  N: {slices: [all, "long"], require: p99(kl) <= table(tau), level: L2}\n'
        "  - no\n"
    ).replace("  - no\n", "")
    analysis = analyse(SourceFile("c", text), Sink())
    found = [
        (o.kind, o.name, o.declares, text[o.span.start : o.span.end]) for o in occurrences(analysis)
    ]
    assert found == [
        (NameKind.SLICE, "all", True, "all"),
        (NameKind.SLICE, "long", True, "long"),
        (NameKind.TABLE, "tau", True, "tau"),
        (NameKind.CLAUSE, "N", True, "N"),
        (NameKind.SLICE, "all", False, "all"),
        (NameKind.SLICE, "long", False, "long"),
        (NameKind.METRIC, "kl", False, "kl"),
        (NameKind.TABLE, "tau", False, "tau"),
    ]
