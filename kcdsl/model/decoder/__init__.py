"""The decoder: one program, of which the built-in architectures of the Llama kind are forms.

`config` says which form, without torch; `rotary`, `parts`, `experts` and `program` are its modules.
`gpt` has what GPT-2 and GPT-NeoX share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kcdsl.model.decoder.config import (
    LAYER_KINDS,
    DecoderConfig,
    Mixture,
    Rotation,
    canonical_key,
    mixtral_key,
    mixtral_mixture,
    name_in_mixtral,
    optional_windows,
    qwen_mixture,
    read_common,
    rotation_of,
    scaled_rotation,
    windows_of,
)

if TYPE_CHECKING:
    from kcdsl.model.decoder.program import Decoder

__all__ = [
    "LAYER_KINDS",
    "DecoderConfig",
    "Mixture",
    "Rotation",
    "build_decoder",
    "canonical_key",
    "mixtral_key",
    "mixtral_mixture",
    "name_in_mixtral",
    "optional_windows",
    "qwen_mixture",
    "read_common",
    "rotation_of",
    "scaled_rotation",
    "windows_of",
]


def build_decoder(config: DecoderConfig) -> Decoder:
    """Build the module of a form, its weights at their defaults; imports torch."""
    from kcdsl.model.decoder.program import Decoder

    return Decoder(config)
