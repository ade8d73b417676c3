"""The document of `kcdsl attribute`: sources of the drift of two kernels, and its blocks.

Plain frozen data, JSON with the schema "kcdsl.attribution/1" (`attribution.schema.json`) and
nothing heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kcdsl.exits import Exit
from kcdsl.verdict.records import DocumentRecord, Record

Status = Literal["attributed", "no_drift", "inconclusive", "invalid_evidence"]
State = Literal["differs", "equal", "absent"]
Method = Literal["shapley", "orders_that_run", "none"]


@dataclass(frozen=True, slots=True)
class EstimatedNumber(Record):
    """A number with its confidence interval; without one it describes only the observed
    requests."""

    derived: ClassVar[tuple[str, ...]] = ("shown",)

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def shown(self) -> bool:
        """Return whether the interval lies on one side of 0."""
        if self.low is None or self.high is None:
            return False
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, slots=True)
class Source(Record):
    """One source of drift.

    `train` and `infer` describe it on both sides. Drifts are in units of the metric: `alone` is the
    drift with only this source taken from infer, `left_out` the reduction of the drift with only
    this source taken from train, `shapley` its Shapley value; None where those kernels do not run.

    `envelope` is the certified bound on its effect alone on the output of `envelope_block`, the
    block where most of the drift arises, and `observed` the drift of that output. `can_explain`:
    whether the bound reaches the observed drift; None without a bound. `excluded` are the blocks
    where a bound shows that it is not the only cause.
    """

    derived: ClassVar[tuple[str, ...]] = ("shown",)

    name: str
    term: str
    state: State
    train: str
    infer: str
    reason: str | None = None
    alone: EstimatedNumber | None = None
    left_out: EstimatedNumber | None = None
    shapley: EstimatedNumber | None = None
    share: float | None = None
    envelope: float | None = None
    observed: float | None = None
    envelope_block: str | None = None
    can_explain: bool | None = None
    excluded: tuple[str, ...] = ()

    @property
    def reach(self) -> float | None:
        """Return the largest share of the drift of that block that it alone can cause; None
        without a bound, or where the bound excludes nothing."""
        if self.can_explain is not False or not self.observed or self.envelope is None:
            return None
        return self.envelope / self.observed

    @property
    def shown(self) -> bool:
        """Return whether its share is significantly different from 0."""
        return self.shapley is not None and self.shapley.shown

    def to_json(self) -> dict[str, Any]:
        """Return plain data; the interval of the share is that of the source."""
        share = _interval("shapley", self.shapley)
        return {
            **Record.to_json(self),
            **_interval("alone", self.alone),
            **_interval("left_out", self.left_out),
            "shapley": share["shapley"],
            "low": share["shapley_low"],
            "high": share["shapley_high"],
        }


@dataclass(frozen=True, slots=True)
class Term(Record):
    """One of the four terms of the error, with the sources that belong to it and its share."""

    name: str
    sources: tuple[str, ...]
    shapley: EstimatedNumber | None


@dataclass(frozen=True, slots=True)
class IntermediateKernel(Record):
    """A kernel between both sides: the sources taken from infer, and its drift or why it has
    none."""

    sources: tuple[str, ...]
    value: float | None
    reason: str | None = None
    simulated: bool = False


@dataclass(frozen=True, slots=True)
class Layer(Record):
    """One block. Sizes are root mean squares over all elements of its output, `largest` is the
    largest element; `floor` is the drift of the training kernel's block from itself when it runs
    again or in a batch. In units of the metric: `logits` is the drift with only this block taken
    from infer, `cumulative` with all blocks up to it, and `gain` its increment of `cumulative`."""

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
        """Return whether the drift of the block exceeds the noise floor of the training kernel."""
        return self.drift > self.floor


@dataclass(frozen=True, slots=True)
class Mismatch(Record):
    """The first element whose bits differ: of block `block`, on its input in the training
    kernel."""

    block: str
    layer: int | None
    operation: str
    request: str
    token: int
    index: int
    train: float
    infer: float


@dataclass(frozen=True, slots=True)
class Layers(Record):
    """All blocks in order of application, over the named requests; `total` is the drift of infer
    there."""

    derived: ClassVar[tuple[str, ...]] = ("first_block", "outside")

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
        """Return the part of the drift that arises outside the blocks: embeddings, residual
        sums."""
        return self.total - (self.rows[-1].cumulative if self.rows else 0.0)

    def largest(self, count: int) -> tuple[Layer, ...]:
        """Return the `count` blocks with the largest absolute gain, in order of application."""
        kept = sorted(self.rows, key=lambda row: -abs(row.gain))[:count]
        return tuple(row for row in self.rows if row in kept)


@dataclass(frozen=True, slots=True)
class Envelope(Record):
    """The certified bound of one source on one block over the requests, and the measured drift.

    `observed` is the largest drift between infer and train, `certified` the bound on the effect of
    this source alone, both on the request with the largest quotient of the two; `certified` is None
    where there is no bound, for the `reason`. `ratio` is the largest quotient of drift and bound of
    one element. `measured` is the largest drift of the real hybrid on the same request, None where
    there is none. `metric`, for a block whose output is the logits, is the largest value of the
    metric that this source alone can cause at any position of the requests.
    """

    derived: ClassVar[tuple[str, ...]] = ("can_explain", "can_reach")

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
        """Return whether it may be the only cause here; None where there is no bound."""
        return None if self.ratio is None else self.ratio <= 1

    @property
    def can_reach(self) -> bool | None:
        """Return whether it alone may cause the observed drift; None where there is no bound."""
        return None if self.certified is None else self.observed <= self.certified


@dataclass(frozen=True, slots=True)
class Remedy(Record):
    """A remedy for a source: an identifier for programs, a sentence for people."""

    id: str
    text: str


@dataclass(frozen=True, slots=True)
class Candidate(Record):
    """A candidate cause.

    `verdict` is "most" or "part" of the drift if its share is significant, else "not_shown".
    `can_explain` False: a certified bound shows that it alone cannot cause the drift of the block
    where most arises. `confirmed`: leaving it out reduces the drift significantly.
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


@dataclass(frozen=True, slots=True)
class Attribution(DocumentRecord):
    """The result of `kcdsl attribute`; drifts are in `unit`s of the metric."""

    schema: ClassVar[str] = "kcdsl.attribution/1"

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
    total: EstimatedNumber
    baseline: float
    noise: float
    method: Method
    orders: tuple[int, int]
    sources: tuple[Source, ...]
    terms: tuple[Term, ...]
    between: tuple[IntermediateKernel, ...]
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
        layers, found = self.layers, DocumentRecord.to_json(self)
        parts = {} if layers is None else layers.to_json()
        return {
            **found,
            **_interval("total", self.total),
            "orders": dict(zip(("run", "all"), self.orders, strict=True)),
            "layers": parts.get("rows", []),
            "layer_requests": parts.get("requests", []),
            "layer_total": parts.get("total"),
            "layer_outside": parts.get("outside"),
            "first_block": parts.get("first_block"),
            "first_mismatch": parts.get("first_mismatch"),
        }


def _interval(name: str, figure: EstimatedNumber | None) -> dict[str, float | None]:
    """Return a number and the ends of its interval under one name."""
    value, low, high = (figure.value, figure.low, figure.high) if figure else (None,) * 3
    return {name: value, f"{name}_low": low, f"{name}_high": high}
