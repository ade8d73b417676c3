"""Ellipsoids of functionals of one row of attention: values and keys are passed at once, down to
their source rows (section 4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck.affine.adjoint import Adjoint, shortened
from kcdsl_certs.recheck.affine.ellipsoids import EllipsoidImage, Part
from kcdsl_certs.recheck.affine.form import Form, Origin, Turned, Walk, form_of, product_raised
from kcdsl_certs.recheck.affine.tape import Gather, PassedRow
from kcdsl_certs.recheck.interval.box import TINY, Floats, raised
from kcdsl_certs.recheck.ops.linear.bilinear import split, whole_heads
from kcdsl_certs.recheck.ops.linear.one_row import by_head

_LOST = 2.0**-33  # bounds the relative error of products of adjoints in the passed entries
_MORE = 1 + 2.0**-38
_HELD = 2**24  # most numbers of products by heads at a time
_LEAST = 2.0**-450  # squares of smaller column norms underflow


@dataclass(frozen=True, slots=True)
class _Linear:
    """Heads of a linear that share no element: W [heads, d, n], |W e_x + o| ≤ `size`; o is up to
    `radius`, plus a rest with Σ o²/caps ≤ `sums` [T] in each row (caps None: no rest). `place` is
    that of the linear on the tape, `source` that of x, with x's shape."""

    weight: Floats
    size: Floats
    radius: Floats
    caps: Floats | None
    sums: Floats
    place: int
    source: int
    shape: tuple[int, ...]

    @staticmethod
    def of(walk: Walk, origin: Origin, index: NDArray[np.int64]) -> _Linear | None:
        """Return the heads of index [heads, T, d]; None if rows are mixed or o has more bounds."""
        x, heads = form_of(walk.forms[origin.source]), split(walk, origin, index)
        if heads is None or origin.place is None or x.place is None or len(x.shape) != 2:
            return None
        entry, tokens = walk.tape.entries[origin.place], np.arange(x.shape[0])
        once = np.unique(index).size == index.size and index.shape[1] == len(tokens)
        if not once or (index[..., 0] // len(origin.weight) != tokens).any():
            return None
        simple = entry.centre is None and entry.kept is None and not entry.nonlinear
        radius = entry.radius if entry.apart is None else entry.apart.radius
        if not simple or radius is None:
            return None
        caps, sums = None, np.zeros(len(tokens))
        if entry.apart is not None:
            caps, sums = entry.apart.caps.reshape(-1)[index], entry.apart.sums[:, 0]
        error_bound = heads.error_bound[0]
        size = (
            np.stack([product_raised(error_bound, np.abs(w).T) for w in heads.weight]) + heads.rest
        )
        own = radius.reshape(-1)[index]
        places = origin.place, x.place, x.shape
        return _Linear(heads.weight, raised(size), own, caps, sums, *places)


def _ellipsoids(flat: Floats, sizes: Floats, squares: Floats | None) -> tuple[list[Part], Floats]:
    """Return ellipsoids of functionals [B, n] of symbols with these sizes [n], and of a rest with
    these squares of half axes [n]; and bounds of the functionals."""
    columns = np.maximum(np.linalg.norm(flat, axis=0), _LEAST)
    shape = sizes / columns * (float(sizes @ columns) * _MORE) + TINY
    parts, each = list[Part]([EllipsoidImage.of(flat, shape)]), np.abs(flat) @ sizes * _MORE
    if squares is not None:
        rest = EllipsoidImage.of(flat, squares + TINY)
        parts.append(rest)
        each = each + rest.extents
    return parts, each


def of_values(walk: Walk, p: Form, v: Form) -> Gather | None:
    """Return the rule for functionals of one row of p v: row j of the values is read by the same
    functionals times p_j, so the own errors of all rows in an element of a head are one symbol."""
    if p.place is None or v.place is None or v.origin is None or v.origin.index.ndim != 3:
        return None
    linear = _Linear.of(walk, v.origin, v.origin.index)
    if linear is None:
        return None
    place = p.place

    def gather(adjoint: Adjoint, floor: int) -> PassedRow | None:
        heads, rows, columns = adjoint.window
        read = np.flatnonzero(p.reference[heads, rows.start].any(axis=0))
        if floor >= linear.place or not read.size:
            return None
        count = int(read[-1]) + 1
        shares = p.reference[heads, rows.start, :count]
        flat = np.ascontiguousarray(adjoint.values).reshape(adjoint.batch, -1)

        def weighed(values: Floats, weights: Floats) -> Floats:
            part = np.einsum("hj,hjd->hd", weights, values[heads, :count, columns])
            return np.asarray(part.reshape(-1) * _MORE)

        squares = None
        if linear.caps is not None:
            most = float(linear.sums[:count].sum()) * _MORE
            squares = weighed(linear.caps, shares**2) * most
        parts, each = _ellipsoids(flat, weighed(linear.radius, np.abs(shares)), squares)
        lost = np.abs(flat) @ weighed(linear.size, np.abs(shares)) * _LOST
        alphas = adjoint.values[:, :, 0].swapaxes(0, 1)  # [heads, B, d]
        back = alphas @ v.reference[heads, :, columns].swapaxes(-1, -2)
        back = np.ascontiguousarray(back.swapaxes(0, 1)[:, :, None])
        to_p = Adjoint(back, (*adjoint.start[:-1], 0))
        by_rows = linear.weight[heads, columns].swapaxes(-1, -2)
        to_x = np.empty((adjoint.batch, count, by_rows.shape[1]))
        step = max(1, _HELD // by_rows[..., 0].size)
        for begin in range(0, adjoint.batch, step):
            some = slice(begin, begin + step)
            to_x[some] = shares.T @ by_head(adjoint.values[some, :, 0], by_rows)
        return PassedRow(parts, each, lost, ((place, to_p), (linear.source, Adjoint(to_x, (0, 0)))))

    return gather


def of_keys(walk: Walk, q: Form, k: Form) -> Gather | None:
    """Return the rule for functionals of one row of q k: score j of a head reads one vector of its
    key, R_jᵀ q if that is rotated, so the own error of the key is one symbol."""
    if q.place is None or k.place is None or len(k.shape) != 3 or q.shape[0] != k.shape[0]:
        return None
    turn, origin = k.turned, k.origin
    group: NDArray[np.int64] | None = np.arange(k.shape[0])
    if turn is not None:
        origin, group = turn.below, whole_heads(turn, turn.index.swapaxes(-1, -2))
    if origin is None or origin.index.ndim != 3 or group is None:
        return None
    index = origin.index if turn is not None else origin.index.swapaxes(-1, -2)
    linear = _Linear.of(walk, origin, index)
    if linear is None or np.unique(group).size < group.size:
        return None
    place, below = q.place, linear

    def gather(adjoint: Adjoint, floor: int) -> PassedRow | None:
        if floor >= below.place:
            return None
        adjoint = shortened(adjoint, 2)
        heads, rows, columns = adjoint.window
        mine = group[heads]
        vectors = q.reference[heads, rows.start][:, None]
        back, size_back = _turned_back(turn, vectors, columns)
        sizes = (np.abs(back) * below.radius[mine][:, columns]).sum(axis=-1)
        whole = (size_back * below.size[mine][:, columns]).sum(axis=-1)
        if turn is not None:
            added = (np.abs(vectors) * turn.rest[mine][:, columns]).sum(axis=-1)
            sizes, whole = sizes + added, whole + added
        squares = None
        if below.caps is not None:
            most = float(below.sums[columns].sum()) * _MORE
            own = (back**2 * below.caps[mine][:, columns]).sum(axis=-1).reshape(-1)
            squares = own * (most * _MORE)
        alphas = adjoint.values[:, :, 0]
        flat = np.ascontiguousarray(alphas).reshape(adjoint.batch, -1)
        parts, each = _ellipsoids(flat, sizes.reshape(-1) * _MORE, squares)
        lost = np.abs(flat) @ whole.reshape(-1) * _LOST
        by_head = alphas.swapaxes(0, 1)  # [heads, B, columns]
        known = by_head @ k.reference[heads, :, columns].swapaxes(-1, -2)
        to_q = Adjoint(
            np.ascontiguousarray(known.swapaxes(0, 1)[:, :, None]), (*adjoint.start[:-1], 0)
        )
        ways = back @ below.weight[mine]  # [heads, columns, n]
        to_x = np.empty((adjoint.batch, flat.shape[1] // len(mine), ways.shape[-1]))
        for j in range(to_x.shape[1]):
            to_x[:, j] = alphas[:, :, j] @ ways[:, j]
        passed = (place, to_q), (below.source, Adjoint(to_x, (columns.start, 0)))
        return PassedRow(parts, each, lost, passed)

    return gather


def _turned_back(turn: Turned | None, vectors: Floats, columns: slice) -> tuple[Floats, Floats]:
    """Return R_jᵀ v of vectors [heads, 1, d], [heads, columns, d], and |R_jᵀ| |v|."""
    if turn is None:
        shape = len(vectors), columns.stop - columns.start, vectors.shape[-1]
        wide = np.broadcast_to(vectors, shape)
        return wide, np.abs(wide)
    half, sizes = vectors.shape[-1] // 2, np.abs(vectors)
    cos, sin = turn.cos[columns], turn.sin[columns]
    crossed, far = vectors * sin, sizes * np.abs(sin)
    moved = np.concatenate([crossed[..., half:], -crossed[..., :half]], axis=-1)
    reached = np.concatenate([far[..., half:], far[..., :half]], axis=-1)
    return vectors * cos + moved, sizes * np.abs(cos) + reached
