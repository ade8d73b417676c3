"""Hugging Face transformers as a kernel: a folder's model, with the weights of the contract."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.terms import KernelRef
from kcdsl.model.architecture import Model
from kcdsl.model.checkpoint import load_checkpoint
from kcdsl.model.files import Artefacts, copy_hashed, folder_files, folder_name, weight_files
from kcdsl.model.hugging_face import HuggingFace, load_folder

ATTENTION = {"composed": "eager", "fused": "sdpa"}
"""What transformers calls the styles of attention."""


def hugging_face(
    ref: KernelRef, model: Model, files: Artefacts, dtype: torch.dtype, style: str
) -> tuple[HuggingFace, Model]:
    """Load the model of a folder in a type; return it, and the model of the contract with it.

    The digest of its checkpoint is that of the contract where it holds the same weights, else its
    own, so that `weights_checksum` sees a difference. Refuse a model with another vocabulary, and
    one that holds other weights than its files. What is loaded is a private copy of the files, made
    while they are hashed, so that nobody can change them in between.
    """
    named = ref.folder
    folder = model.checkpoint.path.parent if named is None else files.base / named
    if named is not None:
        folder = files.admitted(folder, named)
    with TemporaryDirectory(prefix="kcdsl-") as copied:
        for path in (files.admitted(path) for path in folder_files(folder)):
            digest = copy_hashed(path, Path(copied) / path.name)
            files.record(folder_name(ref, path.name), digest)
        encoder = model.encoder_only
        program = load_folder(Path(copied), dtype, ATTENTION[style], folder, encoder_only=encoder)
        tensors = _read(Path(copied))
    if program.limits[0] != model.limits[0]:
        raise refuse(
            codes.HF_FOLDER,
            f"the model of the folder has {program.limits[0]} tokens,"
            f" that of the contract {model.limits[0]}",
            help="name the folder of the contract's model",
        )
    _compare(program, tensors, dtype)
    same = tensors.keys() == model.checkpoint.tensors.keys() and all(
        torch.equal(tensor, model.checkpoint.tensors[key]) for key, tensor in tensors.items()
    )
    digest = model.checkpoint.sha256 if same else _digest(tensors)
    checkpoint = replace(model.checkpoint, sha256=digest)
    return program, replace(model, module=program, checkpoint=checkpoint, built_in=False)


def _read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the files of a folder, as float32."""
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        found.update(load_checkpoint(path).tensors)
    return found


def _compare(program: HuggingFace, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Refuse where a weight of the program is another one than that of this name in the files."""
    held = program.program.state_dict()
    for name, tensor in tensors.items():
        own = held.get(name)
        if own is not None and not torch.equal(own, tensor.to(dtype).to(own.dtype)):
            raise refuse(
                codes.HF_FOLDER,
                f"transformers holds another weight {name} than the files of the folder",
                help="give a folder whose weights are plain: float32, bfloat16 or float16",
            )


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the sha256 over names, shapes and float32 values."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        found.update(f"{name} {tuple(tensor.shape)} ".encode())
        found.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
