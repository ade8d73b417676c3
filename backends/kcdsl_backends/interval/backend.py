"""Decide goals with the interval domain: bound, attack, verdict, proof."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.diagnostics.places import at
from kcdsl.ir.terms import EvidenceKind, KernelRef, Program, RegionKind
from kcdsl.model.architecture import Model, load_model
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import resolve
from kcdsl.route.goals import Goal
from kcdsl.verdict.model import Evidence, Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_backends.adapters import find_adapter, refuse_unserved
from kcdsl_backends.attack.search import Attack, attack
from kcdsl_backends.interval.box import Box
from kcdsl_backends.interval.certified import BlockProblem, Workshop, claim_margin, functional_bound
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.functionals import drift_bound
from kcdsl_backends.interval.proof import ProofBuilder, box_region, token_region
from kcdsl_backends.interval.state import State
from kcdsl_backends.requests import Request, load_requests, select
from kcdsl_backends.threads import threads_for
from kcdsl_certs.recheck import recheck

ASSUMPTIONS = (
    "float64 exp, expm1, erf and tanh of the verifier are within 4 ulp",
    "both kernels obey the numerics specifications named in the goal",
    "the block graph is the block: it was exported from the module of the architecture",
    "region centres are the training kernel's activations on the rows of the slice",
)

_PLACES = 3
"""Places of the output, those with the largest bounds, at which an attack pushes first."""

Progress = Callable[[str, int, int], None]
"""Called with (goal, cases done, cases in all)."""


@dataclass(frozen=True, slots=True)
class _Case:
    """One region of a goal: a name, the tokens it came from, and the box of hidden states."""

    name: str
    tokens: tuple[int, ...]
    centre: Tensor | None
    radius: Tensor


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
        return {name: len(_slice_rows(program, base, model, name)) for name in slices}

    def _decide(
        self,
        program: Program,
        base: Path,
        shop: Workshop,
        goal: Goal,
        options: _Options,
    ) -> GoalOutcome:
        started = time.perf_counter()
        rows = _slice_rows(program, base, shop.model, goal.region.slice)
        if not rows:
            return _without_rows(goal, self.name)
        cases = _cases(shop, goal, rows)
        builder = ProofBuilder(
            shop.model, goal.block, shop.train, shop.infer, goal.functional, goal.k
        )
        bounded: list[_Bounded] = []
        for done, case in enumerate(cases):
            bounded.append(_bound_case(shop, goal, case, builder))
            if options.progress is not None:
                options.progress(goal.clause.id, done + 1, len(cases))
        outcomes, found = _attack(shop, goal, cases, bounded, options.attacks)
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


def _slice_rows(program: Program, base: Path, model: Model, name: str) -> tuple[Request, ...]:
    declared = program.slice(name)
    data = declared.data or program.data
    if data is None:
        raise refuse(
            codes.FILE_MISSING,
            f"the slice {name!r} has no data",
            help="name a JSONL file: `data:` of the contract or of the slice",
        )
    tokenizer = model.tokenizer_source
    tokenize = None if tokenizer is None else tokenizer.encode
    return select(load_requests(base / data, data, tokenize, model.ids), declared)


def _without_rows(goal: Goal, backend: str) -> GoalOutcome:
    reason = f"the slice {goal.region.slice!r} selects no request"
    return GoalOutcome(
        goal, InvalidEvidence(reason), Evidence(EvidenceKind.PROOF, n=0), backend, (), 0.0, 0
    )


def _cases(shop: Workshop, goal: Goal, rows: Sequence[Request]) -> list[_Case]:
    zero = torch.zeros(1, 1, dtype=torch.float64, device=shop.device)
    if goal.block == "model":
        if goal.region.kind is not RegionKind.POINTS:
            raise refuse(
                codes.REGION_OF_TOKENS,
                f"clause {goal.clause.id}: block `model` reads token ids, which have no ball",
                help="use points(...), or name a block on hidden states such as attn_0",
            )
        return [_Case(row.id, row.tokens, None, zero) for row in rows]
    centres = [(row, shop.centre(goal.block, row.tokens)) for row in rows]
    kind, radius = goal.region.kind, _at_least(goal.region.radius)
    if kind is RegionKind.HULL:
        return _hulls(centres, radius)
    spread = torch.full_like(zero, radius if kind is RegionKind.BALL else 0.0)
    return [_Case(row.id, row.tokens, centre, spread) for row, centre in centres]


def _at_least(value: Fraction) -> float:
    """Return a float64 that is not below an exact number."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def _hulls(centres: Sequence[tuple[Request, Tensor | None]], margin: float) -> list[_Case]:
    """Return one box per sequence length: per feature, over all rows and positions of the slice.

    The box is widened by `margin` times its width on both sides.
    """
    stacked = torch.cat([c for _, c in centres if c is not None], 0)
    low, high = stacked.amin(0), stacked.amax(0)
    middle = (low + high) / 2
    radius = torch.maximum(high - middle, middle - low) * (1 + 2 * margin) * (1 + 2.0**-50)
    found: dict[int, _Case] = {}
    for row, _ in centres:
        length = row.length
        shape = (length, middle.shape[0])
        found.setdefault(
            length,
            _Case(
                f"hull-{length}",
                row.tokens,
                middle.expand(shape).contiguous(),
                radius.expand(shape).contiguous(),
            ),
        )
    return list(found.values())


@dataclass(frozen=True, slots=True)
class _Bounded:
    """What is proved of a case, and the places of the output where the bound is largest."""

    outcome: CaseOutcome
    places: tuple[int, ...] = ()


def _bound_case(shop: Workshop, goal: Goal, case: _Case, builder: ProofBuilder) -> _Bounded:
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
            return _Bounded(CaseOutcome(case.name, len(case.tokens), math.inf, reason=reason))
        builder.add(case.name, problem.graph, region, found * margin, bounds.witness)
        return _bounded(case, found * margin, output.drift)
    drift = forms.box if output is None else forms.box.meet(output.drift)
    bound = drift_bound(drift, goal.functional) * margin
    builder.add(case.name, problem.graph, region, bound, forms.witness, "affine")
    return _bounded(case, bound, drift)


def _bounded(
    case: _Case,
    bound: float,
    drift: Box,
    *,
    stable: bool | None = None,
    margin: float | None = None,
) -> _Bounded:
    outcome = CaseOutcome(case.name, len(case.tokens), bound, stable=stable, margin=margin)
    largest = drift.mag().flatten()
    return _Bounded(outcome, tuple(largest.topk(min(_PLACES, largest.numel())).indices.tolist()))


def _attack(
    shop: Workshop,
    goal: Goal,
    cases: Sequence[_Case],
    bounded: Sequence[_Bounded],
    wanted: bool,
) -> tuple[list[CaseOutcome], Attack | None]:
    """Attack the case with the largest bound, and every case that its bound leaves open."""
    results = [found.outcome for found in bounded]
    if not wanted or goal.functional == "no_flip":
        return results, None
    widest = max(range(len(results)), key=lambda i: results[i].bound)
    open_cases = [i for i, case in enumerate(results) if not goal.admits(case.bound)]
    strongest: Attack | None = None
    for index in dict.fromkeys([widest, *open_cases]):
        problem: BlockProblem = shop.problem(goal.block, cases[index].tokens)
        train, infer = problem.simulators()
        with threads_for(problem.size):
            found = attack(
                train,
                infer,
                goal.functional,
                cases[index].centre,
                cases[index].radius,
                seed=index,
                places=bounded[index].places,
            )
        results[index] = replace(results[index], attack=found.value)
        if strongest is None or found.value > strongest.value:
            strongest = found
        if goal.refuted_by(found.value):
            break
    return results, strongest


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
