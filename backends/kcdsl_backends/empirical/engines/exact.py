"""Settings of PyTorch by which it may compute coarser than it claims: off while a kernel runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kcdsl.diagnostics import codes, refuse

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
