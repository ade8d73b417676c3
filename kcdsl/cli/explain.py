"""`kcdsl explain`: what a diagnostic code means, or where a clause goes and why."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import UNKNOWN_CODE, Code, all_codes, find
from kcdsl.exits import Exit

HELP = "explain a diagnostic code, or which backends cover a clause and why"
_CODE = re.compile(r"(?i)kc[0-9]+")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "topic",
        nargs="?",
        metavar="CODE|CLAUSE",
        help="a code such as KC203, or a clause of the contract; without: list the codes",
    )
    parser.add_argument(
        "contract", nargs="?", metavar="CONTRACT", help="the contract of the clause"
    )
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="form of the answer on a clause"
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Print the explanation of one code or clause, or the table of all codes."""
    if arguments.topic is None:
        for code in all_codes():
            print(f"{code.id}  {code.title}")
        return Exit.HELD
    if not _CODE.fullmatch(arguments.topic):
        from kcdsl.cli.explain_clause import explain_clause

        return explain_clause(arguments)
    found = find(arguments.topic)
    if found is None:
        raise refuse(
            UNKNOWN_CODE,
            f"there is no code {arguments.topic}",
            help="`kcdsl explain` lists every code",
        )
    _show(found)
    return Exit.HELD


def _show(code: Code) -> None:
    """Print the page of a code: set for a terminal, as it is for anything else."""
    from kcdsl.diagnostics.pages import page

    written = page(code)
    if written is None:
        print(f"# {code.id}: {code.title}\n\n{textwrap.fill(code.explanation, 100)}")
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(written.text))
    else:
        print(written.text.rstrip("\n"))
