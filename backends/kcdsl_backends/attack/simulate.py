"""Run a block graph in float64 with every rounding of a numerics specification explicit.

A run is admitted by a specification if every stored result obeys its error model
(docs/relational-interval.md). Symbols s in [-1, 1],
chosen by the caller, make it one:

- accumulation: a dot product of n terms is exact + s·A_n,2 (section 3 there);
- early cast: with `casts: any` a product of a linear may be stored before its bias is added, and
  what a norm normalised before its gain;
- inside: elements of elementwise operations, and the inverse root of norms (inside.py);
- cast: with `casts: any` the stored result is v·(1 + u·s); with `casts: nearest` it is v rounded to
  nearest, and there is no symbol.

What a kernel does in float64 has no symbols: the simulation rounds as much itself, and both
together could be more than the specification admits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kcdsl.model.formats import FORMATS, Format
from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.numerics import Numerics
from kcdsl_backends.attack.inside import ELEMENTWISE, NORMS, element_error, root_error, unit
from kcdsl_backends.parameters import StoredParameters

SIMULATED = 53
"""Precision of the arithmetic of the simulation: float64."""
SUMS = frozenset({"linear", "matmul"})
"""Operations that accumulate dot products."""
STORED = SUMS | {
    *("add", "sub", "mul", "scale", "divide", "shift", "tanh", "silu", "gelu"),
    *("softmax", "rms_norm", "layer_norm", "rope"),
}
"""Operations whose result a kernel stores."""


def nearest_to(x: Tensor, format: Format) -> Tensor:
    """Round to nearest even in a format; gradients pass through unchanged."""
    if format.precision >= 53:
        return x
    with torch.no_grad():
        _, exponent = torch.frexp(x)
        leading = torch.clamp(exponent - 1, min=format.min_exponent).to(torch.int64)
        quantum = torch.exp2((leading - format.precision + 1).to(torch.float64))
        shift = torch.round(x / quantum) * quantum - x
    return x + shift


@dataclass(frozen=True, slots=True)
class Simulator:
    """One kernel of a block graph."""

    graph: BlockGraph
    numerics: Numerics
    parameters: StoredParameters

    @property
    def free(self) -> bool:
        """Say whether roundings are symbols."""
        return self.numerics.casts == "any"

    def symbol_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every rounding symbol, by its kind and node: `cast NODE`, ..."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.numerics.compute != "float64":
            nodes = self.graph.nodes
            shapes |= {f"inside {n.name}": n.shape for n in nodes if n.op in ELEMENTWISE}
            shapes |= {f"root {n.name}": (*n.shape[:-1], 1) for n in nodes if n.op in NORMS}
        if FORMATS[self.numerics.accumulate].precision < SIMULATED:
            shapes |= {f"sum {n.name}": n.shape for n in self.graph.nodes if n.op in SUMS}
        if self.free:
            stored = [n for n in self.graph.nodes if n.op in STORED]
            coarser = [n for n in stored if self._format(n).precision < SIMULATED]
            shapes |= {f"cast {n.name}": n.shape for n in coarser}
            if self._coarse:
                shapes |= {f"early {n.name}": n.shape for n in stored if _casts_early(n)}
                inputs = (n for n in self.graph.nodes if n.op == "input")
                shapes |= {f"cast {n.name}": n.shape for n in inputs}
        return shapes

    @property
    def _coarse(self) -> bool:
        return FORMATS[self.numerics.compute].precision < 24

    def run(self, x: Tensor | None, symbols: Mapping[str, Tensor]) -> Tensor:
        """Return the block output for the input x [T, D] under the given roundings."""
        values: dict[str, Tensor] = {}
        nodes = {n.name: n for n in self.graph.nodes}
        for node in self.graph.nodes:
            if node.op in ("param", "constant"):
                continue
            if node.op == "input":
                if x is None:
                    raise ValueError("the block reads hidden states")
                value = x
            else:
                value = self._exact(node, nodes, values)
            accumulated = symbols.get(f"sum {node.name}")
            if accumulated is not None:
                value = value + accumulated * self._sum_error(node, value, nodes, values)
            early = symbols.get(f"early {node.name}")
            if early is not None:
                biased = len(node.inputs) > 2
                bias = self._operand(node.inputs[2], nodes, values) if biased else 0.0
                unit = FORMATS[self.numerics.compute].unit_roundoff
                value = value + unit * early * (value - bias)
            value = self._inside(node, value, symbols, nodes, values)
            values[node.name] = self._store(node, value, symbols.get(f"cast {node.name}"))
        return values[self.graph.output]

    def _inside(
        self,
        node: Node,
        value: Tensor,
        symbols: Mapping[str, Tensor],
        nodes: Mapping[str, Node],
        values: Mapping[str, Tensor],
    ) -> Tensor:
        """Add the roundings inside of an operation to its exact result."""
        inside, root = symbols.get(f"inside {node.name}"), symbols.get(f"root {node.name}")
        if inside is not None:
            operands = [self._operand(name, nodes, values) for name in node.inputs]
            size = element_error(node, value, operands).detach()
            value = value + inside * unit(self.numerics) * size
        if root is not None:
            theta = root_error(node, self._operand(node.inputs[0], nodes, values), self.numerics)
            biased = len(node.inputs) > 2
            bias = self._operand(node.inputs[2], nodes, values) if biased else 0.0
            value = value + root * theta * (value - bias)
        return value

    def _sum_error(
        self, node: Node, exact: Tensor, nodes: Mapping[str, Node], values: Mapping[str, Tensor]
    ) -> Tensor:
        """Return A_n,2(Σ|terms|, sum) of a dot product on the values of this run."""
        left = self._operand(node.inputs[0], nodes, values).abs()
        if node.op == "linear":
            right = self.parameters.linear(nodes[node.inputs[1]]).abs().T
        else:
            right = self._operand(node.inputs[1], nodes, values).abs()
        total = left @ right
        if node.op == "linear" and len(node.inputs) > 2:
            total = total + self._operand(node.inputs[2], nodes, values).abs()
        u, steps = FORMATS[self.numerics.accumulate].unit_roundoff, left.shape[-1]
        if (steps + 2) * u >= 1:
            return torch.zeros_like(total)
        return (steps * (total + exact.abs()) / 2 + 2 * total) * (u / (1 - (steps + 2) * u))

    def _format(self, node: Node) -> Format:
        attention = self.numerics.attention
        names = {"scores": attention.scores, "probabilities": attention.probabilities}
        return FORMATS[names.get(node.role, self.numerics.compute)]

    def _store(self, node: Node, value: Tensor, symbol: Tensor | None) -> Tensor:
        if node.op == "input" and not self._coarse:
            return value
        if node.op not in STORED and node.op != "input":
            return value
        format = self._format(node)
        if self.free:
            return value if symbol is None else value * (1 + format.unit_roundoff * symbol)
        return nearest_to(value, format)

    def _operand(
        self, name: str, nodes: Mapping[str, Node], values: Mapping[str, Tensor]
    ) -> Tensor:
        node = nodes[name]
        if node.op in ("param", "constant"):
            return self.parameters.plain(node)
        return values[name]

    def _exact(self, node: Node, nodes: Mapping[str, Node], values: Mapping[str, Tensor]) -> Tensor:
        def operand(index: int) -> Tensor:
            return self._operand(node.inputs[index], nodes, values)

        attrs, count = node.attrs, len(node.inputs)
        match node.op:
            case "linear":
                weight = self.parameters.linear(nodes[node.inputs[1]])
                y = self._quantised(operand(0)) @ weight.T
                return y + operand(2) if count > 2 else y
            case "matmul":
                return operand(0) @ operand(1)
            case "add":
                return operand(0) + operand(1)
            case "sub":
                return operand(0) - operand(1)
            case "mul":
                return operand(0) * operand(1)
            case "scale":
                return operand(0) * float(attrs["factor"])
            case "divide":
                return operand(0) / float(attrs["divisor"])
            case "shift":
                return operand(0) + float(attrs["offset"])
            case "softmax":
                scores = operand(0)
                if count > 1:
                    mask = self.parameters.mask(nodes[node.inputs[1]])
                    scores = scores.masked_fill(~mask, -torch.inf)
                return scores.softmax(-1)
            case "rms_norm":
                gain = operand(1) if count > 1 else None
                return F.rms_norm(operand(0), (node.shape[-1],), gain, float(attrs["eps"]))
            case "layer_norm":
                gain = operand(1) if count > 1 else None
                bias = operand(2) if count > 2 else None
                return F.layer_norm(operand(0), (node.shape[-1],), gain, bias, float(attrs["eps"]))
            case "rope":
                x, half = operand(0), node.shape[-1] // 2
                turned = torch.cat([-x[..., half:], x[..., :half]], -1)
                return x * operand(1) + turned * operand(2)
            case "embedding":
                ids = torch.tensor(attrs["ids"], device=operand(0).device)
                return operand(0)[ids].reshape(node.shape)
            case "concat":
                return torch.cat([operand(i) for i in range(count)], int(attrs["dim"]))
            case _:
                return _UNARY[node.op](operand(0), node)

    def _quantised(self, x: Tensor) -> Tensor:
        """Return the input of a linear after dynamic quantisation, rounded to nearest."""
        spec = self.numerics.activations
        if spec.format == "none":
            return x
        magnitude = x.detach().abs()
        if spec.format == "uint8":
            low, high = x.detach().amin().clamp(max=0), x.detach().amax().clamp(min=0)
            step = ((high - low) / 255).clamp_min(1e-300)
            zero = torch.round(-low / step)
            code = (torch.round(x.detach() / step) + zero).clamp(0, 255)
            return x + ((code - zero) * step - x.detach())
        limit = 127.0 if spec.format == "int8" else FORMATS[spec.format].largest
        if spec.scale == "mx":
            width = x.shape[-1]
            blocks = F.pad(magnitude, (0, -width % 32)).reshape(*magnitude.shape[:-1], -1, 32)
            top = blocks.amax(-1, keepdim=True).expand_as(blocks).flatten(-2)[..., :width]
            exponent = {"fp8_e4m3": 8, "fp8_e5m2": 15}[spec.format]
            scale = torch.exp2(torch.floor(torch.log2(top.clamp_min(1e-300))) - exponent)
        elif spec.scale == "none":
            scale = torch.ones_like(magnitude[..., :1])
        else:
            top = (
                magnitude.amax(-1, keepdim=True) if spec.scale == "per_token" else magnitude.amax()
            )
            scale = (top / limit).clamp_min(1e-300)
        code = (x.detach() / scale).clamp(-limit, limit)
        code = (
            torch.round(code) if spec.format == "int8" else nearest_to(code, FORMATS[spec.format])
        )
        return x + (code * scale - x.detach())


def _casts_early(node: Node) -> bool:
    """Say whether a result may be stored before its bias or gain is applied."""
    return node.op in NORMS or (node.op == "linear" and len(node.inputs) > 2)


def _slice(x: Tensor, node: Node) -> Tensor:
    index = [slice(None)] * x.dim()
    dim, start, stop, step = (int(node.attrs[k]) for k in ("dim", "start", "stop", "step"))
    index[dim] = slice(start, stop, step)
    return x[tuple(index)]


_UNARY: Mapping[str, Callable[[Tensor, Node], Tensor]] = {
    "neg": lambda x, node: -x,
    "relu": lambda x, node: torch.relu(x),
    "tanh": lambda x, node: torch.tanh(x),
    "silu": lambda x, node: F.silu(x),
    "gelu": lambda x, node: F.gelu(x),
    "reshape": lambda x, node: x.reshape(node.shape),
    "expand": lambda x, node: x.expand(node.shape),
    "permute": lambda x, node: x.permute([int(d) for d in node.attrs["dims"]]),
    "slice": _slice,
}
