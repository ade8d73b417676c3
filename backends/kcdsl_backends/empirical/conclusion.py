"""From evidence to the report: a pure function, so that the same evidence gives the same report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.ir.buckets import expand_tables
from kcdsl.ir.obligations import obligations_of
from kcdsl.ir.terms import Clause, EvidenceKind, Family, Program
from kcdsl.metrics import MetricDefinition
from kcdsl.verdict.model import Violated
from kcdsl.verdict.report import Precheck, Report, Statistics
from kcdsl.verdict.result import ClauseResult
from kcdsl_backends.empirical import diagnoses
from kcdsl_backends.empirical.alarms import Case, decide_all
from kcdsl_backends.empirical.beside import beside
from kcdsl_backends.empirical.clauses import metrics_of, obstacle, slices_of
from kcdsl_backends.empirical.evidence import Evidence, records
from kcdsl_backends.empirical.measured import SliceData
from kcdsl_backends.empirical.reporting import build_report
from kcdsl_backends.empirical.sampling_units import sampling_unit
from kcdsl_backends.empirical.user_metrics import measures_of

PROOFS = (EvidenceKind.PROOF, EvidenceKind.PROOF_REAL, EvidenceKind.PROBABILISTIC)


def conclude(evidence: Evidence) -> Report:
    """Decide every clause that the evidence can decide, and report it.

    Raises Refusal where the contract has no such clause.
    """
    program = expand_tables(evidence.program)
    clauses, deferred = split(program, frozenset(evidence.slices))
    data = slice_data(evidence)
    results, demoted, statistics = decide(evidence, program, clauses, data)
    return build_report(evidence, data, results, {**deferred, **demoted}, statistics)


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
            left_out = [name for name in named if name not in slices]
            deferred |= {f"{clause.id} on {n}": "the slice was not selected" for n in left_out}
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


def slice_data(evidence: Evidence) -> dict[str, SliceData]:
    """Return what was measured, slice by slice."""
    written, measures = records(evidence), measures_of(evidence.program)
    return {
        name: _on_slice(name, keys, evidence, written, measures)
        for name, keys in evidence.slices.items()
    }


def _on_slice(
    name: str,
    keys: Sequence[str],
    evidence: Evidence,
    written: Mapping[str, Mapping[str, Any]],
    measures: Mapping[str, MetricDefinition],
) -> SliceData:
    timing, inside = evidence.timing, set(keys)
    repeats = [timing.repeats[key] for key in keys if key in timing.repeats]
    return SliceData(
        name,
        tuple(evidence.runs[key].unit for key in keys),
        tuple(unit for unit in timing.runs if unit.key in inside),
        (sum(equal == made for equal, made in repeats), len(repeats)) if repeats else None,
        timing.peak_memory,
        tuple(written[key] for key in keys),
        measures,
        unit=sampling_unit(evidence.program),
    )


def decide(
    evidence: Evidence,
    program: Program,
    clauses: Sequence[Clause],
    data: Mapping[str, SliceData],
) -> tuple[tuple[ClauseResult, ...], dict[str, str], Statistics]:
    """Decide every clause; one that demands a proof is only reported where it is violated."""
    cases: list[Case] = []
    measures = measures_of(program)
    blocked = [
        None
        if clause.family is Family.OBSERVABILITY
        else why_blocked(clause, evidence.prechecks, measures)
        for clause in clauses
    ]
    for clause, why in zip(clauses, blocked, strict=True):
        cases += [
            Case(obligation, data[name], why or evidence.spoiled.get(name))
            for name in slices_of(clause) or tuple(data)
            if name in data
            for obligation in obligations_of(clause, name)
        ]
    decided, statistics = decide_all(cases, program, evidence.seed, evidence.looks)
    rows = [
        replace(row, beside=beside(case.obligation.part, row, case.data, evidence))
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
    """Return why no value of the model may be trusted for a clause, None where it may.

    Sampled clauses also need mass wherever the training kernel has some. A request without finite
    numbers is what runtime clauses count, so it does not block them.
    """
    if clause.family is Family.RUNTIME:
        prechecks = [check for check in prechecks if check.name != "finite"]
    reasons = [diagnoses.blocking(prechecks)]
    sampled = any(
        "sampled" in measures[m].needs for m in metrics_of(clause.require) if m in measures
    )
    if sampled:
        reasons += [
            f"precheck {check.name} failed: {check.detail}"
            for check in prechecks
            if check.name == "support_check" and check.outcome == "failed"
        ]
    return "; ".join(reason for reason in reasons if reason is not None) or None
