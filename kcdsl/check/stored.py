"""Stored programs: parsing the JSON of `kcdsl.ir/1`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from kcdsl.diagnostics.codes import STORED_PROGRAM
from kcdsl.diagnostics.model import refuse
from kcdsl.ir import terms as ir
from kcdsl.ir.canonical import SCHEMA, digest
from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.kernels import FORMATS, LogProbabilities, Recording, Service
from kcdsl.metrics import METRICS
from kcdsl.source.files import json_value
from kcdsl.units import NAMED, UNITS

_STORED = re.compile(r"\A\s*\{.*\"schema\"\s*:\s*\"" + re.escape(SCHEMA) + r"\"", re.DOTALL)


def is_stored(text: str) -> bool:
    """Return whether a text is a stored program and not a contract."""
    return _STORED.match(text) is not None


def load_bytes(data: bytes, name: str = "stored program") -> ir.Program:
    """Read the output of `compile --emit ir`; raises Refusal where it is damaged.

    A member `digest`, if present, must be that of the program.
    """
    try:
        value = json_value(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise refuse(
            STORED_PROGRAM,
            f"{name} is not JSON: {error}",
            help="`kcdsl compile CONTRACT --emit ir -o FILE` writes it anew",
        ) from error
    program = from_json(value, name)
    stated = value.get("digest")
    if stated is not None and stated != digest(program):
        raise refuse(
            STORED_PROGRAM,
            f"{name}: the digest does not belong to the program",
            help="`kcdsl compile CONTRACT --emit ir -o FILE` writes it anew",
        )
    return program


def from_json(value: Any, name: str = "stored program") -> ir.Program:
    """Return the program of plain JSON data; raises Refusal where it is not `kcdsl.ir/1`."""
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise refuse(
            STORED_PROGRAM,
            f"{name} is not a document of the schema {SCHEMA}",
            help="`kcdsl compile CONTRACT --emit ir -o FILE` writes it anew",
        )
    try:
        program = _program(value)
        _check_references(program)
    except (
        KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, RecursionError,
    ) as error:  # fmt: skip
        detail = f"{type(error).__name__}: {error}"
        raise refuse(
            STORED_PROGRAM,
            f"{name} does not follow {SCHEMA} ({detail})",
            help="`kcdsl compile CONTRACT --emit ir -o FILE` writes it anew",
        ) from error
    return program


def _check_references(program: ir.Program) -> None:
    """Raise ValueError where a clause uses an undeclared slice, table or metric, or a name is
    declared twice."""
    slices, tables = [s.name for s in program.slices], [t.name for t in program.tables]
    own = [metric.name for metric in program.metrics]
    for names in (slices, tables, own, [c.id for c in program.clauses]):
        if len(set(names)) != len(names):
            raise ValueError("a name is given twice")
    for metric in program.metrics:
        if metric.name in METRICS:
            raise ValueError(f"{metric.name} is a metric of the language")
        if UNITS[metric.unit].dimension != NAMED[metric.dimension]:
            raise ValueError(f"{metric.unit} does not measure {metric.dimension}")
    for clause in program.clauses:
        regions = [f.region.slice for f in walk(clause.require) if isinstance(f, ir.Quantified)]
        named = {t.name for t in terms_of(clause.require) if isinstance(t, ir.TableValue)}
        metrics = {t.name for t in terms_of(clause.require) if isinstance(t, ir.Metric)}
        absent = ({*clause.slices, *regions} - set(slices)) | (named - set(tables))
        absent |= metrics - set(own) - set(METRICS)
        if absent:
            raise ValueError(f"{clause.id} speaks of {', '.join(sorted(absent))}, not declared")


def _program(value: dict[str, Any]) -> ir.Program:
    model, escalation, constants = value["model"], value["escalation"], value["constants"]
    return ir.Program(
        name=_text(value["name"]),
        version=_text(value["version"]),
        model=ir.ModelRef(
            _text(model["checkpoint"]),
            _optional_text(model["architecture"]),
            _optional_text(model["module"]),
            _optional_text(model["config"]),
            _optional_text(model["tokenizer"]),
            blocks=tuple(
                (_text(name), _text(ends["from"]), _text(ends["to"]))
                for name, ends in model.get("blocks", {}).items()
            ),
        ),
        train=_kernel(value["kernels"]["train"]),
        infer=_kernel(value["kernels"]["infer"]),
        data=_optional_text(value["data"]),
        slices=tuple(
            ir.Slice(_text(s["name"]), _optional_text(s["data"]), _predicate(s["where"]))
            for s in value["slices"]
        ),
        clauses=tuple(_clause(c) for c in value["clauses"]),
        escalation=ir.Escalation(
            tuple((level, _text(escalation["by_level"][level.value])) for level in ir.Level),
            tuple(
                (family, level, _text(escalation["by_family"][family.value][level.value]))
                for family in ir.Family
                for level in ir.Level
            ),
            *_health(escalation.get("health")),
        ),
        constants=ir.Constants(
            _fraction(constants["temperature"]),
            _optional(constants["reward_range"]),
            _optional(constants["advantage_max"]),
            _optional(constants["score_norm_max"]),
        ),
        tables=tuple(_table(t) for t in value.get("tables", ())),
        imports=tuple(
            ir.ImportedFrom(_text(item["file"]), _text(item["digest"]))
            for item in value.get("imports", ())
        ),
        metrics=tuple(_metric(m) for m in value.get("metrics", ())),
        guard=_optional_kernel(value["kernels"].get("guard")),
        fallback=_optional_kernel(value["kernels"].get("fallback")),
    )


def _health(value: Any) -> tuple[Fraction, Fraction]:
    if value is None:
        return ir.GUARD_FROM, ir.FALLBACK_FROM
    found = _fraction(value["guard_from"]), _fraction(value["fallback_from"])
    if not 0 < found[0] < found[1]:
        raise ValueError(
            "the thresholds of the health score are not 0 < guard_from < fallback_from"
        )
    return found


def _metric(value: dict[str, Any]) -> ir.UserMetric:
    return ir.UserMetric(
        _text(value["name"]),
        _text(value["function"]),
        ir.Family(value["family"]),
        _one_of(value["counted"], ("token", "request")),
        _one_of(value["better"], ("lower", "higher")),
        _text(value["unit"]),
        _text(value["dimension"]),
        tuple(_one_of(name, _STATISTICS) for name in value["statistics"]),
        tuple(_text(name) for name in value["needs"]),
        _truth(value["signed"]),
        _optional(value["lower"]),
        _optional(value["upper"]),
    )


def _table(value: dict[str, Any]) -> ir.ThresholdTable:
    return ir.ThresholdTable(
        _text(value["name"]),
        _text(value["dimension"]),
        tuple(ir.TableRow(_predicate(r["where"]), _fraction(r["value"])) for r in value["rows"]),
        _optional(value["otherwise"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"a text is needed, not {value!r}")
    return value


def _optional_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _fraction(value: Any) -> Fraction:
    top, _, bottom = _text(value).partition("/")
    fraction = Fraction(int(top), int(bottom))
    if f"{fraction.numerator}/{fraction.denominator}" != value:
        raise ValueError(f"{value!r} is not a fraction in lowest terms")
    return fraction


def _optional(value: Any) -> Fraction | None:
    return None if value is None else _fraction(value)


def _optional_kernel(value: dict[str, Any] | None) -> ir.KernelRef | None:
    return None if value is None else _kernel(value)


def _kernel(value: dict[str, Any]) -> ir.KernelRef:
    service, recording = value.get("service"), value.get("recording")
    return ir.KernelRef(
        _text(value["run"]),
        _pairs(value["numerics"]),
        folder=_optional_text(value.get("folder")),
        service=None if service is None else _service(service),
        recording=None if recording is None else _recording(recording),
        checkpoint=_optional_text(value.get("checkpoint")),
    )


def _recording(value: dict[str, Any]) -> Recording:
    logs = value["logprobs"]
    return Recording(
        _one_of(value["format"], FORMATS),
        tuple(sorted((_text(r), _text(name)) for r, name in value["columns"].items())),
        None if logs is None else _logprobs(logs),
        _optional_text(value["file"]),
        _truth(value["recomputed"]),
    )


def _service(value: dict[str, Any]) -> Service:
    return Service(
        _text(value["url"]),
        _logprobs(value["logprobs"]),
        _optional_text(value["model"]),
        _optional_text(value["key"]),
        _whole(value["tokens"]),
        _whole(value.get("concurrency", 1)),
    )


def _logprobs(value: dict[str, Any]) -> LogProbabilities:
    return LogProbabilities(
        _one_of(value["values"], ("raw", "processed")),
        _fraction(value["temperature"]),
        _fraction(value["top_p"]),
        _whole(value["top_k"]),
        _fraction(value["min_p"]),
        _whole(value["top"]),
    )


def _pairs(value: dict[str, Any]) -> tuple[tuple[str, object], ...]:
    return tuple(
        (name, _pairs(item) if isinstance(item, dict) else item)
        for name, item in sorted(value.items())
    )


def _predicate(value: dict[str, Any]) -> ir.Predicate:
    match value:
        case {"field": field, "op": op, "value": {"number": number}}:
            return ir.FieldTest(_text(field), _one_of(op, _TESTS), _fraction(number))
        case {"field": field, "op": op, "value": str() | bool() as plain}:
            return ir.FieldTest(_text(field), _one_of(op, _TESTS), plain)
        case {"all": list(parts)}:
            return ir.AllOf(tuple(_predicate(part) for part in parts))
        case {"any": list(parts)}:
            return ir.AnyOf(tuple(_predicate(part) for part in parts))
        case {"none": part}:
            return ir.NoneOf(_predicate(part))
        case _:
            raise ValueError(f"unknown predicate {value!r}")


_TESTS = ("==", "!=", "<=", "<", ">=", ">")
_COMPARISONS = ("<=", "<", ">=", ">", "==")
_STATISTICS = ("mean", "max", "min", "rate", "quantile", "aggregate")


def _one_of(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r} is none of {', '.join(allowed)}")
    return _text(value)


def _clause(value: dict[str, Any]) -> ir.Clause:
    budget, evidence = value["budget"], value["evidence"]
    return ir.Clause(
        _text(value["id"]),
        ir.Family(value["family"]),
        formula_from_json(value["require"]),
        ir.Level(value["level"]),
        tuple(_text(name) for name in value["slices"]),
        None if budget is None else _budget(budget),
        None if evidence is None else ir.EvidenceKind(evidence),
        _optional_text(value["action"]),
        holdout=_truth(value.get("holdout", False)),
    )


def _budget(value: dict[str, Any]) -> ir.Budget:
    return ir.Budget(_fraction(value["rate"]), _one_of(value["unit"], ("requests", "windows")))


def formula_from_json(value: dict[str, Any]) -> ir.Formula:
    """Return the formula of plain JSON data; raises ValueError, KeyError or TypeError."""
    match value["kind"]:
        case "compare":
            op = _one_of(value["op"], _COMPARISONS)
            return ir.Compare(op, term_from_json(value["left"]), term_from_json(value["right"]))
        case "no_flip":
            return ir.NoFlip(_text(value["block"]), _text(value["variable"]), _whole(value["k"]))
        case "has":
            return ir.HasFields(tuple(_text(name) for name in value["fields"]))
        case "not":
            return ir.Not(formula_from_json(value["of"]))
        case "and" | "or" | "implies" as op:
            parts = tuple(formula_from_json(part) for part in value["parts"])
            if len(parts) < 2 or (op == "implies" and len(parts) > 2):
                raise ValueError(f"{op!r} does not join {len(parts)} parts")
            return ir.Connective(op, parts)
        case "forall" | "exists" as quantifier:
            region = value["region"]
            kind, longest = ir.RegionKind(region["kind"]), region.get("longest")
            if (longest is None) != (kind is not ir.RegionKind.ROWS):
                raise ValueError("a region of rows, and nothing else, has a longest sequence")
            if longest is not None and not 1 <= _whole(longest) <= ir.MOST_ROWS:
                raise ValueError(f"a longest sequence of {longest} rows")
            return ir.Quantified(
                quantifier,
                _text(value["variable"]),
                ir.Region(
                    kind,
                    _text(region["slice"]),
                    _fraction(region["radius"]),
                    longest=None if longest is None else _whole(longest),
                ),
                formula_from_json(value["body"]),
            )
        case kind:
            raise ValueError(f"unknown formula {kind!r}")


def term_from_json(value: dict[str, Any]) -> ir.Term:
    """Return the term of plain JSON data; raises ValueError, KeyError or TypeError."""
    match value["kind"]:
        case "number":
            return ir.Number(_fraction(value["value"]), _text(value["dimension"]))
        case "metric":
            return ir.Metric(_text(value["name"]))
        case "statistic":
            of = term_from_json(value["of"])
            kind, q = _one_of(value["statistic"], _STATISTICS), _optional(value["q"])
            if (q is None) == (kind == "quantile"):
                raise ValueError("a quantile, and nothing else, has a rank")
            return ir.Statistic(kind, of, q)
        case "norm":
            measured = _truth(value["measured"])
            drift = ir.Drift(_text(value["block"]), _text(value["variable"]), measured)
            return ir.Norm(_one_of(value["norm"], ("inf", "2", "span")), drift)
        case "table":
            return ir.TableValue(_text(value["name"]), _text(value["dimension"]))
        case "abs":
            return ir.Abs(term_from_json(value["of"]))
        case "arith":
            return ir.Arith(
                _one_of(value["op"], ("+", "-", "*", "/")),
                term_from_json(value["left"]),
                term_from_json(value["right"]),
            )
        case kind:
            raise ValueError(f"unknown term {kind!r}")


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"a truth value is needed, not {value!r}")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"a whole number is needed, not {value!r}")
    return value
