"""Rows of the context product, with the values' own errors averaged (section 4).

Of values e_v[j] = W e_x[j] + o[j] a row adds up Σ_j p'_j α·o[j], and the stored probabilities p'
are hardly more than p̃ in sum: where the o[j] are of one size, it does not matter how p' is spread.
Of heads that read the same values |Σ_h p̃_hj α_h|·|o[j]| may be less; then the rest is not averaged.
"""

from __future__ import annotations

import numpy as np

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import UNIT, Form, Origin, Walk, numeric, product_up, raised
from kcdsl_certs.recheck.affine.rules.straight import Straight
from kcdsl_certs.recheck.affine.tape import FAINT, Averaged, Curve, Pull
from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.rules.state import gamma


def averages(walk: Walk, p: Form, v: Form, values: Straight) -> Averaged | None:
    """Return the other way to take functionals of one row; None where something is in the way."""
    if p.place is None or p.balance is None or v.origin is None:
        return None
    read = _readers(v.origin)
    if read is None:
        return None
    source = numeric(walk.forms[v.origin.source])
    if source.place is None or len(source.shape) != 2:
        return None
    below = 2 * np.maximum(raised(p.reach - p.reference), 0.0)
    slack = 1 + 4 * gamma(sum(values.weight.shape) + p.shape[-1] + 64, UNIT)
    reach, weight = values.reach[0], values.weight  # the same rows in every head
    balance, weights = p.balance[..., 0], np.abs(p.reference)
    by_size = np.stack([product_up(reach, np.abs(w).T) for w in weight])
    lost = by_size * (2 * gamma(weight.shape[1] + 8, UNIT)) + FAINT
    inexact = (by_size + values.rest) * (4 * gamma(sum(weight.shape), UNIT)) + FAINT

    def between(adjoint: Adjoint) -> tuple[Floats, Floats]:
        heads, rows, columns = adjoint.window
        t, inside = rows.start, range(heads.start, heads.stop)
        found = np.zeros(adjoint.batch)
        averaged, plain = np.zeros((2, len(weight), adjoint.batch))
        for k, h in enumerate(inside):
            alpha = adjoint.values[:, k, 0]
            own = raised(np.abs(alpha) @ values.rest[h][:, columns].T)
            far = np.abs(alpha @ weight[h][columns]) @ reach.T
            far = far + np.abs(alpha) @ lost[h][:, columns].T
            moved = p.reach[h, t]
            m = _middle(own, moved, float(balance[h, t]))
            near = np.abs(own - m) @ moved + m[:, 0] * balance[h, t] + own @ below[h, t]
            averaged[h] = own @ weights[h, t] + np.minimum(near, own @ moved)
            plain[h] = own @ moved + np.abs(alpha) @ (inexact[h][:, columns].T @ weights[h, t])
            found = found + far @ moved
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
        Curve(between),
        (
            (p.place, _to_probabilities(v.reference, p.shape)),
            (source.place, _to_inputs(p.reference, weight)),
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
    """Return the m [B, 1] where Σ_j weights_j |sizes_j - m| + price·m is least; any m is sound."""
    order = np.argsort(sizes, axis=-1)
    below = np.cumsum(weights[order], axis=-1)
    wanted = (weights.sum() - price) / 2
    if wanted <= 0:
        return np.zeros((len(sizes), 1))
    place = np.minimum((below < wanted).sum(axis=-1), sizes.shape[-1] - 1)
    chosen = np.take_along_axis(order, place[:, None], axis=-1)
    return np.asarray(np.take_along_axis(sizes, chosen, axis=-1))


def _to_probabilities(v: Floats, shape: tuple[int, ...]) -> Pull:
    """Return the pullback p ← α vᵀ."""

    def pull(adjoint: Adjoint) -> Adjoint:
        heads, _, columns = adjoint.window
        found = adjoint.values @ v[heads, :, columns].swapaxes(-1, -2)
        return Adjoint(np.ascontiguousarray(found), (*adjoint.start[:-1], 0))

    return pull


def _to_inputs(p: Floats, weight: Floats) -> Pull:
    """Return the pullback of one row, x_j ← Σ_h p_hj α_h W_h."""

    def pull(adjoint: Adjoint) -> Adjoint:
        heads, rows, columns = adjoint.window
        each = np.einsum("bhd,hdn->bhn", adjoint.values[:, :, 0], weight[heads, columns])
        found = np.einsum("hj,bhn->bjn", p[heads, rows.start], each)
        return Adjoint(np.ascontiguousarray(found), (0, 0))

    return pull
