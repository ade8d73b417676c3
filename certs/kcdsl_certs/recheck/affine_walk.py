"""Walk a block graph in affine forms, kernel by kernel, and bound the drift from both walks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint, merged, units
from kcdsl_certs.recheck.affine.before_casts import asked
from kcdsl_certs.recheck.affine.form import Form, Operand, Passes, Uncast, Walk, form_of
from kcdsl_certs.recheck.affine.independent import Budget
from kcdsl_certs.recheck.affine.many_rows import RowErrors
from kcdsl_certs.recheck.affine.reverse_passes import (
    AT_ONCE,
    FEW,
    batch_limit,
    row_batch_limit,
    store_error_bound,
)
from kcdsl_certs.recheck.affine.tape import Bound, Tape, TapeEntry, reads_many
from kcdsl_certs.recheck.documents.document import Hints
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Box, Floats, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Mask,
    Own,
    Results,
    State,
    pinned,
    shrunk,
)
from kcdsl_certs.recheck.interval_walk import enclosed
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.table import computed, operation_of

Row = tuple[int, ...]

# Adjoints of the training kernel stop at an entry where their bound is at most this share of the
# error of the inference kernel. Claims exceed a prover's bound by 2^-10, room for a few such parts.
_NEGLIGIBLE = 2.0**-12

# The same where the output has many rows: less than the share of a prover, 2^-5, so that a prover
# stops there as well.
_NEGLIGIBLE_OF_MANY = 2.0**-5 - 2.0**-9

_OTHERS = 2.0**-6 - 2.0**-8  # of other operands of a wide sum, less than that of a prover


def walk(
    problem: DriftProblem,
    kernel: KernelNumerics,
    hints: Hints | None = None,
    moved: bool = False,
    budget: Budget | None = None,
    boxes: Mapping[str, Box] | None = None,
    before: Walk | None = None,
) -> Walk:
    """Return the forms of every node in one kernel, and their tape.

    Only the reverse passes that the hints name are made, all if there are no hints. `moved`: the
    kernel reads the block input with the drift of the region, if that has one. With a budget
    roundings are independent. `boxes` are those of the interval domain, by node; `before` is the
    walk of the other kernel. Raises Rejected, naming the node.
    """
    region = None
    if problem.centre is not None and problem.radius is not None:
        region = np.broadcast_to(problem.radius, problem.centre.shape).astype(np.float64)
    softmaxes = frozenset(node.name for node in problem.block.nodes if node.op == "softmax")
    found = Walk(problem, kernel, Tape(region, budget=budget), {}, softmaxes, Passes(hints), moved)
    found.first.update({} if before is None else before.first)
    found.tape.add(TapeEntry(np.zeros((1,)) if region is None else region))
    for node in problem.block.nodes:
        try:
            form = found.forms[node.name] = _apply(found, node)
            if node.op == "input":
                _set_row_bound(found, form_of(form))
            if boxes is not None and node.name in boxes and not isinstance(form, Mask):
                _meet(found, node.name, form, boxes[node.name])
        except Rejected as rejection:
            raise rejection.at(f"node {node.name[:80]!r}") from None
    return found


def _set_row_bound(at: Walk, form: Form) -> None:
    """For a point region, store that elements of a stored input have independent errors."""
    region = at.tape.region
    fixed = at.tape.budget is None and not at.problem.rho and at.problem.drift is None
    if not fixed or region is None or region.any() or len(form.shape) != 2:
        return
    if form.place is not None:
        entry = at.tape.entries[form.place]
        at.tape.entries[form.place] = replace(entry, rows=RowErrors(form.error_bound))


def _meet(at: Walk, name: str, form: Form, within: Box) -> None:
    """Lower the error bound of a node to the farthest end of its box."""
    if form.place is None or form.place == 0:
        return
    above = box.add_up(within.hi, -form.reference)
    below = box.add_up(form.reference, -within.lo)
    store_error_bound(at, name, np.minimum(form.error_bound, np.maximum(above, below)))


def _apply(at: Walk, node: Node) -> Operand:
    operation = operation_of(node)
    problem = pinned(at.problem, node)
    if problem is not at.problem:
        kernel = problem.train if at.kernel is at.problem.train else problem.infer
        at = replace(at, problem=problem, kernel=kernel)
    at.kernel.refuse_wide(problem.block.named, node)
    read = at.read(node)
    return computed(
        node, lambda: operation.affine(at, read, [at.forms[name] for name in read.inputs])
    )


@dataclass(frozen=True, slots=True)
class Drift:
    """The box of inference minus training of the output, and (largest value, drift) by node."""

    output: Box
    sizes: Mapping[str, tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Pair:
    """The walks of both kernels and the forms of their outputs; `known` are the boxes of the output
    in the interval domain, None if it has no bound."""

    train: Walk
    infer: Walk
    t: Form
    i: Form
    known: State | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the output."""
        return self.t.shape

    @property
    def apart(self) -> Box:
        """Return h̃_i - h̃_t."""
        return box.sub(box.exact(self.i.reference), box.exact(self.t.reference))

    @property
    def step(self) -> int:
        """Return the largest number of functionals of a row in one batch."""
        return min(AT_ONCE, batch_limit(self.train), batch_limit(self.infer))

    def output(self) -> Box:
        """Return the box of the output's drift, element by element."""
        around = box.widen(self.apart, raised(self.t.error_bound + self.i.error_bound))
        lo, hi = around.lo.copy(), around.hi.copy()
        apart, region = self.apart, self.train.tape.region
        point = region is None or not region.any()
        steps = any(form.steps is not None for form in (self.t, self.i))
        free = point and any(form.uncast is not None for form in (self.t, self.i))
        stored_says_all = point and (steps or free) and not self.sharing
        rows = () if stored_says_all else self.shape[:-1]
        for row in np.ndindex(*rows) if rows else ():
            for first in range(0, self.shape[-1], self.step):
                count = min(self.step, self.shape[-1] - first)
                where = (*row, slice(first, first + count))
                found = self._errors(units(self.shape, row, first, count))
                lo[where] = np.maximum(lo[where], box.add_down(apart.lo[where], found.lo))
                hi[where] = np.minimum(hi[where], box.add_up(apart.hi[where], found.hi))
        if steps or free:
            train = infer = _stored(self.infer, self.i)
            if self.infer is not self.train:
                many, spare = reads_many(self.shape, self.shape[-1]), (infer.hi - infer.lo) / 2
                if self.train.wide:
                    many, spare = True, np.full(self.shape, spare.max())
                share = _NEGLIGIBLE_OF_MANY if many else _NEGLIGIBLE
                train = _stored(self.train, self.t, spare * share)
            stored = box.sub(infer, train)
            lo, hi = np.maximum(lo, stored.lo), np.minimum(hi, stored.hi)
        return box.checked(Box(lo, hi), "the drift of the output")

    def errors(self, row: Row, functionals: Floats) -> Box:
        """Return the box of functionals [B, n] of e_i - e_t of one row of the output."""
        found = [self._errors(adjoint) for adjoint in in_row(row, functionals, self.step)]
        return Box(np.concatenate([b.lo for b in found]), np.concatenate([b.hi for b in found]))

    @property
    def sharing(self) -> bool:
        """Return whether some effect of other weights is the same in both kernels."""
        tape = self.train.tape
        return tape.budget is None and any(entry.shared is not None for entry in tape.entries)

    def _errors(self, functionals: Adjoint) -> Box:
        found = self._both(functionals, apart=False)
        return box.meet(found, self._both(functionals, apart=True)) if self.sharing else found

    def _both(self, functionals: Adjoint, *, apart: bool) -> Box:
        t = bound_functionals(self.train, self.t, functionals, apart)
        i = t
        if self.infer is not self.train:
            i = bound_functionals(self.infer, self.i, functionals, apart)
        middle = box.sub(box.exact(i.centre), box.exact(t.centre))
        wide = raised(t.wide(i) + i.radius)
        region = self.train.tape.region
        if region is not None and i is not t and region.any():
            wide = raised(wide + _apart(t.input, i.input, region))
        if i is not t:
            for name, (_, size) in {**t.shared, **i.shared}.items():
                one, two = (found.shared.get(name, (None,))[0] for found in (t, i))
                wide = raised(wide + _apart(one, two, size))
        return box.widen(middle, wide)

    @property
    def readings(self) -> tuple[Own, Own]:
        """Return bounds of the distance of readings of the output from their common value."""
        name = self.train.problem.block.output
        found = [side.versions.get(name) for side in (self.train, self.infer)]
        t, i = (None if version is None else version.own for version in found)
        return t, i

    def settle(self) -> None:
        """Check that no more functionals were bounded than the probability is divided among.

        Raises Rejected "bound/chance".
        """
        budgets = [b for b in (self.train.tape.budget, self.infer.tape.budget) if b is not None]
        if budgets:  # one form that serves both kernels is of two runs
            replace(budgets[0]).take(sum(budget.used for budget in budgets[1:]))

    def sizes(self) -> dict[str, tuple[float, float]]:
        """Return the largest |h̃_t| + ρ_t and the largest |h̃_i - h̃_t| + ρ_i + ρ_t by node."""
        every = (name for name in self.train.forms if name not in self.train.named)
        return {name: _sizes(self.train, self.infer, name) for name in every}


def pair(
    problem: DriftProblem,
    hints: tuple[Hints, Hints] | None = None,
    chance: tuple[Fraction, int] | None = None,
) -> Pair:
    """Walk both kernels, with the reverse passes that are named; without hints with all.

    With `chance` (α, N) roundings are independent, and bounds hold except for a share of all runs.
    Raises Rejected, naming the node.
    """
    first, second = (None, None) if hints is None else hints
    within = enclosed(problem)
    train = walk(problem, problem.train, first, budget=_budget(chance), boxes=within.train)
    infer = train
    if problem.infer != problem.train or problem.drift is not None:
        budget = _budget(chance)
        infer = walk(problem, problem.infer, second, True, budget, within.infer, before=train)
    output = problem.block.output
    t, i = (form_of(side.forms[side.reading(output)]) for side in (train, infer))
    return Pair(train, infer, t, i, within.output)


def _budget(chance: tuple[Fraction, int] | None) -> Budget | None:
    return None if chance is None else Budget(*chance)


def drift(problem: DriftProblem, hints: tuple[Hints, Hints] | None = None) -> Drift:
    """Return the drift box of the output from the affine forms of both kernels.

    Raises Rejected, naming the node.
    """
    both = pair(problem, hints)
    return Drift(both.output(), both.sizes())


def bound_functionals(at: Walk, form: Form, functionals: Adjoint, apart: bool = False) -> Bound:
    """Return bounds of functionals of a node's error in one kernel; see `Tape.bound`."""
    if form.place is None:
        return Bound(np.zeros(functionals.batch), np.zeros(functionals.batch), None)
    return at.tape.bound(form.place, functionals, apart=apart)


def _stored(at: Walk, form: Form, spare: Floats | None = None) -> Box:
    """Return the box of an output: of the result before its cast, cast to its format. Adjoints with
    a bound of at most `spare` at an entry are not followed further."""
    if form.place is None:
        return box.exact(form.reference)
    steps, entry, reference = form.steps, None, form.reference
    before = form.uncast if steps is None else steps
    if before is not None:
        entry, reference = before.entry, before.reference
    around = box.widen(box.exact(reference), form.error_bound if entry is None else entry.nearest)
    step, floor = row_batch_limit(at), at.tape.last_floor
    n, place = form.shape[-1], form.place
    if entry is not None and spare is None and steps is None and _passed(at, entry.nearest):
        n = 0

    def bound_rows(rows: Sequence[Row], ends: Results) -> None:
        lo, hi = ends
        for begin in range(0, n, step):
            parts = range(begin, min(begin + step, n), FEW)
            for row, first in itertools.product(rows, parts):
                count = min(FEW, begin + step - first, n - first)
                where: tuple[int | slice, ...] = (*row, slice(first, first + count))
                functionals = units(form.shape, row, first, count)
                less = None if spare is None else spare[where]
                found = at.tape.bound(place, functionals, floor, formed=entry, spare=less)
                wide = found.around(at.tape.region)
                middle = box.add(box.exact(reference[where]), box.exact(found.centre))
                within = box.widen(middle, wide)
                lo[where] = np.maximum(lo[where], within.lo)
                hi[where] = np.minimum(hi[where], within.hi)

    rows = list(np.ndindex(*form.shape[:-1]))
    lo, hi = at.over_rows(rows, (around.lo.copy(), around.hi.copy()), n, bound_rows)
    if form.uncast is not None:
        cast, zero = _free_cast_box(Box(lo, hi), form.uncast), form.uncast.sure
        if zero is None:
            return cast
        return Box(np.where(zero, 0.0, cast.lo), np.where(zero, 0.0, cast.hi))
    if steps is None:
        return Box(lo, hi)
    stored = steps.ends.within(Box(lo, hi))
    reached = box.widen(box.exact(form.reference), form.error_bound)
    return Box(np.maximum(stored.lo, reached.lo), np.minimum(stored.hi, reached.hi))


def _passed(at: Walk, error_bound: Floats) -> bool:
    """Return whether passes of a wide output find little: it is a sum, the hints name passes of all
    rows of one of its operands before a cast, and what the others add is little."""
    block = at.problem.block
    node = block.named[block.output]
    if not at.wide or node.op not in ("add", "sub"):
        return False
    for name in node.inputs:
        form = form_of(at.forms[name])
        deep, near = asked(at, name, "elements", form.shape)
        if (deep | near).all() and (
            error_bound - form.error_bound
        ).max() <= _OTHERS * error_bound.max():
            return block.named[name].op == "linear"
    return False


def _free_cast_box(around: Box, to: Uncast) -> Box:
    """Return the box of all results of a free cast of a box: v·(1 + δ) + η grows with v."""
    if to.kernel.inward:
        return shrunk(to.kernel, to.format, around)
    u, eta = to.kernel.off(to.format)
    low, high = (raised(u * np.abs(end)) + eta for end in (around.lo, around.hi))
    return Box(box.add_down(around.lo, -low), box.add_up(around.hi, high))


def in_row(row: Row, functionals: Floats, step: int) -> list[Adjoint]:
    """Return functionals [B, n] of one row as adjoints of at most `step` each."""
    ones = (1,) * len(row)
    parts = (functionals[k : k + step] for k in range(0, len(functionals), step))
    return [Adjoint(part.reshape(len(part), *ones, -1), (*row, 0)) for part in parts]


def _apart(t: Adjoint | None, i: Adjoint | None, size: Floats) -> Floats | float:
    """Return Σ |α_i - α_t|·size for the shared part of both kernels, with the float64 error of
    sums.

    A difference of two adjoints has an error of half a unit in the last place of either.
    """
    if t is None or i is None:
        one = t or i
        return 0.0 if one is None else one.sizes(size) * (1 + (size.size + 8) * 2.0**-51)
    apart = merged(i, Adjoint(-t.values, t.start))
    rounding = (t.sizes(size) + i.sizes(size)) * 2.0**-52
    return apart.sizes(size) * (1 + (size.size + 8) * 2.0**-51) + rounding


def _sizes(train: Walk, infer: Walk, name: str) -> tuple[float, float]:
    """Return the largest |h̃_t| + ρ_t and the largest |h̃_i - h̃_t| + ρ_i + ρ_t of a node."""
    t, i = train.forms[name], infer.forms[name]
    if isinstance(t, Mask) or isinstance(i, Mask):
        return 0.0, 0.0
    apart = raised(np.abs(i.reference - t.reference)) + t.error_bound + i.error_bound
    size = np.abs(t.reference) + t.error_bound
    if name in train.versions:
        size, apart = size + train.versions[name].own, apart + train.versions[name].own
    if name in infer.versions:
        apart = apart + infer.versions[name].own
    return float(raised(size).max()), float(raised(apart).max())
