"""The fragment of a clause, and the reasons why it is in no other fragment.

A clause belongs to the least fragment that covers it. For every other fragment, the blame is the
first sub-expression that is not in that fragment, with its place in the source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, assert_never

from kcdsl.diagnostics.codes import OUTSIDE_FRAGMENTS
from kcdsl.diagnostics.model import Diagnostic, Label
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.formulas import subterms, terms_of, walk
from kcdsl.ir.obligations import conjuncts
from kcdsl.ir.terms import (
    Abs,
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
    Number,
    Quantified,
    RegionKind,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.route.catalogue import Fragment

CHAIN_METRICS = frozenset({"tv", "kl", "log_ratio", "reward_delta", "grad_bias"})
"""Metrics that the bound chain derives from the drift of the logits."""

_PROOFS = {EvidenceKind.PROOF, EvidenceKind.PROOF_REAL}


class UncoveredReason(NamedTuple):
    """One reason with its place."""

    reason: str
    span: Span


class Placement(NamedTuple):
    """A fragment with the reasons for it; the first is the decisive one."""

    fragment: Fragment
    blame: tuple[UncoveredReason, ...]


def classify(clause: Clause) -> Placement:
    """Return the fragment of a clause with its blame."""
    placement = _place(clause.require)
    if placement.fragment in _MEASURED:
        placement = _on_one_slice(clause) or placement
    if (
        placement.fragment is Fragment.STATISTICAL
        and clause.evidence in _PROOFS
        and _in_chain(clause.require)
    ):
        reason = "a proof is demanded of a statistic that the bound chain derives"
        return Placement(Fragment.IMPLIED, (UncoveredReason(reason, placement.blame[0].span),))
    return placement


def outside_diagnostic(clause: Clause, placement: Placement, source: SourceFile) -> Diagnostic:
    """Return the diagnostic for a clause that no fragment covers."""
    first, *rest = placement.blame
    return Diagnostic(
        OUTSIDE_FRAGMENTS,
        f"no backend decides the clause `{clause.id}`: {first.reason}",
        source,
        first.span,
        labels=tuple(Label(blame.span, blame.reason) for blame in rest),
        help="decidable are: forall x in REGION: NORM(drift(...)) <= NUMBER or no_flip(...), "
        "one in each clause; and any statement about statistics of metrics and has(trace, [...])",
    )


def _in_chain(formula: Formula) -> bool:
    metrics = [term for term in terms_of(formula) if isinstance(term, Metric)]
    return bool(metrics) and all(metric.name in CHAIN_METRICS for metric in metrics)


def _outside(reason: str, span: Span, *more: UncoveredReason) -> Placement:
    return Placement(Fragment.OUTSIDE, (UncoveredReason(reason, span), *more))


def _place(formula: Formula) -> Placement:
    match formula:
        case Quantified():
            return _quantified(formula)
        case HasFields(span=span):
            return Placement(
                Fragment.TRACE_FIELDS, (UncoveredReason("fields of every trace record", span),)
            )
        case Compare():
            return _measured(formula)
        case Not(of=of, span=span):
            inner = _place(of)
            if inner.fragment in _UNIVERSAL:
                return _outside("a negated claim about every input", span, *inner.blame)
            return inner
        case Connective(op=op, parts=parts, span=span):
            return _together(op, [_place(part) for part in parts], span)
        case NoFlip(span=span):
            return _outside("`no_flip` uses an input that is not quantified", span)


_UNIVERSAL = {Fragment.UNIVERSAL_DRIFT, Fragment.UNIVERSAL_FLIP}
_MEASURED = {Fragment.STATISTICAL, Fragment.TRACE_FIELDS}


def _together(op: str, placements: list[Placement], span: Span) -> Placement:
    """Join the parts of a connective: measured parts in any way, a universal part with none."""
    for placement in placements:
        if placement.fragment is Fragment.OUTSIDE:
            return placement
    found = {placement.fragment for placement in placements}
    blame = tuple(UncoveredReason(str(p.fragment), p.blame[0].span) for p in placements)
    if found <= _MEASURED:
        statistical = [p for p in placements if p.fragment is Fragment.STATISTICAL]
        return (statistical or placements)[0]
    if len(found) > 1:
        return _outside("its parts need different backends", span, *blame)
    return _outside(f"`{op}` joins claims about every input", span, *blame)


def _on_one_slice(clause: Clause) -> Placement | None:
    """Return the placement of a clause with a part about several slices at once, None without one.

    Each part of a conjunction is decided per slice, so a disjunction between statements about
    different slices cannot be decided.
    """
    whole = clause.require
    for part in conjuncts(whole) if clause.budget is None else (whole,):
        quantified = [inner for inner in walk(part) if isinstance(inner, Quantified)]
        if isinstance(part, Quantified) or not quantified:
            continue
        first, *others = quantified
        named = {inner.region.slice for inner in quantified}
        if _is_measured_outside(part):
            named.update(clause.slices)
        if len(named) > 1:
            return _outside(
                f"one statement about the slices {' and '.join(sorted(named))}",
                part.span,
                *(
                    UncoveredReason(f"about {q.region.slice}", q.region.span)
                    for q in (first, *others)
                ),
            )
    return None


def _is_measured_outside(formula: Formula) -> bool:
    """Return whether a part of a formula is about a whole slice and under no quantifier."""
    match formula:
        case Compare() | HasFields():
            return True
        case Not(of=of):
            return _is_measured_outside(of)
        case Connective(parts=parts):
            return any(map(_is_measured_outside, parts))
        case _:
            return False


def _quantified(formula: Quantified) -> Placement:
    norms = [term for term in terms_of(formula.body) if isinstance(term, Norm)]
    if norms and all(norm.of.measured for norm in norms):
        return _observed(formula)
    if formula.quantifier == "exists":
        return _outside("`exists` over admissible runs has no backend", formula.span)
    return _universal(formula.body)


def _observed(formula: Quantified) -> Placement:
    """Return the placement of a quantifier over the rows of a slice about their observed drift."""
    if formula.region.kind is not RegionKind.POINTS:
        reason = "`measured_drift` is observed at points, and the region holds more"
        return _outside(reason, formula.region.span)
    for part in walk(formula.body):
        if isinstance(part, Quantified | NoFlip | HasFields):
            return _outside("more than observed drift under one quantifier", part.span)
    for term in terms_of(formula.body):
        if isinstance(term, Statistic):
            return _outside("a statistic under a quantifier", term.span)
    reason = f"observed drift on the rows of {formula.region.slice}"
    return Placement(Fragment.STATISTICAL, (UncoveredReason(reason, formula.body.span),))


def _universal(body: Formula) -> Placement:
    match body:
        case NoFlip(block=block, k=k, span=span):
            reason = f"top-{k} of {block} for every input of a region"
            return Placement(Fragment.UNIVERSAL_FLIP, (UncoveredReason(reason, span),))
        case Compare(op=op, left=Norm(of=drift), right=Number()):
            if drift.measured:
                return _outside("observed and admissible drift in one claim", drift.span)
            if op not in {"<=", "<"}:
                return _outside(f"`{op}` asks for drift; only upper bounds are proved", body.span)
            reason = f"drift of {drift.block} for every input of a region"
            return Placement(Fragment.UNIVERSAL_DRIFT, (UncoveredReason(reason, body.span),))
        case Compare(left=left, right=right):
            culprit = _first_unusual(left) or _first_unusual(right)
            reason, span = culprit or ("two norms are compared with each other", right.span)
            return _outside(reason, span)
        case Connective(op=op, parts=parts, span=span):
            return _together(op, [_universal(part) for part in parts], span)
        case Not(span=span):
            return _outside("a negation under a quantifier", span)
        case Quantified(quantifier=quantifier, span=span):
            return _outside(f"a nested `{quantifier}`", span)
        case HasFields(span=span):
            return _outside("trace fields under a quantifier", span)


def _first_unusual(term: Term) -> tuple[str, Span] | None:
    match term:
        case Norm() | Number():
            return None
        case Statistic(span=span):
            return "a statistic under a quantifier", span
        case Abs(span=span):
            return "`abs` of a term under a quantifier", span
        case TableValue(span=span):
            return "a proof is about one bound, not a table of them", span
        case _:
            return "arithmetic under a quantifier", term.span


def _measured(compare: Compare) -> Placement:
    names: dict[str, Span] = {}
    for term in (*subterms(compare.left), *subterms(compare.right)):
        if isinstance(term, Norm):
            return _outside("the norm of a drift whose input is not quantified", term.span)
        if isinstance(term, Metric):
            names.setdefault(term.name, term.span)
    if not names:
        return _outside("the comparison names no metric", compare.span)
    reason = f"measured {' and '.join(names)}"
    return Placement(Fragment.STATISTICAL, (UncoveredReason(reason, compare.left.span),))


# --- other fragments ------------------------------------------------------------------------------


def why_uncovered(clause: Clause, fragments: Collection[Fragment]) -> UncoveredReason | None:
    """Return why a clause is in none of several fragments; None where it is in one.

    The reason is that of the closest fragment: one about the same quantities, and among those the
    one with the fewest parts outside.
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
    """Return whether a fragment and a requirement are of different kinds: fields of traces, top
    ranks or numbers."""
    match fragment:
        case Fragment.TRACE_FIELDS:
            return not any(isinstance(part, HasFields) for part in walk(requirement))
        case Fragment.UNIVERSAL_FLIP:
            return not any(isinstance(part, NoFlip) for part in walk(requirement))
        case Fragment.UNIVERSAL_DRIFT:
            return not any(isinstance(part, Compare) for part in walk(requirement))
        case _:
            return not any(isinstance(part, Compare | NoFlip) for part in walk(requirement))


def _candidates(clause: Clause, fragment: Fragment) -> Iterator[UncoveredReason]:
    """Yield the parts that are not in a fragment, outermost and leftmost first."""
    requirement = clause.require
    match fragment:
        case Fragment.UNIVERSAL_DRIFT:
            yield from _measured_parts(requirement)
            for part in walk(requirement):
                if isinstance(part, NoFlip):
                    yield UncoveredReason(
                        "a statement about the top ranks, not about a norm", part.span
                    )
            yield from _shape(requirement)
        case Fragment.UNIVERSAL_FLIP:
            yield from _measured_parts(requirement)
            for term in terms_of(requirement):
                if isinstance(term, Norm):
                    yield UncoveredReason("a norm of the drift, not the top ranks", term.span)
            yield from _shape(requirement)
        case Fragment.STATISTICAL:
            yield from _admissible_parts(requirement)
            if clause.evidence in {EvidenceKind.PROOF, EvidenceKind.PROOF_REAL}:
                yield UncoveredReason(
                    "a proof is demanded, and measuring gives none", _start_of(requirement)
                )
            for part in walk(requirement):
                if isinstance(part, HasFields):
                    yield UncoveredReason(
                        "fields of trace records, not a measured number", part.span
                    )
        case Fragment.TRACE_FIELDS:
            for part in walk(requirement):
                if isinstance(part, Compare | NoFlip):
                    yield UncoveredReason(
                        "a statement about numbers, not about trace fields", _start_of(part)
                    )
        case Fragment.IMPLIED:
            yield from _not_derivable(clause)
        case Fragment.OUTSIDE:
            return
        case _:
            assert_never(fragment)


def _start_of(formula: Formula) -> Span:
    return formula.left.span if isinstance(formula, Compare) else formula.span


def _measured_parts(requirement: Formula) -> Iterator[UncoveredReason]:
    """Yield parts about observed values, which are not statements about every input."""
    for part in walk(requirement):
        match part:
            case HasFields(span=span):
                yield UncoveredReason("trace records are data of runs, not of every input", span)
            case Compare():
                for term in terms_of(part):
                    if isinstance(term, Statistic):
                        yield UncoveredReason(
                            "a statistic of measured data, not a drift", term.span
                        )
                    elif isinstance(term, Norm) and term.of.measured:
                        yield UncoveredReason("the drift of the runs that were made", term.of.span)
            case _:
                continue


def _admissible_parts(requirement: Formula) -> Iterator[UncoveredReason]:
    """Yield parts about every admissible run, which measurement cannot decide."""
    for part in walk(requirement):
        match part:
            case NoFlip(span=span):
                yield UncoveredReason(
                    "quantifies over all admissible runs; a measurement sees a few", span
                )
            case Compare():
                for term in terms_of(part):
                    if isinstance(term, Norm) and not term.of.measured:
                        reason = "ranges over every admissible run; a measurement sees a few"
                        yield UncoveredReason(reason, term.of.span)
            case _:
                continue


def _shape(requirement: Formula) -> Iterator[UncoveredReason]:
    """Yield forms in which a statement about drift is not a single bound for every input."""
    for part in walk(requirement):
        match part:
            case Quantified(quantifier="exists", span=span):
                yield UncoveredReason("`exists` asks for one input, not for all", span)
            case Not(span=span):
                yield UncoveredReason("a negation", span)
            case Connective(op=op, span=span):
                yield UncoveredReason(f"`{op}` joins claims; each bound is decided by itself", span)
            case _:
                continue


def _not_derivable(clause: Clause) -> Iterator[UncoveredReason]:
    """Yield parts that the bound chain does not derive from a bound on the drift of the logits."""
    for part in walk(clause.require):
        if isinstance(part, Quantified):
            yield UncoveredReason("claims drift itself: a premise of the bound chain", part.span)
        elif isinstance(part, HasFields):
            yield UncoveredReason("no drift bound says which fields a trace has", part.span)
    for term in terms_of(clause.require):
        if isinstance(term, Metric) and term.name not in CHAIN_METRICS:
            yield UncoveredReason(f"the bound chain derives nothing about {term.name}", term.span)
    for term in terms_of(clause.require):
        if (
            isinstance(term, Statistic)
            and isinstance(term.of, Metric)
            and term.of.name == "log_ratio"
        ):
            yield UncoveredReason(
                "the sign of log_ratio is not bounded; abs(log_ratio) is", term.of.span
            )
    if clause.evidence not in {EvidenceKind.PROOF, EvidenceKind.PROOF_REAL}:
        reason = "measured, as long as the clause does not say `evidence: proof`"
        yield UncoveredReason(reason, _start_of(clause.require))
