"""The compiler: from a contract file to the intermediate representation."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from kcdsl.check.clauses import check_clause
from kcdsl.check.kernels import read_kernel, read_model
from kcdsl.check.names import Scope
from kcdsl.check.policy import read_constants, read_escalation
from kcdsl.check.predicates import predicate
from kcdsl.check.recovery import recover
from kcdsl.check.report import Reporter
from kcdsl.check.structure import RawContract, RawSlice, StructureReader, read_structure
from kcdsl.diagnostics.codes import DATA_ABSENT
from kcdsl.diagnostics.model import Refusal, Sink
from kcdsl.ir import terms as ir
from kcdsl.source.files import read_source
from kcdsl.source.text import SourceFile
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, parse_yaml
from kcdsl.syntax.parser import parse_expression


def compile_contract(path: Path) -> tuple[ir.Program | None, Sink]:
    """Compile a contract file; the program is None where the sink holds an error.

    Files that the contract names (checkpoint, data) are not read; their absence is noted.
    """
    sink = Sink()
    try:
        source = read_source(path)
    except Refusal as refusal:
        for diagnostic in refusal.diagnostics:
            sink.add(diagnostic)
        return None, sink
    return compile_source(source, sink, path.parent), sink


def load_program(path: Path) -> ir.Program:
    """Compile a contract file; raises Refusal with every error and warning where it does not."""
    program, sink = compile_contract(path)
    if program is None:
        raise Refusal(tuple(sink))
    return program


def compile_source(source: SourceFile, sink: Sink, folder: Path | None = None) -> ir.Program | None:
    """Compile the text of a contract; `folder` is where the files it names are looked for.

    The sink is left in the order of the places.
    """
    return analyse(source, sink, folder).program


@dataclass(frozen=True, slots=True)
class Analysis:
    """What is known of a contract, as far as each pass came.

    `root` and `raw` are None where the document could not be read that far. `clauses` goes with
    `raw.clauses`, one each, None for a clause in error. `program` is None where there is any error.
    """

    source: SourceFile
    root: Node | None = None
    raw: RawContract | None = None
    scope: Scope = field(default_factory=lambda: Scope({}, {}))
    slices: tuple[ir.Slice | None, ...] = ()
    clauses: tuple[ir.Clause | None, ...] = ()
    program: ir.Program | None = None


def analyse(source: SourceFile, sink: Sink, folder: Path | None = None) -> Analysis:
    """Run every pass over the text of a contract and keep what each of them found out.

    `folder` is where the files it names are looked for. The sink is left in the order of the
    places.
    """
    analysis = _analyse(source, sink, folder)
    if analysis.root is None:
        sink.found[:] = recover(source, sink, lambda text, into: _analyse(text, into, folder).root)
    sink.found.sort(key=lambda d: d.span.start if d.span is not None else -1)
    return analysis


def _analyse(source: SourceFile, sink: Sink, folder: Path | None) -> Analysis:
    reporter = Reporter(source, sink)
    root = parse_yaml(source, sink)
    raw = read_structure(root, reporter) if root is not None else None
    if raw is None:
        return Analysis(source, root)
    reader = StructureReader(reporter)
    slices = tuple(_slice(item, reporter) for item in raw.slices)
    scope = Scope({item.name.text: item.name.span for item in raw.slices}, {})
    model = read_model(raw.model, reader)
    train, infer = read_kernel(raw.train, reporter), read_kernel(raw.infer, reporter)
    clauses = tuple(check_clause(item, scope, reporter) for item in raw.clauses)
    escalation = read_escalation(raw.escalation, reader)
    constants = read_constants(raw.constants, reader)
    partial = Analysis(source, root, raw, scope, slices, clauses)
    if (
        sink.has_errors
        or raw.name is None
        or raw.version is None
        or model is None
        or train is None
        or infer is None
    ):
        return partial
    if folder is not None:
        _note_absent_files(raw, folder, reporter)
    program = ir.Program(
        name=raw.name.text,
        version=raw.version.text,
        model=model,
        train=train,
        infer=infer,
        data=raw.data.text if raw.data is not None else None,
        slices=tuple(item for item in slices if item is not None),
        clauses=tuple(clause for clause in clauses if clause is not None),
        escalation=escalation,
        constants=constants,
    )
    return replace(partial, program=program)


def _slice(raw: RawSlice, reporter: Reporter) -> ir.Slice | None:
    where: ir.Predicate | None = ir.AllOf()
    if raw.where is not None:
        parsed = parse_expression(reporter.source, raw.where, reporter.sink)
        where = predicate(parsed, reporter) if parsed is not None else None
    if where is None:
        return None
    data = raw.data.text if raw.data is not None else None
    return ir.Slice(raw.name.text, data, where, raw.span)


def _note_absent_files(raw: RawContract, folder: Path, reporter: Reporter) -> None:
    named: list[Scalar] = []
    if isinstance(raw.model, Mapping):
        fields = ("checkpoint", "config", "tokenizer")
        nodes = {name: raw.model.get(name) for name in fields}
        named += [
            node
            for name, node in nodes.items()
            if isinstance(node, Scalar) and (name, node.text) != ("tokenizer", "bytes")
        ]
    named += [node for node in (raw.data, *(s.data for s in raw.slices)) if node is not None]
    for node in named:
        if node.text.startswith("package:"):
            continue
        if not (folder / node.text).exists():
            reporter.note(
                DATA_ABSENT,
                f"there is no file {node.text} here yet",
                node.span,
                "compiling does not need it; `verify` and `evaluate` do",
            )
    for item in raw.slices:
        if item.data is None and raw.data is None:
            reporter.note(
                DATA_ABSENT,
                f"the slice `{item.name.text}` names no data, and the contract has no default",
                item.name.span,
                "add `data: FILE.jsonl` to the contract or to the slice",
            )
