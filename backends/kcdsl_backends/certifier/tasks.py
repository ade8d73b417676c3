"""Tasks that any process can do: bound a case, attack it, check a part of a proof.

A task and its answer can be pickled, and the answer depends on nothing but the task and its
setting: not on which process works, nor on what it did before.
"""

from __future__ import annotations

import math
import pickle
import resource
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from kcdsl.diagnostics import Diagnostic, Refusal, codes, refuse
from kcdsl.diagnostics.model import at
from kcdsl.ir.terms import Program
from kcdsl.model.architecture import Model, load_model
from kcdsl.model.graph import array_digest
from kcdsl.model.own_code import imported_code
from kcdsl.model.presets import resolve
from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.attack.runs import Attack, attack_of, attained, record_run, run_of
from kcdsl_backends.attack.search import attack, with_orders
from kcdsl_backends.attack.simulation import Overflowed
from kcdsl_backends.certifier.bounds import Bounded, bound_case
from kcdsl_backends.certifier.cache import (
    DAMAGE,
    ENTRY_SCHEMA,
    Cache,
    Found,
    decode,
    encode,
    key_of,
    rules_version,
)
from kcdsl_backends.certifier.cases import Case, problem_of, region_of
from kcdsl_backends.certifier.problems import BlockProblem, ProblemFactory
from kcdsl_backends.certifier.proof import Contents, ProofBuilder
from kcdsl_backends.threads import one_thread, threads_for
from kcdsl_certs.recheck import recheck


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What every piece of work of one run shares.

    `checkpoint` is the sha256 of the weights, `rules` the version of the program and `loaded` the
    digests of the model's files with which the work was given out: a process that finds others
    refuses to work.
    """

    program: Program
    base: Path
    device: str
    threads: int
    checkpoint: str
    rules: str
    cache: Path | None
    loaded: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class WorkerContext:
    """What a process keeps between pieces of work of one setting: the model, graphs, weights."""

    setting: RunSettings
    factory: ProblemFactory
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Cache | None:
        """Return the cache of the run."""
        return None if self.setting.cache is None else Cache(self.setting.cache)

    def builder(self, goal: Goal) -> ProofBuilder:
        """Return an empty proof of a goal."""
        factory = self.factory
        return ProofBuilder(
            factory.model,
            goal.block,
            factory.train,
            factory.infer,
            goal.functional,
            goal.k,
            self.digests,
        )


@dataclass(frozen=True, slots=True)
class BoundedCase:
    """A bound and what it adds to the proof of its goal (None where there is no bound)."""

    bounded: Bounded
    contents: Contents | None


@dataclass(frozen=True, slots=True)
class Checked:
    """What the independent checker says of a part of a proof; `reason` is empty if it agrees."""

    reason: str


@dataclass(frozen=True, slots=True)
class Attained:
    """The largest drift that a run has behind each link of a chain but the last."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """Work that was begun and not finished, such as for want of memory."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Work that the input does not admit."""

    diagnostics: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class Defect:
    """Work that ended in an exception that nobody foresaw."""

    kind: str
    message: str
    trace: str


class Task(Protocol):
    """A piece of work."""

    def run(self, context: WorkerContext) -> tuple[Any, Found | None]:
        """Do it; return its value, and what the cache had of it (None where it was not asked)."""
        ...


Value = BoundedCase | Attack | Attained | Checked | None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a piece of work, and what it cost."""

    value: Value | Unfinished | Refused | Defect
    seconds: float
    peak_bytes: int
    found: Found | None = None
    code: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The contract's own modules that the worker has imported, as `Artefacts.code` has them."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Load the model, and nothing more."""

    def run(self, context: WorkerContext) -> tuple[None, None]:
        """Do nothing: the context is there."""
        return None, None


@dataclass(frozen=True, slots=True)
class BoundTask:
    """Bound one case of a goal."""

    goal: Goal
    case: Case

    def run(self, context: WorkerContext) -> tuple[BoundedCase, Found | None]:
        """Bound the case, or take what an earlier run found."""
        with at(self.goal.span):
            case = self.case.on(context.factory.device)
            graph = problem_of(context.factory, self.goal, case).graph
            if context.cache is None:
                return self._bounded(context, case), None
            key = key_of({"what": "bound", **_dependencies(context, self.goal, case)})
            found, value = context.cache.read(key)
            if found is Found.HIT:
                try:
                    bounded, claim, stated = decode(value, (Bounded, CaseOutcome))
                    refuse_apart(self.goal, bounded, claim, stated)
                    named = replace(bounded, outcome=replace(bounded.outcome, name=case.name))
                    if stated is None:
                        return BoundedCase(named, None), found
                    builder = context.builder(self.goal)
                    region = region_of(context.factory, self.goal, case)
                    builder.add_stated(case.name, graph, region, claim, stated)
                    return BoundedCase(named, builder.contents()), found
                except DAMAGE:
                    found = Found.DAMAGED
            fresh = self._bounded(context, case)
            claim, stated = stated_of(fresh.contents)
            context.cache.write(key, encode((fresh.bounded, claim, stated)))
            return fresh, found

    def _bounded(self, context: WorkerContext, case: Case) -> BoundedCase:
        builder = context.builder(self.goal)
        bounded = bound_case(context.factory, self.goal, case, builder)
        contents = builder.contents()
        return BoundedCase(bounded, contents if contents.cases else None)


@dataclass(frozen=True, slots=True)
class AttackTask:
    """Search for a concrete run of a case with a large drift."""

    goal: Goal
    case: Case
    bounded: Bounded

    def run(self, context: WorkerContext) -> tuple[Attack, Found | None]:
        """Attack the case, or take what an earlier run found."""
        with at(self.goal.span):
            case = self.case.on(context.factory.device)
            if context.cache is None:
                return attack_case(context.factory, self.goal, case, self.bounded), None
            places = {"places": list(self.bounded.places)}
            key = key_of({"what": "attack", **_dependencies(context, self.goal, case), **places})
            found, value = context.cache.read(key)
            if found is Found.HIT:
                attack = _believable(context, self.goal, case, value)
                if attack is not None:
                    return attack, found
                found = Found.DAMAGED
            fresh = attack_case(context.factory, self.goal, case, self.bounded)
            if fresh.record is not None or not self.goal.refuted_by(fresh.value):
                context.cache.write(key, encode(fresh))
            return fresh, found


def _believable(context: WorkerContext, goal: Goal, case: Case, value: Any) -> Attack | None:
    """Return an attack of the cache; one that refutes its goal only if its run does so again."""
    case = case.at_its_length
    try:
        kept = decode(value, (Attack,))
        if not (isinstance(kept, Attack) and type(kept.value) is float and kept.value >= 0):
            return None
        if kept.record is None:
            return None if goal.refuted_by(kept.value) else kept
        train, infer = context.factory.problem(goal.block, case.tokens).simulators()
        run = run_of(kept.record, {"train": train, "infer": infer})
    except DAMAGE:
        return None
    if run.x is not None and not case.holds(run.x):
        return None
    with one_thread():
        again = attack_of(run, train, infer, goal.functional)
    if again is None or not goal.refuted_by(again.value):
        return None
    return kept if kept.record.get("attained") == attained(again) else None


@dataclass(frozen=True, slots=True)
class CheckTask:
    """Have the independent checker derive every `step`-th case of a proof, from `first` on."""

    proof: bytes
    first: int = 0
    step: int = 1

    def run(self, context: WorkerContext) -> tuple[Checked, None]:
        """Check the whole document and derive these cases."""
        path = context.factory.model.checkpoint.path
        outcome = recheck(self.proof, path, part=(self.first, self.step))
        return Checked("" if outcome.ok else f"{outcome.reason}: {outcome.detail}"), None


def _dependencies(context: WorkerContext, goal: Goal, case: Case) -> dict[str, Any]:
    """Return everything that the bound of a case depends on, as plain data."""
    factory = context.factory
    graph = problem_of(factory, goal, case).graph
    digests = context.builder(goal).digests_of(graph)
    stated = {f.name: repr(getattr(goal, f.name)) for f in fields(goal)}
    del stated["obligation"], stated["region"]
    region: dict[str, Any] = {"kind": goal.region.kind.value, "box": case.digest}
    if case.longest is not None:
        tables = factory.sequences(goal.block, case.longest).tables
        region["tables"] = {name: array_digest(tables[name]) for name in sorted(tables)}
    return {
        "schema": ENTRY_SCHEMA,
        "rules": context.setting.rules,
        "device": factory.device.type,
        "graph": graph.digest,
        "parameters": digests,
        "region": region,
        "numerics": {"train": factory.train.to_json(), "infer": factory.infer.to_json()},
        "goal": {**stated, "evidence": str(goal.clause.evidence)},
    }


# --- doing the work -------------------------------------------------------------------------------

_KEPT: dict[bytes, WorkerContext] = {}
"""The context of this process; only that of the latest setting is kept."""


def open_context(setting: RunSettings, model: Model | None = None) -> WorkerContext:
    """Return what a process needs to work: the loaded model and an empty factory.

    Raises:
        Refusal: the model cannot be loaded, or it is not the model, or this is not the program,
            that gave out the work.
    """
    loaded = load_model(setting.program.model, setting.base) if model is None else model
    if loaded.checkpoint.sha256 != setting.checkpoint:
        raise _changed("the checkpoint")
    for name, digest in loaded.files.digests.items():
        if setting.loaded.get(name, digest) != digest:
            raise _changed(name)
    if rules_version() != setting.rules:
        raise _changed("the program (kcdsl, torch or numpy)")
    train, infer = resolve(setting.program.train), resolve(setting.program.infer)
    return WorkerContext(
        setting, ProblemFactory(loaded, train, infer, torch.device(setting.device))
    )


def _changed(what: str) -> Refusal:
    return refuse(
        codes.CHANGED_MEANWHILE,
        f"{what} changed while the command ran, or differs between machines",
        help="run it again; every machine needs the same version of kcdsl and the same files",
    )


def work(setting: bytes, task: bytes) -> bytes:
    """Do a pickled piece of work in a process of its own; return the pickled answer.

    Tensors travel by value, so nothing is shared between processes. Nothing is raised.
    """
    started = time.perf_counter()
    with _caught(started) as outcome:
        if setting not in _KEPT:
            _KEPT.clear()
            _KEPT[setting] = open_context(pickle.loads(setting))
        context = _KEPT[setting]
        answer = perform(context, pickle.loads(task))
        imported_code(context.factory.model.files)
        outcome.append(replace(answer, code=dict(context.factory.model.files.code)))
    return pickle.dumps(outcome[0])


def perform(context: WorkerContext, task: Task) -> Answer:
    """Do a piece of work. Nothing is raised but what ends a process."""
    started = time.perf_counter()
    with _caught(started) as outcome, _threads(context.setting.threads):
        value, found = task.run(context)
        outcome.append(Answer(value, time.perf_counter() - started, peak_bytes(), found))
    return outcome[0]


@contextmanager
def _caught(started: float) -> Iterator[list[Answer]]:
    """Make an answer of whatever the body raises."""
    outcome: list[Answer] = []

    def failed(value: Unfinished | Refused | Defect) -> None:
        outcome[:] = [Answer(value, time.perf_counter() - started, peak_bytes())]

    try:
        yield outcome
    except Refusal as refusal:
        failed(Refused(refusal.diagnostics))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror or error}"
        failed(Refused((Diagnostic(codes.INPUT_OUTPUT, text),)))
    except Exception as error:
        if _wants_memory(error):
            first = str(error).strip().splitlines()
            failed(Unfinished(f"out of memory{': ' + first[0] if first else ''}"))
        else:
            trace = traceback.format_exc()
            failed(Defect(type(error).__name__, str(error), trace))


def _wants_memory(error: Exception) -> bool:
    """Say whether an exception means that there was too little memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Run the body on this many threads, whatever was set before."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def worth_attacking(goal: Goal, outcomes: Sequence[CaseOutcome]) -> list[int]:
    """Return which cases to attack, in order: the one with the largest bound, and every case that
    its bound leaves open. The search ends at the first that refutes the goal."""
    if goal.functional == "no_flip":
        return []
    widest = max(range(len(outcomes)), key=lambda i: outcomes[i].bound)
    still_open = [i for i, case in enumerate(outcomes) if not goal.admits(case.bound)]
    return list(dict.fromkeys([widest, *still_open]))


def attack_case(factory: ProblemFactory, goal: Goal, case: Case, bounded: Bounded) -> Attack:
    """Search for runs of one case with a large drift; the same case gives the same runs.

    The result is plain data. It has the record of its run only where it refutes the goal: then, if
    a run with concrete orders of all sums does so too, it is that one. Where no run stays inside of
    its formats it is 0, of no run. Of a region of any length those sequences are attacked that are
    as long as the tokens the region came from.
    """
    any_length, case = case.longest is not None, case.at_its_length
    problem: BlockProblem = factory.problem(goal.block, case.tokens)
    places = _in_last_row(problem, bounded.places) if any_length else bounded.places
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
            )
        except Overflowed:  # whatever runs here leaves its formats, or exceeds a static scale
            row = (0,) * (len(problem.graph.node(problem.graph.output).shape) - 1)
            return Attack(0.0, row, 0, 0.0, 0.0)
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


def _in_last_row(problem: BlockProblem, places: Sequence[int]) -> tuple[int, ...]:
    """Return the same columns of the last row, which under a causal mask reads the most others."""
    output = problem.graph.node(problem.graph.output).shape
    first = math.prod(output) - output[-1]
    return tuple(dict.fromkeys(first + place % output[-1] for place in places))


SUBJECT = frozenset({"name", "graph", "region"})
"""The fields of a case in a proof that say what it is about."""


def stated_of(contents: Contents | None) -> tuple[float, dict[str, Any] | None]:
    """Return the claim of a case, and what its proof states beside what it is about."""
    if contents is None or not contents.cases:
        return 0.0, None
    (record,), (claim,) = contents.cases, contents.claims
    return claim, {k: v for k, v in record.items() if k not in SUBJECT}


def refuse_subject(stated: Any) -> None:
    """Raise ValueError where what is stated says what it is about: a true proof of another region
    shows nothing."""
    if not isinstance(stated, Mapping) or not SUBJECT.isdisjoint(stated):
        raise ValueError("the entry says what its proof is about")


def refuse_apart(goal: Goal, bounded: Any, claim: Any, stated: Any) -> None:
    """Raise ValueError unless what is said of a case has its form, and is what its proof claims."""
    if not isinstance(bounded, Bounded) or not _plain(bounded):
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


def _plain(bounded: Bounded) -> bool:
    """Say whether every field of a bound has its type; runs and links are not kept with it."""
    outcome, places = bounded.outcome, bounded.places
    return (
        type(outcome) is CaseOutcome
        and type(outcome.name) is str
        and type(outcome.length) is int
        and type(outcome.bound) is float
        and outcome.attack is None
        and type(outcome.reason) in (str, type(None))
        and type(outcome.stable) in (bool, type(None))
        and type(outcome.margin) in (float, type(None))
        and outcome.links == ()
        and type(outcome.alpha) in (str, type(None))
        and type(places) is tuple
        and all(type(place) is int and place >= 0 for place in places)
    )
