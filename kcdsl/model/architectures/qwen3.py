"""Qwen3: the Llama program with a norm over each head of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kcdsl.model.configuration import Fields
from kcdsl.model.decoder import (
    DecoderConfig,
    build_decoder,
    canonical_key,
    optional_windows,
    read_common,
    rotation_of,
)

if TYPE_CHECKING:
    from kcdsl.model.decoder.program import Decoder

__all__ = ["build", "canonical_key", "read"]

DECODER = True
READ = (
    "head_dim", "hidden_act", "attention_bias", "sliding_window", "use_sliding_window",
    "max_window_layers", "layer_types",
)  # fmt: skip
FAMILIES = {
    "qwen3": {
        "classes": ("Qwen3ForCausalLM", "Qwen3Model"),
        "needed": ("num_key_value_heads", "max_position_embeddings", "head_dim"),
    },
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read Hugging Face field names. Refuse what the forward pass would not honour."""
    common = read_common("qwen3", raw)
    f = Fields(raw, "qwen3")
    f.require("hidden_act", ("silu", "swish"), default="silu")
    layers, bias = common["layers"], f.flag("attention_bias", False)
    common["windows"] = optional_windows("qwen3", raw, layers)
    common["rotations"] = (rotation_of("qwen3", raw, common),) * layers
    return DecoderConfig(**common, qkv_bias=bias, output_bias=bias, head_norm="head")


def build(raw: Mapping[str, Any]) -> Decoder:
    """Build the module of a configuration (Hugging Face field names)."""
    return build_decoder(read(raw))
