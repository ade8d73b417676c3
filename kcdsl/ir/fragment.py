"""The fragment of a clause, and the sub-expression that put it there.

A clause belongs to the least fragment that covers it. Where none does, the blame says which
sub-expression took it out of each fragment's reach, at its place in the source.
"""

from __future__ import annotations

from dataclasses import dataclass

from kcdsl.diagnostics.codes import OUTSIDE_FRAGMENTS
from kcdsl.diagnostics.model import Diagnostic, Label
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
    Statistic,
    Term,
)
from kcdsl.ir.walk import terms_of
from kcdsl.route.catalogue import Fragment
from kcdsl.source.text import SourceFile, Span

CHAIN_METRICS = frozenset({"tv", "kl", "log_ratio", "reward_delta", "grad_bias"})
"""Metrics that the bound chain derives from the drift of the logits."""

_PROOFS = {EvidenceKind.PROOF, EvidenceKind.PROOF_REAL}


@dataclass(frozen=True, slots=True)
class Blame:
    """One reason with its place."""

    reason: str
    span: Span


@dataclass(frozen=True, slots=True)
class Placement:
    """A fragment with the reasons for it; the first is the decisive one."""

    fragment: Fragment
    blame: tuple[Blame, ...]


def fragment_of(clause: Clause) -> Fragment:
    """Return the least fragment that covers the clause."""
    return classify(clause).fragment


def classify(clause: Clause) -> Placement:
    """Return the fragment of a clause with its blame."""
    placement = _place(clause.require)
    if (
        placement.fragment is Fragment.STATISTICAL
        and clause.evidence in _PROOFS
        and _in_chain(clause.require)
    ):
        reason = "a proof is demanded of a statistic that the bound chain derives"
        return Placement(Fragment.IMPLIED, (Blame(reason, placement.blame[0].span),))
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
        help="decidable are: forall x in REGION: NORM <= NUMBER, forall x in REGION: no_flip(...), "
        "STATISTIC <= NUMBER, has(trace, [...]), and conjunctions within one kind",
    )


def _in_chain(formula: Formula) -> bool:
    metrics = [term for term in terms_of(formula) if isinstance(term, Metric)]
    return bool(metrics) and all(metric.name in CHAIN_METRICS for metric in metrics)


def _outside(reason: str, span: Span, *more: Blame) -> Placement:
    return Placement(Fragment.OUTSIDE, (Blame(reason, span), *more))


def _place(formula: Formula) -> Placement:
    match formula:
        case Quantified(quantifier="exists", span=span):
            return _outside("`exists` has no backend", span)
        case Quantified(body=body):
            return _universal(body)
        case HasFields(span=span):
            return Placement(Fragment.TRACE_FIELDS, (Blame("asks for trace fields", span),))
        case Compare():
            return _statistical(formula)
        case Connective(op="and", parts=parts, span=span):
            return _together(parts, span, _place)
        case Connective(op=op, span=span):
            return _outside(f"`{op}` joins requirements", span)
        case Not(span=span):
            return _outside("a negation that cannot be moved inside", span)
        case NoFlip(span=span):
            return _outside("`no_flip` speaks of an input that is not quantified", span)


def _together(parts: tuple[Formula, ...], span: Span, place: object) -> Placement:
    placements = [_place(part) if place is _place else _universal(part) for part in parts]
    for placement in placements:
        if placement.fragment is Fragment.OUTSIDE:
            return placement
    first = placements[0]
    for other in placements[1:]:
        if other.fragment is not first.fragment:
            return _outside(
                f"one part is {first.fragment}, another is {other.fragment}",
                span,
                Blame(str(first.fragment), first.blame[0].span),
                Blame(str(other.fragment), other.blame[0].span),
            )
    return first


def _universal(body: Formula) -> Placement:
    match body:
        case NoFlip(span=span):
            return Placement(Fragment.UNIVERSAL_FLIP, (Blame("asks about top-k sets", span),))
        case Compare(op=op, left=Norm(of=drift, span=span), right=Number()):
            if drift.measured:
                return _outside(
                    "`measured_drift` is one observed run, and a region holds more", drift.span
                )
            if op not in {"<=", "<"}:
                return _outside(f"`{op}` asks for drift; only upper bounds are proved", body.span)
            return Placement(Fragment.UNIVERSAL_DRIFT, (Blame("bounds a drift", span),))
        case Compare(left=left, right=right):
            culprit = _first_unusual(left) or _first_unusual(right)
            reason, span = culprit if culprit is not None else ("not norm <= number", body.span)
            return _outside(reason, span)
        case Connective(op="and", parts=parts, span=span):
            return _together(parts, span, _universal)
        case Connective(op=op, span=span):
            return _outside(f"`{op}` under a quantifier", span)
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
        case _:
            return "arithmetic under a quantifier", term.span


def _statistical(compare: Compare) -> Placement:
    left, right = compare.left, compare.right
    if not isinstance(right, Number):
        return _outside("two measured terms are compared with each other", right.span)
    match left:
        case Statistic(of=Metric() | Abs(of=Metric()), span=span):
            return Placement(Fragment.STATISTICAL, (Blame("a statistic of a metric", span),))
        case Statistic(of=of):
            return _outside("a statistic of more than one metric", of.span)
        case Norm(span=span):
            return _outside("the norm of a drift whose input is not quantified", span)
        case Abs(span=span):
            return _outside("`abs` outside a statistic", span)
        case _:
            return _outside("arithmetic of measured terms", left.span)
