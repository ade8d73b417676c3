"""backends/template: the distribution is built, installed, discovered and used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kcdsl_certs.signatures import decode, parse_bundle
from tests.support.small_models import write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-0:
    require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= LIMIT"
    evidence: proof
    level: L2
"""
SCRIPT = "import sys; sys.argv[0] = 'kcdsl'; from kcdsl.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def installed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder into which pip installed the distribution."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index",
               "--no-build-isolation", "--target", str(folder),
               str(repository / "backends" / "template")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def kcdsl(installed: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.full
def test_backend_is_listed(installed: Path, tmp_path: Path) -> None:
    ran = kcdsl(installed, tmp_path, "backends")
    assert ran.returncode == 0, ran.stderr
    assert any(line.split()[:1] == ["quick"] for line in ran.stdout.splitlines()), ran.stdout
    assert "quick" not in kcdsl(tmp_path, tmp_path, "backends").stdout


@pytest.mark.full
@pytest.mark.parametrize(("limit", "code", "verdict"), [("1", 0, "held"), ("0", 3, "inconclusive")])
def test_proved_clauses_hold_and_others_stay_open(
    limit: str, code: int, verdict: str, installed: Path, tmp_path: Path
) -> None:
    write_model(tmp_path, rows=[{"id": "a", "text": "hello"}])
    (tmp_path / "contract.yaml").write_text(CONTRACT.replace("LIMIT", limit))
    ran = kcdsl(
        installed, tmp_path, "verify", "--backend", "quick", "--format", "json", "--cache", "off"
    )
    (goal,) = json.loads(ran.stdout)["goals"]
    assert (ran.returncode, goal["verdict"], goal["backend"]) == (code, verdict, "quick"), (
        ran.stderr
    )
    assert goal["evidence"]["confirmed"] is (verdict == "held")


@pytest.mark.full
def test_certificate_is_signed_and_checked(installed: Path, tmp_path: Path) -> None:
    write_model(tmp_path, rows=[{"id": "a", "text": "hello"}])
    (tmp_path / "contract.yaml").write_text(CONTRACT.replace("LIMIT", "1"))
    for words in (
        ("keygen",),
        ("verify", "--backend", "quick", "--cache", "off", "--sign", "kcdsl.key"),
        ("check", "out/verify.cert.json", "--key", "kcdsl.key.pub"),
    ):
        ran = kcdsl(installed, tmp_path, *words)
        assert ran.returncode == 0, (words, ran.stdout, ran.stderr)


@pytest.mark.full
def test_other_backends_decide_where_it_raises(installed: Path, tmp_path: Path) -> None:
    """With `auto` it runs first and nothing of it is signed; alone, nothing is written."""
    site = shutil.copytree(installed, tmp_path / "site")
    module = site / "quick_backend.py"
    text = module.read_text().replace("rank=90", "rank=-1")
    raising = '    ) -> list[GoalOutcome]:\n        raise ZeroDivisionError("a defect of quick")'
    module.write_text(text.replace("    ) -> list[GoalOutcome]:", raising))
    write_model(tmp_path, rows=[{"id": "a", "text": "hello"}])
    (tmp_path / "contract.yaml").write_text(CONTRACT.replace("LIMIT", "1"))
    assert kcdsl(site, tmp_path, "keygen").returncode == 0
    words = ("--format", "json", "--cache", "off", "--attack", "off", "--sign", "kcdsl.key")
    alone = kcdsl(site, tmp_path, "verify", "--backend", "quick", *words)
    failed = "backend 'quick' gave no usable answer: ZeroDivisionError: a defect of quick"
    assert (alone.returncode, f"error[KC402]: {failed}" in alone.stderr) == (2, True), alone.stderr
    assert not (tmp_path / "out").exists()
    ran = kcdsl(site, tmp_path, "verify", "--backend", "auto", *words)
    (goal,) = json.loads(ran.stdout)["goals"]
    assert (ran.returncode, goal["verdict"], goal["backend"]) == (0, "held", "interval"), ran.stderr
    (note,) = (line for line in ran.stderr.splitlines() if line.startswith("note: N-0: decided by"))
    assert f"quick: failed, {failed}" in note
    payload = decode(parse_bundle((tmp_path / "out" / "verify.cert.json").read_bytes())).payload
    assert b"quick" not in payload
    assert b"interval" in payload


@pytest.mark.full
def test_backend_passes_the_conformance_kit(installed: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-P", "-m", "kcdsl_backends.conformance", "quick", "--random", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "no wrong answer"
    assert any(line.endswith(": held") for line in ran.stdout.splitlines())
