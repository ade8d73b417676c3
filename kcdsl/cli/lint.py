"""`kcdsl lint`: check contracts and say everything that is wrong with them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kcdsl.check.compile import compile_contract
from kcdsl.cli.discover import find_contract
from kcdsl.diagnostics import Diagnostic, Severity
from kcdsl.diagnostics.codes import FILE_MISSING, INPUT_OUTPUT
from kcdsl.diagnostics.render import FORMATS, render
from kcdsl.exits import Exit

HELP = "check contracts and report what is wrong, without running anything"
_UNREADABLE = {FILE_MISSING, INPUT_OUTPUT}
_RANK = {Severity.NOTE: 0, Severity.WARNING: 1, Severity.ERROR: 2}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "paths", nargs="*", metavar="PATH", help="contracts (default: the one here)"
    )
    parser.add_argument(
        "--format", choices=FORMATS, default="full", help="how findings are written"
    )
    parser.add_argument(
        "--fail-on",
        choices=[severity.value for severity in _RANK],
        default="error",
        help="least severity that gives exit code 1",
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Print every finding; exit code 1 if one is at least as severe as `--fail-on`, 2 if a file
    cannot be read."""
    here = Path()
    paths = [find_contract(given, here) for given in arguments.paths or [None]]
    found: list[Diagnostic] = []
    for path in paths:
        found.extend(compile_contract(path)[1])
    if found or arguments.format == "json":
        print(render(found, arguments.format, sys.stdout))
    worst = max((_RANK[d.severity] for d in found), default=-1)
    if arguments.format == "full":
        print(_summary(found, len(paths)), file=sys.stderr)
    if any(d.code in _UNREADABLE for d in found):
        return Exit.COULD_NOT_RUN
    limit = _RANK[Severity(arguments.fail_on)]
    return Exit.VIOLATED if worst >= limit else Exit.HELD


def _summary(found: list[Diagnostic], files: int) -> str:
    counts = [
        f"{n} {severity.value}{'s' if n != 1 else ''}"
        for severity in Severity
        if (n := sum(d.severity is severity for d in found))
    ]
    return f"{files} contract{'s' if files != 1 else ''}: {', '.join(counts) or 'nothing found'}"
