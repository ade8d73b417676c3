"""docs/relational-interval.md a third time, in ball arithmetic: what the formulas say, no more.

Written from that page alone, for tests. Kernels that quantise activations are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flint import arb

from tests.support.ball import numbers
from tests.support.ball.numbers import Balls, balls, each, larger, least, most, size, smaller, total
from tests.support.ball.runs import FORMATS

Pair = tuple["Box", "Box"]
# What a kernel stores for a key: as a parameter, and as the weight of a linear.
Stored = tuple[Callable[[str], Any], Callable[[str], Any]]
FINE = 24


@dataclass(frozen=True)
class Box:
    """Lower and upper ends, arrays of balls of one shape."""

    lo: Balls
    hi: Balls

    def map(self, move: Callable[[Balls], Balls]) -> Box:
        return Box(move(self.lo), move(self.hi))

    @property
    def mag(self) -> Balls:
        return larger(size(self.lo), size(self.hi))

    @property
    def middle(self) -> Balls:
        return np.asarray((self.lo + self.hi) / 2, dtype=object)

    @property
    def radius(self) -> Balls:
        return np.asarray((self.hi - self.lo) / 2, dtype=object)

    def __add__(self, other: Box) -> Box:
        return Box(self.lo + other.lo, self.hi + other.hi)

    def __sub__(self, other: Box) -> Box:
        return Box(self.lo - other.hi, self.hi - other.lo)

    def __neg__(self) -> Box:
        return Box(-self.hi, -self.lo)

    def __mul__(self, other: Box) -> Box:
        products = [a * b for a in (self.lo, self.hi) for b in (other.lo, other.hi)]
        lo, hi = products[0], products[0]
        for product in products[1:]:
            lo, hi = smaller(lo, product), larger(hi, product)
        return Box(lo, hi)

    def __matmul__(self, other: Box) -> Box:
        a, b = self.middle, other.middle
        spread = size(a) @ other.radius + self.radius @ size(b) + self.radius @ other.radius
        return around(a @ b, spread)

    def times(self, factor: Any) -> Box:
        return self * known(factor)

    def meet(self, other: Box) -> Box:
        return Box(larger(self.lo, other.lo), smaller(self.hi, other.hi))

    def join(self, other: Box) -> Box:
        return Box(smaller(self.lo, other.lo), larger(self.hi, other.hi))

    def widen(self, radius: Balls) -> Box:
        return Box(self.lo - radius, self.hi + radius)

    @property
    def turned(self) -> Box:
        return self.map(lambda v: np.swapaxes(v, -1, -2))


def around(centre: Balls, radius: Balls) -> Box:
    return Box(centre - radius, centre + radius)


def known(values: Any) -> Box:
    exact = balls(values)
    return Box(exact, exact)


@dataclass(frozen=True)
class State:
    """T, I and D of a node."""

    t: Box
    i: Box
    d: Box

    @property
    def middle(self) -> Box:
        half = balls(0.5)
        return (self.t + self.d.times(half)).meet((self.t + self.i).times(half))


@dataclass(frozen=True)
class Softmax:
    """T*, I*, D* of a softmax, the total variation of its rows, the rounding of both kernels."""

    star: State
    variation: Balls
    rounding: tuple[Balls, Balls]
    allowed: np.ndarray

    @property
    def stored(self) -> State:
        t, i = self.rounding
        return State(self.star.t.widen(t), self.star.i.widen(i), self.star.d.widen(t + i))


def reduced(t: Box, i: Box, d: Box) -> State:
    d = d.meet(i - t)
    i = i.meet(t + d)
    return State(t.meet(i - d), i, d)


@dataclass(frozen=True)
class Kernel:
    """The constants of one numerics record."""

    record: Any

    def u(self, form: str) -> arb:
        return numbers.power(-FORMATS[form][0])

    def eta(self, form: str) -> arb:
        return numbers.power(FORMATS[form][1] - FORMATS[form][0])

    @property
    def compute(self) -> str:
        return str(self.record["compute"])

    @property
    def accumulate(self) -> str:
        return str(self.record["accumulate"])

    @property
    def inner(self) -> str:
        return "float64" if self.compute == "float64" else "float32"

    @property
    def u_f(self) -> arb:
        return self.u(self.inner)

    @property
    def eta_f(self) -> arb:
        return numbers.power(-1074 if self.inner == "float64" else -149)

    @property
    def coarse(self) -> bool:
        return FORMATS[self.compute][0] < FINE

    @property
    def fused(self) -> bool:
        return bool(self.record["attention"]["style"] == "fused")

    def target(self, role: str) -> str:
        return str(self.record["attention"]["scores"] if role == "scores" else self.compute)

    def tiles(self, n: int) -> int:
        return -(-n // int(self.record["attention"]["tile"])) if self.fused else 1

    def stored(self, form: str, y: Box, error: Balls, inner: str) -> Pair:
        """Return the stored value and its error (section 2)."""
        precision, lowest = FORMATS[form]
        v = y.widen(error)
        u, eta = self.cast(form)
        if self.free:
            cast = u * v.mag + eta
            value = self._shrunk(v, u, eta) if self.inward else v.widen(cast)
            return value, self._off(v, cast).widen(error)
        if precision >= max(FINE, FORMATS[inner][0]):
            return v, around(balls(np.zeros(v.lo.shape)), error)
        step = numbers.cut if self.inward else numbers.nearest
        q = v.map(lambda x: each(lambda z: step(z, precision, lowest), x))
        free = self._off(v, larger(u * v.mag, eta))
        same = each(lambda a, b: bool(a == b), q.lo, q.hi).astype(bool)
        wrong = Box(np.where(same, q.lo - v.hi, free.lo), np.where(same, q.hi - v.lo, free.hi))
        return q, wrong.widen(error)

    @property
    def free(self) -> bool:
        return str(self.record["casts"]).startswith("any")

    @property
    def inward(self) -> bool:
        return str(self.record["casts"]).endswith("toward_zero")

    def cast(self, form: str) -> tuple[arb, arb]:
        """Return u and η of one cast: twice that of a rounding to nearest where it is directed."""
        times = 1 if self.record["casts"] in ("any", "nearest") else 2
        return times * self.u(form), times * self.eta(form)

    def held(self, value: arb) -> arb:
        """Return a constant as the kernel stores it."""
        inward = self.record["weights"].get("rounding") == "toward_zero"
        return (numbers.cut if inward else numbers.nearest)(value, *FORMATS[self.compute])

    def _off(self, v: Box, most_of: Balls) -> Box:
        if not self.inward:
            return Box(-most_of, most_of)
        zero = balls(np.zeros(v.lo.shape))
        positive = each(lambda x: bool(x > 0), v.hi).astype(bool)
        negative = each(lambda x: bool(x < 0), v.lo).astype(bool)
        return Box(np.where(positive, -most_of, zero), np.where(negative, most_of, zero))

    def _shrunk(self, v: Box, u: arb, eta: arb) -> Box:
        def less(z: arb) -> arb:
            return (abs(z) * (1 - u) - eta).max(numbers.ZERO) * z.sgn()

        low = each(lambda z: less(z) if z > 0 else z, v.lo)
        return Box(low, each(lambda z: less(z) if z < 0 else z, v.hi))

    def accumulated(self, magnitudes: Balls, result: Balls, k: int, j: int) -> Balls:
        """Return A_k,j(S, Y)."""
        u, eta = self.u(self.accumulate), self.eta(self.accumulate)
        lost = u * (k * (magnitudes + result) / 2 + j * magnitudes)
        return np.asarray(lost / (1 - (k + j) * u) + (k + j) * eta, dtype=object)

    def flushed(self, a: Balls, b: Balls) -> Any:
        if not self.coarse:
            return numbers.ZERO
        sums = total(a) + total(b, -2)
        return numbers.power(-126) * (sums + 2 * a.shape[-1] + 4)


def gamma(count: int, u: arb) -> arb:
    return count * u / (1 - count * u)


@dataclass
class Page:
    """The states of a block's nodes, as the page says."""

    graph: Any
    kernels: tuple[Kernel, Kernel]
    parameters: tuple[Stored, Stored]
    centre: Any
    radius: float
    states: dict[str, Any] = field(default_factory=dict)

    def derive(self) -> State:
        """Return the state of the output."""
        self.keys = {n["name"]: n["attrs"]["key"] for n in self.graph.nodes if n["op"] == "param"}
        for node in self.graph.nodes:
            self.states[node["name"]] = getattr(self, f"_{node['op']}")(node)
        return self.state(self.graph.output)

    def state(self, name: str) -> State:
        found = self.states[name]
        return found.stored if isinstance(found, Softmax) else found

    def read(self, node: Any, place: int) -> State:
        return self.state(node["inputs"][place])

    def settle(self, node: Any, y: tuple[Box, Box, Box], errors: Any, sums: bool = False) -> State:
        sides = []
        for kernel, box, error in zip(self.kernels, y, errors, strict=False):
            inner = kernel.accumulate if sums else kernel.inner
            sides.append(kernel.stored(kernel.target(node["role"]), box, error, inner))
        (t, wrong_t), (i, wrong_i) = sides
        return reduced(t, i, y[2] + (wrong_i - wrong_t))

    # leaves and moves

    def _input(self, node: Any) -> State:
        x = around(balls(self.centre), balls(np.full(self.centre.shape, self.radius)))
        none = balls(np.zeros(self.centre.shape))
        sides = [
            kernel.stored(kernel.compute, x, none, "float32") if kernel.coarse else (x, known(none))
            for kernel in self.kernels
        ]
        (t, wrong_t), (i, wrong_i) = sides
        return reduced(t, i, wrong_i - wrong_t)

    def _param(self, node: Any) -> State:
        t, i = (known(plain(node["attrs"]["key"])) for plain, _ in self.parameters)
        return State(t, i, i - t)

    def _constant(self, node: Any) -> Any:
        value = self.graph.constants[node["attrs"]["key"]]
        if value.dtype == bool:
            return value
        sides = [known(each(lambda x, k=k: k.held(x), balls(value))) for k in self.kernels]
        return State(sides[0], sides[1], sides[1] - sides[0])

    def _moved(self, node: Any, move: Callable[[Balls], Balls]) -> State:
        x = self.read(node, 0)
        return State(x.t.map(move), x.i.map(move), x.d.map(move))

    def _reshape(self, node: Any) -> State:
        return self._moved(node, lambda v: v.reshape(node["attrs"]["shape"]))

    def _expand(self, node: Any) -> State:
        return self._moved(node, lambda v: np.broadcast_to(v, node["attrs"]["shape"]))

    def _permute(self, node: Any) -> State:
        return self._moved(node, lambda v: np.transpose(v, node["attrs"]["dims"]))

    def _slice(self, node: Any) -> State:
        attrs = node["attrs"]

        def move(v: Balls) -> Balls:
            index: list[Any] = [slice(None)] * v.ndim
            index[attrs["dim"]] = slice(attrs["start"], attrs["stop"], attrs["step"])
            return np.asarray(v[tuple(index)], dtype=object)

        return self._moved(node, move)

    def _concat(self, node: Any) -> State:
        states = [self.state(name) for name in node["inputs"]]

        def joined(part: str) -> Box:
            boxes = [getattr(s, part) for s in states]
            return Box(
                *(
                    np.concatenate([getattr(b, end) for b in boxes], axis=node["attrs"]["dim"])
                    for end in ("lo", "hi")
                )
            )

        return State(joined("t"), joined("i"), joined("d"))

    def _neg(self, node: Any) -> State:
        x = self.read(node, 0)
        return State(-x.t, -x.i, -x.d)

    # section 3

    def _linear(self, node: Any) -> State:
        x = self.read(node, 0)
        key = self.keys[node["inputs"][1]]
        w = [known(linear(key)).turned for _, linear in self.parameters]
        biased = len(node["inputs"]) == 3
        b = self.read(node, 2) if biased else None
        products = x.t @ w[0], x.i @ w[1]
        d = x.d @ w[1] + x.t @ (w[1] - w[0])
        y = products
        if b is not None:
            y, d = (products[0] + b.t, products[1] + b.i), d + (b.i - b.t)
        errors = []
        for kernel, side, weight, product, result, bias in zip(
            self.kernels, (x.t, x.i), w, products, y, (b.t, b.i) if b else (None, None), strict=True
        ):
            n = side.lo.shape[-1]
            terms = side.mag @ weight.mag + (bias.mag if bias is not None else 0)
            error = kernel.accumulated(terms, result.mag, n, 2)
            error = error + kernel.flushed(side.mag, weight.mag)
            if biased and kernel.free and kernel.coarse:
                u, eta = kernel.cast(kernel.compute)
                cast = u * (product.mag + error) + eta
                error = error + cast
            errors.append(error)
        return self.settle(node, (*y, d), errors, sums=True)

    def _matmul(self, node: Any) -> State:
        before = self.states[node["inputs"][0]]
        if node["role"] == "context" and isinstance(before, Softmax):
            return self._context(node, before, self.read(node, 1))
        a, b = self.read(node, 0), self.read(node, 1)
        n = a.t.lo.shape[-1]
        y = a.t @ b.t, a.i @ b.i
        d = a.middle @ b.d + a.d @ b.middle
        errors = []
        for kernel, left, right, result in zip(
            self.kernels, (a.t, a.i), (b.t, b.i), y, strict=True
        ):
            j = 6 if kernel.fused and node["role"] == "scores" else 2
            error = kernel.accumulated(left.mag @ right.mag, result.mag, n, j)
            errors.append(error + kernel.flushed(left.mag, right.mag))
        return self.settle(node, (*y, d), errors, sums=True)

    # section 4

    def _sum(self, node: Any, sign: int) -> State:
        a, b = self.read(node, 0), self.read(node, 1)
        y = [
            getattr(a, part) + getattr(b, part) if sign > 0 else getattr(a, part) - getattr(b, part)
            for part in ("t", "i", "d")
        ]
        errors = [k.u_f * box.mag for k, box in zip(self.kernels, y, strict=False)]
        return self.settle(node, (y[0], y[1], y[2]), errors)

    def _add(self, node: Any) -> State:
        return self._sum(node, 1)

    def _sub(self, node: Any) -> State:
        return self._sum(node, -1)

    def _mul(self, node: Any) -> State:
        a, b = self.read(node, 0), self.read(node, 1)
        y = a.t * b.t, a.i * b.i
        d = a.middle * b.d + a.d * b.middle
        errors = [k.u_f * box.mag + k.eta_f for k, box in zip(self.kernels, y, strict=True)]
        return self.settle(node, (*y, d), errors)

    def _scaled(self, node: Any, factor: arb) -> State:
        x = self.read(node, 0)
        y = x.t.times(factor), x.i.times(factor)
        errors = [3 * k.u_f * box.mag + k.eta_f for k, box in zip(self.kernels, y, strict=True)]
        return self.settle(node, (*y, x.d.times(factor)), errors)

    def _scale(self, node: Any) -> State:
        return self._scaled(node, arb(float.fromhex(node["attrs"]["factor"])))

    def _divide(self, node: Any) -> State:
        return self._scaled(node, 1 / arb(float.fromhex(node["attrs"]["divisor"])))

    def _shift(self, node: Any) -> State:
        x, by = self.read(node, 0), arb(float.fromhex(node["attrs"]["offset"]))
        y = x.t + known(by), x.i + known(by)
        errors = [
            k.u_f * box.mag + k.u_f * (1 + k.u_f) * abs(by)
            for k, box in zip(self.kernels, y, strict=True)
        ]
        return self.settle(node, (*y, x.d), errors)

    def _relu(self, node: Any) -> State:
        x, zero = self.read(node, 0), numbers.ZERO
        on = each(lambda a, b: a >= 0 and b >= 0, x.t.lo, x.i.lo).astype(bool)
        off = each(lambda a, b: a <= 0 and b <= 0, x.t.hi, x.i.hi).astype(bool)
        none = balls(np.zeros(on.shape))
        open_ = Box(smaller(x.d.lo, zero), larger(x.d.hi, zero))
        d = Box(
            np.where(on, x.d.lo, np.where(off, none, open_.lo)),
            np.where(on, x.d.hi, np.where(off, none, open_.hi)),
        )
        t, i = (box.map(lambda v: larger(v, zero)) for box in (x.t, x.i))
        return reduced(t, i, d)

    def _function(self, node: Any, value: Any, slope: Any, valley: Any, turns: Any) -> State:
        x = self.read(node, 0)
        y = _range(value, x.t, valley), _range(value, x.i, valley)
        d = _range(slope, x.t.join(x.i), turns) * x.d
        by = [x.t, x.i] if node["op"] == "gelu" else y
        errors = [
            16 * k.u_f * box.mag + numbers.power(-100)
            for k, box in zip(self.kernels, by, strict=True)
        ]
        return self.settle(node, (*y, d), errors)

    def _gelu(self, node: Any) -> State:
        root = numbers.TWO.sqrt()
        return self._function(node, numbers.gelu, gelu_slope, [GELU_VALLEY], [-root, root])

    def _silu(self, node: Any) -> State:
        turns = [-SILU_TURN, SILU_TURN]
        return self._function(node, numbers.silu, silu_slope, [SILU_VALLEY], turns)

    def _tanh(self, node: Any) -> State:
        return self._function(node, numbers.tanh, tanh_slope, [], [numbers.ZERO])

    def _rope(self, node: Any) -> State:
        x, c, s = (self.read(node, place) for place in range(3))
        r = State(_turned(x.t), _turned(x.i), _turned(x.d))
        y = x.t * c.t + r.t * s.t, x.i * c.i + r.i * s.i
        d = x.d * c.i + x.t * (c.i - c.t) + r.d * s.i + r.t * (s.i - s.t)
        errors = []
        for kernel, side, other, cos, sin in zip(
            self.kernels, (x.t, x.i), (r.t, r.i), (c.t, c.i), (s.t, s.i), strict=True
        ):
            p = side.mag * cos.mag + other.mag * sin.mag
            error = gamma(4, kernel.u_f) * p + 2 * kernel.eta_f
            if kernel.coarse:
                u, eta = kernel.cast(kernel.compute)
                error = error + u * (1 + numbers.power(-10)) * p + 2 * eta
            errors.append(error)
        return self.settle(node, (*y, d), errors)

    # section 5

    def _softmax(self, node: Any) -> Softmax:
        s = self.read(node, 0)
        allowed = np.ones(s.t.lo.shape, dtype=bool)
        if len(node["inputs"]) > 1:
            allowed = np.broadcast_to(self.states[node["inputs"][1]], allowed.shape)
        zero = balls(np.zeros(allowed.shape))
        ends = {part: (zero.copy(), zero.copy()) for part in "tid"}
        variation = np.full((*allowed.shape[:-1], 1), numbers.ZERO, dtype=object)
        by_t, by_i = zero.copy(), zero.copy()
        for row in np.ndindex(*allowed.shape[:-1]):
            columns = np.flatnonzero(allowed[row])
            where: Any = (*row, columns)
            t, i, d = (Box(b.lo[where], b.hi[where]) for b in (s.t, s.i, s.d))
            p_t, p_i = _softmax_range(t), _softmax_range(i)
            star = reduced(p_t, p_i, _softmax_drift(p_t, d))
            spread = max_of(d.hi) - min_of(d.lo)
            half = star.d.mag.sum() / 2
            variation[(*row, 0)] = (spread / 4).tanh().min(half)
            for part, box in (("t", star.t), ("i", star.i), ("d", star.d)):
                np.put_along_axis(ends[part][0][row], columns, box.lo, 0)
                np.put_along_axis(ends[part][1][row], columns, box.hi, 0)
            n = int(s.t.lo.shape[-1])
            by_t[where] = _softmax_rounding(self.kernels[0], t, star.t.hi, n)
            by_i[where] = _softmax_rounding(self.kernels[1], i, star.i.hi, n)
        star = State(Box(*ends["t"]), Box(*ends["i"]), Box(*ends["d"]))
        return Softmax(star, variation, (by_t, by_i), allowed)

    def _context(self, node: Any, p: Softmax, v: State) -> State:
        zero = numbers.ZERO
        hull_d, hull_t, hull_i = (_hull(b, p.allowed) for b in (v.d, v.t, v.i))
        carried = (p.star.i @ v.d).meet(hull_d)
        moved = around(balls(np.zeros(hull_t.lo.shape)), p.variation * (hull_t.hi - hull_t.lo))
        low, high = least(v.t.lo, -2), most(v.t.hi, -2)
        for centre in ((low + high) / 2, total(v.t.middle, -2) / v.t.lo.shape[-2]):
            moved = moved.meet(p.star.d @ (v.t - known(np.broadcast_to(centre, v.t.lo.shape))))
        y = (p.star.t @ v.t).meet(hull_t), (p.star.i @ v.i).meet(hull_i)
        errors = []
        for kernel, side, b, values, result in zip(
            self.kernels, (p.star.t, p.star.i), p.rounding, (v.t, v.i), y, strict=True
        ):
            n = side.lo.shape[-1]
            wrong = b @ values.mag
            weights = side.hi + b
            sums = kernel.accumulated(
                weights @ values.mag, result.mag + wrong, n + 2 * kernel.tiles(n) + 4, 2
            )
            errors.append(wrong + sums + kernel.flushed(weights, values.mag) + zero)
        return self.settle(node, (*y, carried + moved), errors, sums=True)

    # section 6

    def _rms_norm(self, node: Any) -> State:
        return self._norm(node, False)

    def _layer_norm(self, node: Any) -> State:
        return self._norm(node, True)

    def _norm(self, node: Any, centred: bool) -> State:
        x, eps = self.read(node, 0), arb(float.fromhex(node["attrs"]["eps"]))
        n = x.t.lo.shape[-1]
        one, none = known(np.ones(n)), known(np.zeros(n))
        g = self.read(node, 1) if len(node["inputs"]) > 1 else State(one, one, none)
        b = self.read(node, 2) if len(node["inputs"]) > 2 else State(none, none, none)
        t, i = _Side.of(x.t, eps, centred), _Side.of(x.i, eps, centred)
        d_c = _centred(x.d) if centred else x.d
        twice = (t.c + t.c + d_c).meet(t.c + i.c)
        terms = d_c * twice
        mean = Box(total(terms.lo) / n, total(terms.hi) / n)
        lengths = [each(lambda z: z.sqrt(), total(box.mag**2)) for box in (d_c, twice)]
        product = lengths[0] * lengths[1] / n
        d_v = mean.meet(around(product * 0, product)).meet(i.v - t.v)
        omega = Box(_omega(t.r.lo, i.r.lo), _omega(t.r.hi, i.r.hi))
        d_r = (-(d_v * omega)).meet(i.r - t.r)
        d_y = (d_c * i.r + t.c * d_r).meet(i.y - t.y)
        y = t.y * g.t + b.t, i.y * g.i + b.i
        d = g.i * d_y + (g.i - g.t) * t.y + (b.i - b.t)
        errors = [
            _norm_error(kernel, side, at, gain.mag, bias.mag, centred)
            for kernel, side, at, gain, bias in zip(
                self.kernels, (x.t, x.i), (t, i), (g.t, g.i), (b.t, b.i), strict=True
            )
        ]
        return self.settle(node, (*y, d), errors)


def max_of(values: Balls) -> arb:
    found: arb = most(values).item()
    return found


def min_of(values: Balls) -> arb:
    found: arb = least(values).item()
    return found


def normal(x: arb) -> arb:
    return (-x / numbers.TWO.sqrt()).erfc() / 2


def gelu_slope(x: arb) -> arb:
    return normal(x) + x * (-x * x / 2).exp() / (2 * arb.pi()).sqrt()


def silu_slope(x: arb) -> arb:
    s = 1 / (1 + (-x).exp())
    return s + x * s * (1 - s)


def tanh_slope(x: arb) -> arb:
    return 1 - x.tanh() ** 2


def _root(function: Callable[[arb], arb], lo: float, hi: float) -> arb:
    """Return where a function changes its sign, by bisection."""
    a, b = arb(lo), arb(hi)
    for _ in range(numbers.PRECISION - 10):
        middle = ((a + b) / 2).mid()
        same = (function(middle) > 0) == (function(a) > 0)
        a, b = (middle, b) if same else (a, middle)
    return a


def _silu_bend(x: arb) -> arb:
    s = 1 / (1 + (-x).exp())
    return 2 + x * (1 - 2 * s)


GELU_VALLEY = _root(gelu_slope, -1.0, -0.5)
SILU_VALLEY = _root(silu_slope, -2.0, -1.0)
SILU_TURN = _root(_silu_bend, 1.0, 4.0)


def _range(function: Callable[[arb], arb], x: Box, turns: list[arb]) -> Box:
    """Return the range on a box of a function that is monotone between its turns."""
    low, high = each(function, x.lo), each(function, x.hi)
    lo, hi = smaller(low, high), larger(low, high)
    for turn in turns:
        at = function(turn)
        inside = each(lambda a, b, t=turn: a <= t and t <= b, x.lo, x.hi).astype(bool)
        lo, hi = np.where(inside, smaller(lo, at), lo), np.where(inside, larger(hi, at), hi)
    return Box(lo, hi)


def _turned(x: Box) -> Box:
    h = x.lo.shape[-1] // 2
    return Box(
        np.concatenate([-x.hi[..., h:], x.lo[..., :h]], axis=-1),
        np.concatenate([-x.lo[..., h:], x.hi[..., :h]], axis=-1),
    )


def _softmax_range(s: Box) -> Box:
    n = s.lo.size
    lo, hi = np.empty(n, dtype=object), np.empty(n, dtype=object)
    for k in range(n):
        others = [j for j in range(n) if j != k]
        lo[k] = 1 / (1 + sum(((s.hi[j] - s.lo[k]).exp() for j in others), numbers.ZERO))
        hi[k] = 1 / (1 + sum(((s.lo[j] - s.hi[k]).exp() for j in others), numbers.ZERO))
    return Box(lo, hi)


def _softmax_drift(p: Box, d: Box) -> Box:
    n = p.lo.size
    lo, hi = balls(np.zeros(n)), balls(np.zeros(n))
    if n == 1:
        return Box(lo, hi)
    for k in range(n):
        others = [j for j in range(n) if j != k]
        t_lo = d.lo[k] - max_of(d.hi[others])
        t_hi = d.hi[k] - min_of(d.lo[others])
        lo[k] = _extreme(p.lo[k], p.hi[k], t_lo, -1)
        hi[k] = _extreme(p.lo[k], p.hi[k], t_hi, 1)
    return Box(lo, hi)


def _extreme(low: arb, high: arb, t: arb, sign: int) -> arb:
    def f(p: arb) -> arb:
        k = t.expm1()
        return p * (1 - p) * k / (1 + p * k)

    ends = f(low).max(f(high)) if sign > 0 else f(low).min(f(high))
    steepest = 1 / (1 + (t / 2).exp())
    if sign * t >= 0 and low <= steepest and steepest <= high:
        return (t / 4).tanh()
    return ends


def _softmax_rounding(kernel: Kernel, s: Box, high: Balls, n: int) -> Balls:
    form = kernel.record["attention"]["probabilities"]
    u, (u_p, eta_p) = kernel.u_f, kernel.cast(form)
    spread = max_of(s.hi) - min_of(s.lo)
    a = u * (spread + 2 * max_of(s.mag)) if kernel.fused else u * spread
    epsilon = 2 * int(kernel.record["attention"]["exp_ulps"]) * u
    once = u / (1 - u)
    total_ = 2 * kernel.tiles(n) * (a + epsilon / (1 - epsilon) + once) + (n + 8) * once
    if kernel.fused and FORMATS[form][0] < FINE:
        lost = (1 + u_p) * n * eta_p
        total_ = total_ + u_p / (1 - u_p) + lost / (1 - lost)
    theta, zeta = total_.expm1(), numbers.power(-120)
    return np.asarray(theta * high + zeta + u_p * (high * (1 + theta) + zeta) + eta_p, dtype=object)


def _hull(v: Box, allowed: np.ndarray) -> Box:
    shape = (*np.broadcast_shapes(allowed.shape[:-2], v.lo.shape[:-2]), allowed.shape[-2])
    lo = np.empty((*shape, v.lo.shape[-1]), dtype=object)
    hi = np.empty(lo.shape, dtype=object)
    columns = np.broadcast_to(allowed, (*shape, allowed.shape[-1]))
    low = np.broadcast_to(v.lo, (*shape[:-1], *v.lo.shape[-2:]))
    high = np.broadcast_to(v.hi, low.shape)
    for index in np.ndindex(*shape):
        some = np.flatnonzero(columns[index])
        lo[index] = least(low[index[:-1]][some], 0)[0]
        hi[index] = most(high[index[:-1]][some], 0)[0]
    return Box(lo, hi)


def _centred(x: Box) -> Box:
    n = x.lo.shape[-1]
    m, r = x.middle, x.radius
    share = r * (1 - arb(2) / n) + total(r) / n
    return around(m - total(m) / n, share)


def _omega(a: Balls, b: Balls) -> Balls:
    return np.asarray((a * b) ** 2 / (a + b), dtype=object)


@dataclass(frozen=True)
class _Side:
    c: Box
    v: Box
    r: Box
    y: Box

    @staticmethod
    def of(x: Box, eps: arb, centred: bool) -> _Side:
        n = x.lo.shape[-1]
        c = _centred(x) if centred else x
        zero = numbers.ZERO
        inner = larger(larger(c.lo, -c.hi), zero)
        low, high = inner**2, c.mag**2
        v = Box(total(low) / n + eps, total(high) / n + eps)
        r = Box(
            each(lambda z: 1 / z.sqrt(), v.hi),
            each(lambda z: 1 / z.sqrt(), v.lo),
        )
        cap = arb(n - 1 if centred else n).sqrt()
        top = smaller(_greatest(c.hi, low, high, n, eps), cap)
        bottom = larger(-_greatest(-c.lo, low, high, n, eps), -cap)
        return _Side(c, v, r, Box(bottom, top).meet(c * r))


def _greatest(h: Balls, low: Balls, high: Balls, n: int, eps: arb) -> Balls:
    def one(value: arb, rest_low: arb, rest_high: arb) -> arb:
        if value == 0:
            return numbers.ZERO
        rest = rest_low if value >= 0 else rest_high
        return value / ((value**2 + rest) / n + eps).sqrt()

    return each(one, h, total(low) - low, total(high) - high)


def _norm_error(
    kernel: Kernel, x: Box, at: _Side, gain: Balls, bias: Balls, centred: bool
) -> Balls:
    n, u, eta = x.lo.shape[-1], kernel.u_f, kernel.eta_f
    mean = total(x.mag) / n
    e_c: Any = numbers.ZERO
    theta: Any = gamma(n + 3, u) + 8 * u
    if centred:
        e_c = 4 * u * x.mag + gamma(n + 6, u) * mean + (n + 6) * eta
        kappa = 4 * gamma(n + 6, u) * (total(x.mag**2) / n) / at.v.lo
        theta = each(lambda z: (1 + 8 * u) / (1 - z).sqrt() - 1, kappa)
    theta = (1 + theta) * (1 + u) ** 2 - 1
    y = at.y.mag
    e_n = theta * y + e_c * at.r.hi * (1 + theta)
    if kernel.coarse:
        u_c, eta_c = kernel.cast(kernel.compute)
        e_n = e_n + u_c * (y + e_n) + eta_c
    tiny = eta * (1 + gain + 3 * most(x.mag))
    return np.asarray(e_n * gain + 3 * u * (y * gain + e_n * gain + bias) + tiny, dtype=object)
