"""What the units of a sample show, in words and numbers, and how many more would be enough."""

from __future__ import annotations

from fractions import Fraction

from kcdsl.ir.terms import Clause
from kcdsl.verdict.result import Shown
from kcdsl_backends.empirical import statistics
from kcdsl_backends.empirical.allowance import allowed_rate, is_mean
from kcdsl_backends.empirical.figures import Figures
from kcdsl_backends.empirical.statistics import Confidence, Exceedance

_MOST_UNITS = 10**9


def shown(
    clause: Clause, of: str, exceedance: Exceedance | None, confidence: Confidence
) -> Shown | None:
    """Return the rate that a sample shows not to be exceeded; None where no unit is counted.

    With none of n beyond it is 1 - α^(1/n), about 3/n at 95 %.
    """
    if exceedance is None or allowed_rate(clause) is None:
        return None
    return Shown(exceedance.k, exceedance.n, of, exceedance.high, confidence.share)


def needed(
    clause: Clause, figures: Figures, exceedance: Exceedance | None, confidence: Confidence
) -> int | None:
    """Return how many units would decide an open clause in its favour, went they on as they did.

    None where no number of units would, or where that cannot be told.
    """
    allowed = allowed_rate(clause)
    if allowed is not None and 0 < allowed < 1 and exceedance is not None:
        return statistics.units_at_rate(allowed, exceedance.rate, confidence)
    if allowed is None and is_mean(clause):
        return _for_mean(figures)
    return None


def _for_mean(figures: Figures) -> int | None:
    """Return n (distance of the limit / distance of the threshold)^2, both from the value."""
    limit = figures.low if figures.op in (">=", ">") else figures.high
    if figures.value is None or figures.threshold is None or limit is None:
        return None
    room = figures.threshold - figures.value
    room = -room if figures.op in (">=", ">") else room
    if room <= 0:
        return None
    wanted = figures.n * (abs(limit - figures.value) / room) ** 2
    return max(figures.n + 1, round(wanted)) if wanted < _MOST_UNITS else None


def why_open(
    clause: Clause,
    figures: Figures,
    found: Shown | None,
    enough: int | None,
    confidence: Confidence,
) -> str:
    """Return why a sample decides nothing, and what would."""
    allowed = allowed_rate(clause)
    if found is not None and allowed is not None:
        return f"{found.text}; {_what_decides(found, allowed, enough, confidence)}"
    if confidence.anytime and found is None and allowed is None:
        return "it has no limit that holds at every look; plan the looks, or give it a budget"
    if figures.value is None or figures.threshold is None:
        return "the limits of the sample do not decide it"
    if figures.low is None and figures.high is None:
        return _no_limits(clause, figures.n)
    more = "" if enough is None else f"; about {enough} would decide it if they are alike"
    return (
        f"the threshold {figures.threshold:g} lies between the limits "
        f"[{_end(figures.low)}, {_end(figures.high)}] of {figures.n} units{more}"
    )


def _no_limits(clause: Clause, n: int) -> str:
    fewest = statistics.FEWEST_CLUSTERS
    if is_mean(clause) and n < fewest:
        return f"{n} units are too few for a limit of their mean: it takes {fewest}"
    return f"its {n} units give no limit"


def _what_decides(
    found: Shown, allowed: Fraction, enough: int | None, confidence: Confidence
) -> str:
    if allowed == 0:
        return "no sample shows that none ever is: a proof or a census does"
    wanted = f"at most {100 * float(allowed):.6g} %"
    if found.k == 0:
        return f"{enough} without any would show {wanted}"
    if enough is None:
        return f"no number of units like these shows {wanted}"
    fewest = statistics.units_for_budget(allowed, confidence)
    return f"about {enough} like these, or {fewest} without any, would show {wanted}"


def _end(limit: float | None) -> str:
    return "none" if limit is None else f"{limit:.4g}"
