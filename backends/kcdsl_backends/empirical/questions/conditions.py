"""E2: the same kernels on several devices, lengths, batch sizes and numbers of streams.

A cell takes the requests with at least L tokens, cut to L, so that they run in batches without
padding. The inference kernel runs batches of b in c threads at a time; the training kernel runs
each request alone. Units are counted as in `kcdsl evaluate`, and its preconditions are checked in
every cell, on the requests of the cell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.formulas import walk
from kcdsl.ir.obligations import named_slices, obligations_of
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Clause, EvidenceKind, HasFields, Program
from kcdsl.model.adapters import find_adapter
from kcdsl.model.attention import SDP_BACKENDS
from kcdsl_backends.empirical.collection.context import (
    KernelContext,
    Progress,
    check_metrics,
    plan_for,
)
from kcdsl_backends.empirical.collection.kernels import prechecks_of
from kcdsl_backends.empirical.decision.comparison import narrow_reasons
from kcdsl_backends.empirical.decision.judgement import evidence_kind
from kcdsl_backends.empirical.decision.repeats import by_prompt
from kcdsl_backends.empirical.decision.report import why_blocked
from kcdsl_backends.empirical.decision.results import DecisionCase, decide_all
from kcdsl_backends.empirical.metrics.user import measures_of
from kcdsl_backends.empirical.questions.cells import (
    Prepare,
    cells_in,
    failed_checks,
    manifest,
    pass_record,
)
from kcdsl_backends.empirical.sources.kernels import Kernel, MeasurementPlan
from kcdsl_backends.empirical.sources.kernels.engines import exact_settings
from kcdsl_backends.empirical.sources.kernels.run import run_request
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.empirical.table.evidence import RequestRun, SliceData
from kcdsl_backends.empirical.table.requirements import (
    PROOFS,
    measured_norms,
    metrics_of,
    split,
)
from kcdsl_backends.requests import Request


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of the grid. `lengths` are in tokens; `concurrency` counts threads that run
    batches."""

    devices: tuple[str, ...] = ("cpu", "cuda")
    lengths: tuple[int, ...] = (16, 32, 64, 128)
    batches: tuple[int, ...] = (1, 2, 4, 8)
    concurrency: tuple[int, ...] = (1, 2, 4)

    @staticmethod
    def of(
        devices: Sequence[str],
        lengths: Sequence[int],
        batches: Sequence[int],
        concurrency: Sequence[int],
    ) -> Axes:
        """Return sorted axes; empty ones take the defaults."""
        defaults = Axes()
        return Axes(
            tuple(sorted(set(devices))) or defaults.devices,
            tuple(sorted(set(lengths))) or defaults.lengths,
            tuple(sorted(set(batches))) or defaults.batches,
            tuple(sorted(set(concurrency))) or defaults.concurrency,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "device": list(self.devices),
            "length": list(self.lengths),
            "batch": list(self.batches),
            "concurrency": list(self.concurrency),
        }


@dataclass(frozen=True, slots=True)
class _KnownOutputs:
    """A kernel whose logits and states for one request are known already."""

    kernel: TorchKernel
    known: Mapping[str, Tensor]

    def logits(self, ids: Any) -> Tensor:
        return self.known["logits"]

    def hidden(self, ids: Any) -> Tensor:
        return self.known["hidden"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def run_grid(
    prepare: Prepare,
    program: Program,
    base: Path,
    folder: Path,
    *,
    axes: Axes = Axes(),
    seed: int = 0,
    fresh: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Return the document of E2: a cell for each combination, or the reason why it has not run.

    Raises Refusal if no cell could run.
    """
    of = manifest(program, base, seed, axes=axes.to_json())
    clauses, deferred = _clauses(program)
    loaded: dict[str, KernelContext | Refusal] = {}

    def context_on(device: str) -> KernelContext:
        if device not in loaded:
            loaded[device] = _load(prepare, program, base, device, seed)
        found = loaded[device]
        if isinstance(found, Refusal):
            raise found
        return found

    found = []
    specs = list(_specs(axes))
    with cells_in(folder, of, fresh=fresh, base=base) as cells:
        for done, spec in enumerate(specs):
            progress("cells", done, len(specs))
            name = "-".join(
                str(spec[axis]) for axis in ("device", "length", "batch", "concurrency")
            )

            def measure(spec: Mapping[str, Any] = spec) -> dict[str, Any]:
                return _measure(context_on(spec["device"]), clauses, spec)

            found.append(cells.cell(name, spec, measure))
    progress("cells", len(specs), len(specs))
    if not any(cell["status"] == "ran" for cell in found):
        reasons = dict.fromkeys(str(cell["reason"]) for cell in found)
        raise refuse(
            codes.EXPERIMENT,
            "not one cell could run",
            notes=tuple(reasons),
            help="the notes say why each cell did not run; choose other lengths, batches or "
            "devices",
        )
    return {
        "schema": "kcdsl.experiment/1",
        "experiment": "e2",
        "manifest": of,
        "axes": axes.to_json(),
        "deferred": deferred,
        "cells": found,
    }


def _specs(axes: Axes) -> Iterator[dict[str, Any]]:
    for device in axes.devices:
        for length in axes.lengths:
            for batch in axes.batches:
                for streams in axes.concurrency:
                    yield {
                        "device": device,
                        "length": length,
                        "batch": batch,
                        "concurrency": streams,
                    }


def _clauses(program: Program) -> tuple[tuple[Clause, ...], dict[str, str]]:
    """Return the clauses about values of the model, and why the others are left out."""
    expanded, measures = expand_tables(program), measures_of(program)
    chosen, deferred = split(expanded, frozenset(s.name for s in expanded.slices))
    kept = []
    for clause in chosen:
        tiers = {measures[m].tier for m in metrics_of(clause.require) if m in measures}
        if any(isinstance(part, HasFields) for part in walk(clause.require)):
            deferred[clause.id] = "reads trace records, which are the same in every cell"
        elif "E" in tiers or measured_norms(clause.require):
            deferred[clause.id] = "reads times or single blocks; `kcdsl evaluate` decides it"
        elif clause.evidence in PROOFS:
            deferred[clause.id] = f"demands {clause.evidence}; `kcdsl verify` decides it"
        else:
            kept.append(clause)
    if not kept:
        raise refuse(
            codes.NOTHING_TO_EVALUATE,
            "the contract has no clause whose pass rate can be mapped",
            notes=tuple(f"{name}: {reason}" for name, reason in deferred.items()),
            help="add a clause such as `p99(kl) <= 0.02`",
        )
    return tuple(kept), deferred


def _load(
    prepare: Prepare, program: Program, base: Path, device: str, seed: int
) -> KernelContext | Refusal:
    try:
        if device == "cuda" and not torch.cuda.is_available():
            raise refuse(
                codes.NO_DEVICE,
                "torch sees no CUDA device",
                help="leave cuda out of --device, or see what `kcdsl doctor` says of the device",
            )
        found = prepare(program, base, device=device, seed=seed, crosscheck=False)
        if not isinstance(found, KernelContext) or not isinstance(found.infer, TorchKernel):
            raise refuse(
                codes.EXPERIMENT,
                f"{program.infer.run} does not run batches here",
                help="name an inference kernel that runs here",
            )
        return found
    except Refusal as error:
        return error


def _measure(
    context: KernelContext, clauses: Sequence[Clause], spec: Mapping[str, Any]
) -> dict[str, Any]:
    check_metrics(context, clauses)
    length, kernel = int(spec["length"]), context.infer
    assert isinstance(kernel, TorchKernel)
    plan = plan_for(context, clauses)
    usable = [r for r in context.requests if r.length >= length]
    if not usable:
        raise refuse(
            codes.EXPERIMENT,
            f"no request has {length} tokens",
            help="choose a shorter --length, or add longer requests to the data",
        )
    requests = [replace(r, tokens=r.tokens[:length]) for r in usable]
    streams = int(spec["concurrency"])
    if streams > 1 and kernel.interception is not None:
        raise refuse(
            codes.EXPERIMENT,
            "a model of one's own is not run in several threads",
            help="leave --concurrency at 1",
        )
    runs = _runs(context, kernel, plan, requests, int(spec["batch"]), streams)
    slices = {
        name: [r.key for r in rows if r.length >= length] for name, rows in context.slices.items()
    }
    measures = measures_of(context.program)
    data = {
        name: SliceData(name, tuple(runs[key].unit for key in keys), measures=measures)
        for name, keys in slices.items()
    }
    # cut to one length, requests with the same beginning are one unit of a sample
    tokens = {request.key: request.tokens for request in requests}
    samples = {
        name: by_prompt(data[name], [tokens[k] for k in keys]) for name, keys in slices.items()
    }
    prechecks = prechecks_of(context, runs, plan, requests)
    blocked = {clause.id: why_blocked(clause, prechecks, measures) for clause in clauses}
    cases = [
        DecisionCase(
            obligation,
            samples[name]
            if evidence_kind(obligation.part, data[name]) is EvidenceKind.SAMPLE
            else data[name],
            blocked[clause.id] or context.spoiled.get(name),
        )
        for clause in clauses
        for name in named_slices(clause) or tuple(data)
        if name in data
        for obligation in obligations_of(clause, name)
    ]
    rows, _ = decide_all(cases, expand_tables(context.program), context.seed)
    return {
        "requests": len(requests),
        "hardware": str(context.environment.get("hardware", "")),
        "rows": [
            pass_record(row.to_json(), narrow_reasons(case.obligation.part, row))
            for case, row in zip(cases, rows, strict=True)
        ],
        "failed_checks": failed_checks(check.to_json() for check in prechecks),
    }


def _runs(
    context: KernelContext,
    kernel: TorchKernel,
    plan: MeasurementPlan,
    requests: Sequence[Request],
    size: int,
    streams: int,
) -> dict[str, RequestRun]:
    """Run batches, `streams` at a time, and measure their outputs before the next ones."""
    batches = [requests[i : i + size] for i in range(0, len(requests), size)]
    runs: dict[str, RequestRun] = {}

    def answer(batch: Sequence[Request]) -> dict[str, Tensor]:
        tokens = [request.tokens for request in batch]
        found = {"logits": kernel.logits(tokens)} if plan.needs_logits else {}
        return found | ({"hidden": kernel.hidden(tokens)} if plan.needs_hidden else {})

    with ThreadPoolExecutor(streams) as threads, _shared_settings(kernel):
        for start in range(0, len(batches), streams):
            wave = batches[start : start + streams]
            for batch, answers in zip(wave, list(threads.map(answer, wave)), strict=True):
                for i, request in enumerate(batch):
                    answered: Kernel = _KnownOutputs(
                        kernel, {name: rows[i] for name, rows in answers.items()}
                    )
                    runs[request.key] = run_request(
                        request, context.train, answered, plan, context.block_input
                    )
    return runs


def _shared_settings(kernel: TorchKernel) -> AbstractContextManager[Any]:
    """Hold the process-wide settings that each run sets and resets, so that threads do not reset
    them for each other."""
    backend = find_adapter(kernel.ref.run).backend
    stack = ExitStack()
    stack.enter_context(exact_settings(kernel.device))
    stack.enter_context(sdpa_kernel([SDP_BACKENDS[backend]]) if backend else nullcontext())
    return stack
