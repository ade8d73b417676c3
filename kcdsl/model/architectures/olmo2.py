"""OLMo 2: norms after each sub-layer, and over all heads of queries and keys together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kcdsl.model.configuration import Fields
from kcdsl.model.decoder import (
    DecoderConfig,
    builder_of,
    canonical_key,
    read_common,
    rotation_of,
)

__all__ = ["build", "canonical_key", "read"]

DECODER = True
READ = ("hidden_act", "attention_bias")
FAMILIES = {
    "olmo2": {"classes": ("Olmo2ForCausalLM", "Olmo2Model"), "null": ("num_key_value_heads",)},
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
    common = read_common("olmo2", raw, eps=1e-5)
    f = Fields(raw, "olmo2")
    f.require("hidden_act", ("silu", "swish"), default="silu")
    bias = f.flag("attention_bias", False)
    common["rotations"] = (rotation_of("olmo2", raw, common),) * common["layers"]
    return DecoderConfig(
        **common, qkv_bias=bias, output_bias=bias, norms="after", head_norm="width"
    )


build = builder_of(read)
