"""Planted symlinks, pipes and `out` settings cannot redirect results.

A folder from elsewhere may contain links and pipes under the names of results, or an `out` that
leads elsewhere; nothing outside of it is written, and no command blocks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcdsl.diagnostics import Refusal
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint
from tests.support.commands import run_here
from tests.support.small_models import write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager, compute: float32}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash, compute: float32}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-MLP: {require: "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 1", level: L2}
  N-KL: {require: p99(kl) <= 1e-3, slices: [all], level: L2}
"""
PRECIOUS = b"alias precious=1\n"
RUNS = {
    "verify": (("verify", "--block", "mlp_0"),),
    "evaluate": (("evaluate",),),
    "attribute": (("attribute", "--no-bounds"),),
    "experiment": (("experiment", "e1", "--only", "attention-sdpa.math"),),
    "sign": (
        ("verify", "--block", "mlp_0"),
        ("sign", "out/verify-mlp_0.statement.json", "--key", "../own.key"),
    ),
}
"""Commands that write results; all but the last of each list are preparations."""
RUN_CHECKPOINTS = {"evaluate": ("out/evaluate.run-checkpoint",)}
"""Files that are removed when a command ends."""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small model and no results."""
    folder = tmp_path_factory.mktemp("honest")
    write_model(folder, rows=[{"id": "a", "text": "hello"}, {"id": "b", "text": "world"}])
    (folder / "contract.yaml").write_text(CONTRACT)
    return folder


@pytest.fixture
def folder(honest: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder, beside a file that must not change."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "profile").write_bytes(PRECIOUS)
    assert run_here("keygen", "-o", "own.key", cwd=tmp_path).code == 0
    return Path(shutil.copytree(honest, tmp_path / "foreign"))


def results(command: str, folder: Path) -> list[Path]:
    """Run a command without links; return the names of its results, and delete them."""
    before = set(files(folder))
    for words in RUNS[command]:
        assert run_here(*words, cwd=folder).code in (0, 3)
        made = set(files(folder)) - before
        if words != RUNS[command][-1]:
            before |= made
    for file in made:
        (folder / file).unlink()
    return [*sorted(made), *map(Path, RUN_CHECKPOINTS.get(command, ()))]


def files(folder: Path) -> Iterator[Path]:
    return (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", RUNS)
def test_symlink_under_the_name_of_a_result_is_not_followed(folder: Path, command: str) -> None:
    planted = results(command, folder)
    assert planted
    home = folder.parent / "home"
    for number, file in enumerate(planted):
        target = home / f"{number}"
        target.write_bytes(PRECIOUS)
        (folder / file).symlink_to(target)
    run_here(*RUNS[command][-1], cwd=folder)
    assert {file.read_bytes() for file in home.iterdir()} == {PRECIOUS}


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", RUNS)
def test_pipe_under_the_name_of_a_result_does_not_block(folder: Path, command: str) -> None:
    for file in results(command, folder):
        os.mkfifo(folder / file)
    assert "KC999" not in run_here(*RUNS[command][-1], cwd=folder).stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize("command", [name for name in RUNS if name != "sign"])
def test_symlinked_results_folder_is_refused(folder: Path, command: str) -> None:
    home = folder.parent / "home"
    (folder / "out").symlink_to(home)
    ran = run_here(*RUNS[command][-1], cwd=folder)
    assert (ran.code, "KC610" in ran.stderr) == (2, True)
    assert [path.name for path in home.iterdir()] == ["profile"]
    named = (*RUNS[command][-1], "-o", "out")
    assert run_here(*named, cwd=folder).code in (0, 3)
    assert len(list(home.iterdir())) > 1


def test_cells_of_an_experiment_stay_in_its_folder(folder: Path) -> None:
    (folder / "out" / "e1").mkdir(parents=True)
    (folder / "out" / "e1" / "cells").symlink_to(folder.parent / "home")
    ran = run_here(*RUNS["experiment"][-1], cwd=folder)
    assert (ran.code, "KC610" in ran.stderr) == (2, True)
    assert [path.name for path in (folder.parent / "home").iterdir()] == ["profile"]


@pytest.mark.parametrize("words", [("fmt",), ("fmt", "."), ("lint", "--fix", "."), ("lint",)])
def test_discovered_contract_must_not_be_a_symlink_elsewhere(
    folder: Path, words: tuple[str, ...]
) -> None:
    outside = folder.parent / "home" / "other.kc.yaml"
    text = CONTRACT.replace("contract: small", "contract:     small")
    outside.write_text(text)
    (folder / "contract.yaml").unlink()
    (folder / "contract.yaml").symlink_to(outside)
    ran = run_here(*words, cwd=folder)
    assert "KC610" in ran.stderr + ran.stdout
    assert ran.code != 0
    assert outside.read_text() == text
    run_here("fmt", "contract.yaml", cwd=folder)
    assert outside.read_text() != text


def test_configuration_cannot_name_a_contract_elsewhere(folder: Path) -> None:
    text = CONTRACT.replace("contract: small", "contract:     small")
    (folder.parent / "home" / "other.kc.yaml").write_text(text)
    (folder / "kcdsl.toml").write_text('contract = "../home/other.kc.yaml"\n')
    ran = run_here("fmt", cwd=folder)
    assert (ran.code, "KC610" in ran.stderr) == (2, True)
    assert (folder.parent / "home" / "other.kc.yaml").read_text() == text


def test_hard_link_is_not_written_through(tmp_path: Path) -> None:
    """An archive may contain one: to its own file, or to a file beside a careless extraction."""
    (tmp_path / "profile").write_bytes(PRECIOUS)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "evaluate.run-checkpoint").hardlink_to(tmp_path / "profile")
    checkpoint = RunCheckpoint(tmp_path / "out" / "evaluate.run-checkpoint")
    with pytest.raises(Refusal, match="cannot be written"):
        checkpoint.open("key")
    assert (tmp_path / "profile").read_bytes() == PRECIOUS
