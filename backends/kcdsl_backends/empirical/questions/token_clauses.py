"""Deciding a contract on token tables, by the code that decides evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.report import refuse_unknown
from kcdsl.ir.formulas import subterms, terms_of, walk
from kcdsl.ir.tables import expand_tables, gaps, whole_of
from kcdsl.ir.terms import (
    Abs,
    AllOf,
    Arith,
    Clause,
    Compare,
    HasFields,
    Metric,
    Norm,
    Number,
    Predicate,
    Program,
    Slice,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.metrics import MetricDefinition
from kcdsl.verdict.report import Statistics
from kcdsl.verdict.result import ClauseResult
from kcdsl_backends.empirical.decision.report import decide
from kcdsl_backends.empirical.metrics.measures import (
    AGGREGATES,
    MAGNITUDES,
    PROBABILITY_FUNCTIONS,
    RECORDED_AGGREGATES,
    SAMPLED_FUNCTIONS,
)
from kcdsl_backends.empirical.metrics.user import measures_of
from kcdsl_backends.empirical.sources.tokens.database import Database, ValueLimit
from kcdsl_backends.empirical.sources.tokens.requests import Requests, as_measured, reduce_requests
from kcdsl_backends.empirical.sources.tokens.slices import SliceMember, check_rows, membership
from kcdsl_backends.empirical.sources.tokens.tables import TokenTable
from kcdsl_backends.empirical.table.evidence import Column, EvidenceTable, Reduced, SliceData
from kcdsl_backends.empirical.table.requirements import metrics_of, split

_OF_SLICES = {*AGGREGATES, *RECORDED_AGGREGATES, *MAGNITUDES, "kv_memory"}
"""Metrics of all tokens at once: no token has a value of its own."""
_ORDERS = ("<=", "<", ">=", ">")


@dataclass(frozen=True, slots=True)
class Decided:
    """The results of a contract's clauses, and the requests that decided them, by slice."""

    results: tuple[ClauseResult, ...]
    deferred: Mapping[str, str]
    statistics: Statistics
    requests: Mapping[str, Requests]


@dataclass(frozen=True, slots=True)
class PreparedContract:
    """A contract prepared for a table: clauses, reasons for undecided ones, slices and terms."""

    program: Program
    clauses: tuple[Clause, ...]
    deferred: Mapping[str, str]
    members: tuple[SliceMember, ...]
    watched: Mapping[str, tuple[str, ...]]
    """Slices that must be empty, with the slices that are invalid if they are not."""
    terms: tuple[Term, ...]
    measures: Mapping[str, MetricDefinition]

    @property
    def slices(self) -> tuple[str, ...]:
        """Return the names of the slices that clauses are decided on."""
        return tuple(m.name for m in self.members if m.name not in self.watched)


def prepare(program: Program, table: TokenTable, only: Sequence[str] = ()) -> PreparedContract:
    """Return the clauses to decide on a table; raises Refusal (KC623) if there are none."""
    expanded, measures = expand_tables(program), measures_of(program)
    known = [s.name for s in program.slices]
    refuse_unknown(only, known, codes.UNKNOWN_SLICE, "the contract has no slice", "slices")
    chosen = [s for s in expanded.slices if not only or whole_of(s.name) in only]
    names = {s.name for s in chosen}
    missed = [gap for gap in gaps(program) if gap.whole in names]
    stated = {s.name: s for s in program.slices}
    members = [_member(s, stated, table) for s in chosen]
    members += [_member(gap.slice, stated, table) for gap in missed]
    clauses, deferred = split(expanded, frozenset(names))
    kept = []
    for clause in clauses:
        reason = _obstacle(clause, measures)
        if reason is None:
            kept.append(clause)
        else:
            deferred[clause.id] = reason
    if not kept:
        raise refuse(
            codes.NOTHING_TO_EVALUATE,
            "the contract has no clause that a token table decides",
            notes=tuple(f"{name}: {reason}" for name, reason in deferred.items()),
            help="add a clause about a metric of tokens, such as `p99(kl) <= 0.02`",
        )
    terms = dict.fromkeys(term for clause in kept for term in _terms_of(clause))
    terms |= dict.fromkeys(Metric(name) for term in terms for name in _metrics(term))
    if any(_sampled(term) for term in terms):
        terms[Metric("log_ratio_linf")] = None
    present = [t for t in terms if all(name in table.metrics for name in _metrics(t))]
    return PreparedContract(
        expanded,
        tuple(kept),
        deferred,
        tuple(members),
        {gap.slice.name: gap.spoils for gap in missed},
        tuple(present),
        measures,
    )


def decide_table(
    task: PreparedContract,
    database: Database,
    *,
    seed: int = 0,
    looks: int | None = 1,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> Decided:
    """Reduce the requests of every slice and decide every clause of a prepared contract.

    Raises Refusal (KC622) where a row lacks a field that a slice tests.
    """
    table = database.table
    slice_of = membership(table, task.members)  # a field that is no column is refused first
    check_rows(database, task.members)
    requests = reduce_requests(database, slice_of, task.terms) if task.terms else {}
    progress("requests", 1, 2)
    empty = Reduced((), {t: _nothing() for t in task.terms}, np.zeros(0, np.int64), _no_rows)
    data = {
        name: SliceData(
            name,
            (),
            measures=task.measures,
            reduced=as_measured(requests[name].reduced, task.measures)
            if name in requests
            else empty,
        )
        for name in task.slices
    }
    spoiled = {
        name: f"{len(requests[gap].reduced)} requests, {requests[gap].reduced.keys[0]!r} first, "
        "are in no row of a table of thresholds"
        for gap, spoils in task.watched.items()
        if gap in requests
        for name in spoils
    }
    evidence = EvidenceTable(
        program=task.program,
        requests=(),
        runs={},
        slices={},
        measured=frozenset(),
        encoder=False,
        contract={},
        model={},
        kernels={},
        data=(),
        environment={},
        spoiled=spoiled,
        seed=seed,
        looks=looks,
    )
    results, demoted, statistics = decide(evidence, task.program, task.clauses, data)
    progress("requests", 2, 2)
    return Decided(results, {**task.deferred, **demoted}, statistics, requests)


def limits_of(task: PreparedContract) -> dict[str, tuple[ValueLimit, ...]]:
    """Return the limits that clauses set to values of single metrics, for counting tokens."""
    found: dict[str, dict[ValueLimit, None]] = {}
    for clause in task.clauses:
        for part in walk(clause.require):
            if not isinstance(part, Compare) or part.op not in _ORDERS:
                continue
            term, op, limit = part.left, part.op, part.right
            of = term.of if isinstance(term, Statistic) else term
            if isinstance(of, Metric) and isinstance(limit, Number):
                found.setdefault(of.name, {})[ValueLimit(op, limit.value)] = None
    return {name: tuple(limits) for name, limits in found.items()}


# --- clauses that a table decides -----------------------------------------------------------------


def _obstacle(clause: Clause, measures: Mapping[str, MetricDefinition]) -> str | None:
    if any(isinstance(part, HasFields) for part in walk(clause.require)):
        return "reads trace records; `kcdsl evaluate` decides it"
    if any(isinstance(term, Norm) for term in terms_of(clause.require)):
        return "measures a block; `kcdsl evaluate` decides it"
    for name in sorted(metrics_of(clause.require)):
        measure = measures.get(name)
        if name in _OF_SLICES or (measure is not None and measure.tier == "E"):
            return f"{name} is no value of a token; `kcdsl evaluate` decides it"
    return None


def _terms_of(clause: Clause) -> Iterator[Term]:
    """Yield the values of tokens that a clause forms statistics of."""
    for part in walk(clause.require):
        if isinstance(part, Compare):
            yield from _pointwise(part.left)
            yield from _pointwise(part.right)


def _pointwise(term: Term) -> Iterator[Term]:
    match term:
        case Number() | TableValue():
            return
        case Arith(_, left, right):
            yield from _pointwise(left)
            yield from _pointwise(right)
        case Statistic(_, of):
            yield of
        case Abs(of) if any(isinstance(t, Statistic) for t in subterms(of)):
            yield from _pointwise(of)
        case _:
            yield term


def _metrics(term: Term) -> list[str]:
    return [t.name for t in subterms(term) if isinstance(t, Metric)]


def _sampled(term: Term) -> bool:
    return any(
        name in SAMPLED_FUNCTIONS or name in PROBABILITY_FUNCTIONS for name in _metrics(term)
    )


def _member(slice_: Slice, stated: Mapping[str, Slice], table: TokenTable) -> SliceMember:
    """Return the rows of a slice: those with its name if it has no predicate and the table has a
    column of names, else by predicate."""
    name = whole_of(slice_.name)
    everything: Predicate = AllOf(())
    by_name = table.slices is not None and stated[name].where == everything
    where = None if slice_.where == everything and by_name else slice_.where
    return SliceMember(slice_.name, where, name if by_name else None)


def _nothing() -> Column:
    counts, floats = np.zeros(0, np.int64), np.zeros(0)
    return Column(counts, counts, counts, counts, counts, floats, floats, floats, counts)


def _no_rows(request: str, term: Term) -> Any:
    return np.zeros(0)
