"""Bilinear remainders of attention: products of operands made of heads of linears.

Their errors are those of a linear's input plus small own errors, both bounded row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.ellipsoids import (
    EllipsoidImage,
    Ellipsoids,
    Part,
    Row,
    norm_of,
    norm_on_ellipsoid,
    norms_of,
)
from kcdsl_certs.recheck.affine.form import Form, Origin, Turned, Walk, form_of, product_raised
from kcdsl_certs.recheck.affine.reverse_passes import tighten_by_floors
from kcdsl_certs.recheck.affine.tape import NonlinearPart, TapeEntry, reads_many
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Floats, raised
from kcdsl_certs.recheck.interval.state import gamma
from kcdsl_certs.recheck.linear_bounds.context import Context, flat_product, halves
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch


@dataclass(frozen=True, slots=True)
class Straight:
    """[heads, T, d] as heads of a linear: W_h [heads, d, n], ρ_x and |o| [heads, T, …]."""

    weight: Floats
    error_bound: Floats
    rest: Floats
    source: str
    rows: list[list[Row]]
    ellipsoids: Ellipsoids


def radius_of(entry: TapeEntry) -> Floats:
    """Return |o| ≤ |centre| + radius of an entry, element by element."""
    found = np.zeros(entry.error_bound.shape) if entry.radius is None else entry.radius
    return found if entry.centre is None else found + np.abs(entry.centre)


def split(walk: Walk, origin: Origin, index: NDArray[np.int64]) -> Straight | None:
    """Return the heads of index [heads, T, d]; None if rows or outputs of heads are mixed."""
    if index.ndim != 3:
        return None
    outputs = origin.weight.shape[0]
    rows, columns = index // outputs, index % outputs
    if (rows != rows[..., :1]).any() or (columns != columns[:, :1]).any():
        return None
    source = form_of(walk.forms[origin.source])
    error_bound = source.error_bound.reshape(-1, origin.weight.shape[1])
    weight, rest = origin.weight[columns[:, 0]], origin.rest[rows, columns]
    known = {} if source.place is None else walk.tape.entries[source.place].ellipsoids
    places = list(np.ndindex(*source.shape[:-1]))
    named = [[places[i] for i in head] for head in rows[..., 0]]
    return Straight(weight, error_bound[rows[..., 0]], rest, origin.source, named, known)


def values(walk: Walk, v: Form, shape: tuple[int, ...]) -> Straight | None:
    """Return the values of a context product of this shape as heads, [heads, T, d]."""
    if v.origin is None or len(shape) != 3 or v.shape[0] != shape[0]:
        return None
    return split(walk, v.origin, v.origin.index)


@dataclass(frozen=True, slots=True)
class _Side:
    """Bounds of one factor of scores, head by head: [heads, T, d] of the part from x and of the own
    error, and [heads, T] of the Euclidean norms of both."""

    moved: Floats
    added: Floats
    moved_norm: Floats
    added_norm: Floats

    @staticmethod
    def of(moved: Floats, added: Floats, norms: Floats) -> _Side:
        square = product_raised(added**2, np.ones((added.shape[-1], 1)))[..., 0]
        return _Side(moved, added, raised(norms), raised(np.sqrt(square)))


def scores(walk: Walk, node: Node, shape: tuple[int, ...]) -> Floats | None:
    """Return a bound of |e_q e_k| of a score product [heads, T, d] @ [heads, d, T'].

    The reaches of both sources are tightened first.
    """
    q, k = (form_of(walk.forms[name]) for name in node.inputs)
    if len(shape) != 3 or not q.shape[0] == k.shape[0] == shape[0]:
        return None
    if q.origin is not None and k.origin is not None:
        for name in dict.fromkeys((q.origin.source, k.origin.source)):
            tighten_by_floors(walk, node, name)
        left = split(walk, q.origin, q.origin.index)
        right = split(walk, k.origin, k.origin.index.swapaxes(-1, -2))
        return None if left is None or right is None else _second_order(left, right)
    if q.turned is None or k.turned is None:
        return None
    for name in dict.fromkeys((q.turned.below.source, k.turned.below.source)):
        tighten_by_floors(walk, node, name)
    query = _rotated(walk, q.turned, q.turned.index)
    key = _rotated(walk, k.turned, k.turned.index.swapaxes(-1, -2))
    if query is None or key is None:
        return None
    return np.stack([_by_norms(query, key, h) for h in range(shape[0])])


def whole_heads(turned: Turned, index: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the head of a rotation at each place of `index` [heads, T, d]; None if a place does
    not have a whole head."""
    if turned.below.index.ndim != 3 or index.shape[1:] != turned.below.index.shape[1:]:
        return None
    size = index[0].size
    found = index[:, 0, 0] // size
    expected = found[:, None, None] * size + np.arange(size).reshape(index.shape[1:])
    return found if np.array_equal(index, expected) else None


def _rotated(walk: Walk, turned: Turned, index: NDArray[np.int64]) -> _Side | None:
    """Return the bounds of rotated heads of a linear, placed by `index`."""
    heads, below = whole_heads(turned, index), split(walk, turned.below, turned.below.index)
    if heads is None or below is None:
        return None
    half = index.shape[-1] // 2
    size_c, size_s = np.abs(turned.cos), np.abs(turned.sin)

    def through(sizes: Floats) -> Floats:
        far = np.concatenate([sizes[..., half:], sizes[..., :half]], axis=-1)
        return raised(sizes * size_c + far * size_s)

    # each pair of elements: the largest singular value of [[c, -s], [s', c']]
    c, s = turned.cos[:, :half], turned.sin[:, :half]
    c_other, s_other = turned.cos[:, half:], turned.sin[:, half:]
    trace = c**2 + s**2 + c_other**2 + s_other**2
    spread = np.hypot(c**2 + s**2 - c_other**2 - s_other**2, 2 * (c * s_other - s * c_other))
    stretch = np.sqrt(raised((trace + spread) / 2) + 2.0**-48).max(axis=-1)
    moved = [
        product_raised(r, np.abs(w).T) for r, w in zip(below.error_bound, below.weight, strict=True)
    ]
    norms = np.stack([_norms(below, h) for h in range(len(below.weight))])
    added = raised(through(below.rest) + turned.rest)
    side = _Side.of(through(np.stack(moved)), added, norms * stretch)
    return _Side(*(part[heads] for part in (side.moved, added, side.moved_norm, side.added_norm)))


def _by_norms(q: _Side, k: _Side, h: int) -> Floats:
    """Return the bound of one head by norms, or by elements if these are less."""
    both = np.outer(q.moved_norm[h], k.moved_norm[h])
    return np.asarray(raised(both + _mixed(q, k, h)))


def _mixed(q: _Side, k: _Side, h: int) -> Floats:
    """Return a bound of the products with an own error as a factor."""
    of_q = product_raised(q.added[h], k.moved[h].T)
    of_k = product_raised(q.moved[h], k.added[h].T)
    of_q = np.minimum(of_q, np.outer(q.added_norm[h], k.moved_norm[h]))
    of_k = np.minimum(of_k, np.outer(q.moved_norm[h], k.added_norm[h]))
    return np.asarray(raised(of_q + of_k + product_raised(q.added[h], k.added[h].T)))


def _second_order(left: Straight, right: Straight) -> Floats:
    """Return the bound: by the product of both weights, element by element or by norms."""
    found = np.empty(
        (left.error_bound.shape[0], left.error_bound.shape[1], right.error_bound.shape[1])
    )
    sides = []
    for part in (left, right):
        pairs = zip(part.error_bound, part.weight, strict=True)
        moved = np.stack([product_raised(r, np.abs(w).T) for r, w in pairs])
        norms = np.stack([_norms(part, h) for h in range(len(part.weight))])
        sides.append(_Side.of(moved, part.rest, norms))
    for h in range(found.shape[0]):
        w_q, w_k = left.weight[h], right.weight[h]
        middle = np.abs(w_q.T @ w_k)
        middle = middle + gamma(w_q.shape[0] + 4, UNIT) * (np.abs(w_q).T @ np.abs(w_k)) * 2
        far = product_raised(
            product_raised(left.error_bound[h], middle + TINY), right.error_bound[h].T
        )
        far = np.minimum(far, np.outer(sides[0].moved_norm[h], sides[1].moved_norm[h]))
        found[h] = far + _mixed(sides[0], sides[1], h)
    return np.asarray(found * (1 + 2.0**-40))


def _norms(operand: Straight, h: int) -> Floats:
    """Return bounds [T] of |W_h e|₂, by the error bound of e and by its ellipsoids."""
    weight = operand.weight[h]
    if reads_many(operand.rest.shape, weight.shape[1]):
        found = _norms_of_many(weight, operand.error_bound[h])
    else:
        found = norms_of(weight, operand.error_bound[h], math.sqrt(weight.shape[1]))
    for t, row in enumerate(operand.rows[h]):
        if row in operand.ellipsoids:
            found[t] = min(found[t], norm_on_ellipsoid(operand.ellipsoids[row], weight))
    return found


def _norms_of_many(weight: Floats, error_bound: Floats) -> Floats:
    """Return bounds [T] of |W e_t|₂ for |e_t| ≤ error_bound_t: |e_t|₂ in the measure 1/w, times the
    largest singular value of W √w, with w the mean of its squares over the rows."""
    unit = math.ldexp(1.0, min(max(math.frexp(float(error_bound.max()))[1], -900), 1000))
    squares = (error_bound / unit) ** 2
    mean = np.maximum(squares.mean(axis=0), 2.0**-100)
    sums = (squares / mean).sum(axis=-1) * (
        1 + 2 * gamma(error_bound.shape[1] + 8, UNIT)
    ) + 2.0**-800
    return np.asarray(raised(np.sqrt(sums) * norm_of(weight * np.sqrt(mean), unit)))


def context_remainder(p: Floats, v: Straight, rest: Floats) -> NonlinearPart:
    """Return the bound of Σ_j e_p,j (α·e_v,j), at most that of the elementwise remainder.

    p is the error bound of the probabilities [heads, T, T'], `rest` = p @ (error bound of v).
    """
    n = v.weight.shape[-1]
    pairs = zip(v.error_bound, v.weight, strict=True)
    by_size = np.stack([product_raised(r, np.abs(w).T) for r, w in pairs])
    lost = by_size * (2 * gamma(v.weight.shape[1] + 8, UNIT)) + v.rest
    slack = 1 + 4 * gamma(n + p.shape[-1] + 64, UNIT)

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        heads, rows, columns = adjoint.window
        found = np.zeros(adjoint.batch)
        for k, h in enumerate(range(heads.start, heads.stop)):
            alpha = adjoint.values[:, k].reshape(-1, adjoint.extent[-1])
            size = np.abs(alpha)
            passed = np.abs(alpha @ v.weight[h][columns]) @ v.error_bound[h].T
            passed = passed + size @ lost[h][:, columns].T
            linear = passed.reshape(adjoint.batch, rows.stop - rows.start, -1) * p[h][rows]
            plain = size.reshape(adjoint.batch, rows.stop - rows.start, -1) * rest[h][rows, columns]
            found = found + np.minimum(linear.sum(-1), plain.sum(-1)).sum(-1)
        return -found * slack, found * slack

    known: list[Floats] = []

    def by_row(adjoint: Adjoint) -> Iterator[tuple[Floats, Floats]]:
        """Yield functionals [B, heads, d] of each row, and norms [heads] of Σ_j e_p,j e_v,j."""
        if not known:
            moved = np.stack([_norms(v, h) for h in range(len(v.weight))])
            own = raised(np.sqrt((v.rest**2).sum(axis=-1)))
            known.append(product_raised(p, raised(moved + own)[..., None])[..., 0])
        heads, rows, _ = adjoint.window
        for k, t in enumerate(range(rows.start, rows.stop)):
            yield adjoint.values[:, :, k], known[0][heads, t]

    def length(adjoint: Adjoint) -> float:
        total = 0.0
        for alpha, sizes in by_row(adjoint):
            apart = sum(norm_of(alpha[:, k], float(size)) for k, size in enumerate(sizes))
            both = math.sqrt(float((sizes**2).sum())) * (1 + 2.0**-40)
            total += min(apart, norm_of(alpha.reshape(len(alpha), -1), both))
        low, high = between(adjoint)
        alone = float(np.linalg.norm(np.maximum(-low, high)))
        return min(total, alone) * (1 + 2.0**-40)

    def around(adjoint: Adjoint) -> list[Part]:
        found = list[Part]()
        for alpha, sizes in by_row(adjoint):
            flat = alpha.reshape(len(alpha), -1)
            size = float((sizes**2).sum()) * (1 + 2.0**-40)
            found.append(EllipsoidImage.of(flat, np.full(flat.shape[1], size)))
        return found

    return NonlinearPart(between, length, around)


@dataclass(frozen=True, slots=True)
class Second:
    """Bounds of second-order terms: of each element in e and in D, or of functionals."""

    elements: tuple[Floats, Floats] | None = None
    nonlinear: Callable[[FunctionalBatch], Floats] | None = None


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
        for matrix, error_bound in self.parts:
            found = found + error_bound @ np.swapaxes(np.abs(matrix), -1, -2)
        return raised(found)


@dataclass(frozen=True, slots=True)
class _Heads:
    """The quantities ê, D̂ and M - m of an operand, each from the middle of its box."""

    e: _Sum
    d: _Sum
    m: _Sum


def _heads(context: Context, node: Node, position: int, transposed: bool) -> _Heads | None:
    """Return an operand as heads of a linear: [heads, T, d], or [heads, d, T] if transposed."""
    name = node.inputs[position]
    origin = context.origins.get(name)
    if origin is None or origin.index.ndim != 3:
        return None
    index = np.swapaxes(origin.index, -1, -2) if transposed else origin.index
    entry, x = context.tape.entries[origin.entry], context.tape.entries[origin.source]
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

    operand = context.operand(node, position)
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
        _Sum(((train, er),), raised(rest_e) + TINY),
        _Sum(((infer, dr), (change, er)), raised(rest_d) + TINY),
        _Sum((((train + infer) / 2, er), (infer / 2, dr)), raised(rest_m) + TINY),
    )


def second_order_scores(context: Context, node: Node) -> Second | None:
    """Return the bounds of a product of queries and keys."""
    q, k = _heads(context, node, 0, False), _heads(context, node, 1, True)
    if q is None or k is None:
        return None
    by_d = _times(q.m, k.d) + _times(q.d, k.m)
    return Second((_times(q.e, k.e), raised(by_d)))


def _times(a: _Sum, b: _Sum) -> Floats:
    """Return a bound of |u[h, t]·w[h, s]|."""
    far_a, far_b = a.carried(), b.carried()
    found = a.rest @ np.swapaxes(far_b + b.rest, -1, -2) + far_a @ np.swapaxes(b.rest, -1, -2)
    for p, error_p in a.parts:
        for q, error_q in b.parts:
            back = np.swapaxes(p, -1, -2)
            inner = np.abs(back @ q)
            inner = inner + gamma(p.shape[1] + 8, UNIT) * (np.abs(back) @ np.abs(q))
            found = found + (error_p @ inner) @ error_q.T
    return raised(found) + TINY


def second_order_context(context: Context, node: Node) -> Second | None:
    """Return the bounds of functionals of probabilities times values."""
    v = _heads(context, node, 1, False)
    if v is None:
        return None
    p = context.operand(node, 0)
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
            for matrix, error_bound in u.parts:
                passed = np.abs(flat_product(alpha, matrix[h][columns]))
                reached = reached + flat_product(passed, error_bound.T)
            found = found + (reached * weight[h, rows]).sum(axis=(1, 2))
        return raised(found)

    def nonlinear(f: FunctionalBatch) -> Floats:
        found = np.zeros(f.batch)
        if f.e is not None:
            found = found + met(f.e, v.e, r)
        if f.d is not None:
            found = found + met(f.d, v.d, t) + met(f.d, v.m, s)
        return raised(found) + TINY

    return Second(None, nonlinear)
