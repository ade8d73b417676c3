"""Metrics of the importance ratio at tokens that were sampled from the inference kernel.

w = p(y)/q(y) of a sampled token y; delta = ln w, float64 of shape [N]. "Unbiased" rests on
E_q w = 1, hence on q covering p and on no filtered sampling (the precondition `support_check`).
Sources: Schulman 2020 (k1 to k3), Vehtari et al. 2024 (Pareto shape of the largest ratios).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from kcdsl.metrics.definition import (
    AGGREGATE,
    INDICATOR,
    LOGS,
    MEAN,
    ONE_WHOLE,
    RATIO_LOG,
    MetricDefinition,
)
from kcdsl.metrics.policies import LOG_COLUMNS
from kcdsl.units import NATS, ONE, RATIO

CLIP = 0.2
"""The half width of the clip band of `clipfrac0`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A remedy for ratios outside [low, high]: they are truncated to the band, masked, or veto the
    whole sequence. `meaning` describes the share of such tokens."""

    name: str
    low: float
    high: float
    does: Literal["truncate", "mask", "veto"]
    formula: str
    meaning: str


RULES: tuple[Rule, ...] = (
    Rule("tis", 0.0, 2.0, "truncate", "1 where w > 2",
         "1 where truncation at 2 would change w, else 0"),
    Rule("mis", 0.5, 2.0, "mask", "1 where w is outside [0.5, 2]",
         "1 where masking outside [0.5, 2] would drop the token, else 0"),
    Rule("icepop", 0.5, 5.0, "mask", "1 where w is outside [0.5, 5]",
         "1 where masking outside [0.5, 5] would drop the token, else 0"),
    Rule("veto", 1e-4, math.inf, "veto", "1 where w < 0.0001",
         "1 where w < 0.0001, which would veto the sequence, else 0"),
)  # fmt: skip
"""The usual thresholds: TIS caps at 2, MIS and IcePop mask outside a band, a veto drops sequences
with a token below 1e-4."""


def logarithms(low: float, high: float) -> tuple[float, float]:
    """Return the logarithms of a band of ratios; raise ValueError unless 0 <= low < high."""
    if not 0 <= low < high:
        raise ValueError(f"a band needs 0 <= low < high, not [{low}, {high}]")
    return (math.log(low) if low > 0 else -math.inf), math.log(high)


def _outside(low: float, high: float) -> Callable[[Any], Any]:
    """Return the indicator of ratios outside [low, high] as a function of ln w; NaN stays NaN.

    The band is on ratios: of the statistic k1 = -ln w it is [-ln high, -ln low].
    """
    lower, upper = logarithms(low, high)

    def outside(delta: Any) -> Any:
        found = ((delta < lower) | (delta > upper)).double()
        return found.masked_fill(delta.isnan(), math.nan)

    return outside


_TRAIN_INFER, _INFER_TRAIN = "KL(train || infer)", "KL(infer || train)"
_CHI2 = "chi2(train || infer)"

_sampled = partial(
    MetricDefinition,
    needs=("sampled",),
    tier="C",
    bias="unbiased",
    noisy=True,
    reads=(RATIO_LOG,),
    columns=LOG_COLUMNS,
)
_bound = partial(
    MetricDefinition,
    needs=("sampled",),
    tier="C",
    bias="lower_bound",
    noisy=True,
    reads=LOGS,
    columns=LOG_COLUMNS,
)
_aggregate = partial(
    MetricDefinition,
    kind="aggregate",
    counted="window",
    statistics=AGGREGATE,
    needs=("sampled",),
    tier="C",
    bias="biased",
    noisy=True,
    columns=LOG_COLUMNS,
)


def _share(
    name: str, low: float, high: float, formula: str, meaning: str | None = None
) -> MetricDefinition:
    return _sampled(
        name,
        RATIO,
        meaning or f"{formula}, else 0",
        formula,
        statistics=INDICATOR,
        upper=ONE_WHOLE,
        entry=_outside(low, high),
    )


DEFINITIONS = (
    _sampled(
        "log_ratio",
        NATS,
        "ln of train over infer probability of the sampled token",
        "ln w",
        signed=True,
        lower=None,
        estimates=f"-{_INFER_TRAIN}",
        entry=lambda delta: delta,
    ),
    _sampled(
        "importance_ratio",
        ONE,
        "train over infer probability of the sampled token",
        "w; its mean is 1 where q covers p",
        statistics=frozenset({"max", "quantile"}),
        entry=lambda delta: delta.exp(),
    ),
    _sampled(
        "k1",
        NATS,
        f"-ln w; its mean estimates {_INFER_TRAIN}",
        "-ln w",
        statistics=MEAN,
        lower=None,
        estimates=_INFER_TRAIN,
        entry=lambda delta: -delta,
    ),
    _sampled(
        "k2",
        NATS,
        f"(ln w)^2 / 2; its mean approximates {_INFER_TRAIN}",
        "(ln w)^2 / 2",
        bias="biased",
        estimates=_INFER_TRAIN,
        entry=lambda delta: delta * delta / 2,
    ),
    _sampled(
        "k3",
        NATS,
        f"w - 1 - ln w; its mean estimates {_INFER_TRAIN}",
        "w - 1 - ln w",
        estimates=_INFER_TRAIN,
        entry="policies:bregman",
    ),
    _sampled(
        "w_log_w",
        NATS,
        f"w ln w; its mean estimates {_TRAIN_INFER}",
        "w ln w",
        statistics=MEAN,
        lower=None,
        estimates=_TRAIN_INFER,
        entry=lambda delta: (delta.exp() * delta).masked_fill(delta.isneginf(), 0.0),
    ),
    _sampled(
        "w_log_w_minus",
        NATS,
        f"w ln w - w + 1; its mean estimates {_TRAIN_INFER}",
        "w ln w - w + 1",
        estimates=_TRAIN_INFER,
        entry="sampled:w_log_w_minus",
    ),
    _sampled(
        "tv_is",
        RATIO,
        "|w - 1| / 2; its mean estimates the total variation",
        "|w - 1| / 2",
        estimates="symmetric",
        entry=lambda delta: delta.expm1().abs() / 2,
    ),
    _sampled(
        "chi2_token",
        ONE,
        f"w^2 - 1; its mean estimates {_CHI2}",
        "w^2 - 1",
        statistics=MEAN,
        lower=-ONE_WHOLE,
        estimates=_CHI2,
        entry=lambda delta: (2 * delta).expm1(),
    ),
    _sampled(
        "chi2_is",
        ONE,
        f"(w - 1)^2; its mean estimates {_CHI2}",
        "(w - 1)^2",
        estimates=_CHI2,
        entry=lambda delta: delta.expm1() ** 2,
    ),
    _sampled(
        "jsd_is",
        NATS,
        "(w ln(2w/(1+w)) + ln(2/(1+w)))/2; its mean estimates the Jensen-Shannon divergence",
        "(w ln(2w/(1 + w)) + ln(2/(1 + w)))/2",
        estimates="symmetric",
        entry="sampled:jsd_is",
    ),
    _sampled(
        "is_variance_inflation",
        ONE,
        "w^2; its mean is what importance weighting multiplies a variance by",
        "w^2; n/ESS",
        statistics=MEAN,
        estimates=f"1 + {_CHI2}",
        entry=lambda delta: (2 * delta).exp(),
    ),
    _sampled(
        "mult_prob_error",
        ONE,
        "e^|ln w|",
        "e^|ln w|; about 1 + 2 TV at small drift",
        lower=ONE_WHOLE,
        bias="biased",
        estimates="symmetric",
        entry=lambda delta: delta.abs().exp(),
    ),
    _bound(
        "prob_absdiff",
        RATIO,
        "|p - q| of the sampled token",
        "|p(y) - q(y)| of the sampled token y",
        upper=ONE_WHOLE,
        estimates="symmetric",
        entry="sampled:prob_absdiff",
    ),
    _bound(
        "binary_tv",
        RATIO,
        "total variation of whether the sampled token comes",
        "|p(y) - q(y)|: TV of 'y or not y'",
        upper=ONE_WHOLE,
        estimates="symmetric",
        entry="sampled:prob_absdiff",
    ),
    _bound(
        "binary_kl",
        NATS,
        "larger KL divergence of whether the sampled token comes",
        "larger KL of 'y or not y', of both directions",
        estimates="larger of both",
        entry="sampled:binary_kl",
    ),
    _share("ratio_extreme", 0.5, 2.0, "1 where |ln w| > ln 2"),
    _share("ratio_above2", 0.0, 2.0, "1 where w > 2"),
    _share("ratio_above10", 0.0, 10.0, "1 where w > 10"),
    _share("ratio_below2", 0.5, math.inf, "1 where w < 1/2"),
    _share("ratio_below10", 0.1, math.inf, "1 where w < 1/10"),
    _share("clipfrac0", 1 - CLIP, 1 + CLIP, "1 where w is outside [0.8, 1.2]"),
    *(_share(f"oob_{r.name}", r.low, r.high, r.formula, r.meaning) for r in RULES),
    _aggregate(
        "ess_frac",
        RATIO,
        "effective sample size of the raw ratios over their number",
        "(sum w)^2 / (n sum w^2), raw",
        better="higher",
        upper=ONE_WHOLE,
        estimates=f"1/(1 + {_CHI2})",
        reads=(RATIO_LOG,),
        entry="sampled:ess_fraction",
    ),
    _aggregate(
        "pearson_p",
        ONE,
        "correlation of both probabilities of sampled tokens",
        "correlation of p(y) and q(y)",
        better="higher",
        lower=-ONE_WHOLE,
        upper=ONE_WHOLE,
        estimates="symmetric",
        reads=LOGS,
        entry="sampled:pearson_probabilities",
    ),
    _aggregate(
        "pearson_logp",
        ONE,
        "correlation of both log-probabilities of sampled tokens",
        "correlation of ln p(y) and ln q(y)",
        better="higher",
        lower=-ONE_WHOLE,
        upper=ONE_WHOLE,
        estimates="symmetric",
        reads=LOGS,
        entry="sampled:pearson",
    ),
    _aggregate(
        "tail_index",
        ONE,
        "Pareto shape of the largest ratios; above 0.7 their means are unreliable",
        "Pareto shape k of the largest w; above 0.7 no mean of w is reliable",
        lower=None,
        reads=(RATIO_LOG,),
        entry="sums:pareto_k",
    ),
)
"""The metrics of sampled tokens, and the numbers of a slice that are formed from their ratios."""
