"""What is known about a node: boxes for both kernels and for their difference (section 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kcdsl_backends.interval.box import Box
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.readings import Apart
from kcdsl_backends.interval.rounding import Stored


@dataclass(frozen=True, slots=True)
class State:
    """T holds the training value, I the inference value, D inference minus training.

    `apart` bounds how far a reading of either value may be from the one of which all are versions.
    """

    train: Box
    infer: Box
    drift: Box
    apart: tuple[Apart, Apart] = (None, None)

    @property
    def middle(self) -> Box:
        """Return a box around (training + inference) / 2."""
        return (self.train + self.drift.half()).meet((self.train + self.infer).half())


@dataclass(frozen=True, slots=True)
class SoftmaxState:
    """A softmax before its own rounding, which is kept apart (section 5).

    `exact` holds p* of both kernels and their drift, `variation` [..., rows] bounds the total
    variation of each row, `rounding_train` and `rounding_infer` bound |computed - p*|, `mask` is
    True where a column takes part (None: everywhere). Of any number of columns, `sums` bounds
    Σ|computed - p*| of each row [..., rows, 1] in the training and the inference kernel.
    """

    exact: State
    variation: Tensor
    rounding_train: Tensor
    rounding_infer: Tensor
    mask: Tensor | None
    sums: tuple[Tensor, Tensor] | None = None
    apart: tuple[Apart, Apart] = (None, None)

    def collapse(self) -> State:
        """Return the plain state of the computed probabilities."""
        return State(
            self.exact.train.widen(self.rounding_train),
            self.exact.infer.widen(self.rounding_infer),
            self.exact.drift.widen(self.rounding_train).widen(self.rounding_infer),
            self.apart,
        )


Known = State | SoftmaxState


def settle(
    node: str, train: Box, infer: Box, drift: Box, apart: tuple[Apart, Apart] = (None, None)
) -> State:
    """Intersect the three boxes with what each pair says about the third.

    Raises:
        NoBound: some end is not finite.
        AssertionError: an intersection is empty, which can only come from a defect.
    """
    for box in (train, infer, drift):
        if not bool((torch.isfinite(box.lo) & torch.isfinite(box.hi)).all()):
            raise NoBound(node, "a bound is not finite")
    drift = drift.meet(infer - train)
    infer = infer.meet(train + drift)
    train = train.meet(infer - drift)
    for box in (train, infer, drift):
        if not bool((box.lo <= box.hi).all()):
            raise AssertionError(f"empty intersection at {node}: a rule of the domain is wrong")
    return State(train, infer, drift, apart)


def combine(node: str, exact_drift: Box, train: Stored, infer: Stored) -> State:
    """Return the state of a stored result: D = D_exact + R_infer - R_train."""
    drift = exact_drift + infer.error - train.error
    return settle(node, train.value, infer.value, drift, (train.apart, infer.apart))
