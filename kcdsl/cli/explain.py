"""`kcdsl explain`: what a diagnostic code means."""

from __future__ import annotations

import argparse
import textwrap

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import UNKNOWN_CODE, all_codes, find
from kcdsl.exits import Exit

HELP = "explain a diagnostic code, or list all of them"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("code", nargs="?", metavar="CODE", help="such as KC203; without: list all")


def run(arguments: argparse.Namespace) -> Exit:
    """Print the explanation of one code, or the table of all codes."""
    if arguments.code is None:
        for code in all_codes():
            print(f"{code.id}  {code.title}")
        return Exit.HELD
    found = find(arguments.code)
    if found is None:
        raise refuse(
            UNKNOWN_CODE,
            f"there is no code {arguments.code}",
            help="`kcdsl explain` lists every code",
        )
    print(f"{found.id}: {found.title}\n")
    print(textwrap.fill(found.explanation, 88))
    return Exit.HELD
