"""The kernel adapters: what each computes, so that claims it does not keep are refused."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.formats import FORMATS
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import (
    COMPOSED_EXP_ULPS,
    FAST_EXP_ULPS,
    FUSED_EXP_ULPS,
    SMALLEST_TILE,
    WHOLE_ROW,
)

CPU_FLASH_TILE = 512
"""Keys per tile of the CPU flash kernel (aten/native/cpu/FlashAttentionKernel.cpp)."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """How an adapter evaluates attention.

    `scores` and `probabilities` say where they are held: "compute", or "wide" (at least float32).
    `tile` is the least number of keys per tile on a CPU and on CUDA, `exp_ulps` the error of the
    exponential; `coarse_exp_ulps` that on a CPU where compute is coarser than float32.
    """

    style: str
    backend: str | None
    scores: str
    probabilities: str
    tile: dict[str, int]
    exp_ulps: int
    coarse_exp_ulps: int
    presets: tuple[str, ...]


_FLASH_TILES = {"cpu": CPU_FLASH_TILE, "cuda": SMALLEST_TILE}
_ROW = {"cpu": WHOLE_ROW, "cuda": WHOLE_ROW}
_WEIGHT_PRESETS = ("fp8-weights", "int8-weights")

ADAPTERS: dict[str, Adapter] = {
    "torch.eager": Adapter(
        "composed",
        None,
        "compute",
        "compute",
        _ROW,
        COMPOSED_EXP_ULPS,
        COMPOSED_EXP_ULPS,
        ("torch-eager", *_WEIGHT_PRESETS),
    ),
    "torch.sdpa": Adapter(
        "fused",
        None,
        "wide",
        "compute",
        _FLASH_TILES,
        FUSED_EXP_ULPS,
        FAST_EXP_ULPS,
        ("torch-sdpa-flash",),
    ),
    "torch.sdpa.math": Adapter(
        "fused",
        "math",
        "wide",
        "wide",
        _ROW,
        COMPOSED_EXP_ULPS,
        COMPOSED_EXP_ULPS,
        ("torch-sdpa-math",),
    ),
    "torch.sdpa.flash": Adapter(
        "fused",
        "flash",
        "wide",
        "compute",
        _FLASH_TILES,
        FUSED_EXP_ULPS,
        FAST_EXP_ULPS,
        ("torch-sdpa-flash",),
    ),
    "torch.sdpa.efficient": Adapter(
        "fused",
        "efficient",
        "wide",
        "compute",
        _FLASH_TILES,
        FUSED_EXP_ULPS,
        FUSED_EXP_ULPS,
        ("torch-sdpa-efficient",),
    ),
}


def find_adapter(run: str) -> Adapter:
    """Return the adapter of this name. Refuse an unknown one."""
    if run not in ADAPTERS:
        near = difflib.get_close_matches(run, ADAPTERS, n=1)
        raise refuse(
            codes.UNKNOWN_ADAPTER,
            f"unknown kernel adapter {run!r}; known: {', '.join(ADAPTERS)}",
            help=f"did you mean {near[0]!r}?" if near else None,
        )
    return ADAPTERS[run]


def refuse_unserved(run: str, adapter: Adapter, numerics: Numerics, device: str) -> None:
    """Refuse numerics that the adapter does not keep: a claim finer than what it computes, or of
    another kind. A claim that is coarser is kept if casts are `any`."""
    problems = [p for p in _problems(adapter, numerics, device) if p]
    if problems:
        raise refuse(
            codes.KERNEL_NUMERICS,
            f"{run} does not compute as its numerics ({numerics.preset}) say:"
            f" {'; '.join(problems)}",
            help=f"numerics for {run}: {', '.join(adapter.presets)}" + _others(adapter, numerics),
        )


def _problems(adapter: Adapter, numerics: Numerics, device: str) -> list[str]:
    attention = numerics.attention
    if numerics.activations.format != "none":
        return [
            f"it does not quantise activations ({numerics.activations.format});"
            " no torch adapter does"
        ]
    if numerics.compute not in ("float64", "float32", "float16", "bfloat16"):
        return [f"it does not compute in {numerics.compute}"]
    if attention.style != adapter.style:
        return [f"its attention is {adapter.style}, not {attention.style}"]
    wide = "float64" if numerics.compute == "float64" else "float32"
    real = {"compute": numerics.compute, "wide": wide}
    tile = adapter.tile.get(device, SMALLEST_TILE)
    coarse = FORMATS[numerics.compute].precision < FORMATS["float32"].precision
    exp_ulps = adapter.coarse_exp_ulps if coarse and device == "cpu" else adapter.exp_ulps
    return [
        _coarser("accumulate", numerics.accumulate, wide, numerics),
        _coarser("attention.scores", attention.scores, real[adapter.scores], numerics),
        _coarser(
            "attention.probabilities",
            attention.probabilities,
            real[adapter.probabilities],
            numerics,
        ),
        f"its tiles have {tile} keys, not {attention.tile}"
        if adapter.style == "fused" and attention.tile > tile
        else "",
        f"its exponential is good to {exp_ulps} ulp, not to {attention.exp_ulps}"
        if attention.exp_ulps < exp_ulps
        else "",
    ]


def _coarser(name: str, claimed: str, real: str, numerics: Numerics) -> str:
    """Say what is wrong with a claimed format: finer than the real one, or unequal and exact."""
    finer = FORMATS[claimed].precision > FORMATS[real].precision
    inexact = numerics.casts == "nearest" and claimed != real and name != "accumulate"
    return f"{name} is {real}, not {claimed}" if finer or inexact else ""


def _others(adapter: Adapter, numerics: Numerics) -> str:
    if numerics.attention.style == adapter.style:
        return ""
    able = [name for name, a in ADAPTERS.items() if a.style == numerics.attention.style]
    return f"; adapters with {numerics.attention.style} attention: {', '.join(able)}"
