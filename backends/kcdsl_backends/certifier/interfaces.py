"""One link of a chain: bound it on the interface before it, and state what comes out of it.

An interface is what one link hands to the next (docs/chains.md): a region that every training run
stays in, and a box of how far the inference kernel's state may be from it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kcdsl.model.graph import array_digest
from kcdsl_backends.certifier.problems import LEAST_CLAIM, BlockProblem, Claims, Entering
from kcdsl_backends.certifier.proof import ProofBuilder, box_region, encode_array
from kcdsl_backends.drift.affine.interface_ellipsoids import InterfaceEllipsoids
from kcdsl_backends.drift.affine_forms import output_ellipsoids, output_entry
from kcdsl_backends.drift.boxes.box import Box, NoBound, up
from kcdsl_backends.drift.boxes.rounding import Apart, Between, power_of_two
from kcdsl_backends.drift.functionals import drift_bound

NOISE = 2.0**-36
"""More than the roundings of both programs come to, relative to the largest number of a state."""
REACHES = 2.0**-7
"""Of the width of the training value, by how much it is claimed to be wider: without reverse passes
of the output both programs follow it in ways of their own, and little comes of it."""
DIGITS = 4
"""Binary digits of the width of a box to which interfaces are rounded outward."""


@dataclass(frozen=True, slots=True)
class Interface:
    """What a link reads: states [T, D] in centre ± radius, and their drift (None: no drift).

    `centre` None stands for the token ids of the block. `around` holds ellipsoids around the rows
    of the drift, which a reader of the proof derives as well. `readings` bound how far a reading of
    the state may be from the one of which all are versions, in training and inference (None: they
    are all the same).
    """

    centre: Tensor | None
    radius: Tensor
    drift: tuple[Tensor, Tensor] | None = None
    around: InterfaceEllipsoids | None = None
    readings: tuple[Tensor, Tensor] | None = None

    def on(self, device: torch.device) -> Interface:
        """Return it on a device."""
        centre = None if self.centre is None else self.centre.to(device)
        drift = _moved(self.drift, device)
        around = None if self.around is None else self.around.on(device)
        readings = _moved(self.readings, device)
        return Interface(centre, self.radius.to(device), drift, around, readings)

    @property
    def box(self) -> Box | None:
        """Return the box of the drift."""
        return None if self.drift is None else Box(*self.drift)

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of its numbers; token ids are part of the graph."""
        around = () if self.around is None else (self.around.middle, self.around.shapes)
        parts = [self.centre, self.radius, *(self.drift or ()), *around, *(self.readings or ())]
        digests = ["" if p is None else array_digest(p.cpu().numpy()) for p in parts]
        return hashlib.sha256("|".join(digests).encode()).hexdigest()

    def entering(self, *, followed: bool = False) -> Entering:
        """Return how the state that a stage reads may differ; `followed`: another stage reads its
        output."""
        between = Between(self.readings or (None, None), followed)
        return Entering(self.box, self.around, between)

    def region(self) -> dict[str, Any]:
        """Return it as the region of a link in a proof; only with a drift."""
        assert self.centre is not None
        assert self.drift is not None
        stated = {**box_region("hull", self.centre, self.radius), "drift": box_record(*self.drift)}
        stated.update(_readings_record(self.readings))
        return stated if self.around is None else {**stated, "ellipsoids": True}


@dataclass(frozen=True, slots=True)
class StageOutput:
    """Boxes of the training value and of the drift of a link's output, as they are claimed, and
    ellipsoids around the rows of the drift where they were asked for. `readings` are those of an
    interface."""

    train: tuple[Tensor, Tensor]
    drift: tuple[Tensor, Tensor]
    around: InterfaceEllipsoids | None = None
    readings: tuple[Tensor, Tensor] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the output as it stands in a proof."""
        boxes = {"train": box_record(*self.train), "drift": box_record(*self.drift)}
        return {**boxes, **_readings_record(self.readings)}

    @property
    def largest(self) -> float:
        """Return the largest drift."""
        return float(Box(*self.drift).mag().amax())

    def interface(self) -> Interface:
        """Return an interface that it fits into, rounded outward."""
        train, drift = rounded(Box(*self.train)), rounded(Box(*self.drift))
        centre = train.lo / 2 + train.hi / 2
        radius = up(torch.maximum(train.hi - centre, centre - train.lo))
        readings = None
        if self.readings is not None:
            one, two = (rounded(Box(torch.zeros_like(own), own)).hi for own in self.readings)
            readings = one, two
        return Interface(centre, radius, (drift.lo, drift.hi), self.around, readings)

    def fits(self, interface: Interface) -> bool:
        """Say whether it lies in an interface, in exact comparison."""
        if interface.centre is None or interface.drift is None or interface.around is not None:
            return False
        centre, radius = interface.centre, interface.radius
        shape, kind = self.train[0].shape, torch.float64
        if any(p.shape != shape or p.dtype != kind for p in (centre, radius, *interface.drift)):
            return False
        inside = (_exceeds(centre - radius, centre, -radius) <= self.train[0]) & (
            self.train[1] <= -_exceeds(-centre - radius, -centre, -radius)
        )
        if self.readings is not None:
            if interface.readings is None:
                return False
            for own, most in zip(self.readings, interface.readings, strict=True):
                if most.shape != shape or most.dtype != kind or not bool((own <= most).all()):
                    return False
        low, high = interface.drift
        return bool((inside & (low <= self.drift[0]) & (self.drift[1] <= high)).all())


@dataclass(frozen=True, slots=True)
class BoundedStage:
    """What is proved of a link: its largest drift, its output, and what the proof states."""

    claim: float
    output: StageOutput
    stated: Mapping[str, Any]


def bound_stage(
    name: str,
    problem: BlockProblem,
    interface: Interface,
    builder: ProofBuilder,
    claims: Claims,
    *,
    ellipsoids: bool = False,
) -> BoundedStage:
    """Bound the output of a link by every domain at once.

    Args:
        name: what the stage is called in the proof.
        problem: the stage, of which another one reads the output.
        interface: what it reads.
        builder: an empty proof about the largest drift.
        claims: how bounds become claims.
        ellipsoids: find such around the rows of the drift too, where there are affine forms.

    Raises:
        NoBound: no domain has a bound of the output.
    """
    problem = replace(problem, entering=interface.entering(followed=True))
    centre, radius = interface.centre, interface.radius
    bounds, forms, why = None, None, ""
    try:
        bounds = problem.bound(centre, radius)
    except NoBound as no:
        why = str(no)
    try:
        forms = problem.forms(centre, radius)
        found = forms.box()
    except NoBound:
        forms = None
    if bounds is None and forms is None:
        raise NoBound(name, why)
    if forms is None:
        assert bounds is not None
        train, drift, apart = bounds.output.train, bounds.output.drift, bounds.output.apart
        claim = claims.claim(drift_bound(drift, "inf"), bounds.witness)
        builder.add(name, problem.graph, {}, claim, bounds.witness)
    else:
        end = output_entry(forms.train, forms.output)
        train, drift, apart = Box.point(end.reference).widen(end.error_bound), found, forms.readings
        if bounds is not None:
            train, drift = train.meet(bounds.output.train), drift.meet(bounds.output.drift)
        witness = forms.witness()
        claim = claims.claim(drift_bound(drift, "inf"), witness)
        builder.add(name, problem.graph, {}, claim, witness, "affine", forms.passes)
    (record,) = builder.contents().cases
    stated = {key: part for key, part in record.items() if key not in ("name", "graph", "region")}
    margin, noise = claims.factor, float(train.mag().amax()) * NOISE
    known = math.inf if bounds is None else float(bounds.output.drift.mag().amax())
    one = _claimed(train, max(margin, 1 + REACHES), noise, REACHES)
    two = _claimed(drift, margin, noise, faint=LEAST_CLAIM if known > 0 else 0.0)
    held = output_ellipsoids(forms) if ellipsoids and forms is not None else None
    readings = None
    if any(own is not None for own in apart):
        first, second = (_claimed_readings(own, train, margin, noise) for own in apart)
        readings = first, second
    return BoundedStage(
        claim, StageOutput((one.lo, one.hi), (two.lo, two.hi), held, readings), stated
    )


def _claimed_readings(own: Apart, like: Box, margin: float, noise: float) -> Tensor:
    """Return how far readings may be apart, as it is claimed: they follow sizes, as T does."""
    zero = torch.zeros_like(like.lo)
    if own is None:
        return zero
    most = own.expand(zero.shape) + LEAST_CLAIM  # of zeros either program keeps another trace
    return _claimed(Box(-most, most), max(margin, 1 + REACHES), noise, REACHES).hi


def _moved(
    pair: tuple[Tensor, Tensor] | None, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    return None if pair is None else (pair[0].to(device), pair[1].to(device))


def _exceeds(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a + b rounded up, of which `total` is the nearest float64."""
    part = total - a
    rest = (a - (total - part)) + (b - part)
    return torch.where(rest > 0, up(total), total)


def box_record(low: Tensor, high: Tensor) -> dict[str, Any]:
    """Return a box as it stands in a proof."""
    return {"low": encode_array(low.cpu().numpy()), "high": encode_array(high.cpu().numpy())}


def _readings_record(readings: tuple[Tensor, Tensor] | None) -> dict[str, Any]:
    """Return the field of a region or an output, none where all readings are the same."""
    if readings is None:
        return {}
    train, infer = (encode_array(own.cpu().numpy()) for own in readings)
    return {"readings": {"train": train, "infer": infer}}


def _claimed(
    box: Box, margin: float, noise: float, share: float = 2.0**-10, faint: float = LEAST_CLAIM
) -> Box:
    """Return a box that is wider by the margin of claims, so that both programs agree on it.

    A large margin is for what is as small as the programs' own roundings; beyond these, `noise`, a
    box needs no more than any claim does, a share of its width. Of a number that is zero whatever
    comes in, as behind a norm without gain, `faint` is more than either program has left.
    """
    middle, spread = box.midpoint()
    if box.is_point:
        return box
    wider = torch.minimum(spread * margin, spread * (1 + share) + noise)
    return Box.point(middle).widen(up(wider + middle.abs() * 2.0**-51 + faint, 2))


def rounded(box: Box) -> Box:
    """Return the box with its ends moved outward to multiples of a power of two, its width divided
    by 2^DIGITS or less."""
    width = box.hi - box.lo
    _, exponent = torch.frexp(width)
    step = power_of_two((exponent - 1 - DIGITS).clamp(-1000, 1000))
    low, high = torch.floor(box.lo / step) * step, torch.ceil(box.hi / step) * step
    kept = (width == 0) | ~torch.isfinite(low) | ~torch.isfinite(high)
    return Box(
        torch.where(kept, box.lo, torch.minimum(low, box.lo)),
        torch.where(kept, box.hi, torch.maximum(high, box.hi)),
    )
