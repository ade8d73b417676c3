"""First steps of new users with the wheel alone: certificate, RL rollouts, served model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import Ran
from tests.support.installed import Installation, build, first_certificate, install
from tests.support.pages import blocks
from tests.support.quantised import quantise
from tests.support.small_models import save_llama

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def installed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Install the wheel without extras: no transformers, no auto_LiRPA."""
    wheel = build(repository, "wheel", tmp_path_factory.mktemp("wheel"))
    return install(wheel, tmp_path_factory.mktemp("environment") / "env")


def done(place: Installation, folder: Path, *words: str) -> Ran:
    ran = place.run(*words, cwd=folder)
    assert ran.code == 0, (words, ran.stdout, ran.stderr)
    assert "Traceback" not in ran.stderr
    return ran


def test_doctor_finds_nothing_missing(installed: Installation, tmp_path: Path) -> None:
    place = installed.run(
        "-c", "import kcdsl; print(kcdsl.__file__)", cwd=tmp_path, program="python"
    )
    assert place.stdout.startswith(str(installed.folder))
    told = done(installed, tmp_path, "doctor").stdout
    assert "optional transformers" in told
    assert "auto_LiRPA==0.3" in told
    assert "Recorded rollouts" in done(installed, tmp_path, "explain", "rollouts").stdout


def test_four_commands_produce_a_certificate(installed: Installation, tmp_path: Path) -> None:
    save_llama(tmp_path / "my model")
    ran = [one for one, _ in first_certificate(installed, tmp_path, "my model")]
    assert [one.code for one in ran] == [0, 0, 0, 0], [one.stderr for one in ran]
    assert "\nvalid\n" in ran[-1].stdout
    done(installed, tmp_path, "evaluate", "--sign", "kcdsl.key", "--bound-seconds", "0")
    certificates = ("out/verify-attn_0.cert.json", "out/evaluate.cert.json")
    key = ("--key", "kcdsl.key.pub")
    done(installed, tmp_path, "check", *certificates, *key, "--recheck", "--complete")
    assert "C-convergent" in done(installed, tmp_path, "status").stdout


def test_rollouts_produce_a_certificate(
    installed: Installation, tmp_path: Path, repository: Path
) -> None:
    """The installed kcdsl scores the rows of the tutorial, recorded with transformers."""
    save_llama(tmp_path / "policy")
    page = (repository / "docs" / "tutorials" / "rl-batch.md").read_text(encoding="utf-8")
    (script,) = (block.text for block in blocks(page) if block.name == "record.py")
    command = [sys.executable, "-c", script, "policy", "rollouts.jsonl"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    done(installed, tmp_path, "init", "policy", "--data", "rollouts.jsonl", "--for", "rl")
    done(installed, tmp_path, "keygen")
    done(installed, tmp_path, "evaluate", "--sign", "kcdsl.key", "--bound-seconds", "0")
    check = ("check", "out/evaluate.cert.json", "--key", "kcdsl.key.pub", "--complete")
    done(installed, tmp_path, *check)
    rows = (tmp_path / "rollouts.jsonl").read_text(encoding="utf-8").splitlines()
    first = json.loads(rows[0])
    first["infer_logs"][0] -= 1e-3
    (tmp_path / "rollouts.jsonl").write_text("\n".join([json.dumps(first), *rows[1:]]) + "\n")
    assert installed.run(*check, cwd=tmp_path).code == 4


def test_quantised_checkpoint_produces_a_certificate(
    installed: Installation, tmp_path: Path
) -> None:
    quantise(save_llama(tmp_path / "model"), tmp_path / "model-fp8", "fp8 tensor")
    done(installed, tmp_path, "init", "model", "--quantised", "model-fp8", "--for", "serving")
    done(installed, tmp_path, "keygen")
    done(installed, tmp_path, "verify", "--block", "attn_0", "--sign", "kcdsl.key")
    key = ("--key", "kcdsl.key.pub")
    done(installed, tmp_path, "check", "out/verify-attn_0.cert.json", *key, "--recheck")
    ran = installed.run("evaluate", "--sign", "kcdsl.key", "--bound-seconds", "0", cwd=tmp_path)
    assert ran.code in (0, 1), ran.stderr  # random weights may select other tokens
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model-fp8" / name).write_bytes((tmp_path / "model" / name).read_bytes())
    changed = installed.run("check", "out/verify-attn_0.cert.json", *key, cwd=tmp_path)
    assert changed.code == 4
    assert "infer_checkpoint" in " ".join(changed.stdout.split())
