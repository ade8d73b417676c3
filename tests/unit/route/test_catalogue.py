"""The backend catalogue with an unusable plug-in distribution."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.api.backends import FormalBackend, formal_backend, formal_backends, look_rules
from kcdsl.diagnostics import Refusal, codes
from kcdsl.route.catalogue import catalogue
from kcdsl_backends.certifier.backend import BACKEND as INTERVAL
from kcdsl_backends.lirpa.backend import BACKEND as LIRPA
from kcdsl_backends.smt.drift.backend import BACKEND as Z3
from kcdsl_backends.smt.drift.marabou import BACKEND as MARABOU

if TYPE_CHECKING:
    from tests.conftest import Cli

GROUP = "kcdsl.backends"
TAKEN = """
from kcdsl.route.catalogue import BackendSpec, Fragment
BACKENDS = (BackendSpec("interval", "taken:BACKEND", frozenset(Fragment), rank=-1),)
"""


@pytest.fixture(
    params=[
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("BACKENDS = 3", "TypeError"),
        ("BACKENDS = ('interval',)", "it is no tuple of"),
        (TAKEN, "the backend 'interval' is offered by kcdsl_backends"),
    ],
    ids=["error", "exit", "import", "number", "names", "taken"],
)
def broken(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, str]:
    """Install a distribution with an unusable entry point; return its module and the reason."""
    text, why = request.param
    module = f"broken_backend_{request.node.callspec.id}"
    (tmp_path / f"{module}.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    mine = EntryPoint("mine", f"{module}:BACKENDS", GROUP)

    def installed(group: str) -> list[EntryPoint]:
        return [*entry_points(group=group), *([mine] if group == GROUP else [])]

    monkeypatch.setattr("importlib.metadata.entry_points", installed)
    return module, why


def test_formal_backends_have_one_interface() -> None:
    """mypy compares these with `FormalBackend`, since a catalogue loads backends untyped."""
    own: tuple[FormalBackend, ...] = (INTERVAL, LIRPA, Z3, MARABOU)
    names = [backend.name for backend in own]
    assert set(names) >= {spec.name for spec in formal_backends()}


def test_unusable_distribution_is_skipped_with_the_reason(
    broken: tuple[str, str], cli: Cli, follows: Callable[..., None]
) -> None:
    module, why = broken
    *others, last = catalogue()
    assert f"{module}:BACKENDS" in last.fault
    assert why in last.fault
    assert not last.fragments
    assert {spec.name: spec.target for spec in others}["interval"].startswith("kcdsl_backends.")
    assert not any(spec.fault for spec in others)
    assert look_rules() is not None
    assert formal_backend(None) is not None
    with pytest.raises(Refusal) as caught:
        formal_backend("mine")
    (problem,) = caught.value.diagnostics
    assert problem.code is codes.NO_BACKEND
    assert last.fault in (problem.help or "")
    ran = cli("backends")
    assert (ran.code, why in ran.stdout) == (0, True)
    document = json.loads(cli("backends", "--format", "json").stdout)
    follows(document)
    assert document["backends"][-1]["fault"] == last.fault
