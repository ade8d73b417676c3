"""What the JSON schema of contracts says about a place: fields, values and their meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import kcdsl_grammar
from kcdsl.lsp.nodes import Path

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
