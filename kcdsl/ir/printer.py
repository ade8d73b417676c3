"""From the IR back to the language: expressions that compile to the same formula again."""

from __future__ import annotations

from fractions import Fraction

from kcdsl.ir import terms as ir
from kcdsl.syntax import ast
from kcdsl.syntax.printer import print_expression

_UNITS = {"s": "s", "B": "B", "tok": "tok", "tok/s": "tok/s", "nat": "nats"}
_NORMS = {"inf": "norm_inf", "2": "norm_2", "span": "span"}


def formula_text(formula: ir.Formula) -> str:
    """Return a formula as the language writes it."""
    return print_expression(statement(formula))


def term_text(term: ir.Term) -> str:
    """Return a term as the language writes it."""
    return print_expression(quantity(term))


def region_text(region: ir.Region) -> str:
    """Return a region as the language writes it."""
    return print_expression(place(region))


def predicate_text(predicate: ir.Predicate) -> str:
    """Return a predicate of slices as the language writes it; `true` where it tests nothing."""
    return print_expression(selection(predicate))


def statement(formula: ir.Formula) -> ast.Expression:
    """Return the syntax of a formula."""
    match formula:
        case ir.Compare(op=op, left=left, right=right):
            return ast.Comparison((op,), (quantity(left), quantity(right)))
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
    """Return the syntax of a region."""
    given: tuple[ast.Expression, ...] = (ast.Name(region.slice),)
    if region.longest is not None:
        given += (ast.Num(Fraction(region.longest)),)
    if region.kind is ir.RegionKind.BALL or region.radius:
        given += (_number(region.radius),)
    return _call(region.kind.value, *given)


def quantity(term: ir.Term) -> ast.Expression:
    """Return the syntax of a term."""
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
    """Return the syntax of a predicate; `true` and `false` where it has no part to test."""
    match predicate:
        case ir.FieldTest(field=field, op=op, value=value):
            return ast.Comparison((op,), (ast.Name(field), _constant(value)))
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
