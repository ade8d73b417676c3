"""`kcdsl aggregate`: the document "kcdsl.aggregate/2" from files and a contract."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kcdsl import __version__
from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.report import refuse_unknown
from kcdsl.inequalities import round_down, round_up
from kcdsl.ir.canonical import digest
from kcdsl.ir.terms import Metric, Program, Term
from kcdsl.metrics import MEASURES
from kcdsl.verdict.health import assess, recommend
from kcdsl.verdict.records import number
from kcdsl.verdict.report import overall
from kcdsl_backends.empirical.questions.token_clauses import (
    Decided,
    PreparedContract,
    decide_table,
    limits_of,
    prepare,
)
from kcdsl_backends.empirical.sources.tokens.content import content_digests, sketches
from kcdsl_backends.empirical.sources.tokens.database import (
    Database,
    Tokens,
    ValueLimit,
    WantedCounts,
    count_tokens,
    opened,
)
from kcdsl_backends.empirical.sources.tokens.requests import Requests, reduce_requests
from kcdsl_backends.empirical.sources.tokens.slices import (
    check_rows,
    left_out,
    membership,
    refuse_copies,
)
from kcdsl_backends.empirical.sources.tokens.tables import (
    TokenTable,
    file_records,
    open_tables,
)
from kcdsl_backends.empirical.statistics.rates import quantile_rank
from kcdsl_backends.empirical.table.evidence import Floats

SCHEMA = "kcdsl.aggregate/2"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class AggregateOptions:
    """The options of a user: metrics (none: those of the contract, else all), further limits by
    metric, shares of percentiles, resources (see `opened`), and whether the document has digests of
    the rows (`content`)."""

    metrics: tuple[str, ...] = ()
    limits: Mapping[str, tuple[ValueLimit, ...]] | None = None
    quantiles: tuple[Fraction, ...] = (Fraction(1, 2), Fraction(19, 20), Fraction(99, 100))
    slices: tuple[str, ...] = ()
    seed: int = 0
    looks: int | None = 1
    memory: int | None = None
    threads: int | None = None
    spill: Path | None = None
    content: bool = False


def options_of(
    limits: Sequence[tuple[str, str, Fraction]], percentiles: Sequence[Fraction], **others: Any
) -> AggregateOptions:
    """Return the options; limits are (metric, operator, value)."""
    found: dict[str, tuple[ValueLimit, ...]] = {}
    for name, op, value in limits:
        found[name] = (*found.get(name, ()), ValueLimit(op, value))
    defaults = AggregateOptions()
    return AggregateOptions(
        limits=found, quantiles=tuple(percentiles) or defaults.quantiles, **others
    )


def aggregate(
    paths: Sequence[str | Path],
    program: Program | None,
    wish: AggregateOptions,
    progress: Progress = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Return the document of token tables, decided by a contract if there is one.

    Raises Refusal for unusable tables, files that change meanwhile, unknown metrics and slices, and
    contracts without a clause that a table decides.
    """
    table = open_tables(paths)
    before = _states(table)
    task = None if program is None else prepare(program, table, wish.slices)
    asked = _asked(table, task, wish)
    files = file_records(table, lambda done, total: progress("digests", done, total))
    refuse_copies(table, [file["sha256"] for file in files])
    with opened(table, memory=wish.memory, threads=wish.threads, spill=wish.spill) as database:
        members = None if task is None else task.members
        slice_of = membership(table, members)
        read = () if task is None else task.terms
        content = _add_content(files, database, read) if wish.content else {}
        if task is None:
            check_rows(database, members)
            terms: list[Term] = [Metric(one.metric) for one in asked]
            requests, decided = reduce_requests(database, slice_of, terms), None
            names = _chosen(tuple(sorted(requests)), wish.slices)
        else:
            decided = decide_table(
                _with_metrics(task, asked),
                database,
                seed=wish.seed,
                looks=wish.looks,
                progress=progress,
            )
            requests, names = dict(decided.requests), task.slices
        tokens = count_tokens(database, slice_of, asked) if asked else {}
        progress("tokens", 1, 1)
        if _states(table) != before:
            raise refuse(
                codes.CHANGED_MEANWHILE,
                "a file of the token table changed while the command ran",
                help="run it again: its results and digests are of different rows",
            )
        better = {name: measure.better for name, measure in MEASURES.items()}
        slices = [
            slice_record(
                name,
                requests[name],
                {one.metric: tokens[name, one.metric] for one in asked},
                asked,
                better,
            )
            for name in names
            if name in requests
        ]
        return {
            "schema": SCHEMA,
            **_conclusion(program, decided),
            "tables": {
                "rows": table.rows,
                "left_out": left_out(database, members),
                "files": list(files),
                **content,
            },
            "environment": _environment(database, wish),
            "slices": slices,
            "sql": list(database.asked),
        }


def _states(table: TokenTable) -> list[tuple[int, ...] | None]:
    """Return what changes with the content of each file; None for one that is gone."""
    found: list[tuple[int, ...] | None] = []
    for file in table.files:
        try:
            one = file.stat()
        except OSError:
            found.append(None)
            continue
        found.append((one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns))
    return found


def _add_content(
    files: Sequence[dict[str, Any]], database: Database, read: Iterable[Term]
) -> dict[str, Any]:
    """Add the digest of its rows to each file with rows. Return the digest of all rows and the
    sketches of the requests by the terms `read`. Raises Refusal for a file with the rows of
    another."""
    whole, found = content_digests(database)
    refuse_copies(database.table, [found.get(i, "") for i in range(len(files))], "rows")
    for i, own in found.items():
        files[i]["content"] = own
    names = {term.name for term in read if isinstance(term, Metric)}
    return {"content": whole, "sketch": sketches(database, names)}


def _asked(
    table: TokenTable, task: PreparedContract | None, wish: AggregateOptions
) -> list[WantedCounts]:
    limits: dict[str, dict[ValueLimit, None]] = {}
    for source in (limits_of(task) if task else {}, wish.limits or {}):
        for name, own in source.items():
            limits.setdefault(name, {}).update(dict.fromkeys(own))
    given = [*wish.metrics, *(wish.limits or {})]
    said = "the token table has no column of floating numbers"
    refuse_unknown(given, table.metrics, codes.TOKEN_TABLE, said, "metrics")
    names = list(given)
    if task is not None:
        names += [name for term in task.terms for name in limits if Metric(name) == term]
    elif not wish.metrics:
        names += list(table.metrics)
    return [
        WantedCounts(name, tuple(limits.get(name, ())), wish.quantiles)
        for name in dict.fromkeys(names)
    ]


def _chosen(there: tuple[str, ...], wanted: Sequence[str]) -> tuple[str, ...]:
    refuse_unknown(wanted, there, codes.UNKNOWN_SLICE, "the token table has no slice", "slices")
    return tuple(name for name in there if not wanted or name in wanted)


def _with_metrics(task: PreparedContract, asked: Sequence[WantedCounts]) -> PreparedContract:
    """Return the task with the reported terms added to those that clauses need."""
    terms = dict.fromkeys([*task.terms, *(Metric(one.metric) for one in asked)])
    return replace(task, terms=tuple(terms))


def _conclusion(program: Program | None, decided: Decided | None) -> dict[str, Any]:
    if program is None or decided is None:
        return {"verdict": None, "exit": 0, "contract": None}
    rows = decided.results
    health = assess(rows, program.escalation)
    verdict, code = overall(rows)
    return {
        "verdict": verdict,
        "exit": int(code),
        "action": recommend(rows, health),
        "health": health.to_json(),
        "contract": {
            "name": program.name,
            "version": program.version,
            "digest": f"sha256:{digest(program).removeprefix('sha256:')}",
        },
        "statistics": decided.statistics.to_json(),
        "clauses": [row.to_json() for row in rows],
        "deferred": dict(decided.deferred),
    }


def _environment(database: Database, wish: AggregateOptions) -> dict[str, Any]:
    import duckdb

    return {
        "kcdsl": __version__,
        "duckdb": duckdb.__version__,
        "seed": wish.seed,
        "memory": database.memory,
    }


# --- aggregate -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Rows of one metric on one slice: numbers of all rows, of those with a value, of NaN, of
    infinite values and of those beyond each limit, the extremes (None without a number), and the
    exact sum of the finite values."""

    rows: int = 0
    values: int = 0
    nan: int = 0
    infinite: int = 0
    beyond: tuple[int, ...] = ()
    least: float | None = None
    most: float | None = None
    total: Fraction = Fraction(0)

    @property
    def mean(self) -> float | None:
        """Return the mean, rounded once; None unless every value is finite."""
        if not self.values or self.nan or self.infinite:
            return None
        return float(self.total / self.values)


def aggregate_of(requests: Requests, metric: str, tokens: Tokens) -> Aggregate:
    """Return the aggregate of a metric from its requests and the counts of its tokens."""
    column = requests.reduced.columns[Metric(metric)]
    least = column.least[~np.isnan(column.least)]
    most = column.most[~np.isnan(column.most)]
    return Aggregate(
        tokens.rows,
        tokens.values,
        int(column.nan.sum()),
        int(column.infinite.sum()),
        tokens.beyond,
        float(least.min()) if least.size else None,
        float(most.max()) if most.size else None,
        requests.totals[Metric(metric)],
    )


# --- as a document -------------------------------------------------------------------------------


def slice_record(
    name: str,
    requests: Requests,
    tokens: Mapping[str, Tokens],
    asked: Sequence[WantedCounts],
    better: Mapping[str, str],
) -> dict[str, Any]:
    """Return the record of a slice: each metric by tokens and by requests."""
    return {
        "slice": name,
        "rows": int(requests.reduced.tokens.sum()),
        "requests": len(requests.reduced),
        "metrics": [
            _metric_record(requests, one, tokens[one.metric], better.get(one.metric, "lower"))
            for one in asked
        ],
    }


def _metric_record(
    requests: Requests, asked: WantedCounts, tokens: Tokens, better: str
) -> dict[str, Any]:
    found = aggregate_of(requests, asked.metric, tokens)
    column = requests.reduced.columns[Metric(asked.metric)]
    side: Literal["upper", "lower"] = "lower" if better == "higher" else "upper"
    complete = bool(((column.missing == 0) & (column.values > 0)).all())
    sides: dict[str, Any] = {
        "tokens": {
            "values": found.values,
            "missing": found.rows - found.values,
            "nan": found.nan,
            "infinite": found.infinite,
            "mean": found.mean,
            "least": number(found.least),
            "most": number(found.most),
            "percentiles": _percentiles(asked.quantiles, tokens.percentiles),
            "beyond": [
                _beyond(limit, k, found.values)
                for limit, k in zip(asked.limits, found.beyond, strict=True)
            ],
        },
        "requests": None,
    }
    if complete:
        worst = column.worst(side)
        ranked = np.sort(worst)
        ranks = tuple(float(ranked[quantile_rank(worst.size, q) - 1]) for q in asked.quantiles)
        sides["requests"] = {
            "values": int(worst.size),
            "worst": "least" if side == "lower" else "most",
            "percentiles": _percentiles(asked.quantiles, ranks),
            "beyond": [
                _beyond(limit, _outside(limit, column.worst(_side(limit))), int(worst.size))
                for limit in asked.limits
            ],
        }
    return {"metric": asked.metric, **sides}


def _side(limit: ValueLimit) -> Literal["upper", "lower"]:
    return "upper" if limit.op in ("<=", "<") else "lower"


def _outside(limit: ValueLimit, worst: Floats) -> int:
    """Count the requests with a value that does not meet a limit."""
    exact = Fraction(round_down(limit.value)) == limit.value
    if limit.op in ("<=", "<"):
        tau = round_down(limit.value)
        meets = worst < tau if limit.op == "<" and exact else worst <= tau
    else:
        tau = round_up(limit.value)
        meets = worst > tau if limit.op == ">" and exact else worst >= tau
    return int(np.count_nonzero(~meets))


def _percentiles(
    quantiles: Sequence[Fraction], found: Sequence[float] | None
) -> dict[str, float | None]:
    values: Sequence[float | None] = [None] * len(quantiles) if found is None else found
    return {f"p{_text(100 * q)}": number(x) for q, x in zip(quantiles, values, strict=True)}


def _text(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.12g}"


def _beyond(limit: ValueLimit, k: int, n: int) -> dict[str, Any]:
    return {"op": limit.op, "limit": float(limit.value), "k": k, "n": n}
