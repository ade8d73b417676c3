"""Norm and span of the output's drift, row by row, where its box leaves them too large."""

from __future__ import annotations

import math

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.affine.form import Form, Walk, raised
from kcdsl_certs.recheck.affine.lengths import length
from kcdsl_certs.recheck.affine.pair import Pair, Row, in_row
from kcdsl_certs.recheck.box import Box, Floats

_LONGEST = 4096  # columns of a row whose errors are bounded in norm
_ENDS = 160  # columns of a row with the largest, and with the least, ends, of which pairs are made
_PAIRS = 2048  # pairs of a row that are asked one by one


def of_rows(pair: Pair, drift: Box, kind: str, claim: float) -> float:
    """Return an upper bound of "2" or "span" of the drift, not worked at below the claim."""
    rows = np.ndindex(*pair.shape[:-1])
    of_row = _length if kind == "2" else _span
    return max(of_row(pair, row, Box(drift.lo[row], drift.hi[row]), claim) for row in rows)


def _length(pair: Pair, row: Row, drift: Box, claim: float) -> float:
    cheap = float(box.up(np.sqrt((box.mag(drift) ** 2).sum()), drift.shape[0] + 8))
    if cheap <= claim or pair.shape[-1] > _LONGEST:
        return cheap
    apart = pair.apart
    known = box.mag(Box(apart.lo[row], apart.hi[row]))
    centre = float(box.up(np.sqrt((known**2).sum()), known.size + 8))
    t = _errors(pair.train, pair.t, row)
    i = t if pair.infer is pair.train else _errors(pair.infer, pair.i, row)
    return min(cheap, float(raised(np.asarray(centre + t + i))))


def _errors(walk: Walk, form: Form, row: Row) -> float:
    """Return a bound of the norm of a row of errors."""
    if form.place is None:
        return 0.0
    (units,) = in_row(row, np.eye(form.shape[-1]), form.shape[-1])
    return length(walk.tape, form.place, units)


def _span(pair: Pair, row: Row, drift: Box, claim: float) -> float:
    cheap = _widest(drift)
    if cheap <= claim:
        return cheap
    apart = pair.apart
    known = Box(apart.lo[row], apart.hi[row])
    n = pair.shape[-1]
    share = float(np.float32(1 / n))  # its 24 bits leave 1 - share exact in a double
    centred = box.add(known, pair.errors(row, np.eye(n) - share))
    best = min((drift, centred), key=_widest)
    bound = _widest(best)
    if bound <= claim or not math.isfinite(bound):
        return min(cheap, bound)
    top = np.argsort(-best.hi, kind="stable")[:_ENDS]
    low = np.argsort(best.lo, kind="stable")[:_ENDS]
    first, second = (index.reshape(-1) for index in np.meshgrid(top, low, indexing="ij"))
    first, second = first[first != second], second[first != second]
    least = np.minimum(_over(drift, first, second), _over(centred, first, second))
    order = np.argsort(-least, kind="stable")[:_PAIRS]
    for start in range(0, order.size, pair.step):  # the same batches whatever is claimed
        some = order[start : start + pair.step]
        if not least[some].max() > claim:
            break
        asked = _contrasts(pair, row, known, first[some], second[some])
        least[some] = np.minimum(least[some], asked)
    found = float(np.max(np.append(least, [0.0, _others(best, top, low)])))
    return min(cheap, bound, found)  # in this order: a NaN is not taken


def _widest(drift: Box) -> float:
    return float(box.add_up(drift.hi.max(), -drift.lo.min()))


def _over(drift: Box, first: np.ndarray, second: np.ndarray) -> Floats:
    return box.add_up(drift.hi[first], -drift.lo[second])


def _contrasts(pair: Pair, row: Row, known: Box, first: np.ndarray, second: np.ndarray) -> Floats:
    """Return upper bounds of D_first - D_second of pairs of columns."""
    values = np.zeros((first.size, pair.shape[-1]))
    values[np.arange(first.size), first] = 1.0
    values[np.arange(first.size), second] = -1.0
    return box.add_up(_over(known, first, second), pair.errors(row, values).hi)


def _others(drift: Box, top: np.ndarray, low: np.ndarray) -> float:
    """Return the largest difference with a column that is in none of the pairs."""
    hi, lo = drift.hi.copy(), drift.lo.copy()
    hi[top], lo[low] = -np.inf, np.inf
    one = box.add_up(hi.max(), -drift.lo.min())
    two = box.add_up(drift.hi.max(), -lo.min())
    return float(max(one, two))
