"""The result of one clause on one slice, and the evidence it rests on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from fractions import Fraction
from typing import Any, ClassVar

from kcdsl.verdict.model import Inconclusive, InvalidEvidence, Verdict, Violated, verdict_name
from kcdsl.verdict.records import Record


@dataclass(frozen=True, slots=True)
class MeasuredPercentiles(Record):
    """Percentiles of the requests, each by its worst token; `worst` is the smallest where more is
    better."""

    p50: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True)
class Certified(Record):
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


@dataclass(frozen=True, slots=True)
class NoiseFloor(Record):
    """The statistic of the clause, formed from the drift of the training kernel from itself when
    `requests` requests are batched otherwise. `above` says that the threshold lies below it, so
    that no inference kernel can be expected to meet the clause."""

    value: float | None
    requests: int
    above: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Beside(Record):
    """All that stands beside one clause on one slice.

    `narrow` says why its result may change with little: "few units" where there are fewer than 20,
    or one more or less beyond decides; "near the threshold" where it is within a tenth of it.
    """

    measured: MeasuredPercentiles | None = None
    certified: Certified | None = None
    noise_floor: NoiseFloor | None = None
    narrow: tuple[str, ...] = ()


def domains_in_words(bounding: Mapping[str, Any]) -> str:
    """Return how many requests were bounded as a whole by what; empty where none was."""
    domains: Mapping[str, Any] = bounding.get("domains", {})
    return ", ".join(f"{len(keys)} by {words}" for words, keys in domains.items())


# --- results --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExceedanceCount(Record):
    """k of n `of` (requests, timed runs, windows, records) beyond the threshold, with limits of
    the rate in the population they stand for (each one-sided at the confidence of the clause)."""

    derived: ClassVar[tuple[str, ...]] = ("rate",)

    k: int
    n: int
    of: str
    low: float | None
    high: float | None

    @property
    def rate(self) -> float:
        """Return k / n."""
        return self.k / self.n


@dataclass(frozen=True, slots=True)
class Shown(Record):
    """What k of n sampled units beyond the threshold show: at `confidence`, the rate in the
    population they stand for is below `rate`."""

    derived: ClassVar[tuple[str, ...]] = ("text",)

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


def share_above(rate: float) -> str:
    """Return a rate in percent, rounded up to three digits: 2.47 %."""
    if rate >= 1:
        return "100 %"
    digits = 2 - math.floor(math.log10(100 * rate)) if rate > 0 else 0
    step = Decimal(1).scaleb(-digits)
    percent = (Decimal(rate) * 100).quantize(step, ROUND_CEILING)
    return f"{percent.normalize():f} %"


@dataclass(frozen=True, slots=True)
class Estimator(Record):
    """How a value was obtained: tier, formula, bias class, the unit of one value, its direction."""

    tier: str
    formula: str
    bias: str
    counted: str
    better: str
    direction: str = ""


@dataclass(frozen=True, slots=True)
class ClauseResult(Record):
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
        row = Record.to_json(self)
        verdict = self.verdict
        exact = {name: row.pop(f"exact_{name}") for name in ("value", "threshold")}
        return row | {
            "exact": exact,
            "verdict": verdict_name(verdict),
            "reason": reason(verdict),
            "counterexample": verdict.counterexample if isinstance(verdict, Violated) else None,
        }


def reason(verdict: Verdict) -> str | None:
    """Return why a verdict is not a plain yes or no."""
    match verdict:
        case Inconclusive(why) | InvalidEvidence(why):
            return why
        case _:
            return None
