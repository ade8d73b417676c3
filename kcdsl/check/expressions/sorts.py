"""The sorts (types) of expressions in requirements and predicates.

`sorts` returns the sort of every sub-expression with its span, `sort_at` that of the smallest one
at an offset. Both are total: an expression in error has the sort `UNKNOWN`. The passes that report
errors use these names in their messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kcdsl.check.expressions.names import (
    BLOCK,
    DRIFTS,
    NORMS,
    PERCENTILE,
    REGIONS,
    STATISTICS,
    Scope,
)
from kcdsl.diagnostics.codes import WRONG_SORT
from kcdsl.diagnostics.model import Fix
from kcdsl.diagnostics.report import Reporter
from kcdsl.diagnostics.spans import Span
from kcdsl.metrics import Counted, MetricDefinition
from kcdsl.syntax import ast
from kcdsl.units import NATS, ONE, RATIO, UNITS, Dimension, takes_bare_numbers


class Real(NamedTuple):
    """A number with a dimension.

    `unit` is its displayed unit. `counted` is the unit that it has one value of (`per`), or ranges
    over (`over`); None for a constant. `bare` marks a constant without a unit.
    """

    dimension: Dimension = ONE
    unit: str = ""
    relation: str = ""
    counted: str = ""
    bare: bool = False

    def __str__(self) -> str:
        shown = f"Real[{self.unit}]" if self.unit else "Real"
        return f"{shown} {self.relation} {self.counted}" if self.relation else shown


class Matrix(NamedTuple):
    """Rows and columns by name: a drift has one row for each token."""

    rows: str
    columns: str

    def __str__(self) -> str:
        return f"Matrix[{self.rows}, {self.columns}]"


class NameSort(NamedTuple):
    """A sort without parts."""

    name: str

    def __str__(self) -> str:
        return self.name


class ListSort(NamedTuple):
    """A list of one sort of item."""

    item: Sort

    def __str__(self) -> str:
        return f"List[{self.item}]"


Sort = Real | Matrix | NameSort | ListSort
BOOL, INT, SEQUENCE = NameSort("Bool"), NameSort("Int"), NameSort("Sequence[Token]")
UNKNOWN = NameSort("unknown")
"""The sort of an expression in error, or of a field of unknown sort."""
BLOCK_SORT, SLICE, REGION, TRACE = (
    NameSort("Block"),
    NameSort("Slice"),
    NameSort("Region"),
    NameSort("Trace"),
)
FIELD, TABLE, TEXT = NameSort("Field"), NameSort("Table"), NameSort("Text")
STATES = Matrix("tokens", "width")

_SHOWN_UNITS = {ONE: "", RATIO: "ratio", NATS: "nats"}
_COLUMNS = {"head": "vocabulary", "model": "outputs"}
_FIELD_SORTS: Mapping[str, Sort] = {"Text": TEXT, "Bool": BOOL, "Int": INT, "Real": Real()}

NAMES = (
    "Bool",
    "Int",
    "Real",
    "Text",
    "List",
    "Matrix",
    "Sequence",
    "Block",
    "Slice",
    "Region",
    "Trace",
    "Field",
    "Table",
)
"""The names of the sorts that expressions have."""


def shown_unit(dimension: Dimension) -> str:
    """Return the displayed unit of a dimension: "" for plain numbers."""
    return _SHOWN_UNITS.get(dimension, str(dimension).replace("nat", "nats"))


def real(dimension: Dimension) -> Real:
    """Return the sort of a number of a dimension."""
    return Real(dimension, shown_unit(dimension))


def sort_of(
    expression: ast.Expression, scope: Scope, fields: Mapping[str, str] | None = None
) -> Sort:
    """Return the sort of an expression.

    `fields` is given for the predicate of a slice: the known sorts of fields.
    """
    return _Sorter(scope, fields).sort(expression)


def sorts(
    expression: ast.Expression, scope: Scope, fields: Mapping[str, str] | None = None
) -> tuple[tuple[Span, Sort], ...]:
    """Return the sort of every sub-expression with its span, in source order; an outer expression
    precedes its parts."""
    sorter = _Sorter(scope, fields)
    sorter.sort(expression)
    return tuple(sorted(sorter.found, key=lambda item: (item[0].start, -item[0].end)))


def sort_at(
    expression: ast.Expression,
    scope: Scope,
    offset: int,
    fields: Mapping[str, str] | None = None,
) -> tuple[Span, Sort] | None:
    """Return span and sort of the smallest sub-expression at an offset of the file, or None outside
    the expression."""
    inside = [
        item for item in sorts(expression, scope, fields) if item[0].start <= offset < item[0].end
    ]
    return min(inside, key=lambda item: item[0].end - item[0].start, default=None)


def described(
    expression: ast.Expression, scope: Scope, fields: Mapping[str, str] | None = None
) -> str:
    """Return the description of an expression in messages: its sort, or else its form."""
    sort = sort_of(expression, scope, fields)
    if sort != UNKNOWN:
        return str(sort)
    match expression:
        case ast.Name(id=name):
            return f"the name `{name}`"
        case ast.Call(function=ast.Name(id=name)):
            return f"`{name}(...)`"
        case _:
            return "an expression without a sort"


def wrong_sort(
    wanted: object,
    found: ast.Expression,
    scope: Scope,
    reporter: Reporter,
    help: str | None = None,
    *,
    fix: Fix | None = None,
) -> None:
    """Report an expression of the wrong sort."""
    message = f"a {wanted} is needed here, not {described(found, scope)}"
    reporter.error(WRONG_SORT, message, found.span, help, fix=fix)


@dataclass(slots=True)
class _Sorter:
    """Visits an expression; `found` collects every part with its sort."""

    scope: Scope
    fields: Mapping[str, str] | None
    bound: dict[str, Sort] = field(default_factory=dict)
    found: list[tuple[Span, Sort]] = field(default_factory=list)

    def sort(self, expression: ast.Expression) -> Sort:
        return self._keep(expression, self._sort(expression))

    def _keep(self, expression: ast.Expression, sort: Sort) -> Sort:
        self.found.append((expression.span, sort))
        return sort

    def _sort(self, expression: ast.Expression) -> Sort:
        match expression:
            case ast.Num():
                return _of_number(expression)
            case ast.Text():
                return TEXT
            case ast.Truth():
                return BOOL
            case ast.ListOf(items=items):
                inner = [self.sort(item) for item in items]
                return ListSort(inner[0]) if inner and len(set(inner)) == 1 else ListSort(UNKNOWN)
            case ast.Name(id=name):
                return self._name(name)
            case ast.Minus(of=of):
                inner_sort = self.sort(of)
                return inner_sort if isinstance(inner_sort, Real) else UNKNOWN
            case ast.Binary(op=op, left=left, right=right):
                return _combined(op, self.sort(left), self.sort(right))
            case ast.ComparisonChain(operands=operands):
                for operand in operands:
                    self.sort(operand)
                return BOOL
            case ast.Membership(of=of, among=among):
                self.sort(of)
                self.sort(among)
                return BOOL
            case ast.Negation(of=of):
                self.sort(of)
                return BOOL
            case ast.Logic(parts=parts):
                for part in parts:
                    self.sort(part)
                return BOOL
            case ast.Quantifier():
                return self._quantifier(expression)
            case ast.Call():
                return self._call(expression)

    def _name(self, name: str) -> Sort:
        if self.fields is not None:
            return _FIELD_SORTS.get(self.fields.get(name, ""), UNKNOWN)
        if name in self.bound:
            return self.bound[name]
        if name in self.scope.variables:
            return _variable(self.scope.regions.get(name, "points"))
        metric = self.scope.metrics.find(name) if self.scope.metrics.known(name) else None
        if metric is None and not self._is_other(name):
            metric = self.scope.metrics.find(name)
        if metric is not None:
            return _of_metric(metric)
        if name in self.scope.slices:
            return SLICE
        if BLOCK.fullmatch(name):
            return BLOCK_SORT
        if name in self.scope.tables:
            return TABLE
        return TRACE if name == "trace" else UNKNOWN

    def _is_other(self, name: str) -> bool:
        tables = name in self.scope.tables or name == "trace"
        return name in self.scope.slices or BLOCK.fullmatch(name) is not None or tables

    def _quantifier(self, expression: ast.Quantifier) -> Sort:
        self.sort(expression.region)
        region, name = expression.region.function.id, expression.variable
        variable = _variable(region)
        self.found.append((name.span, variable))
        outer = self.bound
        self.bound = {**outer, name.id: variable}
        self.sort(expression.body)
        self.bound = outer
        return BOOL

    # --- calls -----------------------------------------------------------------------------------

    def _call(self, call: ast.Call) -> Sort:
        name, arguments = call.function.id, call.arguments
        if name in REGIONS:
            return self._with(call, (SLICE,), REGION)
        if name in DRIFTS:
            block = arguments[0].id if arguments and isinstance(arguments[0], ast.Name) else ""
            known = BLOCK.fullmatch(block) is not None
            found = Matrix("tokens", _COLUMNS.get(block, "width")) if known else UNKNOWN
            return self._with(call, (BLOCK_SORT,), found)
        if name == "no_flip":
            return self._with(call, (BLOCK_SORT,), BOOL)
        if name == "has":
            return self._has(call)
        if name == "table":
            return self._table(call)
        inner = [self.sort(argument) for argument in arguments]
        if name in NORMS:
            drift = len(inner) == 1 and isinstance(inner[0], Matrix)
            return real(ONE) if drift else UNKNOWN
        if name == "abs":
            return inner[0] if len(inner) == 1 and isinstance(inner[0], Real) else UNKNOWN
        if name in STATISTICS or PERCENTILE.fullmatch(name):
            return _of_statistic(name, inner[-1] if inner else UNKNOWN)
        return UNKNOWN

    def _with(self, call: ast.Call, first: tuple[Sort, ...], found: Sort) -> Sort:
        """Sort the arguments of a call; the first ones are names with the sorts `first`."""
        for position, argument in enumerate(call.arguments):
            if position < len(first) and isinstance(argument, ast.Name):
                self._keep(argument, self._named(argument.id, first[position]))
            elif call.function.id == "no_flip" and isinstance(argument, ast.Num):
                whole = argument.unit is None and argument.value.denominator == 1
                self._keep(argument, INT if whole else _of_number(argument))
            else:
                self.sort(argument)
        return found

    def _named(self, name: str, wanted: Sort) -> Sort:
        known = name in self.scope.slices if wanted == SLICE else BLOCK.fullmatch(name) is not None
        return wanted if known else self._name(name)

    def _has(self, call: ast.Call) -> Sort:
        for position, argument in enumerate(call.arguments):
            match argument:
                case ast.Name(id="trace") if position == 0:
                    self._keep(argument, TRACE)
                case ast.ListOf(items=items) if position == 1:
                    for item in items:
                        named = isinstance(item, ast.Name | ast.Text)
                        self._keep(item, FIELD if named else self._sort(item))
                    self._keep(argument, ListSort(FIELD))
                case _:
                    self.sort(argument)
        return BOOL

    def _table(self, call: ast.Call) -> Sort:
        table = None
        for argument in call.arguments:
            if isinstance(argument, ast.Name):
                table = self.scope.tables.get(argument.id)
                self._keep(argument, TABLE if argument.id in self.scope.tables else UNKNOWN)
            else:
                self.sort(argument)
        if table is None:
            return UNKNOWN
        found = next(u.dimension for u in UNITS.values() if str(u.dimension) == table.dimension)
        return Real(found, shown_unit(found), "per", "request")


def _variable(region: str) -> Sort:
    """Return the sort of a bound variable: elements of a ball or hull are input states of a block,
    not tokens."""
    if region == "points":
        return SEQUENCE
    return STATES if region in REGIONS else UNKNOWN


def _of_number(number: ast.Num) -> Sort:
    if number.unit is None:
        return Real(bare=True)
    unit = UNITS.get(number.unit)
    if unit is None:
        return UNKNOWN
    return Real(unit.dimension, "" if unit.dimension == ONE else unit.name)


def _of_metric(metric: MetricDefinition) -> Sort:
    return Real(metric.dimension, shown_unit(metric.dimension), "per", metric.counted)


def _of_statistic(name: str, of: Sort) -> Sort:
    if not isinstance(of, Real) or of.relation != "per":
        return UNKNOWN
    return Real(of.dimension, of.unit, "over", counted_by(name, of.counted))


def counted_by(statistic: str, counted: Counted | str) -> str:
    """Return the unit over which a statistic of a metric ranges.

    A percentile ranges over requests, each represented by its worst token; a mean, a rate, a
    maximum and a minimum range over every value.
    """
    ranks = statistic == "quantile" or PERCENTILE.fullmatch(statistic) is not None
    return "requests" if ranks and counted == "token" else f"{counted}s"


def _combined(op: str, left: Sort, right: Sort) -> Sort:
    if not isinstance(left, Real) or not isinstance(right, Real):
        return UNKNOWN
    dimension = _dimension(op, left, right)
    if dimension is None:
        return UNKNOWN
    relation, counted = left.relation, left.counted
    if not relation:
        relation, counted = right.relation, right.counted
    elif right.relation and (right.relation, right.counted) != (relation, counted):
        # An aggregate has one number per window and is treated like a statistic.
        if not (_is_one_number(left) and _is_one_number(right)):
            return UNKNOWN
        relation = counted = ""
    return Real(dimension, shown_unit(dimension), relation, counted, left.bare and right.bare)


def _is_one_number(sort: Real) -> bool:
    return sort.relation != "per" or sort.counted in ("window", "")


def _dimension(op: str, left: Real, right: Real) -> Dimension | None:
    if op in "*/":
        return left.dimension.times(right.dimension, -1 if op == "/" else 1)
    if left.dimension == right.dimension:
        return left.dimension
    for one, other in ((left, right), (right, left)):
        if one.bare and takes_bare_numbers(other.dimension):
            return other.dimension
    return None
