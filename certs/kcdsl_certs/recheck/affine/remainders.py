"""Nonlinear remainders, and drifts of an input within ellipsoids, as parts of an entry."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine import reverse_passes
from kcdsl_certs.recheck.affine.adjoint import Adjoint, reads_one_each, units
from kcdsl_certs.recheck.affine.before_casts import LARGEST
from kcdsl_certs.recheck.affine.ellipsoids import (
    EllipsoidImage,
    LinearImage,
    Part,
    RankOne,
    Row,
    RowExcess,
    RowSquares,
    Squares,
    WeightNorms,
    around_sum,
    largest_eigenvalue,
    norm_on_ellipsoid,
    reached,
    rows_of,
)
from kcdsl_certs.recheck.affine.form import Form, Walk, form_of
from kcdsl_certs.recheck.affine.tape import NonlinearPart, TapeEntry
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.box import TINY, Floats, raised
from kcdsl_certs.recheck.interval.state import Held

_MORE = 1 + 2.0**-38
_LOOKED_AT = 192  # about so many elements of a row are sorted, as in a prover


@dataclass(frozen=True, slots=True)
class Remainder:
    """o with low ≤ o ≤ high, low ≤ 0 ≤ high [..., n], and Σ|o| ≤ total [..., 1] in each row; `sums`
    bounds Σ|α o| of one row for |α| [B, n]. `known` caches the bounds of functionals of one row by
    the row and a digest: a later pass often reads the same."""

    low: Floats
    high: Floats
    total: Floats
    sums: Callable[[Row, Floats], Floats] | None = None
    known: dict[tuple[Row, bytes], tuple[Floats, Floats]] = field(default_factory=dict)

    @property
    def nonlinear(self) -> NonlinearPart:
        """Return the bounds of its functionals."""
        return NonlinearPart(self._between, self._length, self._around)

    def _between(self, adjoint: Adjoint) -> tuple[Floats, Floats]:
        if self.sums is None or any(size != 1 for size in adjoint.extent[:-1]):
            return self._by_total(adjoint)
        row, columns = tuple(map(int, adjoint.start[:-1])), adjoint.window[-1]
        values = np.zeros((adjoint.batch, self.low.shape[-1]))
        values[:, columns] = adjoint.values.reshape(adjoint.batch, -1)
        key = row, hashlib.sha256(values.data).digest()
        if key not in self.known:
            low, high = self._by_total(adjoint)
            size = self.sums(row, np.abs(values))
            self.known[key] = np.maximum(low, -size), np.minimum(high, size)
        return self.known[key]

    def _by_total(self, adjoint: Adjoint) -> tuple[Floats, Floats]:
        """Return the smallest and the largest values by the ends and the total of each row."""
        below, above = -self.low[adjoint.window], self.high[adjoint.window]
        up, weights = adjoint.values > 0, np.abs(adjoint.values)
        total, order = self.total[adjoint.window[:-1]], _order(weights)
        if np.array_equal(below, above):
            least = most = most_of(weights, above, total, order)
        else:
            least = most_of(weights, np.where(up, below, above), total, order)
            most = most_of(weights, np.where(up, above, below), total, order)
        return -least, most

    def _caps(self, adjoint: Adjoint) -> tuple[Floats, float]:
        """Return the caps, and a bound of Σ|o| in the rows where the adjoint is not zero."""
        cap = np.maximum(-self.low, self.high)[adjoint.window]
        sums = cap.sum(axis=-1, keepdims=True) * _MORE
        whole = np.minimum(self.total[adjoint.window[:-1]], sums)
        read = np.asarray(adjoint.values.any(axis=(0, -1)))
        return cap, float(whole[read].sum()) * _MORE

    def _around(self, adjoint: Adjoint) -> list[Part]:
        """Return the ellipsoid of all o with Σ o²/cap ≤ Σ|o|."""
        cap, whole = self._caps(adjoint)
        shape, flat = cap.reshape(-1) * whole + TINY, adjoint.values.reshape(adjoint.batch, -1)
        if reads_one_each(flat):
            own = np.diagonal(flat) ** 2 * shape * _MORE + TINY
            return [RankOne(np.zeros(len(own)), 0.0, own)]
        return [EllipsoidImage.of(flat, shape)]

    def _length(self, adjoint: Adjoint) -> float:
        cap, whole = self._caps(adjoint)
        columns = np.linalg.norm(adjoint.values, axis=0)[None] * _MORE + TINY
        by_columns = float(most_of(columns, cap[None], self.total[adjoint.window[:-1]])[0])
        scaled = (adjoint.values * np.sqrt(cap)).reshape(adjoint.batch, -1)
        if reads_one_each(scaled):
            spread = float((np.diagonal(scaled) ** 2).max()) * _MORE
        else:
            spread = largest_eigenvalue(scaled @ scaled.T, float((scaled**2).sum()) * _MORE)
        return min(by_columns, math.sqrt(spread * whole) * _MORE + 2.0**-450)


def most_of(
    weights: Floats, caps: Floats, total: Floats, order: NDArray[np.int64] | None = None
) -> Floats:
    """Return a bound of Σ w·t, 0 ≤ t ≤ caps, with rows of t that sum to at most `total`.

    It is λ·total + Σ max(w - λ, 0)·caps for any λ ≥ 0; the best λ is where the caps of elements of
    larger weight sum to the total. In long rows it is looked up among every k-th element. weights
    and caps are [B, ..., n] (or caps those of all), total [..., 1]; the result is [B]. `order` is
    that of these elements by weight, the largest first.
    """
    order = _order(weights) if order is None else order
    alike, step, n = caps.size == caps.shape[-1], _step(weights), order.shape[-1]
    caps = np.broadcast_to(caps, weights.shape)
    some, mass = weights[..., ::step], caps[..., ::step] * step
    if alike:  # one row of caps for all: a plain index is fastest
        used = np.cumsum(mass.reshape(-1, n)[0].take(order), axis=-1)
    else:
        used = np.cumsum(np.take_along_axis(mass, order, axis=-1), axis=-1)
    last = (used < total).sum(axis=-1, keepdims=True)
    place = np.take_along_axis(order, np.minimum(last, n - 1), axis=-1)
    price = np.where(last < n, np.take_along_axis(some, place, axis=-1), 0.0)
    rest = weights - price
    over = np.einsum("...n,...n->...", np.maximum(rest, 0.0, out=rest), caps)
    # λ = 0 contributes 0 also if the total is infinite
    paid = np.where(price > 0, price * np.where(price > 0, total, 0.0), 0.0)[..., 0]
    return np.asarray((over + paid).reshape(weights.shape[0], -1).sum(axis=-1) * _MORE)


def _step(weights: Floats) -> int:
    return max(1, int(weights.shape[-1]) // _LOOKED_AT)


def _order(weights: Floats) -> NDArray[np.int64]:
    """Return the order of every k-th element by weight, the largest first."""
    return np.argsort(-weights[..., :: _step(weights)], axis=-1)


def symbol(walk: Walk, held: Held, middle: Floats, half: Floats, reference: Floats) -> int:
    """Append the drift of an input relative to the midpoint of its box; return its entry.

    `half` is the half width plus the rounding of `reference`, the centre plus the midpoint.
    """
    centres, shapes = held
    rounded = 2.0**-51 * np.abs(reference)  # the error of centres - middle is covered by sum_of
    found: dict[Row, Floats] = {}
    for row, (shift, slip) in enumerate(zip(centres - middle, rounded, strict=True)):
        found[(row,)] = around_sum([shapes[row], RankOne(shift, 1.0, 0.0), ball(slip)])

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        size = reached(found, half, adjoint)
        return -size, size

    def together(adjoint: Adjoint) -> float:
        total = 0.0
        for row, part in rows_of(adjoint):
            columns = part.window[-1]
            values = part.values.reshape(part.batch, -1)
            alone = float(np.linalg.norm(part.sizes(half)))
            total += min(norm_on_ellipsoid(found[row][columns, columns], values), alone)
        return total * (1 + 2.0**-40)

    return walk.tape.add(
        TapeEntry(half, nonlinear=(NonlinearPart(between, together),), ellipsoids=found)
    )


def ball(radius: Floats) -> Floats:
    """Return an ellipsoid around all vectors with norm at most that of `radius`."""
    return raised(np.eye(len(radius)) * float((radius**2).sum()))


def squares(walk: Walk, node: Node, name: str) -> Squares | None:
    """Return bounds of weighted squares of an operand's errors: the known ones, or ellipsoids by
    the passes that the hints name for an operation, which also lower the operand's error bound;
    without passes, those of a linear whose input bounds it by norms.

    Raises Rejected "document/passes".
    """
    form, cut = form_of(walk.forms[name]), walk.tape.cut
    if form.place is None:
        return None
    entry = walk.tape.entries[form.place]
    named = walk.passes.rows is not None and walk.tape.budget is None and cut > 0
    if entry.squares is not None or not named or form.place <= cut:
        return entry.squares
    needed = walk.chosen(node, name, "ellipsoid", cut)
    alone = form.origin is not None and form.origin.norms is not None
    if not (alone or needed.any()):
        return None
    if int(needed.sum()) * form.shape[-1] ** 2 > LARGEST:
        raise Rejected("document/passes", f"the ellipsoids of {name} are too large")
    image, found = _image(walk, form), dict[Row, RowSquares | RowExcess]()
    error_bound = (
        form.error_bound.copy() if image is None else np.minimum(form.error_bound, image.elements)
    )
    if image is not None and alone:
        found = {row: image.row(row) for row in np.ndindex(*form.shape[:-1])}
    for row in reverse_passes.rows(needed):
        functionals = units(form.shape, row, 0, form.shape[-1])
        around = reverse_passes.surrounded(walk.tape, form.place, functionals, cut)
        where, length = tuple(map(int, row)), math.inf
        error_bound[row] = np.minimum(error_bound[row], around.each)
        if image is not None:
            length = float(image.totals[row][0])
            if image.trace(where) < np.trace(around.shape):
                found[where] = image.row(where)
                continue
        found[where] = RowSquares.of(around.shape, length)
    reverse_passes.store_error_bound(walk, name, error_bound)
    known, entry = Squares(found), walk.tape.entries[form.place]
    walk.tape.entries[form.place] = replace(entry, squares=known)
    return known


def _image(walk: Walk, form: Form) -> LinearImage | None:
    """Return the image by a linear of rows of bounded norm; None for other results."""
    origin = form.origin
    if origin is None or origin.rest.shape != form.shape:
        return None
    straight = np.arange(form.reference.size).reshape(form.shape)
    source = form_of(walk.forms[origin.source]).place
    below = None if source is None else walk.tape.entries[source].length
    if below is None or not np.array_equal(origin.index, straight):
        return None
    norms = WeightNorms.of(origin.weight) if origin.norms is None else origin.norms
    return LinearImage(norms, below, origin.rest)
