"""`kcdsl evaluate --looks` and `--anytime`: reports and certificates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.small_models import write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, tokenizer: bytes}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  SOFT: {require: max(kl) <= 1e-3, budget: 5% of requests, evidence: sample, level: L2}
  HARD: {require: max(kl) <= 1e-3, evidence: sample, level: L2}
  MEAN: {require: mean(kl) <= 1e-3, evidence: sample, level: L2}
  ROWS: {require: p99(kl) <= 1e-3, level: L2}
"""

QUICK = ("--seconds", "0.1", "--bound-seconds", "0")
"""Without times and bounds of whole models."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model, 65 prompts and the contract."""
    where = tmp_path_factory.mktemp("looks")
    write_model(where, prompts=[f"row {i}" for i in range(65)])
    (where / "contract.yaml").write_text(CONTRACT)
    return where


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "looks", "error", "soft", "mean"),
    [
        ((), 1, 0.05, "held", "held"),
        (("--looks", "5"), 5, 0.01, "inconclusive", "held"),
        (("--anytime",), None, 0.05, "inconclusive", "inconclusive"),
    ],
)
def test_looks_share_the_error(
    cli: Any,
    follows: Any,
    folder: Path,
    options: Any,
    looks: Any,
    error: float,
    soft: str,
    mean: str,
) -> None:
    """65 requests show 5 % at one look (59); at one of five 90 are needed, at every look 74."""
    ran = cli("evaluate", "--format", "json", *QUICK, *options, cwd=folder)
    assert ran.code == 3
    report = json.loads(ran.stdout)
    follows(report)
    found = report["statistics"]
    assert (found["looks"], found["limit_error"], found["sampled"]) == (looks, error, 3)
    assert (found["passes"], found["violations"]) == ("intersection-union", "holm")
    rows = {row["clause"]: row for row in report["clauses"]}
    assert [rows[name]["verdict"] for name in rows] == [soft, "inconclusive", mean, "held"]
    assert rows["SOFT"]["confidence"] == pytest.approx(1 - error)
    assert rows["SOFT"]["needed"] == {1: None, 5: 90, None: 74}[looks]
    assert rows["HARD"]["shown"]["k"] == 0
    assert rows["HARD"]["needed"] is None
    assert rows["ROWS"]["shown"] is None


@pytest.mark.full
def test_terminal_output_states_the_looks(cli: Any, folder: Path) -> None:
    text = cli("evaluate", *QUICK, "--looks", "5", cwd=folder).stdout
    flat = " ".join(text.split())
    assert "90 without any would show at most 5 %" in flat
    assert "samples: each pass at 95 % over 5 looks together; violations at" in flat
    assert "shared among 3 results (Holm)" in flat
    assert "0 of 65 requests beyond: the rate is below 4.51 % at 95 %" in " ".join(
        cli("evaluate", *QUICK, cwd=folder).stdout.split()
    )


@pytest.mark.full
def test_certificate_of_an_anytime_evaluation_is_valid(cli: Any, folder: Path) -> None:
    """An e-process is weaker than the binomial tail that the checker computes."""
    contract = CONTRACT.replace("budget: 5%", "budget: 10%").split("  HARD")[0]
    (folder / "soft.yaml").write_text(contract)
    assert cli("keygen", "-o", "own.key", cwd=folder).code == 0
    ran = cli(
        "evaluate", "soft.yaml", *QUICK, "--anytime", "--sign", "own.key", "-o", "soft",
        cwd=folder,
    )  # fmt: skip
    assert ran.code == 0, ran.stderr
    checked = cli(
        "check", "soft/evaluate.cert.json", "--key", "own.key.pub", "--contract", "soft.yaml",
        cwd=folder,
    )  # fmt: skip
    assert checked.code == 0, checked.stdout + checked.stderr
