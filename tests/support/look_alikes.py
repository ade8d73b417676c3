"""Configurations that resemble a built-in decoder but belong to another program.

Each has the model type of a form and changes one field; all of them are refused by name.
"""

from __future__ import annotations

from typing import Any

from kcdsl.diagnostics import Refusal, codes
from kcdsl.model import registry
from tests.support.decoders import EVERY_FORM

_MIXED = ["full_attention", "sliding_attention"]
LOOK_ALIKES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("Llama", {"hidden_act": "gelu"}),
    ("Llama", {"qk_norm": True}),
    ("Llama", {"layer_types": _MIXED}),
    ("Llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    ("Llama, YaRN", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7,
                                         "original_max_position_embeddings": 16}}),
    ("Mistral", {"attention_bias": True}),
    ("Mistral", {"layer_types": _MIXED}),
    ("Qwen2", {"layer_types": ["full_attention", "chunked_attention"]}),
    ("Qwen2", {"layer_types": _MIXED, "use_sliding_window": False}),
    ("Qwen3", {"num_experts": 8}),
    ("Qwen3", {"architectures": ["Qwen3MoeForCausalLM"]}),
    ("Qwen3", {"layer_types": ["full_attention"]}),
    ("Gemma 2", {"hidden_activation": "gelu"}),
    ("Gemma 2", {"use_bidirectional_attention": True}),
    ("Gemma 2", {"sliding_window_size": 7}),
    ("Gemma 2", {"sliding_window": None}),
    ("Gemma 3", {"attn_logit_softcapping": 50.0}),
    ("Gemma 3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    ("Gemma 3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("Gemma 3", {"vision_config": {"hidden_size": 8}}),
    ("Phi-3", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}),
    ("Phi-3", {"rope_parameters": {"rope_type": "yarn", "short_factor": [1.0, 1.0],
                                   "long_factor": [1.0, 1.0]}}),
    ("Phi-3", {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}),
    ("OLMo 2", {"clip_qkv": 8.0}),
    ("OLMo 2", {"layer_types": _MIXED}),
    ("SmolLM3", {"no_rope_layers": [1]}),
    ("SmolLM3", {"mlp_activation": "relu"}),
    ("Granite", {"num_local_experts": 4}),
    ("Granite", {"residual_multiplier": -0.4}),
    ("Mixtral", {"num_experts_per_tok": 6}),
    ("Mixtral", {"shared_expert_intermediate_size": 8}),
    ("Mixtral", {"scoring_func": "sigmoid"}),
    ("Mixtral", {"norm_topk_prob": False}),
    ("Qwen2-MoE", {"layer_types": _MIXED}),
    ("Qwen2-MoE", {"use_sliding_window": True, "sliding_window": 3, "layer_types": None}),
    ("Qwen2-MoE", {"mlp_only_layers": [2]}),
    ("Qwen2-MoE", {"n_group": 2}),
    ("Qwen3-MoE", {"num_experts": 6, "num_local_experts": 6}),
    ("Qwen3-MoE", {"shared_expert_intermediate_size": 7}),
    ("Qwen3-MoE", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
)  # fmt: skip
"""The form, and the change."""


def refused(name: str, change: dict[str, Any]) -> bool:
    """Return whether the changed configuration of a form is refused because of the change."""
    form = EVERY_FORM[name]
    try:
        registry.load(form.architecture).build(form.saved() | change)
    except Refusal as refusal:
        return refusal.diagnostics[0].code == codes.MODEL_CONFIG
    return False
