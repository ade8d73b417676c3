"""Statistical power: the rate that a sample shows, and the number of units that decides a
clause."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kcdsl.ir.terms import Clause
from kcdsl.verdict.result import RateLimit
from kcdsl_backends.empirical.statistics import bootstrap, planning
from kcdsl_backends.empirical.statistics.estimates import Confidence, Exceedance
from kcdsl_backends.empirical.table.requirements import (
    allowed_rate,
    is_mean,
    is_throughput,
    reads_times,
)


@dataclass(frozen=True, slots=True)
class Display:
    """The numbers printed with the verdict of a clause; a compound clause has only its text."""

    metric: str
    unit: str = "1"
    op: str = ""
    value: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    threshold: float | None = None
    exact: Fraction | None = None
    """The exact value that the obligation compares with its threshold: of two terms their
    difference. None if a sample gives no limit of it."""


_MOST_UNITS = 10**9


def rate_limit(
    clause: Clause, of: str, exceedance: Exceedance | None, confidence: Confidence
) -> RateLimit | None:
    """Return the upper confidence limit of the rate of a sample; None if no units are counted.

    With 0 of n units beyond the limit it is 1 - α^(1/n), about 3/n at 95 %.
    """
    if exceedance is None or allowed_rate(clause) is None:
        return None
    return RateLimit(exceedance.k, exceedance.n, of, exceedance.high, confidence.share)


def units_needed(
    clause: Clause, display: Display, exceedance: Exceedance | None, confidence: Confidence
) -> int | None:
    """Return the number of units that would decide an open clause in its favour at the observed
    rate or mean.

    None if no number of units would, or if it cannot be computed.
    """
    allowed = allowed_rate(clause)
    if allowed is not None and 0 < allowed < 1 and exceedance is not None:
        return planning.units_at_rate(allowed, exceedance.rate, confidence)
    if allowed is None and is_mean(clause):
        return _for_mean(display)
    return None


def _for_mean(display: Display) -> int | None:
    """Return n (distance of the limit / distance of the threshold)^2, both from the value."""
    limit = display.low if display.op in (">=", ">") else display.high
    if display.value is None or display.threshold is None or limit is None:
        return None
    slack = display.threshold - display.value
    slack = -slack if display.op in (">=", ">") else slack
    if slack <= 0:
        return None
    wanted = display.n * (abs(limit - display.value) / slack) ** 2
    return max(display.n + 1, round(wanted)) if wanted < _MOST_UNITS else None


def why_open(
    clause: Clause,
    display: Display,
    found: RateLimit | None,
    enough: int | None,
    confidence: Confidence,
) -> str:
    """Return why a sample does not decide a clause, and how many units would."""
    allowed = allowed_rate(clause)
    if found is not None and allowed is not None:
        wanted = _what_decides(found, allowed, enough, confidence)
        return f"{found.text}; {wanted}{_of_times(clause) if allowed else ''}"
    if confidence.anytime and found is None and allowed is None:
        return "it has no limit that holds at every look; plan the looks, or give it a budget"
    if display.value is None or display.threshold is None:
        return "the limits of the sample do not decide it"
    if display.low is None and display.high is None:
        return _no_limits(clause, display.n) + _of_times(clause)
    more = "" if enough is None else f"; about {enough} would decide it if they are alike"
    return (
        f"the threshold {display.threshold:g} lies between the limits "
        f"[{_end(display.low)}, {_end(display.high)}] of {display.n} units{more}{_of_times(clause)}"
    )


def _of_times(clause: Clause) -> str:
    """Return a remedy for undecided clauses about times; empty for other clauses."""
    if not reads_times(clause.require):
        return ""
    return "; add requests to the slice, since the timed runs of a request count as one"


def _no_limits(clause: Clause, n: int) -> str:
    fewest = bootstrap.FEWEST_CLUSTERS
    if (is_mean(clause) or is_throughput(clause)) and n < fewest:
        return f"{n} units are too few for a limit of their mean: it takes {fewest}"
    return f"its {n} units give no limit"


def _what_decides(
    found: RateLimit, allowed: Fraction, enough: int | None, confidence: Confidence
) -> str:
    if allowed == 0:
        return "a sample cannot show a rate of zero; a proof or a census can"
    wanted = f"at most {100 * float(allowed):.6g} %"
    if found.k == 0 and enough is not None:
        return f"{enough} without any would show {wanted}"
    if enough is None:
        return f"no number of units like these shows {wanted}"
    fewest = planning.units_for_budget(allowed, confidence)
    return f"about {enough} like these, or {fewest} without any, would show {wanted}"


def _end(limit: float | None) -> str:
    return "none" if limit is None else f"{limit:.4g}"
