"""E1: every variant of the inference kernel is evaluated like the contract's own.

A variant is the contract's inference kernel with one change: precision, attention or quantisation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.report import refuse_unknown
from kcdsl.ir.terms import KernelRef, Program
from kcdsl.model.adapters import ADAPTERS
from kcdsl.model.presets import resolve
from kcdsl_backends.empirical.collection import collect
from kcdsl_backends.empirical.collection.context import KernelContext, Progress
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.questions.cells import (
    Prepare,
    cells_in,
    failed_checks,
    manifest,
    pass_record,
)


def run_single(
    prepare: Prepare,
    program: Program,
    base: Path,
    folder: Path,
    *,
    device: str,
    only: Sequence[str] = (),
    seed: int = 0,
    seconds: float = 5.0,
    fresh: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Return the document of E1: a cell for each variant, those that cannot run with the reason.

    Raises Refusal for an unknown variant, and if no variant could run.
    """
    chosen = _chosen(variants(program.infer), only)
    of = manifest(program, base, seed, device=device, seconds=seconds)
    found = []
    with cells_in(folder, of, fresh=fresh, base=base) as cells:
        for done, variant in enumerate(chosen):
            progress("variants", done, len(chosen))
            changed = replace(program, infer=variant.kernel)

            def measure(changed: Program = changed) -> Mapping[str, Any]:
                context = prepare(
                    changed, base, device=device, seed=seed, seconds=seconds, crosscheck=False
                )
                if not isinstance(context, KernelContext):
                    raise refuse(
                        codes.EXPERIMENT,
                        "the contract's kernels are recorded, and a recording has no variants",
                        help="name kernels that run here",
                    )
                return _cell(conclude(collect(context)).to_json())

            found.append(cells.cell(variant.name, _spec(variant), measure))
    progress("variants", len(chosen), len(chosen))
    if not any(cell["status"] == "ran" for cell in found):
        raise refuse(
            codes.EXPERIMENT,
            "not one variant could run",
            notes=tuple(f"{cell['name']}: {cell['reason']}" for cell in found),
            help="the notes say why each variant did not run; `kcdsl evaluate` must run the "
            "contract as it is",
        )
    return {"schema": "kcdsl.experiment/1", "experiment": "e1", "manifest": of, "cells": found}


def _chosen(every: Sequence[Variant], only: Sequence[str]) -> tuple[Variant, ...]:
    named = [*(variant.name for variant in every), *(variant.factor for variant in every)]
    known = tuple(dict.fromkeys(named))
    refuse_unknown(only, known, codes.EXPERIMENT, "there is no variant", "variants")
    return tuple(
        v for v in every if not only or v.name in only or v.factor in only or v.factor == "none"
    )


def _spec(variant: Variant) -> dict[str, Any]:
    return {
        "name": variant.name,
        "factor": variant.factor,
        "change": variant.change,
        "kernel": {"run": variant.kernel.run, "numerics": _plain(variant.kernel.numerics)},
    }


def _plain(pairs: object) -> Any:
    if isinstance(pairs, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in pairs):
        return {str(key): _plain(value) for key, value in pairs}
    return pairs if isinstance(pairs, str | int | bool) or pairs is None else str(pairs)


def _cell(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "verdict": report["verdict"],
        "rows": [pass_record(row, row["context"]["narrow"]) for row in report["clauses"]],
        "slices": report["slices"],
        "failed_checks": failed_checks(report["prechecks"]),
        "deferred": report["deferred"],
        "fingerprint": report["kernels"]["infer"]["digest"],
    }


# --- variants ------------------------------------------------------------------------------------


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
    """A kernel: its name in the experiment, the changed factor ("none" for the contract's own), and
    the change in words."""

    name: str
    factor: str
    change: str
    kernel: KernelRef


def variants(kernel: KernelRef) -> tuple[Variant, ...]:
    """Return the contract's kernel, and every kernel that differs from it in one factor.

    Whether one runs here is found by running it: none is left out.
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
                    replace(kernel, run=name),
                    preset=adapter.presets[0],
                    compute=resolve(kernel).compute,
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


def _with(kernel: KernelRef, **changes: Any) -> KernelRef:
    numerics = dict(kernel.numerics)
    if "preset" in changes:  # another adapter keeps no claim about the first one's attention
        numerics = {}
    numerics.update(changes)
    return replace(kernel, numerics=tuple(sorted(numerics.items())))
