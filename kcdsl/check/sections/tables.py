"""Tables of thresholds: their rows, and their use in comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from kcdsl.check.expressions.fields import predicate
from kcdsl.check.expressions.names import other_unit, quantity
from kcdsl.check.sections.fields import RawRow, RawSlice, RawTable
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Fix, Label
from kcdsl.diagnostics.report import Reporter, replacement
from kcdsl.ir import terms as ir
from kcdsl.ir.predicates import Case, Undecided, find_case, first_taken
from kcdsl.source.removal import remove_entry, without
from kcdsl.source.yaml_nodes import Mapping, Scalar
from kcdsl.source.yaml_nodes import SequenceNode as Listed
from kcdsl.syntax.parser import parse_expression, parse_quantity
from kcdsl.units import UNITS, Unit, describe

_WHOLE = ("length",)
"""Fields with integer values."""
_MOST_LABELLED = 100
"""The largest number of unreachable rows for which the covering row is searched."""


def check_table(raw: RawTable, reporter: Reporter) -> ir.ThresholdTable | None:
    """Check one table: units, predicates, and that each request has exactly one value.

    None after an error, which is in the sink.
    """
    unit = _unit(raw.unit, reporter)
    rows = [_row(row, unit, reporter) for row in raw.rows]
    otherwise = None
    if raw.otherwise is not None and isinstance(raw.otherwise.value, Scalar):
        otherwise = _value(raw.otherwise.value, unit, reporter)
        if otherwise is None:
            return None
    found = tuple(row for row in rows if row is not None)
    if unit is None or len(found) != len(rows) or not found:
        return None
    if not _is_total(raw, found, otherwise is not None, reporter):
        return None
    name, dimension = raw.name.text, str(unit.dimension)
    return ir.ThresholdTable(name, dimension, found, otherwise, raw.name.span)


def _unit(scalar: Scalar | None, reporter: Reporter) -> Unit | None:
    if scalar is None:
        return None
    unit = UNITS.get(scalar.text)
    if unit is None:
        reporter.error(
            codes.UNKNOWN_UNIT,
            f"there is no unit `{scalar.text}`",
            scalar.span,
            other_unit(scalar.text),
        )
    return unit


def _row(raw: RawRow, unit: Unit | None, reporter: Reporter) -> ir.TableRow | None:
    where = value = None
    if raw.where is not None:
        parsed = parse_expression(reporter.source, raw.where, reporter.sink)
        where = predicate(parsed, reporter) if parsed is not None else None
    if raw.value is not None:
        value = _value(raw.value, unit, reporter)
    return None if where is None or value is None else ir.TableRow(where, value)


def _value(scalar: Scalar, unit: Unit | None, reporter: Reporter) -> Fraction | None:
    """Read a value; without a unit it is in that of the table."""
    number = parse_quantity(reporter.source, scalar, reporter.sink)
    read = quantity(number, reporter) if number is not None else None
    if number is None or read is None or unit is None:
        return None
    value, dimension, bare = read
    if bare:
        return value * unit.factor
    if dimension != unit.dimension:
        reporter.error(
            codes.DIMENSION,
            f"the table holds {describe(unit.dimension)}, and this is {describe(dimension)}",
            number.span,
            f"leave the unit out, or write one like `{unit.name}`",
            fix=replacement(number.unit_span, unit.name),
        )
        return None
    return value


# --- totality ------------------------------------------------------------------------------------


def _is_total(
    raw: RawTable, rows: Sequence[ir.TableRow], otherwise: bool, reporter: Reporter
) -> bool:
    """Report rows that no request reaches, and requests without a row."""
    try:
        reached, left = first_taken([row.where for row in rows], _WHOLE)
    except Undecided:
        return _is_undecided(raw, otherwise, reporter)
    good = True
    for position, row in enumerate(rows):
        where = raw.rows[position].where
        if where is not None and position not in reached:
            taken = _taken_by(rows, position) if position < _MOST_LABELLED else None
            good = False
            labels: tuple[Label, ...] = ()
            first = raw.rows[taken].where if taken is not None else None
            if first is not None:
                labels = (Label(first.span, "takes them all"),)
            reporter.error(
                codes.UNREACHABLE_ROW,
                "no request gets here: the rows above take every one"
                if _can_hold(row.where)
                else "no request satisfies this row",
                where.span,
                "the first row that a request satisfies gives its value; drop the row, or move it "
                "up",
                labels,
                fix=_without_row(raw, position, reporter),
            )
    if not good:
        return False
    return _check_rest(raw, left, otherwise, reporter)


def _is_undecided(raw: RawTable, otherwise: bool, reporter: Reporter) -> bool:
    """Report a table with too many cases, unless it has `otherwise`."""
    if not otherwise:
        reporter.error(
            codes.TABLE_GAP,
            f"whether the rows of `{raw.name.text}` take every request is not decided",
            raw.name.span,
            "add `otherwise: VALUE`",
        )
    return otherwise


def _without_row(raw: RawTable, position: int, reporter: Reporter) -> Fix | None:
    node = raw.entry.value.get("rows") if isinstance(raw.entry.value, Mapping) else None
    rows = node if isinstance(node, Listed) else None
    if rows is None or len(rows.items) != len(raw.rows):
        return None
    return without(reporter.source, rows, [position])


def _check_rest(raw: RawTable, case: Case | None, otherwise: bool, reporter: Reporter) -> bool:
    """Report a missing or unreachable `otherwise`; `case` is a request without a row, or None."""
    if case is not None and not otherwise:
        reporter.error(
            codes.TABLE_GAP,
            f"`{raw.name.text}` has no value for a request with {_describe(case)}",
            raw.name.span,
            "add `otherwise: VALUE`, or a row for it",
        )
        return False
    if case is None and otherwise and raw.otherwise is not None:
        assert isinstance(raw.entry.value, Mapping)
        edit = remove_entry(reporter.source, raw.entry.value, raw.otherwise)
        reporter.error(
            codes.UNREACHABLE_ROW,
            "no request gets here: the rows take every one",
            raw.otherwise.key.span,
            "leave `otherwise` out; nothing can be shown on a bucket without requests",
            fix=Fix("remove `otherwise`", (edit,)),
        )
        return False
    return True


def _taken_by(rows: Sequence[ir.TableRow], position: int) -> int | None:
    """Return the only row that covers every request of a later one, or None."""
    where = rows[position].where
    for earlier, row in enumerate(rows[:position]):
        if not _can_hold(ir.AllOf((where, ir.NoneOf(row.where)))):
            return earlier if _can_hold(where) else None
    return None


def _can_hold(where: ir.Predicate) -> bool:
    try:
        return find_case(where, _WHOLE) is not None
    except Undecided:
        return True


def _describe(case: Case) -> str:
    return " and ".join(f"{name} = {_shown(value)}" for name, value in sorted(case.items()))


def _shown(value: str | Fraction | bool) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if value.denominator == 1 else f"{float(value):g}"


def check_slice(raw: RawSlice, reporter: Reporter) -> ir.Slice | None:
    """Check one declared slice; None after an error in its predicate."""
    where: ir.Predicate | None = ir.AllOf()
    if raw.where is not None:
        parsed = parse_expression(reporter.source, raw.where, reporter.sink)
        where = predicate(parsed, reporter) if parsed is not None else None
    if where is None:
        return None
    data = raw.data.text if raw.data is not None else None
    return ir.Slice(raw.name.text, data, where, raw.span)
