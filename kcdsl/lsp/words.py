"""The meaning of the words of expressions, and of fields by the JSON schema of contracts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import kcdsl_grammar
from kcdsl.check.expressions.functions import Function
from kcdsl.check.expressions.sorts import counted_by, shown_unit
from kcdsl.lsp.nodes import Path
from kcdsl.metrics import MetricDefinition
from kcdsl.units import UNITS, describe

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
    """Return what a metric measures, as Markdown."""
    unit = shown_unit(metric.dimension)
    sort = f"Real[{unit}]" if unit else "Real"
    rows = [
        f"**{metric.name}**: `{sort} per {metric.counted}`",
        "",
        _sentence(metric.summary) if metric.summary else "",
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
    """Return a summary as a sentence. What begins with a symbol, such as `w` or `ln`, keeps it: a
    capital would be another one."""
    word = re.match(r"[^\W\d_]{3,}[\s,;:-]", f"{summary} ")
    return (summary[:1].upper() + summary[1:] if word else summary) + "."


def describe_function(function: Function, metric: MetricDefinition | None = None) -> str:
    """Return a function as Markdown; `metric` is the one that a statistic is applied to."""
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
    """Return what a reference points to; the description beside the reference wins."""
    while "$ref" in schema:
        name = str(schema["$ref"]).removeprefix("#/definitions/")
        found: dict[str, Any] = dict(_document()["definitions"][name])
        if "description" in schema:
            found["description"] = schema["description"]
        schema = found
    return schema


def _alternatives(schema: Schema) -> Iterator[Schema]:
    """Yield a schema and every one that it allows in its place."""
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
    """Return every schema that the value at a path may follow."""
    root = _document()["definitions"]["library" if library else "contract"]
    found: list[Schema] = [root]
    for step in path:
        found = [inner for schema in found for inner in _child(schema, step)]
    return [part for schema in found for part in _alternatives(schema)]


def fields_at(path: Path, library: bool = False) -> list[FieldHelp]:
    """Return the fields that the mapping at a path may have, those that are needed first."""
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
    """Return the values that the schema lists for a place."""
    found: dict[str, None] = {}
    for schema in schemas_at(path, library):
        for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())):
            found[str(value)] = None
        if schema.get("type") == "boolean":
            found |= {"true": None, "false": None}
    return list(found)


def description_at(path: Path, library: bool = False) -> str:
    """Return what the schema says about the field at a path."""
    for schema in schemas_at(path, library):
        if schema.get("description"):
            return str(schema["description"])
    return ""
