"""All metrics of full logits (tier A) of [N, V] pairs, a chunk of rows at a time.

The value of a row depends on the row alone: its bits are the same for every size of the chunks and
every number of threads. Each worker holds one chunk of both kernels (none where the logits are
float32 in memory already) and the arrays of one tile of it.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.metrics import METRICS
from kcdsl.metrics.definition import LOGITS
from kcdsl_backends.empirical.metrics.fused import (
    EXTREMES,
    SUMS,
    Workspace,
    add_tile,
    exceptional_row,
    ordinary,
    values_of,
)
from kcdsl_backends.empirical.metrics.measures import LIST_METRICS
from kcdsl_backends.empirical.statistics.estimates import Array

CHUNK = 64
"""Default number of rows of a chunk."""
DEEPEST = 10
"""Depth of the lists of tokens that rank metrics compare."""

FUSED = frozenset(d.name for d in METRICS.values() if d.entry == "fused:values_of")
BITS = ("bitwise_mismatch_count", "ulp_max")
MARGINS = ("margin", "stable_fraction", "top1_flip", "flip_hazard", "top1_overlap")
TIER_A: frozenset[str] = frozenset(
    d.name for d in METRICS.values() if d.reads == LOGITS or d.name in LIST_METRICS
)
"""The names of every metric that one pass over full logits gives."""
CONTEXT = frozenset({"entropy"})
"""Values of the training kernel alone: the entropy of its policy."""
_STEP = 128
"""Number of elements under each maximum when candidates for the largest are searched."""
_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


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
    workspaces: SimpleQueue[Workspace] = SimpleQueue()
    kind = np.float32 if _is_narrow(train, infer) else np.float64
    for _ in range(workers):
        workspaces.put(Workspace(train.shape[1], min(chunk, train.shape[0]), kind))

    def work(start: int) -> None:
        workspace = workspaces.get()
        try:
            rows = slice(start, start + chunk)
            _chunk(train[rows], infer[rows], temperature, found, start, workspace)
        finally:
            workspaces.put(workspace)

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
    depth = max((METRICS[name].depth for name in wanted - CONTEXT), default=1)
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
    workspace: Workspace,
) -> None:
    """Write the metrics of one chunk, whose first row is `first`, into `found`."""
    with np.errstate(all="ignore"):
        _measure(train, infer, temperature, found, first, workspace)


def _measure(
    train: Tensor,
    infer: Tensor,
    temperature: float,
    found: dict[str, Array],
    first: int,
    workspace: Workspace,
) -> None:
    a, b = _arrays(train, infer)
    rows, wanted = a.shape[0], found.keys()
    views = integer_views(train, infer) if wanted & set(BITS) else None
    fused = bool(wanted & {*FUSED, *CONTEXT, "stable_fraction"})
    depth = DEEPEST if wanted & set(LIST_METRICS) else 2
    ranked = depth > 2 or bool(wanted & set(MARGINS))
    depth = min(depth, a.shape[1])
    extremes, sums = np.empty((len(EXTREMES), rows)), np.empty((len(SUMS), rows))
    bits = np.empty((len(BITS), rows))
    tops: list[tuple[Top, Top]] = []
    defined = np.empty(rows, dtype=np.bool_)
    for start in range(0, rows, workspace.rows):
        at = slice(start, min(start + workspace.rows, rows))
        x, y = a[at], b[at]
        best_x, best_y = x.max(axis=1), y.max(axis=1)
        defined[at] = (best_x < np.inf) & (best_y < np.inf)
        if fused:
            add_tile(x, y, temperature, workspace, extremes[:, at], sums[:, at])
        if views is not None:
            bit_metrics(views[0][at], views[1][at], bits[:, at])
        if ranked:
            tops.append((top_of_rows(x, best_x, depth), top_of_rows(y, best_y, depth)))
    values: dict[str, Array] = dict(zip(BITS, bits, strict=True)) if views is not None else {}
    if fused:
        values.update(values_of(extremes, sums, temperature, a.shape[1]))
        for row in np.flatnonzero(~ordinary(extremes, sums, temperature, workspace.kind)):
            for name, value in exceptional_row(a[row], b[row], temperature).items():
                values[name][row] = value
    if ranked:
        values.update(_ranks(tops, [n for n in LIST_METRICS if n in wanted]))
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
        **{name: LIST_METRICS[name][0](train, infer) for name in lists},
    }


# --- the likeliest tokens -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Top:
    """The k largest logits of R rows: token ids [R, k] and their values [R, k], largest first.

    Equal logits stand in the order of their ids. A row with NaN has the ids -1 and values NaN.
    """

    tokens: NDArray[np.int64]
    values: NDArray[np.float64]


def top_of_rows(logits: NDArray[Any], best: NDArray[Any], k: int) -> Top:
    """Return the k largest of each row of [R, V] floats, whose maxima are `best` [R].

    The k-th largest of maxima over disjoint parts of a row is at most its k-th largest element, so
    only elements at or above it can be among the k. Raises ValueError if a row has fewer than k
    elements.
    """
    rows, width = logits.shape
    if not 1 <= k <= width:
        raise ValueError(f"top-{k} needs at least {k} tokens, the vocabulary has {width}")
    tokens = np.full((rows, k), -1, dtype=np.int64)
    values = np.full((rows, k), np.nan)
    reached = logits >= _threshold(logits, k)[:, None]
    for row in range(rows):
        if best[row] == best[row]:
            candidates = np.flatnonzero(reached[row])
            found = logits[row, candidates]
            order = np.argsort(-found, kind="stable")[:k]
            tokens[row], values[row] = candidates[order], found[order]
    return Top(tokens, values)


def _threshold(logits: NDArray[Any], k: int) -> NDArray[Any]:
    rows, width = logits.shape
    groups = width // _STEP
    if groups < 2 * k:
        cut: NDArray[Any] = np.partition(logits, width - k, axis=1)[:, width - k]
        return cut
    maxima = logits[:, : groups * _STEP].reshape(rows, _STEP, groups).max(axis=1)
    least: NDArray[Any] = np.partition(maxima, groups - k, axis=1)[:, groups - k]
    return least


# --- bit patterns ---------------------------------------------------------------------------------


def integer_views(train: Tensor, infer: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the bit patterns of both sides as signed integers on the CPU.

    Where the formats differ, both are widened exactly: to float32, or to float64 if a side is that.
    Raises TypeError for a format that has no integer view here.
    """
    if train.dtype != infer.dtype:
        wide = torch.float64 if torch.float64 in (train.dtype, infer.dtype) else torch.float32
        train, infer = train.to(wide), infer.to(wide)
    if train.dtype not in _INTEGERS:
        raise TypeError(f"logits of the format {train.dtype} have no units in the last place here")
    to = _INTEGERS[train.dtype]
    first, second = (side.detach().cpu().contiguous().view(to).numpy() for side in (train, infer))
    return first, second


def bit_metrics(train: NDArray[Any], infer: NDArray[Any], out: NDArray[np.float64]) -> None:
    """Write `bitwise_mismatch_count` and `ulp_max` of rows [R, V] of integer views into [2, R].

    -0 and +0 differ in their bits and are 0 ulps apart. The caller must handle rows with NaN.
    """
    out[:] = 0.0
    for row in range(train.shape[0]):
        a, b = train[row], infer[row]
        count = np.count_nonzero(a != b)
        if count:
            out[0, row] = count
            out[1, row] = _furthest(a, b, np.flatnonzero((a ^ b) < 0))


def _furthest(a: NDArray[Any], b: NDArray[Any], opposite: NDArray[np.intp]) -> float:
    """Return the largest distance in ulps of two rows, whose signs differ at `opposite`.

    The bits of floats of one sign are in the order of their magnitudes, so the difference of the
    bits is their distance; across zero it is the sum of both magnitudes.
    """
    between = a - b
    across = 0.0
    if opposite.size:
        between[opposite] = 0
        magnitudes = np.iinfo(a.dtype).max
        x, y = (side[opposite] & magnitudes for side in (a, b))
        across = float((x.astype(np.float64) + y).max())
    return max(across, float(between.max()), -float(between.min()))
