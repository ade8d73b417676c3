"""The BERT encoder: learned positions, post-layer-norm, erf GELU, attention in both directions.

Modules are named as in Hugging Face checkpoints (`embeddings.…`, `encoder.layer.0.…`); a prefix
`bert.` of the checkpoint is dropped. Token types other than 0 are not offered. Forward passes take
[..., T, D] or ids [..., T].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kcdsl.model.attention import AttentionProgram, Composed, merge_heads, split_heads
from kcdsl.model.configuration import LARGEST_DEPTH, Fields, family_of

ENCODER_ONLY = True
READ = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "hidden_act", "layer_norm_eps", "max_position_embeddings", "type_vocab_size",
    "position_embedding_type",
)  # fmt: skip
FAMILIES = {
    "bert": {
        "classes": (
            "BertModel", "BertForMaskedLM", "BertForPreTraining", "BertForTokenClassification",
            "BertForSequenceClassification", "BertForQuestionAnswering", "BertLMHeadModel",
            "BertForNextSentencePrediction", "BertForMultipleChoice",
        ),
        "inert": (
            "tie_word_embeddings", "directionality", "pooler_fc_size", "pooler_type",
            "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head",
        ),
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BertConfig:
    """The fields of config.json that the forward pass depends on."""

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    heads: int
    eps: float
    positions: int
    token_types: int

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> BertConfig:
        """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
        family_of("bert", raw)
        f = Fields(raw, "bert")
        f.require("hidden_act", ("gelu",), default="gelu")
        f.require("position_embedding_type", ("absolute",), default="absolute")
        width, heads = f.count("hidden_size"), f.count("num_attention_heads")
        f.check(width % heads == 0, "hidden_size is no multiple of num_attention_heads")
        return cls(
            vocabulary=f.count("vocab_size"),
            width=width,
            inner_width=f.count("intermediate_size"),
            layers=f.count("num_hidden_layers", most=LARGEST_DEPTH),
            heads=heads,
            eps=f.number("layer_norm_eps", 1e-12),
            positions=f.count("max_position_embeddings", 512),
            token_types=f.count("type_vocab_size", 2),
        )


class BertEmbeddings(nn.Module):
    """Word, type and position embeddings, and the norm of their sum."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocabulary, config.width)
        self.position_embeddings = nn.Embedding(config.positions, config.width)
        self.token_type_embeddings = nn.Embedding(config.token_types, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, ids: Tensor) -> Tensor:
        """Return [..., T, D]."""
        positions = torch.arange(ids.shape[-1], device=ids.device)
        types = torch.zeros_like(positions)
        summed = self.word_embeddings(ids) + self.token_type_embeddings(types)
        normed: Tensor = self.LayerNorm(summed + self.position_embeddings(positions))
        return normed


class BertProjections(nn.Module):
    """The query, key and value maps."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)


class BertOutput(nn.Module):
    """The map back to the width of the model, and the norm that follows the residual."""

    def __init__(self, config: BertConfig, inner: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inner, config.width)
        self.LayerNorm = nn.LayerNorm(config.width, eps=config.eps)


class BertAttention(nn.Module):
    """The attention sub-layer; forward leaves out the residual and the norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_program: AttentionProgram = Composed()
        self.add_module("self", BertProjections(config))
        self.output = BertOutput(config, config.width)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]; `keys` [..., T] is False at padding."""
        maps = self.get_submodule("self")
        assert isinstance(maps, BertProjections)
        q, k, v = (split_heads(m(x), self.heads) for m in (maps.query, maps.key, maps.value))
        scale = 1.0 / math.sqrt(q.shape[-1])
        context = self.attention_program(q, k, v, scale=scale, causal=False, keys=keys)
        projected: Tensor = self.output.dense(merge_heads(context))
        return projected


class BertIntermediate(nn.Module):
    """The widening map of the feed-forward sub-layer."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.width, config.inner_width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the activations [..., T, D_inner]."""
        return F.gelu(self.dense(x))


class BertLayer(nn.Module):
    """Attention and feed-forward, each followed by its residual and norm."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, config.inner_width)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]."""
        x = self.attention.output.LayerNorm(x + self.attention(x, keys))
        widened = self.output.dense(self.intermediate(x))
        normed: Tensor = self.output.LayerNorm(x + widened)
        return normed


class FeedForward(nn.Module):
    """The feed-forward sub-layer of a layer by itself, without residual and norm."""

    def __init__(self, layer: BertLayer) -> None:
        super().__init__()
        self.intermediate = layer.intermediate
        self.dense = layer.output.dense

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., T, D]."""
        projected: Tensor = self.dense(self.intermediate(x))
        return projected


class BertEncoder(nn.Module):
    """The stack of layers."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.layers))


class Bert(nn.Module):
    """An encoder from token ids to hidden states."""

    encoder_only = True

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.settings = config
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the final hidden states [..., T, D] of token ids [..., T]."""
        x: Tensor = self.embeddings(ids)
        for layer in self.encoder.layer:
            x = layer(x, keys)
        return x

    def hidden(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the final hidden states [..., T, D]."""
        return self.forward(ids, keys)

    @property
    def limits(self) -> tuple[int, int]:
        """Return the vocabulary size and the longest sequence."""
        return self.settings.vocabulary, self.settings.positions

    def blocks(self) -> dict[str, nn.Module]:
        """Return every block by name, in order of application."""
        found: dict[str, nn.Module] = {"norm_0": self.embeddings.LayerNorm}
        for i, layer in enumerate(self.encoder.layer):
            assert isinstance(layer, BertLayer)
            found[f"attn_{i}"] = layer.attention
            found[f"norm_{2 * i + 1}"] = layer.attention.output.LayerNorm
            found[f"mlp_{i}"] = FeedForward(layer)
            found[f"norm_{2 * i + 2}"] = layer.output.LayerNorm
            found[f"layer_{i}"] = layer
        return found | {"model": self}

    def block_entries(self) -> dict[str, nn.Module]:
        """Return, for each block that is no module of the forward pass, the module whose input is
        the input of the block."""
        return {f"mlp_{i}": layer.intermediate for i, layer in self._numbered_layers()}

    def block_exits(self) -> dict[str, nn.Module]:
        """Return, for each block that is no module of the forward pass, the module whose output is
        the output of the block."""
        return {f"mlp_{i}": layer.output.dense for i, layer in self._numbered_layers()}

    def _numbered_layers(self) -> list[tuple[int, BertLayer]]:
        return [(i, m) for i, m in enumerate(self.encoder.layer) if isinstance(m, BertLayer)]


def build(raw: Mapping[str, Any]) -> Bert:
    """Build the module of a configuration (Hugging Face field names)."""
    return Bert(BertConfig.read(raw))


def canonical_key(key: str) -> str | None:
    """Return the module's name for a checkpoint key; None for a key that the encoder does not use
    (the pooler, position numbers, and heads beside a `bert.` prefix)."""
    name = key.removeprefix("bert.")
    unused = name.startswith(("pooler.", "cls.")) or name == "embeddings.position_ids"
    return None if unused else name


def sentence_embedding(hidden: Tensor, keys: Tensor | None = None) -> Tensor:
    """Return the mean of the hidden states [..., T, D] over the attended tokens, with norm 1.

    The sum is float64, so that the drift of the embedding is that of the hidden states alone.
    Returns float64 [..., D].
    """
    states = hidden.to(torch.float64)
    if keys is None:
        mean = states.mean(dim=-2)
    else:
        share = keys.to(torch.float64).unsqueeze(-1)
        mean = (states * share).sum(dim=-2) / share.sum(dim=-2)
    return F.normalize(mean, dim=-1)
