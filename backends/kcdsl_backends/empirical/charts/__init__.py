"""The data of the charts: small arrays computed from the values of any number of requests.

Pure functions. Every count comes with its number of units, every histogram with its edges. Values
that are not finite are left out and counted. `kcdsl.verdict.html` draws these data and computes
nothing.
"""

from kcdsl_backends.empirical.charts.report import charts_of

__all__ = ["charts_of"]
