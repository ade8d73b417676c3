"""Evidence: units in full or reduced to statistics, and all that deciding and reporting read.

Percentiles, budgets and extremes represent a request by its worst token, means by the sum of its
tokens and their number. So a verdict needs five numbers of a request of a token table (`Column`)
and not its tokens, and is the same as from the tokens.

`EvidenceTable` is plain frozen data: whoever has it can conclude from it what was concluded when
it was collected, without the kernels, the model or the contract's file. A trace record is what is
logged of one request, and what clauses about traces are decided on.
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

    `values` holds, per metric, one value per token or a single one. `failure` says why a request
    has no values.
    """

    key: str
    tokens: int
    values: Mapping[str, Array] = field(default_factory=dict)
    failure: str | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why a metric has no values here although the request has others."""


@dataclass(frozen=True, slots=True)
class RequestRun:
    """What one request gave: its unit, and the digests of the tensors at the audit points."""

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
        """Return certified / measured; None where nothing was measured or nothing certified."""
        if self.measured == 0 or not np.isfinite(self.certified):
            return None
        return self.certified / self.measured


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
    """How each metric is measured, the user's own included."""
    reduced: Reduced | None = None
    """The requests of a token table, instead of `requests`."""
    unit: str = "request"
    """What one of `requests` is called: "prompt" where a unit is all rollouts of one."""
    batch: bool = False
    """The units are all those of a recorded batch: one more look at it gives the same values."""
    drawn: tuple[SamplingUnit, ...] | None = None
    """Of a sample: one timed run of each unit, which stands for it in counts. None where every run
    counts."""
    known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Estimates of terms on this slice: each is formed once."""

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
"""Why the values of a request are none of their metric (0: they are)."""


@dataclass(frozen=True, slots=True)
class Column:
    """The values of one term, reduced: an entry for each request.

    `values` there are, `missing` there are not; `nan` and `infinite` of the values; `fractions` of
    them are neither 0 nor 1; `least`, `most` ignore NaN (NaN where nothing else is); `totals` are
    the correctly rounded sums of the finite ones; `faults` are keys of `FAULTS`.
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
        """Say of which requests every value is there, and one that its metric can have."""
        found: NDArray[np.bool_] = (self.missing == 0) & (self.values > 0) & (self.faults == 0)
        return found

    def worst(self, side: Literal["upper", "lower"]) -> Floats:
        """Return the worst value of each request; NaN where one of its values is."""
        extreme = self.most if side == "upper" else self.least
        return np.where(self.nan > 0, np.nan, extreme)

    def fingerprint(self, row: int) -> tuple[float | int, ...]:
        """Return all that a statistic of one request alone can depend on; NaN as None would."""
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
"""The usual drifts of models with a head (False) and of encoders (True)."""

CHART_METRICS = ("top5_overlap", "margin", "entropy")
"""What charts read of models with a head beside the usual drifts, where the vocabulary allows."""


@dataclass(frozen=True, slots=True)
class EvidenceTable:
    """What was measured of a contract's requests, and of what."""

    program: Program
    """The contract as it was compiled, its tables as they are stated."""
    requests: tuple[Request, ...]
    """Every request of the slices, once."""
    runs: Mapping[str, RequestRun]
    """What each request gave, by its key."""
    slices: Mapping[str, tuple[str, ...]]
    """The keys of the requests of each slice, buckets of tables included, in the order of the
    file."""
    measured: frozenset[str]
    """The metrics that were measured, and the norms of drifts (`clauses.norm_name`), whether or
    not a request has values of them."""
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
    """By request: certified bounds of metrics, one for each position; `failure` says why there is
    none. Empty where none were sought."""
    bounding: Mapping[str, Any] = field(default_factory=dict)
    """Of which numerics `certified` speaks, and how long was spent on it (plain JSON data)."""
    floor: Mapping[str, SamplingUnit] = field(default_factory=dict)
    """By request: the drift of the training kernel from itself when it is batched otherwise."""
    spoiled: Mapping[str, str] = field(default_factory=dict)
    """Why the evidence on a slice is invalid, whatever was measured."""
    implied: tuple[ImpliedClause, ...] = ()
    notes: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    """Findings of the contract that its author accepts, with the reasons."""
    seed: int = 0
    looks: int | None = 1
    """How many evaluations of growing data share the error; None: any number."""
