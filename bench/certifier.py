"""How near the affine domain's bounds are to the best attack, on the published MiniLM.

For every case the bound and the attack of the same statement, at the point (the region of a ball
where a radius is named), norm_inf of the drift between float32 torch eager and the inference
kernel named; the attack pushes at the elements whose bounds are largest. The worst ratio of the
sentences is the figure.

    make bench-certifier
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from bench.common import Better, Figure, forget_peak, peak_bytes, report, seconds
from bench.minilm import workshop

SHORT = "A cat sleeps."
MIDDLE = "The quick brown fox jumps over the lazy dog near the big river bank."
LONG = (
    "The proxy retries an idempotent request once, with a random delay, when the first answer is a "
    "timeout or one of a short list of errors, and it writes both attempts to the log so that an "
    "operator who reads it can see afterwards how often, and why, this was needed at all."
)
TIMED = 17
"""Tokens of MIDDLE, the sentence of the time and memory figures."""
LENGTHS = (8, 16, 32, 64)
"""Tokens of the growth figure."""

_FREE = {"preset": "torch-eager", "accumulate": "float64"}
_EXACT = {"preset": "torch-eager", "compute": "float64"}
_W8A8 = {"preset": "fp8-w8a8-per-channel", "casts": "nearest"}
_BFLOAT16 = {"preset": "torch-sdpa-flash", "compute": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table: bound / attack at most `limit`."""

    name: str
    block: str
    numerics: dict[str, Any] = field(hash=False)
    limit: float
    sentences: tuple[str, ...] = (SHORT, MIDDLE, LONG)
    radius: float = 0.0
    train: dict[str, Any] | None = field(default=None, hash=False)


CASES = (
    Case(
        "attn_0, float32, any order",
        "attn_0",
        {"preset": "torch-sdpa-flash", "compute": "float32"},
        1.05,
    ),
    Case(
        "attn_0, bfloat16, casts any on input and context",
        "attn_0",
        {**_EXACT, "results": {"input": "bfloat16", "context": "bfloat16"}},
        1.35,
        train=_EXACT,
    ),
    Case("attn_0, bfloat16, casts any everywhere", "attn_0", _BFLOAT16, 1.6),
    Case(
        "attn_0, bfloat16, casts nearest",
        "attn_0",
        {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"},
        1.2,
    ),
    Case("attn_0, fp8 weights, bfloat16 casts any", "attn_0", {"preset": "fp8-weights"}, 1.5),
    Case("attn_0, fp8 W8A8 per token, casts nearest", "attn_0", _W8A8, 1.2, (SHORT, MIDDLE)),
    Case(
        "mlp_0, fp8 W8A8 per token, casts any",
        "mlp_0",
        {**_W8A8, "casts": "any"},
        1.05,
        (SHORT, MIDDLE),
    ),
    Case("attn_0, ball 1e-3, bfloat16, casts any", "attn_0", _BFLOAT16, 2.0, (SHORT, MIDDLE), 1e-3),
    Case("mlp_0, bfloat16, casts any", "mlp_0", _BFLOAT16, 1.02, (SHORT, MIDDLE)),
    Case(
        "layer_0, float32, casts any everywhere",
        "layer_0",
        {**_FREE, "compute": "float32"},
        1.01,
        (SHORT,),
    ),
    Case(
        "layer_0, float16, casts any everywhere",
        "layer_0",
        {**_FREE, "compute": "float16"},
        1.2,
        (SHORT,),
    ),
    Case(
        "layer_0, bfloat16, casts any everywhere",
        "layer_0",
        {**_FREE, "compute": "bfloat16"},
        5.0,
        (SHORT,),
    ),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Bound, interval bound and attack of a sentence; infinite where a domain has none."""

    tokens: int
    bound: float
    interval: float
    attack: float


def main() -> int:
    """Measure every case and report."""
    figures: list[Figure] = []
    for case in CASES:
        figures += _figures(case, [_apart(measure, case, text) for text in case.sentences])
    figures += _apart(cost)
    figures.append(_apart(growth))
    return report("certifier", figures)


def _apart(work: Any, *arguments: object) -> Any:
    """Run in a fresh process: peak memory cannot be reset."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        result = pool.submit(work, *arguments).result()
    named = [a.name for a in arguments if isinstance(a, Case)] or [work.__name__]
    print(*named, result, file=sys.stderr, flush=True)
    return result


def _figures(case: Case, found: list[Measured]) -> Iterator[Figure]:
    worst = max(found, key=lambda m: m.bound / m.attack)
    where = ", ".join(f"{m.tokens} tokens: {m.bound:.3g} / {m.attack:.3g}" for m in found)
    yield Figure(case.name, worst.bound / worst.attack, Better.LOWER, case.limit, where)
    known = [m for m in found if math.isfinite(m.interval) and m.interval > 2 * m.attack]
    if known:
        gain = min(m.interval / m.bound for m in known)
        yield Figure(
            f"{case.name}: interval / affine", gain, Better.HIGHER, 10, "the least of the sentences"
        )


def measure(case: Case, text: str) -> Measured:
    """Bound and attack one sentence in this process."""
    import torch

    from kcdsl_backends.affine.pair import drift
    from kcdsl_backends.attack.search import attack
    from kcdsl_backends.interval.errors import NoBound
    from kcdsl_backends.interval.functionals import drift_bound

    shop = workshop(case.numerics, case.train)
    tokens = tuple(shop.model.tokenizer.encode(text))
    problem, centre = shop.problem(case.block, tokens), shop.centre(case.block, tokens)
    radius = torch.full((1, 1), case.radius, dtype=torch.float64)
    try:
        sizes = drift(problem.graph, problem.train, problem.infer, centre, radius).box.mag()
        bound, places = float(sizes.max()), sizes.flatten().topk(4).indices.tolist()
    except NoBound:
        bound, places = math.inf, []
    try:
        interval = drift_bound(problem.bound(centre, radius).output.drift, "inf")
    except NoBound:
        interval = math.inf
    found = attack(*problem.simulators(), "inf", centre, radius, places=places)
    if found.value > min(bound, interval):
        raise SystemExit(f"{case.name}: a run of drift {found.value} exceeds its bound {bound}")
    return Measured(len(tokens), bound, interval, found.value)


def cost() -> list[Figure]:
    """Return time and memory of all outputs of attn_0."""
    import torch

    from kcdsl_backends.affine.pair import drift

    shop = workshop(CASES[0].numerics)
    tokens = tuple(shop.model.tokenizer.encode(MIDDLE))
    if len(tokens) != TIMED:
        raise SystemExit(f"the sentence has {len(tokens)} tokens, not {TIMED}")
    problem, centre = shop.problem("attn_0", tokens), shop.centre("attn_0", tokens)
    zero = torch.zeros(1, 1, dtype=torch.float64)
    forget_peak()
    time = seconds(
        lambda: drift(problem.graph, problem.train, problem.infer, centre, zero), repeat=3
    )
    where = f"{TIMED} tokens, float32 any order, all outputs, {torch.get_num_threads()} threads"
    return [
        Figure("attn_0: seconds", time, Better.LOWER, 2.0, where),
        Figure("attn_0: peak GB", peak_bytes() / 1e9, Better.LOWER, 1.5, "of the whole process"),
    ]


def growth() -> Figure:
    """Return the exponent with which the time of attn_0 grows with the number of tokens."""
    import torch

    from kcdsl_backends.affine.pair import drift

    shop = workshop(CASES[0].numerics)
    tokens = tuple(shop.model.tokenizer.encode(LONG))
    zero, times = torch.zeros(1, 1, dtype=torch.float64), []
    for count in LENGTHS:
        part = (tokens * 2)[:count]
        problem, centre = shop.problem("attn_0", part), shop.centre("attn_0", part)

        def work(problem: Any = problem, centre: Any = centre) -> object:
            return drift(problem.graph, problem.train, problem.infer, centre, zero)

        times.append(seconds(work, repeat=1, warmup=0))
    exponent = math.log(times[-1] / times[0]) / math.log(LENGTHS[-1] / LENGTHS[0])
    where = ", ".join(f"{n} tokens {t:.2g} s" for n, t in zip(LENGTHS, times, strict=True))
    return Figure("attn_0: growth with tokens, exponent", exponent, Better.LOWER, None, where)


if __name__ == "__main__":
    sys.exit(main())
