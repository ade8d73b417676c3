"""From a file to rows, by its suffix; a file that cannot be read whole is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.model import Refusal
from kcdsl.source.files import MARK, MARKED, UNMARKED, read_bytes, shown
from kcdsl_backends.empirical.sources.rollouts.rows import Rows

SUFFIXES = (".jsonl", ".parquet", ".safetensors")
"""The files that are read."""
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin")
_WAY_OUT = "write the recording again; docs/rollouts.md shows how"


def read_rows(path: Path, name: str) -> Rows:
    """Read a recording; `name` is how the contract calls it.

    Raises Refusal for a missing, damaged, empty or changing file, a suffix that is not known and
    columns of different lengths.
    """
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise refuse(
            codes.ROLLOUT_FILE,
            f"{shown(path)} is a pickle, which may run any code while it is opened",
            help="write Parquet, JSONL or safetensors; docs/rollouts.md shows how",
        )
    if suffix not in _READERS:
        raise refuse(
            codes.ROLLOUT_FILE,
            f"{shown(path)}: recordings are {', '.join(SUFFIXES)} files",
            help=_WAY_OUT,
        )
    found = _READERS[suffix](path, name)
    if found.count == 0:
        raise refuse(codes.ROLLOUT_FILE, f"{shown(path)} has no rows", help=_WAY_OUT)
    return found


def _damaged(path: Path, error: object) -> Refusal:
    return refuse(codes.ROLLOUT_FILE, f"{shown(path)} cannot be read: {error}", help=_WAY_OUT)


# --- JSONL ---------------------------------------------------------------------------------------


def _jsonl(path: Path, name: str) -> Rows:
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    data = read_bytes(path)
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            rows.append(_object(path, number, line))
            numbers.append(number)
    names = dict.fromkeys(key for row in rows for key in row)
    columns = {key: [row.get(key) for row in rows] for key in names}
    return Rows(name, _digest(data), len(rows), columns, "line", numbers)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _object(path: Path, number: int, data: bytes) -> dict[str, Any]:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(found)
        if len(row) != len(found):
            keys = [key for key, _ in found]
            raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} comes twice")
        return row

    try:
        line = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(path, f"line {number} is not UTF-8: {error.reason}") from None
    if number == 1 and line.startswith(MARK):
        raise refuse(codes.MALFORMED_ROLLOUT, f"{shown(path)}, line 1: {MARKED}", help=UNMARKED)
    try:
        row = json.loads(line, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise refuse(
            codes.MALFORMED_ROLLOUT,
            f"{shown(path)}, line {number}: not a JSON object: {error}",
            help="each line is one object; a line that was cut off must go",
        ) from None
    if not isinstance(row, dict):
        raise refuse(
            codes.MALFORMED_ROLLOUT,
            f"{shown(path)}, line {number}: a row is a JSON object, not {type(row).__name__}",
            help='write {"prompt": [...], "tokens": [...], ...}',
        )
    return row


# --- Parquet -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Lists(Sequence[Any]):
    """A column of lists: the numbers of all rows in one array, cut where it is asked."""

    values: NDArray[Any]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    null: NDArray[np.bool_]

    def __len__(self) -> int:
        return self.starts.size

    def __getitem__(self, row: Any) -> Any:
        return None if self.null[row] else self.values[self.starts[row] : self.ends[row]]


def _parquet(path: Path, name: str) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    data = read_bytes(path)
    try:
        table = pq.read_table(pa.BufferReader(data))
        columns = {n: _column(table.column(n)) for n in table.column_names}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from None
    if len(columns) != len(table.column_names):
        raise _damaged(path, "two columns have one name")
    return Rows(name, _digest(data), table.num_rows, columns)


def _column(chunked: Any) -> Sequence[Any]:
    """Return the cells of a column: flat lists of numbers as arrays, others as Python values."""
    import pyarrow as pa

    kind = chunked.type
    listed = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if not listed or not (pa.types.is_integer(kind.value_type) or _is_float(kind.value_type)):
        found: list[Any] = chunked.to_pylist()
        return found
    whole = chunked.combine_chunks()
    parts = whole.chunks if isinstance(whole, pa.ChunkedArray) else [whole]
    joined = pa.concat_arrays(parts) if len(parts) != 1 else parts[0]
    if joined.values.null_count:
        return list(chunked.to_pylist())
    offsets = joined.offsets.to_numpy().astype(np.int64)
    null = np.asarray(joined.is_null().to_numpy(zero_copy_only=False), dtype=bool)
    return _Lists(joined.values.to_numpy(), offsets[:-1], offsets[1:], null)


def _is_float(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_float32(kind) or pa.types.is_float64(kind))


# --- safetensors ---------------------------------------------------------------------------------


def _safetensors(path: Path, name: str) -> Rows:
    """Read a batch: every tensor [rows, ...]; a file without text columns."""
    import torch

    from kcdsl.model.checkpoint import read_tensors

    columns: dict[str, Sequence[Any]] = {}
    try:
        file = read_tensors(path)
        for key in sorted(file.stored):
            tensor = file.tensor(key)
            wide = tensor.to(torch.float64) if tensor.is_floating_point() else tensor
            columns[key] = _cells(wide.numpy())
    except (ValueError, OSError) as error:
        raise _damaged(path, error) from None
    counts = {key: len(cells) for key, cells in columns.items()}
    if len(set(counts.values())) > 1:
        raise _damaged(path, f"its tensors have different numbers of rows: {_differing(counts)}")
    return Rows(name, file.sha256, next(iter(counts.values()), 0), columns)


def _cells(values: NDArray[Any]) -> Sequence[Any]:
    if values.ndim == 0:
        raise ValueError("a tensor without rows")
    return values.tolist() if values.ndim == 1 else list(values)


def _differing(counts: Mapping[str, int]) -> str:
    """Name one tensor for each number of rows."""
    first: dict[int, str] = {}
    for key, count in counts.items():
        first.setdefault(count, key)
    return ", ".join(f"{key} has {count}" for count, key in first.items())


_READERS: Mapping[str, Callable[[Path, str], Rows]] = {
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
}
