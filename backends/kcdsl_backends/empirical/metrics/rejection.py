"""What truncating, masking and vetoing by the importance ratio would do to sampled tokens.

Bounds are bounds on a ratio r, so a rule keeps r in [low, high] whatever statistic expresses it.
The statistic k1 = -ln r falls as r grows: on it the kept range is [-ln high, -ln low]. Comparing k1
with [ln low, ln high] inverts the rule, so that "0.1_1.2" keeps r in [0.83, 10]; equal bounds on
both sides of 1 hide that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kcdsl_backends.empirical.metrics.evidence import Array, Unmeasured, column
from kcdsl_backends.empirical.statistics.vocabulary import rounded_sum

CLIP = 0.2
"""The half width of the clip band that `clipfrac0` uses unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A remedy: ratios outside [low, high] are truncated to the band, masked, or veto the whole
    sequence that they stand in."""

    name: str
    low: float
    high: float
    does: str


RULES: tuple[Rule, ...] = (
    Rule("tis", 0.0, 2.0, "truncate"),
    Rule("mis", 0.5, 2.0, "mask"),
    Rule("icepop", 0.5, 5.0, "mask"),
    Rule("veto", 1e-4, math.inf, "veto"),
)
"""The usual thresholds: TIS caps at 2, MIS and IcePop mask outside a band, a veto drops sequences
with a token below 1e-4."""


@dataclass(frozen=True, slots=True)
class WhatIf:
    """What a rule would do: tokens outside the band of n, the share of tokens it keeps, and the
    mean of the weights it leaves beside the mean of the raw ones."""

    rule: Rule
    below: int
    above: int
    n: int
    kept: float
    mean_weight: float
    mean_raw: float

    @property
    def out_of_band(self) -> float:
        """Return the share of tokens outside the band."""
        return (self.below + self.above) / self.n


def keeps(log_ratio: ArrayLike, low: float, high: float) -> NDArray[np.bool_]:
    """Say for each token whether its ratio lies in [low, high].

    Raises Unmeasured for what is not finite (NaN compares false and would be masked in silence),
    ValueError unless 0 <= low < high.
    """
    values = column(log_ratio, "ln r")
    lower, upper = _logarithms(low, high)
    kept: NDArray[np.bool_] = (values >= lower) & (values <= upper)
    return kept


def keeps_k1(k1: ArrayLike, low: float, high: float) -> NDArray[np.bool_]:
    """Say the same from the statistic k1 = -ln r: kept where -ln high <= k1 <= -ln low."""
    return keeps(-column(k1, "k1"), low, high)


def oob_fraction(log_ratio: ArrayLike, low: float, high: float) -> float:
    """Return the share of tokens with a ratio outside [low, high]."""
    return float(np.mean(~keeps(log_ratio, low, high)))


def clip_fraction(log_ratio: ArrayLike, clip: float = CLIP) -> float:
    """Return the share of tokens with a ratio outside [1 - clip, 1 + clip].

    Before the first optimiser step it should be 0: what is clipped then is the drift alone.
    """
    if not 0 < clip < 1:
        raise ValueError(f"the clip width must lie in (0, 1), not {clip}")
    return oob_fraction(log_ratio, 1 - clip, 1 + clip)


def what_if(
    log_ratio: ArrayLike, lengths: Sequence[int], rules: Sequence[Rule] = RULES
) -> tuple[WhatIf, ...]:
    """Return what each rule would do to the tokens of sequences of these lengths, in their order.

    Raises Unmeasured where the lengths do not add up to the tokens, or nothing is there.
    """
    values = column(log_ratio, "ln r")
    if any(n < 1 for n in lengths) or sum(lengths) != values.size:
        raise Unmeasured(f"lengths that add up to {sum(lengths)} for {values.size} tokens")
    return tuple(_apply(values, lengths, rule) for rule in rules)


def _apply(values: Array, lengths: Sequence[int], rule: Rule) -> WhatIf:
    lower, upper = _logarithms(rule.low, rule.high)
    below, above = values < lower, values > upper
    outside = below | above
    with np.errstate(over="ignore"):
        weights = np.exp(values)
    match rule.does:
        case "truncate":
            kept, left = 1.0, np.exp(np.clip(values, lower, upper))
        case "mask":
            kept, left = float(np.mean(~outside)), np.where(outside, 0.0, weights)
        case "veto":
            starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
            vetoed = np.repeat(np.maximum.reduceat(outside, starts), lengths)
            kept, left = float(np.mean(~vetoed)), np.where(vetoed, 0.0, weights)
        case other:
            raise ValueError(f"unknown rule {other!r}")
    return WhatIf(
        rule,
        int(np.count_nonzero(below)),
        int(np.count_nonzero(above)),
        values.size,
        kept,
        _mean(left),
        _mean(weights),
    )


def _mean(weights: Array) -> float:
    """Return a mean of weights, infinite where one of them is, or where their sum overflows."""
    whole = bool(np.isfinite(weights).all())
    return rounded_sum(weights) / weights.size if whole else math.inf


def what_if_table(rows: Sequence[WhatIf]) -> list[Mapping[str, float | str]]:
    """Return the table as records: raw mean and share outside stand beside every treated mean."""
    return [
        {
            "rule": row.rule.name,
            "does": row.rule.does,
            "low": row.rule.low,
            "high": row.rule.high,
            "out_of_band": row.out_of_band,
            "kept": row.kept,
            "mean_weight": row.mean_weight,
            "mean_raw": row.mean_raw,
        }
        for row in rows
    ]


def _logarithms(low: float, high: float) -> tuple[float, float]:
    if not 0 <= low < high:
        raise ValueError(f"a band needs 0 <= low < high, not [{low}, {high}]")
    return (math.log(low) if low > 0 else -math.inf), math.log(high)
