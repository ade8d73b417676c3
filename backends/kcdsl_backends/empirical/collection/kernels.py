"""Collection from local kernels: run both on every request, check, cross-check, time.

The noise floor is the drift of the training kernel from itself under another batching: the same
tokens run alone, in a batch, in the other order and with padding after them. A threshold below it
demands that the inference kernel be nearer to the training kernel than that is to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Clause
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.bounds.blocks import compare_request, compared_requests, summarise
from kcdsl_backends.empirical.bounds.requests import certified_units
from kcdsl_backends.empirical.collection.context import (
    KernelContext,
    Progress,
    Workers,
    check_metrics,
    plan_for,
)
from kcdsl_backends.empirical.collection.recordings import (
    NOTHING_RAN,
    of_recordings,
    recorded_sides,
)
from kcdsl_backends.empirical.collection.resume import OwnCode, input_digests, resume
from kcdsl_backends.empirical.diagnoses.kernels import Subject, run_prechecks
from kcdsl_backends.empirical.diagnoses.probes import regrouped
from kcdsl_backends.empirical.sources.kernels import Kernel, MeasurementPlan, timing
from kcdsl_backends.empirical.sources.kernels.run import compared, run_request
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint
from kcdsl_backends.empirical.table.evidence import (
    BlockComparison,
    EvidenceTable,
    RequestRun,
    SamplingUnit,
    Timing,
)
from kcdsl_backends.empirical.table.requirements import (
    DEFAULT_BLOCK,
    block_place,
    drift_blocks,
    is_runtime,
    norm_name,
    reads_tokens,
)
from kcdsl_backends.requests import Request

_GENERATION = (
    f"times of tokens are of {timing.NEW_TOKENS} likeliest tokens after each request (fewer where"
    " the model has no room), without a cache of keys and values: a decode step runs the whole"
    " sequence again, so tpot is an upper estimate of what a cache would give"
)


@dataclass(frozen=True, slots=True)
class KernelSource:
    """Both kernels of a contract on this machine, or recorded logits in place of one or both.

    Results in `checkpoint` are not run again. `spread` runs requests in other processes, None in
    this one; all bits are the same.
    """

    context: KernelContext
    checkpoint: RunCheckpoint | None = None
    spread: Workers | None = None

    @property
    def slices(self) -> Collection[str]:
        """Return the names of the slices."""
        return self.context.slices

    def check(self, clauses: Sequence[Clause]) -> None:
        """Refuse a clause whose metric the model or the constants cannot supply."""
        check_metrics(self.context, clauses)

    def fill(self, clauses: Sequence[Clause], progress: Progress) -> EvidenceTable:
        """Run both kernels, compare with certified bounds, check, and time.

        Raises Refusal if a measured block drift is above its certified bound.
        """
        context, plan = self.context, plan_for(self.context, clauses)
        runs = self._runs(plan, progress)
        usable = [r for r in context.requests if runs[r.key].unit.failure is None]
        measured_blocks = {block for block, _ in plan.norms}
        comparisons, notes = self._crosschecks(usable, measured_blocks, progress)
        certified, bounding = certified_units(
            context.bound_model,
            context.requests,
            runs,
            comparisons,
            seconds=context.bound_seconds,
            temperature=context.program.constants.temperature,
            encoder=context.encoder,
            progress=lambda done, total: progress("certified bounds", done, total),
        )
        return context.evidence(
            context.slices,
            encoder=context.encoder,
            runs=runs,
            measured=plan.metrics | {norm_name(*pair) for pair in plan.norms},
            kernels=context.kernels,
            data=context.data,
            prechecks=of_recordings(context.program, prechecks_of(context, runs, plan)),
            timing=self._timing(clauses, progress),
            crosschecks=tuple(summarise(block, found) for block, found in comparisons.items()),
            certified=certified,
            bounding=bounding,
            floor=noise_floor(
                context.train,
                usable,
                plan,
                lambda done, total: progress("noise floor", done, total),
            ),
            notes=(
                *notes,
                *((_GENERATION,) if reads_tokens(clauses) else ()),
                *(() if self.checkpoint is None else self.checkpoint.notes),
                *((NOTHING_RAN,) if recorded_sides(context.program) == 2 else ()),
            ),
        )

    def _runs(self, plan: MeasurementPlan, progress: Progress) -> dict[str, RequestRun]:
        context, checkpoint, requests = self.context, self.checkpoint, self.context.requests
        runs = {} if checkpoint is None else resume(checkpoint, context, plan, requests)
        done = len(runs)
        progress("both kernels", done, len(requests))
        code = OwnCode(context.artefacts, checkpoint)

        def arrived(request: Request, run: RequestRun) -> None:
            nonlocal done
            code.keep()
            if checkpoint is not None:
                checkpoint.keep_run(request, run)
            done += 1
            progress("both kernels", done, len(requests))

        left = [request for request in requests if request.key not in runs]
        if self.spread is not None:
            decided_by = input_digests(context, plan, requests)
            runs |= self.spread.runs(left, decided_by, arrived, code.imported)
        else:
            for request in left:
                run = run_request(request, context.train, context.infer, plan, context.block_input)
                runs[request.key] = run
                arrived(request, run)
        return {request.key: runs[request.key] for request in requests}

    def _crosschecks(
        self, usable: Sequence[Request], measured: Collection[str], progress: Progress
    ) -> tuple[dict[str, list[BlockComparison]], tuple[str, ...]]:
        """Compare blocks with their bounds: those that clauses measure on all requests, others on
        some."""
        context, checkpoint = self.context, self.checkpoint
        if context.certify is None:
            return {}, ("no certified bounds were available, so nothing was cross-checked",)
        program = expand_tables(context.program)
        named = drift_blocks(program)
        absent = [b for b in named if b not in (*context.blocks, "model", DEFAULT_BLOCK)]
        if absent:
            raise refuse(
                codes.UNKNOWN_BLOCK,
                f"a clause names the block {absent[0]}, which the model does not have",
                help=f"blocks: {', '.join(sorted(context.blocks))}",
                span=block_place(program, absent[0]),
            )
        checks: dict[str, list[BlockComparison]] = {}
        notes: list[str] = []
        for block in named if usable else ():
            if block not in context.blocks or block == "model":
                continue
            found = checks[block] = []
            chosen = usable if block in measured else compared_requests(usable)
            for done, request in enumerate(chosen, 1):
                known = None if checkpoint is None else checkpoint.comparison(block, request)
                compared = known or compare_request(
                    request,
                    block,
                    context.train,
                    context.infer,
                    context.block_input,
                    context.certify,
                )
                if checkpoint is not None and known is None:
                    checkpoint.keep_comparison(block, compared)
                found.append(compared)
                progress(f"cross-check {block}", done, len(chosen))
            if len(chosen) < len(usable):
                notes.append(
                    f"{block}: compared with its certified bound on {len(chosen)} of "
                    f"{len(usable)} requests; no clause measures its drift"
                )
            beyond = sum(not math.isfinite(compared.certified) for compared in found)
            if beyond:
                notes.append(
                    f"{block}: {beyond} of {len(found)} requests have no certified bound to be "
                    "compared with: too long, or too coarse"
                )
        return checks, tuple(notes) if checks else ("no block could be cross-checked",)

    def _timing(self, clauses: Sequence[Clause], progress: Progress) -> Timing:
        context, kernel = self.context, self.context.infer
        timed = [clause for clause in clauses if is_runtime(clause)]
        chosen, rounds = timing.chosen_rounds(timed, context.slices)
        if not chosen:
            return Timing()
        return timing.time_requests(
            lambda tokens: kernel.forward(kernel.tokens(tokens)),
            chosen,
            rounds=rounds,
            seconds=context.seconds,
            device=context.device,
            generate=timing.greedy(kernel) if reads_tokens(timed) else None,
            progress=lambda done, total: progress("timed runs", done, total),
        )


def prechecks_of(
    context: KernelContext,
    runs: Mapping[str, RequestRun],
    plan: MeasurementPlan,
    requests: Sequence[Request] | None = None,
) -> tuple[Precheck, ...]:
    """Return the outcomes of the preconditions, on probes among the requests."""
    requests = context.requests if requests is None else requests
    subject = Subject(
        context.train,
        context.infer,
        tuple(requests),
        context.encoder,
        plan.temperature,
        {**context.weights, **context.changed_weights()},
        {name: len(rows) for name, rows in context.slices.items()},
        {key: run.nonfinite for key, run in runs.items()},
        context.reference,
    )
    return run_prechecks(subject, [runs[r.key].unit for r in requests])


# --- noise floor ---------------------------------------------------------------------------------


REQUESTS = 8
"""Number of the longest requests that are regrouped, each with the next one."""
_OF_FORMATS = frozenset({"ulp_max"})
"""Metrics that depend on the format of the logits, which are widened here."""


def noise_floor(
    train: Kernel,
    requests: Sequence[Request],
    plan: MeasurementPlan,
    progress: Callable[[int, int], None],
) -> dict[str, SamplingUnit]:
    """Return the drift of the training kernel from itself, by request and metric.

    The values of a request are the concatenated values of its regroupings. Requests that cannot be
    batched are left out.
    """
    longest = sorted(requests, key=lambda r: (-r.length, r.key))[:REQUESTS]
    chosen = [request for request in longest if request.length >= 2]
    forward = train.hidden if plan.encoder else train.logits
    found: dict[str, SamplingUnit] = {}
    for done, request in enumerate(chosen if len(chosen) > 1 else (), 1):
        other = chosen[done % len(chosen)]
        moved = regrouped((request, other), forward, padding=not plan.encoder)
        if moved is not None:
            found[request.key] = _unit(request, *moved, plan)
        progress(done, len(chosen))
    return found


def _unit(
    request: Request, alone: Tensor, others: Mapping[str, Tensor], plan: MeasurementPlan
) -> SamplingUnit:
    part = replace(request, tokens=request.tokens[: alone.shape[0]])
    with torch.no_grad():
        parts = [compared(part, alone, rows, plan) for rows in others.values()]
    names = parts[0].keys() - _OF_FORMATS
    values = {name: np.concatenate([part[name] for part in parts]) for name in sorted(names)}
    return SamplingUnit(request.key, part.length, values)
