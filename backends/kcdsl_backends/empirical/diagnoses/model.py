"""What a diagnosis is: a mistake of the set-up or a property of a kernel, found on probes.

A *repair* undoes one mistake, such as a shift by one position. It is the named cause of a deviation
where it leaves less than `CLEAR` of it, and less than every other repair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kcdsl.verdict.report import Precheck
from kcdsl_backends.requests import Request

PROBES = 4
"""Requests that are run again for the preconditions."""
POSITIONS = 64
"""Positions of a request that diagnoses read."""
CLEAR = 0.25
"""A repair must leave less than this share of the deviation to be named as the cause."""
BEYOND = 4.0
"""How many times the rounding noise of its claims an error must be to have another cause."""
SMALLEST = 1e-9
"""Deviations (total variation) below this have no cause to look for."""

BLOCKING = frozenset(
    {
        "weights_checksum",
        "token_equality",
        "alignment_shift",
        "temperature_fit",
        "truncation_mass",
        "mask_provenance",
        "swapped_sides",
        "stale_weights",
    }
)
"""Mistakes of the set-up: what was measured then is no drift of numerics. `finite` blocks too where
a kernel returned numbers that are not finite."""

SIDES = ("train", "infer")
Forward = Callable[[Any], Tensor]
"""Token ids [T] or [B, T] to outputs [T, V] or [B, T, V]."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Outputs of both kernels, run twice, on one request; float64 [T, V] or [T, D] on the CPU."""

    request: Request
    train: Tensor
    infer: Tensor
    equal: tuple[bool, bool]
    """Whether the second run of train and of infer gave the same bits."""
    wobble: tuple[float, float] = (0.0, 0.0)
    """How far the second run of each lies from the first (`distances.size`)."""
    gold: Tensor | None = None
    """What the model is without roundings; None where no reference could be run."""
    claimed: tuple[Tensor, Tensor] | None = None
    """What plain programs in the claimed formats of train and infer give."""

    def side(self, index: int) -> Tensor:
        """Return the output of train (0) or infer (1)."""
        return (self.train, self.infer)[index]


@dataclass(frozen=True, slots=True)
class Repair:
    """What undoing one mistake leaves: `left` is a share of the deviation, None where the repair
    does not apply."""

    name: str
    detail: str
    left: float | None
    value: float | None = None
    seen: bool = False
    """Whether the mistake is seen by itself, whatever it explains of the deviation."""

    @property
    def explains(self) -> bool:
        """Say whether little enough is left."""
        return self.left is not None and self.left < CLEAR


def outcome(
    name: str, good: bool, detail: str, value: float | None = None, *, blocking: bool | None = None
) -> Precheck:
    """Return a precondition that passed or failed."""
    blocks = name in BLOCKING if blocking is None else blocking
    return Precheck(name, "passed" if good else "failed", detail, value, blocks)


def not_applicable(name: str, why: str) -> Precheck:
    """Return a precondition that could not be looked at."""
    return Precheck(name, "not_applicable", why)


def cause_of(repairs: Sequence[Repair]) -> Repair | None:
    """Return the repair that leaves least of the deviation, None where none explains it."""
    found = [r for r in repairs if r.explains]
    return min(found, key=lambda r: 0.0 if r.left is None else r.left, default=None)


def blocking(prechecks: Sequence[Precheck]) -> str | None:
    """Return the reason of the first failed precondition that blocks every clause."""
    for check in prechecks:
        if check.blocking and check.outcome == "failed":
            return f"precheck {check.name} failed: {check.detail}"
    return None
