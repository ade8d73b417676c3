"""A third implementation of docs/proofs/relational-interval.md, in ball arithmetic, for tests.

Written from that page alone. Kernels that quantise activations are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flint import arb

from tests.support.ball import numbers
from tests.support.ball.boxes import Box, Softmax, State, around, known, max_of, min_of, reduced
from tests.support.ball.curves import (
    GELU_TANH_TURN,
    GELU_TANH_VALLEY,
    GELU_VALLEY,
    SILU_TURN,
    SILU_VALLEY,
    gelu_slope,
    gelu_tanh_slope,
    range_of,
    silu_slope,
    tanh_slope,
)
from tests.support.ball.kernel import Kernel, gamma
from tests.support.ball.norms import Side, centred_box, norm_error, secant
from tests.support.ball.numbers import Balls, balls, each, larger, least, most, smaller, total
from tests.support.ball.readings import counted
from tests.support.ball.softmaxes import hull, softmax_drift, softmax_range, softmax_rounding

# What a kernel stores for a key: as a parameter, and as the weight of a linear.
Stored = tuple[Callable[[str], Any], Callable[[str], Any]]
# Largest distance of readings from the value that they are versions of, for both kernels.
Apart = tuple[Balls, Balls]
NOTHING = (numbers.ZERO, numbers.ZERO)


@dataclass
class Page:
    """The states of a block's nodes, by the formulas of the page."""

    graph: Any
    kernels: tuple[Kernel, Kernel]
    parameters: tuple[Stored, Stored]
    centre: Any
    radius: float
    states: dict[str, Any] = field(default_factory=dict)
    # h of both kernels
    apart: dict[str, Apart] = field(default_factory=dict)

    def derive(self) -> State:
        """Return the state of the output."""
        self.keys = {n["name"]: n["attrs"]["key"] for n in self.graph.nodes if n["op"] == "param"}
        self.readings = counted(self.graph)
        for node in self.graph.nodes:
            self.states[node["name"]] = getattr(self, f"_{node['op']}")(node)
        return self.state(self.graph.output)

    def state(self, name: str) -> State:
        found = self.states[name]
        return found.stored if isinstance(found, Softmax) else found

    def read(self, node: Any, place: int) -> State:
        return self.state(node["inputs"][place])

    def read_apart(self, node: Any, place: int) -> Apart:
        return self.apart[node["inputs"][place]]

    def settle(
        self,
        node: Any,
        y: tuple[Box, Box, Box],
        errors: Any,
        before: Any,
        sums: bool = False,
        added: tuple[Box, Box] | None = None,
    ) -> State:
        """Store a result.

        `before` is h' of both kernels; `added` is A of both, already contained in y.
        """
        sides, apart = [], []
        for kernel, box, error, carried in zip(self.kernels, y, errors, before, strict=False):
            inner = kernel.accumulate if sums else kernel.inner
            form = kernel.target(node["role"])
            sides.append(kernel.stored(form, box, error, inner))
            h = carried + kernel.rereading(form, box.widen(error)) + (0 if sums else error)
            apart.append(h if kernel.free and self.readings[node["name"]] > 1 else h * 0)
        self.apart[node["name"]] = (apart[0], apart[1])
        (t, wrong_t), (i, wrong_i) = sides
        if added is not None:
            wrong_t, wrong_i = wrong_t + added[0], wrong_i + added[1]
        return reduced(t, i, y[2] + (wrong_i - wrong_t))

    def _once(self, node: Any, state: State) -> State:
        """Return the state of a node with one reading."""
        none = balls(np.zeros(state.t.lo.shape))
        self.apart[node["name"]] = (none, none)
        return state

    # leaves and moves

    def _input(self, node: Any) -> State:
        x = around(balls(self.centre), balls(np.full(self.centre.shape, self.radius)))
        none = balls(np.zeros(self.centre.shape))
        sides = [
            kernel.stored(kernel.compute, x, none, "float32") if kernel.coarse else (x, known(none))
            for kernel in self.kernels
        ]
        (t, wrong_t), (i, wrong_i) = sides
        return self._once(node, reduced(t, i, wrong_i - wrong_t))

    def _param(self, node: Any) -> State:
        t, i = (known(plain(node["attrs"]["key"])) for plain, _ in self.parameters)
        return self._once(node, State(t, i, i - t))

    def _constant(self, node: Any) -> Any:
        value = self.graph.constants[node["attrs"]["key"]]
        if value.dtype == bool:
            return value
        sides = [known(each(lambda x, k=k: k.held(x), balls(value))) for k in self.kernels]
        return self._once(node, State(sides[0], sides[1], sides[1] - sides[0]))

    def _moved(self, node: Any, move: Callable[[Balls], Balls]) -> State:
        x, (h_t, h_i) = self.read(node, 0), self.read_apart(node, 0)
        self.apart[node["name"]] = (move(h_t), move(h_i))
        return State(x.t.map(move), x.i.map(move), x.d.map(move))

    def _view(self, node: Any) -> State:
        attrs, shape = node["attrs"], node["shape"]
        split = attrs["split"]

        def move(v: Balls) -> Balls:
            ranges = attrs.get("ranges", [(0, size, 1) for size in split])
            taken = v.reshape(split)[tuple(slice(*each) for each in ranges)]
            turned = taken.transpose(attrs.get("order", range(len(split))))
            found = np.broadcast_to(turned, attrs.get("sizes", turned.shape)).reshape(shape)
            return np.asarray(found, dtype=object)

        return self._moved(node, move)

    def _concat(self, node: Any) -> State:
        states = [self.state(name) for name in node["inputs"]]
        apart = [self.apart[name] for name in node["inputs"]]

        def end_to_end(values: list[Balls]) -> Balls:
            return np.concatenate(values, axis=node["attrs"]["dim"])

        def joined(part: str) -> Box:
            boxes = [getattr(s, part) for s in states]
            return Box(*(end_to_end([getattr(b, end) for b in boxes]) for end in ("lo", "hi")))

        self.apart[node["name"]] = (
            end_to_end([h for h, _ in apart]),
            end_to_end([h for _, h in apart]),
        )
        return State(joined("t"), joined("i"), joined("d"))

    def _neg(self, node: Any) -> State:
        x = self.read(node, 0)
        self.apart[node["name"]] = self.read_apart(node, 0)
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
        errors, before = [], []
        for kernel, side, weight, product, result, bias in zip(
            self.kernels, (x.t, x.i), w, products, y, (b.t, b.i) if b else (None, None), strict=True
        ):
            n = side.lo.shape[-1]
            terms = side.mag @ weight.mag + (bias.mag if bias is not None else 0)
            error = kernel.accumulated(terms, result.mag, n, 2)
            error = error + kernel.flushed(side.mag, weight.mag)
            cast: Any = numbers.ZERO
            if biased and kernel.free and kernel.coarse:
                u, eta = kernel.cast(kernel.compute)
                cast = u * (product.mag + error) + eta
                cast = cast * (1 + 2 * kernel.u(kernel.accumulate))
            errors.append(error + cast)
            before.append(cast)
        return self.settle(node, (*y, d), errors, before, sums=True)

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
        return self.settle(node, (*y, d), errors, NOTHING, sums=True)

    # section 4

    def _sum(self, node: Any, sign: int) -> State:
        a, b = self.read(node, 0), self.read(node, 1)
        y = [
            getattr(a, part) + getattr(b, part) if sign > 0 else getattr(a, part) - getattr(b, part)
            for part in ("t", "i", "d")
        ]
        errors = [k.u_f * box.mag for k, box in zip(self.kernels, y, strict=False)]
        apart = zip(self.read_apart(node, 0), self.read_apart(node, 1), strict=True)
        return self.settle(node, (y[0], y[1], y[2]), errors, [h + k for h, k in apart])

    def _add(self, node: Any) -> State:
        return self._sum(node, 1)

    def _sub(self, node: Any) -> State:
        return self._sum(node, -1)

    def _mul(self, node: Any) -> State:
        a, b = self.read(node, 0), self.read(node, 1)
        y = a.t * b.t, a.i * b.i
        d = a.middle * b.d + a.d * b.middle
        errors = [k.u_f * box.mag + k.eta_f for k, box in zip(self.kernels, y, strict=True)]
        (a_t, a_i), (b_t, b_i) = self.read_apart(node, 0), self.read_apart(node, 1)
        before = a_t * b.t.mag + b_t * a.t.mag, a_i * b.i.mag + b_i * a.i.mag
        return self.settle(node, (*y, d), errors, before)

    def _scaled(self, node: Any, factor: arb, admitted: list[Box]) -> State:
        """Multiply by a factor, where each kernel may use any value of `admitted` for it."""
        x = self.read(node, 0)
        added = x.t * (admitted[0] - known(factor)), x.i * (admitted[1] - known(factor))
        y = x.t.times(factor) + added[0], x.i.times(factor) + added[1]
        errors = [3 * k.u_f * box.mag + k.eta_f for k, box in zip(self.kernels, y, strict=True)]
        apart = zip(self.read_apart(node, 0), admitted, strict=True)
        before = [h * c.mag + a.mag for (h, c), a in zip(apart, added, strict=True)]
        return self.settle(node, (*y, x.d.times(factor)), errors, before, added=added)

    def _factors(self, node: Any, c: arb) -> list[Box]:
        if node["role"] == "scores":
            return [known(c), known(c)]
        return [k.taken_for(c, node["role"]) for k in self.kernels]

    def _scale(self, node: Any) -> State:
        factor = arb(float.fromhex(node["attrs"]["factor"]))
        return self._scaled(node, factor, self._factors(node, factor))

    def _divide(self, node: Any) -> State:
        divisor = arb(float.fromhex(node["attrs"]["divisor"]))
        inverses = [Box(1 / c.hi, 1 / c.lo) for c in self._factors(node, divisor)]
        return self._scaled(node, 1 / divisor, inverses)

    def _shift(self, node: Any) -> State:
        x, by = self.read(node, 0), arb(float.fromhex(node["attrs"]["offset"]))
        admitted = [k.taken_for(by, node["role"]) for k in self.kernels]
        added = admitted[0] - known(by), admitted[1] - known(by)
        y = x.t + known(by) + added[0], x.i + known(by) + added[1]
        errors = [
            k.u_f * box.mag + k.u_f * (1 + k.u_f) * abs(by)
            for k, box in zip(self.kernels, y, strict=True)
        ]
        apart = zip(self.read_apart(node, 0), added, strict=True)
        before = [h + a.mag for h, a in apart]
        return self.settle(node, (*y, x.d), errors, before, added=added)

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
        self.apart[node["name"]] = self.read_apart(node, 0)
        return reduced(t, i, d)

    def _function(self, node: Any, value: Any, slope: Any, valley: Any, turns: Any) -> State:
        x = self.read(node, 0)
        y = range_of(value, x.t, valley), range_of(value, x.i, valley)
        steep = range_of(slope, x.t.join(x.i), turns)
        by = [x.t, x.i] if node["op"] == "gelu" else y
        errors = [
            16 * k.u_f * box.mag + numbers.power(-100)
            for k, box in zip(self.kernels, by, strict=True)
        ]
        before = [steep.mag * h for h in self.read_apart(node, 0)]
        return self.settle(node, (*y, steep * x.d), errors, before)

    def _gelu(self, node: Any) -> State:
        if node["attrs"].get("approximate") == "tanh":
            turns = [-GELU_TANH_TURN, GELU_TANH_TURN]
            return self._function(
                node, numbers.gelu_tanh, gelu_tanh_slope, [GELU_TANH_VALLEY], turns
            )
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
                error = error + (1 + numbers.power(-10)) * (u * p + 2 * eta)
            errors.append(error)
        before = [
            h * cos.mag + _halves_exchanged(h) * sin.mag
            for h, cos, sin in zip(self.read_apart(node, 0), (c.t, c.i), (s.t, s.i), strict=True)
        ]
        return self.settle(node, (*y, d), errors, before)

    # section 5

    def _softmax(self, node: Any) -> Softmax:
        s, (h_t, h_i) = self.read(node, 0), self.read_apart(node, 0)
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
            p_t, p_i = softmax_range(t), softmax_range(i)
            star = reduced(p_t, p_i, softmax_drift(p_t, d))
            spread = max_of(d.hi) - min_of(d.lo)
            half = star.d.mag.sum() / 2
            variation[(*row, 0)] = (spread / 4).tanh().min(half)
            for part, box in (("t", star.t), ("i", star.i), ("d", star.d)):
                np.put_along_axis(ends[part][0][row], columns, box.lo, 0)
                np.put_along_axis(ends[part][1][row], columns, box.hi, 0)
            n = int(s.t.lo.shape[-1])
            formats = [kernel.target(node["role"]) for kernel in self.kernels]
            by_t[where] = softmax_rounding(self.kernels[0], formats[0], t, h_t[where], star.t.hi, n)
            by_i[where] = softmax_rounding(self.kernels[1], formats[1], i, h_i[where], star.i.hi, n)
        star = State(Box(*ends["t"]), Box(*ends["i"]), Box(*ends["d"]))
        apart = [
            p.hi - p.lo + b if kernel.free and self.readings[node["name"]] > 1 else zero
            for kernel, p, b in zip(self.kernels, (star.t, star.i), (by_t, by_i), strict=True)
        ]
        self.apart[node["name"]] = (apart[0], apart[1])
        return Softmax(star, variation, (by_t, by_i), allowed)

    def _context(self, node: Any, p: Softmax, v: State) -> State:
        zero = numbers.ZERO
        hull_d, hull_t, hull_i = (hull(b, p.allowed) for b in (v.d, v.t, v.i))
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
        return self.settle(node, (*y, carried + moved), errors, NOTHING, sums=True)

    # section 6

    def _rms_norm(self, node: Any) -> State:
        return self._norm(node, False)

    def _layer_norm(self, node: Any) -> State:
        return self._norm(node, True)

    def _norm(self, node: Any, centred: bool) -> State:
        x, apart = self.read(node, 0), self.read_apart(node, 0)
        eps = arb(float.fromhex(node["attrs"]["eps"]))
        n = x.t.lo.shape[-1]
        one, none = known(np.ones(n)), known(np.zeros(n))
        g = self.read(node, 1) if len(node["inputs"]) > 1 else State(one, one, none)
        b = self.read(node, 2) if len(node["inputs"]) > 2 else State(none, none, none)
        t, i = Side.of(x.t, eps, centred), Side.of(x.i, eps, centred)
        d_c = centred_box(x.d) if centred else x.d
        twice = (t.c + t.c + d_c).meet(t.c + i.c)
        terms = d_c * twice
        mean = Box(total(terms.lo) / n, total(terms.hi) / n)
        lengths = [each(lambda z: z.sqrt(), total(box.mag**2)) for box in (d_c, twice)]
        product = lengths[0] * lengths[1] / n
        d_v = mean.meet(around(product * 0, product)).meet(i.v - t.v)
        omega = Box(secant(t.r.lo, i.r.lo), secant(t.r.hi, i.r.hi))
        d_r = (-(d_v * omega)).meet(i.r - t.r)
        d_y = (d_c * i.r + t.c * d_r).meet(i.y - t.y)
        y = t.y * g.t + b.t, i.y * g.i + b.i
        d = g.i * d_y + (g.i - g.t) * t.y + (b.i - b.t)
        errors = [
            norm_error(kernel, side, h, at, gain.mag, bias.mag, centred)
            for kernel, side, h, at, gain, bias in zip(
                self.kernels, (x.t, x.i), apart, (t, i), (g.t, g.i), (b.t, b.i), strict=True
            )
        ]
        before = [
            h * at.r.hi * gain.mag for h, at, gain in zip(apart, (t, i), (g.t, g.i), strict=True)
        ]
        return self.settle(node, (*y, d), errors, before)


def _halves_exchanged(values: Balls) -> Balls:
    h = values.shape[-1] // 2
    return np.concatenate([values[..., h:], values[..., :h]], axis=-1)


def _turned(x: Box) -> Box:
    h = x.lo.shape[-1] // 2
    return Box(
        np.concatenate([-x.hi[..., h:], x.lo[..., :h]], axis=-1),
        np.concatenate([-x.lo[..., h:], x.hi[..., :h]], axis=-1),
    )
