"""Formats and layouts of quantised inputs, keys and values that a checkpoint states.

They have the form of a numerics specification, so that they can be compared with the numerics of
the inference kernel. Codes that no numerics express match no numerics that quantise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from kcdsl.model.numerics.formats import LAYOUTS
from kcdsl.source.files import excerpt

_TENSOR = ("per_tensor", "per_batch")
"""Layouts of one dynamic scale per tensor, or per batch."""
_SIGNED = ("int8", "int8_full")
_FLOATS = {
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "float8_e4m3fnuz": "fp8_e4m3fnuz",
    "float8_e5m2fnuz": "fp8_e5m2fnuz",
}
"""Code formats by torch type."""


@dataclass(frozen=True, slots=True)
class StatedCodes:
    """Codes that a checkpoint states: `said` in words, `able` the pairs (code format, scale layout)
    of numerics that match them, the most likely first."""

    said: str
    able: tuple[tuple[str, str], ...] = ()

    @property
    def section(self) -> str | None:
        """Return fields of numerics that match these codes; None where no numerics do."""
        if not self.able:
            return None
        form, layout = self.able[0]
        return f"format: {form}, scale: {layout}"


def _codes(said: str, forms: Iterable[str], layouts: Iterable[str]) -> StatedCodes:
    return StatedCodes(said, tuple(product(forms, layouts)))


def stated_inputs(method: str, config: Mapping[str, Any]) -> StatedCodes | None:
    """Return the codes of inputs that the configuration of a method states; None where it states
    none, as for weight-only quantisation."""
    match method:
        case "compressed-tensors":
            found = [group.get("input_activations") for group in config["config_groups"].values()]
            read = [_of_arguments(one, inputs=True) for one in found if one is not None]
            said = " or ".join(dict.fromkeys(one.said for one in read))
            able = dict.fromkeys(pair for one in read for pair in one.able)
            return StatedCodes(said, tuple(able)) if read else None
        case "modelopt":
            return _ALGORITHMS.get(str(config.get("quant_algo")))
        case "fp8":
            return _of_fp8(config)
        case "fbgemm_fp8":
            return _codes("fp8 codes by token", ("fp8_e4m3",), ("per_token",))
    return None


def stated_cache(method: str, config: Mapping[str, Any]) -> StatedCodes | None:
    """Return the codes of keys and values that the configuration of a method states."""
    if method not in ("compressed-tensors", "modelopt"):
        return None
    algorithm, scheme = config.get("kv_cache_quant_algo"), config.get("kv_cache_scheme")
    if method == "modelopt" and algorithm is not None:
        forms = ("fp8_e4m3",) if algorithm == "FP8" else ()
        return _codes(f"codes of {excerpt(algorithm)}", forms, ("static",))
    return None if scheme is None else _of_arguments(scheme, inputs=False)


_ALGORITHMS = {
    "FP8": _codes("fp8 codes by tensor", ("fp8_e4m3",), ("static", *_TENSOR)),
    "FP8_PER_CHANNEL_PER_TOKEN": _codes("fp8 codes by token", ("fp8_e4m3",), ("per_token",)),
    "NVFP4": _codes("nvfp4 codes", ("fp4_e2m1",), ("nvfp4",)),
}
"""Algorithms of ModelOpt whose inputs are quantised."""


def _of_fp8(config: Mapping[str, Any]) -> StatedCodes:
    """Return the codes of inputs of `fp8`. Without blocks, a dynamic scale is per token or per
    tensor, depending on the kernel; without `scale_fmt`, block scales may be powers of two or
    not."""
    kind, power = config.get("activation_scheme"), config.get("scale_fmt")
    scales = "" if power is None else f" with {excerpt(power)} scales"
    if config.get("weight_block_size") is not None:
        able = {None: ("group_128", "group_128_e8m0"), "ue8m0": ("group_128_e8m0",)}
        layouts = able.get(power, ()) if power is None or isinstance(power, str) else ()
        return _codes(f"fp8 codes by group of 128{scales}", ("fp8_e4m3",), layouts)
    layouts = () if kind == "dynamic" else ("static",)
    layouts += () if kind == "static" else ("per_token", *_TENSOR)
    forms = ("fp8_e4m3",) if power is None else ()
    return _codes(f"{kind or 'static or dynamic'} fp8 codes{scales}", forms, layouts)


def _of_arguments(raw: object, *, inputs: bool) -> StatedCodes:
    """Return the codes of a scheme of compressed-tensors, for inputs or for a cache."""
    if not isinstance(raw, dict):
        return StatedCodes(excerpt(raw))
    kind, bits, size = raw.get("type", "int"), raw.get("num_bits", 8), raw.get("group_size")
    strategy, dynamic = raw.get("strategy"), raw.get("dynamic", False)
    if strategy is None:
        strategy = "tensor" if size is None else "group"
    symmetric, scales = raw.get("symmetric", True), raw.get("scale_dtype")
    moved = "" if symmetric is True else ", asymmetric,"
    how = "static" if dynamic is False else "dynamic"
    said = excerpt(f"{how} {bits}-bit {kind} codes{moved} by {strategy}")
    if inputs and (kind, bits, strategy) == ("float", 4, "tensor_group"):
        nested = size in (None, 16) and dynamic in (True, "local") and symmetric is True
        return _codes(said, ("fp4_e2m1",) if nested else (), ("nvfp4",))
    layouts = _layouts(str(strategy), size, inputs=inputs) if dynamic is True else ()
    if dynamic is False and strategy in ("tensor", "channel" if inputs else "attn_head"):
        layouts = ("static",)
    plain = bits == 8 and scales in (None, "float32", "torch.float32")
    forms: tuple[str, ...] = ()
    if kind == "float" and symmetric is True:
        forms = ("fp8_e4m3",)
    elif kind == "int" and inputs and layouts == ("static",):
        forms = (*_SIGNED, "uint8")  # the value of the zero point is compared elsewhere
    elif kind == "int" and symmetric is True:
        forms = _SIGNED
    elif kind == "int" and inputs:
        forms = ("uint8",)
    return _codes(said, forms if plain else (), layouts)


def _layouts(strategy: str, size: object, *, inputs: bool) -> tuple[str, ...]:
    """Return the layouts of dynamic scales."""
    if not inputs:
        return {"tensor": ("per_tensor",), "attn_head": ("per_head",)}.get(strategy, ())
    group = f"group_{size}"
    if strategy == "group":
        return (group,) if group in LAYOUTS else ()
    return {"tensor": _TENSOR, "token": ("per_token",)}.get(strategy, ())


def stated_by_torchao(told: Mapping[str, Any]) -> StatedCodes | None:
    """Return the codes of inputs that the metadata of a torchao weight states."""
    data = told["_data"]
    named, kwargs = data.get("activation_quantization"), data.get("act_quant_kwargs")
    if named is not None:
        forms: tuple[str, ...] = ("uint8",) if named == "int8_asym_per_token" else ()
        return _codes(f"codes {excerpt(named)}", forms, ("per_token",))
    if kwargs is None:
        return None
    fields = kwargs.get("_data") if isinstance(kwargs, dict) else None
    if not isinstance(fields, dict):
        return StatedCodes(f"codes of {excerpt(kwargs)}")
    by, static = fields.get("granularity"), "act_quant_scale" in told["_tensor_data_names"]
    layouts = next((layouts for one, layouts in _GRANULARITIES if one == by), ())
    if kwargs.get("_type") == "QuantizeTensorToFloat8Kwargs":
        kind = _name(fields.get("float8_dtype"))
        forms = (_FLOATS[kind],) if kind in _FLOATS else ()
    elif kwargs.get("_type") == "QuantizeTensorToInt8Kwargs":
        kind = f"{_name(fields.get('mapping_type')).lower()} int8"
        able = {"symmetric int8": _SIGNED, "asymmetric int8": ("uint8",)}
        forms = able.get(kind, ())
        # the value of a static zero point is compared elsewhere
        forms = (*_SIGNED, "uint8") if forms and static else forms
    else:
        kind, forms = excerpt(kwargs.get("_type")), ()
    return _codes(f"{kind} codes {_type(by)}", forms, ("static",) if static else layouts)


_GRANULARITIES: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"_type": "PerRow", "_data": {"dim": -1}}, ("per_token",)),
    ({"_type": "PerTensor", "_data": {}}, _TENSOR),
    ({"_type": "PerBlock", "_data": {"block_size": [1, 128]}}, ("group_128",)),
)
"""Layouts by torchao granularity."""


def _type(value: object) -> str:
    return excerpt(value.get("_type") if isinstance(value, dict) else value)


def _name(value: object) -> str:
    """Return the name of an enumeration member or type in the metadata."""
    return str(value.get("_data")) if isinstance(value, dict) else str(value)
