"""Softmax as one operation: a numerator, and the projection on sums of zero (section 3)."""

from __future__ import annotations

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Bools, Box, Floats
from kcdsl_certs.recheck.planes.course import Added, Course, halves, raised
from kcdsl_certs.recheck.planes.functional import Functional
from kcdsl_certs.recheck.planes.rows import DEVIATION, DRIFT, less_mean
from kcdsl_certs.recheck.planes.rules.linear import SPARE
from kcdsl_certs.recheck.planes.tape import FAINT, UNIT, Entry
from kcdsl_certs.recheck.rules.state import Probabilities, gamma
from kcdsl_certs.rejected import Rejected

_FARTHEST = 30.0


def softmax(course: Course, node: Node) -> None:
    """Write the softmax of the scores over the columns that take part."""
    value = course.values[node.name]
    if not isinstance(value, Probabilities):
        raise Rejected("internal", "a softmax without its rounding")
    x, allowed = course.operand(node, 0), value.allowed
    moved, _ = halves(x.d)
    base = x.reference + moved / 2
    p, trust_p = _softmax(x.reference, allowed)
    q, trust_q = _softmax(base, allowed)
    trust = trust_p + trust_q + 8 * UNIT * _most(np.abs(base) + np.abs(x.reference), allowed)
    far_e, far_d = (_most(box.magnitude(part), allowed) for part in (x.e, x.d))
    by_p = _among(less_mean(course.tape, x.place, DEVIATION, p), allowed)
    by_q = _among(less_mean(course.tape, x.place, DEVIATION, q), allowed)
    drift = _among(less_mean(course.tape, x.place, DRIFT, q), allowed)
    # Around base the scores are off by e + τD - (base - s̃), τ from 0 to 1; less their mean by q.
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
    radius = raised(radius + 4 * trust * (np.abs(centre) + radius) + lost * p * far_e) + FAINT
    rest = raised(rest * (1 + 4 * trust) + lost * q * far_d) + FAINT
    none = np.zeros(p.shape)
    size_e = raised(p * box.magnitude(x.e) + np.abs(centre) + radius)
    size_d = raised(q * box.magnitude(x.d) + rest)
    numerator = course.tape.add(
        Entry(
            none,
            box.around(size_e),
            box.around(size_d),
            lambda f: ((x.place, _weighed(f, p, q)),),
            (centre, none),
            (radius, rest),
        )
    )

    def pull(f: Functional) -> tuple[tuple[int, Functional], ...]:
        e = None if f.e is None else _projected(f.e, p)
        d = None if f.d is None else _projected(f.d, q)
        return ((numerator, Functional(e, d)),)

    lost = gamma(p.shape[-1] + SPARE, UNIT) + 4 * trust
    off_e = lost * (size_e + p * size_e.sum(axis=-1, keepdims=True))
    off_d = lost * (size_d + q * size_d.sum(axis=-1, keepdims=True))
    own = value.rounding_t + 4 * trust * p
    course.write(
        node,
        p,
        pull,
        Added(none, raised(off_e + own) + FAINT),
        Added(none, raised(off_d + value.rounding_t + value.rounding_i) + FAINT),
    )


def _softmax(scores: Floats, allowed: Bools) -> tuple[Floats, Floats]:
    """Return the softmax of these very numbers in float64, and its relative error [..., 1]."""
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


def _weighed(f: Functional, p: Floats, q: Floats) -> Functional:
    e = None if f.e is None else f.e.times(p)
    d = None if f.d is None else f.d.times(q)
    return Functional(e, d)


def _projected(adjoint: Adjoint, p: Floats) -> Adjoint:
    """Return α - p·α in every row."""
    whole = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], p.shape[-1]))
    mean = (whole.values * p[whole.window]).sum(axis=-1, keepdims=True)
    return Adjoint(whole.values - mean, whole.start)
