"""What was decided for one clause on one slice, and on what evidence.

Numbers that are not finite are written as null, never as a word that a reader might skip.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from fractions import Fraction
from typing import Any

from kcdsl.verdict.model import Inconclusive, InvalidEvidence, Verdict, Violated, verdict_name
from kcdsl_certs.reals import real_text


@dataclass(frozen=True, slots=True)
class Measured:
    """Percentiles of the requests, each by its worst token; `worst` is the smallest where more is
    better."""

    p50: float
    p99: float
    worst: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {name: number(getattr(self, name)) for name in ("p50", "p99", "worst")}


@dataclass(frozen=True, slots=True)
class Certified:
    """The statistic of the clause, formed from certified bounds of `requests` of `of` requests.

    `value` bounds the clause's own value, None with a `reason` where some requests have no bound;
    `partial` is formed from those that have one. `domains` say by what they were bounded.
    """

    value: float | None
    requests: int
    of: int
    partial: float | None = None
    reason: str | None = None
    domains: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "value": number(self.value),
            "requests": self.requests,
            "of": self.of,
            "partial": number(self.partial),
            "reason": self.reason,
            "domains": list(self.domains),
        }


@dataclass(frozen=True, slots=True)
class NoiseFloor:
    """The statistic of the clause, formed from the drift of the training kernel from itself when
    `requests` requests are batched otherwise. `above` says that the threshold lies below it, so
    that no inference kernel can be expected to meet the clause."""

    value: float | None
    requests: int
    above: bool = False
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "value": number(self.value),
            "requests": self.requests,
            "above": self.above,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class Beside:
    """All that stands beside one clause on one slice.

    `narrow` says why its result may change with little: "few units" where there are fewer than 20,
    or one more or less beyond decides; "near the threshold" where it is within a tenth of it.
    """

    measured: Measured | None = None
    certified: Certified | None = None
    floor: NoiseFloor | None = None
    narrow: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "measured": None if self.measured is None else self.measured.to_json(),
            "certified": None if self.certified is None else self.certified.to_json(),
            "noise_floor": None if self.floor is None else self.floor.to_json(),
            "narrow": list(self.narrow),
        }


def domains_in_words(bounding: Mapping[str, Any]) -> str:
    """Return how many requests were bounded as a whole by what; empty where none was."""
    domains: Mapping[str, Any] = bounding.get("domains", {})
    return ", ".join(f"{len(keys)} by {words}" for words, keys in domains.items())


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExceedanceCount:
    """k of n `of` (requests, timed runs, windows, records) beyond the threshold, with limits of
    the rate in the population they stand for (each one-sided at the confidence of the clause)."""

    k: int
    n: int
    of: str
    low: float | None
    high: float | None

    @property
    def rate(self) -> float:
        """Return k / n."""
        return self.k / self.n

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "k": self.k,
            "n": self.n,
            "of": self.of,
            "rate": self.rate,
            "low": number(self.low),
            "high": number(self.high),
        }


@dataclass(frozen=True, slots=True)
class Shown:
    """What k of n sampled units beyond the threshold show: at `confidence`, the rate in the
    population they stand for is below `rate`."""

    k: int
    n: int
    of: str
    rate: float
    confidence: float

    @property
    def text(self) -> str:
        """Return the statement in words."""
        sure = f"{100 * self.confidence:.6g} %"
        below = f"the rate is below {share_above(self.rate)} at {sure}"
        return f"{self.k} of {self.n} {self.of} beyond: {below}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "k": self.k,
            "n": self.n,
            "of": self.of,
            "rate": self.rate,
            "confidence": self.confidence,
            "text": self.text,
        }


def share_above(rate: float) -> str:
    """Return a rate in percent, rounded up to three digits: 2.47 %."""
    if rate >= 1:
        return "100 %"
    digits = 2 - math.floor(math.log10(100 * rate)) if rate > 0 else 0
    step = Decimal(1).scaleb(-digits)
    percent = (Decimal(rate) * 100).quantize(step, ROUND_CEILING)
    return f"{percent.normalize():f} %"


@dataclass(frozen=True, slots=True)
class Estimator:
    """How a value was obtained: tier, formula, bias class, the unit of one value, its direction."""

    tier: str
    formula: str
    bias: str
    counted: str
    better: str
    direction: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "tier": self.tier,
            "formula": self.formula,
            "bias": self.bias,
            "counted": self.counted,
            "better": self.better,
            "direction": self.direction,
        }


@dataclass(frozen=True, slots=True)
class ClauseResult:
    """One clause on one slice. Values are in base units (`unit`: 1, ratio, nat, s, B, tok/s)."""

    clause: str
    family: str
    level: str
    slice: str
    requirement: str
    metric: str
    unit: str
    op: str
    value: float | None
    low: float | None
    high: float | None
    n: int
    counted: str
    threshold: float | None
    verdict: Verdict
    evidence: str
    confidence: float | None
    exceedance: ExceedanceCount | None = None
    budget: str | None = None
    action: str | None = None
    """The action that this result calls for; None where none does."""
    deviation: float = 0.0
    """v_c of the health score; infinite where the clause cannot be measured."""
    estimators: tuple[Estimator, ...] = ()
    holdout: bool = False
    """Whether the clause is kept from training losses."""
    shown: Shown | None = None
    """What the sample shows of the rate of exceedance; None for a census, and for a mean."""
    needed: int | None = None
    """How many units would decide an inconclusive clause, as far as that can be told."""
    beside: Beside | None = None
    """What was measured, certified and noise of the training kernel, beside the threshold."""
    obligation: str = ""
    """The name of the obligation that was decided (kcdsl.ir.obligations)."""
    exact_value: Fraction | None = None
    """What is compared with the exact threshold, before rounding; `low` and `high` are its limits.
    Of two terms it is their difference, and None in a sample: limits are of the first term."""
    exact_threshold: Fraction | None = None
    """The threshold as the contract states it; None for an obligation of several comparisons."""

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "obligation": self.obligation,
            "clause": self.clause,
            "family": self.family,
            "level": self.level,
            "slice": self.slice,
            "requirement": self.requirement,
            "metric": self.metric,
            "unit": self.unit,
            "op": self.op,
            "value": number(self.value),
            "low": number(self.low),
            "high": number(self.high),
            "n": self.n,
            "counted": self.counted,
            "threshold": number(self.threshold),
            "exact": {
                "value": _exact(self.exact_value),
                "threshold": _exact(self.exact_threshold),
            },
            "verdict": verdict_name(self.verdict),
            "reason": reason(self.verdict),
            "counterexample": (
                dict(self.verdict.counterexample) if isinstance(self.verdict, Violated) else None
            ),
            "evidence": self.evidence,
            "confidence": self.confidence,
            "exceedance": None if self.exceedance is None else self.exceedance.to_json(),
            "budget": self.budget,
            "action": self.action,
            "deviation": number(self.deviation),
            "estimators": [e.to_json() for e in self.estimators],
            "holdout": self.holdout,
            "shown": None if self.shown is None else self.shown.to_json(),
            "needed": self.needed,
            "beside": None if self.beside is None else self.beside.to_json(),
        }


def number(value: float | None) -> float | None:
    """Return a value as JSON can hold it: null where it is missing or not finite."""
    return None if value is None or not math.isfinite(value) else float(value)


def _exact(value: Fraction | None) -> str | None:
    return None if value is None else real_text(value)


def reason(verdict: Verdict) -> str | None:
    """Return why a verdict is not a plain yes or no."""
    match verdict:
        case Inconclusive(why) | InvalidEvidence(why):
            return why
        case _:
            return None
