"""The table of diagnoses: mistakes of the set-up and properties of kernels, found on probes.

A *repair* undoes one mistake, such as a shift by one position. It is the named cause of a deviation
if it leaves less than `CLEAR` of it, and less than every other repair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.table.evidence import SamplingUnit
from kcdsl_backends.requests import Request

PROBES = 4
"""Number of requests that are run again for the preconditions."""
POSITIONS = 64
"""Number of positions of a request that diagnoses read."""
CLEAR = 0.25
"""A repair must leave less than this share of the deviation to be named as the cause."""
BEYOND = 4.0
"""An error above this multiple of the claimed rounding noise has another cause."""
SMALLEST = 1e-9
"""Deviations (total variation) below this are not diagnosed."""
SIDES = ("train", "infer")
FAILURES = (RuntimeError, ValueError, TypeError, IndexError, Refusal)
"""Errors of a kernel on tokens that it cannot take."""
Forward = Callable[[Any], Tensor]
"""Token ids [T] or [B, T] to outputs [T, V] or [B, T, V]."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One diagnosis: the question it answers, and whether its failure voids the evidence.

    A diagnosis that `blocks` is a mistake of the set-up: the measured drift is then not one of
    numerics, and every clause about the model is invalid evidence. `of` lists the subjects.
    """

    name: str
    question: str
    blocks: bool
    of: frozenset[Literal["kernels", "recordings", "servers"]] = frozenset({"kernels"})


_RECORDED = frozenset[Literal["kernels", "recordings", "servers"]]({"recordings"})
_BOTH = frozenset[Literal["kernels", "recordings", "servers"]]({"kernels", "recordings"})
DIAGNOSES: Mapping[str, Diagnosis] = {
    d.name: d
    for d in (
        Diagnosis(
            "weights_checksum",
            "do both kernels hold the weights of the file, unchanged since loading?",
            True,
        ),
        Diagnosis("token_equality", "do both kernels answer for the same positions?", True),
        Diagnosis("finite", "did every request give numbers?", False, _BOTH),
        Diagnosis("empty_slice", "has every slice a row?", False, _BOTH),
        Diagnosis(
            "alignment_shift",
            "would a shift by one position explain the drift?",
            True,
            _BOTH,
        ),
        Diagnosis("temperature_fit", "would a temperature on one side explain it?", True, _BOTH),
        Diagnosis(
            "truncation_mass",
            "is one policy the other, cut off and renormalised?",
            True,
            _BOTH,
        ),
        Diagnosis(
            "mask_provenance",
            "is it that of one run of positions, of padding that is seen, or of tokens that only "
            "one kernel sees?",
            True,
            _BOTH,
        ),
        Diagnosis(
            "swapped_sides",
            "does the kernel called train round as infer claims, and infer as train claims?",
            True,
            _BOTH,
        ),
        Diagnosis(
            "stale_weights",
            "does a kernel err more than its numerics explain, and neither of the above nor a "
            "coarser format explains it?",
            True,
        ),
        Diagnosis("coarser_layer", "does a block err as a coarser format would?", False),
        Diagnosis("self_determinism", "does a kernel give the same bits twice?", False),
        Diagnosis(
            "batch_invariance",
            "does a request get the same answer alone, in a batch, in the other order and padded?",
            False,
        ),
        Diagnosis("support_check", "do sampled ratios average to 1?", False, _BOTH),
        Diagnosis(
            "logprob_semantics",
            "are both sides of one law, that of the contract's policy?",
            True,
            _RECORDED,
        ),
        Diagnosis(
            "sampling_law",
            "were tokens drawn from the law that the values are of?",
            True,
            _RECORDED,
        ),
        Diagnosis("sampling_units", "is it known which rows share a prompt?", True, _RECORDED),
        Diagnosis("stale_policy", "are both sides of one version of the policy?", True, _RECORDED),
        Diagnosis(
            "cloned_rollouts", "do samples of one prompt differ as chance has it?", True, _RECORDED
        ),
        Diagnosis("copied_side", "is one side a copy of the other?", True, _RECORDED),
        Diagnosis("masked_share", "how many sampled tokens do not count?", False, _RECORDED),
        Diagnosis(
            "answers",
            "did the server answer every request?",
            False,
            frozenset({"servers"}),
        ),
    )
}
"""Every diagnosis. `finite` blocks where a kernel returned numbers that are not finite."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Outputs of both kernels, run twice, on one request; float64 [T, V] or [T, D] on the CPU."""

    request: Request
    train: Tensor
    infer: Tensor
    equal: tuple[bool, bool]
    """Whether the second run of train and of infer gave the same bits."""
    wobble: tuple[float, float] = (0.0, 0.0)
    """Distance of the second run of each from the first (`size`)."""
    gold: Tensor | None = None
    """Output of the model without roundings; None where no reference could be run."""
    claimed: tuple[Tensor, Tensor] | None = None
    """Outputs of plain programs in the claimed formats of train and infer."""

    def side(self, index: int) -> Tensor:
        """Return the output of train (0) or infer (1)."""
        return (self.train, self.infer)[index]


@dataclass(frozen=True, slots=True)
class Repair:
    """The deviation left by undoing one mistake: `left` is a share of it, None where the repair
    does not apply."""

    name: str
    detail: str
    left: float | None
    value: float | None = None
    seen: bool = False
    """Whether the mistake is certain, however little of the deviation it explains."""

    @property
    def explains(self) -> bool:
        """Return whether less than `CLEAR` of the deviation is left."""
        return self.left is not None and self.left < CLEAR


def outcome(
    name: str, good: bool, detail: str, value: float | None = None, *, blocking: bool | None = None
) -> Precheck:
    """Return a precondition that passed or failed; `name` is one of `DIAGNOSES`."""
    blocks = DIAGNOSES[name].blocks if blocking is None else blocking
    return Precheck(name, "passed" if good else "failed", detail, value, blocks)


def not_applicable(name: str, why: str) -> Precheck:
    """Return a precondition that could not be checked."""
    return Precheck(name, "not_applicable", why)


def cause_of(repairs: Sequence[Repair]) -> Repair | None:
    """Return the repair that leaves least of the deviation; None if none explains it."""
    found = [r for r in repairs if r.explains]
    return min(found, key=lambda r: 0.0 if r.left is None else r.left, default=None)


def precheck_of(repair: Repair, cause: Repair | None) -> Precheck:
    """Return a repair as a precondition, which fails if it is the cause or certain by itself."""
    if repair.left is None:
        return not_applicable(repair.name, repair.detail)
    good = repair is not cause and not repair.seen
    return outcome(repair.name, good, repair.detail, repair.value)


def blocking(prechecks: Sequence[Precheck]) -> str | None:
    """Return the reason of the first failed precondition that blocks every clause."""
    for check in prechecks:
        if check.blocking and check.outcome == "failed":
            return f"precheck {check.name} failed: {check.detail}"
    return None


# --- distances of outputs, in float64 -------------------------------------------------------------


def total_variation(a: Tensor, b: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the total variation [T] of the policies of logits [T, V]; logits may be -inf."""
    p, q = torch.softmax(a / temperature, -1), torch.softmax(b / temperature, -1)
    return (p - q).abs().sum(-1) / 2


def deviation(probes: Sequence[Probe], temperature: float) -> float:
    """Return the mean total variation of both kernels over all positions; 0 without any."""
    return mean([total_variation(p.train, p.infer, temperature) for p in probes])


def mean(parts: Sequence[Tensor]) -> float:
    """Return the mean over all elements of all parts; 0 without any."""
    joined = torch.cat([p.reshape(-1) for p in parts]) if parts else torch.empty(0)
    return float(joined.mean()) if joined.numel() else 0.0


def row_size(a: Tensor, b: Tensor, *, states: bool = False) -> Tensor:
    """Return the root mean square [T] of b - a; logits are compared up to a constant per row.

    Logits that are both -inf are equal.
    """
    difference = torch.where(a == b, 0.0, b - a)
    if not states:
        difference = difference - difference.mean(-1, keepdim=True)
    return difference.square().mean(-1).sqrt()


def size(a: Tensor, b: Tensor, *, states: bool = False) -> float:
    """Return the mean over rows of `row_size`."""
    return float(row_size(a, b, states=states).mean()) if a.numel() else 0.0


# --- evidence that is missing ---------------------------------------------------------------------


def finite(units: Sequence[SamplingUnit], nonfinite: Mapping[str, int]) -> Precheck:
    """Check that no request failed or gave NaN or infinity; `nonfinite` counts those by request.

    Values that are not finite block; failed requests do not, `failure_rate` counts them.
    """
    name = "finite"
    failed = [unit for unit in units if unit.failure is not None]
    if not failed:
        return outcome(name, bool(units), f"{len(units)} requests", 0.0)
    share = len(failed) / len(units)
    not_finite = [unit for unit in failed if nonfinite.get(unit.key)]
    first = (not_finite or failed)[0]
    detail = f"{len(failed)} of {len(units)} requests; {first.key}: {first.failure}"
    return outcome(name, False, detail, share, blocking=bool(not_finite))


def empty_slice(slices: Mapping[str, int]) -> Precheck:
    """Check that every slice has a row; a clause on an empty slice is invalid evidence."""
    empty = sorted(name for name, rows in slices.items() if rows == 0)
    detail = f"{', '.join(empty)}: no request" if empty else f"{len(slices)} slices"
    return outcome("empty_slice", not empty, detail, float(len(empty)))


# --- errors compared with the claimed numerics ------------------------------------------------

_FLOOR = 64 * 2.0**-53
"""Error of float64, relative to the size of the outputs."""


@dataclass(frozen=True, slots=True)
class RoundingNoise:
    """Distances from the run without roundings, of train and of infer (`size`).

    `expected` is that of a plain program in the claimed formats, plus the difference of two runs of
    the kernel.
    """

    observed: tuple[float, float]
    expected: tuple[float, float]

    def ratio(self, side: int) -> float:
        """Return the error of a side as a multiple of that which its claim allows."""
        return self.observed[side] / self.expected[side]

    @property
    def beyond(self) -> tuple[int, ...]:
        """Return the sides that err more than their claims explain."""
        return tuple(side for side in (0, 1) if self.ratio(side) > BEYOND)

    def shown(self, side: int) -> str:
        """Return the error of a side in words."""
        return (
            f"{SIDES[side]} lies {self.observed[side]:.2g} from the model without roundings, "
            f"{self.ratio(side):.2g} times what its numerics explain"
        )


def noise_of(probes: Sequence[Probe], *, states: bool) -> RoundingNoise | None:
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
    return RoundingNoise((observed[0], observed[1]), (expected[0], expected[1]))


def floor(gold: Tensor) -> float:
    """Return the error bound of a run in float64."""
    return _FLOOR * float(gold.square().mean().sqrt()) + 1e-300


def all_finite(*outputs: Tensor) -> bool:
    """Return whether every number of every output is finite."""
    return all(bool(torch.isfinite(output).all()) for output in outputs)
