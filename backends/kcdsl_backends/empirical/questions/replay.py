"""A changed contract on the evidence of a trace: other thresholds, budgets, levels, clauses.

The evidence is of one pair of kernels, one model and one temperature, and its preconditions were
checked on all requests together. A contract that differs in these is refused, and so is a clause
that reads values which the trace does not have. Otherwise the verdicts are those of a new
evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from kcdsl.check.user_metrics import declarations
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Refusal, Sink, refuse
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest
from kcdsl.ir.obligations import named_slices
from kcdsl.ir.tables import expand_tables, gaps, is_bucket, whole_of
from kcdsl.ir.terms import Clause, Program, Slice
from kcdsl.metrics import UNMEASURED
from kcdsl_backends.empirical.collection.context import spoiled_slices
from kcdsl_backends.empirical.diagnoses.probes import chosen
from kcdsl_backends.empirical.metrics.user import measures_of
from kcdsl_backends.empirical.table.evidence import EvidenceTable
from kcdsl_backends.empirical.table.requirements import (
    DEFAULT_BLOCK,
    PROOFS,
    drift_blocks,
    holds_logits,
    is_runtime,
    measured_norms,
    metrics_of,
    norm_name,
    split,
)
from kcdsl_backends.empirical.table.rows import fields_text
from kcdsl_backends.empirical.table.trace import Trace
from kcdsl_backends.requests import Request, RequestFile, select

_ALWAYS = frozenset({"failure_rate"})
"""Metrics that every trace has."""


def evidence_for(program: Program, trace: Trace) -> EvidenceTable:
    """Return the evidence of a trace for a changed contract, as it was compiled.

    Raises Refusal (KC632) if the contract needs values that the trace does not have.
    """
    evidence = trace.evidence
    for what, stated, held in _fixed(program, evidence.program):
        if stated != held:
            raise _absent(f"the {what} of the contract is another than that of the trace")
    slices = _slices(program, evidence)
    _same_requests(slices, evidence)
    clauses, _ = split(expand_tables(program), frozenset(slices))
    for clause in clauses:
        _check(clause, program, evidence)
    _same_measuring(clauses, evidence)
    _timed(clauses, slices, evidence)
    _cross_checked(program, evidence)
    return replace(
        evidence,
        program=program,
        slices=slices,
        spoiled=_spoiled(program, evidence),
        contract={
            "name": program.name,
            "version": program.version,
            "digest": f"sha256:{digest(program)}",
        },
        implied=(),
        accepted=(),
    )


def same_functions(program: Program, base: Path, evidence: EvidenceTable) -> None:
    """Refuse (KC632) a contract in the folder `base` whose metrics are computed by a file that was
    edited since they were measured."""
    if not program.metrics:
        return
    recorded = evidence.environment.get("metrics", ())
    before = {found["name"]: found["sha256"] for found in recorded}
    now = declarations(base, Sink())
    for metric in program.metrics:
        found = now.get(metric.name)
        text = "" if found is None else found.source.text
        if sha256(text.encode("utf-8")).hexdigest() != before.get(metric.name):
            raise _absent(
                f"the file of the metric `{metric.name}` ({metric.function}) is another than the "
                "one whose values the trace has"
            )


# --- fixed inputs ---------------------------------------------------------------------------------


def _fixed(program: Program, held: Program) -> Iterator[tuple[str, object, object]]:
    """Yield the inputs of measured values: name, value in the contract, value in the trace."""
    yield "model", program.model, held.model
    yield "training kernel", program.train, held.train
    yield "inference kernel", program.infer, held.infer
    yield "temperature", program.constants.temperature, held.constants.temperature
    before = {metric.name: metric for metric in held.metrics}
    for metric in program.metrics:
        yield f"metric {metric.name}", metric, before.get(metric.name)


def _same_requests(slices: Mapping[str, tuple[str, ...]], evidence: EvidenceTable) -> None:
    """Refuse slices with other requests than those on which preconditions were checked: one that
    holds on some requests may fail on others."""
    keys = tuple(dict.fromkeys(key for own in slices.values() for key in own))
    by_key = {request.key: request for request in evidence.requests}
    if keys == tuple(by_key):
        return
    lacking = len(by_key) - len(keys)
    if lacking:
        raise _absent(
            f"the slices of the contract leave out {lacking} of the {len(by_key)} requests on "
            "which the preconditions of the trace were checked"
        )
    if chosen([by_key[key] for key in keys]) != chosen(evidence.requests):
        raise _absent(
            "the slices of the contract stand in another order, in which the preconditions would "
            "be checked on other requests"
        )


def _same_measuring(clauses: Sequence[Clause], evidence: EvidenceTable) -> None:
    """Refuse to leave out a metric if a request failed: that metric may have caused the failure."""
    failed = [key for key, run in evidence.runs.items() if run.unit.failure is not None]
    if not failed:
        return
    before, _ = split(expand_tables(evidence.program), frozenset(evidence.slices))
    now, then = (frozenset().union(*map(_read, some)) for some in (clauses, before))
    if then - now:
        raise _absent(
            f"the request {failed[0]} failed when `{min(then - now)}` was measured too, which the "
            "contract does not read"
        )


def _timed(
    clauses: Sequence[Clause], slices: Mapping[str, tuple[str, ...]], evidence: EvidenceTable
) -> None:
    """Refuse a clause about times of requests that were not timed, or about the memory of another
    set of requests than was run."""
    runtime = [clause for clause in clauses if is_runtime(clause)]
    if not runtime or _recorded(evidence.program):
        return
    ran = {unit.key for unit in evidence.timing.runs}
    wanted: set[str] = set()
    for clause in runtime:
        for name in named_slices(clause) or tuple(slices):
            left = [key for key in slices.get(name, ()) if key not in ran]
            wanted.update(slices.get(name, ()))
            if left:
                raise _absent(
                    f"the clause `{clause.id}` reads times on `{name}`, where {len(left)} "
                    f"requests, {left[0]} first, were not timed"
                )
    for clause in runtime:
        if "peak_memory" in metrics_of(clause.require) and ran != wanted:
            raise _absent(
                f"the clause `{clause.id}` reads the peak memory, which was measured with "
                f"{len(ran - wanted)} more requests than the contract times"
            )


def _cross_checked(program: Program, evidence: EvidenceTable) -> None:
    """Refuse a clause about a block that was not compared with its certified bound, if others
    were."""
    known = {check.block for check in evidence.crosschecks}
    for block in drift_blocks(program):
        if known and block not in known | {"model", DEFAULT_BLOCK}:
            raise _absent(f"the block `{block}` was not compared with its certified bound")


# --- values that clauses read --------------------------------------------------------------------


def _read(clause: Clause) -> frozenset[str]:
    """Return the names of all values that a clause reads."""
    norms = measured_norms(clause.require)
    return metrics_of(clause.require) | {norm_name(*pair) for pair in norms}


def _check(clause: Clause, program: Program, evidence: EvidenceTable) -> None:
    """Refuse a clause that reads values which were not measured. A clause that demands a proof is
    measured too, since a value may refute it, except for metrics that no pair of kernels has."""
    names = _read(clause)
    if clause.evidence in PROOFS:
        if _recorded(program):
            return
        names -= UNMEASURED.keys() - measures_of(program).keys()
    for name in sorted(names - evidence.measured - _ALWAYS):
        raise _absent(f"the clause `{clause.id}` reads `{name}`, which was not measured")
    if "grad_bias" in names:
        stated, held = (
            (p.constants.advantage_max, p.constants.score_norm_max)
            for p in (program, evidence.program)
        )
        if stated != held:
            raise _absent(f"the clause `{clause.id}` reads `grad_bias`, of other constants")


# --- slices --------------------------------------------------------------------------------------


def _slices(program: Program, evidence: EvidenceTable) -> dict[str, tuple[str, ...]]:
    """Return the requests of every slice of the contract that the trace has, buckets included; the
    buckets of changed tables are selected by the fields of requests."""
    held = {s.name: s for s in expand_tables(evidence.program).slices}
    found: dict[str, tuple[str, ...]] = {}
    for slice_ in expand_tables(program).slices:
        name, whole = slice_.name, whole_of(slice_.name)
        known = held.get(name)
        if known is not None and _meaning(known, evidence.program) == _meaning(slice_, program):
            if name in evidence.slices:
                found[name] = evidence.slices[name]
        elif not is_bucket(name):
            raise _absent(f"the slice `{name}` of the contract is not in the trace")
        elif whole in evidence.slices:
            found[name] = tuple(r.key for r in _within(slice_, whole, evidence))
    return found


def _spoiled(program: Program, evidence: EvidenceTable) -> dict[str, str]:
    """Return why slices are invalid: a table of thresholds lacks some of their requests."""
    held, missed = {gap.slice for gap in gaps(evidence.program)}, []
    found: dict[str, str] = {}
    for gap in gaps(program):
        if gap.slice in held:
            found |= {n: evidence.spoiled[n] for n in gap.spoils if n in evidence.spoiled}
        elif gap.whole in evidence.slices:
            missed.append((gap, _within(gap.slice, gap.whole, evidence)))
    return {**found, **spoiled_slices(missed)}


def _meaning(slice_: Slice, program: Program) -> tuple[object, ...]:
    return slice_.where, slice_.data if slice_.data is not None else program.data


def _recorded(program: Program) -> bool:
    """Return whether rollouts were read, whose units are prompts with several of them."""
    return program.infer.recording is not None and not holds_logits(program.infer)


def _within(slice_: Slice, whole: str, evidence: EvidenceTable) -> tuple[Request, ...]:
    """Return the requests of a slice that satisfy the predicate of a bucket of it."""
    if _recorded(evidence.program):
        raise _absent(f"`{slice_.name}` selects rollouts, of which the trace has prompts alone")
    by_key = {request.key: request for request in evidence.requests}
    return select(_file([by_key[key] for key in evidence.slices[whole]]), slice_)


def _file(requests: list[Request]) -> RequestFile:
    """Return requests as a request file, with lines made from their fields."""
    lines = [
        json.dumps({"id": r.id, **json.loads(fields_text(r.fields))}, ensure_ascii=False)
        for r in requests
    ]
    numbered = tuple(replace(request, line=i) for i, request in enumerate(requests, 1))
    return RequestFile("trace", "", numbered, SourceFile("trace", "\n".join(lines) + "\n"))


def _absent(message: str) -> Refusal:
    return refuse(
        codes.NOT_IN_TRACE,
        message,
        help="evaluate the contract itself: `kcdsl evaluate`",
    )
