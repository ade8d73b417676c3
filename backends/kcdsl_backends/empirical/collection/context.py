"""The context of a collection: its loaded and resolved inputs, and the plan of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.ir.tables import Gap
from kcdsl.ir.terms import Clause, Program
from kcdsl.metrics import METRICS, UNMEASURED
from kcdsl.model.files import Artefacts
from kcdsl_backends.empirical.bounds.blocks import Certify
from kcdsl_backends.empirical.bounds.requests import ModelBound
from kcdsl_backends.empirical.diagnoses.reference import Reference
from kcdsl_backends.empirical.metrics.measures import STATE_FUNCTIONS, gradient_function
from kcdsl_backends.empirical.metrics.user import UserFunction, measures_of
from kcdsl_backends.empirical.sources.kernels import BlockInput, Kernel, MeasurementPlan
from kcdsl_backends.empirical.table.evidence import (
    CHART_METRICS,
    SUMMARY_METRICS,
    EvidenceTable,
    RequestRun,
)
from kcdsl_backends.empirical.table.requirements import (
    GENERATED,
    PROOFS,
    measured_norms,
    metrics_of,
    unreadable,
)
from kcdsl_backends.requests import Request, RequestFile

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The fields that the contexts of all sources have, and their evidence table."""

    program: Program
    """The compiled contract, with its tables not expanded."""
    contract: Mapping[str, str]
    model: Mapping[str, Any]
    environment: Mapping[str, Any]
    seed: int = 0
    looks: int | None = 1
    """The number of evaluations of growing data that share the error; None: any number
    (e-processes)."""
    spoiled: Mapping[str, str] = field(default_factory=dict)
    """The reasons why the evidence on slices is invalid, whatever was measured: buckets of a table
    without a value for every request."""

    def evidence(
        self, slices: Mapping[str, Sequence[Request]], *, encoder: bool = False, **measured: Any
    ) -> EvidenceTable:
        """Return the evidence of the requests of each slice; `measured` are further fields.

        Raises Refusal for different requests with one key.
        """
        return EvidenceTable(
            program=self.program,
            requests=distinct_requests(slices),
            slices={name: tuple(r.key for r in rows) for name, rows in slices.items()},
            encoder=encoder,
            contract=self.contract,
            model=self.model,
            environment=self.environment,
            spoiled=self.spoiled,
            seed=self.seed,
            looks=self.looks,
            **measured,
        )


class Workers(Protocol):
    """Other processes that run requests: of this machine, or of a cluster."""

    def runs(
        self,
        requests: Sequence[Request],
        decided_by: Mapping[str, str],
        arrived: Callable[[Request, RequestRun], None],
        imported: Callable[[Mapping[str, tuple[str, str]]], None],
    ) -> dict[str, RequestRun]:
        """Return the results of every request, by its key."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelContext(Context):
    """All inputs of an evaluation of kernels: loaded, resolved, replaceable by fakes."""

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
    device: Any
    certify: Certify | None
    seconds: float = 20.0
    """Time limit of the timed runs."""
    user: tuple[UserFunction, ...] = ()
    """The functions of the user's metrics that the program names."""
    changed_weights: Callable[[], Mapping[str, str]] = dict
    """Returns the kernels whose weights have changed since they were loaded."""
    bound_model: ModelBound | None = None
    """Bounds the drift of the whole model; None if no such bounds are wanted."""
    bound_seconds: float = 0.0
    """Time limit of `bound_model` for all requests."""
    reference: Reference | None = None
    """Runs the model without roundings and as claimed; None if it cannot be copied."""
    artefacts: Artefacts | None = None
    """The files of the command, in which imported modules of the contract are recorded."""

    @property
    def requests(self) -> tuple[Request, ...]:
        """Return every request of the slices, once; raises Refusal for different requests with one
        key."""
        return distinct_requests(self.slices)

    @property
    def data(self) -> tuple[dict[str, Any], ...]:
        """Return the records of the request files for the evidence."""
        return tuple(
            {"name": file.name, "sha256": file.sha256, "rows": len(file.requests)}
            for file in self.files.values()
        )

    @property
    def kernels(self) -> dict[str, dict[str, object]]:
        """Return the records of both kernels for the evidence."""
        stated = (
            ("train", self.program.train, self.train),
            ("infer", self.program.infer, self.infer),
        )
        return {
            side: {
                "run": reference.run,
                "digest": f"sha256:{self.digests[side]}",
                "fingerprint": kernel.fingerprint(),
            }
            for side, reference, kernel in stated
        }


def distinct_requests(slices: Mapping[str, Sequence[Request]]) -> tuple[Request, ...]:
    """Return every request of the slices, once.

    Raises Refusal for different requests with one key, whose values would replace each other: the
    id `b:1` of the file `a` and the id `1` of the file `a:b` have the key `a:b:1`.
    """
    found: dict[str, Request] = {}
    for request in (request for rows in slices.values() for request in rows):
        if found.setdefault(request.key, request) != request:
            raise refuse(
                codes.DUPLICATE_REQUEST,
                f"two requests have the key `{request.key}`",
                help="rename a data file of the contract, or give one of them another id",
            )
    return tuple(found.values())


def spoiled_slices(found: Iterable[tuple[Gap, Sequence[Request]]]) -> dict[str, str]:
    """Return the reasons why slices have no usable evidence: tables lack some of their requests."""
    return {
        name: f"{len(rows)} requests, {rows[0].id!r} first, are in no row of the table {gap.table}"
        for gap, rows in found
        if rows
        for name in gap.spoils
    }


def check_metrics(context: KernelContext, clauses: Sequence[Clause]) -> None:
    """Refuse a clause whose metric the model or the constants cannot supply."""
    for clause in clauses:
        for name in sorted(metrics_of(clause.require)):
            known = name in measures_of(context.program)
            missing = UNMEASURED.get(name) if clause.evidence not in PROOFS and not known else None
            definition = METRICS.get(name)
            roles = ", ".join(definition.columns or () if definition is not None else ())
            help = (
                f"recordings feed it (run: recorded) that have {roles}; or take the clause out"
                if roles
                else "recorded logits feed it (format: logits); or take the clause out"
            )
            problem = _out_of_reach(name, context) or (missing and (missing, help))
            if problem:
                raise unreadable(clause, f"`{name}`", f"but {problem[0]}", problem[1])
        for block, _ in sorted(measured_norms(clause.require)):
            if block not in context.blocks:
                raise refuse(
                    codes.METRIC_OUT_OF_REACH,
                    f"the clause `{clause.id}` measures the block `{block}`, which the model does "
                    "not have",
                    help=f"blocks: {', '.join(sorted(context.blocks))}",
                )


def _out_of_reach(name: str, context: KernelContext) -> tuple[str, str] | None:
    measure = measures_of(context.program).get(name)
    if measure is None:
        return None
    if context.encoder and name in GENERATED:
        return "the model is an encoder and generates nothing", "time its passes with `latency`"
    if context.encoder and not {"logits", "sampled"}.isdisjoint(measure.needs):
        usable = ", ".join(sorted(STATE_FUNCTIONS))
        return "the model is an encoder and has no logits", f"metrics of encoders: {usable}"
    timed = measure.tier == "E" and name != "failure_rate"
    if timed and context.program.infer.recording is not None:
        return "recorded logits are read, not run", "time the kernel where it runs"
    constants = context.program.constants
    if name == "grad_bias" and None in (constants.advantage_max, constants.score_norm_max):
        return (
            "the contract does not state its constants",
            "add `constants: {advantage_max: ..., score_norm_max: ...}`",
        )
    return None


def plan_for(context: KernelContext, clauses: Sequence[Clause]) -> MeasurementPlan:
    """Return the plan of measurements: the metrics of the clauses, and those of the summary."""
    metrics = {name for clause in clauses for name in metrics_of(clause.require)}
    metrics |= set(SUMMARY_METRICS[context.encoder])
    measures = measures_of(context.program)
    if any("sampled" in measures[m].needs for m in metrics if m in measures):
        metrics |= {"importance_ratio", "log_ratio_linf"}
    constants = context.program.constants
    gradient = None
    if "grad_bias" in metrics:
        assert constants.advantage_max is not None
        assert constants.score_norm_max is not None
        gradient = gradient_function(
            float(constants.advantage_max), float(constants.score_norm_max)
        )
    norms = frozenset(pair for clause in clauses for pair in measured_norms(clause.require))
    return MeasurementPlan(
        frozenset(metrics),
        float(constants.temperature),
        context.seed,
        context.encoder,
        gradient,
        norms,
        tuple(user for user in context.user if user.metric.name in metrics),
        frozenset() if context.encoder else frozenset(CHART_METRICS),
    )
