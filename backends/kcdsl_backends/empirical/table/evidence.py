"""Evidence: units in full or reduced to statistics, and the table that decisions and reports read.

Percentiles, budgets and extremes represent a request by its worst token, means by the sum of its
tokens and their number. So a verdict needs only a few numbers of a request of a token table
(`Column`), not its tokens, and is the same as from the tokens.

`EvidenceTable` is plain frozen data: the same results follow from it without the kernels, the model
or the contract's file. A trace record is the log entry of one request, on which clauses about
traces are decided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kcdsl.ir.terms import Program, Term
from kcdsl.metrics import MEASURES, MetricDefinition
from kcdsl.verdict.report import CrossCheck, ImpliedClause, Precheck
from kcdsl_backends.requests import Request

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingUnit:
    """One request, or one timed run of a request: a sampling unit.

    `values` holds, per metric, one value per token or a single one. `failure` is the reason why a
    request has no values.
    """

    key: str
    tokens: int
    values: Mapping[str, Array] = field(default_factory=dict)
    failure: str | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    """The reasons why metrics have no values although the request has others."""


@dataclass(frozen=True, slots=True)
class RequestRun:
    """The results of one request: its unit, and the digests of the tensors at the audit points."""

    unit: SamplingUnit
    seed: int
    digests: Mapping[str, str]
    nonfinite: int

    @property
    def replay_signature(self) -> str:
        """Return the sha256 over the digests at all audit points."""
        lines = "\n".join(f"{name}={self.digests[name]}" for name in sorted(self.digests))
        return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BlockComparison:
    """A block on one request: largest measured and largest certified drift."""

    request: str
    measured: float
    certified: float

    @property
    def tightness(self) -> float | None:
        """Return certified / measured; None if the drift is 0 or has no bound."""
        if self.measured == 0 or not np.isfinite(self.certified):
            return None
        return self.certified / self.measured


FEWEST_ROUNDS = 3
"""The rounds of timed runs that every evaluation of local kernels makes, however long they take."""


@dataclass(frozen=True, slots=True)
class Timing:
    """All timed runs in order; per request, (equal, made) repeats; the peak memory in bytes."""

    runs: tuple[SamplingUnit, ...] = ()
    repeats: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    peak_memory: float | None = None


@dataclass(frozen=True, slots=True)
class SliceData:
    """The units of one slice.

    `requests`: one unit per row. `runs`: every timed run, in the order they ran, by the key of its
    request. `repeats` counts (equal in every run, repeated) requests; `peak_memory` is in bytes,
    None if not measured.
    """

    name: str
    requests: tuple[SamplingUnit, ...]
    runs: tuple[SamplingUnit, ...] = ()
    repeats: tuple[int, int] | None = None
    peak_memory: float | None = None
    records: tuple[Mapping[str, Any], ...] = ()
    """The trace records of the requests."""
    measures: Mapping[str, MetricDefinition] = field(default_factory=lambda: MEASURES)
    """The definitions of the metrics, the user's own included."""
    reduced: Reduced | None = None
    """The requests of a token table, instead of `requests`."""
    unit: str = "request"
    """The name of one of `requests`: "prompt" if a unit is all rollouts of a prompt."""
    batch: bool = False
    """Whether the units are those of a recorded batch, whose values do not vary between looks."""
    drawn: tuple[SamplingUnit, ...] | None = None
    """For a sample: one timed run of each unit, which represents it in counts. None if all runs
    count."""
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of the estimates of terms on this slice."""

    @property
    def size(self) -> int:
        """Return the number of requests."""
        return len(self.requests) if self.reduced is None else len(self.reduced)


# --- reduced -------------------------------------------------------------------------------------


Floats = NDArray[np.float64]
Counts = NDArray[np.int64]

OUTSIDE, SEVERAL = 1, 2
FAULTS = {
    OUTSIDE: "a value lies outside of its range",
    SEVERAL: "it has several values of a metric that has one for each request",
}
"""Faults: why the values of a request cannot be those of their metric (0: no fault)."""


@dataclass(frozen=True, slots=True)
class Column:
    """The values of one term, reduced: an entry for each request.

    Counts are `values`, `missing` values, `nan`, `infinite`, and `fractions` (neither 0 nor 1);
    `least` and `most` ignore NaN (NaN without other values); `totals` are the correctly rounded
    sums of the finite values; `faults` are keys of `FAULTS`.
    """

    values: Counts
    missing: Counts
    nan: Counts
    infinite: Counts
    fractions: Counts
    least: Floats
    most: Floats
    totals: Floats
    faults: Counts

    def at(self, rows: slice | NDArray[np.intp]) -> Column:
        """Return some of the entries."""
        return Column(*(getattr(self, field.name)[rows] for field in fields(self)))

    @property
    def complete(self) -> NDArray[np.bool_]:
        """Return the mask of requests with all values and without faults."""
        found: NDArray[np.bool_] = (self.missing == 0) & (self.values > 0) & (self.faults == 0)
        return found

    def worst(self, side: Literal["upper", "lower"]) -> Floats:
        """Return the worst value of each request; NaN if one of its values is NaN."""
        extreme = self.most if side == "upper" else self.least
        return np.where(self.nan > 0, np.nan, extreme)

    def fingerprint(self, row: int) -> tuple[float | int, ...]:
        """Return the numbers on which a statistic of one request can depend, with 0 for NaN."""
        numbers = (self.least[row], self.most[row], self.totals[row])
        return (
            int(self.values[row]),
            int(self.missing[row]),
            int(self.nan[row]),
            int(self.infinite[row]),
            int(self.fractions[row]),
            int(self.faults[row]),
            *(float(number) if number == number else 0.0 for number in numbers),
        )


@dataclass(frozen=True, slots=True)
class Reduced:
    """The requests of one slice in the order of their first rows: names, tokens, and a column for
    each term."""

    keys: Sequence[str]
    columns: Mapping[Term, Column]
    tokens: Counts
    rows_of: Callable[[str, Term], Floats]
    """The values of a term of a request, in the order of the table."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.keys)

    def part(self, start: int, end: int) -> Reduced:
        """Return consecutive requests."""
        columns = {term: column.at(slice(start, end)) for term, column in self.columns.items()}
        return Reduced(self.keys[start:end], columns, self.tokens[start:end], self.rows_of)


SUMMARY_METRICS = {
    False: ("kl", "tv", "logit_linf", "logit_span", "top1_overlap"),
    True: ("hidden_l2", "hidden_linf", "embedding_l2", "embedding_cosine"),
}
"""The drifts that are always measured, of models with a head (False) and of encoders (True)."""

CHART_METRICS = ("top5_overlap", "margin", "entropy")
"""Further metrics for the charts of models with a head, if the vocabulary is large enough."""


@dataclass(frozen=True, slots=True)
class EvidenceTable:
    """The measured values of a contract's requests, and their provenance."""

    program: Program
    """The compiled contract, with its tables not expanded."""
    requests: tuple[Request, ...]
    """Every request of the slices, once."""
    runs: Mapping[str, RequestRun]
    """The results of each request, by its key."""
    slices: Mapping[str, tuple[str, ...]]
    """The keys of the requests of each slice, buckets of tables included, in the order of the
    file."""
    measured: frozenset[str]
    """The metrics and norms of drifts (`requirements.norm_name`) that were measured, also those of
    which no request has values."""
    encoder: bool
    contract: Mapping[str, str]
    """Name, version and digest."""
    model: Mapping[str, Any]
    kernels: Mapping[str, Mapping[str, Any]]
    """`train` and `infer`, each with `run`, `digest` and `fingerprint`."""
    data: tuple[Mapping[str, Any], ...]
    """The request files: name, sha256, rows."""
    environment: Mapping[str, Any]
    timing: Timing = field(default_factory=Timing)
    prechecks: tuple[Precheck, ...] = ()
    crosschecks: tuple[CrossCheck, ...] = ()
    certified: Mapping[str, SamplingUnit] = field(default_factory=dict)
    """By request: certified bounds of metrics, one for each position, or the `failure`. Empty if
    none were computed."""
    bounding: Mapping[str, Any] = field(default_factory=dict)
    """The numerics of which `certified` holds, and the time spent on it (plain JSON data)."""
    floor: Mapping[str, SamplingUnit] = field(default_factory=dict)
    """By request: the drift of the training kernel from itself under another batching."""
    spoiled: Mapping[str, str] = field(default_factory=dict)
    """The reasons why the evidence on slices is invalid, whatever was measured."""
    implied: tuple[ImpliedClause, ...] = ()
    notes: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    """Findings of the contract that its author accepts, with the reasons."""
    seed: int = 0
    looks: int | None = 1
    """The number of evaluations of growing data that share the error; None: any number."""
