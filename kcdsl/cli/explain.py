"""`kcdsl explain`: what a code or a metric means, or where a clause goes and why."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import FAMILIES, UNKNOWN_CODE, USAGE, Code, all_codes, find
from kcdsl.diagnostics.render.terminal import json_for_terminals
from kcdsl.exits import Exit

HELP = "explain a diagnostic code, a metric, or which backends cover a clause and why"
SCHEMA = "kcdsl.codes/1"
_CODE = re.compile(r"(?i)(?:kc)?([0-9]+)")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "topic",
        nargs="?",
        metavar="CODE|METRIC|CLAUSE",
        help="a code such as KC203, a family of codes such as KC2, a metric such as kl, or a "
        "clause of the contract; without: list the codes",
    )
    parser.add_argument(
        "contract", nargs="?", metavar="CONTRACT", help="the contract of the clause"
    )
    parser.add_argument(
        "--format",
        choices=("text", "json", "markdown"),
        default="text",
        help="form of the answer (default: text)",
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Print the page of a code, a metric, what backends say to a clause, or the list of all codes.

    A clause that has the name of a metric is meant where its contract is given.
    """
    if arguments.topic is None:
        _list(all_codes(), arguments.format)
        return Exit.HELD
    code = _CODE.fullmatch(arguments.topic)
    if code is None and arguments.contract is None:
        from kcdsl.cli.explain_metric import metric_named, show_metric

        metric = metric_named(arguments.topic)
        if metric is not None:
            show_metric(metric, arguments.format)
            return Exit.HELD
    if code is None:
        if arguments.format == "markdown":
            raise refuse(USAGE, "a clause is not explained as Markdown", help="leave --format out")
        from kcdsl.cli.explain_clause import explain_clause

        return explain_clause(arguments)
    wanted = f"KC{code[1]}"
    if wanted in FAMILIES:
        _list(tuple(c for c in all_codes() if c.family == wanted), arguments.format)
        return Exit.HELD
    found = find(wanted)
    if found is None:
        raise refuse(UNKNOWN_CODE, f"there is no code {wanted}", help=_where(wanted))
    _show(found, arguments.format)
    return Exit.HELD


def _where(wanted: str) -> str:
    """Say where the codes are that could be meant: near numbers mean nothing alike."""
    family = wanted[:3]
    if family in FAMILIES:
        return f"`kcdsl explain {family}` lists the codes about {FAMILIES[family]}"
    return "`kcdsl explain` lists every code"


def _show(code: Code, format: str) -> None:
    """Print the page of a code: set for a terminal, as plain text for anything else."""
    written = code.page
    if format == "json":
        print(_json((code,)))
    elif format == "markdown":
        print(written.markdown, end="")
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(written.markdown))
    else:
        print(written.plain, end="")


def _list(codes: Sequence[Code], format: str) -> None:
    """Print codes by family: their titles, in Markdown and JSON what they mean too."""
    if format == "json":
        print(_json(codes))
        return
    markdown = format == "markdown"
    for family in dict.fromkeys(code.family for code in codes):
        before = "\n" if codes[0].family != family else ""
        print(f"{before}{'## ' if markdown else ''}{family}: {FAMILIES[family]}\n")
        for code in codes:
            if code.family == family:
                named = f"{code.id}  {code.title}"
                print(f"- **{code.id}**: {code.title}. {code.summary}" if markdown else named)


def _json(codes: Sequence[Code]) -> str:
    import json

    document = {
        "schema": SCHEMA,
        "codes": [
            {
                "code": code.id,
                "title": code.title,
                "family": FAMILIES[code.family],
                "summary": code.summary,
                "explanation": code.explanation,
                "markdown": code.page.markdown,
            }
            for code in codes
        ],
    }
    return json_for_terminals(json.dumps(document, indent=2, ensure_ascii=False))
