"""Granite: the Llama program with factors on embeddings, scores, residuals and logits."""

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
READ = (
    "hidden_act", "attention_bias", "mlp_bias", "embedding_multiplier", "attention_multiplier",
    "residual_multiplier", "logits_scaling",
)  # fmt: skip
FAMILIES = {
    "granite": {
        "classes": ("GraniteForCausalLM", "GraniteModel"),
        "null": ("num_key_value_heads",),
    },
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
    common = read_common("granite", raw)
    f = Fields(raw, "granite")
    f.require("hidden_act", ("silu", "swish"), default="silu")
    bias = f.flag("attention_bias", False)
    common["rotations"] = (rotation_of("granite", raw, common),) * common["layers"]
    common["score_scale"] = f.number("attention_multiplier", 1.0)
    return DecoderConfig(
        **common,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=f.flag("mlp_bias", False),
        embedding_factor=f.number("embedding_multiplier", 1.0),
        residual_factor=f.number("residual_multiplier", 1.0),
        logit_divisor=f.number("logits_scaling", 1.0),
    )


build = builder_of(read)
