"""What is of second order in products of what comes straight from linears (section 3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.planes.course import Course, halves, raised
from kcdsl_certs.recheck.planes.functional import Functional
from kcdsl_certs.recheck.planes.rules.linear import flat_product
from kcdsl_certs.recheck.planes.tape import FAINT, UNIT
from kcdsl_certs.recheck.rules.state import gamma


@dataclass(frozen=True, slots=True)
class Second:
    """Bounds of what is of second order: of each element in e and in D, or of functionals."""

    elements: tuple[Floats, Floats] | None = None
    curved: Callable[[Functional], Floats] | None = None


@dataclass(frozen=True, slots=True)
class _Sum:
    """A quantity u[h, t] = Σ_k P_k[h] w_k[t] + o[h, t] of an operand [heads, T, d].

    `parts` are pairs of P [heads, d, n] and bounds of |w| [T, n]; |o| ≤ `rest`.
    """

    parts: tuple[tuple[Floats, Floats], ...]
    rest: Floats

    def carried(self) -> Floats:
        """Return Σ |P||w|, element by element."""
        found = np.zeros(self.rest.shape)
        for matrix, reach in self.parts:
            found = found + reach @ np.swapaxes(np.abs(matrix), -1, -2)
        return raised(found)


@dataclass(frozen=True, slots=True)
class _Heads:
    """The quantities ê, D̂ and M - m of an operand, each from the middle of its box."""

    e: _Sum
    d: _Sum
    m: _Sum


def _heads(course: Course, node: Node, position: int, transposed: bool) -> _Heads | None:
    """Return an operand as heads of a linear: [heads, T, d], or [heads, d, T] if transposed."""
    name = node.inputs[position]
    origin = course.origins.get(name)
    if origin is None or origin.index.ndim != 3:
        return None
    index = np.swapaxes(origin.index, -1, -2) if transposed else origin.index
    entry, x = course.tape.entries[origin.entry], course.tape.entries[origin.source]
    tokens, outputs = entry.reference.shape
    columns = index[:, :1] % outputs
    expected = np.arange(tokens, dtype=np.int64)[:, None] * outputs + columns
    if index.shape[1] != tokens or (index != expected).any():
        return None
    train, infer = origin.train[columns[:, 0]], origin.infer[columns[:, 0]]
    change = infer - train

    def picked(values: Floats) -> Floats:
        return np.asarray(values.reshape(-1)[index])

    def turned(values: Floats) -> Floats:
        return np.swapaxes(values, -1, -2) if transposed else values

    def by(values: Floats, matrix: Floats) -> Floats:
        return np.asarray(values @ np.swapaxes(matrix, -1, -2))

    operand = course.operand(node, position)
    (em, er), (dm, dr) = halves(x.e), halves(x.d)
    e_middle, d_middle = turned(halves(operand.e)[0]), turned(halves(operand.d)[0])
    centre_e, centre_d = (picked(part) for part in entry.centre)
    off_e = by(em, train) + centre_e - e_middle
    off_d = by(dm, infer) + by(em, change) + centre_d - d_middle
    lost = gamma(train.shape[-1] + 24, UNIT) * (
        by(np.abs(em), np.abs(train) + np.abs(change)) + by(np.abs(dm), np.abs(infer))
    )
    lost = lost + 8 * UNIT * (
        np.abs(e_middle) + np.abs(d_middle) + np.abs(centre_e) + np.abs(centre_d)
    )
    rest_e = picked(entry.radius[0]) + np.abs(off_e) + lost
    rest_d = picked(entry.radius[1]) + np.abs(off_d) + lost
    rest_m = picked(entry.radius[0]) + picked(entry.radius[1]) / 2
    rest_m = rest_m + np.abs(off_e + off_d / 2) + 2 * lost
    return _Heads(
        _Sum(((train, er),), raised(rest_e) + FAINT),
        _Sum(((infer, dr), (change, er)), raised(rest_d) + FAINT),
        _Sum((((train + infer) / 2, er), (infer / 2, dr)), raised(rest_m) + FAINT),
    )


def scores(course: Course, node: Node) -> Second | None:
    """Return the bounds of a product of queries and keys."""
    q, k = _heads(course, node, 0, False), _heads(course, node, 1, True)
    if q is None or k is None:
        return None
    by_d = _times(q.m, k.d) + _times(q.d, k.m)
    return Second((_times(q.e, k.e), raised(by_d)))


def _times(a: _Sum, b: _Sum) -> Floats:
    """Return a bound of |u[h, t]·w[h, s]|."""
    far_a, far_b = a.carried(), b.carried()
    found = a.rest @ np.swapaxes(far_b + b.rest, -1, -2) + far_a @ np.swapaxes(b.rest, -1, -2)
    for p, reach_p in a.parts:
        for q, reach_q in b.parts:
            back = np.swapaxes(p, -1, -2)
            inner = np.abs(back @ q)
            inner = inner + gamma(p.shape[1] + 8, UNIT) * (np.abs(back) @ np.abs(q))
            found = found + (reach_p @ inner) @ reach_q.T
    return raised(found) + FAINT


def context(course: Course, node: Node) -> Second | None:
    """Return the bounds of functionals of probabilities times values."""
    v = _heads(course, node, 1, False)
    if v is None:
        return None
    p = course.operand(node, 0)
    r, s = halves(p.e)[1], halves(p.d)[1]
    t = raised(r + s / 2)
    count = 2 * v.e.rest.shape[-1] + 32
    lost = {id(u): 2 * gamma(count, UNIT) * u.carried() for u in (v.e, v.d, v.m)}

    def met(adjoint: Adjoint, u: _Sum, weight: Floats) -> Floats:
        """Return Σ_j weight_j |α·u[j]| of every functional."""
        heads, rows, columns = adjoint.window
        found = np.zeros(adjoint.batch)
        for k, h in enumerate(range(heads.start, heads.stop)):
            alpha = adjoint.values[:, k]  # [B, rows, d']
            far = (u.rest[h] + lost[id(u)][h])[:, columns]
            reached = flat_product(np.abs(alpha), far.T)
            for matrix, reach in u.parts:
                pulled = np.abs(flat_product(alpha, matrix[h][columns]))
                reached = reached + flat_product(pulled, reach.T)
            found = found + (reached * weight[h, rows]).sum(axis=(1, 2))
        return raised(found)

    def curved(f: Functional) -> Floats:
        found = np.zeros(f.batch)
        if f.e is not None:
            found = found + met(f.e, v.e, r)
        if f.d is not None:
            found = found + met(f.d, v.d, t) + met(f.d, v.m, s)
        return raised(found) + FAINT

    return Second(None, curved)
