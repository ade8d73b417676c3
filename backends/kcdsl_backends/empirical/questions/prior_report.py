"""What an earlier evaluation says of a clause: its report, or the trace of its requests."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from scipy import stats

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.obligations import Obligation
from kcdsl.ir.printer import term_text
from kcdsl.ir.terms import Abs, Clause, Metric, Statistic
from kcdsl.source.files import MARK, MARKED, read_source, shown
from kcdsl_backends.empirical.requirements.budgets import allowed_rate, bounded_mean, is_mean, sides
from kcdsl_backends.empirical.requirements.clauses import main_comparison
from kcdsl_backends.empirical.statistics.bootstrap import linear_error
from kcdsl_backends.empirical.statistics.estimates import Array, rounded_sum

_SIZE_LIMIT = 2**30
_REPORT, _TRACE = "kcdsl.report/2", "kcdsl.trace/1"


@dataclass(frozen=True, slots=True)
class Observed:
    """n units; `k` of them beyond the threshold and the worst value of each, or the mean `value`
    and the `variance` of one unit, and how many have another mean than the best of `away`."""

    n: int
    k: int | None = None
    value: float | None = None
    variance: float | None = None
    worst: Array | None = None
    away: int | None = None


class Pilot(Protocol):
    """An earlier evaluation of the same clauses."""

    def observe(self, obligation: Obligation) -> Observed | None:
        """Return what was seen of an obligation, None for nothing usable."""
        ...


def read_pilot(path: Path) -> Pilot:
    """Read report.json, trace.jsonl or trace.parquet of `kcdsl evaluate`; raises Refusal for
    anything else (KC629, for a trace also KC630 and KC631)."""
    if path.suffix == ".parquet":
        from kcdsl_backends.empirical.table.evidence import records
        from kcdsl_backends.empirical.table.trace import read_trace

        return _TracePilot(tuple(records(read_trace(path).evidence).values()))
    text = read_source(shown(path), _SIZE_LIMIT).text
    if text.startswith(MARK):
        raise _unusable(path, MARKED)
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    except RecursionError:
        raise _unusable(path, "it is nested too deeply") from None
    try:
        known = document.get("schema") if isinstance(document, dict) else None
        if known == _REPORT:
            return _report(document)
        if known not in (None, _TRACE):
            raise ValueError(f"its schema is {known}")
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
    rows: Mapping[str, Mapping[str, Any]]

    def observe(self, obligation: Obligation) -> Observed | None:
        row, part = self.rows.get(obligation.id), obligation.part
        if row is None or row["verdict"] == "invalid_evidence" or not _of_the_same(row, part):
            return None
        if allowed_rate(part) is not None:
            return _units_of(row)
        limit = row["low"] if row["op"] in (">=", ">") else row["high"]
        value, n = row["value"], int(row["n"])
        if value is None or limit is None or row["confidence"] is None or n < 1:
            return None
        z = float(stats.norm.ppf(float(row["confidence"])))
        variance = n * ((float(limit) - float(value)) / z) ** 2
        return Observed(n, value=float(value), variance=variance, away=_away(row, part))


def _units_of(row: Mapping[str, Any]) -> Observed | None:
    """Return n and k of a row; of `determinism`, which counts no single units, by its value."""
    counted, n = row["exceedance"], row["n"]
    if counted is not None:
        return Observed(counted["n"], counted["k"])
    if row["metric"] != "determinism" or row["value"] is None or not _is_count(0, n):
        return None
    equal = round(row["value"] * n)
    return Observed(n, n - equal) if 0 <= equal <= n else None


def _away(row: Mapping[str, Any], part: Clause) -> int:
    """Return how many requests lie away from the good end of their range, at least as a report
    shows: the half of them, or those beyond the threshold."""
    n, counted, beside = int(row["n"]), row["exceedance"], row.get("beside") or {}
    median, bounded = (beside.get("measured") or {}).get("p50"), bounded_mean(part)
    if bounded is None or (median is not None and median != bounded.best):
        return (n + 1) // 2
    return max(1, 0 if counted is None else counted["k"])


def _of_the_same(row: Mapping[str, Any], part: Clause) -> bool:
    """Say whether a row decided what the part asks for: the contract may have changed since.

    Units beyond another threshold, or counted otherwise, are no units beyond this one; a mean is
    the same mean whatever it was compared with.
    """
    comparison = main_comparison(part.require)
    found = None if comparison is None else sides(comparison)
    if found is None:
        return bool(row["requirement"] == (part.text or part.id))
    term, op, tau = found
    if row["metric"] != term_text(term):
        return False
    if allowed_rate(part) is None:
        return True
    windows = part.budget is not None and part.budget.unit == "windows"
    by_window = str(row["budget"] or "").endswith("windows")
    return bool((row["op"], row["threshold"], by_window) == (op, float(tau), windows))


def _report(document: Mapping[str, Any]) -> Pilot:
    rows: dict[str, Mapping[str, Any]] = {}
    for row in document["clauses"]:
        for name in _FIELDS:
            row[name]
        for name in ("value", "low", "high", "threshold", "confidence"):
            if row[name] is not None and not _is_finite(row[name]):
                raise ValueError(f"{row['clause']} has a {name} that is no number")
        if not _is_count(0, row["n"]) and row["n"] != 0:
            raise ValueError(f"{row['clause']} has {row['n']} units")
        if row["confidence"] is not None and not 0.5 < row["confidence"] < 1:
            raise ValueError(f"{row['clause']} has a confidence of {row['confidence']}")
        counted = row["exceedance"]
        if counted is not None and not _is_count(counted["k"], counted["n"]):
            raise ValueError(f"{row['clause']} has {counted['k']} of {counted['n']} units beyond")
        if rows.setdefault(str(row["obligation"]), row) is not row:
            raise ValueError(f"{row['obligation']} has two rows")
    return _ReportPilot(rows)


_FIELDS = (
    *("verdict", "exceedance", "low", "high", "value", "n", "op", "confidence"),
    *("metric", "threshold", "budget", "requirement"),
)
_MOST = 10**15


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _is_count(k: object, n: object) -> bool:
    return type(k) is type(n) is int and 0 <= k <= n <= _MOST and n > 0


# --- traces ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _TracePilot:
    records: Sequence[Mapping[str, Any]]

    def observe(self, obligation: Obligation) -> Observed | None:
        part = obligation.part
        comparison = main_comparison(part.require)
        found = None if comparison is None else sides(comparison)
        own = [record for record in self.records if obligation.slice in record["slices"]]
        if found is None or not own:
            return None
        term, op, tau = found
        failed = sum(bool(record["failure"]) for record in own)
        if term_text(term) == "failure_rate":
            return Observed(len(own), failed)
        if failed:
            return None
        if is_mean(part):
            inner = term.of if isinstance(term, Abs) else term
            of = inner.of if isinstance(inner, Statistic) else None
            upward = op in (">=", ">")
            return _mean_of(own, of.name, upward=upward) if isinstance(of, Metric) else None
        windows = part.budget is not None and part.budget.unit == "windows"
        if windows or allowed_rate(part) is None or not isinstance(term, Statistic):
            return None
        magnitude = isinstance(term.of, Abs)
        of = term.of.of if isinstance(term.of, Abs) else term.of
        if not isinstance(of, Metric) or term.kind == "mean" or op == "==":
            return None
        worst = _worst_of(own, of.name, magnitude, upper=op in ("<=", "<"))
        if worst is None:
            return None
        beyond = sum(not _keeps(value, op, tau) for value in worst)
        if term.kind == "rate":  # its threshold is a share, and no value
            return Observed(len(worst), beyond)
        return Observed(len(worst), beyond, worst=np.array(worst, dtype=np.float64))


def _trace(lines: Sequence[str]) -> Pilot:
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            raise ValueError(f"line {number} is no JSON") from None
        if not _is_record(record):
            raise ValueError(f"line {number} is no record of a trace")
        records.append(record)
    if not records:
        raise ValueError("it has no records")
    return _TracePilot(records)


def _is_record(record: object) -> bool:
    """Say whether a line is one of `trace.jsonl`, as far as it is read here."""
    match record:
        case {
            "schema": "kcdsl.trace/1",
            "slices": [*slices],
            "failure": None | str(),
            "values": dict(values),
            "latency_s": [*latencies],
        }:
            summaries = [v for v in values.values() if v is not None]
            named = all(isinstance(name, str) for name in slices)
            return named and all(map(_is_finite, latencies)) and all(map(_is_summary, summaries))
        case _:
            return False


def _is_summary(found: object) -> bool:
    match found:
        case {"n": n, "sum": total, "min": least, "max": most}:
            numbers = [v for v in (total, least, most) if v is not None]
            return (n == 0 or _is_count(0, n)) and all(map(_is_finite, numbers))
        case _:
            return False


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


def _mean_of(records: Sequence[Mapping[str, Any]], name: str, *, upward: bool) -> Observed | None:
    """Return the mean over all tokens; `upward` says that a larger one is better."""
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
    value = rounded_sum(np.array(sums)) / math.fsum(sizes)
    if not math.isfinite(value):
        return None
    error = linear_error(np.array(sums), np.array(sizes), value)
    means = np.array(sums) / np.array(sizes)
    away = int(np.count_nonzero(means != (means.max() if upward else means.min())))
    return Observed(n, value=value, variance=n * error**2, away=away)


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
