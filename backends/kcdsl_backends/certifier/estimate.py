"""Cost estimate of bounding a block, from shapes and a timed matrix product."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kcdsl.model.graph import BlockGraph
from kcdsl_backends.drift.affine.error_bounds import BATCH, of_sums
from kcdsl_backends.drift.affine.row_ellipsoids import LARGEST, MANY_WEIGHTS
from kcdsl_backends.drift.affine.row_sums import MANY
from kcdsl_backends.drift.affine.tape import MANY_PRODUCTS

WORTH_SAYING = 30.0
"""Least number of seconds for which an estimate is reported."""
_PROBE = 512
_SLOWER = 2.2
"""Ratio of the total time to that of the matrix products alone, as measured."""
_CHECKED = 1.0
"""Time of the checker as a share of the prover's, as measured."""
_MOVED, _ELLIPSOIDS, _READ = 6e3, 4.0, 2e3
"""Cost of the ellipsoids of a layer in operations, as measured: memory traffic for each token and
parameter, products for each of these and element of a row, and for each element of two rows of
attention."""
_FEW_ROWS, _PASSED = 0.25, 1e3
"""Where most rows of attention are bounded without products with weights: the share of the others,
and memory traffic for each functional, head and key."""
_LESS = "--domains interval, --chain or --device cuda"
_BASE = 6e8
"""Bytes of a process that has imported torch."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Floating-point operations in float64 matrix products, and peak bytes."""

    operations: float
    peak: float

    @staticmethod
    def of(graph: BlockGraph) -> Cost:
        """Return the cost of the affine forms of a block with one output row for each token."""
        shapes = {node.name: node.shape for node in graph.nodes}
        weights = [shapes[n.inputs[1]] for n in graph.nodes if n.op == "linear"]
        scores = [node.shape for node in graph.nodes if node.op == "softmax"]
        parameters = sum(math.prod(shape) for shape in weights)
        tokens, width = shapes[graph.output][0], shapes[graph.output][-1]
        inputs = max((shape[1] for shape in weights), default=width)
        functionals = tokens * width
        operations = 4.0 * functionals * parameters / max(1, len(weights))
        alone = 0 < len(weights) <= len(scores) * 4  # attention without a feed-forward part
        if alone and functionals * inputs >= MANY_PRODUCTS:  # most rows by norms
            read = max(math.prod(shape[:-2]) * shape[-1] for shape in scores)
            operations = _FEW_ROWS * operations + _PASSED * functionals * read
        peak = 6.0 * parameters
        if not scores:  # norms of errors, row by row
            operations += 8.0 * tokens * width**3
        elif len(weights) > len(scores) * 4:  # ellipsoids as well; attention reads all rows
            some = [shape for shape in weights if math.prod(shape) < MANY_WEIGHTS]
            products = sum(math.prod(shape) * max(shape) for shape in some)  # others: by norms
            operations += tokens * (_MOVED * parameters + _ELLIPSOIDS * products)
            operations += _READ * len(scores) * (tokens * width) ** 2
            peak += 2.0 * min(tokens * inputs**2, LARGEST)
        for heads, rows, keys in (s for s in scores if len(s) == 3):
            # in float32 (twice as fast) over half of the keys, or by norms
            each = inputs * heads if keys * inputs * heads < MANY else 8 * heads**2
            operations += functionals * keys * each * (1 if rows > 1 else 2)
        heads = max((shape[0] for shape in scores if len(shape) == 3), default=1)
        largest = max(math.prod(shape) for shape in shapes.values())
        batch = min(of_sums(tokens) if scores else BATCH, width)
        peak += 2 * heads * batch * inputs + 40 * largest
        return Cost(operations, _BASE + 8.0 * peak)


@dataclass(frozen=True, slots=True)
class CostEstimate:
    """Estimated seconds and bytes for several cases, and the bytes that are free."""

    seconds: float
    peak: float
    free: float | None

    @staticmethod
    def of(graphs: Sequence[BlockGraph], jobs: int, *, checked: bool) -> CostEstimate:
        """Return the estimate of cases with these graphs, `jobs` of them at a time."""
        costs = [Cost.of(graph) for graph in graphs]
        operations = sum(cost.operations for cost in costs)
        seconds = _SLOWER * operations / _rate() * (1 + _CHECKED * checked)
        largest = max((cost.peak for cost in costs), default=0.0)
        return CostEstimate(seconds / jobs, largest * jobs, _free())

    def messages(self, limit: float | None = None) -> Iterable[str]:
        """Yield messages for users about a large cost. `limit`: the seconds that it may take."""
        if limit is not None and self.seconds > limit:
            yield (
                f"about {_time(self.seconds)} within a factor of 3, and the time limit is "
                f"{_time(limit)}: fewer or shorter rows, {_LESS} need less"
            )
        elif self.seconds >= WORTH_SAYING:
            yield f"about {_time(self.seconds)} and {self.peak / 1e9:.1f} GB, within a factor of 3"
        if self.free is not None and self.peak > self.free:
            yield (
                f"this may need {self.peak / 1e9:.1f} GB, and {self.free / 1e9:.1f} GB are free: "
                f"fewer --jobs, shorter rows, {_LESS} need less"
            )


def _rate() -> float:
    """Return measured operations per second of a matrix product with the current threads."""
    one = torch.ones(_PROBE, _PROBE, dtype=torch.float64)
    one @ one
    taken = []
    for _ in range(5):
        started = time.perf_counter()
        one @ one
        taken.append(time.perf_counter() - started)
    return 2.0 * _PROBE**3 / max(min(taken), 1e-6)


def _free() -> float | None:
    """Return the bytes of free memory; None if unknown."""
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, ValueError, AttributeError):
        return None


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
