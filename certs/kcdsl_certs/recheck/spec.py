"""Formats and numerics specifications, as data (docs/relational-interval.md, section 2)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.strict import Reader, integer, real
from kcdsl_certs.rejected import Rejected


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format; `least` is the exponent of its smallest normal number."""

    name: str
    precision: int
    least: int
    largest: float

    @property
    def u(self) -> float:
        """Return the unit roundoff."""
        return 2.0**-self.precision

    def holds(self, other: Format) -> bool:
        """Return whether every number of another format is one of this."""
        finer = self.precision >= other.precision and self.largest >= other.largest
        return finer and self.least - self.precision <= other.least - other.precision

    @property
    def eta(self) -> float:
        """Return half the smallest subnormal (float64: all of it, half is no double)."""
        return max(2.0 ** max(self.least - self.precision, -1074), 2.0**-1074)


_FORMATS = (
    Format("float64", 53, -1022, float.fromhex("0x1.fffffffffffffp+1023")),
    Format("float32", 24, -126, float.fromhex("0x1.fffffep+127")),
    Format("tfloat32", 11, -126, float.fromhex("0x1.ffcp+127")),
    Format("float16", 11, -14, 65504.0),
    Format("bfloat16", 8, -126, float.fromhex("0x1.fep+127")),
    Format("fp8_e4m3", 4, -6, 448.0),
    Format("fp8_e5m2", 3, -14, 57344.0),
)
FORMATS = {f.name: f for f in _FORMATS}
FLOAT32 = FORMATS["float32"]
FLOAT64 = FORMATS["float64"]

# Grids of codes that are no integers.
GRIDS = {
    "fp8_e4m3": FORMATS["fp8_e4m3"],
    "fp8_e5m2": FORMATS["fp8_e5m2"],
    "fp8_e4m3fnuz": Format("fp8_e4m3fnuz", 4, -7, 240.0),
    "fp8_e5m2fnuz": Format("fp8_e5m2fnuz", 3, -15, 57344.0),
    "fp6_e2m3": Format("fp6_e2m3", 4, 0, 7.5),
    "fp6_e3m2": Format("fp6_e3m2", 3, -2, 28.0),
    "fp4_e2m1": Format("fp4_e2m1", 2, 0, 6.0),
}
# The last code of a format, and what amax is divided by; 224 for fnuz, as AMD's kernels have it.
CODE_LARGEST = {
    "fp8_e4m3": 448.0,
    "fp8_e5m2": 57344.0,
    "fp8_e4m3fnuz": 224.0,
    "fp8_e5m2fnuz": 57344.0,
    "fp6_e2m3": 7.5,
    "fp6_e3m2": 28.0,
    "fp4_e2m1": 6.0,
    "int8": 127.0,
}
TOP_EXPONENT = {
    "fp8_e4m3": 8,
    "fp8_e5m2": 15,
    "fp8_e4m3fnuz": 7,
    "fp8_e5m2fnuz": 15,
    "fp6_e2m3": 2,
    "fp6_e3m2": 4,
    "fp4_e2m1": 2,
}
INTEGERS = ("int8", "int8_full", "int4_full", "uint4")
FULL_RANGE = {"int8_full": 128, "int4_full": 8}  # codes from -n to n - 1, the scale amax/(n - 1/2)
NIBBLES = 15  # codes of uint4 reach from 0 to this
LEAST_RANGE = float.fromhex("0x1.4f8b58p-17")  # of uint4: float32(1e-5)
NESTED = 2.0**-6, 448.0  # between which multiples of a tensor's scale a nested one is
# How many rows and columns share a scale (0: all there are).
TILES = {
    "per_tensor": (0, 0),
    "per_batch": (0, 0),
    "per_channel": (1, 0),
    "per_token": (1, 0),
    "block_128": (128, 128),
    "block_128_e8m0": (128, 128),
    "group_128_e8m0": (1, 128),
    "group_32": (1, 32),
    "group_64": (1, 64),
    "group_128": (1, 128),
    "mx": (1, 32),
    "nvfp4": (1, 16),
}
CEILED = ("block_128_e8m0", "group_128_e8m0")  # scales are powers of two, not below amax/qmax
LEAST_POWER, MOST_POWER = -127, 127

_FLOATS = ("fp8_e4m3", "fp8_e5m2")
_PLAIN_WEIGHTS = ("per_tensor", "per_channel", "block_128", "group_32", "group_64", "group_128")
_PLAIN_INPUTS = ("per_tensor", "per_token", "group_32", "group_64", "group_128")
_WEIGHTS = {
    **dict.fromkeys(FORMATS, ("none",)),
    **dict.fromkeys(_FLOATS, ("none", *_PLAIN_WEIGHTS, *CEILED, "mx")),
    **dict.fromkeys(("fp8_e4m3fnuz", "fp8_e5m2fnuz", *INTEGERS), _PLAIN_WEIGHTS),
    **dict.fromkeys(("fp6_e2m3", "fp6_e3m2"), ("mx",)),
    "fp4_e2m1": ("mx", "nvfp4"),
}
_ACTIVATIONS = {
    "none": ("none",),
    **dict.fromkeys(
        _FLOATS, ("none", *_PLAIN_INPUTS, "group_128_e8m0", "per_batch", "mx", "static")
    ),
    **dict.fromkeys(
        ("fp8_e4m3fnuz", "fp8_e5m2fnuz", "int8", "int8_full"),
        (*_PLAIN_INPUTS, "per_batch", "static"),
    ),
    "uint8": (*_PLAIN_INPUTS, "static"),
    **dict.fromkeys(("fp6_e2m3", "fp6_e3m2"), ("mx",)),
    "fp4_e2m1": ("mx", "nvfp4"),
}
# Casts: whether each is a step of a known function, whether it only goes toward zero, and how many
# unit roundoffs and halves of the smallest subnormal it may be.
_CASTS = {
    "nearest": (True, False, 1),
    "any": (False, False, 1),
    "toward_zero": (True, True, 2),
    "any_toward_zero": (False, True, 2),
    "any_direction": (False, False, 2),
}
_STATIC = 2.0**-100, 2.0**24  # between these a static scale must be


RESULTS = (
    *("input", "context", "linear", "matmul", "add", "sub", "mul", "scale", "divide", "shift"),
    *("tanh", "silu", "gelu", "rope", "rms_norm", "layer_norm"),
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

        Raises:
            Rejected: "rule/static-scale" where there are none.
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
class Kernel:
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
    base: Kernel | None = None  # where a node pins its format: the kernel itself
    others: tuple[tuple[str, Kernel], ...] = ()  # by pattern, kernels as linears of that name have

    def serving(self, key: str) -> Kernel:
        """Return the kernel as it computes the linear with this weight: by its own name, else by
        the patterns that fit, which must say the same.

        Raises:
            Rejected: "rule/override".
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

    def at(self, node: Node) -> Kernel:
        """Return the kernel as it computes a node: where the program stores the result in a format
        of its own, as one that computes in that, with sums in float32 at best.

        Raises:
            Rejected: "rule/format" for a fused attention whose own format is not held by it.
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
        kind = self.weights[0]
        if kind == "uint4":
            return float(NIBBLES)
        return float(FULL_RANGE[kind]) if kind in FULL_RANGE else CODE_LARGEST[kind]

    @property
    def own(self) -> Kernel:
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

        Raises:
            Rejected: "rule/format".
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

        Raises:
            Rejected: "bound/overflow".
        """
        if node.role == "scores" and node.op in ("scale", "divide"):
            return value, value
        return self.number(value, self.result(node.op, node.role), self.inner)

    def number(self, value: float, form: Format, inner: Format) -> tuple[float, float]:
        """Return the least and the greatest of a number and what it may be in a format; where that
        is as precise as the arithmetic inside, which counts it, the number alone.

        Raises:
            Rejected: "bound/overflow".
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


_UNROUNDED = ("view", "concat", "neg", "relu", "embedding")


def _grid(value: float, form: Format) -> Fraction:
    """Return the distance of the numbers of a format around a value, away from zero."""
    exponent = max(math.frexp(value)[1] - 1, form.least)
    return Fraction(2) ** (exponent - form.precision + 1)


def _neighbours(value: float, form: Format) -> list[float]:
    steps = Fraction(value) / _grid(value, form)
    return [float(whole * _grid(value, form)) for whole in (math.floor(steps), math.ceil(steps))]


def _to_nearest(value: float, form: Format) -> float:
    return float(round(Fraction(value) / _grid(value, form)) * _grid(value, form))


_MOST_SHARDS = 1024
_MOST_OVERRIDES, _MOST_PATTERNS, _LONGEST_PATTERN = 4096, 64, 256


def parse_kernel(value: object, place: str) -> Kernel:
    """Return the kernel of a numerics record (`Numerics.to_json`).

    Raises:
        Rejected: "document/numerics" if a field is missing, unknown or has no meaning.
    """
    record = Reader(value, place, "document/numerics").exactly(
        *("preset", "compute", "accumulate", "casts", "weights", "activations", "attention"),
        optional=(
            *("results", "tensor_core", "sigmoid", "byte_sums", "products", "shards"),
            "overrides",
            "kv_cache",
        ),
    )
    record.text("preset")
    names = tuple(FORMATS)
    pairs = record.has("byte_sums") and record.choice("byte_sums", ("int16_pairs",)) != ""
    units = _units(record)
    stepped, inward, most = _CASTS[record.choice("casts", tuple(_CASTS))]
    if most != 1 and record.has("kv_cache"):
        raise Rejected("document/numerics", "a quantised cache beside directed casts")
    attention = record.reader("attention").exactly(
        "style", "scores", "probabilities", "tile", "exp_ulps"
    )
    kernel = Kernel(
        compute=FORMATS[record.choice("compute", names)],
        accumulate=FORMATS[record.choice("accumulate", names)],
        stepped=stepped,
        weights=("", ""),
        activations=("", ""),
        fused=attention.choice("style", ("composed", "fused")) == "fused",
        scores=FORMATS[attention.choice("scores", names)],
        probabilities=FORMATS[attention.choice("probabilities", names)],
        tile=attention.integer("tile", 1),
        exp_ulps=attention.integer("exp_ulps", 0),
        results=_results(record),
        linear_unit=units[0],
        other_unit=units[1],
        absolute_sigmoid=record.has("sigmoid")
        and record.choice("sigmoid", ("absolute",)) == "absolute",
        inward=inward,
        units=most,
        shortened=_shortened(record),
        shards=_shards(record),
    )
    kernel = _of_linears(record, kernel, pairs)
    found = replace(kernel, others=_others(record, kernel, pairs))
    kernels = (found, *(other for _, other in found.others))
    if units[0] is not None and any(each.activations[1] == "nvfp4" for each in kernels):
        raise Rejected("document/numerics", "a matrix unit that multiplies inputs of nvfp4")
    if most != 1 and any(each.activations[0] != "none" for each in kernels):
        raise Rejected("document/numerics", "quantised activations beside directed casts")
    if pairs and not any(each.paired for each in kernels):
        raise Rejected("document/numerics", "sums of bytes without codes of bytes")
    return found


def _of_linears(record: Reader, kernel: Kernel, pairs: bool) -> Kernel:
    """Return the kernel with the `weights` and `activations` of a record.

    `pairs`: products of bytes, where there are such, are summed two by two.
    """
    weights = record.reader("weights").exactly(
        "format", "scale", optional=("rounding", "scale_format", "applied")
    )
    activations = record.reader("activations").exactly(
        *("format", "scale"),
        optional=("input_scale", "input_zero_point", "least_scale", "amax_limit", "batch_amax"),
    )
    limits = _limits(activations)
    if activations.text("format") != "none" and kernel.accumulate == FORMATS["float16"]:
        raise Rejected("document/numerics", "sums of codes in float16, which they exceed")
    return replace(
        kernel,
        weights=_weights(weights),
        activations=_activations(activations),
        static=_static(activations),
        cut_weights=_cut_weights(weights),
        paired=pairs and _of_bytes(weights, activations),
        scale_format=_scale_format(weights),
        late=_late(weights, activations, kernel),
        least_scale=limits[0],
        amax_limit=limits[1],
        batch_amax=limits[2],
        cache=_cache(record.reader("kv_cache")) if record.has("kv_cache") else None,
    )


def _others(record: Reader, kernel: Kernel, pairs: bool) -> tuple[tuple[str, Kernel], ...]:
    """Read what linears have by their names in place of the kernel's."""
    if not record.has("overrides"):
        return ()
    named = record.reader("overrides")
    wrong = named.fail("must be a few patterns of names of linears")
    patterns = sorted(named.value)
    wide = sum("*" in pattern or "?" in pattern for pattern in patterns)
    if not patterns or len(patterns) > _MOST_OVERRIDES or wide > _MOST_PATTERNS:
        raise wrong
    found = []
    for pattern in patterns:
        bare = "[" not in pattern and not pattern.endswith(".weight")
        if not 1 <= len(pattern) <= _LONGEST_PATTERN or not bare:
            raise wrong
        section = named.reader(pattern).exactly("weights", "activations")
        found.append((pattern, _of_linears(section, kernel, pairs)))
    return tuple(found)


_CACHES = {
    **dict.fromkeys(_FLOATS, ("none", "per_tensor", "per_head", "per_token_head", "static")),
    **dict.fromkeys(
        ("fp8_e4m3fnuz", "fp8_e5m2fnuz", "int8", "int8_full"),
        ("per_tensor", "per_head", "per_token_head", "static"),
    ),
}


def _cache(record: Reader) -> Cache:
    """Read how keys and values are stored; scales are float32 numbers by float.hex()."""
    record.exactly("format", "scale", optional=("key_scale", "value_scale", "least_scale"))
    kind, scale = record.choice("format", tuple(_CACHES)), record.text("scale")
    _allowed(kind, scale, scale in _CACHES[kind])
    static, wrong = scale == "static", Rejected("document/numerics", "a scale of a cache")
    if record.has("key_scale") != static or record.has("value_scale") != static:
        raise wrong
    if static and record.has("least_scale"):
        raise wrong
    if static:
        sides = [_calibrations(record, name) for name in ("key_scale", "value_scale")]
        return Cache(kind, scale, 0.0, Static(sides[0], ()), Static(sides[1], ()))
    if not record.has("least_scale"):
        return Cache(kind, scale, 0.0)
    least = real(record.text("least_scale"), wrong)
    if scale == "none" or not (_STATIC[0] <= least <= _STATIC[1] and _is_single(least)):
        raise wrong
    return Cache(kind, scale, least)


def _calibrations(record: Reader, field: str) -> tuple[tuple[str, tuple[float, ...]], ...]:
    """Return static scales by the names of linears, sorted."""
    wrong = Rejected("document/numerics", "a static scale must be a float32 number in range")
    scales = []
    for name, given in sorted(record.entries(field).items()):
        if not isinstance(given, list) or not given or not name:
            raise wrong
        found = tuple(real(value, wrong) for value in given)
        if not all(_STATIC[0] <= s <= _STATIC[1] and _is_single(s) for s in found):
            raise wrong
        scales.append((name, found))
    if not scales:
        raise wrong
    return tuple(scales)


def _shards(record: Reader) -> int:
    if not record.has("shards"):
        return 1
    count = record.integer("shards", 2)
    if count > _MOST_SHARDS:
        raise Rejected("document/numerics", f"more than {_MOST_SHARDS} shards")
    return count


def _scale_format(record: Reader) -> Format:
    if not record.has("scale_format"):
        return FLOAT32
    if record.text("scale") not in _PLAIN_WEIGHTS:
        raise Rejected("document/numerics", "these scales of weights are not rounded")
    return FORMATS[record.choice("scale_format", ("float16", "bfloat16"))]


def _late(weights: Reader, activations: Reader, kernel: Kernel) -> str:
    """Read where scales of weights are multiplied in, if not with the weights themselves."""
    if not weights.has("applied"):
        return ""
    found, scale = weights.choice("applied", ("sums", "stored_sums")), weights.text("scale")
    able = scale not in ("none", "nvfp4") and activations.text("format") == "none"
    if found == "stored_sums":
        able = able and scale in ("per_tensor", "per_channel") and kernel.shards == 1
    if not able or kernel.accumulate.precision < FLOAT32.precision:
        raise Rejected("document/numerics", "scales after sums that have none")
    return found


def _limits(record: Reader) -> tuple[float, float, float]:
    """Read what dynamic scales are limited to, float32 numbers by float.hex()."""
    kind, scale = record.text("format"), record.text("scale")
    wrong = Rejected("document/numerics", "a limit of dynamic scales where it has no meaning")
    able = scale in (*_PLAIN_INPUTS, "per_batch") and kind != "uint8"
    found = []
    for name, default in (("least_scale", 0.0), ("amax_limit", math.inf), ("batch_amax", 0.0)):
        if not record.has(name):
            found.append(default)
            continue
        value = real(record.text(name), wrong)
        inside = _STATIC[0] <= value <= _STATIC[1] and _is_single(value)
        if not (able and inside and (name != "batch_amax" or scale == "per_batch")):
            raise wrong
        found.append(value)
    if scale == "per_batch" and not found[2]:
        raise wrong
    return found[0], found[1], found[2]


def _shortened(record: Reader) -> bool:
    if not record.has("products"):
        return False
    record.choice("products", ("tfloat32",))
    if (record.text("compute"), record.text("accumulate")) != ("float32", "float32"):
        raise Rejected("document/numerics", "products in tfloat32 without float32 beside them")
    return True


def _of_bytes(weights: Reader, activations: Reader) -> bool:
    """Say whether products of a linear are of unsigned with signed bytes."""
    signed = weights.text("format") in ("int8", "int8_full")
    simple = weights.text("scale") in ("per_tensor", "per_channel")
    return signed and simple and activations.text("format") == "uint8"


def _results(record: Reader) -> tuple[tuple[str, Format], ...]:
    if not record.has("results"):
        return ()
    inner = record.reader("results").exactly(optional=RESULTS)
    return tuple(
        (key, FORMATS[inner.choice(key, tuple(FORMATS))]) for key in RESULTS if inner.has(key)
    )


def _units(record: Reader) -> tuple[Unit | None, Unit | None]:
    if not record.has("tensor_core"):
        return None, None
    core = record.reader("tensor_core").exactly("linears", "others")
    return _unit(core.reader("linears")), _unit(core.reader("others"))


def _unit(record: Reader) -> Unit:
    record.exactly("fraction_bits", "chunk", "result_bits", "promote")
    unit = Unit(
        record.integer("fraction_bits", 1),
        record.integer("chunk", 1),
        record.integer("result_bits", 1),
        record.integer("promote", 0),
    )
    if unit.promote % unit.chunk or max(unit.below, unit.kept) > 64 or unit.kept > 23:
        raise Rejected("document/numerics", "a matrix unit without a meaning")
    return unit


def _weights(record: Reader) -> tuple[str, str]:
    kind, scale = record.choice("format", tuple(_WEIGHTS)), record.text("scale")
    return _allowed(kind, scale, scale in _WEIGHTS[kind])


def _cut_weights(record: Reader) -> bool:
    if not record.has("rounding"):
        return False
    if record.text("scale") != "none":
        raise Rejected("document/numerics", "codes of weights are rounded to nearest")
    return record.choice("rounding", ("toward_zero",)) == "toward_zero"


def _activations(record: Reader) -> tuple[str, str]:
    kind = record.choice("format", tuple(_ACTIVATIONS))
    scale = record.text("scale")
    return _allowed(kind, scale, scale in _ACTIVATIONS[kind])


def _static(record: Reader) -> Static | None:
    """Read static scales, float32 numbers by float.hex(), and the zero points of uint8; of nvfp4
    those of tensors, which may be dynamic."""
    static, whole = record.text("scale") == "static", record.text("format") == "uint8"
    nested, given = record.text("scale") == "nvfp4", record.has("input_scale")
    if (given != static and not nested) or record.has("input_zero_point") != (static and whole):
        raise Rejected("document/numerics", "static scales, and zero points, where they belong")
    if not given:
        return None
    scales = _calibrations(record, "input_scale")
    if nested and any(len(each) != 1 for _, each in scales):
        raise Rejected("document/numerics", "more than one scale of a tensor")
    if not whole:
        return Static(scales, ())
    off = Rejected("document/numerics", "a zero point is an integer from 0 to 255, of a scale")
    points = sorted(record.entries("input_zero_point").items())
    zeros = tuple((name, integer(value, 0, off)) for name, value in points)
    named, having = {name for name, _ in zeros}, {"*", *(name for name, _ in scales)}
    if not (named <= having and all(value <= 255 for _, value in zeros)):
        raise off
    if "*" not in named and not named >= having - {"*"}:
        raise off
    return Static(scales, zeros)


def _is_single(value: float) -> bool:
    single: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return single == value


def _allowed(kind: str, scale: str, allowed: bool) -> tuple[str, str]:
    if not allowed:
        raise Rejected("document/numerics", f"format {kind!r} with scale {scale[:40]!r}")
    return kind, scale
