"""Bounds of blocks by our domains, auto_LiRPA and z3: tightness, time and memory.

The blocks are those of the published MiniLM, and norm and other blocks of examples/tiny_lm. Every
bound is of the same goal: norm_inf of the drift between float32 torch eager and the named inference
kernel, at the point of one sentence, all elements of the output. A method runs in a process with
limits of time and memory; the table has the reason if it does not finish. z3 gets the smallest
goals only, as in the backend `z3`. A bound below a run ends the benchmark if it is ours; otherwise
the row of the attack names it.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from bench import minilm, no_flip
from bench.common import Better, Figure, forget_peak, peak_bytes

MOST_SECONDS = 60
"""Processor time of a method on a case."""
MOST_BYTES = 8 * 2**30
"""Address space of the process of a method."""
SENTENCES = {
    6: "A cat sleeps.",
    17: "The quick brown fox jumps over the lazy dog near the big river bank.",
}
"""A sentence by its number of tokens."""
KERNELS: dict[str, dict[str, Any]] = {
    "bfloat16, casts any": {"preset": "torch-sdpa-flash", "compute": "bfloat16"},
    "fp8, casts to nearest": {"preset": "fp8-w8a8-per-channel", "casts": "nearest"},
}
BLOCKS = {
    "MiniLM": ("attn_0", "mlp_0", "layer_0"),
    "tiny LM": ("norm_0", "attn_0", "mlp_0", "layer_0"),
}
FACTORIES: dict[str, Callable[..., Any]] = {
    "MiniLM": minilm.problem_factory,
    "tiny LM": no_flip.problem_factory,
}
METHODS = ("attack", "interval", "affine", "ibp", "crown", "z3")


@dataclass(frozen=True, slots=True)
class Case:
    """A block of a model under an inference kernel, on a sentence of some tokens."""

    model: str
    block: str
    kernel: str
    tokens: int

    @property
    def name(self) -> str:
        """Return the name of its rows."""
        return f"{self.model} {self.block}, {self.kernel}, {self.tokens} tokens"

    @property
    def small(self) -> bool:
        """Return whether z3 is asked: the fewest operations and tokens of the model."""
        return self.tokens == 6 and self.block in ("norm_0", "mlp_0")


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a method: infinity with a reason if there is none."""

    value: float
    reason: str = ""
    wall: float = 0.0
    processor: float = 0.0
    memory: int = 0


CASES = tuple(
    Case(model, block, kernel, tokens)
    for model, blocks in BLOCKS.items()
    for block in blocks
    for kernel in KERNELS
    for tokens in SENTENCES
    if model == "MiniLM" or tokens == 6
)


def figures(only: str = "") -> list[Figure]:
    """Measure every case whose name contains `only`."""
    found = list[Figure]()
    for case in CASES:
        if only in case.name:
            methods = [name for name in METHODS if name != "z3" or case.small]
            found += _figures(case, {method: _isolated(case, method) for method in methods})
    return found


def _figures(case: Case, found: dict[str, Measured]) -> Iterator[Figure]:
    """Yield a row for every method that finished; the row of the attack names the others."""
    attack = found["attack"]
    without = [f"{name}: {one.reason}" for name, one in found.items() if one.reason]
    below = [name for name, one in found.items() if one.value < attack.value]
    if set(below) & {"interval", "affine"}:
        raise SystemExit(f"{case.name}: a run attains {attack.value}; below it: {below}")
    without += [f"{name}: below the run, unsound" for name in below]
    yield Figure(f"{case.name}: attack", attack.value, Better.HIGHER, None, _cost(attack, *without))
    for name, one in found.items():
        if name != "attack" and math.isfinite(one.value):
            ratio = one.value / attack.value
            yield Figure(f"{case.name}: {name} / attack", ratio, Better.LOWER, None, _cost(one))


def _cost(one: Measured, *more: str) -> str:
    used = f"{one.processor:.2f} s of processor, {one.wall:.2f} s, {one.memory / 2**20:.0f} MiB"
    return "; ".join((used, *more))


def _isolated(case: Case, method: str) -> Measured:
    """Measure in a new process; its failure is a result too."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        try:
            found = pool.submit(measure, case, method).result()
        except BrokenProcessPool:
            found = Measured(math.inf, f"not within {MOST_SECONDS} s and {MOST_BYTES >> 30} GB")
    shown = f"{found.value:.4g} {found.reason}".strip()
    print(f"{case.name}, {method}: {shown} ({_cost(found)})", file=sys.stderr, flush=True)
    return found


def measure(case: Case, method: str) -> Measured:
    """Return the result of a method for a case, computed in this process."""
    import torch

    from kcdsl_backends.drift.boxes import NoBound
    from kcdsl_backends.lirpa.library import Unanswered

    torch.set_num_threads(1)
    factory = FACTORIES[case.model](KERNELS[case.kernel])
    tokens = tuple(factory.model.tokenizer.encode(SENTENCES[case.tokens])[: case.tokens])
    problem, centre = factory.problem(case.block, tokens), factory.centre(case.block, tokens)
    work = _work(problem, centre, torch.zeros(1, 1, dtype=torch.float64), method)
    before = forget_peak()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    spent = math.ceil(time.process_time()) + MOST_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (spent, spent))
    wall, processor = time.perf_counter(), time.process_time()
    try:
        value, reason = work(), ""
    except (NoBound, Unanswered) as no:
        value, reason = math.inf, str(no)
    except (MemoryError, RuntimeError) as no:  # torch raises RuntimeError without memory
        value, reason = math.inf, f"{type(no).__name__}: {str(no).partition(chr(10))[0][:120]}"
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return Measured(value, reason, wall, processor, peak_bytes() - before)


def _work(problem: Any, centre: Any, radius: Any, method: str) -> Callable[[], float]:
    """Return the function to measure: the bound of the largest element, or the attack."""
    from kcdsl_backends.attack import attack
    from kcdsl_backends.lirpa.backend import drift_box

    match method:
        case "attack":
            train, infer = problem.simulators()
            return lambda: attack(train, infer, "inf", centre, radius).value
        case "interval":
            return lambda: float(problem.bound(centre, radius).output.drift.mag().amax())
        case "affine":
            return lambda: float(problem.forms(centre, radius).box().mag().amax())
        case "z3":
            return lambda: _by_splits(problem, centre, radius)
        case _:
            return lambda: float(
                drift_box(problem, centre, radius, method, most=MOST_BYTES).mag().amax()
            )


def _by_splits(problem: Any, centre: Any, radius: Any) -> float:
    """Return the bound of the largest element of the system of z3.

    Raises:
        NoBound: z3 is not asked questions of this size.
    """
    from kcdsl_backends.drift.boxes import NoBound
    from kcdsl_backends.smt.drift.backend import SECONDS, DriftGoal
    from kcdsl_backends.smt.drift.search import DriftQuestion, Search

    goal = DriftGoal.of(problem, centre, radius)
    refusal = goal.refusal(None)
    if refusal is not None:
        raise NoBound(problem.graph.output, refusal)
    Search(goal.targets, SECONDS, DriftQuestion).tighten()
    return float(goal.box().mag().amax())
