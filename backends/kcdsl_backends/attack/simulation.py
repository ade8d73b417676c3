"""Run a block graph in float64 with every rounding of a numerics specification explicit.

A run is admitted by a specification if every stored result obeys its error model
(docs/proofs/relational-interval.md). Symbols s in [-1, 1], chosen by the caller, make it one:

- accumulation: a dot product is exact + s·A_k,j (section 3 there), or, instead of that, the sum
  in a concrete order (operations.py);
- early cast: with `casts: any`, a linear may store its product before it adds the bias, a norm its
  normalised input before the gain, and a rope its products before their sum;
- scalar: a Python number is rounded to the format of the result before it is used;
- inside: elements of elementwise operations and norms, the mean and the inverse root of norms, and
  probabilities are rounded before they are stored (operations.py);
- versions: where casts are free, each reader of a result may see its own version (versions.py),
  with its own scalar, inside, early and cast symbols;
- cast: with `casts: any` the stored result is v·(1 + u·s), with `any_direction` v·(1 + 2u·s), with
  `any_toward_zero` v·(1 - u·(1 + s)); with `nearest` it is v rounded to nearest, with `toward_zero`
  v cut off, and there is no symbol.

A symbol of 1 uses 1 - 2^-20 of an error bound. The rest exceeds the float64 roundings of the
simulation, so the simulated numbers are those of an admitted run. Operations that a kernel does in
float64 have no symbols: the roundings of the simulation are those of the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node, weight_of
from kcdsl.model.lowering.kv_cache import uncached
from kcdsl.model.numerics import Numerics, StaticQuantiser, held_formats
from kcdsl.model.numerics.formats import FORMATS, LAYOUTS, Format
from kcdsl_backends.attack.operations import (
    ELEMENTWISE,
    NORMS,
    batchable,
    exact,
    factors,
    ordered_product,
    rounded_inside,
    straight_through,
    sum_error,
)
from kcdsl_backends.attack.quantised_inputs import (
    Exceeded,
    cached,
    moved_by,
    quantised_tensor,
    to_nearest,
)
from kcdsl_backends.attack.versions import Version, versions
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.boxes.rounding import ONCE, Rounding, several
from kcdsl_backends.drift.boxes.state import StoredParameters
from kcdsl_backends.drift.boxes.sums import Sums
from kcdsl_backends.drift.ops.arithmetic import scalar_of
from kcdsl_backends.drift.ops.route import chosen_mask

SIMULATED = 53
"""Precision of the arithmetic of the simulation: float64."""
WITHIN = 1 - 2.0**-20
"""Share of an error bound that a symbol of 1 uses."""
SUMS = frozenset({"linear", "matmul"})
"""Operations that accumulate dot products."""
STORED = SUMS | ELEMENTWISE | {"cast", "softmax"}
"""Operations whose result a kernel stores."""


_SHARED = frozenset({"sum", "quantised", "mean", "root"})
"""Kinds of symbols that all versions of a result share."""
_SCALARS = {"scale": "factor", "divide": "divisor", "shift": "offset"}
"""Operations with a scalar, and the name of its attribute."""

_BY_ROWS = frozenset(
    {"none", "static", *(name for name, layout in LAYOUTS.items() if layout.rows == 1)}
)
"""Scale layouts whose scale of a row does not depend on other rows."""


class Overflowed(ArithmeticError):
    """A stored value is beyond the largest number of its format: no admitted run."""


class Rerouted(Overflowed):
    """A router may choose other experts than those of the graph."""


Step = Callable[[Tensor], Tensor]
Through = Callable[[str, Step, Tensor], Tensor]
"""Applies a rounding to nearest: (name, rounding, value) -> rounded value, with a gradient of its
own choice (batched_search.py)."""


@dataclass(frozen=True, slots=True)
class Simulator:
    """One kernel of a block graph."""

    graph: BlockGraph
    numerics: Numerics
    parameters: StoredParameters
    _known: list[Version] = field(default_factory=list, init=False, repr=False, compare=False)
    _nodes: dict[str, Node] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def free(self) -> bool:
        return self.numerics.cast.free

    def __post_init__(self) -> None:
        self._nodes.update((node.name, node) for node in self.graph.nodes)

    def _kernel(self, node: Node) -> Rounding:
        """Return the numerics of a node, which a pinned format or an exception for a linear
        changes."""
        try:
            return Rounding(self.numerics).at(node, weight_of(node, self._nodes))
        except NoBound as reason:
            raise Overflowed(f"no run is known: {reason}") from None

    def symbol_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every rounding symbol, by its kind and node: `cast NODE`, ..."""
        shapes: dict[str, tuple[int, ...]] = {}
        for version in self._versions():
            for kind, shape in self._symbols(version.node):
                if version.first or kind not in _SHARED:
                    shapes[f"{kind} {version.name}"] = shape
        return shapes

    def _symbols(self, node: Node) -> list[tuple[str, tuple[int, ...]]]:
        found: list[tuple[str, tuple[int, ...]]] = []
        row = (*node.shape[:-1], 1)
        if node.name in self.sums:
            found.append(("sum", node.shape))
        if self._scalars(node) is not None:
            found.append(("scalar", (1,) * len(node.shape)))
        if self._kernel(node).coarse and self._casts_early(node):
            found.append(("early", node.shape))
        if self._kernel(node).inner(False).precision < SIMULATED:
            if node.op == "layer_norm":
                found.append(("mean", row))
            if node.op in NORMS:
                found.append(("root", row))
            if node.op in ELEMENTWISE or node.op == "softmax":
                found.append(("inside", node.shape))
        if self.free and self._quantises(node):
            source = self.graph.node(node.inputs[0])
            found.append(("quantised", source.shape))
        if self.free and node.op == "cache" and self.numerics.kv_cache is not None:
            found.append(("quantised", node.shape))
        if self._casts_freely(node):
            found.append(("cast", node.shape))
        return found

    def _casts_freely(self, node: Node) -> bool:
        fine = self._format(node).precision >= SIMULATED
        return self.free and self._stores(node) and not fine

    def _versions(self) -> list[Version]:
        """Return all versions of results; one of each where casts are not free."""

        def rounded(node: Node) -> bool:
            return any(kind not in _SHARED for kind, _ in self._symbols(node))

        if not self._known:
            again = several(self.graph) if self.free else ()
            self._known.extend(versions(self.graph, again, rounded))
        return self._known

    @property
    def sums(self) -> frozenset[str]:
        """Return the nodes whose sums are formed in a format below float64."""
        sums = [node for node in self.graph.nodes if node.op in SUMS]
        formats = {node.name: self._kernel(node).inner(True) for node in sums}
        return frozenset(name for name, form in formats.items() if form.precision < SIMULATED)

    @property
    def ordered(self) -> frozenset[str]:
        """Return the nodes whose sums may have a concrete order; none with a tensor core."""
        return self.sums if self.numerics.tensor_core is None else frozenset()

    @property
    def batchable(self) -> bool:
        """Return whether runs can be simulated in a batch: x [n, T, D], symbols [n, ...]."""
        return self.numerics.tensor_core is None and batchable(self.graph)

    @property
    def steps(self) -> bool:
        """Return whether some rounding, of a quantiser or a store, is a step function."""
        stores = any(
            self._stores(node) and self._stores_by_steps(node) for node in self.graph.nodes
        )
        caches = self.numerics.kv_cache is not None
        quantises = caches or any(map(self._quantises, self.graph.nodes))
        tensors = any(self._tensor_quantiser(node) is not None for node in self.graph.nodes)
        return stores or tensors or (not self.free and quantises)

    def _computed_once(self, node: Node) -> bool:
        """Return whether a result is computed once for all of its readings."""
        return node.op in ONCE or self._tensor_quantiser(node) is not None

    def _tensor_quantiser(self, node: Node) -> StaticQuantiser | None:
        """Return the kernel's tensor quantiser at a node; None if there is none."""
        return self.numerics.quantiser(node) if node.op == "quantise" else None

    def _tensor(self, node: Node, x: Tensor, through: Through | None) -> Tensor:
        """Return a tensor after the kernel's tensor quantiser, if it has one."""
        by = self._tensor_quantiser(node)
        if by is None:
            return x

        def step(value: Tensor) -> Tensor:
            return quantised_tensor(value, by)

        return step(x) if through is None else through(_input_rounding(node), step, x)

    def _quantises(self, node: Node) -> bool:
        """Return whether a node is a linear whose input is quantised."""
        return node.op == "linear" and self._kernel(node).numerics.activations.quantised

    def _stores_by_steps(self, node: Node) -> bool:
        """Return whether storing a result rounds it by a step function."""
        precision = self._format(node).precision
        return not self.free and precision < max(24, self._compute_format(node).precision)

    def _casts_early(self, node: Node) -> bool:
        """Return whether a kernel may store a result before its bias, gain or sum."""
        biased = self.free and node.op == "linear" and len(node.inputs) > 2
        written = node.attrs.get("form", "fused") != "fused"
        return biased or node.op in NORMS or node.op == "rope" or (written and node.op == "silu")

    def _scalars(self, node: Node) -> tuple[float, float, float] | None:
        """Return the scalar of an operation and the least and greatest value that it may be
        rounded to; None if it is not rounded."""
        name = _SCALARS.get(node.op)
        if name is None:
            return None
        try:
            low, high = scalar_of(node, name, self._kernel(node))
        except NoBound:
            return None
        return None if low == high else (float(node.attrs[name]), low, high)

    def _operand_formats(self, node: Node) -> list[Format]:
        """Return the formats of a cast's operand that the format of its result cannot represent."""
        held = held_formats(self._nodes, node.inputs[0], self.numerics, handed=False)
        form = self._format(node)
        return [FORMATS[name] for name in held if not form.holds(FORMATS[name])]

    def _stores(self, node: Node) -> bool:
        if node.op == "cast":
            return bool(self._operand_formats(node))
        if node.op == "cache":
            return self.numerics.kv_cache is not None
        return node.op in STORED or (node.op == "input" and self._format(node).coarse)

    def run(
        self,
        x: Tensor | None,
        symbols: Mapping[str, Tensor],
        orders: Mapping[str, str] | None = None,
        through: Through | None = None,
    ) -> Tensor:
        """Return the block output for the input x [T, D] under the given roundings.

        `orders` gives an order to some of `ordered`, whose symbols are then ignored. `through` is
        called for every rounding to nearest. If `batchable`, x and symbols may have a leading
        batch dimension; each run is as it is alone up to last bits.

        Raises:
            Overflowed: a value leaves its format.
            Rerouted: a router may choose other experts than those of the graph.
        """
        unknown = uncached(self.graph) if self.numerics.kv_cache is not None else None
        if unknown is not None:
            raise Overflowed(f"no run of a kernel with a kv_cache is known: {unknown}")
        values: dict[str, Tensor] = {}
        formed: dict[str, tuple[Tensor, list[Tensor], Tensor]] = {}
        for version in self._versions():
            node, name = version.node, version.name
            cast = symbols.get(f"cast {name}")
            if node.op == "input":
                if x is None:
                    raise ValueError("the block reads hidden states")
                values[name] = self._store(node, x, cast, through)
                continue
            if version.first or not self._computed_once(node):
                operands = self._operands(version, values)
                if node.op == "linear":
                    symbol = symbols.get(f"quantised {node.name}")
                    operands[0] = self._quantised_input(node, operands[0], symbol, through)
                rows = values[version.rows] if version.rows else operands[0]
                if node.op == "cache":
                    symbol = symbols.get(f"quantised {node.name}")
                    value = self._cached(node, operands[0], symbol, through)
                elif node.op == "quantise":
                    value = self._tensor(node, operands[0], through)
                elif orders and node.name in orders:
                    form = self._kernel(node).numerics.accumulate
                    value = ordered_product(*factors(node, operands), form, orders[node.name])
                else:
                    value = exact(self.graph, node, operands, rows)
                    value = self._accumulated(node, value, symbols, operands)
                if node.op == "route":
                    refuse_other_route(node, value)
                formed[node.name] = value, operands, rows
            value, operands, rows = formed[node.name]
            value = self._rounded_inside(version, value, symbols, operands, rows)
            values[name] = self._store(node, value, cast, through)
        return values[self.graph.output]

    def _operands(self, version: Version, values: Mapping[str, Tensor]) -> list[Tensor]:
        found = []
        for index, (name, read) in enumerate(zip(version.node.inputs, version.reads, strict=True)):
            source = self.graph.node(name)
            if source.op not in ("param", "constant"):
                found.append(values[read])
            elif version.node.op == "linear" and index == 1:
                found.append(self.parameters.linear(source))
            elif version.node.op == "softmax" and index == 1:
                found.append(self.parameters.mask(source))
            else:
                found.append(self.parameters.plain(source))
        return found

    def _accumulated(
        self, node: Node, exact: Tensor, symbols: Mapping[str, Tensor], operands: Sequence[Tensor]
    ) -> Tensor:
        """Add the symbol of a sum times its error bound A_k,j at the values of this run."""
        symbol = symbols.get(f"sum {node.name}")
        if symbol is None:
            return exact
        kernel = self._kernel(node)
        numerics = kernel.numerics
        left, right, bias = factors(node, operands)
        total = left.abs() @ right.abs()
        if bias is not None:
            total = total + bias.abs()
        roundings, before = left.shape[-1], 2
        if node.role == "context":
            roundings += 2 * numerics.attention.tiles(roundings) + 4
        if node.role == "scores":
            before = numerics.attention.term_roundings
        error = sum_error(total, exact, FORMATS[numerics.accumulate], roundings, before)
        if numerics.tensor_core is not None:
            sizes = left.detach().abs(), right.detach().abs(), total.detach(), exact.detach().abs()
            named = self._quantises(node), self._weight(node)
            error = Sums(*sizes, kernel, roundings - left.shape[-1], before, *named).error()
        return exact + WITHIN * symbol * error

    def _rounded_inside(
        self,
        version: Version,
        value: Tensor,
        symbols: Mapping[str, Tensor],
        operands: Sequence[Tensor],
        rows: Tensor,
    ) -> Tensor:
        """Add the roundings inside of an operation to its exact result; `rows` is the operand of
        the mean and root of a norm, or of the row sums of a softmax."""
        node, named = version.node, {}
        for kind in ("scalar", "mean", "root", "inside", "early"):
            symbol = symbols.get(f"{kind} {node.name if kind in _SHARED else version.name}")
            if symbol is not None:
                named[kind] = WITHIN * symbol
        if not named:
            return value
        if "scalar" in named:
            value = value + self._moved_scalar(node, operands[0], named.pop("scalar"))
        kernel = self._kernel(node)
        return rounded_inside(node, value, named, operands, rows, kernel, self._format(node))

    def _moved_scalar(self, node: Node, x: Tensor, symbol: Tensor) -> Tensor:
        """Return the change of the result due to the rounded scalar of an operation."""
        found = self._scalars(node)
        if found is None:
            return torch.zeros_like(x)
        value, low, high = found
        other = value + symbol.clamp_min(0) * (high - value) + symbol.clamp_max(0) * (value - low)
        match node.op:
            case "scale":
                return x * (other - value)
            case "divide":
                return x * (1 / other - 1 / value)
            case _:
                return (other - value).expand_as(x)

    def _format(self, node: Node) -> Format:
        return self._kernel(node).format_for(node.role, node.op)

    def _compute_format(self, node: Node) -> Format:
        """Return the format in which a result is computed, before it is stored."""
        if node.op == "cast":
            held = [*self._operand_formats(node), self._format(node)]
            return max(held, key=lambda form: form.precision)
        return self._kernel(node).inner(node.op in SUMS)

    def _quantised_input(
        self, node: Node, x: Tensor, symbol: Tensor | None, through: Through | None
    ) -> Tensor:
        """Return the input of a linear after its quantisation."""
        if symbol is None and self.free:
            symbol = torch.zeros_like(x)  # left out
        if through is None or symbol is not None or not self._quantises(node):
            return self._quantised(node, x, symbol)
        return through(_input_rounding(node), lambda value: self._quantised(node, value, None), x)

    def _cached(
        self, node: Node, x: Tensor, symbol: Tensor | None, through: Through | None
    ) -> Tensor:
        """Return keys or values after the quantisation of a kernel with a cache."""
        if self.numerics.kv_cache is None:
            return x
        if symbol is None and self.free:
            symbol = torch.zeros_like(x)  # left out
        if x.dim() > len(node.shape):
            return _run_by_run(lambda one, own: self._cached(node, one, own, through), x, symbol)
        share = None if symbol is None else WITHIN * symbol.expand_as(x)

        def step(value: Tensor) -> Tensor:
            return cached(value, node, self.numerics, share)

        try:
            if through is None or symbol is not None:
                return step(x)
            return through(_input_rounding(node), step, x)
        except Exceeded as reason:
            raise Overflowed(f"{node.name}: {reason}") from None

    def _store(
        self, node: Node, value: Tensor, symbol: Tensor | None, through: Through | None
    ) -> Tensor:
        if not self._stores(node):
            return value
        format = self._format(node)
        cast = self.numerics.cast
        if self._stores_by_steps(node):

            def step(value: Tensor) -> Tensor:
                return straight_through(value, lambda still: cast.step(still, format))

            value = step(value) if through is None else through(node.name, step, value)
        elif symbol is not None and cast.toward_zero:
            value = value * (1 - format.unit_roundoff * (1 + WITHIN * symbol))
        elif symbol is not None:
            value = value * (1 + WITHIN * cast.units * format.unit_roundoff * symbol)
        if not bool((value.detach().abs() <= format.largest).all()):
            raise Overflowed(f"{node.name} leaves {format.name}")
        return value

    def _weight(self, node: Node) -> str:
        """Return the name of the weight of a linear; empty for other operations."""
        return str(self.graph.node(node.inputs[1]).attrs["key"]) if node.op == "linear" else ""

    def _quantised(self, node: Node, x: Tensor, symbol: Tensor | None) -> Tensor:
        """Return the quantised input of a linear: x + s·Q, or to nearest without a symbol."""
        numerics = self._kernel(node).numerics
        if not numerics.activations.quantised:
            return x
        if numerics.cast.units != 1:
            raise Overflowed(f"{node.name}: no run of a quantiser beside directed casts is known")
        runs_share = numerics.activations.scale not in _BY_ROWS
        if runs_share and x.dim() > len(self.graph.node(node.inputs[0]).shape):
            return _run_by_run(lambda one, own: self._quantised(node, one, own), x, symbol)
        weight = self._weight(node)
        try:
            if symbol is not None:
                return moved_by(x, numerics, weight, WITHIN * symbol)
            return to_nearest(x, numerics, weight)
        except Exceeded as reason:
            raise Overflowed(f"{node.name}: {reason}") from None


def refuse_other_route(node: Node, logits: Tensor) -> None:
    """Raise Rerouted unless all chosen logits of a run are above all others."""
    chosen = chosen_mask(node, logits.device)
    least = logits.detach().masked_fill(~chosen, torch.inf).amin(-1)
    others = logits.detach().masked_fill(chosen, -torch.inf).amax(-1)
    if not bool((least > others).all()):
        raise Rerouted(f"{node.name}: a run chooses other experts")


def _run_by_run(
    of: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, symbol: Tensor | None
) -> Tensor:
    """Apply a function of values and symbols to each run of a batch separately."""
    symbols = [None] * len(x) if symbol is None else list(symbol.expand_as(x))
    return torch.stack([of(one, own) for one, own in zip(x, symbols, strict=True)])


def _input_rounding(node: Node) -> str:
    """Return the name of the rounding of a linear's input."""
    return f"{node.name}/input"
