"""SmolLM3: the Llama program, with some layers that have no rotary embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kcdsl.model.configuration import Fields
from kcdsl.model.decoder import (
    LAYER_KINDS,
    DecoderConfig,
    builder_of,
    canonical_key,
    read_common,
    rotation_of,
    windows_of,
)

__all__ = ["build", "canonical_key", "read"]

DECODER = True
READ = (
    "hidden_act", "attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval",
    "sliding_window", "use_sliding_window", "layer_types",
)  # fmt: skip
FAMILIES = {
    "smollm3": {
        "classes": ("SmolLM3ForCausalLM", "SmolLM3Model"),
        "inert": ("max_window_layers", "pretraining_tp"),
        "needed": ("num_key_value_heads", "max_position_embeddings"),
        "null": ("num_key_value_heads",),
    },
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
    common = read_common("smollm3", raw, tied=True)
    f = Fields(raw, "smollm3")
    f.require("hidden_act", ("silu", "swish"), default="silu")
    layers, bias = common["layers"], f.flag("attention_bias", False)
    rotation = rotation_of("smollm3", raw, common, theta=2e6)
    turned = _turned(f, raw, layers)
    used = f.flag("use_sliding_window", False) and raw.get("sliding_window") is not None
    usual = [LAYER_KINDS[used and not one] for one in turned]
    windows = windows_of("smollm3", raw, layers, usual)
    f.check(
        used or not any(windows),
        "'layer_types' has sliding layers, and 'use_sliding_window' is off",
    )
    common |= {"windows": windows, "rotations": tuple(rotation if t else None for t in turned)}
    mlp_bias = f.flag("mlp_bias", False)
    return DecoderConfig(**common, qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def _turned(f: Fields, raw: Mapping[str, Any], layers: int) -> list[bool]:
    """Return for each layer whether it has a rotary embedding: 1 in `no_rope_layers`."""
    every = f.count("no_rope_layer_interval", 4)
    found = raw.get("no_rope_layers")
    if found is None:
        return [(i + 1) % every != 0 for i in range(layers)]
    good = isinstance(found, list) and len(found) == layers
    good = good and all(type(one) is int and one in (0, 1) for one in found)
    f.check(good, f"'no_rope_layers' must be a list of {layers} numbers, each 0 or 1")
    return [one == 1 for one in found]


build = builder_of(read)
