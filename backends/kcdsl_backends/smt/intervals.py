"""Where a measured quantity can lie: the intervals of `kcdsl.ir.facts`."""

from kcdsl.ir.facts import EVERYTHING, Interval, canonical, domain, interval

__all__ = ["EVERYTHING", "Interval", "canonical", "domain", "interval"]
