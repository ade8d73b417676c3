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
"""The unit where a request has several runs: a request counts by its runs that pass."""


@dataclass(frozen=True, slots=True)
class PassRate(Record):
    """The share of units within the threshold in one run, with one-sided limits of the rate in the
    population, each at the confidence of the clause."""

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
    """The band of earlier runs, and the position of the candidate's value.

    `inactive` where too few of the `runs` have a value. `harmful`: the value is outside on the
    side that the clause limits.
    """

    runs: int
    state: BandState
    low: float | None = None
    high: float | None = None
    harmful: bool = False


@dataclass(frozen=True, slots=True)
class Floor(Record):
    """The statistic of the clause between reference builds, on the same checkpoint and data.
    `above`: the threshold is stricter than this noise floor."""

    value: float
    builds: int
    above: bool


@dataclass(frozen=True, slots=True)
class PairedRow(Record):
    """One obligation in both runs, unit by unit.

    `incumbent` and `candidate` are the values of the clause, in base units of `unit`, with their
    verdicts and the shares of units that pass. For a statement about units, `worse` of `n` units
    pass in the incumbent's run only and `better` in the candidate's only; `delta` is the difference
    of the shares that pass. For a mean, `delta` is the difference of the means. For timed runs
    (`counted` is `OF_TIMED_RUNS`), `worse` of `n` requests pass in more of the incumbent's runs.
    `low` and `high` are the 95 % limits of `delta`. `error` is the p-value of a harmful, or useful,
    change. `compared_at` is the threshold used for the units: that of the clause, or the noise
    floor where that is less strict.
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

    `low` and `high` are 95 % limits of the difference of this row alone; they decide no verdict.
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
    """All obligations of the candidate's contract, and other differences between the runs."""

    schema: ClassVar[str] = "kcdsl.compare/2"
    derived: ClassVar[tuple[str, ...]] = ("verdict",)

    contract: Mapping[str, str]
    """The contract of the candidate: name, version, digest."""
    changed: tuple[str, ...]
    """The differences: contract, checkpoint, fields of the kernels, versions of libraries."""
    error: float
    """The chance of calling any row regressed, or any improved, where none is; and of any row that
    lies outside its band."""
    rows: tuple[PairedRow, ...]
    measures: tuple[MeasureDelta, ...] = ()
    history: int = 0
    """The largest number of earlier runs behind a band."""
    references: int = 0
    """The largest number of reference builds behind a noise floor."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Ignored reports, with reasons."""

    @property
    def regressed(self) -> tuple[PairedRow, ...]:
        """Return the rows that became worse, the most severe level first."""
        return _severest([row for row in self.rows if row.change == "regressed"])

    @property
    def beyond(self) -> tuple[PairedRow, ...]:
        """Return the rows outside the band of earlier runs on the harmful side."""
        return _severest([row for row in self.rows if row.band is not None and row.band.harmful])

    @property
    def verdict(self) -> str:
        """Return "violated" if a row became worse or is beyond its band, "held" if rows were
        compared and none did, "inconclusive" otherwise."""
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
    """Return the row and its regression in words."""
    return f"{row.clause} {row.slice} ({row.level}): {regression_text(row)}"


def regression_text(row: PairedRow) -> str:
    """Return the regression of a row in words."""
    if row.worse is None:
        return f"mean {number_text(row.incumbent)} → {number_text(row.candidate)}"
    if row.counted == OF_TIMED_RUNS:
        how = "keep the threshold in fewer timed runs than before"
        return f"{row.worse} of {row.n} requests {how}, {row.better} in more"
    return (
        f"{row.worse} of {row.n} {row.counted} kept the threshold before and do not now, "
        f"{row.better} the other way"
    )


def baseline_lines(found: RunComparison) -> Iterator[str]:
    """Yield sentences about bands, noise floors and ignored reports."""
    for row in found.rows:
        if row.band is not None and row.band.state in ("above", "below") and not row.band.harmful:
            yield f"outside its band, on the good side: {band_text(row)}"
    active = [row for row in found.rows if row.band is not None and row.band.state != "inactive"]
    if found.history or found.unused:
        banded = [row for row in found.rows if row.band is not None]
        runs = counted(found.history, "run")
        yield f"history: {runs}; {len(active)} of {len(banded)} rows have a band"
    floored = [row.floor for row in found.rows if row.floor is not None]
    if found.references:
        stricter = sum(floor.above for floor in floored)
        reports = counted(found.references, "reference report")
        yield f"noise floors: {reports}; {stricter} of {len(floored)} thresholds are stricter"
    for row in found.rows:
        if row.floor is not None and row.floor.above:
            yield f"below the noise floor: {floor_text(row)}"
        if row.change == "within_noise":
            yield f"within the noise: {row.clause} {row.slice}, {number_text(row.candidate)}"
    for file, why in found.unused.items():
        yield f"not used: {file}: {why}"


def band_text(row: PairedRow) -> str:
    """Return the position of a value relative to the band of earlier runs."""
    band = row.band
    assert band is not None
    limits = f"{number_text(band.low)} … {number_text(band.high)}"
    value = number_text(row.candidate)
    return f"{row.clause} {row.slice} ({row.level}): {value}, {band.runs} runs {limits}"


def floor_text(row: PairedRow) -> str:
    """Return a remark on a threshold that is stricter than the noise floor."""
    floor = row.floor
    assert floor is not None
    differ = "differs" if floor.builds == 1 else "differ"
    return (
        f"{row.clause} {row.slice} asks {row.op} {number_text(row.threshold)}, "
        f"{counted(floor.builds, 'reference build')} {differ} by {number_text(floor.value)}"
    )
