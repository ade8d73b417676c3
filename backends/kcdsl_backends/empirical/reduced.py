"""Requests reduced to what statistics need of them: counts, extremes and exact sums.

Percentiles, budgets and extremes represent a request by its worst token, means by the sum of its
tokens and their number. So a verdict needs five numbers of a request and not its tokens, and is the
same as from the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kcdsl.ir.terms import Term
from kcdsl_backends.empirical.clauses import label
from kcdsl_backends.empirical.statistics import NotMeasurable

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Column:
    """The values of one term, reduced: an entry for each request.

    `values` there are, `missing` there are not; `nan` and `infinite` of the values; `fractions` of
    them are neither 0 nor 1; `least`, `most` ignore NaN (NaN where nothing else is); `totals` are
    the correctly rounded sums of the finite ones.
    """

    values: Counts
    missing: Counts
    nan: Counts
    infinite: Counts
    fractions: Counts
    least: Floats
    most: Floats
    totals: Floats

    def at(self, rows: slice | NDArray[np.intp]) -> Column:
        """Return some of the entries."""
        return Column(
            self.values[rows],
            self.missing[rows],
            self.nan[rows],
            self.infinite[rows],
            self.fractions[rows],
            self.least[rows],
            self.most[rows],
            self.totals[rows],
        )

    def worst(self, side: Literal["upper", "lower"]) -> Floats:
        """Return the worst value of each request; NaN where one of its values is."""
        extreme = self.most if side == "upper" else self.least
        return np.where(self.nan > 0, np.nan, extreme)

    def fingerprint(self, row: int) -> tuple[float | int, ...]:
        """Return all that a statistic of one request alone can depend on; NaN as None would."""
        numbers = (self.least[row], self.most[row], self.totals[row])
        return (
            int(self.values[row]),
            int(self.missing[row]),
            int(self.nan[row]),
            int(self.infinite[row]),
            int(self.fractions[row]),
            *(float(number) if number == number else 0.0 for number in numbers),
        )


@dataclass(frozen=True, slots=True)
class Reduced:
    """The requests of one slice in the order of their first rows: names, tokens, and a column for
    each term."""

    keys: Sequence[str]
    columns: Mapping[Term, Column]
    tokens: Counts
    rows_of: Callable[[str, Term], Floats]
    """The values of a term of a request, in the order of the table."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.keys)

    def part(self, start: int, end: int) -> Reduced:
        """Return consecutive requests."""
        columns = {term: column.at(slice(start, end)) for term, column in self.columns.items()}
        return Reduced(self.keys[start:end], columns, self.tokens[start:end], self.rows_of)

    def of(self, term: Term) -> Column:
        """Return the column of a term; raise `NotMeasurable` where a request lacks values."""
        name = label(term)
        if term not in self.columns:
            raise NotMeasurable(f"{name}: the table has no such values")
        column = self.columns[term]
        lacking = np.flatnonzero((column.missing > 0) | (column.values == 0))
        if lacking.size:
            row = int(lacking[0])
            missing, there = int(column.missing[row]), int(column.values[row])
            raise NotMeasurable(
                f"{name}: the request {self.keys[row]}: {missing} of {missing + there} values are "
                "missing"
            )
        return column
