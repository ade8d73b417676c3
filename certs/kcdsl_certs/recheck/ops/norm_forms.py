"""layer_norm and rms_norm as affine forms (section 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine import reverse_passes
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.affine.ellipsoids import (
    Part,
    RankOne,
    bound_on_ellipsoid,
    norm_on_ellipsoid,
    rows_of,
)
from kcdsl_certs.recheck.affine.form import Form, Operand, Walk, form_of
from kcdsl_certs.recheck.affine.independent import only_sure
from kcdsl_certs.recheck.affine.many_rows import Line, RowErrors
from kcdsl_certs.recheck.affine.result_rounding import Formed, round_result
from kcdsl_certs.recheck.affine.tape import VJP, NonlinearPart, Share, Shared
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Bools, Floats, raised
from kcdsl_certs.recheck.interval.state import gamma, target
from kcdsl_certs.recheck.interval.weight_ball import alike
from kcdsl_certs.recheck.numerics.kernel import KernelNumerics
from kcdsl_certs.recheck.ops.arithmetic import underflow
from kcdsl_certs.recheck.ops.norm_errors import (
    LEAST_VARIANCE,
    MOST_SQUARES,
    Loss,
    Norm,
    losses,
    root_error,
)
from kcdsl_certs.recheck.ops.norms import (
    layer_norm_bounds,
    layer_norm_interval,
    rms_norm_bounds,
    rms_norm_interval,
)
from kcdsl_certs.recheck.ops.operation import Operation

_FARTHEST = 0.9  # the largest |μ|, the relative move along the row
_MOST_WRONG = 2.0**-20


@dataclass(frozen=True, slots=True)
class _Reference:
    """The reference run of a norm in float64, and its errors.

    c and y are [..., n]; v and r, one number per row, are [..., 1]. `wrong_c` and `wrong_y` are
    absolute, `wrong` is relative, of v and of r.
    """

    c: Floats
    v: Floats
    r: Floats
    y: Floats
    wrong_c: Floats
    wrong_y: Floats
    wrong: Floats


@dataclass(frozen=True, slots=True)
class _Drift:
    """Bounds of the moves of a norm's input: of |δ|, |μ|, 1 - κ and |κ/(1+μ) - 1|."""

    delta: Floats
    along: Floats
    shrink: Floats
    chi: Floats


def rms_norm_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return x / sqrt(mean(x²) + eps) * weight."""
    return _norm(walk, node, inputs, False)


def layer_norm_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return (x - mean) / sqrt(var + eps) * weight + bias."""
    return _norm(walk, node, inputs, True)


def _norm(walk: Walk, node: Node, inputs: list[Operand], centred: bool) -> Form:
    """Return the norm: e = B + B·(κ/(1 + μ) - 1) + y(κ - 1), B = rδ - μy, one μ and κ per row."""
    eps = node.attrs.exactly("eps").real("eps")
    x = form_of(inputs[0])
    n = x.shape[-1]
    if not eps >= 0 or (centred and n < 2):
        raise Rejected("graph/field", "a norm needs eps ≥ 0 and, if centred, two elements")
    gain, around_gain = _known(walk, node, inputs, 1, n)
    bias, around_bias = _known(walk, node, inputs, 2, n)
    at = _reference(x, eps, centred)
    before = walk.tape.cut
    moved = _drift(walk, node, x, at, centred)
    reference = at.y * gain + bias
    size_g, size_y = np.abs(gain), np.abs(at.y)
    sides = 1 + moved.chi
    # |y'| and the linear part, element by element
    tangent = raised(at.r * moved.delta + size_y * moved.along)
    step = raised(tangent * sides)
    y_mag = raised(size_y + at.wrong_y + step)
    own_x = walk.own(node, 0)
    inner, loss = _rounding(walk.kernel, x, at, moved, y_mag, eps, centred, own_x), None
    if node.written:
        inner, loss = _written(walk.kernel, node, x, at, moved, y_mag, eps, own_x)
    # B is multiplied by κ/(1 + μ) and by the root's error
    ratio = raised(moved.chi + inner.theta * sides)
    sides = 1 + ratio
    # scalars per row: κ - 1 and the root's error in the direction y, the mean's in 1
    turned = raised(inner.theta * (1 + moved.shrink))
    by_y = raised(moved.shrink / 2 + turned)
    own = _float_errors(x, at, moved, centred) * size_g
    own = raised(
        own
        + gamma(n + 8, UNIT) * size_g * (size_y * by_y + inner.mean)
        + 4 * UNIT * (size_y * size_g + np.abs(bias) + np.abs(reference))
    )
    own = raised(own * sides)
    element = raised(size_g * at.wrong_y * (by_y + sides))
    scalars = raised(inner.theta * y_mag + inner.mean)
    whole = raised(scalars + inner.element + inner.cast)
    last = 3 * walk.kernel.inner.u * raised(y_mag * size_g + whole * size_g + np.abs(bias))
    tiny = underflow(walk.kernel)
    largest = x.size.max(axis=-1, keepdims=True)
    last = last + tiny * (1 + size_g + 3 * largest)
    if loss is not None:
        last = loss.last(y_mag, whole, size_g, np.abs(bias))
    cast = raised(size_g * inner.cast)
    shared = None
    if (
        walk.problem.rho
    ):  # the effect of other gains and biases in the weight ball, and its rounding
        others = raised(y_mag + whole) * around_gain + around_bias
        rounded = 4 * walk.kernel.inner.u * others + tiny * around_gain
        if alike((walk.problem.train, walk.problem.infer), linear=False):
            c = walk.first.setdefault(node.name, at.y)
            away = raised(np.abs(at.y - c) + at.wrong_y + step + whole) * around_gain
            beside = raised(own + element + size_g * inner.element + last + TINY)
            size = raised(np.abs(c) * around_gain + around_bias)
            shared = Shared(node.name, size, raised(beside + away + rounded + cast))
        last = raised(last + others + rounded)
    others = raised(own + element + size_g * inner.element + last + TINY)
    share = Share(ratio, raised(size_g * tangent * ratio))
    bent = raised(size_g * (size_y * by_y + inner.mean) + share.otherwise)
    centre = at.y * gain * (-moved.shrink / 2)
    scales = [(at.y * gain, by_y)]
    if centred:
        scales.append((np.broadcast_to(gain, x.shape), inner.mean))
    formed = Formed(
        reference,
        raised(tangent * size_g),
        () if x.place is None else ((x.place, _bracket(at, gain, centred)),),
        raised(others + cast),
        centre,
        bent,
        (_scalars(scales),),
        None if x.place is None else share,
        split=only_sure(others).with_cast(walk.kernel, cast, 0.0),
        shared=shared,
    )
    kernel = walk.kernel
    if not centred and x.place is not None:
        walk.tape.cut = x.place
    form = round_result(walk, node, formed, target(kernel, node), kernel.inner, sums=True)
    _by_length(walk, node, form, size_g, raised(np.sqrt(2 * moved.shrink)), inner)
    lines = [Line(at.y * gain, raised(moved.along * sides + by_y + moved.shrink / 2)[..., 0])]
    if centred:
        level = raised(inner.mean + at.r * _mean(x.error_bound) * sides)[..., 0]
        lines.append(Line(np.broadcast_to(gain, x.shape), level))
    _by_rows(walk, x, form, size_g * at.r * sides, lines)
    if centred and form.place is not None:
        walk.tape.cut = form.place
    rows = walk.chosen(node, node.inputs[0], "ellipsoid", before)
    if centred and form.place is not None and x.place is not None and rows.any():
        reverse_passes.surround_rows(walk, form.place, form.shape, rows, x.place)
    return form


def _by_length(
    walk: Walk, node: Node, form: Form, gain: Floats, chord: Floats, inner: _Inner
) -> None:
    """Bound the norms of rows: normalised rows of norm √n whose angle has the cosine κ have the
    distance √(2n(1 - κ)), here `chord` times √n; the errors that the entry adds are added."""
    if form.place is None or node.name in walk.versions:
        return
    entry, n = walk.tape.entries[form.place], form.shape[-1]
    if entry.radius is None or entry.kept is not None:
        return
    moved = float(gain.max()) * math.sqrt(n) * (chord + inner.theta + inner.mean)
    length = raised(moved + np.linalg.norm(entry.radius, axis=-1, keepdims=True)) * (1 + 2.0**-30)
    walk.tape.entries[form.place] = replace(entry, length=length)


def _by_rows(walk: Walk, x: Form, form: Form, scale: Floats, lines: list[Line]) -> None:
    """Bound functionals of single rows of a norm if those of its input are bounded by elements:
    |α|·(scale·ρ_x + radius), plus the size along each line."""
    if x.place is None or form.place is None:
        return
    below, entry = walk.tape.entries[x.place].rows, walk.tape.entries[form.place]
    if below is None or below.lines or entry.kept is not None or entry.radius is None:
        return
    radius = scale * below.radius + entry.radius
    for line in lines:
        lost = gamma(4 * form.shape[-1] + 64, UNIT) * np.abs(line.direction)
        radius = radius + lost * line.size[:, None]
    rows = RowErrors(raised(radius), tuple(lines))
    walk.tape.entries[form.place] = replace(entry, rows=rows)


def _known(
    walk: Walk, node: Node, values: list[Operand], place: int, n: int
) -> tuple[Floats, Floats]:
    """Return the weight (at 1) or bias (at 2) of a norm, and the radius of its weight ball."""
    nothing = np.zeros((n,))
    if len(values) <= place:
        return np.full((n,), 1.0 if place == 1 else 0.0), nothing
    form = form_of(values[place])
    moves = bool(walk.problem.rho) and node.inputs[place] in walk.problem.keys
    if form.place is not None and not moves:
        raise Rejected("rule/weight", "the weight and bias of a norm must be known")
    if form.shape != (n,):
        raise Rejected("graph/shape", "the weight of a norm does not fit its input")
    return form.reference, form.error_bound if moves else nothing


def _reference(x: Form, eps: float, centred: bool) -> _Reference:
    h, n = x.reference, x.shape[-1]
    c, wrong_c = h, np.zeros(x.shape)
    if centred:
        mean = h.mean(axis=-1, keepdims=True)
        c = h - mean
        wrong_c = raised(gamma(n + 4, UNIT) * np.abs(h).mean(axis=-1, keepdims=True) * 2)
        wrong_c = raised(wrong_c + 2 * UNIT * (np.abs(h) + np.abs(mean)))
    v = (c**2).mean(axis=-1, keepdims=True) + eps
    if not bool((v > 0).all()):
        raise Rejected("bound/not-finite", "a variance is zero")
    off = (2 * np.abs(c) * wrong_c + wrong_c**2).mean(axis=-1, keepdims=True)
    wrong = raised((off * (1 + 2.0**-30) + gamma(n + 8, UNIT) * 2 * v) / v)
    if not bool((wrong < _MOST_WRONG).all()):
        raise Rejected("bound/not-finite", "the mean is too large against the variance")
    wrong = raised(wrong * 2 + 16 * UNIT)
    r = 1 / np.sqrt(v)
    y = c * r
    wrong_y = raised(wrong_c * r * 2 + np.abs(y) * (wrong + 4 * UNIT)) + TINY
    return _Reference(c, v, r, y, wrong_c, wrong_y, wrong)


def _drift(walk: Walk, node: Node, x: Form, at: _Reference, centred: bool) -> _Drift:
    """Return bounds of the moves of rows: δ by unit functionals, μ by one functional per row.

    Raises Rejected "bound/not-finite".
    """
    name = node.inputs[0]
    if x.place is None or not x.error_bound.any():
        none = np.zeros(at.v.shape)
        return _Drift(np.zeros(x.shape), none, none, none)
    least = at.v * (1 - at.wrong)
    usual = _mean(x.error_bound) if centred else 0.0
    delta = raised(x.error_bound + usual)
    wide = raised(_mean((np.abs(at.c) + at.wrong_c) * delta) / least)
    along = wide

    def lower(found: Floats, needed: Bools) -> None:
        nonlocal delta, along
        delta = np.minimum(delta, found)
        wide = raised(_mean((np.abs(at.c) + at.wrong_c) * delta) / least)
        directed = raised(_along(walk, x, at, needed, centred) / least)
        along = np.minimum(along, np.minimum(wide, directed))

    cut, norms = walk.tape.cut, np.full(at.v.shape, np.inf)
    needed = walk.chosen(node, name, "ellipsoid", cut)
    if needed.any() and x.place:
        if not walk.tape.entries[x.place].ellipsoids:  # else known from before the input's cast
            norms = reverse_passes.surround_rows(walk, x.place, x.shape, needed, cut)
        found = _within(walk, x, centred)
        if not centred:
            x = reverse_passes.store_error_bound(walk, name, np.minimum(x.error_bound, found))
        lower(found, needed)
    needed = walk.chosen(node, name, "deviations" if centred else "elements")
    if needed.any():
        if centred:
            lower(reverse_passes.centred(walk, x, needed), needed)
        else:
            x = reverse_passes.tighten_error(walk, node, name, 0)
            lower(x.error_bound, needed)
    if not bool((along < _FARTHEST).all()):
        raise Rejected("bound/not-finite", "the input of a norm moves too far along itself")
    square = _square(walk, x, delta, walk.chosen(node, name, "norm"), centred)
    square = np.minimum(square, raised(norms**2 / x.shape[-1]) + TINY)  # |δ| ≤ |e|
    z = raised(square / (least * (1 - along) ** 2))
    shrink = raised(z / (1 + z + np.sqrt(1 + z)))
    chi = raised(np.maximum(along / (1 - along), (along + shrink) / (1 + along)))
    return _Drift(delta, along, shrink, chi)


def _mean(values: Floats) -> Floats:
    """Return the mean of non-negative rows [..., 1], raised."""
    n = values.shape[-1]
    return raised(values.mean(axis=-1, keepdims=True) * (1 + 4 * n * UNIT)) + TINY


def _within(walk: Walk, x: Form, centred: bool) -> Floats:
    """Return bounds of |δ| from the ellipsoids of rows, infinite in other rows."""
    assert x.place is not None
    found = np.full(x.shape, np.inf)
    for row, shape in walk.tape.entries[x.place].ellipsoids.items():
        found[row] = bound_on_ellipsoid(shape, _centring(x.shape[-1], centred))
    usual = _mean(x.error_bound) if centred else 0.0
    return raised(found + 4 * UNIT * (x.error_bound + usual))


def _centring(n: int, centred: bool) -> Floats:
    return np.eye(n) - 1 / n if centred else np.eye(n)


def _along(walk: Walk, x: Form, at: _Reference, needed: Bools, centred: bool) -> Floats:
    """Return a bound of |mean(c·δ)| = |mean(c·e)|, by one reverse pass in the rows needed."""
    n = x.shape[-1]
    functional = at.c / n
    if centred:
        functional = functional - functional.mean(axis=-1, keepdims=True)
    mean = (np.abs(functional) * x.error_bound).sum(axis=-1, keepdims=True)
    for row in reverse_passes.rows(needed):
        mean[row] = reverse_passes.bound_row_functionals(walk, x, row, functional[row][None])
    # the functional has the error of c and its own roundings
    size = np.abs(functional) + at.wrong_c / n
    blur = (at.wrong_c + at.wrong_c.mean(axis=-1, keepdims=True)) / n * (1 + 2.0**-30)
    off = blur + 4 * gamma(n + 8, UNIT) * (size + size.mean(axis=-1, keepdims=True))
    return (
        raised(mean + (off * x.error_bound).sum(axis=-1, keepdims=True) * (1 + n * 4 * UNIT)) + TINY
    )


def _square(walk: Walk, x: Form, delta: Floats, needed: Bools, centred: bool) -> Floats:
    """Return a bound of mean(δ²): from |δ|, or from the norm of all elements together."""
    n = x.shape[-1]
    functionals = _centring(n, centred)
    norm = reverse_passes.bound_norms(walk, x, needed, lambda _: functionals)
    # 1/n is rounded
    norm = norm + 4 * UNIT * (x.error_bound.sum(axis=-1, keepdims=True) if centred else 0.0)
    square = np.minimum(_mean(delta**2), raised(norm**2 / n) + TINY)
    if x.place is None:
        return square
    for row, shape in walk.tape.entries[x.place].ellipsoids.items():
        size = norm_on_ellipsoid(shape, functionals)
        if centred:
            size += 4 * UNIT * float(x.error_bound[row].sum()) * n
        square[row] = np.minimum(square[row], raised(np.array(size**2 / n)) + TINY)
    return square


@dataclass(frozen=True, slots=True)
class _Inner:
    """Roundings inside: of the root (relative), of the mean (times the root), of each element, and
    of each element once more where it is stored before the gain."""

    theta: Floats
    mean: Floats
    element: Floats
    cast: Floats


def _rounding(
    kernel: KernelNumerics,
    x: Form,
    at: _Reference,
    moved: _Drift,
    y_mag: Floats,
    eps: float,
    centred: bool,
    own: Floats | None,
) -> _Inner:
    """Return the roundings inside before gain and bias.

    The normalised reading of x and that of mean and root may each be `own` from the common value.
    Raises Rejected "bound/not-finite".
    """
    n, u, size = x.shape[-1], kernel.inner.u, x.size
    least = at.v * (1 - at.wrong) * (1 - moved.along) ** 2 * (1 - 2.0**-40)
    away, turned = np.zeros(x.shape), np.zeros(at.v.shape)
    if own is not None:
        away = np.broadcast_to(own, x.shape)
        size = raised(size + away)
        length = np.sqrt(_mean(away**2))
        root = np.sqrt(np.maximum(least, 0.0)) * (1 - 2.0**-45) - length
        if not bool((root > 0).all()):
            raise Rejected("bound/not-finite", "readings differ by as much as the variance")
        least, turned = root**2 * (1 - 2.0**-45), raised(length / root)
    sums = n * size.max(axis=-1) ** 2 + eps
    if not bool((least >= LEAST_VARIANCE).all() and (sums <= MOST_SQUARES).all()):
        raise Rejected("bound/not-finite", "the variance may leave the range of float32")
    theta = raised(root_error(kernel, size, least, centred))
    root = raised(1 / np.sqrt(least) * (1 + theta))
    theta = raised(theta + turned * (1 + theta))
    mean = np.zeros(at.v.shape)
    element = np.zeros(x.shape)
    if centred:
        usual = raised(size.mean(axis=-1, keepdims=True) * (1 + 4 * n * UNIT))
        mean = raised((gamma(n + 6, u) * usual + (0 if own is None else _mean(away))) * root)
        element = raised((4 * u * (size + usual) + (n + 6) * underflow(kernel)) * root)
    if own is not None:
        element = raised(element + away * root)
    products = 6 * u * raised(y_mag + mean + element) * (1 + theta)
    element = raised(element + products)
    cast = np.zeros(x.shape)
    if kernel.coarse:
        relative, faint = kernel.off(kernel.compute)
        cast = raised(relative * raised(y_mag + theta * y_mag + mean + element))
        element = raised(element) + faint
    return _Inner(theta, mean, element, cast)


def _written(
    kernel: KernelNumerics,
    node: Node,
    x: Form,
    at: _Reference,
    moved: _Drift,
    y_mag: Floats,
    eps: float,
    own: Floats | None,
) -> tuple[_Inner, Loss]:
    """Return the roundings before gain and bias of a norm that is written out, and all errors."""
    least = at.v * (1 - at.wrong) * (1 - moved.along) ** 2 * (1 - 2.0**-40)
    delta = (moved.delta**2).mean(axis=-1, keepdims=True)
    most = raised(at.v * (1 + at.wrong) * (1 + 2 * moved.along) + delta) + TINY
    usual = np.abs(x.reference.mean(axis=-1, keepdims=True)) + _mean(x.error_bound)
    usual = raised(usual + gamma(x.shape[-1] + 4, UNIT) * _mean(x.size))
    centred = raised(np.abs(at.c) + at.wrong_c + moved.delta)
    away = np.zeros(x.shape) if own is None else np.broadcast_to(own, x.shape)
    loss = losses(node, kernel, eps, Norm(x.size, centred, usual, least, most, away))
    root = raised((1 + loss.theta) / np.sqrt(least))
    mean, moving = raised(loss.mean * root), raised(away * root)
    element = raised(loss.elements(raised(y_mag + moving), root) + moving)
    return _Inner(loss.theta, mean, element, np.zeros(x.shape)), loss


def _float_errors(x: Form, at: _Reference, moved: _Drift, centred: bool) -> Floats:
    """Return the float64 errors of y, of the map, and of the adjoints (before the gain)."""
    n = x.shape[-1]
    usual = x.error_bound.mean(axis=-1, keepdims=True) if centred else 0.0
    size = np.abs(at.c) + at.wrong_c
    mean = (size * (x.error_bound + usual)).mean(axis=-1, keepdims=True) / at.v
    whole = raised(at.r * (x.error_bound + usual) + np.abs(at.y) * mean)
    off = (at.wrong_c * (x.error_bound + usual)).mean(axis=-1, keepdims=True) / at.v
    map_error = 2 * at.wrong * whole + 4 * np.abs(at.y) * off + 2 * at.wrong_y * mean
    return raised((map_error + gamma(4 * n + 32, UNIT) * whole) * (1 + 2.0**-20))


def _scalars(scales: list[tuple[Floats, Floats]]) -> NonlinearPart:
    """Return the nonlinear part of scalars per row, each at most a size, times a direction."""

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        found = np.zeros(adjoint.batch)
        for direction, size in scales:
            sums = np.abs((adjoint.values * direction[adjoint.window]).sum(axis=-1))
            rows = size[adjoint.window[:-1]][..., 0]
            found = found + (sums * rows).reshape(adjoint.batch, -1).sum(axis=-1)
        return -found, found

    def around(adjoint: Adjoint) -> list[Part]:
        found = list[Part]()
        for direction, size in scales:
            for row, part in rows_of(adjoint):
                most = float(size[row][0])
                values, read = part.values.reshape(part.batch, -1), direction[row][part.window[-1]]
                if most > 0:
                    terms = float(np.linalg.norm(np.abs(values) @ np.abs(read))) * most
                    lost = terms * gamma(len(read) + 16, UNIT)
                    found.append(RankOne.near(values @ read * most, lost))
        return found

    return NonlinearPart(between, around=around)


def _bracket(at: _Reference, gain: Floats, centred: bool) -> VJP:
    """Return the pullback of g·(rδ - μy)."""
    n = gain.shape[0]

    def vjp(adjoint: Adjoint) -> Adjoint:
        whole = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], n))
        window = whole.window
        alpha = whole.values * gain
        along = (alpha * at.y[window]).sum(axis=-1, keepdims=True) / at.v[
            (*window[:-1], slice(None))
        ]
        values = alpha * at.r[(*window[:-1], slice(None))] - along * (at.c[window] / n)
        if centred:
            values = values - values.mean(axis=-1, keepdims=True)
        return Adjoint(values, whole.start)

    return vjp


OPERATIONS = {
    "rms_norm": Operation(1, 2, rms_norm_interval, rms_norm_affine, rms_norm_bounds, (0,)),
    "layer_norm": Operation(1, 3, layer_norm_interval, layer_norm_affine, layer_norm_bounds, (0,)),
}
