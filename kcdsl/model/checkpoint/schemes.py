"""The storage format that a quantisation configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from kcdsl.model.checkpoint.activations import stated_cache, stated_inputs
from kcdsl.model.checkpoint.float8 import fbgemm_scheme, fp8_scheme
from kcdsl.model.checkpoint.quantised import (
    Scheme,
    awq_scheme,
    compressed_tensors_scheme,
    gptq_scheme,
    modelopt_scheme,
    unknown,
)

_METHODS: Mapping[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "compressed-tensors": compressed_tensors_scheme,
    "gptq": gptq_scheme,
    "awq": awq_scheme,
    "modelopt": modelopt_scheme,
    "fp8": fp8_scheme,
    "fbgemm_fp8": fbgemm_scheme,
}


def scheme_of(config: Mapping[str, Any]) -> Scheme:
    """Return the storage format that a quantisation configuration names.

    Refuse (KC455) unsupported methods and variants, by name.
    """
    method = str(config.get("quant_method", "")).lower()
    if method not in ("compressed-tensors", "gptq", "awq") and "quant_algo" in config:
        method = "modelopt"
    if method not in _METHODS:
        raise unknown("quant_method", config.get("quant_method"), (*_METHODS, "torchao"))
    scheme = _METHODS[method](config)
    inputs, cache = stated_inputs(method, config), stated_cache(method, config)
    return replace(scheme, inputs={"*": inputs}, cache=cache)
