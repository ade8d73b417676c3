"""Parse expressions by the table of their grammar: from text to syntax tree, with spans.

Errors of a text that the table rejects are explained with Lark, by the same grammar
(`kcdsl.syntax.errors`).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from kcdsl.diagnostics.codes import BAD_NUMBER, EXPRESSION_SYNTAX, INTERNAL, TOO_DEEP, Code
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.source.numbers import exact
from kcdsl.source.scalar_map import ScalarMap, map_scalar
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax import ast
from kcdsl_grammar.expression_table import ENDS, KEYWORDS, RULES, STARTS, STATES

if TYPE_CHECKING:
    from kcdsl.syntax.errors import Advice

_WHITE = re.compile(r"[ \t\r\n]*")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNIT = re.compile(r"%|[A-Za-z]+(?:/[A-Za-z]+)?")
_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_STRING = re.compile(r'"(?:[^"\\\n]|\\["\\])*"' + r"|'(?:[^'\\\n]|\\['\\])*'")
_COMPARE = re.compile(r"<=|>=|==|!=|<|>")
SIGNS = {
    "+": "PLUS",
    "-": "MINUS",
    "*": "STAR",
    "/": "SLASH",
    "(": "LPAR",
    ")": "RPAR",
    "[": "LSQB",
    "]": "RSQB",
    ",": "COMMA",
    ":": "COLON",
}
_INLINED = tuple(name.startswith("_") for name, _ in RULES)


class Token(NamedTuple):
    """A terminal with its text and its range `[start, end)` of the expression."""

    type: str
    text: str
    start: int
    end: int


class ParseNode(NamedTuple):
    """A rule with its children; the range covers its first to its last token."""

    rule: str
    children: list[ParseNode | Token]
    start: int
    end: int


def parse(text: str, start: str) -> ParseNode | None:
    """Return the tree of a text by one of the start rules; None if it is not well formed."""
    state = STARTS[start]
    end_state = ENDS[start]
    states = [state]
    values: list[list[ParseNode | Token]] = []
    token = _next_token(text, 0, state)
    while token is not None:
        kind = token.type
        step = STATES[state].get(kind)
        if step is None:
            return None
        if step >= 0:
            if step == end_state:
                return None
            states.append(step)
            values.append([token])
            state = step
            token = _next_token(text, token.end, state)
            continue
        name, length = RULES[-1 - step]
        children = values[-length][:] if length == 1 else [c for v in values[-length:] for c in v]
        del states[-length:]
        del values[-length:]
        state = STATES[states[-1]][name]
        if _INLINED[-1 - step]:
            values.append(children)
        else:
            values.append([ParseNode(name, children, children[0].start, children[-1].end)])
        states.append(state)
        if state == end_state and kind == "$END":
            root = values[0][0]
            return root if isinstance(root, ParseNode) else None
    return None


def _next_token(text: str, at: int, state: int) -> Token | None:
    """Return the token at a place that the state allows; None if there is none."""
    start = _WHITE.match(text, at).end()  # type: ignore[union-attr]
    if start == len(text):
        return Token("$END", "", start, start)
    char = text[start]
    allowed = STATES[state]
    sign = SIGNS.get(char)
    if sign is not None:
        return Token(sign, char, start, start + 1)
    if char in "0123456789.":
        found, kind = _NUMBER.match(text, start), "NUMBER"
    elif char in "<>=!":
        found, kind = _COMPARE.match(text, start), "COMPARE"
    elif char in "\"'":
        found, kind = _STRING.match(text, start), "STRING"
    else:
        found, kind = _WORD.match(text, start), "NAME"
        if found is not None and KEYWORDS.get(found[0]) in allowed:
            kind = KEYWORDS[found[0]]
        elif "UNIT" in allowed:
            found, kind = _UNIT.match(text, start), "UNIT"
    return None if found is None else Token(kind, found[0], start, found.end())


LENGTH_LIMIT = 20_000
DEPTH_LIMIT = 80


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
    if scalar.broken:
        return None
    places = map_scalar(source, scalar)
    text = scalar.text

    def report(
        code: Code, message: str, begin: int, end: int, advice: Advice | None = None
    ) -> None:
        help = None if advice is None else advice.text
        fix = None if advice is None else advice.fix(scalar, places, begin, end)
        sink.add(Diagnostic(code, message, source, places.span(begin, end), help=help, fix=fix))

    if not text.strip():
        sink.add(
            Diagnostic(
                EXPRESSION_SYNTAX,
                "the expression is empty",
                source,
                scalar.span,
                help="such as p99(kl) <= 0.02",
            )
        )
        return None
    if places.pieces is None:
        # Places would be wrong, and so would fixes be, which replace what is there.
        message = "kcdsl does not find the characters of this text in the file"
        help = "write it on one line in double quotation marks, and report it with the document"
        sink.add(Diagnostic(INTERNAL, message, source, scalar.span, help=help))
        return None
    if len(text) > LENGTH_LIMIT:
        report(TOO_DEEP, f"the expression is longer than {LENGTH_LIMIT} characters", 0, len(text))
        return None
    root = parse(text, start)
    if root is None:
        from kcdsl.syntax.errors import explain

        explain(text, start, report)
        return None
    if _depth_exceeds(root, DEPTH_LIMIT):
        report(TOO_DEEP, f"the expression has more than {DEPTH_LIMIT} levels", 0, len(text))
        return None
    builder = _Builder(root, places)
    unusable = builder.unusable_numbers()
    for begin, end in unusable:
        report(BAD_NUMBER, "the number is too long, too large or too small", begin, end)
    return None if unusable else builder


def _depth_exceeds(root: ParseNode, limit: int) -> bool:
    level = [root]
    for _ in range(limit):
        level = [child for node in level for child in node.children if isinstance(child, ParseNode)]
        if not level:
            return False
    return True


class _Builder:
    """Converts the tree of the parser into the syntax tree. Depth is already bounded, so recursion
    is safe."""

    def __init__(self, root: ParseNode, places: ScalarMap) -> None:
        self.root = root
        self._places = places

    def unusable_numbers(self) -> list[tuple[int, int]]:
        found, waiting = [], [self.root]
        while waiting:
            for child in waiting.pop().children:
                if isinstance(child, ParseNode):
                    waiting.append(child)
                elif child.type == "NUMBER" and exact(child.text) is None:
                    found.append((child.start, child.end))
        return sorted(found)

    def _span(self, item: ParseNode | Token) -> Span:
        return self._places.span(item.start, item.end)

    def _number(self, parts: list[Token], span: Span) -> ast.Num:
        value = exact(parts[0].text)
        assert value is not None
        if len(parts) == 1:
            return ast.Num(value, None, span, span)
        return ast.Num(value, parts[1].text, span, self._span(parts[1]))

    def budget(self) -> ast.BudgetText:
        tokens = [child for child in self.root.children if isinstance(child, Token)]
        *quantity, _, unit = tokens
        rate_span = self._span(quantity[0]).hull(self._span(quantity[-1]))
        rate = self._number(quantity, rate_span)
        return ast.BudgetText(rate, ast.Name(unit.text, self._span(unit)), self._span(self.root))

    def quantity(self) -> ast.Num:
        tokens = [child for child in self.root.children if isinstance(child, Token)]
        span = self._span(self.root)
        if tokens[0].type != "MINUS":
            return self._number(tokens, span)
        plain = self._number(tokens[1:], span)
        return ast.Num(-plain.value, plain.unit, span, plain.unit_span)

    def expression(self, tree: ParseNode | Token) -> ast.Expression:
        assert isinstance(tree, ParseNode)
        span = self._span(tree)
        parts = tree.children
        trees = [part for part in parts if isinstance(part, ParseNode)]
        tokens = [part for part in parts if isinstance(part, Token)]
        match tree.rule:
            case "number":
                return self._number(tokens, span)
            case "name":
                return ast.Name(tokens[0].text, span)
            case "text":
                return ast.Text(_unquote(tokens[0].text), span)
            case "truth":
                return ast.Truth(tokens[0].text == "true", span)
            case "list":
                return ast.ListOf(tuple(self.expression(t) for t in trees), span)
            case "group":
                return self.expression(trees[0])
            case "call":
                name = ast.Name(tokens[0].text, self._span(tokens[0]))
                return ast.Call(name, tuple(self.expression(t) for t in trees), span)
            case "minus":
                return ast.Minus(self.expression(trees[0]), span)
            case "sum_" | "product":
                left, right = (self.expression(t) for t in trees)
                return ast.Binary(tokens[0].text, left, right, span)
            case "comparison":
                return ast.ComparisonChain(
                    tuple(t.text for t in tokens),
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
                op = {"conjunction": "and", "disjunction": "or"}.get(tree.rule, "implies")
                return ast.Logic(op, tuple(self.expression(t) for t in trees), span)
            case _:
                return self._quantifier(tokens, trees, span)

    def _quantifier(
        self, tokens: list[Token], trees: list[ParseNode], span: Span
    ) -> ast.Quantifier:
        region = self.expression(trees[0])
        assert isinstance(region, ast.Call)
        variable = ast.Name(tokens[1].text, self._span(tokens[1]))
        return ast.Quantifier(tokens[0].text, variable, region, self.expression(trees[1]), span)


def _unquote(token: str) -> str:
    body, quote = token[1:-1], token[0]
    return body.replace(f"\\{quote}", quote).replace("\\\\", "\\") if "\\" in body else body
