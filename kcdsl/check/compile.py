"""The compiler from a contract file to the intermediate representation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from kcdsl.check.expressions.fields import check_fields, check_traces
from kcdsl.check.expressions.names import Scope
from kcdsl.check.layout import recover
from kcdsl.check.sections.clauses import check_clause
from kcdsl.check.sections.fields import ROLES, StructureReader
from kcdsl.check.sections.imports import report_unused, resolve_imports
from kcdsl.check.sections.kernels import read_kernel, read_model
from kcdsl.check.sections.libraries import Import, Loader, Texts, analyse_library
from kcdsl.check.sections.policy import check_actions, read_constants, read_escalation
from kcdsl.check.sections.sources import check_recorded, check_together
from kcdsl.check.sections.structure import (
    RawContract,
    RawLibrary,
    is_library,
    read_structure,
    stored_schema,
)
from kcdsl.check.sections.tables import check_slice, check_table
from kcdsl.check.user_metrics import read_registry
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import (
    Diagnostic,
    Fix,
    Refusal,
    Sink,
    Suppressed,
    TooManyFindings,
    refuse,
)
from kcdsl.diagnostics.report import Reporter
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import terms_of, walk
from kcdsl.metrics import Registry, user_metric
from kcdsl.model import registry
from kcdsl.model.checkpoint.headers import weights_folder
from kcdsl.source.files import is_there, read_source, suggest_file
from kcdsl.source.removal import remove_entry
from kcdsl.source.yaml_nodes import Mapping, Node, Scalar, parse_yaml

_SUPPRESSION = re.compile(r"#\s*kcdsl\s*:\s*[A-Za-z]")


def load_program(path: Path) -> ir.Program:
    """Compile a contract file; raises Refusal with all errors and warnings where that fails."""
    return load_contract(path)[0]


def load_contract(path: Path) -> tuple[ir.Program, tuple[Suppressed, ...]]:
    """Compile a contract file as `load_program` does; return also the findings that its comments
    accept, including findings of a solver, which is not run."""
    return contract_of(path, read_source(path))


def contract_of(path: Path, source: SourceFile) -> tuple[ir.Program, tuple[Suppressed, ...]]:
    """Compile the text of a contract file as `load_contract` does."""
    sink = Sink()
    analysis = analyse(source, sink, path.parent)
    if analysis.program is None:
        raise no_program(path, sink)
    accepted = analysis.suppressed
    if _SUPPRESSION.search(source.text):
        from kcdsl.check.suppressions import unasked

        accepted += unasked(source, analysis.root)
    return analysis.program, accepted


def no_program(path: Path, sink: Sink) -> Refusal:
    """Return the refusal of a file without a program: its errors, or that it is a library."""
    if sink.has_errors:
        return Refusal(tuple(sink))
    return refuse(
        codes.NOT_A_CONTRACT,
        f"{path} is a library, not a contract",
        help="name a contract that imports it",
    )


def compile_source(source: SourceFile, sink: Sink, folder: Path | None = None) -> ir.Program | None:
    """Compile the text of a contract; relative paths in it are relative to `folder`.

    The findings in the sink are sorted by place.
    """
    return analyse(source, sink, folder).program


@dataclass(frozen=True, slots=True)
class Analysis:
    """The results of each pass over a contract or a library.

    `root` and `raw` are None if the document could not be parsed that far. `slices`, `tables` and
    `clauses` have one entry per entry of `raw`, None for one in error; `imports` corresponds to
    `raw.imports`. `program` is None if there is any error. A library has `raw_library` and
    `library` instead of `raw` and `program`.
    """

    source: SourceFile
    root: Node | None = None
    raw: RawContract | None = None
    scope: Scope = field(default_factory=lambda: Scope({}, {}))
    slices: tuple[ir.Slice | None, ...] = ()
    clauses: tuple[ir.Clause | None, ...] = ()
    program: ir.Program | None = None
    draft: ir.Program | None = None
    """The program without the parts that are in error."""
    tables: tuple[ir.ThresholdTable | None, ...] = ()
    imports: tuple[Import, ...] = ()
    raw_library: RawLibrary | None = None
    library: ir.Library | None = None
    suppressed: tuple[Suppressed, ...] = ()
    """Findings that comments of the document accept."""


def analyse(
    source: SourceFile,
    sink: Sink,
    folder: Path | None = None,
    texts: Texts | None = None,
) -> Analysis:
    """Run every pass over the text of a contract and return the result of each.

    Relative paths are relative to `folder`; `texts` replace the files at their paths. The findings
    in the sink are sorted by place.
    """
    try:
        analysis = _analyse(source, sink, folder, texts)
        if analysis.root is None:
            sink.found[:] = recover(
                source, sink, lambda text, into: _analyse(text, into, folder, texts).root
            )
        if _SUPPRESSION.search(source.text):
            from kcdsl.check.suppressions import accept

            analysis = replace(analysis, suppressed=accept(source, analysis.root, sink, folder))
            if sink.has_errors:  # the configuration may refuse what comments accept
                analysis = replace(analysis, program=None, library=None)
    except TooManyFindings as many:
        sink.found[:] = many.diagnostics
        return Analysis(source)
    if "#" in source.text and any(found.fix is not None for found in sink):
        from kcdsl.check.suppressions import spare_comments

        spare_comments(source, analysis.root, sink)
    sink.found.sort(key=lambda diagnostic: _place(diagnostic, source))
    return analysis


def _place(diagnostic: Diagnostic, source: SourceFile) -> tuple[str, int]:
    """Return the sort key of a diagnostic: the document before its imports."""
    own = diagnostic.source is None or diagnostic.source.name == source.name
    name = "" if own or diagnostic.source is None else diagnostic.source.name
    return name, -1 if diagnostic.span is None else diagnostic.span.start


def _analyse(source: SourceFile, sink: Sink, folder: Path | None, texts: Texts | None) -> Analysis:
    reporter, loader = Reporter(source, sink), Loader(sink, folder, texts=texts or {})
    root = parse_yaml(source, sink)
    stored = stored_schema(root)
    if stored is not None:
        reporter.error(
            codes.STORED_PROGRAM,
            f"this is a document `{stored.text}`, which kcdsl wrote, not a contract",
            stored.span,
            help="name the contract that it was made from; `kcdsl diff` reads `kcdsl.ir/1` too",
        )
        return Analysis(source, root)
    if is_library(root):
        loader.stack.append(Path(source.name))
        found = analyse_library(root, reporter, folder, loader)
        return Analysis(
            source, root, imports=found.imports, raw_library=found.raw, library=found.library
        )
    raw = read_structure(root, reporter) if root is not None else None
    if raw is None:
        return Analysis(source, root)
    assert isinstance(root, Mapping)
    reader = StructureReader(reporter)
    taken = _declared(root, raw)
    imports = resolve_imports(raw.imports, folder, taken, reporter, loader)
    slices = tuple(check_slice(item, reporter) for item in raw.slices)
    tables = tuple(check_table(item, reporter) for item in raw.tables)
    known_tables = _known_tables(raw, tables, taken["tables"], imports)
    scope = Scope(taken["slices"], {}, known_tables, read_registry(folder, sink))
    check_fields(
        slices,
        [s for item in imports for s in item.slices],
        tables,
        raw.data.text if raw.data is not None else None,
        reporter,
    )
    model = read_model(raw.model, reader)
    brought = {name: kernel for item in imports for name, kernel in item.kernels}
    train, infer, guard, fallback = (
        brought.get(role) or read_kernel(raw.kernels.get(role), reporter) for role in ROLES
    )
    clauses = tuple(check_clause(item, scope, reporter) for item in raw.clauses)
    escalation = read_escalation(raw.escalation, reader)
    check_actions(raw.clauses, clauses, escalation, reporter)
    known_slices = [*slices, *(s for item in imports for s in item.slices)]
    check_traces(clauses, [s for s in known_slices if s is not None], scope.metrics, reporter)
    constants = read_constants(raw.constants, reader)
    used = _names_in_use(clauses)
    if None not in clauses and clauses:
        report_unused(root, raw.imports, _used_or_missing(used, raw, imports), reporter)
        _report_unused_tables(root, raw, used["tables"], reporter)
    partial = Analysis(source, root, raw, scope, slices, clauses, tables=tables, imports=imports)
    if raw.name is None or raw.version is None or model is None or train is None or infer is None:
        return partial
    check_together(train, infer, raw, constants, reporter)
    check_recorded(train, infer, raw, reporter)
    _check_checkpoints({"train": train, "guard": guard, "fallback": fallback}, reporter)
    good = not sink.has_errors
    if good and folder is not None:
        _note_absent_files(raw, folder, reporter)
        _check_configuration(model, folder, reporter)
        good = not sink.has_errors
    program = ir.Program(
        name=raw.name.text,
        version=raw.version.text,
        model=model,
        train=train,
        infer=infer,
        guard=guard,
        fallback=fallback,
        data=raw.data.text if raw.data is not None else None,
        slices=(
            *(item for item in slices if item is not None),
            *(s for item in imports for s in item.slices if s.name in used["slices"]),
        ),
        clauses=tuple(clause for clause in clauses if clause is not None),
        escalation=escalation,
        constants=constants,
        tables=tuple(
            table
            for table in (*tables, *(t for item in imports for t in item.tables))
            if table is not None and table.name in used["tables"]
        ),
        imports=_provenance(imports, used),
        metrics=_user_metrics(clauses, scope.metrics),
    )
    return replace(partial, program=program if good else None, draft=program)


def _user_metrics(
    clauses: tuple[ir.Clause | None, ...], metrics: Registry
) -> tuple[ir.UserMetric, ...]:
    """Return the user's metrics in clauses, by name."""
    named = {
        term.name
        for clause in clauses
        if clause is not None
        for term in terms_of(clause.require)
        if isinstance(term, ir.Metric)
    }
    found = [metrics[name] for name in sorted(named)]
    return tuple(user_metric(item) for item in found if item.function is not None)


def _declared(root: Mapping, raw: RawContract) -> dict[str, dict[str, Span]]:
    """Return the names that the contract itself declares, with their spans."""
    kernels = root.get("kernels")
    entries = kernels.entries if isinstance(kernels, Mapping) else ()
    return {
        "slices": {item.name.text: item.name.span for item in raw.slices},
        "tables": {item.name.text: item.name.span for item in raw.tables},
        "kernels": {e.key.text: e.key.span for e in entries if e.key.text in ROLES},
    }


def _known_tables(
    raw: RawContract,
    tables: tuple[ir.ThresholdTable | None, ...],
    declared: dict[str, Span],
    imports: tuple[Import, ...],
) -> dict[str, ir.ThresholdTable | None]:
    """Return every table by name; None for one in error."""
    known: dict[str, ir.ThresholdTable | None] = dict.fromkeys(declared)
    known |= {t.name: t for item in imports for t in item.tables}
    known |= {item.name.text: table for item, table in zip(raw.tables, tables, strict=True)}
    return known


def _names_in_use(clauses: tuple[ir.Clause | None, ...]) -> dict[str, frozenset[str]]:
    """Return the names of slices and tables in clauses."""
    slices: set[str] = set()
    tables: set[str] = set()
    for clause in clauses:
        if clause is None:
            continue
        slices |= set(clause.slices)
        for part in walk(clause.require):
            if isinstance(part, ir.Quantified):
                slices.add(part.region.slice)
        for term in terms_of(clause.require):
            if isinstance(term, ir.TableValue):
                tables.add(term.name)
    return {"slices": frozenset(slices), "tables": frozenset(tables)}


def _used_or_missing(
    used: dict[str, frozenset[str]], raw: RawContract, imports: tuple[Import, ...]
) -> dict[str, frozenset[str]]:
    """Add imported names that no library declares, which are reported already."""
    given = {
        "slices": {part.name for item in imports for part in item.slices},
        "tables": {part.name for item in imports for part in item.tables},
    }
    named = {
        what: {name.local.text for item in raw.imports for name in item.brought(what)}
        for what in given
    }
    return {what: used[what] | (named[what] - given[what]) for what in given}


def _report_unused_tables(
    root: Mapping, raw: RawContract, used: frozenset[str], reporter: Reporter
) -> None:
    section = next((e for e in root.entries if e.key.text == "tables"), None)
    idle = [table for table in raw.tables if table.name.text not in used]
    for table in idle:
        assert section is not None
        assert isinstance(section.value, Mapping)
        if len(idle) == len(section.value.entries):
            edit = remove_entry(reporter.source, root, section)
        else:
            edit = remove_entry(reporter.source, section.value, table.entry)
        reporter.warning(
            codes.UNUSED_TABLE,
            f"no clause uses the table `{table.name.text}`",
            table.name.span,
            f"write `table({table.name.text})` as a threshold, or remove it",
            fix=Fix(f"remove `{table.name.text}`", (edit,)),
        )


def _provenance(
    imports: tuple[Import, ...], used: dict[str, frozenset[str]]
) -> tuple[ir.ImportedFrom, ...]:
    """Return the origins of the imported parts of the program."""
    found: dict[ir.ImportedFrom, None] = {}
    for item in imports:
        brings = (
            item.kernels
            or any(s.name in used["slices"] for s in item.slices)
            or any(t.name in used["tables"] for t in item.tables)
        )
        if brings and item.loaded is not None and item.loaded.digest is not None:
            found[ir.ImportedFrom(item.file, item.loaded.digest)] = None
    return tuple(found)


def _check_checkpoints(kernels: dict[str, ir.KernelRef | None], reporter: Reporter) -> None:
    """Report a checkpoint of any kernel but the inference kernel."""
    for role, kernel in kernels.items():
        if kernel is not None and kernel.checkpoint is not None:
            reporter.error(
                codes.FOREIGN_KERNEL_FIELD,
                f"the kernel `{role}` has a `checkpoint`, which is for `infer`",
                kernel.span,
                "the training kernel reads that of `model`",
            )


def _check_configuration(model: ir.ModelRef, folder: Path, reporter: Reporter) -> None:
    """Report a config.json that the built-in architecture does not implement; a missing one is
    reported elsewhere."""
    architecture = model.architecture or ""
    named = model.config or model.checkpoint
    installed = named.startswith("package:")
    beside = folder / named if model.config else weights_folder(folder / named) / "config.json"
    if model.module is not None or not (installed or is_there(beside)):
        return
    from kcdsl.model.configuration import check_config, read_config
    from kcdsl.model.files import resolve_file

    if architecture not in registry.names() or not registry.declared(architecture).families:
        return
    try:
        path = resolve_file(named, folder) if installed else beside
        if installed and not model.config:
            path = weights_folder(path) / "config.json"
        check_config(architecture, read_config(path))
    except Refusal as refusal:
        for found in refusal.diagnostics:
            if found.code == codes.MODEL_CONFIG:
                reporter.sink.add(replace(found, source=reporter.source, span=model.span))


def _note_absent_files(raw: RawContract, folder: Path, reporter: Reporter) -> None:
    named: list[Scalar] = []
    if isinstance(raw.model, Mapping):
        fields = ("checkpoint", "onnx", "config", "tokenizer")
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
        if not is_there(folder / node.text):
            reporter.note(
                codes.DATA_ABSENT,
                f"there is no file {node.text} here yet",
                node.span,
                suggest_file(node.text, folder)
                or "compiling does not need it; `verify` and `evaluate` do",
            )
    for item in raw.slices:
        if item.data is None and raw.data is None:
            reporter.note(
                codes.DATA_ABSENT,
                f"the slice `{item.name.text}` names no data, and the contract has no default",
                item.name.span,
                "add `data: FILE.jsonl` to the contract or to the slice",
            )
