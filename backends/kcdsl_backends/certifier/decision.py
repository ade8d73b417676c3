"""Decide a batch of goals: bounds of all cases, attacks, verdicts, proofs, independent check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kcdsl.route.goals import Goal
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.attack.runs import Attack, attained
from kcdsl_backends.certifier.bounds import CaseBound
from kcdsl_backends.certifier.cache import Lookup
from kcdsl_backends.certifier.composition import CompositionTask, StageAttackTask
from kcdsl_backends.certifier.statements.cases import Case
from kcdsl_backends.certifier.statements.proof import Contents
from kcdsl_backends.certifier.tasks import (
    AttackTask,
    Attained,
    BoundedCase,
    BoundTask,
    CheckTask,
    RecheckResult,
    worth_attacking,
)
from kcdsl_backends.certifier.worker import TaskResult, Unfinished, WorkerContext
from kcdsl_backends.certifier.worker_pool import WorkerPool

Progress = Callable[[str, int, int], None]
"""Called with (stage, tasks done, tasks in all)."""


@dataclass(slots=True)
class OpenGoal:
    """A goal with its cases and results so far; `strongest` is the attack on `attacked`."""

    goal: Goal
    cases: Sequence[Case]
    bounded: list[CaseBound] = field(default_factory=list)
    contents: list[Contents | None] = field(default_factory=list)
    outcomes: list[CaseOutcome] = field(default_factory=list)
    strongest: Attack | None = None
    attacked: Case | None = None
    verdict: Verdict = field(default_factory=lambda: Inconclusive("nothing was tried"))
    proof: bytes | None = None
    confirmed: bool = False
    notes: list[str] = field(default_factory=list)
    cached: int = 0
    damaged: int = 0
    seconds: float = 0.0
    peak_bytes: int = 0

    def add_cost(self, answer: TaskResult) -> None:
        """Add the cost and the cache lookup of an answer."""
        self.seconds += answer.seconds
        self.peak_bytes = max(self.peak_bytes, answer.peak_bytes)
        self.damaged += answer.found is Lookup.DAMAGED


def decide_batch(
    pool: WorkerPool,
    context: WorkerContext,
    batch: Sequence[OpenGoal],
    *,
    attacks: bool,
    confirm: bool,
    progress: Progress | None,
    chain: bool = False,
) -> None:
    """Bound, attack, decide and prove the goals of a batch; with `chain` by chains alone.

    Raises:
        Refusal: a block, a numerics specification or an input cannot be used.
    """
    told = progress or (lambda stage, done, total: None)
    _bound(pool, batch, told, CompositionTask if chain else BoundTask)
    if attacks:
        _attack(pool, batch, told)
        _measure_slack(pool, batch, told)
    for one in batch:
        one.verdict = verdict_of(one.goal, one.outcomes, one.strongest, chain=chain)
        if isinstance(one.verdict, Held):
            _prove(context, one)
    if confirm:
        _confirm(pool, [one for one in batch if one.proof is not None], told)
    for one in batch:
        if one.damaged:
            entries = "entry of the cache was" if one.damaged == 1 else "entries of the cache were"
            one.notes.append(f"{one.damaged} {entries} damaged and found anew")


def _counted(
    progress: Progress, places: Sequence[OpenGoal], stage: str
) -> Callable[[int, TaskResult], None]:
    """Return a callback for answers that reports the progress of each goal; report the first one's
    stage as begun."""
    totals, done = Counter(map(id, places)), Counter[int]()
    if places:
        progress(f"{places[0].goal.clause.id}{stage}", 0, totals[id(places[0])])

    def told(index: int, answer: TaskResult) -> None:
        one = places[index]
        done[id(one)] += 1
        progress(f"{one.goal.clause.id}{stage}", done[id(one)], totals[id(one)])

    return told


def _bound(
    pool: WorkerPool,
    batch: Sequence[OpenGoal],
    progress: Progress,
    task: type[BoundTask] | type[CompositionTask],
) -> None:
    places = [(one, index) for one in batch for index in range(len(one.cases))]
    tasks = [task(one.goal, one.cases[index]) for one, index in places]
    told = _counted(progress, [one for one, _ in places], "")
    for (one, index), answer in zip(places, pool.run(tasks, told), strict=True):
        assert answer is not None
        one.add_cost(answer)
        match answer.value:
            case BoundedCase(bounded, contents):
                one.bounded.append(bounded)
                one.contents.append(contents)
                one.cached += answer.found is Lookup.HIT
            case Unfinished(reason):
                case = one.cases[index]
                outcome = CaseOutcome(case.name, len(case.tokens), math.inf, reason=reason)
                one.bounded.append(CaseBound(outcome))
                one.contents.append(None)
            case other:
                raise AssertionError(f"no answer to a bound: {other}")
        one.outcomes.append(one.bounded[-1].outcome)


def _attack(pool: WorkerPool, batch: Sequence[OpenGoal], progress: Progress) -> None:
    """Attack the cases worth attacking, for each goal up to the first that refutes it."""
    places = [(one, index) for one in batch for index in worth_attacking(one.goal, one.outcomes)]
    tasks = [AttackTask(one.goal, one.cases[i], one.bounded[i]) for one, i in places]
    count = _counted(progress, [one for one, _ in places], ": attack")
    refuted: dict[int, int] = {}

    def wanted(index: int) -> bool:
        return index <= refuted.get(id(places[index][0]), index)

    def told(index: int, answer: TaskResult) -> None:
        one = places[index][0]
        if isinstance(answer.value, Attack) and one.goal.refuted_by(answer.value.value):
            refuted[id(one)] = min(index, refuted.get(id(one), index))
        count(index, answer)

    for number, ((one, index), answer) in enumerate(
        zip(places, pool.run(tasks, told, wanted), strict=True)
    ):
        if answer is None or number > refuted.get(id(one), number):
            continue
        one.add_cost(answer)
        match answer.value:
            case Attack() as attack:
                one.outcomes[index] = _attacked(one.outcomes[index], attack)
                if one.strongest is None or attack.value > one.strongest.value:
                    one.strongest, one.attacked = attack, one.cases[index]
            case Unfinished(reason):
                one.notes.append(f"{one.cases[index].name}: no attack, {reason}")
            case other:
                raise AssertionError(f"no answer to an attack: {other}")


def _attacked(case: CaseOutcome, attack: Attack) -> CaseOutcome:
    """Return the outcome of a case with the result of its attack."""
    reason = "; ".join(filter(None, (case.reason, attack.rerouted))) or None
    return replace(case, attack=attack.value, reason=reason)


def _measure_slack(pool: WorkerPool, batch: Sequence[OpenGoal], progress: Progress) -> None:
    """Attack the links of the chain with the largest bound of each goal, to show their slack."""
    places = [
        (one, max(able, key=lambda i: one.outcomes[i].bound))
        for one in batch
        if (able := [i for i, outcome in enumerate(one.outcomes) if len(outcome.links) > 1])
    ]
    names = [tuple(link.name for link in one.outcomes[i].links) for one, i in places]
    tasks = [
        StageAttackTask(one.goal, one.cases[i], some)
        for (one, i), some in zip(places, names, strict=True)
    ]
    answers = pool.run(tasks)
    for number, ((one, index), answer) in enumerate(zip(places, answers, strict=True)):
        assert answer is not None
        one.add_cost(answer)
        progress(f"{one.goal.clause.id}: slack", number + 1, len(places))
        outcome = one.outcomes[index]
        match answer.value:
            case Attained(values):
                attained = (*values, outcome.attack)
                pairs = zip(outcome.links, attained, strict=False)
                shown = tuple(replace(link, attack=value) for link, value in pairs)
                one.outcomes[index] = replace(outcome, links=shown)
            case Unfinished(reason):
                one.notes.append(f"{outcome.name}: no runs beside the stages, {reason}")
            case other:
                raise AssertionError(f"no answer to a search: {other}")


def _prove(context: WorkerContext, one: OpenGoal) -> None:
    builder = context.builder(one.goal)
    for contents in one.contents:
        claims = () if contents is None else contents.claims
        order = one.goal.functional == "no_flip"
        if contents is None or not claims or not (order or all(map(one.goal.admits, claims))):
            one.verdict = Inconclusive("a case has no proof of the goal")
            return
        builder.absorb(contents)
    one.proof = builder.document()


def _confirm(pool: WorkerPool, proved: Sequence[OpenGoal], progress: Progress) -> None:
    """Have the independent checker re-derive proofs; unconfirmed goals are inconclusive."""
    parts = {id(one): min(pool.width, len(one.cases)) for one in proved}
    places = [(one, first) for one in proved for first in range(parts[id(one)])]
    tasks = [CheckTask(one.proof or b"", first, parts[id(one)]) for one, first in places]
    answers = pool.run(tasks, _counted(progress, [one for one, _ in places], ": check"))
    for one in proved:
        own = [a for (o, _), a in zip(places, answers, strict=True) if o is one and a is not None]
        for answer in own:
            one.add_cost(answer)
        objection = _objection(own, parts[id(one)])
        if objection is not None and parts[id(one)] > 1:
            whole = pool.run([CheckTask(one.proof or b"")])[0]
            objection = _objection([whole] if whole is not None else [], 1) or objection
        if objection is None:
            one.confirmed = True
        else:
            one.proof, one.verdict = None, Inconclusive(objection)


def _objection(answers: Sequence[TaskResult], parts: int) -> str | None:
    """Return why a proof is not confirmed; None only if every part was checked and confirmed."""
    for answer in answers:
        match answer.value:
            case RecheckResult(""):
                pass
            case RecheckResult(reason):
                return f"the independent checker does not confirm the proof: {reason}"
            case Unfinished(reason):
                return f"the independent checker did not finish: {reason}"
            case other:
                raise AssertionError(f"no answer to a check: {other}")
    return None if len(answers) == parts else "the independent checker did not see every case"


def verdict_of(
    goal: Goal, cases: Sequence[CaseOutcome], found: Attack | None, *, chain: bool = False
) -> Verdict:
    """Return the verdict from bounds and attacks of all cases; no case is invalid evidence.

    A clause that admits probabilistic evidence is not refuted by a run with chosen roundings unless
    a probabilistic bound was tried, which a `chain` never does.
    """
    if not cases:
        return InvalidEvidence("there is no case")
    for case in cases:
        if case.attack is not None and case.attack > case.bound and case.alpha is None:
            return InvalidEvidence(
                f"{case.name}: a run attains {case.attack!r}, above the bound {case.bound!r}: "
                "the verifier is wrong, or its input was changed"
            )
        for link in case.links:
            if link.attack is not None and link.attack > link.bound:
                return InvalidEvidence(
                    f"{case.name}: behind {link.name} a run attains {link.attack!r}, above the "
                    f"bound {link.bound!r}: the verifier is wrong, or its input was changed"
                )
    if goal.functional == "no_flip":
        return _stability(cases)
    refuted = [case for case in cases if _refutes(goal, case)]
    if found is not None and refuted:
        if goal.alpha is not None and (chain or "affine" not in (goal.domains or ("affine",))):
            return Inconclusive(
                f"{refuted[0].name}: a run exceeds the threshold, and the probability of such "
                f"runs was not bounded: affine forms of whole blocks do that"
            )
        return Violated(counterexample(cases, found))
    open_cases = [case for case in cases if not goal.admits(case.bound)]
    if not open_cases:
        return Held()
    worst = max(open_cases, key=lambda case: case.bound)
    if worst.reason is not None:
        return Inconclusive(f"{worst.name}: {worst.reason}")
    return Inconclusive(
        f"{worst.name}: the bound {worst.bound:.3g} exceeds the threshold, no run found does"
    )


def _refutes(goal: Goal, case: CaseOutcome) -> bool:
    """Return whether a run refutes the goal; a run with chosen roundings does not if the goal holds
    with the demanded probability."""
    if case.attack is None or not goal.refuted_by(case.attack):
        return False
    return case.alpha is None or not goal.admits(case.bound)


def _stability(cases: Sequence[CaseOutcome]) -> Verdict:
    unstable = [case for case in cases if not case.stable]
    if not unstable:
        return Held()
    for case in unstable:
        if case.reason is not None:
            return Inconclusive(f"{case.name}: {case.reason}")
    named = ", ".join(case.name for case in unstable[:3]) + (" …" if len(unstable) > 3 else "")
    return Inconclusive(f"a flip is not excluded for {len(unstable)} of {len(cases)}: {named}")


def counterexample(cases: Sequence[CaseOutcome], found: Attack) -> dict[str, Any]:
    """Return the figures of the strongest attack for the report."""
    case = max((c for c in cases if c.attack is not None), key=lambda c: c.attack or 0.0)
    shown = attained(found) if found.record is None else dict(found.record["attained"])
    numbers = {name: float.fromhex(shown[name]) for name in ("value", "train", "infer")}
    return {"case": case.name, **shown, **numbers}
