"""Keys and values that a kernel stores as codes and reads back (section 3, Cached keys)."""

from __future__ import annotations

import torch

from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint
from kcdsl_backends.affine.cases import beyond
from kcdsl_backends.affine.independent import Roundings
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.rules.structural import same
from kcdsl_backends.affine.storing import Result, store
from kcdsl_backends.affine.tape import SAFE, Pulled
from kcdsl_backends.interval.box import Box, up
from kcdsl_backends.interval.rules.cache import coded


def cache(run: KernelRun, node: Node) -> None:
    """Append what a kernel reads of its cache; without a cache, the operand."""
    if run.rounding.numerics.kv_cache is None:
        same(run, node)
        return
    index, x = run.entry(node, 0)
    around = beyond(Box(x.reference - x.reach * SAFE, x.reference + x.reach * SAFE))
    found = coded(around, node, run.rounding)
    assert found is not None
    low, high, error = found.value.lo, found.value.hi, found.error.mag()
    middle = low / 2 + high / 2
    half = up(torch.maximum(high - middle, middle - low), 2)
    stairs = (half <= error) if not run.rounding.free else torch.zeros_like(error).bool()
    keep = (~stairs).to(error.dtype)
    reference = torch.where(stairs, middle, x.reference)
    linear = torch.where(stairs, 0.0, x.reach)
    internal = torch.where(stairs, half, error) * SAFE

    def pull(a: Adjoint) -> Pulled:
        return [(index, a.times(keep))]

    parts = None if run.tape.chance is None else Roundings.none(internal)
    again = run.again(node, 0)
    result = Result(reference, pull, linear, internal, roundings=parts, again=again)
    store(run, node, result)
