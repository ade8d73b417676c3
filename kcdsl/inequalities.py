"""Inequalities from the drift of the logits to distributions, rewards, ratios and gradients.

With u = (z_inf - z_train)/T, **s = span(u) = max u - min u**, p = softmax(z_train/T) and
q = softmax(z_inf/T), every function of s below bounds a quantity of the pair (p, q) for all pairs
whose span is at most s. All logarithms are natural. The values are rounded outward (relative
1e-11), are monotone in s and sharp: two classes attain them. Derivations:
docs/proofs/bound-chain.md.

Domain: s >= 0; s = +inf gives the limit; NaN, negative and non-numbers raise DomainError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction

_LN2_UP = 0.6931471805599454
_SQRT2_UP = Fraction(math.isqrt(2 * 10**60) + 1, 10**30)
_KL_SERIES_BELOW = 1.0
# Bernoulli numbers B_2n: kl(s) = sum over n of B_2n (1 + 1/(2n)) s^(2n) / (2n)!, |s| < 2 pi.
_BERNOULLI = (
    Fraction(1, 6),
    Fraction(-1, 30),
    Fraction(1, 42),
    Fraction(-1, 30),
    Fraction(5, 66),
    Fraction(-691, 2730),
    Fraction(7, 6),
    Fraction(-3617, 510),
    Fraction(43867, 798),
)
_KL_COEFFICIENTS = tuple(
    float(b * (1 + Fraction(1, 2 * n)) / math.factorial(2 * n))
    for n, b in enumerate(_BERNOULLI, start=1)
)
RELATIVE_MARGIN = 1e-11
"""Covers the error of a few library calls (each below 2^-50) with a large margin."""
_SMALLEST = 5e-324
_GRID_BITS = 38


class DomainError(ValueError):
    """An argument outside the domain: NaN, infinite or negative, or no temperature above 0."""


# --- from a norm of the drift to s ---------------------------------------------------------------


def span_from_norm(kind: str, bound: float, temperature: float | Fraction = 1) -> float:
    """Return s for a bound on a norm of dz: "span" b/T, "inf" 2b/T, "2" sqrt(2) b/T, rounded up.

    For "2" the norm may be that of dz or of dz minus its mean (never larger).
    """
    exact = Fraction(require_nonnegative(bound, "the bound of the drift"))
    match kind:
        case "span":
            factor = Fraction(1)
        case "inf":
            factor = Fraction(2)
        case "2":
            factor = _SQRT2_UP
        case _:
            raise DomainError(f"no conversion from the norm {kind!r}; known: inf, 2, span")
    return round_up(factor * exact / require_temperature(temperature))


def span_from_intervals(
    intervals: Iterable[tuple[float, float]], temperature: float | Fraction = 1
) -> float:
    """Return (max hi - min lo)/T for dz_i in [lo_i, hi_i], rounded up."""
    exact_temperature = require_temperature(temperature)
    pairs = list(intervals)
    low = require_finite((lo for lo, _ in pairs), "the lower ends")
    high = require_finite((hi for _, hi in pairs), "the upper ends")
    for index, (lo, hi) in enumerate(zip(low, high, strict=True)):
        if lo > hi:
            raise DomainError(f"interval {index} is empty: [{lo!r}, {hi!r}]")
    return round_up((Fraction(max(high)) - Fraction(min(low))) / exact_temperature)


# --- bounds of the distributions -----------------------------------------------------------------


def tv(s: float) -> float:
    """Bound the total variation: tanh(s/4)."""
    s = _argument(s)
    return 0.0 if s == 0.0 else min(1.0, outward_up(_tanh_quarter(onto_grid(s))))


def kl(s: float) -> float:
    """Bound KL(p||q) and KL(q||p): s/(e^s - 1) - 1 + ln((e^s - 1)/s), at most s^2/8."""
    s = _argument(s)
    if s == 0.0 or math.isinf(s):
        return s
    s = onto_grid(s)
    square = s * s
    if s < _KL_SERIES_BELOW:
        value = 0.0
        for coefficient in reversed(_KL_COEFFICIENTS):
            value = coefficient + square * value
        value *= square
    else:
        decayed = math.exp(-s)
        value = s * decayed / -math.expm1(-s) - 1.0 + s + math.log1p(-decayed) - math.log(s)
    return outward_up(min(value, square / 8.0))


def jeffreys(s: float) -> float:
    """Bound KL(p||q) + KL(q||p): s tanh(s/4). Less than twice the bound of one direction."""
    s = _argument(s)
    if s == 0.0 or math.isinf(s):
        return s
    s = onto_grid(s)
    return outward_up(s * _tanh_quarter(s))


def chi2(s: float) -> float:
    """Bound chi^2(p||q) and chi^2(q||p): sinh(s/2)^2; +inf where it overflows."""
    s = _argument(s)
    if s == 0.0 or math.isinf(s):
        return s
    try:
        root = math.sinh(onto_grid(s) / 2.0)
    except OverflowError:
        return math.inf
    return outward_up(root * root)


def ess(s: float) -> float:
    """Bound ESS/n of importance weights **from below**: sech(s/2)^2, rounded down."""
    s = _argument(s)
    if s == 0.0:
        return 1.0
    if math.isinf(s):
        return 0.0
    try:
        return outward_down(1.0 / math.cosh(onto_grid(s) / 2.0) ** 2)
    except OverflowError:
        return 0.0


def hellinger2(s: float) -> float:
    """Bound the squared Hellinger distance 1 - sum sqrt(pq): 1 - sech(s/4)."""
    s = _argument(s)
    if s == 0.0:
        return 0.0
    a = onto_grid(s) / 4.0
    if a > 700.0:
        return 1.0
    value = 2.0 * math.sinh(a / 2.0) ** 2 / math.cosh(a) if a < 2.0 else 1.0 - 1.0 / math.cosh(a)
    return min(1.0, outward_up(value))


def js(s: float) -> float:
    """Bound the Jensen-Shannon divergence: (s/4) tanh(s/4) - ln cosh(s/4), at most ln 2."""
    s = _argument(s)
    if s == 0.0:
        return 0.0
    a = onto_grid(s) / 4.0
    if a < 1.0:
        value = a * math.tanh(a) - math.log1p(2.0 * math.sinh(a / 2.0) ** 2)
    else:
        y = math.exp(-2.0 * a)
        value = math.log(2.0) - math.log1p(y) - (2.0 * a * y / (1.0 + y) if y > 0.0 else 0.0)
    return min(_LN2_UP, outward_up(value))


def abs_log_ratio(s: float) -> float:
    """Bound |ln(p_y/q_y)| of every class y: s itself."""
    return _argument(s)


def w_log_w(s: float) -> float:
    """Bound w ln w of every class, w = p_y/q_y: s e^s; +inf where it overflows.

    A mean over sampled classes is a mean of such values, so it stays below this bound, though not
    below `kl(s)`, which bounds the expectation only.
    """
    s = _argument(s)
    if s == 0.0 or math.isinf(s):
        return s
    try:
        return outward_up(s * math.exp(onto_grid(s)))
    except OverflowError:
        return math.inf


_BOUNDS: dict[str, Callable[[float], float]] = {
    "tv": tv,
    "kl": kl,
    "jeffreys": jeffreys,
    "chi2": chi2,
    "ess": ess,
    "hellinger2": hellinger2,
    "js": js,
    "abs_log_ratio": abs_log_ratio,
    "w_log_w": w_log_w,
}
NAMES: tuple[str, ...] = tuple(_BOUNDS)
"""The names that `bound` knows. All are upper bounds but `ess`, which is a lower one."""


def bound(name: str, s: float) -> float:
    """Return the bound of one quantity at span s (see NAMES)."""
    function = _BOUNDS.get(name)
    if function is None:
        raise DomainError(f"no bound of this name: {name!r}; known: {', '.join(NAMES)}")
    return function(s)


# --- rewards, gradients, weights -----------------------------------------------------------------


def reward(osc: float, s: float) -> float:
    """Bound |E_p R - E_q R| for one next token: osc(R) tanh(s/4), osc(R) = max R - min R."""
    return _scaled(require_nonnegative(osc, "osc(R)"), tv(s))


def gradient_bias(advantage_max: float, score_norm_max: float, s: float) -> float:
    """Bound the norm of the policy-gradient bias if the importance ratio is left out.

    `||E_q[A g] - E_q[w A g]|| <= A_max G E_q|w - 1| = 2 A_max G TV <= 2 A_max G tanh(s/4)` for
    |A| <= A_max and ||g|| <= G, g the score of the training policy.
    """
    a = require_nonnegative(advantage_max, "the largest advantage")
    g = require_nonnegative(score_norm_max, "the largest score norm")
    return _scaled(_scaled(a, g), abs_weight_error(s))


def abs_weight_error(s: float) -> float:
    """Bound E_q|w - 1| = 2 TV: 2 tanh(s/4)."""
    return 2.0 * tv(s)


def bias_free_clip(s: float) -> float:
    """Return the least clip width c for which clip(w, 1-c, 1+c) changes no weight: e^s - 1, rounded
    up."""
    s = _argument(s)
    if s == 0.0 or math.isinf(s):
        return s
    try:
        return outward_up(math.expm1(onto_grid(s)))
    except OverflowError:
        return math.inf


def excess(d: float) -> float:
    """Return e^d - 1 - d >= 0 without cancellation; +inf where it overflows."""
    if abs(d) >= 0.1:
        return (math.inf if d > 700.0 else math.expm1(d)) - d
    tail = 0.0  # d/2! + d^2/3! + ... by Horner's rule
    for n in range(12, 1, -1):
        tail = (1.0 + tail) * d / n
    return tail * d


def _argument(s: float) -> float:
    return require_nonnegative(s, "s", finite=False)


def _scaled(factor: float, value: float) -> float:
    """Return an upper bound of the product of two numbers >= 0."""
    if factor == 0.0 or value == 0.0:
        return 0.0
    return math.nextafter(factor * value, math.inf)


def _tanh_quarter(s: float) -> float:
    """Return tanh(s/4); above s = 4 in the form whose floats are monotone up to saturation."""
    if s < 4.0:
        return math.tanh(s / 4.0)
    return 1.0 if s > 1400.0 else 1.0 - 2.0 / (math.exp(s / 2.0) + 1.0)


# --- directed rounding and checks of arguments ----------------------------------------------------


def round_up(value: Fraction) -> float:
    """Return the least float that is not below an exact number; +inf above the largest float."""
    try:
        nearest = float(value)
    except OverflowError:
        return math.inf if value > 0 else -1.7976931348623157e308
    return nearest if Fraction(nearest) >= value else math.nextafter(nearest, math.inf)


def round_down(value: Fraction) -> float:
    """Return the largest float that is not above an exact number."""
    return -round_up(-value)


def outward_up(value: float) -> float:
    """Enlarge a computed value >= 0 beyond the error of its computation."""
    return value * (1.0 + RELATIVE_MARGIN) + 4 * _SMALLEST


def outward_down(value: float) -> float:
    """Lower a computed value >= 0 beyond the error of its computation, not below 0."""
    return max(0.0, value * (1.0 - RELATIVE_MARGIN) - 4 * _SMALLEST)


def onto_grid(s: float) -> float:
    """Round s >= 0 up to 38 significant bits.

    Neighbours on this grid are so far apart that evaluation errors cannot reverse the order of two
    values, which makes the computed bounds monotone.
    """
    if s == 0.0 or s > 1e300:
        return s
    mantissa, exponent = math.frexp(s)
    return math.ldexp(math.ceil(math.ldexp(mantissa, _GRID_BITS)), exponent - _GRID_BITS)


def require_nonnegative(value: float, what: str, *, finite: bool = True) -> float:
    """Return the value as a float >= 0; raise DomainError for anything else."""
    number = _number(value, what)
    if math.isnan(number) or number < 0.0 or (finite and math.isinf(number)):
        raise DomainError(f"{what} is {number!r}; it must be a number >= 0")
    return number + 0.0


def require_finite(values: Iterable[float], what: str) -> list[float]:
    """Return two or more values as finite floats; raise DomainError for fewer, NaN or infinity."""
    numbers = [_number(value, what) for value in values]
    if len(numbers) < 2:
        raise DomainError(f"{what}: {len(numbers)} values, at least 2 are needed")
    for index, number in enumerate(numbers):
        if not math.isfinite(number):
            raise DomainError(f"{what}[{index}] is {number!r}")
    return numbers


def require_temperature(temperature: float | Fraction) -> Fraction:
    """Return the exact temperature > 0; at T = 0 (greedy decoding) only rank stability holds."""
    number = _number(temperature, "the temperature")
    if not math.isfinite(number) or temperature <= 0:
        raise DomainError(f"the temperature is {temperature!s}; T > 0 is needed")
    return Fraction(temperature)


def _number(value: float | Fraction, what: str) -> float:
    if isinstance(value, (bool, str, bytes)):
        raise DomainError(f"{what} is {value!r}, not a number")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise DomainError(f"{what} is {value!r}, not a finite number") from error
