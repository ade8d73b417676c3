"""`kcdsl lint`: formats and files, folders, standard input, fixes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as xml

import pytest

if TYPE_CHECKING:
    from tests.conftest import Cli

GOOD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
clauses:
  A: {require: p99(kl) <= 1, level: L2}
"""
BAD = GOOD.replace("(kl)", "(kll)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m.safetensors").touch()
    (tmp_path / "d.jsonl").touch()
    (tmp_path / "good.kc.yaml").write_text(GOOD)
    (tmp_path / "bad.kc.yaml").write_text(BAD)
    return tmp_path


def test_folder_with_several_outputs(cli: Cli, folder: Path) -> None:
    ran = cli(
        "lint", ".", "--format", "concise", "--format", "sarif=out.sarif", "-o", "out.xml",
        cwd=folder,
    )  # fmt: skip
    assert ran.code == 1
    assert ran.stdout.startswith("bad.kc.yaml:9:20: error[KC203]")
    sarif = json.loads((folder / "out.sarif").read_text())
    assert len(sarif["runs"][0]["results"]) == 1
    cases = xml.fromstring((folder / "out.xml").read_text()).iter("testcase")
    assert {case.attrib["name"] for case in cases} == {"A", "bad.kc.yaml", "good.kc.yaml"}


def test_github_actions_select_their_format(folder: Path) -> None:
    ran = run(folder, "lint", "bad.kc.yaml", environment={"GITHUB_ACTIONS": "true"})
    assert ran.stdout.startswith("::error file=bad.kc.yaml,")


@pytest.mark.parametrize(
    "words",
    [
        ("--format", "yaml"),
        ("--format", "sarif="),
        ("-o", "out.doc"),
        ("--format", "json", "--format", "text"),
    ],
)
def test_unwritable_outputs_are_refused(cli: Cli, folder: Path, words: tuple[str, ...]) -> None:
    ran = cli("lint", "good.kc.yaml", *words, cwd=folder)
    assert ran.code == 2
    assert "KC901" in ran.stderr


def test_exit_zero_option(cli: Cli, folder: Path) -> None:
    assert cli("lint", "--exit-zero", "bad.kc.yaml", cwd=folder).code == 0
    assert cli("lint", "--exit-zero", "absent.kc.yaml", cwd=folder).code == 2


def test_diff_shows_and_fix_writes(cli: Cli, folder: Path) -> None:
    shown = cli("lint", "--diff", "--unsafe-fixes", "bad.kc.yaml", cwd=folder)
    assert shown.code == 1
    assert "+  A: {require: p99(kl) <= 1, level: L2}" in shown.stdout
    assert (folder / "bad.kc.yaml").read_text() == BAD
    assert cli("lint", "--fix", "bad.kc.yaml", cwd=folder).code == 1
    assert (folder / "bad.kc.yaml").read_text() == BAD
    ran = cli("lint", "--fix", "--unsafe-fixes", "bad.kc.yaml", cwd=folder)
    assert ran.code == 0
    assert "1 fixed" in ran.stderr
    assert (folder / "bad.kc.yaml").read_text() == GOOD


def run(
    folder: Path, *words: str, text: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "kcdsl", *words]
    return subprocess.run(
        program,
        cwd=folder,
        input=text,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )


def test_standard_input(folder: Path) -> None:
    ran = run(folder, "lint", "-", "--stdin-filename", "x.kc.yaml", "--format", "concise", text=BAD)
    assert ran.returncode == 1
    assert ran.stdout.startswith("x.kc.yaml:9:20:")
    assert run(folder, "lint", "-", text=GOOD).returncode == 0
    assert run(folder, "fmt", "-", text="a:   1").stdout == "a: 1\n"


# --- accepted findings ---------------------------------------------------------------------------
ACCEPTED = (
    GOOD
    + """\
  # kcdsl: ignore[KC208] the field of our own tracer
  O: {require: [build_fingerprint, request_shape, replay_signature, rng_sed], level: L3}
"""
)


def test_suppressed_findings_are_reported_with_their_reasons(
    cli: Cli, folder: Path, follows: Callable[..., None]
) -> None:
    (folder / "good.kc.yaml").write_text(ACCEPTED)
    words = [f"--format={name}={name}.out" for name in ("json", "sarif", "junit")]
    ran = cli("lint", "good.kc.yaml", *words, cwd=folder)
    assert (ran.code, ran.stdout) == (0, "")
    assert ran.stderr == "1 contract: 1 accepted\n"
    (record,) = json.loads((folder / "json.out").read_text())
    follows([record], "kcdsl.diagnostics/1")
    assert record["suppressed"] == {"reason": "the field of our own tracer", "line": 10}
    (result,) = json.loads((folder / "sarif.out").read_text())["runs"][0]["results"]
    assert result["suppressions"][0]["justification"] == "the field of our own tracer"
    assert result["suppressions"][0]["location"]["physicalLocation"]["region"] == {"startLine": 10}
    cases = {c.attrib["name"]: c for c in xml.parse(folder / "junit.out").iter("testcase")}
    assert cases["O"].findtext("system-out", "").endswith("accepted: the field of our own tracer")
    assert cases["O"].find("failure") is None
    hidden = cli("lint", "good.kc.yaml", "--ignore", "KC208", "--format", "json", cwd=folder)
    assert json.loads(hidden.stdout) == []


FOLLOWS = """\
  # kcdsl: ignore[KC415] a promise of its own
  B: {require: p99(kl) <= 2, level: L2}
"""


@pytest.mark.full
def test_solver_findings_are_suppressed_where_the_solver_runs(
    cli_process: Cli, folder: Path
) -> None:
    (folder / "contract.yaml").write_text(GOOD + FOLLOWS)
    plain = cli_process("lint", "contract.yaml", cwd=folder)
    assert (plain.code, plain.stderr) == (0, "1 contract: nothing found\n")
    (folder / "m.safetensors").unlink()  # compile reads the headers of weights that are there
    asked = cli_process("compile", "contract.yaml", "--consistency", cwd=folder)
    assert asked.code == 0
    assert "KC415" not in asked.stderr
    assert "1 finding accepted by comments" in asked.stderr
    document = cli_process(
        "compile", "contract.yaml", "--consistency", "--format", "sarif", cwd=folder
    )
    (run,) = json.loads(document.stderr)["runs"]
    (result,) = [one for one in run["results"] if one["ruleId"] == "KC415"]
    assert run["invocations"][0]["exitCode"] == 0
    assert result["suppressions"][0]["justification"] == "a promise of its own"
    (folder / "contract.yaml").write_text(GOOD + FOLLOWS.replace("kl) <= 2", "tv) <= 0.5"))
    unused = cli_process("compile", "contract.yaml", "--consistency", cwd=folder)
    assert "warning[KC900]: nothing here is reported as KC415" in unused.stderr


# --- what is said --------------------------------------------------------------------------------


def test_junit_test_case_per_clause_contains_its_findings(cli: Cli, folder: Path) -> None:
    (folder / "bad.kc.yaml").write_text(
        BAD.replace("contract: c", "contract: c d")
        + "  B:\n    require: >-\n      p99(kl) <= 1\n      and max(tvv) <= 1\n    level: L2\n"
        + "  C: {require: p99(kl) <= 2, level: L2}\n"
        + "  D:\n    require: p99(kl) <= 3\n    level: L9\n"
    )
    ran = cli("lint", "bad.kc.yaml", "--format", "junit", cwd=folder)
    failures = {
        case.attrib["name"]: failure.attrib["type"]
        for case in xml.fromstring(ran.stdout).iter("testcase")
        for failure in case.iter("failure")
    }
    assert failures == {"bad.kc.yaml": "KC107", "A": "KC203", "B": "KC203", "D": "KC104"}


def test_summary_counts_available_fixes(cli: Cli, folder: Path) -> None:
    (folder / "bad.kc.yaml").write_text(BAD + "  B: {require: p99(kl) \u2264 1, level: L2}\n")
    ran = cli("lint", "bad.kc.yaml", cwd=folder)
    assert ran.stderr == "1 contract: 2 errors; 1 fixable with --fix, 1 more with --unsafe-fixes\n"
    mended = cli("lint", "--fix", "bad.kc.yaml", cwd=folder)
    assert mended.stderr == "1 contract: 1 error; 1 fixed; 1 fixable with --fix --unsafe-fixes\n"


def test_fixed_standard_input_is_the_only_standard_output(folder: Path) -> None:
    ran = run(folder, "lint", "-", "--fix", "--unsafe-fixes", text=BAD)
    assert (ran.returncode, ran.stdout) == (0, GOOD)
    left = run(folder, "lint", "-", "--fix", text=BAD)
    assert (left.returncode, left.stdout) == (1, BAD)
    assert "error[KC203]" in left.stderr


def test_fix_follows_a_symlink_and_keeps_the_mode(cli: Cli, folder: Path) -> None:
    (folder / "bad.kc.yaml").chmod(0o640)
    (folder / "link.kc.yaml").symlink_to("bad.kc.yaml")
    assert cli("lint", "--fix", "--unsafe-fixes", "link.kc.yaml", cwd=folder).code == 0
    assert (folder / "link.kc.yaml").is_symlink()
    assert (folder / "bad.kc.yaml").read_text() == GOOD
    assert (folder / "bad.kc.yaml").stat().st_mode & 0o777 == 0o640


def test_diff_is_accepted_by_patch(folder: Path) -> None:
    text = BAD.rstrip("\n")
    (folder / "bad.kc.yaml").write_text(text, encoding="utf-8")
    ran = run(folder, "lint", "--diff", "--unsafe-fixes", "bad.kc.yaml")
    assert ran.returncode == 1
    patched = subprocess.run(
        ["git", "apply", "-p0", "-"], cwd=folder, input=ran.stdout, text=True, check=False
    )
    assert patched.returncode == 0
    mended = (folder / "bad.kc.yaml").read_text(encoding="utf-8")
    assert mended == text.replace("(kll)", "(kl)")


def test_fail_on_severity_option(cli: Cli, folder: Path) -> None:
    (folder / "m.safetensors").unlink()
    for least, code in (("error", 0), ("warning", 0), ("note", 1)):
        assert cli("lint", "good.kc.yaml", "--fail-on", least, cwd=folder).code == code
    assert (
        cli("lint", "--fail-on", "note", "--ignore", "KC606", "good.kc.yaml", cwd=folder).code == 0
    )


def test_several_files_with_one_missing(cli: Cli, folder: Path) -> None:
    ran = cli("lint", "bad.kc.yaml", "none.kc.yaml", "--format", "concise", cwd=folder)
    assert ran.code == 2
    assert "error[KC203]" in ran.stdout
    assert "error[KC601]" in ran.stdout


def test_file_name_that_is_not_utf8(cli: Cli, folder: Path) -> None:
    os.rename(folder / "bad.kc.yaml", os.fsencode(folder) + b"/b\xff.kc.yaml")
    words = [f"--format={name}=out.{name}" for name in ("json", "sarif", "junit", "github", "text")]
    ran = cli("lint", ".", *words, "--format", "concise", cwd=folder)
    assert ran.code == 1
    assert "error[KC203]" in ran.stdout
    (record,) = json.loads((folder / "out.json").read_bytes())
    assert os.fsencode(record["file"]) == b"b\xff.kc.yaml"
    (result,) = json.loads((folder / "out.sarif").read_bytes())["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "b%FF.kc.yaml"
    xml.fromstring((folder / "out.junit").read_bytes())
