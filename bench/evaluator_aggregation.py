"""Slice aggregation compared with a hand-written query of the same content.

    python -m bench.evaluator_aggregation [ROWS]

A temporary folder gets tokens of 48 slices in 20 Parquet files. Both queries count the values above
two limits and compute the exact p50, p95 and p99 of every slice. They run alternately on new
connections; the figure is the median of the ratios.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from statistics import median

import numpy as np

from bench.common import Better, Figure, report
from kcdsl_backends.empirical.sources.tokens.database import (
    Found,
    ValueLimit,
    WantedCounts,
    count_tokens,
    opened,
)
from kcdsl_backends.empirical.sources.tokens.slices import membership
from kcdsl_backends.empirical.sources.tokens.tables import open_tables

ROWS = 2 * 10**8
FILES, SLICES, ROUNDS = 20, 48, 5
LIMITS = (0.01, 0.05)
LIMIT = 1.3
_MEMORY = 8 * 2**30
_HAND = """
SELECT slice, count(*), sum((kl > 0.01::DOUBLE)::INT), sum((kl > 0.05::DOUBLE)::INT),
       quantile_disc(kl, [0.5, 0.95, 0.99])
FROM read_parquet('{folder}/*.parquet') GROUP BY slice
"""


def aggregation_figures(rows: int = ROWS) -> list[Figure]:
    """Make the table, measure both queries alternately, and compare their answers."""
    with tempfile.TemporaryDirectory(prefix="kcdsl-bench-") as name:
        folder = Path(name)
        _write(folder, rows)
        ratios, ours_seconds = [], []
        for _ in range(ROUNDS):
            hand, wanted = _timed(lambda: _by_hand(folder))
            ours, found = _timed(lambda: _ours(folder))
            ratios.append(ours / hand)
            ours_seconds.append(ours)
            _compare(wanted, found)
    where = f"{rows:,} rows, {SLICES} slices, {FILES} files, median of {ROUNDS} turns"
    lower = Better.LOWER
    return [
        Figure("aggregation / hand-written query", median(ratios), lower, LIMIT, where),
        Figure(
            "nanoseconds of a row, aggregated",
            median(ours_seconds) / rows * 1e9,
            lower,
            None,
            "wall time, with whatever else runs on the machine",
        ),
    ]


def _write(folder: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = pa.array([f"slice_{i:02d}" for i in range(SLICES)])
    for file in range(FILES):
        generator = np.random.default_rng(file)
        n = rows // FILES
        lengths = generator.integers(100, 900, size=n // 100 + 1)
        request = np.repeat(np.arange(lengths.size), lengths)[:n]
        of = generator.integers(0, SLICES, size=lengths.size).astype(np.int32)[request]
        kl = np.exp(generator.normal(-7, 1.5, size=n)).astype(np.float32)
        table = pa.table(
            {
                "request": pa.array(request + file * lengths.size),
                "slice": pa.DictionaryArray.from_arrays(pa.array(of), names),
                "kl": pa.array(kl),
            }
        )
        pq.write_table(
            table, folder / f"part{file:02d}.parquet", compression="zstd", row_group_size=2**20
        )


def _by_hand(folder: Path) -> list[tuple[object, ...]]:
    import duckdb

    with duckdb.connect() as connection:
        connection.execute(f"SET memory_limit='{_MEMORY // 2**20}MiB'")
        return connection.execute(_HAND.format(folder=folder)).fetchall()


def _ours(folder: Path) -> Found:
    table = open_tables([folder])
    asked = WantedCounts(
        "kl",
        tuple(ValueLimit("<=", Fraction(limit)) for limit in LIMITS),
        (Fraction(1, 2), Fraction(19, 20), Fraction(99, 100)),
    )
    with opened(table, memory=_MEMORY) as database:
        return count_tokens(database, membership(table, None), [asked])


def _timed(work: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


def _compare(wanted: object, found: object) -> None:
    assert isinstance(wanted, list)
    assert isinstance(found, dict)
    if len(wanted) != len(found):
        raise ValueError(f"{len(found)} slices for {len(wanted)}")
    for name, rows, *beyond, ranks in wanted:
        ours = found[name, "kl"]
        if (ours.rows, list(ours.beyond), list(ours.percentiles)) != (rows, beyond, ranks):
            raise ValueError(f"the answers differ on {name}")


if __name__ == "__main__":
    given = int(float(sys.argv[1])) if len(sys.argv) > 1 else ROWS
    sys.exit(report("evaluator_aggregation", aggregation_figures(given)))
