"""Time and memory of the fused pass over logits compared with two `log_softmax` passes.

Both are measured alternately by processor time of one thread, since other programs lengthen wall
times; the least time of each counts. `log_softmax` allocates new arrays, as the naive evaluation
does; its time with reused arrays is a separate figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.common import Better, Figure, forget_peak, peak_bytes
from kcdsl_backends.empirical.metrics.full_logits import CHUNK, TIER_A, tier_a

POSITIONS, VOCABULARY = 4096, 32000
DRIFTS = (1e-6, 1e-2, 1.0)
ROUNDS = 3
LIMIT = 4.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Processor seconds of two log_softmax passes with new and with reused arrays, of the naive
    metrics and of the fused pass, and the peak bytes that this pass added."""

    passes: float
    kept: float
    naive: float
    fused: float
    extra: int


def tier_a_figures() -> list[Figure]:
    """Measure the pass for every size of drift."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {drift: _costs(drift) for drift in DRIFTS}
    finally:
        torch.set_num_threads(before)
    where = f"[{POSITIONS}, {VOCABULARY}] float32 pairs, 1 thread, {len(TIER_A)} metrics"
    lower = Better.LOWER
    figures = [
        Figure(
            f"tier A / two log_softmax, drift {drift:g}",
            costs.fused / costs.passes,
            lower,
            LIMIT,
            where,
        )
        for drift, costs in found.items()
    ]
    buffer = CHUNK * VOCABULARY * 4
    worst = max(costs.extra for costs in found.values())
    middle = found[DRIFTS[1]]
    return [
        *figures,
        Figure(
            "extra memory / chunk buffer",
            worst / buffer,
            lower,
            2.0,
            f"peak above the logits, results included; a buffer is {CHUNK} rows, "
            f"{buffer / 2**20:.1f} MiB",
        ),
        Figure("microseconds of a position", middle.fused / POSITIONS * 1e6, lower, None, where),
        Figure(
            "eight naive metrics / two log_softmax",
            middle.naive / middle.passes,
            lower,
            None,
            "float32 tensors of full size, wrong by 200 times at small drift",
        ),
        Figure(
            "tier A / two log_softmax into kept arrays",
            middle.fused / middle.kept,
            lower,
            None,
            "the same passes without the cost of new memory",
        ),
    ]


def tier_a_table(figures: Sequence[Figure]) -> str:
    """Return the figures as the table of a page."""
    lines = ["| figure | measured | at most |", "|---|---|---|"]
    for figure in figures:
        limit = "" if figure.limit is None else f"{figure.limit:g}"
        lines.append(f"| {figure.name} | {figure.value:.3g} | {limit} |")
    return "\n".join(lines) + "\n"


def _costs(drift: float) -> Costs:
    generator = torch.Generator().manual_seed(1)
    train = 2 * torch.randn(POSITIONS, VOCABULARY, generator=generator)
    infer = train + drift * torch.randn(POSITIONS, VOCABULARY, generator=generator)
    tier_a(train[:CHUNK], infer[:CHUNK])
    base = forget_peak()
    tier_a(train, infer)
    extra = peak_bytes() - base
    kept = torch.empty_like(train)

    def passes() -> None:
        torch.log_softmax(train, dim=-1)
        torch.log_softmax(infer, dim=-1)

    def into_kept() -> None:
        torch.log_softmax(train, dim=-1, out=kept)
        torch.log_softmax(infer, dim=-1, out=kept)

    works: tuple[Callable[[], object], ...] = (
        passes,
        into_kept,
        lambda: _naive(train, infer),
        lambda: tier_a(train, infer),
    )
    least = [float("inf")] * len(works)
    for _ in range(ROUNDS):
        for place, work in enumerate(works):
            start = time.process_time()
            work()
            least[place] = min(least[place], time.process_time() - start)
    new, existing, naive, fused = least
    return Costs(new, existing, naive, fused, extra)


def _naive(train: Tensor, infer: Tensor) -> tuple[Tensor, ...]:
    """Return eight metrics by straightforward code, on a quarter of the rows at a time."""
    found: list[tuple[Tensor, ...]] = []
    for a, b in zip(train.chunk(4), infer.chunk(4), strict=True):
        log_p, log_q = torch.log_softmax(a, dim=-1), torch.log_softmax(b, dim=-1)
        p, q = log_p.exp(), log_q.exp()
        middle = ((p + q) / 2).log()
        found.append(
            (
                (p * (log_p - log_q)).sum(-1),
                (q * (log_q - log_p)).sum(-1),
                (p * (log_p - middle) + q * (log_q - middle)).sum(-1) / 2,
                (p - q).abs().sum(-1) / 2,
                1 - (p * q).sqrt().sum(-1),
                (b - a).norm(dim=-1),
                (b - a).abs().amax(-1),
                (a.argmax(-1) == b.argmax(-1)).float(),
            )
        )
    return tuple(torch.cat(part) for part in zip(*found, strict=True))
