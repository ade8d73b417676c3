"""Every example contract compiles, holds and is certified."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
VARIANTS = sorted((EXAMPLES / "tiny_lm" / "variants").glob("*.kc.yaml"))
CONTRACTS = [EXAMPLES / "tiny_lm" / "contract.yaml", EXAMPLES / "minilm" / "contract.yaml"]


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A signing key for this module."""
    from kcdsl.cli import main

    path = tmp_path_factory.mktemp("keys") / "test.key"
    assert main(["keygen", "-o", str(path)]) == 0
    return path


def name(path: Path) -> str:
    return path.name.removesuffix(".yaml").removesuffix(".kc") + "@" + path.parent.name


@pytest.mark.parametrize("contract", [*CONTRACTS, *VARIANTS], ids=name)
def test_every_example_compiles_without_findings(cli: Any, contract: Path) -> None:
    ran = cli("lint", "--format", "json", contract)
    assert (ran.code, json.loads(ran.stdout)) == (0, [])


@pytest.mark.full
@pytest.mark.parametrize("contract", VARIANTS, ids=name)
def test_measured_drift_is_below_the_certified_bound(
    cli: Any, contract: Path, key: Path, tmp_path: Path
) -> None:
    """Prove, then run the real kernels, and compare."""
    options = ("--sign", key, "-o", tmp_path, "--format", "json")
    verified = cli("verify", contract, *options)
    assert verified.code == 0, verified.stderr
    for goal in json.loads(verified.stdout)["goals"]:
        assert (goal["verdict"], goal["evidence"]["confirmed"]) == ("held", True)
        assert 0 <= goal["attack"] <= goal["bound"]
    rows, count = ("short", 6) if "audit" in contract.name else ("safety", 12)
    measured = cli(
        "evaluate", contract, *options, "--slice", rows, "--seconds", "2", "--bound-seconds", "2"
    )
    assert measured.code == 0, measured.stderr
    report = json.loads(measured.stdout)
    assert report["crosschecks"], "nothing was compared with a certified bound"
    for row in report["crosschecks"]:
        assert 0 < row["requests"] <= count
        assert 0 <= row["measured"] <= row["certified"]


@pytest.mark.full
def test_audit_is_certified_from_its_proof_alone(cli: Any, key: Path, tmp_path: Path) -> None:
    """One proved clause on the logits implies all others; the checker derives them again."""
    contract = EXAMPLES / "tiny_lm" / "variants" / "float64-audit.kc.yaml"
    verified = cli("verify", contract, "--sign", key, "-o", tmp_path, "--format", "json")
    implied = {item["clause"] for item in json.loads(verified.stdout)["implied"]}
    assert implied == {"N-TV", "N-KL", "N-RATIO", "N-REWARD", "N-GRADIENT"}
    certificate = tmp_path / "verify.cert.json"
    public = f"{key}.pub"
    checked = cli(
        "check", certificate, "--contract", contract, "--key", public, "--recheck", "--complete"
    )
    assert checked.code == 0, checked.stdout


@pytest.mark.full
def test_minilm_is_proved_on_published_weights(cli: Any, key: Path, tmp_path: Path) -> None:
    contract = EXAMPLES / "minilm" / "contract.yaml"
    verified = cli("verify", contract, "--sign", key, "-o", tmp_path, "--format", "json")
    assert verified.code == 0, verified.stderr
    (goal,) = json.loads(verified.stdout)["goals"]
    assert len(goal["cases"]) == 24
    assert goal["bound"] / goal["attack"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("contract", CONTRACTS, ids=name)
def test_demo_commands_run_over_all_requests(
    cli: Any, contract: Path, key: Path, tmp_path: Path
) -> None:
    """Run everything that `make demo` and `make demo-minilm` run."""
    assert cli("verify", contract, "--sign", key, "-o", tmp_path).code == 0
    assert cli("evaluate", contract, "--sign", key, "-o", tmp_path).code == 0
    certificates = sorted(tmp_path.glob("*.cert.json"))
    options = ("--contract", contract, "--key", f"{key}.pub", "--recheck", "--complete")
    checked = cli("check", *certificates, *options)
    assert checked.code == 0, checked.stdout
