"""Llama and the families with the same program: Mistral (sliding windows), Qwen2 (biases of
queries, keys and values), and both with experts, Mixtral and Qwen2-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kcdsl.model.configuration import Fields
from kcdsl.model.decoder import (
    DecoderConfig,
    builder_of,
    mixtral_mixture,
    optional_windows,
    qwen_mixture,
    read_common,
    rotation_of,
    windows_of,
)
from kcdsl.model.decoder import mixtral_key as canonical_key

__all__ = ["build", "canonical_key", "read"]

DECODER = True
READ = ("head_dim", "hidden_act")
FAMILIES = {
    "llama": {
        "classes": ("LlamaForCausalLM", "LlamaModel"),
        "read": ("attention_bias", "mlp_bias"),
        "only": {"pretraining_tp": (1,), "sliding_window": (None,)},
        "null": ("num_key_value_heads", "head_dim"),
    },
    "mistral": {
        "classes": ("MistralForCausalLM", "MistralModel"),
        "read": ("sliding_window",),
        "only": {"attention_bias": (False,), "mlp_bias": (False,)},
        "needed": ("num_key_value_heads", "max_position_embeddings", "sliding_window"),
        "null": ("head_dim",),
    },
    "qwen2": {
        "classes": ("Qwen2ForCausalLM", "Qwen2Model"),
        "read": ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
        "only": {"mlp_bias": (False,), "use_mrope": (False,)},
        "needed": ("num_key_value_heads", "max_position_embeddings"),
        "null": ("num_key_value_heads",),
    },
    "mixtral": {
        "classes": ("MixtralForCausalLM", "MixtralModel"),
        "read": ("sliding_window", "num_local_experts", "num_experts_per_tok"),
        "only": {"attention_bias": (False,), "mlp_bias": (False,)},
        "inert": ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
        "needed": (
            "num_key_value_heads",
            "max_position_embeddings",
            "sliding_window",
            "rms_norm_eps",
            "num_local_experts",
            "num_experts_per_tok",
        ),
        "null": ("head_dim",),
    },
    "qwen2_moe": {
        "classes": ("Qwen2MoeForCausalLM", "Qwen2MoeModel"),
        "read": (
            "sliding_window",
            "use_sliding_window",
            "layer_types",
            "qkv_bias",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "norm_topk_prob",
            "decoder_sparse_step",
            "mlp_only_layers",
        ),
        "only": {"mlp_bias": (False,), "attention_bias": (False,)},
        "inert": ("output_router_logits", "router_aux_loss_coef", "max_window_layers"),
        "needed": (
            "num_key_value_heads",
            "max_position_embeddings",
            "num_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
            "norm_topk_prob",
        ),
    },
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
    common = read_common("llama", raw)
    f = Fields(raw, "llama")
    f.require("hidden_act", ("silu", "swish"), default="silu")
    layers, bias, kind = common["layers"], f.flag("attention_bias", False), raw.get("model_type")
    match kind:
        case "mistral" if raw.get("sliding_window") is not None:
            common["windows"] = (f.count("sliding_window"),) * layers
        case "qwen2":
            common["windows"] = optional_windows("llama", raw, layers)
        case "mixtral":
            common["mixture"] = mixtral_mixture("llama", raw, common)
            if raw.get("sliding_window") is not None:
                common["windows"] = (f.count("sliding_window"),) * layers
        case "qwen2_moe":
            bias = f.flag("qkv_bias", True)
            common["mixture"] = qwen_mixture("llama", raw, layers, shared=True)
            windowed = f.flag("use_sliding_window", False)
            f.check(  # releases of transformers differ in which layers have one by default
                not windowed or bool(raw.get("layer_types")), "the field 'layer_types' is missing"
            )
            common["windows"] = windows_of("llama", raw, layers, ("full_attention",) * layers)
            f.check(
                windowed or not any(common["windows"]),
                "'layer_types' has sliding layers, and 'use_sliding_window' is off",
            )
    theta = 1e6 if kind == "mixtral" else 1e4
    common["rotations"] = (rotation_of("llama", raw, common, theta),) * layers
    return DecoderConfig(
        **common,
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias and kind not in ("qwen2", "qwen2_moe"),
        mlp_bias=f.flag("mlp_bias", False),
    )


build = builder_of(read)
