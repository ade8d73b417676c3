"""Counting parts of a table anywhere, and adding them up.

A part is some of the files. It gives an `Aggregate` for each metric and slice, and these add up to
what the whole table gives, in any order: counts, extremes and exact sums. Percentiles, and requests
whose rows lie in several parts, need the whole table (`document.aggregate`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path

from kcdsl.ir.terms import Metric
from kcdsl_backends.empirical.aggregation.aggregate import Aggregate, aggregate_of
from kcdsl_backends.empirical.aggregation.engine import opened
from kcdsl_backends.empirical.aggregation.requests import reduce_requests
from kcdsl_backends.empirical.aggregation.selecting import membership
from kcdsl_backends.empirical.aggregation.sql import Asked, Limit
from kcdsl_backends.empirical.aggregation.tables import open_tables
from kcdsl_backends.empirical.aggregation.tokens import count_tokens

Limits = Mapping[str, tuple[Limit, ...]]
"""The limits to count by, for each metric."""


def count_shard(files: Sequence[Path], limits: Limits) -> dict[tuple[str, str], Aggregate]:
    """Return what some files hold of each metric on each slice, by slice and metric."""
    table = open_tables(files)
    asked = [Asked(metric, own) for metric, own in limits.items()]
    with opened(table) as database:
        slice_of = membership(table, None)
        tokens = count_tokens(database, slice_of, asked)
        requests = reduce_requests(database, slice_of, [Metric(name) for name in limits])
    return {
        (name, metric): aggregate_of(requests[name], metric, found)
        for (name, metric), found in tokens.items()
    }


def count_shards(
    executor: Executor, shards: Sequence[Sequence[Path]], limits: Limits
) -> dict[tuple[str, str], Aggregate]:
    """Return what all files hold; each shard is one call of the executor.

    Raises what a shard raises: a part that is lost is never left out.
    """
    whole: dict[tuple[str, str], Aggregate] = {}
    for part in executor.map(count_shard, shards, [dict(limits)] * len(shards)):
        for key, found in part.items():
            whole[key] = whole.get(key, Aggregate()) + found
    return whole
