"""Llama and what is the same program: Mistral, whose layers may see a window, and Qwen2, whose
queries, keys and values have biases."""

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
READ = ("head_dim", "hidden_act")
FAMILIES = {
    "llama": {
        "classes": ("LlamaForCausalLM", "LlamaModel"),
        "read": ("attention_bias", "mlp_bias"),
        "only": {"pretraining_tp": (1,), "sliding_window": (None,)},
    },
    "mistral": {
        "classes": ("MistralForCausalLM", "MistralModel"),
        "read": ("sliding_window",),
        "only": {"attention_bias": (False,), "mlp_bias": (False,)},
        "needed": ("num_key_value_heads", "max_position_embeddings", "sliding_window"),
    },
    "qwen2": {
        "classes": ("Qwen2ForCausalLM", "Qwen2Model"),
        "read": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        "only": {"mlp_bias": (False,), "use_mrope": (False,)},
        "needed": ("num_key_value_heads", "max_position_embeddings"),
    },
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read Hugging Face field names. Refuse what the forward pass would not honour."""
    common = read_common("llama", raw)
    f = Fields(raw, "llama")
    f.require("hidden_act", ("silu", "swish"), default="silu")
    layers, bias, kind = common["layers"], f.flag("attention_bias", False), raw.get("model_type")
    match kind:
        case "mistral" if raw.get("sliding_window") is not None:
            common["windows"] = (f.count("sliding_window"),) * layers
        case "qwen2":
            common["windows"] = optional_windows("llama", raw, layers)
    common["rotations"] = (rotation_of("llama", raw, common),) * layers
    return DecoderConfig(
        **common,
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias and kind != "qwen2",
        mlp_bias=f.flag("mlp_bias", False),
    )


def build(raw: Mapping[str, Any]) -> Decoder:
    """Build the module of a configuration (Hugging Face field names)."""
    return build_decoder(read(raw))
