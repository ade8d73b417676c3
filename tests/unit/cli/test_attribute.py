"""`kcdsl attribute`: output, files and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Cli
from tests.support.small_models import write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer:
    run: torch.sdpa.math
    numerics:
      preset: torch-sdpa-math
      compute: bfloat16
      weights: {format: fp8_e4m3, scale: per_channel}
data: prompts.jsonl
slices:
  all: {}
  few: {where: length <= 6}
  none: {where: length > 999}
clauses:
  N-KL: {require: p99(kl) <= 1, slices: [all], level: L2}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("attribute")
    write_model(found, layers=1, prompts=["x" * (4 + i % 20) + chr(97 + i % 26) for i in range(30)])
    (found / "contract.yaml").write_text(CONTRACT)
    return found


@pytest.fixture(scope="module")
def ran(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the output of one run and its document."""
    from tests.support.commands import run_here

    done = run_here("attribute", cwd=folder)
    document = json.loads((folder / "out" / "attribution.json").read_text())
    return done, document


@pytest.mark.full
def test_run_prints_a_table_and_writes_the_document(
    ran: tuple[Any, dict[str, Any]], follows: Callable[..., None]
) -> None:
    done, document = ran
    assert done.code == 0
    follows(document)
    assert document["status"] == "attributed"
    assert document["candidates"][0]["source"] == "weights"
    assert "wrote" in done.stderr
    assert all(len(line) <= 100 for line in done.stdout.splitlines())
    for word in ("operator", "precision", "weights", "batch", "routing", "attn_0", "→"):
        assert word in done.stdout


@pytest.mark.full
def test_shares_sum_to_the_total(ran: tuple[Any, dict[str, Any]]) -> None:
    _, document = ran
    shares = [s["shapley"] for s in document["sources"] if s["shapley"] is not None]
    assert sum(shares) == pytest.approx(document["total"], rel=1e-12)
    assert len(document["between"]) == 16


@pytest.mark.full
def test_json_output_equals_the_document_and_is_reproducible(
    cli: Cli, folder: Path, tmp_path: Path, ran: tuple[Any, dict[str, Any]]
) -> None:
    done = cli("attribute", "--format", "json", "-o", tmp_path / "o", cwd=folder)
    assert done.code == 0
    assert json.loads(done.stdout) == ran[1]
    assert done.stdout == (tmp_path / "o" / "attribution.json").read_text()


@pytest.mark.full
def test_few_requests_are_inconclusive(cli: Cli, folder: Path, tmp_path: Path) -> None:
    done = cli("attribute", "--slice", "few", "--no-bounds", "-o", tmp_path, cwd=folder)
    assert done.code == 3
    assert "requests say too little" in done.stdout
    document = json.loads((tmp_path / "attribution.json").read_text())
    assert not any(s["shown"] for s in document["sources"])
    assert document["envelopes"] == []


@pytest.mark.full
def test_option_alone_omits_batching(cli: Cli, folder: Path, tmp_path: Path) -> None:
    done = cli(
        "attribute", "--batch", "1", "--no-bounds", "--format", "json", "-o", tmp_path, cwd=folder
    )
    document = json.loads(done.stdout)
    batch = next(s for s in document["sources"] if s["name"] == "batch")
    assert (batch["state"], batch["shapley"]) == ("equal", 0.0)
    assert len(document["between"]) == 8


@pytest.mark.full
def test_drift_of_states_is_split_among_the_blocks(cli: Cli, folder: Path, tmp_path: Path) -> None:
    done = cli("attribute", "--metric", "hidden_l2", "--format", "json", "-o", tmp_path, cwd=folder)
    assert done.code == 0, done.stderr
    document = json.loads(done.stdout)
    gains = {row["block"]: row["gain"] for row in document["layers"]}
    assert list(gains) == ["norm_0", "attn_0", "norm_1", "mlp_0", "norm_2"]
    total = sum(gains.values()) + document["layer_outside"]
    assert total == pytest.approx(document["layer_total"], rel=1e-9)
    assert abs(document["layer_outside"]) < 0.05 * document["layer_total"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--metric", "kll"), "KC691", "did you mean `kl`"),
        (("--metric", "latency"), "KC691", "no values of single positions"),
        (("--metric", "hidden_l3"), "KC691", "there is no such metric"),
        (("--slice", "al"), None, "did you mean `all`"),
        (("--slice", "none"), "KC690", "there are no requests"),
        (("--statistic", "median"), None, "invalid choice"),
        (("--batch", "0"), None, "of at least 1"),
    ],
)
def test_unsupported_attributions_are_refused(
    cli: Cli, folder: Path, tmp_path: Path, arguments: tuple[str, ...], code: str, words: str
) -> None:
    done = cli("attribute", *arguments, "-o", tmp_path / "o", cwd=folder)
    assert done.code == 2
    assert words in done.stderr
    assert code is None or code in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "o").exists()


@pytest.mark.full
def test_failed_precondition_is_refused(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kcdsl_backends.empirical.attribution import backend

    monkeypatch.setattr(
        backend, "blocking", lambda checks: "precheck stale_weights failed: planted"
    )
    done = cli("attribute", "-o", tmp_path, cwd=folder)
    assert done.code == 2
    assert "planted" in done.stdout
    document = json.loads((tmp_path / "attribution.json").read_text())
    assert document["status"] == "invalid_evidence"
    assert document["candidates"] == []
    assert not any(s["shown"] for s in document["sources"])
