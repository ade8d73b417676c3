"""All metrics of full logits (tier A) of [N, V] pairs, a chunk of rows at a time.

The value of a row depends on the row alone: its bits are the same for every size of the chunks and
every number of threads. Each worker holds one chunk of both kernels (none where the logits are
float32 in memory already) and the arrays of one tile of it.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl_backends.empirical.metrics import ranks
from kcdsl_backends.empirical.metrics.bits import bit_metrics, integer_views
from kcdsl_backends.empirical.metrics.exceptional import exceptional_row
from kcdsl_backends.empirical.metrics.fused import (
    EXTREMES,
    SUMS,
    Work,
    add_tile,
    ordinary,
    values_of,
)
from kcdsl_backends.empirical.metrics.segments import Array
from kcdsl_backends.empirical.metrics.top import Top, top_of_rows

CHUNK = 64
"""Rows of one chunk unless the caller says otherwise."""
DEEPEST = 10
"""Depth of the lists of tokens that rank metrics compare."""

FUSED = (
    "logit_l2", "logit_l2_centered", "logit_linf", "logit_span", "logit_rel_l2", "logit_cosine",
    "kl", "kl_infer_train", "jeffreys", "js", "tv", "hellinger2", "chi2_train_infer",
    "chi2_infer_train", "renyi_inf", "log_ratio_linf", "entropy_gap",
)  # fmt: skip
BITS = ("bitwise_mismatch_count", "ulp_max")
MARGINS = ("margin", "stable_fraction", "top1_flip", "flip_hazard", "top1_overlap")
TIER_A: frozenset[str] = frozenset((*FUSED, *BITS, *MARGINS, *ranks.LIST_METRICS))
"""The names of every metric that one pass over full logits gives."""
CONTEXT = frozenset({"entropy"})
"""What the pass also tells of the training kernel alone: the entropy of its policy."""


def tier_a(
    train: Tensor,
    infer: Tensor,
    temperature: float = 1.0,
    metrics: Collection[str] = TIER_A,
    *,
    chunk: int = CHUNK,
    threads: int | None = None,
) -> dict[str, Array]:
    """Return metrics of every position of [N, V] logits of both kernels, each [N] float64.

    Logits of at most 32 bits are read as float32, others as float64; no digit is lost either way.
    A row with NaN or +inf is NaN in every metric. `threads` is by default the number that torch
    uses; no bit depends on it. Raises ValueError for empty or misaligned logits, fewer than two
    tokens (ten where lists of ten are compared), T <= 0, and names that are no metric of tier A.
    """
    wanted = frozenset(metrics)
    _check(train, infer, temperature, wanted, chunk)
    found = {name: np.empty(train.shape[0]) for name in sorted(wanted)}
    starts = range(0, train.shape[0], chunk)
    workers = max(1, min(torch.get_num_threads() if threads is None else threads, len(starts)))
    desks: SimpleQueue[Work] = SimpleQueue()
    kind = np.float32 if _is_narrow(train, infer) else np.float64
    for _ in range(workers):
        desks.put(Work(train.shape[1], min(chunk, train.shape[0]), kind))

    def work(start: int) -> None:
        desk = desks.get()
        try:
            rows = slice(start, start + chunk)
            _chunk(train[rows], infer[rows], temperature, found, start, desk)
        finally:
            desks.put(desk)

    if workers == 1:
        for start in starts:
            work(start)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(work, starts))
    return found


def _check(
    train: Tensor, infer: Tensor, temperature: float, wanted: frozenset[str], chunk: int
) -> None:
    if train.ndim != 2 or train.shape != infer.shape:
        raise ValueError(
            f"logits must be two [N, V] arrays of one shape, not {tuple(train.shape)} and "
            f"{tuple(infer.shape)}"
        )
    if train.shape[0] == 0 or train.shape[1] < 2:
        raise ValueError(f"logits of shape {tuple(train.shape)} have no drift to measure")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be positive, not {temperature}")
    if chunk < 1:
        raise ValueError(f"a chunk must hold a row, not {chunk}")
    unknown = wanted - TIER_A - CONTEXT
    if unknown:
        raise ValueError(f"no metric of full logits: {', '.join(sorted(unknown))}")
    depth = max((ranks.depth_of(name) for name in wanted), default=1)
    if depth > train.shape[1]:
        raise ValueError(
            f"top-{depth} needs at least {depth} tokens, the vocabulary has {train.shape[1]}"
        )


def _chunk(
    train: Tensor,
    infer: Tensor,
    temperature: float,
    found: dict[str, Array],
    first: int,
    desk: Work,
) -> None:
    """Write the metrics of one chunk, whose first row is `first`, into `found`."""
    with np.errstate(all="ignore"):
        _measure(train, infer, temperature, found, first, desk)


def _measure(
    train: Tensor,
    infer: Tensor,
    temperature: float,
    found: dict[str, Array],
    first: int,
    desk: Work,
) -> None:
    a, b = _arrays(train, infer)
    rows, wanted = a.shape[0], found.keys()
    views = integer_views(train, infer) if wanted & set(BITS) else None
    fused = bool(wanted & {*FUSED, *CONTEXT, "stable_fraction"})
    depth = DEEPEST if wanted & set(ranks.LIST_METRICS) else 2
    ranked = depth > 2 or bool(wanted & set(MARGINS))
    depth = min(depth, a.shape[1])
    extremes, sums = np.empty((len(EXTREMES), rows)), np.empty((len(SUMS), rows))
    bits = np.empty((len(BITS), rows))
    tops: list[tuple[Top, Top]] = []
    defined = np.empty(rows, dtype=np.bool_)
    for start in range(0, rows, desk.rows):
        at = slice(start, min(start + desk.rows, rows))
        x, y = a[at], b[at]
        best_x, best_y = x.max(axis=1), y.max(axis=1)
        defined[at] = (best_x < np.inf) & (best_y < np.inf)
        if fused:
            add_tile(x, y, temperature, desk, extremes[:, at], sums[:, at])
        if views is not None:
            bit_metrics(views[0][at], views[1][at], bits[:, at])
        if ranked:
            tops.append((top_of_rows(x, best_x, depth), top_of_rows(y, best_y, depth)))
    values: dict[str, Array] = dict(zip(BITS, bits, strict=True)) if views is not None else {}
    if fused:
        values.update(values_of(extremes, sums, temperature, a.shape[1]))
        for row in np.flatnonzero(~ordinary(extremes, sums, temperature, desk.kind)):
            for name, value in exceptional_row(a[row], b[row], temperature).items():
                values[name][row] = value
    if ranked:
        values.update(_ranks(tops, [n for n in ranks.LIST_METRICS if n in wanted]))
    if "stable_fraction" in wanted:
        stable = values["margin"] > 2 * values["logit_linf"]
        values["stable_fraction"] = stable.astype(np.float64)
    for name, target in found.items():
        target[first : first + rows] = np.where(defined, values[name], np.nan)


def _is_narrow(train: Tensor, infer: Tensor) -> bool:
    return {train.dtype, infer.dtype} <= {torch.float32, torch.float16, torch.bfloat16}


def _arrays(train: Tensor, infer: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    to = torch.float32 if _is_narrow(train, infer) else torch.float64
    a, b = (side.detach().to("cpu", to).contiguous().numpy() for side in (train, infer))
    return a, b


def _ranks(tops: list[tuple[Top, Top]], lists: list[str]) -> dict[str, Array]:
    train, infer = (np.concatenate([pair[side].tokens for pair in tops]) for side in (0, 1))
    best = np.concatenate([pair[0].values[:, :2] for pair in tops])
    same = (train[:, 0] == infer[:, 0]).astype(np.float64)
    return {
        "margin": best[:, 0] - best[:, 1],
        "top1_overlap": same,
        "top1_flip": 1.0 - same,
        "flip_hazard": 1000.0 * (1.0 - same),
        **ranks.list_metrics(train, infer, lists),
    }
