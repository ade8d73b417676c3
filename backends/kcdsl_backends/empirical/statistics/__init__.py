"""Statistics of measured values, each with the limits that a sample of requests supports.

One request is one sampling unit: tokens of a request are dependent, and counting them as
independent certifies several times too often. Every limit holds by itself with the stated
confidence (one-sided), so [low, high] is an interval of 2 * confidence - 1.

Values are exact where that is possible: means are correctly rounded sums (`math.fsum`), so their
last digit does not depend on order; percentiles are order statistics without interpolation.
docs/statistics.md says which limit is used where, and what was measured of each. Only numpy and
scipy are imported, so that a router that decides online can use the same functions.
"""

from kcdsl_backends.empirical.statistics.bootstrap import (
    FEWEST_CLUSTERS,
    RESAMPLES,
    clustered_ratio,
    clustered_statistic,
    resamples,
)
from kcdsl_backends.empirical.statistics.estimates import (
    CONFIDENCE,
    ONE_LOOK,
    Confidence,
    Estimate,
    Exceedance,
    NotMeasurable,
    beyond_range,
    check_finite,
    check_values,
    confidence_over,
    holm,
    rounded_sum,
)
from kcdsl_backends.empirical.statistics.planning import (
    shown_by,
    units_at_rate,
    units_for_budget,
    units_for_mean,
    units_with_power,
    units_with_some,
)
from kcdsl_backends.empirical.statistics.rates import (
    exceedance,
    largest,
    limits,
    proportion,
    quantile,
    quantile_rank,
    shows_above,
    shows_below,
    smallest,
    threshold,
)

__all__ = [
    "CONFIDENCE",
    "FEWEST_CLUSTERS",
    "ONE_LOOK",
    "RESAMPLES",
    "Confidence",
    "Estimate",
    "Exceedance",
    "NotMeasurable",
    "beyond_range",
    "check_finite",
    "check_values",
    "clustered_ratio",
    "clustered_statistic",
    "confidence_over",
    "exceedance",
    "holm",
    "largest",
    "limits",
    "proportion",
    "quantile",
    "quantile_rank",
    "resamples",
    "rounded_sum",
    "shown_by",
    "shows_above",
    "shows_below",
    "smallest",
    "threshold",
    "units_at_rate",
    "units_for_budget",
    "units_for_mean",
    "units_with_power",
    "units_with_some",
]
