"""Decide goals about every input of a region: bound, attack, verdict, proof."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.places import at
from kcdsl.ir.terms import EvidenceKind, KernelRef, Program
from kcdsl.model.architecture import load_model
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import resolve
from kcdsl.route.goals import Goal
from kcdsl.verdict.model import Evidence, Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_backends.adapters import find_adapter, refuse_unserved
from kcdsl_backends.attack.search import Attack
from kcdsl_backends.certifier.attacking import attack_cases
from kcdsl_backends.certifier.bounding import Bounded, bound_case
from kcdsl_backends.certifier.cases import cases_of, slice_rows
from kcdsl_backends.certifier.proof import ProofBuilder
from kcdsl_backends.certifier.workshop import Workshop
from kcdsl_certs.recheck import recheck

ASSUMPTIONS = (
    "float64 exp, expm1, erf and tanh of the verifier are within 4 ulp",
    "both kernels obey the numerics specifications named in the goal",
    "the block graph is the block: it was exported from the module of the architecture",
    "region centres are the training kernel's activations on the rows of the slice",
)

Progress = Callable[[str, int, int], None]
"""Called with (goal, cases done, cases in all)."""


@dataclass(frozen=True, slots=True)
class _Options:
    """How goals are decided."""

    attacks: bool
    confirm: bool
    progress: Progress | None
    notes: tuple[str, ...]


class IntervalBackend:
    """The `interval` backend of the catalogue."""

    name = "interval"

    def decide(
        self,
        program: Program,
        base: Path,
        goals: Sequence[Goal],
        *,
        device: str = "cpu",
        attacks: bool = True,
        confirm: bool = True,
        progress: Progress | None = None,
    ) -> tuple[GoalOutcome, ...]:
        """Decide goals in order.

        Args:
            program: the compiled contract.
            base: folder of the contract, to which its paths are relative.
            goals: what to decide.
            device: "cpu" or "cuda".
            attacks: search for concrete runs beside the bounds.
            confirm: have every proof re-derived by the independent checker; what it does not
                confirm is inconclusive.
            progress: told after every case.

        Raises:
            Refusal: the model, the kernels, the data or a block cannot be used.
        """
        model = load_model(program.model, base)
        train, infer = resolve(program.train), resolve(program.infer)
        shop = Workshop(model, train, infer, torch.device(device))
        for goal in goals:
            with at(goal.span):
                model.block(goal.block)
        notes = (
            *_unserved(program.train, train, "training", device),
            *_unserved(program.infer, infer, "inference", device),
        )
        options = _Options(attacks, confirm, progress, notes)
        outcomes = []
        for goal in goals:
            with at(goal.span):
                outcomes.append(self._decide(program, base, shop, goal, options))
        return tuple(outcomes)

    def slice_sizes(self, program: Program, base: Path, slices: Collection[str]) -> dict[str, int]:
        """Return how many rows each of these slices of the contract has."""
        model = load_model(program.model, base)
        return {name: len(slice_rows(program, base, model, name)) for name in slices}

    def _decide(
        self,
        program: Program,
        base: Path,
        shop: Workshop,
        goal: Goal,
        options: _Options,
    ) -> GoalOutcome:
        started = time.perf_counter()
        rows = slice_rows(program, base, shop.model, goal.region.slice)
        if not rows:
            return _without_rows(goal, self.name)
        cases = cases_of(shop, goal, rows)
        builder = ProofBuilder(
            shop.model, goal.block, shop.train, shop.infer, goal.functional, goal.k
        )
        bounded: list[Bounded] = []
        for done, case in enumerate(cases):
            bounded.append(bound_case(shop, goal, case, builder))
            if options.progress is not None:
                options.progress(goal.clause.id, done + 1, len(cases))
        outcomes, found = attack_cases(shop, goal, cases, bounded, options.attacks)
        verdict = _verdict(goal, outcomes, found)
        proof = builder.document() if isinstance(verdict, Held) else None
        if proof is not None and options.confirm:
            confirmation = recheck(proof, shop.model.checkpoint.path)
            if not confirmation.ok:
                proof = None
                verdict = Inconclusive(
                    "the independent checker does not confirm the proof: "
                    f"{confirmation.reason}: {confirmation.detail}"
                )
        return GoalOutcome(
            goal=goal,
            verdict=verdict,
            evidence=Evidence(
                EvidenceKind.PROOF, n=len(cases), assumptions=(*ASSUMPTIONS, *options.notes)
            ),
            backend=self.name,
            cases=tuple(outcomes),
            seconds=time.perf_counter() - started,
            peak_bytes=_peak_bytes(),
            proof=proof,
            confirmed=proof is not None and options.confirm,
            notes=options.notes,
        )


def _unserved(kernel: KernelRef, numerics: Numerics, side: str, device: str) -> tuple[str, ...]:
    """Return why the kernel's adapter does not compute as the numerics say; empty if it does."""
    try:
        refuse_unserved(kernel.run, find_adapter(kernel.run), numerics, device)
    except Refusal as refusal:
        reason = refusal.diagnostics[0].message
        return (f"the {side} kernel keeps numerics that were never run here: {reason}",)
    return ()


def _without_rows(goal: Goal, backend: str) -> GoalOutcome:
    reason = f"the slice {goal.region.slice!r} selects no request"
    return GoalOutcome(
        goal, InvalidEvidence(reason), Evidence(EvidenceKind.PROOF, n=0), backend, (), 0.0, 0
    )


def _verdict(goal: Goal, cases: Sequence[CaseOutcome], found: Attack | None) -> Verdict:
    if goal.functional == "no_flip":
        unstable = [case.name for case in cases if not case.stable]
        if not unstable:
            return Held()
        named = ", ".join(unstable[:3]) + (" …" if len(unstable) > 3 else "")
        return Inconclusive(f"a flip is not excluded for {len(unstable)} of {len(cases)}: {named}")
    if found is not None and goal.refuted_by(found.value):
        return Violated(_counterexample(cases, found))
    open_cases = [case for case in cases if not goal.admits(case.bound)]
    if not open_cases:
        return Held()
    worst = max(open_cases, key=lambda case: case.bound)
    if worst.reason is not None:
        return Inconclusive(f"{worst.name}: {worst.reason}")
    return Inconclusive(
        f"{worst.name}: the bound {worst.bound:.3g} exceeds the threshold, no run found does"
    )


def _counterexample(cases: Sequence[CaseOutcome], found: Attack) -> dict[str, Any]:
    case = max((c for c in cases if c.attack is not None), key=lambda c: c.attack or 0.0)
    return {
        "case": case.name,
        "value": found.value,
        "row": list(found.row),
        "column": found.column,
        "train": found.train_value,
        "infer": found.infer_value,
    }


def _peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


BACKEND = IntervalBackend()
