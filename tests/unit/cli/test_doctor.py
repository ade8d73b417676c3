"""`kcdsl doctor` reports installed, missing, outdated and broken packages."""

from __future__ import annotations

import builtins
import json
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata, resources
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest

from kcdsl.cli.commands import doctor
from kcdsl.cli.commands.doctor import (
    Backend,
    DeviceReport,
    DoctorCommand,
    Environment,
    Package,
    examine,
    to_json,
)
from kcdsl.cli.common.options import OutputFormat
from kcdsl.exits import Exit
from kcdsl.route.catalogue import BackendSpec, Fragment

SCHEMA = resources.files("kcdsl.cli") / "doctor.schema.json"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that hides one distribution."""
    real = metadata.version

    def hide(name: str) -> None:
        def version(asked: str) -> str:
            if asked == name:
                raise metadata.PackageNotFoundError(asked)
            return real(asked)

        monkeypatch.setattr(doctor, "version", version)

    return hide


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every module appear importable, so that the tests do not load torch."""
    monkeypatch.setattr(doctor, "import_module", lambda name: ModuleType(name))
    monkeypatch.setattr(doctor, "_device", lambda: DeviceReport("cpu", "2 threads"))


def package(found: Environment, name: str) -> Package:
    return next(p for p in found.packages if p.name == name)


def test_purposes_cover_the_run_time_requirements(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {doctor._normalised(line.split(">=")[0].strip()) for line in project["dependencies"]}
    assert set(doctor.PURPOSES) == names


def test_complete_installation_is_ready() -> None:
    found = examine()
    assert found.ready
    assert found.remedy is None
    assert {b.name for b in found.backends} >= {"smt", "interval", "empirical"}
    lacking = {need for b in found.backends for need in b.missing}
    assert lacking <= {"maraboupy"}  # no build exists for newer versions of Python


def test_missing_package_names_command_and_disabled_backends(
    without: Callable[[str], None],
) -> None:
    without("torch")
    found = examine()
    torch = package(found, "torch")
    assert (torch.installed, torch.problem) == (None, "missing")
    assert torch.command is not None
    words = shlex.split(torch.command)
    assert words[:4] == [sys.executable, "-m", "pip", "install"]
    assert words[4].startswith("torch")
    assert ">=2.8" in words[4]
    assert not found.ready
    assert found.remedy is not None
    assert "torch" in found.remedy
    disabled = {b.name for b in found.backends if not b.enabled}
    assert disabled == {"interval", "lirpa", "empirical", "marabou", "z3"}
    assert found.device.kind == "none"


def test_installation_without_extras_is_ready_and_names_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`pip install` of the wheel alone installs no library that only an extra needs."""
    real = metadata.version

    def version(name: str) -> str:
        if doctor._normalised(name) not in {*doctor.PURPOSES, "kcdsl"}:
            raise metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(doctor, "version", version)
    found = examine()
    assert found.ready
    lacking = {need for b in found.backends for need in b.missing}
    assert lacking == {"auto_LiRPA", "maraboupy"}
    assert lacking < {p.module for p in found.packages if p.command is not None}
    assert DoctorCommand().run() is Exit.HELD
    text = capsys.readouterr().out
    assert "kcdsl[lirpa]" in text
    assert "--no-deps auto_LiRPA==0.3\n" in text


def test_tested_version_of_lirpa_is_named(repository: Path) -> None:
    pinned = (repository / "constraints.txt").read_text(encoding="utf-8").splitlines()
    name, version, _ = doctor.LIRPA
    assert f"{name}=={version}" in pinned


def test_version_outside_the_range_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version
    monkeypatch.setattr(doctor, "version", lambda n: "2.7.1" if n == "torch" else real(n))
    found = examine()
    problem = package(found, "torch").problem
    assert problem is not None
    assert problem.startswith("outside")
    assert not found.ready


@pytest.mark.parametrize("version", ["2.8.0", "2.13.0+cpu", "2.13.0+cu130", "2.13.1"])
def test_local_builds_of_supported_versions_are_supported(version: str) -> None:
    assert doctor._out_of_range(version, "torch<2.14,>=2.8") is None


@pytest.mark.parametrize("version", ["2.7.9", "2.14.0", "2.14.0+cpu", "1.0"])
def test_unsupported_versions_are_found(version: str) -> None:
    assert doctor._out_of_range(version, "torch<2.14,>=2.8") == "outside <2.14,>=2.8"


def test_package_that_fails_to_import_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> ModuleType:
        if name == "z3":
            raise OSError("libz3.so: cannot open shared object file\nmore lines")
        return ModuleType(name)

    monkeypatch.setattr(doctor, "import_module", load)
    found = examine()
    assert package(found, "z3-solver").problem == (
        "does not import: OSError: libz3.so: cannot open shared object file"
    )
    assert [b.name for b in found.backends if not b.enabled] == ["smt", "marabou", "z3"]
    assert not found.ready


def test_missing_entry_points_are_a_problem(
    without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without("kcdsl")
    monkeypatch.setattr("kcdsl.route.catalogue.catalogue", lambda: ())
    found = examine()
    assert found.version is None
    assert found.backends == ()
    assert not found.ready
    assert any("install -e ." in problem for problem in found.problems)
    assert any("no backend" in problem for problem in found.problems)


def test_failing_catalogue_is_reported_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> tuple[BackendSpec, ...]:
        raise ValueError("backend 'smt' is offered by a:X and b:Y")

    monkeypatch.setattr("kcdsl.route.catalogue.catalogue", broken)
    found = examine()
    assert not found.ready
    assert any("offered by a:X and b:Y" in problem for problem in found.problems)


def test_plugin_backend_with_a_missing_requirement_is_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = BackendSpec("oracle", "nowhere:X", frozenset({Fragment.STATISTICAL}), ("no_such_thing",))
    monkeypatch.setattr("kcdsl.route.catalogue.catalogue", lambda: (spec,))
    found = examine()
    assert found.backends == (Backend("oracle", "", ("statistical",), ("no_such_thing",)),)
    assert not found.ready


def test_too_old_python_is_a_problem() -> None:
    assert doctor._python_problem((3, 11)) is None
    assert doctor._python_problem((3, 14)) is None
    assert doctor._python_problem((3, 10)) == "Python 3.11 or newer is needed"


def test_doctor_json_document(
    capsys: pytest.CaptureFixture[str], without: Callable[[str], None]
) -> None:
    without("z3-solver")
    assert DoctorCommand(format=OutputFormat.JSON).run() is Exit.COULD_NOT_RUN
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["schema"] == "kcdsl.doctor/1"
    assert document["ready"] is False
    (z3,) = [p for p in document["packages"] if p["name"] == "z3-solver"]
    assert z3["installed"] is None
    assert z3["command"] in document["remedy"]
    assert [b["name"] for b in document["backends"] if not b["enabled"]] == ["smt", "marabou", "z3"]
    assert document == to_json(examine())
    jsonschema.validate(document, json.loads(SCHEMA.read_text(encoding="utf-8")))


def test_commands_are_printed_on_one_line(
    capsys: pytest.CaptureFixture[str], without: Callable[[str], None]
) -> None:
    without("torch")
    assert DoctorCommand().run() is Exit.COULD_NOT_RUN
    lines = capsys.readouterr().out.splitlines()
    (run,) = [line for line in lines if line.startswith("run: ")]
    assert shlex.split(run.removeprefix("run: "))[1:4] == ["-m", "pip", "install"]
    assert any(line.startswith("not all of compile, verify, evaluate and check") for line in lines)
    assert max(len(line) for line in lines if "pip" not in line) <= 100


def test_doctor_works_without_rich(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    without: Callable[[str], None],
) -> None:
    real = builtins.__import__

    def refuse_rich(name: str, *rest: Any, **more: Any) -> ModuleType:
        if name.split(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *rest, **more)

    without("rich")
    monkeypatch.setattr(builtins, "__import__", refuse_rich)
    assert DoctorCommand().run() is Exit.COULD_NOT_RUN
    text = capsys.readouterr().out
    assert "problem: rich: missing (tables and progress)" in text


@pytest.mark.parametrize(
    ("capability", "products"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((7, 5), False)]
)
def test_float8_products_need_compute_capability_8_9(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], products: bool
) -> None:
    class Cuda:
        is_available = staticmethod(lambda: True)
        get_device_capability = staticmethod(lambda index: capability)
        get_device_name = staticmethod(lambda index: "GPU")

        @staticmethod
        def get_device_properties(index: int) -> Any:
            return type("Properties", (), {"total_memory": 2**34})

    torch = ModuleType("torch")
    torch.__dict__.update(cuda=Cuda, float8_e4m3fn=object())
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torch", torch)
    device = doctor._device()
    assert (device.kind, device.name, device.memory_bytes) == ("cuda", "GPU", 2**34)
    assert device.capability == f"{capability[0]}.{capability[1]}"
    assert device.float8_products is products


def test_command_imports_nothing_heavy() -> None:
    script = "import sys, kcdsl.cli.commands.doctor; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    loaded = set(done.stdout.split())
    assert "kcdsl.cli.commands.doctor" in loaded
    assert not loaded & {"torch", "numpy", "z3", "onnx", "scipy", "rich"}


@pytest.mark.full
def test_process_writes_nothing_on_stderr(cli_process: Any, tmp_path: Path) -> None:
    ran = cli_process("doctor", cwd=tmp_path)
    assert ran.stderr == ""
    assert "compile, verify, evaluate and check can run." in ran.stdout
