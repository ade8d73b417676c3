"""Functionals of one row of a product in attention: probabilities times values, whose own errors
are averaged, and queries times keys; both read many rows of their source (section 4)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint, same
from kcdsl_certs.recheck.affine.form import Form, Origin, Walk, form_of, product_raised
from kcdsl_certs.recheck.affine.many_rows import ManyRows, Places, RowErrors, Through
from kcdsl_certs.recheck.affine.reverse_passes import OF_ROWS
from kcdsl_certs.recheck.affine.tape import Averaged, NonlinearPart, RowVJP
from kcdsl_certs.recheck.interval.box import TINY, UNIT, Floats, raised
from kcdsl_certs.recheck.interval.state import gamma
from kcdsl_certs.recheck.ops.linear.bilinear import Straight, split, whole_heads

_LOOKED_AT = 32  # about the number of elements of a row that are tried as the middle


def averages(
    walk: Walk, p: Form, v: Form, values: Straight, *, second: bool = True
) -> Averaged | None:
    """Return the rule for functionals of one row, with averages; None if it does not apply.

    Without `second` the second-order terms are bounded element by element, and not here.
    """
    if p.place is None or v.origin is None or (second and p.balance is None):
        return None
    read_by = _readers(v.origin)
    if read_by is None:
        return None
    source = form_of(walk.forms[v.origin.source])
    if source.place is None or len(source.shape) != 2:
        return None
    rows_of = walk.tape.entries[source.place].rows
    below = 2 * np.maximum(raised(p.error_bound - p.reference), 0.0)
    slack = 1 + 4 * gamma(sum(values.weight.shape) + p.shape[-1] + 64, UNIT)
    error_bound, weight = values.error_bound[0], values.weight  # the same rows in every head
    weights, moves = np.abs(p.reference), bool(error_bound.any())
    balance = np.zeros(p.shape[:-1]) if p.balance is None else p.balance[..., 0]
    last_read = [_trimmed((weights + p.error_bound)[:, t]).shape[-1] for t in range(p.shape[-2])]
    by_size = np.stack([product_raised(error_bound, np.abs(w).T) for w in weight])
    lost = by_size * (2 * gamma(weight.shape[1] + 8, UNIT)) + TINY
    inexact = (by_size + values.rest) * (4 * gamma(sum(weight.shape), UNIT)) + TINY
    lost, inexact = p.error_bound @ lost, weights @ inexact  # of every row of p [heads, T, d]
    factors = np.stack([weights, p.error_bound, below], axis=-1)
    by_norms = rows_of if second and moves else None
    last = _LastContextRow(values, v.reference, p.error_bound, by_norms)

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        heads, rows, columns = adjoint.window
        t, inside, known = rows.start, range(heads.start, heads.stop), last.of(adjoint)
        size, read = np.abs(adjoint.values).reshape(adjoint.batch, -1), slice(0, last_read[t])
        own = known.own[:, :, read]  # [heads, B, keys]
        averaged, plain, below_p = np.moveaxis(own @ factors[heads, t, read], -1, 0)
        found = np.zeros(adjoint.batch)
        if not second:
            plain = np.zeros(averaged.shape)
        else:
            found = found + size @ lost[heads, t, columns].reshape(-1)
            moved, price = p.error_bound[heads, t, read], balance[heads, t]
            m = _middle(own, moved, price)
            off = np.abs(own - m) @ moved[..., None]
            near = off[..., 0] + m[..., 0] * price[:, None] + below_p
            averaged = averaged + np.minimum(near, plain)
            if by_norms is not None:
                found = found + known.far[:, t]
            elif rows_of is None:
                for k, h in enumerate(inside):
                    passed = np.abs(adjoint.values[:, k, 0] @ weight[h][columns])
                    found = found + passed @ (error_bound.T @ p.error_bound[h, t])
        for readers in sorted(set(read_by)):
            some = [h - heads.start for h in readers if h in inside]
            alone = averaged[some].sum(axis=0)
            if len(some) > 1:
                alphas, mine = adjoint.values[:, some, 0], [k + heads.start for k in some]
                joint = np.abs(np.einsum("hj,bhd->bjd", p.reference[mine, t], alphas))
                rest = values.rest[mine[0]][:, columns]
                together = (joint * rest).sum(axis=(-1, -2)) * (1 + 2 * gamma(rest.size + 8, UNIT))
                sizes = np.abs(alphas).reshape(adjoint.batch, -1)
                together = together + sizes @ inexact[mine, t, columns].reshape(-1)
                alone = np.minimum(alone, together + plain[some].sum(axis=0))
            found = found + alone
        return -found * slack, found * slack

    def to_probabilities(adjoint: Adjoint) -> Adjoint:
        read = slice(0, max(last_read[adjoint.start[-2]], 1))
        return Adjoint(last.of(adjoint).back[:, :, None, read], (*adjoint.start[:-1], 0))

    def to_inputs(adjoint: Adjoint) -> Adjoint | ManyRows:
        heads, rows, columns = adjoint.window
        t, shares = rows.start, _trimmed(p.reference[heads, rows.start])
        if rows_of is not None:
            through = last.of(adjoint).through(rows_of)
            own = np.diagonal(p.reference[heads], axis1=1, axis2=2)
            return ManyRows(rows_of, t, adjoint.batch, shares, through, own)
        each = np.einsum("bhd,hdn->bhn", adjoint.values[:, :, 0], weight[heads, columns])
        found = np.einsum("hj,bhn->bjn", shares, each)
        return Adjoint(np.ascontiguousarray(found), (0, 0))

    operands: tuple[tuple[int, RowVJP], ...]
    operands = (p.place, to_probabilities), (source.place, to_inputs)
    return Averaged(NonlinearPart(between), operands)


@dataclass
class _ContextRow:
    """Functionals α of one row of probabilities times values, with their products with the values;
    all rows with equal functionals share it."""

    alpha: Floats  # [B, heads, 1, d]
    heads: slice
    columns: slice
    values: Straight
    reference: Floats
    moved: Floats
    rows: RowErrors | None
    carried: Through | None = None

    @cached_property
    def back(self) -> Floats:
        """Return α v of every key, [B, heads, keys]."""
        return by_head(self.alpha[:, :, 0], self.reference[self.heads, :, self.columns])

    @cached_property
    def own(self) -> Floats:
        """Bound |α| |o| of every key, [heads, B, keys]."""
        rest = self.values.rest[self.heads, :, self.columns]
        return raised(np.abs(self.alpha[:, :, 0]).swapaxes(0, 1) @ rest.swapaxes(-1, -2))

    def through(self, rows: RowErrors) -> Through:
        """Return α W."""
        if self.carried is None:
            weight = self.values.weight[self.heads, self.columns]
            self.carried = Through.of(self.alpha[:, :, 0].swapaxes(0, 1), weight, rows)
        return self.carried

    @cached_property
    def far(self) -> Floats:
        """Bound Σ_h Σ_j |e_p,htj| (|α_h W_h| error_bound_j) for every row t, [B, T]."""
        assert self.rows is not None
        return self.through(self.rows).sizes(self.moved[self.heads], self.values.error_bound[0])


@dataclass
class _LastContextRow:
    """Cache of the last functionals."""

    values: Straight
    reference: Floats
    moved: Floats
    rows: RowErrors | None
    known: list[_ContextRow] = field(default_factory=list)

    def of(self, adjoint: Adjoint) -> _ContextRow:
        """Return functionals of one row with their cached products."""
        heads, _, columns = adjoint.window
        alpha = adjoint.values
        for row in self.known:
            if (row.heads, row.columns) == (heads, columns) and same(row.alpha, alpha):
                return row
        while self.known and adjoint.batch + sum(len(row.alpha) for row in self.known) > OF_ROWS:
            del self.known[0]
        row = _ContextRow(
            *(alpha, heads, columns, self.values, self.reference, self.moved, self.rows)
        )
        self.known.append(row)
        return row


def _readers(origin: Origin) -> list[tuple[int, ...]] | None:
    """Return for every head the heads that read the same values as it does.

    None if row j of a head is not row j of a matrix, or if heads share only a part of their values.
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


def _middle(sizes: Floats, weights: Floats, price: Floats) -> Floats:
    """Return an m [heads, B, 1] that nearly minimises Σ_j weights_j |sizes_j - m| + price·m for
    sizes [heads, B, J], weights [heads, J] and a price [heads]; any m is sound."""
    step = max(1, sizes.shape[-1] // _LOOKED_AT)
    sizes, weights = sizes[..., ::step], weights[:, ::step] * step
    if not weights.size:
        return np.zeros((*sizes.shape[:2], 1))
    wanted = ((weights.sum(axis=-1) - price) / 2)[:, None, None]
    order = np.argsort(sizes, axis=-1)
    sorted_weights = np.take_along_axis(np.broadcast_to(weights[:, None], order.shape), order, -1)
    place = (np.cumsum(sorted_weights, axis=-1) < wanted).sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(order, np.minimum(place, sizes.shape[-1] - 1), axis=-1)
    return np.where(wanted > 0, np.take_along_axis(sizes, chosen, axis=-1), 0.0)


def by_head(values: Floats, matrices: Floats) -> Floats:
    """Return values [B, heads, d] times the transposed matrix [heads, m, d] of each head,
    [B, heads, m]."""
    found = np.empty((*values.shape[:2], matrices.shape[1]))
    for h, matrix in enumerate(matrices):
        np.matmul(values[:, h], matrix.T, out=found[:, h])
    return found


def _trimmed(values: Floats) -> Floats:
    """Return the values without the last columns if these are all zero."""
    if values[..., -1:].any():
        return values
    read = np.flatnonzero(np.abs(values).reshape(-1, values.shape[-1]).any(axis=0))
    return values[..., : int(read[-1]) + 1 if read.size else 0]


def keys(walk: Walk, q: Form, k: Form) -> Averaged | None:
    """Return the rule for functionals of one row of q k, through keys, their heads and rotation in
    one pass; None if it does not apply."""
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
    weight, rest, error_bound = straight.weight, straight.rest, straight.error_bound[0]
    by_size = np.stack([product_raised(error_bound, np.abs(w).T) for w in weight]) + rest
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

    def formed(t: int, columns: slice) -> _ScoreRow:
        vectors = q.reference[:, t][:, None]
        parts = [(turned_back(vectors, columns), rest[:, columns])]
        size = (sized_back(np.abs(vectors), columns) * by_size[group][:, columns]).sum(axis=-1)
        if turn is not None:
            own = turn.rest[:, columns]
            parts.append((np.broadcast_to(vectors, parts[0][0].shape), own))
            size = size + (np.abs(vectors) * own[group]).sum(axis=-1)
        alone = sum((np.abs(along) * own[group]).sum(axis=-1) for along, own in parts)
        return _ScoreRow(t, columns, parts, size * lost, np.asarray(alone), weight[group], rows_of)

    def row(adjoint: Adjoint) -> tuple[Floats, _ScoreRow]:
        """Return α without the zero columns at the end, and the data of its row."""
        _, rows, columns = adjoint.window
        alpha = _trimmed(adjoint.values[:, :, 0])
        columns = slice(columns.start, columns.start + alpha.shape[-1])
        if not kept or (kept[0].t, kept[0].columns) != (rows.start, columns):
            kept[:] = [formed(rows.start, columns)]
        return alpha, kept[0]

    kept: list[_ScoreRow] = []

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        (alpha, at), heads = row(adjoint), adjoint.window[0]
        mine, size, joint = group[heads], at.lost[heads].copy(), np.zeros(adjoint.batch)
        for g in np.unique(mine):
            some = np.flatnonzero(mine == g)
            if len(some) == 1:
                size[some] += at.alone[heads][some]
                continue
            for along, own in at.parts:
                each = np.einsum("bhj,hjd->bjd", alpha[:, some], along[heads][some])
                joint = joint + np.abs(each).reshape(len(each), -1) @ own[g].reshape(-1)
        found = joint + np.abs(alpha).reshape(len(alpha), -1) @ size.reshape(-1)
        found = found * (1 + 2 * gamma(size.size * weight.shape[1] + 8, UNIT))
        return -found * slack, found * slack

    def to_inputs(adjoint: Adjoint) -> ManyRows | None:
        (alpha, at), (heads, rows, _) = row(adjoint), adjoint.window
        if not alpha.shape[-1]:
            return None
        t, batch = rows.start, adjoint.batch
        return ManyRows(rows_of, t, batch, weights=alpha, places=at.places, heads=heads)

    def to_queries(adjoint: Adjoint) -> Adjoint:
        heads, _, columns = adjoint.window
        found = by_head(adjoint.values[:, :, 0], k.reference[heads, :, columns])
        return Adjoint(found[:, :, None], (*adjoint.start[:-1], 0))

    return Averaged(NonlinearPart(between), ((q.place, to_queries), (source.place, to_inputs)))


@dataclass
class _ScoreRow:
    """The functionals of the keys of some columns that one row of queries, t, makes, all heads.
    `alone` bounds the own error in each score [heads, J], as Σ |v||o| over the parts v [heads, J,
    d] and o of every group [groups, J, d]; `lost` bounds the float64 error."""

    t: int
    columns: slice
    parts: list[tuple[Floats, Floats]]
    lost: Floats
    alone: Floats
    weight: Floats
    rows: RowErrors

    @cached_property
    def places(self) -> Places:
        """Return the functionals of the keys' input by the scores."""
        return Places(self.parts[0][0] @ self.weight, self.rows, self.columns.start)
