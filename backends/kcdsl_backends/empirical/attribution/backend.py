"""The attribution of a contract's drift: load, run every hybrid, swap blocks, bound, assemble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import torch
from torch import nn

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.diagnostics.report import suggest
from kcdsl.ir.terms import KernelRef, Program
from kcdsl.metrics import MetricDefinition, registry_of
from kcdsl.model.architecture import Model
from kcdsl.verdict.studies.attribution import Attribution, Envelope, Layers
from kcdsl_backends.empirical.attribution import sources
from kcdsl_backends.empirical.attribution.blocks import swap_layers
from kcdsl_backends.empirical.attribution.document import AttributionSubject, assemble
from kcdsl_backends.empirical.attribution.envelopes import envelopes, interval_bounds, most_of
from kcdsl_backends.empirical.attribution.hybrids import Batches, Pair
from kcdsl_backends.empirical.attribution.measurement import (
    FAILURES,
    AttributedMetric,
    MeasuredCoalitions,
    failure_words,
    measure,
)
from kcdsl_backends.empirical.attribution.shapley import Statistic
from kcdsl_backends.empirical.collection.context import KernelContext, Progress
from kcdsl_backends.empirical.collection.inputs import prepare
from kcdsl_backends.empirical.diagnoses.kernels import Subject as Diagnosed
from kcdsl_backends.empirical.diagnoses.kernels import run_prechecks
from kcdsl_backends.empirical.diagnoses.model import POSITIONS, PROBES, blocking
from kcdsl_backends.empirical.diagnoses.probes import chosen
from kcdsl_backends.empirical.metrics.full_logits import TIER_A
from kcdsl_backends.empirical.metrics.measures import (
    PROBABILITY_FUNCTIONS,
    SAMPLED_FUNCTIONS,
    STATE_FUNCTIONS,
)
from kcdsl_backends.empirical.metrics.user import measures_of
from kcdsl_backends.empirical.sources.kernels import Kernel, MeasurementPlan
from kcdsl_backends.empirical.sources.kernels.torch_kernel import load_kernel
from kcdsl_backends.empirical.table.evidence import SamplingUnit
from kcdsl_backends.process import stdout_to_stderr, threads_for
from kcdsl_backends.requests import Request

DEFAULT_METRIC = {False: "kl", True: "hidden_l2"}
"""The default metric of language models (False) and of encoders (True)."""
BOUNDED = 2
"""Number of requests on which blocks are bounded."""
LENGTH = 32
"""Most tokens of such a request; all are cut to one length, so that a block is exported once."""


@stdout_to_stderr
def attribute(
    program: Program,
    base: Path,
    *,
    device: str = "cpu",
    metric: str | None = None,
    statistic: Statistic = "mean",
    slice_name: str | None = None,
    batch: int = 4,
    bounds: bool = True,
    seed: int = 0,
    progress: Progress = lambda stage, done, total: None,
) -> Attribution:
    """Split the drift between the kernels of a contract, whose folder is `base`, among its sources.

    Args:
        program: the compiled contract.
        base: the folder that its paths are relative to.
        device: "cpu" or "cuda".
        metric: the metric to split; None for `kl`, of encoders for `hidden_l2`.
        statistic: reduces token values to one number.
        slice_name: only the requests of this slice; None for those of all slices.
        batch: how many requests the inference side runs together; 1 for each alone.
        bounds: compare the drift of blocks with the certified bound of each source alone.
        seed: of sampled tokens and of resampling.
        progress: called with (stage, done, total).

    Raises:
        Refusal: the model, the data or a kernel cannot be used; the metric has no values to split
            (KC691); there is no drift to split (KC690); a kernel drifts beyond its certified bound
            (KC625).
    """
    if program.infer.service is not None:
        raise _not_divisible(program.infer.run, "inference")
    if program.infer.checkpoint is not None:
        raise refuse(
            codes.NO_ATTRIBUTION,
            "the inference kernel has a checkpoint of its own: its drift is not split yet",
            help="`kcdsl evaluate` measures it block by block",
        )
    context = prepare(
        program,
        base,
        device=device,
        slices=() if slice_name is None else (slice_name,),
        seed=seed,
        crosscheck=False,
        progress=progress,
    )
    if not isinstance(context, KernelContext):
        raise _not_divisible(program.infer.run, "inference")
    name, measure_ = _metric(program, metric, context.encoder)
    model = getattr(context.train, "model", None)
    if not isinstance(model, Model):
        raise _not_divisible(program.train.run, "training")
    place = torch.device(device)

    def load(ref: KernelRef) -> Kernel:
        return load_kernel(ref, model, place, base)

    pair = Pair(program.train, program.infer, context.train, context.infer, model, load)
    plan = MeasurementPlan(
        frozenset({name}),
        float(program.constants.temperature),
        seed,
        context.encoder,
        user=tuple(user for user in context.user if user.metric.name == name),
    )
    padding = model.built_in and not context.encoder
    batches = Batches(batch, padding) if batch > 1 else None
    requests = context.requests
    subject = AttributedMetric(pair, requests, plan, name, measure_.better, batches)
    with threads_for(_largest(model, requests)):
        found = measure(subject, progress)
        frame = AttributionSubject(
            contract=context.contract,
            kernels={"train": program.train.run, "infer": program.infer.run},
            slice=slice_name,
            metric=name,
            statistic=statistic,
            unit=_unit(program, name),
            better=measure_.better,
            batch=batch,
            seed=seed,
            settings=sources.settings(program.train, program.infer),
            blocked=_blocked(context, requests, plan.temperature),
        )
        return conclude(subject, frame, found, bounds=bounds, progress=progress)


def conclude(
    subject: AttributedMetric,
    frame: AttributionSubject,
    measured: MeasuredCoalitions,
    *,
    bounds: bool,
    progress: Progress = lambda stage, done, total: None,
) -> Attribution:
    """Swap and bound the blocks, then assemble the document."""
    notes = list(frame.notes)
    layers, why = _layers(subject, frame.statistic, progress)
    if why is not None:
        notes.append(f"blocks were not swapped: {why}")
    rows: tuple[Envelope, ...] = ()
    if not bounds:
        notes.append("bounds were disabled, so no source is excluded")
    elif frame.blocked is None:
        rows, why = _bounds(subject, measured, progress)
        if why is not None:
            notes.append(f"nothing is excluded by bounds: {why}")
    return assemble(replace(frame, notes=tuple(notes)), measured, layers, rows)


def _largest(model: Model, requests: Sequence[Request]) -> int:
    """Estimate the number of elements of the largest linear output on these requests."""
    widths = [m.out_features for m in model.module.modules() if isinstance(m, nn.Linear)]
    return max(widths, default=1) * max((r.length for r in requests), default=1)


def _not_divisible(run: str, side: str) -> Refusal:
    return refuse(
        codes.NO_ATTRIBUTION,
        f"the {side} kernel {run} cannot be taken apart: no kernel between both sides can be run",
        help="attribute the drift of an adapter that runs the same program here",
    )


def _layers(
    subject: AttributedMetric, statistic: Statistic, progress: Progress
) -> tuple[Layers | None, str | None]:
    plan = subject.plan
    if subject.metric in STATE_FUNCTIONS:  # such a metric reads states only
        plan = replace(plan, encoder=True)
    requests = tuple(_cut(r, POSITIONS) for r in chosen(subject.requests)[:PROBES])
    try:
        return swap_layers(
            replace(subject, plan=plan, requests=requests), statistic, progress
        ), None
    except FAILURES as error:
        return None, failure_words(error)


def _bounds(
    subject: AttributedMetric, measured: MeasuredCoalitions, progress: Progress
) -> tuple[tuple[Envelope, ...], str | None]:
    probed = chosen(subject.requests)[:BOUNDED]
    length = min(LENGTH, *(r.length for r in probed))
    requests = [_cut(r, length) for r in probed]
    make = interval_bounds(subject.pair.model)
    encoder, temperature = subject.plan.encoder, Fraction(subject.plan.temperature)
    meaning = (lambda limits: None) if encoder else most_of(subject.metric, temperature)
    try:
        return envelopes(subject.pair, measured.players, requests, make, progress, meaning), None
    except FAILURES as error:
        if isinstance(error, Refusal) and error.diagnostics[0].code == codes.ABOVE_CERTIFIED:
            raise
        return (), failure_words(error)


def _cut(request: Request, length: int) -> Request:
    return replace(request, tokens=request.tokens[:length])


def _blocked(context: KernelContext, requests: Sequence[Request], temperature: float) -> str | None:
    """Return the set-up mistake that explains the drift; None if none was found."""
    if context.spoiled:
        name, why = next(iter(context.spoiled.items()))
        return f"{name}: {why}"
    subject = Diagnosed(
        context.train,
        context.infer,
        tuple(requests),
        context.encoder,
        temperature,
        {**context.weights, **context.changed_weights()},
        {name: len(rows) for name, rows in context.slices.items()},
        {},
        context.reference,
    )
    units = [SamplingUnit(r.key, r.length) for r in requests]
    return blocking(run_prechecks(subject, units))


def _metric(program: Program, wanted: str | None, encoder: bool) -> tuple[str, MetricDefinition]:
    """Return the name and definition of the metric. Refuse a metric that cannot be split."""
    splittable = _splittable_metrics(program, encoder)
    asked = DEFAULT_METRIC[encoder] if wanted is None else wanted
    definition = registry_of(program).find(asked)
    name = asked if definition is None else definition.name
    if name in splittable:
        return name, measures_of(program)[name]
    why = (
        "there is no such metric"
        if definition is None
        else "it has no values of single positions or requests that running kernels gives"
    )
    raise refuse(
        codes.NOT_ATTRIBUTABLE,
        f"the metric {name!r} cannot be attributed: {why}",
        help=suggest(name, sorted(splittable), "metrics"),
    )


def _splittable_metrics(program: Program, encoder: bool) -> frozenset[str]:
    user = {metric.name for metric in program.metrics}
    if encoder:
        return frozenset(STATE_FUNCTIONS) | user
    sampled = frozenset(SAMPLED_FUNCTIONS) | frozenset(PROBABILITY_FUNCTIONS)
    return frozenset(TIER_A) | sampled | frozenset(STATE_FUNCTIONS) | user


def _unit(program: Program, name: str) -> str:
    found = registry_of(program).find(name)
    return "1" if found is None else str(found.dimension)
