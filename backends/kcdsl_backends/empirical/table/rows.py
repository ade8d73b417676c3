"""The rows of a trace: one for each request, for each timed run in the order they ran, and so on.

Values are lists of float64, which preserves NaN, infinities, the sign of zero and empty arrays; a
missing value is null, which differs from an empty list.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from kcdsl.ir.kernels import LOGITS
from kcdsl.ir.terms import Program
from kcdsl_backends.empirical.statistics.estimates import rounded_sum
from kcdsl_backends.empirical.table.evidence import Array, EvidenceTable, RequestRun, SamplingUnit
from kcdsl_backends.requests import Request

REQUEST, TIMED_RUN, CERTIFIED, FLOOR = "request", "timed_run", "certified", "noise_floor"
_NUMBERS = pa.list_(pa.field("element", pa.float64(), nullable=False))
_WHOLE = pa.list_(pa.field("element", pa.int64(), nullable=False))
_TEXTS = pa.map_(pa.string(), pa.string())
_COLUMNS = (
    ("kind", pa.string()),
    ("request", pa.string()),
    ("id", pa.string()),
    ("line", pa.int64()),
    ("tokens", _WHOLE),
    ("fields", pa.string()),
    ("length", pa.int64()),
    ("slices", pa.list_(pa.field("element", pa.string(), nullable=False))),
    ("places", _WHOLE),
    ("rng_seed", pa.uint64()),
    ("failure", pa.string()),
    ("nonfinite", pa.int64()),
    ("problems", _TEXTS),
    ("digests", _TEXTS),
    ("replay_signature", pa.string()),
    ("repeats_equal", pa.int64()),
    ("repeats_made", pa.int64()),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A unit of a kind; one of the kind REQUEST has the request and its run as well.

    `places` has the positions of the request in its slices; `repeats` counts (equal, made).
    """

    kind: str
    unit: SamplingUnit
    request: Request | None = None
    run: RequestRun | None = None
    places: tuple[tuple[str, int], ...] = ()
    repeats: tuple[int, int] | None = None


def schema(metrics: Sequence[str]) -> pa.Schema:
    """Return the schema of rows whose units have values of these metrics."""
    columns = [pa.field(name, kind) for name, kind in _COLUMNS]
    if metrics:
        columns.append(pa.field("metrics", pa.struct([(name, _NUMBERS) for name in metrics])))
    return pa.schema(columns)


def metrics_in(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the sorted names of all values."""
    return tuple(sorted({name for row in rows for name in row.unit.values}))


# --- to a table ----------------------------------------------------------------------------------


def table(rows: Sequence[Row], metrics: Sequence[str]) -> pa.Table:
    """Return rows as a table of `schema(metrics)`; raises TypeError for values of another type."""
    columns: dict[str, Any] = {name: [] for name, _ in _COLUMNS}
    for row in rows:
        for name, value in _cells(row).items():
            columns[name].append(value)
    arrays = [pa.array(columns[name], kind) for name, kind in _COLUMNS]
    if metrics:
        arrays.append(_metrics(rows, metrics))
    return pa.Table.from_arrays(arrays, schema=schema(metrics))


def _cells(row: Row) -> dict[str, Any]:
    unit, request, run = row.unit, row.request, row.run
    cells: dict[str, Any] = dict.fromkeys(name for name, _ in _COLUMNS)
    cells |= {
        "kind": row.kind,
        "request": unit.key,
        "length": unit.tokens,
        "failure": unit.failure,
        "problems": list(unit.problems.items()),
    }
    if row.repeats is not None:
        cells["repeats_equal"], cells["repeats_made"] = row.repeats
    if request is not None and run is not None:
        cells |= {
            "id": request.id,
            "line": request.line,
            "tokens": request.tokens,
            "fields": fields_text(request.fields),
            "slices": [name for name, _ in row.places],
            "places": [at for _, at in row.places],
            "rng_seed": run.seed,
            "nonfinite": run.nonfinite,
            "digests": list(run.digests.items()),
            "replay_signature": None if unit.failure is not None else run.replay_signature,
        }
    return cells


def fields_text(fields: Mapping[str, str | bool | Fraction]) -> str:
    """Return the fields of a request as JSON; numbers as {"number": "p/q"}."""
    plain = {
        name: {"number": f"{value.numerator}/{value.denominator}"}
        if isinstance(value, Fraction)
        else value
        for name, value in fields.items()
    }
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _metrics(rows: Sequence[Row], metrics: Sequence[str]) -> pa.StructArray:
    children = [_lists([row.unit.values.get(name) for row in rows]) for name in metrics]
    fields = [pa.field(name, _NUMBERS) for name in metrics]
    return pa.StructArray.from_arrays(children, fields=fields)


def _lists(arrays: Sequence[Array | None]) -> pa.ListArray:
    """Return a column of lists that holds the bits of the arrays; None is null."""
    for array in arrays:
        if array is not None and (array.dtype != np.float64 or array.ndim != 1):
            raise TypeError(f"values are {array.dtype} of shape {array.shape}, not float64 [N]")
    sizes = [0 if array is None else array.size for array in arrays]
    flat = [array for array in arrays if array is not None]
    return pa.ListArray.from_arrays(
        pa.array(np.concatenate(([0], np.cumsum(sizes))), pa.int32()),
        pa.array(np.concatenate(flat) if flat else np.empty(0), pa.float64()),
        type=_NUMBERS,
        mask=pa.array([array is None for array in arrays], pa.bool_()),
    )


# --- from a table --------------------------------------------------------------------------------


def rows_of(found: pa.Table, metrics: Sequence[str]) -> Iterator[Row]:
    """Yield the rows of a table of `schema(metrics)`.

    Raises ValueError, TypeError or KeyError for rows that `table` does not write.
    """
    for batch in found.to_batches():
        plain = [name for name, _ in _COLUMNS]
        cells = batch.select(plain).to_pylist(maps_as_pydicts="strict")
        values = {name: _arrays(batch.column("metrics").field(name)) for name in metrics}
        for i, cell in enumerate(cells):
            own = {name: array for name, at in values.items() if (array := at(i)) is not None}
            yield _row(cell, own)


def _arrays(column: pa.ListArray) -> Callable[[int], Array | None]:
    """Return the function from the number of a row to its values."""
    valid = column.is_valid().to_numpy(zero_copy_only=False)
    ends = column.offsets.to_numpy()
    flat = column.values.to_numpy(zero_copy_only=column.values.null_count == 0)
    if column.values.null_count:
        raise ValueError("a value is missing in a list of numbers")
    return lambda i: flat[ends[i] : ends[i + 1]] if valid[i] else None


def _row(cell: Mapping[str, Any], values: Mapping[str, Array]) -> Row:
    unit = SamplingUnit(
        _required(cell, "request"),
        _required(cell, "length"),
        values,
        cell["failure"],
        _required(cell, "problems"),
    )
    if cell["kind"] in (TIMED_RUN, CERTIFIED, FLOOR):
        return Row(cell["kind"], unit)
    if cell["kind"] != REQUEST:
        raise ValueError(f"a row of the kind {cell['kind']!r}")
    request = Request(
        unit.key,
        _required(cell, "id"),
        tuple(_required(cell, "tokens")),
        read_fields(_required(cell, "fields")),
        _required(cell, "line"),
    )
    run = RequestRun(
        unit, _required(cell, "rng_seed"), _required(cell, "digests"), _required(cell, "nonfinite")
    )
    signature = None if unit.failure is not None else run.replay_signature
    if cell["replay_signature"] != signature:
        raise ValueError(f"{unit.key}: the replay signature does not belong to the digests")
    repeats = None
    if cell["repeats_made"] is not None:
        repeats = (_required(cell, "repeats_equal"), cell["repeats_made"])
    places = tuple(zip(_required(cell, "slices"), _required(cell, "places"), strict=True))
    return Row(REQUEST, unit, request, run, places, repeats)


def _required(cell: Mapping[str, Any], name: str) -> Any:
    if cell[name] is None:
        raise ValueError(f"a row has no `{name}`")
    return cell[name]


def read_fields(text: str) -> dict[str, str | bool | Fraction]:
    """Return the fields of `fields_text`; raises ValueError or TypeError."""
    found: dict[str, str | bool | Fraction] = {}
    for name, value in json.loads(text).items():
        if isinstance(value, dict):
            above, _, below = value["number"].partition("/")  # "1e9999999" would take all memory
            found[name] = Fraction(int(above), int(below))
        elif isinstance(value, str | bool):
            found[name] = value
        else:
            raise TypeError(f"the field {name} is no text, truth value or number")
    return found


# --- trace records -------------------------------------------------------------------------------


def sampling_of(program: Program) -> dict[str, float] | None:
    """Return the sampling parameters: those of the contract for a server or a recording, else of
    the whole law; None for a recording without them."""
    service, recording = program.infer.service, program.infer.recording
    if service is None and (recording is None or recording.format == LOGITS):
        return {"temperature": float(program.constants.temperature), "top_p": 1.0, "top_k": 0}
    logs = service.logprobs if service is not None else None
    if recording is not None:
        logs = recording.logprobs
    if logs is None:
        return None
    return {
        "temperature": float(logs.temperature),
        "top_p": float(logs.top_p),
        "top_k": logs.top_k,
        "min_p": float(logs.min_p),
    }


TRACE_SCHEMA = "kcdsl.trace/1"


def records(evidence: EvidenceTable) -> dict[str, dict[str, Any]]:
    """Return the trace record of every request, by its key.

    A failed request has no replay signature, as it has no outputs to compare.
    """
    timed: dict[str, list[float]] = {}
    for unit in evidence.timing.runs:
        seconds = float(unit.values["latency"][0])
        if not math.isnan(seconds):
            timed.setdefault(unit.key, []).append(seconds)
    inside: dict[str, list[str]] = {}
    for name, keys in evidence.slices.items():
        for key in keys:
            inside.setdefault(key, []).append(name)
    kernels = {side: str(evidence.kernels[side]["digest"]) for side in ("train", "infer")}
    found = {}
    for request in evidence.requests:
        run = evidence.runs[request.key]
        unit = run.unit
        found[request.key] = {
            "schema": TRACE_SCHEMA,
            "request": request.key,
            "slices": inside.get(request.key, []),
            "build_fingerprint": kernels["infer"],
            "reference_fingerprint": kernels["train"],
            "request_shape": [1, request.length],
            "rng_seed": run.seed,
            "sampling_params": sampling_of(evidence.program),
            "replay_signature": None if unit.failure is not None else run.replay_signature,
            "digests": dict(sorted(run.digests.items())),
            "failure": unit.failure,
            "nonfinite": run.nonfinite,
            "values": {name: summary(v) for name, v in sorted(unit.values.items())},
            "latency_s": timed.get(request.key, []),
        }
    return found


def summary(values: Array) -> dict[str, float | int | None]:
    """Return the numbers for percentiles, maxima and means of a request: n, sum, smallest, largest;
    None for those that are not finite."""
    finite = bool(np.isfinite(values).all()) and values.size > 0
    total = rounded_sum(values) if finite else math.inf
    return {
        "n": int(values.size),
        "sum": total if math.isfinite(total) else None,
        "min": float(values.min()) if finite else None,
        "max": float(values.max()) if finite else None,
    }
