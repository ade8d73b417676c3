"""What clauses read: metrics, blocks, slices, sampling units; and which ones measuring decides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, assert_never

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.diagnostics.spans import Span
from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.kernels import LOGITS
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Clause,
    Compare,
    EvidenceKind,
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


def split(program: Program, slices: frozenset[str]) -> tuple[tuple[Clause, ...], dict[str, str]]:
    """Return the clauses that running the kernels decides on these slices, and why not the others.

    Raises Refusal where none is left.
    """
    chosen: list[Clause] = []
    deferred: dict[str, str] = {}
    for clause in program.clauses:
        reason = obstacle(clause)
        named = slices_of(clause)
        if reason is not None:
            deferred[clause.id] = reason
        elif named and not slices & set(named):
            deferred[clause.id] = "no slice of it was selected"
        else:
            chosen.append(clause)
            left_out = [name for name in named if name not in slices]
            deferred |= {f"{clause.id} on {n}": "the slice was not selected" for n in left_out}
    for clause in chosen:  # other buckets of its table may have been left out
        deferred.pop(clause.id, None)
    if not chosen:
        raise refuse(
            codes.NOTHING_TO_EVALUATE,
            "the contract has no clause that running the kernels decides",
            notes=tuple(f"{name}: {reason}" for name, reason in deferred.items()),
            help="add a clause such as `p99(kl) <= 0.02`, or run `kcdsl verify`",
        )
    return tuple(chosen), deferred


PROOFS = (EvidenceKind.PROOF, EvidenceKind.PROOF_REAL, EvidenceKind.PROBABILISTIC)
"""Kinds of evidence that measuring does not give."""

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


# --- windows -------------------------------------------------------------------------------------


_Unit = TypeVar("_Unit")

WINDOW = 16
"""Consecutive units that form one window."""
NO_WINDOW_HAS = frozenset({"peak_memory", "determinism"})
"""Metrics that are one number of a whole slice: no window by itself was measured."""


def windows(units: Sequence[_Unit], size: int = WINDOW) -> tuple[tuple[_Unit, ...], ...]:
    """Cut units into windows of `size` in their order; a short rest joins the last window."""
    starts = [size * i for i in range(window_count(len(units), size))]
    ends = [*starts[1:], len(units)]
    return tuple(tuple(units[a:b]) for a, b in zip(starts, ends, strict=True))


def window_count(units: int, size: int = WINDOW) -> int:
    """Return into how many windows so many units are cut."""
    return 0 if units == 0 else max(1, units // size)


# --- sampling units ------------------------------------------------------------------------------


def prompts_are_units(program: Program) -> bool:
    """Say whether rollouts are read from a file: those of one prompt are one sampling unit, and a
    slice with some of them has a unit of its own."""
    recordings = (kernel.recording for kernel in (program.train, program.infer))
    return any(found is not None and found.format != LOGITS for found in recordings)


def sampling_unit(program: Program) -> str:
    """Return what one sampling unit is called: "prompt" or "request"."""
    return "prompt" if prompts_are_units(program) else "request"
