"""An earlier evaluation of a clause: its report, or the evidence of its trace."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from scipy import stats

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.obligations import Obligation
from kcdsl.ir.printer import term_text
from kcdsl.ir.terms import Clause
from kcdsl.source.files import MARK, MARKED, read_source, shown
from kcdsl_backends.empirical.statistics.estimates import (
    Array,
)
from kcdsl_backends.empirical.table.requirements import (
    allowed_rate,
    bounded_mean,
    threshold,
)

_SIZE_LIMIT = 2**30
_REPORT = "kcdsl.report/2"


@dataclass(frozen=True, slots=True)
class Observed:
    """n units; either `k` of them are beyond the threshold, with the `worst` value of each, or they
    have the mean `value` and the `variance` of one unit, and `away` of them another mean than the
    best."""

    n: int
    k: int | None = None
    value: float | None = None
    variance: float | None = None
    worst: Array | None = None
    away: int | None = None


class PriorReport(Protocol):
    """An earlier evaluation of the same clauses."""

    def observe(self, obligation: Obligation) -> Observed | None:
        """Return the earlier values of an obligation; None if none is usable."""
        ...


def read_prior(path: Path) -> PriorReport:
    """Read report.json or trace.parquet of `kcdsl evaluate`.

    Raises Refusal for anything else (KC629, for a trace KC630 and KC631).
    """
    if path.suffix == ".parquet":
        from kcdsl_backends.empirical.questions.prior_trace import prior_of  # needs torch

        return prior_of(path)
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
        raise ValueError(
            "it is neither a report nor trace.parquet"
            if known is None
            else f"its schema is {known}"
        )
    except Refusal:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _unusable(path, str(error) or type(error).__name__) from None


def _unusable(path: Path, why: str) -> Refusal:
    return refuse(
        codes.PRIOR_FILE,
        f"{shown(path)} is no usable prior report: {why}",
        help="give report.json or trace.parquet as `kcdsl evaluate` wrote them",
    )


# --- report.json ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _FromReport:
    rows: Mapping[str, Mapping[str, Any]]

    def observe(self, obligation: Obligation) -> Observed | None:
        row, part = self.rows.get(obligation.id), obligation.part
        if row is None or row["verdict"] == "invalid_evidence" or not _same_question(row, part):
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
    """Return n and k of a row; for `determinism`, which has no counts, from its value."""
    counted, n = row["exceedance"], row["n"]
    if counted is not None:
        return Observed(counted["n"], counted["k"])
    if row["metric"] != "determinism" or row["value"] is None or not _is_count(0, n):
        return None
    equal = round(row["value"] * n)
    return Observed(n, n - equal) if 0 <= equal <= n else None


def _away(row: Mapping[str, Any], part: Clause) -> int:
    """Return a lower bound of the number of requests away from the best value of their range, as
    far as a report shows: half of them, or those beyond the threshold."""
    n, counted, beside = int(row["n"]), row["exceedance"], row.get("beside") or {}
    median, bounded = (beside.get("measured") or {}).get("p50"), bounded_mean(part)
    if bounded is None or (median is not None and median != bounded.best):
        return (n + 1) // 2
    return max(1, 0 if counted is None else counted["k"])


def _same_question(row: Mapping[str, Any], part: Clause) -> bool:
    """Return whether a row decided the requirement of a part: the contract may have changed since.

    Counts beyond another threshold, or of other units, cannot be used; a mean can, whatever its
    threshold was.
    """
    found = threshold(part.require)
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


def _report(document: Mapping[str, Any]) -> PriorReport:
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
    return _FromReport(rows)


_FIELDS = (
    *("verdict", "exceedance", "low", "high", "value", "n", "op", "confidence"),
    *("metric", "threshold", "budget", "requirement"),
)
_MOST = 10**15


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _is_count(k: object, n: object) -> bool:
    return type(k) is type(n) is int and 0 <= k <= n <= _MOST and n > 0
