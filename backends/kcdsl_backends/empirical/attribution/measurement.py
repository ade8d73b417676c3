"""Running every coalition of sources: the kernels between train and infer, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl_backends.empirical.attribution import sources
from kcdsl_backends.empirical.attribution.hybrids import (
    Batches,
    Choices,
    Hybrid,
    Known,
    Outputs,
    Pair,
    RequestOutputs,
    RunMode,
    equal_choices,
    hybrid,
    run_all,
)
from kcdsl_backends.empirical.attribution.shapley import Array, CoalitionColumn, column
from kcdsl_backends.empirical.collection.context import Progress
from kcdsl_backends.empirical.decision.repeats import repeated
from kcdsl_backends.empirical.sources.kernels import MeasurementPlan, tensor_digest
from kcdsl_backends.empirical.sources.kernels.run import run_request
from kcdsl_backends.requests import Request

FAILURES = (RuntimeError, ValueError, ArithmeticError, Refusal)
"""Errors of a kernel that cannot run, or whose values are not finite."""
HELD = 2**27
"""Number of output elements of the training kernel that are kept (1 GiB); others are run again."""


@dataclass(frozen=True, slots=True)
class AttributedMetric:
    """A metric of two kernels over some requests, to be attributed.

    `batches` None: requests are run alone on both sides.
    """

    pair: Pair
    requests: tuple[Request, ...]
    plan: MeasurementPlan
    metric: str
    better: str
    batches: Batches | None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the outputs to compute: "logits", "hidden", or both."""
        logits = ("logits",) if self.plan.needs_logits else ()
        return (*logits, *(("hidden",) if self.plan.needs_hidden else ()))


@dataclass(frozen=True, slots=True)
class Coalition:
    """A hybrid: the sources that it takes from infer, and its column or the reason for none."""

    taken: tuple[str, ...]
    column: CoalitionColumn | None
    reason: str | None = None
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredCoalitions:
    """The columns of all coalitions.

    `players` are the sources that differ, by bit of the masks of `coalitions`; `missing` gives the
    reason for each other source. `infer` is the column of infer itself, `noise` that of a second
    run of train, None if it gave the same bits.
    """

    players: tuple[str, ...]
    coalitions: Mapping[int, Coalition]
    missing: Mapping[str, str]
    infer: CoalitionColumn
    noise: CoalitionColumn | None

    @property
    def columns(self) -> dict[int, CoalitionColumn]:
        """Return the columns of the coalitions that ran."""
        return {m: c.column for m, c in self.coalitions.items() if c.column is not None}


@dataclass(slots=True)
class _TrainOutputs:
    """The outputs of the training kernel, kept up to a total size."""

    subject: AttributedMetric
    held: dict[str, Outputs] = field(default_factory=dict)
    choices: dict[str, Choices] = field(default_factory=dict)
    capacity: int = HELD

    def fill(self) -> None:
        mode = RunMode(self.subject.parts)
        for ran in run_all(self.subject.pair.train, self.subject.requests, mode):
            self.choices[ran.request.key] = ran.choices
            size = sum(out.numel() for out in ran.outputs.values())
            if size <= self.capacity:
                self.held[ran.request.key] = ran.outputs
                self.capacity -= size

    def outputs(self, request: Request) -> Outputs:
        if request.key in self.held:
            return self.held[request.key]
        again = run_all(self.subject.pair.train, [request], RunMode(self.subject.parts))
        return next(iter(again)).outputs


def measure(
    subject: AttributedMetric, progress: Progress = lambda stage, done, total: None
) -> MeasuredCoalitions:
    """Run every coalition.

    Raises Refusal (KC690) if the outputs of a kernel for a request are not finite: there is no
    drift to split.
    """
    pair = subject.pair
    if not subject.requests:
        raise refuse(
            codes.NO_ATTRIBUTION,
            "there are no requests, so nothing was measured that could be attributed",
            help="choose a slice that has requests",
        )
    base = _TrainOutputs(subject)
    _or_refuse("train", base.fill)
    own = sources.different(pair.train_ref, pair.infer_ref)
    batches, no_batch = _usable_batches(subject)
    chosen, infer_column = _infer(subject, base, batches)
    no_routing = _why_no_routing(subject, base, chosen)
    missing = {
        source: why
        for source, why in ((sources.BATCH, no_batch), (sources.ROUTING, no_routing))
        if why is not None
    }
    players = (*own, *(s for s in (sources.BATCH, sources.ROUTING) if s not in missing))
    train_runs = (RequestOutputs(r, base.outputs(r), ()) for r in subject.requests)
    coalitions = {0: Coalition((), _column(subject, base, train_runs))}
    if players:
        coalitions[(1 << len(players)) - 1] = Coalition(players, infer_column)
    numeric = sum(1 << i for i, player in enumerate(players) if player in own)
    every = sorted(range(1 << len(players)), key=lambda mask: (mask & numeric, mask))
    todo = [mask for mask in every if mask not in coalitions]  # grouped by kernel
    loaded: tuple[frozenset[str], Hybrid] | None = None
    for done, mask in enumerate(todo, 1):
        taken = tuple(p for i, p in enumerate(players) if mask >> i & 1)
        wanted = frozenset(taken) & frozenset(own)
        try:
            if loaded is None or loaded[0] != wanted:
                loaded = None  # free the kernel before the next is loaded
                loaded = (wanted, hybrid(pair, wanted))
            experts = chosen if sources.ROUTING in taken else base.choices
            mode = RunMode(
                subject.parts,
                batches if sources.BATCH in taken else None,
                experts if any(base.choices.values()) else None,
            )
            found = _column(subject, base, run_all(loaded[1].kernel, subject.requests, mode))
            coalitions[mask] = Coalition(taken, found, simulated=loaded[1].simulated)
        except FAILURES as error:
            coalitions[mask] = Coalition(taken, None, failure_words(error))
        progress("kernels between", done, len(todo))
    return MeasuredCoalitions(players, coalitions, missing, infer_column, _noise(subject, base))


def _usable_batches(subject: AttributedMetric) -> tuple[Batches | None, str | None]:
    """Return the batches if the inference kernel takes them, else the reason."""
    batches = subject.batches
    if batches is None:
        return None, "requests are run alone on both sides"
    first = list(next(iter(batches.groups(subject.requests))))
    try:
        list(run_all(subject.pair.infer, first, RunMode(subject.parts, batches)))
    except FAILURES as error:
        return None, f"infer takes no batches: {failure_words(error)}"
    return batches, None


def _infer(
    subject: AttributedMetric, base: _TrainOutputs, batches: Batches | None
) -> tuple[dict[str, Choices], CoalitionColumn]:
    """Return the experts that infer chooses, and its column."""
    choices: dict[str, Choices] = {}

    def runs() -> Iterable[RequestOutputs]:
        for ran in run_all(subject.pair.infer, subject.requests, RunMode(subject.parts, batches)):
            choices[ran.request.key] = ran.choices
            yield ran

    found: list[CoalitionColumn] = []
    _or_refuse("infer", lambda: found.append(_column(subject, base, runs())))
    return choices, found[0]


def _why_no_routing(
    subject: AttributedMetric, base: _TrainOutputs, chosen: Mapping[str, Choices]
) -> str | None:
    """Return why the choice of experts is no source; None if the sides choose different experts."""
    keys = [r.key for r in subject.requests]
    if not any(base.choices.values()):
        return "the model chooses no experts"
    if equal_choices([base.choices[k] for k in keys], [chosen[k] for k in keys]):
        return "both sides choose the same experts for every token"
    return None


def _column(
    subject: AttributedMetric, base: _TrainOutputs, runs: Iterable[RequestOutputs]
) -> CoalitionColumn:
    """Return the column of a kernel. Requests with the same tokens form one unit with the values of
    all, since they are not independent."""
    values = {
        ran.request.key: values_between(
            subject, ran.request, base.outputs(ran.request), ran.outputs
        )
        for ran in runs
    }
    requests = subject.requests
    units = [
        np.concatenate([values[requests[i].key] for i in own])
        for own in repeated([request.tokens for request in requests])
    ]
    return column(units, subject.better, subject.metric)


def values_between(
    subject: AttributedMetric, request: Request, train: Outputs, other: Outputs
) -> Array:
    """Return the values of the metric for a request from the outputs of both kernels.

    Raises ValueError if it has none.
    """
    unit = run_request(request, Known(train), Known(other), subject.plan, _no_block).unit
    why = unit.failure or unit.problems.get(subject.metric)
    if why is None and subject.metric not in unit.values:
        why = f"it has no value of {subject.metric}"
    if why is not None:
        raise ValueError(f"request {request.key}: {why}")
    return unit.values[subject.metric]


def _no_block(request: Request, block: str) -> Tensor:
    raise ValueError(f"{block} of {request.key} is not measured")


def _noise(subject: AttributedMetric, base: _TrainOutputs) -> CoalitionColumn | None:
    """Return the column of a second run of train; None if all bits equal those of the first."""
    again = list(run_all(subject.pair.train, subject.requests, RunMode(subject.parts)))
    same = all(
        tensor_digest(out) == tensor_digest(base.outputs(ran.request)[name])
        for ran in again
        for name, out in ran.outputs.items()
    )
    return None if same else _column(subject, base, again)


def _or_refuse(side: str, work: Callable[[], None]) -> None:
    try:
        work()
    except FAILURES as error:
        raise refuse(
            codes.NO_ATTRIBUTION,
            f"the drift of {side} has no value that could be split: {failure_words(error)}",
            help="`kcdsl evaluate` says what is wrong with which request",
        ) from error


def failure_words(error: BaseException) -> str:
    """Return the first line of the message of an error."""
    if isinstance(error, Refusal):
        return error.diagnostics[0].message
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
