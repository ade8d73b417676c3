"""examples/demo.sh returns the exit codes of its commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def demo(tmp_path: Path, repository: Path) -> Path:
    """Return a folder with the script, an example, and a `kcdsl` that exits with its last word."""
    (tmp_path / "examples" / "toy").mkdir(parents=True)
    shutil.copy(repository / "examples" / "demo.sh", tmp_path / "examples" / "demo.sh")
    fake = tmp_path / ".venv" / "bin" / "kcdsl"
    fake.parent.mkdir(parents=True)
    fake.write_text('#!/bin/sh\nfor word; do :; done\necho "ran $*"\nexit "$word"\n')
    fake.chmod(0o755)
    return tmp_path


def run(demo: Path, *codes: int) -> subprocess.CompletedProcess[str]:
    """Run a demo whose steps exit with `codes`."""
    steps = "".join(f"step number-{i} {code}\n" for i, code in enumerate(codes))
    (demo / "examples" / "toy" / "demo.steps").write_text(steps)
    return subprocess.run(
        ["sh", "examples/demo.sh", "examples/toy"],
        cwd=demo,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )


@pytest.mark.parametrize(
    ("codes", "expected", "steps"),
    [
        ((0, 0, 0), 0, 3),
        ((0, 1, 0), 1, 3),
        ((0, 3, 0), 3, 3),
        ((3, 1, 0), 1, 3),
        ((1, 3, 0), 1, 3),
        ((1, 2, 0), 2, 2),
        ((0, 4, 0), 4, 2),
        ((0, 127, 0), 127, 2),
    ],
)
def test_demo_returns_the_exit_code_of_its_steps(
    demo: Path, codes: tuple[int, ...], expected: int, steps: int
) -> None:
    done = run(demo, *codes)
    assert done.returncode == expected
    assert done.stdout.count("ran number-") == steps
    for code in set(codes[:steps]) - {0}:
        assert f"exit code {code}" in done.stderr


def test_each_command_is_shown_before_its_output(demo: Path) -> None:
    lines = run(demo, 0).stdout.splitlines()
    assert lines.index("$ kcdsl number-0 0") < lines.index("ran number-0 0")


def test_outputs_of_an_earlier_demo_are_removed(demo: Path) -> None:
    stale = demo / "examples" / "toy" / "out" / "stale.kcert"
    stale.parent.mkdir()
    stale.touch()
    assert run(demo, 0).returncode == 0
    assert not stale.exists()


def test_missing_folder_is_refused(demo: Path) -> None:
    done = subprocess.run(
        ["sh", "examples/demo.sh", "examples/none"],
        cwd=demo,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "usage" in done.stderr
