"""Implementations of attention; the kernel adapter sets one on each attention module."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kcdsl.diagnostics import Refusal, codes, refuse

SDP_BACKENDS: dict[str, SDPBackend] = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


class AttentionProgram(Protocol):
    """Evaluates softmax(form(q·kᵀ·scale) + mask)·v."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        causal: bool,
        keys: Tensor | None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Return [..., H, T, d] for q, k, v of that shape.

        `keys` is a boolean mask [..., T], True where a key may be attended to; None means all.
        Every row may attend to itself, so that rows of padding stay finite. `window` is the number
        of positions that a row attends to, ending with its own; None means all. With `cap`,
        form(s) is cap * tanh(s / cap), else s.
        """
        ...


@dataclass(frozen=True, slots=True)
class Composed:
    """Three separate operations: matmul, softmax, matmul."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        causal: bool,
        keys: Tensor | None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Return the context; see `AttentionProgram`."""
        scores = (q @ k.transpose(-2, -1)) * scale
        if cap is not None:
            scores = torch.tanh(scores / cap) * cap
        mask = attention_mask(q.shape[-2], causal, keys, q.device, window)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, dim=-1) @ v


@dataclass(frozen=True, slots=True)
class ScaledDotProduct:
    """One call of `scaled_dot_product_attention`.

    `backend` is a key of `SDP_BACKENDS`, or None for the one that PyTorch chooses.
    """

    backend: str | None = None

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        causal: bool,
        keys: Tensor | None,
        window: int | None = None,
        cap: float | None = None,
    ) -> Tensor:
        """Return the context; see `AttentionProgram`."""
        if cap is not None:
            raise ValueError("scaled_dot_product_attention does not cap scores")
        near = window is not None and window < q.shape[-2]
        mask = None
        if keys is not None or near:
            mask = attention_mask(q.shape[-2], causal, keys, q.device, window)
        lead = q.shape[:-3]
        q, k, v = (t.reshape(-1, *t.shape[-3:]) for t in (q, k, v))
        if mask is not None:
            mask = mask.reshape(-1, *mask.shape[-3:]) if mask.dim() > 2 else mask
        chosen = sdpa_kernel([SDP_BACKENDS[self.backend]]) if self.backend else nullcontext()
        with chosen:
            context = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale
            )
        return context.reshape(*lead, *context.shape[-3:])


def composed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return what `scaled_dot_product_attention` returns, as matmul, softmax and matmul."""
    if enable_gqa:
        times = query.shape[-3] // key.shape[-3]
        key, value = (t.repeat_interleave(times, dim=-3) for t in (key, value))
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-2, -1)) * factor
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(torch.softmax(scores, dim=-1), dropout_p, training=dropout_p > 0) @ value


def attention_mask(
    length: int,
    causal: bool,
    keys: Tensor | None,
    device: torch.device,
    window: int | None = None,
) -> Tensor | None:
    """Return the boolean mask, [T, T] or [..., 1, T, T], True where a key is attended to; None:
    all.

    With a `window` (causal only), a row attends to that many positions, ending with its own.
    """
    if not causal and keys is None:
        return None
    full = torch.ones(length, length, dtype=torch.bool, device=device)
    mask = full.tril() if causal else full
    if window is not None and window < length:
        mask = mask.triu(1 - window)
    if keys is None:
        return mask
    itself = torch.eye(length, dtype=torch.bool, device=device)
    return (mask & (keys[..., None, :] | itself)).unsqueeze(-3)


def caps_scores(module: nn.Module) -> bool:
    """Return whether an attention inside `module` caps its scores: an attribute `score_cap`."""
    return any(getattr(part, "score_cap", None) is not None for part in module.modules())


def uncapped(what: str) -> Refusal:
    """Return the refusal of a kernel that does not cap scores, for a model that does."""
    return refuse(
        codes.KERNEL_NUMERICS,
        f"the model caps its attention scores, which {what} does not do",
        help="take an adapter whose attention is composed, such as torch.eager",
    )


def use_attention(module: nn.Module, program: AttentionProgram) -> bool:
    """Set the program of every attention inside `module`; return whether there was one to set.

    An attention module is one with an attribute `attention_program`. Refuse a program that does
    not cap scores for a module that caps them (KC465).
    """
    if caps_scores(module) and isinstance(program, ScaledDotProduct):
        raise uncapped("scaled_dot_product_attention")
    found = False
    for part in module.modules():
        if hasattr(part, "attention_program"):
            part.attention_program = program  # type: ignore[assignment]
            found = True
    return found


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Return [..., H, T, D/H] for [..., T, D]."""
    return x.reshape(*x.shape[:-1], heads, -1).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """Return [..., T, H*d] for [..., H, T, d]."""
    return x.transpose(-3, -2).reshape(*x.shape[:-3], x.shape[-2], -1)
