"""Statistics of measured values, each with the limits that a sample of requests supports.

One request is one sampling unit: tokens of a request are dependent, and counting them as
independent multiplies false passes. Every limit holds individually with the stated confidence
(one-sided), so [low, high] is an interval of 2 * confidence - 1.

Values are exact if possible: means are correctly rounded sums (`math.fsum`), independent of order;
percentiles are order statistics without interpolation. docs/explanation/statistics.md describes the
use and the measured coverage of each limit. Only numpy and scipy are imported, so that a router
that decides online can use the same functions.
"""
