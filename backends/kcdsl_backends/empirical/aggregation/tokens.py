"""Tokens by slice: counts beyond limits, and exact percentiles, in memory that is bounded.

The percentiles of as many metrics and slices as fit are found in one query; a slice too large by
itself is searched by counting (`ranks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl_backends.empirical.aggregation.engine import Database
from kcdsl_backends.empirical.aggregation.ranks import order_statistic
from kcdsl_backends.empirical.aggregation.sql import Asked, token_query
from kcdsl_backends.empirical.statistics import quantile_rank

_BYTES = 3
"""Bytes that a percentile takes in memory, for each byte of the values it is of."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One metric on one slice, token by token: rows, those with a value, those that do not meet
    each limit, and the values at the wanted percentiles (None without values)."""

    rows: int
    values: int
    beyond: tuple[int, ...]
    percentiles: tuple[float, ...] | None


Found = dict[tuple[str, str], Tokens]
"""By slice and metric."""


def count_tokens(database: Database, slice_of: str, asked: Sequence[Asked]) -> Found:
    """Count the tokens of every slice; raises Refusal (KC680) for a row without one."""
    table = database.table
    width = sum(table.metrics[one.metric] for one in asked if one.quantiles)
    copies = slice_of.count("CASE WHEN") if slice_of.startswith("unnest") else 1
    room = database.memory // _BYTES
    if table.rows * max(1, copies) * width <= room:
        return _found(database.rows(token_query(slice_of, asked)), asked)
    counted = _found(
        database.rows(token_query(slice_of, [replace(one, quantiles=()) for one in asked])), asked
    )
    for one in asked:
        if one.quantiles:
            counted |= _percentiles(database, slice_of, one, counted, room)
    return counted


def _found(rows: Sequence[dict[str, Any]], asked: Sequence[Asked]) -> Found:
    found: Found = {}
    for row in rows:
        if row["slice"] is None:
            raise refuse(
                codes.TOKEN_TABLE,
                f"{row['rows']} rows have no slice",
                help="a row that belongs nowhere is not dropped: name its slice, or leave it out",
            )
        for i, one in enumerate(asked):
            ranks = row.get(f"ranks_{i}")
            found[row["slice"], one.metric] = Tokens(
                int(row["rows"]),
                int(row[f"values_{i}"]),
                tuple(int(row[f"beyond_{i}_{j}"] or 0) for j in range(len(one.limits))),
                None if ranks is None else tuple(float(x) + 0.0 for x in ranks),
            )
    return found


def _percentiles(database: Database, slice_of: str, one: Asked, counted: Found, room: int) -> Found:
    """Return the counts of one metric with its percentiles, in as many queries as memory needs."""
    most = max(1, room // database.table.metrics[one.metric])
    own = {name: found for (name, metric), found in counted.items() if metric == one.metric}
    done: Found = {}
    for names in _batches({name: found.values for name, found in own.items()}, most):
        if own[names[0]].values <= most:
            rows = database.rows(token_query(slice_of, [replace(one, limits=())], names))
            ranks = {
                name: found.percentiles
                for (name, _), found in _found(rows, [replace(one, limits=())]).items()
            }
        else:
            ranks = {names[0]: _searched(database, slice_of, names[0], one, own[names[0]], most)}
        for name in names:
            done[name, one.metric] = replace(own[name], percentiles=ranks[name])
    return done


def _searched(
    database: Database, slice_of: str, name: str, one: Asked, found: Tokens, most: int
) -> tuple[float, ...]:
    return tuple(
        order_statistic(
            database,
            slice_of,
            name,
            one.metric,
            quantile_rank(found.values, q),
            found.values,
            most,
        )
        + 0.0
        for q in one.quantiles
    )


def _batches(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Put slices together whose values fit; a larger one stands alone."""
    batch: list[str] = []
    total = 0
    for name in sorted(sizes, key=lambda name: (sizes[name], name)):
        if batch and total + sizes[name] > most:
            yield batch
            batch, total = [], 0
        batch.append(name)
        total += sizes[name]
    if batch:
        yield batch
