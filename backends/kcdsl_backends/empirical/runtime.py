"""Times, memory and determinism of the inference kernel.

Warm-up first; the device is synchronised on both sides of every timed run; rounds over all requests
are repeated, so that slow phases of the machine fall on all requests alike.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from kcdsl.ir.terms import Clause, Statistic
from kcdsl.ir.walk import terms_of
from kcdsl_backends.empirical.clauses import metrics_of
from kcdsl_backends.empirical.measured import Timing, Unit
from kcdsl_backends.empirical.metrics.measures import MEASURES
from kcdsl_backends.empirical.run import tensor_digest
from kcdsl_backends.empirical.statistics import ONE_LOOK, Confidence, units_for_budget
from kcdsl_backends.empirical.windows import WINDOW
from kcdsl_backends.requests import Request

WARM_UP = 3
FEWEST_ROUNDS = 3
FEWEST_RUNS = 64
DIGEST_ROUNDS = 3
"""Rounds whose outputs are compared bit by bit."""


def is_runtime(clause: Clause) -> bool:
    """Say whether a clause needs timed or repeated runs."""
    names = metrics_of(clause.require) - {"failure_rate"}
    return any(MEASURES[n].tier == "E" for n in names if n in MEASURES)


def runs_needed(clause: Clause, confidence: Confidence = ONE_LOOK) -> int:
    """Return how many runs of a slice the clause needs to be decided, if nothing exceeds."""
    wanted = FEWEST_RUNS
    for term in terms_of(clause.require):
        if isinstance(term, Statistic) and term.q is not None and 0 < term.q < 1:
            wanted = max(wanted, units_for_budget(min(term.q, 1 - term.q), confidence))
    if clause.budget is not None and 0 < clause.budget.rate < 1:
        per_unit = WINDOW if clause.budget.unit == "windows" else 1
        units = units_for_budget(Fraction(clause.budget.rate), confidence)
        wanted = max(wanted, per_unit * units)
    return wanted


def rounds_needed(
    clauses: Sequence[Clause], sizes: Sequence[int], confidence: Confidence = ONE_LOOK
) -> int:
    """Return the rounds after which every clause has its runs on each slice of these sizes."""
    least = min((size for size in sizes if size), default=1)
    wanted = max((runs_needed(clause, confidence) for clause in clauses), default=FEWEST_RUNS)
    return max(FEWEST_ROUNDS, math.ceil(wanted / least))


def time_requests(
    forward: Callable[[tuple[int, ...]], Tensor],
    requests: Sequence[Request],
    *,
    rounds: int,
    seconds: float,
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Timing:
    """Time `forward` on every request, round after round, until `rounds` or `seconds` are over.

    At least `FEWEST_ROUNDS` rounds are run. A run that raises has no time (NaN), which no clause
    about times survives.
    """
    for request in requests[:WARM_UP]:
        _attempt(forward, request)
    _reset_peak(device)
    runs: list[Unit] = []
    digests: dict[str, list[str]] = {}
    started = clock()
    for turn in range(rounds):
        if turn >= FEWEST_ROUNDS and clock() - started > seconds:
            break
        for request in requests:
            _synchronise(device)
            begin = clock()
            output = _attempt(forward, request)
            _synchronise(device)
            elapsed = clock() - begin if output is not None else math.nan
            runs.append(
                Unit(request.key, request.length, {"latency": np.array([elapsed], np.float64)})
            )
            if turn < DIGEST_ROUNDS:
                digest = "failed" if output is None else tensor_digest(output)
                digests.setdefault(request.key, []).append(digest)
        progress(turn + 1, rounds)
    return Timing(tuple(runs), {k: _equal(d) for k, d in digests.items()}, _peak(device))


def _attempt(forward: Callable[[tuple[int, ...]], Tensor], request: Request) -> Tensor | None:
    try:
        with torch.no_grad():
            return forward(request.tokens)
    except RuntimeError:
        return None


def _equal(digests: list[str]) -> tuple[int, int]:
    """Return how many repeats gave the bits of the first run; a failed run equals nothing."""
    first, *others = digests
    return sum(d == first != "failed" for d in others), len(others)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


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
