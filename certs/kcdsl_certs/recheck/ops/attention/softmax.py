"""Softmax in every domain (section 5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine import cases, reverse_passes
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.affine.ellipsoids import Row
from kcdsl_certs.recheck.affine.form import Form, Operand, StepRemainder, Walk, form_of
from kcdsl_certs.recheck.affine.result_rounding import Formed, round_result
from kcdsl_certs.recheck.affine.tape import VJP, TapeEntry
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval import box
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Bools, Box, Floats, raised
from kcdsl_certs.recheck.interval.state import (
    DriftProblem,
    Probabilities,
    Results,
    Value,
    gamma,
    numeric,
    reduce,
)
from kcdsl_certs.recheck.linear_bounds.context import (
    DEVIATION,
    DRIFT,
    SPARE,
    Added,
    Context,
    halves,
    less_mean,
)
from kcdsl_certs.recheck.linear_bounds.tape import BoundsEntry, FunctionalBatch
from kcdsl_certs.recheck.ops.attention.probabilities import (
    ZETA,
    allowed_columns,
    probabilities,
    probability_drift,
    relative_rounding,
    softmax_rounding,
    total_variation,
)
from kcdsl_certs.recheck.ops.operation import Operation


def softmax_interval(problem: DriftProblem, node: Node, inputs: list[Value]) -> Probabilities:
    """Return softmax over the last dimension, over the columns that the mask allows."""
    node.attrs.exactly()
    scores = numeric(inputs[0])
    allowed = allowed_columns(inputs[1:], scores.shape)
    p_t, p_i = probabilities(scores.t, allowed), probabilities(scores.i, allowed)
    drift = probability_drift(p_t, scores.d, allowed)
    star = reduce(p_t, p_i, drift)
    b_t = softmax_rounding(problem.train, scores.t, star.t.hi, allowed, scores.own[0])
    b_i = softmax_rounding(problem.infer, scores.i, star.i.hi, allowed, scores.own[1])
    stored = reduce(
        box.widen(star.t, b_t),
        box.widen(star.i, b_i),
        box.widen(star.d, box.up(b_t + b_i)),
        (
            None if problem.train.stepped else box.up(box.add_up(star.t.hi, -star.t.lo) + b_t),
            None if problem.infer.stepped else box.up(box.add_up(star.i.hi, -star.i.lo) + b_i),
        ),
    )
    variation = total_variation(star.d, scores.d, allowed)
    return Probabilities(star, variation, b_t, b_i, allowed, stored)


_FARTHEST = 30.0  # a larger drift of the centred scores counts as unbounded


def softmax_affine(walk: Walk, node: Node, inputs: list[Operand]) -> Form:
    """Return softmax over the last dimension, over the columns that the mask allows.

    With t = e - p·e and y = p(e^t - 1), the drift is Π(y/Z), Πy = y - pΣy, Z = Σ p e^t ≥ 1.
    """
    node.attrs.exactly()
    scores = form_of(inputs[0])
    allowed = allowed_columns(list(inputs[1:]), scores.shape)
    p, wrong = _reference(scores.reference, allowed)
    n = p.shape[-1]
    usual = _row(p * scores.error_bound)
    c = _centred(walk, node, p, wrong, allowed)
    if not bool((c < _FARTHEST).all()):
        raise Rejected("bound/not-finite", "the scores of a softmax drift too far")
    size = box.up(np.expm1(c), 16)  # ≥ |e^t - 1|
    moved = _row(p * size * (1 + 2 * wrong))
    below, above = _remainder_bounds(p, c, wrong)
    # the numerator, up to multiples of p, which Π removes
    middle = p * (above - below) / 2
    radius = raised(p * (above + below) / 2 * (1 + 8 * wrong) + 4 * wrong * p * size)
    radius = raised(radius + gamma(2, UNIT) * p * scores.error_bound) + TINY
    numerator_error = raised(p * (scores.error_bound + above + below) + radius)
    # p e^t/Z and p/Z are at most 1, but adjoint roundings scale with p e, which Π removes; in
    # passes for norms they are a share of the whole error bound
    rounds = 2.0**36 * gamma(n + 3, UNIT) * numerator_error
    numerator_error = np.minimum(numerator_error, np.maximum(1 + 2.0**-40, rounds))
    operands: tuple[tuple[int, VJP], ...] = ()
    if scores.place is not None:
        operands = ((scores.place, _times(p)),)
    numerator = walk.tape.add(TapeEntry(numerator_error, operands, radius, middle))
    # the map Π, with the error of the float64 p
    carried = raised(numerator_error + p * _row(numerator_error))
    own = p * wrong * (1 + 4 * (scores.error_bound + usual) + 2 * moved)
    own = raised(own + gamma(n + 3, UNIT) * carried)
    own = np.where(allowed, own + TINY, 0.0)
    error_bound = np.minimum(1.0, raised(_largest_change(p, c, wrong) + own))
    high = np.minimum(1.0, raised(p * (1 + wrong) + error_bound))
    error = _error(walk, scores, high, allowed, walk.own(node, 0))
    formed = Formed(
        p,
        carried,
        ((numerator, _project(p, allowed)),),
        raised(own + error),
        within=raised(error_bound + error) + TINY,
        sure=~allowed,
    )
    fused = walk.kernel.fused
    kernel = walk.kernel
    form = round_result(walk, node, formed, kernel.probabilities, kernel.inner, rounds=not fused)
    if node.name in walk.versions:
        return replace(form, allowed=allowed)
    steps = None if form.steps is None else _chosen(scores, form, form.steps, allowed, error)
    # the map Π leaves Σ num·(1 - Σp) of a row; 1 - Σp is bounded by the error of p
    lost = 2 * wrong[..., :1] * _row(numerator_error)
    balance = _balance(walk, form, lost)
    return replace(form, allowed=allowed, steps=steps, balance=balance)


def _balance(walk: Walk, form: Form, lost: Floats) -> Floats | None:
    """Return a bound of the distance of row sums from those of the reference; None if a cast
    dropped the dependence between errors."""
    entry = None if form.place is None else walk.tape.entries[form.place]
    if entry is None or entry.kept is not None or not entry.operands or entry.centre is not None:
        return None
    own = np.zeros(form.shape) if entry.radius is None else entry.radius
    return raised(_row(own) + lost) + TINY


def _chosen(
    scores: Form, form: Form, steps: StepRemainder, allowed: Bools, error: Floats
) -> StepRemainder:
    """Return bounds of the stored value in each case of the scores, for scores known by steps."""
    one = scores.box
    around = Box(one.lo[None], one.hi[None])
    if scores.steps is not None:
        most = min(cases.SCORES, cases.choices_allowed(form.shape))
        found = cases.chosen(scores.steps.ends.in_one_case(), form.reference, most)
        around = Box(found.lo, found.hi)
    formed = box.widen(probabilities(around, allowed), error)
    return replace(steps, choices=steps.ends.within(formed))


def _reference(scores: Floats, allowed: Bools) -> tuple[Floats, Floats]:
    """Return float64 probabilities and their relative error, up to 2^-990 absolutely."""
    top = np.where(allowed, scores, -np.inf).max(axis=-1, keepdims=True)
    distance = np.where(allowed, top - scores, 0.0)
    terms = np.where(allowed, np.exp(-distance), 0.0)
    p = terms / terms.sum(axis=-1, keepdims=True)
    farthest = np.minimum(distance, 800.0).max(axis=-1, keepdims=True)
    wrong = 2.0**-48 + 4 * UNIT * (farthest + scores.shape[-1])
    return p, np.broadcast_to(wrong, p.shape)


def _centred(walk: Walk, node: Node, p: Floats, wrong: Floats, allowed: Bools) -> Floats:
    """Return c ≥ |e - p·e| over the allowed columns, 0 elsewhere."""
    scores = form_of(walk.forms[node.inputs[0]])
    usual = _row(p * scores.error_bound)
    plain = raised(scores.error_bound + usual)
    if scores.place is None or not scores.error_bound.any():
        return np.where(allowed, plain, 0.0)
    found = plain.copy()
    for floor in walk.tape.floors:
        chosen = walk.chosen(node, node.inputs[0], "deviations", floor)
        # all heads of a row one after another: they share reads of the keys
        rows = sorted(reverse_passes.rows(chosen), key=lambda row: row[::-1])

        def bound_rows(rows: Sequence[Row], results: Results, floor: int = floor) -> None:
            for row in rows:
                columns = np.flatnonzero(allowed[row])
                some: tuple[int | NDArray[np.intp], ...] = (*row, columns)
                functionals = np.zeros((columns.size, p.shape[-1]))
                functionals[np.arange(columns.size), columns] = 1.0
                bounds = reverse_passes.bound_row_functionals(
                    walk, scores, row, functionals - p[row], floor
                )
                results[0][some] = np.minimum(results[0][some], bounds)

        (found,) = walk.over_rows(rows, (found,), p.shape[-1], bound_rows)
    found = raised(found + 4 * wrong * (scores.error_bound + usual) + TINY)
    single = allowed.sum(axis=-1, keepdims=True) == 1
    return np.where(allowed & ~single, np.minimum(found, plain), 0.0)


def _second_order(c: Floats) -> Floats:
    """Return an upper bound of e^c - 1 - c, without cancellation for small c."""
    tail = 1 + c  # more than 1 + c/13·(1 + c/14·(…)) for c < 0.5
    for k in range(12, 2, -1):
        tail = 1 + c / k * tail
    series = c**2 / 2 * tail
    large = np.expm1(c) - c
    return np.asarray(np.where(c < 0.5, series, large * (1 + 2.0**-44)) * (1 + 2.0**-44))


def _shortfall(c: Floats) -> Floats:
    """Return an upper bound of e^-c - 1 + c, by a series of which the next term is negative."""
    tail = np.ones(c.shape)
    for k in range(8, 2, -1):
        tail = 1 - c / k * tail
    direct = (np.expm1(-c) + c) * (1 + 2.0**-44)
    return np.asarray(np.where(c < 0.5, c**2 / 2 * tail, direct) * (1 + 2.0**-44))


def _sum_beyond_one(p: Floats, c: Floats, wrong: Floats) -> Floats:
    """Return Z̄ - 1 ≥ Σ p e^t - 1 of every row, where |t| ≤ c and Σ p t = 0.

    As Σ p t = 0, e^t may be replaced by e^t - s t for any slope s, which is largest at an end.
    """
    g, fall = _second_order(c), _shortfall(c)
    found = np.full((*c.shape[:-1], 1), np.inf)
    middles = (_row(p * c), np.sqrt(_row(p * c**2)))
    for slope in (np.zeros_like(middles[0]), *((np.sinh(m) - m) / (m + TINY) for m in middles)):
        ends = np.maximum(g - slope * c, fall + slope * c)
        found = np.minimum(
            found, raised(_row(p * (ends.clip(min=0.0) + 8 * UNIT * (g + slope * c))))
        )
    return np.asarray(found * (1 + 4 * wrong[..., :1]))


def _remainder_bounds(p: Floats, c: Floats, wrong: Floats) -> tuple[Floats, Floats]:
    """Return l, m ≥ 0 with -l ≤ (e^t - 1)/Z - t ≤ m for |t| ≤ c and 1 ≤ Z ≤ Z̄."""
    x = _sum_beyond_one(p, c, wrong)
    share = raised(x / (1 + x))  # ≥ 1 - 1/Z
    above = np.maximum(_second_order(c), _shortfall(c) + share * box.up(-np.expm1(-c), 16))
    lowest = np.log1p(x) - x / (1 + x) + 2.0**-44 * share  # where e^t = Z̄
    return raised(np.minimum(lowest, share * c)), raised(above)


def _largest_change(p: Floats, c: Floats, wrong: Floats) -> Floats:
    """Return the largest distance of probabilities from p if |t| ≤ c and Σ p t = 0: the extreme has
    all other probabilities at their mean (Jensen)."""
    x = _sum_beyond_one(p, c, wrong)
    shrinks = raised(box.up(-np.expm1(-c), 16) + np.exp(-c) * x / (1 + x))
    grows = box.up(np.expm1(c), 16)
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = box.others(p)
        power = np.exp(-c / (rest * (1 - 4 * wrong))) * (1 - 2.0**-40)
        least = (p + rest * power) * (1 - 8 * wrong)
        less = rest * (1 + 4 * wrong) * -np.expm1(-c / (rest * (1 + 4 * wrong))) / least
    grows = np.where(np.isfinite(less), np.minimum(less, grows), grows)
    return raised(p * np.maximum(grows, shrinks) * (1 + 16 * wrong)) + TINY


def _row(values: Floats) -> Floats:
    """Return the sums of non-negative rows, raised."""
    return raised(values.sum(axis=-1, keepdims=True) * (1 + values.shape[-1] * 2 * UNIT))


def _error(walk: Walk, scores: Form, high: Floats, allowed: Bools, own: Floats | None) -> Floats:
    """Return the error of the kernel's softmax; if fused, with the cast of the probabilities.

    `own`: the numerator and the sum of a row may use separate readings of a score.
    """
    kernel, around = walk.kernel, scores.box
    if own is not None:
        around = replace(scores, error_bound=raised(scores.error_bound + own)).box
    if kernel.fused:
        return softmax_rounding(kernel, around, high, allowed, own)
    theta = relative_rounding(kernel, around, allowed)
    if own is not None:
        most = np.where(allowed, own, 0.0).max(axis=-1, keepdims=True)
        theta = raised(theta + np.expm1(own + most) * (1 + theta) * (1 + 2.0**-40))
    return np.where(allowed, raised(theta * box.lifted(high) + ZETA), 0.0)


def _times(p: Floats) -> VJP:
    return lambda a: a.times(p)


def _project(p: Floats, allowed: Bools) -> VJP:
    """Return the pullback of Πy = y - pΣy: α - (α·p). For one row it omits the columns at either
    end that are masked in all heads: there, y and p are zero."""
    n, allowed = p.shape[-1], np.atleast_2d(allowed)
    some = np.asarray(allowed.reshape(-1, *allowed.shape[-2:]).any(axis=0))
    firsts, lasts = some.argmax(axis=-1), n - some[:, ::-1].argmax(axis=-1)

    def vjp(adjoint: Adjoint) -> Adjoint:
        first, last, columns = 0, n, adjoint.start[-1]
        if adjoint.extent[-2:-1] == (1,):
            first, last = int(firsts[adjoint.start[-2]]), int(lasts[adjoint.start[-2]])
            values = adjoint.values[..., max(first - columns, 0) : max(last - columns, 0)]
            adjoint = Adjoint(values, (*adjoint.start[:-1], max(first, columns)))
        start, extent = (*adjoint.start[:-1], first), (*adjoint.extent[:-1], last - first)
        whole = embedded(adjoint, start, extent)
        along = (whole.values * p[whole.window]).sum(axis=-1, keepdims=True)
        return Adjoint(whole.values - along, whole.start)

    return vjp


def softmax_bounds(context: Context, node: Node) -> None:
    """Write the softmax of the scores over the unmasked columns."""
    value = context.values[node.name]
    if not isinstance(value, Probabilities):
        raise Rejected("internal", "a softmax without its rounding")
    x, allowed = context.operand(node, 0), value.allowed
    moved, _ = halves(x.d)
    base = x.reference + moved / 2
    p, trust_p = _softmax(x.reference, allowed)
    q, trust_q = _softmax(base, allowed)
    trust = trust_p + trust_q + 8 * UNIT * _most(np.abs(base) + np.abs(x.reference), allowed)
    far_e, far_d = (_most(box.magnitude(part), allowed) for part in (x.e, x.d))
    by_p = _among(less_mean(context.tape, x.place, DEVIATION, p), allowed)
    by_q = _among(less_mean(context.tape, x.place, DEVIATION, q), allowed)
    drift = _among(less_mean(context.tape, x.place, DRIFT, q), allowed)
    # The error of scores around base is e + τD - (base - s̃), τ from 0 to 1, minus its mean by q.
    first = base - x.reference
    first = np.where(allowed, first - (q * first).sum(axis=-1, keepdims=True), 0.0)
    far_first = _most(np.abs(base - x.reference), allowed)
    half = on_the_way(drift, first)
    c_p = _among_sizes(raised(box.magnitude(by_p) + 4 * trust * far_e), allowed)
    c_q = box.magnitude(by_q) + half + 4 * trust * (far_e + far_d + far_first)
    c_q = _among_sizes(raised(c_q), allowed)
    t = _among_sizes(raised(box.magnitude(drift) + 4 * trust * far_d), allowed)
    if not bool((np.maximum(c_p, c_q) < _FARTHEST).all()):
        raise Rejected("bound/not-finite", f"a score may change by more than {_FARTHEST:g}")
    centre, radius = _from_point(p, c_p)
    rest = _from_way(q, c_q, t)
    lost = gamma(SPARE, UNIT) + 4 * trust
    radius = raised(radius + 4 * trust * (np.abs(centre) + radius) + lost * p * far_e) + TINY
    rest = raised(rest * (1 + 4 * trust) + lost * q * far_d) + TINY
    none = np.zeros(p.shape)
    size_e = raised(p * box.magnitude(x.e) + np.abs(centre) + radius)
    size_d = raised(q * box.magnitude(x.d) + rest)
    numerator = context.tape.add(
        BoundsEntry(
            none,
            box.around(size_e),
            box.around(size_d),
            lambda f: ((x.place, _weighed(f, p, q)),),
            (centre, none),
            (radius, rest),
        )
    )

    def vjp(f: FunctionalBatch) -> tuple[tuple[int, FunctionalBatch], ...]:
        e = None if f.e is None else _projected(f.e, p)
        d = None if f.d is None else _projected(f.d, q)
        return ((numerator, FunctionalBatch(e, d)),)

    lost = gamma(p.shape[-1] + SPARE, UNIT) + 4 * trust
    off_e = lost * (size_e + p * size_e.sum(axis=-1, keepdims=True))
    off_d = lost * (size_d + q * size_d.sum(axis=-1, keepdims=True))
    own = value.rounding_t + 4 * trust * p
    context.write(
        node,
        p,
        vjp,
        Added(none, raised(off_e + own) + TINY),
        Added(none, raised(off_d + value.rounding_t + value.rounding_i) + TINY),
    )


def _softmax(scores: Floats, allowed: Bools) -> tuple[Floats, Floats]:
    """Return the softmax of these scores in float64, and its relative error [..., 1]."""
    top = np.where(allowed, scores, -np.inf).max(axis=-1, keepdims=True)
    below = np.where(allowed, top - scores, 0.0)
    terms = np.where(allowed, np.exp(-below), 0.0)
    spread = np.minimum(below.max(axis=-1, keepdims=True), 800.0)
    trust = 4 * UNIT * (scores.shape[-1] + 16 + spread)
    return terms / terms.sum(axis=-1, keepdims=True), trust


def _most(values: Floats, allowed: Bools) -> Floats:
    return np.asarray(np.where(allowed, values, 0.0).max(axis=-1, keepdims=True))


def _among(part: Box, allowed: Bools) -> Box:
    return Box(np.where(allowed, part.lo, 0.0), np.where(allowed, part.hi, 0.0))


def _among_sizes(values: Floats, allowed: Bools) -> Floats:
    return np.where(allowed, values, 0.0)


def on_the_way(delta: Box, place: Floats) -> Floats:
    """Return a bound of |τ·δ - place| for δ in a box and τ from 0 to 1: convex in τ and in δ."""
    ends = np.maximum(np.abs(delta.hi - place), np.abs(delta.lo - place))
    return np.maximum(np.abs(place), ends)


def _rise(c: Floats) -> Floats:
    """Return e^c - 1 - c, rounded up."""
    return np.asarray(np.maximum(np.expm1(c) * (1 + 2.0**-48) - c, 0.0) + 2.0**-47 * c)


def _sum_of(p: Floats, c: Floats) -> Floats:
    """Return an upper bound of Σ p e^t for |t| ≤ c, Σ p t = 0; it is 1 at least."""
    return 1 + raised((p * _rise(c)).sum(axis=-1, keepdims=True))


def _from_point(p: Floats, c: Floats) -> tuple[Floats, Floats]:
    """Return centre and radius of p(e^t/Z - 1 - t)."""
    rise, most = _rise(c), _sum_of(p, c)
    down = (1 - 1 / most + 4 * UNIT) * np.exp(c) * (1 + 2.0**-45)
    return p * rise / 2, raised(p * (rise / 2 + down))


def _from_way(q: Floats, c: Floats, t: Floats) -> Floats:
    """Return a bound of p∘(D - p·D) - q∘(D - q·D), p = q e^w/Z with |w| ≤ c, |D - q·D| ≤ t."""
    least = np.exp(-c) / _sum_of(q, c) * (1 - 2.0**-45)
    away = np.minimum(q * np.maximum(np.expm1(c) * (1 + 2.0**-48), 1 - least), 1.0)
    high = np.minimum(q * np.exp(c) * (1 + 2.0**-45), 1.0)
    return raised(away * t + high * (away * t).sum(axis=-1, keepdims=True))


def _weighed(f: FunctionalBatch, p: Floats, q: Floats) -> FunctionalBatch:
    e = None if f.e is None else f.e.times(p)
    d = None if f.d is None else f.d.times(q)
    return FunctionalBatch(e, d)


def _projected(adjoint: Adjoint, p: Floats) -> Adjoint:
    """Return α - p·α in every row."""
    whole = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], p.shape[-1]))
    mean = (whole.values * p[whole.window]).sum(axis=-1, keepdims=True)
    return Adjoint(whole.values - mean, whole.start)


OPERATIONS = {"softmax": Operation(1, 2, softmax_interval, softmax_affine, softmax_bounds, (0,))}
