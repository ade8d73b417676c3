"""The report of an evaluation: the results of all clauses, and what stands beside them.

Plain frozen data, JSON with the schema "kcdsl.report/2" (`report.schema.json`) and nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from kcdsl.diagnostics.render.terminal import json_for_terminals
from kcdsl.exits import Exit
from kcdsl.verdict.health import Health
from kcdsl.verdict.model import verdict_name
from kcdsl.verdict.names import EXITS, worst
from kcdsl.verdict.result import ClauseResult, number

REPORT_SCHEMA = "kcdsl.report/2"


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
    """Clauses, or a clause on a slice, that this evaluation does not decide, with the reason."""
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
    def unit(self) -> str:
        """Return what one sampling unit is called: "request", or "prompt" of recorded rollouts."""
        return str(self.environment.get("unit", "request"))

    @property
    def verdict(self) -> str:
        """Return violated, else invalid_evidence, else inconclusive, else held."""
        return overall(self.clauses)[0]

    @property
    def not_decided(self) -> str:
        """Name what this evaluation does not decide; empty where it decides the whole contract."""
        return not_decided(self.deferred)

    @property
    def exit(self) -> Exit:
        """Return the status of the process; a violation is named before weaker findings."""
        return overall(self.clauses)[1]

    def to_json(self) -> dict[str, Any]:
        """Return the document "kcdsl.report/2"."""
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
        return (
            json_for_terminals(
                json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
            )
            + "\n"
        )


def not_decided(deferred: Mapping[str, str]) -> str:
    """Say in a sentence that a verdict leaves clauses open; empty where it leaves none."""
    if not deferred:
        return ""
    return (
        f"not the verdict of the contract: {', '.join(deferred)} "
        f"{'is' if len(deferred) == 1 else 'are'} not decided here; `kcdsl status` joins the "
        "results of `kcdsl verify` and `kcdsl evaluate`"
    )


def overall(clauses: Sequence[ClauseResult]) -> tuple[str, Exit]:
    """Return the verdict over all clauses, and the status of the process: violated, else
    invalid_evidence, else inconclusive, else held; nothing decided is no evidence."""
    name = worst({verdict_name(clause.verdict) for clause in clauses})
    return name, EXITS[name]


def report_schema() -> dict[str, Any]:
    """Return the JSON Schema of the report."""
    text = files("kcdsl.verdict").joinpath("report.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
