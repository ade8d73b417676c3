"""Mistakes of set-ups and kernels, planted in real kernels of the tiny language model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.attention import attention_mask
from kcdsl.model.loader import load_model
from kcdsl.model.numerics.weights import linear_weight
from kcdsl.model.presets import resolve
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.kernels import Subject, run_prechecks
from kcdsl_backends.empirical.diagnoses.reference import reference_of
from kcdsl_backends.empirical.sources.kernels import MeasurementPlan
from kcdsl_backends.empirical.sources.kernels.run import run_request
from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel, load_kernel
from kcdsl_backends.requests import Request, load_requests

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "tiny_lm"
Numerics = Mapping[str, Any]
FLOAT32: Numerics = {"compute": "float32"}
BFLOAT16: Numerics = {"compute": "bfloat16"}


@cache
def tiny_model() -> Model:
    """Return the tiny language model."""
    return load_model(
        ModelRef("model.safetensors", config="config.json", architecture="llama"), FOLDER
    )


@cache
def prompts() -> tuple[Request, ...]:
    """Return its 48 prompts."""
    model = tiny_model()
    return load_requests(
        FOLDER / "prompts.jsonl", "prompts.jsonl", lambda text: tuple(text.encode()), model.ids
    ).requests


def kernel(run: str, numerics: Numerics = FLOAT32, model: Model | None = None) -> TorchKernel:
    """Return a kernel of the tiny model, or of another model with the same tensor names."""
    ref = KernelRef(run, tuple(numerics.items()))
    return load_kernel(ref, model or tiny_model(), "cpu")


@dataclass(frozen=True)
class Altered:
    """A kernel whose logits are replaced by a function of them."""

    kernel: TorchKernel
    function: Callable[[TorchKernel, Any], Tensor]

    def logits(self, ids: Any) -> Tensor:
        """Return the altered logits."""
        return self.function(self.kernel, ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)


def after(whole: TorchKernel, change: Callable[[Tensor], Tensor]) -> Altered:
    """Return the kernel with its logits changed."""
    return Altered(whole, lambda own, ids: change(own.logits(ids)))


def top_k(logits: Tensor, k: int) -> Tensor:
    """Return logits with all but the k largest at -inf."""
    return logits.masked_fill(logits < logits.topk(k, -1).values[..., -1:], -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Return logits of the smallest set of likeliest tokens with a mass of at least p."""
    ordered, places = torch.softmax(logits, -1).sort(-1, descending=True)
    gone = ordered.cumsum(-1) - ordered >= p
    return logits.masked_fill(torch.zeros_like(gone).scatter(-1, places, gone), -torch.inf)


@dataclass(frozen=True)
class Masked:
    """Composed attention with a custom mask, a predicate on (query, key)."""

    sees: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        causal: bool,
        keys: Tensor | None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Return the context; see `AttentionProgram`."""
        assert window is cap is None
        length = q.shape[-2]
        row, column = torch.arange(length)[:, None], torch.arange(length)[None]
        mask = self.sees(row, column) | (row == column)
        assert attention_mask(length, causal, keys, q.device) is not None
        scores = ((q @ k.transpose(-2, -1)) * scale).masked_fill(~mask, -torch.inf)
        return torch.softmax(scores, -1) @ v


def masked(whole: TorchKernel, sees: Callable[[Tensor, Tensor], Tensor]) -> TorchKernel:
    """Return the kernel with another attention mask."""
    module = copy.deepcopy(whole.module)
    for part in module.modules():
        if hasattr(part, "attention_program"):
            part.attention_program = Masked(sees)  # type: ignore[assignment]
    return replace(whole, module=module)


def padded(whole: TorchKernel, count: int, pad: int) -> Altered:
    """Return the kernel with left padding that its attention does not mask."""

    def function(own: TorchKernel, ids: Any) -> Tensor:
        given = torch.as_tensor(ids)
        front = torch.full((*given.shape[:-1], count), pad)
        return own.logits(torch.cat([front, given], -1))[..., count:, :]

    return Altered(whole, function)


def zeroed(whole: TorchKernel, first: int, last: int) -> Altered:
    """Return the kernel with logits of 0 at a range of positions, as under a loss mask."""

    def change(logits: Tensor) -> Tensor:
        changed = logits.clone()
        changed[..., first : last + 1, :] = 0.0
        return changed

    return after(whole, change)


def stepped(size: float, seed: int = 0) -> Model:
    """Return the model after some optimiser steps: each weight moved by `size` of its spread."""
    model = tiny_model()
    module = copy.deepcopy(model.module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in module.parameters():
            spread = tensor.std() if tensor.numel() > 1 else tensor.abs()
            step = torch.randn(tensor.shape, generator=generator).sign()
            tensor.add_(size * spread * step)
    return replace(model, module=module)


def coarser(whole: TorchKernel, part: str, numerics: Numerics) -> TorchKernel:
    """Return the kernel with the linears of one part stored and computed in other numerics."""
    claim = resolve({"preset": "torch-eager", **numerics})
    module = copy.deepcopy(whole.module)
    for name, linear in module.get_submodule(part).named_modules():
        if isinstance(linear, nn.Linear):
            original = whole.model.module.get_submodule(f"{part}.{name}").weight
            assert isinstance(original, Tensor)
            stored = linear_weight(original, claim, name).to(linear.weight.dtype)
            linear.weight = nn.Parameter(stored, requires_grad=False)
    return replace(whole, module=module)


def nondeterministic(whole: TorchKernel, size: float, seed: int = 0) -> Altered:
    """Return the kernel with new noise at every run."""
    generator = torch.Generator().manual_seed(seed)

    def change(logits: Tensor) -> Tensor:
        return logits + size * torch.randn(logits.shape, generator=generator, dtype=logits.dtype)

    return after(whole, change)


def batch_variant(alone: TorchKernel, together: TorchKernel) -> Altered:
    """Return a kernel that runs batches by another kernel."""

    def function(own: TorchKernel, ids: Any) -> Tensor:
        return (together if torch.as_tensor(ids).dim() == 2 else own).logits(ids)

    return Altered(alone, function)


@dataclass(frozen=True)
class Planted:
    """A kernel pair with one mistake, the diagnosis that must name it, and parts of its text."""

    diagnosis: str
    pair: Callable[[], tuple[Any, Any]]
    words: str = ""
    slices: Mapping[str, int] | None = None


def _pair(infer: Callable[[TorchKernel], Any]) -> Callable[[], tuple[Any, Any]]:
    return lambda: (kernel("torch.eager"), infer(kernel("torch.sdpa.flash")))


def _coarse_pair(infer: Callable[[TorchKernel], Any]) -> Callable[[], tuple[Any, Any]]:
    return lambda: (kernel("torch.eager"), infer(kernel("torch.sdpa.flash", BFLOAT16)))


def _claims(runs: TorchKernel, says: TorchKernel) -> TorchKernel:
    return replace(runs, ref=says.ref, numerics=says.numerics)


def _nan(logits: Tensor) -> Tensor:
    changed = logits.clone()
    changed[..., 3, 7] = torch.nan
    return changed


def _swapped() -> tuple[TorchKernel, TorchKernel]:
    fine, coarse = kernel("torch.eager"), kernel("torch.sdpa.flash", BFLOAT16)
    return _claims(coarse, fine), _claims(fine, coarse)


def _coarse_claimed_fine() -> tuple[TorchKernel, TorchKernel]:
    fine, coarse = kernel("torch.eager"), kernel("torch.eager", BFLOAT16)
    return fine, replace(coarse, ref=fine.ref)


_FP8 = {**BFLOAT16, "weights": {"format": "fp8_e4m3", "scale": "per_tensor"}}
_INT8 = {**BFLOAT16, "weights": {"format": "int8", "scale": "per_channel"}}

PLANTED: Mapping[str, Planted] = {
    "off by one": Planted(
        "alignment_shift", _pair(lambda k: after(k, lambda z: torch.roll(z, 1, -2))), "+1: "
    ),
    "one too early": Planted(
        "alignment_shift", _pair(lambda k: after(k, lambda z: torch.roll(z, -1, -2))), "-1: "
    ),
    "temperature": Planted(
        "temperature_fit", _pair(lambda k: after(k, lambda z: z / 0.7)), "T = 0.700"
    ),
    "slight temperature": Planted(
        "temperature_fit", _pair(lambda k: after(k, lambda z: z / 1.01)), "T = 1.010"
    ),
    "temperature on bfloat16": Planted(
        "temperature_fit", _coarse_pair(lambda k: after(k, lambda z: z / 0.7)), "T = 0.70"
    ),
    "top-p": Planted(
        "truncation_mass", _pair(lambda k: after(k, lambda z: top_p(z, 0.95))), "top-p 0.95 "
    ),
    "top-p of train": Planted(
        "truncation_mass",
        lambda: (
            after(kernel("torch.eager"), lambda z: top_p(z, 0.9)),
            kernel("torch.sdpa.flash", BFLOAT16),
        ),
        "top-p 0.9 on the side of train",
    ),
    "top-k": Planted(
        "truncation_mass", _pair(lambda k: after(k, lambda z: top_k(z, 20))), "top-k 20 "
    ),
    "top-k on bfloat16": Planted(
        "truncation_mass", _coarse_pair(lambda k: after(k, lambda z: top_k(z, 20))), "top-k 20 "
    ),
    "no causal mask": Planted(
        "mask_provenance", _pair(lambda k: masked(k, lambda r, c: r >= 0 * c)), "infer sees token"
    ),
    "hidden tokens": Planted(
        "mask_provenance",
        _pair(lambda k: masked(k, lambda r, c: (c <= r) & (c > 3))),
        "4 tokens",
    ),
    "hidden token inside": Planted(
        "mask_provenance",
        _pair(lambda k: masked(k, lambda r, c: (c <= r) & (c != 9))),
        "positions 10 to",
    ),
    "every second token hidden": Planted(
        "mask_provenance",
        _pair(lambda k: masked(k, lambda r, c: (c <= r) & (c % 2 > 0))),
        "infer does not see token 0",
    ),
    "narrow window": Planted(
        "mask_provenance",
        _pair(lambda k: masked(k, lambda r, c: (c <= r) & (c > r - 8))),
        "positions 8 to",
    ),
    "wide window": Planted(
        "mask_provenance",
        _pair(lambda k: masked(k, lambda r, c: (c <= r) & (c > r - 32))),
        "positions 32 to",
    ),
    "padding that is seen": Planted(
        "mask_provenance", _pair(lambda k: padded(k, 7, 0)), "infer attends to padding"
    ),
    "masked span": Planted(
        "mask_provenance", _pair(lambda k: zeroed(k, 5, 15)), "positions 5 to 15"
    ),
    "stale weights": Planted(
        "stale_weights",
        lambda: (
            kernel("torch.eager"),
            kernel("torch.sdpa.flash", FLOAT32, stepped(1e-4)),
        ),
        "infer lies",
    ),
    "stale weights of train": Planted(
        "stale_weights",
        lambda: (
            kernel("torch.eager", FLOAT32, stepped(1e-3)),
            kernel("torch.sdpa.flash", BFLOAT16),
        ),
        "train lies",
    ),
    "not a number": Planted("finite", _pair(lambda k: after(k, _nan)), "not finite"),
    "empty slice": Planted("empty_slice", _pair(lambda k: k), "none", {"all": 8, "none": 0}),
    "swapped sides": Planted("swapped_sides", _swapped),
    "one layer in fp8": Planted(
        "coarser_layer",
        _coarse_pair(lambda k: coarser(k, "model.layers.1.mlp", _FP8)),
        "mlp_1 of infer errs",
    ),
    "one attention in fp8": Planted(
        "coarser_layer",
        _coarse_pair(lambda k: coarser(k, "model.layers.0.self_attn", _FP8)),
        "fp8_e4m3 weights (per_tensor)",
    ),
    "one layer in int8": Planted(
        "coarser_layer",
        _coarse_pair(lambda k: coarser(k, "model.layers.0.mlp", _INT8)),
        "int8 weights (per_channel)",
    ),
    "coarser than claimed": Planted("coarser_layer", _coarse_claimed_fine, "as bfloat16 would"),
    "not deterministic": Planted(
        "self_determinism", _pair(lambda k: nondeterministic(k, 1e-6)), "infer 4 of 4"
    ),
    "dropout": Planted(
        "self_determinism", _pair(lambda k: nondeterministic(k, 0.1)), "infer 4 of 4"
    ),
    "batch variant": Planted(
        "batch_invariance",
        lambda: (
            kernel("torch.eager"),
            batch_variant(kernel("torch.sdpa.flash"), kernel("torch.sdpa.flash", BFLOAT16)),
        ),
        "infer moves",
    ),
}

_CLEAN_PAIRS: tuple[tuple[tuple[str, Numerics], tuple[str, Numerics]], ...] = (
    (("torch.eager", FLOAT32), ("torch.sdpa.flash", FLOAT32)),
    (("torch.eager", FLOAT32), ("torch.eager", FLOAT32)),
    (("torch.eager", FLOAT32), ("torch.sdpa.flash", BFLOAT16)),
    (("torch.eager", BFLOAT16), ("torch.sdpa.math", BFLOAT16)),
    (("torch.eager", {"compute": "float64"}), ("torch.eager", FLOAT32)),
    (("torch.eager", FLOAT32), ("torch.eager", {"compute": "float16"})),
    (("torch.eager", FLOAT32), ("torch.eager", {"preset": "fp8-weights"})),
    (("torch.eager", BFLOAT16), ("torch.eager", {"preset": "int8-weights"})),
    (("torch.eager", FLOAT32), ("torch.scaled_mm", {})),
    (("torch.sdpa.flash", BFLOAT16), ("torch.scaled_mm", {"preset": "fp8-w8a8-per-tensor"})),
)
CLEAN = tuple((pair, start) for pair in _CLEAN_PAIRS for start in (0, 8, 17, 26, 36))
"""Fifty correct runs: pairs of kernels, and the first prompt of a subset of 12."""


def clean_run(run: int) -> tuple[Precheck, ...]:
    """Return the preconditions of a clean run."""
    (train, infer), start = CLEAN[run]
    return diagnose(kernel(*train), kernel(*infer), prompts()[start : start + 12])


def planted_run(name: str, requests: Sequence[Request] | None = None) -> tuple[Precheck, ...]:
    """Return the preconditions of a pair with a planted mistake."""
    bug = PLANTED[name]
    return diagnose(*bug.pair(), requests or prompts()[4:12], bug.slices)


def diagnose(
    train: Any,
    infer: Any,
    requests: Sequence[Request],
    slices: Mapping[str, int] | None = None,
) -> tuple[Precheck, ...]:
    """Run every precondition on a pair of kernels."""
    plan = MeasurementPlan(frozenset({"kl", "importance_ratio"}), 1.0, 0, False)
    runs = {
        r.key: run_request(r, train, infer, plan, lambda request, block: torch.empty(0))
        for r in requests
    }
    model = tiny_model()
    digest = model.checkpoint.sha256
    subject = Subject(
        train,
        infer,
        tuple(requests),
        False,
        1.0,
        {"loaded": digest, "file": digest},
        slices or {"all": len(requests)},
        {key: run.nonfinite for key, run in runs.items()},
        reference_of(model, resolve(train.ref), resolve(infer.ref)),
    )
    return run_prechecks(subject, [run.unit for run in runs.values()])


def named(found: Sequence[Precheck]) -> tuple[str, ...]:
    """Return the names of failed preconditions, without symptoms of another one."""
    failed = tuple(check.name for check in found if check.outcome == "failed")
    causes = tuple(name for name in failed if name != "support_check")
    return causes or failed
