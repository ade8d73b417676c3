"""Numerics specifications: the roundings of a kernel (docs/proofs/relational-interval.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.model.numerics.formats import (
    CASTS,
    CODE_FORMATS,
    FORMATS,
    LAYOUTS,
    Casts,
    CodeFormat,
    Format,
    ScaleLayout,
)

if TYPE_CHECKING:
    from kcdsl.model.graph import Node


@dataclass(frozen=True, slots=True)
class Weights:
    """The storage of parameters: `format` is a float format or a code format; `scale` is "none" (a
    plain cast) or a scale layout (`formats`), whose scales are stored in `scale_format`.
    Dequantised values are rounded to float32, then to the compute format. `rounding` is "nearest"
    or, without a scale, "toward_zero"; it applies to every parameter and constant.

    `applied` is the place of scales: "weights", before the product; "sums" of products of codes; or
    "stored_sums", sums that were stored in the compute format first."""

    format: str
    scale: str = "none"
    rounding: str = "nearest"
    scale_format: str = "float32"
    applied: str = "weights"

    @property
    def codes(self) -> CodeFormat:
        """Return the code format of weights with a scale."""
        return CODE_FORMATS[self.format]

    @property
    def layout(self) -> ScaleLayout | None:
        """Return the scale layout; None for a plain cast."""
        return LAYOUTS.get(self.scale)

    def to_json(self) -> dict[str, Any]:
        """Return the record; fields after `scale` are left out at their defaults."""
        return _record(self, "scale")


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The static quantiser of one linear's input: one scale, or one for each input channel, and
    the zero point that codes of uint8 have."""

    scales: tuple[float, ...]
    zero_point: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Quantisation of the input of every linear: `format` is "none" or a code format; `scale` is
    "none", "static", or a layout of dynamic scales (`formats`).

    Dynamic scales are at least `least_scale`, and magnitudes are clipped to `amax_limit`.
    `batch_amax` is the largest magnitude of any batch, whose elements share the scale of layout
    "per_batch".

    Static scales are calibrated: `input_scale` and, for uint8, `input_zero_point` are sorted
    pairs of a linear name ("*": all other linears) and its float32 scales or zero point.
    With layout "nvfp4", `input_scale` may give the scales of tensors.
    """

    format: str = "none"
    scale: str = "none"
    input_scale: tuple[tuple[str, tuple[float, ...]], ...] = ()
    input_zero_point: tuple[tuple[str, int], ...] = ()
    least_scale: float = 0.0
    amax_limit: float = math.inf
    batch_amax: float = 0.0

    @property
    def quantised(self) -> bool:
        """Return whether inputs are quantised."""
        return self.format != "none"

    @property
    def static(self) -> bool:
        """Return whether scales are calibrated."""
        return self.scale == "static"

    @property
    def codes(self) -> CodeFormat:
        """Return the code format of quantised inputs."""
        return CODE_FORMATS[self.format]

    @property
    def layout(self) -> ScaleLayout | None:
        """Return the layout of dynamic scales; None without scales or with static ones."""
        return LAYOUTS.get(self.scale)

    @property
    def nested(self) -> bool:
        """Return whether scales of groups are multiples of the scale of the tensor."""
        return self.layout is not None and self.layout.rule == "nested"

    @property
    def cuts(self) -> bool:
        """Return whether saturation of codes may exceed a rounding error."""
        full = self.quantised and self.codes.cuts
        layout = self.layout is not None and self.layout.cuts
        return full or layout or self.amax_limit < math.inf

    def calibrated(self, weight: str) -> Calibrated | None:
        """Return the static quantiser of the linear with this weight; None where it has none.

        The name of a linear is that of its weight without ".weight".
        """
        name = linear_name(weight)
        scales, zeros = dict(self.input_scale), dict(self.input_zero_point)
        found = scales.get(name, scales.get("*")) if name else None
        if found is None:
            return None
        zero = zeros.get(name, zeros.get("*"))
        if self.codes.zero_point and zero is None:
            return None
        return Calibrated(found, zero or 0)

    def to_json(self) -> dict[str, Any]:
        """Return the record, with scales and magnitudes as float.hex()."""
        return _record(self, "format", "scale")


def plain_weights(numerics: Numerics) -> tuple[Weights, ...]:
    """Return the specifications of unquantised weights in the compute format."""
    return tuple(Weights(form) for form in (numerics.compute, "float32", "float64"))


def sums_of_bytes(weights: Weights, activations: Activations) -> bool:
    """Return whether products of unsigned with signed bytes may be summed in 16 bits."""
    signed = weights.format in CODE_FORMATS and weights.codes.signed_byte
    one = weights.scale in ("per_tensor", "per_channel")
    return signed and one and activations.quantised and activations.codes.zero_point


Scales = tuple[tuple[str, tuple[float, ...]], ...]
_GROUPS = {"per_head": "per_token", "per_token_head": "per_token"}


@dataclass(frozen=True, slots=True)
class KvCache:
    """The storage of keys and values: codes of `format`, dequantised to the compute format.

    `scale` is "none", "static", or the layout of dynamic scales: "per_tensor", "per_head" (all rows
    of one head) or "per_token_head" (one row of one head).
    Dynamic scales are at least `least_scale`. Static ones are `key_scale` and `value_scale`: one
    for all heads, or one per head of the product that reads them, by the name of the linear that
    computes the keys or values ("*": all other linears).
    """

    format: str
    scale: str
    key_scale: Scales = ()
    value_scale: Scales = ()
    least_scale: float = 0.0

    @property
    def static(self) -> bool:
        """Return whether scales are calibrated."""
        return self.scale == "static"

    @property
    def by_head(self) -> bool:
        """Return whether all rows of a head share a scale."""
        return self.scale == "per_head"

    def quantiser(self, part: str, source: str) -> Activations | None:
        """Return the quantiser of "keys" or "values" in the form of a linear's input quantiser, for
        elements arranged by `CacheRows`; None where a static scale is missing.

        `source` is the weight of the linear that computes them, "" where there is no single one.
        """
        if not self.static:
            layout = _GROUPS.get(self.scale, self.scale)
            return Activations(self.format, layout, least_scale=self.least_scale)
        scales = dict(self.key_scale if part == "keys" else self.value_scale)
        found = scales.get(linear_name(source), scales.get("*"))
        return None if found is None else Activations(self.format, "static", (("*", found),))

    def to_json(self) -> dict[str, Any]:
        """Return the record, with scales as float.hex()."""
        return _record(self)


@dataclass(frozen=True, slots=True)
class StaticQuantiser:
    """The static quantiser of one tensor: x becomes (code - zero_point) · scale with
    code = clip(round(x/scale) + zero_point, 0, 255), ties to even."""

    scale: float
    zero_point: int

    def to_json(self) -> dict[str, Any]:
        """Return the record, with the scale as float.hex()."""
        return _record(self)


def linear_name(weight: str) -> str:
    """Return the name of a linear from the checkpoint key of its weight."""
    return weight.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Override:
    """`weights` and `activations` of the linears whose names match `pattern` ("*": any text, "?":
    any character), in place of those of the kernel."""

    pattern: str
    weights: Weights
    activations: Activations

    @property
    def exact(self) -> bool:
        """Return whether the pattern is a plain name."""
        return not any(sign in self.pattern for sign in "*?")

    def fits(self, weight: str) -> bool:
        """Return whether the linear with this weight matches the pattern."""
        return fnmatchcase(linear_name(weight), self.pattern)

    def to_json(self) -> dict[str, Any]:
        """Return the record, which is stored under the pattern."""
        return {"weights": self.weights.to_json(), "activations": self.activations.to_json()}


@dataclass(frozen=True, slots=True)
class Attention:
    """The computation of operations with an attention role.

    `style` "composed" (each op by itself) or "fused" (online softmax, tiles of `tile` keys).
    """

    style: str
    scores: str
    probabilities: str
    tile: int
    exp_ulps: int

    @property
    def fused(self) -> bool:
        """Return whether one kernel computes scores, probabilities and context."""
        return self.style == "fused"

    def to_json(self) -> dict[str, Any]:
        """Return the record."""
        return _record(self)

    @property
    def term_roundings(self) -> int:
        """Return the largest number of roundings of a term of a score before it is added."""
        return 6 if self.fused else 2

    def tiles(self, columns: int) -> int:
        """Return the number of key tiles of a kernel."""
        return math.ceil(columns / self.tile) if self.fused else 1


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    """A matrix unit (docs/proofs/relational-interval.md, section 3).

    One instruction adds up to `chunk` exact products to an accumulator. Every term and the
    accumulator are truncated `fraction_bits` below the largest of their exponents; the sum is
    truncated to `result_bits` bits after the leading one. After `promote` products (0: never) the
    accumulator is added to a sum in the accumulate format and reset to 0.
    """

    fraction_bits: int
    chunk: int
    result_bits: int
    promote: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the record of the unit."""
        return _record(self, "promote")


@dataclass(frozen=True, slots=True)
class TensorCore:
    """The matrix units of a kernel: `linears` for linears with quantised inputs, `others` for all
    other matrix products."""

    linears: MatrixUnit
    others: MatrixUnit

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return the record of both units."""
        return _record(self)


@dataclass(frozen=True, slots=True)
class Numerics:
    """A resolved specification: every field has its final value.

    `compute` is the format of parameters, constants and of every operation's result;
    `accumulate` that of dot products; inside softmax, norms, activations and elementwise maps the
    arithmetic is float32 (float64 where `compute` is).
    `casts` is "nearest" (each result is rounded to nearest once), "toward_zero" (truncated), or a
    free relative error at any place where a fused kernel may round: "any" (one unit roundoff),
    "any_toward_zero" (two, toward zero) or "any_direction" (two, either way).
    `results` names the results that have another format than `compute`, as sorted pairs: "input",
    "context", or an operation; scores and probabilities have theirs from `attention`.
    `tensor_core` None: sums are rounded to nearest in the accumulate format.
    `sigmoid` is the accuracy of the sigmoid in silu: "relative" (some units in its last place) or
    "absolute" (some units in the last place of 1, however small it is).
    `byte_sums` says how linears sum products of unsigned with signed bytes: "wide" (exactly), or
    "int16_pairs" (two products at a time in 16 bits, where they saturate).
    `shards`: the largest number of devices among which a linear may be split along its inputs;
    their results are stored in `compute` and added in it, in any order. `products` is "compute", or
    "tfloat32": operands of matrix products are truncated to tfloat32. `overrides` gives linears
    other `weights` and `activations`, sorted by pattern. `kv_cache` None: keys and values are not
    stored in another format. `quantisers` are static quantisers of single tensors, sorted by the
    program's tensor names: every reader gets the same quantised number, whatever `casts` is.
    """

    preset: str
    compute: str
    accumulate: str
    casts: str
    weights: Weights
    activations: Activations
    attention: Attention
    results: tuple[tuple[str, str], ...] = ()
    tensor_core: TensorCore | None = None
    sigmoid: str = "relative"
    byte_sums: str = "wide"
    products: str = "compute"
    shards: int = 1
    overrides: tuple[Override, ...] = ()
    kv_cache: KvCache | None = None
    quantisers: tuple[tuple[str, StaticQuantiser], ...] = ()

    def quantiser(self, node: Node) -> StaticQuantiser | None:
        """Return the quantiser of a node `quantise`; None where the node is the identity."""
        return dict(self.quantisers).get(str(node.attrs["tensor"]))

    def serving(self, weight: str) -> Numerics:
        """Return the numerics of the linear with this weight, overrides applied.

        A plain name has priority over patterns; all matching patterns must agree. `byte_sums` is
        kept only where both factors are bytes.

        Raises:
            Refusal: two patterns disagree.
        """
        if not self.overrides:
            return self
        fitting = [each for each in self.overrides if each.fits(weight)]
        fitting = [each for each in fitting if each.exact] or fitting
        found = fitting[0] if fitting else Override("*", self.weights, self.activations)
        for other in fitting[1:]:
            if (other.weights, other.activations) != (found.weights, found.activations):
                raise refuse(
                    codes.NUMERICS,
                    f"the overrides {found.pattern!r} and {other.pattern!r} differ, and the linear"
                    f" {linear_name(weight)!r} fits both",
                    help="write an override with the name of the linear, which goes before both",
                )
        bytes_left = sums_of_bytes(found.weights, found.activations)
        return replace(
            self,
            weights=found.weights,
            activations=found.activations,
            byte_sums=self.byte_sums if bytes_left else "wide",
            overrides=(),
        )

    @property
    def by_codes(self) -> bool:
        """Return whether linears may multiply codes, so that scales are applied after the sum."""
        return self.activations.quantised or self.weights.applied != "weights"

    @property
    def sections(self) -> tuple[tuple[Weights, Activations], ...]:
        """Return the weights and activations of the kernel and of every override."""
        own = (self.weights, self.activations)
        return (own, *((each.weights, each.activations) for each in self.overrides))

    @property
    def calibrated_linears(self) -> tuple[str, ...]:
        """Return the linears that static scales of inputs, keys and values name, sorted."""
        given = [pairs for _, a in self.sections for pairs in (a.input_scale, a.input_zero_point)]
        if self.kv_cache is not None:
            given += [self.kv_cache.key_scale, self.kv_cache.value_scale]
        return tuple(sorted({name for pairs in given for name, _ in pairs} - {"*"}))

    @property
    def cast(self) -> Casts:
        """Return the rounding of casts. Raises KeyError for an unknown value of `casts`."""
        return CASTS[self.casts]

    @property
    def function_format(self) -> Format:
        """Return the format of the arithmetic inside softmax, norms, activations and elementwise
        maps."""
        return FORMATS["float64" if self.compute == "float64" else "float32"]

    def stored_format(self, op: str, role: str) -> str:
        """Return the name of the format in which the result of an operation is stored.

        The probabilities of a composed attention have a format of their own; those of a fused one
        stay inside the softmax.
        """
        if role == "scores":
            return self.attention.scores
        if role == "probabilities":
            return self.attention.probabilities
        named = dict(self.results)
        return named.get(role) or named.get(op) or self.compute

    def pinned(self, format: str, role: str = "") -> Numerics | None:
        """Return the numerics of an operation whose result the program stores in `format`.

        They are those of a kernel with this compute format, with sums in at most float32; "": the
        kernel's own. The results of a fused attention have the formats of that kernel, which the
        pinned format must contain; otherwise there is no rule (None).
        """
        if not format:
            return self
        if role and self.attention.fused:
            own = FORMATS[self.stored_format("", role)]
            return self if FORMATS[format].holds(own) else None
        single = self.accumulate == "float64" and format != "float64"
        return replace(
            self,
            compute=format,
            accumulate="float32" if single else self.accumulate,
            attention=replace(self.attention, scores=format, probabilities=format),
            results=(),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record that proofs, certificates and kernel fingerprints carry.

        Fields after `attention` are left out at their defaults.
        """
        record = _record(self)
        if self.overrides:
            record["overrides"] = {each.pattern: each.to_json() for each in self.overrides}
        return record


def _record(one: Any, *always: str) -> dict[str, Any]:
    """Return a dataclass as JSON without fields at their default, except those named."""
    return {
        field.name: _plain(getattr(one, field.name))
        for field in fields(one)
        if field.name in always or getattr(one, field.name) != field.default
    }


def _plain(value: Any) -> Any:
    """Return a value as JSON: floats as float.hex(), pairs as an object."""
    match value:
        case float():
            return value.hex()
        case tuple() if all(isinstance(each, tuple) and len(each) == 2 for each in value):
            return {name: _plain(given) for name, given in value}
        case tuple():
            return [_plain(each) for each in value]
        case _ if hasattr(value, "to_json"):
            return value.to_json()
        case _:
            return value


def narrower(nodes: Mapping[str, Node], node: Node, numerics: Numerics) -> str | None:
    """Return an operand of a sum or product whose pinned format the result does not hold.

    Kernels may or may not round it first: PyTorch rounds zero-dimensional tensors in sums but not
    in products. For the numbers of scale, divide and shift both are possible.
    """
    form = FORMATS[numerics.stored_format(node.op, node.role)]
    for name in node.inputs:
        source = nodes[name]
        while source.op in UNROUNDED and source.op != "embedding":
            source = nodes[source.inputs[0]]
        if source.format and not form.holds(FORMATS[source.format]):
            return name
    return None


UNROUNDED = frozenset({"view", "concat", "neg", "relu", "embedding", "route", "quantise"})
"""Operations that store nothing; inputs, parameters and constants are already stored. `quantise`
gives float32 numbers in a kernel that has a quantiser there."""


def held_formats(
    nodes: Mapping[str, Node], name: str, numerics: Numerics, *, handed: bool
) -> frozenset[str]:
    """Return formats that all contain the numbers of a node.

    `handed`: another block stored the input, so nothing is known about its format.
    """
    found: set[str] = set()
    waiting = [nodes[name]]
    while waiting:
        node = waiting.pop()
        if node.op == "quantise" and numerics.quantiser(node) is not None:
            found.add("float32")
        elif node.op in UNROUNDED:
            waiting += [nodes[source] for source in node.inputs]
        elif node.op in ("param", "constant"):
            wide = node.format or numerics.compute
            found.add("float32" if wide == "float64" and not node.format else wide)
        elif node.op == "input":
            stored = numerics.stored_format("input", node.role)
            coarse = FORMATS[stored].coarse
            found.add("float64" if handed else stored if coarse else "float32")
        else:
            pinned = numerics.pinned(node.format, node.role)
            if pinned is None or (node.op == "softmax" and numerics.attention.fused):
                found.add("float64")
            else:
                found.add(pinned.stored_format(node.op, node.role))
    return frozenset(found)
