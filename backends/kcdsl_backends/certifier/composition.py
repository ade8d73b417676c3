"""Bound a case stage by stage, each for all outputs of the one before (docs/proofs/chains.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from kcdsl.diagnostics.model import at
from kcdsl.model.graph import BlockGraph
from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome, LinkOutcome
from kcdsl_backends.attack import attack
from kcdsl_backends.certifier.bounds import CaseBound, Problem, bound_stated
from kcdsl_backends.certifier.cache import ENTRY_SCHEMA, CacheEntry, Lookup, decode, key_of
from kcdsl_backends.certifier.stages import (
    BoundedStage,
    Interface,
    StageOutput,
    bound_stage,
    named,
    partitions,
    prefix,
    stages_of,
)
from kcdsl_backends.certifier.statements.cases import Case, region_of
from kcdsl_backends.certifier.statements.problems import Claims
from kcdsl_backends.certifier.statements.proof import Contents, ProofBuilder, stated_of
from kcdsl_backends.certifier.tasks import (
    Attained,
    BoundedCase,
    refuse_inconsistent,
    refuse_subject,
    stated_goal,
)
from kcdsl_backends.certifier.worker import WorkerContext
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.state import InterfaceEllipsoids
from kcdsl_backends.process import threads_for

T = TypeVar("T")
_Last = tuple[CaseBound, float, Mapping[str, Any] | None]
"""The bound of the last stage, its claim, and the statements of its proof."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The number of links of a chain, and whether interfaces have ellipsoids besides boxes.

    With ellipsoids, all links after a change are bounded again.
    """

    count: int
    ellipsoids: bool


@dataclass(frozen=True, slots=True)
class CompositionTask:
    """Bound one case of a goal by the first chain that decides it, or by one plan."""

    goal: Goal
    case: Case
    plan: StagePlan | None = None

    def run(self, context: WorkerContext) -> tuple[BoundedCase, Lookup | None]:
        """Bound every link in order, or take its result from the cache.

        Plans are tried in order. If none decides the goal, the result is the chain with the
        smallest bound.
        """
        with at(self.goal.span):
            case = self.case.on(context.factory.device)
            reason = _obstacle(self.goal, case)
            if reason is not None:
                return _without(case, reason), None
            whole = context.factory.problem(self.goal.block, case.tokens).graph
            if any(node.op == "route" for node in whole.nodes):
                return _without(case, "stages have no rule for routes of experts"), None
            links = stages_of(context.factory.model, whole)
            if len(links) < 2:
                return _without(
                    case, f"block {whole.block!r} does not fall apart into stages"
                ), None
            best: tuple[BoundedCase, Lookup | None] | None = None
            damaged = False
            for plan, some in _plans(whole, links):
                if self.plan not in (None, plan):
                    continue
                walk = _ChainRun(context, self.goal, case, whole, some, plan.ellipsoids)
                answer, found = _bounded(walk)
                damaged |= found is Lookup.DAMAGED
                if best is None or _tighter(answer, best[0]):
                    best = answer, found
                if _settled(self.goal, answer.bounded.outcome):
                    best = answer, found
                    break
            assert best is not None
            return best[0], Lookup.DAMAGED if damaged else best[1]


def _plans(
    whole: BlockGraph, links: tuple[BlockGraph, ...]
) -> Iterator[tuple[StagePlan, tuple[BlockGraph, ...]]]:
    """Yield plans with their links; those with the best reuse of the cache come first."""
    yield StagePlan(len(links), ellipsoids=False), links
    for some in partitions(whole, links):
        yield StagePlan(len(some), ellipsoids=True), some


def _bounded(walk: _ChainRun) -> tuple[BoundedCase, Lookup | None]:
    """Bound a case; with new interfaces if cached ones do not suffice for the goal."""
    answer = walk.walk()
    if walk.reused and not _settled(walk.goal, answer.bounded.outcome):
        again = _ChainRun(
            *(walk.context, walk.goal, walk.case, walk.whole, walk.links, walk.ellipsoids),
            afresh=True,
            damaged=walk.damaged,
        )
        return again.walk(), again.found
    return answer, walk.found


def _tighter(one: BoundedCase, two: BoundedCase) -> bool:
    """Return whether a chain has a smaller bound than another."""
    return one.bounded.outcome.bound < two.bounded.outcome.bound


def _settled(goal: Goal, outcome: CaseOutcome) -> bool:
    """Return whether the bound of a case decides the goal."""
    return bool(outcome.stable) if goal.functional == "no_flip" else goal.admits(outcome.bound)


def _obstacle(goal: Goal, case: Case) -> str | None:
    """Return why a case cannot be bounded by a chain; None if it can."""
    if case.longest is not None:
        return "stages have one length; the region has any"
    if goal.weights:
        return "stages are of one checkpoint; the region is also one around the weights"
    return None


def _without(case: Case, reason: str, links: tuple[LinkOutcome, ...] = ()) -> BoundedCase:
    outcome = CaseOutcome(case.name, len(case.tokens), math.inf, reason=reason, links=links)
    return BoundedCase(CaseBound(outcome), None)


@dataclass(slots=True)
class _ChainRun:
    """The bounds of the links of one case, in order, with their records for the proof.

    If the output of a link lies in the interface of an earlier run, that interface is reused
    (`reused`), so that the following links are unchanged; with `afresh` none is reused.
    """

    context: WorkerContext
    goal: Goal
    case: Case
    whole: BlockGraph
    links: tuple[BlockGraph, ...]
    ellipsoids: bool
    afresh: bool = False
    outcomes: list[LinkOutcome] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    damaged: bool = False
    reused: bool = False

    @property
    def _builder(self) -> ProofBuilder:
        return self.context.builder(self.goal)

    @property
    def found(self) -> Lookup | None:
        """Return the lookup result: a hit if every link was cached; None without a cache."""
        if self.context.cache is None:
            return None
        if self.damaged:
            return Lookup.DAMAGED
        return Lookup.HIT if all(link.cached for link in self.outcomes) else Lookup.ABSENT

    def walk(self) -> BoundedCase:
        """Return the bound of the last link and the chain that proves it."""
        entering = Interface(self.case.centre, self.case.radius)
        for number, graph in enumerate(self.links[:-1]):
            try:
                linked = self._inner(graph, entering)
            except NoBound as no:
                place = f"stage {number + 1} of {len(self.links)}, {graph.block}"
                return _without(self.case, f"{place}: {no}", tuple(self.outcomes))
            region = {} if number == 0 else {"region": entering.region()}
            output = {"output": linked.output.to_json()}
            head = {"name": graph.block, "graph": graph.digest}
            self.records.append({**head, **region, **linked.stated, **output})
            entering = self._interface(number, linked.output)
        bounded, claim, stated = self._last(self.links[-1], entering)
        links = tuple(self.outcomes)
        outcome = replace(bounded.outcome, name=self.case.name, links=links)
        if stated is None:
            return BoundedCase(CaseBound(outcome), None)
        head = {"name": self.links[-1].block, "graph": self.links[-1].digest}
        self.records.append({**head, "region": entering.region(), **stated})
        return BoundedCase(replace(bounded, outcome=outcome), self._contents(claim))

    def _interface(self, number: int, output: StageOutput) -> Interface:
        """Return the interface after a stage: that of an earlier run if it contains the output.

        Its key has no parameters, so that stages after a change are found in the cache.
        """
        factory, fresh = self.context.factory, output.interface()
        if self.context.cache is None or self.ellipsoids:
            return fresh
        key = key_of(
            {
                "what": "interface",
                "schema": ENTRY_SCHEMA,
                "rules": self.context.setting.rules,
                "whole": self.whole.digest,
                "case": self.case.name,
                "kind": self.goal.region.kind.value,
                "radius": str(self.goal.region.radius),
                "links": [link.block for link in self.links[: number + 1]],
                "numerics": {"train": factory.train.to_json(), "infer": factory.infer.to_json()},
            }
        )
        entry = CacheEntry(self.context.cache, key)
        if not self.afresh:

            def made(value: Any) -> tuple[Interface, bool]:
                kept: Interface = decode(value, (Interface, Box), factory.device)
                return kept, output.fits(kept)

            kept, found = entry.read(made)
            self.damaged |= found is Lookup.DAMAGED
            if kept is not None and kept[1]:
                self.reused |= kept[0].digest != fresh.digest
                return kept[0]
        entry.write(fresh)
        return fresh

    def _inner(self, graph: BlockGraph, entering: Interface) -> BoundedStage:
        factory = self.context.factory
        entry = self._entry(graph, entering, {"ellipsoids": str(self.ellipsoids)})
        kept = self._kept(entry, lambda value: _stage_of(value, graph, factory.device))
        if kept is not None:
            self.outcomes.append(LinkOutcome(graph.block, kept.output.largest, cached=True))
            return kept
        problem = factory.problem_of_graph(graph)
        builder = replace(self._builder, functional="inf", k=1)
        claims = Claims.of(factory.train, factory.infer)
        stage = bound_stage(
            *(graph.block, problem, entering, builder, claims), ellipsoids=self.ellipsoids
        )
        entry.write(stage)
        self.outcomes.append(LinkOutcome(graph.block, stage.output.largest))
        return stage

    def _last(self, graph: BlockGraph, entering: Interface) -> _Last:
        """Bound the last stage for the goal; the statements are None if it has no proof."""
        factory, goal = self.context.factory, self.goal
        entry = self._entry(graph, entering, stated_goal(goal))

        def made(value: Any) -> _Last:
            last: _Last = decode(value, (CaseBound, CaseOutcome, LinkOutcome))
            refuse_inconsistent(goal, *last)
            return last

        kept = self._kept(entry, made)
        if kept is not None:
            self.outcomes.append(LinkOutcome(graph.block, kept[0].outcome.bound, cached=True))
            return kept
        block = replace(factory.problem_of_graph(graph), entering=entering.entering())
        builder = self._builder
        case = Case(graph.block, self.case.tokens, entering.centre, entering.radius)
        claims = Claims.of(factory.train, factory.infer)
        bounded = bound_stated(Problem(block, case, goal, claims), builder)
        last = bounded, *stated_of(builder.contents())
        entry.write(last)
        self.outcomes.append(LinkOutcome(graph.block, bounded.outcome.bound))
        return last

    def _contents(self, claim: float) -> Contents:
        """Return the contribution of the chain to the proof of its goal."""
        builder, factory = self._builder, self.context.factory
        for graph in self.links:
            builder.add_graph(graph)
        region = region_of(factory, self.goal, self.case)
        builder.add_stated(self.case.name, self.whole, region, claim, {"links": self.records})
        return builder.contents()

    def _entry(
        self, graph: BlockGraph, entering: Interface, asked: Mapping[str, str]
    ) -> CacheEntry:
        return self.context.entry(
            "link", self.goal, graph, interface=entering.digest, stated=dict(asked)
        )

    def _kept(self, entry: CacheEntry, made: Callable[[Any], T]) -> T | None:
        """Return the cached result of a stage; None if there is no valid one."""
        kept, found = entry.read(made)
        self.damaged |= found is Lookup.DAMAGED
        return kept


def _stage_of(value: Any, graph: BlockGraph, device: torch.device) -> BoundedStage:
    """Decode a cached stage and check its form. Raises one of `DAMAGE` if it is invalid.

    Its numbers may still be wrong; the checker re-derives every proof."""
    kept = decode(value, (BoundedStage, StageOutput, InterfaceEllipsoids, Box), device)
    if not isinstance(kept, BoundedStage):
        raise TypeError("not a stage")
    shape, held = graph.node(graph.output).shape, kept.output.around
    boxes = kept.output.train, kept.output.drift
    parts = (*(end for box in boxes for end in (box.lo, box.hi)), *(kept.output.readings or ()))
    if type(kept.claim) is not float or any(tuple(p.shape) != shape for p in parts):
        raise ValueError("not a stage")
    if held is not None and (
        tuple(held.middle.shape) != shape or tuple(held.shapes.shape) != (*shape, shape[-1])
    ):
        raise ValueError("other ellipsoids")
    refuse_subject(kept.stated)
    return kept


_CANDIDATES, _ROUNDS = 3, 6
"""Candidates and rounds of the attack on one link: fewer than for a goal."""


@dataclass(frozen=True, slots=True)
class StageAttackTask:
    """Attack the prefixes of a block that end at each link but the last.

    `names` are those of the links with a bound.
    """

    goal: Goal
    case: Case
    names: tuple[str, ...]

    def run(self, context: WorkerContext) -> tuple[Attained, None]:
        """Return the largest drift of a run after each link."""
        with at(self.goal.span):
            case = self.case.on(context.factory.device)
            whole = context.factory.problem(self.goal.block, case.tokens).graph
            links = named(whole, stages_of(context.factory.model, whole), self.names)
            beginnings = [prefix(whole, link.output) for link in links[:-1]]
            return Attained(tuple(_attained(context, self, case, g) for g in beginnings)), None


def _attained(
    context: WorkerContext, task: StageAttackTask, case: Case, graph: BlockGraph
) -> float:
    """Return the largest drift found at the output of a graph, cached or by a new attack."""
    entry = context.entry("slack", task.goal, graph, region=case.digest)

    def made(value: Any) -> float | None:
        kept = decode(value, ())
        return kept if isinstance(kept, float) and kept >= 0 else None

    kept, _ = entry.read(made)
    if kept is not None:
        return kept
    problem = context.factory.problem_of_graph(graph)
    train, infer = problem.simulators()
    with threads_for(problem.size):
        best = attack(
            *(train, infer, "inf", case.centre, case.radius),
            candidates=_CANDIDATES,
            rounds=_ROUNDS,
            restarts=0,
            batches=0,
            seed=case.seed,
        ).value
    entry.write(best)
    return best
