"""Storing a result: which grid points it may become (section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.formats import Format
from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.tape import SAFE, Amplified, Curved, Entry, Pull
from kcdsl_backends.interval.box import down, up
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rounding import nearest


@dataclass(frozen=True, slots=True)
class Result:
    """A result before it is stored: v = reference + L e + o + ε.

    `linear` is the reach of L e; `internal` bounds what stands in o (remainders, roundings inside,
    float64 errors); `extra` is the reach of what stands in `centre`, `curved` and `amplified`.
    """

    reference: Tensor
    pull: Pull
    linear: Tensor
    internal: Tensor
    centre: Tensor | None = None
    curved: Curved | None = None
    amplified: Amplified | None = None
    extra: Tensor | None = None


def store(run: KernelRun, node: Node, result: Result, *, accumulates: bool = False) -> int:
    """Append the entry of a stored result and return its index.

    Raises:
        NoBound: the result is not finite, or may exceed the largest number of its format.
    """
    kernel, form = run.rounding, stored_format(run, node)
    reach = result.linear + result.internal
    if result.extra is not None:
        reach = reach + result.extra
    reach = reach * SAFE
    entry = Entry(
        node.name,
        result.reference,
        reach,
        result.pull,
        result.centre,
        result.internal * SAFE,
        result.curved,
        result.amplified,
    )
    unit = form.unit_roundoff * ((result.reference.abs() + reach) * SAFE)
    if kernel.free:
        cast = unit + form.underflow
        entry = replace(entry, reach=(reach + cast) * SAFE, radius=(result.internal + cast) * SAFE)
    elif form.precision < max(24, kernel.inner(accumulates).precision):
        entry = _to_nearest(entry, form, unit.clamp_min(form.underflow) * SAFE)
    refuse_overflow(node.name, entry.size, form)
    run.computed[node.name] = run.tape.add(entry)
    return run.computed[node.name]


def stored_format(run: KernelRun, node: Node) -> Format:
    """Return the format in which the result of a node is stored."""
    return run.rounding.format_for(node.role, node.op)


def refuse_overflow(name: str, size: Tensor, form: Format) -> None:
    """Refuse results that may exceed the largest finite number of a format, or that are NaN."""
    if bool((size <= form.largest).all()):
        return
    flat = int(torch.nan_to_num(size, nan=torch.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), size.shape)]
    raise NoBound(
        name, f"overflow reachable: element {index} may exceed {form.largest:g} ({form.name})"
    )


def _to_nearest(entry: Entry, form: Format, half: Tensor) -> Entry:
    """Round to nearest: where few grid points can be met, forget the error that came in."""
    low = nearest(down(entry.reference - entry.reach), form)
    high = nearest(up(entry.reference + entry.reach), form)
    gap = (high - low) / 2
    stairs = gap <= half
    keep = (~stairs).to(half.dtype)
    assert entry.radius is not None
    pull, curved, amplified = entry.pull, entry.curved, entry.amplified

    def kept(adjoint: Adjoint) -> Sequence[tuple[int, Adjoint]]:
        return pull(adjoint.times(keep))

    return Entry(
        entry.name,
        torch.where(stairs, low / 2 + high / 2, entry.reference),
        torch.where(stairs, gap, entry.reach + half) * SAFE,
        kept,
        None if entry.centre is None else entry.centre * keep,
        torch.where(stairs, gap, entry.radius + half) * SAFE,
        None if curved is None else curved.where(keep),
        None if amplified is None else Amplified(amplified.factor, amplified.loose * keep),
        kept=not bool(stairs.any()),
    )
