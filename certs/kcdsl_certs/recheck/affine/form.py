"""The affine form of a node in one kernel, and the walk over a block that derives it.

A proof may name the reverse passes it was made with. They are hints: any pass may be made or
omitted. Without hints all are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.cases import Cases, Ends
from kcdsl_certs.recheck.affine.ellipsoids import Row, WeightNorms
from kcdsl_certs.recheck.affine.tape import Apart, Tape, TapeEntry
from kcdsl_certs.recheck.documents.document import Pass
from kcdsl_certs.recheck.graphs.graph import Node, View
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Bools, Box, Floats, raised
from kcdsl_certs.recheck.interval.state import (
    SUMMED,
    DriftProblem,
    Mask,
    Results,
    gamma,
    in_turn,
    twice,
)
from kcdsl_certs.recheck.numerics.formats import Format
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics


@dataclass(frozen=True, slots=True)
class Passes:
    """The rows in which to make each pass; None if the proof names none."""

    rows: Mapping[Pass, tuple[int, ...]] | None

    def of(self, named: Pass, shape: tuple[int, ...]) -> Bools:
        """Return the rows [..., 1] of a node of this shape in which a pass is to be made."""
        if self.rows is None:
            return np.ones((*shape[:-1], 1), dtype=np.bool_)
        chosen = np.zeros((*shape[:-1], 1), dtype=np.bool_)
        runs = self.rows.get(named, ())
        for start, stop in zip(runs[::2], runs[1::2], strict=True):
            chosen.reshape(-1)[start:stop] = True
        return chosen


@dataclass(frozen=True, slots=True)
class Origin:
    """The linear an operand was moved from: e = W e_x + o; `index` holds row·outputs + output for
    every element of the operand.

    `weight` is [outputs, inputs], `source` the node x, `rest` ≥ |o| [rows, outputs]. `plain`: o has
    only an elementwise bound, around zero. `place` is that of the linear on the tape, if all of o
    stands there.
    """

    weight: Floats
    source: str
    rest: Floats
    index: NDArray[np.int64]
    plain: bool
    place: int | None
    norms: WeightNorms | None = None  # if norms of x bound o and the error of the result


@dataclass(frozen=True, slots=True)
class Turned:
    """The rotation an operand was moved from: rope(y), y from the linear `below`.

    `cos` and `sin` are [T, d], `rest` ≥ |o| bounds the own error of the rotation [heads, T, d];
    `index` holds the rotation's element at each position.
    """

    below: Origin
    cos: Floats
    sin: Floats
    rest: Floats
    index: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepRemainder:
    """Bounds of a result that a cast rounds by steps.

    `reference` and `entry` are of the result before the cast, `ends` and `cases` of the stored
    value; of a softmax, `choices` are its ends in every case of the scores.
    """

    reference: Floats
    entry: TapeEntry
    ends: Ends
    cases: Cases | None = None
    choices: Ends | None = None


@dataclass(frozen=True, slots=True)
class Uncast:
    """A result before a free cast: its reference and entry, the kernel's rounding and the format;
    `sure` marks elements that equal the reference, zero, for any incoming error."""

    reference: Floats
    entry: TapeEntry
    kernel: KernelNumerics
    format: Format
    sure: Bools | None = None


@dataclass(frozen=True, slots=True)
class Form:
    """A node's reference h̃, the error bound ρ ≥ |stored value - h̃| and its place on the tape.

    `place` None: the value is known to be h̃ (a parameter, a constant).
    """

    reference: Floats
    error_bound: Floats
    place: int | None
    origin: Origin | None = None
    allowed: Bools | None = None  # a softmax: which columns take part
    steps: StepRemainder | None = None
    uncast: Uncast | None = None
    cases: Cases | None = None
    balance: Floats | None = None  # a softmax: how far the sums of rows may move, [..., 1]
    turned: Turned | None = None
    moved: tuple[str, View] | None = None  # a view: of which node

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the node."""
        return self.reference.shape

    @property
    def size(self) -> Floats:
        """Return |h̃| + ρ, which bounds the stored value, for use in error terms."""
        return box.lifted(raised(np.abs(self.reference) + self.error_bound))

    @property
    def box(self) -> Box:
        """Return h̃ ± ρ."""
        return box.widen(box.exact(self.reference), self.error_bound)


Operand = Form | Mask


@dataclass(frozen=True, slots=True)
class Version:
    """The additional error of a reading of a node: bounds element by element, and split."""

    own: Floats
    apart: Apart | None = None


_WIDE = 2**10  # elements
DIVIDED = 2**23  # numbers of adjoints, about a second of work: from there on rows are divided


@dataclass(frozen=True, slots=True)
class Walk:
    """The state of one kernel on its walk through the block."""

    problem: DriftProblem
    kernel: KernelNumerics
    tape: Tape
    forms: dict[str, Operand]
    softmaxes: frozenset[str]
    passes: Passes
    moved: bool = False  # whether this kernel reads the input with its drift
    first: dict[str, Floats] = field(default_factory=dict)
    """The inputs of products with weights in the kernel that was walked first, by node: the shared
    part of both kernels is formed with these."""
    versions: dict[str, Version] = field(default_factory=dict)
    """Readings of nodes that are read in several versions; the form of a node is common to all."""
    named: dict[str, str] = field(default_factory=dict)
    """The node of every reading that has a form of its own, by the reading's name in `forms`."""

    @property
    def trained(self) -> bool:
        """Return whether this is the training kernel of two, at a point."""
        region, problem = self.tape.region, self.problem
        point = region is None or not region.any()
        other = problem.infer != problem.train or problem.drift is not None
        return point and other and not problem.rho and not self.moved

    @property
    def wide(self) -> bool:
        """Return whether rows of the output have many elements."""
        return self.problem.block.named[self.problem.block.output].shape[-1] >= _WIDE

    def over_rows(
        self,
        rows: Sequence[Row],
        results: Results,
        functionals: int,
        work: Callable[[Sequence[Row], Results], None],
    ) -> Results:
        """Return the results after `work` has written those of all rows, for each of which it
        bounds so many functionals. Bounds by chance are counted, so they stay in one process."""
        shapes = [entry.error_bound.shape for entry in self.tape.entries if entry.error_bound.ndim]
        widest = max((shape[-1] for shape in shapes), default=1)
        few = len(rows) * functionals * widest < DIVIDED
        over = in_turn if few or self.tape.budget is not None else self.problem.over_rows
        return over(rows, results, work)

    def own(self, node: Node, place: int) -> Floats | None:
        """Return a bound of the distance of readings of an operand from its form, if the rule reads
        it several times or is computed for several readings; else None."""
        version = self.versions.get(node.inputs[place])
        if version is None or node.op in SUMMED:
            return None
        again = (twice(node) and place == 0) or node.name in self.problem.several
        return version.own if again else None

    def read(self, node: Node) -> Node:
        """Return a node with its operands replaced by the names of their readings."""
        inputs = list(node.inputs)
        for place, name in enumerate(node.inputs):
            if name in self.versions and self.own(node, place) is None:
                inputs[place] = self.reading(name, None if node.op in SUMMED else (node, place))
        return replace(node, inputs=tuple(inputs))

    def reading(self, name: str, reader: tuple[Node, int] | None = None) -> str:
        """Return the name of one reading of a node, by default of its stored value.

        Names of nodes have no NUL, so readings of different nodes have different names.
        """
        if name not in self.versions:
            return name
        where = "" if reader is None else f"{reader[1]}\0{reader[0].name}"
        alias = f"{name}\0{where}"
        if alias in self.named:
            return alias
        form, version = form_of(self.forms[name]), self.versions[name]
        operands = () if form.place is None else ((form.place, _whole),)
        error_bound, own = raised(form.error_bound + version.own), raised(version.own) + TINY
        rows = None if form.place is None else self.tape.entries[form.place].rows
        rows = None if rows is None else rows.widened(own)
        place = self.tape.add(TapeEntry(error_bound, operands, own, apart=version.apart, rows=rows))
        self.forms[alias] = replace(
            form, error_bound=error_bound, place=place, uncast=None, balance=None
        )
        self.named[alias] = name
        return alias

    def chosen(self, node: Node, name: str, kind: str, floor: int = 0) -> Bools:
        """Return the rows [..., 1] of a node in which an operation is to make reverse passes.

        Without a cut all passes go down to the input.
        """
        shape, name = form_of(self.forms[name]).shape, self.named.get(name, name)
        cut, whole = (Pass(node.name, name, kind, stop) for stop in ("cut", "input"))
        if floor:
            return self.passes.of(cut, shape)
        longest = self.passes.of(whole, shape)
        return longest if self.tape.cut else longest | self.passes.of(cut, shape)

    def keep(self, name: str, form: Form) -> None:
        """Replace the form of a node by a tighter one."""
        self.forms[name] = form


def _whole(adjoint: Adjoint) -> Adjoint:
    return adjoint


def product_raised(a: Floats, b: Floats) -> Floats:
    """Return an upper bound of a @ b for non-negative a and b, up to float64 underflow."""
    return np.asarray((a @ b) * (1 + 4 * gamma(a.shape[-1] + 8, UNIT)) + TINY)


def form_of(value: Operand) -> Form:
    """Return the form of an operand. Raises Rejected "rule/mask" for a mask."""
    if isinstance(value, Mask):
        raise Rejected("rule/mask", "a mask is read as numbers")
    return value


def known_form(reference: Floats) -> Form:
    """Return the form of numbers that are known."""
    return Form(reference, np.zeros(reference.shape), None)
