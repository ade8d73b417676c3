"""Execution of tasks in one process: shared context, answers and failures.

Tasks and answers can be pickled. An answer depends only on the task and the settings of the run,
not on the process or on earlier tasks.
"""

from __future__ import annotations

import pickle
import resource
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from kcdsl.diagnostics import Diagnostic, Refusal, codes, refuse
from kcdsl.ir.terms import Program
from kcdsl.model.architecture import Model
from kcdsl.model.graph import BlockGraph
from kcdsl.model.loader import load_model
from kcdsl.model.own_code import imported_code
from kcdsl.model.presets import resolve
from kcdsl.route.goals import Goal
from kcdsl_backends.certifier.cache import (
    ENTRY_SCHEMA,
    Cache,
    CacheEntry,
    Lookup,
    key_of,
    rules_version,
)
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.certifier.statements.proof import ProofBuilder
from kcdsl_backends.process import OutOfTime, reuse_memory


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Settings that all tasks of one run share.

    `checkpoint` is the sha256 of the weights, `rules` the version of the program and `loaded` the
    digests of the model's files in the main process. A worker with other ones refuses to work.
    """

    program: Program
    base: Path
    device: str
    threads: int
    checkpoint: str
    rules: str
    cache: Path | None
    loaded: Mapping[str, str] = field(default_factory=dict)
    limit: float | None = None
    """End of the search for bounds and runs, as `time.time`."""


@dataclass(slots=True)
class WorkerContext:
    """State that a process keeps between tasks: the model, graphs and weights."""

    setting: RunSettings
    factory: ProblemFactory
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def cache(self) -> Cache | None:
        """Return the cache of the run."""
        return None if self.setting.cache is None else Cache(self.setting.cache)

    def entry(self, what: str, goal: Goal, graph: BlockGraph, **more: Any) -> CacheEntry:
        """Return the cache entry of a value about a graph that also depends on `more`."""
        if self.cache is None:
            return CacheEntry(None)
        return CacheEntry(self.cache, self.key(what, goal, graph, **more))

    def key(self, what: str, goal: Goal, graph: BlockGraph, **more: Any) -> str:
        """Return the key of such a value, the digest of everything that it depends on."""
        factory = self.factory
        return key_of(
            {
                "what": what,
                "schema": ENTRY_SCHEMA,
                "rules": self.setting.rules,
                "device": factory.device.type,
                "graph": graph.digest,
                "parameters": self.builder(goal).digests_of(graph),
                "served": None if factory.model.served is None else factory.model.served.digest,
                "numerics": {"train": factory.train.to_json(), "infer": factory.infer.to_json()},
                **more,
            }
        )

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
class Unfinished:
    """A task that did not finish, for lack of time or memory."""

    reason: str


@dataclass(frozen=True, slots=True)
class RejectedTask:
    """A task that was rejected because of its input."""

    diagnostics: tuple[Diagnostic, ...]


@dataclass(frozen=True, slots=True)
class Defect:
    """A task that ended with an unexpected exception."""

    kind: str
    message: str
    trace: str


class Task(Protocol):
    """A task for a worker."""

    def run(self, context: WorkerContext) -> tuple[object, Lookup | None]:
        """Run the task; return its value and the cache lookup (None without one)."""
        ...


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task and its cost."""

    value: object
    """The value of the task, or `Unfinished`, `RejectedTask` or `Defect`."""
    seconds: float
    peak_bytes: int
    found: Lookup | None = None
    code: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The user's modules that the worker has imported, in the form of `Artefacts.code`."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A task that only loads the model."""

    def run(self, context: WorkerContext) -> tuple[None, None]:
        return None, None


# --- execution ------------------------------------------------------------------------------------

_CONTEXTS: dict[bytes, WorkerContext] = {}
"""The context of this process for the latest settings."""


def open_context(setting: RunSettings, model: Model | None = None) -> WorkerContext:
    """Return a context with the loaded model and an empty factory.

    Raises:
        Refusal: the model cannot be loaded, or model or program differ from those of the settings.
    """
    reuse_memory()
    loaded = model
    if loaded is None:
        loaded = load_model(setting.program.model, setting.base, by_block=True)
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
    """Run a pickled task in a worker process; return the pickled result.

    Tensors are passed by value, so that processes share nothing. Exceptions become results.
    """
    started = time.perf_counter()
    with _failures_as_results(started) as outcome:
        if setting not in _CONTEXTS:
            _CONTEXTS.clear()
            _CONTEXTS[setting] = open_context(pickle.loads(setting))
        context = _CONTEXTS[setting]
        answer = perform(context, pickle.loads(task))
        imported_code(context.factory.model.files)
        outcome.append(replace(answer, code=dict(context.factory.model.files.code)))
    return pickle.dumps(outcome[0])


def perform(context: WorkerContext, task: Task) -> TaskResult:
    """Run a task. Only exceptions that end the process are raised."""
    started = time.perf_counter()
    with _failures_as_results(started) as outcome, _threads(context.setting.threads):
        value, found = task.run(context)
        outcome.append(TaskResult(value, time.perf_counter() - started, peak_bytes(), found))
    return outcome[0]


@contextmanager
def _failures_as_results(started: float) -> Iterator[list[TaskResult]]:
    """Convert an exception of the body to a task result."""
    outcome: list[TaskResult] = []

    def failed(value: Unfinished | RejectedTask | Defect) -> None:
        outcome[:] = [TaskResult(value, time.perf_counter() - started, peak_bytes())]

    try:
        yield outcome
    except Refusal as refusal:
        failed(RejectedTask(refusal.diagnostics))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror or error}"
        help = "free some space, or see whether the file can be read and written"
        failed(RejectedTask((Diagnostic(codes.INPUT_OUTPUT, text, help=help),)))
    except OutOfTime:
        failed(Unfinished("not begun within the time limit"))
    except Exception as error:
        wants = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if wants or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)):
            first = str(error).strip().splitlines()
            failed(Unfinished(f"out of memory{': ' + first[0] if first else ''}"))
        else:
            trace = traceback.format_exc()
            failed(Defect(type(error).__name__, str(error), trace))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    """Run the body on this many threads of torch."""
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
