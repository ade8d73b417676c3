"""The report of an evaluation: what was decided for each clause and slice, on what evidence.

Plain frozen data, JSON with the schema "kcdsl.report/1" (`report.schema.json`) and nothing heavy.
Numbers that are not finite are written as null, never as a word that a reader might skip.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Decimal
from importlib.resources import files
from typing import Any

from kcdsl.exits import Exit
from kcdsl.verdict.beside import Beside
from kcdsl.verdict.health import Health
from kcdsl.verdict.model import Inconclusive, InvalidEvidence, Verdict, Violated, verdict_name

REPORT_SCHEMA = "kcdsl.report/1"


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
class Statistics:
    """How sampled results were decided.

    False passes and false violations each happen with a probability of at most `error`, over all
    the planned `looks` at growing data together (None: any number of looks). One limit at one look
    fails with `limit_error`. Passes need no correction, since all clauses must hold; violations,
    of which any counts, share the error among the `sampled` results by Holm's method, the last of
    them at `violation_error`.
    """

    error: float = 0.05
    looks: int | None = 1
    limit_error: float = 0.05
    sampled: int = 0
    violation_error: float = 0.05

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "error": self.error,
            "looks": self.looks,
            "limit_error": self.limit_error,
            "passes": "intersection-union",
            "violations": "holm",
            "sampled": self.sampled,
            "violation_error": self.violation_error,
        }


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

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
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


@dataclass(frozen=True, slots=True)
class Precheck:
    """One precondition: `outcome` is "passed", "failed" or "not_applicable"."""

    name: str
    outcome: str
    detail: str
    value: float | None = None
    blocking: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "outcome": self.outcome,
            "detail": self.detail,
            "value": number(self.value),
            "blocking": self.blocking,
        }


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """Measured block drift beside the bound certified for the claimed numerics, largest over the
    requests; `tightness` is certified / measured at the request where it is smallest."""

    block: str
    requests: int
    measured: float
    certified: float
    tightness: float | None
    request: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "block": self.block,
            "requests": self.requests,
            "measured": number(self.measured),
            "certified": number(self.certified),
            "tightness": number(self.tightness),
            "request": self.request,
        }


@dataclass(frozen=True, slots=True)
class ImpliedClause:
    """A clause on a slice that follows once the drift clause `by` is proved; `chain` is one step
    per line."""

    clause: str
    slice: str
    by: str
    chain: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "clause": self.clause,
            "slice": self.slice,
            "by": self.by,
            "chain": list(self.chain),
        }


@dataclass(frozen=True, slots=True)
class Warned:
    """Something about a clause on a slice that is no verdict, with the code that explains it."""

    code: str
    clause: str
    slice: str
    message: str

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "code": self.code,
            "clause": self.clause,
            "slice": self.slice,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class SliceSummary:
    """What was measured on a slice whatever the clauses say: statistics of the usual drifts."""

    name: str
    requests: int
    tokens: int
    statistics: Mapping[str, Mapping[str, float]]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        statistics = {
            name: {key: number(value) for key, value in row.items()}
            for name, row in self.statistics.items()
        }
        return {
            "slice": self.name,
            "requests": self.requests,
            "tokens": self.tokens,
            "statistics": statistics,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that one evaluation found."""

    contract: Mapping[str, str]
    """name, version, digest (sha256 of the canonical contract)."""
    model: Mapping[str, Any]
    kernels: Mapping[str, Mapping[str, Any]]
    """train and infer, each with `run`, `fingerprint` and `digest`."""
    data: tuple[Mapping[str, Any], ...]
    """The request files: name, sha256, rows."""
    environment: Mapping[str, Any]
    """Versions, device, seed, confidence."""
    clauses: tuple[ClauseResult, ...]
    slices: tuple[SliceSummary, ...]
    prechecks: tuple[Precheck, ...]
    crosschecks: tuple[CrossCheck, ...]
    implied: tuple[ImpliedClause, ...]
    deferred: Mapping[str, str]
    """Clauses that running the kernels does not decide, each with the reason."""
    health: Health
    action: str
    notes: tuple[str, ...] = field(default=())
    statistics: Statistics = Statistics()
    warnings: tuple[Warned, ...] = ()
    bounding: Mapping[str, Any] = field(default_factory=dict)
    """Of which numerics the certified bounds of the whole model speak, or why none were sought."""
    charts: Mapping[str, Any] = field(default_factory=dict)
    """The data of the charts: plain JSON of bounded size."""

    @property
    def verdict(self) -> str:
        """Return violated, else invalid_evidence, else inconclusive, else held."""
        return overall(self.clauses)[0]

    @property
    def exit(self) -> Exit:
        """Return the status of the process; a violation is named before weaker findings."""
        return overall(self.clauses)[1]

    def to_json(self) -> dict[str, Any]:
        """Return the document "kcdsl.report/1"."""
        return {
            "schema": REPORT_SCHEMA,
            "verdict": self.verdict,
            "exit": int(self.exit),
            "action": self.action,
            "health": self.health.to_json(),
            "contract": dict(self.contract),
            "model": dict(self.model),
            "kernels": {side: dict(kernel) for side, kernel in self.kernels.items()},
            "data": [dict(row) for row in self.data],
            "environment": dict(self.environment),
            "statistics": self.statistics.to_json(),
            "clauses": [c.to_json() for c in self.clauses],
            "slices": [s.to_json() for s in self.slices],
            "prechecks": [p.to_json() for p in self.prechecks],
            "crosschecks": [c.to_json() for c in self.crosschecks],
            "implied": [i.to_json() for i in self.implied],
            "deferred": dict(self.deferred),
            "notes": list(self.notes),
            "warnings": [w.to_json() for w in self.warnings],
            "bounding": dict(self.bounding),
            "charts": dict(self.charts),
        }

    def dumps(self) -> str:
        """Return the document as text; raises ValueError rather than write NaN or infinity."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


_EXITS = {
    "violated": Exit.VIOLATED,
    "invalid_evidence": Exit.COULD_NOT_RUN,
    "inconclusive": Exit.INCONCLUSIVE,
    "held": Exit.HELD,
}


def overall(clauses: Sequence[ClauseResult]) -> tuple[str, Exit]:
    """Return the verdict over all clauses, and the status of the process: violated, else
    invalid_evidence, else inconclusive, else held; nothing decided is no evidence."""
    found = {verdict_name(clause.verdict) for clause in clauses}
    names = ("violated", "invalid_evidence", "inconclusive")
    name = next((n for n in names if n in found), "held" if found else "invalid_evidence")
    return name, _EXITS[name]


def number(value: float | None) -> float | None:
    """Return a value as JSON can hold it: null where it is missing or not finite."""
    return None if value is None or not math.isfinite(value) else float(value)


def reason(verdict: Verdict) -> str | None:
    """Return why a verdict is not a plain yes or no."""
    match verdict:
        case Inconclusive(why) | InvalidEvidence(why):
            return why
        case _:
            return None


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of the report."""
    text = files("kcdsl.verdict").joinpath("report.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
