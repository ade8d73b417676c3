"""Bound one case: by the interval domain, and by affine forms where that is not enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from kcdsl.model.graph import BlockGraph
from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.affine.functionals import functional_bound
from kcdsl_backends.affine.order import margins
from kcdsl_backends.affine.pair import Both
from kcdsl_backends.certifier.cases import Case, problem_of, region_of, widened
from kcdsl_backends.certifier.proof import ProofBuilder
from kcdsl_backends.certifier.workshop import Workshop, claim_margin
from kcdsl_backends.interval.box import Box
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.functionals import drift_bound, top_margin
from kcdsl_backends.interval.propagate import Bounds

_PLACES = 3
"""Places of the output, those with the largest bounds, at which an attack pushes first."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """What is proved of a case, and the places of the output where the bound is largest."""

    outcome: CaseOutcome
    places: tuple[int, ...] = ()


def bound_case(shop: Workshop, goal: Goal, case: Case, builder: ProofBuilder) -> Bounded:
    """Bound a case by the interval domain, and by affine forms where that is not enough."""
    problem, region = problem_of(shop, goal, case), region_of(shop, goal, case)
    case = widened(goal, case)
    margin = claim_margin(shop.train, shop.infer, problem.graph)
    return bound_stated(Stated(goal, case, problem, builder, region, margin))


def bound_stated(stated: Stated) -> Bounded:
    """Bound a case on a problem that is ready; see `bound_case`."""
    goal, case, problem = stated.goal, stated.case, stated.problem
    bounds, reason = None, None
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

    def forms(self, centre: Tensor | None, radius: Tensor) -> Both:
        """Return affine forms; raises NoBound."""
        ...


@dataclass(frozen=True, slots=True)
class Stated:
    """A case with what is needed to state a bound of it; `margin` is the factor of claims."""

    goal: Goal
    case: Case
    problem: Problem
    builder: ProofBuilder
    region: Mapping[str, Any]
    margin: float

    def by_intervals(self, bound: float, witness: Mapping[str, tuple[float, float]]) -> None:
        """Add the case to the proof, with a bound of the interval domain alone."""
        self.builder.add(self.case.name, self.problem.graph, self.region, bound, witness)

    def by_forms(self, bound: float, forms: Both) -> None:
        """Add the case to the proof, with a bound of affine forms."""
        graph, witness = self.problem.graph, forms.witness()
        self.builder.add(self.case.name, graph, self.region, bound, witness, "affine", forms.passes)

    def outcome(self, bound: float, reason: str | None = None, **more: Any) -> CaseOutcome:
        """Return the outcome of the case."""
        case = self.case
        return CaseOutcome(
            case.name, case.longest or len(case.tokens), bound, reason=reason, **more
        )


def _drift(stated: Stated, bounds: Bounds | None, reason: str | None) -> Bounded:
    """Bound a functional of the drift."""
    goal, case, margin = stated.goal, stated.case, stated.margin
    found = math.inf
    if bounds is not None:
        found = drift_bound(bounds.output.drift, goal.functional) * margin
        if goal.admits(found):
            stated.by_intervals(found, bounds.witness)
            return Bounded(stated.outcome(found), _places(bounds.output.drift))
    try:
        forms = stated.problem.forms(case.centre, case.radius)
        drift = forms.box()
    except NoBound:
        if bounds is None:
            return Bounded(stated.outcome(math.inf, reason))
        stated.by_intervals(found, bounds.witness)
        return Bounded(stated.outcome(found), _places(bounds.output.drift))
    drift = drift if bounds is None else drift.meet(bounds.output.drift)
    bound = margin * functional_bound(
        forms, drift, goal.functional, lambda value: goal.admits(value * margin)
    )
    stated.by_forms(bound, forms)
    return Bounded(stated.outcome(bound), _places(drift))


def _order(stated: Stated, bounds: Bounds | None, reason: str | None) -> Bounded:
    """Bound from below how far the largest columns stay above the others."""
    goal, case, factor = stated.goal, stated.case, stated.margin
    found, known, top = math.inf, None, None
    if bounds is not None:
        output = bounds.output
        found, known = drift_bound(output.drift, "inf") * factor, (output.train, output.infer)
        top = top_margin(output, goal.k, factor)
        if top > 0:
            stated.by_intervals(found, bounds.witness)
            return Bounded(stated.outcome(found, stable=True, margin=top))
    try:
        forms = stated.problem.forms(case.centre, case.radius)
    except NoBound:
        if bounds is not None:
            stated.by_intervals(found, bounds.witness)
        return Bounded(stated.outcome(found, reason, stable=False, margin=top))
    rows = margins(forms, goal.k, known, factor)
    least = float(rows.amin()) if rows.numel() else -math.inf
    bound = min(found, forms.witness()[forms.output][1] * factor)
    stated.by_forms(bound, forms)
    return Bounded(stated.outcome(bound, stable=least > 0, margin=least))


def _places(drift: Box) -> tuple[int, ...]:
    largest = drift.mag().flatten()
    return tuple(largest.topk(min(_PLACES, largest.numel())).indices.tolist())
