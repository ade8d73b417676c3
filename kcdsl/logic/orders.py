"""Inequalities between metrics of one token, with reasons.

Edges are linear: *small* <= factor times *large* for every token. Products along paths are bounds
too, so `least_factor` searches all paths. Curves are nonlinear: *small* <= f(bound) where
*large* <= bound, f monotone. Sources: norms of one row of logits; docs/proofs/bound-chain.md;
Pinsker; J. Lin, Divergence measures based on the Shannon entropy, IEEE Trans. Inf. Theory 37
(1991).

p and q are the two distributions of the next token, L = max |ln p/q|, s = span(dz)/T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from kcdsl import inequalities
from kcdsl.inequalities import round_up
from kcdsl.metrics import LN_2_UP

SQRT2_UP = Fraction(14142136, 10**7)
"""An upper bound of the square root of two."""
MAGNITUDE_OF_LOG_RATIO = "abs(log_ratio)"
"""The node of |ln w| of the sampled token."""

_ONE = Fraction(1)


class Edge(NamedTuple):
    """small <= factor * large for every token."""

    small: str
    factor: Fraction
    large: str
    why: str


EDGES: tuple[Edge, ...] = (
    Edge("logit_linf", _ONE, "logit_l2", "no component is larger than the Euclidean norm"),
    Edge("logit_l2_centered", _ONE, "logit_l2", "removing the mean never lengthens a vector"),
    Edge("logit_span", Fraction(2), "logit_linf", "two components differ by at most twice both"),
    Edge("logit_span", SQRT2_UP, "logit_l2_centered", "(x - y)^2 <= 2 (x^2 + y^2)"),
    Edge("hidden_linf", _ONE, "hidden_l2", "no component is larger than the Euclidean norm"),
    Edge("kl", _ONE, "jeffreys", "jeffreys is the sum of both divergences"),
    Edge("kl_infer_train", _ONE, "jeffreys", "jeffreys is the sum of both divergences"),
    Edge("js", Fraction(1, 4), "jeffreys", "JS <= J/4 (Lin 1991)"),
    Edge("js", LN_2_UP, "tv", "JS <= ln 2 TV (Lin 1991)"),
    Edge("hellinger2", _ONE, "tv", "H^2 <= TV"),
    Edge("hellinger2", Fraction(1, 2), "kl", "KL >= -2 ln(1 - H^2) >= 2 H^2"),
    Edge("hellinger2", Fraction(1, 2), "kl_infer_train", "KL >= -2 ln(1 - H^2) >= 2 H^2"),
    Edge("hellinger2", Fraction(1, 4), "jeffreys", "KL >= 2 H^2 in both directions"),
    Edge("kl", _ONE, "log_ratio_linf", "KL is a mean of ln p/q"),
    Edge("kl_infer_train", _ONE, "log_ratio_linf", "KL is a mean of ln q/p"),
    Edge("jeffreys", Fraction(2), "log_ratio_linf", "both divergences are means of ln ratios"),
    Edge("tv", Fraction(1, 2), "log_ratio_linf", "TV <= tanh(L/2) for |ln p/q| <= L"),
    Edge(MAGNITUDE_OF_LOG_RATIO, _ONE, "log_ratio_linf", "the sampled token is one of all"),
    Edge("k1", _ONE, MAGNITUDE_OF_LOG_RATIO, "k1 is -ln w"),
)
"""Edges that hold at every temperature."""

TEMPERED: tuple[Edge, ...] = (
    Edge("tv", Fraction(1, 4), "logit_span", "TV <= tanh(s/4) <= s/4, s = span/T"),
    Edge("log_ratio_linf", _ONE, "logit_span", "|ln w| <= s, s = span/T"),
)
"""Edges at the temperature T, whose factors must be divided by T."""
UNTEMPERED: tuple[Edge, ...] = (
    Edge("logit_span", Fraction(2), "log_ratio_linf", "span/T = span(ln p/q) <= 2 max |ln p/q|"),
)
"""Edges at the temperature T, whose factors must be multiplied by T."""


class Path(NamedTuple):
    """small <= factor * large, with the reasons of its edges."""

    factor: Fraction
    reasons: tuple[str, ...]


def least_factor(small: str, large: str, temperature: Fraction | None) -> Path | None:
    """Return the smallest known factor with small <= factor * large for every token.

    `temperature` relates logits to distributions; None: no relation.
    """
    return _closure(temperature).get((small, large))


@cache
def _closure(temperature: Fraction | None) -> dict[tuple[str, str], Path]:
    found: dict[tuple[str, str], Path] = {}
    for edge in _edges(temperature):
        found[edge.small, edge.large] = Path(edge.factor, (edge.why,))
    names = sorted({name for pair in found for name in pair})
    for middle in names:
        for small in names:
            first = found.get((small, middle))
            if first is None:
                continue
            for large in names:
                second = found.get((middle, large))
                if second is None or small == large:
                    continue
                known, factor = found.get((small, large)), first.factor * second.factor
                if known is None or factor < known.factor:
                    found[small, large] = Path(factor, (*first.reasons, *second.reasons))
    return found


def _edges(temperature: Fraction | None) -> list[Edge]:
    found = list(EDGES)
    if temperature:
        found += [Edge(e.small, e.factor / temperature, e.large, e.why) for e in TEMPERED]
        found += [Edge(e.small, e.factor * temperature, e.large, e.why) for e in UNTEMPERED]
    return found


# --- curves --------------------------------------------------------------------------------------


class Curve(NamedTuple):
    """If large <= bound for a token, then small <= at(bound, T).

    `concave`: the bound also holds for the means (Jensen). `tempered`: it needs T > 0.
    """

    small: str
    large: str
    at: Callable[[Fraction, Fraction], Fraction | None]
    concave: bool
    tempered: bool
    why: str


def _root_up(value: Fraction) -> Fraction:
    """Return the square root, exact if it is a fraction, else an upper bound."""
    top, bottom = math.isqrt(value.numerator), math.isqrt(value.denominator)
    if top * top == value.numerator and bottom * bottom == value.denominator:
        return Fraction(top, bottom)
    scale = 10 ** (18 + max(0, len(str(value.denominator)) - len(str(value.numerator))))
    return Fraction(math.isqrt(value.numerator * scale * scale // value.denominator) + 1, scale)


def _pinsker(bound: Fraction, temperature: Fraction) -> Fraction:
    return _root_up(bound / 2)


def _of_hellinger(bound: Fraction, temperature: Fraction) -> Fraction:
    return _root_up(bound * (2 - bound)) if bound <= 1 else _ONE


_SPANS: dict[str, tuple[Fraction, bool, str]] = {
    "logit_span": (_ONE, True, "s = span/T"),
    "logit_linf": (Fraction(2), True, "s <= 2 linf/T"),
    "logit_l2": (SQRT2_UP, True, "s <= sqrt(2) l2/T"),
    "logit_l2_centered": (SQRT2_UP, True, "s <= sqrt(2) l2/T"),
    "log_ratio_linf": (Fraction(2), False, "s <= 2 L"),
}
_OF_SPAN: dict[str, tuple[Callable[[float], float], bool, str]] = {
    "tv": (inequalities.tv, True, "TV <= tanh(s/4)"),
    "kl": (inequalities.kl, False, "KL <= s/(e^s - 1) - 1 + ln((e^s - 1)/s) <= s^2/8"),
    "kl_infer_train": (inequalities.kl, False, "KL <= s/(e^s - 1) - 1 + ln((e^s - 1)/s) <= s^2/8"),
    "jeffreys": (inequalities.jeffreys, False, "KL(p||q) + KL(q||p) <= s tanh(s/4)"),
    "hellinger2": (inequalities.hellinger2, False, "H^2 <= 1 - sech(s/4)"),
    "js": (inequalities.js, False, "JS <= (s/4) tanh(s/4) - ln cosh(s/4)"),
}


def _through_span(small: str, large: str) -> Curve:
    factor, tempered, conversion = _SPANS[large]
    function, concave, formula = _OF_SPAN[small]

    def at(bound: Fraction, temperature: Fraction) -> Fraction | None:
        s = factor * bound / (temperature if tempered else 1)
        value = function(round_up(s))
        return Fraction(value) if math.isfinite(value) else None

    return Curve(small, large, at, concave, tempered, f"{formula}, {conversion}")


CURVES: tuple[Curve, ...] = (
    Curve("tv", "kl", _pinsker, True, False, "TV <= sqrt(KL/2) (Pinsker)"),
    Curve("tv", "kl_infer_train", _pinsker, True, False, "TV <= sqrt(KL/2) (Pinsker)"),
    Curve(
        "tv", "jeffreys", lambda b, _: _root_up(b / 4), True, False,
        "TV <= sqrt(J)/2 (Pinsker in both directions)",
    ),
    Curve("tv", "js", lambda b, _: _root_up(2 * b), True, False, "TV <= sqrt(2 JS)"),
    Curve("tv", "hellinger2", _of_hellinger, True, False, "TV <= sqrt(H^2 (2 - H^2))"),
    *(_through_span(small, large) for large in _SPANS for small in _OF_SPAN),
)  # fmt: skip


def curves(small: str, large: str, temperature: Fraction | None) -> tuple[Curve, ...]:
    """Return the curves from one metric to another that hold at a temperature."""
    found = _by_pair().get((small, large), ())
    return tuple(curve for curve in found if temperature or not curve.tempered)


@cache
def _by_pair() -> dict[tuple[str, str], tuple[Curve, ...]]:
    found: dict[tuple[str, str], tuple[Curve, ...]] = {}
    for curve in CURVES:
        pair = curve.small, curve.large
        found[pair] = (*found.get(pair, ()), curve)
    return found
