"""The decoder: one program, of which the built-in architectures of the Llama kind are forms.

`config` says which form, without torch; `rotary`, `parts`, `experts` and `program` are its modules.
`gpt` has what GPT-2 and GPT-NeoX share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

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
    "builder_of",
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


def builder_of(
    read: Callable[[Mapping[str, Any]], DecoderConfig],
) -> Callable[[Mapping[str, Any]], Decoder]:
    """Return the function that builds the module of a form from its configuration, in the field
    names of Hugging Face, with the weights at their defaults; it imports torch."""

    def build(raw: Mapping[str, Any]) -> Decoder:
        from kcdsl.model.decoder.program import Decoder

        return Decoder(read(raw))

    return build
