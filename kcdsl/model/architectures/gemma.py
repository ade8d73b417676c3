"""Gemma 2 and the text model of Gemma 3: norms around each sub-layer whose gain is 1 + weight, GELU
gates, scaled embeddings, windows in some layers.

Gemma 2 caps scores and logits. Gemma 3 normalises each head of queries and keys, and has two
rotations: one of the layers with a window, one of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kcdsl.model.configuration import ROPE_BY_LAYER, Fields
from kcdsl.model.decoder import (
    LAYER_KINDS,
    DecoderConfig,
    Rotation,
    builder_of,
    canonical_key,
    read_common,
    rotation_of,
    scaled_rotation,
    windows_of,
)

__all__ = ["build", "canonical_key", "read"]

DECODER = True
READ = (
    "head_dim", "hidden_activation", "attention_bias", "query_pre_attn_scalar", "sliding_window",
    "layer_types", "final_logit_softcapping",
)  # fmt: skip
FAMILIES = {
    "gemma2": {
        "classes": ("Gemma2ForCausalLM", "Gemma2Model"),
        "read": ("attn_logit_softcapping", "sliding_window_size"),
        "only": {
            "hidden_act": ("gelu_pytorch_tanh",),
            "use_bidirectional_attention": (None, False),
        },
        "inert": ("cache_implementation",),
        "needed": (
            "num_key_value_heads", "max_position_embeddings", "head_dim", "query_pre_attn_scalar",
            "sliding_window", "attn_logit_softcapping", "final_logit_softcapping",
        ),
    },
    "gemma3_text": {
        "classes": ("Gemma3ForCausalLM", "Gemma3TextModel"),
        "read": ("rope_local_base_freq", "sliding_window_pattern", "_sliding_window_pattern"),
        "only": {
            "attn_logit_softcapping": (None,),
            "use_bidirectional_attention": (None, False),
        },
        "inert": ("cache_implementation",),
        "needed": (
            "num_key_value_heads", "max_position_embeddings", "head_dim", "query_pre_attn_scalar",
            "sliding_window",
        ),
        "rope": ("default", "linear", "llama3", "yarn", "by layer"),
    },
}  # fmt: skip


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
    kind = raw.get("model_type")
    common = read_common("gemma", raw, tied=True)
    f = Fields(raw, "gemma")
    f.require("hidden_activation", ("gelu_pytorch_tanh",), default="gelu_pytorch_tanh")
    layers, bias = common["layers"], f.flag("attention_bias", False)
    every = 2 if kind == "gemma2" else _pattern(f, raw)
    usual = [LAYER_KINDS[(i + 1) % every != 0] for i in range(layers)]
    windows = windows_of("gemma", raw, layers, usual)
    if raw.get("sliding_window_size") is not None:
        same = raw["sliding_window_size"] == raw["sliding_window"]
        f.check(same, "'sliding_window_size' and 'sliding_window' differ")
    if kind == "gemma2":
        common["rotations"] = (rotation_of("gemma", raw, common),) * layers
    else:
        local, whole = _rotations(f, raw, common)
        common["rotations"] = tuple(whole if window is None else local for window in windows)
    scale = 1.0 / math.sqrt(f.number("query_pre_attn_scalar", 256.0))
    return DecoderConfig(
        **(common | {"windows": windows, "score_scale": scale}),
        qkv_bias=bias,
        output_bias=bias,
        activation="gelu_tanh",
        norms="around",
        offset_gain=True,
        head_norm="" if kind == "gemma2" else "head",
        score_cap=f.optional("attn_logit_softcapping"),
        logit_cap=f.optional("final_logit_softcapping"),
        embedding_scale=math.sqrt(common["width"]),
    )


def _pattern(f: Fields, raw: Mapping[str, Any]) -> int:
    """Return the period of layers without a window, used where `layer_types` is missing."""
    if raw.get("layer_types") is None:
        f.check("_sliding_window_pattern" not in raw, "the field 'layer_types' is missing")
    return f.count("sliding_window_pattern", 6)


def _rotations(
    f: Fields, raw: Mapping[str, Any], common: Mapping[str, Any]
) -> tuple[Rotation, Rotation]:
    """Return the rotations of layers with a window, and of the others. Both have parameters of
    their own, or the first has the base `rope_local_base_freq`."""
    table = f.mapping("rope_parameters")
    bases = f.number("rope_local_base_freq", 1e4), f.number("rope_theta", 1e6)
    if set(table) & set(ROPE_BY_LAYER):
        f.check("rope_local_base_freq" not in raw, "the local base of RoPE is stated twice")
        tables = Fields(table, "gemma RoPE")
        own = tables.mapping("sliding_attention"), tables.mapping("full_attention")
    else:
        f.check(not table, "'rope_parameters' must be given for each kind of layer")
        scaling = f.mapping("rope_scaling")
        named = not scaling or "rope_type" in scaling  # transformers does not read "type" here
        f.check(named, "the field 'rope_type' of 'rope_scaling' is missing")
        own = {}, scaling
    local, whole = (
        scaled_rotation("gemma", one, common, base) for one, base in zip(own, bases, strict=True)
    )
    return local, whole


build = builder_of(read)
