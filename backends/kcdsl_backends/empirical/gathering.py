"""Gathering evidence: run both kernels on every request, check, cross-check, time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.ir.buckets import expand_tables
from kcdsl.ir.terms import Clause, Program
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical import diagnoses, runtime
from kcdsl_backends.empirical.bounding import certified_units
from kcdsl_backends.empirical.clauses import (
    DEFAULT_BLOCK,
    block_place,
    drift_blocks,
    measured_norms,
    metrics_of,
    norm_name,
    slices_of,
)
from kcdsl_backends.empirical.conclusion import PROOFS, split
from kcdsl_backends.empirical.crosscheck import Comparison, compare_request, summarise
from kcdsl_backends.empirical.decisive import decisive
from kcdsl_backends.empirical.evidence import CHART_METRICS, SUMMARY_METRICS, Evidence
from kcdsl_backends.empirical.journal import Journal
from kcdsl_backends.empirical.measured import Run, Timing
from kcdsl_backends.empirical.metrics.measures import (
    STATE_FUNCTIONS,
    UNMEASURED,
    gradient_function,
)
from kcdsl_backends.empirical.noise_floor import noise_floor
from kcdsl_backends.empirical.resuming import OwnCode, resume
from kcdsl_backends.empirical.rollouts.needs import NEEDS
from kcdsl_backends.empirical.run import Plan, run_request
from kcdsl_backends.empirical.setting import Setting, recorded_side
from kcdsl_backends.empirical.spreading import Spread
from kcdsl_backends.empirical.statistics import confidence_over
from kcdsl_backends.empirical.user_metrics import measures_of
from kcdsl_backends.requests import Request

_GENERATION = (
    f"times of tokens are of {runtime.NEW_TOKENS} likeliest tokens after each request (fewer where"
    " the model has no room), without a cache of keys and values: a decode step runs the whole"
    " sequence again, so tpot is an upper estimate of what a cache would give"
)
Progress = Callable[[str, int, int], None]
"""Told (stage, done, total)."""


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
        setting,
        requests,
        runs,
        comparisons,
        lambda done, total: progress("certified bounds", done, total),
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
            *((_GENERATION,) if runtime.reads_tokens(clauses) else ()),
            *(() if journal is None else journal.notes),
        ),
        seed=setting.seed,
        looks=setting.looks,
    )


# --- what to do ----------------------------------------------------------------------------------


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
    if setting.encoder and name in runtime.GENERATED:
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
    timed = [clause for clause in clauses if runtime.is_runtime(clause)]
    if not timed or not requests:
        return Timing()
    names = {name for c in timed for name in (slices_of(c) or tuple(setting.slices))}
    chosen = {r.key: r for name in names if name in setting.slices for r in setting.slices[name]}
    sizes = [len(setting.slices[name]) for name in names if name in setting.slices]
    kernel = setting.infer
    return runtime.time_requests(
        lambda tokens: kernel.forward(kernel.tokens(tokens)),
        tuple(chosen.values()),
        rounds=runtime.rounds_needed(timed, sizes, confidence_over(setting.looks)),
        seconds=setting.seconds,
        device=setting.device,
        generate=runtime.greedy(kernel) if runtime.reads_tokens(timed) else None,
        progress=lambda done, total: progress("timed runs", done, total),
    )
