"""`kcdsl aggregate`: count token tables by slice, and decide a contract on them."""

from __future__ import annotations

import argparse
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

from kcdsl.cli.numbers import count, fraction, not_negative, seed
from kcdsl.diagnostics.render.terminal import json_for_terminals, one_line
from kcdsl.exits import Exit

HELP = "count logged tokens by slice, and decide a contract on them"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kcdsl.cli.looks import add_looks

    parser.add_argument(
        "tables",
        nargs="+",
        metavar="TABLE",
        help="Parquet files, or folders of them: one row per token, with a column `request`",
    )
    parser.add_argument("--contract", metavar="CONTRACT", help="decide its clauses on the tables")
    parser.add_argument("--slice", action="append", metavar="NAME", help="only this slice")
    parser.add_argument("--metric", action="append", metavar="NAME", help="only this column")
    parser.add_argument(
        "--limit",
        action="append",
        type=_limit,
        metavar="REQUIREMENT",
        help="count what does not meet it, such as 'kl <= 0.05'",
    )
    parser.add_argument(
        "--percentile",
        action="append",
        type=_percentile,
        metavar="P",
        help="such as 99.9 (default: 50, 95 and 99)",
    )
    parser.add_argument("--seed", type=seed, default=0, metavar="N", help="of resampling")
    add_looks(parser)
    parser.add_argument(
        "--memory", type=_gigabytes, metavar="GIB", help="default: half of what is free"
    )
    parser.add_argument("--threads", type=count, metavar="N", help="default: all cores")
    parser.add_argument(
        "--spill", metavar="DIR", help="where a folder for what does not fit is made, and removed"
    )
    parser.add_argument("--sql", action="store_true", help="print the queries that were run too")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result as JSON")


def run(arguments: argparse.Namespace) -> Exit:
    """Run the command: the status is that of the clauses; 0 without a contract."""
    import json

    from kcdsl.check.compile import load_program
    from kcdsl.cli.progress import progress_bars
    from kcdsl.source.files import in_contract
    from kcdsl.source.writing import write_bytes

    path = None if arguments.contract is None else Path(arguments.contract)
    program = None if path is None else load_program(path)
    found = backend()
    with in_contract(path or Path("contract.yaml")), progress_bars() as progress:
        document = found.aggregate(
            arguments.tables,
            program,
            slices=tuple(arguments.slice or ()),
            metrics=tuple(arguments.metric or ()),
            limits=tuple(arguments.limit or ()),
            percentiles=tuple(arguments.percentile or ()),
            seed=arguments.seed,
            looks=None if arguments.anytime else arguments.looks,
            memory=arguments.memory,
            threads=arguments.threads,
            spill=None if arguments.spill is None else Path(arguments.spill),
            progress=progress,
        )
    text = (
        json_for_terminals(json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False))
        + "\n"
    )
    if arguments.output is not None:
        write_bytes(Path(arguments.output), text.encode())
    if arguments.json:
        sys.stdout.write(text)
    else:
        from kcdsl.verdict.aggregate_text import print_aggregate

        print_aggregate(document, sys.stdout, queries=arguments.sql)
    if arguments.output is not None:
        print(one_line(f"wrote {arguments.output}"), file=sys.stderr)
    return Exit(document["exit"])


def _limit(text: str) -> tuple[str, str, Fraction]:
    for op in ("<=", ">=", "<", ">"):
        name, found, value = text.partition(op)
        if found:
            number = fraction(value)
            if name.strip() and number is not None:
                return name.strip(), op, number
            break
    raise argparse.ArgumentTypeError(
        f"must be METRIC <= NUMBER, or with >=, < or >, not {text!r}; numbers are in base units"
    )


def _percentile(text: str) -> Fraction:
    value = fraction(text)
    if value is None or not 0 < value < 100 or (value * 10**7).denominator != 1:
        raise argparse.ArgumentTypeError("must be between 0 and 100, with at most 7 decimals")
    return value / 100


def _gigabytes(text: str) -> int:
    value = not_negative(text)
    if not 0.1 <= value < 2**20:
        raise argparse.ArgumentTypeError("must be at least 0.1")
    return int(value * 2**30)


def backend() -> Any:
    """Return the backend that measures; refuse where what it needs is not installed."""
    from importlib.util import find_spec

    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_BACKEND
    from kcdsl.route.catalogue import Fragment, catalogue

    able = [s for s in catalogue() if Fragment.STATISTICAL in s.fragments]
    lacking = {name for spec in able for name in spec.missing()}
    lacking |= {name for name in ("duckdb", "pyarrow") if find_spec(name) is None}
    if able and not lacking:
        return able[0].load()
    raise refuse(
        NO_BACKEND,
        f"no installed backend measures: {', '.join(sorted(lacking)) or 'none'} missing",
        help="`kcdsl doctor` says how to install what is missing",
    )
