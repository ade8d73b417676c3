"""Why a clause is out of a fragment's reach: the first sub-expression that takes it out.

`kcdsl.ir.fragment.classify` says where a clause belongs; this module says, for every other
fragment, which part of the requirement a backend of that fragment could not take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import assert_never

from kcdsl.diagnostics.spans import Span
from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.fragment import CHAIN_METRICS, Blame, classify
from kcdsl.ir.terms import (
    Clause,
    Compare,
    Connective,
    EvidenceKind,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    Norm,
    Not,
    Quantified,
    Statistic,
)
from kcdsl.route.catalogue import Fragment


def why_outside(clause: Clause, fragment: Fragment) -> Blame | None:
    """Return what takes a clause out of a fragment; None where the clause belongs to it."""
    placement = classify(clause)
    if placement.fragment is fragment:
        return None
    candidates = _candidates(clause, fragment)
    return next(candidates, placement.blame[0])


def why_uncovered(clause: Clause, fragments: Collection[Fragment]) -> Blame | None:
    """Return what keeps a clause out of each of several fragments; None where one holds it.

    Of several fragments the nearest is asked: one that speaks of what the clause speaks of, and of
    those the one that the fewest parts do not fit.
    """
    placement = classify(clause)
    if placement.fragment in fragments:
        return None
    decisive = [placement.blame[0]]
    found = [
        (_is_strange(clause.require, fragment), list(_candidates(clause, fragment)) or decisive)
        for fragment in Fragment
        if fragment in fragments
    ]
    _, nearest = min(found, key=lambda f: (f[0], len(f[1])), default=(True, decisive))
    return nearest[0]


def _is_strange(requirement: Formula, fragment: Fragment) -> bool:
    """Say whether a fragment has nothing in common with a requirement: fields of traces, top ranks
    and numbers are three things."""
    match fragment:
        case Fragment.TRACE_FIELDS:
            return not any(isinstance(part, HasFields) for part in walk(requirement))
        case Fragment.UNIVERSAL_FLIP:
            return not any(isinstance(part, NoFlip) for part in walk(requirement))
        case Fragment.UNIVERSAL_DRIFT:
            return not any(isinstance(part, Compare) for part in walk(requirement))
        case _:
            return not any(isinstance(part, Compare | NoFlip) for part in walk(requirement))


def _candidates(clause: Clause, fragment: Fragment) -> Iterator[Blame]:
    """Yield the parts that a fragment does not hold, outermost and leftmost first."""
    requirement = clause.require
    match fragment:
        case Fragment.UNIVERSAL_DRIFT:
            yield from _measured_parts(requirement)
            for part in walk(requirement):
                if isinstance(part, NoFlip):
                    yield Blame("a statement about the top ranks, not about a norm", part.span)
            yield from _shape(requirement)
        case Fragment.UNIVERSAL_FLIP:
            yield from _measured_parts(requirement)
            for term in terms_of(requirement):
                if isinstance(term, Norm):
                    yield Blame("a norm of the drift, not the top ranks", term.span)
            yield from _shape(requirement)
        case Fragment.STATISTICAL:
            yield from _admissible_parts(requirement)
            if clause.evidence in {EvidenceKind.PROOF, EvidenceKind.PROOF_REAL}:
                yield Blame("a proof is demanded, and measuring gives none", _place(requirement))
            for part in walk(requirement):
                if isinstance(part, HasFields):
                    yield Blame("fields of trace records, not a measured number", part.span)
        case Fragment.TRACE_FIELDS:
            for part in walk(requirement):
                if isinstance(part, Compare | NoFlip):
                    yield Blame("a statement about numbers, not about trace fields", _place(part))
        case Fragment.IMPLIED:
            yield from _not_derivable(clause)
        case Fragment.OUTSIDE:
            return
        case _:
            assert_never(fragment)


def _place(formula: Formula) -> Span:
    return formula.left.span if isinstance(formula, Compare) else formula.span


def _measured_parts(requirement: Formula) -> Iterator[Blame]:
    """Parts that speak of what was observed, which no statement about every input holds."""
    for part in walk(requirement):
        match part:
            case HasFields(span=span):
                yield Blame("trace records are data of runs, not of every input", span)
            case Compare():
                for term in terms_of(part):
                    if isinstance(term, Statistic):
                        yield Blame("a statistic of measured data, not a drift", term.span)
                    elif isinstance(term, Norm) and term.of.measured:
                        yield Blame("the drift of the runs that were made", term.of.span)
            case _:
                continue


def _admissible_parts(requirement: Formula) -> Iterator[Blame]:
    """Parts that speak of every admissible run, which measuring cannot decide."""
    for part in walk(requirement):
        match part:
            case NoFlip(span=span):
                yield Blame("speaks of every admissible run; a measurement sees a few", span)
            case Compare():
                for term in terms_of(part):
                    if isinstance(term, Norm) and not term.of.measured:
                        reason = "ranges over every admissible run; a measurement sees a few"
                        yield Blame(reason, term.of.span)
            case _:
                continue


def _shape(requirement: Formula) -> Iterator[Blame]:
    """Forms that keep a statement about drift from being one bound for every input."""
    for part in walk(requirement):
        match part:
            case Quantified(quantifier="exists", span=span):
                yield Blame("`exists` asks for one input, not for all", span)
            case Not(span=span):
                yield Blame("a negation", span)
            case Connective(op=op, span=span) if op != "and":
                yield Blame(f"`{op}` joins claims; each bound is decided by itself", span)
            case _:
                continue


def _not_derivable(clause: Clause) -> Iterator[Blame]:
    """Parts that the bound chain does not derive from a bound on the drift of the logits."""
    for part in walk(clause.require):
        if isinstance(part, Quantified):
            yield Blame("claims drift itself: a premise of the bound chain", part.span)
        elif isinstance(part, HasFields):
            yield Blame("no drift bound says which fields a trace has", part.span)
    for term in terms_of(clause.require):
        if isinstance(term, Metric) and term.name not in CHAIN_METRICS:
            yield Blame(f"the bound chain derives nothing about {term.name}", term.span)
    for term in terms_of(clause.require):
        if (
            isinstance(term, Statistic)
            and isinstance(term.of, Metric)
            and term.of.name == "log_ratio"
        ):
            yield Blame("the sign of log_ratio is not bounded; abs(log_ratio) is", term.of.span)
    if clause.evidence not in {EvidenceKind.PROOF, EvidenceKind.PROOF_REAL}:
        reason = "measured, as long as the clause does not say `evidence: proof`"
        yield Blame(reason, _place(clause.require))
