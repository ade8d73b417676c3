"""The header of a trace: everything in evidence but its rows, as JSON.

Numbers that are not finite are written as "nan", "inf" and "-inf": JSON has no words for them. The
canonical form of a program keeps the meaning and no more; a report also shows the author's wording,
orders its rows as the contract does, and labels terms by the names that the author chose. So a
header holds these too, and both must have the same digest.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from kcdsl.check.stored import formula_from_json, from_json
from kcdsl.ir.canonical import digest, document_json, formula_json
from kcdsl.ir.terms import Clause, Program
from kcdsl.verdict.report import CrossCheck, ImpliedClause, Precheck
from kcdsl_backends.empirical.table.evidence import Evidence, sampling_of
from kcdsl_backends.empirical.table.rows import CERTIFIED, FLOOR, TIMED_RUN, Row
from kcdsl_backends.empirical.table.units import Run, Timing, Unit
from kcdsl_backends.requests import Request

TRACE_SCHEMA = "kcdsl.trace/3"
_PLAIN = ("contract", "model", "kernels", "environment", "bounding", "spoiled")


def header_of(
    evidence: Evidence, rows: Sequence[Row], metrics: Sequence[str], report: Mapping[str, Any]
) -> Any:
    """Return the header of rows; `metrics` are theirs, `report` is what was concluded."""
    return {
        "schema": TRACE_SCHEMA,
        "program": stated_json(evidence.program),
        **{name: dict(getattr(evidence, name)) for name in _PLAIN},
        "data": [dict(row) for row in evidence.data],
        "encoder": evidence.encoder,
        "measured": sorted(evidence.measured),
        "metrics": list(metrics),
        "slices": list(evidence.slices),
        "rows": dict(Counter(row.kind for row in rows)),
        "sampling_params": sampling_of(evidence.program),
        "peak_memory": _real(evidence.timing.peak_memory),
        "prechecks": [
            {
                "name": check.name,
                "outcome": check.outcome,
                "detail": check.detail,
                "value": _real(check.value),
                "blocking": check.blocking,
            }
            for check in evidence.prechecks
        ],
        "crosschecks": [
            {
                "block": check.block,
                "requests": check.requests,
                "measured": _real(check.measured),
                "certified": _real(check.certified),
                "tightness": _real(check.tightness),
                "request": check.request,
            }
            for check in evidence.crosschecks
        ],
        "implied": [item.to_json() for item in evidence.implied],
        "notes": list(evidence.notes),
        "accepted": list(evidence.accepted),
        "seed": evidence.seed,
        "looks": evidence.looks,
        "report": report,
    }


def evidence_of(header: Mapping[str, Any], rows: Sequence[Row]) -> Evidence:
    """Return the evidence of a header and its rows.

    Raises KeyError, TypeError, ValueError or Refusal where they do not belong together.
    """
    program = stated_program(header["program"])
    if header["contract"]["digest"] != f"sha256:{header['program']['canonical']['digest']}":
        raise ValueError("the program is another than the contract's digest says")
    if header["rows"] != Counter(row.kind for row in rows):
        raise ValueError("it lacks rows, or has more than were written")
    requests, runs = _requests(rows)
    for row in rows:
        if row.unit.key not in runs:
            raise ValueError(f"a row is of {row.unit.key}, which is no request")
    return Evidence(
        program=program,
        requests=requests,
        runs=runs,
        slices=_slices(header["slices"], rows),
        measured=frozenset(header["measured"]),
        encoder=bool(header["encoder"]),
        contract=header["contract"],
        model=header["model"],
        kernels=header["kernels"],
        data=tuple(header["data"]),
        environment=header["environment"],
        timing=_timing(header, rows),
        prechecks=tuple(
            Precheck(**{**check, "value": _float(check["value"])}) for check in header["prechecks"]
        ),
        crosschecks=tuple(_crosscheck(check) for check in header["crosschecks"]),
        certified={unit.key: unit for unit in _units(rows, CERTIFIED)},
        bounding=header["bounding"],
        floor={unit.key: unit for unit in _units(rows, FLOOR)},
        spoiled=header["spoiled"],
        implied=tuple(
            ImpliedClause(item["clause"], item["slice"], item["by"], tuple(item["chain"]))
            for item in header["implied"]
        ),
        notes=tuple(header["notes"]),
        accepted=tuple(header["accepted"]),
        seed=header["seed"],
        looks=header["looks"],
    )


def _requests(rows: Sequence[Row]) -> tuple[tuple[Request, ...], dict[str, Run]]:
    requests: list[Request] = []
    runs: dict[str, Run] = {}
    for row in rows:
        if row.request is not None and row.run is not None:
            if row.request.key in runs:
                raise ValueError(f"the request {row.request.key} is given twice")
            requests.append(row.request)
            runs[row.request.key] = row.run
    return tuple(requests), runs


def _slices(names: Sequence[str], rows: Sequence[Row]) -> dict[str, tuple[str, ...]]:
    """Return the keys of each slice, in the order of their places, which must have no gap."""
    members: dict[str, dict[int, str]] = {name: {} for name in names}
    for row in rows:
        for name, at in row.places:
            if at in members[name]:
                raise ValueError(f"the slice {name} has two requests at {at}")
            members[name][at] = row.unit.key
    found: dict[str, tuple[str, ...]] = {}
    for name, keys in members.items():
        if keys.keys() != set(range(len(keys))):
            raise ValueError(f"the slice {name} lacks a request")
        found[name] = tuple(keys[at] for at in range(len(keys)))
    return found


def _timing(header: Mapping[str, Any], rows: Sequence[Row]) -> Timing:
    return Timing(
        _units(rows, TIMED_RUN),
        {row.unit.key: row.repeats for row in rows if row.repeats is not None},
        _float(header["peak_memory"]),
    )


def _units(rows: Sequence[Row], kind: str) -> tuple[Unit, ...]:
    return tuple(row.unit for row in rows if row.kind == kind)


def _crosscheck(value: Mapping[str, Any]) -> CrossCheck:
    measured, certified = _float(value["measured"]), _float(value["certified"])
    if measured is None or certified is None:
        raise ValueError(f"the cross-check of {value['block']} has no numbers")
    return CrossCheck(
        value["block"],
        value["requests"],
        measured,
        certified,
        _float(value["tightness"]),
        value["request"],
    )


def _real(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(float(value))


def _float(value: Any) -> float | None:
    if isinstance(value, str):
        found = float(value)
        if math.isfinite(found):
            raise ValueError(f"the number {value!r} is written as a text")
        return found
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TypeError(f"{value!r} is no number")
    return value


# --- stated --------------------------------------------------------------------------------------


_Item = TypeVar("_Item")


def stated_json(program: Program) -> dict[str, Any]:
    """Return a program as plain JSON data, with orders, names and wording as they were stated."""
    return {
        "canonical": document_json(program),
        "slices": [slice_.name for slice_ in program.slices],
        "tables": [table.name for table in program.tables],
        "metrics": [metric.name for metric in program.metrics],
        "clauses": [
            {
                "id": clause.id,
                "text": clause.text,
                "require": formula_json(clause.require),
                "slices": list(clause.slices),
            }
            for clause in program.clauses
        ],
    }


def stated_program(value: Any) -> Program:
    """Return the program of `stated_json`.

    Raises ValueError, TypeError, KeyError or Refusal where the data are not such a program, or what
    was stated has another digest than the canonical form beside it.
    """
    canonical = value["canonical"]
    held = from_json(canonical, "the program of the trace")
    clauses = {clause.id: clause for clause in held.clauses}
    program = replace(
        held,
        slices=_in_order(held.slices, value["slices"], lambda slice_: slice_.name),
        tables=_in_order(held.tables, value["tables"], lambda table: table.name),
        metrics=_in_order(held.metrics, value["metrics"], lambda metric: metric.name),
        clauses=tuple(_worded(clauses[entry["id"]], entry) for entry in value["clauses"]),
    )
    if digest(program) != canonical["digest"]:
        raise ValueError("the program is another than its digest says")
    return program


def _in_order(
    items: Sequence[_Item], names: Sequence[str], name_of: Callable[[_Item], str]
) -> tuple[_Item, ...]:
    known = {name_of(item): item for item in items}
    return tuple(known[name] for name in names)


def _worded(clause: Clause, entry: Any) -> Clause:
    if not isinstance(entry["text"], str):
        raise TypeError(f"the wording of {clause.id} is no text")
    return replace(
        clause,
        text=entry["text"],
        require=formula_from_json(entry["require"]),
        slices=tuple(entry["slices"]),
    )
