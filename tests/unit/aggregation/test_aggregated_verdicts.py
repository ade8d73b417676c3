"""Verdicts from token tables equal those from the same values in memory, bit for bit."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Refusal
from kcdsl.ir.obligations import named_slices, obligations_of
from kcdsl.ir.terms import Program
from kcdsl.verdict.model import Held, InvalidEvidence, Violated
from kcdsl.verdict.result import ClauseResult
from kcdsl_backends.empirical.decision.results import DecisionCase, decide_all
from kcdsl_backends.empirical.questions.token_clauses import decide_table, prepare
from kcdsl_backends.empirical.sources.tokens.database import opened
from kcdsl_backends.empirical.sources.tokens.tables import open_tables
from tests.unit.aggregation.conftest import Rows

if TYPE_CHECKING:
    from tests.conftest import Cli

_HEAD = """kcdsl: 1
contract: tables
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: requests.jsonl
slices: {chat: {}, code: {}}
clauses:
"""
CLAUSES = (
    "p99(kl) <= 0.05",
    "p50(kl) < 0.05",
    "max(kl) <= 0.1",
    "min(top5_overlap) >= 60%",
    "mean(kl) <= 0.01",
    "mean(top5_overlap) >= 0.8",
    "rate(top1_flip) <= 0.5",
    "max(kl) <= 0.05, budget: 25% of requests",
    "mean(kl) <= 0.01, budget: 10% of requests",
    "p95(kl) <= 0.05, budget: 50% of windows",
    "min(top5_overlap) >= 60%, budget: 20% of requests",
    "p95(kl) <= 0.05, evidence: sample",
    "mean(kl) <= 0.05, evidence: sample",
    "max(kl) <= 0.05, budget: 30% of requests, evidence: sample",
    "p99(kl) <= 0.05 and mean(js) <= 0.02",
    "p99(kl) <= 0.05 or mean(js) <= 0.02",
    "not (max(kl) > 0.05)",
    "p95(abs(kl - js)) <= 0.05",
    "max(kl * 2 + js / 4) <= 0.2",
    "max(kl / (js + 1)) <= 100",
    "abs(mean(kl - js)) <= 0.01",
    "mean(k3) <= 0.001",
)


def program_of(folder: Path, clauses: Sequence[str]) -> Program:
    lines = []
    for i, text in enumerate(clauses):
        requirement, *rest = text.split(", ")
        more = "".join(f", {part}" for part in rest)
        family = "S" if "overlap" in requirement else "R" if "latency" in requirement else "N"
        lines.append(
            f'  {family}-{i}: {{require: "{requirement}"{more}, level: L2, slices: [chat, code]}}\n'
        )
    path = folder / "contract.yaml"
    path.write_text(_HEAD + "".join(lines), encoding="utf-8")
    return load_program(path)


def from_memory(program: Program, rows: Rows, seed: int = 0) -> tuple[ClauseResult, ...]:
    data = {name: rows.in_memory(name) for name in ("chat", "code")}
    cases = [
        DecisionCase(obligation, data[name])
        for clause in program.clauses
        for name in named_slices(clause) or tuple(data)
        for obligation in obligations_of(clause, name)
    ]
    return decide_all(cases, program, seed)[0]


def from_table(program: Program, files: Sequence[Path]) -> tuple[ClauseResult, ...]:
    table = open_tables(files)
    with opened(table) as database:
        return decide_table(prepare(program, table), database).results


def bits(rows: Sequence[ClauseResult]) -> list[object]:
    """Return rows with doubles as bits (zeros without sign), without additional report fields."""

    def plain(value: object) -> object:
        if isinstance(value, float):
            return struct.pack("<d", value + 0.0)
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list) else value

    bare = ({k: v for k, v in row.to_json().items() if k != "context"} for row in rows)
    return [plain(row) for row in bare]


_SPECIAL = st.sampled_from([0.05, 0.1, -0.0, 0.0, 1e-300, 5e-324, 0.6, 3 / 5, 1.0, 0.01])
_PLAIN = st.floats(0, 0.3)
_WILD = st.one_of(
    _PLAIN, _SPECIAL, st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -1e308, None])
)


def _within(value: float | None) -> float | None:
    """Return a value that a divergence of Jensen and Shannon can have, instead of 1 nat."""
    return math.log(2) if value == 1.0 else value


@st.composite
def tables(draw: st.DrawFn, values: st.SearchStrategy[float | None]) -> Rows:
    n = draw(st.integers(1, 40))
    requests = draw(st.lists(st.sampled_from([f"r{i}" for i in range(40)]), min_size=n, max_size=n))
    slices = [("chat", "chat", "code")[int(name[1:]) % 3] for name in requests]
    shares = st.sampled_from([0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    return Rows(
        requests,
        slices,
        {
            "kl": draw(st.lists(values, min_size=n, max_size=n)),
            "js": draw(st.lists(values.map(_within), min_size=n, max_size=n)),
            "k3": draw(st.lists(_PLAIN, min_size=n, max_size=n)),
            "top5_overlap": draw(st.lists(shares, min_size=n, max_size=n)),
            "top1_flip": draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n)),
        },
        draw(st.booleans()),
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return program_of(tmp_path_factory.mktemp("contract"), CLAUSES)


@pytest.mark.full
@settings(deadline=None, max_examples=8)
@given(rows=tables(st.one_of(_PLAIN, _SPECIAL)), files=st.integers(1, 4))
def test_verdicts_equal_those_of_the_values_in_memory(
    program: Program, rows: Rows, files: int
) -> None:
    with TemporaryDirectory() as folder:
        found = from_table(program, rows.write(Path(folder), files=files, group=7))
    assert bits(found) == bits(from_memory(program, rows))


@pytest.mark.full
@settings(deadline=None, max_examples=8)
@given(rows=tables(_WILD))
def test_missing_and_infinite_values_give_equal_verdicts(program: Program, rows: Rows) -> None:
    with TemporaryDirectory() as folder:
        found = from_table(program, rows.write(Path(folder)))
    wanted = from_memory(program, rows)
    assert [type(row.verdict) for row in found] == [type(row.verdict) for row in wanted]
    sound = [i for i, row in enumerate(wanted) if not isinstance(row.verdict, InvalidEvidence)]
    assert bits([found[i] for i in sound]) == bits([wanted[i] for i in sound])


def test_absent_slice_or_column_is_invalid_evidence(tmp_path: Path) -> None:
    """No row of the slice `code`, no column `js`: invalid evidence, whatever other rows give."""
    rows = Rows(["a", "b"], ["chat", "chat"], {"kl": [0.001, 0.002]})
    contract = program_of(tmp_path, ["p99(kl) <= 0.05", "mean(js) <= 0.1"])
    found = {(r.clause, r.slice): r.verdict for r in from_table(contract, rows.write(tmp_path))}
    assert isinstance(found["N-0", "chat"], Held)
    assert isinstance(found["N-0", "code"], InvalidEvidence)
    assert found["N-1", "chat"] == InvalidEvidence("js: the table has no such values")


def test_requests_without_a_value_are_not_dropped(tmp_path: Path) -> None:
    rows = Rows(["a", "b", "b"], ["chat"] * 3, {"kl": [0.001, None, 0.002]})
    contract = program_of(tmp_path, ["p99(kl) <= 0.05"])
    found = from_table(contract, rows.write(tmp_path))[0]
    assert found.verdict == InvalidEvidence("kl: the request b: 1 of 2 values are missing")


def test_command_decides_and_reports_its_queries(
    cli: Cli, tmp_path: Path, follows: Callable[[Any], None]
) -> None:
    (tmp_path / "tables").mkdir()
    Rows(["a", "b", "c"], ["chat", "chat", "code"], {"kl": [0.001, 0.07, 0.01]}).write(
        tmp_path / "tables"
    )
    program_of(tmp_path, ["p99(kl) <= 0.05", "p95(latency) <= 2 s"])
    words = ["aggregate", str(tmp_path / "tables"), "--contract", str(tmp_path / "contract.yaml")]
    ran = cli(*words, "--format", "json", "--looks", "2")
    document = json.loads(ran.stdout)
    assert ran.code == document["exit"] == 1
    follows(document)
    by_slice = {row["slice"]: row for row in document["clauses"]}
    assert by_slice["chat"]["counterexample"]["request"] == "b"
    assert by_slice["code"]["verdict"] == "held"
    assert document["deferred"] == {
        "R-1": "latency is no value of a token; `kcdsl evaluate` decides it"
    }
    assert document["slices"][0]["metrics"][0]["tokens"]["beyond"] == [
        {"op": "<=", "limit": 0.05, "k": 1, "n": 2}
    ]
    assert document["statistics"]["looks"] == 2
    shown = cli(*words, "--sql", "--limit", "kl < 0.01", "-o", str(tmp_path / "out.json"))
    assert shown.code == 1
    assert "✗ violated" in shown.stdout
    assert "quantile_disc" in shown.stdout
    assert json.loads((tmp_path / "out.json").read_text())["verdict"] == "violated"
    assert cli("aggregate", str(tmp_path / "tables")).code == 0
    assert cli("aggregate", str(tmp_path / "tables"), "--slice", "chta").code == 2


@pytest.mark.full
def test_process_exit_prints_nothing(cli_process: Cli, tmp_path: Path) -> None:
    """The bindings of DuckDB print leaked objects when an interpreter ends."""
    (tmp_path / "tables").mkdir()
    Rows(["a", "b"], ["chat", "code"], {"kl": [0.001, 0.01]}).write(tmp_path / "tables")
    ran = cli_process("aggregate", "tables", cwd=tmp_path)
    assert (ran.code, ran.stderr) == (0, "")


def test_rows_outside_predicates_and_tables_are_invalid_evidence(tmp_path: Path) -> None:
    """Rows without the field, and requests outside every row of a table, invalidate evidence."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    text = _HEAD.replace("{chat: {}, code: {}}", '{all: {where: "length >= 1"}}').replace(
        "clauses:",
        "tables:\n  tau:\n    unit: nats\n    rows:\n"
        '      - {where: "length <= 4", value: 0.05}\n      - {where: "length > 4", value: 0.005}\n'
        "clauses:",
    )
    (tmp_path / "contract.yaml").write_text(
        text + "  N-0: {require: p99(kl) <= table(tau), slices: [all], level: L2}\n"
    )
    contract = load_program(tmp_path / "contract.yaml")
    columns = {"request": ["a", "a", "b"], "kl": [0.02, 0.01, 0.01], "length": [2, 2, 9]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    found = {r.slice: type(r.verdict) for r in from_table(contract, [tmp_path / "t.parquet"])}
    assert list(found.values()) == [Held, Violated]
    lacking = pa.table({**columns, "length": pa.array([2, None, 9])})
    pq.write_table(lacking, tmp_path / "t.parquet")
    with pytest.raises(Refusal, match="1 rows have no `length`"):
        from_table(contract, [tmp_path / "t.parquet"])
