"""Storing a result: the entry of its cast to the format's grid (section 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics.formats import Format
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine.before_casts import (
    bound_before_cast,
    find_ellipsoids,
    of_one_reading,
    read_alone,
)
from kcdsl_backends.drift.affine.cases import Cases, Ends, Together, beyond, on_grid
from kcdsl_backends.drift.affine.error_bounds import elements, norms
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.kernel import KernelRun, Private
from kcdsl_backends.drift.affine.row_ellipsoids import known_lengths
from kcdsl_backends.drift.affine.row_sums import WeightedRows
from kcdsl_backends.drift.affine.tape import (
    VJP,
    Amplified,
    Gather,
    Nonlinear,
    Remainder,
    Shared,
    SingleRow,
    SplitError,
    TapeEntry,
)
from kcdsl_backends.drift.boxes import SAFE, Box, down, refuse_overflow, refuse_unbounded_sums, up
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding, power_of_two

SUMMED = ("linear", "add", "sub", "layer_norm", "rms_norm")
"""Operations of whose results a free cast is taken apart: their errors are sums of many."""


@dataclass(frozen=True, slots=True)
class Result:
    """A result before it is stored: v = reference + L e + o + ε.

    `linear` bounds |L e|; `internal` bounds the part of o without the rest (remainders, roundings
    inside, float64 errors); `extra` bounds the rest: `centre`, `nonlinear` and `amplified`. `cases`
    hold v; `roundings` split `internal`, and `shared` splits off the part of both kernels. `early`
    was a free cast before the last operation, its error not counted in `internal`. `again` bounds
    the additional error of readings of the operands other than those of the entries. `weighed`
    bounds small functionals of L e.
    """

    reference: Tensor
    vjp: VJP
    linear: Tensor
    internal: Tensor
    centre: Tensor | None = None
    nonlinear: Nonlinear | None = None
    amplified: Amplified | None = None
    extra: Tensor | None = None
    cases: Cases | None = None
    roundings: Roundings | None = None
    early: Early | None = None
    one_row: SingleRow | None = None
    gathered: Gather | None = None
    shared: Shared | None = None
    again: Apart = None
    weighed: WeightedRows | None = None


@dataclass(frozen=True, slots=True)
class Early:
    """A free cast of w = known + e: `of_known` bounds its error from the known part, with
    subnormals, `of_error` its error from e; `unit` is the unit roundoff."""

    unit: float
    of_known: Tensor
    of_error: Tensor

    @staticmethod
    def none(like: Tensor) -> Early:
        """Return the `Early` of an operation without such a cast."""
        return Early(0.0, torch.zeros_like(like), torch.zeros_like(like))


def round_result(
    run: KernelRun,
    node: Node,
    result: Result,
    *,
    accumulates: bool = False,
    tight: bool = False,
    inner: Format | None = None,
) -> int:
    """Append the entry of a stored result and return its index.

    With `tight` the result of a cast by steps is bounded by reverse passes; `inner` is the format
    in which the result was formed, if that is not the arithmetic of the operation.

    Raises:
        NoBound: the result is not finite, or may exceed the largest number of its format.
    """
    kernel, form = run.rounding, stored_format(run, node)
    inner = inner or kernel.inner(accumulates)
    if kernel.free and node.name in run.several:
        return _append_versions(run, node, result, form, accumulates=accumulates, inner=inner)
    internal, early = result.internal, result.early
    if early is not None:
        internal = internal + early.of_known + early.of_error
        result = replace(result, shared=_more(result.shared, early.of_known + early.of_error))
    if accumulates:
        refuse_unbounded_sums(node.name, internal, inner)
    entry = bound_before_cast(run, node, _formed(run, node, result, internal))
    error_bound = entry.error_bound
    unit, faint = kernel.unit(form), kernel.faint(form)
    off, before = unit * ((result.reference.abs() + error_bound) * SAFE), entry.size
    if kernel.free:
        reference, own, parts = result.reference, off + faint, entry.roundings
        final, worst = node.name == run.graph.output, run.tape.chance is None
        split = worst and not final and not kernel.casts.toward_zero
        apart = _apart(run, node, result, form, entry) if split else None
        if kernel.casts.toward_zero:
            reference, own = halved(entry, own * SAFE)
            parts = None if parts is None else parts.with_sure(own)
        elif parts is not None:
            parts = parts.cast(off, faint, kernel.casts)
        entry = replace(
            entry,
            reference=reference,
            error_bound=(error_bound + own) * SAFE,
            radius=(internal + own) * SAFE,
            roundings=parts,
            before=entry if final and worst else None,
            apart=apart,
            shared=_more(entry.shared, own),
            carried=None if entry.carried is None else (entry.carried + own) * SAFE,
        )
    elif form.precision < max(24, inner.precision):
        if tight:
            entry = _tightened(run, entry)
            before = entry.size
        entry = _stepped(entry, form, kernel, result.cases)
    size = entry.size
    if kernel.casts.toward_zero and (kernel.free or form.precision < max(24, inner.precision)):
        size, form = _cut_off(size, before, form, inner)
    refuse_overflow(node.name, size, form)
    run.computed[node.name] = run.tape.add(entry)
    return run.computed[node.name]


def _append_versions(
    run: KernelRun, node: Node, result: Result, form: Format, *, accumulates: bool, inner: Format
) -> int:
    """Append the entry of a result with a separate version for every reading.

    A sum in an accumulator is the same in all readings but for its casts; anything else may be
    computed again for each, with the same weights.
    """
    kernel, early = run.rounding, result.early
    if accumulates:
        refuse_unbounded_sums(node.name, result.internal, kernel.inner(accumulates))
    nothing, formed = torch.zeros_like(result.internal), result
    inside, common = (nothing, result.internal) if accumulates else (result.internal, nothing)
    if result.shared is not None and not accumulates:
        inside, common = result.shared.rest * SAFE, result.shared.size
        result = replace(result, shared=replace(result.shared, rest=nothing))
    own = inside
    if early is not None:
        own = own + early.of_known + early.of_error
    if result.again is not None:
        own = own + result.again
    index = run.computed[node.name] = run.tape.add(_formed(run, node, result, common))
    lengths = find_ellipsoids(run, node, index)
    if lengths is not None:
        lengths = (lengths + inside.norm(dim=-1, keepdim=True)) * SAFE
    entry = run.tape.entries[index]
    error_bound = (entry.error_bound + own) * SAFE
    size = (result.reference.abs() + error_bound) * SAFE
    unit, faint = kernel.unit(form), kernel.faint(form)
    cast = (unit * size + faint) * SAFE
    apart = None
    final = node.name == run.graph.output
    if run.tape.chance is None and not kernel.casts.toward_zero and not final:
        if read_alone(run, node):
            each = of_one_reading(entry, _formed(run, node, formed, formed.internal), inside)
            apart = _apart(run, node, formed, form, each, lengths)
        if apart is not None:  # the part common to all readings stays in the entry
            radius = (apart.radius - result.internal).clamp_min(0) + inside
            if result.again is not None:
                radius = radius + (1 + 2 * unit) * (1 + unit) * result.again
            apart = replace(apart, radius=radius * SAFE)
    if kernel.casts.toward_zero:
        cast = torch.minimum(cast, size)
    run.private[node.name] = Private((own + cast) * SAFE, apart)
    whole = (size + cast) * SAFE
    if kernel.casts.toward_zero:
        whole, form = _cut_off(size, size, form, inner)
    refuse_overflow(node.name, whole, form)
    return index


def _cut_off(size: Tensor, before: Tensor, form: Format, inner: Format) -> tuple[Tensor, Format]:
    """Return the size of a result that was cut off toward zero, and the format that bounds it:
    `inner` if the result may exceed that format before the cut."""
    finite = before <= inner.largest
    size = torch.where(finite, torch.minimum(size, form.toward_zero(before)), before)
    return size, form if bool(finite.all()) else inner


def _formed(run: KernelRun, node: Node, result: Result, internal: Tensor) -> TapeEntry:
    """Return the entry of a result before it is stored."""
    error_bound = result.linear + internal
    if result.extra is not None:
        error_bound = error_bound + result.extra
    parts = None
    if run.tape.chance is not None:
        parts = result.roundings or Roundings.none(internal * SAFE)
    return TapeEntry(
        node.name,
        result.reference,
        error_bound * SAFE,
        result.vjp,
        result.centre,
        internal * SAFE,
        result.nonlinear,
        result.amplified,
        roundings=parts,
        one_row=result.one_row,
        gathered=result.gathered,
        shared=_more(result.shared, torch.zeros_like(internal)),
    )


def _more(shared: Shared | None, own: Tensor) -> Shared | None:
    """Return the shared part with an additional error in its rest."""
    return None if shared is None else replace(shared, rest=(shared.rest + own) * SAFE)


def _apart(
    run: KernelRun,
    node: Node,
    result: Result,
    form: Format,
    lower: TapeEntry,
    lengths: Tensor | None = None,
) -> SplitError | None:
    """Split off the error of free casts, if it is no small part of the result.

    A cast of w = w̃ + e adds at most u|w̃| + u|e|. The first part is known element by element; the
    sum of |e| over a row of n is at most √n times its norm, for which a pass is made unless these
    `lengths` [..., 1] are known, or those of an image. `lower` is an entry whose error bounds hold
    for e as well.
    """
    early = result.early or Early.none(result.internal)
    entry = _formed(run, node, result, result.internal)
    less = torch.minimum(entry.error_bound, lower.error_bound)
    entry = replace(entry, error_bound=less, carried=entry.error_bound)
    whole = entry.error_bound.sum(-1, keepdim=True) * SAFE
    size = result.reference.abs().sum(-1, keepdim=True)
    cast = run.rounding.unit(form)
    share = early.unit + cast * (1 + early.unit)
    needed = (whole > 0) & (min(share, run.grain) * whole >= run.negligible * size)
    if result.weighed is not None:  # rules of its rows need a result that is not split
        needed &= whole > size
    if node.name in run.by_length:
        lengths = known_lengths(run, node, entry)
    place = run.tape.add(entry)
    needed &= ~run.far_below(place)
    total, floor = whole, run.tape.near
    columns = entry.shape[-1]
    asked = lengths is None and node.op in SUMMED
    if node.name in run.lowered and not _summed(run, node):  # its elements have bounds from passes
        asked = False
    if asked and run.passing(node, place, "norm", needed, floor):
        lengths = known_lengths(run, node, entry)
        if lengths is None:
            unit = torch.eye(columns, dtype=torch.float64, device=whole.device)
            lengths = norms(run.tape, place, unit, needed, floor)
    if lengths is not None:
        total = torch.minimum(whole, lengths * math.sqrt(columns) * SAFE)
    run.tape.entries.pop()
    if not bool((total < whole).any()):
        return None
    cap = share * entry.error_bound * SAFE
    radius = result.internal + early.of_known * (1 + cast) + cast * result.reference.abs()
    radius = (radius + run.rounding.faint(form)) * SAFE
    total = share * total * SAFE
    return SplitError(radius, Remainder(-cap, cap, total).nonlinear(), cap, total)


def _summed(run: KernelRun, node: Node) -> bool:
    """Return whether elements of a result are added up somewhere. If only sums with other results
    lead to the output, the elements count separately."""
    readers = [reader for reader in run.graph.nodes if node.name in reader.inputs]
    return any(reader.op not in ("add", "sub") or _summed(run, reader) for reader in readers)


def _tightened(run: KernelRun, entry: TapeEntry) -> TapeEntry:
    """Return an entry that is not on the tape, with its error bound from reverse passes."""
    place = run.tape.add(entry)
    everywhere = torch.ones_like(entry.error_bound[..., :1], dtype=torch.bool)
    error_bound = elements(run.tape, place, everywhere)
    run.tape.entries.pop()
    return replace(entry, error_bound=error_bound * SAFE, carried=entry.widest)


def stored_format(run: KernelRun, node: Node) -> Format:
    """Return the format in which the result of a node is stored."""
    return run.rounding.format_for(node.role, node.op)


def _stepped(entry: TapeEntry, form: Format, kernel: Rounding, formed: Cases | None) -> TapeEntry:
    """Cast by steps: if few grid points are possible, drop the dependence on incoming errors."""
    size, casts = entry.reference.abs() + entry.error_bound, kernel.casts
    worst = (kernel.unit(form) * (size * SAFE)).clamp_min(kernel.faint(form)) * SAFE
    cast = torch.minimum(worst, casts.units * half_step(size, form)) * SAFE
    reference, half = entry.reference, worst
    if casts.toward_zero:
        reference, cast = halved(entry, cast)
        half = torch.where(_signs(entry) == 0, worst, worst / 2)
    around = beyond(
        Box(down(entry.reference - entry.error_bound), up(entry.reference + entry.error_bound))
    )
    if casts.toward_zero:  # a known number on the grid does not change
        known = entry.error_bound == 0
        low, high = (torch.where(known, entry.reference, end) for end in (around.lo, around.hi))
        around = Box(low, high)
    low, high = casts.step(around.lo, form), casts.step(around.hi, form)
    ends = Ends.of(low, high, form, casts)
    cases = None if formed is None else on_grid(formed, ends)
    by_steps = (high - low) / 2 <= half
    if cases is not None:
        by_steps, hull = by_steps | (cases.widest <= half), cases.hull
        low, high = hull.lo, hull.hi
    gap = up((high - low) / 2, 2) * (high > low)
    keep = (~by_steps).to(half.dtype)
    assert entry.radius is not None
    vjp, nonlinear, amplified = entry.vjp, entry.nonlinear, entry.amplified
    reference = torch.where(by_steps, low / 2 + high / 2, reference)
    radius, parts = (entry.radius + cast) * SAFE, entry.roundings
    parts = None if parts is None else replace(parts, sure=(parts.sure + cast) * SAFE)
    shared = _more(entry.shared, cast)
    if shared is not None:
        shared = Shared(shared.size, torch.where(by_steps, gap * SAFE, shared.rest), keep)

    def kept(adjoint: Adjoint) -> Sequence[tuple[int, Adjoint]]:
        return vjp(adjoint.times(keep))

    return TapeEntry(
        entry.name,
        reference,
        torch.where(by_steps, gap, entry.error_bound + cast) * SAFE,
        kept,
        None if entry.centre is None else entry.centre * keep,
        torch.where(by_steps, gap * SAFE, radius),
        None if nonlinear is None else nonlinear.where(keep),
        None if amplified is None else replace(amplified, loose=amplified.loose * keep),
        kept=not bool(by_steps.any()),
        ends=ends,
        cases=cases,
        together=None if cases is None else _together(cases, reference, by_steps, radius),
        before=entry,
        roundings=None if parts is None else parts.where(~by_steps, gap * SAFE),
        one_row=None if entry.one_row is None else entry.one_row.where(keep),
        shared=shared,
        carried=None if entry.carried is None else (entry.carried + cast) * SAFE,
    )


def _signs(entry: TapeEntry) -> Tensor:
    """Return the signs of a result before its cast, 0 if unknown."""
    positive, negative = (
        entry.reference - entry.error_bound >= 0,
        entry.reference + entry.error_bound <= 0,
    )
    return positive.to(entry.error_bound.dtype) - negative.to(entry.error_bound.dtype)


def halved(entry: TapeEntry, most: Tensor) -> tuple[Tensor, Tensor]:
    """Return a reference for a result cut off toward zero by at most `most`, and its error.

    A result of known sign loses between 0 and `most`: half of it moves the reference, half of it is
    the error. No cut changes a sign.
    """
    signs, most = _signs(entry), torch.minimum(most, entry.size)
    shifted = entry.reference - signs * (most / 2)
    own = (most / 2 + 2.0**-52 * entry.reference.abs()) * SAFE
    return shifted, torch.where(signs == 0, most, own)


def half_step(size: Tensor, form: Format) -> Tensor:
    """Return half the distance of grid points up to a magnitude: the error of nearest."""
    _, exponent = torch.frexp(up(size, 2))
    leading = (exponent - 1).clamp_min(form.min_exponent)
    return power_of_two(leading - form.precision)


def cast_freely(box: Box, form: Format, kernel: Rounding) -> Box:
    """Return the box of all results of free casts of a box to a format.

    v·(1 + δ) + η grows with v for every δ and η, so the ends of the box are the worst.
    """
    if kernel.casts.toward_zero:
        return kernel.cut_freely(box, form)
    unit, faint = kernel.unit(form), kernel.faint(form)
    low = box.lo - up(unit * box.lo.abs() + faint, 2)
    return Box(down(low, 2), up(box.hi + up(unit * box.hi.abs() + faint, 2), 2))


def _together(cases: Cases, reference: Tensor, by_steps: Tensor, radius: Tensor) -> Together:
    """Return the bounds of o: the cases of elements known by steps, elsewhere the radius."""
    low = torch.where(by_steps, down(cases.low - reference), 0.0)
    high = torch.where(by_steps, up(cases.high - reference), 0.0)
    return Together(Cases(low, high, cases.width), torch.where(by_steps, 0.0, radius))
