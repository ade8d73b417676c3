"""Evidence from recordings: read, score if the training kernel is loaded, diagnose, measure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.kernels import KernelRef
from kcdsl.ir.terms import Clause, EvidenceKind
from kcdsl.model.fingerprint import fingerprint_digest, kernel_fingerprint
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.collection.context import Progress
from kcdsl_backends.empirical.collection.recordings import (
    RolloutContext,
    counts,
    semantics_of,
)
from kcdsl_backends.empirical.diagnoses.recorded import Recorded, recorded_prechecks
from kcdsl_backends.empirical.sources.rollouts.layouts import mapped
from kcdsl_backends.empirical.sources.rollouts.measures import NEEDS, check_depths, check_needs
from kcdsl_backends.empirical.sources.rollouts.prompts import (
    PromptRollouts,
    groups_of,
    run_of,
    score,
    timed,
)
from kcdsl_backends.empirical.sources.rollouts.record import Policy, Rollout
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from kcdsl_backends.empirical.table.evidence import EvidenceTable, RequestRun, SamplingUnit, Timing
from kcdsl_backends.empirical.table.requirements import PROOFS, metrics_of

_TIMED = frozenset({"latency", "ttft", "tpot", "throughput", "kv_memory"})
"""Metrics whose units are rows."""
_COMPARED = frozenset({"k3", "w_log_w_minus", "tv_is", "importance_ratio"})
"""Metrics that are always measured if both sides are compared."""


@dataclass(frozen=True, slots=True)
class RolloutSource:
    """Recorded rollouts; the training kernel scores them if it is loaded."""

    context: RolloutContext

    @property
    def slices(self) -> Collection[str]:
        """Return the names of the slices."""
        return self.context.rows

    def check(self, clauses: Sequence[Clause]) -> None:
        """Refuse a clause whose metric reads a column that the recordings lack."""
        roles, columns = _roles(self.context)
        user = [metric.name for metric in self.context.program.metrics]
        check_needs(_without_proofs(clauses), roles, columns, user)

    def fill(self, clauses: Sequence[Clause], progress: Progress) -> EvidenceTable:
        """Score, diagnose and measure the rollouts of every prompt."""
        context, wanted = self.context, _without_proofs(clauses)
        rows, policies = _scored(context, progress)
        check_depths(wanted, [r for found in rows.values() for r in found])
        groups = _groups(context, rows)
        metrics = {name for clause in wanted for name in metrics_of(clause.require)}
        metrics |= _COMPARED if _compares(metrics) else set()
        distinct = {g.request.key: g for found in groups.values() for g in found}
        return context.evidence(
            {name: tuple(g.request for g in found) for name, found in groups.items()},
            runs=_runs(distinct, metrics, context, progress),
            measured=frozenset(metrics),
            kernels=_kernels(context),
            data=tuple(
                {"name": found.name, "sha256": found.sha256, "rows": len(found.rollouts)}
                for found in context.recordings.values()
            ),
            prechecks=_prechecks(context, rows, groups, metrics, policies),
            timing=_timing(wanted, distinct.values()),
            notes=(
                *context.notes,
                *_shares(context, groups),
                *_joined(context),
                *_census_note(wanted),
            ),
        )


def _without_proofs(clauses: Sequence[Clause]) -> list[Clause]:
    return [clause for clause in clauses if clause.evidence not in PROOFS]


def _roles(context: RolloutContext) -> tuple[frozenset[str], dict[str, str]]:
    """Return the roles that every recording has, and all names of columns."""
    found = [frozenset(r.roles) for r in context.recordings.values()]
    roles = frozenset.intersection(*found) if found else frozenset()
    if context.train is not None:
        lists = {"train_top_ids", "train_top_logs"} if "infer_top_ids" in roles else set()
        roles |= {"train_logs", *lists}
    infer = context.program.infer.recording
    assert infer is not None
    train = context.program.train.recording
    columns = mapped(infer.format, {**dict(infer.columns), **dict(train.columns if train else ())})
    return roles, dict(columns.columns)


def _compares(metrics: set[str]) -> bool:
    return any("train_logs" in NEEDS.get(name, ()) for name in metrics) or not metrics


def _scored(
    context: RolloutContext, progress: Progress
) -> tuple[dict[str, tuple[Rollout, ...]], tuple[Policy, ...]]:
    """Return the rollouts of each slice with both sides, and policies for diagnoses."""
    if context.train is None:
        return dict(context.rows), ()
    every = {id(r): r for found in context.rows.values() for r in found}
    found = score(
        list(every.values()),
        context.train,
        float(context.program.constants.temperature),
        lambda done, total: progress("training kernel", done, total),
        context.train_semantics if context.kept else None,
    )
    scored = dict(zip(every, found.rollouts, strict=True))
    rows = {name: tuple(scored[id(r)] for r in found) for name, found in context.rows.items()}
    return rows, found.policies


def _groups(
    context: RolloutContext, rows: Mapping[str, tuple[Rollout, ...]]
) -> dict[str, tuple[PromptRollouts, ...]]:
    """Return the sampling units of each slice."""
    return {
        name: groups_of(
            context.data_of[name],
            [r for r in context.recordings[context.data_of[name]].rollouts if counts(r)],
            found,
        )
        for name, found in rows.items()
    }


def _runs(
    distinct: Mapping[str, PromptRollouts],
    metrics: set[str],
    context: RolloutContext,
    progress: Progress,
) -> dict[str, RequestRun]:
    runs = {}
    for done, (key, group) in enumerate(distinct.items(), 1):
        runs[key] = run_of(group, metrics, context.seed)
        progress("rollouts", done, len(distinct))
    return runs


def _timing(clauses: Sequence[Clause], groups: Any) -> Timing:
    """Return one timed run for each rollout with stamps, where a clause reads times."""
    read = {name for clause in clauses for name in metrics_of(clause.require)}
    if not read & {"latency", "ttft", "tpot", "throughput"}:
        return Timing()
    runs: list[SamplingUnit] = []
    for group in groups:
        try:
            runs += timed(group)
        except NotMeasurable as error:
            first = group.members[0]
            raise refuse(
                codes.MALFORMED_ROLLOUT,
                f"{group.request.key}, {first.place}: {error}",
                help="stamps are seconds of one clock, one for each sampled token",
            ) from None
    return Timing(tuple(runs))


def _prechecks(
    context: RolloutContext,
    rows: Mapping[str, tuple[Rollout, ...]],
    groups: Mapping[str, tuple[PromptRollouts, ...]],
    metrics: set[str],
    policies: tuple[Policy, ...],
) -> tuple[Precheck, ...]:
    every = {id(r): r for found in rows.values() for r in found}
    infer, train = context.program.infer.recording, context.program.train.recording
    assert infer is not None
    return recorded_prechecks(
        Recorded(
            tuple(every.values()),
            float(context.program.constants.temperature),
            {name: len(found) for name, found in groups.items()},
            context.train_semantics,
            semantics_of(infer.logprobs),
            policies,
            train is not None and train.recomputed,
            _compares(metrics),
            any("train_top_ids" in (NEEDS.get(name) or ()) for name in metrics),
            context.left_out,
            counts_units=bool(metrics - _TIMED),
            kept=context.kept,
        )
    )


def _kernels(context: RolloutContext) -> dict[str, dict[str, object]]:
    """Return the identification of both sides: that of a recorded one by its files."""
    files = {name: found.sha256 for name, found in context.recordings.items()}
    stated: Sequence[tuple[str, KernelRef]] = (
        ("train", context.program.train),
        ("infer", context.program.infer),
    )
    found: dict[str, dict[str, object]] = {}
    for side, reference in stated:
        fingerprint = kernel_fingerprint(reference, context.device)
        if reference.recording is not None:
            fingerprint = {**fingerprint, "recorded": dict(sorted(files.items()))}
        found[side] = {
            "run": reference.run,
            "digest": f"sha256:{fingerprint_digest(fingerprint)}",
            "fingerprint": fingerprint,
        }
    return found


def _joined(context: RolloutContext) -> tuple[str, ...]:
    count = sum(found.joined for found in context.recordings.values())
    return (f"{count} groups share a prompt with another and count with it",) if count else ()


def _census_note(clauses: Sequence[Clause]) -> tuple[str, ...]:
    names = [c.id for c in clauses if c.evidence is EvidenceKind.CENSUS]
    if not names:
        return ()
    return (f"{', '.join(names)}: a census of these rollouts, which says nothing of others",)


def _shares(
    context: RolloutContext, groups: Mapping[str, tuple[PromptRollouts, ...]]
) -> tuple[str, ...]:
    members: dict[int, Rollout] = {}
    prompts: set[tuple[str, str]] = set()
    for name, found in groups.items():
        for member in (member for group in found for member in group.members):
            members[id(member)] = member
            prompts.add((context.data_of[name], member.unit))
    tokens = sum(len(m.tokens) for m in members.values())
    masked = tokens - sum(m.counted for m in members.values())
    units = len(prompts)
    said = f"{len(members)} rollouts of {units} prompts: the prompt is the unit"
    share = (
        f"; {100 * masked / tokens:.3g} % of {tokens} sampled tokens are masked" if tokens else ""
    )
    return (said + share,)
