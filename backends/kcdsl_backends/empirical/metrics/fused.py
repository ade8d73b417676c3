"""Sums over the vocabulary from which every norm and divergence of ordinary rows follows.

With p the training policy and d = ln q - ln p = dz/T - c, where c is the change of ln Z, all of
them are functions of sums over h = e^(d/2) - 1 and v = h - d/2 >= 0 (`values_of`). One pass over
the logits computes the sums.

Quantities with cancellation are float64: both normalisers, d and v. Those computed from them
without cancellation have the format of the logits: for float32 each value is within 1e-6 of itself
(the entropy gap within 1e-6 of sum |q - p| |ln p|) or within 1e-20, for float64 within 1e-8.

The bits of a sum do not depend on threads, on the number of rows or on where they lie: numpy's
elementwise loops treat every element alike. Products are summed by BLAS, which may share long
vectors among threads and sums float32 in float32: rows are cut into blocks, whatever the other rows
are, and the sums of blocks are added in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.empirical.statistics.estimates import Array

Numbers = NDArray[Any]

LARGEST_RATIO = {np.dtype(np.float32): 20.0, np.dtype(np.float64): 300.0}
"""Largest |d| of an ordinary row: the powers of e^d that are computed stay in the format's
range."""
LN_2 = 0.6931471805599453
_SERIES = 1e-5
_TILE = 16384
_BLOCK = 2048
"""Longest product summed in the format of its factors: short enough for the accuracy of float32,
and below the length that BLAS splits among threads (10,000 elements in OpenBLAS)."""

EXTREMES = ("top", "bottom", "shift", "z", "z_infer")
"""Of each row: the largest and the least dz, c, and the normalisers of e^((z - max z)/T)."""
SUMS = (
    "train2", "infer2", "dz2", "v", "d", "d2", "h2", "jeffreys", "back", "change", "mean", "tilt",
    "there", "cosh", "cosh_change", "tv",
)  # fmt: skip
"""The sums of products over the vocabulary, as `values_of` reads them."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Rows of `width` elements cut into `count` blocks of `each`, the last one filled up."""

    width: int
    count: int
    each: int

    @property
    def padded(self) -> int:
        """Return the length of a row with the padding of its last block."""
        return self.count * self.each

    def of(self, rows: Numbers) -> Numbers:
        """View padded rows [R, padded] as blocks [R, count, each]."""
        return rows.reshape(rows.shape[0], self.count, self.each)


def blocks_of(width: int) -> BlockLayout:
    """Return the layout of rows of `width` elements."""
    count = -(-width // _BLOCK)
    return BlockLayout(width, count, -(-width // count))


def total(products: Numbers) -> Array:
    """Return the sums over the last dimension, [..., count] float32 or float64, in float64."""
    found: Array = np.add.reduce(products, axis=-1, dtype=np.float64)
    return found


class Workspace:
    """The memory of one worker: three float64 arrays and six of the format `kind`.

    A tile has as many rows of `width` logits as fit into the cache, at most `rows`.
    """

    def __init__(self, width: int, rows: int, kind: type[np.floating[Any]]) -> None:
        self.rows = max(1, min(rows, _TILE // width))
        self.kind: np.dtype[np.floating[Any]] = np.dtype(kind)
        self.blocks = blocks_of(width)
        padded = self.blocks.padded
        self.wide = np.zeros((3, self.rows, padded))
        self.parts = np.zeros((6, self.rows, padded), dtype=kind)
        self.ones = np.ones((self.blocks.count, self.blocks.each), dtype=kind)
        self.wide_ones = np.ones((self.blocks.count, self.blocks.each))
        self.products = np.empty((len(SUMS), self.rows, self.blocks.count), dtype=kind)


def add_tile(
    train: Numbers,
    infer: Numbers,
    temperature: float,
    work: Workspace,
    extremes: Array,
    sums: Array,
) -> None:
    """Write the extremes [5, R] and the sums [16, R] of R <= `work.rows` rows of logits.

    `train` and `infer` are [R, V] of the format `work.kind`. Values of rows that are not ordinary
    have no meaning.
    """
    rows, width = train.shape
    blocks = work.blocks
    a, b, d = (buffer[:rows] for buffer in work.wide)
    products = work.products[:, :rows]
    best = train.max(axis=1).astype(np.float64)[:, None]
    best_infer = infer.max(axis=1).astype(np.float64)[:, None]
    p, near, h, m, u, x = (buffer[:rows] for buffer in work.parts)
    p_, near_, h_, m_, u_, x_ = (blocks.of(buffer) for buffer in (p, near, h, m, u, x))

    np.copyto(a[:, :width], train)
    np.copyto(b[:, :width], infer)
    if width < blocks.padded:
        a[:, width:] = b[:, width:] = 0.0
    np.subtract(b, a, out=d)
    for of, (buffer, blocked) in enumerate(((h, h_), (m, m_), (u, u_))):
        np.copyto(buffer, (a, b, d)[of], casting="same_kind")
        np.vecdot(blocked, blocked, out=products[of])
    top, bottom = d[:, :width].max(axis=1), d[:, :width].min(axis=1)
    a -= best
    b -= best_infer
    if temperature != 1.0:
        a /= temperature
        b /= temperature
        d /= temperature
    if width < blocks.padded:
        a[:, width:] = b[:, width:] = -np.inf
    np.subtract(train, best.astype(work.kind), out=x[:, :width])
    np.exp(a, out=a)
    np.exp(b, out=b)
    z = total(np.vecdot(blocks.of(a), work.wide_ones))
    z_infer = total(np.vecdot(blocks.of(b), work.wide_ones))
    np.copyto(p, a, casting="same_kind")
    shift = (best_infer - best)[:, 0] / temperature + np.log1p((z_infer - z) / z)
    extremes[:] = top, bottom, shift, z, z_infer

    d -= shift[:, None]
    if width < blocks.padded:
        d[:, width:] = 0.0
    np.copyto(near, d, casting="same_kind")
    np.vecdot(near_, work.ones, out=products[4])
    np.vecdot(near_, near_, out=products[5])
    d *= 0.5
    np.expm1(d, out=b)
    np.copyto(h, b, casting="same_kind")
    largest = np.maximum(top / temperature - shift, shift - bottom / temperature)
    _subtract_half(b, d, largest < _SERIES)
    np.copyto(u, b, casting="same_kind")
    np.vecdot(p_, u_, out=products[3])
    np.multiply(p, h, out=u)
    np.vecdot(u_, h_, out=products[6])
    np.add(h, 2, out=m)
    m *= h
    h += 1
    np.multiply(p, m, out=u)
    np.vecdot(u_, near_, out=products[7])
    np.vecdot(u_, m_, out=products[8])
    np.vecdot(u_, work.ones, out=products[9])
    np.vecdot(p_, x_, out=products[10])
    np.vecdot(u_, x_, out=products[11])
    np.divide(m, h, out=x)
    x *= x
    np.vecdot(p_, x_, out=products[12])
    x *= 0.25
    np.log1p(x, out=x)
    np.vecdot(p_, x_, out=products[13])
    np.vecdot(u_, x_, out=products[14])
    np.abs(u, out=u)
    np.vecdot(u_, work.ones, out=products[15])
    sums[:] = total(products)


def _subtract_half(step: Array, half: Array, close: NDArray[np.bool_]) -> None:
    """Replace h by v = h - d/2; in rows with tiny d, by its series."""
    if not close.all():
        step -= half
    for row in np.flatnonzero(close):
        t, near = step[row], half[row]
        np.multiply(near, 1 / 6, out=t)
        t += 0.5
        t *= near
        t *= near


def ordinary(
    extremes: Array, sums: Array, temperature: float, kind: np.dtype[Any]
) -> NDArray[np.bool_]:
    """Return the mask of rows for which the sums hold: finite logits, and probabilities that differ
    by at most a factor e^20 (e^300 in float64)."""
    top, bottom, shift = extremes[0], extremes[1], extremes[2]
    largest = np.maximum(top / temperature - shift, shift - bottom / temperature)
    finite = np.isfinite(extremes).all(axis=0) & np.isfinite(sums).all(axis=0)
    found: NDArray[np.bool_] = finite & (largest <= LARGEST_RATIO[kind])
    return found


def values_of(extremes: Array, sums: Array, temperature: float, width: int) -> dict[str, Array]:
    """Return every norm and divergence from the sums of rows of `width` logits, each [N].

    With e^d - 1 = h (2 + h), 2 sinh(d/2) = h (2 + h)/(1 + h) and e^d - 1 - d = h^2 + 2 v:

        KL(p||q) = sum p (h^2 + 2 v)             H^2 = sum p h^2 / 2
        J  = sum p (e^d - 1) d                   TV  = sum p |e^d - 1| / 2
        KL(q||p) = J - KL(p||q)                  chi2(q||p) = sum p (e^d - 1)^2
        chi2(p||q) = sum p (2 sinh(d/2))^2
        JS = J/4 - sum p (2 + (e^d - 1)) ln(1 + sinh(d/2)^2) / 4
        H(p) - H(q) = KL(q||p) + sum p (e^d - 1) ln p
        H(p) = ln Z - sum p z/T, z the logits less their largest

    No sum of squares or of v has a negative term. The two differences lose little: where d is small
    J is twice KL(q||p), and J/4 twice JS. In the last line any constant may be added to ln p, as
    sum p (e^d - 1) = 0: the logits of the training kernel, less their mean, are used for it.
    """
    top, bottom, shift, z, _ = extremes
    s: Mapping[str, Array] = dict(zip(SUMS, sums, strict=True))
    smallest = bottom / temperature - shift
    spread = s["d2"] / width - (s["d"] / width) ** 2
    norm, length, other = (np.sqrt(s[name]) for name in ("dz2", "train2", "infer2"))
    jeffreys = s["jeffreys"] / z
    forward = (s["h2"] + 2 * s["v"]) / z
    backward = np.maximum(jeffreys - forward, 0.0)
    shared = (2 * s["cosh"] + s["cosh_change"]) / z
    tilt = (s["tilt"] - s["change"] * s["mean"] / z) / z / temperature
    return {
        "logit_l2": norm,
        "logit_l2_centered": temperature * np.sqrt(np.maximum(spread, 0.0) * width),
        "logit_linf": np.maximum(top, -bottom),
        "logit_span": top - bottom,
        "logit_rel_l2": relative_length(norm, length),
        "logit_cosine": cosine(norm, length, other),
        "kl": forward,
        "kl_infer_train": backward,
        "jeffreys": jeffreys,
        "js": np.clip((jeffreys - shared) / 4, 0.0, LN_2),
        "tv": np.minimum(s["tv"] / z / 2, 1.0),
        "hellinger2": np.minimum(s["h2"] / z / 2, 1.0),
        "chi2_train_infer": s["there"] / z,
        "chi2_infer_train": s["back"] / z,
        "renyi_inf": -smallest,
        "log_ratio_linf": np.maximum(top / temperature - shift, -smallest),
        "entropy_gap": backward + tilt,
        "entropy": np.log(z) - s["mean"] / z / temperature,
    }


def relative_length(norm: Array, length: Array) -> Array:
    """Return ||dz|| / ||z||, 0 for dz = 0 and infinite for z = 0."""
    with np.errstate(all="ignore"):
        found: Array = np.where(norm == 0, 0.0, norm / length)
    return found


def cosine(norm: Array, length: Array, other: Array) -> Array:
    """Return the cosine of two vectors from their lengths and that of their difference.

    The form 1 - (||dz||^2 - (||z|| - ||y||)^2)/(2 ||z|| ||y||) keeps the digits of a cosine near
    one. It is 1 for equal vectors, NaN if one vector is 0 or infinite.
    """
    with np.errstate(all="ignore"):
        away = (norm - (length - other)) * (norm + (length - other)) / (2 * length * other)
        found: Array = np.where(norm == 0, 1.0, np.clip(1 - away, -1.0, 1.0))
    return found


# --- rows outside the range of the sums -----------------------------------------------------------

_LARGE = 50.0


def exceptional_row(
    train: NDArray[Any], infer: NDArray[Any], temperature: float
) -> dict[str, float]:
    """Return the norms and divergences of one row of logits, both [V].

    Such rows have masked tokens, or policies far apart. A token that both kernels exclude (both
    logits -inf) is left out. One that only one of them excludes has an infinite ratio: divergences
    that need its support are infinite. NaN or +inf make every value NaN.
    """
    with np.errstate(all="ignore"):
        z, y = train.astype(np.float64), infer.astype(np.float64)
        if _undefined(z) or _undefined(y):
            return dict.fromkeys((*_logit_values(z, y), *_policy_values(z, y)), math.nan)
        shared = ~(np.isneginf(z) & np.isneginf(y))
        z, y = z[shared], y[shared]
        values = _logit_values(z, y)
        values.update(_policy_values(_logarithms(z / temperature), _logarithms(y / temperature)))
        return {name: float(value) for name, value in values.items()}


def _undefined(z: Array) -> bool:
    return bool((np.isnan(z) | np.isposinf(z)).any()) or not np.isfinite(z).any()


def _logarithms(z: Array) -> Array:
    z = z - z.max()
    shifted: Array = z - math.log(math.fsum(np.exp(z)))
    return shifted


def _logit_values(z: Array, y: Array) -> dict[str, Any]:
    d = y - z
    length, other, norm = (np.sqrt(np.sum(v * v)) for v in (z, y, d))
    finite = math.isfinite(norm)
    centred = np.sqrt(np.sum((d - d.mean()) ** 2)) if finite else norm
    return {
        "logit_l2": norm,
        "logit_l2_centered": centred,
        "logit_linf": np.abs(d).max(),
        "logit_span": d.max() - d.min() if finite else norm,
        "logit_rel_l2": float(relative_length(norm, length)) if finite else norm,
        "logit_cosine": float(cosine(norm, length, other)),
    }


def _policy_values(lp: Array, lq: Array) -> dict[str, Any]:
    d = lq - lp
    p, q = np.exp(lp), np.exp(lq)
    larger, gap = np.maximum(p, q), np.abs(d)
    forward, backward = _kl(p, q, d), _kl(q, p, -d)
    mixture = np.logaddexp(lp, lq) - LN_2
    js = 0.5 * _kl(p, np.exp(mixture), mixture - lp) + 0.5 * _kl(q, np.exp(mixture), mixture - lq)
    return {
        "kl": forward,
        "kl_infer_train": backward,
        "jeffreys": forward + backward,
        "js": np.clip(js, 0.0, LN_2),
        "tv": min(0.5 * np.sum(larger * -np.expm1(-gap)), 1.0),
        "hellinger2": min(0.5 * np.sum(larger * np.expm1(-gap / 2) ** 2), 1.0),
        "chi2_train_infer": _chi2(p, q, lp, d),
        "chi2_infer_train": _chi2(q, p, lq, -d),
        "renyi_inf": (-d).max(),
        "log_ratio_linf": gap.max(),
        "entropy_gap": _entropy_gap(p, q, lp, lq, d, backward),
        "entropy": _entropy(p, lp),
    }


def _kl(p: Array, q: Array, d: Array) -> float:
    """Return sum p (e^d - 1 - d), d = ln q - ln p, in a form that does not overflow."""
    near = p * (np.expm1(np.minimum(d, _LARGE)) - d)
    far = (q - p) - p * d
    return max(float(np.sum(np.where(p == 0, q, np.where(d > _LARGE, far, near)))), 0.0)


def _chi2(p: Array, q: Array, lp: Array, d: Array) -> float:
    """Return sum (p - q)^2 / q = sum p (p/q) (1 - e^d)^2, where terms with p = 0 are q."""
    terms = np.exp(lp - d) * np.expm1(d) ** 2
    far = (q - p) + (np.exp(lp - d) - p)
    return float(np.sum(np.where(p == 0, q, np.where(d > _LARGE, far, terms))))


def _entropy_gap(p: Array, q: Array, lp: Array, lq: Array, d: Array, backward: float) -> float:
    """Return H(p) - H(q), by KL(q || p) + sum (q - p) ln p where that is finite."""
    if not math.isfinite(backward):
        return _entropy(p, lp) - _entropy(q, lq)
    change = np.where(d > _LARGE, q - p, p * np.expm1(np.minimum(d, _LARGE)))
    return backward + float(np.sum(change * (lp - np.sum(np.where(p == 0, 0.0, p * lp)))))


def _entropy(p: Array, lp: Array) -> float:
    return -float(np.sum(np.where(p == 0, 0.0, p * lp)))
