"""Functionals of one row of a product in attention: probabilities times values, whose own errors
are averaged, and queries times keys; both read many rows of what they come from (section 4)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import Form, Origin, Walk, form_of, product_raised
from kcdsl_certs.recheck.affine.many_rows import Kept, ManyRows, RowReach
from kcdsl_certs.recheck.affine.tape import Averaged, NonlinearPart, Pull, RowPull
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Floats, raised
from kcdsl_certs.recheck.interval.state import gamma
from kcdsl_certs.recheck.ops.linear.bilinear import Straight, split, whole_heads

_LOOKED_AT = 32  # about so many elements of a row, to find the one in the middle


def averages(
    walk: Walk, p: Form, v: Form, values: Straight, *, second: bool = True
) -> Averaged | None:
    """Return the other way to take functionals of one row; None where something is in the way.

    Without `second` what is of second order is known element by element, and not counted here.
    """
    if p.place is None or v.origin is None or (second and p.balance is None):
        return None
    read = _readers(v.origin)
    if read is None:
        return None
    source = form_of(walk.forms[v.origin.source])
    if source.place is None or len(source.shape) != 2:
        return None
    rows_of, last = walk.tape.entries[source.place].rows, Kept()
    below = 2 * np.maximum(raised(p.reach - p.reference), 0.0)
    slack = 1 + 4 * gamma(sum(values.weight.shape) + p.shape[-1] + 64, UNIT)
    reach, weight = values.reach[0], values.weight  # the same rows in every head
    weights, moves = np.abs(p.reference), bool(reach.any())
    balance = np.zeros(p.shape[:-1]) if p.balance is None else p.balance[..., 0]
    last_read = [_until((weights + p.reach)[:, t]).shape[-1] for t in range(p.shape[-2])]
    by_size = np.stack([product_raised(reach, np.abs(w).T) for w in weight])
    lost = by_size * (2 * gamma(weight.shape[1] + 8, UNIT)) + TINY
    inexact = (by_size + values.rest) * (4 * gamma(sum(weight.shape), UNIT)) + TINY

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        heads, rows, columns = adjoint.window
        t, inside = rows.start, range(heads.start, heads.stop)
        found = np.zeros(adjoint.batch)
        averaged, plain = np.zeros((2, len(weight), adjoint.batch))
        if rows_of is not None and second and moves:
            alphas = adjoint.values[:, :, 0].swapaxes(0, 1)
            moving = raised(p.reach[heads, t] @ reach)
            found = last.through(alphas, weight, (heads, columns), rows_of).sizes(moving)
        for k, h in enumerate(inside):
            alpha = adjoint.values[:, k, 0]
            own = raised(np.abs(alpha) @ values.rest[h][:, columns].T)
            if not second:
                averaged[h] = own @ weights[h, t]
                plain[h] = np.abs(alpha) @ (inexact[h][:, columns].T @ weights[h, t])
                continue
            far = np.abs(alpha) @ lost[h][:, columns].T
            if rows_of is None:
                far = far + np.abs(alpha @ weight[h][columns]) @ reach.T
            moved = p.reach[h, t]
            found = found + far @ moved
            own, moved = own[:, : last_read[t]], moved[: last_read[t]]
            m = _middle(own, moved, float(balance[h, t]))
            near = np.abs(own - m) @ moved + m[:, 0] * balance[h, t]
            near = near + own @ below[h, t, : last_read[t]]
            averaged[h] = own @ weights[h, t, : last_read[t]] + np.minimum(near, own @ moved)
            plain[h] = own @ moved + np.abs(alpha) @ (inexact[h][:, columns].T @ weights[h, t])
        for readers in sorted(set(read)):
            some = [h for h in readers if h in inside]
            alone = averaged[some].sum(axis=0)
            if len(some) > 1:
                alphas = adjoint.values[:, [h - heads.start for h in some], 0]
                joint = np.abs(np.einsum("hj,bhd->bjd", p.reference[some, t], alphas))
                own = values.rest[some[0]][:, columns]
                together = (joint * own).sum(axis=(-1, -2)) * (1 + 2 * gamma(own.size + 8, UNIT))
                together = together + plain[some].sum(axis=0)
                alone = np.minimum(alone, together)
            found = found + alone
        return -found * slack, found * slack

    return Averaged(
        NonlinearPart(between),
        (
            (p.place, _to_probabilities(v.reference, p.shape)),
            (source.place, _to_inputs(p.reference, weight, rows_of, last)),
        ),
    )


def _readers(origin: Origin) -> list[tuple[int, ...]] | None:
    """Return for every head the heads that read the same values as it does.

    None where row j of a head is not row j of a matrix, or heads share a part of their values.
    """
    tokens, outputs = origin.rest.shape
    if not origin.plain or origin.index.ndim != 3 or origin.index.shape[1] != tokens:
        return None
    rows, columns = origin.index // outputs, origin.index[:, 0] % outputs
    if not (rows == np.arange(tokens)[None, :, None]).all():
        return None
    kinds, kind = np.unique(columns, axis=0, return_inverse=True)
    if np.unique(kinds).size != kinds.size:
        return None
    return [tuple(np.flatnonzero(kind.ravel() == mine).tolist()) for mine in kind.ravel()]


def _middle(sizes: Floats, weights: Floats, price: float) -> Floats:
    """Return an m [B, 1] where Σ_j weights_j |sizes_j - m| + price·m is nearly least; any m is
    sound."""
    step = max(1, sizes.shape[-1] // _LOOKED_AT)
    sizes, weights = sizes[:, ::step], weights[::step] * step
    wanted = (weights.sum() - price) / 2
    if wanted <= 0 or not weights.size:
        return np.zeros((len(sizes), 1))
    order = np.argsort(sizes, axis=-1)
    below = np.cumsum(weights[order], axis=-1)
    place = np.minimum((below < wanted).sum(axis=-1), sizes.shape[-1] - 1)
    chosen = np.take_along_axis(order, place[:, None], axis=-1)
    return np.asarray(np.take_along_axis(sizes, chosen, axis=-1))


def _to_probabilities(v: Floats, shape: tuple[int, ...]) -> Pull:
    """Return the pullback p ← α vᵀ."""

    def pull(adjoint: Adjoint) -> Adjoint:
        heads, _, columns = adjoint.window
        found = _each_head(adjoint, v[heads, :, columns].swapaxes(-1, -2))
        return Adjoint(found, (*adjoint.start[:-1], 0))

    return pull


def _each_head(adjoint: Adjoint, matrices: Floats) -> Floats:
    """Return functionals [B, heads, 1, n] of one row times a matrix [heads, n, m] of each head."""
    found = adjoint.values[:, :, 0].swapaxes(0, 1) @ matrices
    return np.ascontiguousarray(found.swapaxes(0, 1)[:, :, None])


def _to_inputs(p: Floats, weight: Floats, rows_of: RowReach | None, last: Kept) -> RowPull:
    """Return the pullback of one row, x_j ← Σ_h p_hj α_h W_h."""

    def pull(adjoint: Adjoint) -> Adjoint | ManyRows:
        heads, rows, columns = adjoint.window
        if rows_of is not None:
            shares, alphas = _until(p[heads, rows.start]), adjoint.values[:, :, 0].swapaxes(0, 1)
            through = last.through(alphas, weight, (heads, columns), rows_of)
            return ManyRows(rows_of, rows.start, adjoint.batch, shares, through)
        each = np.einsum("bhd,hdn->bhn", adjoint.values[:, :, 0], weight[heads, columns])
        found = np.einsum("hj,bhn->bjn", p[heads, rows.start], each)
        return Adjoint(np.ascontiguousarray(found), (0, 0))

    return pull


def _until(values: Floats) -> Floats:
    """Leave out the last columns, where all is zero."""
    read = np.flatnonzero(np.abs(values).reshape(-1, values.shape[-1]).any(axis=0))
    return values[..., : int(read[-1]) + 1 if read.size else 0]


def keys(walk: Walk, q: Form, k: Form) -> Averaged | None:
    """Return the other way to take functionals of one row of q k: keys, their heads and rotation at
    once. None where something is in the way."""
    if q.place is None or len(k.shape) != 3 or q.shape[0] != k.shape[0]:
        return None
    origin = k.origin if k.turned is None else k.turned.below
    if origin is None or not origin.plain:
        return None
    group = None if k.turned is None else whole_heads(k.turned, k.turned.index.swapaxes(-1, -2))
    if k.turned is not None and group is None:
        return None
    plain = origin if group is not None else replace(origin, index=origin.index.swapaxes(-1, -2))
    read, source = _readers(plain), form_of(walk.forms[origin.source])
    straight = split(walk, plain, plain.index)
    rows_of = None if source.place is None else walk.tape.entries[source.place].rows
    if read is None or straight is None or rows_of is None or source.place is None:
        return None
    group = np.array([min(same) for same in read]) if group is None else group
    weight, rest, reach = straight.weight, straight.rest, straight.reach[0]
    by_size = np.stack([product_raised(reach, np.abs(w).T) for w in weight]) + rest
    turn, slack = k.turned, 1 + 4 * gamma(sum(weight.shape) + k.shape[-1] + 64, UNIT)
    lost = 4 * gamma(2 * weight.shape[1] + len(weight) + 64, UNIT)

    def turned_back(vectors: Floats, columns: slice) -> Floats:
        """Return R_jᵀ v of vectors [heads, 1, d], [heads, columns, d]."""
        if turn is None:
            return np.broadcast_to(
                vectors, (len(vectors), columns.stop - columns.start, *vectors.shape[2:])
            )
        half = vectors.shape[-1] // 2
        by_sin = vectors * turn.sin[columns]
        back = np.concatenate([by_sin[..., half:], -by_sin[..., :half]], axis=-1)
        return np.asarray(vectors * turn.cos[columns] + back)

    def sized_back(vectors: Floats, columns: slice) -> Floats:
        if turn is None:
            return np.abs(turned_back(vectors, columns))
        half = vectors.shape[-1] // 2
        by_sin = vectors * np.abs(turn.sin[columns])
        back = np.concatenate([by_sin[..., half:], by_sin[..., :half]], axis=-1)
        return np.asarray(vectors * np.abs(turn.cos[columns]) + back)

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        heads, rows, columns = adjoint.window
        alpha, mine = _until(adjoint.values[:, :, 0]), group[heads]
        columns = slice(columns.start, columns.start + alpha.shape[-1])
        vectors = q.reference[heads, rows.start][:, None]
        parts = [(turned_back(vectors, columns), rest)]
        size = (sized_back(np.abs(vectors), columns) * by_size[mine][:, columns]).sum(axis=-1)
        if turn is not None:
            parts.append((np.broadcast_to(vectors, parts[0][0].shape), turn.rest))
            size = size + (np.abs(vectors) * turn.rest[mine][:, columns]).sum(axis=-1)
        found = np.einsum("bhj,hj->b", np.abs(alpha), size) * lost
        for directions, own in parts:
            for g in np.unique(mine):
                some = np.flatnonzero(mine == g)
                if len(some) == 1:
                    each = (np.abs(directions[some[0]]) * own[g, columns]).sum(axis=-1)
                    found = found + np.abs(alpha[:, some[0]]) @ each
                    continue
                joint = np.einsum("bhj,hjd->bjd", alpha[:, some], directions[some])
                found = found + np.abs(joint).reshape(len(joint), -1) @ own[g, columns].reshape(-1)
        return -found * slack, found * slack

    def to_inputs(adjoint: Adjoint) -> ManyRows | None:
        heads, rows, columns = adjoint.window
        alpha = _until(adjoint.values[:, :, 0])
        if not alpha.shape[-1]:
            return None
        columns = slice(columns.start, columns.start + alpha.shape[-1])
        vectors = turned_back(q.reference[heads, rows.start][:, None], columns)
        places = vectors @ weight[group[heads]]
        weights = np.ascontiguousarray(alpha.swapaxes(0, 1))
        return ManyRows(
            *(rows_of, rows.start, adjoint.batch, None, None, weights, places, columns.start)
        )

    def to_queries(adjoint: Adjoint) -> Adjoint:
        heads, _, columns = adjoint.window
        found = _each_head(adjoint, k.reference[heads, :, columns].swapaxes(-1, -2))
        return Adjoint(found, (*adjoint.start[:-1], 0))

    return Averaged(NonlinearPart(between), ((q.place, to_queries), (source.place, to_inputs)))
