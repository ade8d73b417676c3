"""The meaning of the words of expressions, and of fields by the JSON schema of contracts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import kcdsl_grammar
from kcdsl.check.expressions.names import FUNCTIONS, PERCENTILE
from kcdsl.check.expressions.sorts import counted_by, shown_unit
from kcdsl.lsp.nodes import Path
from kcdsl.metrics import MetricDefinition
from kcdsl.units import UNITS, describe


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a function."""

    name: str
    meaning: str
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the language: its parameters, the sort of its value and its meaning.

    `snippet` is what a completion inserts, with the places to fill in as editors mark them.
    """

    name: str
    parameters: tuple[Parameter, ...]
    sort: str
    meaning: str
    snippet: str

    @property
    def signature(self) -> str:
        """Return the call with all its parameters and the sort of its value."""
        shown = [f"{p.name}?" if p.optional else p.name for p in self.parameters]
        return f"{self.name}({', '.join(shown)}): {self.sort}"


_METRIC = Parameter("metric", "a metric with one value per token or request, or `abs(metric)`")
_BLOCK = Parameter("block", "`attn_0`, `mlp_0`, `norm_0`, `layer_0` and so on, `head` or `model`")
_INPUT = Parameter("x", "the variable that a quantifier binds")
_SLICE = Parameter("slice", "a slice of the contract")
_DRIFT = Parameter("drift", "`drift(block, x)` or `measured_drift(block, x)`")


def _statistic(name: str, meaning: str) -> Function:
    return Function(name, (_METRIC,), "Real", meaning, f"{name}(${{1:metric}})")


def _norm(name: str, meaning: str) -> Function:
    snippet = f"{name}(drift(${{1:block}}, ${{2:x}}))"
    return Function(name, (_DRIFT,), "Real", meaning, snippet)


def _percentile(name: str) -> Function:
    share = name.removeprefix("p")
    meaning = f"The value that at most {100 - int(share)}% of what is counted exceeds."
    return _statistic(name, meaning + " Tokens count by the worst one of each request.")


_FUNCTIONS = (
    _statistic("mean", "The mean of a metric over the slice."),
    _statistic("max", "The largest value of a metric over the slice."),
    _statistic("min", "The smallest value of a metric over the slice."),
    _statistic("rate", "The share of the slice for which an indicator is 1."),
    Function(
        "quantile",
        (Parameter("q", "the level, strictly between 0 and 1, such as `0.999`"), _METRIC),
        "Real",
        "The value that at most the share 1 - q of what is counted exceeds.",
        "quantile(${1:0.999}, ${2:metric})",
    ),
    *(_percentile(name) for name in ("p50", "p90", "p95", "p99")),
    _norm("norm_inf", "The largest absolute component of a drift, of its worst row."),
    _norm("norm_2", "The Euclidean norm of a drift, of its worst row."),
    _norm("span", "The largest minus the smallest component of a drift, of its worst row."),
    Function(
        "abs",
        (Parameter("term", "a metric or a number"),),
        "Real",
        "The magnitude; a signed metric such as `log_ratio` is bounded through it.",
        "abs(${1:metric})",
    ),
    Function(
        "table",
        (Parameter("name", "a table of the section `tables`"),),
        "Real per request",
        "The threshold that a table gives for the request at hand; it stands alone on one side of "
        "a comparison.",
        "table(${1:name})",
    ),
    Function(
        "drift",
        (_BLOCK, _INPUT),
        "Matrix[tokens, width]",
        "Any run of the inference kernel minus any run of the training kernel that their numerics "
        "admit. A statement about it is proved for all of them.",
        "drift(${1:block}, ${2:x})",
    ),
    Function(
        "measured_drift",
        (_BLOCK, _INPUT),
        "Matrix[tokens, width]",
        "The difference of the two runs that were observed.",
        "measured_drift(${1:block}, ${2:x})",
    ),
    Function(
        "points",
        (_SLICE,),
        "Region",
        "Each row of the slice, by itself and exactly.",
        "points(${1:slice})",
    ),
    Function(
        "ball",
        (_SLICE, Parameter("radius", "a plain number, zero or more, such as `1e-3`")),
        "Region",
        "Around each row of the slice an l_inf ball on the input of the block.",
        "ball(${1:slice}, ${2:1e-3})",
    ),
    Function(
        "hull",
        (_SLICE, Parameter("margin", "a relative margin, zero or more; default 0", True)),
        "Region",
        "The box around the inputs of the block over all rows of the slice, widened by a relative "
        "margin.",
        "hull(${1:slice})",
    ),
    Function(
        "rows",
        (
            _SLICE,
            Parameter("longest", "a whole number: of how many rows a sequence is at most"),
            Parameter("margin", "a relative margin, zero or more; default 0", True),
        ),
        "Region",
        "Every sequence, and every KV cache, of 1 to `longest` rows, each in the box of one row of "
        "the inputs of the block over all rows of the slice, widened by a relative margin.",
        "rows(${1:slice}, ${2:512})",
    ),
    Function(
        "no_flip",
        (_BLOCK, _INPUT, Parameter("k", "how many of the largest components; default 1", True)),
        "Bool",
        "No admissible pair of runs changes which components of a row are the k largest.",
        "no_flip(${1:model}, ${2:x})",
    ),
    Function(
        "has",
        (Parameter("trace", "the word `trace`"), Parameter("[field, ...]", "fields of a record")),
        "Bool",
        "Every trace record carries the fields, not null.",
        "has(trace, [${1:build_fingerprint}])",
    ),
)
_BY_NAME = {function.name: function for function in _FUNCTIONS}

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


def find_function(name: str) -> Function | None:
    """Return a function of the language; any percentile `pNN` is one."""
    found = _BY_NAME.get(name)
    if found is None and PERCENTILE.fullmatch(name):
        return _percentile(name)
    return found


def all_functions() -> tuple[Function, ...]:
    """Return every function, in the order in which messages list them."""
    return tuple(_BY_NAME[name] for name in FUNCTIONS)


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
