"""Estimates with limits, the confidence of a limit, and multiplicity of verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

_ROUNDED = 1e-6
"""Largest excess of a value over its range, relative to 1 or to itself, by float32 rounding."""

_MANY = 64
"""Number of values below which `math.fsum` sums them directly."""

CONFIDENCE = 0.95
"""The confidence of each limit, as reports state it."""


@dataclass(frozen=True, slots=True)
class Confidence:
    """The confidence of one limit: it fails with a probability of at most `error`.

    `anytime`: the probability that it fails at any look at growing data is at most `error`;
    otherwise the number of units is fixed in advance.
    """

    error: Fraction = Fraction(1, 20)
    anytime: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.error < 1:
            raise ValueError(f"an error lies between 0 and 1, not {self.error}")

    @property
    def share(self) -> float:
        """Return 1 - error."""
        return float(1 - self.error)

    def divided(self, parts: int | Fraction) -> Confidence:
        """Return the confidence of each of `parts` limits of which none may fail."""
        return Confidence(self.error / parts, self.anytime)


ONE_LOOK = Confidence()
"""95 % for a number of units that was fixed in advance."""


def confidence_over(looks: int | None) -> Confidence:
    """Return the confidence of one limit at one of `looks` looks, 95 % over all of them together.

    None stands for any number of looks.
    """
    return Confidence(ONE_LOOK.error, anytime=True) if looks is None else ONE_LOOK.divided(looks)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic over n units; `low` and `high` are None if the sample supports no limit.

    `exact` is the value before rounding to float64 if it is a quotient: a mean, a share.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    method: str
    exact: Fraction | None = None
    weight: Fraction = Fraction(1)
    """The divisor of a mean: the number of its token values."""

    @property
    def rational(self) -> Fraction:
        """Return the exact value that is compared with a threshold."""
        return Fraction(self.value) if self.exact is None else self.exact


@dataclass(frozen=True, slots=True)
class Exceedance:
    """k of n units beyond the threshold, with one-sided limits of the rate."""

    k: int
    n: int
    low: float
    high: float

    @property
    def rate(self) -> Fraction:
        """Return k / n exactly."""
        return Fraction(self.k, self.n)


class NotMeasurable(ValueError):
    """The values support no statement: there are none, or one of them is not finite."""


def check_values(values: Sequence[float] | Array, what: str) -> Array:
    """Return the values as float64; raise `NotMeasurable` for none, and if one is not finite."""
    array = np.asarray(values, dtype=np.float64)
    check_finite(int(np.count_nonzero(~np.isfinite(array))), int(array.size), what)
    return array


def beyond_range(values: Array, bounds: tuple[float | None, float | None]) -> NDArray[np.bool_]:
    """Return the mask of values outside the range of single values by more than float32 rounding.

    NaN is left to `check_values`.
    """
    low, high = bounds
    if values.size and _inside(values, low, high):
        return np.zeros(values.shape, dtype=np.bool_)
    slack = np.where(np.isfinite(values), _ROUNDED * np.maximum(1.0, np.abs(values)), 0.0)
    found = np.zeros(values.shape, dtype=np.bool_)
    with np.errstate(invalid="ignore"):
        if low is not None:
            found |= values < low - slack
        if high is not None:
            found |= values > high + slack
    return found


def _inside(values: Array, low: float | None, high: float | None) -> bool:
    """Return whether all values lie in the range; NaN does not."""
    above = low is None or bool(values.min() >= low)
    return above and (high is None or bool(values.max() <= high))


def check_finite(bad: int, n: int, what: str) -> None:
    """Raise `NotMeasurable` for no values, and if some of them are not finite."""
    if n == 0:
        raise NotMeasurable(f"{what}: there are no values")
    if bad:
        raise NotMeasurable(f"{what}: {bad} of {n} values are not finite")


def rounded_sum(values: Array) -> float:
    """Return the correctly rounded sum of finite values; infinite beyond the largest float64."""
    parts = _exact_parts(np.asarray(values, dtype=np.float64).ravel())
    try:
        return math.fsum(values if parts is None else parts)
    except OverflowError:  # possibly of a partial sum only
        exact = sum(map(Fraction, values.tolist()), Fraction(0))
        try:
            return float(exact)
        except OverflowError:
            return math.inf if exact > 0 else -math.inf


def _exact_parts(values: Array) -> list[float] | None:
    """Return a few numbers with exactly the sum of many values; None for few values, or if one is
    too large or not finite.

    Each pass splits off the leading bits of all values, on one grid so coarse that their sum is
    exact in any order (Rump, Ogita and Oishi 2008, extraction of vectors).
    """
    if values.size < _MANY:
        return None
    largest = float(max(values.max(), -values.min()))
    room = math.ceil(math.log2(values.size + 2))
    if not largest < 2.0 ** (1000 - room):
        return None
    parts, rest = [], values
    while largest > 0:
        grid = math.ldexp(1.0, math.frexp(largest)[1] + room)
        leading = (rest + grid) - grid
        rest = rest - leading
        parts.append(float(leading.sum()))
        largest = float(max(rest.max(), -rest.min()))
    return parts


def column(values: ArrayLike, name: str, *, fewest: int = 1) -> Array:
    """Return values as a float64 array of one dimension.

    Raises NotMeasurable for other shapes, fewer than `fewest` values, and NaN or infinities.
    """
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1:
        raise NotMeasurable(f"{name} must be one value per row, not of shape {found.shape}")
    if found.size < fewest:
        raise NotMeasurable(f"{name}: {found.size} values, needs at least {fewest}")
    bad = int(np.count_nonzero(~np.isfinite(found)))
    if bad:
        raise NotMeasurable(f"{name}: {bad} of {found.size} values are not finite")
    return found


def columns(fewest: int = 1, /, **values: ArrayLike) -> tuple[Array, ...]:
    """Return several columns of one length, in the order given; raises NotMeasurable otherwise."""
    found = tuple(column(v, name, fewest=fewest) for name, v in values.items())
    sizes = {name: v.size for name, v in zip(values, found, strict=True)}
    if len(set(sizes.values())) > 1:
        raise NotMeasurable(f"columns of different lengths: {sizes}")
    return found


def indicators(values: ArrayLike, name: str) -> Array:
    """Return a column of zeros and ones; raises NotMeasurable for any other value."""
    found = column(values, name)
    if not bool(np.isin(found, (0.0, 1.0)).all()):
        raise NotMeasurable(f"{name} must hold 0 or 1 only")
    return found


def check_counts(k: int, n: int) -> None:
    """Raise ValueError unless k of n units is a count."""
    if not 0 <= k <= n:
        raise ValueError(f"{k} of {n}")


def check_rate(rate: Fraction) -> None:
    """Raise ValueError unless a rate can be tested: 0 needs a proof or a census, 1 no evidence."""
    if not 0 < rate < 1:
        raise ValueError(f"a rate that a sample can show lies between 0 and 1, not {rate}")


def holm(
    family: int,
    error: Fraction,
    candidates: Iterable[int],
    rejected: Callable[[int, Fraction], bool],
) -> tuple[frozenset[int], Fraction]:
    """Return the rejected candidates among `family` hypotheses, and the last level used.

    "Promote if all hold" is an intersection of claims: a false one is accepted with at most its own
    error, so passes need no correction (Berger 1982). "Violated if any clause is" is a union:
    violations are corrected by Holm's method, which bounds the probability of any false one under
    any dependence.

    `rejected(i, level)` returns whether i is rejected at an error level by itself, monotone in the
    level. It is called for candidates only: those rejected at `error`.
    """
    left, found = set(candidates), set[int]()
    if family < len(left):
        raise ValueError(f"{len(left)} candidates in a family of {family}")
    level = error / max(1, family)
    while left:
        level = error / (family - len(found))
        new = {i for i in sorted(left) if rejected(i, level)}
        if not new:
            break
        left -= new
        found |= new
    return frozenset(found), level


# --- interval arithmetic -------------------------------------------------------------------------


Outcome = Literal["held", "violated", "unknown"]


@dataclass(frozen=True, slots=True)
class EstimateInterval:
    """A value in [low, high]; None is an infinite limit.

    Fractions hold every float64 exactly, so a comparison with a threshold never rounds.
    """

    value: Fraction
    low: Fraction | None
    high: Fraction | None

    @staticmethod
    def point(value: Fraction) -> EstimateInterval:
        """Return the interval of a constant."""
        return EstimateInterval(value, value, value)

    @staticmethod
    def of(estimate: Estimate) -> EstimateInterval:
        """Return the interval of an estimate."""
        return EstimateInterval(
            estimate.rational, _fraction(estimate.low), _fraction(estimate.high)
        )

    def as_point(self) -> EstimateInterval:
        """Return the value alone, for statements about the measured units only."""
        return EstimateInterval.point(self.value)

    def negate(self) -> EstimateInterval:
        """Return the interval of the opposite number."""
        return EstimateInterval(
            -self.value,
            None if self.high is None else -self.high,
            None if self.low is None else -self.low,
        )

    def magnitude(self, stricter: EstimateInterval) -> EstimateInterval:
        """Return the interval of the absolute value.

        `stricter` is the same number with limits at half the error, since both limits are tests
        whether the number differs from 0. The upper limit needs no correction: it fails only if the
        limit on the side of the number does.
        """
        low = Fraction(0)
        if stricter.low is not None and stricter.low > 0:
            low = stricter.low
        if stricter.high is not None and stricter.high < 0:
            low = -stricter.high
        ends = [end for end in (self.low, self.high) if end is not None]
        if self.low is not None and self.low >= 0:
            high = self.high
        elif self.high is not None and self.high <= 0:
            high = None if self.low is None else -self.low
        else:
            high = max(map(abs, ends)) if len(ends) == 2 else None
        return EstimateInterval(abs(self.value), low, high)

    def combine(self, op: str, other: EstimateInterval) -> EstimateInterval:
        """Return `self op other`; raises `NotMeasurable` for a division by a value that may be
        zero."""
        match op:
            case "+":
                return EstimateInterval(
                    self.value + other.value,
                    _sum(self.low, other.low),
                    _sum(self.high, other.high),
                )
            case "-":
                return self.combine("+", other.negate())
            case "*":
                return self._times(other)
            case "/":
                return self._times(other._inverse())
        raise ValueError(f"unknown operation {op!r}")

    def _times(self, other: EstimateInterval) -> EstimateInterval:
        corners = [_product(a, b) for a in self._ends() for b in other._ends()]
        low, high = min(corners), max(corners)
        return EstimateInterval(self.value * other.value, _end(low), _end(high))

    def _ends(self) -> tuple[Fraction | float, Fraction | float]:
        """Return both limits, infinite if there is none."""
        return (
            -math.inf if self.low is None else self.low,
            math.inf if self.high is None else self.high,
        )

    def _inverse(self) -> EstimateInterval:
        if self.value == 0:
            raise NotMeasurable("division by zero")
        if self.low is not None and self.low > 0:
            least = Fraction(0) if self.high is None else 1 / self.high
            return EstimateInterval(1 / self.value, least, 1 / self.low)
        if self.high is not None and self.high < 0:
            return self.negate()._inverse().negate()
        return EstimateInterval(1 / self.value, None, None)


def _product(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    """Return a product of limits; 0 times any number, however large, is 0."""
    if a == 0 or b == 0:
        return Fraction(0)
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    return math.inf if (a > 0) == (b > 0) else -math.inf


def _end(limit: Fraction | float) -> Fraction | None:
    return limit if isinstance(limit, Fraction) else None


def compare(left: EstimateInterval, op: str, right: EstimateInterval) -> Outcome:
    """Compare two intervals: held or violated only if every pair of values agrees."""
    match op:
        case "<=":
            return _order(left, right, strict=False)
        case "<":
            return _order(left, right, strict=True)
        case ">=":
            return _order(right, left, strict=False)
        case ">":
            return _order(right, left, strict=True)
        case "==":
            return _equal(left, right)
    raise ValueError(f"unknown comparison {op!r}")


def _order(small: EstimateInterval, large: EstimateInterval, *, strict: bool) -> Outcome:
    if _below(small.high, large.low) or (not strict and _same(small.high, large.low)):
        return "held"
    if _below(large.high, small.low) or (strict and _same(large.high, small.low)):
        return "violated"
    return "unknown"


def _below(a: Fraction | None, b: Fraction | None) -> bool:
    return a is not None and b is not None and a < b


def _same(a: Fraction | None, b: Fraction | None) -> bool:
    return a is not None and a == b


def _equal(left: EstimateInterval, right: EstimateInterval) -> Outcome:
    below, above = _order(left, right, strict=False), _order(right, left, strict=False)
    if "violated" in (below, above):
        return "violated"
    return "held" if below == above == "held" else "unknown"


def _sum(a: Fraction | None, b: Fraction | None) -> Fraction | None:
    return None if a is None or b is None else a + b


def _fraction(limit: float | None) -> Fraction | None:
    return None if limit is None else Fraction(limit)
