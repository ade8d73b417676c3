"""Linears of torchao: `quantize_` with a published configuration, checked weight by weight."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.numerics import Numerics

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
