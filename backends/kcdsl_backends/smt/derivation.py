"""Clauses that follow from a proved drift of the logits.

A proof bounds the drift of block `model`, whose rows are the logits of one position each;
`kcdsl.inequalities` turns it into a bound on every metric of that position, so on every statistic
over positions of the slice. z3 is asked whether the bounds leave room for a violation of the
clause.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import z3

from kcdsl import inequalities
from kcdsl.inequalities import DomainError, round_up
from kcdsl.ir.formulas import subterms
from kcdsl.ir.obligations import Comparison
from kcdsl.ir.printer import term_text
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Clause,
    Compare,
    Connective,
    Constants,
    Formula,
    HasFields,
    Metric,
    NoFlip,
    Norm,
    Not,
    Number,
    Program,
    Quantified,
    RegionKind,
    Statistic,
    TableValue,
    Term,
)
from kcdsl.logic.relations import Interval, canonical, interval
from kcdsl.model.registry import is_encoder
from kcdsl.verdict.outcome import Implied, ImpliedBound, ProvedDrift
from kcdsl_backends.smt.axioms import number, outward
from kcdsl_backends.smt.predicates import lies_inside
from kcdsl_backends.smt.solver import Outcome, Solver
from kcdsl_backends.smt.translation import Translator
from kcdsl_certs.reals import real_text

# --- bounds of each metric ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowBounds:
    """`span` bounds max dz - min dz, `s` the same of dz/T; `known` bounds the metrics."""

    norm: str
    norm_bound: float
    span: float
    s: float
    temperature: Fraction
    known: dict[str, Interval]


FORMULAS = {
    "tv": "TV <= tanh(s/4)",
    "kl": "KL <= s/(e^s - 1) - 1 + ln((e^s - 1)/s)",
    "jeffreys": "KL(p||q) + KL(q||p) <= s tanh(s/4)",
    "chi2": "chi^2 <= sinh(s/2)^2",
    "hellinger2": "Hellinger^2 <= 1 - sech(s/4)",
    "js": "JS <= (s/4) tanh(s/4) - ln cosh(s/4)",
    "log_ratio": "|ln w| <= s",
    "abs_log_ratio": "|ln w| <= s",
    "w_log_w": "|w ln w| <= s e^s",
    "reward_delta": "|E_p R - E_q R| <= osc(R) tanh(s/4)",
    "grad_bias": "||bias|| <= 2 A_max G tanh(s/4)",
}
"""The step of the chain for each metric of the distributions, for people."""

_SIGNED = ("log_ratio", "w_log_w", "reward_delta")
# norm of the proof -> metric of the logits -> factor
_NORMS = {
    "inf": {"logit_linf": 1.0},
    "2": {"logit_l2": 1.0, "logit_l2_centered": 1.0, "logit_linf": 1.0},
    "span": {},
}


def row_bounds(norm: str, bound: float, constants: Constants) -> RowBounds:
    """Return every bound that follows from `norm(dz) <= bound` for one row.

    Metrics whose constants the contract does not state are left out. Raises DomainError for
    an unknown norm, a bound that is negative or not finite, and T <= 0.
    """
    width = inequalities.span_from_norm(norm, bound)
    s = inequalities.span_from_norm("span", width, constants.temperature)
    limits = {name: inequalities.bound(name, s) for name in inequalities.NAMES if name != "ess"}
    limits["log_ratio"] = limits["abs_log_ratio"]
    limits["logit_span"] = width
    if constants.reward_range is not None and constants.reward_range >= 0:
        limits["reward_delta"] = inequalities.reward(round_up(constants.reward_range), s)
    advantage, score = constants.advantage_max, constants.score_norm_max
    if advantage is not None and score is not None and advantage >= 0 and score >= 0:
        limits["grad_bias"] = inequalities.gradient_bias(round_up(advantage), round_up(score), s)
    for name, factor in _NORMS[norm].items():
        limits[name] = factor * bound
    known = {
        name: Interval(Fraction(-limit if name in _SIGNED else 0), Fraction(limit))
        for name, limit in limits.items()
        if math.isfinite(limit)
    }
    return RowBounds(norm, bound, width, s, constants.temperature, known)


# --- words ----------------------------------------------------------------------------------------


_NORM_TEXT = {"inf": "norm_inf", "2": "norm_2", "span": "span"}
_CONVERSIONS = {"inf": "2 norm_inf", "2": "sqrt(2) norm_2"}


def derivation(
    clause: Clause,
    slice_name: str,
    proof: ProvedDrift,
    bounds: RowBounds,
    used: Sequence[str],
    shown: Sequence[ImpliedBound],
) -> tuple[str, ...]:
    """Return the steps from the proved drift to the clause."""
    drift = f"{_NORM_TEXT[proof.norm]}(drift({proof.block}))"
    steps = [f"{drift} <= {number(bounds.norm_bound)} ({proof.clause_id})"]
    if slice_name != proof.slice:
        steps.append(f"every row of slice {slice_name} is a row of slice {proof.slice}")
    if proof.norm in _CONVERSIONS:
        conversion = _CONVERSIONS[proof.norm]
        steps.append(f"span(drift({proof.block})) <= {conversion} <= {number(bounds.span)}")
    steps.append(f"s = span/T <= {number(bounds.s)} (T = {real_text(bounds.temperature)})")
    for metric in used:
        limit = bounds.known[metric].high
        if limit is not None and metric in FORMULAS:
            steps.append(f"{FORMULAS[metric]} <= {number(float(limit))}")
    for found in shown:
        upper = found.comparison.op in ("<=", "<")
        limit = found.comparison.threshold
        bound = number(found.bound, up=upper, within=limit)
        end = _extreme(found.comparison.quantity, upper=upper)
        middle = "<=" if upper else ">="
        through = f"{middle} {end} " if end else ""
        target = (
            f" {found.comparison.op} {real_text(found.comparison.threshold)}"
            if found.decides
            else ""
        )
        steps.append(f"{found.quantity} {through}{middle} {bound}{target}")
    if len(shown) != 1:
        steps.append(f"hence {clause.text or clause.id}")
    return tuple(steps)


def _extreme(quantity: Term | NoFlip | HasFields, *, upper: bool) -> str | None:
    """Return the extreme that a mean or quantile cannot pass: p99(tv) gives max(tv)."""
    match quantity:
        case Statistic("mean" | "rate" | "quantile", of):
            return term_text(Statistic("max" if upper else "min", of))
        case _:
            return None


# --- derivation -----------------------------------------------------------------------------------


LOGITS_BLOCK = "model"
_OF_EVERY_ROW = (RegionKind.POINTS, RegionKind.BALL, RegionKind.HULL)
"""Regions that hold every request of their slice, however long it is."""
_NEGATED = {"<=": ">", "<": ">=", ">=": "<", ">": "<="}


def derive(
    program: Program, proved: Sequence[ProvedDrift], timeout_ms: int = 2000
) -> tuple[Implied, ...]:
    """Return every empirical clause, per slice, that a proved drift implies, with its chain.

    A proof counts if it is about block `model` of a program whose output is logits, over the rows
    of the clause's slice or of one that is proved to contain it, with a finite bound >= 0 and the
    contract's temperature > 0. A clause is implied if every comparison it needs follows; one that
    holds by the ranges of its metrics alone is not reported, nor is anything the solver leaves
    open. The caller must make sure that the clause's slice has rows. A clause with a table follows
    bucket by bucket.
    """
    program = expand_tables(program)
    usable = [(proof, found) for proof in proved if (found := _usable(program, proof)) is not None]
    usable.sort(key=lambda pair: pair[1].span)
    implied: list[Implied] = []
    for clause in program.clauses:
        if not _is_about_chain(clause.require):
            continue
        for name in clause.slices:
            for proof, bounds in usable:
                if not _covers(program, proof, name, timeout_ms):
                    continue
                if _follows(clause, name, bounds, timeout_ms):
                    implied.append(_implied(clause, name, proof, bounds))
                    break
    return tuple(implied)


def _usable(program: Program, proof: ProvedDrift) -> RowBounds | None:
    """Return what the proof bounds, or None if the chain does not apply to it."""
    if proof.block != LOGITS_BLOCK or is_encoder(program.model.architecture):
        return None
    if proof.region not in _OF_EVERY_ROW or not _declares(program, proof.slice):
        return None
    if isinstance(proof.bound, bool) or not isinstance(proof.bound, (int, float)):
        return None
    if not math.isfinite(proof.bound) or proof.bound < 0:
        return None
    temperature = program.constants.temperature
    if temperature <= 0 or proof.temperature != temperature:
        return None
    try:
        return row_bounds(proof.norm, float(proof.bound), program.constants)
    except DomainError:
        return None


def _declares(program: Program, name: str) -> bool:
    return any(declared.name == name for declared in program.slices)


def _covers(program: Program, proof: ProvedDrift, name: str, timeout_ms: int) -> bool:
    if not _declares(program, name):
        return False
    return lies_inside(program, program.slice(name), program.slice(proof.slice), timeout_ms)


def _follows(clause: Clause, name: str, bounds: RowBounds, timeout_ms: int) -> bool:
    """Ask z3 for a violation within the bounds; it must not exist, and must exist without them."""
    with_bounds = _violation(clause, name, bounds.known, timeout_ms)
    return (
        with_bounds is Outcome.UNSAT
        and _violation(clause, name, {}, timeout_ms) is not Outcome.UNSAT
        and all(_is_consistent(part) for part in _intervals(clause.require, bounds.known))
    )


def _violation(
    clause: Clause, name: str, known: Mapping[str, Interval], timeout_ms: int
) -> Outcome:
    translator = Translator(context=z3.Context(), known=known)
    goal = translator.negation(clause.require, name)
    solver = Solver(translator.context, timeout_ms)
    solver.add(translator.facts())
    return solver.decide(goal)


def _is_consistent(part: Interval) -> bool:
    """Refuse to conclude anything from bounds that exclude each other."""
    return part.low is None or part.high is None or part.low <= part.high


# --- which clauses -------------------------------------------------------------------------------


def _is_about_chain(formula: Formula) -> bool:
    """Say whether the formula compares measured quantities, and nothing else."""
    match formula:
        case Compare(_, left, right):
            return not (_has_norm(left) or _has_norm(right))
        case Not(of):
            return _is_about_chain(of)
        case Connective(_, parts):
            return all(_is_about_chain(part) for part in parts)
        case Quantified() | NoFlip() | HasFields():
            return False


def _has_norm(term: Term) -> bool:
    match term:
        case Norm():
            return True
        case Abs(of) | Statistic(_, of):
            return _has_norm(of)
        case Arith(_, left, right):
            return _has_norm(left) or _has_norm(right)
        case Number() | Metric() | TableValue():
            return False


def comparisons(formula: Formula, negated: bool = False) -> Iterator[Compare]:
    """Yield the comparisons that the formula asks for.

    A negation is carried inwards; that of an equality is dropped.
    """
    match formula:
        case Compare(op, left, right):
            if not negated:
                yield formula
            elif op in _NEGATED:
                yield Compare(_NEGATED[op], left, right, formula.span)
        case Not(of):
            yield from comparisons(of, not negated)
        case Connective("implies", (antecedent, consequent)):
            yield from comparisons(antecedent, not negated)
            yield from comparisons(consequent, negated)
        case Connective(_, parts):
            for part in parts:
                yield from comparisons(part, negated)
        case Quantified(_, _, _, body):
            yield from comparisons(body, negated)
        case NoFlip() | HasFields():
            return


def _intervals(formula: Formula, known: Mapping[str, Interval]) -> Iterator[Interval]:
    for compare in comparisons(formula):
        yield interval(compare.left, known)
        yield interval(compare.right, known)


# --- the result ----------------------------------------------------------------------------------


def _implied(clause: Clause, name: str, proof: ProvedDrift, bounds: RowBounds) -> Implied:
    shown: list[ImpliedBound] = []
    for compare in comparisons(clause.require):
        found = _bound(compare, bounds.known)
        if found is not None and found not in shown:
            shown.append(found)
    used = tuple(
        dict.fromkeys(
            metric
            for compare in comparisons(clause.require)
            for metric in _metrics(compare.left)
            if metric in bounds.known
        )
    )
    return Implied(
        clause_id=clause.id,
        slice=name,
        by=proof.clause_id,
        proof_slice=proof.slice,
        norm=proof.norm,
        norm_bound=float(proof.bound),
        span=bounds.span,
        temperature=bounds.temperature,
        bounds=tuple(shown),
        steps=derivation(clause, name, proof, bounds, used, tuple(shown)),
        assumptions=_assumptions(name, used),
    )


def _bound(compare: Compare, known: Mapping[str, Interval]) -> ImpliedBound | None:
    """Return the end of the term's interval that decides `term op constant`; None without one."""
    if not isinstance(compare.right, Number):
        return None
    where = interval(compare.left, known)
    upper = compare.op in ("<=", "<")
    end = where.high if upper else where.low
    if end is None or compare.op == "==":
        return None
    metrics = tuple(dict.fromkeys(_metrics(compare.left)))
    if not any(metric in known for metric in metrics):
        return None
    return ImpliedBound(
        Comparison(compare.left, compare.op, compare.right.value, compare.right.dimension),
        outward(end, up=upper),
        metrics[0] if len(metrics) == 1 and not _is_compound(compare.left) else None,
    )


def _metrics(term: Term) -> Iterator[str]:
    return (canonical(part.name) for part in subterms(term) if isinstance(part, Metric))


def _is_compound(term: Term) -> bool:
    return any(isinstance(part, Arith) for part in subterms(term))


def _assumptions(name: str, used: Sequence[str]) -> tuple[str, ...]:
    stated = [
        "both kernels keep the numerics they claim",
        "the output of block model is the logits that enter the softmax; nothing (masks, caps, "
        "penalties, truncation) changes them in between",
        "per token, teacher-forced on the rows of the slice; nothing follows for rollouts",
        "about exact real values of the metrics; the rounding of an evaluator is not part of it",
        f"the slice {name} has at least one row",
    ]
    if "reward_delta" in used:
        stated.append(
            "the reward belongs to the next token alone, spans at most reward_range, and its mean "
            "is the expectation under each policy (no sampling error, no rollout)"
        )
    if "grad_bias" in used:
        stated.append(
            "advantages are at most advantage_max in magnitude and scores of the training policy "
            "at most score_norm_max in norm"
        )
    return tuple(stated)
