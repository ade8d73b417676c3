"""Statistics of measured values, each with the limits that a sample of requests supports.

One request is one sampling unit: tokens of a request are dependent, and counting them as
independent certifies several times too often. Every limit holds by itself with the stated
confidence (one-sided), so [low, high] is an interval of 2 * confidence - 1.

Values are exact where that is possible: means are correctly rounded sums (`math.fsum`), so their
last digit does not depend on order; percentiles are order statistics without interpolation.
docs/explanation/statistics.md says which limit is used where, and what was measured of each. Only
numpy and scipy are imported, so that a router that decides online can use the same functions.
"""
