"""layer_norm and rms_norm as one operation: their slope at the middle of the way (section 3)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.adjoint import Adjoint, embedded
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Box, Floats
from kcdsl_certs.recheck.planes import rows
from kcdsl_certs.recheck.planes.course import Added, Course, Operand, halves, raised
from kcdsl_certs.recheck.planes.functional import Functional
from kcdsl_certs.recheck.planes.tape import FAINT, UNIT
from kcdsl_certs.recheck.rules import norms
from kcdsl_certs.recheck.rules.state import gamma

_SPARE = 64


@dataclass(frozen=True, slots=True)
class _Slope:
    """δ ↦ r(δ - y mean(yδ)); other places of the way are off by at most `away`."""

    r: Floats
    y: Floats
    away: Floats


def rms_norm(course: Course, node: Node) -> None:
    """Write x / sqrt(mean(x²) + eps) * weight."""
    _norm(course, node, False)


def layer_norm(course: Course, node: Node) -> None:
    """Write (x - mean) / sqrt(var + eps) * weight + bias."""
    _norm(course, node, True)


def _norm(course: Course, node: Node, centred: bool) -> None:
    x, state, eps = course.operand(node, 0), course.state(node.inputs[0]), node.attrs.real("eps")
    n = x.shape[-1]
    (g_t, g_i), (b_t, b_i) = (_known(course, node, k, n, 2.0 - k) for k in (1, 2))
    r, y = _at(x.reference, eps, centred)
    there = x.reference + halves(x.e)[0] + halves(x.d)[0] / 2
    to_train = box.join(box.exact(x.reference), state.t)
    own = _slope(course, x, rows.DEVIATION, x.reference, to_train, eps, centred)
    moved = _slope(course, x, rows.DRIFT, there, box.join(state.t, state.i), eps, centred)
    values = norms.side(state.t, eps, centred).y
    apart = box.sub(box.exact(g_i), box.exact(g_t))
    beside = box.add(box.mul(values, apart), box.sub(box.exact(b_i), box.exact(b_t)))
    middle, radius = halves(beside)
    lost = gamma(n + _SPARE, UNIT)
    size = np.abs(x.reference)
    size = size + size.mean(axis=-1, keepdims=True) if centred else size
    off_e = lost * (np.abs(g_t) * (r * size + np.abs(y)) + np.abs(b_t))
    off_e = off_e + lost * np.abs(g_t) * _carried(own, box.magnitude(x.e))
    off_d = lost * np.abs(g_i) * _carried(moved, box.magnitude(x.d))

    def pull(f: Functional) -> tuple[tuple[int, Functional], ...]:
        e = None if f.e is None else _back(f.e, own, g_t, centred)
        d = None if f.d is None else _back(f.d, moved, g_i, centred)
        return ((x.place, Functional(e, d)),)

    course.write(
        node,
        y * g_t + b_t,
        pull,
        Added(np.zeros(y.shape), raised(np.abs(g_t) * own.away + off_e) + FAINT),
        Added(middle, raised(np.abs(g_i) * moved.away + radius + off_d) + FAINT),
    )


def _known(
    course: Course, node: Node, position: int, n: int, otherwise: float
) -> tuple[Floats, Floats]:
    """Return the weight or the bias of both kernels."""
    if len(node.inputs) <= position:
        return np.full(n, otherwise), np.full(n, otherwise)
    state = course.state(node.inputs[position])
    return state.t.lo, state.i.lo


def _at(x: Floats, eps: float, centred: bool) -> tuple[Floats, Floats]:
    c = x - x.mean(axis=-1, keepdims=True) if centred else x
    r = 1 / np.sqrt((c * c).mean(axis=-1, keepdims=True) + eps)
    return r, c * r


def _slope(
    course: Course,
    x: Operand,
    unknown: str,
    middle: Floats,
    way: Box,
    eps: float,
    centred: bool,
) -> _Slope:
    """Return the slope at the middle, with a bound of how others on the way differ from it."""
    r, y = _at(middle, eps, centred)
    n = y.shape[-1]
    size = box.magnitude(x.e if unknown == rows.DEVIATION else x.d)
    delta = size
    if centred:
        even = np.full(y.shape, 1 / n)
        delta = box.magnitude(rows.less_mean(course.tape, x.place, unknown, even))
    lost = gamma(n + _SPARE, UNIT)
    seen = rows.along(course.tape, x.place, unknown, y / n)
    seen = seen + lost * (np.abs(y) * size).mean(axis=-1, keepdims=True)
    if centred:  # y is centred but for float64, the functional is not
        off = np.abs(y.mean(axis=-1, keepdims=True)) + lost * np.abs(y).mean(axis=-1, keepdims=True)
        seen = seen + off * size.mean(axis=-1, keepdims=True)
    seen = raised(seen)
    places = norms.side(way, eps, centred)
    r_away = raised(np.maximum(places.r.hi - r, r - places.r.lo) + lost * r)
    y_away = np.maximum(np.abs(places.y.hi - y), np.abs(places.y.lo - y)) + lost * np.abs(y)
    apart = raised((y_away * delta).mean(axis=-1, keepdims=True) * (1 + lost))
    whole = (box.magnitude(places.y) * delta).mean(axis=-1, keepdims=True) * (1 + lost)
    whole = np.minimum(raised(whole), raised(seen + apart))
    away = r_away * (delta + np.abs(y) * seen)
    away = away + places.r.hi * (y_away * whole + np.abs(y) * apart)
    return _Slope(r, y, raised(away))


def _carried(slope: _Slope, size: Floats) -> Floats:
    """Return the magnitudes that are summed in the slope and in its adjoint."""
    size = size + size.mean(axis=-1, keepdims=True)
    turned = np.abs(slope.y) * (np.abs(slope.y) * size).mean(axis=-1, keepdims=True)
    return raised(slope.r * (size + turned))


def _back(adjoint: Adjoint, slope: _Slope, gain: Floats, centred: bool) -> Adjoint:
    whole = embedded(adjoint, (*adjoint.start[:-1], 0), (*adjoint.extent[:-1], len(gain)))
    values, y = whole.values * gain, slope.y[whole.window]
    back = values - y * (values * y).mean(axis=-1, keepdims=True)
    back = back * slope.r[whole.window[:-1]]
    if centred:
        back = back - back.mean(axis=-1, keepdims=True)
    return Adjoint(back, whole.start)
