"""Diagnoses of weights: digests, other weights, and blocks in coarser formats than claimed.

Blocks run on their inputs in the float32 program, so that earlier blocks add no error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kcdsl.model.numerics import Activations, Numerics, Weights
from kcdsl.model.numerics.formats import FORMATS
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import (
    BEYOND,
    SIDES,
    Probe,
    RoundingNoise,
    all_finite,
    floor,
    not_applicable,
    outcome,
    size,
)
from kcdsl_backends.empirical.diagnoses.reference import Reference
from kcdsl_backends.empirical.sources.kernels import Kernel


def weights_checksum(checkpoints: Mapping[str, str]) -> Precheck:
    """Check that both kernels hold the weights of the file."""
    different = len(set(checkpoints.values())) != 1
    detail = ", ".join(f"{place} {digest[:12]}" for place, digest in sorted(checkpoints.items()))
    return outcome("weights_checksum", not different, detail or "no digest")


def stale_weights(
    noise: RoundingNoise | None, localised: Localised | None, cause: str | None
) -> Precheck:
    """Report other weights if no repair, mask or coarser format explains an error.

    `cause` is the cause named already; `value` is the error of a side as a multiple of its claim.
    """
    name = "stale_weights"
    if noise is None:
        return not_applicable(name, "no reference run")
    worst = max((0, 1), key=noise.ratio)
    deviating = () if localised is None else localised.other_weights
    shown = noise.shown(worst)
    if deviating and localised is not None:
        shown = f"{shown}; {first_of(deviating, localised.blocks)}"
    coarser = localised is not None and bool(localised.coarser)
    other = bool(deviating) or (bool(noise.beyond) and not coarser)
    good = cause is not None or not other
    return outcome(name, good, shown if good else f"other weights: {shown}", noise.ratio(worst))


def coarser_layer(localised: Localised | None, cause: str | None) -> Precheck:
    """Name the first block that computes in a coarser format than its kernel claims."""
    name = "coarser_layer"
    if localised is None:
        return not_applicable(name, "no reference run of blocks")
    coarser = localised.coarser
    if not coarser:
        return outcome(name, True, f"{localised.blocks} blocks compute as claimed", 0.0)
    count = float(len({s.block for s in coarser}))
    good = cause is not None or bool(localised.other_weights)
    return outcome(name, good, first_of(coarser, localised.blocks), count)


def watch_weights(kernels: Mapping[str, Kernel]) -> Callable[[], Mapping[str, str]]:
    """Return a function that names the kernels whose weights have changed since this call."""
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


# --- blocks that err beyond their claims ----------------------------------------------------------

_WEIGHTS = (
    Weights("fp8_e4m3", "none"),
    Weights("fp8_e4m3", "per_tensor"),
    Weights("fp8_e4m3", "per_channel"),
    Weights("fp8_e5m2", "none"),
    Weights("fp8_e5m2", "per_tensor"),
    Weights("int8", "per_tensor"),
    Weights("int8", "per_channel"),
)
_ACTIVATIONS = (
    Activations("none", "none"),
    Activations("fp8_e4m3", "per_token"),
    Activations("fp8_e4m3", "per_tensor"),
    Activations("int8", "per_token"),
)
_COMPUTE = ("bfloat16", "float16")
_SUSPECT = 1.05
"""Smallest multiple of its claimed error at which coarser formats are tried for a block."""
_APART = 0.5
"""Smallest distance from the plain program that counts, in units of the claimed error."""
_LEFT = 0.5
"""Largest distance from the plain program of a coarser format, as a share of that from the claimed
one: activations round differently."""


@dataclass(frozen=True, slots=True)
class DeviatingBlock:
    """A block whose error is `ratio` times that of its claim; `format` is the coarser format that
    explains the error, None if none does."""

    side: int
    block: str
    ratio: float
    format: str | None

    def shown(self) -> str:
        """Return the finding in words."""
        how = f"as {self.format} would" if self.format else "as no coarser format would"
        return (
            f"{self.block} of {SIDES[self.side]} errs {self.ratio:.3g} times what its numerics "
            f"explain, {how}"
        )


@dataclass(frozen=True, slots=True)
class Localised:
    """The blocks with errors beyond their claims, in order of application, and the number
    examined."""

    deviating: tuple[DeviatingBlock, ...]
    blocks: int

    @property
    def coarser(self) -> tuple[DeviatingBlock, ...]:
        """Return the blocks that a coarser format explains."""
        return tuple(s for s in self.deviating if s.format is not None)

    @property
    def other_weights(self) -> tuple[DeviatingBlock, ...]:
        """Return the blocks that no format explains."""
        return tuple(s for s in self.deviating if s.format is None)


def localise(
    probe: Probe, kernels: tuple[Kernel, Kernel], reference: Reference
) -> Localised | None:
    """Return the blocks that err more than their claims explain; None if none runs.

    The limit is `BEYOND` times the noise of the claim, less if a coarser format explains the error.
    """
    names = reference.blocks()
    try:
        inputs = reference.inputs(probe.request.tokens, names)
        examined = {
            name: [
                _deviation(name, inputs[name], side, kernels[side], reference) for side in (0, 1)
            ]
            for name in inputs
        }
    except (Exception, SystemExit):  # a user's module may raise anything in another format
        return None
    compared = [sides for sides in examined.values() if None not in sides]
    found = (
        stray for sides in examined.values() for stray in sides if isinstance(stray, DeviatingBlock)
    )
    return Localised(tuple(found), len(compared)) if compared else None


def whole_model(probe: Probe, sides: Sequence[int], reference: Reference) -> Localised | None:
    """Search a coarser format for the whole kernel; None if none explains its error."""
    if probe.gold is None:
        return None
    gold, tokens, found = probe.gold, probe.request.tokens, []
    for side in sides:
        claim, own = reference.claim(side), probe.side(side)
        plain = reference.run(claim, tokens)
        error, allowed = size(gold, own), size(gold, plain) + floor(gold)
        apart = size(plain, own, states=True)
        best = _best_format(claim, lambda variant: reference.run(variant, tokens), own, apart)
        if best is not None:
            found.append(DeviatingBlock(side, "the whole model", error / allowed, best))
    return Localised(tuple(found), 1) if found else None


def _best_format(
    claim: Numerics, run: Callable[[Numerics], Tensor], own: Tensor, apart: float
) -> str | None:
    """Return the coarser format whose plain program is nearest to the kernel; None if none is much
    nearer than that of its claim, at distance `apart`."""
    best, left = None, _LEFT
    for variant in _coarser(claim):
        try:
            share = size(run(variant), own, states=True) / apart
        except (Exception, SystemExit):  # numerics that this model or block cannot have
            continue
        if share < left:
            best, left = variant, share
    return None if best is None else _words(best)


def _deviation(
    name: str, x: Tensor, side: int, kernel: Kernel, reference: Reference
) -> DeviatingBlock | Literal["as claimed"] | None:
    """Return the deviation of a block beyond its claim, or "as claimed"; None if its values cannot
    be compared."""
    with torch.no_grad():
        own, again = kernel.block(name, x), kernel.block(name, x)
    own = own.to("cpu", torch.float64)
    gold = reference.block(None, name, x)
    claimed = reference.block(reference.claim(side), name, x)
    if not all_finite(own, gold, claimed) or own.shape != gold.shape:
        return None
    wobble = size(own, again.to("cpu", torch.float64), states=True)
    allowed = size(gold, claimed, states=True) + wobble + floor(gold)
    error = size(gold, own, states=True)
    apart = size(claimed, own, states=True)
    if error <= _SUSPECT * allowed or apart <= _APART * allowed:
        return "as claimed"
    best = _best_format(
        reference.claim(side), lambda variant: reference.block(variant, name, x), own, apart
    )
    if best is None and error <= BEYOND * allowed:
        return "as claimed"
    return DeviatingBlock(side, name, error / allowed, best)


def _coarser(claim: Numerics) -> Iterator[Numerics]:
    """Yield numerics with coarser weights, activations, or a coarser compute format."""
    for weights in _WEIGHTS:
        for activations in _ACTIVATIONS:
            yield replace(claim, weights=weights, activations=activations, overrides=())
    for compute in _COMPUTE:
        if FORMATS[compute].precision >= FORMATS[claim.compute].precision:
            continue
        plain = Activations("none", "none")
        yield replace(
            claim, compute=compute, weights=Weights(compute), activations=plain, overrides=()
        )


def _words(numerics: Numerics) -> str:
    if numerics.weights.format == numerics.compute:
        return numerics.compute
    weights, activations = numerics.weights, numerics.activations
    words = f"{weights.format} weights"
    if weights.scale != "none":
        words += f" ({weights.scale})"
    if activations.format != "none":
        words += f" and {activations.format} activations ({activations.scale})"
    return words


def first_of(deviating: Sequence[DeviatingBlock], blocks: int) -> str:
    """Return the first deviating block and the number of such blocks, in words."""
    count = len({s.block for s in deviating})
    return f"{deviating[0].shown()}; {count} of {blocks} blocks stray"
