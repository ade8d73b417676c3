"""Running requests in other processes: those of this machine, or of a ray cluster.

A worker loads the contract itself and runs pieces of the requests with the settings of a single
process, its threads included, so that all bits are the same; a worker with other files or libraries
is refused. A piece whose worker was lost is run once more by a new one; a request without a result
is never left out.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.model import Diagnostic, Refusal
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import Program
from kcdsl.model.files import Artefacts
from kcdsl.model.own_code import imported_code
from kcdsl_backends.empirical.collection.context import KernelContext, plan_for
from kcdsl_backends.empirical.collection.inputs import prepare
from kcdsl_backends.empirical.collection.resume import input_digests
from kcdsl_backends.empirical.sources.kernels.run import run_request
from kcdsl_backends.empirical.table.evidence import RequestRun
from kcdsl_backends.empirical.table.requirements import split
from kcdsl_backends.executors import (
    Processes,
    Ray,
    WorkerLost,
    set_thread_variables,
    thread_variables,
)
from kcdsl_backends.process import stdout_to_stderr
from kcdsl_backends.requests import Request

Code = Mapping[str, tuple[str, str]]
"""Imported modules of the contract, as in `Artefacts.code`."""
PIECE = 8
"""Number of requests of one piece: small, so that a lost piece costs little."""
ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class Recipe:
    """The arguments of `inputs.prepare` for a worker that decide values."""

    program: Program
    base: Path
    device: str
    slices: tuple[str, ...]
    seed: int
    threads: int
    variables: Mapping[str, str] = field(default_factory=thread_variables)
    """The environment variables of threads, which are part of the fingerprints of kernels."""


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """Workers that run requests: `engine` "processes" or "ray", and `jobs` of them (None, for ray:
    all cores)."""

    recipe: Recipe
    engine: str
    jobs: int | None

    def runs(
        self,
        requests: Sequence[Request],
        decided_by: Mapping[str, str],
        arrived: Callable[[Request, RequestRun], None] = lambda request, run: None,
        imported: Callable[[Code], None] = lambda code: None,
    ) -> dict[str, RequestRun]:
        """Return the results of every request, by its key.

        `arrived` is called with each result, `imported` with the contract's own modules that the
        worker has imported. `decided_by` holds the digests of everything that decides values here
        (`input_digests`), and must equal those of the worker. Raises Refusal (KC684) if a piece
        loses its worker twice, is incomplete or comes from a worker with other inputs, and the
        refusals of a worker that loads the contract.
        """
        data = pickle.dumps(self.recipe)
        waiting = [tuple(requests[i : i + PIECE]) for i in range(0, len(requests), PIECE)]
        found: dict[str, RequestRun] = {}
        for _ in range(ATTEMPTS if waiting else 0):
            pool, lost = self._open(len(waiting)), []
            try:
                futures: list[tuple[tuple[Request, ...], Future[bytes]]] = []
                for piece in waiting:
                    try:
                        keys = tuple(request.key for request in piece)
                        futures.append((piece, pool.submit(run_piece, data, keys)))
                    except BrokenExecutor:
                        lost.append(piece)
                for piece, future in futures:
                    try:
                        answer = pickle.loads(future.result())
                    except (BrokenExecutor, WorkerLost):
                        lost.append(piece)
                        continue
                    runs = _checked(answer, data, piece, decided_by)
                    imported(answer.code)
                    for request, run in zip(piece, runs, strict=True):
                        found[request.key] = run
                        arrived(request, run)
            finally:
                pool.kill()
            waiting = lost
            if not waiting:
                break
        if waiting:
            raise refuse(
                codes.WORKER_LOST,
                f"the worker of the requests from {waiting[0][0].id!r} on ended {ATTEMPTS} times"
                " before they were done",
                help="want of memory is the usual cause: use fewer --jobs",
            )
        return found

    def _open(self, pieces: int) -> Any:
        if self.engine == "ray":
            return Ray(self.jobs, 1)
        return Processes(min(self.jobs or 1, pieces), self.recipe.threads)


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """The result of a piece: its name, and its runs with the digests of what decided them, or why
    the contract could not be loaded; and the contract's own modules that its worker has
    imported."""

    task: str
    runs: tuple[RequestRun, ...] = ()
    decided_by: Mapping[str, str] = field(default_factory=dict)
    refusal: tuple[Diagnostic, ...] = ()
    code: Code = field(default_factory=dict)


def task_id(recipe: bytes, keys: Sequence[str]) -> str:
    """Return the name of a piece: the digest of recipe and keys, the same on every machine."""
    return hashlib.sha256(recipe + b"\0" + "\0".join(keys).encode()).hexdigest()


def _checked(
    answer: WorkerResult, recipe: bytes, piece: Sequence[Request], decided_by: Mapping[str, str]
) -> list[RequestRun]:
    if answer.refusal:
        raise Refusal(answer.refusal)
    other = [name for name, part in decided_by.items() if answer.decided_by.get(name) != part]
    if other:
        raise refuse(
            codes.WORKER_LOST,
            f"a worker runs with other {', '.join(other)} than this process",
            help="every machine needs the same version of kcdsl and the same files",
        )
    keys = [request.key for request in piece]
    if answer.task != task_id(recipe, keys) or [run.unit.key for run in answer.runs] != keys:
        raise refuse(
            codes.WORKER_LOST,
            f"a worker answered for other requests than {keys[0]!r} and those after it",
            help="every machine needs the same version of kcdsl and the same files",
        )
    return list(answer.runs)


# --- in a worker ---------------------------------------------------------------------------------

_LOADED: dict[str, tuple[Callable[[str], RequestRun], Mapping[str, str], Artefacts]] = {}


@stdout_to_stderr
def run_piece(recipe: bytes, keys: tuple[str, ...]) -> bytes:
    """Run some requests of a contract; it is loaded once by each worker."""
    name = hashlib.sha256(recipe).hexdigest()
    try:
        if name not in _LOADED:
            _LOADED.clear()
            _LOADED[name] = _load(pickle.loads(recipe))
        run, decided_by, files = _LOADED[name]
        runs = tuple(run(key) for key in keys)
        imported_code(files)
        answer = WorkerResult(task_id(recipe, keys), runs, decided_by, code=dict(files.code))
    except Refusal as refusal:
        answer = WorkerResult(task_id(recipe, keys), refusal=refusal.diagnostics)
    return pickle.dumps(answer)


def _load(recipe: Recipe) -> tuple[Callable[[str], RequestRun], Mapping[str, str], Artefacts]:
    """Return the function that runs a request by its key, the digests of what decides its result,
    and the files that were read."""
    torch.set_num_threads(recipe.threads)
    set_thread_variables(recipe.variables)
    files = Artefacts.of(recipe.base)
    context = prepare(
        recipe.program,
        recipe.base,
        device=recipe.device,
        slices=recipe.slices,
        seed=recipe.seed,
        crosscheck=False,
        artefacts=files,
    )
    assert isinstance(context, KernelContext)
    clauses, _ = split(expand_tables(context.program), frozenset(context.slices))
    plan = plan_for(context, clauses)
    requests = {request.key: request for request in context.requests}

    def run(key: str) -> RequestRun:
        return run_request(requests[key], context.train, context.infer, plan, context.block_input)

    return run, input_digests(context, plan, tuple(requests.values())), files
