"""Trace fields: the well-known ones, and which of them the clauses need for replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kcdsl.diagnostics.codes import UNCOVERED_TRACE
from kcdsl.diagnostics.model import Label
from kcdsl.diagnostics.report import Reporter, nearest
from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.terms import (
    AllOf,
    Clause,
    Connective,
    Family,
    Formula,
    HasFields,
    Metric,
    Norm,
    Quantified,
    Slice,
)
from kcdsl.metrics import Registry

TRACE_FIELDS: tuple[str, ...] = (
    "build_fingerprint",
    "request_shape",
    "rng_seed",
    "sampling_params",
    "replay_signature",
)
"""The payload that replay and attribution need; a contract may require others as well."""

_ALWAYS = ("build_fingerprint", "request_shape")
"""Without these nobody can run the request again on the kernels that served it."""
_DRAWN = frozenset({"sampled", "text", "rewards", "outcomes", "rollouts", "advantages"})
"""Data that depend on how tokens were drawn; replay needs the seed and the sampling parameters."""
_TIMED = frozenset({"timing", "memory"})
"""Data that a run does not repeat exactly; everything else replays to the same signature."""


def doubtful(name: str) -> str | None:
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
            places = _slices_of(clause) or tuple(whole)
            if not all(_covered(name, place, observing, whole) for place in places):
                lacking.setdefault(name, []).append(clause)
    if lacking:
        needing = list(dict.fromkeys(c.id for name in lacking for c in lacking[name]))
        fields = [name for name in TRACE_FIELDS if name in lacking]
        rest = f" and {len(needing) - 1} more" if len(needing) > 1 else ""
        reporter.warning(
            UNCOVERED_TRACE,
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


def _slices_of(clause: Clause) -> tuple[str, ...]:
    named = [p.region.slice for p in walk(clause.require) if isinstance(p, Quantified)]
    return tuple(dict.fromkeys((*clause.slices, *named)))


def _covered(field: str, place: str, observing: Sequence[Clause], slices: dict[str, Slice]) -> bool:
    """Say whether some clause requires the field on a slice, or on all the data of that slice."""
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
