"""Token tables: their files, columns and rows, checked; values as SQL literals."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.source.files import open_regular, shown

REQUEST, SLICE, POSITION, NAMES = "request", "slice", "position", "kcdsl.slices"
"""The columns of requests, slices and positions, and the key of the names of integer slices."""


PLACE = "kcdsl_place"
"""The column with the number of a row's file and its number in the file, as one integer."""
_OWN = frozenset({PLACE, "file_index", "file_row_number"})
"""The names of columns that DuckDB and `view` add."""


@dataclass(frozen=True, slots=True)
class TokenTable:
    """Parquet files of the same columns, one row per token.

    `metrics` has the bytes of one value of every floating column; `fields` the kind ("number",
    "integer", "string", "boolean") of the other columns that predicates may test. `slices` is the
    kind of the column of slices: "names", "lists" of names, "numbers", or None without one.
    """

    files: tuple[Path, ...]
    rows: int
    metrics: Mapping[str, int]
    fields: Mapping[str, str]
    slices: str | None
    names: tuple[str, ...] = ()
    """The names of integer slices, by their number."""


def open_tables(paths: Sequence[str | Path]) -> TokenTable:
    """Read the schemas of Parquet files, or of folders of them; only their footers are read.

    Raises Refusal (KC680) for other files, for files without the column `request` or without
    floating columns, for files that differ in their columns, and for tables without rows.
    """
    import pyarrow.parquet as pq

    files = _files(paths)
    first: Any = None
    names: tuple[str, ...] = ()
    rows = 0
    for file in files:
        try:
            with pq.ParquetFile(file) as opened:
                schema, count = opened.schema_arrow, opened.metadata.num_rows
        except (OSError, ValueError) as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise refuse(
                codes.TOKEN_TABLE,
                f"{shown(file)} is no Parquet file: {line}",
                help="write the table with pyarrow, DuckDB or pandas as Parquet",
            ) from error
        own = _names(file, schema)
        if first is None:
            first, names = schema, own
        elif not schema.remove_metadata().equals(first.remove_metadata()) or own != names:
            raise refuse(
                codes.TOKEN_TABLE,
                f"{shown(file)} has other columns than {shown(files[0])}",
                notes=(f"{shown(files[0])}: {_told(first)}", f"{shown(file)}: {_told(schema)}"),
                help="write all files of a table with the same columns, types and slice names",
            )
        rows += count
    if rows == 0:
        raise refuse(codes.TOKEN_TABLE, "the token tables have no rows", help="nothing is no pass")
    return _table(files, rows, first, names)


def _files(paths: Sequence[str | Path]) -> tuple[Path, ...]:
    found: list[Path] = []
    for given in paths:
        path = Path(given)
        inside = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not inside:
            raise refuse(
                codes.TOKEN_TABLE,
                f"the folder {shown(path)} has no *.parquet files",
                help="name the folder in which the *.parquet files are",
            )
        for file in inside:
            if not file.is_file():
                raise refuse(
                    codes.TOKEN_TABLE,
                    f"there is no file {shown(file)}",
                    help="name an existing Parquet file, or a folder of them",
                )
        found += inside
    once = dict.fromkeys(file.resolve() for file in found)
    if len(once) != len(found):
        twice = next(f for f in found if [g.resolve() for g in found].count(f.resolve()) > 1)
        raise refuse(codes.TOKEN_TABLE, f"{shown(twice)} is given twice", help="give it once")
    return tuple(found)


def _names(file: Path, schema: Any) -> tuple[str, ...]:
    raw = (schema.metadata or {}).get(NAMES.encode())
    if raw is None:
        return ()
    try:
        names = json.loads(raw)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
        raise refuse(
            codes.TOKEN_TABLE,
            f"{shown(file)}: the metadata `{NAMES}` is no JSON list of names",
            help='write the names as a JSON list of strings, such as ["chat", "code"], one for'
            " each number in the column `slice`",
        )
    if len(set(names)) != len(names):
        raise refuse(
            codes.TOKEN_TABLE,
            f"{shown(file)}: `{NAMES}` gives a name twice",
            help="give each number of the column `slice` a name of its own",
        )
    return tuple(names)


def _table(files: tuple[Path, ...], rows: int, schema: Any, names: tuple[str, ...]) -> TokenTable:
    import pyarrow.types as kinds

    metrics: dict[str, int] = {}
    fields: dict[str, str] = {}
    slices: str | None = None
    for column in schema:
        kind = column.type.value_type if kinds.is_dictionary(column.type) else column.type
        text = kinds.is_string(kind) or kinds.is_large_string(kind)
        if column.name == SLICE:
            slices = _slices(column.type, kind, text)
        if kinds.is_floating(kind) and column.name not in (REQUEST, SLICE, POSITION):
            metrics[column.name] = max(4, kind.bit_width // 8)
            fields[column.name] = "number"
        elif text or kinds.is_boolean(kind) or kinds.is_integer(kind):
            name = "string" if text else "boolean" if kinds.is_boolean(kind) else "integer"
            fields[column.name] = name
        elif column.name == POSITION:
            fields[POSITION] = str(kind)
    if fields.get(REQUEST) not in ("string", "integer"):
        raise refuse(
            codes.TOKEN_TABLE,
            f"the table has no column `{REQUEST}` of strings or integers",
            notes=(f"columns: {_told(schema)}",),
            help="tokens of one request depend on each other, so each row names its request",
        )
    if not metrics:
        raise refuse(
            codes.TOKEN_TABLE,
            "the table has no column of float32 or float64, so no metric",
            notes=(f"columns: {_told(schema)}",),
            help="write the values of each metric as a column of float32 or float64 with the "
            "name of the metric, such as `kl`",
        )
    low = [name.lower() for name in schema.names]
    if len(set(low)) != len(low):
        raise refuse(
            codes.TOKEN_TABLE,
            "two columns differ in the case of their names only",
            help="rename one of them: SQL does not tell them apart",
        )
    taken = next((name for name in schema.names if name.lower() in _OWN), None)
    if taken is not None:
        raise refuse(
            codes.TOKEN_TABLE,
            f"the table has a column `{taken}`, which would replace the order of its rows",
            help="rename the column, or leave it out",
        )
    return TokenTable(files, rows, metrics, fields, slices, names)


def _slices(whole: Any, kind: Any, text: bool) -> str:
    import pyarrow.types as kinds

    if text:
        return "names"
    if kinds.is_integer(kind):
        return "numbers"
    if kinds.is_list(whole) or kinds.is_large_list(whole):
        inner = whole.value_type
        inner = inner.value_type if kinds.is_dictionary(inner) else inner
        if kinds.is_string(inner) or kinds.is_large_string(inner):
            return "lists"
    raise refuse(
        codes.TOKEN_TABLE,
        f"the column `{SLICE}` holds {whole}",
        help="give the name of the slice, a list of names, or an integer id with its name in the "
        f"metadata `{NAMES}`",
    )


def _told(schema: Any) -> str:
    return ", ".join(f"{column.name} {column.type}" for column in schema)


def file_records(
    table: TokenTable, progress: Callable[[int, int], None]
) -> tuple[dict[str, Any], ...]:
    """Return name, sha256 and bytes of every file, for the record of a decision."""
    found = []
    for done, file in enumerate(table.files, 1):
        with open_regular(file) as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        found.append({"name": str(shown(file)), "sha256": digest, "bytes": file.stat().st_size})
        progress(done, len(table.files))
    return tuple(found)


def quoted(name: str) -> str:
    """Return the quoted name of a column."""
    return '"' + name.replace('"', '""') + '"'


def text(value: str) -> str:
    """Return a string as a literal."""
    return "'" + value.replace("'", "''") + "'"


_PATTERN = re.compile(r"[*?\[]")


def literal(file: Path) -> str:
    """Return the name of a file for DuckDB, with the signs of its glob patterns in brackets, so
    that they stand for themselves."""
    return text(_PATTERN.sub(r"[\g<0>]", str(file)))


def double(value: float) -> str:
    """Return a float64 literal: a bare 0.05 would be a decimal number and compare differently."""
    return f"'{value!r}'::DOUBLE"


def belonging_nowhere(what: str, thing: str) -> Refusal:
    """Return the refusal of rows without a request or slice."""
    return refuse(
        codes.TOKEN_TABLE,
        f"{what} rows have no {thing}",
        help=f"a row that belongs nowhere is not dropped: name its {thing}, or leave it out",
    )
