"""Bound one case by more and more domains until it holds: intervals, affine forms, planes, and
what is likely, where that is enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

from torch import Tensor

from kcdsl.model.graph import BlockGraph
from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.affine.functionals import functional_bound
from kcdsl_backends.affine.order import margins
from kcdsl_backends.affine.pair import Both
from kcdsl_backends.certifier.cases import Case, problem_of, region_of, widened
from kcdsl_backends.certifier.problems import Claims, ProblemFactory
from kcdsl_backends.certifier.proof import ProofBuilder
from kcdsl_backends.interval.box import Box
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.functionals import drift_bound, top_margin
from kcdsl_backends.interval.propagate import Bounds
from kcdsl_backends.interval.state import State
from kcdsl_backends.planes.propagate import Enough
from kcdsl_backends.planes.propagate import Found as Planes
from kcdsl_backends.planes.search import Effort
from kcdsl_backends.planes.worth import cheap
from kcdsl_certs.reals import real_text

_PLACES = 3
"""Places of the output, those with the largest bounds, at which an attack pushes first."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """What is proved of a case, and the places of the output where the bound is largest."""

    outcome: CaseOutcome
    places: tuple[int, ...] = ()


def bound_case(factory: ProblemFactory, goal: Goal, case: Case, builder: ProofBuilder) -> Bounded:
    """Bound a case by the interval domain, and by others where that is not enough."""
    problem, region = problem_of(factory, goal, case), region_of(factory, goal, case)
    case = widened(goal, case)
    claims = Claims.of(factory.train, factory.infer, problem.graph)
    return bound_stated(Stated(goal, case, problem, builder, region, claims))


def bound_stated(stated: Stated) -> Bounded:
    """Bound a case on a problem that is ready; see `bound_case`."""
    goal, case, problem = stated.goal, stated.case, stated.problem
    bounds, reason = None, None
    if stated.asks("interval"):
        try:
            bounds = problem.bound(case.centre, case.radius)
        except NoBound as no:
            reason = str(no)
    if goal.functional == "no_flip":
        return _order(stated, bounds, reason)
    return _drift(stated, bounds, reason)


class Problem(Protocol):
    """A block that the domains can bound."""

    @property
    def graph(self) -> BlockGraph:
        """Return its graph."""
        ...

    def bound(self, centre: Tensor | None, radius: Tensor) -> Bounds:
        """Propagate boxes; raises NoBound."""
        ...

    def forms(self, centre: Tensor | None, radius: Tensor, alpha: Fraction | None = None) -> Both:
        """Return affine forms, with independent roundings given `alpha`; raises NoBound."""
        ...

    def planes(
        self, centre: Tensor | None, radius: Tensor, effort: Effort, enough: Enough
    ) -> Planes:
        """Bound the output by planes; raises NoBound."""
        ...


@dataclass(frozen=True, slots=True)
class Stated:
    """A case with what is needed to state a bound of it."""

    goal: Goal
    case: Case
    problem: Problem
    builder: ProofBuilder
    region: Mapping[str, Any]
    claims: Claims

    @property
    def margin(self) -> float:
        """Return the factor of claims."""
        return self.claims.factor

    def by_intervals(self, bound: float, witness: Mapping[str, tuple[float, float]]) -> None:
        """Add the case to the proof, with a bound of the interval domain alone."""
        self.builder.add(self.case.name, self.problem.graph, self.region, bound, witness)

    def by_forms(self, bound: float, forms: Both) -> None:
        """Add the case to the proof, with a bound of affine forms."""
        graph, witness, chance = self.problem.graph, forms.witness(), forms.chance
        self.builder.add(
            *(self.case.name, graph, self.region, bound, witness, "affine", forms.passes),
            chance=None if chance is None else chance.to_json(),
        )

    def by_planes(self, bound: float, planes: Planes, forms: Both | None = None) -> None:
        """Add the case to the proof, with a bound of planes, met with affine forms if given."""
        domain, passes = ("planes", None) if forms is None else ("affine+planes", forms.passes)
        self.builder.add(
            *(self.case.name, self.problem.graph, self.region, bound, planes.witness),
            *(domain, passes, planes.hints),
        )

    def asks(self, domain: str) -> bool:
        """Say whether the goal may be bounded in a domain; planes of themselves only if cheap."""
        if self.goal.domains is not None:
            return domain in self.goal.domains
        return domain != "planes" or cheap(self.problem.graph)

    def forms(self, alpha: Fraction | None = None) -> Both | None:
        """Return the affine forms, None where there are none or none are asked for."""
        if not self.asks("affine"):
            return None
        try:
            return self.problem.forms(self.case.centre, self.case.radius, alpha)
        except NoBound:
            return None

    def planes(self) -> Planes | None:
        """Return what planes say, None where that is nothing or they are not asked for."""
        if not self.asks("planes"):
            return None
        goal = self.goal
        limit = None
        if goal.functional == "inf" and goal.threshold is not None:
            limit = float(goal.threshold) / self.margin
        try:
            return self.problem.planes(
                self.case.centre, self.case.radius, Effort(limit=limit), self.settled
            )
        except NoBound:
            return None

    def settled(self, output: State) -> bool:
        """Say whether boxes of the output settle the goal."""
        goal = self.goal
        if goal.functional == "no_flip":
            return top_margin(output, goal.k, self.margin) > 0
        return goal.admits(drift_bound(output.drift, goal.functional) * self.margin)

    def outcome(self, bound: float, reason: str | None = None, **more: Any) -> CaseOutcome:
        """Return the outcome of the case."""
        case = self.case
        return CaseOutcome(
            case.name, case.longest or len(case.tokens), bound, reason=reason, **more
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """What a domain says: the bound, how it goes into the proof, and the margin of an order."""

    bound: float
    add: Callable[[], None]
    places: tuple[int, ...] = ()
    margin: float = -math.inf
    alpha: str | None = None


def _drift(stated: Stated, bounds: Bounds | None, reason: str | None) -> Bounded:
    """Bound a functional of the drift, by more and more domains until the goal holds."""
    best: _Found | None = None
    for found in _drifts(stated, bounds):
        best = found if best is None or found.bound < best.bound else best
        if stated.goal.admits(best.bound):
            break
    if best is None:
        return Bounded(stated.outcome(math.inf, reason or "no domain that was asked has a bound"))
    best.add()
    return Bounded(stated.outcome(best.bound, alpha=best.alpha), best.places)


def _drifts(stated: Stated, bounds: Bounds | None) -> Iterator[_Found]:
    """Yield the bounds of a functional of the drift, the cheapest domain first."""
    goal, claim = stated.goal, stated.claims.claim
    known: Box | None = None
    if bounds is not None:
        known, witness = bounds.output.drift, bounds.witness
        found = claim(drift_bound(known, goal.functional), witness)
        yield _Found(found, lambda: stated.by_intervals(found, witness), _places(known))
    forms, box = _boxed(stated.forms())
    if forms is not None and box is not None:
        yield from _by_forms(stated, forms, _met(box, known), lambda b: stated.by_forms(b, forms))
    planes = stated.planes()
    if planes is not None:
        alone, every = claim(drift_bound(planes.box, goal.functional), planes.witness), planes
        yield _Found(alone, lambda: stated.by_planes(alone, every), _places(planes.box))
        if forms is not None and box is not None:
            met = box.meet(planes.box)
            yield from _by_forms(stated, forms, met, lambda b: stated.by_planes(b, every, forms))
    likely, box = _boxed(None if goal.alpha is None else stated.forms(goal.alpha))
    if likely is not None and box is not None:
        yield from _by_forms(stated, likely, _met(box, known), lambda b: stated.by_forms(b, likely))


def _boxed(forms: Both | None) -> tuple[Both | None, Box | None]:
    """Return forms with the box of the drift that they give; None where there is none."""
    try:
        return forms, None if forms is None else forms.box()
    except NoBound:
        return None, None


def _met(box: Box, known: Box | None) -> Box:
    return box if known is None else box.meet(known)


def _by_forms(
    stated: Stated, forms: Both, drift: Box, add: Callable[[float], None]
) -> Iterator[_Found]:
    """Yield the bound by affine forms, on a box of the drift; nothing where there is none."""
    goal, witness = stated.goal, forms.witness()
    try:
        found = functional_bound(
            *(forms, drift, goal.functional),
            lambda value: goal.admits(stated.claims.claim(value, witness)),
        )
        bound = stated.claims.claim(found, witness)
        yield _Found(bound, lambda: add(bound), _places(drift), alpha=_alpha(forms))
    except NoBound:
        return


def _alpha(forms: Both) -> str | None:
    """Return with what probability bounds fail, None in the worst case; raises NoBound."""
    return None if forms.chance is None else real_text(forms.chance.alpha)


def _order(stated: Stated, bounds: Bounds | None, reason: str | None) -> Bounded:
    """Bound from below how far the largest columns stay above the others."""
    best: _Found | None = None
    for found in _orders(stated, bounds):
        best = found if best is None or found.margin > best.margin else best
        if best.margin > 0:
            break
    if best is None:
        return Bounded(stated.outcome(math.inf, reason, stable=False))
    best.add()
    margin, stable = best.margin, best.margin > 0
    return Bounded(stated.outcome(best.bound, stable=stable, margin=margin, alpha=best.alpha))


def _orders(stated: Stated, bounds: Bounds | None) -> Iterator[_Found]:
    """Yield margins of the order, the cheapest domain first; their bounds are of the drift."""
    goal, factor = stated.goal, stated.margin
    found, known = math.inf, None
    if bounds is not None:
        output, witness = bounds.output, bounds.witness
        found, known = drift_bound(output.drift, "inf") * factor, (output.train, output.infer)
        top, whole = top_margin(output, goal.k, factor), found
        yield _Found(whole, lambda: stated.by_intervals(whole, witness), margin=top)
    forms = stated.forms()
    if forms is not None:
        yield from _ordered(stated, forms, known, found)
    planes = stated.planes()
    if planes is not None:
        moved, every = drift_bound(planes.box, "inf") * factor, planes
        boxes = planes.output.train, planes.output.infer
        alone = top_margin(planes.output, goal.k, factor)
        yield _Found(moved, lambda: stated.by_planes(moved, every), margin=alone)
        if forms is not None:
            both = _least(margins(forms, goal.k, boxes, factor))
            yield _Found(moved, lambda: stated.by_planes(moved, every, forms), margin=both)
    likely = None if goal.alpha is None else stated.forms(goal.alpha)
    if likely is not None:
        yield from _ordered(stated, likely, known, found)


def _ordered(
    stated: Stated, forms: Both, known: tuple[Box, Box] | None, found: float
) -> Iterator[_Found]:
    """Yield the least margin of all rows by affine forms; nothing where there is none."""
    try:
        least = _least(margins(forms, stated.goal.k, known, stated.margin))
        bound = min(found, forms.witness()[forms.output][1] * stated.margin)
        yield _Found(
            bound, lambda: stated.by_forms(bound, forms), margin=least, alpha=_alpha(forms)
        )
    except NoBound:
        return


def _least(rows: Tensor) -> float:
    return float(rows.amin()) if rows.numel() else -math.inf


def _places(drift: Box) -> tuple[int, ...]:
    largest = drift.mag().flatten()
    return tuple(largest.topk(min(_PLACES, largest.numel())).indices.tolist())
