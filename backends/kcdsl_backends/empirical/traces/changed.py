"""A changed contract on the evidence of a trace: other thresholds, budgets, levels, clauses.

What was measured is of one pair of kernels, one model and one temperature; a contract about another
is refused by name, and so is a clause that reads a metric or a slice that the trace does not have.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Refusal, refuse
from kcdsl.ir.buckets import expand_tables, gaps, is_bucket, whole_of
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Clause, Program, Slice
from kcdsl.source.text import SourceFile
from kcdsl_backends.empirical.clauses import measured_norms, metrics_of, norm_name, slices_of
from kcdsl_backends.empirical.conclusion import PROOFS, split
from kcdsl_backends.empirical.evidence import Evidence
from kcdsl_backends.empirical.setting import spoiled_slices
from kcdsl_backends.empirical.traces.file import Trace
from kcdsl_backends.empirical.traces.rows import fields_text
from kcdsl_backends.requests import Request, RequestFile, select

_ALWAYS = frozenset({"failure_rate"})
"""What every request says, whatever was measured."""


def under(program: Program, trace: Trace) -> Evidence:
    """Return the evidence of a trace for a changed contract, as it was compiled.

    Raises Refusal (KC632) where it speaks of what the trace does not have.
    """
    evidence = trace.evidence
    for what, stated, held in _fixed(program, evidence.program):
        if stated != held:
            raise _absent(f"the {what} of the contract is another than that of the trace")
    slices = _slices(program, evidence)
    spoiled = spoiled_slices(
        (gap, _within(gap.slice, evidence.slices.get(gap.whole, ()), evidence))
        for gap in gaps(program)
    )
    clauses, _ = split(expand_tables(program), frozenset(slices))
    for clause in clauses:
        _check(clause, program, evidence)
    return replace(
        evidence,
        program=program,
        slices=slices,
        spoiled=spoiled,
        contract={
            "name": program.name,
            "version": program.version,
            "digest": f"sha256:{digest(program)}",
        },
        implied=(),
        accepted=(),
    )


def _fixed(program: Program, held: Program) -> Iterator[tuple[str, object, object]]:
    """Yield what decides measured values: its name, as the contract and as the trace has it."""
    yield "model", program.model, held.model
    yield "training kernel", program.train, held.train
    yield "inference kernel", program.infer, held.infer
    yield "temperature", program.constants.temperature, held.constants.temperature
    before = {metric.name: metric for metric in held.metrics}
    for metric in program.metrics:
        yield f"metric {metric.name}", metric, before.get(metric.name)


def _check(clause: Clause, program: Program, evidence: Evidence) -> None:
    """Refuse a clause that reads what was not measured; one that demands a proof is not measured
    here in any case."""
    if clause.evidence in PROOFS:
        return
    names = metrics_of(clause.require) | {
        norm_name(*pair) for pair in measured_norms(clause.require)
    }
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


def _slices(program: Program, evidence: Evidence) -> dict[str, tuple[str, ...]]:
    """Return the requests of every slice of the contract that the trace has, buckets included."""
    held = {s.name: s for s in evidence.program.slices}
    expanded = expand_tables(program)
    named = {name for clause in expanded.clauses for name in slices_of(clause)}
    found: dict[str, tuple[str, ...]] = {}
    for slice_ in expanded.slices:
        whole = whole_of(slice_.name)
        if not is_bucket(slice_.name):
            known = held.get(whole)
            if known is None or _meaning(known, evidence.program) != _meaning(slice_, program):
                if any(whole_of(name) == whole for name in named):
                    raise _absent(f"the slice `{whole}` of the contract is not in the trace")
                continue
        if whole not in evidence.slices:
            continue
        keys = evidence.slices[whole]
        if is_bucket(slice_.name):
            keys = tuple(request.key for request in _within(slice_, keys, evidence))
        found[slice_.name] = keys
    return found


def _meaning(slice_: Slice, program: Program) -> tuple[object, ...]:
    return slice_.where, slice_.data if slice_.data is not None else program.data


def _within(slice_: Slice, keys: tuple[str, ...], evidence: Evidence) -> tuple[Request, ...]:
    """Return which of some requests satisfy the predicate of a slice."""
    by_key = {request.key: request for request in evidence.requests}
    return select(_file([by_key[key] for key in keys]), slice_)


def _file(requests: list[Request]) -> RequestFile:
    """Return requests as the file that they would make: what its lines show is what they have."""
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
