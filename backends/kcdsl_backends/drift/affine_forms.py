"""Affine forms of both kernels: the drift of the output, and ellipsoids around its rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.ellipsoids import RankOne, around_sum
from kcdsl_backends.drift.affine.error_bounds import (
    gram_ellipsoid,
    gram_norm,
    of_elements,
    on_row,
)
from kcdsl_backends.drift.affine.independent import Chance, functionals_allowed
from kcdsl_backends.drift.affine.kernel import KernelRun, StoredSpread
from kcdsl_backends.drift.affine.result_rounding import cast_freely
from kcdsl_backends.drift.affine.tape import INPUT, Range, TapeEntry, reads_many
from kcdsl_backends.drift.affine_run import affine_run, coarsest
from kcdsl_backends.drift.boxes import SAFE, Box, NoBound, down, gamma, up
from kcdsl_backends.drift.boxes.rounding import Apart
from kcdsl_backends.drift.boxes.state import (
    ALONE,
    Entering,
    InterfaceEllipsoids,
    Kernels,
    StoredParameters,
)
from kcdsl_backends.drift.boxes.weight_ball import WeightBall
from kcdsl_backends.drift.interval import kernel_boxes

IGNORED = 2.0**-12
"""A training error up to this share of the inference error is bounded without a reverse pass."""
NEGLIGIBLE = 2.0**-9
"""Parts of the training error up to this share of the width of the inference kernel's stored output
are not propagated further."""
NEGLIGIBLE_OF_MANY = 2.0**-5
"""The same where the output has many rows (`reads_many`), or wide ones: there it is a share of the
largest width of all elements."""


OTHERS = 2.0**-6
"""Up to this share of the largest bound of a wide sum, its other operands are worth no passes."""


@dataclass(frozen=True, slots=True)
class AffineForms:
    """The reference runs of both kernels, with the tapes of their errors."""

    output: str
    train: KernelRun
    infer: KernelRun

    @property
    def ends(self) -> tuple[TapeEntry, TapeEntry]:
        """Return the entries of the output, training and inference."""
        return output_entry(self.train, self.output), output_entry(self.infer, self.output)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.ends[0].shape

    @property
    def known(self) -> Box:
        """Return the difference of the references, with the rounding of its subtraction."""
        one, two = self.ends
        return Box.point(two.reference) - Box.point(one.reference)

    def errors(self, functionals: Adjoint) -> Box:
        """Bound a·e_infer - a·e_train for functionals of the output [B]."""
        b = self.infer.tape.bound(self.infer.computed[self.output], functionals)
        a = b if self.infer is self.train else self._training(functionals, b)
        found = self._apart(a, b)
        return found.meet(self._with_shared(functionals)) if self.sharing else found

    def _with_shared(self, functionals: Adjoint) -> Box:
        """Bound the same, with symbols that both kernels share (the input, weights) cancelled."""
        sides = [self.train] if self.infer is self.train else [self.train, self.infer]
        found = [s.tape.bound(s.computed[self.output], functionals, shared=True) for s in sides]
        return self._apart(found[0], found[-1])

    def _apart(self, a: Range, b: Range) -> Box:
        """Bound the difference of functionals of both errors."""
        moved = _difference(a, b, self.train.tape.radius)
        low, high = b.with_parts(a)  # the kernels' roundings are not related
        return Box(down(low - a.high - moved), up(high - a.low + moved))

    @property
    def sharing(self) -> bool:
        """Return whether both kernels share symbols of the weights in a weight ball."""
        entries = self.train.tape.entries
        return self.train.tape.chance is None and any(e.shared is not None for e in entries)

    def _training(self, functionals: Adjoint, infer: Range) -> Range:
        """Bound a·e_train; by the error bound alone if that is negligible against a·e_infer."""
        error_bound = self.ends[0].error_bound
        by_elements = functionals.magnitude(error_bound) * (1 + 2 * gamma(error_bound.numel() + 8))
        other = infer.magnitude(self.train.tape.radius)
        if bool((by_elements <= IGNORED * other).all()):
            return Range(-by_elements, by_elements, None)
        return self.train.tape.bound(self.train.computed[self.output], functionals)

    def box(self) -> Box:
        """Bound the drift of every element of the output.

        Raises:
            NoBound: a bound is not finite.
        """
        box = self._element_by_element()
        if self._as_stored:
            stored = self._stored()
            box = stored if box is None else box.meet(stored)
        assert box is not None
        one, two = self.ends
        box = box.meet(self.known.widen(up(one.error_bound + two.error_bound)))
        if not bool((torch.isfinite(box.lo) & torch.isfinite(box.hi)).all()):
            raise NoBound(self.output, "a bound is not finite")
        return box

    def _element_by_element(self) -> Box | None:
        """Bound the drift with the shared symbols of input and weights; None at a point where one
        of the kernels rounds its output, which gives tighter bounds."""
        one = self.ends[0]
        if self._as_stored and self._at_a_point and not self.sharing:
            return None
        by_row = any(end.by_row for end in self.ends)

        def bound(i: int, start: int, stop: int, functionals: Adjoint) -> tuple[Tensor, Tensor]:
            found = self.errors(functionals)
            return found.lo, found.hi

        wide = torch.full_like(one.reference, torch.inf)
        ends = of_elements(self.infer.tape, one.shape, (-wide, wide), bound, by_row=by_row)
        return self.known + Box(*ends)

    @property
    def _at_a_point(self) -> bool:
        return not bool((self.train.tape.radius > 0).any())

    @property
    def _as_stored(self) -> bool:
        """Return whether the output is also bounded before its cast: if one cast is to nearest, or
        at a point, where both kernels share no symbols."""
        stepped = any(end.ends is not None for end in self.ends)
        return stepped or (self._at_a_point and any(end.before is not None for end in self.ends))

    def _stored(self) -> Box:
        """Bound the drift by the boxes before the cast, cast to the format of the output."""
        infer = _stored(self.infer, self.output)
        if self.infer is self.train:
            return infer - infer
        many, spare = reads_many(self.shape, self.shape[-1]), (infer.hi - infer.lo) / 2
        if self.train.wide:
            many, spare = True, spare.amax().expand(self.shape)
        return infer - _stored(
            self.train, self.output, spare * (NEGLIGIBLE_OF_MANY if many else NEGLIGIBLE)
        )

    @property
    def readings(self) -> tuple[Apart, Apart]:
        """Return the distance of each reading of the output from their common value, in training
        and inference."""
        own = [run.private.get(self.output) for run in (self.train, self.infer)]
        one, two = (None if private is None else private.error_bound for private in own)
        return one, two

    @property
    def chance(self) -> Chance | None:
        """Return the probability with which all bounds hold; None in the worst case.

        Raises:
            NoBound: more functionals were bounded than share the probability of failure.
        """
        one, two = self.train.tape.chance, self.infer.tape.chance
        if one is None or two is None:
            return None
        found = replace(one, asked=one.asked + two.asked)
        if found.asked > found.functionals:
            raise NoBound(self.output, f"more than {found.functionals} bounds by chance are used")
        return found

    def length(self, row: tuple[int, ...]) -> float:
        """Bound the Euclidean norm of the drift of a row by those of reference and errors."""
        known = self.known.mag()[row]
        unit = torch.eye(known.numel(), dtype=known.dtype, device=known.device)
        functionals = on_row(unit, row, self.shape)
        sides = [self.train] if self.infer is self.train else [self.train, self.infer]
        sizes = [gram_norm(side.tape, side.computed[self.output], functionals) for side in sides]
        centre = float(known.square().sum().sqrt() * (1 + 2 * gamma(known.numel() + 4)))
        total = centre + sizes[0] + sizes[-1]
        return total * (1 + 2.0**-50)

    @property
    def passes(self) -> dict[str, list[dict[str, Any]]]:
        """Return the reverse passes that were made for each kernel."""
        return {"train": self.train.passes.to_json(), "infer": self.infer.passes.to_json()}

    def witness(self) -> dict[str, tuple[float, float]]:
        """Return for every computed node (largest size, largest drift)."""
        found: dict[str, tuple[float, float]] = {}
        for name, index in self.train.computed.items():
            one = self.train.tape.entries[index]
            two = self.infer.tape.entries[self.infer.computed[name]]
            moved = (two.reference - one.reference).abs() + one.error_bound + two.error_bound
            size = one.size
            if name != self.output:  # the output's entry is that of one reading
                first, second = self.train.private.get(name), self.infer.private.get(name)
                size = size if first is None else (size + first.error_bound) * (1 + 2.0**-50)
                for private in (first, second):
                    moved = (
                        moved if private is None else (moved + private.error_bound) * (1 + 2.0**-50)
                    )
            found[name] = float(size.amax()), float(up(moved, 4).amax())
        return found


def _stored(run: KernelRun, output: str, spare: Tensor | None = None) -> Box:
    """Return the box of a stored output: the box before the cast, cast to its format.

    Errors of up to `spare` at an entry are not propagated further.
    """
    entry = output_entry(run, output)
    formed = entry.before
    index, floor = run.computed[output], run.tape.last_floor

    def bound(i: int, start: int, stop: int, functionals: Adjoint) -> tuple[Tensor, Tensor]:
        less = None if spare is None else spare[i].reshape(-1)[start:stop]
        found = run.tape.bound(index, functionals, floor, formed=formed, spare=less)
        return found.with_region(run.tape.radius)

    if formed is not None and spare is None and _passed(run, output, formed):
        low, high = -formed.error_bound, formed.error_bound
    else:
        wide = torch.full_like(entry.reference, torch.inf)
        low, high = of_elements(run.tape, entry.shape, (-wide, wide), bound, by_row=entry.by_row)
    read = entry if formed is None else formed
    reference = Box.point(read.reference)
    around = (reference + Box(low, high)).meet(reference.widen(up(read.error_bound)))
    if entry.ends is not None:
        ends = entry.ends.within(around)
        return Box(ends.low, ends.high).meet(
            Box.point(entry.reference).widen(up(entry.error_bound))
        )
    if formed is None:
        return around
    node = run.nodes[output]
    kernel = run.rounding.at(node)
    return cast_freely(around, kernel.format_for(node.role, node.op), kernel)


def _passed(run: KernelRun, output: str, formed: TapeEntry) -> bool:
    """Return whether passes of a wide output find little: it is a sum, passes have bounded one of
    its operands before its cast, and what the others add is a small share of the largest bound."""
    node = run.nodes[output]
    if not run.wide or node.op not in ("add", "sub"):
        return False
    known = [run.tape.entries[run.computed[name]] for name in node.inputs if name in run.lowered]
    least = [(formed.error_bound - entry.error_bound).amax() for entry in known]
    return any(bool(rest <= OTHERS * formed.error_bound.amax()) for rest in least)


def output_entry(run: KernelRun, output: str) -> TapeEntry:
    """Return the tape entry of the output of a run."""
    return run.tape.entries[run.computed[output]]


def affine_forms(
    graph: BlockGraph,
    train: StoredParameters,
    infer: StoredParameters,
    centre: Tensor | None,
    radius: Tensor,
    entering: Entering = ALONE,
    *,
    ball: WeightBall | None = None,
    alpha: Fraction | None = None,
    grain: float = 0.0,
) -> AffineForms:
    """Run both kernels at the centre of [centre - radius, centre + radius], with their errors.

    If both have the same numerics and read the same input, their runs are the same set, and one
    tape serves both.

    Args:
        graph: the block.
        train, infer: what both kernels store; their numerics are the kernels'.
        centre: [T, D] float64; None for a block on token ids.
        radius: broadcastable to [T, D], float64, >= 0.
        entering: how the states that both kernels read may differ.
        ball: a region around the weights; None: the stored weights alone.
        alpha: assume independent roundings; all bounds together then fail in a share of at most
            `alpha` of the runs on any one input.
        grain: lower limit of the unit roundoff by which passes are chosen: the larger, the fewer
            reverse passes are made, and the wider the bounds.

    Raises:
        NoBound: some result has no finite bound.
    """
    met = kernel_boxes(graph, Kernels.of(train, infer, ball=ball), centre, radius, entering)
    grain = max(grain, coarsest(graph, train, infer))
    chances = [None if alpha is None else Chance(alpha, functionals_allowed(graph)) for _ in met]

    def run(
        side: int, common: Mapping[str, Tensor] | None = None, other: KernelRun | None = None
    ) -> KernelRun:
        stored = (train, infer)[side]
        spread = None if ball is None else StoredSpread(ball, stored, side)
        return affine_run(
            *(graph, stored, centre, radius, grain, entering),
            side=side,
            spread=spread,
            chance=chances[side],
            boxes=met[side],
            common=common,
            other=other,
        )

    if entering.drift is None and _same(train, infer):
        one = two = run(0)
    elif ball is None:  # first the inference kernel, which is coarser and fails earlier
        two = run(1)
        one = run(0, other=None if bool(radius.any()) else two)
    else:
        one = run(0)
        two = run(1, one.common)
    if graph.output not in one.computed or graph.output not in two.computed:
        raise NoBound(graph.output, "the output does not depend on the input")
    return AffineForms(graph.output, one, two)


def _same(train: StoredParameters, infer: StoredParameters) -> bool:
    """Return whether both kernels admit the same runs: equal parameters and equal numerics."""
    stored = train.tensors is infer.tensors and train.constants is infer.constants
    return stored and replace(infer.numerics, preset=train.numerics.preset) == train.numerics


def _difference(a: Range, b: Range, radius: Tensor) -> Tensor:
    """Bound Σ |(α_infer - α_train)·s| for the symbols s that both kernels share: the input minus
    its centre, and the effect of a weight ball on known numbers."""
    total = torch.zeros_like(a.low)
    if a is b:
        return total
    none = (None, None)
    apart = [
        (a.shared.get(name, none)[0], b.shared.get(name, none)[0], size)
        for name, (_, size) in {**a.shared, **b.shared}.items()
    ]
    if bool((radius > 0).any()):
        apart.append((a.region, b.region, radius))
    for first, second, size in apart:
        total = total + _functionals_apart(first, second, size)
    return total


def _functionals_apart(one: Adjoint | None, two: Adjoint | None, size: Tensor) -> Tensor | float:
    """Bound |(two - one)·s| for |s| <= size, the rounding of the difference included."""
    each = [adjoint for adjoint in (one, two) if adjoint is not None]
    if not each:
        return 0.0
    both = each[0] if one is None or two is None else one.times(-1.0).plus(two)
    sizes = sum(adjoint.magnitude(size) for adjoint in each)
    terms = both.values[0].numel() + 8
    return both.magnitude(size) * (1 + 2 * gamma(terms)) + 2.0**-52 * sizes


LARGEST = 2**29
"""Most numbers in the ellipsoids of a state; larger ones are not made."""
FAINT = 2.0**-16
"""An error of a row up to this share of the other kernel's is bounded by its box alone."""


def output_ellipsoids(forms: AffineForms) -> InterfaceEllipsoids | None:
    """Return ellipsoids around the drift of the rows of the output; None if above `LARGEST`.

    D = (h̃_i - h̃_t) + e_i - e_t, and each error lies in an ellipsoid of its own.
    """
    shape = forms.shape
    if len(shape) != 2 or shape[0] * shape[1] ** 2 > LARGEST:
        return None
    middle, off = forms.known.midpoint()
    ends = forms.ends
    shapes = []
    for row in range(shape[0]):
        sizes = [float(end.error_bound[row].norm()) for end in ends]
        parts = [
            _box(end.error_bound[row])
            if size <= FAINT * max(sizes)
            else _error(run, forms.output, row)
            for run, end, size in zip((forms.train, forms.infer), ends, sizes, strict=True)
        ]
        slip = float(off[row].norm()) * SAFE
        rest = RankOne(off[row], 0.0, slip**2)
        shapes.append(around_sum([*parts, rest]))
    return InterfaceEllipsoids(middle, torch.stack(shapes))


def _error(run: KernelRun, output: str, row: int) -> Tensor:
    """Return an ellipsoid around the error of a row of the output in one kernel."""
    entry, index = output_entry(run, output), run.computed[output]
    if (row,) in entry.ellipsoids:
        return entry.ellipsoids[(row,)]
    unit = torch.eye(entry.shape[-1], dtype=torch.float64, device=entry.reference.device)
    floor = run.tape.cut if run.tape.cut < index else INPUT
    return gram_ellipsoid(run.tape, index, on_row(unit, (row,), entry.shape), floor)


def _box(error_bound: Tensor) -> Tensor:
    """Return an ellipsoid around a box: (Σ ρ)·diag(ρ)."""
    return torch.diag(error_bound) * float(error_bound.sum()) * SAFE
