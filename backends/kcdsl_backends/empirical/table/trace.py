"""Writing evidence as a trace, and reading it back or refusing it.

A trace is one Parquet file: the rows of `rows`, and in its footer the header and the seal. What is
not intact, of another version, or not what this program writes is refused before anything is
concluded from it. The seal is the sha256 of every byte of the file, with zeros in its own place. It
stands in the key-value metadata of the footer, where a reader finds it without trusting the rest.
It shows damage and careless changes; it is no signature.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.source.files import read_bytes
from kcdsl_backends.empirical.table import rows
from kcdsl_backends.empirical.table.evidence import Evidence
from kcdsl_backends.empirical.table.header import TRACE_SCHEMA, evidence_of, header_of
from kcdsl_backends.empirical.table.rows import Row

HEADER = "kcdsl.trace"
_TOKENS = 2**20
"""About how many tokens are written together, as one group of rows."""
_WAY_OUT = "evaluate again: `kcdsl evaluate` writes out/trace.parquet"


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace holds: the evidence, the report as it was concluded then, and its digest."""

    evidence: Evidence
    report: Mapping[str, Any]
    digest: str


def trace_bytes(evidence: Evidence, report: Mapping[str, Any]) -> bytes:
    """Return the trace of evidence and of the report (its JSON) that was concluded from it."""
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


def _rows(evidence: Evidence) -> list[Row]:
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
    """Read a trace; raises Refusal (KC630, KC631) for what cannot be relied upon."""
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
        return _read(data, name, stated)
    except (pa.ArrowException, OSError) as error:
        raise _unusable(name, str(error).splitlines()[0]) from error
    except Refusal as error:
        raise _unusable(name, str(error)) from error
    except (
        KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError,
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
        table = file.read(columns=expected.names, use_threads=False)
    evidence = evidence_of(header, list(rows.rows_of(table, header["metrics"])))
    return Trace(evidence, header["report"], f"sha256:{stated}")


def _unusable(name: str, why: str) -> Refusal:
    return refuse(codes.TRACE_FILE, f"{name} is no usable trace: {why}", help=_WAY_OUT)


# --- sealing -------------------------------------------------------------------------------------


SEAL = "kcdsl.digest"
UNSEALED = "sha256:" + "0" * 64
_SEAL = re.compile(rb"kcdsl\.digest[^\x20-\x7e]\x47sha256:([0-9a-f]{64})")
"""The key, then of the value: its tag and its length, 71, as the footer encodes them."""


def sealed(data: bytes) -> bytes:
    """Return a file that was written with `UNSEALED`, with its digest; raises ValueError."""
    found = _SEAL.search(data)
    if found is None or found[1] != b"0" * 64:
        raise ValueError("there is no place for the digest")
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[: found.start(1)] + digest + data[found.end(1) :]


def seal_of(data: bytes) -> str | None:
    """Return the digest that a file states of itself, None where it states none or several."""
    found = _SEAL.findall(data)
    return found[0].decode() if len(found) == 1 else None


def is_intact(data: bytes) -> bool:
    """Say whether a file has the digest that it states."""
    found = _SEAL.search(data)
    if found is None or seal_of(data) is None:
        return False
    digest = hashlib.sha256(data[: found.start(1)])
    digest.update(b"0" * 64)
    digest.update(data[found.end(1) :])
    return digest.hexdigest().encode() == found[1]
