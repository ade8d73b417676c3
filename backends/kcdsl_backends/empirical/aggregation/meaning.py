"""What columns are evidence of: values that their metric can have, and as many of them as it has.

A table holds what someone logged under the name of a metric. A divergence below zero, or several
values of a metric that has one for each request, is none of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from kcdsl.ir.terms import Metric, Term
from kcdsl.ir.walk import subterms
from kcdsl.metrics import MetricDefinition
from kcdsl_backends.empirical.reduced import OUTSIDE, SEVERAL, Column, Reduced
from kcdsl_backends.empirical.statistics import beyond_range


def as_measured(reduced: Reduced, measures: Mapping[str, MetricDefinition]) -> Reduced:
    """Return requests with the faults of their values named.

    A request has one value of a term whose metrics all have one for each request, however many of
    its rows repeat it. A term that combines metrics is held against those of them that have columns
    of their own.
    """
    columns = {term: _as_measured(term, reduced.columns, measures) for term in reduced.columns}
    return replace(reduced, columns=columns)


def _as_measured(
    term: Term, columns: Mapping[Term, Column], measures: Mapping[str, MetricDefinition]
) -> Column:
    names = [part.name for part in subterms(term) if isinstance(part, Metric)]
    column = columns[term]
    faults = np.zeros_like(column.faults)
    for name in names:
        of, measure = columns.get(Metric(name)), measures.get(name)
        if of is not None and measure is not None:
            bounds = (measure.low, measure.high)
            faults[beyond_range(of.least, bounds) | beyond_range(of.most, bounds)] = OUTSIDE
    if names and all(name in measures and measures[name].per == "request" for name in names):
        return _once(column, faults)
    return replace(column, faults=faults)


def _once(column: Column, faults: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Column:
    """Return a column in which every row of a request repeats its one value."""
    number = column.nan == 0
    mixed = ~number & (column.nan < column.values)
    faults[mixed | (number & (column.least != column.most) & (column.values > 0))] = SEVERAL
    return replace(
        column,
        values=np.minimum(column.values, 1),
        nan=np.minimum(column.nan, 1),
        infinite=np.minimum(column.infinite, 1),
        fractions=np.minimum(column.fractions, 1),
        totals=np.where(np.isfinite(column.least), column.least, 0.0),
        faults=faults,
    )
