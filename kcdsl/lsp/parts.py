"""What slices, tables and kernels are, as Markdown: those of a document and those it imports."""

from __future__ import annotations

from fractions import Fraction

from kcdsl.check.compile import Analysis
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.ir.words import predicate_text, term_text
from kcdsl.lsp.knowledge import quoted
from kcdsl.source.yaml_nodes import Scalar


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
