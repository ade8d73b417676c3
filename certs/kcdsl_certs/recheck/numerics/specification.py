"""Strict parsing of numerics specifications into kernels."""

from __future__ import annotations

import math
import struct
from dataclasses import replace

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.graphs.strict_json import Reader, integer, real
from kcdsl_certs.recheck.numerics.formats import (
    CODES,
    FLOAT32,
    FORMATS,
    PLAIN_INPUTS,
    PLAIN_WEIGHTS,
    Format,
    layout_of,
)
from kcdsl_certs.recheck.numerics.kernel import Cache, KernelNumerics, Static, TensorCodes, Unit

_WEIGHTS = {
    **dict.fromkeys(FORMATS, ("none",)),
    **{name: code.weights for name, code in CODES.items() if code.weights},
}
_ACTIVATIONS = {
    "none": ("none",),
    **{name: code.activations for name, code in CODES.items() if code.activations},
}
# Casts: whether each is a known step function, whether it rounds toward zero, and its error in unit
# roundoffs and halves of the smallest subnormal.
_CASTS = {
    "nearest": (True, False, 1),
    "any": (False, False, 1),
    "toward_zero": (True, True, 2),
    "any_toward_zero": (False, True, 2),
    "any_direction": (False, False, 2),
}
_STATIC = 2.0**-100, 2.0**24  # the range of a static scale

RESULTS = (
    *("input", "context", "linear", "matmul", "add", "sub", "mul", "scale", "divide", "shift"),
    *("tanh", "silu", "gelu", "rope", "rms_norm", "layer_norm"),
)

_MOST_SHARDS = 1024
_MOST_OVERRIDES, _MOST_PATTERNS, _LONGEST_PATTERN = 4096, 64, 256


def parse_kernel(value: object, place: str) -> KernelNumerics:
    """Return the kernel of a numerics record (`Numerics.to_json`).

    Raises Rejected "document/numerics" if a field is missing, unknown or invalid.
    """
    record = Reader(value, place, "document/numerics").exactly(
        *("preset", "compute", "accumulate", "casts", "weights", "activations", "attention"),
        optional=(
            *("results", "tensor_core", "sigmoid", "byte_sums", "products", "shards"),
            *("overrides", "kv_cache", "quantisers"),
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
    kernel = KernelNumerics(
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
        tensors=_tensors(record),
    )
    if kernel.tensors and (kernel.compute != FLOAT32 or most != 1):
        raise Rejected("document/numerics", "tensors of codes beside other numbers than float32")
    kernel = _of_linears(record, kernel, pairs)
    found = replace(kernel, others=_others(record, kernel, pairs))
    kernels = (found, *(other for _, other in found.others))
    if units[0] is not None and any(layout_of(each.activations[1]).nested for each in kernels):
        raise Rejected("document/numerics", "a matrix unit that multiplies inputs of nvfp4")
    if most != 1 and any(each.coded_inputs for each in kernels):
        raise Rejected("document/numerics", "quantised activations beside directed casts")
    if pairs and not any(each.paired for each in kernels):
        raise Rejected("document/numerics", "sums of bytes without codes of bytes")
    return found


def _of_linears(record: Reader, kernel: KernelNumerics, pairs: bool) -> KernelNumerics:
    """Return the kernel with the `weights` and `activations` of a record.

    `pairs`: if terms are products of bytes, they are summed two by two.
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


def _others(
    record: Reader, kernel: KernelNumerics, pairs: bool
) -> tuple[tuple[str, KernelNumerics], ...]:
    """Read the overrides of linears by patterns of their names."""
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


_CACHES = {name: code.caches for name, code in CODES.items() if code.caches}


def _cache(record: Reader) -> Cache:
    """Read the quantisation of keys and values; scales are float32 numbers by float.hex()."""
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


def _tensors(record: Reader) -> tuple[tuple[str, TensorCodes], ...]:
    """Read the quantisation of tensors, sorted by name; scales are float32 by float.hex()."""
    if not record.has("quantisers"):
        return ()
    named, found = record.reader("quantisers"), []
    for name in sorted(named.value):
        detail = f"a scale or zero point of the tensor {name[:80]!r} that no rule covers"
        wrong = Rejected("document/numerics", detail)
        one = named.reader(name).exactly("scale", "zero_point")
        scale, zero = real(one.text("scale"), wrong), one.integer("zero_point", 0)
        inside = _STATIC[0] <= scale <= _STATIC[1] and _is_single(scale)
        if not name or not inside or zero > 255:
            raise wrong
        found.append((name, TensorCodes(scale, zero)))
    if not found:
        raise Rejected("document/numerics", "quantisers of no tensor")
    return tuple(found)


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
    scale = record.text("scale")
    if scale not in PLAIN_WEIGHTS:
        raise Rejected("document/numerics", f"{scale[:40]!r} scales have no 'scale_format'")
    return FORMATS[record.choice("scale_format", ("float16", "bfloat16"))]


def _late(weights: Reader, activations: Reader, kernel: KernelNumerics) -> str:
    """Read whether the kernel multiplies sums, not weights, by the scales of weights."""
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
    """Read the limits of dynamic scales, float32 numbers by float.hex()."""
    kind, scale = record.text("format"), record.text("scale")
    wrong = Rejected("document/numerics", "a limit of dynamic scales where it has no meaning")
    able = scale in (*PLAIN_INPUTS, "per_batch") and kind != "uint8"
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
    """Return whether a linear multiplies unsigned by signed bytes."""
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
    """Read static scales, float32 numbers by float.hex(), and the zero points of uint8; for nvfp4
    the scales of tensors, which may be dynamic."""
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
