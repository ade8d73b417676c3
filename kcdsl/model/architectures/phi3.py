"""Phi-3: the Llama program with one matrix for queries, keys and values, and one for gate and up.

With `longrope`, sequences may have up to `original_max_position_embeddings` tokens: for longer ones
the program uses other tables at all positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kcdsl.model.configuration import Fields
from kcdsl.model.decoder import (
    DecoderConfig,
    builder_of,
    canonical_key,
    read_common,
    scaled_rotation,
)

__all__ = ["build", "canonical_key", "read"]

DECODER = True
READ = ("hidden_act", "sliding_window", "original_max_position_embeddings")
FAMILIES = {
    "phi3": {
        "classes": ("Phi3ForCausalLM", "Phi3Model"),
        "only": {
            "attention_bias": (False,),
            "auto_map": (
                {
                    "AutoConfig": "configuration_phi3.Phi3Config",
                    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
                },
            ),
        },
        "inert": ("embd_pdrop", "resid_pdrop"),
        "needed": ("max_position_embeddings", "original_max_position_embeddings"),
        "null": ("num_key_value_heads",),
        "rope": ("default", "longrope"),
    },
}


def read(raw: Mapping[str, Any]) -> DecoderConfig:
    """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
    common = read_common("phi3", raw, eps=1e-5)
    f = Fields(raw, "phi3")
    f.require("hidden_act", ("silu", "swish"), default="silu")
    layers, original = common["layers"], f.count("original_max_position_embeddings")
    table = dict(f.mapping("rope_parameters") or f.mapping("rope_scaling"))
    stated = table.setdefault("original_max_position_embeddings", original)
    f.check(stated == original, "'original_max_position_embeddings' is stated twice, differently")
    rotation = scaled_rotation("phi3", table, common, f.number("rope_theta", 10000.0))
    if rotation.kind == "longrope":
        common["positions"] = min(common["positions"], original)
    if raw.get("sliding_window") is not None:
        common["windows"] = (f.count("sliding_window"),) * layers
    common["rotations"] = (rotation,) * layers
    return DecoderConfig(**common, fused=True)


build = builder_of(read)
