"""What an earlier evaluation says of a clause: its report, or the trace of its requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy import stats

from kcdsl.config import shown
from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.terms import Abs, Clause, Compare, Metric, Number, Statistic, Term
from kcdsl.source.files import read_source
from kcdsl_backends.empirical.allowance import allowed_rate
from kcdsl_backends.empirical.clauses import main_comparison
from kcdsl_backends.empirical.statistics.bootstrap import linear_error
from kcdsl_backends.empirical.statistics.vocabulary import Array

_SIZE_LIMIT = 2**30
_REPORT, _TRACE = "kcdsl.report/1", "kcdsl.trace/1"


@dataclass(frozen=True, slots=True)
class Observed:
    """n units; `k` of them beyond the threshold and the worst value of each, or the mean `value`
    and the `variance` of one unit."""

    n: int
    k: int | None = None
    value: float | None = None
    variance: float | None = None
    worst: Array | None = None


class Pilot(Protocol):
    """An earlier evaluation of the same clauses."""

    def observe(self, part: Clause, position: int, slice_name: str) -> Observed | None:
        """Return what was seen of a part of a clause on a slice, None for nothing usable.

        `position` counts the parts of the clause.
        """
        ...


def read_pilot(path: Path) -> Pilot:
    """Read report.json, trace.jsonl or trace.parquet of `kcdsl evaluate`; raises Refusal for
    anything else (KC629, for a trace also KC630 and KC631)."""
    if path.suffix == ".parquet":
        from kcdsl_backends.empirical.evidence import records
        from kcdsl_backends.empirical.traces.file import read_trace

        return _TracePilot(tuple(records(read_trace(path).evidence).values()))
    text = read_source(shown(path), _SIZE_LIMIT).text
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    except RecursionError:
        raise _unusable(path, "it is nested too deeply") from None
    try:
        if isinstance(document, dict) and document.get("schema") == _REPORT:
            return _report(document)
        return _trace(text.splitlines())
    except Refusal:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(path, str(error) or type(error).__name__) from None


def _unusable(path: Path, why: str) -> Refusal:
    return refuse(
        codes.PILOT_FILE,
        f"{shown(path)} is no usable pilot: {why}",
        help="give report.json or a trace as `kcdsl evaluate` wrote them",
    )


# --- report.json ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ReportPilot:
    rows: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]

    def observe(self, part: Clause, position: int, slice_name: str) -> Observed | None:
        rows = self.rows.get((part.id, slice_name), ())
        if position >= len(rows) or rows[position]["verdict"] == "invalid_evidence":
            return None
        row = rows[position]
        if allowed_rate(part) is not None:
            counted = row["exceedance"]
            return None if counted is None else Observed(int(counted["n"]), int(counted["k"]))
        limit = row["low"] if row["op"] in (">=", ">") else row["high"]
        value, n = row["value"], int(row["n"])
        if value is None or limit is None or row["confidence"] is None or n < 1:
            return None
        z = float(stats.norm.ppf(float(row["confidence"])))
        return Observed(
            n, value=float(value), variance=n * ((float(limit) - float(value)) / z) ** 2
        )


def _report(document: Mapping[str, Any]) -> Pilot:
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in document["clauses"]:
        for name in ("verdict", "exceedance", "low", "high", "value", "n", "op", "confidence"):
            row[name]
        rows.setdefault((str(row["clause"]), str(row["slice"])), []).append(row)
    return _ReportPilot(rows)


# --- traces ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TracePilot:
    records: Sequence[Mapping[str, Any]]

    def observe(self, part: Clause, position: int, slice_name: str) -> Observed | None:
        comparison = main_comparison(part.require)
        if comparison is None:
            return None
        own = [record for record in self.records if slice_name in record["slices"]]
        split = _metric_and_threshold(comparison)
        if split is None or not own or any(record["failure"] for record in own):
            return None
        kind, name, magnitude, tau, op = split
        if part.budget is not None and (part.budget.unit == "windows" or kind == "mean"):
            return None
        if kind == "mean":
            return None if magnitude else _mean_of(own, name)
        worst = _worst_of(own, name, magnitude, upper=op in ("<=", "<"))
        if worst is None or allowed_rate(part) is None:
            return None
        beyond = sum(not _keeps(value, op, tau) for value in worst)
        return Observed(len(worst), beyond, worst=np.array(worst, dtype=np.float64))


_FLIPPED = {"<=": ">=", ">=": "<=", "<": ">", ">": "<", "==": "=="}


def _trace(lines: Sequence[str]) -> Pilot:
    records = []
    for number, line in enumerate(lines, 1):
        record = json.loads(line)
        if not isinstance(record, dict) or record.get("schema") != _TRACE:
            raise ValueError(f"line {number} is no record of a trace")
        for name in ("slices", "failure", "values", "latency_s"):
            record[name]
        records.append(record)
    if not records:
        raise ValueError("it has no records")
    return _TracePilot(records)


def _metric_and_threshold(
    comparison: Compare,
) -> tuple[str, str, bool, Fraction, str] | None:
    left, right, op = comparison.left, comparison.right, comparison.op
    if isinstance(left, Number):
        left, right, op = right, left, _FLIPPED[op]
    if not isinstance(left, Statistic) or not isinstance(right, Number) or op == "==":
        return None
    of: Term = left.of.of if isinstance(left.of, Abs) else left.of
    if not isinstance(of, Metric):
        return None
    return left.kind, of.name, isinstance(left.of, Abs), right.value, op


def _worst_of(
    records: Sequence[Mapping[str, Any]], name: str, magnitude: bool, *, upper: bool
) -> list[float] | None:
    """Return the worst value of each unit, as far as a trace holds it; None where it does not."""
    if name == "latency":
        return [float(v) for record in records for v in record["latency_s"]] or None
    found: list[float] = []
    for record in records:
        summary = record["values"].get(name)
        if summary is None or summary["min"] is None or summary["max"] is None:
            return None
        low, high = float(summary["min"]), float(summary["max"])
        if magnitude and not upper:
            return None
        found.append(max(abs(low), abs(high)) if magnitude else high if upper else low)
    return found


def _mean_of(records: Sequence[Mapping[str, Any]], name: str) -> Observed | None:
    sums, sizes = [], []
    for record in records:
        summary = record["values"].get(name)
        if summary is None or summary["sum"] is None or not summary["n"]:
            return None
        sums.append(float(summary["sum"]))
        sizes.append(float(summary["n"]))
    n = len(sums)
    if n < 2:
        return None
    value = math.fsum(sums) / math.fsum(sizes)
    error = linear_error(np.array(sums), np.array(sizes), value)
    return Observed(n, value=value, variance=n * error**2)


def _keeps(value: float, op: str, tau: Fraction) -> bool:
    if not math.isfinite(value):
        return False
    exact = Fraction(value)
    match op:
        case "<=":
            return exact <= tau
        case "<":
            return exact < tau
        case ">=":
            return exact >= tau
        case _:
            return exact > tau
