"""Traces: evidence written as one Parquet file, and read back or refused.

A trace holds the rows of `rows`, and in its footer the header and the seal. A file that is not
intact, of another version, or not written by this program is refused before it is used.
The seal is the sha256 of every byte of the file, with zeros in place of the seal. It is in the
key-value metadata of the footer, where a reader finds it without parsing the rest. It detects
damage and accidental changes; it is no signature.

The header is everything in evidence but its rows, as JSON. Numbers that are not finite are written
as "nan", "inf" and "-inf": JSON has no such numbers. The canonical form of a program keeps only its
meaning; a report also shows the author's wording, order and names. So a header holds these too, and
both must have the same digest.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from kcdsl.check.stored import formula_from_json, from_json
from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.canonical import digest, document_json, formula_json
from kcdsl.ir.terms import Clause, Program
from kcdsl.metrics.definition import CONFIDENCES, LOGS, RANKED
from kcdsl.source.files import read_bytes
from kcdsl.verdict.report import CrossCheck, ImpliedClause, Precheck
from kcdsl_backends.empirical.table import rows
from kcdsl_backends.empirical.table.evidence import EvidenceTable, RequestRun, Timing
from kcdsl_backends.empirical.table.parquet import read_parquet
from kcdsl_backends.empirical.table.rows import CERTIFIED, FLOOR, TIMED_RUN, Row, sampling_of
from kcdsl_backends.requests import Request

HEADER = "kcdsl.trace"
_TOKENS = 2**20
"""Approximate number of tokens in one row group."""
_WAY_OUT = "evaluate again: `kcdsl evaluate` writes out/trace.parquet"


@dataclass(frozen=True, slots=True)
class Trace:
    """The content of a trace: the evidence, the report on it, and the digest of the file."""

    evidence: EvidenceTable
    report: Mapping[str, Any]
    digest: str


def trace_bytes(evidence: EvidenceTable, report: Mapping[str, Any]) -> bytes:
    """Return the bytes of the trace of the evidence and of the report on it (its JSON)."""
    every = _rows(evidence)
    metrics = rows.metrics_in(every)
    sink = io.BytesIO()
    with pq.ParquetWriter(
        sink, rows.schema(metrics), compression="zstd", store_schema=False, write_statistics=False
    ) as writer:
        for group in _groups(every):
            writer.write_table(rows.table(group, metrics))
        header = json.dumps(header_of(evidence, every, metrics, report), allow_nan=False)
        writer.add_key_value_metadata({HEADER: header, SEAL: UNSEALED})
    return sealed(sink.getvalue())


def _rows(evidence: EvidenceTable) -> list[Row]:
    places: dict[str, list[tuple[str, int]]] = {}
    for name, keys in evidence.slices.items():
        for at, key in enumerate(keys):
            places.setdefault(key, []).append((name, at))
    found = [
        Row(
            rows.REQUEST,
            evidence.runs[request.key].unit,
            request,
            evidence.runs[request.key],
            tuple(places.get(request.key, ())),
            evidence.timing.repeats.get(request.key),
        )
        for request in evidence.requests
    ]
    others = (
        (rows.TIMED_RUN, evidence.timing.runs),
        (rows.CERTIFIED, evidence.certified.values()),
        (rows.FLOOR, evidence.floor.values()),
    )
    return [*found, *(Row(kind, unit) for kind, units in others for unit in units)]


def _groups(every: Sequence[Row]) -> Iterator[Sequence[Row]]:
    start = held = 0
    for end, row in enumerate(every, 1):
        held += row.unit.tokens
        if held >= _TOKENS:
            yield every[start:end]
            start, held = end, 0
    yield every[start:]


# --- reading -------------------------------------------------------------------------------------


def read_trace(path: Path) -> Trace:
    """Read a trace; raises Refusal (KC630, KC631) if it cannot be relied upon."""
    data, name = read_bytes(path), str(path)
    stated = seal_of(data)
    if stated is None:
        raise _unusable(name, "it is no trace, or was cut short")
    if not is_intact(data):
        raise refuse(
            codes.TRACE_CHANGED,
            f"{name} is not as it was written: its digest is another than it states",
            help=_WAY_OUT,
        )
    try:
        found = _read(data, name, stated)
        _check_arrays(found.evidence)
        return found
    except (pa.ArrowException, OSError) as error:
        raise _unusable(name, str(error).splitlines()[0]) from error
    except Refusal as error:
        raise _unusable(name, str(error)) from error
    except (
        LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError,
    ) as error:  # fmt: skip
        raise _unusable(name, f"{type(error).__name__}: {error}") from error


def _read(data: bytes, name: str, stated: str) -> Trace:
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        found = (file.metadata.metadata or {}).get(HEADER.encode())
        if found is None:
            raise ValueError("it has no header")
        header = json.loads(found)
        if header["schema"] != TRACE_SCHEMA:
            raise ValueError(f"its schema is {header['schema']}, not {TRACE_SCHEMA}")
        expected, columns = rows.schema(header["metrics"]), file.schema_arrow
        for column in expected:
            if column.name not in columns.names:
                raise ValueError(f"it has no column {column.name}")
            if columns.field(column.name).type != column.type:
                kind = columns.field(column.name).type
                raise ValueError(f"its column {column.name} holds {kind}, not {column.type}")
    table = read_parquet(data).select(expected.names)
    evidence = evidence_of(header, list(rows.rows_of(table, header["metrics"])))
    return Trace(evidence, header["report"], f"sha256:{stated}")


_TOGETHER = (CONFIDENCES, RANKED, LOGS, ("margin", "top1_overlap"))
"""Arrays that one function reads, entry by entry."""


def _check_arrays(evidence: EvidenceTable) -> None:
    """Raise ValueError for arrays of shapes, and counts of repeats, that no measurement gives."""
    for unit in (run.unit for run in evidence.runs.values()):
        for names in _TOGETHER:
            if len({unit.values[name].size for name in names if name in unit.values}) > 1:
                raise ValueError(
                    f"{unit.key}: {', '.join(names)} differ in their numbers of values"
                )
    for unit in evidence.timing.runs:
        if "latency" not in unit.values or unit.values["latency"].size != 1:
            raise ValueError(f"a timed run of {unit.key} has no time, or several")
    for key, (equal, made) in evidence.timing.repeats.items():
        if not 0 <= equal <= made or made == 0:
            raise ValueError(f"{equal} of {made} repeats of {key} are equal")


def _unusable(name: str, why: str) -> Refusal:
    return refuse(codes.TRACE_FILE, f"{name} is no usable trace: {why}", help=_WAY_OUT)


# --- sealing -------------------------------------------------------------------------------------


SEAL = "kcdsl.digest"
UNSEALED = "sha256:" + "0" * 64
_SEAL = re.compile(rb"kcdsl\.digest[^\x20-\x7e]\x47sha256:([0-9a-f]{64})")
"""The key, then tag and length (71) of the value, as the footer encodes them."""


def sealed(data: bytes) -> bytes:
    """Return a file that was written with `UNSEALED`, with its digest; raises ValueError."""
    found = _SEAL.search(data)
    if found is None or found[1] != b"0" * 64:
        raise ValueError("there is no place for the digest")
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[: found.start(1)] + digest + data[found.end(1) :]


def seal_of(data: bytes) -> str | None:
    """Return the digest that a file states; None if it states none or several."""
    found = _SEAL.findall(data)
    return found[0].decode() if len(found) == 1 else None


def is_intact(data: bytes) -> bool:
    """Return whether a file has the digest that it states."""
    found = _SEAL.search(data)
    if found is None or seal_of(data) is None:
        return False
    digest = hashlib.sha256(data[: found.start(1)])
    digest.update(b"0" * 64)
    digest.update(data[found.end(1) :])
    return digest.hexdigest().encode() == found[1]


TRACE_SCHEMA = "kcdsl.trace/3"
_PLAIN = ("contract", "model", "kernels", "environment", "bounding", "spoiled")


def header_of(
    evidence: EvidenceTable, rows: Sequence[Row], metrics: Sequence[str], report: Mapping[str, Any]
) -> Any:
    """Return the header of rows; `metrics` are those of the rows, `report` is the report on
    them."""
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
        "prechecks": [_written(check) for check in evidence.prechecks],
        "crosschecks": [_written(check) for check in evidence.crosschecks],
        "implied": [item.to_json() for item in evidence.implied],
        "notes": list(evidence.notes),
        "accepted": list(evidence.accepted),
        "seed": evidence.seed,
        "looks": evidence.looks,
        "report": report,
    }


def evidence_of(header: Mapping[str, Any], rows: Sequence[Row]) -> EvidenceTable:
    """Return the evidence of a header and its rows.

    Raises KeyError, TypeError, ValueError or Refusal if they do not belong together.
    """
    _check_header(header)
    program = stated_program(header["program"])
    if header["contract"]["digest"] != f"sha256:{header['program']['canonical']['digest']}":
        raise ValueError("the program is another than the contract's digest says")
    if header["rows"] != Counter(row.kind for row in rows):
        raise ValueError("it lacks rows, or has more than were written")
    requests, runs = _requests(rows)
    for row in rows:
        if row.unit.key not in runs:
            raise ValueError(f"a row is of {row.unit.key}, which is no request")
    kinds = (TIMED_RUN, CERTIFIED, FLOOR)
    units = {kind: tuple(row.unit for row in rows if row.kind == kind) for kind in kinds}
    return EvidenceTable(
        program=program,
        requests=requests,
        runs=runs,
        slices=_slices(header["slices"], rows),
        measured=frozenset(header["measured"]),
        encoder=bool(header["encoder"]),
        data=tuple(header["data"]),
        timing=Timing(
            units[TIMED_RUN],
            {row.unit.key: row.repeats for row in rows if row.repeats is not None},
            _float(header["peak_memory"]),
        ),
        prechecks=tuple(Precheck(**_read_reals(check, "value")) for check in header["prechecks"]),
        crosschecks=tuple(_crosscheck(check) for check in header["crosschecks"]),
        certified={unit.key: unit for unit in units[CERTIFIED]},
        floor={unit.key: unit for unit in units[FLOOR]},
        implied=tuple(
            ImpliedClause(item["clause"], item["slice"], item["by"], tuple(item["chain"]))
            for item in header["implied"]
        ),
        notes=tuple(header["notes"]),
        accepted=tuple(header["accepted"]),
        seed=header["seed"],
        looks=header["looks"],
        **{name: header[name] for name in _PLAIN},
    )


_OBJECTS = (*_PLAIN, "program", "rows", "report")
_TEXTS = ("measured", "metrics", "slices", "notes", "accepted")


def _check_header(header: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for entries that `header_of` does not write."""
    kernels = [header["kernels"][side] for side in ("train", "infer")]
    objects = [*(header[name] for name in _OBJECTS), *kernels, *header["data"]]
    if not all(isinstance(value, dict) for value in objects):
        raise TypeError("an entry of its header is no object")
    texts = [text for name in _TEXTS for text in header[name]]
    texts += [*header["contract"].values(), *header["spoiled"].values()]
    texts += [side["digest"] for side in kernels]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("an entry of its header is no text")
    seed, looks = header["seed"], header["looks"]
    if type(seed) is not int or seed < 0:
        raise ValueError(f"its seed is {seed!r}")
    if looks is not None and (type(looks) is not int or looks < 1):
        raise ValueError(f"its number of looks is {looks!r}")


def _requests(rows: Sequence[Row]) -> tuple[tuple[Request, ...], dict[str, RequestRun]]:
    requests: list[Request] = []
    runs: dict[str, RequestRun] = {}
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


def _crosscheck(value: Mapping[str, Any]) -> CrossCheck:
    found = CrossCheck(**_read_reals(value, *_REALS[1:]))
    if None in (found.measured, found.certified):
        raise ValueError(f"the cross-check of {found.block} has no numbers")
    return found


_REALS = ("value", "measured", "certified", "tightness")
"""The numbers of checks, which may be infinite."""


def _written(check: Precheck | CrossCheck) -> dict[str, Any]:
    found = asdict(check)
    return found | {name: _real(found[name]) for name in _REALS if name in found}


def _read_reals(check: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {**check, **{name: _float(check[name]) for name in names}}


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
    """Return a program as plain JSON data, with the author's order, names and wording."""
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

    Raises ValueError, TypeError, KeyError or Refusal if the data are not such a program, or if the
    stated form has another digest than the canonical one.
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
