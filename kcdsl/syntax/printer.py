"""The canonical text of an expression: parsing it again gives the same tree."""

from __future__ import annotations

from kcdsl.source.numbers import spell
from kcdsl.syntax import ast

_STATEMENT, _OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _UNARY, _ATOM = range(9)


def print_expression(expression: ast.Expression) -> str:
    """Return the text with single spaces and the fewest brackets that keep the meaning."""
    return _print(expression, _STATEMENT)


def _print(expression: ast.Expression, needed: int) -> str:
    text, level = _form(expression)
    return text if level >= needed else f"({text})"


def _form(expression: ast.Expression) -> tuple[str, int]:
    """Return the text of an expression and how tightly its outermost form binds."""
    match expression:
        case ast.Num():
            return _number(expression), _ATOM
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
        case ast.Comparison(ops=ops, operands=operands):
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


def _number(number: ast.Num) -> str:
    value = spell(number.value)
    if number.unit is None:
        return value
    return f"{value}%" if number.unit == "%" else f"{value} {number.unit}"
