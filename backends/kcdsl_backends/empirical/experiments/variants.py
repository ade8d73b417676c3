"""E1: the contract's inference kernel with one change: precision, attention or quantisation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kcdsl.ir.terms import KernelRef
from kcdsl.model.presets import resolve
from kcdsl_backends.adapters import ADAPTERS

_WEIGHTS = (
    ("fp8_e4m3", "per_channel"),
    ("fp8_e4m3", "per_tensor"),
    ("int8_full", "per_channel"),
    ("int8_full", "per_tensor"),
    ("int4_full", "per_channel"),
)
_QUANTISED_INPUTS = ("torch.scaled_mm", "torchao.int8_dynamic", "onnxruntime.dynamic_int8")
BASELINE = "as-stated"


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel: its name in the experiment, what was changed ("none" for the contract's own), and
    how."""

    name: str
    factor: str
    change: str
    kernel: KernelRef


def variants(kernel: KernelRef) -> tuple[Variant, ...]:
    """Return the contract's kernel, and every kernel that differs from it in one thing.

    Whether one can run here is found by running it: none is left out.
    """
    own = Variant(BASELINE, "none", "as the contract states it", kernel)
    return own, *_precisions(kernel), *_attentions(kernel), *_quantisations(kernel)


def _precisions(kernel: KernelRef) -> Iterator[Variant]:
    stated = resolve(kernel).compute
    for name in ("float64", "float32", "float16", "bfloat16"):
        if name != stated:
            yield Variant(
                f"compute-{name}",
                "precision",
                f"computes in {name} instead of {stated}",
                _with(kernel, compute=name),
            )


def _attentions(kernel: KernelRef) -> Iterator[Variant]:
    for name, adapter in ADAPTERS.items():
        if name != kernel.run and adapter.engine in ("torch", "compile"):
            yield Variant(
                f"attention-{name.removeprefix('torch.')}",
                "attention",
                f"runs {name} instead of {kernel.run}",
                _with(
                    replace(kernel, run=name), preset=adapter.presets[0], compute=_compute(kernel)
                ),
            )


def _quantisations(kernel: KernelRef) -> Iterator[Variant]:
    for format, scale in _WEIGHTS:
        yield Variant(
            f"weights-{format.replace('_', '-')}-{scale.replace('_', '-')}",
            "quantisation",
            f"stores weights in {format}, scaled {scale}",
            _with(kernel, weights=(("format", format), ("scale", scale))),
        )
    for name in _QUANTISED_INPUTS:
        if name != kernel.run:
            yield Variant(
                f"inputs-{name}",
                "quantisation",
                f"{name}: quantises weights and the inputs of linears",
                _with(replace(kernel, run=name), preset=ADAPTERS[name].presets[0]),
            )


def _compute(kernel: KernelRef) -> str:
    return resolve(kernel).compute


def _with(kernel: KernelRef, **changes: Any) -> KernelRef:
    numerics = dict(kernel.numerics)
    if "preset" in changes:  # another adapter keeps no claim about the first one's attention
        numerics = {}
    numerics.update(changes)
    return replace(kernel, numerics=tuple(sorted(numerics.items())))
