"""Keys and values that are stored as codes and read back (Rule 2.21)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.form import Form, Operand, Version, Walk, form_of, known_form
from kcdsl_certs.recheck.affine.result_rounding import Formed, round_result
from kcdsl_certs.recheck.affine.tape import TapeEntry
from kcdsl_certs.recheck.graphs.graph import Block, Node
from kcdsl_certs.recheck.interval import box, quantisers
from kcdsl_certs.recheck.interval.box import TINY, Box, Floats, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    State,
    Value,
    numeric,
    reduce,
    stored,
    target,
)
from kcdsl_certs.recheck.numerics.kernel import Cache, KernelNumerics
from kcdsl_certs.recheck.ops.arithmetic import operands_of, times
from kcdsl_certs.recheck.ops.linear.quantised_inputs import quantisation
from kcdsl_certs.recheck.ops.operation import Operation

_PARTS = {"scores": "keys", "context": "values"}


def refuse_uncached(block: Block, *kernels: KernelNumerics) -> None:
    """Refuse a block in which a kernel with a cache might read keys or values that are not cached.

    Every product of two results must be of scores or context and read its second factor from a
    `cache` node; every softmax must be that of an attention. Raises Rejected "rule/cache".
    """
    marked = [node for node in block.nodes if node.op == "cache"]
    if not marked and all(kernel.cache is None for kernel in kernels):
        return
    nodes, reads = block.named, Counter(name for node in block.nodes for name in node.inputs)
    serving = set()
    for node in block.nodes:
        if node.op == "softmax" and node.role != "probabilities":
            raise Rejected("rule/cache", f"softmax {node.name[:80]!r} is of no attention")
        if node.op != "matmul":
            continue
        if node.role not in _PARTS or len(node.inputs) != 2:
            raise Rejected("rule/cache", f"product {node.name[:80]!r} is of no attention")
        second = nodes[node.inputs[1]]
        if second.op != "cache" or second.attrs.text("part") != _PARTS[node.role]:
            raise Rejected("rule/cache", f"{node.name[:80]!r} reads keys or values past a cache")
        serving.add(second.name)
    for node in marked:
        if node.name not in serving or reads[node.name] != 1 or node.name == block.output:
            raise Rejected("rule/cache", f"cache {node.name[:80]!r} is not read by one product")
        if node.format or node.role or len(node.shape) < 2 or len(node.inputs) != 1:
            raise Rejected("rule/cache", f"cache {node.name[:80]!r} is none of keys or values")
        if node.attrs.text("source") != _source(block, node.inputs[0]):
            raise Rejected("rule/cache", f"cache {node.name[:80]!r} names another linear")


def _source(block: Block, start: str) -> str:
    """Return the weight of the only linear that a node depends on; "" if none or several."""
    found, seen, waiting = set(), {start}, [start]
    while waiting:
        node = block.named[waiting.pop()]
        if node.op in ("input", "embedding"):
            return ""
        if node.op == "linear":
            if len(node.inputs) < 2:
                raise Rejected("graph/field", f"{node.name[:80]!r} is linear in no weight")
            weight = block.named[node.inputs[1]]
            found.add(weight.attrs.text("key") if weight.op == "param" else "")
            continue
        waiting += [name for name in node.inputs if name not in seen]
        seen |= set(node.inputs)
    return found.pop() if len(found) == 1 else ""


def cache_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> State:
    """Return keys or values as they are read back; the operand where a kernel has no cache."""
    node.attrs.exactly("part", "source")
    if problem.rows is not None:
        raise Rejected("bound/not-finite", "a cache of sequences of any length")
    x = numeric(inputs[0])
    held, moved, sides = [], [], []
    for kernel, own in ((problem.train, x.t), (problem.infer, x.i)):
        found = coded(kernel, node, own)
        held.append(own if found is None else found[0])
        moved.append(box.zeros(x.shape) if found is None else found[1])
    drift = box.add(x.d, box.sub(moved[1], moved[0]))
    drift = box.meet(drift, box.sub(held[1], held[0]))
    for kernel, value in ((problem.train, held[0]), (problem.infer, held[1])):
        if kernel.cache is None:
            sides.append((value, box.zeros(x.shape)))
        else:
            nothing = np.zeros(x.shape)
            sides.append(stored(kernel, target(kernel, node), value, nothing, kernel.inner))
    (t, wrong_t), (i, wrong_i) = sides
    if problem.errors is not None:
        problem.errors[node.name] = (wrong_t, wrong_i)
    return reduce(t, i, box.add(drift, box.sub(wrong_i, wrong_t)))


def coded(kernel: KernelNumerics, node: Node, x: Box) -> tuple[Box, Box] | None:
    """Return the values of codes, and their errors; None for a kernel without a cache.

    Raises Rejected "rule/static-scale" or "bound/overflow".
    """
    spec = kernel.cache
    if spec is None:
        return None
    part, key, static = node.attrs.text("part"), "*", None
    if spec.static:
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
    rows = Box(_rows(x.lo, part, spec), _rows(x.hi, part, spec))
    key = key or "*"  # of several linears: the scale for those not named
    value, off = quantisers.quantised(inside, rows, quantisation(inside, rows, key), key)
    found = (
        Box(_back(b.lo, x.lo, part, spec), _back(b.hi, x.lo, part, spec)) for b in (value, off)
    )
    first, second = found
    return first, second


def _rows(x: Floats, part: str, spec: Cache) -> Floats:
    """Return heads of tokens [H, T, d], a head in one row, or [T, d, H] for static scales."""
    x = np.swapaxes(x, -1, -2) if part == "keys" else x
    x = x.reshape(-1, *x.shape[-2:])
    if spec.scale == "per_head":
        return x.reshape(x.shape[0], -1)
    return np.ascontiguousarray(np.moveaxis(x, 0, -1) if spec.static else x)


def _back(rows: Floats, like: Floats, part: str, spec: Cache) -> Floats:
    """Return the inverse of `_rows`."""
    turned = (*like.shape[:-2], like.shape[-1], like.shape[-2])
    rows = np.moveaxis(rows, -1, 0) if spec.static else rows
    rows = rows.reshape(turned if part == "keys" else like.shape)
    return np.ascontiguousarray(np.swapaxes(rows, -1, -2) if part == "keys" else rows)


def cache_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return keys or values as they are read back; the operand where the kernel has no cache.

    With casts to nearest, a value that is known to half a step or better does not depend on the
    operand's error; elsewhere the operand's error is propagated.
    """
    node.attrs.exactly("part", "source")
    kernel, x = walk.kernel, form_of(inputs[0])
    found = coded(kernel, node, x.box)
    if found is None:
        if x.place is None:
            return known_form(x.reference)
        place = walk.tape.add(TapeEntry(x.error_bound, ((x.place, lambda a: a),)))
        own = walk.own(node, 0)
        if own is not None:
            walk.versions[node.name] = Version(own)
        return Form(x.reference, x.error_bound, place, cases=x.cases)
    value, off = found
    error = box.mag(off)
    middle = value.lo / 2 + value.hi / 2
    half = np.maximum(box.add_up(value.hi, -middle), box.add_up(middle, -value.lo))
    flat = (half <= error) if kernel.stepped else np.zeros(x.shape, dtype=bool)
    keep = np.where(flat, 0.0, 1.0)
    reference = np.where(flat, middle, x.reference)
    operands = operands_of((x, times(keep, x.shape)))
    radius = raised(np.where(flat, half, error)) + TINY
    formed = Formed(reference, x.error_bound * keep, operands, radius, own=walk.own(node, 0))
    return round_result(walk, node, formed, target(kernel, node), kernel.inner)


OPERATIONS = {"cache": Operation(1, 1, cache_interval, cache_affine, None, forms=False)}
