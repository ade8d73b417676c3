"""Both kernels and the reference on the requests that are probed, and the noise of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl.diagnostics.model import Refusal
from kcdsl_backends.empirical.diagnoses.model import (
    BEYOND,
    POSITIONS,
    PROBES,
    SIDES,
    Forward,
    Probe,
    size,
)
from kcdsl_backends.empirical.diagnoses.reference import Reference
from kcdsl_backends.empirical.sources.kernels import Kernel, tensor_digest
from kcdsl_backends.requests import Request


def chosen(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return the requests that are probed: the first of at least 16 tokens, else the longest."""
    return tuple(sorted(requests, key=lambda r: min(r.length, 16), reverse=True)[:PROBES])


def forwards(train: Kernel, infer: Kernel, encoder: bool) -> tuple[Forward, Forward]:
    """Return what is probed of each kernel: its states where the model has no logits."""
    return (train.hidden, infer.hidden) if encoder else (train.logits, infer.logits)


def probe(
    request: Request,
    train: Kernel,
    infer: Kernel,
    encoder: bool,
    reference: Reference | None = None,
) -> Probe | None:
    """Run both kernels twice on a request; None where one of them fails."""
    outputs, equal, wobble = [], [], []
    for forward in forwards(train, infer, encoder):
        try:
            with torch.no_grad():
                first, second = forward(request.tokens), forward(request.tokens)
        except (RuntimeError, ValueError, Refusal):
            return None
        one, two = (o[:POSITIONS].to("cpu", torch.float64, copy=True) for o in (first, second))
        same = tensor_digest(first) == tensor_digest(second)
        outputs.append(one)
        equal.append(same)
        wobble.append(0.0 if same or one.shape != two.shape else size(one, two, states=encoder))
    known = None if reference is None else _reference(request, reference)
    gold, claimed = (None, None) if known is None else (known[0], (known[1], known[2]))
    if gold is not None and gold.shape != outputs[0].shape:
        gold, claimed = None, None
    return Probe(
        request,
        outputs[0],
        outputs[1],
        (equal[0], equal[1]),
        (wobble[0], wobble[1]),
        gold,
        claimed,
    )


def _reference(request: Request, reference: Reference) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the output without roundings and as each side claims; None where one cannot run."""
    try:
        gold, train, infer = (
            reference.run(claim, request.tokens)
            for claim in (None, reference.train, reference.infer)
        )
    except (Exception, SystemExit):  # a user's module may raise anything in another format
        return None
    return gold, train, infer


# --- errors beside what the claimed numerics allow ------------------------------------------------

_FLOOR = 64 * 2.0**-53
"""Error, relative to the size of the outputs, that float64 itself makes."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Distances from the run without roundings, of train and of infer (`size`).

    `expected` is that of a plain program in the claimed formats, plus what two runs of the kernel
    differ by.
    """

    observed: tuple[float, float]
    expected: tuple[float, float]

    def ratio(self, side: int) -> float:
        """Return how many times what its claim allows a side errs."""
        return self.observed[side] / self.expected[side]

    @property
    def beyond(self) -> tuple[int, ...]:
        """Return the sides that err more than their claims explain."""
        return tuple(side for side in (0, 1) if self.ratio(side) > BEYOND)

    def shown(self, side: int) -> str:
        """Return the figures of a side in words."""
        return (
            f"{SIDES[side]} lies {self.observed[side]:.2g} from the model without roundings, "
            f"{self.ratio(side):.2g} times what its numerics explain"
        )


def noise_of(probes: Sequence[Probe], *, states: bool) -> Noise | None:
    """Return the noise of both kernels; None without a reference run."""
    known = [(p, p.gold, p.claimed) for p in probes if p.gold is not None and p.claimed is not None]
    finite = [(p, g, c) for p, g, c in known if all_finite(p.train, p.infer, g, *c)]
    if not finite:
        return None
    observed, expected = [], []
    for side in (0, 1):
        seen = [size(g, p.side(side), states=states) for p, g, _ in finite]
        allowed = [
            size(g, c[side], states=states) + p.wobble[side] + floor(g) for p, g, c in finite
        ]
        observed.append(sum(seen) / len(finite))
        expected.append(sum(allowed) / len(finite))
    return Noise((observed[0], observed[1]), (expected[0], expected[1]))


def floor(gold: Tensor) -> float:
    """Return the error that a run in float64 may have."""
    return _FLOOR * float(gold.square().mean().sqrt()) + 1e-300


def all_finite(*outputs: Tensor) -> bool:
    """Say whether every number of every output is finite."""
    return all(bool(torch.isfinite(output).all()) for output in outputs)
