"""The trace of an earlier evaluation as a prior: the values on which clauses were decided."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np

from kcdsl.ir.obligations import Comparison, Obligation
from kcdsl.ir.printer import term_text
from kcdsl.ir.terms import Abs, Statistic, Term
from kcdsl_backends.empirical.decision.report import sampled_data, slice_data
from kcdsl_backends.empirical.decision.values import Side, token_sums, worst_of_units
from kcdsl_backends.empirical.statistics.bootstrap import linear_error
from kcdsl_backends.empirical.statistics.estimates import (
    Array,
    NotMeasurable,
    check_values,
    rounded_sum,
)
from kcdsl_backends.empirical.table.evidence import SliceData
from kcdsl_backends.empirical.table.requirements import (
    FAILURE_RATE,
    allowed_rate,
    is_mean,
)
from kcdsl_backends.empirical.table.trace import read_trace


@dataclass(frozen=True, slots=True)
class Observed:
    """n units; either `k` of them are beyond the threshold, with the `worst` value of each, or they
    have the mean `value`, the `variance` of one unit, the `residuals` of all, positive where they
    make the mean larger, and `away` of them another mean than the best."""

    n: int
    k: int | None = None
    value: float | None = None
    variance: float | None = None
    residuals: Array | None = None
    worst: Array | None = None
    away: int | None = None


@dataclass(frozen=True, slots=True)
class Prior:
    """The values of an earlier evaluation, by slice."""

    slices: Mapping[str, SliceData]

    @classmethod
    def read(cls, path: Path) -> Prior:
        """Read a trace; raises Refusal (KC630, KC631) if it cannot be relied upon."""
        evidence = read_trace(path).evidence
        return cls(sampled_data(evidence, slice_data(evidence)))

    def observe(self, obligation: Obligation) -> Observed | None:
        """Return the earlier values of an obligation; None if none is usable."""
        part, data = obligation.part, self.slices.get(obligation.slice or "")
        compared = obligation.comparison
        if compared is None or data is None or not data.requests:
            return None
        term, op = compared.quantity, compared.op
        failed = sum(unit.failure is not None for unit in data.requests)
        if term == FAILURE_RATE:
            return Observed(len(data.requests), failed)
        if failed:
            return None
        try:
            if is_mean(part):
                inner = term.of if isinstance(term, Abs) else term
                upward = op in (">=", ">")
                return _mean_of(inner.of, data, upward) if isinstance(inner, Statistic) else None
            windows = part.budget is not None and part.budget.unit == "windows"
            if windows or op == "==" or allowed_rate(part) is None:
                return None
            return _units_beyond(term, compared, data) if isinstance(term, Statistic) else None
        except NotMeasurable:
            return None


def _units_beyond(term: Statistic, compared: Comparison, data: SliceData) -> Observed:
    """Return the units beyond a threshold; raises NotMeasurable."""
    side: Side = "upper" if compared.op in ("<=", "<") else "lower"
    worst = check_values(worst_of_units(term.of, data, side), term_text(term.of))
    beyond = sum(not compared.admits(Fraction(value)) for value in worst.tolist())
    if term.kind == "rate":  # its threshold is a share, not a value
        return Observed(worst.size, beyond)
    return Observed(worst.size, beyond, worst=worst)


def _mean_of(of: Term, data: SliceData, upward: bool) -> Observed | None:
    """Return the mean over all tokens; `upward` says that a larger one is better."""
    sums, sizes = token_sums(of, data)
    if sums.size < 2:
        return None
    value = rounded_sum(sums) / math.fsum(sizes)
    if not math.isfinite(value):
        return None
    error, means = linear_error(sums, sizes, value), sums / sizes
    away = int(np.count_nonzero(means != (means.max() if upward else means.min())))
    residuals, variance = sums - value * sizes, sums.size * error**2
    return Observed(sums.size, None, value, variance, residuals, away=away)
