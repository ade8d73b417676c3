"""Keys and values that a kernel stores as codes and reads back (section 3, Cached keys)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kcdsl.model.graph import BlockGraph, Node
from kcdsl.model.lowering.caching import uncached
from kcdsl.model.numerics import Activations, Numerics
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.cases import beyond
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.tape import Adjoints
from kcdsl_backends.drift.boxes.box import SAFE, Box, NoBound, up
from kcdsl_backends.drift.boxes.quantizers import quantizer_steps
from kcdsl_backends.drift.boxes.rounding import Rounding, Stored
from kcdsl_backends.drift.boxes.state import State, Step, combine
from kcdsl_backends.drift.ops.operation import Operation
from kcdsl_backends.drift.ops.quantized_input import activation_error
from kcdsl_backends.drift.ops.view import same

ANY = "*"
"""The name by which an arranged quantiser knows its static scales."""


def interval_cache(step: Step) -> State:
    """Bound what both kernels read of their caches; of one without a cache, the operand."""
    x, node = step.operand(0), step.node
    if step.kernels.rows is not None:
        raise NoBound(node.name, "a quantised kv_cache of sequences of any length")
    zero = torch.zeros_like(x.drift.lo)
    drift, sides = x.drift, []
    codes = [coded(own, node, k) for own, k in zip((x.train, x.infer), _both(step), strict=True)]
    for sign, found in zip((-1, 1), codes, strict=True):
        if found is not None:
            drift = drift + found.error if sign > 0 else drift - found.error
    values = [
        own if found is None else found.value
        for own, found in zip((x.train, x.infer), codes, strict=True)
    ]
    drift = drift.meet(values[1] - values[0])
    for value, found, kernel in zip(values, codes, _both(step), strict=True):
        same = Stored(value, Box(zero, zero))
        back = same if found is None else read_back(value, kernel, node)
        sides.append(replace(back, apart=None))  # one product reads it
    return combine(node.name, drift, *sides)


def _both(step: Step) -> tuple[Rounding, Rounding]:
    return step.kernels.train, step.kernels.infer


def read_back(value: Box, kernel: Rounding, node: Node) -> Stored:
    """Return the values of codes in the format that a kernel reads them back in."""
    form = kernel.format_for(node.role, node.op)
    return kernel.store(value, torch.zeros_like(value.lo), form, node.name, kernel.inner(False))


def coded(x: Box, node: Node, kernel: Rounding) -> Stored | None:
    """Return the values of the codes of keys or values and their errors; None without a cache.

    Raises:
        NoBound: a static scale is missing, or may be exceeded.
    """
    spec = cache_quantizer(node, kernel.numerics)
    if spec is None:
        return None
    inside = replace(kernel, numerics=as_linears(kernel.numerics, spec))
    rows = Box(*(arranged(end, node, kernel.numerics) for end in (x.lo, x.hi)))
    error = activation_error(rows, inside, node.name, ANY)
    assert error is not None
    found = quantizer_steps(rows, error, inside, ANY, node.name)
    found = found or Stored(rows.widen(error), Box.around(error))

    def back(box: Box) -> Box:
        return Box(*(replaced(end, node, kernel.numerics, x.lo) for end in (box.lo, box.hi)))

    return Stored(back(found.value), back(found.error))


def as_linears(numerics: Numerics, spec: Activations) -> Numerics:
    """Return numerics under which the input of any linear is quantised like keys or values."""
    return replace(numerics, activations=spec, overrides=())


def cache_quantizer(node: Node, numerics: Numerics) -> Activations | None:
    """Return the quantiser of arranged keys or values; None where they are not cached.

    Raises:
        NoBound: there is no static scale for them.
    """
    if numerics.kv_cache is None:
        return None
    part, source = str(node.attrs["part"]), str(node.attrs["source"])
    found = numerics.kv_cache.quantiser(part, source)
    if found is None:
        raise NoBound(node.name, f"no static scale is given for the {part} of {source or 'this'}")
    return found


def arranged(x: Tensor, node: Node, numerics: Numerics) -> Tensor:
    """Return keys [.., d, T] or values [.., T, d] so that what shares a scale is a row.

    [H, T, d]; [H, T·d] where a head shares one; [T, d, H] with static scales.
    """
    assert numerics.kv_cache is not None
    x = x.mT if node.attrs["part"] == "keys" else x
    x = x.reshape(-1, *x.shape[-2:])
    if numerics.kv_cache.by_head:
        return x.reshape(len(x), -1)
    return x.permute(1, 2, 0) if numerics.kv_cache.static else x


def replaced(x: Tensor, node: Node, numerics: Numerics, like: Tensor) -> Tensor:
    """Return arranged numbers where they were in `like`."""
    assert numerics.kv_cache is not None
    keys = node.attrs["part"] == "keys"
    rows, width = like.shape[-2:][::-1] if keys else like.shape[-2:]
    x = x.permute(2, 0, 1) if numerics.kv_cache.static else x
    x = x.reshape(*like.shape[:-2], rows, width)
    return (x.mT if keys else x).contiguous()


def refuse_uncached(graph: BlockGraph, *kernels: Numerics) -> None:
    """Refuse a graph that does not say what a kernel's cache stores.

    Raises:
        NoBound: naming an operation.
    """
    unknown = uncached(graph) if any(k.kv_cache is not None for k in kernels) else None
    if unknown is not None:
        raise NoBound(graph.output, f"a kernel with a kv_cache: {unknown}")


def affine_cache(run: KernelRun, node: Node) -> None:
    """Append what a kernel reads of its cache; without a cache, the operand."""
    if run.rounding.numerics.kv_cache is None:
        same(run, node)
        return
    index, x = run.entry(node, 0)
    around = beyond(Box(x.reference - x.error_bound * SAFE, x.reference + x.error_bound * SAFE))
    found = coded(around, node, run.rounding)
    assert found is not None
    low, high, error = found.value.lo, found.value.hi, found.error.mag()
    middle = low / 2 + high / 2
    half = up(torch.maximum(high - middle, middle - low), 2)
    stairs = (half <= error) if not run.rounding.free else torch.zeros_like(error).bool()
    keep = (~stairs).to(error.dtype)
    reference = torch.where(stairs, middle, x.reference)
    linear = torch.where(stairs, 0.0, x.error_bound)
    internal = torch.where(stairs, half, error) * SAFE

    def vjp(a: Adjoint) -> Adjoints:
        return [(index, a.times(keep))]

    parts = None if run.tape.chance is None else Roundings.none(internal)
    again = run.again(node, 0)
    result = Result(reference, vjp, linear, internal, roundings=parts, again=again)
    round_result(run, node, result)


OPERATIONS = {"cache": Operation(interval_cache, affine_cache)}
