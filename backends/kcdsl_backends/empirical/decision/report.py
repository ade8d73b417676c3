"""From evidence to the report: a pure function, so that the same evidence gives the same report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.ir.obligations import named_slices, obligations_of
from kcdsl.ir.tables import expand_tables, is_bucket
from kcdsl.ir.terms import Clause, EvidenceKind, Family, Program
from kcdsl.metrics import MEASURES, MetricDefinition
from kcdsl.verdict.health import assess, recommend
from kcdsl.verdict.model import Violated
from kcdsl.verdict.report import ClauseWarning, Precheck, Report, SliceSummary, Statistics
from kcdsl.verdict.result import ClauseResult
from kcdsl_backends.empirical.charts import charts_of
from kcdsl_backends.empirical.charts.series import mean
from kcdsl_backends.empirical.decision.comparison import result_context
from kcdsl_backends.empirical.decision.judgement import evidence_kind
from kcdsl_backends.empirical.decision.repeats import by_prompt, repeated, with_drawn_runs
from kcdsl_backends.empirical.decision.results import DecisionCase, decide_all
from kcdsl_backends.empirical.diagnoses.model import blocking
from kcdsl_backends.empirical.metrics.user import measures_of
from kcdsl_backends.empirical.statistics.estimates import CONFIDENCE
from kcdsl_backends.empirical.statistics.rates import quantile_rank
from kcdsl_backends.empirical.table.evidence import SUMMARY_METRICS, EvidenceTable, SliceData
from kcdsl_backends.empirical.table.requirements import (
    PROOFS,
    metrics_of,
    prompts_are_units,
    sampling_unit,
    split,
)
from kcdsl_backends.empirical.table.rows import records
from kcdsl_certs.encoding.reals import real_text


def conclude(evidence: EvidenceTable) -> Report:
    """Decide every clause that the evidence can decide, and return the report.

    Raises Refusal if the contract has no such clause.
    """
    program = expand_tables(evidence.program)
    clauses, deferred = split(program, frozenset(evidence.slices))
    data = slice_data(evidence)
    results, demoted, statistics = decide(evidence, program, clauses, data)
    evidence = replace(evidence, notes=(*evidence.notes, *_repeats(evidence, results)))
    return build_report(evidence, data, results, {**deferred, **demoted}, statistics)


def slice_data(evidence: EvidenceTable) -> dict[str, SliceData]:
    """Return the measured values, slice by slice."""
    written, measures = records(evidence), measures_of(evidence.program)
    return {
        name: _on_slice(name, keys, evidence, written, measures)
        for name, keys in evidence.slices.items()
    }


def _on_slice(
    name: str,
    keys: Sequence[str],
    evidence: EvidenceTable,
    written: Mapping[str, Mapping[str, Any]],
    measures: Mapping[str, MetricDefinition],
) -> SliceData:
    timing, inside = evidence.timing, set(keys)
    made = [key for key in keys if key in timing.repeats]
    repeats = [[timing.repeats[made[i]] for i in own] for own in repeated(_prompts(made, evidence))]
    return SliceData(
        name,
        tuple(evidence.runs[key].unit for key in keys),
        tuple(unit for unit in timing.runs if unit.key in inside),
        (sum(all(equal == of for equal, of in own) for own in repeats), len(repeats))
        if repeats
        else None,
        timing.peak_memory,
        tuple(written[key] for key in keys),
        measures,
        unit=sampling_unit(evidence.program),
        batch=prompts_are_units(evidence.program),
    )


def sampled_data(evidence: EvidenceTable, data: Mapping[str, SliceData]) -> Mapping[str, SliceData]:
    """Return the data of slices for samples: requests with the same prompt, and their timed runs,
    are one unit.

    Recorded rollouts already are units by prompt, and a token table has no prompts.
    """
    if prompts_are_units(evidence.program):
        return {name: with_drawn_runs(own) for name, own in data.items()}
    return {
        name: own
        if own.reduced is not None
        else by_prompt(own, _prompts(evidence.slices[name], evidence))
        for name, own in data.items()
    }


def _prompts(keys: Sequence[str], evidence: EvidenceTable) -> list[tuple[int, ...]]:
    """Return the tokens of requests, which identify their prompts."""
    tokens = {request.key: request.tokens for request in evidence.requests}
    return [tokens[key] for key in keys]


def _repeats(evidence: EvidenceTable, results: Sequence[ClauseResult]) -> tuple[str, ...]:
    """Return a note on the number of requests that count with another in samples."""
    sampled = [row.slice for row in results if row.evidence == EvidenceKind.SAMPLE.value]
    keys = list(dict.fromkeys(key for name in sampled for key in evidence.slices[name]))
    more = len(keys) - len(repeated(_prompts(keys, evidence)))
    if not more or prompts_are_units(evidence.program):
        return ()
    return (f"{more} requests repeat a prompt and count with it in samples",)


def decide(
    evidence: EvidenceTable,
    program: Program,
    clauses: Sequence[Clause],
    data: Mapping[str, SliceData],
) -> tuple[tuple[ClauseResult, ...], dict[str, str], Statistics]:
    """Decide every clause; one that demands a proof is only reported if it is violated."""
    cases: list[DecisionCase] = []
    measures = measures_of(program)
    samples = sampled_data(evidence, data)
    blocked = [
        None
        if clause.family is Family.OBSERVABILITY
        else why_blocked(clause, evidence.prechecks, measures)
        for clause in clauses
    ]
    for clause, why in zip(clauses, blocked, strict=True):
        cases += [
            DecisionCase(
                obligation,
                samples[name]
                if evidence_kind(obligation.part, data[name]) is EvidenceKind.SAMPLE
                else data[name],
                why or evidence.spoiled.get(name),
            )
            for name in named_slices(clause) or tuple(data)
            if name in data
            for obligation in obligations_of(clause, name)
        ]
    decided, statistics = decide_all(cases, program, evidence.seed, evidence.looks)
    rows = [
        replace(row, context=result_context(case.obligation.part, row, case.data, evidence))
        for case, row in zip(cases, decided, strict=True)
    ]
    results: list[ClauseResult] = []
    demoted: dict[str, str] = {}
    for clause, why in zip(clauses, blocked, strict=True):
        own = [
            row for case, row in zip(cases, rows, strict=True) if case.obligation.clause is clause
        ]
        refuted = any(isinstance(row.verdict, Violated) for row in own)
        if clause.evidence in PROOFS and not refuted and why is None:
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


def why_blocked(
    clause: Clause, prechecks: Sequence[Precheck], measures: Mapping[str, MetricDefinition]
) -> str | None:
    """Return why values of the model cannot be trusted for a clause; None if they can.

    Sampled clauses also require that the inference policy has mass wherever the training policy
    does. Runtime clauses count requests without finite values, so these do not block them.
    """
    if clause.family is Family.RUNTIME:
        prechecks = [check for check in prechecks if check.name != "finite"]
    reasons = [blocking(prechecks)]
    sampled = any(
        "sampled" in measures[m].needs or measures[m].tier == "C"
        for m in metrics_of(clause.require)
        if m in measures
    )
    if sampled:
        reasons += [
            f"precheck {check.name} failed: {check.detail}"
            for check in prechecks
            if check.name == "support_check" and check.outcome == "failed"
        ]
    return "; ".join(reason for reason in reasons if reason is not None) or None


# --- reporting -----------------------------------------------------------------------------------


def build_report(
    evidence: EvidenceTable,
    data: Mapping[str, SliceData],
    results: tuple[ClauseResult, ...],
    deferred: Mapping[str, str],
    statistics: Statistics,
) -> Report:
    """Return the report, with health score and recommended action."""
    health = assess(results, evidence.program.escalation)
    return Report(
        contract=evidence.contract,
        model=evidence.model,
        kernels=evidence.kernels,
        data=evidence.data,
        environment={
            **evidence.environment,
            "seed": evidence.seed,
            "confidence": CONFIDENCE,
            "unit": sampling_unit(evidence.program),
            "temperature": real_text(evidence.program.constants.temperature),
        },
        clauses=results,
        slices=tuple(
            summarise_slice(d, evidence.encoder) for d in data.values() if not is_bucket(d.name)
        ),
        prechecks=evidence.prechecks,
        crosschecks=evidence.crosschecks,
        implied=evidence.implied,
        deferred=deferred,
        health=health,
        action=recommend(results, health),
        notes=(*evidence.notes, *evidence.accepted),
        statistics=statistics,
        warnings=below_noise(results),
        bounding=evidence.bounding,
        charts=charts_of(evidence, data, results),
    )


def below_noise(results: Sequence[ClauseResult]) -> tuple[ClauseWarning, ...]:
    """Return warnings for the clauses whose threshold is below the noise floor of the training
    kernel."""
    found = []
    for row in results:
        floor = None if row.context is None else row.context.noise_floor
        if floor is None or not floor.above or floor.value is None or row.threshold is None:
            continue
        far = "above" if row.op in (">=", ">") else "below"
        found.append(
            ClauseWarning(
                codes.BELOW_NOISE.id,
                row.clause,
                row.slice,
                f"the threshold {row.threshold:.3g} lies {far} the noise floor {floor.value:.3g}: "
                f"so far the training kernel is from itself when {floor.requests} requests are "
                "batched otherwise",
            )
        )
    return tuple(found)


def summarise_slice(data: SliceData, encoder: bool) -> SliceSummary:
    """Return mean, percentiles and worst of the summary metrics; each request by its worst
    token."""
    rows: dict[str, dict[str, float]] = {}
    for name in SUMMARY_METRICS[encoder]:
        values = [u.values[name] for u in data.requests if name in u.values and u.failure is None]
        if not values or len(values) != len(data.requests) or not all(v.size for v in values):
            continue
        higher = MEASURES[name].better == "higher"
        worst = np.sort([float(v.min() if higher else v.max()) for v in values])
        if higher:
            worst = worst[::-1]
        joined = np.concatenate(values)
        rows[name] = {"mean": mean(joined)}
        for percent in (50, 95, 99):
            rank = quantile_rank(worst.size, Fraction(percent, 100))
            rows[name][f"p{percent}"] = float(worst[rank - 1])
        rows[name]["worst"] = float(worst[-1])
    tokens = sum(unit.tokens for unit in data.requests)
    return SliceSummary(data.name, len(data.requests), tokens, rows)
