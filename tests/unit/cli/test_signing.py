"""Signing as a separate step: statements, several signers, stages and lifetimes."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import load_program
from kcdsl_certs.signatures import decode, parse_bundle
from kcdsl_certs.statement import Predicate, parse_predicate
from tests.support.small_models import write_contract, write_model

HELD = "forall x in ball(all, 1e-3): norm_inf(drift(attn_0, x)) <= 0.01"
QUICK = ("--attack", "off", "--confirm", "off")


@pytest.fixture
def folder(tmp_path: Path, cli: Any) -> Path:
    """Return a folder with a small model, a contract, and two keys."""
    write_model(tmp_path)
    write_contract(tmp_path, HELD)
    for name in ("one.key", "two.key"):
        assert cli("keygen", "-o", tmp_path / name).code == 0
    return tmp_path


def body(path: Path) -> Predicate:
    return parse_predicate(
        json.loads(decode(parse_bundle(path.read_bytes())).payload)["predicate"]
    )[0]


@pytest.mark.full
def test_stage_lifetime_and_signers_follow_the_options(cli: Any, folder: Path) -> None:
    words = ("--sign", "one.key", "--sign", "two.key", "--stage", "canary", "--valid-for", "7")
    ran = cli("verify", *QUICK, *words, cwd=folder)
    assert ran.code == 0, ran.stderr
    path = folder / "out" / "verify.cert.json"
    found = body(path)
    assert found.stage == "canary"
    assert found.valid_until - found.issued_at == timedelta(days=7)
    keys = ("--key", "one.key.pub", "--key", "two.key.pub", "--threshold", "2")
    assert cli("check", path, *keys, "--stage", "canary", cwd=folder).code == 0
    assert cli("check", path, *keys, "--stage", "full", cwd=folder).code == 4


@pytest.mark.parametrize("days", ["0", "-1", "3661", "1.5", "x"])
def test_lifetime_must_be_a_number_of_days(cli: Any, folder: Path, days: str) -> None:
    assert cli("verify", f"--valid-for={days}", cwd=folder).code == 2


def test_second_run_never_removes_a_foreign_signature(cli: Any, folder: Path) -> None:
    assert cli("verify", *QUICK, "--sign", "one.key", cwd=folder).code == 0
    path = folder / "out" / "verify.cert.json"
    before = path.read_bytes()
    other = cli("verify", *QUICK, "--sign", "two.key", cwd=folder)
    assert (other.code, "KC649" in other.stderr) == (2, True)
    assert path.read_bytes() == before
    assert cli("sign", "--add", path, "--key", "two.key", cwd=folder).code == 0
    both = path.read_bytes()
    again = cli("verify", *QUICK, "--sign", "one.key", cwd=folder)
    assert (again.code, "KC649" in again.stderr) == (2, True)
    assert path.read_bytes() == both
    unsigned = cli("verify", *QUICK, cwd=folder)
    assert unsigned.code == 0
    assert "is of an earlier run" in unsigned.stderr
    assert path.read_bytes() == both


@pytest.mark.full
def test_signer_may_replace_a_certificate_with_a_notice(cli: Any, folder: Path) -> None:
    words = ("--sign", "one.key")
    assert "replaces" not in cli("verify", *QUICK, *words, cwd=folder).stderr
    again = cli("verify", *QUICK, *words, cwd=folder).stderr
    assert "replaces an earlier one by the same keys\n" in again
    contract = folder / "contract.yaml"
    name = load_program(contract).name
    text = contract.read_text()
    contract.write_text(text.replace(f"contract: {name}", "contract: second"))
    assert load_program(contract).name == "second"
    other = cli("verify", *QUICK, *words, cwd=folder).stderr
    assert f"by the same keys, of the contract {name}: -o gives" in other
    (folder / "out" / "verify.cert.json").write_text("notes of somebody")
    ran = cli("verify", *QUICK, *words, cwd=folder)
    assert (ran.code, "is no certificate" in ran.stderr) == (2, True)


def test_unnamed_key_signs_nothing(cli: Any, folder: Path) -> None:
    (folder / "one.key").rename(folder / "kcdsl.key")
    assert cli("verify", *QUICK, cwd=folder).code == 0
    assert not (folder / "out" / "verify.cert.json").exists()


def test_missing_or_changed_proofs_are_not_signed(cli: Any, folder: Path) -> None:
    assert cli("verify", *QUICK, cwd=folder).code == 0
    words = ("sign", "out/verify.statement.json", "--key", "one.key")
    (proof,) = (folder / "out").glob("*.proof.json")
    data = proof.read_bytes()
    proof.write_bytes(data + b" ")
    changed = cli(*words, cwd=folder)
    assert (changed.code, "proof/digest-mismatch" in changed.stderr) == (2, True)
    proof.unlink()
    missing = cli(*words, cwd=folder)
    assert (missing.code, "proof/missing" in missing.stderr) == (2, True)
    proof.write_bytes(data)
    elsewhere = cli(*words, "-o", "verify.cert.json", cwd=folder)
    assert (elsewhere.code, "in the folder of its statement" in elsewhere.stderr) == (2, True)
    assert cli(*words, cwd=folder).code == 0


def test_invalid_statements_are_not_signed(cli: Any, folder: Path) -> None:
    path = folder / "x.statement.json"
    for text in ("", "{}", "[]", "{", '{"_type": 1}', "\ufeff{}"):
        path.write_text(text)
        ran = cli("sign", path, "--key", "one.key", cwd=folder)
        assert (ran.code, "KC649" in ran.stderr) == (2, True), text
        assert cli("sign", "--add", path, "--key", "one.key", cwd=folder).code == 2
    for name in (folder, "absent", "", ".", ".."):
        ran = cli("sign", name, "--key", "one.key", cwd=folder)
        assert (ran.code, "KC649" in ran.stderr) == (2, True), name


LOADED = """
import sys
from kcdsl.cli import main
code = main(sys.argv[1:])
foreign = ("torch", "numpy", "z3", "safetensors", "yaml", "kcdsl_backends", "kcdsl.check.compile")
print(sorted(name for name in foreign if name in sys.modules))
sys.exit(code)
"""


def test_signing_process_imports_nothing_that_runs_contracts(cli: Any, folder: Path) -> None:
    assert cli("verify", *QUICK, cwd=folder).code == 0
    words = ("sign", "out/verify.statement.json", "--key", "one.key")
    (folder / "contract.yaml").unlink()
    (folder / "model.safetensors").unlink()
    command = [sys.executable, "-c", LOADED, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
