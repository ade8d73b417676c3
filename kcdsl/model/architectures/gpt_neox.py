"""GPT-NeoX (Pythia): pre-layer-norm, RoPE of a part of each head, one matrix for queries, keys and
values, side by side for each head, causal.

With parallel residuals, attention and feed-forward read the same states. Modules are named as in
Hugging Face checkpoints. Forward passes take [..., T, D] or ids [..., T].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from kcdsl.model.attention import AttentionProgram, Composed, merge_heads, split_heads
from kcdsl.model.configuration import LARGEST_DEPTH, Fields, family_of
from kcdsl.model.decoder.config import Rotation
from kcdsl.model.decoder.gpt import FORMS, GPTModel, Names
from kcdsl.model.decoder.rotary import Rotary

READ = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "hidden_act", "max_position_embeddings", "layer_norm_eps", "use_parallel_residual",
    "attention_bias", "tie_word_embeddings", "rope_parameters", "rope_theta", "rotary_emb_base",
    "partial_rotary_factor", "rotary_pct",
)  # fmt: skip
FAMILIES = {
    "gpt_neox": {
        "classes": ("GPTNeoXForCausalLM", "GPTNeoXModel"),
        "only": {"rope_scaling": (None,), "head_dim": (None,)},
        "inert": ("hidden_dropout",),
        "rope": ("default", "partial"),
    },
}


@dataclass(frozen=True, slots=True)
class NeoXConfig:
    """The fields of config.json that the forward pass depends on."""

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    heads: int
    eps: float
    positions: int
    rotary_width: int
    rope_theta: float
    gelu: str
    parallel: bool
    attention_bias: bool
    tied: bool

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> NeoXConfig:
        """Read Hugging Face field names. Refuse values that the forward pass does not implement."""
        family_of("gpt_neox", raw)
        f = Fields(raw, "gpt_neox")
        f.require("hidden_act", FORMS, default="gelu")
        width, heads = f.count("hidden_size"), f.count("num_attention_heads")
        f.check(width % heads == 0, "hidden_size is no multiple of num_attention_heads")
        share = _stated(raw, ("rotary_pct", "partial_rotary_factor"), 0.25)
        theta = _stated(raw, ("rotary_emb_base", "rope_theta"), 10000.0)
        rotary = int(width // heads * share)
        f.check(0 < share <= 1, f"{share} of a head cannot be rotated")
        f.check(rotary > 0 and rotary % 2 == 0, f"RoPE of {rotary} numbers of a head")
        return cls(
            vocabulary=f.count("vocab_size"),
            width=width,
            inner_width=f.count("intermediate_size"),
            layers=f.count("num_hidden_layers", most=LARGEST_DEPTH),
            heads=heads,
            eps=f.number("layer_norm_eps", 1e-5),
            positions=f.count("max_position_embeddings", 2048),
            rotary_width=rotary,
            rope_theta=theta,
            gelu=FORMS[raw.get("hidden_act", "gelu")],
            parallel=f.flag("use_parallel_residual", True),
            attention_bias=f.flag("attention_bias", True),
            tied=f.flag("tie_word_embeddings", False),
        )


def _stated(raw: Mapping[str, Any], names: tuple[str, str], default: float) -> float:
    """Return a number of RoPE, which has an old name, and a new one in `rope_parameters`.

    Refuse different values, and another value under the new name beside `rope_parameters`, which
    transformers does not read there.
    """
    f, (old, new) = Fields(raw, "gpt_neox"), names
    fields = ((raw, old), (f.mapping("rope_parameters"), new))
    stated = [
        Fields(held, "gpt_neox").number(name, default)
        for held, name in fields
        if held.get(name) is not None
    ]
    f.check(len(set(stated)) < 2, f"{old} and {new} differ")
    found = stated[0] if stated else default
    beside = raw.get(new) is None or f.number(new, default) == found
    f.check(beside, f"{new!r} is not the number that 'rope_parameters' or {old!r} states")
    return found


class NeoXAttention(nn.Module):
    """The attention sub-layer, without residual and norm."""

    def __init__(self, config: NeoXConfig, rotary: Rotary) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_program: AttentionProgram = Composed()
        width, bias = config.width, config.attention_bias
        self.query_key_value = nn.Linear(width, 3 * width, bias=bias)
        self.dense = nn.Linear(width, width, bias=bias)
        self.rotary = rotary

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]; `keys` [..., T] is False at padding."""
        q, k, v = split_heads(self.query_key_value(x), self.heads).chunk(3, dim=-1)
        q, k = self.rotary(q), self.rotary(k)
        scale = 1.0 / math.sqrt(q.shape[-1])
        context = self.attention_program(q, k, v, scale=scale, causal=True, keys=keys)
        projected: Tensor = self.dense(merge_heads(context))
        return projected


class NeoXMLP(nn.Module):
    """The feed-forward sub-layer, without residual and norm."""

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.gelu = config.gelu
        self.dense_h_to_4h = nn.Linear(config.width, config.inner_width)
        self.dense_4h_to_h = nn.Linear(config.inner_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., T, D]."""
        inner = F.gelu(self.dense_h_to_4h(x), approximate=self.gelu)
        projected: Tensor = self.dense_4h_to_h(inner)
        return projected


class NeoXLayer(nn.Module):
    """Pre-norm attention and feed-forward with their residuals, in parallel or in sequence."""

    def __init__(self, config: NeoXConfig, rotary: Rotary) -> None:
        super().__init__()
        self.parallel = config.parallel
        self.input_layernorm = nn.LayerNorm(config.width, eps=config.eps)
        self.post_attention_layernorm = nn.LayerNorm(config.width, eps=config.eps)
        self.attention = NeoXAttention(config, rotary)
        self.mlp = NeoXMLP(config)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]."""
        attended: Tensor = self.attention(self.input_layernorm(x), keys)
        if self.parallel:
            both: Tensor = self.mlp(self.post_attention_layernorm(x)) + attended + x
            return both
        attended = attended + x
        deeper: Tensor = self.mlp(self.post_attention_layernorm(attended)) + attended
        return deeper


class NeoXStack(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__()
        self.embed_in = nn.Embedding(config.vocabulary, config.width)
        rotary = Rotary(Rotation(config.rope_theta), config.rotary_width, config.positions)
        self.layers = nn.ModuleList(NeoXLayer(config, rotary) for _ in range(config.layers))
        self.final_layer_norm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the normalised hidden states [..., T, D]."""
        x = self.embed_in(ids)
        for layer in self.layers:
            x = layer(x, keys)
        normed: Tensor = self.final_layer_norm(x)
        return normed


class NeoX(GPTModel):
    """A causal language model; its head is tied to the embedding if configured so."""

    names = Names(
        *("gpt_neox", "layers", "final_layer_norm", "embed_out"),
        ("input_layernorm", "attention", "post_attention_layernorm", "mlp"),
    )

    def __init__(self, config: NeoXConfig) -> None:
        super().__init__(config)
        self.gpt_neox = NeoXStack(config)
        self.embed_out = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.embed_out.weight = self.gpt_neox.embed_in.weight


def build(raw: Mapping[str, Any]) -> NeoX:
    """Build the module of a configuration (Hugging Face field names)."""
    return NeoX(NeoXConfig.read(raw))


def canonical_key(key: str) -> str | None:
    """Return the module's name for a checkpoint key; None for the causal masks and frequencies of
    old files."""
    if key.endswith((".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")):
        return None
    if key == "lm_head.weight":
        return "embed_out.weight"
    return key if key.startswith(("gpt_neox.", "embed_out.")) else f"gpt_neox.{key}"
