"""Decide drift goals with auto_LiRPA: bound every case, attack it, compare both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics.model import at
from kcdsl.ir.terms import EvidenceKind, Program
from kcdsl.model.architecture import load_model
from kcdsl.model.files import Artefacts
from kcdsl.model.presets import resolve
from kcdsl.route.goals import Goal
from kcdsl.verdict.counterexample import counterexample
from kcdsl.verdict.model import Evidence, Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_backends.attack.runs import Attack
from kcdsl_backends.certifier.backend import ASSUMPTIONS
from kcdsl_backends.certifier.bounds import CaseBound
from kcdsl_backends.certifier.decision import verdict_of
from kcdsl_backends.certifier.replay import case_record
from kcdsl_backends.certifier.statements.cases import Case, cases_of, problem_of, slice_rows
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.certifier.tasks import attack_case, worth_attacking
from kcdsl_backends.certifier.worker import peak_bytes
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_backends.lirpa.library import METHODS, Unanswered, bounds, version
from kcdsl_backends.lirpa.network import DriftNetwork

REAL = "auto_LiRPA {version} computes bounds in float64 and does not count its own roundings"
"""What evidence of this backend assumes beside the assumptions of a proof."""
_LARGEST = 2**32
"""Bytes that the coefficients of CROWN may take before it is left out."""
_WIDEST = 2**16
"""Functionals of one result that CROWN carries back, at most."""


class LirpaBackend:
    """The `lirpa` backend of the catalogue."""

    name = "lirpa"

    def decide(
        self,
        program: Program,
        base: Path,
        goals: Sequence[Goal],
        *,
        device: str = "cpu",
        attacks: bool = True,
        progress: Callable[[str, int, int], None] | None = None,
        artefacts: Artefacts | None = None,
        **_: Any,
    ) -> tuple[GoalOutcome, ...]:
        """Decide goals; their outcomes come in the same order.

        A goal is held only if its clause asks for `evidence: proof-real`. There is no proof object.

        Args:
            program: the compiled contract.
            base: folder of the contract, to which its paths are relative.
            goals: what to decide; the domains of a goal are methods of `METHODS`.
            device: where the training kernel runs that gives the regions; bounds are of the CPU.
            attacks: search for concrete runs, and compare every bound with them.
            progress: told after every case.
            artefacts: the files of the command, with which the digests of what is read are
                recorded.

        Raises:
            Refusal: the model, the kernels, the data or a block cannot be used.
        """
        files = artefacts or Artefacts.of(base.resolve())
        model = load_model(program.model, files)
        train, infer = resolve(program.train), resolve(program.infer)
        factory = ProblemFactory(model, train, infer, torch.device("cpu"))
        found = []
        for goal in goals:
            with at(goal.span):
                rows = slice_rows(program, model, goal.region.slice)
                cases = cases_of(factory, goal, rows) if rows else []
                found.append(_decided(program, factory, goal, cases, attacks, progress))
        return tuple(found)

    def slice_sizes(
        self,
        program: Program,
        base: Path,
        slices: Collection[str],
        *,
        artefacts: Artefacts | None = None,
    ) -> dict[str, int]:
        """Return how many rows each of these slices of the contract has."""
        model = load_model(program.model, artefacts or base)
        return {name: len(slice_rows(program, model, name)) for name in slices}


def _decided(
    program: Program,
    factory: ProblemFactory,
    goal: Goal,
    cases: Sequence[Case],
    attacks: bool,
    progress: Callable[[str, int, int], None] | None,
) -> GoalOutcome:
    """Return the outcome of a goal on its cases."""
    started, bounded, notes = time.monotonic(), list[CaseBound](), dict[str, None]()
    for number, case in enumerate(cases):
        one, told = _bounded(factory, goal, case)
        bounded.append(one)
        notes.update(dict.fromkeys(told))
        if progress is not None:
            progress(goal.clause.id, number + 1, len(cases))
    outcomes = [one.outcome for one in bounded]
    strongest: tuple[Attack, Case] | None = None
    for index in worth_attacking(goal, outcomes) if attacks and outcomes else ():
        found = attack_case(factory, goal, cases[index], bounded[index])
        outcomes[index] = replace(outcomes[index], attack=found.value)
        if strongest is None or found.value > strongest[0].value:
            strongest = found, cases[index]
        if goal.refuted_by(found.value):
            break
    verdict = _verdict(goal, outcomes, None if strongest is None else strongest[0])
    assumptions = (*ASSUMPTIONS, REAL.format(version=version()))
    return GoalOutcome(
        goal=goal,
        verdict=verdict,
        evidence=Evidence(EvidenceKind.PROOF_REAL, n=len(cases), assumptions=assumptions),
        backend=LirpaBackend.name,
        cases=tuple(outcomes),
        seconds=time.monotonic() - started,
        peak_bytes=peak_bytes(),
        counterexample=_counterexample(program, factory, goal, verdict, strongest),
        notes=tuple(notes),
    )


def _verdict(goal: Goal, outcomes: Sequence[CaseOutcome], found: Attack | None) -> Verdict:
    """Return the verdict; a run above a bound contradicts the library, and nothing is held then."""
    for case in outcomes:
        if case.attack is not None and case.attack > case.bound:
            return InvalidEvidence(
                f"{case.name}: a run attains {case.attack!r}, above the bound {case.bound!r}: "
                f"auto_LiRPA {version()} is contradicted"
            )
    verdict = verdict_of(goal, outcomes, found)
    if isinstance(verdict, Held) and goal.clause.evidence is not EvidenceKind.PROOF_REAL:
        worst = max(case.bound for case in outcomes)
        return Inconclusive(
            f"the bound {worst:.3g} is one of real arithmetic, which the clause does not admit: "
            "`evidence: proof-real` does"
        )
    return verdict


def _counterexample(
    program: Program,
    factory: ProblemFactory,
    goal: Goal,
    verdict: Verdict,
    strongest: tuple[Attack, Case] | None,
) -> bytes | None:
    """Return the document of the run that breaks a goal; None where no run does."""
    if not isinstance(verdict, Violated) or strongest is None or strongest[0].record is None:
        return None
    attack, case = strongest
    record = case_record(factory.problem(goal.block, case.tokens), factory, goal, case)
    return counterexample(program, goal, {**record, **(attack.record or {})})


# --- bounds ---------------------------------------------------------------------------------------


def _bounded(factory: ProblemFactory, goal: Goal, case: Case) -> tuple[CaseBound, list[str]]:
    """Return the least bound of a case, and what people should know of it."""
    named = case.name, case.longest or len(case.tokens)
    best, method, without, places = math.inf, "", list[str](), tuple[int, ...]()
    if case.longest is not None or goal.weights or goal.states:
        reason = "auto_LiRPA is asked about one length, one checkpoint and one state"
        return CaseBound(CaseOutcome(*named, math.inf, reason=reason)), []
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
        return CaseBound(CaseOutcome(*named, math.inf, reason=reason)), []
    told = f"bounds are of auto_LiRPA {version()}, {method}, in real arithmetic"
    return CaseBound(CaseOutcome(*named, best), places), [told, *without]


def _methods(goal: Goal) -> tuple[str, ...]:
    """Return the methods to try in turn: α-CROWN only if it is asked for."""
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
        most: bytes that CROWN may take, as they are estimated.

    Raises:
        NoBound: some result has no interval, or an operation the network does not have.
        Unanswered: the library has no bound, or CROWN would take too much memory.
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
    """Refuse a block for whose coefficients there is too little memory.

    CROWN carries one functional back for each element of what a nonlinear operation reads: to all
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


BACKEND = LirpaBackend()
