"""Times, memory and determinism of the inference kernel.

Warm-up first; the device is synchronised on both sides of every timed run; rounds over all requests
are repeated, so that slow phases of the machine fall on all requests alike. A timed run is one
forward pass, and, where clauses read the times of tokens, a generation after the request: the time
to its first token is that of the prefill, the time per further token that of a decode step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.obligations import named_slices
from kcdsl.ir.terms import Clause
from kcdsl_backends.empirical.sources.kernels import Kernel, tensor_digest
from kcdsl_backends.empirical.table.evidence import FEWEST_ROUNDS, SamplingUnit, Timing
from kcdsl_backends.empirical.table.requirements import GENERATED
from kcdsl_backends.executors import in_order
from kcdsl_backends.requests import Request

WARM_UP = 3
FEWEST_RUNS = 64
DIGEST_ROUNDS = 3
"""Rounds whose outputs are compared bit by bit."""
NEW_TOKENS = 16
"""So many tokens a kernel that runs here generates after a request."""
OF_GENERATION = ("latency", "ttft", "tpot")

Clock = Callable[[], float]
Generate = Callable[[Request, Clock], Iterable[tuple[float, int]]]
"""Generates after a request: yields (time, number of tokens) as tokens arrive. A first item with 0
tokens gives the start time, if that is not the time of the call. Raises `Untimed`."""


class Untimed(Exception):
    """A generation has no times that can be used; the text says why."""


def rounds_needed(sizes: Sequence[int]) -> int:
    """Return the rounds after which each slice of these sizes has `FEWEST_RUNS` runs. Rounds reduce
    the variance of means; confidence limits depend on the number of requests only."""
    least = min((size for size in sizes if size), default=1)
    return max(FEWEST_ROUNDS, math.ceil(FEWEST_RUNS / least))


def chosen_rounds(
    timed: Sequence[Clause], slices: Mapping[str, Sequence[Request]]
) -> tuple[tuple[Request, ...], int]:
    """Return the requests of the slices that clauses about times name, and the rounds over them."""
    names = {name for clause in timed for name in (named_slices(clause) or tuple(slices))}
    rows = [own for name, own in slices.items() if name in names]
    chosen = {request.key: request for own in rows for request in own}
    return tuple(chosen.values()), rounds_needed([len(own) for own in rows])


def time_requests(
    forward: Callable[[tuple[int, ...]], Tensor],
    requests: Sequence[Request],
    *,
    rounds: int,
    seconds: float,
    device: torch.device,
    generate: Generate | None = None,
    clock: Clock = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Timing:
    """Time `forward` on every request, round after round, until `rounds` or `seconds` are over;
    and `generate` too, where it is given.

    At least `FEWEST_ROUNDS` rounds are run. A run that raises has the time NaN: no clause
    about times passes with it.
    """
    for request in requests[:WARM_UP]:
        _attempt(forward, request)
        if generate is not None:
            _generated(generate, request, device, clock)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs: list[SamplingUnit] = []
    digests: dict[str, list[str]] = {}
    for turn in _turns(rounds, seconds, clock, progress):
        for request in requests:
            _synchronise(device)
            begin = clock()
            output = _attempt(forward, request)
            _synchronise(device)
            elapsed = clock() - begin if output is not None else math.nan
            values, problems = {"latency": np.array([elapsed], np.float64)}, {}
            if generate is not None:
                made = _generated(generate, request, device, clock)
                values |= {name: made.values[name] for name in GENERATED & made.values.keys()}
                problems = {name: made.problems[name] for name in GENERATED & made.problems.keys()}
            runs.append(SamplingUnit(request.key, request.length, values, problems=problems))
            if turn < DIGEST_ROUNDS:
                digest = "failed" if output is None else tensor_digest(output)
                digests.setdefault(request.key, []).append(digest)
    return Timing(tuple(runs), {k: _equal(d) for k, d in digests.items()}, _peak(device))


def time_served(
    generate: Generate,
    requests: Sequence[Request],
    *,
    rounds: int,
    seconds: float,
    at_once: int = 1,
    clock: Clock = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Timing:
    """Time the generation of a server on every request, as `time_requests` does, `at_once` at a
    time: from the request to its first token, between tokens, and to the last one (latency)."""
    device = torch.device("cpu")

    def timed(request: Request) -> SamplingUnit:
        return _generated(generate, request, device, clock)

    with closing(in_order(requests[:WARM_UP], timed, at_once)) as units:
        list(units)
    runs: list[SamplingUnit] = []
    for _ in _turns(rounds, seconds, clock, progress):
        with closing(in_order(requests, timed, at_once)) as units:
            runs += units
    return Timing(tuple(runs))


def _turns(
    rounds: int, seconds: float, clock: Clock, progress: Callable[[int, int], None]
) -> Iterator[int]:
    started = clock()
    for turn in range(rounds):
        if turn >= FEWEST_ROUNDS and clock() - started > seconds:
            return
        yield turn
        progress(turn + 1, rounds)


def greedy(kernel: Kernel) -> Generate:
    """Return a greedy generator for a kernel that runs in this process: of `NEW_TOKENS` tokens, or
    fewer if the model takes no longer sequence. There is no cache of keys and values: each step
    runs the whole sequence again."""

    def generate(request: Request, clock: Clock) -> Iterator[tuple[float, int]]:
        ids = list(request.tokens)
        for done in range(NEW_TOKENS):
            try:
                tokens = kernel.tokens(ids)
            except Refusal:
                if done:  # the model has no room for a further token
                    return
                raise
            try:
                ids.append(int(kernel.forward(tokens)[-1].argmax()))
            except Refusal as refusal:
                raise Untimed(refusal.diagnostics[0].message) from refusal
            yield clock(), 1

    return generate


def _generated(
    generate: Generate, request: Request, device: torch.device, clock: Clock
) -> SamplingUnit:
    """Return the times of one generation; `problems` give the reason for each missing one.

    Tokens that arrive together with the first one do not count as further tokens.
    """
    came: list[tuple[float, int]] = []
    _synchronise(device)
    begin = clock()
    try:
        with torch.no_grad():
            came.extend(generate(request, clock))
        if came and came[0][1] == 0:
            begin, _ = came.pop(0)
        if not came:
            raise Untimed("no token was generated")
    except (RuntimeError, Untimed) as error:
        return SamplingUnit(
            request.key,
            0,
            {name: np.array([math.nan]) for name in OF_GENERATION},
            problems=dict.fromkeys(OF_GENERATION, str(error) or type(error).__name__),
        )
    first, last = came[0][0], came[-1][0]
    tokens = sum(count for _, count in came)
    further = sum(count for moment, count in came if moment > first)
    found = {"latency": last - begin, "ttft": first - begin}
    problems = {}
    if further:
        found["tpot"] = (last - first) / further
    else:
        problems["tpot"] = "no token came after the first, so none has a time between tokens"
    values = {name: np.array([value], np.float64) for name, value in found.items()}
    return SamplingUnit(request.key, tokens, values, problems=problems)


def _attempt(forward: Callable[[tuple[int, ...]], Tensor], request: Request) -> Tensor | None:
    try:
        with torch.no_grad():
            return forward(request.tokens)
    except RuntimeError:
        return None


def _equal(digests: list[str]) -> tuple[int, int]:
    """Return how many repeats equal the first run bit by bit, of how many; failed runs do not."""
    first, *others = digests
    return sum(d == first != "failed" for d in others), len(others)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> float | None:
    """Return the peak memory in bytes: of the CUDA allocator, else of the whole process so far."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:
        return None
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(usage if sys.platform == "darwin" else usage * 1024)
