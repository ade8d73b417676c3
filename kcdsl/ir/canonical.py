"""Programs as canonical JSON, and their digest.

The digest covers the meaning alone: spans, comments, formatting, the wording of requirements and
the order of slices, clauses and listed names take no part. Fractions are written as "p/q".
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from typing import Any

from kcdsl.ir import terms as ir

SCHEMA = "kcdsl.ir/1"


def digest(program: ir.Program) -> str:
    """Return the SHA-256 of the canonical JSON of a program, in hexadecimal."""
    return hashlib.sha256(canonical_bytes(program)).hexdigest()


def canonical_bytes(program: ir.Program) -> bytes:
    """Return the canonical JSON (RFC 8785) of a program."""
    import rfc8785

    return bytes(rfc8785.dumps(to_json(program)))


def document(program: ir.Program) -> bytes:
    """Return the file that `compile --emit ir` writes: the canonical JSON with its digest.

    The digest is that of the same object without the member `digest`.
    """
    import rfc8785

    return bytes(rfc8785.dumps({**to_json(program), "digest": digest(program)}))


def to_json(program: ir.Program) -> dict[str, Any]:
    """Return a program as plain JSON data with the schema `kcdsl.ir/1`."""
    escalation = program.escalation
    constants = program.constants
    return {
        "schema": SCHEMA,
        "name": program.name,
        "version": program.version,
        "model": {
            "checkpoint": program.model.checkpoint,
            "architecture": program.model.architecture,
            "module": program.model.module,
            "config": program.model.config,
            "tokenizer": program.model.tokenizer,
        },
        "kernels": {"train": _kernel(program.train), "infer": _kernel(program.infer)},
        "data": program.data,
        "slices": [
            {"name": s.name, "data": s.data, "where": _predicate(s.where)}
            for s in sorted(program.slices, key=lambda s: s.name)
        ],
        "clauses": [_clause(c) for c in sorted(program.clauses, key=lambda c: c.id)],
        "escalation": {
            "by_level": {level.value: action for level, action in escalation.by_level},
            "by_family": {
                family.value: {lv.value: act for f, lv, act in escalation.by_family if f is family}
                for family in ir.Family
            },
        },
        "constants": {
            "temperature": _fraction(constants.temperature),
            "reward_range": _optional(constants.reward_range),
            "advantage_max": _optional(constants.advantage_max),
            "score_norm_max": _optional(constants.score_norm_max),
        },
    }


def _fraction(value: Fraction) -> str:
    return f"{value.numerator}/{value.denominator}"


def _optional(value: Fraction | None) -> str | None:
    return None if value is None else _fraction(value)


def _kernel(kernel: ir.KernelRef) -> dict[str, Any]:
    return {"run": kernel.run, "numerics": _plain(kernel.numerics)}


def _plain(pairs: tuple[tuple[str, object], ...]) -> dict[str, Any]:
    return {name: _plain(value) if isinstance(value, tuple) else value for name, value in pairs}


def _predicate(predicate: ir.Predicate) -> dict[str, Any]:
    match predicate:
        case ir.FieldTest(field=field, op=op, value=value):
            plain = {"number": _fraction(value)} if isinstance(value, Fraction) else value
            return {"field": field, "op": op, "value": plain}
        case ir.AllOf(parts=parts):
            return {"all": [_predicate(part) for part in parts]}
        case ir.AnyOf(parts=parts):
            return {"any": [_predicate(part) for part in parts]}
        case ir.NoneOf(part=part):
            return {"none": _predicate(part)}


def _clause(clause: ir.Clause) -> dict[str, Any]:
    budget = clause.budget
    return {
        "id": clause.id,
        "family": clause.family.value,
        "require": formula_json(clause.require),
        "level": clause.level.value,
        "slices": sorted(clause.slices),
        "budget": None if budget is None else {"rate": _fraction(budget.rate), "unit": budget.unit},
        "evidence": None if clause.evidence is None else clause.evidence.value,
        "action": clause.action,
    }


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
            return {"kind": "has", "fields": sorted(fields)}
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
