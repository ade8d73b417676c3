"""The state of one kernel's walk over a block: tape, operands, and reverse passes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, weight_of
from kcdsl_backends.drift.affine.ellipsoids import Maps
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.row_sums import BoundedRows
from kcdsl_backends.drift.affine.tape import INPUT, Shared, SplitError, Tape, TapeEntry
from kcdsl_backends.drift.boxes import SAFE, up
from kcdsl_backends.drift.boxes.rounding import ONCE, Apart, Rounding, reads_twice
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.drift.boxes.weight_ball import WeightBall

Kind = Literal["elements", "deviations", "norm", "ellipsoid", "product"]
"""Single elements; elements minus a mean, and the direction of a norm; the norm of a row; an
ellipsoid around a row; the remainder of a product with a row, functional by functional."""
Key = tuple[str, str, Kind, bool]
"""The operation that needs the pass, the bounded node, the kind, whether it stops at the cut."""


@dataclass(slots=True)
class Passes:
    """The rows of nodes for which passes were made."""

    rows: dict[Key, Tensor] = field(default_factory=dict)

    def made(self, key: Key, needed: Tensor) -> None:
        """Record passes in the rows `needed` [..., 1]."""
        if bool(needed.any()):
            before = self.rows.get(key)
            self.rows[key] = needed.clone() if before is None else needed | before

    def to_json(self) -> list[dict[str, Any]]:
        """Return the record of a proof: the first and end of every run of rows, flattened."""
        return [
            {
                "at": at,
                "of": of,
                "kind": kind,
                "stop": "cut" if cut else "input",
                "rows": list(runs_of(needed)),
            }
            for (at, of, kind, cut), needed in self.rows.items()
        ]


def runs_of(needed: Tensor) -> Iterator[int]:
    """Yield the first and end of every run of needed rows."""
    inside = False
    for position, row in enumerate(needed.flatten().tolist()):
        if row != inside:
            yield position
            inside = row
    if inside:
        yield needed.numel()


@dataclass(frozen=True, slots=True)
class StoredSpread:
    """The distance of the stored parameters of a weight ball from the checkpoint's stored ones, in
    one kernel (`side` 0: training, 1: inference)."""

    ball: WeightBall
    stored: StoredParameters
    side: int

    def of(self, node: Node, *, linear: bool = False) -> Tensor:
        """Return the distance element by element, of a linear weight or anything else."""
        centre, held = self.stored.read(node, linear=linear), self.ball.held(node, linear=linear)
        box = (held.train, held.infer)[self.side]
        return up(torch.maximum(box.hi - centre, centre - box.lo).clamp_min(0))

    def alike(self, node: Node, *, linear: bool = False) -> bool:
        """Return whether both kernels store it alike, so that both have the same difference."""
        return self.ball.held(node, linear=linear).alike


@dataclass(frozen=True, slots=True)
class Private:
    """The distance of each reading of a result from the common value of all readings.

    `error_bound` bounds it element by element, `apart` splits it into its parts.
    """

    error_bound: Tensor
    apart: SplitError | None = None


NEGLIGIBLE = 2.0**-3
"""No reverse passes are made for a remainder up to this share of a rounding."""
FAINT = 2.0**-11
"""Nor, in the training kernel, for one up to this share of the inference kernel's error bounds."""
FAINT_WIDE = 2.0**-3
"""The same for results with rows of `WIDE` or more elements, whose passes cost the most."""
WIDE = 2**10
"""Elements of a row from which on a result is wide."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of an operation: an entry of the tape, or a known number (index None)."""

    index: int | None
    reference: Tensor
    error_bound: Tensor

    @property
    def size(self) -> Tensor:
        """Return a bound of the magnitude."""
        return (self.reference.abs() + self.error_bound) * SAFE


@dataclass(slots=True)
class KernelRun:
    """The reference run of a kernel, and the tape of its errors.

    `grain` is the unit roundoff of the coarser kernel of the pair: for remainders far below its
    roundings no reverse passes are made.
    """

    graph: BlockGraph
    rounding: Rounding
    parameters: StoredParameters
    tape: Tape
    nodes: Mapping[str, Node]
    grain: float
    computed: dict[str, int] = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)
    """References of nodes without errors, which depend on token ids and parameters alone."""
    passes: Passes = field(default_factory=Passes)
    handed: bool = False
    """Whether another block stored the input."""
    plain: int | None = None
    """The entry of the block input if it is not rounded: its errors are those of the region."""
    spread: StoredSpread | None = None
    """The weight ball as this kernel stores it; None: the parameters are the checkpoint's."""
    common: dict[str, Tensor] = field(default_factory=dict)
    """Operands of operations with weights in the first kernel that is run, at the centre: there the
    effect of other weights that both kernels share is computed."""
    several: frozenset[str] = frozenset()
    """Nodes that are read more than once, with free casts; the distances of their readings are in
    `private`, and not in the entries."""
    private: dict[str, Private] = field(default_factory=dict)
    readings: dict[tuple[str, str, int], int] = field(default_factory=dict)
    other: KernelRun | None = None
    """The run of the inference kernel, in that of the training kernel at a point: both errors are
    part of the drift there."""
    lowered: set[str] = field(default_factory=set)
    """Results whose error bounds are from passes before their casts."""
    by_length: set[str] = field(default_factory=set)
    """Linears whose errors are bounded by norms of their inputs, without passes."""
    maps: dict[str, Maps] = field(default_factory=dict)
    """Bounds of their weights, by linear."""

    @property
    def negligible(self) -> float:
        """Return the share of a result up to which a remainder gets no reverse passes."""
        return NEGLIGIBLE * self.grain

    def small(self, node: Node, sizes: Tensor) -> Tensor:
        """Return sums [..., 1] of the rows of a remainder of a result up to which no reverse passes
        are made for it; `sizes` [..., 1] are the sums of the magnitudes of the result."""
        share = self.negligible * sizes
        if self.other is None or node.name not in self.other.computed:
            return share
        entry = self.other.tape.entries[self.other.computed[node.name]]
        faint = FAINT_WIDE if self.wide and node.shape[-1] >= WIDE else FAINT
        return torch.maximum(share, faint * entry.error_bound.sum(-1, keepdim=True))

    @property
    def wide(self) -> bool:
        """Return whether the rows of the output have many elements."""
        return self.nodes[self.graph.output].shape[-1] >= WIDE

    def far_below(self, index: int) -> Tensor:
        """Return the rows [..., 1] of a wide entry of the training kernel whose error bounds are a
        small share of those of the inference kernel: their casts are worth no passes."""
        entry = self.tape.entries[index]
        sums, wide = entry.error_bound.sum(-1, keepdim=True), entry.shape[-1] >= WIDE
        if self.other is None or not (wide and self.wide) or entry.name not in self.other.computed:
            return torch.zeros_like(sums, dtype=torch.bool)
        other = self.other.tape.entries[self.other.computed[entry.name]]
        return sums <= FAINT_WIDE * other.error_bound.sum(-1, keepdim=True)

    def passing(
        self, node: Node, index: int, kind: Kind, needed: Tensor, floor: int = INPUT
    ) -> bool:
        """Return whether an operation needs passes in any row of an entry, and record them.

        Args:
            node: the operation.
            needed: [..., 1] bool, rows of the entry.
            floor: where the passes stop.
        """
        if kind == "norm" and self.tape.chance is not None:  # norms are worst-case bounds
            return False
        key = node.name, self.tape.entries[index].name, kind, floor != INPUT
        self.passes.made(key, needed)
        return bool(needed.any())

    def operand(self, node: Node, position: int) -> Operand:
        """Return an input of a node; a parameter of a weight ball has an error of its own."""
        name = node.inputs[position]
        source = self.source(node, position)
        if self.spread is not None and source.op == "param" and name not in self.computed:
            self.moving(name, source, self.parameters.plain(source), self.spread.of(source))
        if name in self.computed:
            index = self._read(node, position)
            entry = self.tape.entries[index]
            return Operand(index, entry.reference, entry.error_bound)
        reference = (
            self.known[name]
            if name in self.known
            else self.parameters.plain(self.source(node, position))
        )
        return Operand(None, reference, torch.zeros_like(reference))

    def again(self, node: Node, position: int) -> Apart:
        """Return the distance of readings of an input from the entry that an operation reads: it is
        computed again for several readings, or reads the input several times."""
        private = self.private.get(node.inputs[position])
        if private is None:
            return None
        several = reads_twice(node) if position == 0 else False
        several = several or (node.op not in ONCE and node.name in self.several)
        return private.error_bound if several else None

    def _read(self, node: Node, position: int) -> int:
        """Return the entry of one reading; matrix operations share that of the stored value."""
        name = node.inputs[position]
        if name not in self.private or self.again(node, position) is not None:
            return self.computed[name]
        return self.reading(name, "" if node.op in ONCE else node.name, position)

    def reading(self, name: str, reader: str = "", position: int = 0) -> int:
        """Return the entry of one reading of a node; by default, that of the stored value."""
        private = self.private.get(name)
        if private is None:
            return self.computed[name]
        key = (name, reader, position if reader else 0)
        if key not in self.readings:
            index = self.computed[name]
            entry, own = self.tape.entries[index], private.error_bound
            self.readings[key] = self.tape.add(
                TapeEntry(
                    name,
                    entry.reference,
                    (entry.error_bound + own) * SAFE,
                    lambda a: [(index, a)],
                    None,
                    own,
                    roundings=None if self.tape.chance is None else Roundings.none(own),
                    apart=private.apart,
                    before=entry.before,
                    rows=None if entry.rows is None else BoundedRows.of(entry.rows.rows.wider(own)),
                )
            )
        return self.readings[key]

    def keep(self, node: Node, apart: Apart) -> None:
        """Record the distance of readings of a result that has no rounding."""
        if apart is not None:
            self.private[node.name] = Private(apart)

    def own(self, name: str) -> Tensor | None:
        """Return the radius of a computed node in any one reading, element by element."""
        radius, private = self.tape.entries[self.computed[name]].radius, self.private.get(name)
        if private is None:
            return radius
        return private.error_bound if radius is None else (radius + private.error_bound) * SAFE

    def moving(self, name: str, source: Node, reference: Tensor, radius: Tensor) -> None:
        """Append a parameter within `radius` of its reference."""
        own = (radius * SAFE).contiguous()
        entry = TapeEntry(name, reference, own, lambda a: [], None, own)
        if self.spread is not None and self.spread.alike(source):
            entry = replace(entry, shared=Shared(own, torch.zeros_like(own)))
        self.computed[name] = self.tape.add(entry)

    def around(self, node: Node, position: int) -> Tensor | None:
        """Return the distance of a parameter input from `optional`; None without a weight ball."""
        if self.spread is None or len(node.inputs) <= position:
            return None
        source = self.source(node, position)
        return self.spread.of(source) if source.op == "param" else None

    def quantises(self, linear: Node) -> bool:
        """Return whether the input of a linear is quantised."""
        numerics = self.parameters.numerics.serving(weight_of(linear, self.nodes))
        return numerics.activations.quantised

    def source(self, node: Node, position: int) -> Node:
        """Return the node that produces an input."""
        return self.nodes[node.inputs[position]]

    def entry(self, node: Node, position: int) -> tuple[int, TapeEntry]:
        """Return the entry of an input, with its index; a known number gets one without errors."""
        operand = self.operand(node, position)
        index = operand.index
        if index is None:
            known = TapeEntry(
                node.inputs[position], operand.reference, operand.error_bound, lambda a: []
            )
            index = self.tape.add(known)
        return index, self.tape.entries[index]

    def optional(self, node: Node, position: int) -> Tensor | None:
        """Return the stored value of a parameter input, None where the node has no such input."""
        if len(node.inputs) <= position:
            return None
        return self.parameters.plain(self.source(node, position))
