"""`kcdsl compile`: check a contract, build its IR and show the route of each clause."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kcdsl.check.compile import analyse, no_program
from kcdsl.cli.discover import find_contract
from kcdsl.cli.solver import add_timeout, limits, solver_backend
from kcdsl.config import load_config
from kcdsl.diagnostics import Diagnostic, Refusal, Severity, Sink, Suppressed, refuse
from kcdsl.diagnostics.codes import NO_BACKEND, UNKNOWN_CLAUSE
from kcdsl.diagnostics.render import DOCUMENTS, FORMATS, Checked, Run, render
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.exits import Exit
from kcdsl.ir.canonical import digest, document, library_digest
from kcdsl.ir.terms import Library, ModelRef, Program
from kcdsl.ir.training import for_training, training_document
from kcdsl.route.router import Route, route
from kcdsl.source.files import read_source

HELP = "check a contract, build its IR and show the route of each clause"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("contract", nargs="?", metavar="CONTRACT", help="default: the one here")
    written = parser.add_mutually_exclusive_group()
    written.add_argument(
        "--emit",
        choices=("ir", "smtlib"),
        help="write the canonical JSON instead, or the question to a solver whether every clause "
        "can hold at once",
    )
    written.add_argument(
        "--follows",
        metavar="CLAUSE",
        help="write the SMT-LIB question whether the other clauses imply this one",
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result to a file")
    parser.add_argument("--format", choices=FORMATS, default="full", help="form of diagnostics")
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=("training",),
        help="leave out held-out clauses and what they alone speak of",
    )
    parser.add_argument(
        "--consistency",
        action="store_true",
        help="ask z3 whether clauses contradict, repeat or hollow out each other",
    )
    add_timeout(parser, "with --consistency: how long z3 may take for all questions")


def run(arguments: argparse.Namespace) -> Exit:
    """Compile; diagnostics go to stderr, the table or the IR to stdout or the file."""
    path = find_contract(arguments.contract, Path())
    source, sink = read_source(path), Sink()
    analysis = analyse(source, sink, path.parent)
    program, withheld, accepted = analysis.program, None, analysis.suppressed
    if analysis.library is not None:
        if arguments.emit or arguments.follows or arguments.consistency or arguments.purpose:
            raise no_program(path, sink)
        _print(sink, arguments.format, _about(path, accepted, Exit.HELD))
        _deliver(_library(analysis.library), arguments.output)
        return Exit.HELD
    if program is None:
        _print(sink, arguments.format, _about(path, accepted, Exit.COULD_NOT_RUN))
        return Exit.COULD_NOT_RUN
    full = program
    if arguments.purpose == "training":
        program, withheld = for_training(program)
    findings = Sink()
    if arguments.consistency:
        from kcdsl.check.suppressions import accept

        findings = _consistency(program, source, arguments.timeout)
        accepted += accept(source, analysis.root, findings, path.parent, solver=True)
    routes = route(program)
    for diagnostic in (*findings, *_undecided(routes)):
        sink.add(diagnostic)
    code = Exit.VIOLATED if findings.has_errors else Exit.HELD
    _print(sink, arguments.format, _about(path, accepted, code), frozenset(findings))
    if arguments.emit == "ir":
        written = document(program) if withheld is None else training_document(full)
        _deliver(written.decode("utf-8") + "\n", arguments.output)
    elif arguments.emit == "smtlib" or arguments.follows:
        _deliver(_question(program, arguments.follows), arguments.output)
    else:
        weights = _weights(program.model, path.parent)
        _deliver(_table(program, weights, routes, arguments.output), arguments.output)
    if withheld is not None:
        print(one_line(f"left out for training: {withheld}"), file=sys.stderr)
    return code


def _about(path: Path, accepted: tuple[Suppressed, ...], code: Exit) -> Run:
    files = (Checked(str(path)),)
    return Run("kcdsl compile", files, accepted, load_config(path.parent).docs_url, exit_code=code)


def _print(sink: Sink, format: str, run: Run, asked: frozenset[Diagnostic] = frozenset()) -> None:
    """Print errors and warnings, and what was asked for; of other notes and of accepted findings
    only their number."""
    if format in DOCUMENTS:
        print(render(sink, format, sys.stderr, run), file=sys.stderr)
        return
    shown = [d for d in sink if d.severity is not Severity.NOTE or d in asked]
    if shown:
        print(render(shown, format, sys.stderr), file=sys.stderr)
    hidden = len(sink.found) - len(shown)
    if hidden and format == "full":
        plural = "s" if hidden > 1 else ""
        print(f"{hidden} note{plural}: `kcdsl lint` shows them", file=sys.stderr)
    accepted = len(run.suppressed)
    if accepted and format == "full":
        plural = "s" if accepted > 1 else ""
        print(f"{accepted} finding{plural} accepted by comments", file=sys.stderr)


def _question(program: Program, follows: str | None) -> str:
    from kcdsl.ir import smtlib

    if follows is None:
        return smtlib.consistency(program)
    if all(clause.id != follows for clause in program.clauses):
        raise refuse(
            UNKNOWN_CLAUSE,
            f"the contract has no clause {follows!r}",
            help=f"clauses: {', '.join(clause.id for clause in program.clauses)}",
        )
    return smtlib.implication(program, follows)


def _consistency(program: Program, source: SourceFile, timeout: float) -> Sink:
    from kcdsl.cli.progress import progress_bars

    backend, sink = solver_backend("--consistency"), Sink()
    question, total = limits(timeout)
    with progress_bars() as report:
        found: list[Diagnostic] = backend.consistency(program, question, source, total, report)
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


def _library(library: Library) -> str:
    """Return what `compile` says of a library: its digest, as imports state it, and its names."""
    named = {
        "slices": [s.name for s in library.slices],
        "kernels": [name for name, _ in library.kernels],
        "tables": [t.name for t in library.tables],
    }
    lines = [f"library {library.name} {library.version}", f"digest  {library_digest(library)}"]
    lines += [f"{what:7} {', '.join(sorted(names))}" for what, names in named.items() if names]
    return "\n".join(lines) + "\n"


def _weights(model: ModelRef, folder: Path) -> str:
    """Return the digest of the checkpoint as it is now, or where it was looked for in vain."""
    from kcdsl.model.files import file_digest, resolve_file

    try:
        return f"sha256:{file_digest(resolve_file(model.checkpoint, folder))}"
    except Refusal as refusal:
        return refusal.diagnostics[0].message


def _table(program: Program, weights: str, routes: tuple[Route, ...], output: str | None) -> str:
    from io import StringIO

    from rich.table import Table
    from rich.text import Text

    from kcdsl.verdict.console import HarmlessConsole

    terminal = output is None and sys.stdout.isatty()
    buffer = StringIO()
    console = HarmlessConsole(
        file=buffer, width=None if terminal else 100, force_terminal=terminal, highlight=False
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("clause", "level", "family", "fragment", "backend", "why"):
        table.add_column(name, no_wrap=name == "clause", overflow="fold")
    families = {clause.id: clause for clause in program.clauses}
    for item in routes:
        clause = families[item.clause_id]
        backend = Text(item.backend or "none", style="" if item.backend else "red")
        name = f"{clause.id} (held out)" if clause.holdout else clause.id
        cells = (name, clause.level.value, clause.family.value, item.fragment.value)
        table.add_row(*(Text(cell) for cell in cells), backend, Text(item.reason))
    console.print(Text(f"contract {program.name} {program.version}"))
    console.print(Text(f"digest      sha256:{digest(program)}"))
    console.print(Text(f"checkpoint  {one_line(weights)}\n"), soft_wrap=True)
    console.print(table)
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"
