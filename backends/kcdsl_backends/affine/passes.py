"""Which reverse passes a kernel's forms were made with (section 1): hints for whoever derives them.

A pass may be made anywhere, so that hints need no trust; they spare a reader the search for
the passes that a bound needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

Kind = Literal["reach", "deviations", "norm", "ellipsoid", "product"]
"""Single elements; elements minus a mean, and the direction of a norm; the norm of a row; an
ellipsoid around a row; the remainder of a product with a row, functional by functional."""

Key = tuple[str, str, Kind, bool]
"""The operation that asks, the node asked about, the kind, and whether it stops at the cut."""


@dataclass(slots=True)
class Passes:
    """The rows of nodes for which passes were made."""

    rows: dict[Key, Tensor] = field(default_factory=dict)

    def made(self, key: Key, needed: Tensor) -> None:
        """Remember passes in the rows `needed` [..., 1]."""
        if bool(needed.any()):
            before = self.rows.get(key)
            self.rows[key] = needed.clone() if before is None else needed | before

    def to_json(self) -> list[dict[str, Any]]:
        """Return what stands in a proof: rows as first and end of every run of them, flattened."""
        return [
            {
                "at": at,
                "of": of,
                "kind": kind,
                "stop": "cut" if cut else "input",
                "rows": list(_runs(needed)),
            }
            for (at, of, kind, cut), needed in self.rows.items()
        ]


def _runs(needed: Tensor) -> Iterator[int]:
    """Yield where runs of rows that are needed begin and end."""
    inside = False
    for position, row in enumerate(needed.flatten().tolist()):
        if row != inside:
            yield position
            inside = row
    if inside:
        yield needed.numel()
