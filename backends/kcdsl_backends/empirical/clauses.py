"""Reading clauses: which metrics they need, and whether running the kernels can decide them."""

from __future__ import annotations

from typing import assert_never

from kcdsl.diagnostics.spans import Span
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Clause,
    Compare,
    Formula,
    Metric,
    NoFlip,
    Norm,
    Number,
    Program,
    Quantified,
    RegionKind,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.ir.walk import terms_of, walk


def metrics_of(formula: Formula) -> frozenset[str]:
    """Return the names of the metrics that a formula reads."""
    return frozenset(t.name for t in terms_of(formula) if isinstance(t, Metric))


def measured_norms(formula: Formula) -> frozenset[tuple[str, str]]:
    """Return (block, norm) of every measured drift that a formula reads."""
    return frozenset(
        (t.of.block, t.kind) for t in terms_of(formula) if isinstance(t, Norm) and t.of.measured
    )


def norm_name(block: str, kind: str) -> str:
    """Return the name under which the norm of a measured drift is recorded."""
    return f"measured_drift[{block}].{kind}"


def main_comparison(formula: Formula) -> Compare | None:
    """Return the comparison that a formula consists of, if it is one or a quantified one."""
    match formula:
        case Compare():
            return formula
        case Quantified():
            return main_comparison(formula.body)
        case _:
            return None


def statistic_count(formula: Formula) -> int:
    """Return how many estimates a formula compares, at least 1; those that are to equal something
    count twice, since they may miss it on either side."""
    estimates = 0
    for part in walk(formula):
        if isinstance(part, Compare):
            both = 2 if part.op == "==" else 1
            estimates += both * (_estimates(part.left) + _estimates(part.right))
    return max(1, estimates)


def _estimates(term: Term) -> int:
    match term:
        case Number() | TableValue():
            return 0
        case Statistic() | Metric() | Norm():
            return 1
        case Abs(of):
            return _estimates(of)
        case Arith(_, left, right):
            return _estimates(left) + _estimates(right)
        case _:
            assert_never(term)


def obstacle(clause: Clause) -> str | None:
    """Return why running the kernels cannot decide a clause, or None where it can."""
    for part in walk(clause.require):
        match part:
            case NoFlip():
                return "speaks of every admissible run (no_flip); `kcdsl verify` decides it"
            case Quantified() if part.region.kind is not RegionKind.POINTS:
                return f"ranges over a {part.region.kind}; `kcdsl verify` decides it"
            case _:
                pass
    if any(isinstance(t, Norm) and not t.of.measured for t in terms_of(clause.require)):
        return "speaks of every admissible run (drift); `kcdsl verify` decides it"
    return None


def slices_of(clause: Clause) -> tuple[str, ...]:
    """Return the slices that a clause is decided on, in the order of the contract."""
    named = [p.region.slice for p in walk(clause.require) if isinstance(p, Quantified)]
    return tuple(dict.fromkeys((*clause.slices, *named)))


DEFAULT_BLOCK = "attn_0"
"""The block that is compared with its certified bound whether a clause names it or not."""


def drift_blocks(program: Program) -> tuple[str, ...]:
    """Return the blocks that drift clauses name, in order; `attn_0` first, whether named or not."""
    named = [DEFAULT_BLOCK]
    for clause in program.clauses:
        named += [t.of.block for t in terms_of(clause.require) if isinstance(t, Norm)]
    return tuple(dict.fromkeys(named))


def block_place(program: Program, block: str) -> Span | None:
    """Return where the contract first speaks of the drift of a block."""
    terms = (t for clause in program.clauses for t in terms_of(clause.require))
    return next((t.of.span for t in terms if isinstance(t, Norm) and t.of.block == block), None)
