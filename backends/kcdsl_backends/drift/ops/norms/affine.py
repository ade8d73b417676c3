"""RMSNorm and LayerNorm as one operation (section 5)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.adjoint import Adjoint, at, by_rows, largest_eigenvalue
from kcdsl_backends.drift.affine.ellipsoids import Part, RankOne, bound_on_ellipsoid, image
from kcdsl_backends.drift.affine.error_bounds import (
    deviations,
    directions,
    elements,
    norms,
    surround_rows,
)
from kcdsl_backends.drift.affine.independent import Roundings
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.result_rounding import Result, round_result
from kcdsl_backends.drift.affine.row_sums import BoundedRows, RowBound
from kcdsl_backends.drift.affine.tape import (
    INPUT,
    Adjoints,
    Amplified,
    Nonlinear,
    Shared,
    Tape,
    TapeEntry,
)
from kcdsl_backends.drift.boxes import SAFE, NoBound, gamma
from kcdsl_backends.drift.boxes.rounding import Apart
from kcdsl_backends.drift.ops.norms.written import (
    LEAST_VARIANCE,
    parts_of,
    refuse_large_squares,
    written,
)

FARTHEST = 0.9
"""Relative drift along the row above which there is no bound."""
_TOO_FAR = "the drift reaches the size of the variance"
EARLY = 2.0**-24
"""Factor by which the limit for ellipsoids is lower: they keep error bounds from growing."""
LARGEST = 2**29
"""Most numbers in the ellipsoids of a tensor; larger ones are not made."""
SMALL = 2.0**-9
"""Up to this relative drift along a row a remainder is not bounded by norms."""


@dataclass(frozen=True, slots=True)
class _Moved:
    """Bounds of the moves of a norm's parts, [..., 1], but `error_bound` [..., n].

    `error_bound` bounds |δ| and `mean` |μ|; `shrink` bounds 1 - κ and `factor` |κ/(1 + μ) - 1|;
    `least` bounds the variance from below; `rows` is the mask of the rows that have ellipsoids.
    """

    error_bound: Tensor
    mean: Tensor
    shrink: Tensor
    factor: Tensor
    least: Tensor
    rows: Tensor


def affine_norm(run: KernelRun, node: Node, *, centred: bool) -> None:
    """Append x / sqrt(mean(x²) + eps) * weight, or (x - mean) / sqrt(var + eps) * weight + bias."""
    index, x = run.entry(node, 0)
    n, eps = x.shape[-1], float(node.attrs["eps"])
    if centred and n < 2:
        raise NoBound(node.name, "a single element has no variance")
    gain, bias = run.optional(node, 1), run.optional(node, 2)
    g = torch.ones(n, dtype=torch.float64, device=x.reference.device) if gain is None else gain
    b = torch.zeros_like(g) if bias is None else bias
    c = x.reference - x.reference.mean(-1, keepdim=True) if centred else x.reference
    v = c.square().mean(-1, keepdim=True) + eps
    r = v.rsqrt()
    y = c * r
    moved = _moved(run, node, index, c, v, centred=centred)
    steep = g * y
    linear = g.abs() * (r * moved.error_bound + y.abs() * moved.mean) * SAFE
    again = run.again(node, 0)
    inside, cast, flat, theta, formed = _inside(
        run, node, x, y, r, moved, g, b, again, centred=centred
    )
    # the root has one error factor 1 + θ, in B(1 + f) and in y κ
    along = theta * (1 + moved.shrink)
    moved = replace(moved, factor=(moved.factor + theta * (1 + moved.factor)) * SAFE)
    loose = moved.factor * linear * SAFE
    along = (along + moved.shrink / 2) * SAFE
    h = x.reference.abs()
    h = h + h.mean(-1, keepdim=True) if centred else h
    own = gamma(n + 32) * (linear + steep.abs() + b.abs() + r * h * g.abs())
    own = own * (1 + moved.factor)
    centre = steep * (-moved.shrink / 2)
    others, shared = _others(run, node, y, formed, gamma(n + 32) * (y.abs() + r * h))
    if shared is not None:
        shared = replace(shared, rest=(inside + cast + own + shared.rest) * SAFE)
    inside = (inside + others) * SAFE

    def vjp(a: Adjoint) -> Adjoints:
        window = (*a.window[:-1], (0, n))
        values, part = a.on(window) * g, at(window)
        unit = y[part]
        back = r[part[:-1]] * (values - unit * (values * unit).mean(-1, keepdim=True))
        back = back - back.mean(-1, keepdim=True) if centred else back
        return [(index, Adjoint(back, window, a.shape))]

    def between(a: Adjoint) -> tuple[Tensor, Tensor]:
        part, rows = at(a.window), at(a.window)[:-1]
        steeply, flatly = a.values * steep[part], a.values * g[part[-1]]
        scaled = steeply.sum(-1).abs() + gamma(n + 8) * steeply.abs().sum(-1)
        found = scaled * along[rows][..., 0]
        if centred:
            shifted = flatly.sum(-1).abs() + gamma(n + 8) * flatly.abs().sum(-1)
            found = found + shifted * flat[rows][..., 0]
        total = found.flatten(1).sum(-1) * SAFE
        return -total, total

    def around(a: Adjoint) -> list[Part]:
        found = list[Part]()
        for direction, sizes in ((steep, along), (g.expand(y.shape), flat)):
            for row, part in by_rows(a):
                columns, size = slice(*part.window[-1]), float(sizes[row])
                read, values = direction[row][columns] * size, part.values.flatten(1)
                if size > 0:
                    lost = gamma(n + 8) * float((values.abs() @ read.abs()).norm()) * SAFE
                    found.append(RankOne.near(values @ read, lost))
        return found

    extra = loose + steep.abs() * along + g.abs() * flat + centre.abs()
    if not centred and run.operand(node, 0).index is not None and index != run.plain:
        run.tape.cut = index
    stored = round_result(
        run,
        node,
        Result(
            y * g + b,
            vjp,
            linear,
            (inside + cast + own) * SAFE,
            centre=centre,
            nonlinear=Nonlinear(between, around=around),
            amplified=Amplified(moved.factor, loose),
            extra=extra * SAFE,
            roundings=Roundings.one((inside + own) * SAFE, cast, run.rounding.casts),
            shared=shared,
        ),
    )
    _bound_lengths(run, stored, g, moved.shrink, theta, flat)
    lines = [(steep, moved.mean * (1 + moved.factor) + along + moved.shrink / 2)]
    if centred:
        shift = r * x.error_bound.mean(-1, keepdim=True) * (1 + moved.factor)
        lines.append((g.expand(y.shape), flat + shift))
    _bound_rows(run, index, stored, g.abs() * r * (1 + moved.factor), lines)
    if not centred:
        return
    run.tape.cut = stored
    if bool(moved.rows.any()):
        surround_rows(run.tape, stored, moved.rows, INPUT if index == run.plain else index)


def _bound_lengths(
    run: KernelRun, stored: int, g: Tensor, shrink: Tensor, theta: Tensor, flat: Tensor
) -> None:
    """Bound the norms of the rows of a result: normalised rows have norm √n, and the cosine of the
    angle between two of them is κ."""
    entry, n = run.tape.entries[stored], g.shape[-1]
    if entry.name in run.private or entry.radius is None or not entry.kept:
        return
    turned = (2 * n * shrink).sqrt() + math.sqrt(n) * (theta + flat)
    radius = entry.radius.norm(dim=-1, keepdim=True)
    length = (float(g.abs().amax()) * turned + radius) * SAFE * SAFE
    run.tape.entries[stored] = replace(entry, length=length)


def _bound_rows(
    run: KernelRun,
    index: int,
    stored: int,
    scale: Tensor,
    lines: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Bound functionals of single rows of a norm, if they are bounded by elements of its input.

    With β = α∘g, a functional of r δ - μ y is at most |β| r ρ + |β·y| m̄, plus r |Σ β| mean(ρ) if δ
    is centred, times the amplification; the other errors are the radius, and multiples of both
    directions.

    Args:
        scale: the factor of |α|·ρ.
        lines: directions [..., n], and the factors [..., 1] of |α·direction|.
    """
    below, entry = run.tape.entries[index].rows, run.tape.entries[stored]
    if below is None or len(below.rows.size) or not entry.kept or entry.radius is None:
        return
    directions = torch.stack([line for line, _ in lines])
    sizes = torch.stack([size[..., 0] for _, size in lines]) * SAFE
    n = entry.shape[-1]
    inexact = gamma(n + 32) * (directions.abs() * sizes[..., None]).sum(0)
    radius = (scale * below.rows.radius + entry.radius + inexact) * SAFE
    rows = BoundedRows.of(RowBound(radius, directions, sizes))
    run.tape.entries[stored] = replace(entry, rows=rows)


def _moved(
    run: KernelRun, node: Node, index: int, c: Tensor, v: Tensor, *, centred: bool
) -> _Moved:
    n, tape = c.shape[-1], run.tape
    around = tape.entries[index].error_bound
    error_bound = (around + around.mean(-1, keepdim=True) if centred else around) * SAFE
    mean = (c.abs() * error_bound).mean(-1, keepdim=True) / v * SAFE
    inexact = 4 * gamma(n + 8)
    if tape.chance is None:
        _refuse_far(node, tape, index, c / n / v, mean)

    def lowered(found: Tensor, needed: Tensor) -> tuple[Tensor, Tensor]:
        """Return error bound and mean by passes; that of the direction goes to the input."""
        less = torch.minimum(error_bound, (found + inexact * around) * SAFE)
        along = directions(tape, index, c / n, needed) / v * SAFE
        along = along + inexact * (c.abs() * less).mean(-1, keepdim=True) / v
        return less, torch.minimum(mean, along)

    early = ~(mean <= math.sqrt(run.negligible) * EARLY)
    if c.numel() * n > LARGEST or tape.chance is not None:
        early = torch.zeros_like(early)
    known = torch.zeros_like(early)  # rows with an ellipsoid found before the cast of the input
    for row in tape.entries[index].ellipsoids:
        known[row] = True
    deep = torch.zeros_like(early)  # rows whose norm is known from a pass down to the input
    lengths = torch.full_like(mean, torch.inf)
    if run.passing(node, index, "ellipsoid", early, tape.cut) and index != run.plain:
        if not bool(known.any()):
            deep = early & (tape.cut == INPUT)
            lengths = surround_rows(tape, index, early, tape.cut)[1]
        found = _within(tape, index, centred=centred)
        if not centred:
            tape.tighten(index, found)
        error_bound, mean = lowered(found, early)
    together = lengths.square() / n * SAFE
    square = torch.minimum(_square(tape, index, error_bound, centred=centred), together)
    needed = ~(square <= run.negligible * v) & ~known
    if run.passing(node, index, "deviations" if centred else "elements", needed):
        if centred:
            found = deviations(tape, index, torch.full_like(c, 1 / n), needed)
        else:
            found = elements(tape, index, needed)
            tape.tighten(index, found)
        error_bound, mean = lowered(found, needed)
        square = torch.minimum(_square(tape, index, error_bound, centred=centred), together)
    if not bool((mean < FARTHEST).all()):
        raise NoBound(node.name, _TOO_FAR)
    needed = ~(mean <= SMALL) & ~known & ~deep
    if run.passing(node, index, "norm", needed):
        unit = torch.eye(n, dtype=torch.float64, device=c.device)
        lengths = norms(tape, index, unit - 1 / n if centred else unit, needed)
        square = torch.minimum(square, lengths.square() / n * SAFE)
    square = square / (v * (1 - mean) ** 2) * SAFE
    shrink = square / (1 + square + torch.sqrt(1 + square)) * SAFE
    factor = torch.maximum(mean / (1 - mean), (mean + shrink) / (1 + mean)) * SAFE
    # v itself has the float64 error of a mean of squares
    off = 8 * gamma(n + 16) * c.square().mean(-1, keepdim=True)
    least = v * (1 - mean) ** 2 * (1 - 2.0**-45) - off
    return _Moved(error_bound, mean, shrink, factor, least, early)


def _refuse_far(node: Node, tape: Tape, index: int, along: Tensor, mean: Tensor) -> None:
    """Refuse a norm whose error along a row is too large, before any other pass: one functional of
    each row suffices to show it."""
    far = ~(mean < FARTHEST)
    if bool(far.any()) and not bool((directions(tape, index, along, far) < FARTHEST)[far].all()):
        raise NoBound(node.name, _TOO_FAR)


def _square(tape: Tape, index: int, error_bound: Tensor, *, centred: bool) -> Tensor:
    """Bound mean(δ²) of every row: by the error bound, or by the longest axis of its ellipsoid."""
    square, n = error_bound.square().mean(-1, keepdim=True) * SAFE, error_bound.shape[-1]
    for row, matrix in tape.entries[index].ellipsoids.items():
        axes = image(matrix, _centring(matrix))[0] if centred else matrix
        longest = largest_eigenvalue(axes, float(axes.diagonal().sum()) * SAFE)
        square[row] = square[row].clamp_max(longest / n * SAFE)
    return square


def _within(tape: Tape, index: int, *, centred: bool) -> Tensor:
    """Bound |δ| element by element by the ellipsoids; infinite in rows that have none."""
    found = torch.full_like(tape.entries[index].error_bound, torch.inf)
    for row, matrix in tape.entries[index].ellipsoids.items():
        unit = _centring(matrix) if centred else torch.eye(len(matrix), dtype=matrix.dtype)
        found[row] = bound_on_ellipsoid(matrix, unit.to(matrix))
    return found


def _centring(matrix: Tensor) -> Tensor:
    """Return 1 - 1/n."""
    n = len(matrix)
    return torch.eye(n, dtype=matrix.dtype, device=matrix.device) - 1 / n


def _inside(
    run: KernelRun,
    node: Node,
    x: TapeEntry,
    y: Tensor,
    r: Tensor,
    moved: _Moved,
    g: Tensor,
    b: Tensor,
    again: Apart,
    *,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the roundings inside: of each element [..., n] and of a cast before the gain, those of
    mean and root, relative [..., 1]; and a bound of the factor of the gain.

    The normalised reading of x and that of mean and root may each be `again` from the common value.
    """
    kernel, n, size = run.rounding, x.shape[-1], x.size
    u, lost, own, least = kernel.u_function, kernel.eta_function, torch.zeros_like(y), moved.least
    if again is not None:
        own, size = again.expand(y.shape), (size + again) * SAFE
    average = size.mean(-1, keepdim=True) * SAFE
    squares = size.square().mean(-1, keepdim=True) * SAFE
    turned = torch.zeros_like(r)
    if again is not None:
        length = (own.square().mean(-1, keepdim=True).sqrt() * SAFE).expand(r.shape)
        root = moved.least.clamp_min(0).sqrt() * (1 - 2.0**-45) - length
        least = torch.where(root > 0, root.square() * (1 - 2.0**-45), 0.0)
        turned = torch.where(root > 0, length / root, 0.0) * SAFE
    if not bool((least >= LEAST_VARIANCE).all()):
        raise NoBound(node.name, "the variance may be zero")
    refuse_large_squares(node.name, size, float(node.attrs["eps"]))
    if parts_of(node):
        return _written(run, node, x, y, r, moved, g, b, own, centred=centred)
    if centred:
        kappa = 4 * gamma(n + 6, u) * squares / least * SAFE
        if not bool((kappa < 1).all()):
            raise NoBound(node.name, "the mean is too large against the variance")
        theta = ((1 + 8 * u) * (1 + 2.0**-48) / torch.sqrt(1 - kappa) - 1) * SAFE
    else:
        theta = torch.full_like(r, gamma(n + 3, u) + 8 * u)
    root = least.rsqrt() * (1 + theta) * SAFE
    theta = (theta + turned + theta * turned) * SAFE
    shifted = gamma(n + 6, u) * average * root if centred else torch.zeros_like(root)
    if centred:
        shifted = (shifted + own.mean(-1, keepdim=True) * root) * SAFE
    grown = 1 + moved.factor
    magnitude = y.abs() * (1 + grown * moved.mean) + grown * r * moved.error_bound
    magnitude = magnitude * (1 + theta) * SAFE
    each = 6 * u * (magnitude + shifted) + own * root
    if centred:
        each = each + (4 * u * (size + average) + (n + 6) * lost) * root
    cast = torch.zeros_like(each)
    if kernel.coarse:
        form = kernel.compute
        cast = kernel.unit(form) * (magnitude + shifted + each) * SAFE
        each = each + kernel.faint(form)
    steep, formed = g.abs(), (magnitude + shifted + each + cast) * SAFE
    scaled = 3 * u * (formed * steep + b.abs())
    underflow = lost * (1 + steep + 3 * size.amax(-1, keepdim=True))
    inside = (each * steep + scaled + underflow) * SAFE
    return inside, cast * steep * SAFE, shifted, theta, formed


def _written(
    run: KernelRun,
    node: Node,
    x: TapeEntry,
    y: Tensor,
    r: Tensor,
    moved: _Moved,
    g: Tensor,
    b: Tensor,
    again: Tensor,
    *,
    centred: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the result of `_inside` for a norm that is written out, in the worst case."""
    middle = x.reference.mean(-1, keepdim=True).abs() + x.error_bound.mean(-1, keepdim=True)
    middle = (middle + 2.0**-40 * x.size.mean(-1, keepdim=True)) * SAFE
    size = (y.abs() / r + moved.error_bound) * SAFE * SAFE
    spread = moved.error_bound.square().mean(-1, keepdim=True)
    most = (r**-2 * (1 + 2 * moved.mean) + spread) * (1 + 2.0**-40)
    found = written(node, run.rounding, x.size, size, middle, moved.least, most, again)
    root = moved.least.rsqrt() * (1 + found.theta) * SAFE
    grown = 1 + moved.factor
    magnitude = y.abs() * (1 + grown * moved.mean) + grown * r * moved.error_bound
    magnitude = magnitude * SAFE
    shifted = found.mean * root * SAFE
    each = (found.apart((magnitude + again * root) * SAFE, root) + again * root) * SAFE
    formed = (magnitude * (1 + found.theta) + shifted + each) * SAFE
    error = (formed - magnitude).clamp_min(0) + 2.0**-50 * formed
    inside = found.result(node.name, magnitude, error, each * SAFE, g.abs(), b.abs())
    return inside, torch.zeros_like(inside), shifted, found.theta, formed


def _others(
    run: KernelRun, node: Node, y: Tensor, formed: Tensor, inexact: Tensor
) -> tuple[Tensor, Shared | None]:
    """Return the effect of other gains and biases with its roundings, and the part shared by both
    kernels: Δ_g c + Δ_b, with the first kernel's normalised numbers c at the centre.

    `formed` bounds the normalised numbers before the gain, `inexact` the float64 error of y.
    """
    spread, kernel = run.spread, run.rounding
    total, size, rest = torch.zeros_like(y), torch.zeros_like(y), torch.zeros_like(y)
    if spread is None:
        return total, None
    known = run.common.setdefault(node.name, y)
    away = (
        (y - known).abs() + (formed - y.abs()).clamp_min(0) + inexact + 2.0**-50 * formed
    ) * SAFE
    each = (
        (formed, known.abs(), away),
        (torch.ones_like(y), torch.ones_like(y), torch.zeros_like(y)),
    )
    for position, (whole, first, apart) in enumerate(each, 1):
        around = run.around(node, position)
        if around is None:
            continue
        rounded = 4 * kernel.u_function * whole + kernel.eta_function
        total = total + around * (whole + rounded) * SAFE
        if spread.alike(run.source(node, position)):
            size, whole = size + around * first * SAFE, apart
        rest = rest + around * (whole + rounded) * SAFE
    return total * SAFE, Shared(size * SAFE, rest * SAFE) if bool(size.any()) else None
