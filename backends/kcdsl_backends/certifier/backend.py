"""Decide goals about every input of a region: bound, attack, verdict, proof."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain as chained
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.diagnostics.model import at
from kcdsl.ir.terms import EvidenceKind, KernelRef, Program, RegionKind
from kcdsl.model.adapters import find_adapter, refuse_unserved, unproved
from kcdsl.model.architecture import Model
from kcdsl.model.attention import caps_scores
from kcdsl.model.files import Artefacts
from kcdsl.model.loader import load_model
from kcdsl.model.numerics import Numerics
from kcdsl.model.presets import refuse_strays, resolve
from kcdsl.route.catalogue import Execution
from kcdsl.route.goals import Goal
from kcdsl.verdict.counterexample import Replayed, counterexample
from kcdsl.verdict.model import Evidence, Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.outcome import GoalOutcome
from kcdsl_backends.certifier.cache import rules_version
from kcdsl_backends.certifier.decision import OpenGoal, Progress, decide_batch
from kcdsl_backends.certifier.estimate import CostEstimate
from kcdsl_backends.certifier.replay import case_record, replay
from kcdsl_backends.certifier.statements.cases import (
    StatedCase,
    cases_of,
    problem_of,
    slice_rows,
    stated_case,
    with_weights,
)
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.certifier.worker import RunSettings, WorkerContext, open_context, peak_bytes
from kcdsl_backends.certifier.worker_pool import WorkerPool, threads_of
from kcdsl_backends.comparison import compared_program
from kcdsl_backends.drift.linear_bounds import cheap
from kcdsl_backends.requests import Request
from kcdsl_certs.verification.proofs import INDEPENDENT

ASSUMPTIONS = (
    "float64 exp, expm1, erf and tanh of the verifier are within 4 ulp",
    "both kernels obey the numerics specifications named in the goal",
    "the block graph is the block: it was exported from the module of the architecture",
    "region centres are the training kernel's activations on the rows of the slice",
)

ANY_LENGTH = (
    "the block at every length is what its graph at two rows says, as compared at three and at the "
    "longest (at most 8192, and as long as the model takes)"
)
"""Further assumption for a region of sequences of any length."""

HERE = Execution(jobs=1)
"""Execution in this process without a cache."""

_LARGEST_BATCH = 2**30
"""Limit of the bytes of region centres in memory."""


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
        execution: Execution = HERE,
        chain: bool = False,
        artefacts: Artefacts | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> tuple[GoalOutcome, ...]:
        """Decide goals; their outcomes come in the same order.

        Args:
            program: the compiled contract.
            base: folder of the contract, to which its paths are relative.
            goals: what to decide.
            device: "cpu" or "cuda".
            attacks: also search for concrete runs with a large drift.
            confirm: have every proof re-derived by the independent checker; an unconfirmed one
                makes the goal inconclusive.
            progress: called after every task.
            execution: engine, jobs and cache. Of an outcome, only seconds, memory and cache hits
                depend on it.
            chain: prove each goal stage by stage, instead of its block as a whole.
            artefacts: the files of the command, which record the digests of files that are read.
            tell: receives an estimate of the cost before the work, if it is large.

        Raises:
            Refusal: the model, the kernels, the data, a block or the engine cannot be used.
        """
        if chain and any(goal.weights or goal.states for goal in goals):
            raise refuse(
                codes.WEIGHTS_REGION,
                "a chain is proved for the weights of the checkpoint and the states of the regions",
                help="leave out --chain, or --weights and --states",
            )
        base = base.resolve()
        files = artefacts or Artefacts.of(base)
        model = load_model(program.model, files, by_block=True)
        loaded = dict(files.digests)
        train, infer = resolve(program.train), resolve(program.infer)
        for kernel, numerics in ((program.train, train), (program.infer, infer)):
            with at(kernel.span):
                refuse_strays(numerics, model.linears(), model.quantised_tensors)
        for goal in goals:
            with at(goal.span):
                model.block(goal.block)
        notes = (
            *_unserved(program.train, train, "training", device, model),
            *_unserved(program.infer, infer, "inference", device, model),
        )
        rows = []
        for goal in goals:
            with at(goal.span):
                rows.append(slice_rows(program, model, goal.region.slice))
        every = (row.tokens for own in rows for row in own)
        compared = compared_program(program.model.architecture, model, every)
        assumptions = (*ASSUMPTIONS, *filter(None, (compared,)))
        threads = threads_of(execution, sum(map(_size, goals, rows)))
        sha256, rules = model.checkpoint.sha256, rules_version()
        setting = RunSettings(
            program, base, device, threads, sha256, rules, execution.cache, loaded
        )
        context = open_context(setting, model)
        batches = _batches(context, goals, rows)
        first = list(islice(batches, 1))
        if execution.seconds is not None:  # work begins once the first regions are known
            context.setting = replace(setting, limit=time.time() + execution.seconds)
        outcomes: list[GoalOutcome] = []
        with WorkerPool(context, execution) as pool:
            for batch in chained(first, batches):
                working = [one for one in batch if one.cases]
                if tell is not None and not chain:
                    _report_cost(context, working, pool.width, tell, checked=confirm)
                decide_batch(
                    pool,
                    context,
                    working,
                    attacks=attacks,
                    confirm=confirm,
                    progress=progress,
                    chain=chain,
                )
                for one in batch:
                    told = notes if chain else (*notes, *_planes_note(context, one))
                    outcomes.append(self._outcome(context, one, told, assumptions))
        return tuple(outcomes)

    def slice_sizes(
        self,
        program: Program,
        base: Path,
        slices: Collection[str],
        *,
        artefacts: Artefacts | None = None,
    ) -> dict[str, int]:
        """Return the number of rows of each of these slices of the contract."""
        model = load_model(program.model, artefacts or base, by_block=True)
        return {name: len(slice_rows(program, model, name)) for name in slices}

    def regions(
        self,
        program: Program,
        base: Path,
        goals: Sequence[Goal],
        *,
        checkpoint: Path,
        device: str = "cpu",
    ) -> tuple[tuple[StatedCase, ...], ...]:
        """Return the regions of each goal's cases with the weights of another checkpoint.

        Configuration and tokenizer are those of the contract; no bound is computed.

        Raises:
            Refusal: the model, the data or a block cannot be used.
        """
        files = Artefacts.of(base)
        model = load_model(with_weights(program.model, files, checkpoint), files, by_block=True)
        factory = ProblemFactory(
            model, resolve(program.train), resolve(program.infer), torch.device(device)
        )
        found = []
        for goal in goals:
            with at(goal.span):
                cases = cases_of(factory, goal, slice_rows(program, model, goal.region.slice))
                found.append(tuple(stated_case(factory, goal, case) for case in cases))
        return tuple(found)

    def replay(
        self,
        program: Program,
        base: Path,
        document: Mapping[str, Any],
        *,
        device: str = "cpu",
        checkpoint: str | None = None,
    ) -> Replayed:
        """Run a counterexample again; see `certifier.replay.replay`.

        `checkpoint` replaces the file that the contract names.
        """
        return replay(program, base.resolve(), document, device=device, checkpoint=checkpoint)

    def _outcome(
        self, context: WorkerContext, one: OpenGoal, notes: tuple[str, ...], always: tuple[str, ...]
    ) -> GoalOutcome:
        if not one.cases:
            reason = f"the slice {one.goal.region.slice!r} selects no request"
            evidence = Evidence(EvidenceKind.PROOF, n=0)
            return GoalOutcome(one.goal, InvalidEvidence(reason), evidence, self.name, (), 0.0, 0)
        any_length = (ANY_LENGTH,) if one.goal.region.kind is RegionKind.ROWS else ()
        alphas = {case.alpha for case in one.outcomes if case.alpha is not None}
        chances = tuple(INDEPENDENT.format(alpha=alpha) for alpha in sorted(alphas))
        assumptions = (*always, *any_length, *chances, *notes)
        kind = EvidenceKind.PROBABILISTIC if alphas else EvidenceKind.PROOF
        return GoalOutcome(
            goal=one.goal,
            verdict=one.verdict,
            evidence=Evidence(kind, n=len(one.cases), assumptions=assumptions),
            backend=self.name,
            cases=tuple(one.outcomes),
            seconds=one.seconds,
            peak_bytes=max(one.peak_bytes, peak_bytes()),
            proof=one.proof,
            counterexample=_counterexample(context, one),
            confirmed=one.confirmed,
            notes=(*notes, *one.notes),
            cached=one.cached,
        )


def _planes_note(context: WorkerContext, one: OpenGoal) -> tuple[str, ...]:
    """Return the note that planes, left out for their cost, may decide an inconclusive goal."""
    goal, kinds = one.goal, (RegionKind.POINTS, RegionKind.BALL, RegionKind.HULL)
    able = goal.domains is None and goal.weights == 0 and goal.region.kind in kinds
    if not able or not isinstance(one.verdict, Inconclusive):
        return ()
    graphs = (problem_of(context.factory, goal, case).graph for case in one.cases)
    if all(cheap(graph) for graph in graphs):
        return ()
    return ("planes were not tried, as the block is large: --domains interval,affine,planes",)


def _counterexample(context: WorkerContext, one: OpenGoal) -> bytes | None:
    """Return the document of the run that violates a goal; None if there is none."""
    if not isinstance(one.verdict, Violated) or one.strongest is None or one.attacked is None:
        return None
    if one.strongest.record is None:
        return None
    problem = context.factory.problem(one.goal.block, one.attacked.tokens)
    record = case_record(problem, context.factory, one.goal, one.attacked)
    return counterexample(context.setting.program, one.goal, {**record, **one.strongest.record})


def _report_cost(
    context: WorkerContext,
    batch: Sequence[OpenGoal],
    jobs: int,
    tell: Callable[[str], None],
    *,
    checked: bool,
) -> None:
    """Report the estimated cost of the affine forms of these goals."""
    graphs = []
    for one in batch:
        if one.goal.domains is None or "affine" in one.goal.domains:
            with at(one.goal.span):
                graphs += [problem_of(context.factory, one.goal, case).graph for case in one.cases]
    limit = context.setting.limit
    left = None if limit is None else max(0.0, limit - time.time())
    for line in CostEstimate.of(graphs, jobs, checked=checked).messages(left):
        tell(line)


def _size(goal: Goal, rows: Sequence[Request]) -> int:
    """Return the number of cases of a goal on these rows."""
    if goal.region.kind is RegionKind.HULL:
        return len({row.length for row in rows})
    if goal.region.kind is RegionKind.ROWS:
        return 1
    return len(rows)


def _batches(
    context: WorkerContext, goals: Sequence[Goal], rows: Sequence[Sequence[Request]]
) -> Iterator[list[OpenGoal]]:
    """Yield the goals in order with their cases, in batches of limited memory."""
    batch: list[OpenGoal] = []
    held = 0
    for goal, own in zip(goals, rows, strict=True):
        with at(goal.span):
            cases = cases_of(context.factory, goal, own) if own else []
        if batch and held > _LARGEST_BATCH:
            yield batch
            batch, held = [], 0
        batch.append(OpenGoal(goal, [case.on(torch.device("cpu")) for case in cases]))
        held += sum(case.centre.nbytes for case in cases if case.centre is not None)
    if batch:
        yield batch


def _unserved(
    kernel: KernelRef, numerics: Numerics, side: str, device: str, model: Model
) -> tuple[str, ...]:
    """Return why the kernel's adapter may deviate from its numerics; empty if it does not."""
    why = unproved(kernel.run)
    if why is not None:
        reason = f"{kernel.run}: {why}"
        return (f"the {side} kernel may deviate from the numerics of the proof: {reason}",)
    adapter = find_adapter(kernel.run)
    try:
        if adapter.style == "fused" and caps_scores(model.module):
            return (f"the {side} kernel cannot run this model: {kernel.run} does not cap scores",)
        refuse_unserved(kernel.run, adapter, numerics, device)
    except Refusal as refusal:
        reason = refusal.diagnostics[0].message
        return (f"the {side} kernel keeps numerics that were never run here: {reason}",)
    return ()


BACKEND = IntervalBackend()
