"""Small Parquet files that expand to gigabytes are refused before decompression."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcdsl.diagnostics import Refusal
from kcdsl_backends.empirical.sources.rollouts.rows import read_rows
from kcdsl_backends.empirical.table import parquet
from kcdsl_backends.empirical.table.parquet import read_parquet

LONG = "x" * 2**10


def written(columns: Mapping[str, Any], times: int) -> bytes:
    """Return a file with the same columns repeated as row groups."""
    part, sink = pa.table(dict(columns)), io.BytesIO()
    with pq.ParquetWriter(sink, part.schema, compression="zstd") as writer:
        for _ in range(times):
            writer.write_table(part)
    return sink.getvalue()


BOMBS: Mapping[str, tuple[Mapping[str, Any], int]] = {
    "rows": ({"reward": np.zeros(2**14)}, 8),
    "values": ({"logs": [np.zeros(2**16)]}, 4),
    "bytes of text": ({"prompt": [LONG] * 2**9}, 8),
    "bytes without compression": ({"prompt": ["x" * 2**21]}, 2),
}


@pytest.mark.parametrize("what", BOMBS)
def test_files_with_huge_contents_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The limits are those of the product, divided by 1024, so that the files need little time."""
    data = written(*BOMBS[what])
    read_parquet(data)
    for name in ("_ROWS", "_VALUES", "_BYTES"):
        monkeypatch.setattr(parquet, name, getattr(parquet, name) // 2**10)
    with pytest.raises(ValueError, match=f"holds [0-9]+ {what} in {len(data)} bytes"):
        read_parquet(data)
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(Refusal, match="cannot be read: it holds"):
        read_rows(tmp_path / "a.parquet", "a.parquet")


def test_texts_are_read_in_their_types() -> None:
    kinds: Mapping[str, pa.DataType] = {
        "text": pa.string(),
        "large": pa.large_string(),
        "bytes": pa.binary(),
        "lists": pa.list_(pa.string()),
        "maps": pa.map_(pa.string(), pa.string()),
        "parts": pa.struct([("a", pa.string()), ("b", pa.float64())]),
        "number": pa.int64(),
    }
    cells = {
        "text": ["a", None, "a"],
        "large": ["b", "b", None],
        "bytes": [b"\xff", b"", None],
        "lists": [["a", "a"], None, []],
        "maps": [[("k", "v")], [], None],
        "parts": [{"a": "x", "b": 1.0}, None, {"a": None, "b": 2.0}],
        "number": [1, None, 3],
    }
    table = pa.table({name: pa.array(cells[name], kind) for name, kind in kinds.items()})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=1)
    assert read_parquet(sink.getvalue()).equals(table)
