"""Small token tables, and the same data as units in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData


@dataclass(frozen=True)
class Rows:
    """Tokens as columns: requests, slices, and the values of metrics (None: no value)."""

    requests: Sequence[str]
    slices: Sequence[str]
    metrics: Mapping[str, Sequence[float | None]]
    float32: bool = False

    def write(self, folder: Path, *, files: int = 1, group: int = 1024) -> list[Path]:
        """Write the rows, in order, into some files; return these."""
        n = len(self.requests)
        kind = pa.float32() if self.float32 else pa.float64()
        columns = {
            "request": pa.array(self.requests, pa.string()),
            "slice": pa.array(self.slices, pa.string()).dictionary_encode(),
            **{name: pa.array(values, kind) for name, values in self.metrics.items()},
        }
        table = pa.table(columns)
        ends = [round(n * i / files) for i in range(files + 1)]
        paths = []
        for i, (start, end) in enumerate(pairwise(ends)):
            path = folder / f"part{i:03d}.parquet"
            pq.write_table(table.slice(start, end - start), path, row_group_size=group)
            paths.append(path)
        return paths

    def stored(self, name: str) -> list[float | None]:
        """Return the values as the table stores them."""
        if not self.float32:
            return [None if x is None else float(x) for x in self.metrics[name]]
        with np.errstate(over="ignore"):
            return [None if x is None else float(np.float32(x)) for x in self.metrics[name]]

    def in_memory(self, name: str) -> SliceData:
        """Return a slice in the form of local evaluations: every value of every request."""
        inside = [i for i, found in enumerate(self.slices) if found == name]
        keys = list(dict.fromkeys(self.requests[i] for i in inside))
        units = []
        for key in keys:
            rows = [i for i in inside if self.requests[i] == key]
            values: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
            problems = {}
            for metric in self.metrics:
                stored = self.stored(metric)
                own = [stored[i] for i in rows]
                missing = sum(x is None for x in own)
                if missing:
                    problems[metric] = f"{missing} of {len(own)} values are missing"
                else:
                    values[metric] = np.array(own, dtype=np.float64)
            units.append(SamplingUnit(key, len(rows), values, problems=problems))
        return SliceData(name, tuple(units))
