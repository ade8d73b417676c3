"""Misleading or incomplete tables never give an unjustified verdict."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import Program
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.text.studies import print_aggregate
from kcdsl_backends.empirical.questions.aggregate import AggregateOptions, aggregate
from kcdsl_backends.empirical.questions.token_clauses import decide_table, prepare
from kcdsl_backends.empirical.sources.tokens.database import opened
from kcdsl_backends.empirical.sources.tokens.tables import open_tables

_HEAD = """kcdsl: 1
contract: tables
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: requests.jsonl
"""


def contract(
    folder: Path, requirement: str, slices: str = "{chat: {}}", names: str = "[chat]", **more: str
) -> Program:
    """Return a contract with one clause on the given slices."""
    extra = "".join(f", {key}: {value}" for key, value in more.items())
    family = "S" if "overlap" in requirement else "N"
    path = folder / "contract.yaml"
    path.write_text(
        f'{_HEAD}slices: {slices}\nclauses:\n  {family}: {{require: "{requirement}", level: L2, '
        f"slices: {names}{extra}}}\n"
    )
    return load_program(path)


def write(folder: Path, columns: Mapping[str, Sequence[Any] | pa.Array], name: str = "t") -> Path:
    path = folder / f"{name}.parquet"
    pq.write_table(pa.table(dict(columns)), path)
    return path


def verdicts(program: Program, *files: Path) -> list[Verdict]:
    table = open_tables(files)
    with opened(table, threads=1) as database:
        return [row.verdict for row in decide_table(prepare(program, table), database).results]


def refused(program: Program | None, *files: Path) -> str:
    with pytest.raises(Refusal) as caught:
        aggregate(files, program, AggregateOptions(threads=1))
    (found,) = caught.value.diagnostics
    assert found.code.id in ("KC680", "KC622")
    return found.message


def invalid(verdict: Verdict) -> str:
    assert isinstance(verdict, InvalidEvidence), verdict
    return verdict.reason


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", ["max(kl) <= 0.05", "p99(kl) <= 0.05", "mean(kl) <= 0.05"])
@pytest.mark.parametrize("values", [[-0.5, -0.25], [0.01, -0.5], [0.02, -1e-5]])
def test_values_outside_the_range_of_a_metric_are_invalid(
    tmp_path: Path, requirement: str, values: list[float]
) -> None:
    """A negative divergence was logged with the wrong sign, or by an estimator that cancels."""
    file = write(tmp_path, {"request": ["a", "b"], "slice": ["chat"] * 2, "kl": values})
    (found,) = verdicts(contract(tmp_path, requirement), file)
    assert "the request" in invalid(found)
    assert "lies outside of its range" in invalid(found)


def test_values_inside_combinations_are_range_checked(tmp_path: Path) -> None:
    columns = {"request": ["a", "b"], "slice": ["chat"] * 2, "kl": [0.1, -0.1], "js": [0.1, 0.1]}
    file = write(tmp_path, columns)
    (found,) = verdicts(contract(tmp_path, "max(kl + js) <= 0.5"), file)
    assert invalid(found) == "kl: the request b: -0.1 to -0.1: a value lies outside of its range"
    (counted,) = verdicts(
        contract(tmp_path, "max(abs(kl - js)) <= 0.5", budget="60% of requests"), file
    )
    assert "lies outside" in invalid(counted)


def test_float32_rounding_at_the_range_limit_is_accepted(tmp_path: Path) -> None:
    columns = {"request": ["a", "b"], "slice": ["chat"] * 2, "tv": [1.0000001, -1e-8]}
    (found,) = verdicts(contract(tmp_path, "p50(tv) <= 0.5"), write(tmp_path, columns))
    assert isinstance(found, Held)


@pytest.mark.parametrize(
    ("value", "requirement", "held"),
    [
        (0.6, "min(top5_overlap) >= 60%", True),
        (0.6, "mean(top5_overlap) >= 60%", True),
        (0.55, "min(top5_overlap) >= 60%", False),
        (0.5999, "min(top5_overlap) >= 60%", False),
        (0.55, "mean(top5_overlap) >= 60%", False),
        (0.55, "min(top5_overlap) >= 60%, budget: 10% of requests", False),
    ],
)
def test_share_is_not_rounded_up_to_its_threshold(
    tmp_path: Path, value: float, requirement: str, held: bool
) -> None:
    """Shares of five tokens are stored as doubles, 3/5 as slightly less; 0.55 is not 3/5."""
    text, _, budget = requirement.partition(", budget: ")
    more = {"budget": budget} if budget else {}
    shares = pa.array([value, 1.0 if "min" in text else value], pa.float32())
    columns = {"request": ["a", "b"], "slice": ["chat"] * 2, "top5_overlap": shares}
    (found,) = verdicts(contract(tmp_path, text, **more), write(tmp_path, columns))
    assert isinstance(found, Held) == held


def test_missing_values_do_not_imply_equal_policies(tmp_path: Path) -> None:
    """Equal policies need no sample size; a column with gaps does not prove them."""
    n = 40
    columns = {"request": [f"r{i}" for i in range(n)], "slice": ["chat"] * n, "k3": [0.0] * n}
    program = contract(tmp_path, "mean(k3) <= 0.001")
    zeros = pa.array([0.0] * n, pa.float64())
    (equal,) = verdicts(program, write(tmp_path, {**columns, "log_ratio_linf": zeros}))
    assert isinstance(equal, Held)
    some = pa.array([0.0] * (n - 1) + [None], pa.float64())
    (gaps,) = verdicts(program, write(tmp_path, {**columns, "log_ratio_linf": some}))
    assert not isinstance(gaps, Held)


@pytest.mark.parametrize(
    ("drift", "values", "requirement"),
    [
        ([0.0, math.nan], [0.0, 0.0], "mean(k3) <= 0.001"),
        ([0.0, 0.0], [-0.5, 0.5], "abs(mean(log_ratio)) <= 0.001"),
    ],
)
def test_columns_that_contradict_equal_policies_give_no_verdict(
    tmp_path: Path, drift: list[float], values: list[float], requirement: str
) -> None:
    """Neither NaN beside zeros nor ratios other than 1 are those of equal policies."""
    n = 40
    columns = {
        "request": [f"r{i}" for i in range(n) for _ in range(2)],
        "slice": ["chat"] * (2 * n),
        "k3": [0.0] * (2 * n),
        "log_ratio": [0.0, 0.0, *values * (n - 1)],
        "log_ratio_linf": [0.0, 0.0, *drift * (n - 1)],
    }
    (found,) = verdicts(contract(tmp_path, requirement), write(tmp_path, columns))
    assert isinstance(found, Inconclusive)


def test_empty_slice_does_not_imply_equal_policies(tmp_path: Path) -> None:
    program = contract(
        tmp_path, "mean(k3) <= 0.001", slices="{chat: {}, code: {}}", names="[chat, code]"
    )
    columns = {"request": ["a"], "slice": ["chat"], "k3": [0.0], "log_ratio_linf": [0.0]}
    found = verdicts(program, write(tmp_path, columns))
    assert "there are no values" in invalid(found[1])


LENIENT = (
    "max(kl) <= 1",
    "p50(kl) <= 1",
    "mean(kl) <= 1",
    "not (max(kl) > 1)",
    "max(kl + js) <= 3",
    "p50(abs(js - kl)) <= 1",
    "max(js) <= 0.5 and mean(kl) <= 1",
    "max(kl) <= 1, budget: 50% of requests",
    "p50(kl) <= 1, budget: 50% of windows",
    "mean(kl) <= 1, budget: 50% of requests",
    "mean(kl) <= 1, evidence: sample",
)


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Program:
    lines = []
    for i, text in enumerate(LENIENT):
        requirement, *rest = text.split(", ")
        more = "".join(f", {part}" for part in rest)
        lines.append(
            f'  N-{i}: {{require: "{requirement}"{more}, level: L2, slices: [chat, code]}}\n'
        )
    path = tmp_path_factory.mktemp("lenient") / "contract.yaml"
    path.write_text(f"{_HEAD}slices: {{chat: {{}}, code: {{}}}}\nclauses:\n{''.join(lines)}")
    return load_program(path)


@pytest.mark.full
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_no_clause_with_a_missing_value_holds(lenient: Program, data: st.DataObject) -> None:
    """One missing value in many, also where a budget would allow one violation."""
    n = data.draw(st.integers(30, 60))
    requests = [f"r{data.draw(st.integers(0, 25))}" for _ in range(n)]
    slices = [("chat", "code")[int(name[1:]) % 2] for name in requests]
    values: list[float | None] = data.draw(st.lists(st.floats(0, 0.3), min_size=n, max_size=n))
    at = data.draw(st.integers(0, n - 1))
    values[at] = data.draw(st.sampled_from([None, math.nan, math.inf, -math.inf, -0.5, -1e300]))
    columns = {"request": requests, "slice": slices, "kl": values, "js": [0.1] * n}
    with TemporaryDirectory() as folder:
        file = write(Path(folder), columns)
        table = open_tables([file])
        with opened(table, threads=1) as database:
            rows = decide_table(prepare(lenient, table), database).results
    hurt = [row for row in rows if row.slice == slices[at] and row.metric != "max(js)"]
    assert len(hurt) == len(LENIENT)
    assert {type(row.verdict) for row in hurt} == {InvalidEvidence}
    assert sum(isinstance(row.verdict, Held) for row in rows if row.metric == "max(js)") > 0


@pytest.mark.parametrize("requirement", ["min(margin) >= 0.5", "p50(margin) >= 0.5"])
@pytest.mark.parametrize("budget", [{}, {"budget": "50% of requests"}, {"evidence": "sample"}])
def test_infinity_on_the_harmless_side_is_invalid(
    tmp_path: Path, requirement: str, budget: dict[str, str]
) -> None:
    rows = {"request": ["a", "a", "b"], "slice": ["chat"] * 3, "margin": [1.0, math.inf, 1.0]}
    program = contract(tmp_path, requirement, **budget)
    (verdict,) = verdicts(program, write(tmp_path, rows))
    assert "not finite" in invalid(verdict)


# --- metrics of requests -------------------------------------------------------------------------


def test_request_level_value_counts_once(tmp_path: Path) -> None:
    """Each row of a request repeats its value: a long request has no larger weight."""
    columns = {
        "request": ["a", *["b"] * 9],
        "slice": ["chat"] * 10,
        "token_kl_max": [0.9, *[0.1] * 9],
    }
    file = write(tmp_path, columns)
    assert not isinstance(verdicts(contract(tmp_path, "mean(token_kl_max) <= 0.2"), file)[0], Held)
    assert isinstance(verdicts(contract(tmp_path, "mean(token_kl_max) <= 0.5"), file)[0], Held)
    assert isinstance(verdicts(contract(tmp_path, "max(token_kl_max) <= 0.95"), file)[0], Held)


def test_differing_request_level_values_are_refused(tmp_path: Path) -> None:
    columns = {"request": ["a", "a"], "slice": ["chat"] * 2, "token_kl_max": [0.9, 0.1]}
    (found,) = verdicts(contract(tmp_path, "mean(token_kl_max) <= 1"), write(tmp_path, columns))
    assert "has several values" in invalid(found)


# --- rows ----------------------------------------------------------------------------------------


def test_slice_fields_that_differ_within_a_request_are_refused(tmp_path: Path) -> None:
    """The token beyond the threshold would be in no slice."""
    program = contract(tmp_path, "max(kl) <= 0.05", slices='{chat: {where: "length <= 4"}}')
    columns = {"request": ["a", "a", "b"], "kl": [0.01, 9.0, 0.01], "length": [4, 5, 2]}
    message = refused(program, write(tmp_path, columns))
    assert message.startswith("the request `a` has several values of `length`, by which slices")
    whole = write(tmp_path, {**columns, "length": [4, 4, 2]})
    assert not isinstance(verdicts(program, whole)[0], Held)


@pytest.mark.parametrize(
    ("one", "other"), [("chat", "left"), (["chat"], ["left"]), (["chat", "left"], ["left"])]
)
@pytest.mark.parametrize("with_contract", [True, False])
def test_requests_in_several_named_slices_are_refused(
    tmp_path: Path, one: Any, other: Any, with_contract: bool
) -> None:
    """The token beyond the threshold would be in a slice that no clause is about."""
    columns = {"request": ["a", "a", "b"], "slice": [one, other, one], "kl": [0.01, 9.0, 0.01]}
    program = contract(tmp_path, "max(kl) <= 0.05") if with_contract else None
    message = refused(program, write(tmp_path, columns))
    assert message.startswith("the request `a` has several values of `slice`, by which slices")


def test_order_and_repetition_in_lists_of_slices_do_not_matter(tmp_path: Path) -> None:
    lists = [["chat", "left"], ["left", "chat", "chat"]]
    file = write(tmp_path, {"request": ["a", "a"], "slice": lists, "kl": [0.01, 0.02]})
    assert isinstance(verdicts(contract(tmp_path, "max(kl) <= 0.05"), file)[0], Held)


@pytest.mark.parametrize(
    ("where", "inside"),
    [
        ("n <= 1e60", True), ("n < -1e60", False), ("n >= -1e60", True), ("n > 1e60", False),
        ("n == 1e60", False), ("n != 1e60", True),
    ],
)  # fmt: skip
def test_predicates_beyond_integers_are_decided(tmp_path: Path, where: str, inside: bool) -> None:
    program = contract(tmp_path, "max(kl) <= 1", slices=f'{{chat: {{where: "{where}"}}}}')
    integers = pa.array([2**64 - 1, 0], pa.uint64())
    file = write(tmp_path, {"request": ["a", "b"], "kl": [0.1, 0.1], "n": integers})
    found = verdicts(program, file)[0]
    assert isinstance(found, Held if inside else InvalidEvidence)


@pytest.mark.parametrize("names", [[["chat"], []], [["chat"], [None]], [["chat"], ["chat", None]]])
@pytest.mark.parametrize("with_contract", [True, False])
def test_rows_in_no_slice_are_not_dropped(
    tmp_path: Path, names: list[list[str | None]], with_contract: bool
) -> None:
    columns = {
        "request": ["a", "b"],
        "slice": pa.array(names, pa.list_(pa.string())),
        "kl": [0.01, 9.0],
    }
    program = contract(tmp_path, "max(kl) <= 0.05") if with_contract else None
    message = refused(program, write(tmp_path, columns))
    assert message.startswith("1 rows have no ")


def test_unnamed_slices_are_reported(tmp_path: Path) -> None:
    columns = {
        "request": ["a", "b", "c", "c"],
        "slice": ["chat", "chta", "code", "code"],
        "kl": [0.01, 9.0, 0.01, 0.01],
    }
    file = write(tmp_path, columns)
    found = aggregate([file], contract(tmp_path, "max(kl) <= 0.05"), AggregateOptions(threads=1))
    assert found["verdict"] == "held"
    assert found["tables"]["left_out"] == 3
    stream = io.StringIO()
    print_aggregate(found, stream)
    assert "4 rows in 1 file, 1 slice; 3 rows in none of them" in stream.getvalue()
    assert aggregate([file], None, AggregateOptions(threads=1))["tables"]["left_out"] == 0


def test_positions_reveal_missing_and_duplicate_rows(tmp_path: Path) -> None:
    program = contract(tmp_path, "max(kl) <= 0.05")
    columns: dict[str, Any] = {
        "request": ["a", "a", "a", "b"],
        "slice": ["chat"] * 4,
        "kl": [0.01] * 4,
    }
    good = write(tmp_path, {**columns, "position": [7, 5, 6, 0]})
    assert isinstance(verdicts(program, good)[0], Held)
    twice = write(tmp_path, {**columns, "position": [5, 6, 6, 0]})
    assert refused(program, twice) == (
        "the request `a` has 3 rows at 2 of the positions 5 to 6: each must be there once"
    )
    gap = write(tmp_path, {**columns, "position": [5, 6, 8, 0]})
    assert "3 rows at 3 of the positions 5 to 8" in refused(program, gap)
    lacking = write(tmp_path, {**columns, "position": [5, 6, None, 0]})
    assert "1 rows have no `position`" in refused(None, lacking)
    words = write(tmp_path, {**columns, "position": ["5", "6", "7", "0"]})
    assert "the column `position` holds strings" in refused(None, words)
    floats = write(tmp_path, {**columns, "position": [5.0, 6.0, 7.0, 0.0]})
    assert "the column `position` holds doubles" in refused(None, floats)


@pytest.mark.parametrize("name", ["kcdsl_place", "file_index", "File_Row_Number"])
def test_columns_that_replace_the_order_of_rows_are_refused(tmp_path: Path, name: str) -> None:
    """The order decides windows, and files are told apart by it."""
    columns = {"request": ["a", "b"], "slice": ["chat"] * 2, "kl": [0.01, 0.02], name: [None, 0]}
    program = contract(tmp_path, "max(kl) <= 0.05", budget="50% of windows")
    message = refused(program, write(tmp_path, columns))
    assert message.startswith(f"the table has a column `{name}`")


def test_slices_that_differ_in_a_final_nul_are_told_apart(tmp_path: Path) -> None:
    columns = {"request": ["a", "b", "c"], "slice": ["x", "x\0", "x"], "kl": [0.1, 0.2, 0.3]}
    found = aggregate([write(tmp_path, columns)], None, AggregateOptions(threads=1))
    assert [(one["slice"], one["rows"]) for one in found["slices"]] == [("x", 2), ("x\0", 1)]


@pytest.mark.parametrize("stage", ["digests", "requests", "tokens"])
def test_file_that_changes_after_its_digest_is_refused(tmp_path: Path, stage: str) -> None:
    program = contract(tmp_path, "max(kl) <= 0.05")
    columns = {"request": ["a", "b"], "slice": ["chat"] * 2, "kl": [0.01, 0.5]}
    file = write(tmp_path, columns)

    def exchange(reached: str, done: int, total: int) -> None:
        if reached == stage and done == total:
            write(tmp_path, {**columns, "kl": [0.01, 0.02]})

    with pytest.raises(Refusal, match="changed while the command ran"):
        aggregate([file], program, AggregateOptions(threads=1), exchange)


def test_copy_of_a_file_is_refused(tmp_path: Path) -> None:
    """Every token of it would count twice."""
    columns = {"request": ["a", "b"], "slice": ["chat"] * 2, "kl": [0.01, 0.02]}
    first, second = write(tmp_path, columns), write(tmp_path, columns, "copy")
    assert "copy.parquet has the bytes of" in refused(None, first, second)


@pytest.mark.parametrize("name", ["[a].parquet", "*.parquet", "?.parquet", "[!b].parquet"])
def test_file_names_are_not_glob_patterns(tmp_path: Path, name: str) -> None:
    """DuckDB would read `a.parquet` twice, and never the file that exceeds the limit."""
    program = contract(tmp_path, "max(kl) <= 0.05")
    good = write(tmp_path, {"request": ["a"], "slice": ["chat"], "kl": [0.01]}, "a")
    bad = write(tmp_path, {"request": ["b"], "slice": ["chat"], "kl": [0.5]}, "b")
    bad = bad.rename(tmp_path / name)
    (verdict,) = verdicts(program, good, bad)
    assert isinstance(verdict, Violated)


def test_folder_names_are_not_hive_partitions(tmp_path: Path) -> None:
    folder = tmp_path / "kl=0" / "slice=chat"
    folder.mkdir(parents=True)
    program = contract(tmp_path, "max(kl) <= 0.05")
    file = write(folder, {"request": ["b"], "slice": ["chat"], "kl": [0.5]})
    (verdict,) = verdicts(program, file)
    assert isinstance(verdict, Violated)


def test_file_without_rows_changes_nothing(tmp_path: Path) -> None:
    program = contract(tmp_path, "max(kl) <= 0.05")
    columns = {"request": ["a"], "slice": ["chat"], "kl": [0.01]}
    file, empty = write(tmp_path, columns), tmp_path / "empty.parquet"
    pq.write_table(pq.read_table(file).slice(0, 0), empty)
    assert isinstance(verdicts(program, file, empty)[0], Held)
    assert "have no rows" in refused(program, empty)
