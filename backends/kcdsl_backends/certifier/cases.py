"""The cases of a goal: one region of the block's input for each row of the slice."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.terms import Program, RegionKind
from kcdsl.model.architecture import Model
from kcdsl.model.graph import array_digest
from kcdsl.route.goals import Goal
from kcdsl_backends.certifier.proof import box_region, token_region
from kcdsl_backends.certifier.workshop import Workshop
from kcdsl_backends.requests import Request, load_requests, select


@dataclass(frozen=True, slots=True)
class Case:
    """One region of a goal: a name, the tokens it came from, and the box of hidden states.

    It can be pickled, so that any process can take it.
    """

    name: str
    tokens: tuple[int, ...]
    centre: Tensor | None
    radius: Tensor

    def on(self, device: torch.device) -> Case:
        """Return the case with its box on a device."""
        centre = None if self.centre is None else self.centre.to(device)
        return replace(self, centre=centre, radius=self.radius.to(device))

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of the region: its tokens if these are what the block reads, its
        box otherwise. The name does not count."""
        if self.centre is None:
            return hashlib.sha256(repr(self.tokens).encode()).hexdigest()
        parts = (array_digest(part.cpu().numpy()) for part in (self.centre, self.radius))
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    @property
    def seed(self) -> int:
        """Return a seed that the region alone decides."""
        return int(self.digest[:8], 16)


def region_of(goal: Goal, case: Case) -> dict[str, Any]:
    """Return the region of a case as it stands in a proof."""
    if case.centre is None:
        return token_region(case.tokens)
    return box_region(goal.region.kind.value, case.centre, case.radius)


def slice_rows(program: Program, base: Path, model: Model, name: str) -> tuple[Request, ...]:
    """Return the rows of the data that a slice selects."""
    declared = program.slice(name)
    data = declared.data or program.data
    if data is None:
        raise refuse(
            codes.FILE_MISSING,
            f"the slice {name!r} has no data",
            help="name a JSONL file: `data:` of the contract or of the slice",
        )
    tokenizer = model.tokenizer_source
    tokenize = None if tokenizer is None else tokenizer.encode
    return select(load_requests(base / data, data, tokenize, model.ids), declared)


def cases_of(shop: Workshop, goal: Goal, rows: Sequence[Request]) -> list[Case]:
    """Return the regions of a goal on these rows, in their order."""
    zero = torch.zeros(1, 1, dtype=torch.float64, device=shop.device)
    if goal.block == "model":
        if goal.region.kind is not RegionKind.POINTS:
            raise refuse(
                codes.REGION_OF_TOKENS,
                f"clause {goal.clause.id}: block `model` reads token ids, which have no ball",
                help="use points(...), or name a block on hidden states such as attn_0",
            )
        return [Case(row.id, row.tokens, None, zero) for row in rows]
    centres = [(row, shop.centre(goal.block, row.tokens)) for row in rows]
    kind, radius = goal.region.kind, _at_least(goal.region.radius)
    if kind is RegionKind.HULL:
        return _hulls(centres, radius)
    spread = torch.full_like(zero, radius if kind is RegionKind.BALL else 0.0)
    return [Case(row.id, row.tokens, centre, spread) for row, centre in centres]


def _at_least(value: Fraction) -> float:
    """Return a float64 that is not below an exact number."""
    nearest = float(value)
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def _hulls(centres: Sequence[tuple[Request, Tensor | None]], margin: float) -> list[Case]:
    """Return one box per sequence length: per feature, over all rows and positions of the slice.

    The box is widened by `margin` times its width on both sides.
    """
    stacked = torch.cat([c for _, c in centres if c is not None], 0)
    low, high = stacked.amin(0), stacked.amax(0)
    middle = (low + high) / 2
    radius = torch.maximum(high - middle, middle - low) * (1 + 2 * margin) * (1 + 2.0**-50)
    found: dict[int, Case] = {}
    for row, _ in centres:
        length = row.length
        shape = (length, middle.shape[0])
        found.setdefault(
            length,
            Case(
                f"hull-{length}",
                row.tokens,
                middle.expand(shape).contiguous(),
                radius.expand(shape).contiguous(),
            ),
        )
    return list(found.values())
