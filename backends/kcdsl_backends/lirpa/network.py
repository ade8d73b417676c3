"""Two kernels of a block as one torch module whose output is the drift (docs/reference/lirpa.md).

The module computes the block graph in both kernels, without rounding, and adds to every result an
error of the kernel: an input of the module with a known box.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, View
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.rounding import ONCE
from kcdsl_backends.drift.boxes.state import Kernels
from kcdsl_backends.lirpa.library import Entry, scalar
from kcdsl_backends.real_arithmetic.allowances import LEAVES, Allowance, allowances

_STORED = "stored"
"""Name of the reading that all sums and the output of the block share."""


# --- the module -----------------------------------------------------------------------------------


class DriftNetwork(torch.nn.Module):
    """A function of the block input and of all errors: the drift of the output, [1, elements].

    `entries` holds the boxes of its inputs, in order; `forward` takes one tensor for each.
    """

    def __init__(self, problem: BlockProblem, centre: Tensor | None, radius: Tensor) -> None:
        """Build the module for the inputs in [centre - radius, centre + radius].

        Raises:
            NoBound: a node has no interval or an operation that is not supported.
        """
        super().__init__()
        self.entries: list[Entry] = []
        self._indices: dict[str, int] = {}
        self._constants: dict[Hashable, str] = {}
        self._sources: list[Tensor] = []
        if centre is not None:
            low, high = centre - radius, centre + radius
            self._indices["input"] = 0
            self.entries.append(Entry(low[None], high[None]))
        kernels, found = problem.kernels(), allowances(problem, centre, radius).sides
        self._sides = [_Side(self, problem.graph, kernels, side, found[side]) for side in (0, 1)]
        with torch.no_grad():
            self._drift(None)
        self.eval()

    def forward(self, *given: Tensor) -> Tensor:
        """Return the drift for one input and one set of errors."""
        return self._drift(given)

    def _drift(self, given: Sequence[Tensor] | None) -> Tensor:
        train, infer = (side.output(given) for side in self._sides)
        return (infer - train).reshape(1, -1)

    def entry(self, name: str, box: Box | None, given: Sequence[Tensor] | None) -> Tensor:
        """Return an input of the module; if `given` is None, declare it and return its midpoint."""
        if given is not None:
            return given[self._indices[name]]
        if box is not None:
            self._indices[name] = len(self.entries)
            self.entries.append(Entry(box.lo[None], box.hi[None]))
        one = self.entries[self._indices[name]]
        return (one.low + one.high) / 2

    def constant(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return a constant tensor of the module; `make` is called once for each key."""
        if key not in self._constants:
            self._constants[key] = f"constant_{len(self._constants)}"
            made = torch.nn.Parameter(make().to(torch.float64).contiguous(), requires_grad=False)
            self.register_parameter(self._constants[key], made)
        found: Tensor = getattr(self, self._constants[key])
        return found

    def made_of(self, value: Tensor, use: str, make: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a constant tensor computed from another, which both kernels may share."""
        self._sources.append(value)  # keeps `id` unique
        return self.constant((id(value), use), lambda: make(value))


@dataclass(slots=True)
class _Side:
    """One kernel in the module."""

    network: DriftNetwork
    graph: BlockGraph
    kernels: Kernels
    side: int
    known: Mapping[str, Allowance]
    nodes: dict[str, Node] = field(init=False)
    _given: Sequence[Tensor] | None = None
    _found: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.nodes = {node.name: node for node in self.graph.nodes}

    def output(self, given: Sequence[Tensor] | None) -> Tensor:
        """Return the output that this kernel stores."""
        self._given, self._found = given, {}
        return self._reading(self.graph.output, _STORED)

    def _cached(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self._found:
            self._found[name] = make()
        return self._found[name]

    def _add_error(self, x: Tensor, what: str, box: Box | None, shape: tuple[int, ...]) -> Tensor:
        """Add a new error input in a box to a value of some shape."""
        if box is None or not bool((box.lo.abs() + box.hi.abs()).any()):
            return x
        shaped = Box(*(end.expand(shape).contiguous() for end in (box.lo, box.hi)))
        return x + self.network.entry(f"{self.side} {what}", shaped, self._given)

    def _reading(self, name: str, use: str) -> Tensor:
        """Return the reading of a result by one reader."""
        allowed = self.known[name]
        if allowed.apart is None:
            return self._value(name)
        box, what, shape = Box.around(allowed.apart), f"{name} {use}", self.nodes[name].shape
        return self._cached(what, lambda: self._add_error(self._base(name), what, box, shape))

    def _value(self, name: str) -> Tensor:
        """Return a result with one reading: the operation on its readings, plus the error."""
        node, error = self.nodes[name], self.known[name].error
        return self._cached(
            name, lambda: self._add_error(self._exact(node, self._operand), name, error, node.shape)
        )

    def _base(self, name: str) -> Tensor:
        """Return the value that all readings of a result are versions of, without casts since the
        last sums."""
        node = self.nodes[name]
        if node.op in ONCE or node.op == "input":
            return self._value(name)
        return self._cached(f"{name} base", lambda: self._exact(node, self._base_operand))

    def _operand(self, node: Node, index: int) -> Tensor:
        use = _STORED if node.op in ONCE else f"{node.name} {index}"
        return self._reading(node.inputs[index], use)

    def _base_operand(self, node: Node, index: int) -> Tensor:
        return self._base(node.inputs[index])

    def _exact(self, node: Node, read: Callable[[Node, int], Tensor]) -> Tensor:
        """Return the result of an operation on real numbers, [1, *shape]."""
        if node.op == "input":
            return self.network.entry("input", None, self._given)
        count = len(node.inputs)
        computed = [self.nodes[name].op not in LEAVES for name in node.inputs]
        sources = [self.nodes[name] for name in node.inputs]

        def operand(index: int) -> Tensor:
            if not computed[index]:
                return self._constant(sources[index])
            x, own = read(node, index), sources[index].shape
            missing = len(node.shape) - len(own)
            return x if missing <= 0 else x.reshape(1, *(1,) * missing, *own)

        match node.op:
            case "linear":
                return self._linear(node, read(node, 0))
            case "matmul":
                return torch.matmul(operand(0), operand(1))
            case "add":
                return operand(0) + operand(1)
            case "sub":
                return operand(0) + -operand(1)
            case "mul":
                return operand(0) * operand(1)
            case "scale":
                return operand(0) * float(node.attrs["factor"])
            case "divide":
                return operand(0) * (1.0 / float(node.attrs["divisor"]))
            case "shift":
                return operand(0) + float(node.attrs["offset"])
            case "cast":
                return operand(0)
            case "neg":
                return -operand(0)
            case "relu":
                return torch.relu(operand(0))
            case "tanh" | "silu":
                return scalar(node.op, operand(0))
            case "gelu":
                tanh = node.attrs.get("approximate") == "tanh"
                return scalar("gelu_tanh" if tanh else "gelu", operand(0))
            case "view":
                return self._viewed(node, self._batched(sources[0], operand(0)))
            case "concat":
                parts = [self._batched(sources[i], operand(i)) for i in range(count)]
                return torch.cat(parts, int(node.attrs["dim"]) % len(node.shape) + 1)
            case "softmax":
                return self._softmax(node, operand(0))
            case "layer_norm" | "rms_norm":
                return self._norm(node, operand(0))
            case "rope":
                x, half = operand(0), node.shape[-1] // 2
                turned = self._times(x, "turn", node.shape[-1], lambda n: _turn(n, half))
                return x * self._constant(sources[1]) + turned * self._constant(sources[2])
            case "embedding":
                ids = torch.tensor(node.attrs["ids"])
                table = self._stored(sources[0], linear=False)
                return self.network.made_of(table, node.name, lambda t: t[ids].reshape(node.shape))
            case op:
                raise NoBound(node.name, f"the module has no operation {op}")

    def _stored(self, node: Node, *, linear: bool) -> Tensor:
        held = self.kernels.linear(node) if linear else self.kernels.plain(node)
        return held.infer if self.side else held.train

    def _constant(self, node: Node) -> Tensor:
        return self.network.made_of(self._stored(node, linear=False), "", lambda t: t)

    def _batched(self, node: Node, value: Tensor) -> Tensor:
        """Add the leading dimension of other results to one that depends on constants alone."""
        return value if value.dim() > len(node.shape) else value[None]

    def _times(self, x: Tensor, name: str, size: int, make: Callable[[int], Tensor]) -> Tensor:
        """Return x @ m for the constant matrix m = make(size)."""
        return x @ self.network.constant((name, size), lambda: make(size))

    def _linear(self, node: Node, x: Tensor) -> Tensor:
        entering, source = self.known[node.name].entering, self.nodes[node.inputs[0]]
        x = self._add_error(x, f"{node.name} entering", entering, source.shape)
        weight = self._stored(self.nodes[node.inputs[1]], linear=True)
        y = x @ self.network.made_of(weight, "T", lambda t: t.T)
        if len(node.inputs) < 3:
            return y
        return y + self._constant(self.nodes[node.inputs[2]])

    def _softmax(self, node: Node, scores: Tensor) -> Tensor:
        """Return exp(s - c) over its sums; c is a constant of each row."""
        shift, floor = self.known[node.name].shift, self.known[node.name].floor
        assert shift is not None
        e = scalar("exp", scores + self.network.made_of(shift, "", lambda t: -t))
        if len(node.inputs) > 1:
            source = self.nodes[node.inputs[1]]
            e = e * self.network.constant(
                ("mask", source.name, node.shape),
                lambda: self.kernels.mask(source).expand(node.shape),
            )
        total = self._times(e, "sum", node.shape[-1], lambda n: torch.ones(n, 1))
        return e * scalar("reciprocal", total, floor)

    def _norm(self, node: Node, x: Tensor) -> Tensor:
        if node.op == "layer_norm":
            x = self._times(x, "centre", node.shape[-1], lambda n: torch.eye(n) - 1.0 / n)
        mean = self._times(x * x, "mean", node.shape[-1], lambda n: torch.full((n, 1), 1.0 / n))
        eps = float(node.attrs["eps"])
        y = x * scalar("rsqrt", mean + eps, eps)
        for index, name in enumerate(node.inputs[1:]):
            held = self._constant(self.nodes[name])
            y = y + held if index else y * held
        return y

    def _viewed(self, node: Node, x: Tensor) -> Tensor:
        """Apply a view to x with operations that the library supports."""
        view = View.of(node)
        if tuple(x.shape[1:]) != view.split:
            x = x.reshape(1, *view.split)
        for dim, (start, stop, step) in enumerate(view.ranges):
            if step != 1:
                raise NoBound(node.name, "the module has no view in steps")
            if (start, stop) != (0, view.split[dim]):
                x = x.narrow(dim + 1, start, stop - start)
        if view.order != tuple(range(len(view.order))):
            x = x.permute(0, *(1 + dim for dim in view.order))
        for dim, (size, own) in enumerate(zip(view.sizes, x.shape[1:], strict=True)):
            if size != own:
                x = torch.cat([x] * size, dim + 1)
        return x if tuple(x.shape[1:]) == view.shape else x.reshape(1, *view.shape)


def _turn(size: int, half: int) -> Tensor:
    """Return m with x @ m = concat(-x[h:], x[:h])."""
    eye = torch.eye(size)
    return torch.cat([-eye[:, half:], eye[:, :half]], 1)
