"""The formats of a report: what is printed, and what is written beside it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.diagnostics.render.terminal import json_for_terminals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kcdsl.diagnostics.spans import SourceFile, Span
    from kcdsl.ir.terms import Program

FORMATS = ("text", "json", "junit", "github", "sarif", "concise", "html")
"""What `--format` takes; `text` is for people, the others are for programs and browsers."""


@dataclass(frozen=True, slots=True)
class Output:
    """A format, and the file that it is written to; None for standard output."""

    format: str
    file: Path | None


def add_formats(parser: argparse.ArgumentParser) -> None:
    """Add `--format FORMAT[=FILE]`, which may be given several times."""
    parser.add_argument(
        "--format",
        action="append",
        metavar="FORMAT[=FILE]",
        help=f"print as, or write to a file: {', '.join(FORMATS)} (default: text)",
    )


def outputs(words: Sequence[str] | None, *, json: bool = False) -> tuple[Output, ...]:
    """Return what is asked for, `json` on standard output, and text there where nothing else is.

    Raises Refusal for a format that there is not, and for two on standard output.
    """
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import USAGE

    found = []
    for word in words or ():
        name, sign, file = word.partition("=")
        if name not in FORMATS or (sign and not file):
            raise refuse(USAGE, f"there is no format `{word}`", help=f"one of {', '.join(FORMATS)}")
        found.append(Output(name, Path(file) if sign else None))
    if json and Output("json", None) not in found:
        found.append(Output("json", None))
    if sum(output.file is None for output in found) > 1:
        raise refuse(USAGE, "two formats for standard output", help="give one of them a file")
    if all(output.file is not None for output in found):
        found.append(Output("text", None))
    return tuple(found)


def document_in(
    format: str,
    report: Mapping[str, Any],
    *,
    command: str,
    source: SourceFile | None = None,
    places: Mapping[str, Span] | None = None,
    attribution: Mapping[str, Any] | None = None,
) -> str:
    """Return a report document in a format other than `text`, ending with a line break."""
    match format:
        case "json":
            import json

            return (
                json_for_terminals(
                    json.dumps(report, indent=2, allow_nan=False, ensure_ascii=False)
                )
                + "\n"
            )
        case "html":
            from kcdsl.verdict.html import page

            return page(report, attribution) + "\n"
        case _:
            from kcdsl.verdict.annotations import in_format

            text = in_format(report, format, command, source, places)
            return text + "\n" if text and not text.endswith("\n") else text


def contract_places(path: Path, program: Program) -> tuple[SourceFile, dict[str, Span]]:
    """Return a contract's file, and where each of its clauses stands in it."""
    from kcdsl.source.files import read_source

    source = read_source(path)
    inside = range(len(source.text) + 1)
    places = {clause.id: clause.span for clause in program.clauses}
    return source, {name: span for name, span in places.items() if span.end in inside}
