"""Reading commands end quickly on hostile files, with a diagnostic.

Processor time is measured, which other programs do not affect; the limit is far above what the
commands need, and earlier versions took minutes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.diagnostics.model import FINDINGS
from tests.support import foreign, hostile
from tests.support.configurations import DECODER_TEXT

if TYPE_CHECKING:
    from tests.conftest import Cli
    from tests.support.commands import Ran

SECONDS = 20.0
"""The time limit of one command; each takes less than five seconds on a machine of two cores."""
LONGEST = 2_000_000
"""The largest number of characters that one command may print."""

Soon = Callable[..., "Ran"]


@pytest.fixture
def soon(cli: Cli, tmp_path: Path) -> Soon:
    """Return a function that runs a command in a folder with a contract, within a time limit."""
    (tmp_path / "contract.yaml").write_text(hostile.HEAD + hostile.CLAUSE)
    (tmp_path / "config.json").write_text(DECODER_TEXT)
    (tmp_path / "model.safetensors").write_bytes(hostile.CHECKPOINT)
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "tokens": [0, 1]}\n')
    assert cli("keygen", "-o", "own.key", cwd=tmp_path).code == 0

    def run(*words: str) -> Ran:
        begun = time.process_time()
        ran = cli(*words, cwd=tmp_path)
        took = time.process_time() - begun
        assert took < SECONDS
        assert len(ran.stdout) + len(ran.stderr) < LONGEST
        assert "KC999" not in ran.stderr + ran.stdout
        assert "Traceback" not in ran.stderr
        return ran

    return run


@pytest.mark.full
@pytest.mark.parametrize("name", hostile.CONTRACTS)
def test_hostile_contracts_end_quickly(soon: Soon, tmp_path: Path, name: str) -> None:
    (tmp_path / "contract.yaml").write_text(hostile.CONTRACTS[name])
    ran = soon("lint", "--format", "concise", "contract.yaml")
    assert ran.code in (1, 2), ran.stdout
    assert "error[KC" in ran.stdout + ran.stderr
    assert len(ran.stdout.splitlines()) <= FINDINGS + 1
    assert soon("compile", "contract.yaml").code == 2
    assert soon("fmt", "--check", "contract.yaml").code != 0
    assert soon("diff", "contract.yaml", "contract.yaml").code == 2
    assert soon("lint", "--diff", "contract.yaml").code in (0, 1, 2)
    assert soon("lint", "--fix", "--unsafe-fixes", "contract.yaml").code in (1, 2)


@pytest.mark.parametrize("words", hostile.READERS, ids=" ".join)
@pytest.mark.parametrize("name", hostile.ZEROS)
def test_nul_bytes_in_contracts_are_refused(
    soon: Soon, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "contract.yaml").write_text(hostile.ZEROS[name])
    (tmp_path / "lib.yaml").write_text(hostile.LIBRARY)
    ran = soon(*words)
    assert ran.code != 0
    said = ran.stdout + ran.stderr
    assert "error[KC001]: the character U+0000 may not occur" in said
    assert "contract.yaml:" in said
    assert "= help: remove its escape" in said
    assert (tmp_path / "contract.yaml").read_text() == hostile.ZEROS[name]


@pytest.mark.parametrize("words", hostile.READERS_OF_CONFIGURATIONS, ids=" ".join)
@pytest.mark.parametrize("name", hostile.ZEROS_OF_CONFIGURATIONS)
def test_nul_bytes_in_configurations_are_refused(
    soon: Soon, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "kcdsl.toml").write_text(hostile.ZEROS_OF_CONFIGURATIONS[name])
    ran = soon(*words)
    assert ran.code != 0
    said = ran.stdout + ran.stderr
    assert f"error[KC605]: `{name}` cannot be" in said
    assert "kcdsl.toml:1:" in said
    assert "U+0000" in said


@pytest.mark.parametrize(
    "words",
    [
        ("check", "j.json", "--checkpoint", "a\0b", "--key", "own.key.pub"),
        ("keygen", "-o", "a\0b"),
        ("evaluate", "contract.yaml", "-o", "a\0b"),
        ("config", "show", "a\0b"),
        ("lint", "--format", "json=a\0b", "contract.yaml"),
    ],
    ids=" ".join,
)
def test_nul_bytes_in_arguments_are_refused(
    soon: Soon, tmp_path: Path, words: tuple[str, ...]
) -> None:
    (tmp_path / "j.json").write_text("{}")
    ran = soon(*words)
    assert ran.code == 2
    assert "zero byte" in ran.stderr


@pytest.mark.full
def test_nul_bytes_in_addresses_are_refused(tmp_path: Path) -> None:
    text = hostile.HEAD + hostile.CLAUSE
    uri = (tmp_path / "contract.yaml").as_uri().replace("contract", "con%00tract")
    assert foreign.with_server(tmp_path, text, uri).errors == ()


@pytest.mark.full
@pytest.mark.parametrize("name", ["one key", "parentheses", "imports", "comments that accept"])
def test_hostile_contracts_in_the_language_server(tmp_path: Path, name: str) -> None:
    talk = foreign.with_server(tmp_path, hostile.CONTRACTS[name])
    assert talk.errors == ()
    assert max(talk.seconds.values()) < SECONDS


@pytest.mark.parametrize("name", hostile.CONFIGURATIONS)
def test_hostile_configurations_end_quickly(soon: Soon, tmp_path: Path, name: str) -> None:
    (tmp_path / "kcdsl.toml").write_text(hostile.CONFIGURATIONS[name])
    for words in (("lint", "contract.yaml"), ("config", "show"), ("plan",)):
        ran = soon(*words)
        assert ran.code in (1, 2)
        assert "error[KC" in ran.stdout + ran.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", hostile.MODULES)
def test_hostile_metric_modules_end_quickly(soon: Soon, tmp_path: Path, name: str) -> None:
    (tmp_path / "kcdsl.toml").write_text('metrics = ["own.py"]')
    (tmp_path / "own.py").write_text(hostile.MODULES[name])
    assert soon("lint", "contract.yaml").code in (0, 1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", hostile.DATA)
def test_hostile_data_files_end_quickly(soon: Soon, tmp_path: Path, name: str) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(hostile.DATA[name])
    ran = soon("plan")
    assert ran.code == 2
    assert "error[KC" in ran.stderr


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", hostile.DOCUMENTS)
def test_hostile_documents_end_quickly(soon: Soon, tmp_path: Path, name: str) -> None:
    (tmp_path / "j.json").write_bytes(hostile.DOCUMENTS[name])
    check = ("check", "j.json", "--contract", "contract.yaml", "--key", "own.key.pub")
    for words in (
        check,
        ("report", "j.json"),
        ("sign", "j.json"),
        ("plan", "--prior", "j.json"),
        ("replay", "j.json"),
        ("diff", "j.json", "contract.yaml"),
        ("transfer", "j.json", "model.safetensors", "--key", "own.key.pub"),
    ):
        assert soon(*words).code in (2, 4)


@pytest.mark.parametrize("name", hostile.CHECKPOINTS)
def test_hostile_checkpoints_end_quickly(soon: Soon, tmp_path: Path, name: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(hostile.CHECKPOINTS[name])
    (tmp_path / "j.json").write_text("{}")
    assert soon("compile", "contract.yaml").code == 2
    assert soon("check", "j.json", "--contract", "contract.yaml", "--key", "own.key.pub").code == 4
