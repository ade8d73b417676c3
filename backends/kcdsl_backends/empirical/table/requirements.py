"""Requirements of clauses: the metrics that they read, their slices, and the rates they allow.

`p99(m) <= τ` says that at most 1 % of the requests exceed τ, `budget: 1% of requests` on `max(m)`
says the same, and a maximum alone says that none does. `failure_rate` and `determinism` are shares
of requests themselves. A mean is no statement about units, and neither is a rate over tokens, which
is a mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar, assert_never

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import Refusal, refuse
from kcdsl.diagnostics.spans import Span
from kcdsl.ir.formulas import subterms, terms_of, walk
from kcdsl.ir.kernels import LOGITS, KernelRef
from kcdsl.ir.obligations import Obligation, named_slices
from kcdsl.ir.printer import formula_text
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Clause,
    Compare,
    EvidenceKind,
    Formula,
    HasFields,
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
from kcdsl.ir.terms import Number as Constant
from kcdsl.metrics import MEASURES, METRICS
from kcdsl.verdict.report import deferred_name


def metrics_of(formula: Formula) -> frozenset[str]:
    """Return the names of the metrics that a formula reads."""
    return frozenset(t.name for t in terms_of(formula) if isinstance(t, Metric))


def measured_norms(formula: Formula) -> frozenset[tuple[str, str]]:
    """Return (block, norm) of every measured drift that a formula reads."""
    return frozenset(
        (t.of.block, t.kind) for t in terms_of(formula) if isinstance(t, Norm) and t.of.measured
    )


def norm_name(block: str, kind: str) -> str:
    """Return the name of the values of the norm of a measured drift."""
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
    """Return the number of estimates that a formula compares, at least 1; those compared by `==`
    count twice, since they may err on either side."""
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
    """Return why running the kernels cannot decide a clause; None if it can."""
    for part in walk(clause.require):
        match part:
            case NoFlip():
                return "quantifies over all admissible runs (no_flip); `kcdsl verify` decides it"
            case Quantified() if part.region.kind is not RegionKind.POINTS:
                return f"ranges over a {part.region.kind}; `kcdsl verify` decides it"
            case _:
                pass
    if any(isinstance(t, Norm) and not t.of.measured for t in terms_of(clause.require)):
        return "quantifies over all admissible runs (drift); `kcdsl verify` decides it"
    return None


def split(program: Program, slices: frozenset[str]) -> tuple[tuple[Clause, ...], dict[str, str]]:
    """Return the clauses that running the kernels decides on these slices, and the reasons for
    others.

    Raises Refusal if there is none.
    """
    chosen: list[Clause] = []
    deferred: dict[str, str] = {}
    for clause in program.clauses:
        reason = obstacle(clause)
        named = named_slices(clause)
        if reason is not None:
            deferred[clause.id] = reason
        elif named and not slices & set(named):
            deferred[clause.id] = "no slice of it was selected"
        else:
            chosen.append(clause)
            left_out = [name for name in named if name not in slices]
            for name in left_out:
                deferred[deferred_name(clause.id, name)] = "the slice was not selected"
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


FAILURE_RATE = Statistic("aggregate", Metric("failure_rate"))
"""The share of requests without an answer, as a term."""

PROOFS = (EvidenceKind.PROOF, EvidenceKind.PROOF_REAL, EvidenceKind.PROBABILISTIC)
"""Kinds of evidence that measurements do not give."""

DEFAULT_BLOCK = "attn_0"
"""The block that is compared with its certified bound whether a clause names it or not."""


def drift_blocks(program: Program) -> tuple[str, ...]:
    """Return the blocks that drift clauses name, in order; `attn_0` first, whether named or not."""
    named = [DEFAULT_BLOCK]
    for clause in program.clauses:
        named += [t.of.block for t in terms_of(clause.require) if isinstance(t, Norm)]
    return tuple(dict.fromkeys(named))


def block_place(program: Program, block: str) -> Span | None:
    """Return the first place in the contract of the drift of a block."""
    terms = (t for clause in program.clauses for t in terms_of(clause.require))
    return next((t.of.span for t in terms if isinstance(t, Norm) and t.of.block == block), None)


def unreadable(
    clause: Clause, what: str, why: str, help: str, notes: tuple[str, ...] = ()
) -> Refusal:
    """Return the refusal of a clause that reads values which its source does not have."""
    message = f"the clause `{clause.id}` reads {what}, {why}"
    return refuse(codes.METRIC_OUT_OF_REACH, message, notes=notes, help=help)


# --- windows -------------------------------------------------------------------------------------


_Unit = TypeVar("_Unit")

WINDOW = 16
"""Number of consecutive units in one window."""
NO_WINDOW_HAS = frozenset({"peak_memory", "determinism"})
"""Metrics with one number for a whole slice, so that a window has no value."""


def windows(units: Sequence[_Unit], size: int = WINDOW) -> tuple[tuple[_Unit, ...], ...]:
    """Cut units into windows of `size` in their order; a short rest joins the last window."""
    starts = [size * i for i in range(window_count(len(units), size))]
    ends = [*starts[1:], len(units)]
    return tuple(tuple(units[a:b]) for a, b in zip(starts, ends, strict=True))


def window_count(units: int, size: int = WINDOW) -> int:
    """Return the number of windows of so many units."""
    return 0 if units == 0 else max(1, units // size)


# --- recordings and times ------------------------------------------------------------------------


GENERATED = frozenset({"ttft", "tpot"})
"""Metrics of the times of single tokens."""


def is_runtime(clause: Clause) -> bool:
    """Return whether a clause needs timed or repeated runs."""
    names = metrics_of(clause.require) - {"failure_rate"}
    return any(MEASURES[n].tier == "E" for n in names if n in MEASURES)


def reads_tokens(clauses: Iterable[Clause]) -> bool:
    """Return whether any clause reads the times of single tokens."""
    return any(metrics_of(clause.require) & GENERATED for clause in clauses)


def holds_logits(kernel: KernelRef) -> bool:
    """Return whether a kernel is a recording of whole logits."""
    return kernel.recording is not None and kernel.recording.format == LOGITS


# --- sampling units ------------------------------------------------------------------------------


def prompts_are_units(program: Program) -> bool:
    """Return whether rollouts are read from a file, so that those of one prompt are one sampling
    unit; a slice with some of them has a unit of its own."""
    recordings = (kernel.recording for kernel in (program.train, program.infer))
    return any(found is not None and found.format != LOGITS for found in recordings)


_OF_RUNS = frozenset(
    name
    for name, metric in METRICS.items()
    if {"timing", "outcomes", "repeats"} & set(metric.needs)
)
"""Metrics of runs, which vary from run to run."""


_TIMES = frozenset(name for name, metric in METRICS.items() if "timing" in metric.needs)


def reads_times(formula: Formula) -> bool:
    """Return whether a formula reads times, of which each request has several."""
    return bool(metrics_of(formula) & _TIMES)


def is_throughput(clause: Clause) -> bool:
    """Return whether a clause compares the throughput with a number: a mean over timed requests."""
    found = threshold(clause.require)
    return found is not None and Metric("throughput") in subterms(found[0]) and not clause.budget


def of_runs(formula: Formula) -> bool:
    """Return whether a formula reads metrics that vary from run to run: times, failures."""
    return bool(metrics_of(formula) & _OF_RUNS)


def measured_anew(formula: Formula, program: Program) -> bool:
    """Return whether another evaluation of the same requests gives other values: those of runs, and
    all answers of a server. Recorded values do not change, and draws of a local kernel follow the
    seed."""
    if program.infer.recording is not None:
        return False
    served = any(kernel.service is not None for kernel in (program.train, program.infer))
    return of_runs(formula) or (served and bool(metrics_of(formula)))


def sampling_unit(program: Program) -> str:
    """Return the name of one sampling unit: "prompt" or "request"."""
    return "prompt" if prompts_are_units(program) else "request"


_UPPER, _LOWER = ("<=", "<"), (">=", ">")


def allowed_rate(clause: Clause) -> Fraction | None:
    """Return the allowed rate of units beyond; 0 if no unit may be, None if units do not count."""
    if clause.budget is not None:
        return clause.budget.rate
    formula = clause.require
    if isinstance(formula, HasFields):
        return Fraction(0)
    if isinstance(formula, Quantified):
        return Fraction(0) if formula.quantifier == "forall" else None
    found = threshold(formula)
    return None if found is None else _of_term(*found)


def threshold(formula: Formula) -> tuple[Term, str, Fraction] | None:
    """Return (term, operator, number) of a comparison with a number; None for other formulas."""
    match main_comparison(formula):
        case Compare(op, term, Constant(value)) if not isinstance(term, Constant):
            return term, op, value
        case _:
            return None


def better_of(obligation: Obligation) -> str:
    """Return the better direction of values by the operator: "lower" or "higher"."""
    found = obligation.comparison
    return "higher" if found is not None and found.op in _LOWER else "lower"


def requirement_text(part: Clause, whole: Clause) -> str:
    """Return the text of a part: that of its clause, or of its comparison if the clause has
    several."""
    budget = part.budget
    if budget is not None:
        return f"{whole.text or whole.id}, up to {float(100 * budget.rate):g}% of {budget.unit}"
    comparison = main_comparison(part.require)
    if comparison is None or part.require == whole.require:
        return whole.text or whole.id
    return formula_text(comparison)


def _of_term(term: Term, op: str, tau: Fraction) -> Fraction | None:
    match term:
        case Statistic("max") if op in _UPPER:
            return Fraction(0)
        case Statistic("min") if op in _LOWER:
            return Fraction(0)
        case Statistic("quantile", _, Fraction() as q) if op in _UPPER:
            return 1 - q
        case Statistic("quantile", _, Fraction() as q) if op in _LOWER:
            return q
        case Statistic("rate", Metric(name)) if op in _UPPER and 0 <= tau < 1:
            return tau if _per_request(name) else None
        case Metric("failure_rate") if op in _UPPER and 0 <= tau < 1:
            return tau
        case Metric("determinism") if op in _LOWER and 0 < tau <= 1:
            return 1 - tau
        case Statistic("aggregate", of):
            return _of_term(of, op, tau)
        case Norm():
            return Fraction(0)
        case _:
            return None


def is_mean(clause: Clause) -> bool:
    """Return whether a clause compares one mean of values (or its magnitude) with a number; a rate
    over tokens is one."""
    found = threshold(clause.require)
    if found is None or clause.budget is not None:
        return False
    term = found[0].of if isinstance(found[0], Abs) else found[0]
    match term:
        case Statistic("mean", of):
            return _pointwise(of)
        case Statistic("rate", Metric(name)):
            return not _per_request(name)
        case _:
            return False


@dataclass(frozen=True, slots=True)
class Bounded:
    """A mean of values in a range: the best value, the distance of the threshold from it as a share
    of the range (0 to 1), and the width of the range."""

    best: float
    share: Fraction
    width: float


def bounded_mean(clause: Clause) -> Bounded | None:
    """Return the range of a mean of one metric; None for other terms, for an unbounded range, and
    for a threshold outside it."""
    found = threshold(clause.require)
    if found is None or not is_mean(clause):
        return None
    term, op, tau = found
    inner = term.of if isinstance(term, Statistic) else None
    definition = METRICS.get(inner.name) if isinstance(inner, Metric) else None
    if definition is None or definition.lower is None or definition.upper is None or op == "==":
        return None
    best, distance = definition.lower, tau - definition.lower
    if op in _LOWER:
        best, distance = definition.upper, definition.upper - tau
    width = definition.upper - definition.lower
    share = distance / width
    return Bounded(float(best), share, float(width)) if 0 < share < 1 else None


def _per_request(name: str) -> bool:
    """Return whether a metric is known to have one value per request."""
    definition = METRICS.get(name)
    return definition is not None and definition.counted == "request"


def _pointwise(term: Term) -> bool:
    return all(isinstance(part, Metric | Abs | Arith | Constant) for part in subterms(term))
