"""Bound one case: by the interval domain, and by affine forms where that is not enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.certifier.cases import Case
from kcdsl_backends.certifier.proof import ProofBuilder, box_region, token_region
from kcdsl_backends.certifier.workshop import Workshop, claim_margin, functional_bound
from kcdsl_backends.interval.box import Box
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.functionals import drift_bound
from kcdsl_backends.interval.state import State

_PLACES = 3
"""Places of the output, those with the largest bounds, at which an attack pushes first."""


@dataclass(frozen=True, slots=True)
class Bounded:
    """What is proved of a case, and the places of the output where the bound is largest."""

    outcome: CaseOutcome
    places: tuple[int, ...] = ()


def bound_case(shop: Workshop, goal: Goal, case: Case, builder: ProofBuilder) -> Bounded:
    """Bound a case by the interval domain, and by affine forms where that is not enough."""
    problem, margin = shop.problem(goal.block, case.tokens), claim_margin(shop.train, shop.infer)
    region = (
        token_region(case.tokens)
        if case.centre is None
        else box_region(goal.region.kind.value, case.centre, case.radius)
    )
    output: State | None = None
    reason = None
    try:
        bounds = problem.bound(case.centre, case.radius)
    except NoBound as no:
        reason = str(no)
    else:
        output = bounds.output
        found, top = functional_bound(output, goal.functional, goal.k)
        if goal.functional == "no_flip" or goal.admits(found * margin):
            builder.add(case.name, problem.graph, region, found * margin, bounds.witness)
            stable = None if top is None else top > 0
            return _bounded(case, found * margin, output.drift, stable=stable, margin=top)
    try:
        forms = problem.affine(case.centre, case.radius)
    except NoBound as no:
        if output is None:
            reason = str(no)
            return Bounded(CaseOutcome(case.name, len(case.tokens), math.inf, reason=reason))
        builder.add(case.name, problem.graph, region, found * margin, bounds.witness)
        return _bounded(case, found * margin, output.drift)
    drift = forms.box if output is None else forms.box.meet(output.drift)
    bound = drift_bound(drift, goal.functional) * margin
    builder.add(case.name, problem.graph, region, bound, forms.witness, "affine")
    return _bounded(case, bound, drift)


def _bounded(
    case: Case,
    bound: float,
    drift: Box,
    *,
    stable: bool | None = None,
    margin: float | None = None,
) -> Bounded:
    outcome = CaseOutcome(case.name, len(case.tokens), bound, stable=stable, margin=margin)
    largest = drift.mag().flatten()
    return Bounded(outcome, tuple(largest.topk(min(_PLACES, largest.numel())).indices.tolist()))
