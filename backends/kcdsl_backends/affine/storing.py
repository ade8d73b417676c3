"""Storing a result: which grid points it may become (section 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.formats import Format
from kcdsl.model.graph import Node
from kcdsl_backends.affine.adjoint import Adjoint
from kcdsl_backends.affine.cases import Cases, Ends, Together, beyond, to_nearest
from kcdsl_backends.affine.independent import Roundings
from kcdsl_backends.affine.kernel import KernelRun
from kcdsl_backends.affine.reaches import elements
from kcdsl_backends.affine.tape import SAFE, Amplified, Curved, Entry, Pull
from kcdsl_backends.interval.box import Box, down, up
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.interval.rounding import nearest, power_of_two


@dataclass(frozen=True, slots=True)
class Result:
    """A result before it is stored: v = reference + L e + o + ε.

    `linear` is the reach of L e; `internal` bounds what stands in o (remainders, roundings inside,
    float64 errors); `extra` is the reach of what stands in `centre`, `curved` and `amplified`.
    `cases` hold v; `roundings` take `internal` apart.
    """

    reference: Tensor
    pull: Pull
    linear: Tensor
    internal: Tensor
    centre: Tensor | None = None
    curved: Curved | None = None
    amplified: Amplified | None = None
    extra: Tensor | None = None
    cases: Cases | None = None
    roundings: Roundings | None = None


def store(
    run: KernelRun,
    node: Node,
    result: Result,
    *,
    accumulates: bool = False,
    tight: bool = False,
) -> int:
    """Append the entry of a stored result and return its index.

    `tight` bounds what a cast to nearest rounds by reverse passes.

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
        roundings=_roundings(run, result),
    )
    unit = form.unit_roundoff * ((result.reference.abs() + reach) * SAFE)
    if kernel.free:
        cast, parts = unit + form.underflow, entry.roundings
        parts = None if parts is None else parts.cast(unit, form.underflow)
        radius = (result.internal + cast) * SAFE
        last = entry if node.name == run.graph.output and run.tape.chance is None else None
        entry = replace(
            entry, reach=(reach + cast) * SAFE, radius=radius, roundings=parts, before=last
        )
    elif form.precision < max(24, kernel.inner(accumulates).precision):
        if tight:
            entry = _tightened(run, entry)
            unit = form.unit_roundoff * ((result.reference.abs() + entry.reach) * SAFE)
        half = unit.clamp_min(form.underflow) * SAFE
        entry = _to_nearest(entry, form, half, result.cases)
    refuse_overflow(node.name, entry.size, form)
    run.computed[node.name] = run.tape.add(entry)
    return run.computed[node.name]


def _roundings(run: KernelRun, result: Result) -> Roundings | None:
    """Return the parts of what stands in o; None where bounds are of the worst case."""
    if run.tape.chance is None:
        return None
    return result.roundings or Roundings.none(result.internal * SAFE)


def _tightened(run: KernelRun, entry: Entry) -> Entry:
    """Return an entry that is not on the tape, its reach from reverse passes."""
    place = run.tape.add(entry)
    everywhere = torch.ones_like(entry.reach[..., :1], dtype=torch.bool)
    reach = elements(run.tape, place, everywhere)
    run.tape.entries.pop()
    return replace(entry, reach=reach * SAFE)


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


def _to_nearest(entry: Entry, form: Format, half: Tensor, formed: Cases | None) -> Entry:
    """Round to nearest: where few grid points can be met, forget the error that came in."""
    around = beyond(Box(down(entry.reference - entry.reach), up(entry.reference + entry.reach)))
    low, high = nearest(around.lo, form), nearest(around.hi, form)
    ends = Ends.of(low, high, form)
    cases = None if formed is None else to_nearest(formed, ends)
    stairs = (high - low) / 2 <= half
    if cases is not None:
        stairs, hull = stairs | (cases.widest <= half), cases.hull
        low, high = hull.lo, hull.hi
    gap = up((high - low) / 2, 2) * (high > low)
    keep = (~stairs).to(half.dtype)
    assert entry.radius is not None
    pull, curved, amplified = entry.pull, entry.curved, entry.amplified
    reference = torch.where(stairs, low / 2 + high / 2, entry.reference)
    size = entry.reference.abs() + entry.reach
    cast = torch.minimum(half, half_step(size, form)) * SAFE
    radius, parts = (entry.radius + cast) * SAFE, entry.roundings
    parts = None if parts is None else replace(parts, sure=(parts.sure + cast) * SAFE)

    def kept(adjoint: Adjoint) -> Sequence[tuple[int, Adjoint]]:
        return pull(adjoint.times(keep))

    return Entry(
        entry.name,
        reference,
        torch.where(stairs, gap, entry.reach + cast) * SAFE,
        kept,
        None if entry.centre is None else entry.centre * keep,
        torch.where(stairs, gap * SAFE, radius),
        None if curved is None else curved.where(keep),
        None if amplified is None else Amplified(amplified.factor, amplified.loose * keep),
        kept=not bool(stairs.any()),
        ends=ends,
        cases=cases,
        together=None if cases is None else _together(cases, reference, stairs, radius),
        before=entry,
        roundings=None if parts is None else parts.where(~stairs, gap * SAFE),
    )


def half_step(size: Tensor, form: Format) -> Tensor:
    """Return half the distance of grid points up to a magnitude: the error of nearest there."""
    _, exponent = torch.frexp(up(size, 2))
    leading = (exponent - 1).clamp_min(form.min_exponent)
    return power_of_two(leading - form.precision)


def cast_freely(box: Box, form: Format) -> Box:
    """Return all that free casts to a format may make of the numbers of a box.

    v·(1 + δ) + η grows with v for every δ and η, so the ends of the box are the worst.
    """
    unit, faint = form.unit_roundoff, form.underflow
    low = box.lo - up(unit * box.lo.abs() + faint, 2)
    return Box(down(low, 2), up(box.hi + up(unit * box.hi.abs() + faint, 2), 2))


def _together(cases: Cases, reference: Tensor, stairs: Tensor, radius: Tensor) -> Together:
    """Return what o may be: the cases of what is known by steps, elsewhere the radius."""
    low = torch.where(stairs, down(cases.low - reference), 0.0)
    high = torch.where(stairs, up(cases.high - reference), 0.0)
    return Together(Cases(low, high, cases.width), torch.where(stairs, 0.0, radius))
