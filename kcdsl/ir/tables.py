"""Tables of thresholds: expansion of clauses with `table(...)`.

A bucket of a table has the requests that satisfy its row and no earlier one; the last bucket has
all other requests, if the table has a value for them (`otherwise`). A clause with `table(t)` on a
slice means: for every bucket b of t, the clause with the value of b in place of `table(t)`, on the
slice within b. `expand_tables` makes these clauses, so that other code does not need to handle
tables: they share the identifier of the original and have slices named `SLICE[TABLE: PREDICATE]`.

A bucket that cannot contain requests of the slice is omitted; every other one must have requests,
like any slice. If a table has no `otherwise`, a request of no row is invalid evidence: `gaps`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from kcdsl.ir.formulas import rewritten, terms_of, walk
from kcdsl.ir.predicates import Undecided, find_case
from kcdsl.ir.printer import predicate_text
from kcdsl.ir.terms import (
    AllOf,
    Clause,
    Compare,
    Formula,
    NoneOf,
    Number,
    Predicate,
    Program,
    Quantified,
    Slice,
    TableValue,
    Term,
    ThresholdTable,
)

OTHERWISE = "otherwise"


@dataclass(frozen=True, slots=True)
class Bucket:
    """The requests for which a table gives one value."""

    table: str
    label: str
    """The source text of the row's predicate, or `otherwise`."""
    where: Predicate
    value: Fraction


@dataclass(frozen=True, slots=True)
class Gap:
    """The requests of the slice `whole` that are in no row of a table without `otherwise`; any such
    request makes the evidence on the slices `spoils` invalid."""

    table: str
    whole: str
    slice: Slice
    spoils: tuple[str, ...]


def table_of(clause: Clause) -> str | None:
    """Return the name of the table in a clause, or None."""
    names = (t.name for t in terms_of(clause.require) if isinstance(t, TableValue))
    return next(names, None)


def buckets(table: ThresholdTable) -> tuple[Bucket, ...]:
    """Return the buckets of a table, in the order of its rows."""
    found: list[Bucket] = []
    earlier: tuple[Predicate, ...] = ()
    for row in table.rows:
        label = predicate_text(row.where)
        found.append(Bucket(table.name, label, _all((*earlier, row.where)), row.value))
        earlier += (NoneOf(row.where),)
    if table.otherwise is not None:
        found.append(Bucket(table.name, OTHERWISE, _all(earlier), table.otherwise))
    return tuple(found)


def bucket_slice(slice_: Slice, bucket: Bucket) -> Slice:
    """Return the part of a slice that lies in a bucket."""
    where = _all((slice_.where, bucket.where))
    return replace(slice_, name=f"{slice_.name}[{bucket.table}: {bucket.label}]", where=where)


def is_bucket(name: str) -> bool:
    """Return whether a slice is a bucket, by its name; no declared name has a bracket."""
    return "[" in name


def whole_of(name: str) -> str:
    """Return the name of the declared slice that contains a slice."""
    return name.partition("[")[0]


def expand_tables(program: Program) -> Program:
    """Return the program with each clause with a table replaced by its clauses per bucket."""
    if not program.tables:
        return program
    slices: dict[str, Slice] = {s.name: s for s in program.slices}
    clauses: list[Clause] = []
    for clause in program.clauses:
        name = table_of(clause)
        if name is None:
            clauses.append(clause)
            continue
        for part, parts_of_slices in _by_bucket(clause, program, program.table(name)):
            clauses.append(part)
            slices.update({s.name: s for s in parts_of_slices})
    return replace(program, slices=tuple(slices.values()), clauses=tuple(clauses), tables=())


def gaps(program: Program) -> tuple[Gap, ...]:
    """Return the gaps of the tables, whose requests make the evidence of clauses invalid."""
    found: dict[str, Gap] = {}
    for clause in program.clauses:
        name = table_of(clause)
        if name is None or program.table(name).otherwise is not None:
            continue
        table = program.table(name)
        missed = _all(tuple(NoneOf(row.where) for row in table.rows))
        for slice_name in _slices_of(clause):
            whole = program.slice(slice_name)
            inner = replace(
                whole, name=f"{slice_name}[{name}: no row]", where=_all((whole.where, missed))
            )
            spoils = tuple(bucket_slice(whole, bucket).name for bucket in buckets(table))
            found[inner.name] = Gap(name, slice_name, inner, spoils)
    return tuple(found.values())


def _by_bucket(
    clause: Clause, program: Program, table: ThresholdTable
) -> list[tuple[Clause, list[Slice]]]:
    """Return the clause for each bucket, with its slices."""
    everywhere, names = buckets(table), _slices_of(clause)
    inside = {name: _reached(program.slice(name), everywhere) for name in names}
    quantified = any(isinstance(part, Quantified) for part in walk(clause.require))
    found: list[tuple[Clause, list[Slice]]] = []
    for bucket in everywhere:
        reached = tuple(name for name in names if bucket in inside[name])
        if quantified and reached:
            reached = names  # a statement about several slices cannot be split
        parts = {name: bucket_slice(program.slice(name), bucket) for name in reached}
        if not parts:
            continue
        here = replace(
            clause,
            require=_within(clause.require, bucket, {n: s.name for n, s in parts.items()}),
            slices=tuple(parts[name].name for name in clause.slices if name in parts),
        )
        found.append((here, list(parts.values())))
    return found


def _reached(slice_: Slice, everywhere: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
    """Return the buckets that may contain requests of a slice; all buckets if that is undecided or
    would be none, so that nothing is dropped silently."""
    try:
        found = tuple(b for b in everywhere if find_case(_all((slice_.where, b.where))) is not None)
    except Undecided:
        return everywhere
    return found or everywhere


def _slices_of(clause: Clause) -> tuple[str, ...]:
    named = (f.region.slice for f in walk(clause.require) if isinstance(f, Quantified))
    return tuple(dict.fromkeys((*clause.slices, *named)))


def _all(parts: tuple[Predicate, ...]) -> Predicate:
    """Join predicates by `and`, without nesting."""
    flat: list[Predicate] = []
    for part in parts:
        flat.extend(part.parts if isinstance(part, AllOf) else (part,))
    return flat[0] if len(flat) == 1 else AllOf(tuple(flat))


def _within(formula: Formula, bucket: Bucket, slices: dict[str, str]) -> Formula:
    """Return a formula with the value and the slices of a bucket."""

    def part(one: Formula) -> Formula:
        match one:
            case Compare(left=left, right=right):
                return replace(one, left=_value(left, bucket), right=_value(right, bucket))
            case Quantified(region=region):
                return replace(one, region=replace(region, slice=slices[region.slice]))
            case _:
                return one

    return rewritten(formula, part)


def _value(term: Term, bucket: Bucket) -> Term:
    if isinstance(term, TableValue):
        return Number(bucket.value, term.dimension, term.span)
    return term
