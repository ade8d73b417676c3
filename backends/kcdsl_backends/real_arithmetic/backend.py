"""Decide drift goals with a solver of real arithmetic: bound all cases, attack them, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics.model import at
from kcdsl.ir.terms import EvidenceKind, Program
from kcdsl.model.files import Artefacts
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl.route.catalogue import Execution
from kcdsl.route.goals import Goal
from kcdsl.verdict.counterexample import counterexample
from kcdsl.verdict.model import Evidence, Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_backends.attack.runs import Attack
from kcdsl_backends.certifier.backend import ASSUMPTIONS, HERE
from kcdsl_backends.certifier.bounds import CaseBound
from kcdsl_backends.certifier.decision import verdict_of
from kcdsl_backends.certifier.replay import case_record
from kcdsl_backends.certifier.statements.cases import Case, cases_of, slice_rows
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.certifier.tasks import attack_case, worth_attacking
from kcdsl_backends.certifier.worker import peak_bytes


@dataclass(frozen=True, slots=True)
class SolverAnswer:
    """The answer of a solver to a case: a bound, notes for the user, and an input.

    `x` [T, D] is an input of the region with a presumably large drift, where an attack starts.
    None: no input is preferred.
    """

    bounded: CaseBound
    notes: Sequence[str] = ()
    x: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RealBackend:
    """A backend that bounds drift with a solver whose answers no checker derives again.

    Args:
        name: the name in the catalogue.
        solver: returns the name and the version of the solver.
        assumption: a further assumption of the evidence; `{solver}` is replaced by the solver.
        bound: bounds a case within seconds (None: no limit).
    """

    name: str
    solver: Callable[[], str]
    assumption: str
    bound: Callable[[ProblemFactory, Goal, Case, float | None], SolverAnswer]

    def decide(
        self,
        program: Program,
        base: Path,
        goals: Sequence[Goal],
        *,
        device: str = "cpu",
        attacks: bool = True,
        progress: Callable[[str, int, int], None] | None = None,
        execution: Execution = HERE,
        artefacts: Artefacts | None = None,
        **_: Any,
    ) -> tuple[GoalOutcome, ...]:
        """Decide goals; their outcomes come in the same order.

        A goal is held only if its clause has `evidence: proof-real`. There is no proof object.
        Arguments and errors are those of `kcdsl_backends.certifier.backend`, but the domains of a
        goal are methods of the solver, and only the time limit of `execution` is used: everything
        runs in this process, bounds on the CPU.
        """
        files = artefacts or Artefacts.of(base.resolve())
        model = load_model(program.model, files)
        train, infer = resolve(program.train), resolve(program.infer)
        factory = ProblemFactory(model, train, infer, torch.device("cpu"))
        limit = None if execution.seconds is None else time.monotonic() + execution.seconds
        found = []
        for goal in goals:
            with at(goal.span):
                rows = slice_rows(program, model, goal.region.slice)
                cases = cases_of(factory, goal, rows) if rows else []
                found.append(self._decided(program, factory, goal, cases, attacks, progress, limit))
        return tuple(found)

    def slice_sizes(
        self,
        program: Program,
        base: Path,
        slices: Collection[str],
        *,
        artefacts: Artefacts | None = None,
    ) -> dict[str, int]:
        """Return the number of rows of each of these slices of the contract."""
        model = load_model(program.model, artefacts or base)
        return {name: len(slice_rows(program, model, name)) for name in slices}

    def _decided(
        self,
        program: Program,
        factory: ProblemFactory,
        goal: Goal,
        cases: Sequence[Case],
        attacks: bool,
        progress: Callable[[str, int, int], None] | None,
        limit: float | None,
    ) -> GoalOutcome:
        """Return the outcome of a goal on its cases."""
        started, answers, notes = time.monotonic(), list[SolverAnswer](), dict[str, None]()
        for number, case in enumerate(cases):
            left = None if limit is None else max(0.0, limit - time.monotonic())
            answers.append(self.bound(factory, goal, case, left))
            notes.update(dict.fromkeys(answers[-1].notes))
            if progress is not None:
                progress(goal.clause.id, number + 1, len(cases))
        outcomes = [one.bounded.outcome for one in answers]
        strongest: tuple[Attack, Case] | None = None
        for index in worth_attacking(goal, outcomes) if attacks and cases else ():
            found = _attacked(factory, goal, cases[index], answers[index])
            outcomes[index] = replace(outcomes[index], attack=found.value)
            if strongest is None or found.value > strongest[0].value:
                strongest = found, cases[index]
            if goal.refuted_by(found.value):
                break
        attack = None if strongest is None else strongest[0]
        verdict = self._verdict(goal, outcomes, attack)
        assumptions = (*ASSUMPTIONS, self.assumption.format(solver=self.solver()))
        return GoalOutcome(
            goal=goal,
            verdict=verdict,
            evidence=Evidence(EvidenceKind.PROOF_REAL, n=len(cases), assumptions=assumptions),
            backend=self.name,
            cases=tuple(outcomes),
            seconds=time.monotonic() - started,
            peak_bytes=peak_bytes(),
            counterexample=_counterexample(program, factory, goal, verdict, strongest),
            notes=tuple(notes),
        )

    def _verdict(
        self, goal: Goal, outcomes: Sequence[CaseOutcome], found: Attack | None
    ) -> Verdict:
        """Return the verdict; invalid evidence if a run exceeds a bound of the solver."""
        for case in outcomes:
            if case.attack is not None and case.attack > case.bound:
                return InvalidEvidence(
                    f"{case.name}: a run attains {case.attack!r}, above the bound {case.bound!r}: "
                    f"{self.solver()} is contradicted"
                )
        verdict = verdict_of(goal, outcomes, found)
        if isinstance(verdict, Held) and goal.clause.evidence is not EvidenceKind.PROOF_REAL:
            worst = max(case.bound for case in outcomes)
            return Inconclusive(
                f"the bound {worst:.3g} has no proof that is derived again, which the clause does "
                "not admit: `evidence: proof-real` does"
            )
        return verdict


def _attacked(factory: ProblemFactory, goal: Goal, case: Case, answer: SolverAnswer) -> Attack:
    """Return the strongest run, from the input of the answer or in the whole region."""
    if answer.x is not None:
        there = replace(case, centre=answer.x, radius=torch.zeros_like(case.radius))
        found = attack_case(factory, goal, there, answer.bounded)
        if goal.refuted_by(found.value):
            return found
    return attack_case(factory, goal, case, answer.bounded)


def _counterexample(
    program: Program,
    factory: ProblemFactory,
    goal: Goal,
    verdict: Verdict,
    strongest: tuple[Attack, Case] | None,
) -> bytes | None:
    """Return the document of the run that violates a goal; None if there is none."""
    if not isinstance(verdict, Violated) or strongest is None or strongest[0].record is None:
        return None
    attack, case = strongest
    record = case_record(factory.problem(goal.block, case.tokens), factory, goal, case)
    return counterexample(program, goal, {**record, **(attack.record or {})})
