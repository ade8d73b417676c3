"""Tasks that any process can run: bound a case, attack it, check a part of a proof.

Cached results may be wrong; the checker re-derives every proof. The subject of a proof is never
taken from a cache entry, and cached values must agree with the statements of the cached proof.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import NoneType
from typing import Any

from kcdsl.diagnostics.model import at
from kcdsl.model.graph import array_digest
from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.attack import attack, with_orders
from kcdsl_backends.attack.routes import other_route
from kcdsl_backends.attack.runs import Attack, attack_of, attained, record_run, run_of
from kcdsl_backends.attack.simulation import Overflowed
from kcdsl_backends.certifier.bounds import CaseBound, bound_case
from kcdsl_backends.certifier.cache import CacheEntry, Lookup, decode
from kcdsl_backends.certifier.statements.cases import Case, problem_of, region_of
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.certifier.statements.proof import SUBJECT, Contents, stated_of
from kcdsl_backends.certifier.worker import WorkerContext
from kcdsl_backends.forked import over_rows
from kcdsl_backends.process import one_thread, refuse_late, threads_for, until
from kcdsl_certs.recheck import recheck


@dataclass(frozen=True, slots=True)
class BoundedCase:
    """A bound and its contribution to the proof of its goal (None if there is no bound)."""

    bounded: CaseBound
    contents: Contents | None


@dataclass(frozen=True, slots=True)
class RecheckResult:
    """The checker's result for a part of a proof; `reason` is empty if it agrees."""

    reason: str


@dataclass(frozen=True, slots=True)
class Attained:
    """The largest drift of a run after each link of a chain but the last."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BoundTask:
    """Bound one case of a goal."""

    goal: Goal
    case: Case

    def run(self, context: WorkerContext) -> tuple[BoundedCase, Lookup | None]:
        """Bound the case, or take its bound from the cache."""
        with at(self.goal.span):
            case = self.case.on(context.factory.device)
            graph = problem_of(context.factory, self.goal, case).graph

            def made(value: Any) -> BoundedCase:
                bounded, claim, stated = decode(value, (CaseBound, CaseOutcome))
                refuse_inconsistent(self.goal, bounded, claim, stated)
                named = replace(bounded, outcome=replace(bounded.outcome, name=case.name))
                if stated is None:
                    return BoundedCase(named, None)
                builder = context.builder(self.goal)
                region = region_of(context.factory, self.goal, case)
                builder.add_stated(case.name, graph, region, claim, stated)
                return BoundedCase(named, builder.contents())

            entry = entry_of(context, "bound", self.goal, case)
            kept, found = entry.read(made)
            if kept is not None:
                return kept, found
            builder = context.builder(self.goal)
            with until(context.setting.limit):
                refuse_late()
                bounded = bound_case(context.factory, self.goal, case, builder)
            contents = builder.contents()
            if bounded.finished:
                entry.write((bounded, *stated_of(contents)))
            return BoundedCase(bounded, contents if contents.cases else None), found


@dataclass(frozen=True, slots=True)
class AttackTask:
    """Search for a concrete run of a case with a large drift."""

    goal: Goal
    case: Case
    bounded: CaseBound

    def run(self, context: WorkerContext) -> tuple[Attack, Lookup | None]:
        """Attack the case, or take its attack from the cache."""
        with at(self.goal.span):
            case = self.case.on(context.factory.device)
            starts = {
                "places": list(self.bounded.places),
                "start": list(map(str, self.bounded.start)),
            }
            entry = entry_of(context, "attack", self.goal, case, **starts)
            kept, found = entry.read(lambda value: _reproduced(context, self.goal, case, value))
            if kept is not None:
                return kept, found
            with until(context.setting.limit):
                refuse_late()
            fresh = attack_case(context.factory, self.goal, case, self.bounded)
            if math.isinf(self.bounded.outcome.bound):
                fresh = replace(fresh, rerouted=_rerouted(context.factory, self.goal, case))
            if fresh.record is not None or not self.goal.refuted_by(fresh.value):
                entry.write(fresh)
            return fresh, found


def _reproduced(context: WorkerContext, goal: Goal, case: Case, value: Any) -> Attack | None:
    """Return a cached attack; one that refutes its goal only if its run is reproduced.

    Raises one of `DAMAGE` if it is invalid."""
    case = case.at_its_length
    kept = decode(value, (Attack,))
    if not (isinstance(kept, Attack) and type(kept.value) is float and kept.value >= 0):
        return None
    if type(kept.rerouted) is not str:
        return None
    if kept.record is None:
        return None if goal.refuted_by(kept.value) else kept
    train, infer = context.factory.problem(goal.block, case.tokens).simulators()
    run = run_of(kept.record, {"train": train, "infer": infer})
    if run.x is not None and not case.holds(run.x):
        return None
    with one_thread():
        again = attack_of(run, train, infer, goal.functional)
    if again is None or not goal.refuted_by(again.value):
        return None
    return kept if kept.record.get("attained") == attained(again) else None


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Have the independent checker re-derive every `step`-th case of a proof, from `first` on."""

    proof: bytes
    first: int = 0
    step: int = 1

    def run(self, context: WorkerContext) -> tuple[RecheckResult, None]:
        """Check the whole document and re-derive these cases."""
        model = context.factory.model
        served = None if model.served is None else model.served.path
        part = (self.first, self.step)
        outcome = recheck(
            self.proof, model.checkpoint.path, part=part, served=served, over_rows=over_rows
        )
        return RecheckResult("" if outcome.ok else f"{outcome.reason}: {outcome.detail}"), None


def entry_of(context: WorkerContext, what: str, goal: Goal, case: Case, **more: Any) -> CacheEntry:
    """Return the cache entry of a result about a case, keyed by everything that it depends on."""
    factory = context.factory
    region: dict[str, Any] = {"kind": goal.region.kind.value, "box": case.digest}
    if case.longest is not None:
        tables = factory.sequences(goal.block, case.longest).tables
        region["tables"] = {name: array_digest(tables[name]) for name in sorted(tables)}
    graph = problem_of(factory, goal, case).graph
    return context.entry(what, goal, graph, region=region, stated=stated_goal(goal), **more)


def stated_goal(goal: Goal) -> dict[str, str]:
    """Return the fields of a goal, besides its region, that a bound depends on."""
    stated = {f.name: repr(getattr(goal, f.name)) for f in fields(goal)}
    del stated["obligation"], stated["region"]
    return {**stated, "evidence": str(goal.clause.evidence)}


def worth_attacking(goal: Goal, outcomes: Sequence[CaseOutcome]) -> list[int]:
    """Return the cases to attack, in order: the one with the largest bound, then every case whose
    bound does not prove the goal. The search ends at the first that refutes the goal."""
    if goal.functional == "no_flip":
        return []
    widest = max(range(len(outcomes)), key=lambda i: outcomes[i].bound)
    still_open = [i for i, case in enumerate(outcomes) if not goal.admits(case.bound)]
    return list(dict.fromkeys([widest, *still_open]))


def attack_case(factory: ProblemFactory, goal: Goal, case: Case, bounded: CaseBound) -> Attack:
    """Search for runs of one case with a large drift; deterministic.

    The result is plain data. It has the record of its run only if that refutes the goal; a run with
    concrete orders of all sums is preferred. If all runs overflow, the value is 0 without a run. In
    a region of any length, sequences with the length of the case's tokens are attacked.
    """
    any_length, case = case.longest is not None, case.at_its_length
    problem: BlockProblem = factory.problem(goal.block, case.tokens)
    shape, places = problem.graph.node(problem.graph.output).shape, bounded.places
    if any_length:  # under a causal mask the last row reads most others
        first = math.prod(shape) - shape[-1]
        places = tuple(dict.fromkeys(first + place % shape[-1] for place in places))
    train, infer = problem.simulators()
    with threads_for(problem.size):
        try:
            found = attack(
                train,
                infer,
                goal.functional,
                case.centre,
                case.radius,
                seed=case.seed,
                places=places,
                start=bounded.start,
            )
        except Overflowed:  # every run overflows or exceeds a static scale
            return Attack(0.0, (0,) * (len(shape) - 1), 0, 0.0, 0.0)
        if found.run is None or not goal.refuted_by(found.value):
            return replace(found, run=None)
        run = found.run
        ordered = with_orders(run, train, infer, goal.functional)
        if ordered is not None and ordered.run is not None and goal.refuted_by(ordered.value):
            run = ordered.run
    with one_thread():
        again = attack_of(run, train, infer, goal.functional)
    if again is None or not goal.refuted_by(again.value):
        return replace(found, run=None)
    return replace(found, run=None, record={**record_run(run), "attained": attained(again)})


def _rerouted(factory: ProblemFactory, goal: Goal, case: Case) -> str:
    """Describe a run of a case that chooses other experts than its graph; empty if none is found or
    the block has no routers."""
    case = case.at_its_length
    problem = factory.problem(goal.block, case.tokens)
    with threads_for(problem.size):
        found = other_route(*problem.simulators(), case.centre, case.radius)
    return "" if found is None else str(found)


def refuse_subject(stated: Any) -> None:
    """Raise ValueError if cached statements name a subject: a valid proof of another region must
    not be accepted."""
    if not isinstance(stated, Mapping) or not SUBJECT.isdisjoint(stated):
        raise ValueError("the entry says what its proof is about")


def refuse_inconsistent(goal: Goal, bounded: Any, claim: Any, stated: Any) -> None:
    """Raise ValueError unless a cached bound is well-formed and agrees with its proof."""
    if not isinstance(bounded, CaseBound) or not _well_typed(bounded):
        raise ValueError("no bound")
    outcome = bounded.outcome
    if stated is None:
        if outcome.bound != math.inf or outcome.stable:
            raise ValueError("a bound without a proof")
        return
    refuse_subject(stated)
    said = "held" if goal.functional == "no_flip" else outcome.bound.hex()
    if type(claim) is not float or claim != outcome.bound or stated["claim"] != said:
        raise ValueError("the proof claims something else")
    if outcome.alpha != (stated["chance"]["alpha"] if "chance" in stated else None):
        raise ValueError("the proof leaves something else to chance")


_KINDS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "length": (int,),
    "bound": (float,),
    "attack": (NoneType,),
    "reason": (str, NoneType),
    "stable": (bool, NoneType),
    "margin": (float, NoneType),
    "alpha": (str, NoneType),
}
"""The types of the fields of a cached outcome, which has no runs and links."""


def _well_typed(bounded: CaseBound) -> bool:
    """Return whether every field of a bound has its type."""
    outcome, places, start = bounded.outcome, bounded.places, bounded.start
    if type(start) is not tuple or any(type(x) is not float or not -1 <= x <= 1 for x in start):
        return False
    if type(outcome) is not CaseOutcome or type(places) is not tuple or outcome.links != ():
        return False
    if bounded.finished is not True:
        return False
    fits = all(type(getattr(outcome, name)) in kinds for name, kinds in _KINDS.items())
    return fits and all(type(place) is int and place >= 0 for place in places)
