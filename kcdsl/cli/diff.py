"""`kcdsl diff`: is the new contract stricter, weaker, equal or incomparable, clause by clause."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kcdsl.check.compile import compile_source, no_program
from kcdsl.cli.discover import find_contract
from kcdsl.cli.solver import add_timeout, limits, solver_backend
from kcdsl.diagnostics import Severity, Sink
from kcdsl.diagnostics.render import render
from kcdsl.exits import Exit
from kcdsl.ir.load import is_stored, load_bytes
from kcdsl.ir.terms import Program
from kcdsl.source.files import read_source
from kcdsl.verdict.difference import Difference, Relation

HELP = "say whether a contract became stricter or weaker, clause by clause"
FORMATS = ("full", "json", "markdown")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "old", metavar="OLD", help="the contract as it was, or what --emit ir wrote"
    )
    parser.add_argument("new", metavar="NEW", help="the contract as it is to be, or the like")
    parser.add_argument("--format", choices=FORMATS, default="full", help="form of the result")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the result to a file")
    add_timeout(parser, "how long z3 may take for all questions")


def run(arguments: argparse.Namespace) -> Exit:
    """Print how the new contract differs; exit code 1 if it may accept what the old one refuses,
    3 if that is open."""
    from kcdsl.cli.progress import progress_bars

    old, new = _program(arguments.old), _program(arguments.new)
    backend = solver_backend("kcdsl diff")
    question, total = limits(arguments.timeout)
    with progress_bars() as report:
        found: Difference = backend.difference(old, new, question, total, report)
    _deliver(_written(found, arguments.format), arguments.output)
    return exit_code(found.relation)


def exit_code(relation: Relation) -> Exit:
    """Return the process status for the relation of the whole contract."""
    if relation.is_finding:
        return Exit.VIOLATED
    return Exit.INCONCLUSIVE if relation is Relation.UNDECIDED else Exit.HELD


def _program(given: str) -> Program:
    """Return a contract, compiled or as it was stored; what is wrong with it goes to stderr."""
    path = find_contract(given, Path())
    source, sink = read_source(path), Sink()
    if is_stored(source.text):
        return load_bytes(source.text.encode("utf-8"), str(path))
    program = compile_source(source, sink, path.parent)
    if program is None:
        raise no_program(path, sink)
    errors = [d for d in sink if d.severity is Severity.ERROR]
    if errors:
        print(render(errors, "full", sys.stderr), file=sys.stderr)
    return program


def _written(found: Difference, format: str) -> str:
    if format == "json":
        from kcdsl.verdict.difference_json import difference_json

        return difference_json(found)
    from kcdsl.verdict.difference_text import full, markdown

    return full(found) if format == "full" else markdown(found)


def _deliver(text: str, output: str | None) -> None:
    if output is None:
        sys.stdout.write(text)
    else:
        from kcdsl.source.writing import write_bytes

        write_bytes(Path(output), text.encode("utf-8"))
