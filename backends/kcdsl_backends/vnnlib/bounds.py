"""Bounds of all blocks of a program and of sums of them, for a batch of input boxes.

Intervals forward, and linear bounds backward as in CROWN (Zhang et al., 2018, arXiv:1811.00866).
Bounds include all rounding errors of float64: they hold in real arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse, special

from kcdsl_backends.vnnlib.program import Affine, Array, Matrix, NetworkProgram, ProgramBlock

U = 2.0**-53
_TINY = 2.0**-1000
"""Bound of the underflow errors in a sum of fewer than 2^70 products."""
_NEGLIGIBLE = 2.0**-300
"""Coefficients, slopes and matrix entries below this are replaced by 0, so that their products do
not underflow; the error is added to the bound."""
_INF = np.inf
REFINED = frozenset({"relu", "difference", "mul", "power", "select"})
"""Kinds whose bounds gain much from smaller boxes of the operands."""


def gamma(n: int) -> float:
    """Return an upper bound of n u / (1 - n u), the relative error of n roundings."""
    return (n + 2) * U * 1.001


def down(x: Array) -> Array:
    """Return the next lower float64 numbers."""
    return np.nextafter(x, -_INF)


def up(x: Array) -> Array:
    """Return the next higher float64 numbers."""
    return np.nextafter(x, _INF)


def nearest(value: Fraction) -> float:
    """Round a number to float64; infinite beyond its range."""
    try:
        return float(value)
    except OverflowError:
        return _INF if value > 0 else -_INF


def rounded(value: Fraction, outward: Callable[[Array], Array]) -> float:
    """Round a number to float64, outward by `down` or `up` unless it is exact."""
    near = nearest(value)
    exact = np.isfinite(near) and Fraction(near) == value
    return near if exact else float(outward(np.asarray(near)))


@dataclass(frozen=True, slots=True)
class NodeBox:
    """Lower and upper ends of boxes, [B, n] each."""

    lo: Array
    hi: Array

    @property
    def mag(self) -> Array:
        """Return the largest magnitude in each box."""
        return np.maximum(np.abs(self.lo), np.abs(self.hi))

    def meet(self, lo: Array, hi: Array) -> NodeBox:
        """Return the intersection; NaN means no bound."""
        return NodeBox(np.fmax(self.lo, lo), np.fmin(self.hi, hi))


@dataclass(frozen=True, slots=True)
class Plane:
    """Linear bound Σ slopes · operands + offset, elementwise; slopes (one per operand) [B, n]."""

    slopes: tuple[Array, ...]
    offset: Array


@dataclass(slots=True)
class Boxes:
    """Bounds of every block on a batch of input boxes."""

    program: NetworkProgram
    ends: list[NodeBox] = field(default_factory=list)
    below: list[Plane | None] = field(default_factory=list)
    above: list[Plane | None] = field(default_factory=list)


def enclosed(program: NetworkProgram, lo: Array, hi: Array, linear: bool = True) -> Boxes:
    """Bound every block for inputs in boxes [B, n]; `linear`: also by linear bounds."""
    found = Boxes(program, [NodeBox(lo, hi)], [None], [None])
    with np.errstate(all="ignore"):
        for block in program.blocks[1:]:
            ends_of = sum_ends if block.kind == "linear" else affine_ends
            operands = [ends_of(found, a) for a in block.operands]
            if linear and block.kind in REFINED:
                pairs = zip(block.operands, operands, strict=True)
                operands = [_refined(found, a, ends) for a, ends in pairs]
            ends = KINDS[block.kind](block, operands)
            found.ends.append(_sound(ends))
            low, high = _planes(block, operands, found.ends[-1]) if linear else (None, None)
            found.below.append(_without_negligible(low, operands, -1.0))
            found.above.append(_without_negligible(high, operands, 1.0))
    return found


def _sound(ends: NodeBox) -> NodeBox:
    """Replace NaN ends by infinite ones."""
    lo, hi = (np.where(np.isnan(e), w, e) for e, w in ((ends.lo, -_INF), (ends.hi, _INF)))
    return NodeBox(lo, hi)


def _sizes(a: Affine) -> int:
    return sum(m.shape[1] for m in a.terms.values())


def _product(x: Array, m: Matrix) -> Array:
    """Return x @ m.T for x [B, n]."""
    found: Array = np.asarray(x @ m.T)
    return found


@np.errstate(all="ignore")
def affine_ends(boxes: Boxes, a: Affine) -> NodeBox:
    """Bound sums by intervals, [B, n]."""
    batch = len(boxes.ends[0].lo)
    middle = np.broadcast_to(a.constant, (batch, a.size)).copy()
    radius, mag = np.zeros((batch, a.size)), np.abs(middle)
    for block, m in a.terms.items():
        ends = boxes.ends[block]
        centre, size = ends.lo / 2 + ends.hi / 2, abs(m)
        middle += _product(centre, m)
        radius += _product(up(np.maximum(ends.hi - centre, centre - ends.lo)), size)
        mag += _product(ends.mag, size)
    lost = 4 * gamma(_sizes(a) + len(a.terms) + 8) * mag + _TINY
    return _sound(NodeBox(down(middle - radius - lost), up(middle + radius + lost)))


def sum_ends(boxes: Boxes, a: Affine) -> NodeBox:
    """Bound sums by intervals; exactly for a single element with coefficient 1 or -1."""
    ends = affine_ends(boxes, a)
    counts = np.zeros(a.size, dtype=np.int64)
    held = {b: sparse.csr_array(m) for b, m in a.terms.items()}
    for m in held.values():
        counts += np.diff(m.indptr)
    for block, m in held.items():
        rows = np.flatnonzero((counts == 1) & (np.diff(m.indptr) == 1))
        places = m.indptr[rows]
        factors, columns = m.data[places], m.indices[places]
        plain = np.abs(factors) == 1
        rows, factors, columns = rows[plain], factors[plain], columns[plain]
        low, high = boxes.ends[block].lo[:, columns], boxes.ends[block].hi[:, columns]
        low, high = np.where(factors > 0, low, -high), np.where(factors > 0, high, -low)
        fixed = a.constant[rows]
        with np.errstate(all="ignore"):
            ends.lo[:, rows] = _moved(low, fixed, down)
            ends.hi[:, rows] = _moved(high, fixed, up)
    return ends


def _moved(x: Array, by: Array, outward: Callable[[Array], Array]) -> Array:
    """Return x + by, rounded outward unless it is exact."""
    total = x + by
    part = total - x
    error = (x - (total - part)) + (by - part)
    found: Array = np.where(error == 0, total, outward(total))
    return found


def _refined(boxes: Boxes, a: Affine, ends: NodeBox) -> NodeBox:
    """Intersect boxes of sums with linear bounds, for sums whose sign is not determined."""
    open_ = ((ends.lo < 0) & (ends.hi > 0)).any(0)
    if not open_.any() or set(a.terms) <= {0}:
        return ends
    ids = np.flatnonzero(open_)
    part = a.rows(ids)
    least, most = ends.lo.copy(), ends.hi.copy()
    least[:, ids] = linear_lower(boxes, part)
    most[:, ids] = -linear_lower(boxes, negated(part))
    return ends.meet(least, most)


def negated(a: Affine) -> Affine:
    """Return sums times -1."""
    return Affine(-a.constant, {b: -m for b, m in a.terms.items()})


# --- linear bounds, backward ----------------------------------------------------------------------


@np.errstate(all="ignore")
def linear_lower(boxes: Boxes, a: Affine, scores: bool = False) -> Any:
    """Return lower bounds of sums, [B, n]; with `scores` also the coefficients of the input.

    From the last block to the input, each block is replaced by its lower plane if its coefficient
    is positive, by its upper plane if that is negative.
    """
    batch, rows = len(boxes.ends[0].lo), a.size
    width = {b: boxes.program.blocks[b].size for b in range(len(boxes.ends))}
    held: dict[int, Array] = {
        b: np.broadcast_to(m.toarray() if sparse.issparse(m) else m, (batch, rows, width[b]))
        for b, m in a.terms.items()
    }
    total = np.broadcast_to(a.constant, (batch, rows)).copy()
    # `lost` bounds rounding errors of coefficients times values, `mass` the sum of magnitudes
    mass, lost = np.abs(total), np.zeros_like(total)
    for index in range(len(boxes.ends) - 1, 0, -1):
        c = held.pop(index, None)
        if c is None:
            continue
        small = _is_negligible(c)
        if small.any():
            lost += 2 * _NEGLIGIBLE * _where(small, boxes.ends[index].mag).sum(-1)
            c = np.where(small, 0.0, c)
        below, above = boxes.below[index], boxes.above[index]
        block = boxes.program.blocks[index]
        if block.kind == "linear":
            _propagate(boxes, held, c, block.operands[0], total, mass, lost)
            continue
        assert below is not None
        assert above is not None
        plus, minus = np.maximum(c, 0), np.minimum(c, 0)
        part = _where(plus, below.offset) + _where(minus, above.offset)
        total += part.sum(-1)
        mass += np.abs(part).sum(-1) * (1 + 2.0**-20)
        lost += 2 * gamma(width[index] + 8) * np.abs(part).sum(-1)
        for k, operand in enumerate(block.operands):
            if not below.slopes[k].any() and not above.slopes[k].any():
                continue
            moved = plus * below.slopes[k][:, None] + minus * above.slopes[k][:, None]
            _propagate(boxes, held, moved, operand, total, mass, lost)
    found = total - 2 * lost - 4 * gamma(4 * len(boxes.ends)) * mass
    c = held.pop(0, None)
    if c is None:
        c = np.zeros((batch, rows, width[0]))
    lo, hi = boxes.ends[0].lo[:, None], boxes.ends[0].hi[:, None]
    worst = np.maximum(c, 0) * lo + np.minimum(c, 0) * hi
    worst = np.where(c == 0, 0.0, worst)
    size = np.abs(worst).sum(-1)
    found = down(found + worst.sum(-1) - 4 * gamma(width[0] + 8) * size - _TINY * 2.0**100)
    found = np.where(np.isnan(found), -_INF, found)
    return (found, c) if scores else found


def _where(c: NDArray[Any], offset: Array) -> Array:
    """Return c [B, rows, n] times offsets [B, n], with 0 times infinity as 0."""
    found: Array = np.where(c == 0, 0.0, c * offset[:, None])
    return found


def _propagate(
    boxes: Boxes,
    held: dict[int, Array],
    c: Array,
    a: Affine,
    total: Array,
    mass: Array,
    lost: Array,
) -> None:
    """Propagate coefficients [B, rows, n] of sums to the blocks that the sums read."""
    total += c @ a.constant
    size = np.abs(c)
    count = gamma(a.size + 8)
    fixed = size @ np.abs(a.constant)
    mass += fixed * (1 + 2.0**-20)
    lost += 2 * count * fixed + _TINY
    for block, m in a.terms.items():
        m, small = _split_negligible(m)
        if small is not None:
            lost += 2 * _where(_times(size, small), boxes.ends[block].mag).sum(-1)
        moved, loss = _times(c, m), _times(size, abs(m))
        held[block] = held[block] + moved if block in held else moved
        # relative error `count` of the product, and once more of the addition
        sizes = loss + np.abs(held[block])
        lost += 2 * count * _where(sizes, boxes.ends[block].mag).sum(-1)


def _is_negligible(x: Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (np.abs(x) < _NEGLIGIBLE) & (x != 0)
    return found


def _split_negligible(m: Matrix) -> tuple[Matrix, Matrix | None]:
    """Return a matrix without negligible entries, and bounds of these; None if it has none."""
    data = m.data if sparse.issparse(m) else m
    small = _is_negligible(data)
    if not small.any():
        return m, None
    parts = np.where(small, 0.0, data), np.where(small, _NEGLIGIBLE, 0.0)
    if not sparse.issparse(m):
        return parts
    return tuple(sparse.csr_array((one, m.indices, m.indptr), shape=m.shape) for one in parts)


def _without_negligible(
    plane: Plane | None, operands: Sequence[NodeBox], sign: float
) -> Plane | None:
    """Replace negligible slopes of a plane by 0 and add their largest effect to its offset."""
    if plane is None or not any(_is_negligible(slope).any() for slope in plane.slopes):
        return plane
    offset, slopes = plane.offset, []
    for slope, x in zip(plane.slopes, operands, strict=True):
        small = _is_negligible(slope)
        offset = offset + sign * np.where(small, 2 * _NEGLIGIBLE * x.mag, 0.0)
        slopes.append(np.where(small, 0.0, slope))
    return Plane(tuple(slopes), offset)


def _times(c: Array, m: Matrix) -> Array:
    batch, rows, n = c.shape
    found = np.asarray(np.ascontiguousarray(c).reshape(batch * rows, n) @ m)
    return found.reshape(batch, rows, m.shape[1])


# --- kinds: intervals -----------------------------------------------------------------------------

Interval = Callable[[ProgramBlock, Sequence[NodeBox]], NodeBox]
_LOOSE = 2.0**-40
"""Generous bound of the relative error of library functions."""


def _near(value: Array, least: float, most: float) -> NodeBox:
    """Return an enclosure of values computed by a library."""
    wide = np.abs(value) * _LOOSE + 2.0**-1020
    return NodeBox(np.clip(value - wide, least, most), np.clip(value + wide, least, most))


def _monotone(
    function: Callable[[Array], Array], least: float = -_INF, most: float = _INF
) -> Interval:
    def interval(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
        x = operands[0]
        return NodeBox(_near(function(x.lo), least, most).lo, _near(function(x.hi), least, most).hi)

    return interval


def _steps(function: Callable[[Array], Array]) -> Interval:
    """Return the interval of a monotone function that float64 computes exactly."""
    return lambda block, operands: NodeBox(function(operands[0].lo), function(operands[0].hi))


def _linear(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    return operands[0]


def factor_ends(value: Any) -> tuple[Array, Array]:
    """Return enclosures [n] of the factors of a block."""
    each = [float(v) if isinstance(v, Fraction) else _root(v) for v in value]
    near = np.asarray(each, dtype=np.float64)
    return down(near - np.abs(near) * 8 * U), up(near + np.abs(near) * 8 * U)


def _root(value: Any) -> float:
    return float(value.scale) / float(np.sqrt(float(value.under)))


def _corners(x: NodeBox, y: NodeBox) -> NodeBox:
    products = [a * b for a in (x.lo, x.hi) for b in (y.lo, y.hi)]
    # 0 times infinity is 0 here: infinite ends are limits
    products = [np.where(np.isnan(p), 0.0, p) for p in products]
    lo, hi = np.minimum.reduce(products), np.maximum.reduce(products)
    return NodeBox(down(lo), up(hi))


def _factor(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    low, high = factor_ends(block.value)
    return _corners(operands[0], NodeBox(low[None], high[None]))


def _mul(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    return _corners(operands[0], operands[1])


def _power(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    x, n = operands[0], int(block.value)
    lo, hi = (_near(np.power(e, n), -_INF, _INF) for e in (x.lo, x.hi))
    if n % 2:
        return NodeBox(lo.lo, hi.hi)
    most = np.maximum(lo.hi, hi.hi)
    least = np.where((x.lo <= 0) & (x.hi >= 0), 0.0, np.minimum(lo.lo, hi.lo))
    return NodeBox(np.maximum(least, 0.0), most)


def _power_of(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    x, base = operands[0], np.asarray(block.value)[None]
    low, high = _near(np.power(base, x.lo), 0.0, _INF), _near(np.power(base, x.hi), 0.0, _INF)
    return NodeBox(np.minimum(low.lo, high.lo), np.maximum(low.hi, high.hi))


def _reciprocal(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    x = operands[0]
    one_side = (x.lo > 0) | (x.hi < 0)
    lo = np.where(one_side, down(1.0 / x.hi), -_INF)
    return NodeBox(lo, np.where(one_side, up(1.0 / x.lo), _INF))


def _share(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    """Bound 1 / (1 + s) for a sum s >= 0 of exponentials."""
    low, high = np.maximum(operands[0].lo, 0), operands[0].hi
    found = NodeBox(down(1.0 / up(1.0 + high)), up(1.0 / down(1.0 + low)))
    return NodeBox(np.maximum(found.lo, 0.0), np.minimum(found.hi, 1.0))


def _rooted(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    x = operands[0]
    found = _monotone(np.sqrt)(block, operands)
    return NodeBox(np.where(x.lo < 0, -_INF, np.maximum(found.lo, 0)), found.hi)


def _logarithm(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    low, high = np.log(operands[0].lo), np.log(operands[0].hi)
    # near 1 the logarithm is about x - 1, which is exact in float64
    wide = 2.0**-50
    ends = NodeBox(low - np.abs(low) * _LOOSE - wide, high + np.abs(high) * _LOOSE + wide)
    return NodeBox(np.where(operands[0].lo <= 0, -_INF, ends.lo), ends.hi)


def _zero(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    x = operands[0]
    never, always = (x.lo > 0) | (x.hi < 0), (x.lo == 0) & (x.hi == 0)
    return NodeBox(always.astype(np.float64), (~never).astype(np.float64))


def _select(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    chosen, x, y = operands
    first, second = chosen.lo > 0, chosen.hi <= 0
    lo = np.where(first, x.lo, np.where(second, y.lo, np.minimum(x.lo, y.lo)))
    return NodeBox(lo, np.where(first, x.hi, np.where(second, y.hi, np.maximum(x.hi, y.hi))))


def _difference(block: ProgramBlock, operands: Sequence[NodeBox]) -> NodeBox:
    """Bound relu(z + d) - relu(z) by 0 and d, and by the boxes of both terms."""
    z, d = operands
    other = NodeBox(down(z.lo + d.lo), up(z.hi + d.hi))
    lo = np.maximum(np.minimum(d.lo, 0), down(np.maximum(other.lo, 0) - np.maximum(z.hi, 0)))
    hi = np.minimum(np.maximum(d.hi, 0), up(np.maximum(other.hi, 0) - np.maximum(z.lo, 0)))
    both = (z.lo >= 0) & (other.lo >= 0)
    return NodeBox(np.where(both, d.lo, lo), np.where(both, d.hi, hi))


KINDS: Mapping[str, Interval] = {
    "linear": _linear,
    "relu": _steps(lambda x: np.maximum(x, 0.0)),
    "difference": _difference,
    "factor": _factor,
    "mul": _mul,
    "power": _power,
    "power-of": _power_of,
    "sigmoid": _monotone(special.expit, 0.0, 1.0),
    "tanh": _monotone(np.tanh, -1.0, 1.0),
    "exp": _monotone(np.exp, 0.0),
    "erf": _monotone(special.erf, -1.0, 1.0),
    "log": _logarithm,
    "sqrt": _rooted,
    "reciprocal": _reciprocal,
    "share": _share,
    "floor": _steps(np.floor),
    "ceil": _steps(np.ceil),
    "truncate": _steps(np.trunc),
    "positive": _steps(lambda x: (x > 0).astype(np.float64)),
    "zero": _zero,
    "select": _select,
}


# --- kinds: planes --------------------------------------------------------------------------------


def _planes(
    block: ProgramBlock, operands: Sequence[NodeBox], ends: NodeBox
) -> tuple[Plane | None, Plane | None]:
    """Return linear lower and upper bounds of a block; constants for kinds without a rule."""
    none = np.zeros_like(ends.lo)
    flat = tuple(none for _ in block.operands)
    below, above = Plane(flat, ends.lo), Plane(flat, ends.hi)
    match block.kind:
        case "linear":
            return None, None
        case "relu":
            return _relu_planes(operands[0])
        case "difference":
            return _difference_planes(operands, ends)
        case "factor":
            return _factor_planes(block, operands[0])
        case "mul":
            return _product_planes(*operands)
        case "select":
            return _select_planes(operands, ends)
        case "power" if block.value == 2:
            return _square_planes(operands[0], ends)
    return below, above


def _line(slope: Array, x: Array, y: Array) -> Array:
    """Return y - slope x, rounded up by more than the rounding errors of its uses."""
    size = np.abs(slope * x) + np.abs(y)
    return y - slope * x + 4 * U * size + _TINY


def _relu_planes(x: NodeBox) -> tuple[Plane, Plane]:
    on, off = x.lo >= 0, x.hi <= 0
    zero = np.zeros_like(x.lo)
    slope = np.where(on, 1.0, np.where(off, 0.0, x.hi / (x.hi - x.lo)))
    slope = np.where(np.isfinite(slope), slope, 0.0)
    # a line at or above both ends is above the convex function
    offset = np.maximum(_line(slope, x.lo, zero), _line(slope, x.hi, x.hi))
    above = Plane((slope,), np.where(on | off, 0.0, offset))
    steep = np.where(on, 1.0, np.where(off, 0.0, (x.hi > -x.lo).astype(np.float64)))
    return Plane((steep,), zero), above


def _difference_planes(operands: Sequence[NodeBox], ends: NodeBox) -> tuple[Plane, Plane]:
    """Return planes below min(d, 0) and above max(d, 0), which enclose relu(z + d) - relu(z)."""
    z, d = operands
    other_lo, other_hi = down(z.lo + d.lo), up(z.hi + d.hi)
    on, off = (z.lo >= 0) & (other_lo >= 0), (z.hi <= 0) & (other_hi <= 0)
    known, none = on | off, np.zeros_like(d.lo)
    _, above = _relu_planes(d)
    _, turned = _relu_planes(NodeBox(-d.hi, -d.lo))  # max(-d, 0) <= s (-d) + t
    same = on.astype(np.float64)
    high, low = (np.where(known, same, p.slopes[0]) for p in (above, turned))
    top = Plane((none, high), np.where(known, 0.0, above.offset))
    bottom = Plane((none, low), np.where(known, 0.0, -turned.offset))
    return bottom, top


def _factor_planes(block: ProgramBlock, x: NodeBox) -> tuple[Plane, Plane]:
    low, high = factor_ends(block.value)
    slope = np.broadcast_to(low / 2 + high / 2, x.lo.shape)
    wide = (high - low)[None] * x.mag * 1.001 + _TINY
    return Plane((slope,), -wide), Plane((slope,), wide)


def _product_planes(x: NodeBox, y: NodeBox) -> tuple[Plane, Plane]:
    """Return the McCormick planes that are tighter at the midpoint."""
    below = [_corner_plane(x.lo, y.lo, -1.0), _corner_plane(x.hi, y.hi, -1.0)]
    above = [_corner_plane(x.lo, y.hi, 1.0), _corner_plane(x.hi, y.lo, 1.0)]
    mx, my = (x.lo + x.hi) / 2, (y.lo + y.hi) / 2

    def best(planes: list[Plane], sign: float) -> Plane:
        values = [sign * (p.slopes[0] * mx + p.slopes[1] * my + p.offset) for p in planes]
        pick = values[0] <= values[1]
        one, two = planes
        slopes = tuple(np.where(pick, a, b) for a, b in zip(one.slopes, two.slopes, strict=True))
        return Plane(slopes, np.where(pick, one.offset, two.offset))

    return best(below, -1.0), best(above, 1.0)


def _corner_plane(a: Array, b: Array, sign: float) -> Plane:
    """Return the plane b x + a y - a b, moved outward by its rounding error."""
    away = sign * (4 * U * np.abs(a * b) + _TINY)
    return Plane((b, a), -a * b + away)


def _square_planes(x: NodeBox, ends: NodeBox) -> tuple[Plane, Plane]:
    slope = x.lo + x.hi
    offset = np.maximum(_line(slope, x.lo, up(x.lo**2)), _line(slope, x.hi, up(x.hi**2)))
    middle = x.lo / 2 + x.hi / 2
    tangent = 2 * middle  # x^2 >= 2 m x - m^2
    low = -(middle**2) * (1 + 4 * U) - _TINY
    return Plane((tangent,), low), Plane((slope,), offset)


def _select_planes(operands: Sequence[NodeBox], ends: NodeBox) -> tuple[Plane, Plane]:
    chosen = operands[0]
    first, second = chosen.lo > 0, chosen.hi <= 0
    none, known = np.zeros_like(ends.lo), first | second
    slopes = (none, first.astype(np.float64), (~first & second).astype(np.float64))
    return (
        Plane(slopes, np.where(known, 0.0, ends.lo)),
        Plane(slopes, np.where(known, 0.0, ends.hi)),
    )
