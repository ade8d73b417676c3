"""Operands straight from a linear (section 3): their errors are those of its input, and little.

An operand that was moved from a linear, whose input was not quantised and whose store kept its
map everywhere, has e[h, t] = W_h e_x[t] + o[h, t] with W_h some rows of the weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.ellipsoids import Ellipsoids, Row, longest
from kcdsl_certs.recheck.affine.form import UNIT, Form, Origin, Walk, numeric, product_up
from kcdsl_certs.recheck.affine.reaches import until
from kcdsl_certs.recheck.affine.spectrum import largest
from kcdsl_certs.recheck.affine.tape import FAINT, Curve, Entry
from kcdsl_certs.recheck.block import Node
from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.rules.state import gamma


@dataclass(frozen=True, slots=True)
class Straight:
    """[heads, T, d] as heads of a linear: W_h [heads, d, n], ρ_x and |o| [heads, T, …]."""

    weight: Floats
    reach: Floats
    rest: Floats
    source: str
    rows: list[list[Row]]
    ellipsoids: Ellipsoids


def radius_of(entry: Entry) -> Floats:
    """Return |o| ≤ |centre| + radius of an entry, element by element."""
    found = np.zeros(entry.reach.shape) if entry.radius is None else entry.radius
    return found if entry.centre is None else found + np.abs(entry.centre)


def _split(walk: Walk, origin: Origin, index: NDArray[np.int64]) -> Straight | None:
    """Return the heads of index [heads, T, d], if each head has its rows and its outputs."""
    if index.ndim != 3:
        return None
    outputs = origin.weight.shape[0]
    rows, columns = index // outputs, index % outputs
    if (rows != rows[..., :1]).any() or (columns != columns[:, :1]).any():
        return None
    source = numeric(walk.forms[origin.source])
    reach = source.reach.reshape(-1, origin.weight.shape[1])
    weight, rest = origin.weight[columns[:, 0]], origin.rest[rows, columns]
    known = {} if source.place is None else walk.tape.entries[source.place].ellipsoids
    places = list(np.ndindex(*source.shape[:-1]))
    named = [[places[i] for i in head] for head in rows[..., 0]]
    return Straight(weight, reach[rows[..., 0]], rest, origin.source, named, known)


def values(walk: Walk, v: Form, shape: tuple[int, ...]) -> Straight | None:
    """Return the values of a context product of this shape as heads, [heads, T, d]."""
    if v.origin is None or len(shape) != 3 or v.shape[0] != shape[0]:
        return None
    return _split(walk, v.origin, v.origin.index)


def scores(walk: Walk, node: Node, shape: tuple[int, ...]) -> Floats | None:
    """Return a bound of |e_q e_k| of a score product [heads, T, d] @ [heads, d, T'].

    What both were made of is made tight first.
    """
    q, k = (numeric(walk.forms[name]) for name in node.inputs)
    if q.origin is None or k.origin is None or not q.shape[0] == k.shape[0] == shape[0]:
        return None
    if len(shape) != 3:
        return None
    for name in dict.fromkeys((q.origin.source, k.origin.source)):
        until(walk, node, name)
    left = _split(walk, q.origin, q.origin.index)
    right = _split(walk, k.origin, k.origin.index.swapaxes(-1, -2))
    return None if left is None or right is None else _second_order(left, right)


def _second_order(left: Straight, right: Straight) -> Floats:
    """Return the bound: through the product of both weights, element by element or by norms."""
    found = np.empty((left.reach.shape[0], left.reach.shape[1], right.reach.shape[1]))
    for h in range(found.shape[0]):
        w_q, w_k = left.weight[h], right.weight[h]
        size_q, size_k = np.abs(w_q), np.abs(w_k)
        middle = np.abs(w_q.T @ w_k) + gamma(w_q.shape[0] + 4, UNIT) * (size_q.T @ size_k) * 2
        far = product_up(product_up(left.reach[h], middle + FAINT), right.reach[h].T)
        far = np.minimum(far, np.outer(_norms(left, h), _norms(right, h)))
        by_q = product_up(left.reach[h], size_q.T) + left.rest[h]
        by_k = product_up(right.reach[h], size_k.T)
        found[h] = far + product_up(by_q, right.rest[h].T) + product_up(left.rest[h], by_k.T)
    return np.asarray(found * (1 + 2.0**-40))


def _norms(operand: Straight, h: int) -> Floats:
    """Return bounds [T] of |W_h e|₂, by the reach of e and by its ellipsoids."""
    weight = operand.weight[h]
    found = [norm_of(weight * row, math.sqrt(weight.shape[1])) for row in operand.reach[h]]
    for t, row in enumerate(operand.rows[h]):
        if row in operand.ellipsoids:
            found[t] = min(found[t], longest(operand.ellipsoids[row], weight))
    return np.array(found)


def norm_of(matrix: Floats, size: float) -> float:
    """Return a bound of |M x|₂ for |x|₂ ≤ size."""
    small = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    trace = float((matrix**2).sum()) * (1 + 2.0**-30) + FAINT
    return math.sqrt(largest(small, trace)) * size * (1 + 2.0**-40)


def context_curve(p: Floats, v: Straight, rest: Floats) -> Curve:
    """Return the bound of Σ_j e_p,j (α·e_v,j), at most that of the elementwise remainder.

    p is the reach of the probabilities [heads, T, T'], `rest` = p @ (reach of v).
    """
    n = v.weight.shape[-1]
    by_size = np.stack([product_up(r, np.abs(w).T) for r, w in zip(v.reach, v.weight, strict=True)])
    lost = by_size * (2 * gamma(v.weight.shape[1] + 8, UNIT)) + v.rest
    slack = 1 + 4 * gamma(n + p.shape[-1] + 64, UNIT)

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        heads, rows, columns = adjoint.window
        found = np.zeros(adjoint.batch)
        for k, h in enumerate(range(heads.start, heads.stop)):
            alpha = adjoint.values[:, k].reshape(-1, adjoint.extent[-1])
            size = np.abs(alpha)
            pulled = np.abs(alpha @ v.weight[h][columns]) @ v.reach[h].T
            pulled = pulled + size @ lost[h][:, columns].T
            linear = pulled.reshape(adjoint.batch, rows.stop - rows.start, -1) * p[h][rows]
            plain = size.reshape(adjoint.batch, rows.stop - rows.start, -1) * rest[h][rows, columns]
            found = found + np.minimum(linear.sum(-1), plain.sum(-1)).sum(-1)
        return -found * slack, found * slack

    return Curve(between)
