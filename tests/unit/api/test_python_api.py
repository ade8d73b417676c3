"""The Python API returns what the commands return, and imports lazily."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kcdsl
from tests.support.small_models import write_contract, write_model

HELD = "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.01"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, prompts=("a b", "some"))
    write_contract(tmp_path, HELD, "p99(kl) <= 0.1")
    return tmp_path


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = (
        "import sys, kcdsl\n"
        "print([n for n in ('torch', 'numpy', 'kcdsl.api', 'json', 'rich') if n in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout.strip() == "[]", ran.stderr


def test_every_public_name_exists() -> None:
    for name in kcdsl.__all__:
        assert getattr(kcdsl, name) is not None
    with pytest.raises(AttributeError):
        _ = kcdsl.nothing  # type: ignore[attr-defined]


def test_contract_is_loaded_and_displayed(folder: Path) -> None:
    contract = kcdsl.load(folder)
    assert [clause.id for clause in contract.clauses] == ["N-0", "N-1"]
    assert contract.to_arrow().column("clause").to_pylist() == ["N-0", "N-1"]
    assert "<td>N-0</td>" in contract._repr_html_()
    assert repr(contract).startswith("<Contract: ")
    assert len(repr(contract)) < 200
    assert "p99(kl) &lt;= 1/10" in contract._repr_html_() or "kl" in contract._repr_html_()


def test_errors_carry_their_diagnostics(tmp_path: Path) -> None:
    with pytest.raises(kcdsl.Refusal) as refusal:
        kcdsl.load(tmp_path / "missing.yaml")
    assert [found.code.id for found in refusal.value.diagnostics] == ["KC601"]
    (tmp_path / "contract.yaml").write_text("kcdsl: 1\n")
    with pytest.raises(kcdsl.Refusal) as refusal:
        kcdsl.load(tmp_path)
    assert all(found.code.id == "KC102" for found in refusal.value.diagnostics)


def test_results_equal_those_of_the_commands(cli: Any, folder: Path, follows: Any) -> None:
    assert cli("keygen", cwd=folder).code == 0
    key = str(folder / "kcdsl.key")
    contract = kcdsl.load(folder)
    proved = contract.verify("attn_0", attack=False, sign=[key], output=str(folder / "out"))
    assert proved.held
    follows(proved.to_json())
    (row,) = proved.rows()
    assert (row["clause"], row["verdict"]) == ("N-0", "held")
    assert row["bound"] <= 0.01
    ran = cli("verify", "--block", "attn_0", "--attack", "off", "--format", "json", cwd=folder)
    assert json.loads(ran.stdout)["goals"][0]["cases"] == proved.to_json()["goals"][0]["cases"]
    result = kcdsl.check(proved.path, key=key + ".pub", contract=folder / "contract.yaml")
    assert result
    assert result.valid
    follows(result.to_json())
    assert {step["outcome"] for step in result.rows()} <= {"ok", "not_run"}
    assert repr(proved) == f"<Verification: held, {proved.path}>"
    assert repr(result) == "<CheckResult: valid>"
    other = kcdsl.check(proved.path, key=key + ".pub", contract=folder, at="2020-01-01T00:00:00Z")
    assert not other
    assert other.reasons
    whole = kcdsl.check(proved.path, key=key + ".pub", contract=folder, complete=True)
    assert not whole
    assert whole._repr_html_().startswith("<p>invalid: clause/missing</p>")


@pytest.mark.full
def test_evaluation_returns_a_report(folder: Path, follows: Any) -> None:
    found = kcdsl.load(folder).evaluate(seconds=0.1, bound_seconds=0)
    assert found.held
    assert isinstance(found.report, kcdsl.Report)
    assert found.report.action == "log"
    follows(found.to_json())
    assert {row["clause"] for row in found.rows()} == {"N-1"}
    assert found._repr_html_().startswith("<iframe srcdoc=")
    assert (folder / "out" / "report.json").is_file()


@pytest.mark.full
def test_a_script_needs_no_guard_for_workers(folder: Path) -> None:
    """Workers that import the script would run it again, and could not start."""
    script = folder / "script.py"
    script.write_text(
        "import kcdsl\n"
        "print('started')\n"
        "contract = kcdsl.load('contract.yaml')\n"
        "print(contract.verify('attn_0', attack=False, jobs=2, cache='off').held)\n"
    )
    ran = subprocess.run(
        [sys.executable, script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == ["started", "True"], ran.stderr


def test_checker_name_remains_a_package() -> None:
    import kcdsl.check.compile as compiled

    assert callable(kcdsl.check)
    assert compiled.load_program is not None


@pytest.mark.parametrize(
    "option",
    [
        {"looks": 0},
        {"looks": 0.06},
        {"looks": True},
        {"jobs": -1},
        {"seed": -1},
        {"seconds": float("nan")},
        {"bound_seconds": -1.0},
        {"stage": "production"},
        {"device": "gpu"},
        {"engine": "threads"},
        {"lifetime": 30},
        {"allow_code": "yes"},
        {"output": 3},
        {"sign": 3},
    ],
    ids=str,
)
def test_values_refused_by_the_command_are_refused(folder: Path, option: dict[str, Any]) -> None:
    """0.06 looks would give an error level of 83 %, and a limit of NaN seconds never ends."""
    (name,) = option
    with pytest.raises(kcdsl.Refusal) as refusal:
        kcdsl.load(folder).evaluate(**option)
    (found,) = refusal.value.diagnostics
    assert found.message.startswith(f"{name} is ")
    assert not (folder / "out").exists()
    if name not in ("looks", "seed", "seconds", "bound_seconds"):
        with pytest.raises(kcdsl.Refusal):
            kcdsl.load(folder).verify(**option)


@pytest.mark.parametrize(
    ("option", "help"),
    [
        ({"domains": ("affine",)}, "text, as on the command line"),
        ({"alpha": 0.01}, "text, as on the command line"),
        ({"weights": 1e-4}, "text, as on the command line"),
        ({"backend": 1}, "text, as on the command line"),
        ({"time_limit": -1.0}, "a number of seconds, from 0 on"),
        ({"cache": False}, "a path"),
        ({"clause": 3}, "text, as on the command line, or several"),
    ],
    ids=str,
)
def test_values_of_another_type_are_refused(
    folder: Path, option: dict[str, Any], help: str
) -> None:
    """Numbers of a statement are text: a float64 would be another number than the one typed."""
    with pytest.raises(kcdsl.Refusal) as refusal:
        kcdsl.load(folder).verify("attn_0", **option)
    (found,) = refusal.value.diagnostics
    assert (found.code.id, found.help) == ("KC901", help)
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    "option",
    [
        {"signature_only": "no"},
        {"recheck": 0},
        {"complete": None},
        {"threshold": "2"},
        {"minimum_sequence": -1},
        {"key": 3},
        {"policy": 3},
        {"revocations": [b"x"]},
        {"stage": "production"},
        {"at": 20261129},
    ],
    ids=str,
)
def test_settings_of_a_check_are_refused(folder: Path, option: dict[str, Any]) -> None:
    """`signature_only="no"` is true and would skip the steps after the signature."""
    (name,) = option
    with pytest.raises(kcdsl.Refusal) as refusal:
        kcdsl.check(folder / "any.cert.json", contract=folder, **option)
    (found,) = refusal.value.diagnostics
    assert found.message.startswith(f"{name} is ")


def test_what_is_no_file_is_refused() -> None:
    """A `Verification` is not a certificate; its `path` is."""
    wrong: Any = object()
    with pytest.raises(kcdsl.Refusal, match="the certificate is <object"):
        kcdsl.check(wrong)
    with pytest.raises(kcdsl.Refusal, match="the contract is <object"):
        kcdsl.load(wrong)


def test_switches_are_true_or_false(folder: Path) -> None:
    """`attack="off"`, as on the command line, would be true."""
    options: dict[str, Any] = {"attack": "off"}
    with pytest.raises(kcdsl.Refusal, match="attack is 'off'"):
        kcdsl.load(folder).verify("attn_0", **options)


def test_one_key_may_be_named_by_itself(folder: Path) -> None:
    with pytest.raises(kcdsl.Refusal, match=r"there is no key missing\.key"):
        kcdsl.load(folder).verify("attn_0", sign="missing.key")
    with pytest.raises(kcdsl.Refusal, match=r"there is no key missing\.key"):
        kcdsl.load(folder).verify("attn_0", sign=[Path("missing.key")])
    with pytest.raises(kcdsl.Refusal, match=r"there is no key missing\.key"):
        kcdsl.load(folder).evaluate(sign="missing.key")


def test_a_public_key_does_not_sign(cli: Any, folder: Path) -> None:
    assert cli("keygen", cwd=folder).code == 0
    with pytest.raises(kcdsl.Refusal, match="is a public key, and no public key signs"):
        kcdsl.load(folder).verify("attn_0", sign=str(folder / "kcdsl.key.pub"))


def test_check_without_certificates_is_refused(folder: Path) -> None:
    with pytest.raises(kcdsl.Refusal) as refusal:
        kcdsl.check([], contract=folder)
    (found,) = refusal.value.diagnostics
    assert found.message == "no certificate is named"
