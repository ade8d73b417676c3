"""Keys and values that are stored as codes and read back (section 2, Cached keys and values)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kcdsl_certs.recheck import box, staircase
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.rules.linear import quantisation
from kcdsl_certs.recheck.rules.state import Scene, State, Value, numeric, reduce, stored, target
from kcdsl_certs.recheck.spec import Kernel
from kcdsl_certs.rejected import Rejected


def cache(scene: Scene, node: Node, inputs: list[Value]) -> State:
    """Return keys or values as they are read back; the operand where a kernel has no cache."""
    node.attrs.exactly("part", "source")
    if scene.rows is not None:
        raise Rejected("bound/not-finite", "a cache of sequences of any length")
    x = numeric(inputs[0])
    held, moved, sides = [], [], []
    for kernel, own in ((scene.train, x.t), (scene.infer, x.i)):
        found = coded(kernel, node, own)
        held.append(own if found is None else found[0])
        moved.append(box.zeros(x.shape) if found is None else found[1])
    drift = box.add(x.d, box.sub(moved[1], moved[0]))
    drift = box.meet(drift, box.sub(held[1], held[0]))
    for kernel, value in ((scene.train, held[0]), (scene.infer, held[1])):
        if kernel.cache is None:
            sides.append((value, box.zeros(x.shape)))
        else:
            nothing = np.zeros(x.shape)
            sides.append(stored(kernel, target(kernel, node), value, nothing, kernel.inner))
    (t, wrong_t), (i, wrong_i) = sides
    if scene.errors is not None:
        scene.errors[node.name] = (wrong_t, wrong_i)
    return reduce(t, i, box.add(drift, box.sub(wrong_i, wrong_t)))


def coded(kernel: Kernel, node: Node, x: Box) -> tuple[Box, Box] | None:
    """Return the values of codes, and what they are off by; None for a kernel without a cache.

    Raises:
        Rejected: "rule/static-scale" or "bound/overflow".
    """
    spec = kernel.cache
    if spec is None:
        return None
    part, key, static = node.attrs.text("part"), "*", None
    if spec.scale == "static":
        static, key = (spec.keys if part == "keys" else spec.values), node.attrs.text("source")
    layout = "per_token" if spec.scale in ("per_head", "per_token_head") else spec.scale
    inside = replace(
        kernel,
        activations=(spec.kind, layout),
        static=static,
        least_scale=spec.least_scale,
        amax_limit=np.inf,
        batch_amax=0.0,
        others=(),
    )
    rows = Box(_rows(x.lo, part, spec.scale), _rows(x.hi, part, spec.scale))
    key = key or "*"  # of several linears: the scale for those not named
    value, off = staircase.quantised(inside, rows, quantisation(inside, rows, key), key)
    found = (
        Box(_back(b.lo, x.lo, part, spec.scale), _back(b.hi, x.lo, part, spec.scale))
        for b in (value, off)
    )
    first, second = found
    return first, second


def _rows(x: Floats, part: str, scale: str) -> Floats:
    """Return heads of tokens [H, T, d], a head in one row, or [T, d, H] for static scales."""
    x = np.swapaxes(x, -1, -2) if part == "keys" else x
    x = x.reshape(-1, *x.shape[-2:])
    if scale == "per_head":
        return x.reshape(x.shape[0], -1)
    return np.ascontiguousarray(np.moveaxis(x, 0, -1) if scale == "static" else x)


def _back(rows: Floats, like: Floats, part: str, scale: str) -> Floats:
    """Return such rows where they were."""
    turned = (*like.shape[:-2], like.shape[-1], like.shape[-2])
    rows = np.moveaxis(rows, -1, 0) if scale == "static" else rows
    rows = rows.reshape(turned if part == "keys" else like.shape)
    return np.ascontiguousarray(np.swapaxes(rows, -1, -2) if part == "keys" else rows)
