"""`kcdsl compare`: a candidate held beside the incumbent, request by request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from scipy import stats

from kcdsl.verdict.model import InvalidEvidence
from kcdsl_backends.empirical.decide.report import conclude
from kcdsl_backends.empirical.questions import pairs
from tests.support.commands import run_here
from tests.support.small_models import DECODER, write_model

CONTRACT = """\
kcdsl: 1
contract: pair
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: COMPUTE}}
data: prompts.jsonl
slices: {all: {}, some: {where: length >= 6}}
clauses:
  KL: {require: p95(kl) <= LIMIT, slices: [all, some], level: L2}
  MEAN: {require: mean(kl) <= 1, slices: [all], level: L1}
  BOTH: {require: p99(kl) <= 2 * p50(kl) + 1, slices: [all], level: L1}
  FAILED: {require: failure_rate <= 0.5, slices: [all], level: L3}
"""
SCHEMA = json.loads(Path("kcdsl/verdict/compare.schema.json").read_text())


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Evaluate one contract with kernels of two precisions, and with another threshold."""
    folder = tmp_path_factory.mktemp("compare")
    rows = [{"id": f"p{i}", "text": f"prompt {i} {'x' * (i % 7)}"} for i in range(12)]
    write_model(folder, config=DECODER, rows=rows)
    found = {}
    runs = (("fine", "float32", "1e-7"), ("coarse", "bfloat16", "1e-7"), ("other", "float32", "1"))
    for name, compute, limit in runs:
        text = CONTRACT.replace("COMPUTE", compute).replace("LIMIT", limit)
        (folder / "contract.yaml").write_text(text)
        ran = run_here("evaluate", "--bound-seconds", "0", "-o", name, cwd=folder)
        assert ran.code in (0, 1, 3), ran.stderr
        found[name] = folder / name / "trace.parquet"
    return found


def _compare(cli: Any, one: Path, two: Path, code: int) -> dict[str, Any]:
    ran = cli("compare", one, two, "--json")
    assert ran.code == code, ran.stdout + ran.stderr
    document = json.loads(ran.stdout)
    jsonschema.validate(document, SCHEMA)
    assert isinstance(document, dict)
    return document


def test_a_coarser_kernel_is_named_with_the_slices_that_got_worse(
    cli: Any, traces: dict[str, Path]
) -> None:
    document = _compare(cli, traces["fine"], traces["coarse"], 1)
    rows = {row["obligation"]: row for row in document["rows"]}
    for name in ("KL/all/0", "KL/some/0", "MEAN/all/0"):
        assert rows[name]["change"] == "regressed", rows[name]
    assert rows["KL/all/0"]["worse"] == rows["KL/all/0"]["n"] == 12
    assert rows["KL/all/0"]["delta"] == -1.0
    assert rows["MEAN/all/0"]["candidate"] > rows["MEAN/all/0"]["incumbent"]
    assert rows["MEAN/all/0"]["low"] > 0
    assert rows["BOTH/all/0"]["change"] == "not_compared"
    assert rows["FAILED/all/0"]["change"] == "unchanged"
    assert any("infer kernel" in name and "compute" in name for name in document["changed"])
    shown = cli("compare", traces["fine"], traces["coarse"])
    assert "worse: KL all (L2): 12 of 12 requests kept the threshold before" in shown.stdout


def test_a_finer_kernel_is_better_and_the_same_one_is_the_same(
    cli: Any, traces: dict[str, Path]
) -> None:
    better = _compare(cli, traces["coarse"], traces["fine"], 0)
    assert {r["change"] for r in better["rows"] if r["clause"] in ("KL", "MEAN")} == {"improved"}
    same = _compare(cli, traces["fine"], traces["fine"], 0)
    assert {row["change"] for row in same["rows"]} == {"unchanged", "not_compared"}
    assert same["changed"] == []
    assert "nothing was shown to be worse" in cli("compare", traces["fine"], traces["fine"]).stdout


def test_another_threshold_is_another_question(cli: Any, traces: dict[str, Path]) -> None:
    document = _compare(cli, traces["other"], traces["fine"], 0)
    rows = [row for row in document["rows"] if row["clause"] == "KL"]
    assert {row["change"] for row in rows} == {"not_compared"}
    assert all("asks something else" in row["reason"] for row in rows)
    assert "clauses, slices or constants of the contract" in document["changed"]


def test_other_requests_are_refused(cli: Any, traces: dict[str, Path]) -> None:
    folder = traces["fine"].parents[1]
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    (folder / "fewer.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    text = CONTRACT.replace("COMPUTE", "float32").replace("LIMIT", "1").replace("prompts", "fewer")
    (folder / "contract.yaml").write_text(text)
    assert run_here("evaluate", "--bound-seconds", "0", "-o", "fewer", cwd=folder).code in (0, 1, 3)
    ran = cli("compare", traces["fine"], folder / "fewer" / "trace.parquet")
    assert ran.code == 2
    assert "error[KC632]" in ran.stderr
    assert cli("compare", traces["fine"], folder / "config.json").code == 2


# --- statistics -----------------------------------------------------------------------------------


def test_shares_are_compared_by_mcnemars_exact_test() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        before, after = rng.random(60) < 0.8, rng.random(60) < 0.7
        found = pairs._of_shares(before, after)
        worse, better = int((before & ~after).sum()), int((~before & after).sum())
        expected = stats.binomtest(worse, worse + better, alternative="greater").pvalue
        assert found.harm == pytest.approx(expected)
        assert found.delta == pytest.approx(after.mean() - before.mean())
        assert found.low <= found.delta <= found.high


def test_one_unit_that_moves_is_no_change() -> None:
    kept = np.ones(1000, dtype=bool)
    one_lost = kept.copy()
    one_lost[0] = False
    assert pairs._of_shares(kept, one_lost).harm == 0.5
    assert pairs._of_shares(kept, kept).harm == 1.0


@pytest.mark.full
def test_kernels_that_do_not_differ_are_rarely_called_different() -> None:
    """Twenty rows of two runs that differ by chance alone: any false alarm in at most 5 %."""
    rng, false = np.random.default_rng(1), 0
    for _ in range(300):
        chances = []
        for _ in range(20):
            before, after = rng.random(80) < 0.9, rng.random(80) < 0.9
            chances.append(pairs._of_shares(before, after).harm)
        false += bool(pairs._beyond(chances))
    assert stats.binomtest(false, 300, 0.05, alternative="greater").pvalue > 1e-3


def test_a_change_of_a_mean_is_seen_beside_large_differences_of_requests() -> None:
    rng = np.random.default_rng(2)
    sizes = rng.integers(5, 200, 400).astype(float)
    level = rng.lognormal(0, 1, 400)
    sums = level * sizes
    moved = (level * 1.02 + 0.01 * rng.standard_normal(400)) * sizes
    (one, first), (two, second) = pairs._linear(sums, sizes), pairs._linear(moved, sizes)
    away = second - first
    spread = np.std(away, ddof=1) * np.sqrt(400)
    assert (two - one) / spread > 10
    apart = np.hypot(np.std(first), np.std(second)) * np.sqrt(400)
    assert (two - one) / apart < 1


def test_invalid_evidence_is_not_compared(
    cli: Any, traces: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled_report(evidence: Any) -> Any:
        report = conclude(evidence)
        spoiled = [replace(row, verdict=InvalidEvidence("stale")) for row in report.clauses[:1]]
        return replace(report, clauses=(*spoiled, *report.clauses[1:]))

    monkeypatch.setattr(pairs, "conclude", spoiled_report)
    document = _compare(cli, traces["fine"], traces["fine"], 3)
    (row,) = [row for row in document["rows"] if "invalid_evidence" in row["verdicts"]]
    assert (row["change"], row["reason"]) == ("not_compared", "invalid evidence: stale")
