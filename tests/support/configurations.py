"""Small model configurations, as in config.json; does not import torch."""

from __future__ import annotations

import json
from typing import Any

DECODER: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
DECODER_TEXT = json.dumps({**DECODER, "vocab_size": 256, "max_position_embeddings": 1024})
"""The text of a valid config.json, for tests that do not depend on its values."""
