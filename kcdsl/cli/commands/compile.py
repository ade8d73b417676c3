"""`kcdsl compile`, `diff` and `fmt`: route clauses, compare contracts, write the house layout."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.api.backends import solver_backend
from kcdsl.api.contract import contracts_in, find_contract, read_contract, refuse_foreign_code
from kcdsl.check.compile import analyse, compile_source, no_program
from kcdsl.cli.common import Command, argument, choice, switch, value
from kcdsl.cli.common.options import (
    OutputFormat,
    contract_argument,
    format_option,
    output_option,
    seconds,
    whole,
)
from kcdsl.cli.common.output import difference, progress_bars, write_text
from kcdsl.diagnostics import Diagnostic, Refusal, Severity, Sink, Suppressed, refuse
from kcdsl.diagnostics.codes import DATA_ABSENT, NO_BACKEND, UNKNOWN_CLAUSE, USAGE
from kcdsl.diagnostics.render import DOCUMENTS, FORMATS, Checked, LintRun, render
from kcdsl.diagnostics.render.full import render_full
from kcdsl.diagnostics.render.terminal import counted, json_for_terminals, one_line
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.exits import Exit
from kcdsl.ir.canonical import digest, document, library_digest
from kcdsl.ir.terms import ONNX, Library, ModelRef, Program
from kcdsl.logic import smtlib
from kcdsl.model.presets import resolve
from kcdsl.route.router import Route, route
from kcdsl.source.config import load_config
from kcdsl.source.files import decode_source, in_contract, read_source
from kcdsl.source.output import write_bytes

if TYPE_CHECKING:
    from kcdsl.verdict.studies.difference import Relation

_ONNX_USAGE = "kcdsl compile --emit onnx --block attn_0 -o attn_0.onnx"
QUESTION_MS = 2000
"""The most milliseconds that a single question to z3 may take."""


class OutputKind(StrEnum):
    """The output in place of the table of routes."""

    IR = "ir"
    SMTLIB = "smtlib"
    ONNX = "onnx"


class Purpose(StrEnum):
    """The purpose of compiling a contract."""

    TRAINING = "training"


@dataclass(frozen=True, kw_only=True)
class CompileCommand(Command):
    """Check a contract, build its IR and show the route of each clause."""

    contract: str | None = contract_argument()
    emit: OutputKind | None = choice(
        OutputKind,
        "write canonical JSON instead, the SMT-LIB query for joint satisfiability of all "
        "clauses, or the graph of a block with its weights as an ONNX file",
        group="written",
    )
    block: str | None = value("BLOCK", "with --emit onnx: the block, such as attn_0")
    tokens: int = value(
        "N", "with --emit onnx: the sequence length", 8, read=whole(least=1), name="tokens"
    )
    follows: str | None = value(
        "CLAUSE",
        "write the SMT-LIB query that asks whether the other clauses imply this one",
        group="written",
    )
    output: str | None = output_option("FILE", "write the result to a file")
    format: str = choice(FORMATS, "format of diagnostics", "text")
    purpose: Purpose | None = choice(
        Purpose, "leave out held-out clauses and all that only they use", name="for"
    )
    consistency: bool = switch(
        "check with z3 for clauses that are contradictory, redundant or vacuous"
    )
    timeout: float = value(
        "SECONDS",
        "with --consistency: time limit for all queries of z3 together",
        60.0,
        read=seconds,
    )

    def run(self) -> Exit:
        """Compile; diagnostics go to stderr, the table or the IR to stdout or the file."""
        if (self.emit is OutputKind.ONNX) is (self.block is None):
            raise refuse(USAGE, "`--emit onnx` and `--block` go together", help=_ONNX_USAGE)
        if self.emit is OutputKind.ONNX and self.output is None:
            raise refuse(USAGE, "an ONNX file is not printed", help=_ONNX_USAGE)
        path = find_contract(self.contract, Path())
        source, sink = read_source(path), Sink()
        analysis = analyse(source, sink, path.parent)
        program, withheld, accepted = analysis.program, None, analysis.suppressed
        if analysis.library is not None:
            if self.emit or self.follows or self.consistency or self.purpose:
                raise no_program(path, sink)
            self._print(sink, path, accepted, Exit.HELD)
            write_text(_library(analysis.library), self.output)
            return Exit.HELD
        if program is None:
            self._print(sink, path, accepted, Exit.COULD_NOT_RUN)
            return Exit.COULD_NOT_RUN
        unfit = _unfit(program, source, path.parent)
        if unfit:
            for diagnostic in unfit:
                sink.add(diagnostic)
            self._print(sink, path, accepted, Exit.COULD_NOT_RUN)
            return Exit.COULD_NOT_RUN
        full = program
        if self.purpose is Purpose.TRAINING:
            from kcdsl.ir.training import for_training, training_document

            program, withheld = for_training(program)
        findings = Sink()
        if self.consistency:
            from kcdsl.check.suppressions import accept

            findings = _consistency(program, source, self.timeout)
            accepted += accept(source, analysis.root, findings, path.parent, solver=True)
        routes = route(program)
        for diagnostic in (*findings, *_undecided(routes)):
            sink.add(diagnostic)
        code = Exit.VIOLATED if findings.has_errors else Exit.HELD
        self._print(sink, path, accepted, code, frozenset(findings))
        if self.emit is OutputKind.IR:
            written = document(program) if withheld is None else training_document(full)
            text = written.decode("utf-8") + "\n"
            seen = self.output is None and sys.stdout.isatty()
            write_text(json_for_terminals(text) if seen else text, self.output)
        elif self.block is not None and self.output is not None:
            write_bytes(Path(self.output), _block_model(path, self.block, self.tokens))
        elif self.emit is OutputKind.SMTLIB or self.follows:
            write_text(_question(program, self.follows), self.output)
        else:
            terminal = self.output is None and sys.stdout.isatty()
            weights = _weights(program.model, path.parent)
            write_text(_table(program, weights, routes, terminal), self.output)
        if withheld is not None:
            print(one_line(f"left out for training: {withheld}"), file=sys.stderr)
        return code

    def _print(
        self,
        sink: Sink,
        path: Path,
        accepted: tuple[Suppressed, ...],
        code: Exit,
        asked: frozenset[Diagnostic] = frozenset(),
    ) -> None:
        """Print errors and warnings, requested findings, and missing files; of other notes and of
        accepted findings only the number."""
        if self.format in DOCUMENTS:
            docs_url = load_config(path.parent).docs_url
            run = LintRun(
                "kcdsl compile", (Checked(str(path)),), accepted, docs_url, exit_code=code
            )
            print(render(sink, self.format, sys.stderr, run), file=sys.stderr)
            return
        absent = () if sink.has_errors else (DATA_ABSENT,)
        shown = [
            d for d in sink if d.severity is not Severity.NOTE or d in asked or d.code in absent
        ]
        if shown:
            print(render(shown, self.format, sys.stderr), file=sys.stderr)
        if self.format != "text":
            return
        hidden = len(sink.found) - len(shown)
        if hidden:
            print(f"{counted(hidden, 'note')}: `kcdsl lint` shows them", file=sys.stderr)
        if accepted:
            print(f"{counted(len(accepted), 'finding')} accepted by comments", file=sys.stderr)


def _unfit(program: Program, source: SourceFile, folder: Path) -> tuple[Diagnostic, ...]:
    """Return the defects of the model and the kernels, with spans in the text."""
    from kcdsl.check.artefacts import check_artefacts

    placed = (
        diagnostic if diagnostic.span is None else replace(diagnostic, source=source)
        for diagnostic in check_artefacts(program, folder)
    )
    return tuple(placed)


def _question(program: Program, follows: str | None) -> str:
    if follows is None:
        return smtlib.consistency(program)
    if all(clause.id != follows for clause in program.clauses):
        raise refuse(
            UNKNOWN_CLAUSE,
            f"the contract has no clause {follows!r}",
            help=f"clauses: {', '.join(clause.id for clause in program.clauses)}",
        )
    return smtlib.implication(program, follows)


def _block_model(path: Path, block: str, length: int) -> bytes:
    """Return a block of the training kernel as the bytes of an ONNX model.

    Refuse a model with own code of the contract, and a block whose graph depends on the input: one
    that reads token ids, or has experts.
    """
    from kcdsl.model.files import Artefacts
    from kcdsl.model.loader import load_model
    from kcdsl.model.lowering.evaluate import traced_format
    from kcdsl.model.lowering.export import block_graph
    from kcdsl.model.lowering.routes import routers
    from kcdsl.model.onnx.writer import block_model

    contract = read_contract(str(path))
    refuse_foreign_code(contract, allowed=False, metrics=False)
    with in_contract(contract.path):
        model = load_model(contract.program.model, Artefacts.of(contract.base))
        model.block(block)
        if block == "model" or routers(model, block):
            raise refuse(
                USAGE,
                f"the graph of {block} depends on its input",
                help="name a block on hidden states without experts, such as attn_0",
            )
        own = traced_format(resolve(contract.program.train).compute)
        graph = block_graph(model, block, length, formats=(own,))
        params = {key: model.weights.narrow(key) for key in graph.parameters}
        data: bytes = block_model(graph, params, own).SerializeToString()
    return data


def _limits(timeout: float) -> tuple[int, int]:
    """Return the time limits in milliseconds of each z3 query and of all of them."""
    total = max(1, int(1000 * timeout))
    return min(total, QUESTION_MS), total


def _consistency(program: Program, source: SourceFile, timeout: float) -> Sink:
    backend, sink = solver_backend("--consistency"), Sink()
    question, total = _limits(timeout)
    with progress_bars() as report:
        found: list[Diagnostic] = backend.consistency(program, question, source, total, report)
    for diagnostic in found:
        sink.add(diagnostic)
    return sink


def _undecided(routes: tuple[Route, ...]) -> Sink:
    """Warn of every clause that no installed backend decides, with the reason of each backend."""
    sink = Sink()
    for item in routes:
        if item.backend is None:
            sink.add(
                Diagnostic(
                    NO_BACKEND,
                    f"no backend decides the clause `{item.clause_id}`: {item.reason}",
                    notes=tuple(f"not {name}: {why}" for name, why in item.why_not.items()),
                    help=f"`kcdsl explain {item.clause_id}` says what each backend lacks",
                    severity=Severity.WARNING,
                )
            )
    return sink


def _library(library: Library) -> str:
    """Return the output for a library: its digest, in the form of imports, and its names."""
    named = {
        "slices": [s.name for s in library.slices],
        "kernels": [name for name, _ in library.kernels],
        "tables": [t.name for t in library.tables],
    }
    lines = [f"library {library.name} {library.version}", f"digest  {library_digest(library)}"]
    lines += [f"{what:7} {', '.join(sorted(names))}" for what, names in named.items() if names]
    return "\n".join(lines) + "\n"


def _weights(model: ModelRef, folder: Path) -> str:
    """Return the current digest of the checkpoint in certificates, or the path if it is missing."""
    from kcdsl.model.checkpoint.ranges import manifest_now
    from kcdsl.model.files import Artefacts
    from kcdsl.release.artefacts import checkpoint_manifest

    try:
        path = Artefacts.of(folder).find_weights(model.checkpoint)
        if model.architecture == ONNX:
            return f"sha256:{checkpoint_manifest(path).digest}"
        return f"sha256:{manifest_now(path).digest}"
    except Refusal as refusal:
        return refusal.diagnostics[0].message


def _table(program: Program, weights: str, routes: tuple[Route, ...], terminal: bool) -> str:
    from rich.table import Column
    from rich.text import Text

    from kcdsl.verdict.text.console import rendered, table

    clauses = {clause.id: clause for clause in program.clauses}
    rows = (
        (
            f"{clause.id} (held out)" if clause.holdout else clause.id,
            *(clause.level.value, clause.family.value, item.fragment.value),
            Text(item.backend or "none", style="" if item.backend else "red"),
            item.reason,
        )
        for item in routes
        for clause in (clauses[item.clause_id],)
    )
    names = ("level", "family", "fragment", "backend", "why")
    found = table((Column("clause", no_wrap=True), *names), rows, padding=(0, 1), pad_edge=False)
    head = (
        f"contract {program.name} {program.version}",
        f"digest      sha256:{digest(program)}",
        f"checkpoint  {one_line(weights)}\n",
    )
    return rendered(*head, found, terminal=terminal)


# --- diff ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DiffCommand(Command):
    """Check whether a contract, or the statement of a certificate, became stricter or weaker."""

    old: str = argument("OLD", "the old contract, its IR written by --emit ir, or a certificate")
    new: str = argument("NEW", "the new contract, its IR written by --emit ir, or a certificate")
    format: OutputFormat = format_option()
    output: str | None = output_option("FILE", "write the result to a file")
    timeout: float = value(
        "SECONDS", "time limit for all queries of z3 together", 60.0, read=seconds
    )

    def run(self) -> Exit:
        """Print the difference; exit code 1 if the new one may accept more, or states less, than
        the old one, 3 if that is undecided."""
        from kcdsl.api.certificates import are_certificates
        from kcdsl.verdict.studies.difference import Relation

        files = [Path(name) for name in (self.old, self.new)]
        whole = all(path.is_file() for path in files) and are_certificates(*files)
        relation, text = self._certificates(*files) if whole else self._contracts()
        write_text(text, self.output)
        if relation.is_finding:
            return Exit.VIOLATED
        return Exit.INCONCLUSIVE if relation is Relation.UNDECIDED else Exit.HELD

    def _certificates(self, old: Path, new: Path) -> tuple[Relation, str]:
        from kcdsl.api.certificates import differing
        from kcdsl.verdict.studies.certificate_difference import full

        found = differing(old, new)
        return found.relation, full(found) if self.format is OutputFormat.TEXT else found.dumps()

    def _contracts(self) -> tuple[Relation, str]:
        from kcdsl.verdict.studies.difference import Difference, full

        old, new = _program(self.old), _program(self.new)
        backend = solver_backend("kcdsl diff")
        question, total = _limits(self.timeout)
        with progress_bars() as report:
            found: Difference = backend.difference(old, new, question, total, report)
        return found.relation, full(found) if self.format is OutputFormat.TEXT else found.dumps()


def _program(given: str) -> Program:
    """Return a contract, compiled or stored; its findings go to stderr."""
    from kcdsl.check.stored import is_stored, load_bytes

    path = find_contract(given, Path())
    source, sink = read_source(path), Sink()
    if is_stored(source.text):
        return load_bytes(source.text.encode("utf-8"), str(path))
    program = compile_source(source, sink, path.parent)
    if program is None:
        raise no_program(path, sink)
    errors = [d for d in sink if d.severity is Severity.ERROR]
    if errors:
        print(render(errors, "text", sys.stderr), file=sys.stderr)
    return program


# --- fmt ------------------------------------------------------------------------------------------


_STDIN = "-"


@dataclass(frozen=True, kw_only=True)
class FmtCommand(Command):
    """Format contracts; comments and meaning are kept."""

    paths: tuple[str, ...] = argument(
        "PATH",
        "files, folders (their *.kc.yaml and contract.yaml), or - for standard input",
        "*",
    )
    check: bool = switch("write nothing; exit 1 if a file would change")
    diff: bool = switch("show what would change, and write nothing")

    def run(self) -> Exit:
        """Format each file; exit code 1 where `--check` or `--diff` found one that would change, 2
        where one cannot be read, written or formatted; that file is not changed."""
        dry = self.check or self.diff
        seen, failed, changed = 0, 0, 0
        for name, path in self._places():
            seen += 1
            try:
                source = _read(name, path)
                text = _formatted(source)
                if path is None and not dry:
                    sys.stdout.write(text)
                if text == source.text:
                    continue
                if path is not None and not dry:
                    write_bytes(path, text.encode("utf-8"), path.stat().st_mode & 0o777)
            except Refusal as refusal:
                print(render_full(refusal.diagnostics, sys.stderr), file=sys.stderr)
                failed += 1
                continue
            changed += 1
            if self.diff:
                sys.stdout.write(difference(source, text))
            elif self.check:
                print(one_line(str(name)))
        summary = f"{counted(seen, 'file')}: {changed} {'would change' if dry else 'changed'}"
        if failed:
            summary += f", {failed} left as {'they are' if failed > 1 else 'it is'}"
        print(summary, file=sys.stderr)
        if failed:
            return Exit.COULD_NOT_RUN
        return Exit.VIOLATED if dry and changed else Exit.HELD

    def _places(self) -> list[tuple[str, Path | None]]:
        """Return the names and paths to format; the path is None for standard input."""
        if _STDIN in self.paths:
            if len(self.paths) > 1:
                raise refuse(USAGE, "standard input is read alone", help="leave the others out")
            return [("<stdin>", None)]
        config = load_config(Path())
        found = contracts_in(self.paths, Path(), config.exclude, config.origin("exclude").folder)
        return [(str(path), path) for path in found]


def _read(name: str, path: Path | None) -> SourceFile:
    return decode_source(name, sys.stdin.buffer.read()) if path is None else read_source(path)


def _formatted(source: SourceFile) -> str:
    """Return the formatted text; raises Refusal where it cannot be formatted."""
    from kcdsl.format import format_text

    sink = Sink()
    text = format_text(source, sink)
    if text is None:
        raise Refusal(tuple(sink))
    return text
