"""Small blocks for proofs: llama-like, bert-like, heads, and the remaining operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.support import proofs
from tests.support.caches import with_caches
from tests.support.plane_blocks import feed_forward

Build = Callable[[np.random.Generator], Any]
IDS = (4, 0, 4)


def decoder(rng: np.random.Generator) -> Any:
    """Return a llama-like attention: rms norm, rope, grouped queries, causal mask, residual."""
    return proofs.attention(rng, rows=3, heads=2, kv_heads=1, size=2)


def cached(rng: np.random.Generator) -> Any:
    """Return the decoder with caches of keys and values."""
    return with_caches(decoder(rng))


def requantised(rng: np.random.Generator) -> Any:
    """Return a residual sum and a norm that read a quantised tensor."""
    g = proofs.Graph((2, 4))
    x = g.add("quantise", [g.add("input", [], (2, 4))], (2, 4), tensor="x")
    y = g.add("linear", [x, g.param("w", rng.standard_normal((4, 4)) / 2)], (2, 4))
    y = g.add("quantise", [g.add("add", [x, y], (2, 4))], (2, 4), tensor="y")
    norm = g.add("rms_norm", [y, g.param("gain", rng.standard_normal(4))], (2, 4), eps=1e-5)
    g.add("add", [y, norm], (2, 4))
    return g


def short_decoder(rng: np.random.Generator) -> Any:
    """Return the decoder at two rows, for proofs of any length."""
    return proofs.attention(rng, rows=2, heads=2, kv_heads=1, size=4)


def gated(rng: np.random.Generator) -> Any:
    """Return a llama-like MLP: silu times a gate."""
    return proofs.mlp(rng, "silu", rows=2, width=4)


def encoder(rng: np.random.Generator, rows: int = 3, heads: int = 2, size: int = 2) -> Any:
    """Return a bert-like layer: biased attention, scaled scores, layer norms, gelu."""
    width = heads * size
    g = proofs.Graph((rows, width))
    x = g.add("input", [], (rows, width))
    h = g.add("add", [x, proofs.unmasked_attention(g, x, rng, rows, heads, size)], (rows, width))
    one = g.param("norm.weight", 1 + 0.1 * rng.standard_normal(width))
    zero = g.param("norm.bias", 0.1 * rng.standard_normal(width))
    h = g.add("layer_norm", [h, one, zero], (rows, width), eps=1e-5)
    up = g.param("up.weight", rng.standard_normal((6, width)) / width**0.5)
    y = g.add("gelu", [g.add("linear", [h, up], (rows, 6))], (rows, 6))
    down = g.param("down.weight", rng.standard_normal((width, 6)) / 6**0.5)
    g.add("add", [h, g.add("linear", [y, down], (rows, width))], (rows, width))
    return g


def head(rng: np.random.Generator) -> Any:
    """Return a language model without layers: embedding, norm, and a head of its own table."""
    g = proofs.Graph(None)
    table = g.param("table", rng.standard_normal((5, 4)))
    x = g.add("embedding", [table], (3, 4), ids=list(IDS))
    weight = g.param("norm.weight", 1 + 0.1 * rng.standard_normal(4))
    h = g.add("rms_norm", [x, weight], (3, 4), eps=1e-6)
    logits = g.param("head", 2 * rng.standard_normal((5, 4)))
    g.add("linear", [h, logits], (3, 5))
    return g


def remaining_operations(rng: np.random.Generator) -> Any:
    """Return a block with the operations of no other block: tanh and piecewise linear ones."""
    g = proofs.piecewise(rng, rows=2, width=2)
    shape = tuple(g.nodes[-1]["shape"])
    g.add("tanh", [g.output], shape)
    return g


def feed(rng: np.random.Generator) -> Any:
    """Return linears with ReLU between them, twice."""
    return feed_forward(rng, rows=2, width=3, inner=5, layers=2)


def wide(rng: np.random.Generator) -> Any:
    """Return linears of 130 channels: a group of 128 that share a scale, and one of two."""
    g = proofs.Graph((2, 130))
    x = g.add("input", [], (2, 130))
    up = g.param("up.weight", rng.standard_normal((3, 130)) / 130**0.5)
    y = g.add("linear", [x, up, g.param("up.bias", 0.1 * rng.standard_normal(3))], (2, 3))
    y = g.add("gelu", [y], (2, 3))
    g.add("linear", [y, g.param("down.weight", rng.standard_normal((2, 3)))], (2, 2))
    return g
