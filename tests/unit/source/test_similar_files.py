"""A missing path gets the suggestion of a file with a similar name."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl.diagnostics.model import Refusal
from kcdsl.source.files import read_source, similar_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two files and a folder."""
    (tmp_path / "contract.yaml").touch()
    (tmp_path / "prompts.jsonl").touch()
    (tmp_path / "model").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("contrct.yaml", "contract.yaml"),
        ("contract.yml", "contract.yaml"),
        ("promts.jsonl", "prompts.jsonl"),
        ("modl", None),
        ("something else", None),
        ("gone/contract.yaml", None),
        ("contract.yaml/contract.yaml", None),
        ("x" * 300, None),
        ("a\0/contract.yaml", None),
    ],
)
def test_similar_names_are_suggested(folder: Path, name: str, meant: str | None) -> None:
    assert similar_file(folder / name) == meant


def test_missing_file_is_refused_with_a_suggestion(folder: Path) -> None:
    (folder / "model-7b-instruct").mkdir()
    (folder / ".cache").mkdir()
    (folder / "model-00001-of-00005.safetensors").touch()
    with pytest.raises(Refusal) as refused:
        read_source(folder / "contrct.yaml")
    (diagnostic,) = refused.value.diagnostics
    assert diagnostic.code.id == "KC601"
    assert diagnostic.help == f"did you mean {folder / 'contract.yaml'}?"
    for name, help in (
        ("other.yaml", f"in {folder} there is contract.yaml"),
        ("other.onnx", f"no file of {folder} is of this kind; name one that is there"),
        (
            "model-00002-of-00005.safetensors",
            "a part of the checkpoint: fetch it, or save the checkpoint again",
        ),
        ("model-7b", f"in {folder} there is model, model-7b-instruct"),
        ("model-2.5-7b", f"in {folder} there is model, model-7b-instruct"),
        ("model-7b-instrct", f"did you mean {folder / 'model-7b-instruct'}?"),
        ("gone/other.yaml", f"there is no folder {folder / 'gone'} either"),
    ):
        with pytest.raises(Refusal) as refused:
            read_source(folder / name)
        assert refused.value.diagnostics[0].help == help
