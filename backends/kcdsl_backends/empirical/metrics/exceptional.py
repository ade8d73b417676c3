"""The metrics of one row that the fused pass cannot take: masked tokens, or policies far apart.

A token that both kernels exclude (both logits -inf) is left out. One that only one of them
excludes has an infinite ratio: divergences that need its support are infinite. NaN or +inf make
every value NaN.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_backends.empirical.metrics.columns import Array
from kcdsl_backends.empirical.metrics.fused import cosine, relative_length

_LARGE = 50.0
_LN_2 = 0.6931471805599453


def exceptional_row(
    train: NDArray[Any], infer: NDArray[Any], temperature: float
) -> dict[str, float]:
    """Return the norms and divergences of one row of logits, both [V]."""
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
    mixture = np.logaddexp(lp, lq) - _LN_2
    js = 0.5 * _kl(p, np.exp(mixture), mixture - lp) + 0.5 * _kl(q, np.exp(mixture), mixture - lq)
    return {
        "kl": forward,
        "kl_infer_train": backward,
        "jeffreys": forward + backward,
        "js": np.clip(js, 0.0, _LN_2),
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
    """Return sum (p - q)^2 / q = sum p (p/q) (1 - e^d)^2, with 0 of p giving q."""
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
