"""Linears on float8 codes, and the settings of PyTorch that let it compute coarser than it claims.

`torch._scaled_mm` runs with dynamic or static scales of activations. `exact_settings` turns TF32
and reduced-precision reductions off while a kernel runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.formats import CODE_FORMATS
from kcdsl.model.numerics import Numerics

_COARSE_SUMS = (
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)
"""Settings of products on CUDA: half-precision partial sums, half-precision sums."""


@contextmanager
def exact_settings(device: torch.device) -> Iterator[None]:
    """Turn off, for a while, every setting by which PyTorch may compute coarser than it claims.

    TF32 or bfloat16 inside float32 products, half precision between the steps of its math
    attention, and on CUDA half-precision sums, whole or partial. Refuse to run where this thread
    flushes subnormal numbers to zero, which no numerics of float32 admits.
    """
    _refuse_flushing()
    with ExitStack() as stack:
        stack.enter_context(_exact_products())
        fused: Any = torch.backends.cuda
        if fused.fp16_bf16_reduction_math_sdp_allowed():
            fused.allow_fp16_bf16_reduction_math_sdp(False)
            stack.callback(fused.allow_fp16_bf16_reduction_math_sdp, True)
        if device.type == "cuda":
            for name in _COARSE_SUMS:
                if getattr(fused.matmul, name):
                    setattr(fused.matmul, name, False)
                    stack.callback(setattr, fused.matmul, name, True)
        yield


def _refuse_flushing() -> None:
    if bool(torch.full((8,), 2.0**-126, device="cpu").mul(0.5).all()):
        return
    raise refuse(
        codes.KERNEL_NUMERICS,
        "this process flushes subnormal numbers to zero, which numerics do not admit",
        help="call torch.set_flush_denormal(False); a library built with -ffast-math may set it",
    )


@contextmanager
def _exact_products() -> Iterator[None]:
    """Form products of float32 in float32, whichever interface of PyTorch set it otherwise."""
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # the newer interface is in use, and the older one does not read it
        library: Any = torch.backends
        places = (library.cuda.matmul, library.mkldnn.matmul)
        known = [place.fp32_precision for place in places]
        for place in places:
            place.fp32_precision = "ieee"
        try:
            yield
        finally:
            for place, before in zip(places, known, strict=True):
                place.fp32_precision = before
        return
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)


# --- scaled --------------------------------------------------------------------------------------


_FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn}
_ALIGNED = 16
"""What both widths of a weight are multiples of on CUDA (PyTorch, `_scaled_mm_out_cuda`)."""


class ScaledLinear(nn.Module):
    """A linear whose weight is stored as codes, and whose input is quantised as it comes in.

    `names` are those of its weight: by one of them it may have a static scale, by all the same.
    """

    def __init__(
        self, linear: nn.Linear, original: Tensor, numerics: Numerics, names: Sequence[str] = ()
    ) -> None:
        super().__init__()
        rows = numerics.weights.scale == "per_channel"
        static = numerics.activations.scale == "static"
        self.given = _given(numerics, names) if static else None
        self.by_token = rows if static else numerics.activations.scale == "per_token"
        if rows != self.by_token:
            raise refuse(
                codes.KERNEL_NUMERICS,
                "torch._scaled_mm takes scales of rows on both sides, or one scale on each;"
                f" the weights are {numerics.weights.scale},"
                f" the activations {numerics.activations.scale}",
                help="per_channel goes with per_token, per_tensor with per_tensor",
            )
        place, shape = linear.weight.device, tuple(linear.weight.shape)
        if place.type == "cuda" and any(width % _ALIGNED for width in shape):
            raise refuse(
                codes.KERNEL_NUMERICS,
                f"torch._scaled_mm takes widths that {_ALIGNED} divides on CUDA, and"
                f" {_called(names)} has {shape[1]} and {shape[0]}",
                help="use --device cpu, or torch.eager with the preset fp8-weights",
            )
        quantised, scale = quantise(original.to(place, torch.float32), by_row=rows)
        self.codes = nn.Parameter(quantised, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """Return the weight that the codes stand for, float32 [out, in]."""
        return self.codes.to(torch.float32) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, [..., out]."""
        flat, found = quantise(
            x.reshape(-1, x.shape[-1]).to(torch.float32), by_row=self.by_token, given=self.given
        )
        own = self.scale.t() if self.by_token else self.scale
        inside = self.bias if x.dtype != torch.float32 else None  # not taken with float32 results
        y = torch._scaled_mm(
            flat, self.codes.t(), scale_a=found, scale_b=own, bias=inside, out_dtype=x.dtype
        )
        if self.bias is not None and inside is None:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], -1)


def quantise(x: Tensor, *, by_row: bool, given: float | None = None) -> tuple[Tensor, Tensor]:
    """Return the float8 codes of a float32 matrix and its scales, [rows, 1] or a single number.

    `given`: the static scale of all of it.
    """
    largest = CODE_FORMATS["fp8_e4m3"].divisor
    sizes = x.abs()
    scale = (sizes.amax(dim=1, keepdim=True) if by_row else sizes.amax()) / largest
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    if given is not None:
        scale = torch.full_like(scale, given)
    return (x / scale).clamp(-largest, largest).to(_FLOAT8["fp8_e4m3"]), scale


def _given(numerics: Numerics, names: Sequence[str]) -> float:
    """Return the static scale of the input of a linear."""
    found = {numerics.activations.calibrated(name) for name in names}
    scales = {one.scales for one in found if one is not None}
    if None in found or len(scales) != 1 or len(next(iter(scales))) != 1:
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"torch._scaled_mm takes one static scale of the input of {_called(names)}",
            help="write one number in activations.input_scale, by all names that a weight has",
        )
    return scales.pop()[0]


def _called(names: Sequence[str]) -> str:
    return " and ".join(name.removesuffix(".weight") for name in names) or "a linear"
