"""Options from configuration, environment and command line, in order of precedence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.diagnostics import Diagnostic, Sink
from kcdsl.source.config import OPTIONS, load_config, read_config

if TYPE_CHECKING:
    from tests.conftest import Cli

CONTRACT = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
clauses:
  A: {require: p99(kl) <= 1, level: L2}
  O:
    require: "has(trace, [build_fingerprint, request_shape, replay_signature, rng_sed])"
    level: L3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a contract that has one warning and two notes."""
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    return tmp_path


def found(cli: Cli, folder: Path, *words: str, **variables: str) -> list[str]:
    """Return the codes in the output of `kcdsl lint`."""
    ran = cli("lint", "--format", "json", *words, cwd=folder, env=variables)
    assert ran.code in {0, 1}, ran
    return [item["code"] for item in json.loads(ran.stdout)]


def test_precedence_is_command_line_environment_file(cli: Cli, folder: Path) -> None:
    assert found(cli, folder) == ["KC606", "KC606", "KC208"]
    (folder / "pyproject.toml").write_text('[tool.kcdsl]\nignore = ["kc6"]\n')
    assert found(cli, folder) == ["KC208"]
    assert found(cli, folder, KCDSL_IGNORE="KC208") == ["KC606", "KC606"]
    assert found(cli, folder, KCDSL_IGNORE="KC208", KCDSL_LINT_IGNORE="KC2,KC606") == []
    assert found(cli, folder, "--ignore", "KC9", KCDSL_IGNORE="KC6") == ["KC606", "KC606", "KC208"]
    assert found(cli, folder, "--ignore", "KC2,KC9", "--ignore", "KC6") == []


def test_select_and_ignore_combine(cli: Cli, folder: Path) -> None:
    (folder / "kcdsl.toml").write_text('select = ["KC2"]\nignore = ["KC208"]\n')
    assert found(cli, folder) == []
    assert found(cli, folder, "--select", "KC208") == ["KC208"]
    assert found(cli, folder, "--select", "KC2", "--ignore", "KC208") == []
    assert found(cli, folder, "--ignore", "KC9") == ["KC208"]


def test_errors_are_shown_whatever_is_selected(cli: Cli, folder: Path) -> None:
    (folder / "contract.yaml").write_text(CONTRACT.replace("(kl)", "(kll)"))
    ran = cli("lint", "--select", "KC5", "--ignore", "KC2", "--format", "concise", cwd=folder)
    assert ran.code == 1
    assert ran.stdout.startswith("contract.yaml:9:20: error[KC203]")


@pytest.mark.parametrize("words", [("--select", "KC8"), ("--ignore", "208"), ("--ignore", "KC2*")])
def test_unknown_codes_are_refused(cli: Cli, folder: Path, words: tuple[str, str]) -> None:
    ran = cli("lint", *words, cwd=folder)
    assert ran.code == 2
    assert f"{words[0]}: no code begins with `{words[1]}`" in ran.stderr


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('ignore = ["KC606", "KC995"]', "1:21", "`ignore` cannot be `KC995`"),
        ('select = ["metric"]', "1:12", "`select` cannot be `metric`"),
        ('ignore = "KC606"', "1:1", "`ignore` takes a list of codes"),
        ("ignore = [606]", "1:1", "`ignore` takes a list of codes"),
        ('fail-on = "fatal"', "1:12", "`fail-on` cannot be `fatal`"),
        ('# ignore\nignor = ["KC6"]', "2:1", "there is no option `ignor`"),
        ("refuse-suppressions = 1", "1:1", "takes true or false"),
        ('fail-on = "note"\nfail_on = "note"', "2:1", "is written twice"),
    ],
)
def test_invalid_values_have_a_position(
    cli: Cli, folder: Path, text: str, line: str, words: str
) -> None:
    (folder / "kcdsl.toml").write_text(f"{text}\n")
    for command in (("lint",), ("config", "show")):
        ran = cli(*command, cwd=folder)
        assert ran.code == 2
        assert "error[KC605]" in ran.stderr
        assert f"kcdsl.toml:{line}\n" in ran.stderr
        assert words in ran.stderr


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("KCDSL_IGNORE", "KC995"),
        ("KCDSL_COLOR", "two"),
        ("KCDSL_REFUSE_SUPPRESSIONS", "perhaps"),
        ("KCDSL_FAIL_ON", "fatal"),
        ("KCDSL_LINT_FAIL_ON", "fatal"),
        ("KCDSL_LINT_FIX", "perhaps"),
        ("KCDSL_LINT_FIXX", "1"),
    ],
)
def test_invalid_environment_variables_are_refused(
    cli: Cli, folder: Path, variable: str, value: str
) -> None:
    ran = cli("lint", cwd=folder, env={variable: value})
    assert ran.code == 2
    assert variable in ran.stderr


def test_config_show_states_the_origin_of_values(
    cli: Cli, folder: Path, follows: Callable[..., None]
) -> None:
    (folder / "kcdsl.toml").write_text('fail-on = "note"\nselect = ["kc2"]\n')
    ran = cli("config", "show", "--format", "json", cwd=folder, env={"KCDSL_IGNORE": "KC208"})
    document = json.loads(ran.stdout)
    follows(document)
    by_name = {item["name"]: item for item in document["options"]}
    assert set(by_name) == {option.name for option in OPTIONS}
    assert by_name["select"]["value"] == ["KC2"]
    assert by_name["select"]["origin"] == {
        "kind": "file", "file": "kcdsl.toml", "line": 2, "column": 1,
    }  # fmt: skip
    assert by_name["ignore"]["origin"] == {"kind": "environment", "variable": "KCDSL_IGNORE"}
    assert by_name["color"]["origin"] == {"kind": "default"}
    table = cli("config", "show", cwd=folder).stdout
    assert 'fail-on              "note"   kcdsl.toml:1' in table


def test_only_the_nearest_file_applies(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "kcdsl.toml").write_text('fail-on = "note"\nignore = ["KC6"]\n')
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.other]\nx = 1\n")
    assert load_config(below, {}).fail_on == "note"
    (tmp_path / "a" / "pyproject.toml").write_text('[tool.kcdsl]\nfail-on = "warning"\n')
    config = load_config(below, {})
    assert (config.fail_on, config.ignore) == ("warning", ())
    (tmp_path / "a" / "kcdsl.toml").write_text("")
    assert load_config(below, {}).fail_on == "error"


def test_one_error_keeps_the_other_options(tmp_path: Path) -> None:
    (tmp_path / "kcdsl.toml").write_text('fail-on = "fatal"\nselect = ["KC2"]\n')
    sink = Sink()
    config = read_config(tmp_path, sink, {})
    assert (config.fail_on, config.select) == ("error", ("KC2",))
    assert [d.code.id for d in sink] == ["KC605"]


def test_position_of_an_item_is_not_in_a_comment(tmp_path: Path) -> None:
    text = '# "KC995"\nignore = [\n  "KC606",\n  "KC995",  # "KC995"\n]\n'
    (tmp_path / "kcdsl.toml").write_text(text)
    sink = Sink()
    read_config(tmp_path, sink, {})
    (diagnostic,) = sink
    assert isinstance(diagnostic, Diagnostic)
    assert diagnostic.span is not None
    assert diagnostic.span.start == text.index('"KC995",') + 1


def test_colour_is_selected_by_option_variable_and_file(cli: Cli, folder: Path) -> None:
    plain = {"NO_COLOR": "", "FORCE_COLOR": ""}

    def coloured(*words: str, **variables: str) -> bool:
        return "\x1b[" in cli(*words, "lint", cwd=folder, env={**plain, **variables}).stdout

    assert not coloured()
    assert coloured("--color", "always")
    assert coloured("--color=always", KCDSL_COLOR="never")
    assert coloured(KCDSL_COLOR="always", NO_COLOR="1")
    assert coloured(FORCE_COLOR="1")
    assert not coloured("--color", "never", FORCE_COLOR="1")
    (folder / "kcdsl.toml").write_text('color = "always"\n')
    assert coloured()
    assert not coloured(NO_COLOR="1")
    assert not coloured("--color", "never")
    assert cli("--color", "sometimes", "lint", cwd=folder).code == 2
