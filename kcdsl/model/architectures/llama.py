"""The Llama family: RMSNorm, RoPE, SwiGLU, grouped-query attention, causal.

Modules are named as in the checkpoints of Llama, Mistral and Qwen2, so that the name of every
parameter is its checkpoint key. Forward passes take [..., T, D] or ids [..., T].
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
from kcdsl.model.configuration import LARGEST_DEPTH, ROPE_FIELDS, Fields, family_of

READ = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "tie_word_embeddings",
)  # fmt: skip
FAMILIES = {
    "llama": {
        "classes": ("LlamaForCausalLM", "LlamaModel"),
        "read": ("attention_bias", "mlp_bias"),
        "only": {"pretraining_tp": (1,), "sliding_window": (None,)},
    },
    "mistral": {
        "classes": ("MistralForCausalLM", "MistralModel"),
        "read": ("sliding_window",),
        "only": {"attention_bias": (False,), "mlp_bias": (False,)},
        "needed": ("num_key_value_heads", "max_position_embeddings", "sliding_window"),
    },
    "qwen2": {
        "classes": ("Qwen2ForCausalLM", "Qwen2Model"),
        "read": ("sliding_window", "use_sliding_window", "layer_types"),
        "only": {"mlp_bias": (False,), "use_mrope": (False,)},
        "inert": ("max_window_layers",),
        "needed": ("num_key_value_heads", "max_position_embeddings"),
    },
}


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The fields of config.json that the forward pass depends on."""

    vocabulary: int
    width: int
    inner_width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    eps: float
    positions: int
    rope_theta: float
    rope_scaling: tuple[tuple[str, Any], ...]
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> LlamaConfig:
        """Read Hugging Face field names. Refuse what the forward pass would not honour."""
        family_of("llama", raw)
        f = Fields(raw, "llama")
        f.require("hidden_act", ("silu", "swish"), default="silu")
        heads = f.count("num_attention_heads")
        width = f.count("hidden_size")
        kv_heads = f.count("num_key_value_heads", heads)
        head_width = f.count("head_dim", width // heads)
        rope = f.mapping("rope_parameters") or f.mapping("rope_scaling")
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        f.check(heads % kv_heads == 0, "num_attention_heads is no multiple of num_key_value_heads")
        f.check(head_width % 2 == 0, "head_dim must be even for RoPE")
        bias = f.flag("attention_bias", False)
        positions = f.count("max_position_embeddings", 2048)
        kinds = f.kinds("layer_types", ("full_attention", "sliding_attention"))
        windowed = raw.get("model_type") == "mistral" or f.flag("use_sliding_window", False)
        if windowed or "sliding_attention" in kinds:
            # the first `sliding_window` positions see all earlier ones, as here
            stated = raw.get("sliding_window", 0)
            f.check(stated != 0, "the field 'sliding_window' is missing")
            positions = min(positions, f.count("sliding_window", positions))
        scaling = Fields(rope, "llama RoPE")
        for name in ROPE_FIELDS.get(kind, ()):
            scaling.check(name in rope, f"the field {name!r} is missing")
            scaling.number(name, 1.0)
        if kind == "llama3":
            ordered = rope["low_freq_factor"] < rope["high_freq_factor"]
            scaling.check(ordered, "'low_freq_factor' must be less than 'high_freq_factor'")
        theta = f.number("rope_theta", scaling.number("rope_theta", 10000.0))
        return cls(
            vocabulary=f.count("vocab_size"),
            width=width,
            inner_width=f.count("intermediate_size"),
            layers=f.count("num_hidden_layers", most=LARGEST_DEPTH),
            heads=heads,
            kv_heads=kv_heads,
            head_width=head_width,
            eps=f.number("rms_norm_eps", 1e-6),
            positions=positions,
            rope_theta=theta,
            rope_scaling=tuple(sorted((str(k), v) for k, v in rope.items())),
            tied=f.flag("tie_word_embeddings", False),
            qkv_bias=bias or raw.get("model_type") == "qwen2",
            output_bias=bias and raw.get("model_type") != "qwen2",
            mlp_bias=f.flag("mlp_bias", False),
        )


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight, rounded once at the end."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised [..., T, D]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Rotary(nn.Module):
    """Rotation of the two halves of each head by position (half-rotation RoPE).

    The tables are computed in float64 on the CPU and stored as float32, so that every device and
    every kernel starts from the same numbers.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        frequencies = _frequencies(config)
        angles = torch.outer(torch.arange(config.positions, dtype=torch.float64), frequencies)
        table = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", table.cos().to(torch.float32), persistent=False)
        self.register_buffer("sin", table.sin().to(torch.float32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the rotated [..., H, T, d]; the arithmetic is at least float32, rounded once."""
        length, half = x.shape[-2], x.shape[-1] // 2
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        turned = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
        return (wide * self.cos[:length] + turned * self.sin[:length]).to(x.dtype)


class LlamaAttention(nn.Module):
    """The attention sub-layer, without residual and norm."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.config = config
        self.attention_program: AttentionProgram = Composed()
        inner, kv = config.heads * config.head_width, config.kv_heads * config.head_width
        self.q_proj = nn.Linear(config.width, inner, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.width, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.width, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, config.width, bias=config.output_bias)
        self.rotary = rotary

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]; `keys` [..., T] is True where a token is no padding."""
        c = self.config
        q = self.rotary(split_heads(self.q_proj(x), c.heads))
        k = self.rotary(split_heads(self.k_proj(x), c.kv_heads))
        v = split_heads(self.v_proj(x), c.kv_heads)
        k, v = (_repeat_heads(t, c.heads // c.kv_heads) for t in (k, v))
        scale = 1.0 / math.sqrt(c.head_width)
        context = self.attention_program(q, k, v, scale=scale, causal=True, keys=keys)
        projected: Tensor = self.o_proj(merge_heads(context))
        return projected


class LlamaMLP(nn.Module):
    """The gated feed-forward sub-layer, without residual and norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.inner_width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.width, config.inner_width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.inner_width, config.width, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., T, D]."""
        inner: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return inner


class LlamaLayer(nn.Module):
    """Pre-norm attention and feed-forward, each with its residual."""

    def __init__(self, config: LlamaConfig, rotary: Rotary) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.eps)
        self.self_attn = LlamaAttention(config, rotary)
        self.post_attention_layernorm = RMSNorm(config.width, config.eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]."""
        x = x + self.self_attn(self.input_layernorm(x), keys)
        deeper: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return deeper


class LlamaStack(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        rotary = Rotary(config)
        self.layers = nn.ModuleList(LlamaLayer(config, rotary) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, config.eps)

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the normalised hidden states [..., T, D]."""
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, keys)
        normed: Tensor = self.norm(x)
        return normed


class Llama(nn.Module):
    """A causal language model; its head is tied to the embedding where the configuration says."""

    encoder_only = False

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.settings = config
        self.model = LlamaStack(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the logits [..., T, V] of token ids [..., T]."""
        logits: Tensor = self.lm_head(self.model(ids, keys))
        return logits

    def hidden(self, ids: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return the hidden states [..., T, D] that enter the head."""
        states: Tensor = self.model(ids, keys)
        return states

    @property
    def limits(self) -> tuple[int, int]:
        """Return the vocabulary size and the longest sequence."""
        return self.settings.vocabulary, self.settings.positions

    def blocks(self) -> dict[str, nn.Module]:
        """Return every block by name, in order of application."""
        found: dict[str, nn.Module] = {}
        for i, layer in enumerate(self.model.layers):
            assert isinstance(layer, LlamaLayer)
            found[f"norm_{2 * i}"] = layer.input_layernorm
            found[f"attn_{i}"] = layer.self_attn
            found[f"norm_{2 * i + 1}"] = layer.post_attention_layernorm
            found[f"mlp_{i}"] = layer.mlp
            found[f"layer_{i}"] = layer
        found[f"norm_{2 * len(self.model.layers)}"] = self.model.norm
        found["head"] = self.lm_head
        return found | {"model": self}


def build(raw: Mapping[str, Any]) -> Llama:
    """Build the module of a configuration (Hugging Face field names)."""
    return Llama(LlamaConfig.read(raw))


def canonical_key(key: str) -> str | None:
    """Return the module's name for a checkpoint key; None for a key that carries no weights."""
    return None if key.endswith("rotary_emb.inv_freq") else key


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """Return [..., H*times, T, d], each head repeated in place."""
    return x if times == 1 else x.repeat_interleave(times, dim=-3)


def _frequencies(config: LlamaConfig) -> Tensor:
    """Return the angular step per position of each pair, float64 [d/2].

    The scaled forms follow the published Llama 3.1 rule: wavelengths beyond the old context are
    stretched by `factor`, short ones stay, and those between are interpolated.
    """
    exponents = torch.arange(0, config.head_width, 2, dtype=torch.float64) / config.head_width
    steps = config.rope_theta**-exponents
    scaling = dict(config.rope_scaling)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "linear":
        return steps / float(scaling["factor"])
    if kind != "llama3":
        return steps
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = float(scaling["original_max_position_embeddings"]) * steps / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * steps / float(scaling["factor"]) + share * steps
