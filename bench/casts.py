"""Drift of kernels whose casts do not round to nearest: bound and attack on MiniLM.

Every value of `casts`, on attention and feed-forward at a point, bfloat16 against float32
in any order. A kernel whose casts are steps has one run at a point, up to the order of its sums.

    make bench-casts
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from bench.certifier import MIDDLE, Case, Measured, measure
from bench.common import Better, Figure, report, show_in

LIMIT = 2.0
"""Limit of bound / attack for all casts."""
_STEPS = {"preset": "torch-eager", "compute": "bfloat16"}
_FREE = {"preset": "torch-sdpa-flash", "compute": "bfloat16"}
_CUT = {"format": "bfloat16", "rounding": "toward_zero"}
_WORDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nearest", {**_STEPS, "casts": "nearest"}),
    ("toward_zero", {**_STEPS, "casts": "toward_zero"}),
    ("toward_zero, weights too", {**_STEPS, "casts": "toward_zero", "weights": _CUT}),
    ("any", {**_FREE, "casts": "any"}),
    ("any_toward_zero", {**_FREE, "casts": "any_toward_zero"}),
    ("any_direction", {**_FREE, "casts": "any_direction"}),
)


def main() -> int:
    """Measure, write the table into the page, and report bound / attack."""
    found = []
    for block in ("attn_0", "mlp_0"):
        for word, numerics in _WORDS:
            line = measure(Case(f"{block}, bfloat16, casts {word}", block, numerics, None), MIDDLE)
            print(block, word, line, flush=True)
            found.append((block, word, line))
    show_in("reference/numerics.md", "casts", _table(found))
    return report("casts", list(_figures(found)))


def _figures(found: list[tuple[str, str, Measured]]) -> Iterator[Figure]:
    for block, word, line in found:
        where = f"{line.tokens} tokens: {_bound(line):.3g} / {line.attack:.3g}"
        ratio = _bound(line) / line.attack
        yield Figure(f"{block}, bfloat16, casts {word}", ratio, Better.LOWER, LIMIT, where)


def _bound(line: Measured) -> float:
    """Return the smaller of both domains' bounds."""
    return min(line.bound, line.interval)


def _table(found: list[tuple[str, str, Measured]]) -> str:
    """Return the table of the page."""
    columns = ("block", "`casts`", "bound", "attack", "bound / attack", "interval domain")
    rows = [
        (
            block,
            word,
            *(f"{v:.3g}" for v in (_bound(line), line.attack, _bound(line) / line.attack)),
            f"{line.interval:.3g}",
        )
        for block, word, line in found
    ]
    ruled = [columns, ("---",) * len(columns), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in ruled)


if __name__ == "__main__":
    sys.exit(main())
