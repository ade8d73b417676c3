"""The VS Code extension builds, and its own tests pass."""

from __future__ import annotations

import subprocess
from pathlib import Path


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
