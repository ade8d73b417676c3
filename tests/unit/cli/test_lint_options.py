"""`kcdsl lint`: formats and files, folders, standard input, fixes, watching."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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


def test_a_folder_and_several_outputs(cli: Cli, folder: Path) -> None:
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


def test_github_actions_get_their_format(folder: Path) -> None:
    ran = run(folder, "lint", "bad.kc.yaml", environment={"GITHUB_ACTIONS": "true"})
    assert ran.stdout.startswith("::error file=bad.kc.yaml,")


@pytest.mark.parametrize(
    "words",
    [
        ("--format", "yaml"),
        ("--format", "sarif="),
        ("-o", "out.doc"),
        ("--format", "json", "--format", "full"),
    ],
)
def test_unusable_outputs(cli: Cli, folder: Path, words: tuple[str, ...]) -> None:
    ran = cli("lint", "good.kc.yaml", *words, cwd=folder)
    assert ran.code == 2
    assert "KC901" in ran.stderr


def test_exit_zero(cli: Cli, folder: Path) -> None:
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


def test_watching(folder: Path) -> None:
    program = [sys.executable, "-m", "kcdsl", "lint", "bad.kc.yaml", "--watch"]
    process = subprocess.Popen(
        program, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "1 contract: 1 error; --fix --unsafe-fixes mends 1\n"
        assert process.stderr.readline() == "watching; Ctrl-C ends\n"
        time.sleep(0.05)
        (folder / "bad.kc.yaml").write_text(GOOD)
        assert process.stderr.readline() == "1 contract: nothing found\n"
        process.send_signal(2)
        assert process.wait(timeout=10) == 0
    finally:
        process.kill()
        process.communicate()
