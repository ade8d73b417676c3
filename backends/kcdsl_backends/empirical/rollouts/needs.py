"""Which columns a metric is formed from, and what a recording lacks of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.recordings import ROLES
from kcdsl.ir.terms import Clause
from kcdsl.metrics import METRICS
from kcdsl_backends.empirical.clauses import measured_norms, metrics_of
from kcdsl_backends.empirical.metrics.measures import LIST_METRICS
from kcdsl_backends.empirical.rollouts.record import Rollout

NEEDS: Mapping[str, tuple[str, ...]] = {
    m.name: m.columns for m in METRICS.values() if m.columns is not None
}
"""The roles of columns that each metric of a recording reads."""

_LOGITS = "the recording holds no logits: let both kernels read them (format: logits), or run"


def check_needs(
    clauses: Sequence[Clause],
    roles: Collection[str],
    columns: Mapping[str, str],
    user: Iterable[str],
) -> None:
    """Refuse a clause whose metric reads a column that the recording lacks.

    `user` are the user's own metrics, which read arrays of a forward pass of both kernels.
    """
    own = frozenset(user)
    for clause in clauses:
        for name in sorted(metrics_of(clause.require)):
            if name in own:
                raise _out_of_reach(clause, name, "metrics of your own read arrays of both kernels")
            if name not in NEEDS:
                raise _out_of_reach(clause, name, _why_not(name))
            missing = [role for role in NEEDS[name] if role not in roles]
            if missing:
                raise _lacking(clause, name, missing, columns)
        if measured_norms(clause.require):
            raise _out_of_reach(clause, "measured_drift", "a recording runs no block")


def check_depths(clauses: Sequence[Clause], rollouts: Sequence[Rollout]) -> None:
    """Refuse a metric of longer lists of the likeliest tokens than the recording has."""
    depths = [
        min(r.train.top.likeliest, r.infer.top.likeliest)
        for r in rollouts
        if r.train is not None and r.infer is not None and r.train.top and r.infer.top and r.counted
    ]
    for clause in clauses:
        for name in sorted(metrics_of(clause.require) & set(LIST_METRICS)):
            k = LIST_METRICS[name][1]
            if depths and min(depths) < k:
                why = f"it needs the {k} likeliest tokens, and the recording lists {min(depths)}"
                raise _out_of_reach(clause, name, why)


def _why_not(name: str) -> str:
    if name in ("peak_memory", "determinism"):
        return "nothing is run, so nothing is timed, repeated or counted"
    return _LOGITS


def _out_of_reach(clause: Clause, name: str, why: str) -> Exception:
    return refuse(
        codes.METRIC_OUT_OF_REACH,
        f"the clause `{clause.id}` reads `{name}`, but {why}",
        help="metrics of recordings, and what each of them reads: docs/rollouts.md",
    )


def _lacking(
    clause: Clause, name: str, missing: Sequence[str], columns: Mapping[str, str]
) -> Exception:
    named = [f"`{columns.get(role, role)}`" for role in missing]
    first = missing[0]
    return refuse(
        codes.METRIC_OUT_OF_REACH,
        f"the clause `{clause.id}` reads `{name}`, but the recording has no column"
        f" {' and no '.join(named)}",
        notes=tuple(f"{role}: {ROLES[role]}" for role in missing),
        help=f"record it, or name its column: columns: {{{first}: NAME}}",
    )
