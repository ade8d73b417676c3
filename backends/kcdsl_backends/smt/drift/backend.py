"""Bound small cases with z3, for the backend `z3`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import z3
from torch import Tensor

from kcdsl.diagnostics.model import at
from kcdsl.ir.terms import Program
from kcdsl.model.files import Artefacts
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.certifier.bounds import CaseBound
from kcdsl_backends.certifier.statements.cases import Case, cases_of, problem_of, slice_rows
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_backends.process import one_thread
from kcdsl_backends.real_arithmetic.backend import RealBackend, SolverAnswer
from kcdsl_backends.smt.drift.encoding import Encoder, coefficients
from kcdsl_backends.smt.drift.forms import System
from kcdsl_backends.smt.drift.search import (
    DriftElement,
    DriftQuestion,
    ElementQuestion,
    Search,
    size_of,
    targets,
)
from kcdsl_backends.smt.solver import Outcome

SECONDS = 60.0
"""Time limit of a case if the command has none."""
COEFFICIENTS = 2**25
"""Largest number of coefficients of one result of an encoded block: 256 MB."""
SPLITS = 64
"""Largest number of case splits of a question."""
TERMS = 50_000
"""Largest number of terms in the linear constraints of a question."""


@dataclass(slots=True)
class DriftGoal:
    """A case as questions for z3: its symbols, and every element of the drift.

    Args:
        targets: every element of the drift in both directions, with valid bounds.
        shape: of the output.
    """

    system: System
    targets: list[DriftElement]
    shape: tuple[int, ...]

    @staticmethod
    def of(problem: BlockProblem, centre: Tensor | None, radius: Tensor) -> DriftGoal:
        """Encode a block under two numerics on a region.

        Raises:
            NoBound: the block is too large, a result has no interval, an operation no rule.
        """
        needed = coefficients(problem)
        if needed > COEFFICIENTS:
            raise NoBound(problem.graph.output, too_large(needed))
        encoder = Encoder(problem, centre, radius)
        output = encoder.output()
        found = targets(encoder.system, output.drift, output.change)
        return DriftGoal(encoder.system, found, output.drift.shape)

    def box(self) -> Box:
        """Return the box of the drift that the bounds of all targets give."""
        ends = torch.full((2, math.prod(self.shape)), math.inf, dtype=torch.float64)
        for one in self.targets:
            ends[0 if one.sign > 0 else 1, one.place] = one.high
        high = torch.maximum(ends[0], -ends[1])
        return Box(-ends[1].reshape(self.shape), high.reshape(self.shape))

    def refusal(self, threshold: float | None) -> str | None:
        """Return why z3 is not asked; None if every undecided question is small enough."""
        asked = [one for one in self.targets if threshold is None or one.high > threshold]
        size = size_of(asked)
        if size.splits <= SPLITS and size.terms <= TERMS:
            return None
        return (
            f"too large: {size} in one question; at most {SPLITS} case splits and "
            f"{TERMS:,} terms are asked"
        )

    def input(self, target: DriftElement, centre: Tensor, radius: Tensor) -> Tensor:
        """Return the float32 input near the values that z3 found for a target, in the region."""
        moved = torch.zeros_like(centre).flatten()
        for symbol, value in target.values.items():
            if symbol < self.system.inputs:
                moved[self.system.places[symbol]] = value
        wide = radius.expand(centre.shape)
        x = (centre + wide * moved.reshape(centre.shape)).float().double()
        return torch.where((x - centre).abs() <= wide, x, centre)


def too_large(needed: int) -> str:
    """Return the reason not to encode a block with so many coefficients."""
    return (
        f"too large: about {needed:,} coefficients in one result; "
        f"at most {COEFFICIENTS:,} are encoded"
    )


@dataclass(frozen=True, slots=True)
class CaseSize:
    """The size of a case as questions to z3.

    Args:
        case: its name.
        small: whether z3 is asked.
        reason: the size of the largest question, or why z3 is not asked.
        scripts: the questions whether an element exceeds the threshold, in SMT-LIB, if z3 is asked.
    """

    case: str
    small: bool
    reason: str
    scripts: tuple[str, ...] = ()


def sizes(program: Program, files: Artefacts, goal: Goal) -> list[CaseSize]:
    """Return the size of every case of a goal.

    Raises:
        Refusal: the model, the kernels, the data or the block cannot be used.
    """
    model = load_model(program.model, files)
    train, infer = resolve(program.train), resolve(program.infer)
    factory = ProblemFactory(model, train, infer, torch.device("cpu"))
    with at(goal.span):
        rows = slice_rows(program, model, goal.region.slice)
        cases = cases_of(factory, goal, rows) if rows else []
        return [_size(factory, goal, case) for case in cases]


def _size(factory: ProblemFactory, goal: Goal, case: Case) -> CaseSize:
    encoded = _encoded(factory, goal, case)
    if isinstance(encoded, str):
        return CaseSize(case.name, False, encoded)
    threshold = _limit(goal)
    refusal = encoded.refusal(threshold)
    if refusal is not None:
        return CaseSize(case.name, False, refusal)
    asked = [one for one in encoded.targets if threshold is None or one.high > threshold]
    if threshold is None:
        return CaseSize(case.name, True, f"{size_of(asked)} in the largest question")
    if not asked:
        return CaseSize(case.name, True, "the bound holds before z3 is asked")
    scripts = tuple(DriftQuestion(one).text(_up(threshold)) for one in asked)
    reason = f"{len(asked)} questions; the largest has {size_of(asked)}"
    return CaseSize(case.name, True, reason, scripts)


def _encoded(factory: ProblemFactory, goal: Goal, case: Case) -> DriftGoal | str:
    """Return a case as questions, or the reason why it is not asked."""
    if case.longest is not None or goal.weights or goal.states:
        return "solvers are asked about one length, one checkpoint and one state"
    try:
        with one_thread():
            return DriftGoal.of(problem_of(factory, goal, case), case.centre, case.radius)
    except NoBound as no:
        return str(no)


def _limit(goal: Goal) -> float | None:
    """Return the limit of every element; None if the clause has no such number."""
    return _admitted(goal) if goal.functional == "inf" and goal.threshold is not None else None


@dataclass(frozen=True, slots=True)
class LinearSolver:
    """A solver of linear constraints with case splits.

    Args:
        name: its name in messages.
        version: returns the name and the version.
        question: makes the question about one element of the drift.
    """

    name: str
    version: Callable[[], str]
    question: Callable[[DriftElement], ElementQuestion]

    def bounded(
        self, factory: ProblemFactory, goal: Goal, case: Case, seconds: float | None
    ) -> SolverAnswer:
        """Return the smallest bound of a case that the solver proves within the time limit."""
        started = time.monotonic()
        encoded, threshold = _encoded(factory, goal, case), _limit(goal)
        if isinstance(encoded, str):
            length = case.longest or len(case.tokens)
            return SolverAnswer(CaseBound(CaseOutcome(case.name, length, math.inf, reason=encoded)))
        reason, notes = encoded.refusal(threshold), []
        spent = time.monotonic() - started
        left = max(0.0, (SECONDS if seconds is None else seconds) - spent)
        search = Search(encoded.targets, left, self.question)
        if reason is None:
            answer = Outcome.SAT if threshold is None else search.settle(threshold)
            if answer is Outcome.UNKNOWN:
                reason = f"{self.name} did not decide the threshold within the time limit"
            else:
                search.tighten()
        drift = encoded.box()
        bound = drift_bound(drift, goal.functional)
        if search.asked:
            notes.append(f"{search.asked} questions were put to {self.version()}")
        places = drift.mag().flatten().topk(min(3, math.prod(encoded.shape))).indices.tolist()
        outcome = CaseOutcome(case.name, len(case.tokens), bound)
        if reason is not None and not goal.admits(bound):
            outcome = CaseOutcome(case.name, len(case.tokens), bound, reason=reason)
        x = None
        strongest = max(encoded.targets, key=lambda one: one.low)
        if case.centre is not None and strongest.values and bool((case.radius > 0).any()):
            x = encoded.input(strongest, case.centre, case.radius)
        return SolverAnswer(CaseBound(outcome, tuple(places)), notes, x)


def _up(value: float) -> float:
    return math.nextafter(value, math.inf)


def _admitted(goal: Goal) -> float:
    """Return a float64 next to the threshold that the goal admits as a bound."""
    assert goal.threshold is not None
    value = float(goal.threshold)
    while value > 0 and not goal.admits(_up(value)):
        value = math.nextafter(value, -math.inf)
    return value


def _version() -> str:
    return f"z3 {z3.get_version_string()}"


BACKEND = RealBackend(
    "z3",
    _version,
    "{solver} answers `unsat` only where that is so: no proof of it is derived again",
    LinearSolver("z3", _version, DriftQuestion).bounded,
)
