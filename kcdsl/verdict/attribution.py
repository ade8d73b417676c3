"""Which source makes two kernels drift, and in which block: the document of `kcdsl attribute`.

Plain frozen data, JSON with the schema "kcdsl.attribution/1" (`attribution.schema.json`) and
nothing heavy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kcdsl.diagnostics.render.terminal import json_for_terminals
from kcdsl.exits import Exit

ATTRIBUTION_SCHEMA = "kcdsl.attribution/1"
Status = Literal["attributed", "no_drift", "inconclusive", "invalid_evidence"]
State = Literal["differs", "equal", "absent"]
Method = Literal["shapley", "orders_that_run", "none"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number with its interval; without one nothing is shown of other requests."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def shown(self) -> bool:
        """Say whether the interval lies on one side of 0."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"value": self.value, "low": self.low, "high": self.high, "shown": self.shown}


@dataclass(frozen=True, slots=True)
class Source:
    """One source of drift.

    `train` and `infer` say in words what it is on both sides. Drifts are in units of the metric:
    `alone` with this source of infer only, `left_out` what is lost where it alone is that of
    train, `shapley` its share; None where the kernels for it do not run.

    `envelope` is the certified bound of how far it alone may move the output of `envelope_block`,
    the block where most of the drift arises, and `observed` how far that moves. `can_explain` says
    whether it may reach that; None without a bound. `excluded` are the blocks of which a bound
    shows that it is not the only cause.
    """

    name: str
    term: str
    state: State
    train: str
    infer: str
    reason: str | None = None
    alone: Figure | None = None
    left_out: Figure | None = None
    shapley: Figure | None = None
    share: float | None = None
    envelope: float | None = None
    observed: float | None = None
    envelope_block: str | None = None
    can_explain: bool | None = None
    excluded: tuple[str, ...] = ()

    @property
    def reach(self) -> float | None:
        """Return the most of the drift of that block that it alone can make, as a share; None
        without a bound, or where the bound excludes nothing."""
        if self.can_explain is not False or not self.observed or self.envelope is None:
            return None
        return self.envelope / self.observed

    @property
    def shown(self) -> bool:
        """Say whether its share is shown to be other than 0."""
        return self.shapley is not None and self.shapley.shown

    def to_json(self) -> dict[str, Any]:
        """Return plain data; the interval of the share stands beside it."""
        share = self.shapley
        return {
            "name": self.name,
            "term": self.term,
            "state": self.state,
            "train": self.train,
            "infer": self.infer,
            "reason": self.reason,
            "alone": None if self.alone is None else self.alone.value,
            "alone_low": None if self.alone is None else self.alone.low,
            "alone_high": None if self.alone is None else self.alone.high,
            "left_out": None if self.left_out is None else self.left_out.value,
            "left_out_low": None if self.left_out is None else self.left_out.low,
            "left_out_high": None if self.left_out is None else self.left_out.high,
            "shapley": None if share is None else share.value,
            "low": None if share is None else share.low,
            "high": None if share is None else share.high,
            "shown": self.shown,
            "share": self.share,
            "envelope": self.envelope,
            "observed": self.observed,
            "envelope_block": self.envelope_block,
            "can_explain": self.can_explain,
            "excluded": list(self.excluded),
        }


@dataclass(frozen=True, slots=True)
class Term:
    """One of the four terms of the error, with the sources that belong to it and its share."""

    name: str
    sources: tuple[str, ...]
    shapley: Figure | None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "sources": list(self.sources),
            "shapley": None if self.shapley is None else self.shapley.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Interaction:
    """What two sources do together beyond the sum of what each does: 0 where effects add up."""

    first: str
    second: str
    figure: Figure

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"first": self.first, "second": self.second, **self.figure.to_json()}


@dataclass(frozen=True, slots=True)
class Between:
    """A kernel between both sides: what it takes from infer, and its drift or why it has none."""

    sources: tuple[str, ...]
    value: float | None
    reason: str | None = None
    simulated: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "sources": list(self.sources)}


@dataclass(frozen=True, slots=True)
class Layer:
    """One block. Sizes are root mean squares over all elements at its output, `largest` one
    element; `floor` is how far the training kernel's own block moves when it runs again or in a
    batch. In units of the metric: `logits`, its drift where this block alone is that of infer,
    `cumulative`, where all blocks up to it are, and `gain`, what it adds to that."""

    block: str
    drift: float
    largest: float
    relative: float
    floor: float
    differing: float
    logits: float
    cumulative: float
    gain: float

    @property
    def above(self) -> bool:
        """Say whether the block drifts further than the training kernel's own."""
        return self.drift > self.floor


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first element whose bits differ: of block `block`, on what enters it in training."""

    block: str
    layer: int | None
    operation: str
    request: str
    token: int
    index: int
    train: float
    infer: float


@dataclass(frozen=True, slots=True)
class Layers:
    """All blocks in order of application, over the named requests; `total` is the drift of infer
    there."""

    rows: tuple[Layer, ...]
    requests: tuple[str, ...]
    total: float
    first_mismatch: Mismatch | None

    @property
    def first_block(self) -> str | None:
        """Return the first block that drifts above its floor."""
        return next((row.block for row in self.rows if row.above), None)

    @property
    def outside(self) -> float:
        """Return what of the drift arises outside of the blocks: embeddings, sums between them."""
        return self.total - (self.rows[-1].cumulative if self.rows else 0.0)

    def largest(self, count: int) -> tuple[Layer, ...]:
        """Return the `count` blocks that gain or lose most, in order of application."""
        kept = sorted(self.rows, key=lambda row: -abs(row.gain))[:count]
        return tuple(row for row in self.rows if row in kept)


@dataclass(frozen=True, slots=True)
class Envelope:
    """The certified bound of one source on one block over the requests, beside what was measured.

    `observed` is the largest drift between infer and train, `certified` the largest bound of what
    this source alone may do, both on the request where the first is the most of the second;
    `certified` is None where there is no bound, for the `reason`. `ratio` is the largest quotient
    of drift and bound of one element. `measured` is the largest drift of the real hybrid on the
    same request, None where there is none. `metric` is, of a block whose output are the logits, the
    most of the metric that this source alone can make there at any position of the requests.
    """

    source: str
    block: str
    request: str
    observed: float
    certified: float | None
    ratio: float | None
    measured: float | None
    reason: str | None = None
    metric: float | None = None

    @property
    def can_explain(self) -> bool | None:
        """Say whether it may be the only cause here; None where there is no bound."""
        return None if self.ratio is None else self.ratio <= 1

    @property
    def can_reach(self) -> bool | None:
        """Say whether it alone may move the block as far; None where there is no bound."""
        return None if self.certified is None else self.observed <= self.certified

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "can_explain": self.can_explain, "can_reach": self.can_reach}


@dataclass(frozen=True, slots=True)
class Remedy:
    """What may be done about a source: a word for programs, a sentence for people."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cause, the likeliest first.

    `verdict` "most" or "part" of the drift where its share is shown, else "not_shown".
    `can_explain` False: a certified bound shows that it alone cannot reach the drift of the block
    where most arises. `confirmed`: leaving it out takes a shown part of the drift away.
    """

    rank: int
    source: str
    share: float | None
    low: float | None
    high: float | None
    verdict: Literal["most", "part", "against", "not_shown"]
    can_explain: bool | None
    confirmed: bool | None
    blocks: tuple[str, ...]
    evidence: tuple[str, ...]
    remedies: tuple[Remedy, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        plain = asdict(self)
        return {**plain, **{k: list(plain[k]) for k in ("blocks", "evidence", "remedies")}}


@dataclass(frozen=True, slots=True)
class Attribution:
    """What `kcdsl attribute` found; drifts are in `unit`s of the metric."""

    contract: Mapping[str, str]
    kernels: Mapping[str, str]
    slice: str | None
    metric: str
    statistic: str
    unit: str
    better: str
    requests: int
    batch: int
    seed: int
    status: Status
    reason: str | None
    total: Figure
    baseline: float
    noise: float
    method: Method
    orders: tuple[int, int]
    sources: tuple[Source, ...]
    terms: tuple[Term, ...]
    interactions: tuple[Interaction, ...]
    between: tuple[Between, ...]
    layers: Layers | None
    envelopes: tuple[Envelope, ...]
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]

    @property
    def exit(self) -> Exit:
        """Return the exit code: 3 where no share is shown, 2 where the evidence is invalid."""
        match self.status:
            case "attributed" | "no_drift":
                return Exit.HELD
            case "inconclusive":
                return Exit.INCONCLUSIVE
            case "invalid_evidence":
                return Exit.COULD_NOT_RUN

    def to_json(self) -> dict[str, Any]:
        """Return the document "kcdsl.attribution/1"."""
        layers = self.layers
        first = None if layers is None else layers.first_mismatch
        return {
            "schema": ATTRIBUTION_SCHEMA,
            "contract": dict(self.contract),
            "kernels": dict(self.kernels),
            "slice": self.slice,
            "metric": self.metric,
            "statistic": self.statistic,
            "unit": self.unit,
            "better": self.better,
            "requests": self.requests,
            "batch": self.batch,
            "seed": self.seed,
            "status": self.status,
            "reason": self.reason,
            "total": self.total.value,
            "total_low": self.total.low,
            "total_high": self.total.high,
            "baseline": self.baseline,
            "noise": self.noise,
            "method": self.method,
            "orders": {"run": self.orders[0], "all": self.orders[1]},
            "sources": [source.to_json() for source in self.sources],
            "terms": [term.to_json() for term in self.terms],
            "interactions": [pair.to_json() for pair in self.interactions],
            "between": [row.to_json() for row in self.between],
            "layers": [] if layers is None else [asdict(row) for row in layers.rows],
            "layer_requests": [] if layers is None else list(layers.requests),
            "layer_total": None if layers is None else layers.total,
            "layer_outside": None if layers is None else layers.outside,
            "first_block": None if layers is None else layers.first_block,
            "first_mismatch": None if first is None else asdict(first),
            "envelopes": [row.to_json() for row in self.envelopes],
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "notes": list(self.notes),
        }

    def dumps(self) -> str:
        """Return the document as text."""
        return (
            json_for_terminals(
                json.dumps(self.to_json(), indent=2, allow_nan=False, ensure_ascii=False)
            )
            + "\n"
        )
