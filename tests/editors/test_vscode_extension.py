"""The VS Code extension builds, and its own tests pass."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from kcdsl.api.contract import contracts_in
from kcdsl.units import UNITS

pytestmark = pytest.mark.programs


def test_extension_builds_and_passes_its_tests(repository: Path) -> None:
    folder = repository / "grammar" / "editors" / "vscode"
    assert (folder / "node_modules").is_dir(), "`make tools` installs what it needs"
    done = subprocess.run(
        ["npm", "test"], cwd=folder, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# fail 0" in done.stdout
    assert "expressions.kc.yaml run successfu" in done.stdout
    assert (folder / "out" / "extension.js").stat().st_size > 10_000


def test_every_unit_is_highlighted(repository: Path) -> None:
    folder = repository / "grammar" / "editors" / "vscode" / "syntaxes"
    grammar = json.loads((folder / "kcdsl-expression.tmLanguage.json").read_text("utf-8"))
    number = re.compile(grammar["repository"]["number"]["match"])
    for unit in set(UNITS) - {"1"}:
        found = number.fullmatch(f"5 {unit}")
        assert found is not None, unit
        assert found[2] == unit


def test_extension_selects_the_files_that_commands_read(repository: Path, tmp_path: Path) -> None:
    folder = repository / "grammar" / "editors" / "vscode"
    manifest = json.loads((folder / "package.json").read_text("utf-8"))
    (language,) = manifest["contributes"]["languages"]
    names = [f"a{extension}" for extension in language["extensions"]] + language["filenames"]
    for name in (*names, "other.yaml"):
        (tmp_path / name).write_text("kcdsl: 1\n", encoding="utf-8")
    assert {path.name for path in contracts_in([str(tmp_path)], tmp_path)} == {*names}
    for name in (*language["extensions"], *language["filenames"]):
        assert any(event.endswith(name) for event in manifest["activationEvents"]), name
