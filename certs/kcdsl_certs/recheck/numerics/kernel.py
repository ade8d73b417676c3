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
    nearest,
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A matrix unit: `chunk` products an instruction, cut off `below` bits under the largest
    exponent; the accumulator keeps `kept` bits, and is added to a sum after `promote` products."""

    below: int
    chunk: int
    kept: int
    promote: int


@dataclass(frozen=True, slots=True)
class Static:
    """Calibrated quantisers of the inputs of linears, by their names; "*": of those not named."""

    scales: tuple[tuple[str, tuple[float, ...]], ...]
    zeros: tuple[tuple[str, int], ...]

    def of(self, key: str, kind: str) -> tuple[tuple[float, ...], int]:
        """Return the scales and the zero point for the linear with this weight.

        Raises Rejected "rule/static-scale" where there are none.
        """
        names = (key.removesuffix(".weight"), "*")
        scales = [found for name in names for at, found in self.scales if at == name]
        zeros = [found for name in names for at, found in self.zeros if at == name]
        if not key or not scales or (kind == "uint8" and not zeros):
            raise Rejected("rule/static-scale", f"the input of {key!r} has no static scale")
        return scales[0], zeros[0] if zeros else 0


@dataclass(frozen=True, slots=True)
class Cache:
    """How keys and values are stored: as codes of a format, with scales of a layout ("per_head",
    "per_token_head", "per_tensor", "none"), or static ones of keys and of values."""

    kind: str
    scale: str
    least_scale: float
    keys: Static | None = None
    values: Static | None = None


@dataclass(frozen=True, slots=True)
class TensorCodes:
    """How a tensor is stored: as codes 0 to 255, of which `zero` stands for 0 and each further one
    for `scale` more."""

    scale: float
    zero: int


@dataclass(frozen=True, slots=True)
class KernelNumerics:
    """What one kernel may round, and how far."""

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
    inward: bool = False  # casts go toward zero
    units: int = 1  # of u and η in one cast
    cut_weights: bool = False  # parameters are cut off toward zero
    shards: int = 1  # parts of a linear, stored and added in the compute format
    shortened: bool = False  # products of matrices read tfloat32
    paired: bool = False  # linears sum two products of bytes at a time, in 16 bits
    scale_format: Format = FLOAT32  # of the scales of weights
    late: str = ""  # "sums": scales of weights multiply sums of codes; "stored_sums": stored ones
    least_scale: float = 0.0  # of dynamic scales of activations
    amax_limit: float = math.inf  # what dynamic scales are made of is no larger
    batch_amax: float = 0.0  # no number of a batch that shares a scale is larger
    cache: Cache | None = None  # None: keys and values are read as they are computed
    tensors: tuple[tuple[str, TensorCodes], ...] = ()  # that are stored as codes, by name
    served: bool = False  # its weights are those of the inference kernel's checkpoint
    base: KernelNumerics | None = None  # where a node pins its format: the kernel itself
    others: tuple[
        tuple[str, KernelNumerics], ...
    ] = ()  # by pattern, kernels as linears of that name have

    def serving(self, key: str) -> KernelNumerics:
        """Return the kernel as it computes the linear with this weight: by its own name, else by
        the patterns that fit, which must say the same.

        Raises Rejected "rule/override".
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
        """Return the kernel as it computes a node: where the program stores the result in a format
        of its own, as one that computes in that, with sums in float32 at best.

        Raises Rejected "rule/format" for a fused attention whose own format is not held by it.
        """
        if not node.format:
            return self
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
    def by_codes(self) -> bool:
        """Return whether the terms of linears may be codes, with scales after the sum."""
        return self.activations[0] != "none" or self.late != ""

    @property
    def before_sums(self) -> int:
        """Return the roundings of a term of a linear before it is added.

        Products of codes have those of the weight and of both scales, wherever the kernel
        multiplies them in, beside that of the product; a scale of NVFP4 is a rounded product
        itself.
        """
        if not self.by_codes:
            return 2
        return 4 + (self.weights[1], self.activations[1]).count("nvfp4")

    @property
    def most_code(self) -> float:
        """Return the largest code of the weights, less its zero point."""
        code = CODES[self.weights[0]]
        return max(code.last, code.below)

    @property
    def own(self) -> KernelNumerics:
        """Return the kernel as it computes what has no format of its own."""
        return self.base or self

    @property
    def holding(self) -> Format:
        """Return the format in which parameters are held."""
        return self.own.compute

    def reads(self, nodes: Mapping[str, Node], name: str, handed: bool) -> list[Format]:
        """Return the formats of the numbers of a node: each of them is one of these.

        Where another block stored the input (`handed`), nothing is known of that.
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
        """Refuse a sum or product that reads a pinned format which its result does not hold: some
        kernels round such an operand first.

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
        """Return the least and the greatest number that a kernel may take for a Python scalar:
        itself, or what it is in the format of the result. The inside of an operation counts what
        rounding it to that of its arithmetic adds.

        Raises Rejected "bound/overflow".
        """
        if node.role == "scores" and node.op in ("scale", "divide"):
            return value, value
        return self.number(value, self.result(node.op, node.role), self.inner)

    def number(self, value: float, form: Format, inner: Format) -> tuple[float, float]:
        """Return the least and the greatest of a number and what it may be in a format; where that
        is as precise as the arithmetic inside, which counts it, the number alone.

        Raises Rejected "bound/overflow".
        """
        if form.precision >= inner.precision:
            return value, value
        steps = _neighbours(value, form) if self.units != 1 else [_to_nearest(value, form)]
        if max(map(abs, (value, *steps))) > form.largest:
            raise Rejected("bound/overflow", f"the number {value} may overflow {form.name}")
        return min(value, *steps), max(value, *steps)

    def off(self, form: Format) -> tuple[float, float]:
        """Return u and η of one cast into a format: what it is off by, relatively and near zero."""
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


# What an override changes of a kernel.
_OF_LINEARS = (
    *("weights", "cut_weights", "scale_format", "late", "activations", "static", "least_scale"),
    *("amax_limit", "batch_amax", "paired", "others"),
)


def fits(pattern: str, name: str) -> bool:
    """Say whether a name fits a pattern, "*" standing for any text and "?" for any character."""
    ends = {0}  # of the parts of the name that what was read of the pattern fits
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
    """Return what a kernel's cast makes of values, where it is a step function."""
    return (cut if kernel.inward else nearest)(values, target)
