"""Collection from local kernels: run both on every request, check, cross-check, time.

The noise floor is how far the training kernel is from itself when a request is batched otherwise:
the same tokens run alone, in a batch, in the other order and padded behind. No inference kernel can
undercut this drift; a threshold below it asks it to be nearer to the training kernel than that is
to itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Clause, Program
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical import diagnoses
from kcdsl_backends.empirical.bounds.blocks import compare_request, summarise
from kcdsl_backends.empirical.bounds.requests import certified_units
from kcdsl_backends.empirical.collection.context import (
    Progress,
    Setting,
    check_metrics,
    distinct,
    kernels_record,
    plan_for,
)
from kcdsl_backends.empirical.collection.parallel import Spread
from kcdsl_backends.empirical.collection.resume import OwnCode, decisive, resume
from kcdsl_backends.empirical.diagnoses import regrouped
from kcdsl_backends.empirical.requirements.clauses import (
    DEFAULT_BLOCK,
    block_place,
    drift_blocks,
    norm_name,
    slices_of,
    split,
)
from kcdsl_backends.empirical.sources.kernels import timing
from kcdsl_backends.empirical.sources.kernels.run import Kernel, Plan, compared, run_request
from kcdsl_backends.empirical.statistics import confidence_over
from kcdsl_backends.empirical.table.checkpoint import Journal
from kcdsl_backends.empirical.table.evidence import Evidence
from kcdsl_backends.empirical.table.units import Comparison, Run, Timing, Unit
from kcdsl_backends.requests import Request

_GENERATION = (
    f"times of tokens are of {timing.NEW_TOKENS} likeliest tokens after each request (fewer where"
    " the model has no room), without a cache of keys and values: a decode step runs the whole"
    " sequence again, so tpot is an upper estimate of what a cache would give"
)


def gather(
    setting: Setting,
    progress: Progress = lambda stage, done, total: None,
    journal: Journal | None = None,
    spread: Spread | None = None,
) -> Evidence:
    """Run both kernels on the slices of a contract; what `journal` holds is not run again.

    `spread` says where requests are run, None for this process: every bit is the same.

    Raises Refusal for a contract without clauses that this can decide, for a metric that the model
    cannot supply, and where a measured block drift lies above its certified bound.
    """
    program = expand_tables(setting.program)
    clauses, _ = split(program, frozenset(setting.slices))
    check_metrics(setting, clauses)
    plan = plan_for(setting, clauses)
    requests = distinct(setting)
    runs = _run_all(setting, plan, requests, journal, progress, spread)
    comparisons, notes = _crosschecks(setting, program, requests, runs, journal, progress)
    certified, bounding = certified_units(
        setting.bound_model,
        requests,
        runs,
        comparisons,
        seconds=setting.bound_seconds,
        temperature=setting.program.constants.temperature,
        encoder=setting.encoder,
        progress=lambda done, total: progress("certified bounds", done, total),
    )
    prechecks = prechecks_of(setting, requests, runs, plan)
    return Evidence(
        program=setting.program,
        requests=requests,
        runs=runs,
        slices={name: tuple(r.key for r in rows) for name, rows in setting.slices.items()},
        measured=plan.metrics | {norm_name(*pair) for pair in plan.norms},
        encoder=setting.encoder,
        contract=setting.contract,
        model=setting.model,
        kernels=kernels_record(setting),
        data=tuple(
            {"name": file.name, "sha256": file.sha256, "rows": len(file.requests)}
            for file in setting.files.values()
        ),
        environment=setting.environment,
        timing=_time(setting, clauses, requests, progress),
        prechecks=prechecks,
        crosschecks=tuple(summarise(block, found) for block, found in comparisons.items()),
        certified=certified,
        bounding=bounding,
        floor=noise_floor(
            setting.train,
            [r for r in requests if runs[r.key].unit.failure is None],
            plan,
            lambda done, total: progress("noise floor", done, total),
        ),
        spoiled=setting.spoiled,
        notes=(
            *notes,
            *((_GENERATION,) if timing.reads_tokens(clauses) else ()),
            *(() if journal is None else journal.notes),
        ),
        seed=setting.seed,
        looks=setting.looks,
    )


# --- the stages ----------------------------------------------------------------------------------


def _run_all(
    setting: Setting,
    plan: Plan,
    requests: Sequence[Request],
    journal: Journal | None,
    progress: Progress,
    spread: Spread | None,
) -> dict[str, Run]:
    known = frozenset() if journal is None else resume(journal, setting, plan, requests)
    done = len(known)
    progress("both kernels", done, len(requests))
    runs: dict[str, Run] = {}

    code = OwnCode(setting.artefacts, journal)

    def arrived(request: Request, run: Run) -> None:
        nonlocal done
        code.keep()
        if journal is not None:
            journal.keep_run(request, run)
        done += 1
        progress("both kernels", done, len(requests))

    left = [request for request in requests if request.key not in known]
    away: dict[str, Run] = {}
    if spread is not None:
        decided_by = decisive(setting, plan, requests)
        away = spread.runs(left, decided_by, arrived, code.imported)
    for request in requests:
        found = journal.run(request) if journal is not None and request.key in known else None
        if found is None and spread is not None:
            found = away[request.key]
        elif found is None:
            found = run_request(request, setting.train, setting.infer, plan, setting.block_input)
            arrived(request, found)
        runs[request.key] = found
    return runs


def _crosschecks(
    setting: Setting,
    program: Program,
    requests: Sequence[Request],
    runs: Mapping[str, Run],
    journal: Journal | None,
    progress: Progress,
) -> tuple[dict[str, list[Comparison]], tuple[str, ...]]:
    if setting.certify is None:
        return {}, ("no certified bounds were available, so nothing was cross-checked",)
    usable = [r for r in requests if runs[r.key].unit.failure is None]
    named = drift_blocks(program)
    absent = [b for b in named if b not in (*setting.blocks, "model", DEFAULT_BLOCK)]
    if absent:
        raise refuse(
            codes.UNKNOWN_BLOCK,
            f"a clause speaks about the block {absent[0]}, which the model does not have",
            help=f"blocks: {', '.join(sorted(setting.blocks))}",
            span=block_place(program, absent[0]),
        )
    blocks = [b for b in named if b in setting.blocks and b != "model"]
    checks: dict[str, list[Comparison]] = {}
    unbounded: list[str] = []
    for block in blocks:
        found = []
        for done, request in enumerate(usable, 1):
            known = None if journal is None else journal.comparison(block, request)
            compared = known or compare_request(
                request,
                block,
                setting.train,
                setting.infer,
                setting.block_input,
                setting.certify,
            )
            if journal is not None and known is None:
                journal.keep_comparison(block, compared)
            found.append(compared)
            progress(f"cross-check {block}", done, len(usable))
        if found:
            checks[block] = found
        beyond = sum(not math.isfinite(compared.certified) for compared in found)
        if beyond:
            unbounded.append(
                f"{block}: {beyond} of {len(found)} requests have no certified bound to be "
                "compared with: too long, or too coarse"
            )
    return checks, tuple(unbounded) if checks else ("no block could be cross-checked",)


def prechecks_of(
    setting: Setting, requests: Sequence[Request], runs: Mapping[str, Run], plan: Plan
) -> tuple[Precheck, ...]:
    """Return what the preconditions come to, on probes among the requests."""
    subject = diagnoses.Subject(
        setting.train,
        setting.infer,
        tuple(requests),
        setting.encoder,
        plan.temperature,
        {**setting.weights, **setting.changed_weights()},
        {name: len(rows) for name, rows in setting.slices.items()},
        {key: run.nonfinite for key, run in runs.items()},
        setting.reference,
    )
    return diagnoses.run_prechecks(subject, [runs[r.key].unit for r in requests])


def _time(
    setting: Setting,
    clauses: Sequence[Clause],
    requests: Sequence[Request],
    progress: Progress,
) -> Timing:
    timed = [clause for clause in clauses if timing.is_runtime(clause)]
    if not timed or not requests:
        return Timing()
    names = {name for c in timed for name in (slices_of(c) or tuple(setting.slices))}
    chosen = {r.key: r for name in names if name in setting.slices for r in setting.slices[name]}
    sizes = [len(setting.slices[name]) for name in names if name in setting.slices]
    kernel = setting.infer
    return timing.time_requests(
        lambda tokens: kernel.forward(kernel.tokens(tokens)),
        tuple(chosen.values()),
        rounds=timing.rounds_needed(timed, sizes, confidence_over(setting.looks)),
        seconds=setting.seconds,
        device=setting.device,
        generate=timing.greedy(kernel) if timing.reads_tokens(timed) else None,
        progress=lambda done, total: progress("timed runs", done, total),
    )


# --- noise floor ---------------------------------------------------------------------------------


REQUESTS = 8
"""Requests that are regrouped, each with the next one: the longest."""
_OF_FORMATS = frozenset({"ulp_max"})
"""Metrics of the format of the logits, which are widened here."""


def noise_floor(
    train: Kernel,
    requests: Sequence[Request],
    plan: Plan,
    progress: Callable[[int, int], None],
) -> dict[str, Unit]:
    """Return the drift of the training kernel from itself, by request and metric.

    The values of a request are those of all its regroupings, one after the other. Requests that
    cannot be batched have none, and where none can the result is empty.
    """
    longest = sorted(requests, key=lambda r: (-r.length, r.key))[:REQUESTS]
    chosen = [request for request in longest if request.length >= 2]
    forward = train.hidden if plan.encoder else train.logits
    found: dict[str, Unit] = {}
    for done, request in enumerate(chosen if len(chosen) > 1 else (), 1):
        other = chosen[done % len(chosen)]
        moved = regrouped((request, other), forward, padding=not plan.encoder)
        if moved is not None:
            found[request.key] = _unit(request, *moved, plan)
        progress(done, len(chosen))
    return found


def _unit(request: Request, alone: Tensor, others: Mapping[str, Tensor], plan: Plan) -> Unit:
    part = replace(request, tokens=request.tokens[: alone.shape[0]])
    with torch.no_grad():
        parts = [compared(part, alone, rows, plan) for rows in others.values()]
    names = parts[0].keys() - _OF_FORMATS
    values = {name: np.concatenate([part[name] for part in parts]) for name in sorted(names)}
    return Unit(request.key, part.length, values)
