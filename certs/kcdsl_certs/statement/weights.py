"""The files of a checkpoint's weights: one, an index and the shards that it names, or an ONNX file
and its external data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl_certs.encoding.files import open_regular, shown
from kcdsl_certs.encoding.rejected import Rejected

if TYPE_CHECKING:
    from kcdsl_certs.encoding.onnx import OnnxTensor

ONNX = ".onnx"
"""The suffix of ONNX files."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
CONFIGURATIONS = ("config.json", "hf_quant_config.json")
"""The configurations of quantised weights."""
LARGEST_INDEX = 1 << 26


def index_of(checkpoint: Path) -> Path | None:
    """Return the index of a sharded checkpoint, given by the index or its folder; else None.

    Raises Rejected `checkpoint/ambiguous` for a folder from which loaders may read other weights
    too: one with a single file of weights and an index or further weights, of which servers load
    all, or with an adapter, which transformers adds.
    """
    if not os.path.isdir(checkpoint):
        return checkpoint if checkpoint.name.endswith(".index.json") else None
    names = set(os.listdir(checkpoint))
    single, several = SINGLE in names, INDEX in names
    others = [n for n in names if n == INDEX or (n.endswith(".safetensors") and n != SINGLE)]
    if single and others:
        detail = f"{shown(checkpoint.name)} has both {SINGLE} and {shown(min(others))}"
        raise Rejected("checkpoint/ambiguous", detail)
    if (single or several) and ADAPTER in names:
        detail = f"{shown(checkpoint.name)} has an adapter ({ADAPTER})"
        raise Rejected("checkpoint/ambiguous", detail)
    return checkpoint / INDEX if several else None


def weight_files(checkpoint: Path) -> tuple[Path, ...] | None:
    """Return the files of the weights of an index, an ONNX file or a folder.

    None for any other file, and for a folder without Hugging Face names: then all of it is the
    checkpoint.

    Raises Rejected as `index_of` and `shards_of` do.
    """
    if checkpoint.name.endswith(ONNX) and not os.path.isdir(checkpoint):
        beside = onnx_files(read_onnx(checkpoint)[1])
        return (checkpoint, *(checkpoint.parent / name for name in beside)) if beside else None
    index = index_of(checkpoint)
    if index is not None:
        return (index, *(index.parent / name for name in sorted(set(shards_of(index).values()))))
    single = checkpoint / SINGLE
    folder = os.path.isdir(checkpoint)
    return (single,) if folder and os.path.lexists(single) else None


def storage_files(checkpoint: Path) -> tuple[Path, ...]:
    """Return the files of a checkpoint with configurations of weight storage: the weights, and the
    configurations beside them.

    Raises Rejected as `weight_files` does, and `checkpoint/empty` for a folder without weights.
    """
    folder = os.path.isdir(checkpoint)
    files = weight_files(checkpoint) or (() if folder else (checkpoint,))
    if not files:
        raise Rejected("checkpoint/empty", f"{shown(checkpoint.name)} holds no weights")
    beside = (files[0].parent / name for name in CONFIGURATIONS)
    return (*files, *(path for path in beside if os.path.lexists(path)))


def read_onnx(path: Path) -> tuple[bytes, dict[str, OnnxTensor]]:
    """Return the bytes of an ONNX file, and its tensors.

    Raises Rejected `checkpoint/format` for other files; OSError where it cannot be read.
    """
    from kcdsl_certs.encoding import onnx

    with open_regular(path, "checkpoint/special-file", links=False) as file:
        data = file.read(onnx.LARGEST + 1)
    if len(data) > onnx.LARGEST:
        raise Rejected("checkpoint/format", f"more than {onnx.LARGEST} bytes")
    return data, onnx.tensors_of(data)


def onnx_files(tensors: Mapping[str, OnnxTensor]) -> tuple[str, ...]:
    """Return the names of the files of external data, sorted.

    Raises Rejected `checkpoint/index` for a name that leads out of the folder of the ONNX file.
    """
    names = sorted({one.location for one in tensors.values() if one.location})
    for name in names:
        plain = name.isprintable() and not any(part in name for part in "/\\:\0")
        if not plain or name in (".", ".."):
            raise Rejected(
                "checkpoint/index", f"{ascii(name)[:80]} is no file beside the ONNX file"
            )
    return tuple(names)


def shards_of(index: Path) -> Mapping[str, str]:
    """Return the name of the shard of every tensor that an index names.

    Raises Rejected `checkpoint/index` for other files, and for a name that leads out of the folder
    of the index; OSError where it cannot be read.
    """
    with open_regular(index, "checkpoint/special-file", links=False) as file:
        return parse_index(file.read(LARGEST_INDEX + 1))


def parse_index(data: bytes) -> Mapping[str, str]:
    """Return the content of an index from its bytes; see `shards_of`."""
    try:
        if len(data) > LARGEST_INDEX:
            raise ValueError(f"more than {LARGEST_INDEX} bytes")
        raw = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise Rejected("checkpoint/index", f"no JSON of an index: {error}") from None
    names = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(names, dict) or not names:
        raise Rejected("checkpoint/index", "it has no weight_map")
    for name in names.values():
        good = isinstance(name, str) and name.isprintable() and name.endswith(".safetensors")
        if not good or any(part in name for part in "/\\:"):
            raise Rejected("checkpoint/index", f"{ascii(name)[:80]} is no file beside the index")
    return names


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice in an object")
    return found
