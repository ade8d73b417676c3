"""Slices as predicates over the fields of one request."""

from __future__ import annotations

from collections.abc import Iterator

from kcdsl.ir.predicates import Value, tests_of
from kcdsl.ir.printer import predicate_text
from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, NoneOf, Predicate, Slice
from kcdsl.logic.smtlib import text
from kcdsl.logic.smtlib.text import Symbols

_SORTS = {"truth": "Bool", "text": "String", "number": "Real"}


def slice_lines(slice_: Slice, symbols: Symbols) -> Iterator[str]:
    """Yield the definition of a slice, and the assertion that it is not empty.

    A test of a field of another kind is false. A slice without a test contains every request.
    """
    tests = list(tests_of(slice_.where))
    if not tests:
        return
    fields: dict[str, list[str]] = {}
    for test in tests:
        kinds = fields.setdefault(test.field, [])
        if kind_of(test.value) not in kinds:
            kinds.append(kind_of(test.value))
    parameters = {
        name: sort for field, kinds in fields.items() for name, sort in _parameters(field, kinds)
    }
    chosen = {name: symbols.symbol(("parameter", name), name) for name in parameters}
    head = " ".join(f"({chosen[name]} {sort})" for name, sort in parameters.items())
    body = _predicate(slice_.where, fields, chosen)
    function = symbols.symbol(("slice", slice_.name), f"in slice {slice_.name}")
    one_kind = [
        text.negation(text.conjunction([chosen[_is(field, a)], chosen[_is(field, b)]]))
        for field, kinds in fields.items()
        for i, a in enumerate(kinds)
        for b in kinds[i + 1 :]
    ]
    yield text.comment(f"slice {slice_.name}: {predicate_text(slice_.where)}")
    yield f"(define-fun {function} ({head}) Bool {text.conjunction([*one_kind, body])})"
    given = {
        name: symbols.symbol(
            ("request", slice_.name, name), f"{name} of a request of {slice_.name}"
        )
        for name in parameters
    }
    for name, sort in parameters.items():
        yield text.declare(given[name], sort)
    claim = symbols.symbol(("nonempty", slice_.name), f"slice {slice_.name} has a request")
    yield text.named(f"({function} {' '.join(given.values())})", claim)


def kind_of(value: Value) -> str:
    """Return the kind of a field's value: "truth", "text" or "number"."""
    if isinstance(value, bool):
        return "truth"
    return "text" if isinstance(value, str) else "number"


def _parameters(field: str, kinds: list[str]) -> Iterator[tuple[str, str]]:
    for kind in kinds:
        yield _name(field, kind, kinds), _SORTS[kind]
        if len(kinds) > 1:
            yield _is(field, kind), "Bool"


def _name(field: str, kind: str, kinds: list[str]) -> str:
    return f"field {field}" if len(kinds) == 1 else f"field {field} as a {kind}"


def _is(field: str, kind: str) -> str:
    return f"field {field} is a {kind}"


def _predicate(predicate: Predicate, fields: dict[str, list[str]], chosen: dict[str, str]) -> str:
    match predicate:
        case AllOf(parts):
            return text.conjunction(_predicate(part, fields, chosen) for part in parts)
        case AnyOf(parts):
            return text.disjunction(_predicate(part, fields, chosen) for part in parts)
        case NoneOf(part):
            return text.negation(_predicate(part, fields, chosen))
        case FieldTest(field, op, value):
            kind = kind_of(value)
            test = _test(op, chosen[_name(field, kind, fields[field])], value)
            if len(fields[field]) == 1:
                return test
            return text.conjunction([chosen[_is(field, kind)], test])


def _test(op: str, symbol: str, value: Value) -> str:
    match value:
        case bool():
            constant = text.TRUE if value else text.FALSE
        case str():
            constant = text.text(value)
        case _:
            constant = text.real(value)
    equal = f"(= {symbol} {constant})"
    return {"==": equal, "!=": text.negation(equal)}.get(op, f"({op} {symbol} {constant})")
