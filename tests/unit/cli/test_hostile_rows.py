"""Hostile rows and configurations are refused or printed escaped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.commands import run_here
from tests.support.small_models import write_model
from tests.unit.cli.test_planted_links import CONTRACT

OBEYED = re.compile(
    r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|^\s*::error",
    re.MULTILINE,
)
NAMES = ("a\x1b[31m", "b\x9b31m", "c\n::error::d", "e\u2028::error::f", "g\u202eh", "i\x00", "j\r")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, rows=[{"id": name, "text": "hello"} for name in NAMES])
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    return tmp_path


@pytest.mark.full
def test_every_report_format_escapes_terminal_controls(folder: Path) -> None:
    evaluated = run_here("evaluate", cwd=folder)
    assert evaluated.code == 0, evaluated.stderr
    said = [evaluated.stdout, evaluated.stderr]
    for format in ("html", "json", "sarif", "junit", "concise"):
        ran = run_here("report", "out/report.json", "--format", format, cwd=folder)
        assert ran.code == 0, ran.stderr
        said += [ran.stdout, ran.stderr]
    said.append((folder / "out" / "report.html").read_text())
    assert [found[0] for text in said if (found := OBEYED.search(text))] == []
    assert "error::d" in said[2]


@pytest.mark.parametrize("field", ["id", "text", "category", "\ud800"])
@pytest.mark.parametrize("command", [("verify", "--block", "mlp_0"), ("evaluate",)])
def test_lone_surrogate_in_a_row_is_refused(
    folder: Path, command: tuple[str, ...], field: str
) -> None:
    row = {"id": "a", "text": "hello", field: "x\ud800"}
    (folder / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    ran = run_here(*command, cwd=folder)
    assert (ran.code, "KC620" in ran.stderr) == (2, True)


@pytest.mark.parametrize("command", [("compile",), ("verify", "--block", "mlp_0")])
def test_configuration_with_a_duplicate_key_is_refused(
    folder: Path, command: tuple[str, ...]
) -> None:
    text = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(text + ', "hidden_size": 8}')
    ran = run_here(*command, cwd=folder)
    assert (ran.code, "KC455" in ran.stderr, "given twice" in ran.stderr) == (2, True, True)


@pytest.mark.parametrize("command", [("compile",), ("verify", "--block", "mlp_0")])
@pytest.mark.parametrize("place", ["config.json", "model.safetensors"])
def test_lone_surrogate_in_the_model_is_refused(
    folder: Path, place: str, command: tuple[str, ...]
) -> None:
    path = folder / place
    data = path.read_bytes()
    start = 0 if place == "config.json" else 8
    end = len(data) if not start else 8 + int.from_bytes(data[:8], "little")
    field = {"torch_dtype": "\ud800"} if not start else {"__metadata__": {"a": "\ud800"}}
    own = json.dumps({**json.loads(data[start:end]), **field}).encode()
    path.write_bytes((len(own).to_bytes(8, "little") if start else b"") + own + data[end:])
    ran = run_here(*command, cwd=folder)
    assert (ran.code, "half a surrogate pair" in ran.stderr) == (2, True), ran.stderr
