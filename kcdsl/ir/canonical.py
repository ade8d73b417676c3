"""Programs as canonical JSON, and their digest.

The digest covers only the meaning. It is independent of spans, comments, formatting, the wording of
requirements, the order of slices, tables, clauses and listed names, and of imports. Fractions are
written as "p/q".

Requirements are normalised first: bound variables are called `x`, `x1`, `x2` … from the outside in;
a constant or a table is on the right of its comparison; `a >= b` of two other terms is `b <= a`;
trace fields are sorted by name. Nothing else is rewritten: parts of `and`, sums and products keep
the author's order, so requirements that are only equivalent by a law of logic or arithmetic are
different.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from itertools import count, islice
from typing import Any, assert_never

from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import MIRRORED, subterms, walk, with_leaves
from kcdsl.ir.kernels import LogProbabilities, Recording, Service
from kcdsl.ir.terms import (
    Compare,
    Connective,
    Formula,
    HasFields,
    NoFlip,
    Norm,
    Not,
    Number,
    Quantified,
    TableValue,
    Term,
)

_Names = Mapping[str, str]


def normal_formula(formula: Formula) -> Formula:
    """Return the normal form of a formula, with the spans of the original."""
    free = free_variables(formula)
    fresh = (name for n in count() if (name := f"x{n}" if n else "x") not in free)
    depth = sum(isinstance(part, Quantified) for part in walk(formula))
    return _formula(formula, {}, tuple(islice(fresh, depth)))


def free_variables(formula: Formula) -> frozenset[str]:
    """Return the variables of a formula that no quantifier in it binds."""
    match formula:
        case NoFlip(variable=variable):
            return frozenset({variable})
        case Compare(left=left, right=right):
            terms = (*subterms(left), *subterms(right))
            return frozenset(term.of.variable for term in terms if isinstance(term, Norm))
        case Not(of=of):
            return free_variables(of)
        case Connective(parts=parts):
            return frozenset().union(*(free_variables(part) for part in parts))
        case Quantified(variable=variable, body=body):
            return free_variables(body) - {variable}
        case HasFields():
            return frozenset()
        case _:
            assert_never(formula)


def _formula(formula: Formula, names: _Names, fresh: tuple[str, ...]) -> Formula:
    """Rename bound variables; `fresh` yields the names for inner quantifiers."""
    match formula:
        case Compare():
            return _compare(formula, names)
        case NoFlip(variable=variable):
            return replace(formula, variable=names.get(variable, variable))
        case HasFields(fields=fields):
            return replace(formula, fields=tuple(sorted(fields)))
        case Not(of=of):
            return replace(formula, of=_formula(of, names, fresh))
        case Connective(parts=parts):
            return replace(formula, parts=tuple(_formula(part, names, fresh) for part in parts))
        case Quantified(variable=variable, body=body):
            inner = _formula(body, {**names, variable: fresh[0]}, fresh[1:])
            return replace(formula, variable=fresh[0], body=inner)
        case _:
            assert_never(formula)


def _compare(compare: Compare, names: _Names) -> Compare:
    op, left, right = compare.op, _term(compare.left, names), _term(compare.right, names)
    if not isinstance(right, Number | TableValue) and op in {">=", ">"}:
        op, left, right = MIRRORED[op], right, left
    return replace(compare, op=op, left=left, right=right)


def _term(term: Term, names: _Names) -> Term:
    def named(leaf: Term) -> Term:
        if not isinstance(leaf, Norm):
            return leaf
        drift = leaf.of
        return replace(leaf, of=replace(drift, variable=names.get(drift.variable, drift.variable)))

    return with_leaves(term, named)


# --- JSON -----------------------------------------------------------------------------------------


SCHEMA = "kcdsl.ir/1"
LIBRARY_SCHEMA = "kcdsl.library/1"


def digest(program: ir.Program) -> str:
    """Return the SHA-256 of the canonical JSON of a program, in hexadecimal."""
    import hashlib

    return hashlib.sha256(canonical_bytes(program)).hexdigest()


def canonical_bytes(program: ir.Program) -> bytes:
    """Return the canonical JSON (RFC 8785) of a program."""
    import rfc8785

    return bytes(rfc8785.dumps(to_json(program)))


def document(program: ir.Program) -> bytes:
    """Return the file that `compile --emit ir` writes: the canonical JSON with its digest.

    The digest is that of the same object without the members `digest` and `imports` (the origins of
    imported parts).
    """
    import rfc8785

    return bytes(rfc8785.dumps(document_json(program)))


def document_json(program: ir.Program) -> dict[str, Any]:
    """Return the content of `document` as plain data."""
    found = {**to_json(program), "digest": digest(program)}
    if program.imports:
        named = sorted(program.imports, key=lambda item: (item.file, item.digest))
        found["imports"] = [{"file": item.file, "digest": item.digest} for item in named]
    return found


def library_digest(library: ir.Library) -> str:
    """Return the digest of a library in the form of imports: "sha256:" and 64 hexadecimal
    digits."""
    import hashlib

    import rfc8785

    return "sha256:" + hashlib.sha256(rfc8785.dumps(library_json(library))).hexdigest()


def library_json(library: ir.Library) -> dict[str, Any]:
    """Return a library as plain JSON data with the schema `kcdsl.library/1`."""
    return {
        "schema": LIBRARY_SCHEMA,
        "name": library.name,
        "version": library.version,
        "slices": _slices(library.slices),
        "kernels": {name: kernel_json(kernel) for name, kernel in library.kernels},
        "tables": _tables(library.tables),
    }


def _blocks(model: ir.ModelRef) -> dict[str, Any]:
    """Return the field with the blocks of an ONNX file; empty for another model."""
    named = {name: {"from": first, "to": last} for name, first, last in sorted(model.blocks)}
    return {"blocks": named} if named else {}


def to_json(program: ir.Program) -> dict[str, Any]:
    """Return a program as plain JSON data with the schema `kcdsl.ir/1`.

    `tables`, `metrics`, `holdout` of a clause, the kernels `guard` and `fallback`, and `health` of
    the escalation are left out where they are empty, false or the default.
    """
    escalation = program.escalation
    constants = program.constants
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "name": program.name,
        "version": program.version,
        "model": {
            "checkpoint": program.model.checkpoint,
            "architecture": program.model.architecture,
            "module": program.model.module,
            "config": program.model.config,
            "tokenizer": program.model.tokenizer,
            **_blocks(program.model),
        },
        "kernels": {role: kernel_json(kernel) for role, kernel in program.kernels.items()},
        "data": program.data,
        "slices": _slices(program.slices),
        "clauses": [_clause(c) for c in sorted(program.clauses, key=lambda c: c.id)],
        "escalation": {
            "by_level": {level.value: action for level, action in escalation.by_level},
            "by_family": {
                family.value: {lv.value: act for f, lv, act in escalation.by_family if f is family}
                for family in ir.Family
            },
            **_health(escalation),
        },
        "constants": {
            "temperature": _fraction(constants.temperature),
            "reward_range": _optional(constants.reward_range),
            "advantage_max": _optional(constants.advantage_max),
            "score_norm_max": _optional(constants.score_norm_max),
        },
    }
    if program.tables:
        found["tables"] = _tables(program.tables)
    if program.metrics:
        found["metrics"] = [_metric(m) for m in sorted(program.metrics, key=lambda m: m.name)]
    return found


def _health(escalation: ir.Escalation) -> dict[str, Any]:
    """Return the thresholds of the health score; empty for the defaults."""
    thresholds = escalation.guard_from, escalation.fallback_from
    if thresholds == (ir.GUARD_FROM, ir.FALLBACK_FROM):
        return {}
    guard_from, fallback_from = map(_fraction, thresholds)
    return {"health": {"guard_from": guard_from, "fallback_from": fallback_from}}


def _metric(metric: ir.UserMetric) -> dict[str, Any]:
    return {
        "name": metric.name,
        "function": metric.function,
        "family": metric.family.value,
        "counted": metric.counted,
        "better": metric.better,
        "unit": metric.unit,
        "dimension": metric.dimension,
        "statistics": sorted(metric.statistics),
        "needs": sorted(metric.needs),
        "signed": metric.signed,
        "lower": _optional(metric.lower),
        "upper": _optional(metric.upper),
    }


def _slices(slices: tuple[ir.Slice, ...]) -> list[dict[str, Any]]:
    return [
        {"name": s.name, "data": s.data, "where": predicate_json(s.where)}
        for s in sorted(slices, key=lambda s: s.name)
    ]


def _tables(tables: tuple[ir.ThresholdTable, ...]) -> list[dict[str, Any]]:
    return [
        {
            "name": table.name,
            "dimension": table.dimension,
            "rows": [
                {"where": predicate_json(row.where), "value": _fraction(row.value)}
                for row in table.rows
            ],
            "otherwise": _optional(table.otherwise),
        }
        for table in sorted(tables, key=lambda t: t.name)
    ]


def _fraction(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


def _optional(value: Fraction | None) -> str | None:
    return None if value is None else _fraction(value)


def kernel_json(kernel: ir.KernelRef) -> dict[str, Any]:
    """Return a kernel as plain JSON data.

    `folder`, `service`, `recording` and `checkpoint` are left out where it has none.
    """
    found: dict[str, Any] = {"run": kernel.run, "numerics": _plain(kernel.numerics)}
    if kernel.folder is not None:
        found["folder"] = kernel.folder
    if kernel.service is not None:
        found["service"] = service_json(kernel.service)
    if kernel.recording is not None:
        found["recording"] = recording_json(kernel.recording)
    if kernel.checkpoint is not None:
        found["checkpoint"] = kernel.checkpoint
    return found


def service_json(service: Service) -> dict[str, Any]:
    """Return the description of a server as plain JSON data; a `concurrency` of 1 is left out."""
    at_once = {} if service.concurrency == 1 else {"concurrency": service.concurrency}
    return {
        **at_once,
        "url": service.url,
        "model": service.model,
        "key": service.key,
        "tokens": service.tokens,
        "logprobs": _logprobs(service.logprobs),
    }


def recording_json(recording: Recording) -> dict[str, Any]:
    """Return the description of a recording as plain JSON data."""
    logs = recording.logprobs
    return {
        "format": recording.format,
        "columns": dict(recording.columns),
        "logprobs": None if logs is None else _logprobs(logs),
        "file": recording.file,
        "recomputed": recording.recomputed,
    }


def _logprobs(logs: LogProbabilities) -> dict[str, Any]:
    return {
        "values": logs.values,
        "temperature": _fraction(logs.temperature),
        "top_p": _fraction(logs.top_p),
        "top_k": logs.top_k,
        "min_p": _fraction(logs.min_p),
        "top": logs.top,
    }


def _plain(pairs: tuple[tuple[str, object], ...]) -> dict[str, Any]:
    return {name: _plain(value) if isinstance(value, tuple) else value for name, value in pairs}


def predicate_json(predicate: ir.Predicate) -> dict[str, Any]:
    """Return a predicate of requests as plain JSON data."""
    match predicate:
        case ir.FieldTest(field=field, op=op, value=value):
            plain = {"number": _fraction(value)} if isinstance(value, Fraction) else value
            return {"field": field, "op": op, "value": plain}
        case ir.AllOf(parts=parts):
            return {"all": [predicate_json(part) for part in parts]}
        case ir.AnyOf(parts=parts):
            return {"any": [predicate_json(part) for part in parts]}
        case ir.NoneOf(part=part):
            return {"none": predicate_json(part)}


def _clause(clause: ir.Clause) -> dict[str, Any]:
    budget = clause.budget
    found: dict[str, Any] = {
        "id": clause.id,
        "family": clause.family.value,
        "require": formula_json(normal_formula(clause.require)),
        "level": clause.level.value,
        "slices": sorted(clause.slices),
        "budget": None if budget is None else {"rate": _fraction(budget.rate), "unit": budget.unit},
        "evidence": None if clause.evidence is None else clause.evidence.value,
        "action": clause.action,
    }
    if clause.holdout:
        found["holdout"] = True
    return found


def formula_json(formula: ir.Formula) -> dict[str, Any]:
    """Return a formula as plain JSON data; `kind` names the node."""
    match formula:
        case ir.Compare(op=op, left=left, right=right):
            return {
                "kind": "compare",
                "op": op,
                "left": term_json(left),
                "right": term_json(right),
            }
        case ir.NoFlip(block=block, variable=variable, k=k):
            return {"kind": "no_flip", "block": block, "variable": variable, "k": k}
        case ir.HasFields(fields=fields):
            return {"kind": "has", "fields": list(fields)}
        case ir.Not(of=of):
            return {"kind": "not", "of": formula_json(of)}
        case ir.Connective(op=op, parts=parts):
            return {"kind": op, "parts": [formula_json(part) for part in parts]}
        case ir.Quantified(quantifier=quantifier, variable=variable, region=region, body=body):
            return {
                "kind": quantifier,
                "variable": variable,
                "region": {
                    "kind": region.kind.value,
                    "slice": region.slice,
                    "radius": _fraction(region.radius),
                    **({} if region.longest is None else {"longest": region.longest}),
                },
                "body": formula_json(body),
            }


def term_json(term: ir.Term) -> dict[str, Any]:
    """Return a term as plain JSON data; `kind` names the node."""
    match term:
        case ir.Number(value=value, dimension=dimension):
            return {"kind": "number", "value": _fraction(value), "dimension": dimension}
        case ir.Metric(name=name):
            return {"kind": "metric", "name": name}
        case ir.Statistic(kind=kind, of=of, q=q):
            return {"kind": "statistic", "statistic": kind, "of": term_json(of), "q": _optional(q)}
        case ir.Norm(kind=kind, of=of):
            return {
                "kind": "norm",
                "norm": kind,
                "block": of.block,
                "variable": of.variable,
                "measured": of.measured,
            }
        case ir.Abs(of=of):
            return {"kind": "abs", "of": term_json(of)}
        case ir.Arith(op=op, left=left, right=right):
            return {"kind": "arith", "op": op, "left": term_json(left), "right": term_json(right)}
        case ir.TableValue(name=name, dimension=dimension):
            return {"kind": "table", "name": name, "dimension": dimension}
