"""What certified boxes of one row say of its two policies, class by class.

Given boxes of the training logits z_i and of the drifts u_i = dz_i/T in [l_i, h_i], the log-odds of
class i move by t_i = u_i - ln E[e^u_j], j drawn from p without i, which lies between

    l_i - h_max - ln(1 - Σ w_j (1 - e^(h_j - h_max)))   and
    h_i - l_min - ln(1 + Σ w_j (e^(l_j - l_min) - 1)),

w_j the least share of class j among the others. With c_i = 1 - p_i the log ratio is
ln(q_i/p_i) = -ln(1 + c_i (e^-t_i - 1)), and every f-divergence is Σ p_i F(q_i/p_i) with a convex F
that is least at 1, so each of its terms is largest at an end. For a known p the ends of q_i are
those of the softmax over the box exactly. What is bounded pair by pair, as the drifts of
z_i - z_top, is a box too: a shift of all logits changes neither policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from kcdsl.chain.exact import excess, js_term
from kcdsl.chain.rounding import (
    RELATIVE_MARGIN,
    ChainDomainError,
    require_finite,
    require_temperature,
    round_down,
    round_up,
)

Interval = tuple[float, float]

_LARGEST_EXPONENT = 700.0
_PER_TERM = 2.0**-50
_SMALLEST = 5e-324


@dataclass(frozen=True, slots=True)
class SpecificRow:
    """Bounds of one row, as in `CertifiedRow`; `log_ratio` holds ln(q_i/p_i) of every class."""

    tv: float
    kl: float
    jeffreys: float
    chi2: float
    ess: float
    js: float
    hellinger2: float
    abs_log_ratio: float
    w_log_w: float
    log_ratio: tuple[Interval, ...]


def specific_row(
    logits: Iterable[Interval],
    drifts: Iterable[Interval],
    temperature: float | Fraction = 1,
) -> SpecificRow:
    """Bound what boxes of the training logits [V] and of the drifts [V] allow.

    A known training row is a box of points. Raises ChainDomainError for V < 2, rows that are not
    of one length, ends that are not finite or crossed, and T <= 0.
    """
    exact = require_temperature(temperature)
    z, u = _intervals(logits, exact, "logit"), _intervals(drifts, exact, "drift")
    if len(z) != len(u):
        raise ChainDomainError(f"misaligned rows: {len(z)} logits and {len(u)} drifts")
    slack = _Slack(RELATIVE_MARGIN + len(z) * _PER_TERM)
    p, rest = _policy(z, slack)
    moves = _moves(p, u, slack)
    ratios = tuple(_log_ratio(c, t, slack) for c, t in zip(rest, moves, strict=True))
    high = [end for _, end in p]

    def total(term: Callable[[float], float]) -> float:
        terms = (
            mass * max(term(low), term(top)) if mass > 0.0 else 0.0
            for mass, (low, top) in zip(high, ratios, strict=True)
        )
        return slack.up(math.fsum(terms))

    chi2 = max(total(lambda r: _square(_expm1(r))), total(lambda r: 4.0 * _square(_sinh(r / 2))))
    largest = max(max(-low, top, 0.0) for low, top in ratios)
    below = max(0.0, max(-low for low, _ in ratios))
    return SpecificRow(
        tv=min(1.0, *_variation(p, rest, moves, slack)),
        kl=total(excess),
        jeffreys=total(lambda r: r * _expm1(r)),
        chi2=chi2,
        ess=slack.down(1.0 / (1.0 + chi2)),
        js=min(0.6931471805599454, total(lambda r: (1.0 + _exp(r)) / 2 * js_term(r))),
        hellinger2=min(1.0, total(lambda r: _square(_expm1(r / 2)) / 2)),
        abs_log_ratio=largest,
        w_log_w=slack.up(below * _exp(below)),
        log_ratio=ratios,
    )


@dataclass(frozen=True, slots=True)
class _Slack:
    """Outward rounding of values >= 0 that are off by at most `relative`."""

    relative: float

    def up(self, value: float) -> float:
        return value * (1.0 + self.relative) + 4 * _SMALLEST

    def down(self, value: float) -> float:
        return max(0.0, value * (1.0 - self.relative) - 4 * _SMALLEST)


def _intervals(values: Iterable[Interval], temperature: Fraction, what: str) -> list[Interval]:
    pairs = list(values)
    low = require_finite((lo for lo, _ in pairs), f"the lower ends of the {what}s", at_least=2)
    high = require_finite((hi for _, hi in pairs), f"the upper ends of the {what}s", at_least=2)
    if any(lo > hi for lo, hi in zip(low, high, strict=True)):
        raise ChainDomainError(f"an interval of a {what} is empty")
    if temperature != 1:
        low = [round_down(Fraction(lo) / temperature) for lo in low]
        high = [round_up(Fraction(hi) / temperature) for hi in high]
        require_finite([*low, *high], f"a {what} divided by the temperature")
    return list(zip(low, high, strict=True))


def _policy(z: Sequence[Interval], slack: _Slack) -> tuple[list[Interval], list[Interval]]:
    """Return the ranges of p_i and of 1 - p_i."""
    top = max(hi for _, hi in z)
    most = _others([slack.up(_exp(_above(hi - top))) for _, hi in z])
    least = _others([slack.down(_exp(_below(lo - top))) for lo, _ in z])
    p, rest = [], []
    for (lo, hi), more, less in zip(z, most, least, strict=True):
        high = slack.up(slack.up(more) * slack.up(_exp(_above(top - lo))))
        capped = min(_below(top - hi), _LARGEST_EXPONENT)
        low = slack.down(slack.down(less) * slack.down(_exp(capped)))
        p.append((slack.down(1.0 / (1.0 + high)), min(1.0, slack.up(1.0 / (1.0 + low)))))
        ratio = 1.0 if math.isinf(high) else high / (1.0 + high)
        rest.append((slack.down(low / (1.0 + low)), min(1.0, slack.up(ratio))))
    return p, rest


def _moves(p: Sequence[Interval], u: Sequence[Interval], slack: _Slack) -> list[Interval]:
    """Return the range of t_i, by how much the log-odds of every class may move."""
    least, most = min(lo for lo, _ in u), max(hi for _, hi in u)
    rises, falls = [], []
    for (mass, _), (lo, hi) in zip(p, u, strict=True):
        rise = min(max(0.0, _below(lo - least)), _LARGEST_EXPONENT)
        rises.append(slack.down(mass * math.expm1(rise)))
        falls.append(slack.down(mass * -math.expm1(min(0.0, _above(hi - most)))))
    shares = _others([high for _, high in p])
    found = []
    for (lo, hi), share, rise, fall in zip(u, shares, _others(rises), _others(falls), strict=True):
        others = slack.up(share)
        up = slack.down(math.log1p(slack.down(rise / others)))
        down = slack.down(-math.log1p(-min(slack.down(fall / others), 1.0 - 2.0**-53)))
        found.append((_below(_below(lo - most) + down), _above(_above(hi - least) - up)))
    return found


def _log_ratio(rest: Interval, t: Interval, slack: _Slack) -> Interval:
    """Return the range of ln(q/p), which grows with t and, in size, with c = 1 - p."""
    (c_low, c_high), (low, high) = rest, t
    below = -_fall(c_high, -low, slack.up) if low <= 0.0 else _rise(c_low, low, slack.down)
    above = _rise(c_high, high, slack.up) if high >= 0.0 else -_fall(c_low, -high, slack.down)
    return below, above


def _fall(c: float, by: float, outward: Callable[[float], float]) -> float:
    """Return -ln(q/p) for t = -by <= 0, that is ln(1 + c (e^by - 1)); at most by."""
    return min(by, outward(math.log1p(outward(c * _expm1(by)))))


def _rise(c: float, by: float, outward: Callable[[float], float]) -> float:
    """Return ln(q/p) for t = by >= 0, that is -ln(1 - c (1 - e^-by)); at most by."""
    lost = outward(c * -math.expm1(-by))
    return by if lost >= 1.0 else min(by, outward(-math.log1p(-lost)))


def _variation(
    p: Sequence[Interval], rest: Sequence[Interval], moves: Sequence[Interval], slack: _Slack
) -> tuple[float, float]:
    """Return bounds of Σ max(q - p, 0) and of Σ max(p - q, 0), which are the same number."""
    gains = (_gain(a, c, max(0.0, t)) for a, c, (_, t) in zip(p, rest, moves, strict=True))
    losses = (_gain(c, a, max(0.0, -t)) for a, c, (t, _) in zip(p, rest, moves, strict=True))
    return slack.up(math.fsum(gains)), slack.up(math.fsum(losses))


def _gain(p: Interval, rest: Interval, t: float) -> float:
    """Return the largest p (1 - p) K / (1 + p K), K = e^t - 1, for t >= 0 and p in its range."""
    if t == 0.0:
        return 0.0
    peak = 1.0 / (1.0 + _exp(t / 2.0))
    if p[0] <= peak * (1.0 + 1e-9) and p[1] >= peak * (1.0 - 1e-9):
        return math.tanh(t / 4.0)
    k = _expm1(t)
    if math.isinf(k):
        return rest[1]
    ends = ((p[0], rest[1]), (p[1], rest[0]))
    return max(min(a, 1.0) * min(c, 1.0) * (k / (1.0 + a * k)) for a, c in ends)


def _others(values: Sequence[float]) -> list[float]:
    """Return for every place the sum of the values >= 0 at all others, without a subtraction."""
    before = [0.0, *accumulate(values[:-1])]
    after = [*reversed([0.0, *accumulate(reversed(values[1:]))])]
    return [left + right for left, right in zip(before, after, strict=True)]


def _above(value: float) -> float:
    return math.nextafter(value, math.inf)


def _below(value: float) -> float:
    return math.nextafter(value, -math.inf)


def _square(value: float) -> float:
    return value * value


def _exp(x: float) -> float:
    return math.inf if x > _LARGEST_EXPONENT else math.exp(x)


def _expm1(x: float) -> float:
    return math.inf if x > _LARGEST_EXPONENT else math.expm1(x)


def _sinh(x: float) -> float:
    return math.copysign(math.inf, x) if abs(x) > _LARGEST_EXPONENT else math.sinh(x)
