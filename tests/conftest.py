"""Fixtures that all tests share."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests.support.commands import ANNOTATING, PLAIN_TERMINAL, Ran, run_here
from tests.support.files import files_below
from tests.support.graphs import cache_graphs
from tests.support.tiers import mark_tiers

# Numeric libraries read these when they are first imported, and child processes inherit them:
# one thread each, so that `pytest -n 2` does not ask two cores for the work of many threads.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# jsonschema reads 38 grammars of addresses where it finds this package, which takes each worker
# 2 s; no schema of ours has such a format.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]

settings.register_profile(
    "kcdsl", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", parent=settings.get_profile("kcdsl"), max_examples=1000)
settings.register_profile(
    "unshrunk", parent=settings.get_profile("kcdsl"),
    derandomize=True, phases=(Phase.explicit, Phase.generate),
)  # fmt: skip
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kcdsl"))

_PLACES = itertools.count()

REPOSITORY = Path(__file__).resolve().parent.parent

# maraboupy, which the extra requires below Python 3.12, has no wheel for later versions.
collect_ignore = [] if sys.version_info < (3, 12) else ["unit/backends/test_marabou.py"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of the second tier, before `-m` is applied."""
    mark_tiers(items)


def pytest_runtest_setup() -> None:
    """Make the certifier trace each block of the same model once in this process."""
    cache_graphs()


def pytest_collection() -> None:
    """Disable garbage collection while modules are imported and tests are collected."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude all existing objects from later garbage collections, to save a second each."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()
    atexit.register(gc.unfreeze)  # extensions report leaked objects when Python exits


class Cli(Protocol):
    """Run `kcdsl ARGUMENTS…`, in the folder `cwd` and with extra environment variables."""

    def __call__(
        self,
        *arguments: str | os.PathLike[str],
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Ran: ...


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that replaces the user's cache; tests share it."""
    home = tmp_path_factory.mktemp("cache-home")
    (home / "libraries").mkdir()
    return home


@pytest.fixture(autouse=True)
def _isolated_state(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own state folder and user configuration."""
    place = f"{cache_home}/{next(_PLACES)}"
    # The digests of installed libraries are shared: they are slow to compute.
    os.makedirs(f"{place}/kcdsl")
    os.symlink(f"{cache_home}/libraries", f"{place}/kcdsl/libraries")
    monkeypatch.setenv("XDG_CACHE_HOME", place)
    monkeypatch.setenv("XDG_CONFIG_HOME", f"{place}/configuration")
    monkeypatch.setenv("XDG_STATE_HOME", f"{cache_home}/state")
    monkeypatch.delenv("KCDSL_POLICY", raising=False)


@pytest.fixture
def shared_files(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Allow contracts to name files of the examples and of other temporary folders."""
    allowed = (repository / "examples", tmp_path_factory.getbasetemp())
    monkeypatch.setenv("KCDSL_ALLOW_FOLDERS", ",".join(map(str, allowed)))


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def schemas(repository: Path) -> dict[str, dict[str, Any]]:
    """Return the published JSON schemas by their names, such as "kcdsl.verify/2"."""
    places = ("kcdsl", "grammar", "backends", "certs", "bench")
    files = [
        file
        for place in places
        for file in (repository / place).rglob("*.schema.json")
        if "node_modules" not in file.parts
    ]
    found: dict[str, dict[str, Any]] = {}
    for file in files:
        schema = json.loads(file.read_text(encoding="utf-8"))
        assert schema["$id"] not in found, file
        found[schema["$id"]] = schema
    return found


@pytest.fixture(scope="session")
def follows(schemas: dict[str, dict[str, Any]]) -> Callable[..., None]:
    """Return a function that validates a document against its schema, or against `name`."""
    import jsonschema

    @functools.cache
    def validator(name: str) -> Any:
        kind = jsonschema.validators.validator_for(schemas[name])
        kind.check_schema(schemas[name])
        return kind(schemas[name])

    def validate(document: Any, name: str | None = None) -> None:
        validator(document["schema"] if name is None else name).validate(document)

    return validate


@pytest.fixture(scope="session")
def project_files(repository: Path) -> tuple[Path, ...]:
    """Return every file of the project, without those that set-up, builds and runs create."""
    return files_below(repository)


@pytest.fixture
def cli() -> Cli:
    """Return a function that runs `kcdsl` in this process (no terminal, 100 columns, no colour)."""
    return run_here


@pytest.fixture(scope="session")
def cli_process() -> Cli:
    """Return a function that runs `kcdsl` as a subprocess, without a terminal or input."""

    def run(
        *arguments: str | os.PathLike[str],
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Ran:
        outer = {key: value for key, value in os.environ.items() if key not in ANNOTATING}
        done = subprocess.run(
            [sys.executable, "-c", _ENTRY, *(os.fspath(a) for a in arguments)],
            cwd=cwd,
            env={**outer, **PLAIN_TERMINAL, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            timeout=600,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


# The same as the installed `kcdsl` script; also works where the script is not on PATH.
_ENTRY = "import sys; sys.argv[0] = 'kcdsl'; from kcdsl.cli import main; sys.exit(main())"
