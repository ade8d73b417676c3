"""The context of a collection: what it reads, loaded and resolved, and what it measures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.ir.tables import Gap
from kcdsl.ir.terms import Clause, KernelRef, Program
from kcdsl.model.files import Artefacts
from kcdsl_backends.empirical.bounds.blocks import Certify
from kcdsl_backends.empirical.bounds.requests import ModelBound
from kcdsl_backends.empirical.diagnoses import Reference
from kcdsl_backends.empirical.metrics.measures import (
    STATE_FUNCTIONS,
    UNMEASURED,
    gradient_function,
)
from kcdsl_backends.empirical.metrics.user import UserFunction, measures_of
from kcdsl_backends.empirical.requirements.clauses import PROOFS, measured_norms, metrics_of
from kcdsl_backends.empirical.sources.kernels import timing
from kcdsl_backends.empirical.sources.kernels.run import BlockInput, Kernel, Plan
from kcdsl_backends.empirical.sources.rollouts.measures import NEEDS
from kcdsl_backends.empirical.table.evidence import CHART_METRICS, SUMMARY_METRICS
from kcdsl_backends.requests import Request, RequestFile


@dataclass(frozen=True, slots=True)
class Setting:
    """Everything an evaluation reads: loaded, resolved, and replaceable by fakes."""

    program: Program
    """The contract as it was compiled, its tables as they are stated."""
    train: Kernel
    infer: Kernel
    block_input: BlockInput
    files: Mapping[str, RequestFile]
    slices: Mapping[str, tuple[Request, ...]]
    encoder: bool
    blocks: frozenset[str]
    weights: Mapping[str, str]
    digests: Mapping[str, str]
    """Digests of the fingerprints of `train` and `infer`."""
    contract: Mapping[str, str]
    model: Mapping[str, Any]
    environment: Mapping[str, Any]
    device: Any
    certify: Certify | None
    seed: int = 0
    looks: int | None = 1
    """How many evaluations of growing data share the error; None: any number (e-processes)."""
    seconds: float = 20.0
    """How long runs may be timed."""
    spoiled: Mapping[str, str] = field(default_factory=dict)
    """Why the evidence on a slice is invalid, whatever was measured: buckets of a table that does
    not have a value for every request."""
    user: tuple[UserFunction, ...] = ()
    """The functions of the user's metrics that the program speaks of."""
    changed_weights: Callable[[], Mapping[str, str]] = dict
    """Names the kernels whose weights are no longer those that were loaded."""
    bound_model: ModelBound | None = None
    """Bounds the drift of the whole model; None where that is not sought."""
    bound_seconds: float = 0.0
    """How long `bound_model` may take over all requests."""
    reference: Reference | None = None
    """Runs the model without roundings and as claimed; None where it cannot be copied."""
    artefacts: Artefacts | None = None
    """The files of the command, with which own code that requests import is recorded."""


def recorded_side(kernel: KernelRef) -> bool:
    """Say whether a kernel is read from a recording."""
    return kernel.recording is not None


def spoiled_slices(found: Iterable[tuple[Gap, Sequence[Request]]]) -> dict[str, str]:
    """Return why a slice has no usable evidence, for tables that miss requests of it."""
    return {
        name: f"{len(rows)} requests, {rows[0].id!r} first, are in no row of the table {gap.table}"
        for gap, rows in found
        if rows
        for name in gap.spoils
    }


Progress = Callable[[str, int, int], None]
"""Told (stage, done, total)."""


def check_metrics(setting: Setting, clauses: Sequence[Clause]) -> None:
    """Refuse a clause whose metric the model or the constants cannot supply."""
    for clause in clauses:
        for name in sorted(metrics_of(clause.require)):
            known = name in measures_of(setting.program)
            missing = UNMEASURED.get(name) if clause.evidence not in PROOFS and not known else None
            roles = ", ".join(NEEDS.get(name, ()))
            help = (
                f"recordings feed it (run: recorded) that have {roles}; or take the clause out"
                if roles
                else "recorded logits feed it (format: logits); or take the clause out"
            )
            problem = _out_of_reach(name, setting) or (missing and (missing, help))
            if problem:
                raise refuse(
                    codes.METRIC_OUT_OF_REACH,
                    f"the clause `{clause.id}` reads `{name}`, but {problem[0]}",
                    help=problem[1],
                )
        for block, _ in sorted(measured_norms(clause.require)):
            if block not in setting.blocks:
                raise refuse(
                    codes.METRIC_OUT_OF_REACH,
                    f"the clause `{clause.id}` measures the block `{block}`, which the model does "
                    "not have",
                    help=f"blocks: {', '.join(sorted(setting.blocks))}",
                )


def _out_of_reach(name: str, setting: Setting) -> tuple[str, str] | None:
    measure = measures_of(setting.program).get(name)
    if measure is None:
        return None
    if setting.encoder and name in timing.GENERATED:
        return "the model is an encoder and generates nothing", "time its passes with `latency`"
    if setting.encoder and not {"logits", "sampled"}.isdisjoint(measure.needs):
        usable = ", ".join(sorted(STATE_FUNCTIONS))
        return "the model is an encoder and has no logits", f"metrics of encoders: {usable}"
    timed = measure.tier == "E" and name != "failure_rate"
    if timed and recorded_side(setting.program.infer):
        return "recorded logits are read, not run", "time the kernel where it runs"
    constants = setting.program.constants
    if name == "grad_bias" and None in (constants.advantage_max, constants.score_norm_max):
        return (
            "the contract does not state its constants",
            "add `constants: {advantage_max: ..., score_norm_max: ...}`",
        )
    return None


def plan_for(setting: Setting, clauses: Sequence[Clause]) -> Plan:
    """Return what to measure: what the clauses read, and the usual drifts of the summary."""
    metrics = {name for clause in clauses for name in metrics_of(clause.require)}
    metrics |= set(SUMMARY_METRICS[setting.encoder])
    measures = measures_of(setting.program)
    if any("sampled" in measures[m].needs for m in metrics if m in measures):
        metrics |= {"importance_ratio", "log_ratio_linf"}
    constants = setting.program.constants
    gradient = None
    if "grad_bias" in metrics:
        assert constants.advantage_max is not None
        assert constants.score_norm_max is not None
        gradient = gradient_function(
            float(constants.advantage_max), float(constants.score_norm_max)
        )
    norms = frozenset(pair for clause in clauses for pair in measured_norms(clause.require))
    return Plan(
        frozenset(metrics),
        float(constants.temperature),
        setting.seed,
        setting.encoder,
        gradient,
        norms,
        tuple(user for user in setting.user if user.metric.name in metrics),
        frozenset() if setting.encoder else frozenset(CHART_METRICS),
    )


def distinct(setting: Setting) -> tuple[Request, ...]:
    """Return every request of the slices, once."""
    found = {r.key: r for requests in setting.slices.values() for r in requests}
    return tuple(found.values())


def kernels_record(setting: Setting) -> dict[str, dict[str, object]]:
    """Return what evidence says of both kernels."""
    stated = (
        ("train", setting.program.train, setting.train),
        ("infer", setting.program.infer, setting.infer),
    )
    return {
        side: {
            "run": reference.run,
            "digest": f"sha256:{setting.digests[side]}",
            "fingerprint": kernel.fingerprint(),
        }
        for side, reference, kernel in stated
    }
