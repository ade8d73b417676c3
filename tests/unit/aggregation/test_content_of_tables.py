"""Digests of rows: independent of the file layout, different for different rows."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcdsl.diagnostics import Refusal
from kcdsl_backends.empirical.questions.aggregate import AggregateOptions, aggregate
from kcdsl_backends.empirical.sources.tokens.content import SKETCH, content_digests, sketches
from kcdsl_backends.empirical.sources.tokens.database import opened
from kcdsl_backends.empirical.sources.tokens.tables import open_tables

COLUMNS: dict[str, list[Any]] = {
    "request": ["a", "a", "b", "c"],
    "slice": [["chat"], ["chat"], ["chat", "code"], ["code"]],
    "position": [0, 1, 0, 0],
    "kl": [0.25, 0.5, None, float("nan")],
    "surface": ["x", None, "-", "1:x"],
    "cached": [True, False, True, None],
}


def written(path: Path, table: pa.Table, **how: Any) -> Path:
    pq.write_table(table, path, **how)
    return path


def digests(*paths: Path) -> tuple[str, dict[int, str]]:
    with opened(open_tables(paths)) as database:
        return content_digests(database)


def sketch_of(*paths: Path, kind: str = "values") -> list[str]:
    with opened(open_tables(paths)) as database:
        return sketches(database, ["kl"])[kind]


def table(changes: Mapping[str, Any] | None = None) -> pa.Table:
    return pa.table({**COLUMNS, **(changes or {})})


def test_equal_rows_have_the_same_digest(tmp_path: Path) -> None:
    wanted = digests(written(tmp_path / "plain.parquet", table()))
    assert wanted[1] == {0: wanted[0]}
    turned = table().take([3, 1, 0, 2]).select(list(reversed(COLUMNS)))
    narrow = table(
        {
            "kl": pa.array(COLUMNS["kl"], pa.float32()),
            "position": pa.array(COLUMNS["position"], pa.int8()),
            "request": pa.array(COLUMNS["request"]).dictionary_encode(),
            "surface": pa.array(COLUMNS["surface"], pa.large_string()),
        }
    )
    for i, same in enumerate((turned, narrow)):
        path = written(tmp_path / f"{i}.parquet", same, compression="gzip", row_group_size=1)
        assert digests(path) == wanted
    first, rest = table().slice(0, 1), table().slice(1)
    parts = [written(tmp_path / f"part{i}.parquet", one) for i, one in enumerate((rest, first))]
    whole, files = digests(*parts)
    assert whole == wanted[0]
    assert len({*files.values(), whole}) == 3
    empty = written(tmp_path / "empty.parquet", table().slice(0, 0))
    assert digests(parts[0], empty, parts[1]) == (whole, {0: files[0], 2: files[1]})


@pytest.mark.parametrize(
    "changes",
    [
        {"request": ["a", "a", "b", "d"]},
        {"slice": [["chat"], ["chat"], ["code"], ["code"]]},
        {"position": [0, 1, 0, 1]},
        {"kl": [0.25, 0.5000001, None, float("nan")]},
        {"kl": [0.25, 0.5, float("nan"), float("nan")]},
        {"kl": [0.25, 0.5, None, None]},
        {"surface": ["x", "-", "-", "1:x"]},
        {"surface": ["x", None, None, "1:x"]},
        {"surface": ["x", None, "-", "x"]},
        {"cached": [True, True, True, None]},
    ],
)
def test_other_rows_have_another_digest(tmp_path: Path, changes: dict[str, Any]) -> None:
    plain, other = (
        digests(written(tmp_path / f"{i}.parquet", table(one)))[0]
        for i, one in enumerate(({}, changes))
    )
    assert plain != other


def test_duplicate_rows_do_not_cancel(tmp_path: Path) -> None:
    """Sums are over multisets: two copies of a row count twice."""
    rows = [table(), table().take([0, 1, 2, 3, 0]), table().take([0, 1, 2, 3, 0, 0])]
    found = {digests(written(tmp_path / f"{i}.parquet", one))[0] for i, one in enumerate(rows)}
    assert len(found) == 3


def test_copy_of_a_table_in_other_bytes_is_refused(tmp_path: Path) -> None:
    rows = table().drop_columns(["position"])
    one = written(tmp_path / "one.parquet", rows)
    two = written(tmp_path / "two.parquet", rows, compression="gzip")
    wish = AggregateOptions(quantiles=(Fraction(1, 2),), content=True)
    with pytest.raises(Refusal) as caught:
        aggregate([one, two], None, wish)
    assert "two.parquet has the rows of" in caught.value.diagnostics[0].message


# --- sketches -------------------------------------------------------------------------------------


def test_sketch_of_requests_is_independent_of_layout(tmp_path: Path) -> None:
    """Other columns, the order of rows and the other requests of a file do not matter."""
    whole = sketch_of(written(tmp_path / "whole.parquet", table()))
    assert len(whole) == len({*whole}) == 3
    turned = table().take([3, 1, 0, 2]).drop_columns(["surface", "cached"])
    for other in ("name", "digest"):  # names within the query
        turned = turned.append_column(other, pa.array(["x"] * 4))
    assert sketch_of(written(tmp_path / "turned.parquet", turned)) == whole
    halves = [
        sketch_of(written(tmp_path / f"half{i}.parquet", one))
        for i, one in enumerate((table().slice(0, 2), table().slice(2)))
    ]
    assert sorted([*halves[0], *halves[1]]) == whole
    assert [len(half) for half in halves] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "common"),
    [
        ({"request": ["a", "a", "b", "d"]}, 2),
        ({"request": ["a", "b", "b", "c"]}, 1),
        ({"kl": [0.5, 0.25, None, float("nan")]}, 3),
        ({"kl": [0.25, 0.75, None, float("nan")]}, 2),
        ({"kl": [0.25, 0.5, None, None]}, 2),
    ],
)
def test_other_requests_have_another_digest(
    tmp_path: Path, changes: dict[str, Any], common: int
) -> None:
    plain, other = (
        sketch_of(written(tmp_path / f"{i}.parquet", table(one)))
        for i, one in enumerate(({}, changes))
    )
    assert len({*plain} & {*other}) == common
    ids = [sketch_of(tmp_path / f"{i}.parquet", kind="ids") for i in range(2)]
    assert len({*ids[0]} & {*ids[1]}) == 3 - ("d" in changes.get("request", ""))
    assert not {*plain, *other} & {*ids[0], *ids[1]}


def test_sketches_of_large_tables_reveal_shared_requests(tmp_path: Path) -> None:
    def rows(first: int, last: int) -> list[str]:
        columns = {"request": [str(i) for i in range(first, last)], "kl": [0.5] * (last - first)}
        return sketch_of(written(tmp_path / f"{first}.parquet", pa.table(columns)))

    whole, part, other = rows(0, 4000), rows(3600, 4400), rows(4000, 8000)
    assert {len(one) for one in (whole, part, other)} == {SKETCH}
    assert {*whole} & {*part}
    assert not {*whole} & {*other}
