"""Fields of requests in the predicates of slices and tables, and the fields of traces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from kcdsl.check.expressions.names import Scope, single_comparison
from kcdsl.check.expressions.sorts import described
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Edit, Fix, Label
from kcdsl.diagnostics.report import Reporter, did_you_mean, nearest
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import MIRRORED, terms_of
from kcdsl.ir.obligations import named_slices
from kcdsl.ir.predicates import tests_of
from kcdsl.ir.terms import (
    AllOf,
    Clause,
    Connective,
    Family,
    Formula,
    HasFields,
    Metric,
    Norm,
    Slice,
)
from kcdsl.metrics import Registry
from kcdsl.syntax import ast

LENGTH = "length"
"""The number of tokens, a field that every request has."""

_WORDS = {"Text": "a text", "Real": "a number", "Bool": "a truth value"}


def value_sort(value: str | Fraction | bool) -> str:
    """Return the sort of a value: Text, Bool or Real."""
    if isinstance(value, bool):
        return "Bool"
    return "Text" if isinstance(value, str) else "Real"


def field_sorts(slices: Sequence[ir.Slice | None], data: str | None) -> Mapping[str, str]:
    """Return the sorts of the fields of one data file, by the first test of each in slices."""
    found = {LENGTH: "Int"}
    for item in slices:
        if item is not None and (item.data or data) == data:
            for test in tests_of(item.where):
                found.setdefault(test.field, value_sort(test.value))
    return found


def check_fields(
    slices: Sequence[ir.Slice | None],
    imported: Sequence[ir.Slice],
    tables: Sequence[ir.ThresholdTable | None],
    data: str | None,
    reporter: Reporter,
) -> None:
    """Report a field that is used with two sorts; `data` is the default data of slices.

    Imported slices are compared but not reported, since their own file is checked.
    """
    by_data: dict[str | None, dict[str, tuple[str, Span | None]]] = {}
    for item in imported:
        known = by_data.setdefault(item.data or data, {})
        for test in tests_of(item.where):
            known.setdefault(test.field, (value_sort(test.value), None))
    for own in slices:
        if own is not None:
            _compare(own.where, by_data.setdefault(own.data or data, {}), reporter)
    for table in tables:
        known = {}
        for row in table.rows if table is not None else ():
            _compare(row.where, known, reporter)


def _compare(
    where: ir.Predicate, known: dict[str, tuple[str, Span | None]], reporter: Reporter
) -> None:
    for test in tests_of(where):
        sort = value_sort(test.value)
        if test.field == LENGTH and sort != "Real":
            reporter.error(
                codes.FIELD_OF_TWO_SORTS,
                f"`{LENGTH}` is the number of tokens, and here {_WORDS[sort]}",
                test.span,
                "compare it with a number",
            )
            continue
        first, place = known.setdefault(test.field, (sort, test.span))
        if first == sort:
            continue
        labels = (Label(place, f"{_WORDS[first]} here"),) if place is not None else ()
        reporter.error(
            codes.FIELD_OF_TWO_SORTS,
            f"`{test.field}` is {_WORDS[sort]} here and {_WORDS[first]} elsewhere",
            test.span,
            "a field holds one of them; numbers stand without quotation marks, texts with them",
            labels,
        )


_NEAR = 0.8
"""The least similarity of a misspelt name; 1 is equal."""


def _words(expression: ast.Expression) -> str:
    return described(expression, Scope({}, {}), {"length": "Int"})


def predicate(expression: ast.Expression, reporter: Reporter) -> ir.Predicate | None:
    """Type a predicate over the fields of a request; None after an error."""
    match expression:
        case ast.ComparisonChain():
            return _comparison(expression, reporter)
        case ast.Membership(of=of, among=among):
            return _membership(of, among, reporter)
        case ast.Negation(of=of):
            inner = predicate(of, reporter)
            return None if inner is None else ir.NoneOf(inner)
        case ast.Logic(op=op, parts=parts):
            typed = [predicate(part, reporter) for part in parts]
            found = tuple(part for part in typed if part is not None)
            if len(found) != len(parts):
                return None
            if op == "implies":
                return ir.AnyOf((ir.NoneOf(found[0]), found[1]))
            return ir.AllOf(found) if op == "and" else ir.AnyOf(found)
        case _:
            reporter.error(
                codes.WRONG_SORT,
                f"a test of a request is needed here, not {_words(expression)}",
                expression.span,
                'such as `length > 128` or `category == "safety"`',
            )
            return None


def _comparison(expression: ast.ComparisonChain, reporter: Reporter) -> ir.Predicate | None:
    parts = single_comparison(expression, reporter)
    if parts is None:
        return None
    op, left, right = parts
    if not isinstance(left, ast.Name) and isinstance(right, ast.Name):
        left, right, op = right, left, MIRRORED[op]
    if not isinstance(left, ast.Name):
        help = "compare a field of the request with a value"
        if isinstance(left, ast.Binary | ast.Minus):
            message = "a test compares one field, and computes nothing"
            reporter.error(codes.WRONG_SORT, message, left.span, help)
            return None
        code = codes.VACUOUS if not isinstance(left, ast.Call) else codes.WRONG_SORT
        reporter.error(code, "the comparison names no field", expression.span, help)
        return None
    _doubt(left, reporter)
    value = _value(right, reporter)
    if value is None:
        return None
    if op not in {"==", "!="} and not isinstance(value, Fraction):
        reporter.error(
            codes.WRONG_SORT,
            f"`{op}` orders numbers, not {_words(right)}",
            expression.op_spans[0],
            "write == or !=",
        )
        return None
    return ir.FieldTest(left.id, op, value, expression.span)


def _value(expression: ast.Expression, reporter: Reporter) -> str | Fraction | bool | None:
    match expression:
        case ast.Text(value=value) | ast.Truth(value=value):
            return value
        case ast.Num(value=value, unit=None):
            return value
        case ast.Minus(of=ast.Num(value=value, unit=None)):
            return -value
        case ast.Num(unit_span=span):
            reporter.error(
                codes.WRONG_SORT, "fields of requests have no units", span, "leave the unit out"
            )
        case ast.Name(id=name, span=span):
            reporter.error(
                codes.WRONG_SORT,
                f"a value is needed, not the name `{name}`",
                span,
                f'write "{name}" if the text is meant',
                fix=_in_quotes(reporter.source, span),
            )
        case _:
            reporter.error(
                codes.WRONG_SORT,
                f"a value is needed, not {_words(expression)}",
                expression.span,
                help="write a number, a text in quotation marks, true or false",
            )
    return None


def _in_quotes(source: SourceFile, span: Span) -> Fix | None:
    """Return the fix that quotes a name with the marks that its scalar does not use; None where the
    scalar begins with the name, and the marks would become those of the scalar."""
    from kcdsl.source.scalar_map import scalar_at

    scalar = scalar_at(source, span.start)
    if scalar is None or (scalar.style == "plain" and scalar.span.start == span.start):
        return None
    mark = "'" if scalar.style == '"' else '"'
    edits = (Edit(Span(span.start, span.start), mark), Edit(Span(span.end, span.end), mark))
    return Fix("put it in quotation marks", edits, safe=False)


def _doubt(field: ast.Name, reporter: Reporter) -> None:
    """Warn of a field whose name is similar to `length`."""
    if field.id != LENGTH and _nearly(field.id, LENGTH):
        reporter.warning(
            codes.DOUBTFUL_NAME,
            f"`{field.id}` is no field that every request has",
            field.span,
            did_you_mean(LENGTH, f"did you mean `{LENGTH}`, the number of tokens?"),
        )


def _nearly(name: str, other: str) -> bool:
    # An upper bound of the similarity, which rules out most names quickly.
    common = sum(min(name.count(letter), other.count(letter)) for letter in set(name))
    if 2 * common < _NEAR * (len(name) + len(other)):
        return False
    from difflib import SequenceMatcher

    return SequenceMatcher(None, other, name).ratio() >= _NEAR


def _membership(of: ast.Expression, among: ast.ListOf, reporter: Reporter) -> ir.Predicate | None:
    if not isinstance(of, ast.Name):
        reporter.error(
            codes.WRONG_SORT,
            f"a field is needed, not {_words(of)}",
            of.span,
            help='write a field on the left, such as `category in ["code", "chat"]`',
        )
        return None
    _doubt(of, reporter)
    if not among.items:
        reporter.error(
            codes.VACUOUS,
            "nothing is in an empty list",
            among.span,
            help="list the values that are meant, or leave the test out",
        )
        return None
    values = [_value(item, reporter) for item in among.items]
    tests = tuple(
        ir.FieldTest(of.id, "==", value, item.span)
        for value, item in zip(values, among.items, strict=True)
        if value is not None
    )
    return ir.AnyOf(tests) if len(tests) == len(values) else None


TRACE_FIELDS: tuple[str, ...] = (
    "build_fingerprint",
    "request_shape",
    "rng_seed",
    "sampling_params",
    "replay_signature",
)
"""The fields that replay and attribution need; a contract may require others as well."""

_ALWAYS = ("build_fingerprint", "request_shape")
"""Fields that are needed to repeat a request on the kernels that served it."""
_DRAWN = frozenset({"sampled", "text", "rewards", "outcomes", "rollouts", "advantages"})
"""Data that depend on sampling; replay needs the seed and the sampling parameters."""
_TIMED = frozenset({"timing", "memory"})
"""Data that repeated runs do not reproduce exactly; all else replays to the same signature."""


def likely_field(name: str) -> str | None:
    """Return the well-known field that `name` is probably a misspelling of, or None."""
    return None if name in TRACE_FIELDS else nearest(name, TRACE_FIELDS)


def needed_fields(clause: Clause, metrics: Registry) -> tuple[str, ...]:
    """Return the trace fields without which the clause cannot be evaluated again from logs.

    Empty for clauses about proved drift, which no trace decides, and about traces themselves.
    """
    needs: set[str] = set()
    for term in terms_of(clause.require):
        if isinstance(term, Metric):
            needs |= set(metrics[term.name].needs)
        elif isinstance(term, Norm) and term.of.measured:
            needs.add("logits")
    if not needs:
        return ()
    found = {*_ALWAYS}
    if needs & _DRAWN:
        found |= {"rng_seed", "sampling_params"}
    if needs - _TIMED:
        found.add("replay_signature")
    return tuple(name for name in TRACE_FIELDS if name in found)


def check_traces(
    clauses: Sequence[Clause | None],
    slices: Iterable[Slice],
    metrics: Registry,
    reporter: Reporter,
) -> None:
    """Warn where the observability clauses leave out fields that other clauses need for replay.

    A contract without observability clauses says nothing about traces, and is left alone.
    """
    known = [clause for clause in clauses if clause is not None]
    observing = [c for c in known if c.family is Family.OBSERVABILITY and fields_of(c.require)]
    if not observing:
        return
    whole = {item.name: item for item in slices}
    lacking: dict[str, list[Clause]] = {}
    for clause in known:
        for name in needed_fields(clause, metrics):
            places = named_slices(clause) or tuple(whole)
            if not all(_covered(name, place, observing, whole) for place in places):
                lacking.setdefault(name, []).append(clause)
    if lacking:
        needing = list(dict.fromkeys(c.id for name in lacking for c in lacking[name]))
        fields = [name for name in TRACE_FIELDS if name in lacking]
        rest = f" and {len(needing) - 1} more" if len(needing) > 1 else ""
        reporter.warning(
            codes.UNCOVERED_TRACE,
            f"{needing[0]}{rest} cannot be replayed from traces: no observability clause "
            f"requires {', '.join(fields)} on every slice that is needed",
            observing[0].span,
            f"require {', '.join(f'`{name}`' for name in fields)} there",
            (Label(lacking[fields[0]][0].span, "needs them"),),
        )


def fields_of(formula: Formula) -> frozenset[str]:
    """Return the fields that a formula requires whatever else is true."""
    match formula:
        case HasFields(fields=fields):
            return frozenset(fields)
        case Connective(op="and", parts=parts):
            return frozenset[str]().union(*map(fields_of, parts))
        case _:
            return frozenset()


def _covered(field: str, place: str, observing: Sequence[Clause], slices: dict[str, Slice]) -> bool:
    """Return whether some clause requires the field on a slice, or on all the data of that
    slice."""
    here = slices.get(place)
    for clause in observing:
        if field not in fields_of(clause.require):
            continue
        if not clause.slices or place in clause.slices:
            return True
        there = [slices[name] for name in clause.slices if name in slices]
        if here is not None and any(s.where == AllOf() and s.data == here.data for s in there):
            return True
    return False
