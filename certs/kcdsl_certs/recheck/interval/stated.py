"""Codes of inputs, keys and values that a quantised checkpoint states
(docs/reference/quantised-checkpoints.md#numerics-of-such-a-kernel)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SIGNED = ("int8", "int8_full")
_WHOLE = ("per_tensor", "per_batch")
_FP8 = "fp8_e4m3"


def fits_inputs(method: Mapping[str, Any], name: str, kind: str, scale: str) -> bool:
    """Return whether inputs with this code format `kind` and scale layout `scale` agree with a
    configuration whose method has this name.

    Raises ValueError, LookupError, TypeError or AttributeError for a malformed configuration.
    """
    if name == "compressed-tensors":
        groups = [one.get("input_activations") for one in method["config_groups"].values()]
        stated = [one for one in groups if one is not None]
        return not stated or any(_fits(one, kind, scale) for one in stated)
    if name == "modelopt":
        algorithm = method.get("quant_algo")
        if algorithm == "NVFP4":
            return (kind, scale) == ("fp4_e2m1", "nvfp4")
        if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            return (kind, scale) == (_FP8, "per_token")
        return algorithm != "FP8" or (kind == _FP8 and scale in (*_WHOLE, "static"))
    if name == "fbgemm_fp8":
        return (kind, scale) == (_FP8, "per_token")
    if name != "fp8":
        return True
    power, how = method.get("scale_fmt"), method.get("activation_scheme")
    if kind != _FP8 or power not in (None, "ue8m0"):
        return False
    if method.get("weight_block_size") is not None:
        return scale == "group_128_e8m0" or (scale == "group_128" and power is None)
    if power is not None:
        return False
    if scale == "static":
        return how != "dynamic"
    return how != "static" and scale in (*_WHOLE, "per_token")


def _fits(stated: Mapping[str, Any], kind: str, scale: str) -> bool:
    """Return whether inputs agree with a scheme of compressed-tensors."""
    strategy, size, dynamic, symmetric = _scheme(stated)
    numbers = stated.get("type", "int"), stated.get("num_bits", 8)
    if numbers == ("float", 4):
        nested = strategy == "tensor_group" and size in (None, 16) and symmetric
        return nested and dynamic in (True, "local") and (kind, scale) == ("fp4_e2m1", "nvfp4")
    if stated.get("scale_dtype") not in (None, "float32", "torch.float32"):
        return False
    if dynamic is False:
        alike = scale == "static" and strategy in ("tensor", "channel")
    elif dynamic is True:
        layouts = {"tensor": _WHOLE, "token": ("per_token",), "group": (f"group_{size}",)}
        alike = scale in layouts.get(strategy, ())
    else:
        return False
    if numbers == ("float", 8):
        return alike and symmetric and kind == _FP8
    if numbers != ("int", 8):
        return False
    if dynamic is False:
        return alike and kind in (*_SIGNED, "uint8")
    return alike and (kind in _SIGNED if symmetric else kind == "uint8")


def _scheme(stated: Mapping[str, Any]) -> tuple[str, object, object, bool]:
    """Return strategy, group size, whether scales are dynamic, and whether they are symmetric."""
    strategy, size = stated.get("strategy"), stated.get("group_size")
    if strategy is None:
        strategy = "tensor" if size is None else "group"
    return str(strategy), size, stated.get("dynamic", False), stated.get("symmetric", True) is True


def fits_cache(method: Mapping[str, Any], name: str, kind: str, scale: str) -> bool:
    """Return whether keys and values agree with a configuration; see `fits_inputs`."""
    if name not in ("compressed-tensors", "modelopt"):
        return True
    algorithm, stated = method.get("kv_cache_quant_algo"), method.get("kv_cache_scheme")
    if name == "modelopt" and algorithm is not None:
        return algorithm == "FP8" and (kind, scale) == (_FP8, "static")
    if stated is None:
        return True
    strategy, _, dynamic, symmetric = _scheme(stated)
    numbers = stated.get("type", "int"), stated.get("num_bits", 8)
    if stated.get("scale_dtype") not in (None, "float32", "torch.float32"):
        return False
    if numbers == ("float", 8):
        alike = kind == _FP8 and symmetric
    else:
        alike = numbers == ("int", 8) and kind in _SIGNED and symmetric
    if dynamic is False:
        return alike and scale == "static" and strategy in ("tensor", "attn_head")
    layout = {"tensor": "per_tensor", "attn_head": "per_head"}.get(strategy)
    return alike and dynamic is True and scale == layout


def fits_torchao(told: Mapping[str, Any], kind: str, scale: str) -> bool:
    """Return whether inputs agree with the torchao metadata of a weight; see `fits_inputs`."""
    fields = told["_data"]
    named, stated = fields.get("activation_quantization"), fields.get("act_quant_kwargs")
    if named is not None:
        return named == "int8_asym_per_token" and (kind, scale) == ("uint8", "per_token")
    if stated is None:
        return True
    more, shared = stated["_data"], stated["_data"]["granularity"]
    static = "act_quant_scale" in told["_tensor_data_names"]
    if static:
        alike = scale == "static"
    else:
        by = shared["_type"], shared["_data"]
        alike = (
            (by == ("PerRow", {"dim": -1}) and scale == "per_token")
            or (by == ("PerTensor", {}) and scale in _WHOLE)
            or (by == ("PerBlock", {"block_size": [1, 128]}) and scale == "group_128")
        )
    if stated["_type"] == "QuantizeTensorToFloat8Kwargs":
        names = {_FP8: "e4m3fn", "fp8_e5m2": "e5m2"}
        names |= {f"fp8_{one}": one for one in ("e4m3fnuz", "e5m2fnuz")}
        return alike and more["float8_dtype"]["_data"] == f"float8_{names.get(kind)}"
    mapping = more["mapping_type"]["_data"]
    if stated["_type"] != "QuantizeTensorToInt8Kwargs" or mapping not in _MAPPINGS:
        return False
    able = (*_SIGNED, "uint8") if static else _MAPPINGS[mapping]
    return alike and kind in able


_MAPPINGS = {"SYMMETRIC": _SIGNED, "ASYMMETRIC": ("uint8",)}
"""Code formats of dynamic quantisation by torchao's mapping type."""
