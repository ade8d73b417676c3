"""The data of the charts: from the values of requests to small arrays, whatever their number.

Pure functions. Every count has its number of units beside it; edges are stated. What is not finite
is left out and counted. `kcdsl.verdict.html` draws what stands here and computes nothing.
"""

from kcdsl_backends.empirical.charts.report import charts_of

__all__ = ["charts_of"]
