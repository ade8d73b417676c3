"""The evaluation of a contract: run, measure, cross-check, decide, report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.ir.terms import Clause, EvidenceKind, Family, Program
from kcdsl.verdict.model import Violated
from kcdsl.verdict.report import ClauseResult, CrossCheck, Precheck, Report, Statistics
from kcdsl_backends.empirical import diagnoses, runtime
from kcdsl_backends.empirical.alarms import Case, decide_all
from kcdsl_backends.empirical.clauses import (
    DEFAULT_BLOCK,
    block_place,
    conjuncts,
    drift_blocks,
    measured_norms,
    metrics_of,
    obstacle,
    slices_of,
)
from kcdsl_backends.empirical.crosscheck import compare_request, summarise
from kcdsl_backends.empirical.measured import SliceData
from kcdsl_backends.empirical.metrics.measures import (
    STATE_FUNCTIONS,
    UNMEASURED,
    Measure,
    gradient_function,
)
from kcdsl_backends.empirical.reporting import build_report
from kcdsl_backends.empirical.run import Plan, Run, run_request
from kcdsl_backends.empirical.runtime import Timing
from kcdsl_backends.empirical.setting import SUMMARY_METRICS, Setting
from kcdsl_backends.empirical.statistics import confidence_over
from kcdsl_backends.empirical.trace import trace_record
from kcdsl_backends.empirical.user_metrics import measures_of
from kcdsl_backends.requests import Request

Progress = Callable[[str, int, int], None]
"""Told (stage, done, total)."""

_PROOFS = (EvidenceKind.PROOF, EvidenceKind.PROOF_REAL, EvidenceKind.PROBABILISTIC)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The report, and one trace record per request."""

    report: Report
    traces: tuple[dict[str, Any], ...]


def evaluate(setting: Setting, progress: Progress = lambda stage, done, total: None) -> Evaluation:
    """Run both kernels on the slices of a contract and decide what that can decide.

    Raises Refusal for a contract without such clauses, for a metric that the model cannot supply,
    and where a measured block drift lies above its certified bound.
    """
    clauses, deferred = split(setting.program, frozenset(setting.slices))
    check_metrics(setting, clauses)
    plan = plan_for(setting, clauses)
    requests = _distinct(setting)
    runs = {}
    for done, request in enumerate(requests, 1):
        runs[request.key] = run_request(
            request, setting.train, setting.infer, plan, setting.block_input
        )
        progress("both kernels", done, len(requests))
    crosschecks, notes = _crosschecks(setting, requests, runs, progress)
    prechecks = _prechecks(setting, requests, runs, plan)
    timing = _time(setting, clauses, requests, progress)
    traces = _traces(setting, requests, runs, timing, plan)
    data = {name: _slice_data(name, setting, runs, timing, traces) for name in setting.slices}
    results, demoted, statistics = _decide(setting, clauses, data, prechecks)
    deferred |= demoted
    report = build_report(
        setting, results, deferred, data, prechecks, crosschecks, notes, statistics
    )
    return Evaluation(report, tuple(traces[request.key] for request in requests))


# --- what to do ----------------------------------------------------------------------------------


def split(program: Program, slices: frozenset[str]) -> tuple[tuple[Clause, ...], dict[str, str]]:
    """Return the clauses that running the kernels decides on these slices, and why not the others.

    Raises Refusal where none is left.
    """
    chosen: list[Clause] = []
    deferred: dict[str, str] = {}
    for clause in program.clauses:
        reason = obstacle(clause)
        named = slices_of(clause)
        if reason is not None:
            deferred[clause.id] = reason
        elif named and not slices & set(named):
            deferred[clause.id] = "no slice of it was selected"
        else:
            chosen.append(clause)
    for clause in chosen:  # other buckets of its table may have been left out
        deferred.pop(clause.id, None)
    if not chosen:
        raise refuse(
            codes.NOTHING_TO_EVALUATE,
            "the contract has no clause that running the kernels decides",
            notes=tuple(f"{name}: {reason}" for name, reason in deferred.items()),
            help="add a clause such as `p99(kl) <= 0.02`, or run `kcdsl verify`",
        )
    return tuple(chosen), deferred


def check_metrics(setting: Setting, clauses: Sequence[Clause]) -> None:
    """Refuse a clause whose metric the model or the constants cannot supply."""
    for clause in clauses:
        for name in sorted(metrics_of(clause.require)):
            missing = UNMEASURED.get(name) if clause.evidence not in _PROOFS else None
            help = "let the clause demand `evidence: proof`, or take it out"
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
    if setting.encoder and measure.source in ("logits", "sampled", "calibration", "gradient"):
        usable = ", ".join(sorted(STATE_FUNCTIONS))
        return "the model is an encoder and has no logits", f"metrics of encoders: {usable}"
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
    if any(measures[m].source == "sampled" for m in metrics if m in measures):
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
    )


def _distinct(setting: Setting) -> tuple[Request, ...]:
    found = {r.key: r for requests in setting.slices.values() for r in requests}
    return tuple(found.values())


# --- the stages ----------------------------------------------------------------------------------


def _crosschecks(
    setting: Setting,
    requests: Sequence[Request],
    runs: Mapping[str, Run],
    progress: Progress,
) -> tuple[tuple[CrossCheck, ...], tuple[str, ...]]:
    if setting.certify is None:
        return (), ("no certified bounds were available, so nothing was cross-checked",)
    usable = [r for r in requests if runs[r.key].unit.failure is None]
    named = drift_blocks(setting.program)
    absent = [b for b in named if b not in (*setting.blocks, "model", DEFAULT_BLOCK)]
    if absent:
        raise refuse(
            codes.UNKNOWN_BLOCK,
            f"a clause speaks about the block {absent[0]}, which the model does not have",
            help=f"blocks: {', '.join(sorted(setting.blocks))}",
            span=block_place(setting.program, absent[0]),
        )
    blocks = [b for b in named if b in setting.blocks and b != "model"]
    checks: list[CrossCheck] = []
    for block in blocks:
        found = []
        for done, request in enumerate(usable, 1):
            found.append(
                compare_request(
                    request,
                    block,
                    setting.train,
                    setting.infer,
                    setting.block_input,
                    setting.certify,
                )
            )
            progress(f"cross-check {block}", done, len(usable))
        if found:
            checks.append(summarise(block, found))
    notes = () if checks else ("no block could be cross-checked",)
    return tuple(checks), notes


def _prechecks(
    setting: Setting, requests: Sequence[Request], runs: Mapping[str, Run], plan: Plan
) -> tuple[Precheck, ...]:
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
        return Timing((), {}, None)
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
        progress=lambda done, total: progress("timed runs", done, total),
    )


def _traces(
    setting: Setting,
    requests: Sequence[Request],
    runs: Mapping[str, Run],
    timing: Timing,
    plan: Plan,
) -> dict[str, dict[str, Any]]:
    member = {name: {r.key for r in chosen} for name, chosen in setting.slices.items()}
    timed: dict[str, list[Any]] = {}
    for unit in timing.runs:
        timed.setdefault(unit.key, []).append(unit)
    return {
        request.key: trace_record(
            request,
            runs[request.key],
            slices=[name for name, keys in member.items() if request.key in keys],
            kernels=setting.digests,
            temperature=plan.temperature,
            runs=timed.get(request.key, ()),
        )
        for request in requests
    }


def _slice_data(
    name: str,
    setting: Setting,
    runs: Mapping[str, Run],
    timing: Timing,
    traces: Mapping[str, Mapping[str, Any]],
) -> SliceData:
    keys = [request.key for request in setting.slices[name]]
    inside = set(keys)
    repeats = [timing.repeats[key] for key in keys if key in timing.repeats]
    return SliceData(
        name,
        tuple(runs[key].unit for key in keys),
        tuple(unit for unit in timing.runs if unit.key in inside),
        (sum(equal == made for equal, made in repeats), len(repeats)) if repeats else None,
        timing.peak_memory,
        tuple(traces[key] for key in keys),
        measures_of(setting.program),
    )


def _decide(
    setting: Setting,
    clauses: Sequence[Clause],
    data: Mapping[str, SliceData],
    prechecks: Sequence[Precheck],
) -> tuple[tuple[ClauseResult, ...], dict[str, str], Statistics]:
    """Decide every clause; one that demands a proof is only reported where it is violated."""
    cases: list[Case] = []
    measures = measures_of(setting.program)
    blocked = [
        None if clause.family is Family.OBSERVABILITY else _blocked(clause, prechecks, measures)
        for clause in clauses
    ]
    for clause, why in zip(clauses, blocked, strict=True):
        cases += [
            Case(clause, part, data[name], why or setting.spoiled.get(name))
            for name in slices_of(clause) or tuple(data)
            if name in data
            for part in conjuncts(clause)
        ]
    rows, statistics = decide_all(cases, setting.program, setting.seed, setting.looks)
    results: list[ClauseResult] = []
    demoted: dict[str, str] = {}
    for clause, why in zip(clauses, blocked, strict=True):
        own = [row for case, row in zip(cases, rows, strict=True) if case.whole is clause]
        refuted = any(isinstance(row.verdict, Violated) for row in own)
        if clause.evidence in _PROOFS and not refuted and why is None:
            demoted[clause.id] = f"demands {clause.evidence}; `kcdsl verify` decides it"
            continue
        results.extend(own)
    if not results:
        raise refuse(
            codes.NOTHING_TO_EVALUATE,
            "every clause demands a proof, and running the kernels only measures",
            help="run `kcdsl verify`",
        )
    return tuple(results), demoted, statistics


def _blocked(
    clause: Clause, prechecks: Sequence[Precheck], measures: Mapping[str, Measure]
) -> str | None:
    """Return why no value of the model may be trusted for a clause, None where it may.

    Sampled clauses also need mass wherever the training kernel has some. A request without finite
    numbers is what runtime clauses count, so it does not block them.
    """
    if clause.family is Family.RUNTIME:
        prechecks = [check for check in prechecks if check.name != "finite"]
    reasons = [diagnoses.blocking(prechecks)]
    sampled = any(
        measures[m].source == "sampled" for m in metrics_of(clause.require) if m in measures
    )
    if sampled:
        reasons += [
            f"precheck {check.name} failed: {check.detail}"
            for check in prechecks
            if check.name == "support_check" and check.outcome == "failed"
        ]
    return "; ".join(reason for reason in reasons if reason is not None) or None
