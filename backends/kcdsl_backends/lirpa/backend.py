"""Bound cases with auto_LiRPA, for the backend `lirpa`."""

from __future__ import annotations

import math

from torch import Tensor

from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.certifier.bounds import CaseBound
from kcdsl_backends.certifier.statements.cases import Case, problem_of
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_backends.lirpa.library import METHODS, Unanswered, bounds, version
from kcdsl_backends.lirpa.network import DriftNetwork
from kcdsl_backends.real_arithmetic.backend import RealBackend, SolverAnswer

_LARGEST = 2**32
"""Memory limit in bytes for the coefficients of CROWN."""
_WIDEST = 2**16
"""Largest number of functionals of one result that CROWN propagates back."""


def _bounded(
    factory: ProblemFactory, goal: Goal, case: Case, _seconds: float | None
) -> SolverAnswer:
    """Return the smallest bound of a case with notes about the method."""
    named = case.name, case.longest or len(case.tokens)
    best, method, without, places = math.inf, "", list[str](), tuple[int, ...]()
    if case.longest is not None or goal.weights or goal.states:
        reason = "auto_LiRPA is used for one length, one checkpoint and one state only"
        return SolverAnswer(CaseBound(CaseOutcome(*named, math.inf, reason=reason)))
    problem = problem_of(factory, goal, case)
    for name in _methods(goal):
        try:
            drift = drift_box(problem, case.centre, case.radius, name)
        except (NoBound, Unanswered) as no:
            without.append(f"{name}: {no}")
            continue
        value = drift_bound(drift, goal.functional)
        if value < best:
            best, method, places = value, name, _places(drift)
        if goal.admits(best):
            break
    if not method:
        reason = "; ".join(without)
        return SolverAnswer(CaseBound(CaseOutcome(*named, math.inf, reason=reason)))
    told = f"bounds are of auto_LiRPA {version()}, {method}, in real arithmetic"
    return SolverAnswer(CaseBound(CaseOutcome(*named, best), places), [told, *without])


def _methods(goal: Goal) -> tuple[str, ...]:
    """Return the methods to try in order; α-CROWN only on request."""
    return ("ibp", "crown") if goal.domains is None else goal.domains


def drift_box(
    problem: BlockProblem,
    centre: Tensor | None,
    radius: Tensor,
    method: str,
    *,
    most: int = _LARGEST,
) -> Box:
    """Return bounds of the drift of a block's output by a method of auto_LiRPA.

    Args:
        problem: the block under two numerics.
        centre, radius: the region, [T, D] and broadcastable; centre None for a block on token ids.
        method: one of `METHODS`.
        most: limit of the estimated memory of CROWN in bytes.

    Raises:
        NoBound: a result has no interval, or an operation is not supported by the network.
        Unanswered: the library gives no bound, or CROWN would need too much memory.
    """
    if method not in METHODS:
        raise ValueError(f"no method of auto_LiRPA: {method!r}")
    network = DriftNetwork(problem, centre, radius)
    if method != "ibp":
        _refuse_large(problem, network, method, most)
    low, high = bounds(network, network.entries, method)
    shape = problem.graph.node(problem.graph.output).shape
    return Box(low.reshape(shape), high.reshape(shape))


def _refuse_large(problem: BlockProblem, network: DriftNetwork, method: str, most: int) -> None:
    """Raise Unanswered if the coefficients of CROWN would need more than `most` bytes.

    CROWN propagates one functional for each operand element of a nonlinear operation: back to all
    inputs of the network, above and below, and through every term of products of two results.
    """
    nodes = {node.name: node for node in problem.graph.nodes}
    results = [node for node in nodes.values() if node.op not in ("param", "constant")]
    rows = max(math.prod(node.shape) for node in results)
    products = [node for node in results if node.op == "matmul"]
    terms = [math.prod(node.shape) * nodes[node.inputs[0]].shape[-1] for node in products]
    inputs = sum(entry.low.numel() for entry in network.entries)
    needed = 8 * min(rows, _WIDEST) * (4 * inputs + 16 * max(terms, default=0))
    if needed > most:
        raise Unanswered(
            f"{method} would take about {needed / 2**30:.0f} GB for results of {rows:,} numbers"
        )


def _places(drift: Box) -> tuple[int, ...]:
    largest = drift.mag().flatten()
    return tuple(largest.topk(min(3, largest.numel())).indices.tolist())


BACKEND = RealBackend(
    "lirpa",
    lambda: f"auto_LiRPA {version()}",
    "{solver} computes bounds in float64 and does not count its own roundings",
    _bounded,
)
