"""Recordings as columns of checked cells, from files read by their suffix.

A file that cannot be read completely is refused, and so is a cell of the wrong type for its role,
with its file, row and column. Nothing is repaired or filled in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.codes import Code
from kcdsl.diagnostics.model import Refusal
from kcdsl.source.files import MARK, MARKED, UNMARKED, json_value, read_bytes, shown


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of a file: `columns` hold one cell per row, None for null."""

    name: str
    sha256: str
    count: int
    columns: Mapping[str, Sequence[Any]]
    word: str = "row"
    """The word for a row in messages: "row" or "line"."""
    numbers: Sequence[int] | None = None
    """The number of each row in messages; None for 1, 2, 3, ..."""

    def number(self, row: int) -> int:
        """Return the number of a row in messages, from 1."""
        return row + 1 if self.numbers is None else self.numbers[row]

    def place(self, row: int) -> str:
        """Return the place of a row, such as "rollouts.jsonl, line 7"."""
        return f"{self.name}, {self.word} {self.number(row)}"

    def refusal(
        self, row: int, column: str, what: str, help: str | None = None, code: Code | None = None
    ) -> Refusal:
        """Return the refusal of one cell."""
        return refuse(
            code or codes.MALFORMED_ROLLOUT,
            f"{self.place(row)}, column `{column}`: {what}",
            help=help or "mend the row, or leave it out of the recording",
        )

    def cell(self, row: int, column: str) -> Any:
        """Return a cell; raises Refusal for null."""
        found = self.columns[column][row]
        if found is None:
            raise self.refusal(row, column, "null")
        return found

    def listed(self, row: int, column: str) -> Sequence[Any] | NDArray[Any]:
        """Return a cell that is a list; raises Refusal for null and anything else."""
        found = self.cell(row, column)
        if not _is_list(found):
            raise self.refusal(row, column, "must be a list")
        return cast("Sequence[Any] | NDArray[Any]", found)

    def single(self, row: int, column: str) -> bool:
        """Return whether a cell is a single value instead of a list."""
        return not _is_list(self.cell(row, column))

    # --- typed cells -----------------------------------------------------------------------------

    def array(self, row: int, column: str, dimensions: int) -> NDArray[np.float64]:
        """Return a cell as a float64 array with this number of dimensions; NaN is allowed.

        Raises Refusal for null, ragged lists and items that are no numbers.
        """
        found = self.cell(row, column)
        if isinstance(found, np.ndarray) and found.dtype.kind in "fiu":
            numbers = found
        else:
            bad = _first_non_number(found)
            if bad is not None:
                raise self.refusal(row, column, f"{bad[1]} at position {bad[0]}")
            try:
                numbers = np.asarray(found)
            except (ValueError, TypeError, OverflowError):
                raise self.refusal(row, column, "the lists differ in length") from None
        if numbers.size == 0 and numbers.ndim <= dimensions:
            numbers = np.zeros((0,) * dimensions)
        if numbers.dtype.kind not in "fiu":
            raise self.refusal(
                row, column, "holds something else than numbers, or numbers beyond 64 bits"
            )
        if numbers.ndim != dimensions:
            shape = "a number" if dimensions == 0 else f"a list of {dimensions} dimensions"
            raise self.refusal(row, column, f"must be {shape}, not {numbers.ndim}-dimensional")
        return numbers.astype(np.float64)

    def finite(self, row: int, column: str, dimensions: int) -> NDArray[np.float64]:
        """Return a cell as finite numbers; raises Refusal for NaN and infinities too."""
        numbers = self.array(row, column, dimensions)
        bad = np.argwhere(~np.isfinite(numbers))
        if bad.size or (dimensions == 0 and not np.isfinite(numbers)):
            where = "" if dimensions == 0 else f" at position {', '.join(map(str, bad[0]))}"
            raise self.refusal(row, column, f"{_shown(numbers, bad)}{where} is not finite")
        return numbers

    def whole(self, row: int, column: str, dimensions: int) -> NDArray[np.int64]:
        """Return a cell as whole numbers from 0 on, below 2^53."""
        numbers = self.finite(row, column, dimensions)
        wrong = (numbers != np.floor(numbers)) | (numbers < 0) | (numbers >= 2**53)
        if bool(wrong.any()):
            if dimensions == 0:
                raise self.refusal(row, column, f"{float(numbers):g} is no whole number from 0 on")
            bad = np.argwhere(wrong)
            at = ", ".join(map(str, bad[0]))
            raise self.refusal(row, column, f"{_shown(numbers, bad)} at position {at} is no id")
        found: NDArray[np.int64] = numbers.astype(np.int64)
        return found

    def flags(self, row: int, column: str) -> NDArray[np.bool_]:
        """Return a cell as a list of 0 and 1 (or booleans)."""
        found = self.cell(row, column)
        if isinstance(found, np.ndarray) and found.dtype.kind == "b" and found.ndim == 1:
            return found
        if isinstance(found, list) and found and all(isinstance(f, bool) for f in found):
            return np.array(found)
        numbers = self.finite(row, column, 1)
        if not bool(np.isin(numbers, (0.0, 1.0)).all()):
            raise self.refusal(row, column, "must hold 0 and 1 only")
        flags: NDArray[np.bool_] = numbers == 1.0
        return flags

    def text(self, row: int, column: str) -> str:
        """Return a cell as text; a whole number is taken as its digits."""
        found = self.cell(row, column)
        if isinstance(found, np.integer | int) and not isinstance(found, bool):
            return str(int(found))
        if not isinstance(found, str):
            raise self.refusal(row, column, "must be a text")
        return found


def _is_list(cell: Any) -> bool:
    return isinstance(cell, list | tuple) or (isinstance(cell, np.ndarray) and cell.ndim > 0)


def _first_non_number(value: Any) -> tuple[str, str] | None:
    """Return position, such as "3, 0", and description of the first null or truth value in nested
    lists, which numpy would convert to a number."""
    if not isinstance(value, list | tuple) or set(map(type, value)) <= {int, float}:
        return None
    for i, item in enumerate(value):
        if item is None or isinstance(item, bool):
            return str(i), "null" if item is None else f"the truth value {str(item).lower()}"
        inner = _first_non_number(item)
        if inner is not None:
            return f"{i}, {inner[0]}", inner[1]
    return None


def _shown(numbers: NDArray[np.float64], bad: NDArray[np.intp]) -> str:
    return f"{float(numbers[tuple(bad[0])]) if bad.size else float(numbers):g}"


# --- files ----------------------------------------------------------------------------------------


SUFFIXES = (".jsonl", ".parquet", ".safetensors")
"""The suffixes of supported files."""
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".bin")
_WAY_OUT = "write the recording again; `kcdsl explain rollouts` shows how"


def read_rows(path: Path, name: str) -> FileRows:
    """Read a recording; `name` is its name in the contract.

    Raises Refusal for a missing, damaged, empty or changing file, an unknown suffix, and columns of
    different lengths.
    """
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise refuse(
            codes.ROLLOUT_FILE,
            f"{shown(path)} is a pickle, which may run any code while it is opened",
            help="write Parquet, JSONL or safetensors where it was written;"
            " `kcdsl explain rollouts` has the lines for verl, SkyRL and slime",
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


def _jsonl(path: Path, name: str) -> FileRows:
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    data = read_bytes(path)
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            rows.append(_object(path, number, line))
            numbers.append(number)
    names = dict.fromkeys(key for row in rows for key in row)
    columns = {key: [row.get(key) for row in rows] for key in names}
    return FileRows(name, hashlib.sha256(data).hexdigest(), len(rows), columns, "line", numbers)


def _object(path: Path, number: int, data: bytes) -> dict[str, Any]:
    try:
        line = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(path, f"line {number} is not UTF-8: {error.reason}") from None
    if number == 1 and line.startswith(MARK):
        raise refuse(codes.MALFORMED_ROLLOUT, f"{shown(path)}, line 1: {MARKED}", help=UNMARKED)
    try:
        row = json_value(line)
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
    """A column of lists: the values of all rows in one array, sliced on access."""

    values: NDArray[Any]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    null: NDArray[np.bool_]

    def __len__(self) -> int:
        return self.starts.size

    def __getitem__(self, row: Any) -> Any:
        return None if self.null[row] else self.values[self.starts[row] : self.ends[row]]


def _parquet(path: Path, name: str) -> FileRows:
    import pyarrow as pa

    from kcdsl_backends.empirical.table.parquet import read_parquet

    data = read_bytes(path)
    try:
        table = read_parquet(data)
        if len(set(table.column_names)) < len(table.column_names):
            raise ValueError("two columns have one name")
        columns = {n: _column(table.column(n)) for n in table.column_names}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise _damaged(path, str(error).splitlines()[0]) from None
    return FileRows(name, hashlib.sha256(data).hexdigest(), table.num_rows, columns)


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


def _safetensors(path: Path, name: str) -> FileRows:
    """Read a batch: every tensor [rows, ...]; a file without text columns."""
    import torch

    from kcdsl.model.checkpoint.tensors import read_tensors

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
    return FileRows(name, file.sha256, next(iter(counts.values()), 0), columns)


def _cells(values: NDArray[Any]) -> Sequence[Any]:
    if values.ndim == 0:
        raise ValueError("a tensor without rows")
    if values.size == 0:
        raise ValueError("a tensor without numbers")
    return values.tolist() if values.ndim == 1 else list(values)


def _differing(counts: Mapping[str, int]) -> str:
    """Name one tensor for each number of rows."""
    first: dict[int, str] = {}
    for key, count in counts.items():
        first.setdefault(count, key)
    return ", ".join(f"{key} has {count}" for count, key in first.items())


_READERS: Mapping[str, Callable[[Path, str], FileRows]] = {
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".safetensors": _safetensors,
}
