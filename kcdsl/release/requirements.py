"""What a certificate of a contract must cover, as the verifier reads it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

from kcdsl.ir.buckets import expand_tables
from kcdsl.ir.obligations import Obligation
from kcdsl.ir.terms import (
    Abs,
    AllOf,
    AnyOf,
    Arith,
    Clause,
    Compare,
    Connective,
    FieldTest,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    NoneOf,
    Norm,
    Not,
    Number,
    Predicate,
    Program,
    Quantified,
    Region,
    Statistic,
    Term,
)
from kcdsl.ir.walk import terms_of, walk
from kcdsl.ir.words import formula_text, region_text, term_text
from kcdsl.metrics import find_metric
from kcdsl.model.files import Artefacts
from kcdsl.release.artefacts import companions
from kcdsl_certs.canonical import canonical_digest
from kcdsl_certs.clauses import Evidence
from kcdsl_certs.reals import real_text
from kcdsl_certs.requirements import Chain, Comparison, RequiredClause
from kcdsl_certs.rows import BYTES, SliceSource

Alternatives = tuple[tuple[Comparison, ...], ...]

_NEGATED = {"<=": ">", "<": ">=", ">=": "<", ">": "<="}
_MOST_ALTERNATIVES = 64
_WITHOUT_LOGITS = ("bert",)


def required_clauses(program: Program, base: Path | Artefacts) -> tuple[RequiredClause, ...]:
    """Return every (clause, slice) that the contract names, in its order.

    A clause with a table is required on each bucket of its slices by itself, with its threshold.
    `base` is the folder of the contract; the data of the slices is hashed. Raises Refusal where a
    data file is missing.
    """
    files = Artefacts.of(base)
    program = expand_tables(program)
    digests: dict[str, str | None] = {}
    required: list[RequiredClause] = []
    for clause in program.clauses:
        region = region_of(clause.require)
        for name in slices_of(clause):
            if name is not None and name not in digests:
                digests[name] = slice_digest(program, files, name)
            required.append(
                RequiredClause(
                    id=clause.id,
                    slice=name,
                    alternatives=_with_chain(alternatives(clause.require), program),
                    budget=None if clause.budget is None else clause.budget.rate,
                    evidence=None if clause.evidence is None else Evidence(clause.evidence.value),
                    slice_digest=None if name is None else digests[name],
                    block=block_of(clause.require),
                    region=None if region is None else region_text(region),
                    inside=() if name is None else containing_slices(program, name),
                )
            )
    return tuple(required)


def comparisons_of(obligation: Obligation, program: Program) -> tuple[Comparison, ...]:
    """Return the comparisons of an obligation, those of all its alternatives; none where it has no
    normal form."""
    form = _with_chain(alternatives(obligation.part.require), program)
    return tuple(comparison for part in form for comparison in part)


def slices_of(clause: Clause) -> tuple[str | None, ...]:
    """Return the slices a clause is decided on; (None,) where it names none."""
    if clause.slices:
        return clause.slices
    region = region_of(clause.require)
    return (None,) if region is None else (region.slice,)


def slice_digest(program: Program, files: Artefacts, name: str) -> str | None:
    """Return the digest that pins a slice: its data file and its predicate; None without data."""
    declared = program.slice(name)
    data = declared.data if declared.data is not None else program.data
    if data is None:
        return None
    record = {"data": files.digest(files.find(data)), "where": _predicate(declared.where)}
    return canonical_digest(record)


def slice_sources(program: Program, files: Artefacts) -> dict[str, SliceSource]:
    """Return where the rows of every slice with data come from, buckets of tables included.

    Without a tokenizer of its own the model reads bytes. Kernels that draw after prompts, or whose
    rollouts are read, are measured in other units than rows.
    """
    program = expand_tables(program)
    tokens = "other" if "tokenizer" in companions(program.model, files) else BYTES
    kernels = (program.train, program.infer)
    drawn = any(k.service is not None or k.recording is not None for k in kernels)
    found = {}
    for declared in program.slices:
        data = declared.data if declared.data is not None else program.data
        if data is not None:
            where, units = _predicate(declared.where), "other" if drawn else "rows"
            found[declared.name] = SliceSource(data, where, tokens, units)
    return found


def containing_slices(program: Program, name: str) -> tuple[str, ...]:
    """Return the slices that contain this one by their form: same data, fewer conditions."""
    inner = program.slice(name)
    return tuple(
        outer.name
        for outer in program.slices
        if (outer.data or program.data) == (inner.data or program.data)
        and _conditions(outer.where) <= _conditions(inner.where)
    )


def _conditions(predicate: Predicate) -> frozenset[Predicate]:
    return frozenset(predicate.parts if isinstance(predicate, AllOf) else (predicate,))


def _predicate(predicate: Predicate) -> Any:
    match predicate:
        case FieldTest(field, op, value):
            stated = {"real": real_text(value)} if isinstance(value, Fraction) else value
            return {"field": field, "op": op, "value": stated}
        case AllOf(parts):
            return {"all": [_predicate(part) for part in parts]}
        case AnyOf(parts):
            return {"any": [_predicate(part) for part in parts]}
        case NoneOf(part):
            return {"none": _predicate(part)}


# --- formulas ------------------------------------------------------------------------------------


def alternatives(formula: Formula) -> Alternatives:
    """Return the requirement in disjunctive normal form over comparisons.

    The quantity of `no_flip` is the certified margin between the kept and the other columns, that
    of `has` the share of records that carry every field.
    Empty where it has none: an existential quantifier, the negation of a quantifier, or more than
    64 alternatives. Under `forall` a disjunction is read as one of universal statements, which
    implies it.
    """
    return _normal_form(formula, negated=False)


def _normal_form(formula: Formula, *, negated: bool) -> Alternatives:
    match formula:
        case Compare() if negated and formula.op not in _NEGATED:
            return ()
        case Compare(op, left, right):
            return ((_comparison(_NEGATED[op] if negated else op, left, right),),)
        case NoFlip() | HasFields() | Quantified() if negated:
            return ()
        case NoFlip():
            return ((Comparison(formula_text(formula), ">", Fraction(0)),),)
        case HasFields():
            return ((Comparison(formula_text(formula), ">=", Fraction(1)),),)
        case Not(of):
            return _normal_form(of, negated=not negated)
        case Connective("implies", (antecedent, consequent)):
            either = Connective("or", (Not(antecedent), consequent))
            return _normal_form(either, negated=negated)
        case Connective(op, parts):
            inner = [_normal_form(part, negated=negated) for part in parts]
            return _conjunction(inner) if (op == "and") != negated else _disjunction(inner)
        case Quantified(quantifier, _, _, body):
            return _normal_form(body, negated=False) if quantifier == "forall" else ()


def _conjunction(parts: list[Alternatives]) -> Alternatives:
    size = 1
    for part in parts:
        size *= len(part)
    if size > _MOST_ALTERNATIVES:
        return ()
    return tuple(tuple(c for part in choice for c in part) for choice in product(*parts))


def _disjunction(parts: list[Alternatives]) -> Alternatives:
    found = tuple(choice for part in parts for choice in part)
    return found if len(found) <= _MOST_ALTERNATIVES else ()


def _comparison(op: str, left: Term, right: Term) -> Comparison:
    if isinstance(right, Number):
        return Comparison(term_text(left), op, right.value, _chain(left))
    return Comparison(term_text(Arith("-", left, right)), op, Fraction(0))


def _chain(term: Term) -> Chain | None:
    """Return the metric of which the term is a value or statistic: its bound bounds the term."""
    match term:
        case Metric(name):
            definition = find_metric(name)
            return Chain(name if definition is None else definition.name)
        case Abs(of):
            return _chain(of)
        case Statistic("mean" | "max" | "min" | "quantile" | "aggregate", of):
            return _chain(of)
        case _:
            return None


def _with_chain(form: Alternatives, program: Program) -> Alternatives:
    """Fill in temperature and constants; without logits the chain says nothing."""
    constants = program.constants
    stated = tuple(
        (name, value)
        for name in ("advantage_max", "reward_range", "score_norm_max")
        if (value := getattr(constants, name)) is not None
    )

    def filled(comparison: Comparison) -> Comparison:
        if comparison.chain is None or program.model.architecture in _WITHOUT_LOGITS:
            return replace(comparison, chain=None)
        chain = Chain(comparison.chain.metric, constants.temperature, stated)
        return replace(comparison, chain=chain)

    return tuple(tuple(filled(c) for c in part) for part in form)


def region_of(formula: Formula) -> Region | None:
    """Return the region of the first quantifier, or None."""
    return next((f.region for f in walk(formula) if isinstance(f, Quantified)), None)


def block_of(formula: Formula) -> str | None:
    """Return the block that the formula speaks about, or None for none or several."""
    found = {part.block for part in walk(formula) if isinstance(part, NoFlip)}
    found |= {term.of.block for term in terms_of(formula) if isinstance(term, Norm)}
    return found.pop() if len(found) == 1 else None
