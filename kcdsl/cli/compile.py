"""`kcdsl compile`: check a contract, build its IR and show the route of each clause."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kcdsl.check.compile import compile_source
from kcdsl.cli.discover import find_contract
from kcdsl.diagnostics import Diagnostic, Severity, Sink, refuse
from kcdsl.diagnostics.codes import NO_BACKEND
from kcdsl.diagnostics.render import FORMATS, render
from kcdsl.exits import Exit
from kcdsl.ir.canonical import digest, document
from kcdsl.ir.terms import Program
from kcdsl.route.catalogue import catalogue
from kcdsl.route.router import Route, route
from kcdsl.source.files import read_source
from kcdsl.source.text import SourceFile

HELP = "check a contract, build its IR and show the route of each clause"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("contract", nargs="?", metavar="CONTRACT", help="default: the one here")
    parser.add_argument("--emit", choices=("ir",), help="write the canonical JSON instead")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result to a file")
    parser.add_argument("--format", choices=FORMATS, default="full", help="form of diagnostics")
    parser.add_argument(
        "--consistency",
        action="store_true",
        help="ask z3 whether clauses contradict or repeat each other",
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Compile; diagnostics go to stderr, the table or the IR to stdout or the file."""
    path = find_contract(arguments.contract, Path())
    source, sink = read_source(path), Sink()
    program = compile_source(source, sink, path.parent)
    if program is None:
        _print(sink, arguments.format)
        return Exit.COULD_NOT_RUN
    findings = _consistency(program, source) if arguments.consistency else Sink()
    routes = route(program)
    for diagnostic in (*findings, *_undecided(routes)):
        sink.add(diagnostic)
    _print(sink, arguments.format)
    if arguments.emit == "ir":
        _deliver(document(program).decode("utf-8") + "\n", arguments.output)
    else:
        _deliver(_table(program, routes, arguments.output), arguments.output)
    return Exit.VIOLATED if findings.has_errors else Exit.HELD


def _print(sink: Sink, format: str) -> None:
    """Print errors and warnings; of notes only their number, outside JSON."""
    if format == "json":
        print(render(sink, format, sys.stderr), file=sys.stderr)
        return
    shown = [d for d in sink if d.severity is not Severity.NOTE]
    if shown:
        print(render(shown, format, sys.stderr), file=sys.stderr)
    hidden = len(sink.found) - len(shown)
    if hidden and format == "full":
        plural = "s" if hidden > 1 else ""
        print(f"{hidden} note{plural}: `kcdsl lint` shows them", file=sys.stderr)


def _consistency(program: Program, source: SourceFile) -> Sink:
    spec = next((spec for spec in catalogue() if spec.name == "smt"), None)
    if spec is None or spec.missing():
        lacking = "the backend smt" if spec is None else ", ".join(spec.missing())
        raise refuse(
            NO_BACKEND,
            f"--consistency needs {lacking}, which is not installed",
            help="pip install z3-solver",
        )
    sink = Sink()
    found: list[Diagnostic] = spec.load().consistency(program, source=source)
    for diagnostic in found:
        sink.add(diagnostic)
    return sink


def _undecided(routes: tuple[Route, ...]) -> Sink:
    """Warn of every clause that no installed backend decides, with the reason of each."""
    sink = Sink()
    for item in routes:
        if item.backend is None:
            sink.add(
                Diagnostic(
                    NO_BACKEND,
                    f"nobody decides the clause `{item.clause_id}`: {item.reason}",
                    notes=tuple(f"not {name}: {why}" for name, why in item.why_not.items()),
                    severity=Severity.WARNING,
                )
            )
    return sink


def _deliver(text: str, output: str | None) -> None:
    if output is None:
        sys.stdout.write(text)
    else:
        from kcdsl.source.writing import write_bytes

        write_bytes(Path(output), text.encode("utf-8"))


def _table(program: Program, routes: tuple[Route, ...], output: str | None) -> str:
    from io import StringIO

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = output is None and sys.stdout.isatty()
    buffer = StringIO()
    console = Console(
        file=buffer, width=None if terminal else 100, force_terminal=terminal, highlight=False
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("clause", "level", "family", "fragment", "backend", "why"):
        table.add_column(name, no_wrap=name == "clause", overflow="fold")
    families = {clause.id: clause for clause in program.clauses}
    for item in routes:
        clause = families[item.clause_id]
        backend = Text(item.backend or "none", style="" if item.backend else "red")
        cells = (clause.id, clause.level.value, clause.family.value, item.fragment.value)
        table.add_row(*(Text(cell) for cell in cells), backend, Text(item.reason))
    console.print(Text(f"contract {program.name} {program.version}"))
    console.print(Text(f"digest   sha256:{digest(program)}\n"))
    console.print(table)
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
