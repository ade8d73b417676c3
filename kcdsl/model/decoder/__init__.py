"""The decoder: one configurable program for all built-in architectures of the Llama kind.

`config` has the configuration, without torch; `rotary`, `parts`, `experts` and `program` have the
modules. `gpt` is the common part of GPT-2 and GPT-NeoX.
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
    """Return a function that builds the module from a configuration with Hugging Face field names,
    with initial weights; that function imports torch."""

    def build(raw: Mapping[str, Any]) -> Decoder:
        from kcdsl.model.decoder.program import Decoder

        return Decoder(read(raw))

    return build
