"""The boxes of a node, and the error of storing a result (sections 1 and 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.any_length import Marks
from kcdsl_certs.recheck.graphs.graph import Block, Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import Bools, Box, Floats
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.numerics.formats import FLOAT32, Format
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics, stepped

SUMMED = ("linear", "matmul")  # computed once, from stored operands
BY_ROW = ("softmax", "rms_norm", "layer_norm")  # read their first operand twice
_FIXED = ("input", "param", "constant", "embedding")

Own = Floats | None
"""The largest distance of a reading from the common value of all readings; None: zero."""


def twice(node: Node) -> bool:
    """Return whether an operation reads its first operand twice: in sums over a row and element by
    element, or in the sigmoid and the product of a silu that is written out."""
    return node.op in BY_ROW or (node.op == "silu" and node.written)


def several(block: Block, *, followed: bool = False) -> frozenset[str]:
    """Return the nodes of which there may be several versions. With `followed` another block of a
    chain reads the output, of which there may then be several as well."""
    whole: Counter[str] = Counter()
    near: Counter[str] = Counter()
    for name in {name for node in block.nodes if node.op in SUMMED for name in node.inputs}:
        whole[name] = near[name] = 1
    whole[block.output] = near[block.output] = 2 if followed else 1
    for node in reversed(block.nodes):
        if node.op in SUMMED:
            continue
        made, handed = (min(max(count[node.name], 1), 2) for count in (whole, near))
        for place, name in enumerate(node.inputs):
            by_row = node.op in BY_ROW
            written = node.written and node.op != "rope" and place == 0
            whole[name] += made + int(twice(node) and place == 0)
            near[name] += (1 if by_row else handed) + int(written)
    found = set()
    for node in block.nodes:
        count = near if node.op in SUMMED else whole
        if node.op not in _FIXED and count[node.name] > 1:
            found.add(node.name)
    return frozenset(found)


def plus(*parts: Own) -> Own:
    """Return the sum of distances of readings that have several causes."""
    named = [part for part in parts if part is not None]
    return _sum(named) if named else None


def _sum(parts: Iterable[Floats]) -> Floats:
    total: Floats = np.zeros(())
    for part in parts:
        total = total + part
    return np.asarray(total * (1 + 2.0**-48))


def by(part: Own, factor: Floats | float) -> Own:
    """Return the distance of readings of a product; `factor` ≥ |the other factor|."""
    return None if part is None else np.asarray(part * factor * (1 + 2.0**-48) + 2.0**-1000)


@dataclass(frozen=True, slots=True)
class State:
    """Enclosures of the training value, the inference value and inference minus training."""

    t: Box
    i: Box
    d: Box
    own: tuple[Own, Own] = (None, None)  # the distance of readings of either value

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the node."""
        return self.t.shape


@dataclass(frozen=True, slots=True)
class Mask:
    """A bool constant: True for the columns that attention may read."""

    allowed: Bools

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the node."""
        return self.allowed.shape


@dataclass(frozen=True, slots=True)
class Probabilities:
    """A softmax: the exact one of the stored scores (`star`) and the rounding of either kernel.

    `variation` is the total variation of each row; `rounding_t` and `rounding_i` are elementwise.
    `allowed` has the shape of the scores. `stored` is read by all operations except a context
    product. At any length `total` bounds the sum of either kernel's roundings over a row.
    """

    star: State
    variation: Floats
    rounding_t: Floats
    rounding_i: Floats
    allowed: Bools
    stored: State  # with the distance of readings
    total: tuple[Floats, Floats] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the node."""
        return self.star.shape


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A large matrix that only linears read, some rows at a time: the largest magnitudes of its
    values (training or inference) and of its drift."""

    shape: tuple[int, ...]
    value: float
    drift: float


Value = State | Mask | Probabilities | StoredMatrix


@dataclass(frozen=True, slots=True)
class Rows:
    """Any number of rows up to `longest`: the marks of every node's dimensions, and the tables of
    positions as both kernels store them, by the node of their constant."""

    longest: int
    marks: Mapping[str, Marks]
    tables: Mapping[str, State]


Held = tuple[Floats, Floats]
"""Ellipsoids around the rows of a tensor: row t is in middle[t] + {e: |a·e| ≤ √(aᵀ P[t] a)}; middle
is [T, n], P is [T, n, n]."""


Results = tuple[Floats, ...]
Share = Sequence[tuple[int, ...]]
OverRows = Callable[[Share, Results, Callable[[Share, Results], None]], Results]
"""`over_rows(rows, results, work)` calls `work(share, results)` for shares that make up all rows,
each of which writes the results of its rows, and returns the results."""


def in_turn(rows: Share, results: Results, work: Callable[[Share, Results], None]) -> Results:
    """Run `work` on all rows in this process; results are overwritten."""
    work(rows, results)
    return results


@dataclass(frozen=True, slots=True)
class DriftProblem:
    """The context of the rules: everything that they may read besides their inputs.

    With `rows` the graph is read at any number of rows, each of them in the box of the region.
    """

    block: Block
    train: KernelNumerics
    infer: KernelNumerics
    parameters: Parameters
    keys: Mapping[str, str]
    weights: frozenset[str]
    centre: Floats | None
    radius: Floats | None
    rows: Rows | None = None
    drift: Box | None = None  # the drift of the block input (links of a chain)
    rho: Fraction = Fraction(0)  # the region around the weights: every |θ' - θ| ≤ ρ|θ|
    held: Held | None = None  # ellipsoids around the rows of the drift, in addition to its box
    errors: dict[str, tuple[Box, Box]] | None = None  # if not None: filled with errors of storing
    readings: tuple[Own, Own] = (None, None)  # the distance of readings of the block input
    followed: bool = False  # whether another link of a chain reads the output
    over_rows: OverRows = in_turn  # how the rows of long passes are divided
    several: frozenset[str] = field(init=False)  # nodes with several versions

    def __post_init__(self) -> None:
        object.__setattr__(self, "several", several(self.block, followed=self.followed))

    @property
    def entering(self) -> tuple[Own, Own]:
        """Return the distance of readings of the input from their common value, in training and
        inference."""
        train, infer = self.readings
        return None if self.train.stepped else train, None if self.infer.stepped else infer

    @property
    def handed(self) -> bool:
        """Return whether another block stored the input."""
        return self.drift is not None


def recast(problem: DriftProblem, node: Node, x: State) -> State:
    """Return a state cast to the format of a node, unchanged if the format holds all its values."""
    sides, nothing = [], np.zeros(x.shape)
    for kernel, own in ((problem.train, x.t), (problem.infer, x.i)):
        form = target(kernel, node)
        read = kernel.reads(problem.block.named, node.inputs[0], problem.handed)
        if all(form.holds(other) for other in read):
            sides.append((own, box.exact(nothing)))
        else:
            widest = max(read, key=lambda other: other.precision)
            sides.append(stored(kernel, form, own, nothing, widest))
    (t, wrong_t), (i, wrong_i) = sides
    versions: list[Own] = []
    for now, before, kernel, version in (
        (t, x.t, problem.train, x.own[0]),
        (i, x.i, problem.infer, x.own[1]),
    ):
        cast = None if now is before else _versions(problem, node, kernel, before, nothing, version)
        versions.append(version if cast is None else cast)
    if problem.errors is not None:
        problem.errors[node.name] = (wrong_t, wrong_i)
    if t is x.t and i is x.i:
        return x
    return reduce(t, i, box.add(x.d, box.sub(wrong_i, wrong_t)), (versions[0], versions[1]))


def pinned(problem: DriftProblem, node: Node) -> DriftProblem:
    """Return the problem with both kernels as they compute a node: in its pinned format, and a
    linear with the override of its name."""
    if (node.format and node.op != "constant") or (node.op, node.role) == ("softmax", ""):
        problem = replace(problem, train=problem.train.at(node), infer=problem.infer.at(node))
    key = problem.keys.get(node.inputs[1]) if node.op == "linear" else None
    if key is None or not (problem.train.others or problem.infer.others):
        return problem
    return replace(problem, train=problem.train.serving(key), infer=problem.infer.serving(key))


def numeric(value: Value) -> State:
    """Return the state of a numeric value. Raises Rejected "rule/mask" for a mask."""
    match value:
        case State():
            return value
        case Probabilities():
            return value.stored
        case Mask():
            raise Rejected("rule/mask", "a mask is read as numbers")
        case StoredMatrix():
            raise Rejected("internal", "a matrix of a linear is read as numbers")


def reduce(t: Box, i: Box, d: Box, own: tuple[Own, Own] = (None, None)) -> State:
    """Return the state of three boxes, each intersected with what the other two imply."""
    if t.point and i.point:
        return State(t, i, box.checked(box.meet(d, box.sub(i, t)), "the drift"), own)
    d = box.checked(box.meet(d, box.sub(i, t)), "the drift")
    i = box.checked(box.meet(i, box.add(t, d)), "the inference value")
    t = box.checked(box.meet(t, box.sub(i, d)), "the training value")
    return State(t, i, d, own)


def target(kernel: KernelNumerics, node: Node) -> Format:
    """Return the format in which a kernel stores the result of a node."""
    return kernel.result(node.op, node.role)


def settle(
    problem: DriftProblem,
    node: Node,
    exact: tuple[Box, Box, Box],
    errors: tuple[Floats, Floats],
    inner: tuple[Format, Format] | None = None,
    beside: tuple[Box, Box] | None = None,
    own: tuple[Own, Own] = (None, None),
) -> State:
    """Return the state of a stored result.

    `exact` encloses f_t, f_i and f_i - f_t of real arithmetic, `errors` bound the error inside
    the operation, `inner` are the formats of that arithmetic (default: `KernelNumerics.inner`);
    `beside` boxes further errors of f in either kernel before it is stored. `own` is the distance
    of readings of the operands, carried to the result of either kernel.
    """
    y_t, y_i, d = exact
    inner_t, inner_i = inner or (problem.train.inner, problem.infer.inner)
    more = beside is not None and any(part.lo.any() or part.hi.any() for part in beside)
    if beside is not None and more:
        y_t, y_i = box.add(y_t, beside[0]), box.add(y_i, beside[1])
    t, wrong_t = stored(problem.train, target(problem.train, node), y_t, errors[0], inner_t)
    i, wrong_i = stored(problem.infer, target(problem.infer, node), y_i, errors[1], inner_i)
    if beside is not None and more:
        wrong_t, wrong_i = box.add(wrong_t, beside[0]), box.add(wrong_i, beside[1])
    if problem.errors is not None:
        problem.errors[node.name] = (wrong_t, wrong_i)
    versions = (
        _versions(problem, node, problem.train, y_t, errors[0], own[0]),
        _versions(problem, node, problem.infer, y_i, errors[1], own[1]),
    )
    if beside is not None:
        one, two = versions
        versions = (
            None if one is None else plus(one, box.mag(beside[0])),
            None if two is None else plus(two, box.mag(beside[1])),
        )
    return reduce(t, i, box.add(d, box.sub(wrong_i, wrong_t)), versions)


def _versions(
    problem: DriftProblem, node: Node, kernel: KernelNumerics, y: Box, error: Floats, own: Own
) -> Own:
    """Return the distance of a reading of a result from the common value: its cast, and the errors
    inside an operation that is computed again for each reading."""
    if kernel.stepped or (node.op in SUMMED and node.name not in problem.several):
        return None
    u, eta = kernel.off(target(kernel, node))
    cast = box.up(u * box.mag(box.widen(y, error)) + eta)
    return plus(own, cast, None if node.op in SUMMED else error)


def stored(
    kernel: KernelNumerics, form: Format, y: Box, error: Floats, inner: Format
) -> tuple[Box, Box]:
    """Return the stored value and its error against real arithmetic (Rule 2.3).

    With casts that are steps, `error` includes the rounding to the format if the format is at least
    as precise as float32 and as the arithmetic inside; otherwise it is a separate step.
    Raises Rejected "bound/overflow" if a stored number may leave the format.
    """
    v = box.widen(y, error)
    if not (np.isfinite(v.lo).all() and np.isfinite(v.hi).all()):
        raise Rejected("bound/not-finite", "the value has no finite bound")
    within = box.around(error)
    if not kernel.stepped:
        value, wrong = _freely(kernel, form, v, within)
    elif form.precision >= max(FLOAT32.precision, inner.precision):
        value, wrong = v, within
    else:
        value, wrong = _step(kernel, form, v, within)
        if kernel.inward:  # an infinite value stays infinite
            _fits(v, inner)
    _fits(value, form)
    return value, wrong


def _fits(value: Box, form: Format) -> None:
    if not bool((box.magnitude(value) <= form.largest).all()):
        flat = int(np.argmax(np.nan_to_num(box.magnitude(value), nan=np.inf)))
        place = [int(n) for n in np.unravel_index(flat, value.shape)]
        raise Rejected("bound/overflow", f"element {place} may overflow {form.name}")


def _freely(kernel: KernelNumerics, form: Format, v: Box, within: Box) -> tuple[Box, Box]:
    """Return value and error of a free cast."""
    u, eta = kernel.off(form)
    cast = box.up(u * box.mag(v) + eta)
    if kernel.inward:
        return shrunk(kernel, form, v), box.add(_inward(v, cast), within)
    return box.widen(v, cast), box.around(box.up(within.hi + cast))


def shrunk(kernel: KernelNumerics, form: Format, v: Box) -> Box:
    """Return the box of numbers after free casts toward zero. The result is monotone in the number,
    never larger than it in size, and never of the other sign."""
    u, eta = kernel.off(form)
    lo, hi = (box.up(u * np.abs(end) + eta) for end in (v.lo, v.hi))
    below = np.where(v.lo > 0, np.maximum(box.add_down(v.lo, -lo), 0.0), v.lo)
    above = np.where(v.hi < 0, np.minimum(box.add_up(v.hi, hi), 0.0), v.hi)
    return Box(below, above)


def _inward(v: Box, cast: Floats) -> Box:
    """Return the error of a cast toward zero of at most `cast`."""
    return Box(np.where(v.hi > 0, -cast, 0.0), np.where(v.lo < 0, cast, 0.0))


def _step(kernel: KernelNumerics, form: Format, v: Box, within: Box) -> tuple[Box, Box]:
    """Return value and error of a cast that is a step function."""
    low, high = (stepped(end, form, kernel) for end in (v.lo, v.hi))
    u, eta = kernel.off(form)
    free = box.up(np.maximum(u * box.mag(v), eta))
    wide = _inward(v, free) if kernel.inward else box.around(free)
    flat = low == high
    lo = np.where(flat, box.add_down(low, -v.hi), wide.lo)
    hi = np.where(flat, box.add_up(high, -v.lo), wide.hi)
    return Box(low, high), box.add(Box(lo, hi), within)


def gamma(count: int, u: float) -> float:
    """Return an upper bound of count·u / (1 - count·u); infinite from count·u = 1 on."""
    product = count * u
    return float("inf") if product >= 1 else product / (1 - product) * (1 + 2.0**-50)


def middle(a: State) -> Box:
    """Return a box of (a_t + a_i)/2."""
    one = box.add(a.t, box.half(a.d))
    return box.meet(one, box.half(box.add(a.t, a.i)))
