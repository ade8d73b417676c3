"""Two evaluations of one contract on the same requests: the document of `kcdsl compare`.

Plain frozen data, JSON with the schema "kcdsl.compare/2" (`compare.schema.json`) and nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from kcdsl.diagnostics.render.terminal import counted
from kcdsl.verdict.model import HELD
from kcdsl.verdict.records import DocumentRecord, Record

Change = Literal["regressed", "improved", "unchanged", "undecided", "within_noise", "not_compared"]
BandState = Literal["inactive", "inside", "above", "below"]


OF_TIMED_RUNS = "requests with timed runs"
"""What is counted where a request has several runs: by itself, in how many it keeps a threshold."""


@dataclass(frozen=True, slots=True)
class PassRate(Record):
    """The share of units that keep the threshold in one run, with limits of the rate in the
    population that they stand for (each one-sided at the confidence of the clause)."""

    derived: ClassVar[tuple[str, ...]] = ("rate",)

    kept: int
    n: int
    of: str
    low: float | None
    high: float | None

    @property
    def rate(self) -> float:
        """Return kept / n."""
        return self.kept / self.n


@dataclass(frozen=True, slots=True)
class Band(Record):
    """The band of earlier runs, and where the candidate's value lies.

    `inactive` where too few of the `runs` have a value. `harmful`: the value lies outside on the
    side that the clause limits.
    """

    runs: int
    state: BandState
    low: float | None = None
    high: float | None = None
    harmful: bool = False


@dataclass(frozen=True, slots=True)
class Floor(Record):
    """How far reference builds are from each other by the statistic of the clause, on the same
    checkpoint and data. `above`: the threshold is stricter than that."""

    value: float
    builds: int
    above: bool


@dataclass(frozen=True, slots=True)
class PairedRow(Record):
    """One obligation in both runs, unit by unit.

    `incumbent` and `candidate` are the values of the clause, in base units of `unit`, with their
    verdicts and the shares of units that keep the threshold. Of a statement about units, `worse` of
    `n` units kept the threshold in the incumbent's run alone and `better` in the candidate's alone;
    `delta` is the difference of the shares that keep it. Of a mean it is the difference of the
    means. Of timed runs (`counted` is `OF_TIMED_RUNS`), `worse` of `n` requests kept it in more of
    their runs in the incumbent's. `low` and `high` are its limits at 95 %. `error` is the chance of
    a change as harmful, or as useful, if there were none. `compared_at` is the threshold that the
    units were compared with: that of the clause, or the noise floor where that is less strict.
    """

    obligation: str
    clause: str
    slice: str
    requirement: str
    level: str
    change: Change
    unit: str
    counted: str
    verdicts: tuple[str, str]
    family: str = ""
    op: str = ""
    threshold: float | None = None
    incumbent: float | None = None
    candidate: float | None = None
    rates: tuple[PassRate | None, PassRate | None] = (None, None)
    n: int = 0
    worse: int | None = None
    better: int | None = None
    delta: float | None = None
    low: float | None = None
    high: float | None = None
    error: float | None = None
    compared_at: float | None = None
    floor: Floor | None = None
    band: Band | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class MeasureDelta(Record):
    """The mean of a metric in both runs, request by request: quality and reward, or runtime cost.

    `low` and `high` are limits of the difference at 95 %, of this row alone: it decides nothing.
    """

    kind: Literal["quality", "cost"]
    metric: str
    slice: str
    unit: str
    better: str
    n: int
    incumbent: float
    candidate: float
    delta: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class RunComparison(DocumentRecord):
    """All obligations of the candidate's contract, and what else differs between the runs."""

    schema: ClassVar[str] = "kcdsl.compare/2"
    derived: ClassVar[tuple[str, ...]] = ("verdict",)

    contract: Mapping[str, str]
    """That of the candidate: name, version, digest."""
    changed: tuple[str, ...]
    """What differs: contract, checkpoint, fields of the kernels, versions of libraries."""
    error: float
    """The chance of calling any row regressed, or any improved, where none is; and of any row that
    lies outside its band."""
    rows: tuple[PairedRow, ...]
    measures: tuple[MeasureDelta, ...] = ()
    history: int = 0
    """How many earlier runs the bands rest on, at most."""
    references: int = 0
    """How many reference builds the noise floors rest on, at most."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Reports that were named and count for nothing, and why."""

    @property
    def regressed(self) -> tuple[PairedRow, ...]:
        """Return what became worse, the most severe level first."""
        return _severest([row for row in self.rows if row.change == "regressed"])

    @property
    def beyond(self) -> tuple[PairedRow, ...]:
        """Return what lies outside the band of earlier runs on the side that harms."""
        return _severest([row for row in self.rows if row.band is not None and row.band.harmful])

    @property
    def verdict(self) -> str:
        """Return "violated" where something became worse or lies beyond its band, "held" where
        something was compared and nothing did, "inconclusive" otherwise."""
        if self.regressed or self.beyond:
            return "violated"
        invalid = any("invalid_evidence" in row.verdicts for row in self.rows)
        compared = any(row.change != "not_compared" for row in self.rows)
        return HELD if compared and not invalid else "inconclusive"


def _severest(rows: list[PairedRow]) -> tuple[PairedRow, ...]:
    return tuple(sorted(rows, key=lambda row: row.level, reverse=True))


# --- for people -----------------------------------------------------------------------------------


def number_text(value: float | None) -> str:
    """Return a number in a few characters; a dash where there is none."""
    return "–" if value is None else f"{value:.4g}"


def worse_text(row: PairedRow) -> str:
    """Return what became worse of a row, and by how much."""
    found = f"{row.clause} {row.slice} ({row.level}): "
    if row.worse is None:
        return f"{found}mean {number_text(row.incumbent)} → {number_text(row.candidate)}"
    if row.counted == OF_TIMED_RUNS:
        how = "keep the threshold in fewer timed runs than before"
        return f"{found}{row.worse} of {row.n} requests {how}, {row.better} in more"
    return (
        f"{found}{row.worse} of {row.n} {row.counted} kept the threshold before and do not now, "
        f"{row.better} the other way"
    )


def baseline_lines(found: RunComparison) -> Iterator[str]:
    """Yield what bands and noise floors say, and which reports count for nothing."""
    for row in found.rows:
        if row.band is not None and row.band.state in ("above", "below") and not row.band.harmful:
            yield f"outside its band, on the good side: {band_text(row)}"
    active = [row for row in found.rows if row.band is not None and row.band.state != "inactive"]
    if found.history or found.unused:
        banded = [row for row in found.rows if row.band is not None]
        runs = counted(found.history, "run")
        yield f"history: {runs}; {len(active)} of {len(banded)} rows have a band"
    for row in found.rows:
        if row.floor is not None and row.floor.above:
            yield f"below the noise floor: {floor_text(row)}"
        if row.change == "within_noise":
            yield f"within the noise: {row.clause} {row.slice}, {number_text(row.candidate)}"
    for file, why in found.unused.items():
        yield f"not used: {file}: {why}"


def band_text(row: PairedRow) -> str:
    """Return where a value lies beside the band of earlier runs."""
    band = row.band
    assert band is not None
    limits = f"{number_text(band.low)} … {number_text(band.high)}"
    value = number_text(row.candidate)
    return f"{row.clause} {row.slice} ({row.level}): {value}, {band.runs} runs {limits}"


def floor_text(row: PairedRow) -> str:
    """Return a threshold that is stricter than what reference builds differ by."""
    floor = row.floor
    assert floor is not None
    differ = "differs" if floor.builds == 1 else "differ"
    return (
        f"{row.clause} {row.slice} asks {row.op} {number_text(row.threshold)}, "
        f"{counted(floor.builds, 'reference build')} {differ} by {number_text(floor.value)}"
    )
