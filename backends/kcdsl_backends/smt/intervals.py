"""Where a measured quantity can lie: the intervals of `kcdsl.ir.relations`."""

from kcdsl.ir.relations import EVERYTHING, Interval, canonical, domain, interval

__all__ = ["EVERYTHING", "Interval", "canonical", "domain", "interval"]
