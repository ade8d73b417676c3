"""Counts of token tables compared with numpy, for any storage layout; refusals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcdsl.diagnostics import Refusal
from kcdsl.inequalities import round_down, round_up
from kcdsl.ir.terms import AllOf, AnyOf, FieldTest, Metric, NoneOf, Predicate
from kcdsl_backends.empirical.questions.aggregate import AggregateOptions, aggregate, aggregate_of
from kcdsl_backends.empirical.sources.tokens.database import (
    ValueLimit,
    WantedCounts,
    count_tokens,
    decimal,
    opened,
    order_statistic,
)
from kcdsl_backends.empirical.sources.tokens.requests import exact_sums, reduce_requests, steps_for
from kcdsl_backends.empirical.sources.tokens.slices import SliceMember, membership
from kcdsl_backends.empirical.sources.tokens.tables import open_tables
from tests.unit.aggregation.conftest import Rows

QUANTILES = (Fraction(1, 2), Fraction(19, 20), Fraction(99, 100))
_VALUES = st.one_of(
    st.floats(0, 0.25, width=32),
    st.sampled_from([0.05, 0.1, -0.0, 0.0, 1e-40, math.nan, math.inf, -math.inf, None]),
)


def _rank(values: Sequence[float], q: Fraction) -> float:
    """Return the order statistic of rank ceil(q n), NaN last."""
    ordered = sorted(values, key=lambda x: (math.isnan(x), x))
    return ordered[max(1, math.ceil(q * len(values))) - 1]


@pytest.mark.full
@settings(deadline=None, max_examples=25)
@given(
    values=st.lists(_VALUES, min_size=1, max_size=60),
    float32=st.booleans(),
    tau=st.sampled_from(["0.05", "0.1", "0", "1/3"]),
    op=st.sampled_from(["<=", "<", ">=", ">"]),
    room=st.sampled_from([None, 3]),
)
def test_counts_equal_those_of_numpy(
    values: list[float | None], float32: bool, tau: str, op: str, room: int | None
) -> None:
    names = ["chat" if i % 3 else "code" for i in range(len(values))]
    rows = Rows([f"r{i % 7}" for i in range(len(values))], names, {"kl": values}, float32)
    asked = WantedCounts("kl", (ValueLimit(op, Fraction(tau)),), QUANTILES)
    with TemporaryDirectory() as folder:
        table = open_tables(rows.write(Path(folder), files=min(3, len(values))))
        with opened(table) as database:
            if room is not None:
                database.memory = room * 12
            found = count_tokens(database, membership(table, None), [asked])
            requests = reduce_requests(database, membership(table, None), [Metric("kl")])
    for name in set(names):
        every = [x for x, of in zip(rows.stored("kl"), names, strict=True) if of == name]
        there = [x for x in every if x is not None]
        own = found[name, "kl"]
        assert (own.rows, own.values) == (len(every), len(there))
        assert own.beyond == (sum(not _meets(x, op, Fraction(tau)) for x in there),)
        wanted = [_rank(there, q) for q in QUANTILES] if there else None
        np.testing.assert_array_equal(
            [] if own.percentiles is None else own.percentiles, wanted or []
        )
        whole = aggregate_of(requests[name], "kl", own)
        finite = [x for x in there if math.isfinite(x)]
        assert whole.total == sum(map(Fraction, finite), Fraction(0))
        assert (whole.nan, whole.infinite) == (
            sum(map(math.isnan, there)),
            sum(map(math.isinf, there)),
        )
        numbers = [x for x in there if not math.isnan(x)]
        assert (whole.least, whole.most) == (min(numbers, default=None), max(numbers, default=None))
        mean = math.fsum(finite) / len(finite) if finite else None
        assert whole.mean is None if len(finite) != len(there) else whole.mean == _close(mean)


def _close(value: float | None) -> object:
    return None if value is None else pytest.approx(value, rel=1e-15, abs=5e-324)


def _meets(x: float, op: str, tau: Fraction) -> bool:
    if math.isnan(x):
        return False
    if math.isinf(x):
        return (x < 0) == (op in ("<=", "<"))
    exact = Fraction(x)
    return {"<=": exact <= tau, "<": exact < tau, ">=": exact >= tau, ">": exact > tau}[op]


def test_nan_absent_from_parquet_statistics_is_counted(tmp_path: Path) -> None:
    """Statistics of row groups ignore NaN: 0.1 to 0.3 here, all below the limit."""
    rows = Rows(["a", "a", "b", "b"], ["s"] * 4, {"kl": [0.1, math.nan, 0.2, 0.3]})
    table = open_tables(rows.write(tmp_path))
    assert pq.ParquetFile(table.files[0]).metadata.row_group(0).column(2).statistics.max == 0.3
    with opened(table) as database:
        asked = WantedCounts("kl", (ValueLimit("<=", Fraction(1, 2)),))
        assert count_tokens(database, '"slice"', [asked])["s", "kl"].beyond == (1,)
        highest = order_statistic(database, '"slice"', "s", "kl", 4, 4, 1)
    assert math.isnan(highest)


def test_float32_columns_are_compared_as_doubles(tmp_path: Path) -> None:
    """float32(0.05) is above 0.05; a bare 0.05 would be a decimal, which it does not exceed."""
    table = open_tables(Rows(["a"], ["s"], {"kl": [0.05]}, float32=True).write(tmp_path))
    with opened(table) as database:
        asked = WantedCounts("kl", (ValueLimit("<=", Fraction("0.05")),))
        assert count_tokens(database, '"slice"', [asked])["s", "kl"].beyond == (1,)


@pytest.mark.parametrize("q", ["0.5", "0.95", "0.99", "0.999"])
def test_percentiles_have_the_documented_rank(q: str, tmp_path: Path) -> None:
    sizes = [*range(1, 80), 100, 999, 1000, 1001, 2000, 3000]
    slices = [str(n) for n in sizes for _ in range(n)]
    values: list[float | None] = [float(i) for n in sizes for i in range(1, n + 1)]
    table = open_tables(Rows(slices, slices, {"kl": values}).write(tmp_path))
    with opened(table) as database:
        found = count_tokens(database, '"slice"', [WantedCounts("kl", (), (Fraction(q),))])
    for n in sizes:
        assert found[str(n), "kl"].percentiles == (math.ceil(Fraction(q) * n),)


@pytest.mark.parametrize("room", [1, 7, 100])
def test_percentile_of_a_large_slice_is_found_by_counting(room: int, tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    drawn = np.round(generator.normal(size=700), 2)  # with ties
    values: list[float | None] = [*drawn.tolist(), math.inf, math.nan]
    n = len(values)
    table = open_tables(Rows(["r"] * n, ["s"] * n, {"kl": values}).write(tmp_path, group=64))
    with opened(table) as database:
        for rank in (1, 2, 350, 351, 695, 701, 702):
            found = order_statistic(database, '"slice"', "s", "kl", rank, n, room)
            wanted = [*sorted(drawn.tolist()), math.inf, math.nan]
            np.testing.assert_equal(found, wanted[rank - 1])


@settings(deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_sums_of_any_doubles_are_exact(values: list[float]) -> None:
    steps = steps_for(max(abs(v) for v in values) or 1.0, 40)
    digits = []
    for value in values:
        left, own = value, []
        for step in steps:
            own.append(math.trunc(left / step))
            left -= own[-1] * step
        assert left == 0
        digits.append(own)
    columns = [[str(sum(own[j] for own in digits))] for j in range(len(steps))]
    found = exact_sums(columns, steps)
    exact = sum(map(Fraction, values), Fraction(0))
    assert found.integers[0] * found.unit == exact
    try:
        wanted = float(exact)
    except OverflowError:
        wanted = math.inf if exact > 0 else -math.inf
    assert found.rounded(found.integers[0]) == wanted


@given(st.fractions())
def test_rational_limit_equals_its_double_limit_for_doubles(tau: Fraction) -> None:
    low, high = round_down(tau), round_up(tau)
    assert Fraction(low) <= tau <= Fraction(high)
    assert Fraction(math.nextafter(low, math.inf)) > tau
    assert Fraction(math.nextafter(high, -math.inf)) < tau


def test_shares_are_written_as_decimals() -> None:
    assert [decimal(Fraction(q)) for q in ("1/2", "0.95", "0.999", "1/20")] == [
        "0.5",
        "0.95",
        "0.999",
        "0.05",
    ]
    with pytest.raises(ValueError, match="no decimal number"):
        decimal(Fraction(1, 3))


# --- how rows are stored does not matter ---------------------------------------------------------


def test_results_are_independent_of_files_threads_and_memory(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    n = 5000
    values: list[float | None] = np.exp(generator.normal(-7, 3, n)).tolist()
    requests = np.sort(generator.integers(0, 300, n))
    rows = Rows(
        [f"r{i}" for i in requests],
        [("chat", "code", "maths")[i % 3] for i in requests],
        {"kl": values},
    )
    limits = {"kl": (ValueLimit("<=", Fraction("0.01")),)}
    found = []
    for i, (files, group, threads) in enumerate([(1, 5000, 1), (7, 100, 2), (3, 999, 4)]):
        folder = tmp_path / str(i)
        folder.mkdir()
        document = aggregate(
            rows.write(folder, files=files, group=group),
            None,
            AggregateOptions(limits=limits, threads=threads, memory=2**29 if i else 2**30),
        )
        found.append(document["slices"])
    assert found[0] == found[1] == found[2]
    assert [row["slice"] for row in found[0]] == ["chat", "code", "maths"]


def test_spill_files_are_removed(tmp_path: Path) -> None:
    spill, tables = tmp_path / "spill", tmp_path / "tables"
    spill.mkdir()
    tables.mkdir()
    Rows(["a"], ["s"], {"kl": [0.1]}).write(tables)
    aggregate([tables], None, AggregateOptions(spill=spill))
    assert list(spill.iterdir()) == []


# --- slices --------------------------------------------------------------------------------------


def _counted(table: pa.Table, folder: Path, members: list[SliceMember] | None) -> dict[str, int]:
    pq.write_table(table, folder / "t.parquet")
    opened_table = open_tables([folder / "t.parquet"])
    with opened(opened_table) as database:
        found = count_tokens(database, membership(opened_table, members), [WantedCounts("kl")])
    return {name: one.rows for (name, _), one in found.items()}


def _table(**columns: object) -> pa.Table:
    return pa.table({"request": list("aabb"), "kl": [0.1, 0.2, 0.3, 0.4], **columns})


def test_slice_columns_hold_names_lists_or_numbers(tmp_path: Path) -> None:
    assert _counted(_table(slice=["x", "y", "x", "x"]), tmp_path, None) == {"x": 3, "y": 1}
    lists = _table(slice=[["x", "all"], ["all", "all"], ["all"], ["all"]])
    assert _counted(lists, tmp_path, None) == {"all": 4, "x": 1}
    numbers = _table(slice=[0, 1, 1, 1])
    assert _counted(numbers, tmp_path, None) == {"0": 1, "1": 3}
    named = numbers.replace_schema_metadata({"kcdsl.slices": '["x", "y"]'})
    assert _counted(named, tmp_path, None) == {"x": 1, "y": 3}
    assert _counted(_table(), tmp_path, None) == {"all": 4}
    with pytest.raises(Refusal, match="rows have no slice"):
        _counted(
            _table(slice=[2, 0, 0, 0]).replace_schema_metadata({"kcdsl.slices": '["x", "y"]'}),
            tmp_path,
            None,
        )


def test_predicates_select_rows(tmp_path: Path) -> None:
    table = _table(length=[3, 3, 9, 9], lang=["de", "de", "en", "en"], score=[0.5, 0.5, 0.1, 0.1])
    tests: dict[str, Predicate] = {
        "long": FieldTest("length", ">", Fraction(17, 2)),
        "nine": FieldTest("length", "==", Fraction(9)),
        "none": FieldTest("length", "==", Fraction(17, 2)),
        "german": FieldTest("lang", "==", "de"),
        "tenth": FieldTest("score", "<=", Fraction(1, 10)),
        "either": AnyOf((FieldTest("lang", "==", "en"), FieldTest("score", ">=", Fraction(1, 2)))),
        "neither": AnyOf(()),
        "not_long": NoneOf(FieldTest("length", ">=", Fraction(9))),
    }
    members = [SliceMember(name, where, None) for name, where in tests.items()]
    found = _counted(table, tmp_path, [*members, SliceMember("all", AllOf(()), None)])
    assert found == {"long": 2, "nine": 2, "german": 2, "either": 4, "not_long": 2, "all": 4}


# --- what cannot be used -------------------------------------------------------------------------


def test_unusable_tables_are_refused(tmp_path: Path) -> None:
    def refused(message: str, *tables: pa.Table) -> None:
        paths = []
        for i, table in enumerate(tables):
            paths.append(tmp_path / f"{i}.parquet")
            pq.write_table(table, paths[-1])
        with pytest.raises(Refusal, match=message):
            aggregate(paths, None, AggregateOptions())

    refused("no column `request`", pa.table({"kl": [0.1]}))
    refused("no column of float32 or float64", pa.table({"request": ["a"]}))
    refused("have no rows", _table().slice(0, 0))
    refused("other columns", _table(), pa.table({"request": ["c"], "kl": [1]}))
    refused("some rows have no request", _table().set_column(0, "request", [["a", None, "a", "b"]]))
    refused("have no slice", _table(slice=["x", None, "x", "x"]))
    refused("the column `slice` holds", _table(slice=[0.5] * 4))
    (tmp_path / "text.parquet").write_text("no table")
    with pytest.raises(Refusal, match="is no Parquet file"):
        open_tables([tmp_path / "text.parquet"])
    with pytest.raises(Refusal, match="there is no file"):
        open_tables([tmp_path / "absent.parquet"])
    pq.write_table(_table(), tmp_path / "good.parquet")
    with pytest.raises(Refusal, match="is given twice"):
        open_tables([tmp_path / "good.parquet", tmp_path / "good.parquet"])
    with pytest.raises(Refusal, match="no column of floating numbers 'tv'"):
        aggregate([tmp_path / "good.parquet"], None, AggregateOptions(metrics=("tv",)))


def test_slice_names_are_escaped_in_output(cli: Any, tmp_path: Path) -> None:
    """Neither as markup, of which `[/b]` alone would be an error, nor as terminal sequences."""
    names = ["[/b]", "[red]x", "\x1b[31my"]
    Rows(["a", "b", "c"], names, {"kl": [0.1, 0.2, 0.3]}).write(tmp_path)
    ran = cli("aggregate", str(tmp_path))
    assert ran.code == 0
    for shown in ("[/b]", "[red]x", "\N{REPLACEMENT CHARACTER}[31my"):
        assert shown in ran.stdout
