"""DuckDB in bounded memory: what does not fit spills to a folder that is removed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl_backends.empirical.aggregation.sql import text, view
from kcdsl_backends.empirical.aggregation.tables import TokenTable
from kcdsl_backends.executors import available_memory

LEAST_MEMORY = 256 * 2**20
_OFF = "statistics_propagation,filter_pushdown"
"""What DuckDB must not do: it concludes from the least and greatest value of a row group, which
Parquet states without NaN, that no value exceeds them, and so does not count a NaN."""


@dataclass(slots=True)
class Database:
    """A connection on which the table is `tokens`; `memory` is in bytes. It remembers what was
    asked, in order, so that a report can show it."""

    connection: Any
    table: TokenTable
    memory: int
    asked: list[str] = field(default_factory=list)

    def rows(self, query: str) -> list[dict[str, Any]]:
        """Return the rows of an answer as dictionaries, for answers of few rows."""
        answer = self._ask(query, lambda: self.connection.execute(query))
        names = [column[0] for column in answer.description]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]

    def columns(self, query: str) -> Any:
        """Return an answer as an Arrow table."""
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
                codes.TOKEN_TABLE, f"the token table cannot be read: {_first(error)}"
            ) from error


@contextmanager
def opened(
    table: TokenTable,
    *,
    memory: int | None = None,
    threads: int | None = None,
    spill: Path | None = None,
) -> Iterator[Database]:
    """Open a table. `memory` is in bytes (default: half of what is available), `threads` of one
    query (default: all cores), `spill` the folder in which a folder for what does not fit is made
    and removed (default: that of temporary files)."""
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
    """Say whether a NaN in a Parquet file is lost, when it is counted or when rows are chosen."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = folder / "nan.parquet"
    pq.write_table(pa.table({"x": pa.array([0.1, float("nan")], pa.float32())}), file)
    counts = "count_if(NOT (x::DOUBLE <= '0.5'::DOUBLE)), count_if(isnan(x))"
    source = f"read_parquet({text(str(file))})"
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
