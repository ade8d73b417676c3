"""A small example model for a draft in a folder without one: random weights from a seed."""

from __future__ import annotations

import json
import sys
from array import array
from random import Random

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
_SPREAD = 0.15


def config_text() -> str:
    """Return the config.json of the model."""
    return json.dumps(CONFIG, indent=1) + "\n"


def weights() -> bytes:
    """Return the weights as a safetensors file, the same every time."""
    chance, header, data, at = Random(0), {}, [], 0
    for name, shape in _shapes().items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        middle = 1.0 if len(shape) == 1 else 0.0
        values = array("f", (middle + chance.gauss(0, _SPREAD) for _ in range(count)))
        if sys.byteorder == "big":
            values.byteswap()  # the format is little-endian
        raw = values.tobytes()
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + len(raw)]}
        data.append(raw)
        at += len(raw)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    return len(head).to_bytes(8, "little") + head + b"".join(data)


def _shapes() -> dict[str, tuple[int, ...]]:
    width, inner, groups = 32, 64, 16
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (256, width)}
    for i in range(2):
        at = f"model.layers.{i}."
        found |= {
            f"{at}input_layernorm.weight": (width,),
            f"{at}self_attn.q_proj.weight": (width, width),
            f"{at}self_attn.k_proj.weight": (groups, width),
            f"{at}self_attn.v_proj.weight": (groups, width),
            f"{at}self_attn.o_proj.weight": (width, width),
            f"{at}post_attention_layernorm.weight": (width,),
            f"{at}mlp.gate_proj.weight": (inner, width),
            f"{at}mlp.up_proj.weight": (inner, width),
            f"{at}mlp.down_proj.weight": (width, inner),
        }
    return found | {"model.norm.weight": (width,)}
