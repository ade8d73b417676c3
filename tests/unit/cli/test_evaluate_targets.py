"""`kcdsl evaluate` checks its output targets before it measures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from kcdsl.api import evaluation

CONTRACT = """\
kcdsl: 1
contract: targets
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: requests.jsonl
slices: {all: {}}
clauses:
  N-KL: {require: p99(kl) <= 1, slices: [all], level: L2}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a contract whose kernels must not be loaded."""

    def measuring() -> Any:
        raise AssertionError("something is measured")

    monkeypatch.setattr(evaluation, "measuring_backend", measuring)
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--format", "junit=absent/x.xml"), "there is no folder absent"),
        (("--format", "html=."), "is a folder, not a file"),
        (("--format", "sarif=a", "--format", "junit=a"), "a is to be written twice"),
        (("--format", "sarif=a", "--format", "junit=./a"), "a is to be written twice"),
        (("--format", "json=out/report.json"), "out/report.json is to be written twice"),
        (("--format", "html=out/report.html"), "out/report.html is to be written twice"),
        (
            ("-o", "new", "--format", "junit=new/trace.parquet"),
            "new/trace.parquet is to be written twice",
        ),
        (("--format", "json", "--format", "github"), "two formats for standard output"),
        (("--format", "text", "--format", "github"), "two formats for standard output"),
    ],
)
def test_unwritable_targets_are_refused_before_measuring(
    cli: Any, folder: Path, words: tuple[str, ...], said: str
) -> None:
    ran = cli("evaluate", *words, cwd=folder)
    assert ran.code == 2
    assert said in ran.stderr
    assert os.listdir(folder) == ["contract.yaml"]


@pytest.mark.parametrize(
    "words",
    [
        ("--format", "junit=out/x.xml"),
        ("--format", "junit=/dev/null", "--format", "sarif=/dev/null"),
        ("--format", "json"),
    ],
)
def test_writable_targets_are_accepted(cli: Any, folder: Path, words: tuple[str, ...]) -> None:
    """The evaluation creates `out`; a device may be named more than once."""
    assert "something is measured" in cli("evaluate", *words, cwd=folder).stderr
