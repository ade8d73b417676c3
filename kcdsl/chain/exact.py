"""The quantities of one row of logits as they are, in plain floats without cancellation.

A reference beside the evaluator: the certified column is compared with these numbers, and the
checks of the bounds use them. Inputs are lists of V logits of the two kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kcdsl.chain import bounds
from kcdsl.chain.rounding import ChainDomainError, require_temperature


@dataclass(frozen=True, slots=True)
class ExactRow:
    """Measured quantities of one row; `span` is span(dz/T), the rest as in `bounds.NAMES`.

    `kl` is KL(train||infer), `kl_reverse` KL(infer||train), `chi2` the larger of both ways,
    `ess` the smaller, and `w_log_w` the largest w ln w over the classes.
    """

    span: float
    tv: float
    kl: float
    kl_reverse: float
    jeffreys: float
    chi2: float
    ess: float
    js: float
    hellinger2: float
    abs_log_ratio: float
    w_log_w: float


def exact_row(
    train: Sequence[float], infer: Sequence[float], temperature: float | Fraction = 1
) -> ExactRow:
    """Measure one row. Classes that both kernels mask (-inf) are dropped first.

    KL is summed in the Bregman form p (e^d - 1 - d), every term of which is >= 0. Raises
    ChainDomainError for misaligned rows, NaN, +inf, V < 2, T <= 0 and a mask on one side only
    (a support violation: the importance ratio is 0 or infinite there).
    """
    t = float(require_temperature(temperature))
    z, y = common_support(train, infer)
    difference = [b - a for a, b in zip(z, y, strict=True)]
    log_p = _log_softmax([a / t for a in z])
    log_q = _log_softmax([b / t for b in y])
    normaliser = _log_mean_shift(log_p, [d / t for d in difference])
    ratio = [normaliser - d / t for d in difference]  # ln(p/q), from the difference itself
    p, q = [math.exp(v) for v in log_p], [math.exp(v) for v in log_q]
    middle = [0.5 * (a + b) for a, b in zip(p, q, strict=True)]
    kl = math.fsum(a * excess(-r) for a, r in zip(p, ratio, strict=True))
    reverse = math.fsum(b * excess(r) for b, r in zip(q, ratio, strict=True))
    forward_chi2 = math.fsum(b * _expm1(r) ** 2 for b, r in zip(q, ratio, strict=True))
    reverse_chi2 = math.fsum(a * _expm1(-r) ** 2 for a, r in zip(p, ratio, strict=True))
    worst_chi2 = max(forward_chi2, reverse_chi2)
    return ExactRow(
        span=bounds.span(difference, temperature),
        tv=0.5 * math.fsum(b * abs(_expm1(r)) for b, r in zip(q, ratio, strict=True)),
        kl=kl,
        kl_reverse=reverse,
        jeffreys=kl + reverse,
        chi2=worst_chi2,
        ess=1.0 / (1.0 + worst_chi2),
        js=math.fsum(m * js_term(r) for m, r in zip(middle, ratio, strict=True)),
        hellinger2=0.5 * math.fsum(b * _expm1(r / 2) ** 2 for b, r in zip(q, ratio, strict=True)),
        abs_log_ratio=max(abs(r) for r in ratio),
        w_log_w=max(r * math.exp(min(r, 700.0)) for r in ratio),
    )


def common_support(
    train: Sequence[float], infer: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return both rows without the classes that both mask with -inf; else as `exact_row`."""
    if len(train) != len(infer):
        raise ChainDomainError(f"misaligned rows: {len(train)} and {len(infer)} logits")
    kept = [pair for pair in zip(train, infer, strict=True) if pair != (-math.inf, -math.inf)]
    if any(-math.inf in pair for pair in kept):
        raise ChainDomainError("support violation: a class is masked on one side only")
    if not all(math.isfinite(a) and math.isfinite(b) for a, b in kept):
        raise ChainDomainError("a logit is NaN or +inf")
    if len(kept) < 2:
        raise ChainDomainError(f"{len(kept)} classes left, at least 2 are needed")
    return [float(a) for a, _ in kept], [float(b) for _, b in kept]


def excess(d: float) -> float:
    """Return e^d - 1 - d >= 0 without cancellation; +inf where it overflows."""
    if abs(d) >= 0.1:
        return _expm1(d) - d
    tail = 0.0  # d/2! + d^2/3! + ... by Horner's rule
    for n in range(12, 1, -1):
        tail = (1.0 + tail) * d / n
    return tail * d


def _expm1(x: float) -> float:
    return math.inf if x > 700.0 else math.expm1(x)


def js_term(r: float) -> float:
    """Return ln 2 - h2(1/(1 + e^r)), the divergence at one class relative to the mixture.

    With a = r/2 this is a tanh a - ln cosh a, free of cancellation for small a.
    """
    a = abs(r) / 2.0
    if a < 1.0:
        return a * math.tanh(a) - math.log1p(2.0 * math.sinh(a / 2.0) ** 2)
    y = math.exp(-2.0 * a)
    return math.log(2.0) - math.log1p(y) - 2.0 * a * y / (1.0 + y)


def _log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    total = math.log(math.fsum(math.exp(v - top) for v in row))
    return [v - top - total for v in row]


def _log_mean_shift(log_p: list[float], shift: list[float]) -> float:
    """Return ln E_p e^shift, relative to a class of the shift so that small shifts keep digits."""
    centre = shift[max(range(len(shift)), key=log_p.__getitem__)]
    parts = [(math.exp(v), d - centre) for v, d in zip(log_p, shift, strict=True)]
    if max(d for _, d in parts) > 0.5:
        top = max(v + d for v, (_, d) in zip(log_p, parts, strict=True))
        terms = (math.exp(v + d - top) for v, (_, d) in zip(log_p, parts, strict=True))
        return centre + top + math.log(math.fsum(terms))
    return centre + math.log1p(math.fsum(a * math.expm1(d) for a, d in parts))
