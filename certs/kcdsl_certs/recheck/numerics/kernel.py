"""Roundings of one kernel, and their sizes (docs/proofs/relational-interval.md, section 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.numerics.formats import (
    CODES,
    FLOAT32,
    FLOAT64,
    FORMATS,
    Floats,
    Format,
    cut,
    layout_of,
    nearest,
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A tensor core: an instruction adds `chunk` products, truncated `below` bits under the largest
    exponent; the accumulator has `kept` bits and is added to a sum after `promote` products."""

    below: int
    chunk: int
    kept: int
    promote: int


@dataclass(frozen=True, slots=True)
class Static:
    """Calibrated quantisers of the inputs of linears, by the linear's name; "*" for all others."""

    scales: tuple[tuple[str, tuple[float, ...]], ...]
    zeros: tuple[tuple[str, int], ...]

    def of(self, key: str, kind: str) -> tuple[tuple[float, ...], int]:
        """Return the scales and the zero point for the linear with this weight.

        Raises Rejected "rule/static-scale" if it has none.
        """
        names = (key.removesuffix(".weight"), "*")
        scales = [found for name in names for at, found in self.scales if at == name]
        zeros = [found for name in names for at, found in self.zeros if at == name]
        if not key or not scales or (CODES[kind].shifted and not zeros):
            raise Rejected("rule/static-scale", f"the input of {key!r} has no static scale")
        return scales[0], zeros[0] if zeros else 0


@dataclass(frozen=True, slots=True)
class Cache:
    """The quantisation of keys and values: their code format, the layout of dynamic scales
    ("per_head", "per_token_head", "per_tensor", "none"), or static scales of keys and values."""

    kind: str
    scale: str
    least_scale: float
    keys: Static | None = None
    values: Static | None = None

    @property
    def static(self) -> bool:
        """Return whether the scales are static."""
        return self.keys is not None


@dataclass(frozen=True, slots=True)
class TensorCodes:
    """The quantisation of a tensor to codes 0 to 255: code c is the number (c - `zero`)·`scale`."""

    scale: float
    zero: int


@dataclass(frozen=True, slots=True)
class KernelNumerics:
    """The roundings that one kernel may make, and their sizes."""

    compute: Format
    accumulate: Format
    stepped: bool  # casts are a known step function, not free
    weights: tuple[str, str]
    activations: tuple[str, str]
    fused: bool
    scores: Format
    probabilities: Format
    tile: int
    exp_ulps: int
    results: tuple[tuple[str, Format], ...] = ()
    linear_unit: Unit | None = None
    other_unit: Unit | None = None
    absolute_sigmoid: bool = False
    static: Static | None = None
    inward: bool = False  # casts round toward zero
    units: int = 1  # the error of a cast in multiples of u and η
    cut_weights: bool = False  # parameters are rounded toward zero
    shards: int = 1  # parts of a linear, stored and added in the compute format
    shortened: bool = False  # matrix products read their operands as tfloat32
    paired: bool = False  # linears sum two products of bytes at a time, in 16 bits
    scale_format: Format = FLOAT32  # of the scales of weights
    late: str = ""  # "sums": scales of weights multiply sums of codes; "stored_sums": stored ones
    least_scale: float = 0.0  # of dynamic scales of activations
    amax_limit: float = math.inf  # upper limit of the amax of dynamic scales
    batch_amax: float = 0.0  # upper bound of all numbers of a batch that shares a scale
    cache: Cache | None = None  # None: keys and values are not quantised
    tensors: tuple[tuple[str, TensorCodes], ...] = ()  # tensors stored as codes, by name
    served: bool = False  # its weights are those of the inference kernel's checkpoint
    base: KernelNumerics | None = None  # the kernel of which `at` made this for a pinned format
    others: tuple[
        tuple[str, KernelNumerics], ...
    ] = ()  # by pattern, kernels as linears of that name have

    def serving(self, key: str) -> KernelNumerics:
        """Return the kernel for the linear with this weight: the override of its own name, else
        that of the patterns that match.

        Raises Rejected "rule/override" if matching patterns differ.
        """
        if not self.others:
            return self
        name = key.removesuffix(".weight")
        named = [kernel for pattern, kernel in self.others if pattern == name]
        fitting = named or [kernel for pattern, kernel in self.others if fits(pattern, name)]
        if not fitting:
            return self
        if any(kernel != fitting[0] for kernel in fitting):
            raise Rejected("rule/override", f"patterns that fit {name[:80]!r} disagree")
        return replace(self, **{field: getattr(fitting[0], field) for field in _OF_LINEARS})

    def at(self, node: Node) -> KernelNumerics:
        """Return the kernel for a node: if the node pins a format, one that computes in this
        format, with sums in float32 at best; for a softmax of no attention, one that stores
        probabilities as results.

        Raises Rejected "rule/format" for a fused attention whose own format the pinned one does
        not hold.
        """
        if not node.format:
            stored = self.result(node.op, node.role) if node.op == "softmax" else None
            if stored in (None, self.probabilities):
                return self
            return replace(self, probabilities=stored, base=self.own)
        form = FORMATS[node.format]
        if node.role and self.fused:
            if not form.holds(self.result("", node.role)):
                raise Rejected("rule/format", f"a fused attention stored in {form.name}")
            return self
        single = self.accumulate == FLOAT64 and form != FLOAT64
        return replace(
            self,
            compute=form,
            accumulate=FLOAT32 if single else self.accumulate,
            scores=form,
            probabilities=form,
            results=(),
            base=self.own,
        )

    @property
    def coded_weights(self) -> bool:
        """Return whether weights of linears are codes with scales."""
        return self.weights[1] != "none"

    @property
    def coded_inputs(self) -> bool:
        """Return whether inputs of linears are codes."""
        return self.activations[0] != "none"

    @property
    def scaled_inputs(self) -> bool:
        """Return whether inputs of linears are codes with scales."""
        return self.activations[1] != "none"

    @property
    def static_inputs(self) -> bool:
        """Return whether inputs of linears are codes with calibrated scales."""
        return self.activations[1] == "static"

    @property
    def by_codes(self) -> bool:
        """Return whether linears may sum products of codes and apply scales to the sum."""
        return self.coded_inputs or self.late != ""

    @property
    def before_sums(self) -> int:
        """Return the number of roundings of a term of a linear before it is added.

        Besides that of the product, products of codes have those of the weight and of both scales,
        wherever the kernel multiplies by them; a scale of NVFP4 is a rounded product itself.
        """
        if not self.by_codes:
            return 2
        return 4 + sum(layout_of(scale).nested for _, scale in (self.weights, self.activations))

    @property
    def most_code(self) -> float:
        """Return the largest code of the weights, less its zero point."""
        code = CODES[self.weights[0]]
        return max(code.last, code.below)

    @property
    def own(self) -> KernelNumerics:
        """Return the kernel for nodes that pin no format."""
        return self.base or self

    @property
    def holding(self) -> Format:
        """Return the format in which parameters are stored."""
        return self.own.compute

    def reads(self, nodes: Mapping[str, Node], name: str, handed: bool) -> list[Format]:
        """Return formats such that each number of a node is in one of them.

        If another block stored the input (`handed`), its formats are not known.
        """
        kernel, found, waiting = self.own, [], [name]
        while waiting:
            node = nodes[waiting.pop()]
            named = node.attrs.text("tensor") if node.op == "quantise" else None
            if named is not None and any(tensor == named for tensor, _ in kernel.tensors):
                found.append(FLOAT32)
                continue
            if node.op in _UNROUNDED:
                waiting += node.inputs
                continue
            if node.op in ("param", "constant"):
                form = FORMATS[node.format] if node.format else kernel.compute
                form = FLOAT32 if form == FLOAT64 and not node.format else form
            elif node.op == "input":
                form = FLOAT64 if handed else kernel.result("input", "")
                form = FLOAT32 if not handed and form.precision > FLOAT32.precision else form
            elif node.op == "softmax" and kernel.fused:
                form = FLOAT64
            else:
                form = kernel.at(node).result(node.op, node.role)
            found.append(form)
        return found

    def refuse_wide(self, nodes: Mapping[str, Node], node: Node) -> None:
        """Refuse a sum or product whose operand has a pinned format that the result's format does
        not hold: some kernels round such an operand first.

        Raises Rejected "rule/format".
        """
        form = self.result(node.op, node.role)
        for name in node.inputs if node.op in ("add", "sub", "mul") else ():
            read = nodes[name]
            while read.op in _UNROUNDED and read.inputs and read.op != "embedding":
                read = nodes[read.inputs[0]]
            if read.format and not form.holds(FORMATS[read.format]):
                raise Rejected("rule/format", f"{form.name} does not hold what {name[:80]!r} is")

    def scalar(self, value: float, node: Node) -> tuple[float, float]:
        """Return the least and the greatest number that a kernel may use for a Python scalar:
        itself, or its rounding to the format of the result. The error of rounding it to the format
        of the operation's arithmetic is counted in that operation.

        Raises Rejected "bound/overflow".
        """
        if node.role == "scores" and node.op in ("scale", "divide"):
            return value, value
        return self.number(value, self.result(node.op, node.role), self.inner)

    def number(self, value: float, form: Format, inner: Format) -> tuple[float, float]:
        """Return the least and the greatest of a number and its roundings to a format; the number
        alone if the format is as precise as the arithmetic inside, where the rounding is counted.

        Raises Rejected "bound/overflow".
        """
        if form.precision >= inner.precision:
            return value, value
        steps = _neighbours(value, form) if self.units != 1 else [_to_nearest(value, form)]
        if max(map(abs, (value, *steps))) > form.largest:
            raise Rejected("bound/overflow", f"the number {value} may overflow {form.name}")
        return min(value, *steps), max(value, *steps)

    def off(self, form: Format) -> tuple[float, float]:
        """Return u and η of one cast into a format: its relative error, and its error near zero."""
        return self.units * form.u, self.units * form.eta

    def result(self, op: str, role: str) -> Format:
        """Return the format in which the result of an operation is stored."""
        special = {"scores": self.scores, "probabilities": self.probabilities}
        if role in special:
            return special[role]
        for key in (role, op):
            for name, form in self.results:
                if name == key:
                    return form
        return self.compute

    @property
    def inner(self) -> Format:
        """Return the format inside softmax, norms, activations and elementwise arithmetic."""
        return FLOAT64 if self.compute == FLOAT64 else FLOAT32

    @property
    def coarse(self) -> bool:
        """Return whether compute is coarser than float32."""
        return self.compute.precision < FLOAT32.precision


# The fields of a kernel that an override replaces.
_OF_LINEARS = (
    *("weights", "cut_weights", "scale_format", "late", "activations", "static", "least_scale"),
    *("amax_limit", "batch_amax", "paired", "others"),
)


def fits(pattern: str, name: str) -> bool:
    """Return whether a name matches a pattern; "*" matches any text and "?" any character."""
    ends = {0}  # lengths of the prefixes of the name that the pattern's prefix matches
    for sign in pattern:
        if sign == "*":
            ends = set(range(min(ends), len(name) + 1))
        else:
            ends = {at + 1 for at in ends if at < len(name) and sign in ("?", name[at])}
        if not ends:
            return False
    return len(name) in ends


_UNROUNDED = ("view", "concat", "neg", "relu", "embedding", "route", "quantise")


def _grid(value: float, form: Format) -> Fraction:
    """Return the distance of the numbers of a format around a value, away from zero."""
    exponent = max(math.frexp(value)[1] - 1, form.least)
    return Fraction(2) ** (exponent - form.precision + 1)


def _neighbours(value: float, form: Format) -> list[float]:
    steps = Fraction(value) / _grid(value, form)
    return [float(whole * _grid(value, form)) for whole in (math.floor(steps), math.ceil(steps))]


def _to_nearest(value: float, form: Format) -> float:
    return float(round(Fraction(value) / _grid(value, form)) * _grid(value, form))


def stepped(values: Floats, target: Format, kernel: KernelNumerics) -> Floats:
    """Return values after a kernel's cast that is a step function (nearest, or toward zero)."""
    return (cut if kernel.inward else nearest)(values, target)
