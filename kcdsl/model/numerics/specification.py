"""Numerics specifications: which roundings a kernel may take
(docs/proofs/relational-interval.md)."""

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
    """How parameters are stored: `format` a float format or one of codes; `scale` "none" (a plain
    cast) or a layout of scales (`formats`), whose scales are stored in `scale_format`.
    Dequantised values are rounded to float32, then to the compute format. `rounding` "nearest" or,
    without a scale, "toward_zero"; it is that of every parameter and constant.

    `applied` says what scales are multiplied with: "weights", before the product, "sums" of
    products of codes, or "stored_sums", which were stored in the compute format first."""

    format: str
    scale: str = "none"
    rounding: str = "nearest"
    scale_format: str = "float32"
    applied: str = "weights"

    @property
    def codes(self) -> CodeFormat:
        """Return the codes of weights with a scale."""
        return CODE_FORMATS[self.format]

    @property
    def layout(self) -> ScaleLayout | None:
        """Return which weights share a scale; None for a plain cast."""
        return LAYOUTS.get(self.scale)

    def to_json(self) -> dict[str, Any]:
        """Return the record; what follows `scale` stands in it only where it says something."""
        return _record(self, "scale")


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The static quantiser of one linear's input: one scale, or one for each input channel, and
    the zero point that codes of uint8 have."""

    scales: tuple[float, ...]
    zero_point: int


@dataclass(frozen=True, slots=True)
class Activations:
    """Quantisation of the input of every linear: `format` "none" or a format of codes; `scale`
    "none", a layout of scales (`formats`), which are made of what comes in, or
    "static".

    Dynamic scales are never below `least_scale`, and made of no magnitude above `amax_limit`; what
    is larger is cut off. `batch_amax` is the largest magnitude of any batch, whose elements share
    the scale of layout "per_batch".

    Static scales are calibrated before: `input_scale` and, for uint8, `input_zero_point` are sorted
    pairs of the name of a linear ("*": any that is not named) and its float32 scales or zero point.
    With layout "nvfp4" `input_scale` may give the scales of tensors.
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
        """Say whether inputs are quantised at all."""
        return self.format != "none"

    @property
    def static(self) -> bool:
        """Say whether scales are calibrated before."""
        return self.scale == "static"

    @property
    def codes(self) -> CodeFormat:
        """Return the codes of quantised inputs."""
        return CODE_FORMATS[self.format]

    @property
    def layout(self) -> ScaleLayout | None:
        """Return which elements share a dynamic scale; None without scales and with static ones."""
        return LAYOUTS.get(self.scale)

    @property
    def nested(self) -> bool:
        """Say whether scales of groups are multiples of that of the tensor."""
        return self.layout is not None and self.layout.rule == "nested"

    @property
    def cuts(self) -> bool:
        """Say whether codes may cut off more than they round: at the end of their range."""
        full = self.quantised and self.codes.cuts
        layout = self.layout is not None and self.layout.cuts
        return full or layout or self.amax_limit < math.inf

    def calibrated(self, weight: str) -> Calibrated | None:
        """Return the static quantiser of the linear with this weight; None where it has none.

        A linear has the name of its weight without ".weight".
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
        """Return the record; scales and magnitudes stand in it as float.hex()."""
        return _record(self, "format", "scale")


def plain_weights(numerics: Numerics) -> tuple[Weights, ...]:
    """Return the weights that are the parameters of the compute format and nothing else."""
    return tuple(Weights(form) for form in (numerics.compute, "float32", "float64"))


def sums_of_bytes(weights: Weights, activations: Activations) -> bool:
    """Say whether products of unsigned with signed bytes may be summed in 16 bits."""
    signed = weights.format in CODE_FORMATS and weights.codes.signed_byte
    one = weights.scale in ("per_tensor", "per_channel")
    return signed and one and activations.quantised and activations.codes.zero_point


Scales = tuple[tuple[str, tuple[float, ...]], ...]
_GROUPS = {"per_head": "per_token", "per_token_head": "per_token"}


@dataclass(frozen=True, slots=True)
class KvCache:
    """How a kernel stores keys and values: as codes of `format`, read back in the compute format.

    `scale` "none", "static", or of what shares a scale that is made of its largest magnitude:
    "per_tensor", "per_head" (all rows of one head) or "per_token_head" (one row of one head).
    Dynamic scales are never below `least_scale`. Static ones are `key_scale` and `value_scale`: one
    for all heads, or one for each head of the product that reads them, by the name of the linear
    that forms the keys or values ("*": any that is not named).
    """

    format: str
    scale: str
    key_scale: Scales = ()
    value_scale: Scales = ()
    least_scale: float = 0.0

    @property
    def static(self) -> bool:
        """Say whether scales are calibrated before."""
        return self.scale == "static"

    @property
    def by_head(self) -> bool:
        """Say whether all rows of a head share a scale."""
        return self.scale == "per_head"

    def quantiser(self, part: str, source: str) -> Activations | None:
        """Return the quantiser of "keys" or "values" whose elements are arranged so that it is one
        of the input of a linear (`CacheRows`); None where a static scale is missing.

        `source` is the weight of the linear that forms them, "" where that is not one alone.
        """
        if not self.static:
            layout = _GROUPS.get(self.scale, self.scale)
            return Activations(self.format, layout, least_scale=self.least_scale)
        scales = dict(self.key_scale if part == "keys" else self.value_scale)
        found = scales.get(linear_name(source), scales.get("*"))
        return None if found is None else Activations(self.format, "static", (("*", found),))

    def to_json(self) -> dict[str, Any]:
        """Return the record; scales stand in it as float.hex()."""
        return _record(self)


@dataclass(frozen=True, slots=True)
class StaticQuantiser:
    """The quantiser of one tensor: x becomes (code - zero_point) · scale, its code x/scale to the
    nearest even integer, plus the zero point, kept within 0 to 255. Both were calibrated before."""

    scale: float
    zero_point: int

    def to_json(self) -> dict[str, Any]:
        """Return the record; the scale stands in it as float.hex()."""
        return _record(self)


def linear_name(weight: str) -> str:
    """Return the name of a linear by that of its weight in the checkpoint."""
    return weight.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Override:
    """What linears have in place of the `weights` and `activations` of their kernel: those whose
    names fit `pattern` ("*": any text, "?": any character)."""

    pattern: str
    weights: Weights
    activations: Activations

    @property
    def exact(self) -> bool:
        """Say whether the pattern is a name."""
        return not any(sign in self.pattern for sign in "*?")

    def fits(self, weight: str) -> bool:
        """Say whether the linear with this weight is one of those meant."""
        return fnmatchcase(linear_name(weight), self.pattern)

    def to_json(self) -> dict[str, Any]:
        """Return the record, which stands by the pattern."""
        return {"weights": self.weights.to_json(), "activations": self.activations.to_json()}


@dataclass(frozen=True, slots=True)
class Attention:
    """How the ops with an attention role are computed.

    `style` "composed" (each op by itself) or "fused" (online softmax, tiles of `tile` keys).
    """

    style: str
    scores: str
    probabilities: str
    tile: int
    exp_ulps: int

    @property
    def fused(self) -> bool:
        """Say whether one kernel computes scores, probabilities and context."""
        return self.style == "fused"

    def to_json(self) -> dict[str, Any]:
        """Return the record."""
        return _record(self)

    @property
    def term_roundings(self) -> int:
        """Return how often a term of a score may be rounded before it is added."""
        return 6 if self.fused else 2

    def tiles(self, columns: int) -> int:
        """Return how many tiles of keys a kernel walks through."""
        return math.ceil(columns / self.tile) if self.fused else 1


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    """A matrix unit (docs/proofs/relational-interval.md, section 3).

    One instruction adds up to `chunk` exact products to an accumulator. Every term and the
    accumulator are cut off, toward zero, `fraction_bits` below the largest of their exponents; the
    sum keeps `result_bits` bits after the leading one, toward zero. After `promote` products (0:
    never) the accumulator is added to a sum in the accumulate format, and starts again at 0.
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
    """What forms sums of products: `linears` those of linears whose inputs are quantised, `others`
    all other products of matrices."""

    linears: MatrixUnit
    others: MatrixUnit

    def to_json(self) -> dict[str, dict[str, int]]:
        """Return the record of both units."""
        return _record(self)


@dataclass(frozen=True, slots=True)
class Numerics:
    """A resolved specification: nothing is left to defaults.

    `compute` is the format of parameters, constants and of every operation's result;
    `accumulate` that of dot products; inside softmax, norms, activations and elementwise maps the
    arithmetic is float32 (float64 where `compute` is).
    `casts` is "nearest" (one rounding to nearest at each result), "toward_zero" (what does not fit
    is cut off there), or a free relative error wherever a fused kernel may put it: "any" (of one
    unit roundoff), "any_toward_zero" (two, toward zero) or "any_direction" (two, either way).
    `results` names the results that have another format than `compute`, as sorted pairs: "input",
    "context", or an operation; scores and probabilities have theirs from `attention`.
    `tensor_core` None: sums are rounded to nearest in the accumulate format.
    `sigmoid` is "relative" (the sigmoid in silu is good to some units in its last place) or
    "absolute" (to some units in the last place of 1, however small it is).
    `byte_sums` says how linears sum products of unsigned with signed bytes: "wide" (exactly), or
    "int16_pairs" (two products at a time in 16 bits, where they saturate).
    `shards`: a linear may be split along its inputs among so many devices, whose results are stored
    in `compute` and added in it, in any order.
    `products` is "compute", or "tfloat32": what products of matrices read is cut to tfloat32 first.
    `overrides` gives linears other `weights` and `activations`, sorted by pattern.
    `kv_cache` None: keys and values are read as they are computed.
    `quantisers` are those of single tensors, sorted by the names that the program gives these:
    every reader has the same quantised number, whatever casts are.
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
        """Return the quantiser of a node `quantise`; None where the kernel passes its tensor on."""
        return dict(self.quantisers).get(str(node.attrs["tensor"]))

    def serving(self, weight: str) -> Numerics:
        """Return the numerics of the linear with this weight: a name goes before patterns, and
        patterns that fit must agree.

        Bytes are summed in pairs only where both factors are bytes.

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
        """Say whether linears multiply codes, or may, so that their scales come after the sum."""
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
        """Return what the word `casts` says; a word that there is not is a KeyError."""
        return CASTS[self.casts]

    @property
    def function_format(self) -> Format:
        """Return the format of the arithmetic inside softmax, norms, activations and elementwise
        maps."""
        return FORMATS["float64" if self.compute == "float64" else "float32"]

    def stored_format(self, op: str, role: str) -> str:
        """Return the name of the format in which the result of an operation is stored.

        The probabilities of a composed attention are stored in their own, of a fused one inside of
        the softmax.
        """
        if role == "scores":
            return self.attention.scores
        if role == "probabilities":
            return self.attention.probabilities
        named = dict(self.results)
        return named.get(role) or named.get(op) or self.compute

    def pinned(self, format: str, role: str = "") -> Numerics | None:
        """Return the numerics of an operation whose result the program stores in `format`.

        They are those of a kernel that computes in it, with sums in float32 at best; "": the
        kernel's own. A fused attention is a kernel's own program: its results have its formats,
        where those pinned hold them, and else there is no rule (None).
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

        What follows `attention` stands in it only where it says something.
        """
        record = _record(self)
        if self.overrides:
            record["overrides"] = {each.pattern: each.to_json() for each in self.overrides}
        return record


def _record(one: Any, *always: str) -> dict[str, Any]:
    """Return a dataclass as JSON, without the fields that have their default and are not named."""
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

    Whether a kernel rounds it first is not known: PyTorch rounds tensors without dimensions in
    sums, and not in products. Numbers of scale, divide and shift may be either.
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
"""Operations that store nothing; inputs, parameters and constants are stored before. `quantise`
forms numbers of float32, in a kernel that has a quantiser there."""


def held_formats(
    nodes: Mapping[str, Node], name: str, numerics: Numerics, *, handed: bool
) -> frozenset[str]:
    """Return formats in which the numbers of a node are stored: each is one of any of them.

    `handed` says that another block stored the input, of which nothing is known then.
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
