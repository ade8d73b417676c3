"""`kcdsl report`: show a report that was written earlier, without running anything."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kcdsl.diagnostics.spans import SourceFile, Span

HELP = "write the page of a report again, or show it in another format"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kcdsl.cli.report_formats import FORMATS

    parser.add_argument("report", metavar="REPORT", help="report.json of `kcdsl evaluate`")
    parser.add_argument(
        "--attribution", metavar="FILE", help="JSON of `kcdsl attribute`, shown on the page"
    )
    parser.add_argument(
        "--format",
        choices=[name for name in FORMATS if name != "text"],
        default="html",
        help="default: html",
    )
    parser.add_argument(
        "--contract", metavar="CONTRACT", help="places of clauses for junit, github and sarif"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="default: standard output")


def run(arguments: argparse.Namespace) -> Exit:
    """Show the report; the exit code is that of its verdict."""
    from kcdsl.cli.report_formats import document_in
    from kcdsl.source.writing import write_bytes
    from kcdsl.verdict.report_file import read_attribution, read_report, unusable

    file = Path(arguments.report)
    document = read_report(file)
    attribution = None
    if arguments.attribution is not None:
        attribution = read_attribution(Path(arguments.attribution))
    source, places = _places(arguments.contract)
    try:
        text = document_in(
            arguments.format,
            document,
            command="kcdsl report",
            source=source,
            places=places,
            attribution=attribution,
        )
    except _malformed() as error:
        raise unusable(file, str(error) or type(error).__name__) from None
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        write_bytes(Path(arguments.output), text.encode())
        print(one_line(f"wrote {arguments.output}"), file=sys.stderr)
    return Exit(document["exit"])


def _malformed() -> tuple[type[Exception], ...]:
    """Return what a document of another shape raises while it is shown."""
    from jinja2 import UndefinedError

    wrong = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)
    return (*wrong, UndefinedError)


def _places(contract: str | None) -> tuple[SourceFile | None, Mapping[str, Span]]:
    if contract is None:
        return None, {}
    from kcdsl.check.compile import load_contract
    from kcdsl.cli.discover import find_contract
    from kcdsl.cli.report_formats import contract_places

    path = find_contract(contract, Path())
    program, _ = load_contract(path)
    return contract_places(path, program)
