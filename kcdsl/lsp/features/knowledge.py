"""Descriptions for hovers and completions: clauses with their last verdicts, parts of contracts and
libraries, words of expressions, and fields by the JSON schema of contracts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

import kcdsl_grammar
from kcdsl.check.compile import Analysis
from kcdsl.check.expressions.names import Function, Scope
from kcdsl.check.expressions.sorts import counted_by, shown_unit
from kcdsl.check.sections.structure import RawClause
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.diagnostics.spans import Span
from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import walk
from kcdsl.ir.printer import predicate_text, term_text
from kcdsl.lsp.text.nodes import Path
from kcdsl.lsp.text.reports import Verdict, latest
from kcdsl.metrics import MetricDefinition
from kcdsl.source.yaml_nodes import Scalar
from kcdsl.syntax import ast
from kcdsl.units import UNITS, describe
from kcdsl.verdict.model import SIGNS

if TYPE_CHECKING:
    from kcdsl.lsp.text.documents import Snapshot  # needs lsprotocol, unlike `kcdsl explain`


@dataclass(frozen=True, slots=True)
class KnownClause:
    """A clause as written, with its compiled form if it has one."""

    raw: RawClause
    clause: ir.Clause | None


def known_clauses(analysis: Analysis) -> tuple[KnownClause, ...]:
    """Return the clauses of a document in order."""
    if analysis.raw is None:
        return ()
    pairs = zip(analysis.raw.clauses, analysis.clauses, strict=True)
    return tuple(KnownClause(raw, clause) for raw, clause in pairs)


def clause_named(analysis: Analysis, name: str | None) -> KnownClause | None:
    """Return the clause with an identifier."""
    return next((item for item in known_clauses(analysis) if item.raw.id.text == name), None)


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
    """Return the policy's action for a clause without its own."""
    program, clause = analysis.draft, item.clause
    if clause is None or program is None or clause.action is not None:
        return None
    return program.escalation.action(clause.family, clause.level)


def is_formal(clause: ir.Clause) -> bool:
    """Return whether a clause is about every input of a region and decided by `verify`."""
    return any(isinstance(part, ir.Quantified) for part in walk(clause.require))


def quoted(scalar: Scalar) -> str:
    """Return a text on one line."""
    return " ".join(scalar.text.split())


# --- parts ----------------------------------------------------------------------------------------


def slice_text(analysis: Analysis, name: str) -> str:
    """Return the description of a slice, by its name in the document."""
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
    """Return the description of a table, by its name in the document."""
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
    """Return the description of an imported kernel, by its name in the document."""
    for brought in analysis.imports:
        for local, kernel in brought.kernels:
            if local == name:
                return f"{_program(name, kernel)}\n\nimported from `{brought.file}`"
    return f"**{name}**: no kernel that is imported"


def library_text(analysis: Analysis, number: int, what: str, name: str) -> str:
    """Return the description of a name in the library of an import."""
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
    if kernel.checkpoint is not None:
        rows.append(f"- checkpoint: `{kernel.checkpoint}`")
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


KEYWORDS = {
    "forall": "The statement holds for every input of the region.",
    "exists": "The statement holds for at least one input of the region.",
    "in": "Before a region: what a variable ranges over. Before a list: one of its items.",
    "implies": "Where the left side holds, so does the right side.",
    "and": "Both sides hold.",
    "or": "At least one side holds.",
    "not": "The statement does not hold.",
    "of": "What a budget counts: requests or windows.",
    "true": "A truth value.",
    "false": "A truth value.",
    "trace": "The trace records of the inference kernel.",
    "requests": "The budget allows this share of the requests of the slice.",
    "samples": "The same as requests.",
    "windows": "The budget allows this share of the windows of time.",
}


def describe_metric(metric: MetricDefinition) -> str:
    """Return the description of a metric, as Markdown."""
    unit = shown_unit(metric.dimension)
    sort = f"Real[{unit}]" if unit else "Real"
    rows = [
        f"**{metric.name}**: `{sort} per {metric.counted}`",
        "",
        _sentence(one_line(metric.summary)) if metric.summary else "",
        "",
        f"- better: {metric.better}" + (", bounded through `abs(...)`" if metric.signed else ""),
        f"- dimension: {describe(metric.dimension)}",
        f"- family: {metric.family}",
    ]
    if metric.kind == "aggregate":
        rows.append("- one number for each window; it stands alone")
    else:
        allowed = sorted(metric.statistics - {"aggregate"})
        rows.append(f"- statistics: {', '.join(f'`{name}`' for name in allowed)}")
    rows.append(f"- computed from: {', '.join(metric.needs)}")
    limits = [f"at least {metric.lower}" if metric.lower is not None else ""]
    limits.append(f"at most {float(metric.upper):g}" if metric.upper is not None else "")
    if any(limits):
        rows.append(f"- values: {', '.join(text for text in limits if text)}")
    if metric.function is not None:
        rows.append(f"- defined by `{metric.function}`")
    return "\n".join(rows)


def _sentence(summary: str) -> str:
    """Return a summary as a sentence. A leading symbol, such as `w` or `ln`, is not capitalised."""
    word = re.match(r"[^\W\d_]{3,}[\s,;:-]", f"{summary} ")
    return (summary[:1].upper() + summary[1:] if word else summary) + "."


def describe_function(function: Function, metric: MetricDefinition | None = None) -> str:
    """Return a function as Markdown; `metric` is the argument of a statistic."""
    rows = [f"```kcdsl\n{function.signature}\n```", function.meaning, ""]
    rows += [f"- `{p.name}`: {p.meaning}" for p in function.parameters]
    if metric is not None and function.sort == "Real" and metric.kind == "pointwise":
        counted = counted_by(function.name, metric.counted)
        rows.append(
            f"\nHere it ranges over {counted}; for `{metric.name}` {metric.better} is better."
        )
    return "\n".join(rows)


def describe_unit(name: str) -> str | None:
    """Return a unit as Markdown."""
    unit = UNITS.get(name)
    if unit is None:
        return None
    base = shown_unit(unit.dimension)
    about = f"**{name}**: {describe(unit.dimension)}"
    if unit.factor == 1 or name == base:
        return about
    return f"{about}; 1 {name} is {unit.factor}" + (f" {base}" if base else "")


_BLOCKS = {
    "attn": "the attention of layer {n}",
    "mlp": "the feed-forward network of layer {n}",
    "norm": "the normalisation number {n}",
    "layer": "the whole layer {n}",
    "head": "the projection to the vocabulary",
    "model": "the whole model: its outputs are the logits",
}


def describe_block(name: str) -> str:
    """Return a block of the model as Markdown."""
    word, _, number = name.partition("_")
    meaning = _BLOCKS.get(word, "a block of the model").format(n=number)
    return f"**{name}**: `Block`\n\n{meaning[:1].upper()}{meaning[1:]}."


# --- the schema -----------------------------------------------------------------------------------


Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class FieldHelp:
    """A field that a mapping may have."""

    name: str
    description: str
    required: bool
    holds: str
    """`mapping`, `list` or `value`."""


@cache
def _document() -> Schema:
    found: Schema = json.loads(kcdsl_grammar.text("contract.schema.json"))
    return found


def _target(schema: Schema) -> Schema:
    """Return the target of a reference; a description beside the reference has priority."""
    while "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/definitions/")
        found: dict[str, Any] = dict(_document()["definitions"][name])
        if "description" in schema:
            found["description"] = schema["description"]
        schema = found
    return schema


def _alternatives(schema: Schema) -> Iterator[Schema]:
    """Yield a schema and all its alternatives."""
    schema = _target(schema)
    yield schema
    for word in ("oneOf", "anyOf", "allOf"):
        for part in schema.get(word, ()):
            yield from _alternatives(part)


def _child(schema: Schema, step: str | int) -> Iterator[Schema]:
    for part in _alternatives(schema):
        if isinstance(step, int):
            if isinstance(part.get("items"), dict):
                yield part["items"]
        elif step in part.get("properties", {}):
            yield part["properties"][step]
        elif isinstance(part.get("additionalProperties"), dict):
            yield part["additionalProperties"]


def schemas_at(path: Path, library: bool = False) -> list[Schema]:
    """Return every schema that applies to the value at a path."""
    root = _document()["definitions"]["library" if library else "contract"]
    found: list[Schema] = [root]
    for step in path:
        found = [inner for schema in found for inner in _child(schema, step)]
    return [part for schema in found for part in _alternatives(schema)]


def fields_at(path: Path, library: bool = False) -> list[FieldHelp]:
    """Return the fields of the mapping at a path, required ones first."""
    found: dict[str, FieldHelp] = {}
    schemas = schemas_at(path, library)
    required = {name for schema in schemas for name in schema.get("required", ())}
    for schema in schemas:
        for name, inner in schema.get("properties", {}).items():
            target = _target(inner) if isinstance(inner, dict) else {}
            if name in found or not isinstance(inner, dict) or not inner:
                continue
            description = str(target.get("description", ""))
            found[name] = FieldHelp(name, description, name in required, _holds(inner))
    return sorted(found.values(), key=lambda field: not field.required)


def _holds(schema: Schema) -> str:
    kinds = [part.get("type") for part in _alternatives(schema)]
    if "object" in kinds and "string" not in kinds:
        return "mapping"
    return "list" if "array" in kinds and "string" not in kinds else "value"


def values_at(path: Path, library: bool = False) -> list[str]:
    """Return the values that the schema lists for a path."""
    found: dict[str, None] = {}
    for schema in schemas_at(path, library):
        for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())):
            found[str(value)] = None
        if schema.get("type") == "boolean":
            found |= {"true": None, "false": None}
    return list(found)


def description_at(path: Path, library: bool = False) -> str:
    """Return the schema's description of the field at a path."""
    for schema in schemas_at(path, library):
        if schema.get("description"):
            return str(schema["description"])
    return ""
