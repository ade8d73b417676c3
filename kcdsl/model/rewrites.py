"""Rewrites of drafts: patterns that users write out by hand become single operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.model.drafts import Draft, Drafts, Rule


def masked_softmax(drafts: Drafts, node: Draft) -> Draft | None:
    """softmax(mask(scores, m)) -> softmax(scores, m); several masks are combined."""
    if node.op != "softmax" or len(node.inputs) != 1:
        return None
    scores, mask = node.inputs[0], None
    while (source := drafts.nodes[scores]).op == "mask":
        found = drafts.value(source.inputs[1])
        assert found is not None
        mask = found if mask is None else np.logical_and(mask, found)
        scores = source.inputs[0]
    if mask is None or drafts.nodes[scores].shape != node.shape:
        return None
    return replace(node, inputs=(scores, drafts.constant(np.ascontiguousarray(mask))))


def written_out_silu(drafts: Drafts, node: Draft) -> Draft | None:
    """x * sigmoid(x) -> silu(x)."""
    if node.op != "mul":
        return None
    for x, gate in (node.inputs, node.inputs[::-1]):
        if drafts.nodes[gate].op == "sigmoid" and drafts.nodes[gate].inputs == (x,):
            return replace(node, op="silu", inputs=(x,))
    return None


def written_out_rms_norm(drafts: Drafts, node: Draft) -> Draft | None:
    """x * rsqrt(mean(x²) + eps), x / sqrt(mean(x²) + eps) -> rms_norm(x); with the variance of x in
    place of the mean square, and x centred -> layer_norm."""
    for x, root in _normalised_pairs(drafts, node):
        inner = drafts.nodes[root]
        if inner.op != "shift" or float(inner.attrs["offset"]) <= 0.0:
            continue
        eps = float(inner.attrs["offset"])
        spread = drafts.nodes[inner.inputs[0]]
        if spread.op == "mean" and _is_square_of(drafts, spread.inputs[0], x):
            return replace(node, op="rms_norm", inputs=(x,), attrs={"eps": eps})
        centred = _centred(drafts, x)
        if spread.op == "variance" and centred is not None and spread.inputs[0] == centred:
            return replace(node, op="layer_norm", inputs=(centred,), attrs={"eps": eps})
    return None


def centred_rms_norm(drafts: Drafts, node: Draft) -> Draft | None:
    """rms_norm(x - mean(x)) without weight -> layer_norm(x)."""
    if node.op != "rms_norm" or len(node.inputs) != 1:
        return None
    centred = _centred(drafts, node.inputs[0])
    if centred is None:
        return None
    return replace(node, op="layer_norm", inputs=(centred,))


def norm_weight(drafts: Drafts, node: Draft) -> Draft | None:
    """rms_norm(x) * weight -> rms_norm(x, weight)."""
    if node.op != "mul":
        return None
    for norm, weight in (node.inputs, node.inputs[::-1]):
        source, factor = drafts.nodes[norm], drafts.nodes[weight]
        plain = source.op == "rms_norm" and len(source.inputs) == 1
        row = factor.op == "param" and factor.shape == source.shape[-1:]
        if plain and row:
            inputs = (*source.inputs, weight)
            return replace(node, op="rms_norm", inputs=inputs, attrs=source.attrs)
    return None


def written_out_rope(drafts: Drafts, node: Draft) -> Draft | None:
    """x * cos + concat(-x[h:], x[:h]) * sin -> rope(x, cos, sin)."""
    if node.op != "add":
        return None
    for straight, turned in (node.inputs, node.inputs[::-1]):
        for x, cos in _times_constant(drafts, straight):
            for rotated, sin in _times_constant(drafts, turned):
                half = node.shape[-1] // 2
                tables = all(drafts.nodes[t].shape[-1] == node.shape[-1] for t in (cos, sin))
                if tables and _is_half_turn(drafts, rotated, x, half) and _same(drafts, x, node):
                    return replace(node, op="rope", inputs=(x, cos, sin), attrs={})
    return None


RULES: tuple[Rule, ...] = (
    masked_softmax,
    written_out_silu,
    written_out_rms_norm,
    centred_rms_norm,
    norm_weight,
    written_out_rope,
)


# --- parts of the patterns -----------------------------------------------------------------------


def _normalised_pairs(drafts: Drafts, node: Draft) -> list[tuple[str, str]]:
    """Return (x, y) for which the node is x / sqrt(y)."""
    found: list[tuple[str, str]] = []
    if node.op == "mul":
        for x, factor in (node.inputs, node.inputs[::-1]):
            inverse = drafts.nodes[factor]
            if inverse.op == "rsqrt":
                found.append((x, inverse.inputs[0]))
            elif inverse.op == "reciprocal":
                root = drafts.nodes[inverse.inputs[0]]
                found += [(x, root.inputs[0])] if root.op == "sqrt" else []
    elif node.op == "quotient":
        root = drafts.nodes[node.inputs[1]]
        found += [(node.inputs[0], root.inputs[0])] if root.op == "sqrt" else []
    return found


def _is_square_of(drafts: Drafts, name: str, x: str) -> bool:
    node = drafts.nodes[name]
    return node.op == "mul" and node.inputs == (x, x)


def _centred(drafts: Drafts, name: str) -> str | None:
    """Return x where the node is x - mean(x)."""
    node = drafts.nodes[name]
    if node.op != "sub":
        return None
    x, mean = node.inputs
    source = drafts.nodes[mean]
    return x if source.op == "mean" and source.inputs == (x,) else None


def _times_constant(drafts: Drafts, name: str) -> list[tuple[str, str]]:
    node = drafts.nodes[name]
    if node.op != "mul":
        return []
    pairs = (node.inputs, node.inputs[::-1])
    return [(x, c) for x, c in pairs if _is_float(drafts.value(c)) and drafts.value(x) is None]


def _is_float(array: NDArray[Any] | None) -> bool:
    return array is not None and array.dtype == np.float32


def _is_half_turn(drafts: Drafts, name: str, x: str, half: int) -> bool:
    """Say whether the node is concat(-x[half:], x[:half]) along the last dimension."""
    node = drafts.nodes[name]
    last = len(node.shape) - 1
    if node.op != "concat" or node.attrs["dim"] != last or len(node.inputs) != 2:
        return False
    negative = drafts.nodes[node.inputs[0]]
    if negative.op != "neg" or node.shape[-1] != 2 * half:
        return False
    upper, lower = drafts.nodes[negative.inputs[0]], drafts.nodes[node.inputs[1]]
    return _is_slice(upper, x, last, half, 2 * half) and _is_slice(lower, x, last, 0, half)


def _is_slice(node: Draft, x: str, dim: int, start: int, stop: int) -> bool:
    wanted = {"dim": dim, "start": start, "stop": stop, "step": 1}
    return node.op == "slice" and node.inputs == (x,) and dict(node.attrs) == wanted


def _same(drafts: Drafts, x: str, node: Draft) -> bool:
    return drafts.nodes[x].shape == node.shape
