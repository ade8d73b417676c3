"""Reducing every request of a table to what statistics need of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.terms import Term
from kcdsl_backends.empirical.aggregation.engine import Database
from kcdsl_backends.empirical.aggregation.sql import (
    extreme_query,
    request_query,
    rows_query,
)
from kcdsl_backends.empirical.aggregation.sums import ExactSums, exact_sums, steps_for
from kcdsl_backends.empirical.reduced import Column, Floats, Reduced

_FIRST, _MORE = 2, 4


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of one slice, and the exact sums of the finite values of each term."""

    reduced: Reduced
    totals: Mapping[Term, Fraction]


def reduce_requests(
    database: Database, slice_of: str, terms: Sequence[Term]
) -> dict[str, Requests]:
    """Return the requests of every slice that has any, in the order of their first rows.

    Raises Refusal (KC680) for rows without a request or a slice.
    """
    largest = database.rows(extreme_query(terms))[0]
    tops = [largest[f"largest_{i}"] or 1.0 for i in range(len(terms))]
    count = _FIRST
    while True:
        steps = [steps_for(top, count) for top in tops]
        found = database.columns(request_query(slice_of, terms, steps))
        rests = [found.column(f"rest_{i}").to_numpy() for i in range(len(steps))]
        if not any(bool((rest > 0).any()) for rest in rests):
            break
        count += _MORE
    _refuse_nameless(found)
    return _by_slice(database, slice_of, terms, steps, found)


def _refuse_nameless(found: Any) -> None:
    for name in ("slice", "request"):
        lacking = found.column(name).null_count
        if lacking:
            raise refuse(
                codes.TOKEN_TABLE,
                f"some rows have no {name}",
                help="a row that belongs nowhere is not dropped: give it one, or leave it out",
            )


def _by_slice(
    database: Database,
    slice_of: str,
    terms: Sequence[Term],
    steps: Sequence[Sequence[float]],
    found: Any,
) -> dict[str, Requests]:
    names = found.column("slice").to_numpy(zero_copy_only=False)
    place = found.column("place").to_numpy()
    order = np.lexsort((place, names.astype(str)))
    names, ordered = names[order].astype(str), found.take(order)
    keys = ordered.column("request").to_pylist()
    tokens = ordered.column("tokens").to_numpy()
    sums = [_sums(ordered, i, own) for i, own in enumerate(steps)]
    columns = {term: _column(ordered, i, sums[i]) for i, term in enumerate(terms)}
    changes = np.flatnonzero(names[1:] != names[:-1]) + 1
    starts = [0, *changes.tolist()] if len(names) else []
    ends = [*changes.tolist(), len(names)] if len(names) else []
    slices: dict[str, Requests] = {}
    for start, end in zip(starts, ends, strict=True):
        name = str(names[start])

        def rows_of(request: str, term: Term, name: str = name) -> Floats:
            query = rows_query(slice_of, name, request, term)
            values = database.columns(query).column("x").to_numpy(zero_copy_only=False)
            return np.asarray(values, dtype=np.float64)

        whole = Reduced(keys, columns, tokens, rows_of)
        totals = {
            term: one.unit * sum(one.integers[start:end])
            for term, one in zip(terms, sums, strict=True)
        }
        slices[name] = Requests(whole.part(start, end), totals)
    return slices


def _sums(found: Any, i: int, steps: Sequence[float]) -> ExactSums:
    digits = [found.column(f"sum_{i}_{j}").fill_null("0").to_pylist() for j in range(len(steps))]
    return exact_sums(digits, steps)


def _column(found: Any, i: int, sums: ExactSums) -> Column:
    def counts(name: str) -> Any:
        return found.column(f"{name}_{i}").fill_null(0).to_numpy().astype(np.int64)

    def extremes(name: str) -> Any:  # 0 for -0: which of them is found depends on the order of rows
        return found.column(f"{name}_{i}").fill_null(float("nan")).to_numpy() + 0.0

    values = counts("values")
    return Column(
        values,
        found.column("tokens").to_numpy() - values,
        counts("nan"),
        counts("infinite"),
        counts("fractions"),
        extremes("least"),
        extremes("most"),
        np.array([sums.rounded(n) for n in sums.integers], dtype=np.float64),
        np.zeros(len(values), dtype=np.int64),
    )
