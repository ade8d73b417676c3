"""The worst case over a box of drifts for a known training distribution p.

With |u_i| <= eps after the best common shift (eps = s/2, a common shift changes no probability) and
K = e^(2 eps) - 1, the extremes lie at vertices: +eps on a set A of classes, -eps elsewhere, and
depend on pi = p(A) alone:

    TV = pi (1 - pi) K / (1 + pi K)                       largest at pi* = 1/(1 + e^eps)
    KL(p||q) = ln(1 + pi K) - 2 eps pi                    largest at pi# = 1/(2 eps) - 1/K

If 1 - p1 lies below the peak (p1 the largest probability: the *confident regime*), no reachable pi
comes closer to the peak than 1 - p1, which gives a closed form. Outside this regime the largest
value over A is a subset-sum problem; a scan over sorted prefixes finds a lower bound of it only, so
here the value that holds for every p is returned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kcdsl.chain import bounds
from kcdsl.chain.exact import excess
from kcdsl.chain.rounding import (
    ChainDomainError,
    outward_up,
    require_finite,
    require_nonnegative,
)

Rule = Literal["generic", "confident", "classes"]
_LARGEST_EPS = 300.0
_NORMALISATION_SLACK = 1e-6
_PEAK_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class BoxBound:
    """A bound and the rule it comes from.

    "generic" holds for every p, "confident" for this p; "classes" goes class by class (specific.py)
    """

    value: float
    rule: Rule


def bound_box(name: str, p: Iterable[float], eps: float) -> BoxBound:
    """Bound "tv", "kl" (KL(p||q)) or any name of `bounds.NAMES` for the distribution p [V].

    Raises ChainDomainError for V < 2, entries that are NaN, infinite or negative, and sums that
    are not 1 to 1e-6. `eps` is a bound on |u_i|, or s/2 where only the span is bounded.
    """
    row = require_finite(p, "p", at_least=2)
    if min(row) < 0.0:
        raise ChainDomainError(f"p has a negative entry, {min(row)!r}")
    total = math.fsum(row)
    if abs(total - 1.0) > _NORMALISATION_SLACK:
        raise ChainDomainError(f"p sums to {total!r}, not to 1")
    top = row.index(max(row))
    rest = max(math.fsum(row[:top] + row[top + 1 :]), 1.0 - row[top])
    return bound_box_from_rest(name, min(1.0, outward_up(max(0.0, rest))), eps)


def bound_box_from_rest(name: str, rest: float, eps: float) -> BoxBound:
    """As `bound_box`, from an upper bound on `rest` = 1 - p1 alone.

    This is the form for a p that is known through intervals: take the worst end of p1.
    """
    rest = require_nonnegative(rest, "1 - p1")
    if rest > 1.0:
        raise ChainDomainError(f"1 - p1 is {rest!r}, above 1")
    eps = require_nonnegative(eps, "eps", finite=False)
    generic = BoxBound(bounds.bound(name, 2.0 * eps), "generic")
    if eps == 0.0 or eps > _LARGEST_EPS:
        return generic
    specific = _confident(name, rest, eps)
    if specific is None or specific >= generic.value:
        return generic
    return BoxBound(specific, "confident")


def _confident(name: str, rest: float, eps: float) -> float | None:
    """Return the closed form, or None where p is outside the confident regime of this name."""
    k = math.expm1(2.0 * eps)
    match name:
        case "tv" if rest < (1.0 - _PEAK_SLACK) / (1.0 + math.exp(eps)):
            return outward_up(rest * (1.0 - rest) * k / (1.0 + rest * k))
        case "kl" if rest < (1.0 - _PEAK_SLACK) * _kl_peak(eps):
            log_moment = math.log1p(rest * k)
            inside = rest * excess(2.0 * eps - log_moment)
            return outward_up(inside + (1.0 - rest) * excess(-log_moment))
        case _:
            return None


def _kl_peak(eps: float) -> float:
    """Return pi# = 1/(2 eps) - 1/(e^(2 eps) - 1), from below where the subtraction cancels."""
    x = 2.0 * eps
    if x < 0.1:
        return 0.5 - x / 12.0
    return 1.0 / x - 1.0 / math.expm1(x)
