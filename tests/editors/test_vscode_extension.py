"""The VS Code extension builds, and its own tests pass."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from kcdsl.check.units import UNITS


def test_the_extension_builds_and_its_tests_pass(repository: Path) -> None:
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
