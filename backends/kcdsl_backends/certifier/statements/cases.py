"""The cases of a goal: one region of the block's input for each row of the slice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.model import at
from kcdsl.inequalities import round_up
from kcdsl.ir.terms import ModelRef, Program, RegionKind
from kcdsl.model.architecture import Model
from kcdsl.model.files import Artefacts
from kcdsl.model.graph import array_digest
from kcdsl.route.goals import Goal
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.certifier.statements.proof import box_region, rows_region, token_region
from kcdsl_backends.drift.boxes import up
from kcdsl_backends.requests import Request, requests_of, select
from kcdsl_certs.encoding.reals import real_text


@dataclass(frozen=True, slots=True)
class Case:
    """One region of a goal: a name, the tokens of its row, and the box of hidden states.

    With `longest`, the box is that of one row [1, D], and the region has every sequence of 1 to
    `longest` such rows.
    """

    name: str
    tokens: tuple[int, ...]
    centre: Tensor | None
    radius: Tensor
    longest: int | None = None

    def on(self, device: torch.device) -> Case:
        centre = None if self.centre is None else self.centre.to(device)
        return replace(self, centre=centre, radius=self.radius.to(device))

    @property
    def digest(self) -> str:
        """Return the sha256 (hex) of the region without its name: of the tokens if the block reads
        token ids, else of the box."""
        if self.centre is None:
            return hashlib.sha256(repr(self.tokens).encode()).hexdigest()
        parts = [array_digest(part.cpu().numpy()) for part in (self.centre, self.radius)]
        if self.longest is not None:
            parts.append(f"1 to {self.longest} rows")
        return hashlib.sha256("|".join(parts).encode()).hexdigest()

    @property
    def at_its_length(self) -> Case:
        """Return the sequences of the region with the length of its tokens, which an attack uses;
        a region of one length is returned unchanged."""
        if self.longest is None or self.centre is None:
            return self
        shape = (len(self.tokens), self.centre.shape[-1])
        return replace(
            self,
            centre=self.centre.expand(shape).contiguous(),
            radius=self.radius.expand(shape).contiguous(),
            longest=None,
        )

    def holds(self, x: Tensor) -> bool:
        """Return whether hidden states [T, D] are an input of the region."""
        if self.centre is None or x.dim() != 2 or x.shape[-1] != self.centre.shape[-1]:
            return False
        if self.longest is None:
            fits = x.shape == self.centre.shape
        else:
            fits = 1 <= x.shape[0] <= self.longest
        return fits and bool(((x - self.centre).abs() <= self.radius).all())

    @property
    def seed(self) -> int:
        return int(self.digest[:8], 16)


def problem_of(factory: ProblemFactory, goal: Goal, case: Case) -> BlockProblem:
    """Return the block problem of a case: at one length or at any, for the parameters of the
    checkpoint or for a weight ball."""
    if case.longest is None:
        problem = factory.problem(goal.block, case.tokens)
    else:
        with at(goal.span):
            problem = factory.sequences(goal.block, case.longest)
    if not goal.weights:
        return problem
    return replace(problem, weight_ball=factory.weight_ball(goal.block, goal.weights))


def region_of(factory: ProblemFactory, goal: Goal, case: Case) -> dict[str, Any]:
    """Return the region of a case in the format of a proof, including the weight ball."""
    region = _of_inputs(factory, goal, widened(goal, case))
    return {**region, "weights": real_text(goal.weights)} if goal.weights else region


def widened(goal: Goal, case: Case) -> Case:
    """Return the region of the bound: that of the clause, widened by the states of the goal. An
    attack uses only the clause's region."""
    if not goal.states or case.centre is None:
        return case
    return replace(case, radius=up(case.radius + round_up(goal.states)))


def _of_inputs(factory: ProblemFactory, goal: Goal, case: Case) -> dict[str, Any]:
    if case.centre is None:
        return token_region(case.tokens)
    if case.longest is not None:
        tables = factory.sequences(goal.block, case.longest).tables
        return rows_region(case.centre, case.radius, case.longest, tables)
    kind = goal.region.kind
    if goal.states and kind is RegionKind.POINTS:
        kind = RegionKind.BALL
    return box_region(kind.value, case.centre, case.radius)


@dataclass(frozen=True, slots=True)
class StatedCase:
    """A case as a proof states it: its name, the digest of its graph, and its region."""

    name: str
    graph: str
    region: Mapping[str, Any]


def stated_case(factory: ProblemFactory, goal: Goal, case: Case) -> StatedCase:
    """Return the subject of a proof of a case."""
    return StatedCase(
        case.name, problem_of(factory, goal, case).graph.digest, region_of(factory, goal, case)
    )


def with_weights(model: ModelRef, files: Artefacts, checkpoint: Path) -> ModelRef:
    """Return a model with other weights but the same configuration and tokenizer."""
    files.allow(checkpoint)
    usual_place = files.locate(model.checkpoint)

    def beside(named: str | None, usual: str) -> str | None:
        found = files.beside(usual_place, usual)
        return str(found) if named is None and found is not None else named

    return replace(
        model,
        checkpoint=str(checkpoint.absolute()),
        config=beside(model.config, "config.json"),
        tokenizer=beside(model.tokenizer, "tokenizer.json"),
    )


def slice_rows(program: Program, model: Model, name: str) -> tuple[Request, ...]:
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
    return select(requests_of(model.files, data, tokenize, model.ids), declared)


def cases_of(factory: ProblemFactory, goal: Goal, rows: Sequence[Request]) -> list[Case]:
    """Return the regions of a goal on these rows, in order."""
    zero = torch.zeros(1, 1, dtype=torch.float64, device=factory.device)
    if goal.block == "model":
        if goal.region.kind is not RegionKind.POINTS:
            raise refuse(
                codes.REGION_OF_TOKENS,
                f"clause {goal.clause.id}: block `model` reads token ids, which have no ball",
                help="use points(...), or name a block on hidden states such as attn_0",
            )
        return [Case(row.id, row.tokens, None, zero) for row in rows]
    centres = [(row, factory.centre(goal.block, row.tokens)) for row in rows]
    kind, radius = goal.region.kind, round_up(goal.region.radius)
    if kind is RegionKind.HULL:
        return _hulls(centres, radius)
    if kind is RegionKind.ROWS and goal.region.longest is not None:
        longest, (middle, wide) = goal.region.longest, _span(centres, radius)
        # an attack uses the tokens of the longest request, up to the covered length
        tokens = max(rows, key=lambda row: row.length).tokens[:longest]
        return [Case(f"rows-{longest}", tokens, middle[None], wide[None], longest=longest)]
    spread = torch.full_like(zero, radius if kind is RegionKind.BALL else 0.0)
    return [Case(row.id, row.tokens, centre, spread) for row, centre in centres]


def _hulls(centres: Sequence[tuple[Request, Tensor | None]], margin: float) -> list[Case]:
    """Return one box per sequence length: per feature, over all rows and positions of the slice.

    The box is widened by `margin` times its width on both sides.
    """
    middle, radius = _span(centres, margin)
    found: dict[int, Case] = {}
    for row, _ in centres:
        box = [part.expand(row.length, len(middle)).contiguous() for part in (middle, radius)]
        found.setdefault(row.length, Case(f"hull-{row.length}", row.tokens, box[0], box[1]))
    return list(found.values())


def _span(centres: Sequence[tuple[Request, Tensor | None]], margin: float) -> tuple[Tensor, Tensor]:
    """Return centre and radius [D] of the box over all rows and positions, widened by a margin."""
    stacked = torch.cat([c for _, c in centres if c is not None], 0)
    low, high = stacked.amin(0), stacked.amax(0)
    middle = (low + high) / 2
    radius = torch.maximum(high - middle, middle - low) * (1 + 2 * margin) * (1 + 2.0**-50)
    return middle, radius
