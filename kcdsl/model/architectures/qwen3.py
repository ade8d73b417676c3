"""Qwen3: Llama with a norm over each head of queries and keys, Qwen3-MoE with experts too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kcdsl.model.configuration import Fields
from kcdsl.model.decoder import (
    DecoderConfig,
    builder_of,
    canonical_key,
    optional_windows,
    qwen_mixture,
    read_common,
    rotation_of,
)

__all__ = ["build", "canonical_key", "read"]

DECODER = True
READ = (
    "head_dim", "hidden_act", "attention_bias", "sliding_window", "use_sliding_window",
    "max_window_layers",
)  # fmt: skip
FAMILIES = {
    "qwen3": {
        "classes": ("Qwen3ForCausalLM", "Qwen3Model"),
        "read": ("layer_types",),
        "needed": ("num_key_value_heads", "max_position_embeddings", "head_dim"),
        "null": ("num_key_value_heads",),
    },
    "qwen3_moe": {
        "classes": ("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
        "read": (
            "num_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        ),
        "inert": ("output_router_logits", "router_aux_loss_coef"),
        "needed": (
            "num_key_value_heads",
            "max_position_embeddings",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "norm_topk_prob",
        ),
    },
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
    common = read_common("qwen3", raw)
    f = Fields(raw, "qwen3")
    f.require("hidden_act", ("silu", "swish"), default="silu")
    layers, bias = common["layers"], f.flag("attention_bias", False)
    if raw.get("model_type") == "qwen3_moe":
        common["mixture"] = qwen_mixture("qwen3", raw, layers)
        if f.flag("use_sliding_window", False):  # releases of transformers differ in which layers
            f.check(
                f.count("max_window_layers", 0, least=0) == 0,
                "with 'use_sliding_window', 'max_window_layers' must be missing or 0",
            )
            common["windows"] = (f.count("sliding_window"),) * layers
    else:
        common["windows"] = optional_windows("qwen3", raw, layers)
    common["rotations"] = (rotation_of("qwen3", raw, common),) * layers
    return DecoderConfig(**common, qkv_bias=bias, output_bias=bias, head_norm="head")


build = builder_of(read)
