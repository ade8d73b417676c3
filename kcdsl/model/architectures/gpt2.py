"""GPT-2: learned positions, pre-layer-norm, one matrix for queries, keys and values, causal.

Modules are named as in Hugging Face checkpoints with the prefix `transformer.`, which those of the
model without a head lack. They store the weights of their linears transposed, as [in, out]. Forward
passes take [..., T, D] or ids [..., T].
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
from kcdsl.model.checkpoint.modules import TransposedLinear
from kcdsl.model.configuration import LARGEST_DEPTH, Fields, family_of
from kcdsl.model.decoder.gpt import FORMS, GPTModel, Names

READ = (
    "vocab_size", "n_embd", "n_inner", "n_layer", "n_head", "n_positions", "activation_function",
    "layer_norm_epsilon", "tie_word_embeddings",
)  # fmt: skip
FAMILIES = {
    "gpt2": {
        "classes": ("GPT2LMHeadModel", "GPT2Model"),
        "only": {
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
        },
        "inert": (
            "n_ctx", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_activation",
            "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
        ),
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The fields of config.json that the forward pass depends on."""

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    heads: int
    eps: float
    positions: int
    gelu: str
    tied: bool

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> GPT2Config:
        """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
        family_of("gpt2", raw)
        f = Fields(raw, "gpt2")
        f.require("activation_function", FORMS, default="gelu_new")
        width, heads = f.count("n_embd"), f.count("n_head")
        f.check(width % heads == 0, "n_embd is no multiple of n_head")
        return cls(
            vocabulary=f.count("vocab_size"),
            width=width,
            inner_width=f.count("n_inner", 4 * width, null=True),
            layers=f.count("n_layer", most=LARGEST_DEPTH),
            heads=heads,
            eps=f.number("layer_norm_epsilon", 1e-5),
            positions=f.count("n_positions", 1024),
            gelu=FORMS[raw.get("activation_function", "gelu_new")],
            tied=f.flag("tie_word_embeddings", True),
        )


class GPT2Attention(nn.Module):
    """The attention sub-layer, without residual and norm."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_program: AttentionProgram = Composed()
        self.c_attn = TransposedLinear(config.width, 3 * config.width)
        self.c_proj = TransposedLinear(config.width, config.width)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]; `keys` [..., T] is False at padding."""
        q, k, v = (split_heads(t, self.heads) for t in self.c_attn(x).chunk(3, dim=-1))
        scale = 1.0 / math.sqrt(q.shape[-1])
        context = self.attention_program(q, k, v, scale=scale, causal=True, keys=keys)
        projected: Tensor = self.c_proj(merge_heads(context))
        return projected


class GPT2MLP(nn.Module):
    """The feed-forward sub-layer, without residual and norm."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.gelu = config.gelu
        self.c_fc = TransposedLinear(config.width, config.inner_width)
        self.c_proj = TransposedLinear(config.inner_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., T, D]."""
        projected: Tensor = self.c_proj(F.gelu(self.c_fc(x), approximate=self.gelu))
        return projected


class GPT2Layer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, eps=config.eps)
        self.attn = GPT2Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, eps=config.eps)
        self.mlp = GPT2MLP(config)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]."""
        x = x + self.attn(self.ln_1(x), keys)
        deeper: Tensor = x + self.mlp(self.ln_2(x))
        return deeper


class GPT2Stack(nn.Module):
    """Embeddings, layers and final norm."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocabulary, config.width)
        self.wpe = nn.Embedding(config.positions, config.width)
        self.h = nn.ModuleList(GPT2Layer(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the normalised hidden states [..., T, D]."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[-1], device=ids.device))
        for layer in self.h:
            x = layer(x, keys)
        normed: Tensor = self.ln_f(x)
        return normed


class GPT2(GPTModel):
    """A causal language model; its head is tied to the embedding unless configured otherwise."""

    names = Names("transformer", "h", "ln_f", "lm_head", ("ln_1", "attn", "ln_2", "mlp"))

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.transformer = GPT2Stack(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.transformer.wte.weight


def build(raw: Mapping[str, Any]) -> GPT2:
    """Build the module of a configuration (Hugging Face field names)."""
    return GPT2(GPT2Config.read(raw))


def canonical_key(key: str) -> str | None:
    """Return the module's name for a checkpoint key; None for the causal masks of old files."""
    if key.endswith((".attn.bias", ".attn.masked_bias")):
        return None
    return key if key.startswith(("transformer.", "lm_head.")) else f"transformer.{key}"
