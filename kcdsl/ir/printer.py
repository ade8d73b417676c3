"""Printer of the IR and syntax trees in the syntax of the language.

The text of a formula compiles to the same formula; the text of an expression has single spaces and
the fewest brackets that keep its meaning.
"""

from __future__ import annotations

from fractions import Fraction

from kcdsl.ir import terms as ir
from kcdsl.source.numbers import decimal_text
from kcdsl.syntax import ast

_UNITS = {"s": "s", "B": "B", "tok": "tok", "tok/s": "tok/s", "nat": "nats"}
_NORMS = {"inf": "norm_inf", "2": "norm_2", "span": "span"}


def formula_text(formula: ir.Formula) -> str:
    """Return the source text of a formula."""
    return print_expression(statement(formula))


def term_text(term: ir.Term) -> str:
    """Return the source text of a term."""
    return print_expression(quantity(term))


def region_text(region: ir.Region) -> str:
    """Return the source text of a region."""
    return print_expression(place(region))


def predicate_text(predicate: ir.Predicate) -> str:
    """Return the source text of a predicate of slices; `true` for an empty conjunction."""
    return print_expression(selection(predicate))


def statement(formula: ir.Formula) -> ast.Expression:
    """Return the syntax tree of a formula."""
    match formula:
        case ir.Compare(op=op, left=left, right=right):
            return ast.ComparisonChain((op,), (quantity(left), quantity(right)))
        case ir.NoFlip(block=block, variable=variable, k=k):
            given = (ast.Name(block), ast.Name(variable))
            return _call("no_flip", *given, *(() if k == 1 else (_number(Fraction(k)),)))
        case ir.HasFields(fields=fields):
            return _call("has", ast.Name("trace"), ast.ListOf(tuple(map(ast.Text, fields))))
        case ir.Not(of=of):
            return ast.Negation(statement(of))
        case ir.Connective(op=op, parts=parts):
            return ast.Logic(op, tuple(statement(part) for part in parts))
        case ir.Quantified(quantifier=quantifier, variable=variable, region=region, body=body):
            return ast.Quantifier(quantifier, ast.Name(variable), place(region), statement(body))


def place(region: ir.Region) -> ast.Call:
    """Return the syntax tree of a region."""
    given: tuple[ast.Expression, ...] = (ast.Name(region.slice),)
    if region.longest is not None:
        given += (ast.Num(Fraction(region.longest)),)
    if region.kind is ir.RegionKind.BALL or region.radius:
        given += (_number(region.radius),)
    return _call(region.kind.value, *given)


def quantity(term: ir.Term) -> ast.Expression:
    """Return the syntax tree of a term."""
    match term:
        case ir.Number(value=value, dimension="ratio"):
            return _number(value * 100, "%")
        case ir.Number(value=value, dimension=dimension):
            return _number(value, _UNITS.get(dimension))
        case ir.Metric(name=name):
            return ast.Name(name)
        case ir.Statistic(kind="aggregate", of=of):
            return quantity(of)
        case ir.Statistic(kind="quantile", of=of, q=q) if q is not None:
            percent = q * 100
            if percent.denominator == 1 and 0 < percent < 100:
                return _call(f"p{percent}", quantity(of))
            return _call("quantile", _number(q), quantity(of))
        case ir.Statistic(kind=kind, of=of):
            return _call(kind, quantity(of))
        case ir.Norm(kind=kind, of=ir.Drift(block=block, variable=variable, measured=measured)):
            drift = "measured_drift" if measured else "drift"
            return _call(_NORMS[kind], _call(drift, ast.Name(block), ast.Name(variable)))
        case ir.Abs(of=of):
            return _call("abs", quantity(of))
        case ir.Arith(op=op, left=left, right=right):
            return ast.Binary(op, quantity(left), quantity(right))
        case ir.TableValue(name=name):
            return _call("table", ast.Name(name))


def selection(predicate: ir.Predicate) -> ast.Expression:
    """Return the syntax tree of a predicate; `true` or `false` where it has no parts."""
    match predicate:
        case ir.FieldTest(field=field, op=op, value=value):
            return ast.ComparisonChain((op,), (ast.Name(field), _constant(value)))
        case ir.AllOf(parts=parts) | ir.AnyOf(parts=parts):
            if len(parts) == 1:
                return selection(parts[0])
            every = isinstance(predicate, ir.AllOf)
            if not parts:
                return ast.Truth(every)
            return ast.Logic("and" if every else "or", tuple(selection(part) for part in parts))
        case ir.NoneOf(part=part):
            return ast.Negation(selection(part))


def _call(name: str, *arguments: ast.Expression) -> ast.Call:
    return ast.Call(ast.Name(name), arguments)


def _constant(value: str | Fraction | bool) -> ast.Expression:
    match value:
        case bool():
            return ast.Truth(value)
        case str():
            return ast.Text(value)
        case Fraction():
            return _number(value)


def _number(value: Fraction, unit: str | None = None) -> ast.Expression:
    """Return a number; a fraction without an exact decimal is written as a quotient."""
    if value < 0:
        return ast.Minus(_number(-value, unit))
    if _has_decimal(value):
        return ast.Num(value, unit)
    whole = ast.Num(Fraction(value.numerator), unit)
    return ast.Binary("/", whole, ast.Num(Fraction(value.denominator)))


def _has_decimal(value: Fraction) -> bool:
    rest = value.denominator
    for factor in (2, 5):
        while rest % factor == 0:
            rest //= factor
    return rest == 1


_STATEMENT, _OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _UNARY, _ATOM = range(9)


def print_expression(expression: ast.Expression) -> str:
    """Return the text with single spaces and the fewest brackets that keep the meaning."""
    return _print(expression, _STATEMENT)


def _print(expression: ast.Expression, needed: int) -> str:
    text, level = _form(expression)
    return text if level >= needed else f"({text})"


def _form(expression: ast.Expression) -> tuple[str, int]:
    """Return the text of an expression and the precedence of its outermost form."""
    match expression:
        case ast.Num():
            return _number_text(expression), _ATOM
        case ast.Name(id=name):
            return name, _ATOM
        case ast.Text(value=value):
            escaped = value.replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"', _ATOM
        case ast.Truth(value=value):
            return ("true" if value else "false"), _ATOM
        case ast.ListOf(items=items):
            return f"[{_joined(items)}]", _ATOM
        case ast.Call(function=function, arguments=arguments):
            return f"{function.id}({_joined(arguments)})", _ATOM
        case ast.Minus(of=of):
            return f"-{_print(of, _UNARY)}", _UNARY
        case ast.Binary(op=op, left=left, right=right):
            level = _SUM if op in "+-" else _PRODUCT
            return f"{_print(left, level)} {op} {_print(right, level + 1)}", level
        case ast.ComparisonChain(ops=ops, operands=operands):
            text = _print(operands[0], _SUM)
            for op, operand in zip(ops, operands[1:], strict=True):
                text += f" {op} {_print(operand, _SUM)}"
            return text, _COMPARE
        case ast.Membership(of=of, among=among):
            return f"{_print(of, _SUM)} in {_print(among, _ATOM)}", _COMPARE
        case ast.Negation(of=of):
            return f"not {_print(of, _NOT)}", _NOT
        case ast.Logic(op="implies", parts=(left, right)):
            return f"{_print(left, _OR)} implies {_print(right, _STATEMENT)}", _STATEMENT
        case ast.Logic(op=op, parts=parts):
            level = _OR if op == "or" else _AND
            return f" {op} ".join(_print(part, level + 1) for part in parts), level
        case ast.Quantifier(kind=kind, variable=variable, region=region, body=body):
            head = f"{kind} {variable.id} in {_print(region, _ATOM)}"
            return f"{head}: {_print(body, _STATEMENT)}", _STATEMENT


def _joined(items: tuple[ast.Expression, ...]) -> str:
    return ", ".join(_print(item, _STATEMENT) for item in items)


def _number_text(number: ast.Num) -> str:
    value = decimal_text(number.value)
    if number.unit is None:
        return value
    return f"{value}%" if number.unit == "%" else f"{value} {number.unit}"
