"""Commands run code from a contract's folder only with the user's permission."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl.cli import COMMANDS
from tests.support.foreign import (
    BEFORE_US,
    OF_USED,
    READING,
    RUNNING,
    SCRIPT,
    Outcome,
    attempt,
    editor_session,
    hostile_contract,
    kcdsl,
    packages,
    set_traps,
    trap,
    used_contract,
)
from tests.support.networks import box, declared, perceptron, saved
from tests.support.reports import ROW, report

QUERY = "\n".join(
    (
        "(vnnlib-version <2.0>)",
        declared("N", "X", "Y", 2, 1),
        box("X", 2, -1.0, 1.0),
        "(assert (>= Y[0,0] 100.0))",
    )
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trap for everything that could be imported from it."""
    folder = tmp_path_factory.mktemp("hostile")
    hostile_contract(folder)
    (folder / "report.json").write_text(report(ROW).dumps())
    saved(perceptron(np.random.default_rng(0), (2, 3, 1)), folder / "N.onnx")
    (folder / "query.vnnlib").write_text(QUERY)
    (folder / "table.jsonl").write_text('{"request": "a", "position": 0, "kl": 0.1}\n')
    ran = attempt(kcdsl("keygen", "-o", "own.key", safe=True), folder)
    assert ran.outcome is Outcome.ACCEPTED, ran.stderr
    set_traps(folder, packages())
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Return a copy for one attack, where traps record their names."""
    copy = tmp_path / "hostile"
    shutil.copytree(made, copy)
    for file in copy.rglob("*.py"):
        file.write_text(file.read_text().replace(str(made), str(copy)))
    return copy


def test_every_command_is_classified_as_reading_or_running() -> None:
    assert READING.keys() | RUNNING.keys() | {"lsp"} == COMMANDS.keys()
    assert not READING.keys() & RUNNING.keys()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", READING)
def test_reading_command_runs_no_code(name: str, folder: Path) -> None:
    ran = attempt(kcdsl(*READING[name]), folder, seconds=240)
    assert ran.executed == ()
    assert ran.outcome in {Outcome.ACCEPTED, Outcome.REFUSED}, ran.stderr


@pytest.mark.full
def test_language_server_runs_no_code(folder: Path) -> None:
    assert editor_session(folder) == ()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", RUNNING)
def test_running_command_asks_for_permission(name: str, folder: Path) -> None:
    ran = attempt(kcdsl(*RUNNING[name]), folder, seconds=240)
    assert (ran.executed, ran.code) == ((), 2)
    assert ran.outcome is Outcome.REFUSED, ran.stderr
    if name not in {"replay", "transfer", "why"}:  # those read another file first
        assert "KC609" in ran.stderr
        assert "--allow-code" in ran.stderr


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with real documents of its contract, whose own modules became traps."""
    folder = tmp_path_factory.mktemp("used") / "folder"
    used_contract(folder)
    return folder


@pytest.mark.full
@pytest.mark.parametrize("name", OF_USED)
def test_documents_of_a_contract_run_none_of_its_code(name: str, used: Path) -> None:
    words, code = OF_USED[name]
    ran = attempt(kcdsl(*words, safe=True), used, seconds=240)
    assert (ran.executed, ran.code) == ((), code), ran.stderr
    if code == 2:
        assert "KC609" in ran.stderr


@pytest.mark.full
def test_traps_replace_the_modules_of_a_used_contract(used: Path) -> None:
    words = ("evaluate", "contract.yaml", "--allow-code", "--fresh", "-o", "again")
    ran = attempt(kcdsl(*words, safe=True), used, seconds=240)
    assert ran.executed == ("network", "own_gap")


@pytest.mark.parametrize("name", RUNNING)
def test_running_commands_document_the_option(name: str, cli: Any) -> None:
    text = " ".join(cli(name, "--help").stdout.split())
    assert "--allow-code" in text
    assert "This command runs code of the contract" in text


def test_reading_commands_have_no_option_to_run_code(cli: Any) -> None:
    for name in READING:
        assert "--allow-code" not in cli(name, "--help").stdout


@pytest.mark.full
def test_traps_run_once_code_is_allowed(folder: Path) -> None:
    ran = attempt(kcdsl("evaluate", "--allow-code", "contract.yaml"), folder, seconds=240)
    assert {"own_metrics.py", "trapped_metrics", "trapped_metrics/own.py"} <= set(ran.executed)
    assert not set(packages()) & set(ran.executed)
    ran = attempt(kcdsl("verify", "--allow-code", "contract.yaml"), folder, seconds=240)
    assert set(ran.executed) == {"trapped_model", "trapped_model.network"}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("trusted", "code"), [(".", "KC609"), ("..", "KC457"), ("../hos", "KC609")]
)
def test_trusted_folder_runs_code(trusted: str, code: str, folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "config" / "kcdsl" / "kcdsl.toml"
    mine.parent.mkdir(parents=True)
    mine.write_text(f"trusted-folders = [{json.dumps(str(folder / trusted / 'x'))}]\n")
    if trusted == "..":
        mine.write_text(f"trusted-folders = [{json.dumps(str(tmp_path))}]\n")
    variables = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    ran = attempt(kcdsl(*RUNNING["verify"]), folder, seconds=240, variables=variables)
    assert code in ran.stderr
    assert bool(ran.executed) == (code == "KC457")


def test_symlink_out_of_a_trusted_folder_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted" / "inner").symlink_to(folder)
    variables = {"KCDSL_TRUSTED_FOLDERS": str(tmp_path / "trusted")}
    contract = str(tmp_path / "trusted" / "inner" / "contract.yaml")
    ran = attempt(kcdsl("verify", contract), folder, seconds=240, variables=variables)
    assert "KC609" in ran.stderr
    assert ran.executed == ()


def test_folder_cannot_declare_itself_trusted(folder: Path, cli: Any) -> None:
    (folder / "kcdsl.toml").write_text('metrics = ["own_metrics.py"]\ntrusted-folders = ["."]\n')
    ran = cli("verify", "contract.yaml", cwd=folder)
    assert ran.code == 2
    assert "KC605" in ran.stderr
    assert "`trusted-folders` is yours to say, not the folder's" in ran.stderr


def test_configuration_above_a_trusted_folder_is_not_trusted(folder: Path, cli: Any) -> None:
    inner = folder / "inner"
    inner.mkdir()
    text = (folder / "contract.yaml").read_text()
    plain = text.replace('module: "trapped_model.network:build"', "architecture: llama")
    (inner / "contract.yaml").write_text(plain)
    ran = cli(
        "evaluate", "inner/contract.yaml", cwd=folder, env={"KCDSL_TRUSTED_FOLDERS": str(inner)}
    )
    assert ran.code == 2
    assert "own_metrics.py:gap" in ran.stderr
    assert "KC609" in ran.stderr


def test_standalone_checker_imports_nothing_from_the_folder(folder: Path) -> None:
    words = ("check", "certificate.json", "--expect", "expected.json", "--key", "own.key.pub")
    (folder / "expected.json").write_text("{}")
    (folder / "kcdsl_certs.py").unlink()  # Python imports it before any code of kcdsl runs
    command = [sys.executable, "-m", "kcdsl_certs", *words, "--checkpoint", "model.safetensors"]
    ran = attempt(command, folder)
    assert ran.executed == ()
    assert ran.outcome is Outcome.REFUSED, ran.stderr
    assert "error: " in ran.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize("entries", ["", ":", ".", "./"])
def test_relative_search_path_entries_are_ignored(folder: Path, entries: str) -> None:
    for name in BEFORE_US:
        (folder / f"{name}.py").unlink(missing_ok=True)
    command = [sys.executable, "-P", "-c", SCRIPT, "lint", "contract.yaml"]
    ran = attempt(command, folder, variables={"PYTHONPATH": entries})
    assert (ran.executed, ran.outcome) == ((), Outcome.ACCEPTED), ran.stderr


@pytest.mark.full
def test_program_imports_no_shadowed_standard_library_module(folder: Path) -> None:
    set_traps(folder, sorted(sys.stdlib_module_names))
    ran = attempt(kcdsl("compile", "--consistency", "contract.yaml", safe=True), folder)
    assert (ran.executed, ran.outcome) == ((), Outcome.ACCEPTED), ran.stderr


def test_absolute_search_path_entries_are_kept(folder: Path) -> None:
    trap(folder / "marked.py", "marked", folder)
    program = "from kcdsl.cli.process import isolate; isolate(); import marked"
    command = [sys.executable, "-P", "-c", program]
    assert "marked" in attempt(command, folder, variables={"PYTHONPATH": str(folder)}).executed
    assert "marked" not in attempt(command, folder, variables={"PYTHONPATH": "."}).executed


def test_z3_is_loaded_from_its_own_package(folder: Path) -> None:
    spec = find_spec("z3")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    library = Path(spec.submodule_search_locations[0]) / "lib"
    for file in library.glob("libz3.*"):
        shutil.copy(file, folder / file.name)
    program = (
        "import ctypes, os; load = ctypes.CDLL.__init__;"
        "note = lambda own, name, *a, **k: os.write(2, f'loads {name}\\n'.encode()) and "
        "load(own, name, *a, **k); ctypes.CDLL.__init__ = note;" + SCRIPT
    )
    command = [sys.executable, "-c", program, "diff", "contract.yaml", "contract.yaml"]
    ran = attempt(command, folder)
    assert ran.code == 0, ran.stderr
    loaded = [line.removeprefix("loads ") for line in ran.stderr.splitlines() if "libz3" in line]
    assert [Path(file).parent for file in loaded] == [library]


def test_workers_import_nothing_from_the_working_folder(folder: Path) -> None:
    program = (
        "import sys, multiprocessing as m; from kcdsl.cli.process import isolate; isolate();"
        "p = m.get_context('spawn').Process(target=print, args=('ran',)); p.start(); p.join();"
        "sys.exit(p.exitcode)"
    )
    set_traps(folder, ["multiprocessing", "pickle", "socket"])
    ran = attempt([sys.executable, "-P", "-c", program], folder)
    assert (ran.executed, ran.code) == ((), 0), ran.stderr
