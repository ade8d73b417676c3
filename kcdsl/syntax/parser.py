"""From text to syntax tree, with every place mapped to the file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from kcdsl.diagnostics.codes import BAD_NUMBER, EXPRESSION_SYNTAX, TOO_DEEP, Code
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.source.numbers import exact
from kcdsl.source.scalar_map import ScalarMap, map_scalar
from kcdsl.source.text import SourceFile, Span
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax import ast
from kcdsl.syntax.mistakes import advice_for_character, advice_for_token, expected_words
from kcdsl_grammar import text as grammar_text

LENGTH_LIMIT = 20_000
DEPTH_LIMIT = 80
_STARTS = ("requirement", "predicate", "budget", "quantity")


@cache
def _lark() -> Lark:
    return Lark(
        grammar_text("expression.lark"),
        parser="lalr",
        start=list(_STARTS),
        propagate_positions=True,
        maybe_placeholders=False,
        keep_all_tokens=True,
    )


def parse_expression(source: SourceFile, scalar: Scalar, sink: Sink) -> ast.Expression | None:
    """Parse a requirement or slice predicate; None after an error in the sink."""
    tree = _parse(source, scalar, "requirement", sink)
    return None if tree is None else tree.expression(tree.root.children[0])


def parse_budget(source: SourceFile, scalar: Scalar, sink: Sink) -> ast.BudgetText | None:
    """Parse `1% of requests`; None after an error in the sink."""
    tree = _parse(source, scalar, "budget", sink)
    return None if tree is None else tree.budget()


def parse_quantity(source: SourceFile, scalar: Scalar, sink: Sink) -> ast.Num | None:
    """Parse a number with an optional unit, such as `250 ms`; None after an error in the sink."""
    tree = _parse(source, scalar, "quantity", sink)
    return None if tree is None else tree.quantity()


def _parse(source: SourceFile, scalar: Scalar, start: str, sink: Sink) -> _Builder | None:
    places = map_scalar(source, scalar)
    text = scalar.text

    def report(code: Code, message: str, begin: int, end: int, help: str | None = None) -> None:
        sink.add(Diagnostic(code, message, source, places.span(begin, end), help=help))

    if scalar.broken:
        return None
    if not text.strip():
        sink.add(Diagnostic(EXPRESSION_SYNTAX, "the expression is empty", source, scalar.span))
        return None
    if len(text) > LENGTH_LIMIT:
        report(TOO_DEEP, f"the expression is longer than {LENGTH_LIMIT} characters", 0, len(text))
        return None
    try:
        root = _lark().parse(text, start=start)
    except UnexpectedInput as error:
        _explain(error, text, start, report)
        return None
    if _depth_exceeds(root, DEPTH_LIMIT):
        report(TOO_DEEP, f"the expression has more than {DEPTH_LIMIT} levels", 0, len(text))
        return None
    builder = _Builder(root, places)
    for begin, end in builder.unusable_numbers():
        report(BAD_NUMBER, "the number is too long, too large or too small", begin, end)
    return None if builder.unusable_numbers() else builder


def _explain(error: UnexpectedInput, text: str, start: str, report: Callable[..., None]) -> None:
    expected: set[str] = set()
    if isinstance(error, UnexpectedToken):
        expected = set(error.accepts or error.expected)
        token = error.token
        if token.type == "$END":
            end = len(text.rstrip())
            report(
                EXPRESSION_SYNTAX,
                f"the expression ends too early; expected {expected_words(expected)}",
                end,
                end + 1 if end < len(text) else end,
                advice_for_token("", "$END", text, end, expected),
            )
            return
        begin = token.start_pos if token.start_pos is not None else 0
        report(
            EXPRESSION_SYNTAX,
            f"`{token}` cannot stand here; expected {expected_words(expected)}",
            begin,
            begin + len(token),
            advice_for_token(str(token), token.type, text, begin, expected),
        )
        return
    begin = error.pos_in_stream or 0
    if isinstance(error, UnexpectedCharacters):
        expected = set(error.allowed or ())
    length, help = advice_for_character(text, begin)
    shown = text[begin : begin + length]
    message = f"`{shown}` is not part of the language"
    if shown[:1] in {'"', "'"}:
        message = "the text is not closed"
        length = len(text) - begin
    elif expected and help is None:
        message += f"; expected {expected_words(expected)}"
    report(EXPRESSION_SYNTAX, message, begin, begin + length, help)


def _depth_exceeds(root: Tree[Token], limit: int) -> bool:
    level: list[Any] = [root]
    for _ in range(limit):
        level = [child for tree in level for child in tree.children if isinstance(child, Tree)]
        if not level:
            return False
    return True


class _Builder:
    """Turns the tree of the parser into ours. Depth is bounded before, so recursion is safe."""

    def __init__(self, root: Tree[Token], places: ScalarMap) -> None:
        self.root = root
        self._places = places

    def unusable_numbers(self) -> list[tuple[int, int]]:
        tokens = self.root.scan_values(lambda v: isinstance(v, Token) and v.type == "NUMBER")
        return [(t.start_pos or 0, t.end_pos or 0) for t in tokens if exact(str(t)) is None]

    def _span(self, item: Tree[Token] | Token) -> Span:
        if isinstance(item, Token):
            start, end = item.start_pos or 0, item.end_pos or 0
        else:
            start, end = item.meta.start_pos, item.meta.end_pos
        return self._places.span(start, end)

    def _number(self, parts: list[Token], span: Span) -> ast.Num:
        value = exact(str(parts[0]))
        assert value is not None
        if len(parts) == 1:
            return ast.Num(value, None, span, span)
        return ast.Num(value, str(parts[1]), span, self._span(parts[1]))

    def budget(self) -> ast.BudgetText:
        tokens = [child for child in self.root.children if isinstance(child, Token)]
        *quantity, _, unit = tokens
        rate_span = self._span(quantity[0]).hull(self._span(quantity[-1]))
        rate = self._number(quantity, rate_span)
        return ast.BudgetText(rate, ast.Name(str(unit), self._span(unit)), self._span(self.root))

    def quantity(self) -> ast.Num:
        tokens = [child for child in self.root.children if isinstance(child, Token)]
        span = self._span(self.root)
        if tokens[0].type != "MINUS":
            return self._number(tokens, span)
        plain = self._number(tokens[1:], span)
        return ast.Num(-plain.value, plain.unit, span, plain.unit_span)

    def expression(self, tree: Tree[Token] | Token) -> ast.Expression:
        assert isinstance(tree, Tree)
        span = self._span(tree)
        parts = tree.children
        trees = [part for part in parts if isinstance(part, Tree)]
        tokens = [part for part in parts if isinstance(part, Token)]
        match tree.data:
            case "number":
                return self._number(tokens, span)
            case "name":
                return ast.Name(str(tokens[0]), span)
            case "text":
                return ast.Text(_unquote(str(tokens[0])), span)
            case "truth":
                return ast.Truth(str(tokens[0]) == "true", span)
            case "list":
                return ast.ListOf(tuple(self.expression(t) for t in trees), span)
            case "group":
                return self.expression(trees[0])
            case "call":
                name = ast.Name(str(tokens[0]), self._span(tokens[0]))
                return ast.Call(name, tuple(self.expression(t) for t in trees), span)
            case "minus":
                return ast.Minus(self.expression(trees[0]), span)
            case "sum_" | "product":
                left, right = (self.expression(t) for t in trees)
                return ast.Binary(str(tokens[0]), left, right, span)
            case "comparison":
                return ast.Comparison(
                    tuple(str(t) for t in tokens),
                    tuple(self.expression(t) for t in trees),
                    span,
                    tuple(self._span(t) for t in tokens),
                )
            case "membership":
                among = self.expression(trees[1])
                assert isinstance(among, ast.ListOf)
                return ast.Membership(self.expression(trees[0]), among, span)
            case "negation":
                return ast.Negation(self.expression(trees[0]), span)
            case "conjunction" | "disjunction" | "implication_":
                op = {"conjunction": "and", "disjunction": "or"}.get(tree.data, "implies")
                return ast.Logic(op, tuple(self.expression(t) for t in trees), span)
            case _:
                return self._quantifier(tokens, trees, span)

    def _quantifier(
        self, tokens: list[Token], trees: list[Tree[Token]], span: Span
    ) -> ast.Quantifier:
        region = self.expression(trees[0])
        assert isinstance(region, ast.Call)
        variable = ast.Name(str(tokens[1]), self._span(tokens[1]))
        return ast.Quantifier(str(tokens[0]), variable, region, self.expression(trees[1]), span)


def _unquote(token: str) -> str:
    body, quote = token[1:-1], token[0]
    return body.replace(f"\\{quote}", quote).replace("\\\\", "\\") if "\\" in body else body
