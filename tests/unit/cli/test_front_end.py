"""The commands compile, lint, explain and backends, and the behaviour of all commands."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

import kcdsl
from kcdsl.api.causes import WhySettings
from kcdsl.api.certificates import CheckSettings
from kcdsl.api.contract import find_contract
from kcdsl.api.evaluation import EvaluateSettings
from kcdsl.api.verification import VerifySettings
from kcdsl.cli import COMMANDS, application, main
from kcdsl.cli.commands import GROUPS, load
from kcdsl.cli.common import Argument, Command
from kcdsl.cli.common.options import Stage
from kcdsl.cli.process import use_large_pages
from kcdsl.diagnostics import Refusal
from kcdsl.exits import Exit
from kcdsl_certs.statement import build_manifest

if TYPE_CHECKING:
    from tests.conftest import Cli

GOOD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
clauses:
  N-KL: {require: p99(kl) <= 0.02, level: L2}
"""
BAD = GOOD.replace("p99(kl)", "p99(kll)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one contract."""
    (tmp_path / "contract.yaml").write_text(GOOD, encoding="utf-8")
    return tmp_path


def test_compile_shows_the_backend_of_each_clause(cli: Cli, folder: Path) -> None:
    ran = cli("compile", cwd=folder)
    assert ran.code == 0
    assert "contract c 1.0.0" in ran.stdout
    assert "N-KL" in ran.stdout
    assert "empirical" in ran.stdout
    assert ran.stderr.count("note[KC606]: there is no file") == 2


def test_compile_emits_the_ir(cli: Cli, folder: Path, follows: Callable[..., None]) -> None:
    ran = cli("compile", "--emit", "ir", cwd=folder)
    document = json.loads(ran.stdout)
    assert document["schema"] == "kcdsl.ir/1"
    assert len(document["digest"]) == 64
    follows(document)
    assert cli("compile", "--emit", "ir", "-o", "out.json", cwd=folder).code == 0
    assert (folder / "out.json").read_text(encoding="utf-8") == ran.stdout
    assert sorted(p.name for p in folder.iterdir()) == ["contract.yaml", "out.json"]


def test_contract_that_does_not_compile(cli: Cli, folder: Path) -> None:
    (folder / "contract.yaml").write_text(BAD, encoding="utf-8")
    ran = cli("compile", "--emit", "ir", "-o", "out.json", cwd=folder)
    assert (ran.code, ran.stdout) == (2, "")
    assert "contract.yaml:9:23" in ran.stderr
    assert "did you mean `kl`?" in ran.stderr
    assert [p.name for p in folder.iterdir()] == ["contract.yaml"]
    ran = cli("compile", "--format", "json", cwd=folder)
    assert json.loads(ran.stderr)[0]["code"] == "KC203"


def test_lint_reports_findings(cli: Cli, folder: Path, follows: Callable[..., None]) -> None:
    ran = cli("lint", cwd=folder)
    assert ran.code == 0
    assert ran.stdout.count("note[KC606]") == 2
    bad = folder / "bad.kc.yaml"
    bad.write_text(BAD, encoding="utf-8")
    ran = cli("lint", bad, "--format", "concise")
    assert ran.code == 1
    assert f"{bad}:9:23: error[KC203]" in ran.stdout
    ran = cli("lint", bad, folder / "contract.yaml", "--format", "json")
    records = json.loads(ran.stdout)
    assert {record["code"] for record in records} == {"KC203", "KC606"}
    follows(records, "kcdsl.diagnostics/1")
    assert cli("lint", folder / "contract.yaml", "--fail-on", "note").code == 1
    assert json.loads(cli("lint", bad, "--format", "json").stdout) != []


def test_lint_of_an_empty_folder(cli: Cli, tmp_path: Path) -> None:
    ran = cli("lint", tmp_path / "absent.yaml")
    assert ran.code == 2
    assert "KC601" in ran.stdout
    assert cli("lint", cwd=tmp_path).code == 2


def test_lint_of_an_unreadable_file(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_to_open(*arguments: object, **named: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse_to_open)
    ran = cli("lint", "contract.yaml", cwd=folder)
    assert ran.code == 2
    assert "KC602" in ran.stdout


def test_clauses_without_a_backend_are_reported(cli: Cli, folder: Path) -> None:
    text = GOOD.replace("level: L2", "level: L2, evidence: proof")
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    ran = cli("compile", cwd=folder)
    assert ran.code == 0
    assert "warning[KC402]: no backend decides the clause `N-KL`" in ran.stderr
    assert "not empirical:" in ran.stderr


@pytest.mark.full
def test_consistency_is_checked_on_request(cli_process: Cli, folder: Path) -> None:
    text = GOOD + "  N-TOO: {require: p99(kl) >= 0.03, override: direction, level: L1}\n"
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    ran = cli_process("compile", "--consistency", cwd=folder)
    assert ran.code == 1
    assert "KC410" in ran.stderr
    assert "contract.yaml:" in ran.stderr
    assert cli_process("compile", cwd=folder).code == 0


def test_explain_prints_the_page_of_a_code(cli: Cli) -> None:
    ran = cli("explain", "kc203")
    assert ran.code == 0
    assert ran.stdout.startswith("KC203: unknown metric\n\nThere is no metric of this name.\n")
    assert "KC001" in cli("explain").stdout
    ran = cli("explain", "KC998")
    assert (ran.code, ran.stdout) == (2, "")


def test_backends_lists_installed_backends(cli: Cli, follows: Callable[..., None]) -> None:
    document = json.loads(cli("backends", "--format", "json").stdout)
    follows(document)
    assert document["schema"] == "kcdsl.backends/1"
    names = {backend["name"] for backend in document["backends"]}
    assert {"smt", "interval", "empirical"} <= names
    assert "interval" in cli("backends").stdout


# --- what surrounds every command ----------------------------------------------------------------


def test_help_lists_every_command_once_under_a_heading(cli: Cli) -> None:
    ran = cli("--help")
    assert ran.code == 0
    found: dict[str, list[str]] = {}
    for line in ran.stdout.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            heading = line.removesuffix(":")
        elif re.match(r"  [a-z]", line):
            found.setdefault(heading, []).append(line.split()[0])
    assert found == {heading: list(commands) for heading, commands in GROUPS.items()}
    assert ran.stdout.startswith("usage: kcdsl [-h]")
    assert max(map(len, ran.stdout.splitlines())) <= 100
    assert cli("--version").stdout == f"kcdsl {kcdsl.__version__}\n"


@pytest.mark.parametrize(
    "words", [[], ["nothing"], ["compile", "--nothing"], ["compile", "a", "b"], ["--nothing"]]
)
def test_usage_errors_have_exit_code_2(cli: Cli, words: list[str]) -> None:
    ran = cli(*words)
    assert (ran.code, ran.stdout) == (2, "")
    assert ran.stderr


@pytest.mark.parametrize(
    ("words", "message", "help"),
    [
        (["lint", "--fxi"], "`kcdsl lint` has no option `--fxi`", "did you mean `--fix`?"),
        (["--colour=always", "lint"], "`kcdsl lint` has no option `--colour`", "`--color`?"),
        (["config", "show", "--frmat=x"], "`kcdsl config` has no option `--frmat`", "`--format`?"),
        (["compile", "a", "b"], "`kcdsl compile` does not take `b`", "`kcdsl compile --help`"),
        (
            ["doctor", "--format", "json", "b"],
            "`kcdsl doctor` does not take `b`",
            "`kcdsl doctor --help`",
        ),
        (["--zzz"], "`kcdsl` has no option `--zzz`", "`kcdsl --help`"),
    ],
)
def test_unknown_argument_is_named(cli: Cli, words: list[str], message: str, help: str) -> None:
    ran = cli(*words)
    assert (ran.code, ran.stdout) == (2, "")
    assert f"error[KC901]: {message}" in ran.stderr
    assert help in ran.stderr


@pytest.mark.parametrize(
    "words",
    [
        "compile contract.yaml -o contract.yaml",
        "compile -o contract.yaml",
        "lint --format json=contract.yaml",
        "lint . --format text --format json=./contract.yaml",
        "diff old.yaml contract.yaml -o contract.yaml",
        "evaluate --format json=contract.yaml",
        "report contract.yaml -o contract.yaml",
        "compare contract.yaml old.yaml --html contract.yaml",
        "aggregate contract.yaml -o contract.yaml",
        "sign contract.yaml -o contract.yaml",
        "show contract.yaml --html contract.yaml",
        "check contract.yaml --write-expectation contract.yaml",
        "transfer contract.yaml old.yaml -o contract.yaml",
        "register head --register contract.yaml --sign old.yaml -o contract.yaml",
    ],
)
def test_results_do_not_replace_what_a_command_reads(cli: Cli, folder: Path, words: str) -> None:
    (folder / "old.yaml").write_text(GOOD, encoding="utf-8")
    ran = cli(*words.split(), cwd=folder)
    assert (ran.code, ran.stdout) == (2, "")
    assert "contract.yaml`, which the command reads" in ran.stderr
    assert (folder / "contract.yaml").read_text(encoding="utf-8") == GOOD


def test_text_does_not_replace_a_checkpoint(cli: Cli, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(b"{}".ljust(8, b"\0"))
    (folder / "old.yaml").write_text(GOOD, encoding="utf-8")
    ran = cli("diff", "old.yaml", "contract.yaml", "-o", str(weights), cwd=folder)
    assert ran.code == 2
    assert "model.safetensors is no text file" in ran.stderr
    assert weights.read_bytes() == b"{}".ljust(8, b"\0")


@pytest.mark.parametrize("name", COMMANDS)
def test_files_for_results_are_declared(name: str) -> None:
    for _, option in load(name).options():
        if "FILE" in (option.metavar or ""):
            said = re.search(r"\b(write|written|output)\b", option.help) is not None
            assert option.writes or not said, option.names


def _readable(option: Argument) -> str:
    """Return a text that an argument accepts."""
    for text in (*option.choices, "1", "0.5", "kl <= 1", "24h", "0" * 64, f"{'0' * 64}=m"):
        with suppress(argparse.ArgumentTypeError, ValueError):
            option.read(text)
            return text
    raise AssertionError(option)


def _pieces(command: type[Command]) -> tuple[list[list[str]], list[str]]:
    """Return an occurrence of each option, one of a group, and all positional arguments.

    Values differ where they are free.
    """
    options: list[list[str]] = []
    positionals: list[str] = []
    groups: set[str] = set()
    for _, option in command.options():
        if option.positional is not None:
            free = 1 if option.positional in ("", "?") else 3
            texts = [f"word{len(positionals) + i}" for i in range(free)]
            positionals += [_readable(option)] if option.choices else texts
        elif option.group is None or option.group not in groups:
            groups.add(option.group or "")
            named = option.names[-1]
            options.append([named] if option.is_switch else [named, _readable(option)])
    return options, positionals


@pytest.mark.parametrize("name", COMMANDS)
def test_output_formats_are_values_of_one_option(name: str) -> None:
    """`--format json` is the one spelling of JSON on standard output."""
    options = {option.name: option for _, option in load(name).options()}
    assert options.keys().isdisjoint({"json", "text", "markdown", "sarif", "junit", "github"})
    if "format" in options:
        offered = options["format"]
        assert "json" in (offered.choices or tuple(offered.words() if offered.words else ()))


@pytest.mark.parametrize("name", COMMANDS)
def test_options_and_positional_arguments_may_be_in_any_order(name: str) -> None:
    command = load(name)
    parser = application.parser_of(name, command)
    options, positionals = _pieces(command)

    def parsed(words: list[str]) -> dict[str, object]:
        given, unknown = parser.parse_known_args(
            application.gathered([name, *words], name, command)
        )
        assert [word for word in unknown if word != "--"] == []
        return vars(given)

    flat = [word for option in options for word in option]
    expected = parsed([*positionals, *flat])
    assert {f for f, o in command.options() if o.positional is not None} <= set(expected)
    assert parsed([*flat, "--", *positionals]) == expected
    chance = Random(0)
    for _ in range(30):
        pieces = [*options, *([word] for word in positionals)]
        places = chance.sample(range(len(pieces)), len(positionals))
        order = iter(chance.sample(options, len(options)))
        left = iter(positionals)
        taken = set(places)
        mixed = [[next(left)] if i in taken else next(order) for i in range(len(pieces))]
        assert parsed([word for piece in mixed for word in piece]) == expected


@pytest.mark.parametrize(
    "words",
    [
        ["register", "add", "--register", "r.db", "nothere.json"],
        ["explain", "N-KL", "--format", "text", "nothere.yaml"],
        ["experiment", "e1", "--seconds", "0.1", "nothere.yaml"],
        ["vnnlib", "verify", "--timeout", "5", "nothere.vnnlib", "--network", "f=nothere.onnx"],
    ],
)
def test_positional_argument_after_an_option_is_accepted(
    cli: Cli, words: list[str], tmp_path: Path
) -> None:
    ran = cli(*words, cwd=tmp_path)
    assert ran.code == 2
    assert "nothere" in ran.stderr
    assert "does not take" not in ran.stderr


def test_lint_of_several_contracts_without_a_path(cli: Cli, folder: Path) -> None:
    (folder / "other.kc.yaml").write_text(GOOD, encoding="utf-8")
    ran = cli("lint", cwd=folder)
    assert ran.code == 2
    assert "name one of them, or `.` for all" in ran.stdout + ran.stderr
    assert cli("lint", ".", cwd=folder).code == 0


def test_misspelt_command_gets_a_suggestion(cli: Cli) -> None:
    assert "did you mean `kcdsl compile`?" in cli("comple").stderr


def _fail_with(error: BaseException) -> Callable[[str], type[Command]]:
    class Failing(Command):
        def run(self) -> Exit:
            raise error

    return lambda name: Failing


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (RuntimeError("odd"), 2, "KC999]: RuntimeError: odd"),
        (
            PermissionError(13, "Permission denied", "x.json"),
            2,
            "KC602]: x.json: Permission denied",
        ),
        (KeyboardInterrupt(), 130, "kcdsl: interrupted"),
        (BrokenPipeError(), 2, ""),
    ],
)
def test_exceptions_of_commands_become_exit_codes(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, text: str
) -> None:
    monkeypatch.setattr(application, "load", _fail_with(error))
    ran = cli("lint")
    assert ran.code == code
    assert text in ran.stderr
    assert "Traceback" not in ran.stderr


def test_traceback_is_printed_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "load", _fail_with(RuntimeError("odd")))
    with pytest.raises(RuntimeError):
        main(["--traceback", "lint"])
    monkeypatch.setenv("KCDSL_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        main(["lint"])


# --- finding the contract ------------------------------------------------------------------------


def refused(start: Path, given: str | None = None) -> str:
    """Return the code of the refusal by discovery."""
    with pytest.raises(Refusal) as caught:
        find_contract(given, start)
    return caught.value.diagnostics[0].code.id


def test_only_contract_of_the_folder_is_found(folder: Path) -> None:
    assert find_contract(None, folder) == folder / "contract.yaml"
    (folder / "other.kc.yaml").write_text(GOOD, encoding="utf-8")
    assert refused(folder) == "KC604"
    assert find_contract(str(folder / "other.kc.yaml"), folder).name == "other.kc.yaml"


def test_folder_without_a_contract_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path) == "KC603"
    assert refused(tmp_path, str(tmp_path / "absent.yaml")) == "KC601"
    assert refused(tmp_path, str(tmp_path)) == "KC603"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pyproject.toml", '[tool.kcdsl]\ncontract = "deep/contract.yaml"\n'),
        ("kcdsl.toml", 'contract = "deep/contract.yaml"\n'),
    ],
)
def test_nearest_configuration_is_found(tmp_path: Path, name: str, text: str) -> None:
    deep = tmp_path / "deep"
    deep.mkdir()
    (deep / "contract.yaml").write_text(GOOD, encoding="utf-8")
    (tmp_path / name).write_text(text, encoding="utf-8")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\n", encoding="utf-8")
    assert find_contract(None, below) == deep.resolve() / "contract.yaml"


@pytest.mark.parametrize(
    "text", ["[tool.kcdsl\n", "[tool]\nkcdsl = 3\n", "[tool.kcdsl]\ncontract = 3\n"]
)
def test_invalid_configuration_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text, encoding="utf-8")
    assert refused(tmp_path) == "KC605"


def test_configured_contract_that_is_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kcdsl.toml").write_text('contract = "absent.yaml"\n', encoding="utf-8")
    assert refused(tmp_path) == "KC601"


def test_compile_names_the_checkpoint_as_certificates_do(
    cli: Cli, tmp_path: Path, repository: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(repository / "examples" / "tiny_lm", folder)
    weights = folder / "model.safetensors"
    digest = build_manifest(weights).digest
    result = cli("compile", str(folder / "contract.yaml"))
    assert f"checkpoint  sha256:{digest}\n" in result.stdout
    weights.unlink()
    (folder / "config.json").unlink()
    result = cli("compile", str(folder / "contract.yaml"))
    assert result.code == 0
    assert f"checkpoint  there is no file model.safetensors (looked in {folder})\n" in result.stdout


@pytest.mark.parametrize(
    ("name", "settings", "others"),
    [
        ("verify", VerifySettings, {"progress", "tell"}),
        ("evaluate", EvaluateSettings, {"more", "progress", "tell"}),
        ("check", CheckSettings, {"promoting", "expected", "progress"}),
        ("why", WhySettings, {"progress", "clock"}),
    ],
)
def test_settings_are_named_like_options(
    name: str, settings: type[VerifySettings], others: set[str]
) -> None:
    # A field whose option has another name would keep its default, whatever the user sets.
    assert {f.name for f in fields(settings) if not hasattr(load(name), f.name)} == others


def test_settings_accept_the_values_of_options() -> None:
    given = {"stage": Stage.CANARY, "valid_for": 3, "blocks": ("mlp_0",)}
    found = load("verify")(**given).settings(VerifySettings, attack=False, confirm=True)
    assert (found.stage, type(found.stage)) == ("canary", str)
    assert found.lifetime == timedelta(days=3)
    assert (found.blocks, found.attack) == (("mlp_0",), False)


def test_torch_gets_large_pages_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, used in ((None, "1"), ("0", "0")):
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", given or "")
        if given is None:
            monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
        use_large_pages()
        assert os.environ["THP_MEM_ALLOC_ENABLE"] == used
