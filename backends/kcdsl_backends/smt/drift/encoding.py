"""Both kernels of a block as affine forms of shared symbols: training and drift, node by node.

The rules are those of docs/reference/z3.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kcdsl.model.graph import Node, View
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import EPS, SAFE, Box, NoBound, gamma, up
from kcdsl_backends.drift.boxes.rounding import ONCE
from kcdsl_backends.drift.boxes.state import Kernels, Parameter, SoftmaxState
from kcdsl_backends.drift.ops.activations import GELU, GELU_TANH, SILU, TANH
from kcdsl_backends.drift.ops.softmax import probabilities
from kcdsl_backends.real_arithmetic.allowances import LEAVES, Allowances, allowances
from kcdsl_backends.smt.drift.forms import SymbolForm, System

_BoxPair = tuple[Box | None, Box | None]
_STORED = "stored"
"""Name of the reading that all sums and the output of the block share."""


@dataclass(frozen=True, slots=True)
class BothKernels:
    """The training value of a result and its drift, with boxes of both kernels' values."""

    train: SymbolForm
    drift: SymbolForm
    boxes: tuple[Box, Box]
    change: Box

    @property
    def infer(self) -> SymbolForm:
        """Return the inference value."""
        return self.train + self.drift

    @property
    def hull(self) -> Box:
        """Return a box of both kernels' values."""
        return self.boxes[0].hull(self.boxes[1])

    def mapped(self, place: Callable[[Tensor], Tensor]) -> BothKernels:
        """Rearrange the elements by a function that selects and moves elements."""

        def moved(box: Box) -> Box:
            return Box(place(box.lo), place(box.hi))

        train, drift = self.train.mapped(place), self.drift.mapped(place)
        return BothKernels(
            train, drift, (moved(self.boxes[0]), moved(self.boxes[1])), moved(self.change)
        )


def pair(
    train: SymbolForm, drift: SymbolForm, known: tuple[Box, Box, Box] | None = None
) -> BothKernels:
    """Return a pair with the boxes of its forms, intersected with known boxes."""
    boxes = [train.range(), (train + drift).range(), drift.range()]
    if known is not None:
        boxes = [one.meet(two) for one, two in zip(boxes, known, strict=True)]
    return BothKernels(train, drift, (boxes[0], boxes[1]), boxes[2])


@dataclass(slots=True)
class Encoder:
    """Encodes a block graph; `system` collects the symbols and their constraints."""

    problem: BlockProblem
    centre: Tensor | None
    radius: Tensor
    system: System = field(default_factory=System)
    _found: dict[str, BothKernels] = field(default_factory=dict)
    _nodes: dict[str, Node] = field(init=False)
    _kernels: Kernels = field(init=False)
    _known: Allowances = field(init=False)

    def __post_init__(self) -> None:
        """Bound every node by intervals.

        Raises:
            NoBound: a node has no interval.
        """
        self._nodes = {node.name: node for node in self.problem.graph.nodes}
        self._kernels = self.problem.kernels()
        self._known = allowances(self.problem, self.centre, self.radius)

    def output(self) -> BothKernels:
        """Return the output that both kernels store.

        Raises:
            NoBound: an operation has no rule here.
        """
        return self._reading(self.problem.graph.output, _STORED)

    # --- readings and errors ----------------------------------------------------------------------

    def _cached(self, name: str, make: Callable[[], BothKernels]) -> BothKernels:
        if name not in self._found:
            self._found[name] = make()
        return self._found[name]

    def _add_errors(self, x: BothKernels, boxes: _BoxPair) -> BothKernels:
        """Return a result with errors of both kernels in these boxes."""
        errors = [
            SymbolForm.constant(torch.zeros_like(x.train.centre))
            if box is None
            else self.system.fresh(box, x.train.shape)
            for box in boxes
        ]
        return pair(x.train + errors[0], x.drift + (errors[1] - errors[0]))

    def _refined(self, name: str, x: BothKernels) -> BothKernels:
        """Return a result with its boxes intersected with those of the interval domain."""
        state = self._known.states[name]
        state = state.collapse() if isinstance(state, SoftmaxState) else state
        return pair(x.train, x.drift, (state.train, state.infer, state.drift))

    def _reading(self, name: str, use: str) -> BothKernels:
        """Return the reading of a result by one reader."""
        apart = tuple(side[name].apart for side in self._known.sides)
        if apart == (None, None):
            return self._value(name)
        boxes = tuple(None if a is None else Box.around(a) for a in apart)
        return self._cached(
            f"{name} {use}",
            lambda: self._refined(name, self._add_errors(self._base(name), (boxes[0], boxes[1]))),
        )

    def _value(self, name: str) -> BothKernels:
        """Return a result with one reading: the operation on its readings, plus errors."""
        errors = self._known.sides[0][name].error, self._known.sides[1][name].error
        return self._cached(
            name,
            lambda: self._refined(
                name,
                self._add_errors(self._exact(self._nodes[name], self._operand), errors),
            ),
        )

    def _base(self, name: str) -> BothKernels:
        """Return the value of which all readings of a result are versions."""
        node = self._nodes[name]
        if node.op in ONCE or node.op == "input":
            return self._value(name)
        return self._cached(f"{name} base", lambda: self._exact(node, self._base_operand))

    def _operand(self, node: Node, index: int) -> BothKernels:
        use = _STORED if node.op in ONCE else f"{node.name} {index}"
        return self._reading(node.inputs[index], use)

    def _base_operand(self, node: Node, index: int) -> BothKernels:
        return self._base(node.inputs[index])

    # --- operations -------------------------------------------------------------------------------

    def _exact(self, node: Node, read: Callable[[Node, int], BothKernels]) -> BothKernels:
        """Return the result of an operation on real numbers."""
        sources = [self._nodes[name] for name in node.inputs]

        def operand(index: int) -> BothKernels:
            source = sources[index]
            if source.op in LEAVES:
                return _constant(self._kernels.plain(source))
            return read(node, index)

        match node.op:
            case "input":
                return self._input()
            case "linear":
                return self._linear(node, read(node, 0))
            case "matmul":
                return self._products(operand(0), operand(1))
            case "add" | "sub":
                a, b = operand(0), operand(1)
                if node.op == "sub":
                    return pair(a.train - b.train, a.drift - b.drift)
                return pair(a.train + b.train, a.drift + b.drift)
            case "mul":
                a, b = operand(0), operand(1)
                return self._product(a, b, square=a is b)  # two readings are no square
            case "scale":
                return _scaled(operand(0), float(node.attrs["factor"]))
            case "divide":
                return _scaled(operand(0), 1.0 / float(node.attrs["divisor"]))
            case "shift":
                x = operand(0)
                offset = torch.tensor(float(node.attrs["offset"]), dtype=torch.float64)
                return pair(x.train.plus(offset), x.drift)
            case "cast":
                return operand(0)
            case "neg":
                return _scaled(operand(0), -1.0)
            case "relu":
                return self._relu(operand(0))
            case "tanh" | "silu" | "gelu":
                return self._smooth(node, operand(0))
            case "view":
                x = operand(0)
                return x.mapped(lambda index: _viewed(View.of(node), index))
            case "concat":
                return _concat([operand(i) for i in range(len(sources))], int(node.attrs["dim"]))
            case "softmax":
                return self._softmax(node, operand(0))
            case "layer_norm" | "rms_norm":
                return self._norm(node, operand(0))
            case "rope":
                x, half = operand(0), node.shape[-1] // 2
                turned = x.mapped(lambda i: torch.cat([i[..., half:], i[..., :half]], -1))
                sign = torch.ones(node.shape[-1], dtype=torch.float64)
                sign[:half] = -1
                turned = pair(turned.train.times(sign), turned.drift.times(sign))
                parts = [
                    _times_constant(one, self._kernels.plain(source))
                    for one, source in ((x, sources[1]), (turned, sources[2]))
                ]
                return pair(parts[0].train + parts[1].train, parts[0].drift + parts[1].drift)
            case "embedding":
                ids = torch.tensor(node.attrs["ids"])
                held = _constant(self._kernels.plain(sources[0]).rows(ids))
                return held.mapped(lambda index: index.reshape(node.shape))
            case op:
                raise NoBound(node.name, f"no rule for the operation {op}")

    def _input(self) -> BothKernels:
        assert self.centre is not None
        shape = tuple(self.centre.shape)
        x = self.system.fresh(Box.around(self.radius.expand(shape)))
        self.system.inputs = len(self.system.places)
        return pair(x.plus(self.centre), SymbolForm.constant(torch.zeros_like(self.centre)))

    def _linear(self, node: Node, x: BothKernels) -> BothKernels:
        entering = tuple(side[node.name].entering for side in self._known.sides)
        if entering != (None, None):
            x = self._add_errors(x, (entering[0], entering[1]))
            for side, form in zip(self._known.sides, (x.train, x.infer), strict=True):
                step = side[node.name].step
                if step is not None:
                    self.system.codes(form, step)
        weight = self._kernels.linear(self._nodes[node.inputs[1]])
        by, change = weight.infer.T, weight.infer.T - weight.train.T
        drift = x.drift.before(by)
        if not weight.alike:
            drift = drift + x.train.before(change, 2 * EPS * change.abs())
        train = x.train.before(weight.train.T)
        if len(node.inputs) > 2:
            bias = _constant(self._kernels.plain(self._nodes[node.inputs[2]]))
            train, drift = train + bias.train, drift + bias.drift
        return pair(train, drift)

    def _remainder(self, size: Tensor) -> SymbolForm:
        """Return fresh numbers of at most this magnitude."""
        return self.system.fresh(Box.around(up(size * SAFE)))

    def _product(self, a: BothKernels, b: BothKernels, *, square: bool = False) -> BothKernels:
        """Return a·b = mₐb + m_b a - mₐm_b + (a - mₐ)(b - m_b), and Δ(ab) = āΔb + b̄Δa."""
        shape = tuple(np.broadcast_shapes(a.train.shape, b.train.shape))
        (am, ar), (bm, br) = a.boxes[0].midpoint(), b.boxes[0].midpoint()
        rest = (ar * br * SAFE).expand(shape)
        linear = b.train.times(am) + a.train.times(bm)
        train = linear.plus(-am * bm, 2 * EPS * (am * bm).abs())
        box = Box(torch.zeros_like(rest), up(rest)) if square else Box.around(up(rest))
        train = train + self.system.fresh(box)
        (am, ar), (bm, br) = _middle(a).midpoint(), _middle(b).midpoint()
        size = (ar * b.change.mag() + br * a.change.mag()).expand(shape)
        drift = b.drift.times(am) + a.drift.times(bm) + self._remainder(size)
        return pair(train, drift)

    def _products(self, a: BothKernels, b: BothKernels) -> BothKernels:
        """Return a @ b by the rules of a product, one remainder for each sum."""
        (am, ar), (bm, br) = a.boxes[0].midpoint(), b.boxes[0].midpoint()
        off = gamma(am.shape[-1] + 4) * (am.abs() @ bm.abs())
        train = a.train.before(bm) + b.train.turned.before(am.mT).turned
        train = train.plus(-(am @ bm), off) + self._remainder(ar @ br)
        (am, ar), (bm, br) = _middle(a).midpoint(), _middle(b).midpoint()
        size = ar @ b.change.mag() + a.change.mag() @ br
        drift = a.drift.before(bm) + b.drift.turned.before(am.mT).turned
        return pair(train, drift + self._remainder(size * (1 + 2.0**-40)))

    def _relu(self, x: BothKernels) -> BothKernels:
        """Return both rectified values exactly, with case splits where a sign is undecided."""
        made = self.system.relu(x.train, x.drift, x.boxes, x.change)
        stay = (x.boxes[0].lo >= 0) & (x.boxes[1].lo >= 0)
        low, high = x.change.lo.clamp_max(0), x.change.hi.clamp_min(0)
        known = Box(torch.where(stay, x.change.lo, low), torch.where(stay, x.change.hi, high))
        both = [Box(box.lo.clamp_min(0), box.hi.clamp_min(0)) for box in x.boxes]
        return pair(made.value, made.change, (both[0], both[1], known))

    def _smooth(self, node: Node, x: BothKernels) -> BothKernels:
        """Return f(a) = f(c) + s(a - c) ± r|a - c| and Δf = sΔa ± r|Δa|, with f' in s ± r."""
        tanh = node.op == "gelu" and node.attrs.get("approximate") == "tanh"
        function = {"tanh": TANH, "silu": SILU, "gelu": GELU_TANH if tanh else GELU}[node.op]
        centre, radius = x.boxes[0].midpoint()
        value, off = function.range(Box.point(centre)).midpoint()
        slope, loose = function.slopes(x.boxes[0]).midpoint()
        train = x.train.plus(-centre).times(slope).plus(value, off)
        train = train + self._remainder(loose * radius)
        slope, loose = function.slopes(x.hull).midpoint()
        drift = x.drift.times(slope)
        drift = drift + self._remainder(loose * x.change.mag())
        both = function.range(x.boxes[0]), function.range(x.boxes[1])
        return pair(train, drift, (*both, drift.range()))

    def _softmax(self, node: Node, scores: BothKernels) -> BothKernels:
        """Return p(c) + the change from c to the training scores, and the drift from these."""
        mask = None
        if len(node.inputs) > 1:
            mask = self._kernels.mask(self._nodes[node.inputs[1]]).expand(node.shape)
        centre, _ = scores.boxes[0].midpoint()
        start, off = probabilities(Box.point(centre), mask).midpoint()
        moved, box = scores.train.plus(-centre), scores.boxes[0]
        train = self._softmax_change(moved, box, mask)
        drift = self._softmax_change(scores.drift, scores.hull, mask, scores.change)
        both = [probabilities(one, mask) for one in scores.boxes]
        result = pair(train.plus(start, off), drift)
        return pair(result.train, result.drift, (both[0], both[1], result.change))

    def _softmax_change(
        self, d: SymbolForm, scores: Box, mask: Tensor | None, change: Box | None = None
    ) -> SymbolForm:
        """Return p(s + d) - p(s) = p̃_i(d_i - Σ p̃_j d_j), p̃ at scores of a box (Rule 3)."""
        if mask is not None:
            d = d.times(mask.to(torch.float64))
        size = (d.range() if change is None else d.range().meet(_masked(change, mask))).mag()
        p, loose = probabilities(scores, mask).midpoint()
        mean = d.times(p).total()
        rest = (loose * size).sum(-1, keepdim=True) * (1 + 2.0**-40)
        # p̃ differs for every i
        inner = d - (mean + self._remainder(rest.expand(size.shape)))
        return inner.times(p) + self._remainder(loose * inner.range().mag())

    def _norm(self, node: Node, x: BothKernels) -> BothKernels:
        name, n, eps = node.name, node.shape[-1], float(node.attrs["eps"])
        if node.op == "layer_norm":
            means = [_mean(form, n) for form in (x.train, x.drift)]
            x = pair(x.train - means[0], x.drift - means[1])
        squares = self._product(x, x, square=True)
        shift = torch.tensor(eps, dtype=torch.float64)
        train, drift = _mean(squares.train, n).plus(shift), _mean(squares.drift, n)
        least = [box.square().mean().lo + eps * (1 - 4 * EPS) for box in x.boxes]
        most = [box.square().mean().hi * (1 + 4 * EPS) + eps * (1 + 4 * EPS) for box in x.boxes]
        known = [Box(low * (1 - 4 * EPS), high) for low, high in zip(least, most, strict=True)]
        v = pair(train, drift, (known[0], known[1], drift.range()))
        root = self._root(name, v)
        found = self._product(x, root)
        for index, key in enumerate(node.inputs[1:]):
            held = self._kernels.plain(self._nodes[key])
            if index:
                shift_by = _constant(held)
                found = pair(found.train + shift_by.train, found.drift + shift_by.drift)
            else:
                found = _times_constant(found, held)
        return found

    def _root(self, name: str, v: BothKernels) -> BothKernels:
        """Return v^-1/2, whose derivative -v^-3/2/2 increases."""

        def slopes(box: Box) -> tuple[Tensor, Tensor]:
            low, high = -0.5 * box.lo**-1.5, -0.5 * box.hi**-1.5
            return Box(low * (1 + 2.0**-45), high * (1 - 2.0**-45)).midpoint()

        if not bool((v.hull.lo > 0).all()):
            raise NoBound(name, "the variance may be zero")
        centre, radius = v.boxes[0].midpoint()
        value = centre**-0.5
        slope, loose = slopes(v.boxes[0])
        train = v.train.plus(-centre).times(slope).plus(value, 2.0**-45 * value)
        train = train + self._remainder(loose * radius)
        slope, loose = slopes(v.hull)
        drift = v.drift.times(slope) + self._remainder(loose * v.change.mag())
        both = [Box(b.hi**-0.5 * (1 - 2.0**-45), b.lo**-0.5 * (1 + 2.0**-45)) for b in v.boxes]
        return pair(train, drift, (both[0], both[1], drift.range()))


def _middle(x: BothKernels) -> Box:
    """Return a box of half the sum of both kernels' values."""
    return (x.boxes[0] + x.boxes[1]).half().meet(x.boxes[0] + x.change.half())


def _mean(form: SymbolForm, count: int) -> SymbolForm:
    share = torch.tensor(1.0 / count, dtype=torch.float64)
    return form.total().times(share, EPS * share)


def _masked(box: Box, mask: Tensor | None) -> Box:
    if mask is None:
        return box
    zero = torch.zeros_like(box.lo)
    return Box(torch.where(mask, box.lo, zero), torch.where(mask, box.hi, zero))


def _scaled(x: BothKernels, factor: float) -> BothKernels:
    by = torch.tensor(factor, dtype=torch.float64)
    return pair(x.train.times(by, EPS * by.abs()), x.drift.times(by, EPS * by.abs()))


def _constant(held: Parameter) -> BothKernels:
    """Return a parameter that both kernels store."""
    change, off = held.difference.midpoint()
    return pair(SymbolForm.constant(held.train), SymbolForm.constant(change, off))


def _times_constant(x: BothKernels, held: Parameter) -> BothKernels:
    change, off = held.difference.midpoint()
    drift = x.drift.times(held.infer)
    if not held.alike:
        drift = drift + x.train.times(change, off)
    return pair(x.train.times(held.train), drift)


def _viewed(view: View, x: Tensor) -> Tensor:
    """Return the elements of x where a view puts them."""
    cut = x.reshape(view.split)[tuple(slice(*each) for each in view.ranges)]
    return cut.permute(view.order).expand(view.sizes).reshape(view.shape)


def _concat(parts: list[BothKernels], dim: int) -> BothKernels:
    many = max(form.coefs.shape[-1] for x in parts for form in (x.train, x.drift))

    def joined(forms: list[SymbolForm]) -> SymbolForm:
        axis = dim % len(forms[0].shape)
        pad = [torch.nn.functional.pad(f.coefs, (0, many - f.coefs.shape[-1])) for f in forms]
        return SymbolForm(
            torch.cat([f.centre for f in forms], axis),
            torch.cat(pad, axis),
            torch.cat([f.error for f in forms], axis),
        )

    return pair(joined([x.train for x in parts]), joined([x.drift for x in parts]))


def coefficients(problem: BlockProblem) -> int:
    """Estimate the number of coefficients of the largest result of a block: its elements times the
    symbols of all results of both kernels."""
    sizes = [math.prod(n.shape) for n in problem.graph.nodes if n.op not in LEAVES]
    return max(sizes) * 3 * sum(sizes)
