"""Earlier runs and reference builds for a comparison: bands of values, and noise floors.

A band is the two-sided Student prediction interval of the next value from n earlier ones (Hahn and
Meeker, Statistical Intervals, 1991, section 4.6), at an error shared among all rows with a band
(Bonferroni). It assumes that values of runs are independent draws from one normal law. A row has a
band from `FEWEST_RUNS` runs on. A noise floor is the worst value between two reference builds on
the same checkpoint and data, with its confidence limit if it was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from kcdsl.ir.tables import whole_of
from kcdsl.verdict.result import ClauseResult
from kcdsl.verdict.studies.comparison import Band, BandState, Floor

FEWEST_RUNS = 8
"""Smallest number of earlier values for a band."""
Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Baselines:
    """The reports that are used, and the unused ones with the reason."""

    history: tuple[Document, ...] = ()
    references: tuple[Document, ...] = ()
    unused: Mapping[str, str] | None = None


def usable(
    candidate: Document,
    history: Mapping[str, Document],
    references: Mapping[str, Document],
    untrusted: Mapping[str, str],
) -> Baselines:
    """Return the reports, by file, that are comparable with the candidate; each once.

    A report of the history must have the candidate's data, temperature and functions of metrics, a
    reference the checkpoint too.
    `untrusted`
        names files that are left out, with the reason.
    """
    unused: dict[str, str] = {}
    kept: list[list[Document]] = [[], []]
    seen: list[Document] = [candidate]
    for place, documents in enumerate((history, references)):
        for file, document in documents.items():
            why = untrusted.get(file) or _why_not_comparable(
                candidate, document, checkpoint=bool(place)
            )
            if not why and any(document == other for other in seen):
                why = "its content is that of the candidate's report, or of one named before"
            if why:
                unused[file] = why
                continue
            seen.append(document)
            kept[place].append(document)
    return Baselines(tuple(kept[0]), tuple(kept[1]), unused)


def _why_not_comparable(candidate: Document, document: Document, *, checkpoint: bool) -> str:
    """Return why a report is not comparable; empty if it is."""
    own, other = ({d.get("sha256") for d in each.get("data", [])} for each in (candidate, document))
    if not own or None in own or own != other:
        return "it is about other data"
    if candidate["environment"].get("unit") != document["environment"].get("unit"):
        return "its units are others"
    if candidate["environment"].get("temperature") != document["environment"].get("temperature"):
        return "it is at another temperature"
    here, there = (
        {each["name"]: each["sha256"] for each in one["environment"].get("metrics", ())}
        for one in (candidate, document)
    )
    edited = [name for name in here.keys() & there.keys() if here[name] != there[name]]
    if edited:
        return f"another file computed {min(edited)}"
    if not checkpoint:
        return ""
    digests = [each["model"].get("sha256") for each in (candidate, document)]
    return "" if digests[0] and digests[0] == digests[1] else "it is about another checkpoint"


# --- bands ----------------------------------------------------------------------------------------


def bands(
    rows: Sequence[ClauseResult], candidate: Document, history: Sequence[Document], error: float
) -> dict[str, Band]:
    """Return the bands of earlier runs and the position of the candidate's values, by
    obligation."""
    found: dict[str, Band] = {}
    values = {row.obligation: _earlier(row, candidate, history) for row in rows}
    active = [
        row for row in rows if _is_number(row.value) and len(values[row.obligation]) >= FEWEST_RUNS
    ]
    for row in rows:
        earlier = values[row.obligation]
        found[row.obligation] = Band(len(earlier), "inactive")
    for row in active:
        assert row.value is not None
        low, high = prediction(values[row.obligation], error / len(active))
        state: BandState = "inside"
        if not row.value >= low:
            state = "below"
        elif not row.value <= high:
            state = "above"
        found[row.obligation] = Band(
            len(values[row.obligation]), state, low, high, _harms(state, row.op)
        )
    return found


def prediction(values: Sequence[float], error: float) -> tuple[float, float]:
    """Return the limits within which the next value lies with probability 1 - `error`.

    Equal values have a band of that value alone: any other value is a change.
    """
    sample = np.array(values, dtype=np.float64)
    n = sample.size
    if np.all(sample == sample[0]):
        return float(sample[0]), float(sample[0])
    mean = math.fsum(values) / n
    half = float(stats.t.ppf(1 - error / 2, n - 1)) * float(np.std(sample, ddof=1))
    half *= math.sqrt(1 + 1 / n)
    return mean - half, mean + half


def _harms(state: BandState, op: str) -> bool:
    if state == "inside":
        return False
    sides = {"<=": ("above",), "<": ("above",), ">=": ("below",), ">": ("below",)}
    return state in sides.get(op, ("above", "below"))


def _earlier(row: ClauseResult, candidate: Document, history: Sequence[Document]) -> list[float]:
    """Return the values of the same obligation in earlier runs, runtime ones on the same
    machine."""
    found = []
    for document in history:
        if row.family == "runtime" and _machine(document) != _machine(candidate):
            continue
        if _rows_of(document, row.slice) != _rows_of(candidate, row.slice):
            continue
        for other in document["clauses"]:
            same = (other.get("obligation"), other.get("requirement")) == (
                row.obligation,
                row.requirement,
            )
            if (
                same
                and other.get("verdict") != "invalid_evidence"
                and _is_number(other.get("value"))
            ):
                found.append(float(other["value"]))
    return found


def _rows_of(document: Document, slice: str) -> Any:
    """Return the numbers of requests and tokens of a slice: with the digest of the data they
    distinguish it from a slice of the same name in another contract."""
    found = (own for own in document.get("slices", ()) if own.get("slice") == whole_of(slice))
    return [(own.get("requests"), own.get("tokens")) for own in found]


def _machine(document: Document) -> Any:
    """Return the machine of the inference kernel, on which times depend, as far as it is stated."""
    fingerprint = document["kernels"].get("infer", {}).get("fingerprint", {})
    return fingerprint.get("hardware"), fingerprint.get("device")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# --- noise floors ---------------------------------------------------------------------------------


def floors(
    rows: Sequence[ClauseResult], candidate: Document, references: Sequence[Document]
) -> dict[str, Floor]:
    """Return the known noise floors of obligations that compare with a number.

    The drift of the candidate's training kernel from itself under another batching counts as one
    build.
    """
    found: dict[str, Floor] = {}
    for row in rows:
        if row.threshold is None or row.op not in ("<=", "<", ">=", ">"):
            continue
        upper = row.op in ("<=", "<")
        values = [
            value
            for document in references
            if _rows_of(document, row.slice) == _rows_of(candidate, row.slice)
            for value in _reference_values(row, document, upper)
        ]
        own = None if row.context is None else row.context.noise_floor
        if own is not None and own.value is not None and math.isfinite(own.value):
            values.append(own.value)
        if not values:
            continue
        worst = max(values) if upper else min(values)
        above = worst > row.threshold if upper else worst < row.threshold
        found[row.obligation] = Floor(worst, len(values), above)
    return found


def _reference_values(row: ClauseResult, document: Document, upper: bool) -> list[float]:
    found = []
    for other in document["clauses"]:
        same = all(other.get(n) == getattr(row, n) for n in ("obligation", "metric", "op", "unit"))
        if not same or other.get("verdict") == "invalid_evidence":
            continue
        value, limit = other.get("value"), other.get("high" if upper else "low")
        if not _is_number(value):
            continue
        ends = [float(value)]
        if other.get("evidence") == "sample" and _is_number(limit):
            ends.append(float(limit))
        found.append(max(ends) if upper else min(ends))
    return found


def within(value: float | None, floor: Floor | None, op: str) -> bool:
    """Return whether a value lies within the noise floor."""
    if floor is None or value is None:
        return False
    return value <= floor.value if op in ("<=", "<") else value >= floor.value
