"""Parts of a decoder layer: norms, attention and feed-forward, without residuals.

Modules are named as in the checkpoints of Hugging Face, so that the name of every parameter is its
checkpoint key. Forward passes take [..., T, D].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kcdsl.model.attention import AttentionProgram, Composed, merge_heads, split_heads
from kcdsl.model.decoder.config import DecoderConfig
from kcdsl.model.decoder.rotary import Rotary


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * weight, rounded once at the end."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised [..., T, D]."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class OffsetRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) * (1 + weight), in float32 at least, rounded once at the end."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised [..., T, D]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = F.rms_norm(wide, (x.shape[-1],), None, self.eps)
        return (normed * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


def norm(config: DecoderConfig, width: int) -> nn.Module:
    """Return a norm of the kind that a decoder has."""
    return (OffsetRMSNorm if config.offset_gain else RMSNorm)(width, config.eps)


class SelfAttention(nn.Module):
    """The attention sub-layer."""

    def __init__(self, config: DecoderConfig, window: int | None, rotary: Rotary | None) -> None:
        super().__init__()
        self.config = config
        self.window = window
        self.score_cap = config.score_cap
        self.attention_program: AttentionProgram = Composed()
        inner, kv = config.heads * config.head_width, config.kv_heads * config.head_width
        if config.fused:
            self.qkv_proj = nn.Linear(config.width, inner + 2 * kv, bias=config.qkv_bias)
        else:
            self.q_proj = nn.Linear(config.width, inner, bias=config.qkv_bias)
            self.k_proj = nn.Linear(config.width, kv, bias=config.qkv_bias)
            self.v_proj = nn.Linear(config.width, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(inner, config.width, bias=config.output_bias)
        if config.head_norm:
            whole = config.head_norm == "width"
            self.q_norm = norm(config, inner if whole else config.head_width)
            self.k_norm = norm(config, kv if whole else config.head_width)
        self.rotary = rotary

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        """Return [..., T, D]; `keys` [..., T] is False at padding."""
        c = self.config
        q, k, v = self._projected(x)
        if c.head_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (split_heads(t, n) for t, n in ((q, c.heads), (k, c.kv_heads), (v, c.kv_heads)))
        if c.head_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        k, v = (_repeat_heads(t, c.heads // c.kv_heads) for t in (k, v))
        context = self.attention_program(
            q, k, v, scale=c.score_scale, causal=True, keys=keys,
            window=self.window, cap=self.score_cap,
        )  # fmt: skip
        projected: Tensor = self.o_proj(merge_heads(context))
        return projected

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, heads side by side."""
        if not self.config.fused:
            return self.q_proj(x), self.k_proj(x), self.v_proj(x)
        kv = self.config.kv_heads * self.config.head_width
        q, k, v = self.qkv_proj(x).split([self.o_proj.in_features, kv, kv], dim=-1)
        return q, k, v


class GatedMLP(nn.Module):
    """The gated feed-forward sub-layer, or one of its experts, which may have another width."""

    def __init__(self, config: DecoderConfig, width: int | None = None) -> None:
        super().__init__()
        self.config = config
        wide, bias = config.inner_width if width is None else width, config.mlp_bias
        if config.fused:
            self.gate_up_proj = nn.Linear(config.width, 2 * wide, bias=bias)
        else:
            self.gate_proj = nn.Linear(config.width, wide, bias=bias)
            self.up_proj = nn.Linear(config.width, wide, bias=bias)
        self.down_proj = nn.Linear(wide, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., T, D]."""
        if self.config.fused:
            gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(x), self.up_proj(x)
        silu = self.config.activation == "silu"
        shown = F.silu(gate) if silu else F.gelu(gate, approximate="tanh")
        inner: Tensor = self.down_proj(shown * up)
        return inner


def _repeat_heads(x: Tensor, times: int) -> Tensor:
    """Return [..., H*times, T, d], each head repeated in place."""
    return x if times == 1 else x.repeat_interleave(times, dim=-3)
