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
    """Percentiles over requests of the worst token of each; `worst` is the minimum if higher is
    better."""

    p50: float
    p99: float
    worst: float


@dataclass(frozen=True, slots=True)
class Certified(Record):
    """The statistic of the clause over certified bounds of `requests` out of `of` requests.

    `value` bounds the clause's own value, None with a `reason` where some requests have no bound;
    `partial` is the statistic over those that have one. `domains` are the proof domains used.
    """

    value: float | None
    requests: int
    of: int
    partial: float | None = None
    reason: str | None = None
    domains: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NoiseFloor(Record):
    """The statistic of the clause over the drift of the training kernel from itself, when
    `requests` requests are batched differently. `above`: it exceeds the threshold, so no inference
    kernel can be expected to meet the clause."""

    value: float | None
    requests: int
    above: bool = False
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class ResultContext(Record):
    """Context of the result of one clause on one slice.

    `narrow` has reasons why the result is fragile: "few units" where there are fewer than 20 or one
    exceedance decides; "near the threshold" where the value is within a tenth of it.
    """

    measured: MeasuredPercentiles | None = None
    certified: Certified | None = None
    noise_floor: NoiseFloor | None = None
    narrow: tuple[str, ...] = ()


def domains_in_words(bounding: Mapping[str, Any]) -> str:
    """Return the number of bounded requests by proof domain, in words; empty where none was."""
    domains: Mapping[str, Any] = bounding.get("domains", {})
    return ", ".join(f"{len(keys)} by {words}" for words, keys in domains.items())


# --- results --------------------------------------------------------------------------------------


TRACE_RECORDS = "records"
"""What a clause about the fields of a trace counts."""


@dataclass(frozen=True, slots=True)
class ExceedanceCount(Record):
    """k of n `of` (requests, timed runs, windows, records) beyond the threshold, with one-sided
    limits of the rate in the population, each at the confidence of the clause."""

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
class RateLimit(Record):
    """The conclusion from k of n sampled units beyond the threshold: at `confidence`, the rate in
    the population is below `rate`."""

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
    """The estimator of a value: tier, formula, bias class, the unit of one value, its direction."""

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
    """The action for this result; None where there is none."""
    deviation: float = 0.0
    """v_c of the health score; infinite where the clause cannot be measured."""
    estimators: tuple[Estimator, ...] = ()
    holdout: bool = False
    """Whether the clause is excluded from training losses."""
    shown: RateLimit | None = None
    """The conclusion about the rate of exceedance; None for a census and for a mean."""
    needed: int | None = None
    """An estimate of the number of units that would decide an inconclusive clause."""
    context: ResultContext | None = None
    """Measured percentiles, certified bound and noise floor."""
    obligation: str = ""
    """The name of the obligation that was decided (kcdsl.ir.obligations)."""
    exact_value: Fraction | None = None
    """The value compared with the exact threshold, before rounding; `low` and `high` are its
    limits. Of two terms it is their difference, and None in a sample: limits are of the first
    term."""
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
    """Return the reason of an undecided verdict; None for held or violated."""
    match verdict:
        case Inconclusive(why) | InvalidEvidence(why):
            return why
        case _:
            return None
