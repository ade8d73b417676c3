"""One kernel of a block while its tape is written, and the reverse passes that are made for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, weight_of
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.row_sums import BoundedRows
from kcdsl_backends.drift.affine.tape import INPUT, Shared, SplitError, Tape, TapeEntry
from kcdsl_backends.drift.boxes import SAFE, up
from kcdsl_backends.drift.boxes.rounding import ONCE, Apart, Rounding, reads_twice
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.drift.boxes.weight_ball import WeightBall

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
                "rows": list(runs_of(needed)),
            }
            for (at, of, kind, cut), needed in self.rows.items()
        ]


def runs_of(needed: Tensor) -> Iterator[int]:
    """Yield where runs of rows that are needed begin and end."""
    inside = False
    for position, row in enumerate(needed.flatten().tolist()):
        if row != inside:
            yield position
            inside = row
    if inside:
        yield needed.numel()


@dataclass(frozen=True, slots=True)
class StoredSpread:
    """How far what a kernel (0: training, 1: inference) stores of the parameters in a ball may be
    from what it stores of those of the checkpoint."""

    ball: WeightBall
    stored: StoredParameters
    side: int

    def of(self, node: Node, *, linear: bool = False) -> Tensor:
        """Return the distance element by element, of a linear weight or anything else."""
        centre, held = self.stored.read(node, linear=linear), self.ball.held(node, linear=linear)
        box = (held.train, held.infer)[self.side]
        return up(torch.maximum(box.hi - centre, centre - box.lo).clamp_min(0))

    def alike(self, node: Node, *, linear: bool = False) -> bool:
        """Say whether both kernels store it in one way, so that both are off by the same."""
        return self.ball.held(node, linear=linear).alike


@dataclass(frozen=True, slots=True)
class Private:
    """How far each reading of a result may be by itself from the one of which all are versions.

    `error_bound` bounds it element by element, `apart` takes it apart.
    """

    error_bound: Tensor
    apart: SplitError | None = None


NEGLIGIBLE = 2.0**-3
"""Up to this share of a rounding a remainder is worth no reverse passes."""


@dataclass(frozen=True, slots=True)
class Operand:
    """What an operation reads: an entry of the tape, or a known number (index None)."""

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

    `grain` is the unit roundoff of the coarser kernel of the pair: remainders far below what it
    rounds off are not worth reverse passes.
    """

    graph: BlockGraph
    rounding: Rounding
    parameters: StoredParameters
    tape: Tape
    nodes: Mapping[str, Node]
    grain: float
    computed: dict[str, int] = field(default_factory=dict)
    known: dict[str, Tensor] = field(default_factory=dict)
    """References of nodes without errors: what is made of token ids and parameters alone."""
    passes: Passes = field(default_factory=Passes)
    handed: bool = False
    """Whether another block stored the input."""
    plain: int | None = None
    """The entry of the block input where it is not rounded: its errors are those of the region."""
    spread: StoredSpread | None = None
    """Of a region around the weights; None: the parameters are those of the checkpoint."""
    common: dict[str, Tensor] = field(default_factory=dict)
    """What operations with weights read in the first kernel that is run, at the centre: what both
    kernels make of other weights is taken at these numbers."""
    several: frozenset[str] = frozenset()
    """Nodes that are read more than once, where casts are free; what each reading is by itself
    stands in `private`, and entries are without it."""
    private: dict[str, Private] = field(default_factory=dict)
    readings: dict[tuple[str, str, int], int] = field(default_factory=dict)
    lowered: set[str] = field(default_factory=set)
    """Results whose error bounds were found by passes before their casts."""

    @property
    def negligible(self) -> float:
        """Return the share of a result up to which a remainder is worth no reverse passes."""
        return NEGLIGIBLE * self.grain

    def passing(
        self, node: Node, index: int, kind: Kind, needed: Tensor, floor: int = INPUT
    ) -> bool:
        """Say whether an operation needs passes in any row of an entry; remember that it does.

        Args:
            node: the operation.
            needed: [..., 1] bool, rows of the entry.
            floor: where the passes stop.
        """
        if kind == "norm" and self.tape.chance is not None:  # worst cases, far beyond the likely
            return False
        key = node.name, self.tape.entries[index].name, kind, floor != INPUT
        self.passes.made(key, needed)
        return bool(needed.any())

    def operand(self, node: Node, position: int) -> Operand:
        """Return an input of a node; a parameter that may move has an error of its own."""
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
        """Return how far each reading of an input may be apart from the entry that an operation
        reads, because it is computed for several readings, or reads it several times."""
        private = self.private.get(node.inputs[position])
        if private is None:
            return None
        several = reads_twice(node) if position == 0 else False
        several = several or (node.op not in ONCE and node.name in self.several)
        return private.error_bound if several else None

    def _read(self, node: Node, position: int) -> int:
        """Return the entry of one reading; operations on matrices share that of what is stored."""
        name = node.inputs[position]
        if name not in self.private or self.again(node, position) is not None:
            return self.computed[name]
        return self.reading(name, "" if node.op in ONCE else node.name, position)

    def reading(self, name: str, reader: str = "", position: int = 0) -> int:
        """Return the entry of one reading of a node; by default, that of what is stored."""
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
        """Note how far readings of a result that nothing rounds may be apart."""
        if apart is not None:
            self.private[node.name] = Private(apart)

    def own(self, name: str) -> Tensor | None:
        """Return what a computed node adds, element by element, in any one reading."""
        radius, private = self.tape.entries[self.computed[name]].radius, self.private.get(name)
        if private is None:
            return radius
        return private.error_bound if radius is None else (radius + private.error_bound) * SAFE

    def moving(self, name: str, source: Node, reference: Tensor, radius: Tensor) -> None:
        """Append numbers of a parameter, which may be anywhere around those known."""
        own = (radius * SAFE).contiguous()
        entry = TapeEntry(name, reference, own, lambda a: [], None, own)
        if self.spread is not None and self.spread.alike(source):
            entry = replace(entry, shared=Shared(own, torch.zeros_like(own)))
        self.computed[name] = self.tape.add(entry)

    def around(self, node: Node, position: int) -> Tensor | None:
        """Return how far a parameter input may be from `optional`; None where it does not move."""
        if self.spread is None or len(node.inputs) <= position:
            return None
        source = self.source(node, position)
        return self.spread.of(source) if source.op == "param" else None

    def quantises(self, linear: Node) -> bool:
        """Say whether the input of a linear is quantised."""
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
