"""Kernels of libraries: models of transformers, and linear layers of torchao."""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.terms import KernelRef
from kcdsl.model.architecture import Model
from kcdsl.model.architectures.hf import HuggingFace, load_folder
from kcdsl.model.checkpoint import load_checkpoint
from kcdsl.model.files import Artefacts, copy_hashed, folder_files, folder_name, weight_files
from kcdsl.model.numerics import Numerics

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


# --- torchao linears -----------------------------------------------------------------------------


TILE = 128


@cache
def exact_bytes(device: str) -> bool:
    """Say whether products of matrices of signed bytes are exact on a kind of device.

    On processors without VNNI instructions oneDNN adds them in 16 bits, where they saturate.
    """
    ends = torch.tensor([127, -128, 127, -128], dtype=torch.int8).repeat_interleave(16)
    left = torch.stack([ends, -ends.clamp_min(-127), ends.abs().clamp_max(127), ends.roll(16)])
    left = left.repeat(8, 1).to(torch.int8).to(device)
    found = torch._int_mm(left, left[:16].t().contiguous())
    wide = left.to("cpu", torch.float64)
    return bool(torch.equal(found.cpu().to(torch.float64), wide @ wide[:16].T))


def quantise_linear(linear: nn.Linear, original: Tensor, numerics: Numerics) -> None:
    """Give a linear the weight that torchao makes of the float32 original.

    Refuse groups that do not fill its width.
    """
    if numerics.weights.scale == "group_128" and linear.in_features % TILE:
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"torchao takes groups of {TILE} inputs, and a linear has {linear.in_features}",
            help="write `scale: per_channel`",
        )
    with _quietly():
        from torchao.quantization import quantize_

        compute = linear.weight.dtype
        linear.weight = nn.Parameter(original.to(linear.weight.device), requires_grad=False)
        quantize_(linear, _configuration(numerics))
        if compute != torch.float32:
            linear.weight = nn.Parameter(_in(linear.weight, compute), requires_grad=False)


def _in(weight: Any, compute: torch.dtype) -> Tensor:
    """Return a float8 weight whose dequantised form has another type; its scale stays float32."""
    found: Tensor = type(weight)(
        weight.qdata,
        weight.scale,
        block_size=weight.block_size,
        mm_config=weight.mm_config,
        act_quant_kwargs=weight.act_quant_kwargs,
        kernel_preference=weight.kernel_preference,
        dtype=compute,
    )
    return found


def _configuration(numerics: Numerics) -> Any:
    if numerics.weights.format == "int4_full":
        return _four_bits(numerics.weights.scale)
    from torchao.quantization import (
        Float8WeightOnlyConfig,
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        PerRow,
        PerTensor,
    )

    scale = PerRow() if numerics.weights.scale == "per_channel" else PerTensor()
    if numerics.weights.format == "fp8_e4m3":
        return Float8WeightOnlyConfig(granularity=scale, set_inductor_config=False)
    if numerics.activations.format == "none":
        return Int8WeightOnlyConfig(granularity=scale, set_inductor_config=False)
    return Int8DynamicActivationInt8WeightConfig(
        granularity=[PerRow(), scale], set_inductor_config=False
    )


def _four_bits(scale: str) -> Any:
    """Return the configuration of 4-bit weights that every device runs.

    `Int4WeightOnlyConfig` has no kernel for CPUs; this one holds the same codes, one to a byte.
    """
    from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup

    return IntxWeightOnlyConfig(
        weight_dtype=getattr(torch, "int4"),  # noqa: B009
        granularity=PerAxis(0) if scale == "per_channel" else PerGroup(128),
    )


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep torchao's remarks on extensions for other machines from the terminal."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
