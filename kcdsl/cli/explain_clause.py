"""`kcdsl explain CLAUSE`: which backends cover a clause, and what keeps the others from it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from kcdsl.check.compile import Analysis, analyse, no_program
from kcdsl.cli.discover import find_contract
from kcdsl.cli.explain_metric import metric_named, show_metric
from kcdsl.diagnostics import Diagnostic, Refusal, Severity, Sink, refuse
from kcdsl.diagnostics.codes import NO_CONTRACT, OUTSIDE_FRAGMENTS, UNKNOWN_CLAUSE
from kcdsl.diagnostics.render.terminal import json_for_terminals, one_line
from kcdsl.diagnostics.report import nearest, suggest
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.exits import Exit
from kcdsl.ir.fragment import Blame, classify
from kcdsl.ir.terms import Clause, Program
from kcdsl.metrics import BUILT_IN
from kcdsl.route.blame import why_uncovered
from kcdsl.route.catalogue import BackendSpec, Fragment, catalogue
from kcdsl.route.router import Route, route
from kcdsl.source.files import read_source

SCHEMA = "kcdsl.explain/1"


@dataclass(frozen=True, slots=True)
class Candidate:
    """What a backend says to a clause. `blame` is the part out of its reach, where there is one."""

    backend: str
    covers: bool
    reason: str
    blame: Blame | None


def explain_clause(arguments: argparse.Namespace) -> Exit:
    """Print the table of backends for the clause `arguments.topic` of `arguments.contract`.

    A clause that no backend covers is explained too, and so is one beside clauses in error. Where
    there is no such clause, a metric that the contract's user declares under this name is shown.
    """
    name = arguments.topic
    path = _contract(arguments)
    source, sink = read_source(path), Sink()
    analysis = analyse(source, sink, path.parent)
    if analysis.raw is not None and all(c.id.text != name for c in analysis.raw.clauses):
        metric = metric_named(name, analysis.scope.metrics)
        if metric is not None:
            show_metric(metric, arguments.format)
            return Exit.HELD
        clauses = [c.id.text for c in analysis.raw.clauses]
        near = (*clauses, *analysis.scope.metrics.names())
        raise refuse(
            UNKNOWN_CLAUSE,
            f"{path} has no clause `{name}`, and there is no code or metric of this name",
            help=suggest(name, near if nearest(name, near) else clauses, "clauses"),
        )
    program, elsewhere = analysis.draft, _errors(sink)
    clause = next((c for c in program.clauses if c.id == name), None) if program else None
    own = tuple(found for found in elsewhere if _speaks_of(found, name, analysis))
    if own:
        raise Refusal(own)
    if program is None or clause is None:
        raise no_program(path, sink)
    specs = catalogue()
    chosen = next(r for r in route(program, specs) if r.clause_id == clause.id)
    candidates = [_candidate(clause, spec, chosen) for spec in specs]
    if arguments.format == "json":
        print(_json(program, clause, chosen, candidates, source))
    else:
        print(_text(program, clause, chosen, candidates, source))
    if elsewhere:
        plural = "s" if len(elsewhere) > 1 else ""
        print(
            f"the contract has {len(elsewhere)} error{plural}: `kcdsl lint` shows them",
            file=sys.stderr,
        )
    return Exit.HELD


def _contract(arguments: argparse.Namespace) -> Path:
    """Return the path of the contract. Where none is named and none is here, the topic may be a
    misspelt code or metric, so the refusal says what it is not."""
    try:
        return find_contract(arguments.contract, Path())
    except Refusal as refusal:
        if arguments.contract is not None or refusal.diagnostics[0].code is not NO_CONTRACT:
            raise
        name, known = arguments.topic, BUILT_IN.names()
        raise refuse(
            UNKNOWN_CLAUSE,
            f"`{name}` is no code and no metric, and there is no contract here to look for a clause"
            " of this name",
            help=suggest(name, known)
            if nearest(name, known)
            else f"name the contract of the clause: kcdsl explain {name} CONTRACT;"
            " docs/metrics.md lists the metrics, `kcdsl explain` the codes",
        ) from refusal


def _errors(sink: Sink) -> list[Diagnostic]:
    return [found for found in sink if found.severity is Severity.ERROR]


def _speaks_of(found: Diagnostic, name: str, analysis: Analysis) -> bool:
    """Say whether an error is one of a clause, other than that no backend covers it."""
    if found.code is OUTSIDE_FRAGMENTS or found.span is None or analysis.raw is None:
        return False
    if found.source is not None and found.source.name != analysis.source.name:
        return False
    own = [c for c in analysis.raw.clauses if c.id.text == name]
    spans = [part.span for c in own for part in (c.id, c.body) if part is not None]
    return any(span.start <= found.span.start <= span.end for span in spans)


def _candidate(clause: Clause, spec: BackendSpec, chosen: Route) -> Candidate:
    blame = why_uncovered(clause, spec.fragments)
    if blame is not None:
        return Candidate(spec.name, False, blame.reason, blame)
    if chosen.fragment is Fragment.IMPLIED and not chosen.premises:
        reason = chosen.why_not[spec.name]
        place = classify(clause).blame[0].span
        return Candidate(spec.name, False, reason, Blame(reason, place))
    if spec.name == chosen.backend:
        return Candidate(spec.name, True, "it is the least backend that covers the clause", None)
    return Candidate(spec.name, True, chosen.why_not.get(spec.name, ""), None)


def _text(
    program: Program,
    clause: Clause,
    chosen: Route,
    candidates: list[Candidate],
    source: SourceFile,
) -> str:
    from io import StringIO

    from rich.table import Table
    from rich.text import Text

    from kcdsl.diagnostics.render.full import render_place
    from kcdsl.verdict.console import HarmlessConsole

    terminal = sys.stdout.isatty()
    buffer = StringIO()
    console = HarmlessConsole(
        file=buffer, width=None if terminal else 100, force_terminal=terminal, highlight=False
    )
    at = source.position(clause.span.start)
    console.print(
        Text(f"clause    {clause.id} of {program.name}, {one_line(source.name)}:{at.line}")
    )
    console.print(Text(f"requires  {one_line(clause.text)}"))
    console.print(Text(f"fragment  {chosen.fragment}: {chosen.reason}"))
    console.print(Text(f"backend   {chosen.backend or 'none'}\n"))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("backend", "covers it", "because"):
        table.add_column(name, overflow="fold")
    for item in candidates:
        word = Text("yes" if item.covers else "no", style="green" if item.covers else "red")
        table.add_row(Text(item.backend), word, Text(_because(item, source)))
    console.print(table)
    lines = [line.rstrip() for line in buffer.getvalue().splitlines()]
    for item in candidates:
        if item.blame is not None and item.blame.span.end > item.blame.span.start:
            lines += ["", f"out of reach of {item.backend}: {item.blame.reason}"]
            lines.append(render_place(source, item.blame.span, "", sys.stdout))
    return "\n".join(lines)


def _because(item: Candidate, source: SourceFile) -> str:
    if item.blame is None:
        return item.reason
    quoted = " ".join(source.text[item.blame.span.start : item.blame.span.end].split())
    return f"`{quoted}`: {item.reason}" if quoted else item.reason


def _json(
    program: Program,
    clause: Clause,
    chosen: Route,
    candidates: list[Candidate],
    source: SourceFile,
) -> str:
    import json

    document = {
        "schema": SCHEMA,
        "contract": program.name,
        "clause": clause.id,
        "requires": clause.text,
        "fragment": str(chosen.fragment),
        "backend": chosen.backend,
        "reason": chosen.reason,
        "backends": [
            {
                "backend": item.backend,
                "covers": item.covers,
                "reason": item.reason,
                "blame": None if item.blame is None else _place(item.blame, source),
            }
            for item in candidates
        ],
    }
    return json_for_terminals(json.dumps(document, indent=2, ensure_ascii=False))


def _place(blame: Blame, source: SourceFile) -> dict[str, object]:
    start, end = source.position(blame.span.start), source.position(blame.span.end)
    return {
        "text": source.text[blame.span.start : blame.span.end],
        "line": start.line,
        "column": start.column,
        "end_line": end.line,
        "end_column": end.column,
    }
