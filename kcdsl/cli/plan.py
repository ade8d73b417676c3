"""`kcdsl plan`: how many requests the clauses of a contract need to be decidable."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.ir.terms import Program
    from kcdsl.verdict.plan import Plan

HELP = "tell how many requests the clauses need to be decidable"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kcdsl.cli.looks import add_looks

    parser.add_argument("contract", nargs="?", metavar="CONTRACT", help="default: the one here")
    parser.add_argument("--slice", action="append", metavar="NAME", help="only this slice")
    add_looks(parser)
    parser.add_argument(
        "--power",
        type=_probability,
        default=0.8,
        metavar="P",
        help="how likely a clause that is kept is to be shown (default: 0.8)",
    )
    parser.add_argument(
        "--pilot",
        metavar="FILE",
        help="report.json or a trace (.jsonl, .parquet) of an earlier evaluation: its rates, its "
        "spread, and the thresholds that it would have shown",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> Exit:
    """Run the command: nothing is measured and nothing is written."""
    from kcdsl.check.compile import load_program
    from kcdsl.cli.discover import find_contract
    from kcdsl.source.files import in_contract

    path = find_contract(arguments.contract, Path())
    program = load_program(path)
    chosen = tuple(arguments.slice or ())
    _known(program, chosen)
    planner = _planner()
    with in_contract(path):
        found: Plan = planner(
            program,
            path.resolve().parent,
            looks=None if arguments.anytime else arguments.looks,
            power=arguments.power,
            pilot=None if arguments.pilot is None else Path(arguments.pilot),
            slices=chosen,
        )
    if arguments.json:
        sys.stdout.write(found.dumps())
    else:
        from kcdsl.verdict.plan_text import print_plan

        print_plan(found, sys.stdout)
    return Exit.HELD


def _probability(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be a number between 0 and 1, not {text!r}")
    return value


def _known(program: Program, names: tuple[str, ...]) -> None:
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import UNKNOWN_SLICE
    from kcdsl.diagnostics.report import suggest

    known = [s.name for s in program.slices]
    for name in names:
        if name not in known:
            raise refuse(
                UNKNOWN_SLICE,
                f"the contract has no slice {name!r}",
                help=suggest(name, known, "slices"),
            )


def _planner() -> Any:
    """Return the planner of the backend that measures; refuse where what it needs is missing."""
    from importlib.util import find_spec

    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_BACKEND
    from kcdsl.route.catalogue import Fragment, catalogue

    able = [s for s in catalogue() if Fragment.STATISTICAL in s.fragments and s.planner]
    for spec in able:
        if all(find_spec(name) is not None for name in spec.planner_needs):
            return spec.load_planner()
    needs = sorted({n for spec in able for n in spec.planner_needs if find_spec(n) is None})
    raise refuse(
        NO_BACKEND,
        f"no installed backend plans: {', '.join(needs)} missing" if needs else "no backend plans",
        help="`kcdsl doctor` says how to install what is missing",
    )
