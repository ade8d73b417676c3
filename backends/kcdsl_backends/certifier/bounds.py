"""Bound one case by one domain after another until the goal holds.

A domain takes a `Problem` and yields `Bound`s, each with the `Proof` that the independent checker
re-derives. The domains, cheapest first, are boxes, affine forms, linear bounds, linear bounds on
split boxes, and, for goals that admit probabilistic evidence, forms with independent roundings.
Later domains may intersect their bounds with earlier ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from torch import Tensor

from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.certifier.statements.cases import Case, problem_of, region_of, widened
from kcdsl_backends.certifier.statements.problems import BlockProblem, Claims, ProblemFactory
from kcdsl_backends.certifier.statements.proof import Proof, ProofBuilder
from kcdsl_backends.drift.affine_forms import AffineForms
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.state import State
from kcdsl_backends.drift.functionals import (
    drift_bound,
    functional_bound,
    order_margins,
    top_margin,
)
from kcdsl_backends.drift.interval import Bounds
from kcdsl_backends.drift.linear_bounds import LinearFound, SlopeEffort, cheap
from kcdsl_backends.drift.relu_networks import FEWEST, MOST, MOST_BOXES
from kcdsl_backends.process import OutOfTime
from kcdsl_certs.encoding.reals import real_text

_LATE = "the time limit ended the search for a smaller bound"
_PLACES = 3
"""Number of output elements, those with the largest bounds, that an attack tries first."""


@dataclass(frozen=True, slots=True)
class CaseBound:
    """The proved bound of a case, and the output elements where it is largest."""

    outcome: CaseOutcome
    places: tuple[int, ...] = ()
    finished: bool = True
    """Whether all domains ran within the time limit."""
    start: tuple[float, ...] = ()
    """An input where the exact drift exceeds the limit, as offsets from the centre in units of the
    radius; empty if none is known."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of the functional; of the drift if the functional is `no_flip`.

    `margin` is a lower bound of the distance of the largest columns above the others. `alpha` is
    the probability that the bound fails; None for a worst-case bound.
    """

    value: float
    proof: Proof
    places: tuple[int, ...] = ()
    margin: float = -math.inf
    alpha: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """A block under two numerics, a region of its input, and the functional of a goal."""

    block: BlockProblem
    case: Case
    goal: Goal
    claims: Claims

    @property
    def order(self) -> bool:
        """Return whether the goal is about the order of the largest columns (`no_flip`)."""
        return self.goal.functional == "no_flip"

    @property
    def region(self) -> tuple[Tensor | None, Tensor]:
        return self.case.centre, self.case.radius

    def settled(self, output: State) -> bool:
        if self.order:
            return top_margin(output, self.goal.k, self.claims.factor) > 0
        value = drift_bound(output.drift, self.goal.functional)
        return self.goal.admits(value * self.claims.factor)

    def settles(self, bound: Bound) -> bool:
        return bound.margin > 0 if self.order else self.goal.admits(bound.value)

    def of_boxes(self, output: State, proof: Proof) -> Bound:
        drift, claims = output.drift, self.claims
        if self.order:
            top = top_margin(output, self.goal.k, claims.factor)
            return Bound(drift_bound(drift, "inf") * claims.factor, proof, margin=top)
        value = claims.claim(drift_bound(drift, self.goal.functional), proof.witness)
        return Bound(value, proof, _places(drift))

    def of_forms(
        self, forms: AffineForms, drift: Box, proof: Proof | None = None
    ) -> Iterator[Bound]:
        """Yield the bound of a functional by affine forms and a box of the drift, if there is one.
        The default proof is that of the forms."""
        goal, witness = self.goal, forms.witness()
        try:
            found = functional_bound(
                *(forms, drift, goal.functional),
                lambda value: goal.admits(self.claims.claim(value, witness)),
            )
            value, proof = self.claims.claim(found, witness), proof or _proof_of_forms(forms)
            yield Bound(value, proof, _places(drift), alpha=_alpha(forms))
        except NoBound:
            return


@dataclass(slots=True)
class EarlierBounds:
    """Results of earlier domains on a problem, which later ones may use."""

    boxes: Bounds | None = None
    forms: AffineForms | None = None
    drift: Box | None = None
    """The box of the drift that `forms` give."""
    reason: str | None = None
    """Reason of the first domain that has no bound."""
    left: str | None = None
    """Reason why splitting did not decide the goal."""
    start: tuple[float, ...] = ()
    """See `CaseBound`."""


@dataclass(frozen=True, slots=True)
class IntervalDomain:
    """Boxes of both kernels and of their difference."""

    name: str = "interval"

    def bounds(self, problem: Problem, found: EarlierBounds) -> Iterator[Bound]:
        try:
            found.boxes = problem.block.bound(*problem.region)
        except NoBound as no:
            found.reason = str(no)
            return
        yield problem.of_boxes(found.boxes.output, Proof(found.boxes.witness))


@dataclass(frozen=True, slots=True)
class AffineDomain:
    """Affine forms of both kernels' errors; `likely`: with independent roundings, where bounds may
    fail with the probability that the goal admits."""

    likely: bool = False
    name: str = "affine"

    def bounds(self, problem: Problem, found: EarlierBounds) -> Iterator[Bound]:
        alpha = problem.goal.alpha if self.likely else None
        if self.likely and alpha is None:
            return
        try:
            forms = problem.block.forms(*problem.region, alpha)
        except NoBound as no:
            found.reason = found.reason or str(no)
            return
        if not self.likely:
            found.forms = forms
        if problem.order:
            yield from _order_of_forms(problem, forms, found.boxes)
            return
        try:
            drift = forms.box()
        except NoBound:
            return
        if not self.likely:
            found.drift = drift
        met = drift if found.boxes is None else drift.meet(found.boxes.output.drift)
        yield from problem.of_forms(forms, met)


@dataclass(frozen=True, slots=True)
class LinearDomain:
    """Planes on the difference graph."""

    name: str = "planes"

    def bounds(self, problem: Problem, found: EarlierBounds) -> Iterator[Bound]:
        """Yield the bound of planes, and that of planes and affine forms together."""
        planes, forms = _planes(problem), found.forms
        if planes is None:
            return
        alone = problem.of_boxes(planes.output, Proof(planes.witness, "planes", None, planes.hints))
        yield alone
        if forms is None:
            return
        proof = Proof(planes.witness, "affine+planes", forms.passes, planes.hints)
        if problem.order:
            boxes = planes.output.train, planes.output.infer
            both = _least(order_margins(forms, problem.goal.k, boxes, problem.claims.factor))
            yield Bound(alone.value, proof, margin=both)
        elif found.drift is not None:
            yield from problem.of_forms(forms, found.drift.meet(planes.box), proof)


@dataclass(frozen=True, slots=True)
class SplitDomain:
    """Planes on parts of a split region, for blocks that are ReLU networks.

    The claim is the threshold of the goal itself.
    """

    name: str = "splits"

    def bounds(self, problem: Problem, found: EarlierBounds) -> Iterator[Bound]:
        """Yield the largest bound that the threshold admits, if all boxes are proved."""
        goal, limit = problem.goal, largest_admitted(problem.goal)
        moves = bool((problem.case.radius > 0).any())
        if limit is None or goal.functional != "inf" or not moves:
            return
        try:
            network = problem.block.layers(*problem.region)
            most = MOST_BOXES if goal.domains else min(MOST_BOXES, MOST // network.cost)
            if most < FEWEST and not goal.domains:
                return
            rows = network.split(limit, problem.claims.factor, most)
        except NoBound as no:
            found.reason = found.reason or str(no)
            return
        last = rows[-1]
        if last.point is not None:
            found.start = network.shares(len(rows) - 1, last.point)
            found.left = "splits: at one input the drift exceeds it in real arithmetic"
        elif last.tree is None:
            found.left = f"splits: {last.note}"
        trees = [one.tree.data for one in rows if one.tree is not None]
        if len(trees) == len(network.low):
            yield Bound(limit, Proof(network.witness, self.name, splits=trees))


def largest_admitted(goal: Goal) -> float | None:
    """Return the largest number above 0 that the threshold of a goal admits; None without one."""
    if goal.threshold is None or goal.threshold <= 0:
        return None
    limit = float(min(goal.threshold, Fraction(2) ** 1000))
    while limit > 0 and not goal.admits(limit):
        limit = math.nextafter(limit, 0)
    return limit if limit > 0 else None


Domain = IntervalDomain | AffineDomain | LinearDomain | SplitDomain
DOMAINS: tuple[Domain, ...] = (
    IntervalDomain(),
    AffineDomain(),
    LinearDomain(),
    SplitDomain(),
    AffineDomain(likely=True),
)
"""All domains, the cheapest first; `Goal.domains` has their names."""


def domains_of(problem: Problem) -> list[Domain]:
    """Return the domains of a goal; planes by default only for blocks where they are cheap."""
    names = problem.goal.domains
    if names is not None:
        return [domain for domain in DOMAINS if domain.name in names]
    return [d for d in DOMAINS if d.name != "planes" or cheap(problem.block.graph)]


def bound_case(factory: ProblemFactory, goal: Goal, case: Case, builder: ProofBuilder) -> CaseBound:
    """Bound a case by the interval domain, and by others if that is not enough."""
    block, region = problem_of(factory, goal, case), region_of(factory, goal, case)
    claims = Claims.of(factory.train, factory.infer, block.graph)
    return bound_stated(Problem(block, widened(goal, case), goal, claims), builder, region)


def bound_stated(
    problem: Problem, builder: ProofBuilder, region: Mapping[str, Any] | None = None
) -> CaseBound:
    """Bound a problem by its domains in order until one decides the goal; add the best bound, with
    the region, to the proof."""
    best, found, finished = None, EarlierBounds(), True
    try:
        for bound in (b for domain in domains_of(problem) for b in domain.bounds(problem, found)):
            if best is None or _tighter(problem, bound, best):
                best = bound
            if problem.settles(best):
                break
    except OutOfTime:
        finished, found.reason = False, _LATE
    case, late = problem.case, None if finished else _LATE
    named = case.name, case.longest or len(case.tokens)
    if best is None:
        if problem.order:
            outcome = CaseOutcome(*named, math.inf, reason=found.reason, stable=False)
            return CaseBound(outcome, finished=finished)
        reason = found.left or found.reason or "none of the tried domains has a bound"
        outcome = CaseOutcome(*named, math.inf, reason=reason)
        return CaseBound(outcome, finished=finished, start=found.start)
    builder.add(case.name, problem.block.graph, region or {}, best.value, best.proof)
    if problem.order:
        outcome = CaseOutcome(
            *(*named, best.value), stable=best.margin > 0, margin=best.margin, alpha=best.alpha
        )
        outcome = replace(outcome, reason=None if outcome.stable else late)
        return CaseBound(outcome, finished=finished)
    if late is None and found.left is not None and not problem.settles(best):
        late = f"the bound {best.value:.3g} exceeds the threshold; {found.left}"
    outcome = CaseOutcome(*named, best.value, reason=late, alpha=best.alpha)
    return CaseBound(outcome, best.places, finished, found.start)


def _tighter(problem: Problem, one: Bound, other: Bound) -> bool:
    return one.margin > other.margin if problem.order else one.value < other.value


def _planes(problem: Problem) -> LinearFound | None:
    """Return the bounds by planes; None if there are none."""
    goal, limit = problem.goal, None
    if goal.functional == "inf" and goal.threshold is not None:
        limit = float(goal.threshold) / problem.claims.factor
    try:
        return problem.block.planes(*problem.region, SlopeEffort(limit=limit), problem.settled)
    except NoBound:
        return None


def _proof_of_forms(forms: AffineForms) -> Proof:
    """Return the proof of forms, with the failure probability of all bounds so far."""
    chance = None if forms.chance is None else forms.chance.to_json()
    return Proof(forms.witness(), "affine", forms.passes, chance=chance)


def _alpha(forms: AffineForms) -> str | None:
    """Return the probability that bounds fail; None for worst-case bounds."""
    return None if forms.chance is None else real_text(forms.chance.alpha)


def _order_of_forms(problem: Problem, forms: AffineForms, boxes: Bounds | None) -> Iterator[Bound]:
    """Yield the least margin of all rows by affine forms, if there is one."""
    known, size, factor = None, math.inf, problem.claims.factor
    if boxes is not None:
        known = boxes.output.train, boxes.output.infer
        size = drift_bound(boxes.output.drift, "inf") * factor
    try:
        least = _least(order_margins(forms, problem.goal.k, known, factor))
        value = min(size, forms.witness()[forms.output][1] * factor)
        yield Bound(value, _proof_of_forms(forms), margin=least, alpha=_alpha(forms))
    except NoBound:
        return


def _least(rows: Tensor) -> float:
    return float(rows.amin()) if rows.numel() else -math.inf


def _places(drift: Box) -> tuple[int, ...]:
    largest = drift.mag().flatten()
    return tuple(largest.topk(min(_PLACES, largest.numel())).indices.tolist())
