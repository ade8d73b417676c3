"""Facts about clauses beyond their text (meaning, action, last verdicts), and descriptions of
slices, tables and kernels as Markdown, those of libraries included."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.names import Scope
from kcdsl.check.sections.structure import RawClause
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import walk
from kcdsl.ir.printer import predicate_text, term_text
from kcdsl.lsp.documents import Snapshot
from kcdsl.lsp.reports import Verdict, latest
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax import ast
from kcdsl.verdict.model import SIGNS


@dataclass(frozen=True, slots=True)
class KnownClause:
    """A clause as written, with its meaning where it has one."""

    raw: RawClause
    clause: ir.Clause | None


def known_clauses(analysis: Analysis) -> tuple[KnownClause, ...]:
    """Return the clauses of a document in their order."""
    if analysis.raw is None:
        return ()
    pairs = zip(analysis.raw.clauses, analysis.clauses, strict=True)
    return tuple(KnownClause(raw, clause) for raw, clause in pairs)


def clause_named(analysis: Analysis, name: str | None) -> KnownClause | None:
    """Return the clause with an identifier."""
    return next((item for item in known_clauses(analysis) if item.raw.id.text == name), None)


def clause_at(analysis: Analysis, offset: int) -> KnownClause | None:
    """Return the clause that holds a place."""
    for item in known_clauses(analysis):
        end = max([item.raw.span.end, *(e.value.span.end for e in item.raw.fields)])
        if min(item.raw.id.span.start, item.raw.span.start) <= offset <= end:
            return item
    return None


def scope_in(expression: ast.Expression, scope: Scope) -> Scope:
    """Return the scope with the variables that the expression binds anywhere."""
    match expression:
        case ast.Quantifier(variable=variable, body=body):
            return scope_in(body, scope.bind(variable.id, variable.span))
        case ast.Logic(parts=parts):
            for part in parts:
                scope = scope_in(part, scope)
            return scope
        case ast.Negation(of=of):
            return scope_in(of, scope)
        case _:
            return scope


def verdicts_of(snapshot: Snapshot, clause: str) -> tuple[tuple[Verdict, bool], ...]:
    """Return the last verdict on each slice of a clause, and whether it is stale."""
    known = snapshot.digest
    return tuple((v, v.stale(known)) for v in latest(snapshot.verdicts, clause, known))


def mark(verdict: str) -> str:
    """Return the sign of a verdict."""
    return SIGNS.get(verdict, "·")


def policy_action(analysis: Analysis, item: KnownClause) -> str | None:
    """Return the action that the policy gives a clause which states none."""
    program, clause = analysis.draft, item.clause
    if clause is None or program is None or clause.action is not None:
        return None
    return program.escalation.action(clause.family, clause.level)


def is_formal(clause: ir.Clause) -> bool:
    """Say whether a clause speaks of every input of a region, so that `verify` decides it."""
    return any(isinstance(part, ir.Quantified) for part in walk(clause.require))


def quoted(scalar: Scalar) -> str:
    """Return a text on one line."""
    return " ".join(scalar.text.split())


# --- parts ----------------------------------------------------------------------------------------


def slice_text(analysis: Analysis, name: str) -> str:
    """Return what a slice is, by its name in the document."""
    raw = analysis.raw or analysis.raw_library
    for item in raw.slices if raw is not None else ():
        if item.name.text == name:
            where = f"the requests with `{quoted(item.where)}`" if item.where else "every request"
            default = raw.data.text if raw is not None and raw.data is not None else None
            data = item.data.text if item.data is not None else default
            return f"**{name}**: `Slice`\n\n{where}" + (f" of `{data}`" if data else "")
    for brought in analysis.imports:
        for part in brought.slices:
            if part.name == name:
                return f"{_selection(name, part)}\n\nimported from `{brought.file}`"
    return f"**{name}**: no slice of this contract"


def table_text(analysis: Analysis, name: str) -> str:
    """Return what a table is, by its name in the document."""
    raw = analysis.raw or analysis.raw_library
    for item in raw.tables if raw is not None else ():
        if item.name.text != name:
            continue
        unit = item.unit.text if item.unit is not None else ""
        rows = [f"**{name}**: `Table`" + (f" of thresholds in {unit}" if unit else ""), ""]
        for row in item.rows:
            if row.where is not None and row.value is not None:
                rows.append(f"- `{quoted(row.where)}`: {row.value.text}")
        if item.otherwise is not None and isinstance(item.otherwise.value, Scalar):
            rows.append(f"- otherwise: {item.otherwise.value.text}")
        return "\n".join(rows)
    for brought in analysis.imports:
        for part in brought.tables:
            if part.name == name:
                return f"{_thresholds(name, part)}\n\nimported from `{brought.file}`"
    return f"**{name}**: no table of this contract"


def kernel_text(analysis: Analysis, name: str) -> str:
    """Return what an imported kernel is, by its name in the document."""
    for brought in analysis.imports:
        for local, kernel in brought.kernels:
            if local == name:
                return f"{_program(name, kernel)}\n\nimported from `{brought.file}`"
    return f"**{name}**: no kernel that is imported"


def library_text(analysis: Analysis, number: int, what: str, name: str) -> str:
    """Return what a name of the library of an import means there."""
    loaded = analysis.imports[number].loaded if number < len(analysis.imports) else None
    library = loaded.library if loaded is not None else None
    if library is None:
        return ""
    where = f"\n\nof the library {library.name}"
    match what:
        case "slices":
            found = [_selection(name, part) for part in library.slices if part.name == name]
        case "tables":
            found = [_thresholds(name, part) for part in library.tables if part.name == name]
        case _:
            found = [_program(name, part) for key, part in library.kernels if key == name]
    return found[0] + where if found else f"**{name}**: not in the library {library.name}"


def _selection(name: str, part: ir.Slice) -> str:
    every = part.where == ir.AllOf()
    which = "every request" if every else f"the requests with `{predicate_text(part.where)}`"
    return f"**{name}**: `Slice`\n\n{which}" + (f" of `{part.data}`" if part.data else "")


def _thresholds(name: str, part: ir.ThresholdTable) -> str:
    rows = [f"**{name}**: `Table`", ""]
    rows += [f"- `{predicate_text(r.where)}`: {_value(r.value, part)}" for r in part.rows]
    if part.otherwise is not None:
        rows.append(f"- otherwise: {_value(part.otherwise, part)}")
    return "\n".join(rows)


def _value(value: Fraction, part: ir.ThresholdTable) -> str:
    return term_text(ir.Number(value, part.dimension, Span(0, 0)))


def _program(name: str, kernel: ir.KernelRef) -> str:
    rows = [f"**{name}**: `Kernel`", "", f"- run: `{kernel.run}`"]
    if kernel.folder is not None:
        rows.append(f"- folder: `{kernel.folder}`")
    if kernel.service is not None:
        logs = kernel.service.logprobs
        rows.append(f"- url: `{kernel.service.url}`")
        rows.append(f"- logprobs: `{logs.values}`, temperature `{float(logs.temperature):g}`")
        rows.append(f"- at a time: {kernel.service.concurrency}")
    return "\n".join([*rows, *_settings(kernel.numerics, "")])


def _settings(pairs: tuple[tuple[str, object], ...], before: str) -> list[str]:
    rows = []
    for key, value in pairs:
        if isinstance(value, tuple):
            rows += _settings(value, f"{before}{key}.")
        else:
            rows.append(f"- {before}{key}: `{value}`")
    return rows
