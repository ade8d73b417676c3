"""Readers of single fields of numerics: choices, counts, static scales, limits of dynamic scales.

Imports neither numpy nor torch.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.model.numerics.formats import CODE_FORMATS, LAYOUTS, Casts
from kcdsl.model.numerics.specification import StaticQuantiser

LEAST_STATIC, LARGEST_STATIC = 2.0**-100, 2.0**24
"""Range of static scales: products with codes and with usual scales neither under- nor overflow."""

Scales = tuple[tuple[str, tuple[float, ...]], ...]
ZeroPoints = tuple[tuple[str, int], ...]


def static_scales(section: Mapping[str, Any], format: str, scale: str) -> tuple[Scales, ZeroPoints]:
    """Return `input_scale` and `input_zero_point` of a section `activations`, sorted by name.

    A field is one value for all linears, or a mapping by linear name ("*": the others). A scale is
    a number, or a list with one per input channel; it is rounded to float32. Numbers may be
    strings, in decimal or in the form of float.hex(); a string with spaces is a list. With `nvfp4`
    the scale is per tensor and may be missing. Refuse missing and invalid values.
    """
    nested = scale == "nvfp4"
    if scale != "static":
        for key in ("input_scale", "input_zero_point"):
            if key in section and not (nested and key == "input_scale"):
                raise refusal(f"activations have `{key}` and no `scale: static`")
        if not nested or "input_scale" not in section:
            return (), ()
    if "input_scale" not in section:
        raise refusal(
            "static activations need `input_scale`",
            help="write the scales that were calibrated: input_scale: 0.02, or a mapping of"
            " linears",
        )
    scales = _by_name("input_scale", section["input_scale"])
    found = tuple((name, _scales(_place("input_scale", name), v)) for name, v in scales)
    if nested and any(len(given) != 1 for _, given in found):
        raise refusal("activations.input_scale of nvfp4 is one number for each linear")
    if not CODE_FORMATS[format].zero_point:
        if "input_zero_point" in section:
            raise refusal(f"{format} activations have no zero point", help="uint8 activations have")
        return found, ()
    if "input_zero_point" not in section:
        raise refusal("static uint8 activations need `input_zero_point`")
    given = _by_name("input_zero_point", section["input_zero_point"])
    zeros = tuple((name, _zero_point(_place("input_zero_point", name), v)) for name, v in given)
    named, having = {name for name, _ in zeros}, {name for name, _ in found}
    for name in sorted(named - having - {"*"}):
        raise refusal(f"activations.input_scale has no scale of {name!r}, which has a zero point")
    for name, _ in found:
        if name not in named and "*" not in named:
            raise refusal(f"activations.input_zero_point has no zero point of {name!r}")
    return found, zeros


def cache_scales(section: Mapping[str, Any], scale: str) -> tuple[Scales, Scales, float]:
    """Return `key_scale`, `value_scale` and `least_scale` of a section `kv_cache`.

    Static scales are read as those of activations; keys and values must both have one. Refuse a
    least scale of static scales.
    """
    found: list[Scales] = []
    for key in ("key_scale", "value_scale"):
        if (key in section) != (scale == "static"):
            there = "have no" if scale == "static" else "have a"
            raise refusal(
                f"the keys and values of kv_cache.scale {scale!r} {there} kv_cache.{key}",
                help="write `scale: static` with `key_scale` and `value_scale`",
            )
        if scale == "static":
            given = _by_name(key, section[key], "kv_cache")
            found.append(
                tuple((n, _scales(_place(key, n, "kv_cache"), value)) for n, value in given)
            )
    least = 0.0
    if "least_scale" in section:
        if scale in ("none", "static"):
            raise refusal(f"kv_cache has `least_scale` and the scale {scale!r}")
        least = _scale("kv_cache.least_scale", section["least_scale"])
    return (found[0], found[1], least) if found else ((), (), least)


def static_quantisers(
    value: object, compute: str, casts: Casts
) -> tuple[tuple[str, StaticQuantiser], ...]:
    """Return the field `quantisers`, a mapping from tensor names to quantisers, as sorted pairs."""
    found = []
    for name, given in sorted(mapping_of("quantisers", value).items()):
        place = f"quantisers.{name}"
        section = mapping_of(place, given)
        refuse_unknown(section, place, ("scale", "zero_point"))
        if not name or len(section) < 2:
            raise refusal(
                f"{place} needs `scale` and `zero_point`", help="kcdsl init FILE.onnx writes both"
            )
        scale = _scale(f"{place}.scale", section["scale"])
        zero_point = _zero_point(f"{place}.zero_point", section["zero_point"])
        found.append((name, StaticQuantiser(scale, zero_point)))
    if found and compute != "float32":
        raise refusal(f"compute is {compute}; quantisers of tensors belong to float32 programs")
    if found and casts.units != 1:
        raise refusal("casts are directed, and quantisers of tensors round to nearest")
    return tuple(found)


def dynamic_limits(
    section: Mapping[str, Any], format: str, scale: str
) -> tuple[float, float, float]:
    """Return `least_scale`, `amax_limit` and `batch_amax` of a section `activations`, as float32.

    Refuse them where the scale does not depend on the largest magnitude, and a `per_batch` scale
    without `batch_amax`.
    """
    layout = LAYOUTS.get(scale)
    plain = layout is not None and layout.rule in ("amax", "batch")
    able = plain and not CODE_FORMATS[format].zero_point
    found = {"least_scale": 0.0, "amax_limit": math.inf, "batch_amax": 0.0}
    for key in found:
        if key not in section:
            continue
        if not able or (key == "batch_amax" and scale != "per_batch"):
            raise refusal(f"activations have `{key}` and the scale {scale!r} of {format}")
        found[key] = _scale(f"activations.{key}", section[key])
    if scale == "per_batch" and not found["batch_amax"]:
        raise refusal(
            "activations of scale 'per_batch' need `batch_amax`",
            help="write the largest magnitude that any batch may hold: batch_amax: 100",
        )
    return found["least_scale"], found["amax_limit"], found["batch_amax"]


def _by_name(key: str, value: object, section: str = "activations") -> list[tuple[str, object]]:
    if not isinstance(value, Mapping):
        return [("*", value)]
    if not value or not all(isinstance(name, str) and name for name in value):
        raise refusal(f"{section}.{key} names no linear", help="name one, or write `*` for all")
    return sorted(value.items())


def _place(key: str, name: str, section: str = "activations") -> str:
    return f"{section}.{key}" if name == "*" else f"{section}.{key}.{name}"


def _scales(place: str, value: object) -> tuple[float, ...]:
    value = value.split() if isinstance(value, str) else value
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values:
        raise refusal(f"{place} is an empty list; it must be a scale or one for each channel")
    return tuple(_scale(place, item) for item in values)


def _scale(place: str, value: object) -> float:
    number = _number(value)
    if not LEAST_STATIC <= number <= LARGEST_STATIC:
        shown = value if isinstance(value, str) else repr(value)
        raise refusal(f"{place} is {shown}; it must be a number from 2^-100 to 2^24")
    single: float = struct.unpack("<f", struct.pack("<f", number))[0]
    return single


def _zero_point(place: str, value: object) -> int:
    number = _number(value)
    if not 0 <= number <= 255 or number != int(number):
        shown = value if isinstance(value, str) else repr(value)
        raise refusal(f"{place} is {shown}; it must be an integer from 0 to 255")
    return int(number)


def _number(value: object) -> float:
    """Return a number, which may be a string; NaN for anything else."""
    if isinstance(value, bool):
        return math.nan
    if isinstance(value, int | float | Fraction):
        return _finite(lambda: float(value))
    if not isinstance(value, str) or len(value) > 64:
        return math.nan
    if "0x" in value.lower():
        return _finite(lambda: float.fromhex(value))
    return _finite(lambda: float(Fraction(value)))


def _finite(read: Any) -> float:
    try:
        found: float = read()
    except (ValueError, OverflowError, ZeroDivisionError):
        return math.nan
    return found


def as_dictionaries(value: Any) -> dict[str, Any]:
    """Return nested mappings, or sorted pairs in place of mappings, as dictionaries."""
    items = value.items() if isinstance(value, Mapping) else value
    return {str(k): _plain_value(v) for k, v in items}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return as_dictionaries(value)
    pairs = isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value)
    return as_dictionaries(value) if pairs else value


def section_of(base: Mapping[str, Any], given: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a section of a contract over that of the preset; one with a format replaces it."""
    mine = mapping_of(key, given.get(key, {}))
    return mine if "format" in mine else {**base.get(key, {}), **mine}


def mapping_of(name: str, value: Any) -> dict[str, Any]:
    """Return a mapping; refuse any other value."""
    if not isinstance(value, dict):
        raise refusal(f"{name} must be a mapping, not {value!r}")
    return value


def refuse_unknown(raw: Mapping[str, Any], name: str, known: Iterable[str]) -> None:
    """Refuse a mapping with a key that is not known."""
    known = tuple(known)
    for key in raw:
        if key not in known:
            raise refusal(f"{name} has no key {key!r}", known, key)


def choice_of(name: str, value: Any, allowed: Iterable[str]) -> str:
    """Return a value that is one of those allowed; refuse any other."""
    options = tuple(allowed)
    if not isinstance(value, str) or value not in options:
        raise refusal(f"{name} is {value!r}", options, value)
    return value


def count_of(name: str, value: Any, largest: int) -> int:
    """Return an integer from 1 to `largest`; refuse any other value."""
    number = isinstance(value, int | float | Fraction) and not isinstance(value, bool)
    if not number or not 1 <= value <= largest or value != int(value):
        raise refusal(f"{name} is {value!r}; it must be an integer from 1 to {largest}")
    return int(value)


_OTHER_NAMES = {
    "fp64": "float64",
    "double": "float64",
    "fp32": "float32",
    "single": "float32",
    "float": "float32",
    "tf32": "tfloat32",
    "fp16": "float16",
    "half": "float16",
    "fp8": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "channel": "per_channel",
    "tensor": "per_tensor",
}
"""Common other names of formats and scales."""


def refusal(
    message: str,
    allowed: Iterable[str] = (),
    tried: object = None,
    near: Iterable[str] = (),
    help: str | None = None,
) -> Refusal:
    """Return a refusal that lists the allowed values; `near`: candidates for a suggestion."""
    import difflib

    options = tuple(allowed)
    among = (*options, *near)
    near = difflib.get_close_matches(str(tried), among, n=1) if tried is not None else []
    near = [name for name in (_OTHER_NAMES.get(str(tried).lower()),) if name in options] or near
    shown = f"; allowed: {', '.join(options)}" if options else ""
    return refuse(
        codes.NUMERICS, message + shown, help=f"did you mean {near[0]!r}?" if near else help
    )
