"""Preconditions: is the difference a drift of numerics, or a mistake in the set-up?

Each has a name and an outcome. Blocking ones make every clause about the model `InvalidEvidence`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kcdsl.diagnostics.model import Refusal
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.measured import Array, Unit
from kcdsl_backends.empirical.metrics.distribution import kl
from kcdsl_backends.empirical.run import Kernel, tensor_digest
from kcdsl_backends.requests import Request

PROBES = 4
"""Requests that are run again for the preconditions."""
_POSITIONS = 64
_CLEAR = 0.25
"""A repair must leave less than this share of the deviation to be named as the cause."""
_SMALLEST = 1e-9


@dataclass(frozen=True, slots=True)
class Probe:
    """Outputs of both kernels, run twice, on one request; float64 [T, V] or [T, D] on the CPU."""

    request: Request
    train: Tensor
    infer: Tensor
    equal: tuple[bool, bool]
    """Whether the second run of train and of infer gave the same bits."""


def probe(request: Request, train: Kernel, infer: Kernel, encoder: bool) -> Probe | None:
    """Run both kernels twice on a request; None where one of them fails."""
    outputs, equal = [], []
    for kernel in (train, infer):
        forward = kernel.hidden if encoder else kernel.logits
        try:
            with torch.no_grad():
                first, second = forward(request.tokens), forward(request.tokens)
        except (RuntimeError, ValueError, Refusal):
            return None
        outputs.append(first[:_POSITIONS].to("cpu", torch.float64))
        equal.append(tensor_digest(first) == tensor_digest(second))
    return Probe(request, outputs[0], outputs[1], (equal[0], equal[1]))


def run_prechecks(
    units: Sequence[Unit],
    probes: Sequence[Probe | None],
    *,
    encoder: bool,
    checkpoints: Mapping[str, str],
    temperature: float,
) -> tuple[Precheck, ...]:
    """Return every precondition with its outcome; `checkpoints` holds weights digests by place."""
    usable = [p for p in probes if p is not None]
    comparable = [p for p in usable if p.train.shape == p.infer.shape]
    found = [
        weights_checksum(checkpoints),
        token_equality(units, usable),
        finite(units),
        self_determinism(usable),
    ]
    if not encoder:
        found += [
            alignment_shift(comparable),
            temperature_fit(comparable, temperature),
            support_check(
                [
                    u.values["importance_ratio"]
                    for u in units
                    if u.failure is None and "importance_ratio" in u.values
                ]
            ),
        ]
    return tuple(found)


def weights_checksum(checkpoints: Mapping[str, str]) -> Precheck:
    """Both kernels must hold the weights of the file."""
    different = len(set(checkpoints.values())) != 1
    detail = ", ".join(f"{place} {digest[:12]}" for place, digest in sorted(checkpoints.items()))
    return _outcome("weights_checksum", not different, detail or "no digest", blocking=True)


def token_equality(units: Sequence[Unit], probes: Sequence[Probe]) -> Precheck:
    """Both kernels must answer for the same tokens: one row of output per token, on both sides."""
    for p in probes:
        if p.train.shape != p.infer.shape:
            return _outcome(
                "token_equality",
                False,
                f"{p.request.key}: outputs of shapes {tuple(p.train.shape)} and "
                f"{tuple(p.infer.shape)}",
                blocking=True,
            )
    tokens = sum(unit.tokens for unit in units)
    return _outcome(
        "token_equality", bool(units), f"{tokens} tokens of {len(units)} requests", blocking=True
    )


def finite(units: Sequence[Unit]) -> Precheck:
    """No request may have failed or given NaN or infinity."""
    failed = [unit for unit in units if unit.failure is not None]
    if not failed:
        return _outcome("finite", bool(units), f"{len(units)} requests", 0.0)
    share = len(failed) / len(units)
    detail = f"{len(failed)} of {len(units)} requests; {failed[0].key}: {failed[0].failure}"
    return _outcome("finite", False, detail, share)


def self_determinism(probes: Sequence[Probe]) -> Precheck:
    """A kernel run twice should give the same bits; otherwise its noise is part of every drift."""
    if not probes:
        return Precheck("self_determinism", "not_applicable", "no request could be run")
    sides = {side: sum(not p.equal[i] for p in probes) for i, side in enumerate(("train", "infer"))}
    rate = sum(sides.values()) / (2 * len(probes))
    detail = ", ".join(f"{side} {n} of {len(probes)} differ" for side, n in sides.items())
    return _outcome("self_determinism", rate == 0, detail, rate)


def alignment_shift(probes: Sequence[Probe]) -> Precheck:
    """Is the inference output off by one position? Compare ln p of the next tokens at -1, 0, +1."""
    name = "alignment_shift"
    gaps = {shift: _gap(probes, shift) for shift in (-1, 0, 1)}
    here = gaps[0]
    if not math.isfinite(here):
        return Precheck(name, "not_applicable", "no request with four tokens")
    best = min(gaps, key=lambda shift: gaps[shift])
    late = best != 0 and here > _SMALLEST and gaps[best] < _CLEAR * here
    detail = ", ".join(f"{shift:+d}: {gap:.3g}" for shift, gap in gaps.items())
    return _outcome(name, not late, f"mean |difference of ln p| at shift {detail}", float(best))


def _gap(probes: Sequence[Probe], shift: int) -> float:
    gaps: list[Tensor] = []
    for p in probes:
        length = p.train.shape[0]
        if length < 4:
            continue
        labels = torch.tensor(p.request.tokens[1 : length + 1])
        rows = torch.arange(1, min(length, labels.numel()) - 1)
        train = torch.log_softmax(p.train, -1)[rows, labels[rows]]
        infer = torch.log_softmax(p.infer, -1)[rows + shift, labels[rows]]
        gaps.append((train - infer).abs())
    joined = torch.cat(gaps) if gaps else torch.empty(0)
    return float(joined.mean()) if joined.numel() else math.nan


def temperature_fit(probes: Sequence[Probe], temperature: float) -> Precheck:
    """Does one temperature on the training logits explain the drift? Report the best T."""
    name = "temperature_fit"
    if not probes:
        return Precheck(name, "not_applicable", "no request could be run")
    train = torch.cat([p.train for p in probes])
    target = torch.log_softmax(torch.cat([p.infer for p in probes]) / temperature, -1)

    def loss(log_t: float) -> float:
        scaled = torch.log_softmax(train / (temperature * math.exp(log_t)), -1)
        return float(kl(scaled, target).mean())

    here = loss(0.0)
    if not math.isfinite(here):
        return Precheck(name, "not_applicable", "the drift is not finite")
    best = _minimise(loss, -1.5, 1.5)
    fitted, after = math.exp(best), loss(best)
    off = here > _SMALLEST and abs(best) > 0.02 and after < _CLEAR * here
    detail = f"T = {fitted:.3f} leaves {after:.3g} of {here:.3g} nats"
    return _outcome(name, not off, detail, fitted)


def _minimise(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimiser of a unimodal function on [low, high] by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(32):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2


def support_check(ratios: Sequence[Array]) -> Precheck:
    """Sampled ratios must average to one; otherwise q misses mass of p, or the sides are swapped.

    The tolerance is five standard errors over requests.
    """
    name = "support_check"
    if not ratios:
        return Precheck(name, "not_applicable", "no clause reads sampled tokens")
    sums = np.array([math.fsum(r) for r in ratios])
    sizes = np.array([float(r.size) for r in ratios])
    mean = math.fsum(sums) / math.fsum(sizes)
    residual = sums - mean * sizes
    error = math.sqrt(math.fsum(residual**2)) / math.fsum(sizes)
    good = math.isfinite(mean) and abs(mean - 1) <= 5 * error + 1e-6
    return _outcome(name, good, f"mean w = {mean:.9g}, standard error {error:.2g}", mean)


def blocking(prechecks: Sequence[Precheck]) -> str | None:
    """Return the reason of the first failed precondition that blocks every clause."""
    for check in prechecks:
        if check.blocking and check.outcome == "failed":
            return f"precheck {check.name} failed: {check.detail}"
    return None


def _outcome(
    name: str, good: bool, detail: str, value: float | None = None, *, blocking: bool = False
) -> Precheck:
    return Precheck(name, "passed" if good else "failed", detail, value, blocking)


def watch_weights(kernels: Mapping[str, Kernel]) -> Callable[[], Mapping[str, str]]:
    """Return a function that names the kernels whose weights are other than they are now."""
    readers = {s: r for s, k in kernels.items() if (r := getattr(k, "weights_digest", None))}
    before = {side: read() for side, read in readers.items()}
    return lambda: {s: "changed" for s, read in readers.items() if read() != before[s]}


def weights_digests(train: Kernel, infer: Kernel, loaded: str, now: str) -> dict[str, str]:
    """Return the digests that must agree: of the weights as loaded, of the file as it is now, and
    of the weights each kernel was built from."""
    found = {"loaded": loaded, "file": now}
    for side, kernel in (("train", train), ("infer", infer)):
        model = getattr(kernel, "model", None)
        if model is not None:
            found[side] = model.checkpoint.sha256
    return found
