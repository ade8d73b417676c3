"""Token tables in DuckDB: counts and exact percentiles by slice, in bounded memory.

Exceedance is `NOT (x <= threshold)`, so that a NaN exceeds; both sides are doubles, because
`0.05::FLOAT > 0.05::DOUBLE` is true; a NULL is no value and is counted separately. A threshold is
rounded down to a double, which does not change comparisons of doubles. Percentiles are order
statistics of rank ceil(q n).

Data beyond the memory limit spill to a temporary folder. One query finds the percentiles of as many
metrics and slices as fit. A slice that does not fit is searched: rows between two values are
counted on both sides of pivots drawn among them, and the part with the wanted rank is searched
next, until it fits. Counts decide, so the result is exact for any pivots; NaN is the greatest
value, as DuckDB orders it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.inequalities import round_down, round_up
from kcdsl_backends.empirical.sources.tokens.tables import (
    PLACE,
    TokenTable,
    belonging_nowhere,
    double,
    literal,
    quoted,
    text,
)
from kcdsl_backends.empirical.statistics.rates import quantile_rank
from kcdsl_backends.executors import available_memory

LEAST_MEMORY = 256 * 2**20
_OFF = "statistics_propagation,filter_pushdown"
"""Disabled optimisers of DuckDB: they conclude from the least and greatest value of a row group,
which Parquet states without NaN, that no value exceeds them, and so miss a NaN."""


@dataclass(slots=True)
class Database:
    """A connection on which the table is `tokens`; `memory` is in bytes. `asked` holds all queries,
    in order, for the report."""

    connection: Any
    table: TokenTable
    memory: int
    asked: list[str] = field(default_factory=list)

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of a result as dictionaries, for results of few rows."""
        answer = self._ask(query, lambda: self.connection.execute(query))
        names = [column[0] for column in answer.description]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]

    def columns(self, query: str) -> Any:
        """Return a result as an Arrow table."""
        return self._ask(query, lambda: self.connection.sql(query).to_arrow_table())

    def _ask(self, query: str, run: Callable[[], Any]) -> Any:
        import duckdb

        self.asked.append(query)
        try:
            return run()
        except duckdb.OutOfMemoryException as error:
            raise refuse(
                codes.AGGREGATION_MEMORY,
                f"{self.memory / 2**30:.3g} GiB of memory are too few: {_first(error)}",
                help="give more with --memory, or aggregate fewer metrics at a time",
            ) from error
        except duckdb.Error as error:
            raise refuse(
                codes.TOKEN_TABLE,
                f"the token table cannot be read: {_first(error)}",
                help="write the file again; `kcdsl explain aggregation` has the columns that a"
                " table needs",
            ) from error


@contextmanager
def opened(
    table: TokenTable,
    *,
    memory: int | None = None,
    threads: int | None = None,
    spill: Path | None = None,
) -> Iterator[Database]:
    """Open a table. `memory` is in bytes (default: half of the available), `threads` of one query
    (default: all cores), `spill` the parent of the temporary folder for data beyond the memory
    (default: that of temporary files)."""
    import duckdb

    limit = _limit(memory)
    with tempfile.TemporaryDirectory(prefix="kcdsl-spill-", dir=spill) as folder:
        settings: dict[str, Any] = {
            "memory_limit": f"{limit // 2**20}MiB",
            "temp_directory": folder,
            "preserve_insertion_order": False,
            "ieee_floating_point_ops": True,
            "enable_external_file_cache": False,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
        }
        if threads is not None:
            settings["threads"] = threads
        connection = duckdb.connect(":memory:", config=settings)
        try:
            connection.execute(f"SET disabled_optimizers = '{_OFF}'")
            if _loses_nan(connection, Path(folder)):
                raise refuse(
                    codes.AGGREGATION_ENGINE,
                    "this version of DuckDB does not count a NaN beyond a limit",
                    help="install another one: `kcdsl doctor` names what was tested",
                )
            statement = view(table)
            connection.execute(statement)
            yield Database(connection, table, limit, [statement])
        finally:
            connection.close()


def _loses_nan(connection: Any, folder: Path) -> bool:
    """Return whether DuckDB loses a NaN of a Parquet file when it counts or selects rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = folder / "nan.parquet"
    pq.write_table(pa.table({"x": pa.array([0.1, float("nan")], pa.float32())}), file)
    counts = "count_if(NOT (x::DOUBLE <= '0.5'::DOUBLE)), count_if(isnan(x))"
    source = f"read_parquet({literal(file)})"
    found = connection.execute(f"SELECT {counts} FROM {source}").fetchone()
    kept = connection.execute(f"SELECT count(*) FROM {source} WHERE x > 0.5").fetchone()
    file.unlink()
    return (*found, *kept) != (1, 1, 1)


def _limit(memory: int | None) -> int:
    if memory is not None:
        return memory
    available = available_memory()
    if available is not None and available < 2 * LEAST_MEMORY:
        raise refuse(
            codes.AGGREGATION_MEMORY,
            f"{available / 2**20:.3g} MiB of memory are free, and aggregation takes half of at "
            f"least {2 * LEAST_MEMORY // 2**20}",
            help="end other programs, or say with --memory what may be taken",
        )
    return 4 * LEAST_MEMORY if available is None else available // 2


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# --- tokens --------------------------------------------------------------------------------------


_BYTES = 3
"""Bytes of memory of a percentile query per byte of its values."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one metric on one slice: numbers of rows, of those with a value and of those beyond
    each limit, and the values at the wanted percentiles (None without values)."""

    rows: int
    values: int
    beyond: tuple[int, ...]
    percentiles: tuple[float, ...] | None


Found = dict[tuple[str, str], Tokens]
"""Counts by (slice, metric)."""


def count_tokens(database: Database, slice_of: str, asked: Sequence[WantedCounts]) -> Found:
    """Count the tokens of every slice; raises Refusal (KC680) for a row without one."""
    table = database.table
    width = sum(table.metrics[one.metric] for one in asked if one.quantiles)
    copies = slice_of.count("CASE WHEN") if slice_of.startswith("unnest") else 1
    room = database.memory // _BYTES
    if table.rows * max(1, copies) * width <= room:
        return _found(database.rows(token_query(slice_of, asked)), asked)
    counted = _found(
        database.rows(token_query(slice_of, [replace(one, quantiles=()) for one in asked])), asked
    )
    for one in asked:
        if one.quantiles:
            counted |= _percentiles(database, slice_of, one, counted, room)
    return counted


def _found(rows: Sequence[dict[str, Any]], asked: Sequence[WantedCounts]) -> Found:
    found: Found = {}
    for row in rows:
        if row["slice"] is None:
            raise belonging_nowhere(row["rows"], "slice")
        for i, one in enumerate(asked):
            ranks = row.get(f"ranks_{i}")
            found[row["slice"], one.metric] = Tokens(
                int(row["rows"]),
                int(row[f"values_{i}"]),
                tuple(int(row[f"beyond_{i}_{j}"] or 0) for j in range(len(one.limits))),
                None if ranks is None else tuple(float(x) + 0.0 for x in ranks),
            )
    return found


def _percentiles(
    database: Database, slice_of: str, one: WantedCounts, counted: Found, room: int
) -> Found:
    """Return the counts of one metric with its percentiles, in as many queries as memory needs."""
    most = max(1, room // database.table.metrics[one.metric])
    own = {name: found for (name, metric), found in counted.items() if metric == one.metric}
    done: Found = {}
    for names in _batches({name: found.values for name, found in own.items()}, most):
        if own[names[0]].values <= most:
            rows = database.rows(token_query(slice_of, [replace(one, limits=())], names))
            ranks = {
                name: found.percentiles
                for (name, _), found in _found(rows, [replace(one, limits=())]).items()
            }
        else:  # a slice by itself
            name, values = names[0], own[names[0]].values
            at = (quantile_rank(values, q) for q in one.quantiles)
            search = (database, slice_of, name, one.metric)
            ranks = {name: tuple(order_statistic(*search, n, values, most) + 0.0 for n in at)}
        for name in names:
            done[name, one.metric] = replace(own[name], percentiles=ranks[name])
    return done


def _batches(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Group slices whose values fit into memory together; a larger one is alone."""
    batch: list[str] = []
    total = 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        if batch and total + sizes[name] > most:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += sizes[name]
    if batch:
        yield batch


# --- ranks ---------------------------------------------------------------------------------------


_PIVOTS = 15
_SAMPLE = 4096


@dataclass(frozen=True, slots=True)
class _Part:
    """The `values` values between `low` and `high` (None: unbounded); `before` values are
    smaller."""

    low: float | None
    high: float | None
    before: int
    values: int


def order_statistic(
    database: Database, slice_of: str, name: str, metric: str, rank: int, values: int, room: int
) -> float:
    """Return the value of a rank (from 1) among `values` of a metric in a slice; at most `room`
    values are sorted at a time."""
    part = _Part(None, None, 0, values)
    while part.values > room:
        rows = _rows(slice_of, name, metric, part)
        pivots = _pivots(database, rows)
        counts = database.rows(
            "SELECT "
            + ", ".join(
                f"count_if(x < {_value(p)}) AS below_{i}, count_if(x <= {_value(p)}) AS upto_{i}"
                for i, p in enumerate(pivots)
            )
            + f"\nFROM {rows}"
        )[0]
        low, before, high, end = part.low, 0, part.high, part.values
        for i, pivot in enumerate(pivots):
            below, upto = int(counts[f"below_{i}"]), int(counts[f"upto_{i}"])
            wanted = rank - part.before
            if below < wanted <= upto:
                return pivot
            if upto < wanted:
                low, before = pivot, upto
            else:
                high, end = pivot, below
                break
        part = _Part(low, high, part.before + before, end - before)
    rows = _rows(slice_of, name, metric, part)
    found = database.rows(
        f"SELECT x FROM {rows}\nORDER BY x LIMIT 1 OFFSET {rank - part.before - 1}"
    )
    return float(found[0]["x"])


def _rows(slice_of: str, name: str, metric: str, part: _Part) -> str:
    x = quoted(metric)
    tests = [f"slice = {text(name)}", f"{x} IS NOT NULL"]
    if part.low is not None:
        tests.append(f"{x} > {_value(part.low)}")
    if part.high is not None:
        tests.append(f"{x} < {_value(part.high)}")
    rows = rows_of(slice_of, x)
    return f"(SELECT {x}::DOUBLE AS x FROM {rows}\n      WHERE {' AND '.join(tests)})"


def _pivots(database: Database, rows: str) -> list[float]:
    sample = database.rows(f"SELECT x FROM {rows} USING SAMPLE reservoir({_SAMPLE} ROWS)")
    drawn = sorted({float(row["x"]) for row in sample if not math.isnan(row["x"])})
    if any(math.isnan(row["x"]) for row in sample):
        drawn.append(math.nan)
    steps = max(1, len(drawn) // (_PIVOTS + 1))
    chosen = drawn[steps - 1 :: steps]
    return chosen if chosen else drawn


def _value(value: float) -> str:
    return f"'{value!r}'::DOUBLE"


# --- rows ----------------------------------------------------------------------------------------


def view(table: TokenTable) -> str:
    """Return the statement that creates the view `tokens` of the files.

    Names of folders such as `kl=0` are not read as values of columns, which is DuckDB's default.
    """
    files = ", ".join(map(literal, table.files))
    return (
        f"CREATE VIEW tokens AS SELECT *, file_index * {2**40} + file_row_number AS {PLACE}\n"
        f"FROM read_parquet([{files}], hive_partitioning = false)"
    )


# --- tokens --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ValueLimit:
    """A requirement on a value: `op` is <=, <, >= or >."""

    op: str
    value: Fraction

    def holds(self, x: str) -> str:
        """Return the condition that a column meets it, in doubles."""
        down = self.op in ("<=", "<")
        nearest = round_down(self.value) if down else round_up(self.value)
        op = self.op if Fraction(nearest) == self.value else self.op[0] + "="
        test = f"{x}::DOUBLE {op} {double(nearest)}"
        return test if down else f"{test} AND NOT isnan({x})"  # in DuckDB NaN is the greatest value


@dataclass(frozen=True, slots=True)
class WantedCounts:
    """The counts wanted of one metric: values beyond each limit, and the q of percentiles."""

    metric: str
    limits: tuple[ValueLimit, ...] = ()
    quantiles: tuple[Fraction, ...] = ()


def token_query(
    slice_of: str, asked: Sequence[WantedCounts], only: Sequence[str] | None = None
) -> str:
    """Return the query of counts and percentiles of tokens, one row per slice.

    Columns: slice, rows, then of metric i: values_i, beyond_i_j for each limit, ranks_i.
    """
    columns = ["slice", "count(*) AS rows"]
    for i, one in enumerate(asked):
        x = quoted(one.metric)
        columns.append(f"count({x}) AS values_{i}")
        columns += [
            f"sum((NOT ({limit.holds(x)}))::INTEGER) AS beyond_{i}_{j}"
            for j, limit in enumerate(one.limits)
        ]
        if one.quantiles:
            wanted = ", ".join(map(decimal, one.quantiles))
            columns.append(f"quantile_disc({x}, [{wanted}]) AS ranks_{i}")
    names = ", ".join(dict.fromkeys(quoted(one.metric) for one in asked))
    return (
        f"SELECT {(',' + chr(10) + '       ').join(columns)}\n"
        f"FROM {rows_of(slice_of, names, only)}\n"
        "GROUP BY slice"
    )


def rows_of(slice_of: str, names: str, only: Sequence[str] | None = None) -> str:
    """Return the rows with their slice, of some slices or of all."""
    rows = f"(SELECT {slice_of} AS slice, {names} FROM tokens)"
    if only is None:
        return rows
    return f"(SELECT * FROM {rows}\n      WHERE slice IN ({', '.join(map(text, only))}))"


def decimal(q: Fraction) -> str:
    """Return a share as a decimal number, with which DuckDB computes ranks in integers."""
    digits = 0
    while (q * 10**digits).denominator != 1:
        digits += 1
        if digits > 9:
            raise ValueError(f"{q} is no decimal number of at most 9 digits")
    digits = max(1, digits)
    whole, rest = divmod(int(q * 10**digits), 10**digits)
    return f"{whole}.{rest:0{digits}d}"
