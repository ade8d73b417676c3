"""Headers of checkpoints: files, folders and shards, without reading weights or importing torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import CHECKPOINT_FORMAT, FILE_MISSING
from kcdsl.model.checkpoint.headers import INDEX, SINGLE, read_headers

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
HELD: dict[str, dict[str, tuple[int, ...]]] = {ONE: {"a": (2, 3)}, TWO: {"b": (4,), "c": (1,)}}


def sharded(folder: Path, held: Mapping[str, Mapping[str, tuple[int, ...]]] = HELD) -> Path:
    """Write shards and their index; return the folder."""
    folder.mkdir(exist_ok=True)
    for name, tensors in held.items():
        made = {key: torch.ones(shape, dtype=torch.bfloat16) for key, shape in tensors.items()}
        save_file(made, folder / name)
    index = {key: name for name, tensors in held.items() for key in tensors}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def test_folder_index_and_single_file_have_equal_headers(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    by_folder, by_index = read_headers(folder), read_headers(folder / INDEX)
    assert by_folder == by_index
    told = {key: (one.kind, one.shape) for key, one in by_folder.tensors.items()}
    assert told == {"a": ("BF16", (2, 3)), "b": ("BF16", (4,)), "c": ("BF16", (1,))}
    assert by_folder.places == {"a": folder / ONE, "b": folder / TWO, "c": folder / TWO}
    single = tmp_path / "s"
    single.mkdir()
    save_file({"a": torch.ones(2, 3)}, single / SINGLE)
    assert read_headers(single) == read_headers(single / SINGLE)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"d": ONE}, "is not there"),
        ({"b": ONE}, "lies in"),
        ({"c": None}, "is not in the index"),
        ({"a": "../" + ONE}, "no name in its folder"),
        ({"a": "/" + ONE}, "no name in its folder"),
        ({"a": "..\\" + ONE}, "no name in its folder"),
        ({"a": "pytorch_model.bin"}, "no name in its folder"),
        ({"a": 1}, "no name in its folder"),
    ],
)
def test_inexact_index_is_refused(tmp_path: Path, change: dict[str, object], word: str) -> None:
    folder = sharded(tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= change
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v is not None}
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(Refusal, match=word) as refused:
        read_headers(folder)
    assert refused.value.diagnostics[0].code == CHECKPOINT_FORMAT


def test_a_gap_between_tensors_is_refused(tmp_path: Path) -> None:
    one = {"dtype": "U8", "shape": [1]}
    header = json.dumps({"a": {**one, "data_offsets": [1, 2]}}).encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(Refusal, match="a does not begin where the tensor before it ends"):
        read_headers(tmp_path / SINGLE)


def test_an_index_of_too_many_files_opens_none(tmp_path: Path) -> None:
    named = {str(n): f"{n}.safetensors" for n in range(10_001)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": named}))
    with pytest.raises(Refusal, match="it names more than"):
        read_headers(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 12\n"
    (tmp_path / SINGLE).write_text(pointer)
    with pytest.raises(Refusal) as refused:
        read_headers(tmp_path / SINGLE)
    (found,) = refused.value.diagnostics
    assert "it is a pointer of Git LFS" in found.message
    assert found.help == "fetch the weights: git lfs pull"


def test_duplicate_tensors_and_index_names_are_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m", {ONE: {"a": (2,), "x": (1,)}, TWO: {"a": (2,), "b": (1,)}})
    with pytest.raises(Refusal, match="lies in"):
        read_headers(folder)
    text = f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}'
    (folder / INDEX).write_text(text)
    with pytest.raises(Refusal, match="twice"):
        read_headers(folder)


def test_folder_needs_exactly_one_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"never read")
    with pytest.raises(Refusal, match="pickle") as refused:
        read_headers(tmp_path)
    assert refused.value.diagnostics[0].code == FILE_MISSING
    folder = sharded(tmp_path / "m")
    save_file({"a": torch.ones(1)}, folder / SINGLE)
    with pytest.raises(Refusal, match="both"):
        read_headers(folder)
    (folder / SINGLE).unlink()
    (folder / ONE).unlink()
    with pytest.raises(Refusal, match=ONE):
        read_headers(folder)


def test_a_folder_with_an_adapter_is_refused_and_its_weights_by_name_are_not(
    tmp_path: Path,
) -> None:
    """transformers with PEFT adds the adapter to the weights that it reads of such a folder."""
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE)
    read_headers(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(Refusal, match=r"adapter_config\.json"):
        read_headers(tmp_path)
    assert set(read_headers(tmp_path / SINGLE).tensors) == {"a"}


@pytest.mark.parametrize("name", [INDEX, "consolidated.safetensors", "adapter_model.safetensors"])
def test_a_folder_with_further_weights_is_refused_and_its_weights_by_name_are_not(
    name: str, tmp_path: Path
) -> None:
    """Without an index, servers load every file of safetensors in a folder."""
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE)
    save_file({"a": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(Refusal, match=f"both model.safetensors and {name}"):
        read_headers(tmp_path)
    assert set(read_headers(tmp_path / SINGLE).tensors) == {"a"}


def test_headers_are_read_without_torch_and_numpy() -> None:
    code = "import sys, kcdsl.model.checkpoint.headers; print({'torch', 'numpy'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"
