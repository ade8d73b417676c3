"""Clauses that follow from a proved drift of the logits.

A proof bounds the drift of block `model`, whose rows are the logits of one position each.
`kcdsl.inequalities` turns it into bounds on every metric of a position, and so on every statistic
over positions of the slice. z3 decides whether a violation of the clause is possible within them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import z3

from kcdsl import inequalities
from kcdsl.inequalities import DomainError, round_up
from kcdsl.ir.formulas import subterms, terms_of, walk
from kcdsl.ir.obligations import Comparison, obligations_of
from kcdsl.ir.printer import term_text
from kcdsl.ir.tables import expand_tables
from kcdsl.ir.terms import (
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
    Program,
    RegionKind,
    Statistic,
    Term,
)
from kcdsl.logic.relations import Interval, canonical, interval
from kcdsl.model.registry import is_encoder
from kcdsl.verdict.outcome import Implied, ImpliedBound, ProvedDrift
from kcdsl_backends.smt.axioms import number, outward
from kcdsl_backends.smt.solver import Outcome, Solver, lies_inside
from kcdsl_backends.smt.translation import Translator
from kcdsl_certs.encoding.reals import real_text

# --- bounds of each metric ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Bounds of one row: `span` of max dz - min dz, `s` the same of dz/T, `known` of metrics."""

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
"""The step of the bound chain for each metric of the distributions, as text."""

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
    drift = f"{_NORM_TEXT[proof.norm]}(drift({proof.block}, x))"
    steps = [f"{drift} <= {number(bounds.norm_bound)} ({proof.clause_id})"]
    if slice_name != proof.slice:
        steps.append(f"every row of slice {slice_name} is a row of slice {proof.slice}")
    if proof.norm in _CONVERSIONS:
        conversion = _CONVERSIONS[proof.norm]
        steps.append(f"span(drift({proof.block}, x)) <= {conversion} <= {number(bounds.span)}")
    steps.append(f"s = span/T <= {number(bounds.s)} (T = {real_text(bounds.temperature)})")
    for metric in used:
        limit = bounds.known[metric].high
        if limit is not None and metric in FORMULAS:
            steps.append(f"{FORMULAS[metric]} <= {number(float(limit))}")
    for found in shown:
        op, limit = found.comparison.op, found.comparison.threshold
        upper = op in ("<=", "<")
        bound, middle = number(found.bound, up=upper, within=limit), "<=" if upper else ">="
        end = _extreme(found.comparison.quantity, upper=upper)
        through = f"{middle} {end} " if end else ""
        target = f" {op} {real_text(limit)}" if found.decides else ""
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
"""Regions that contain every request of their slice, of any length."""


def derive(
    program: Program, proved: Sequence[ProvedDrift], timeout_ms: int = 2000
) -> tuple[Implied, ...]:
    """Return every empirical clause, per slice, that a proved drift implies, with its chain.

    A proof counts if it is about block `model` of a program whose output is logits, over the rows
    of the clause's slice or of one that is proved to contain it, with a finite bound >= 0 and the
    contract's temperature > 0. A clause is implied if every comparison it needs follows. Clauses
    that hold by the ranges of their metrics alone, and undecided ones, are not reported. The caller
    ensures that the clause's slice has rows. A clause with a table is derived bucket by bucket.
    """
    program = expand_tables(program)
    usable = [(proof, found) for proof in proved if (found := _usable(program, proof)) is not None]
    usable.sort(key=lambda pair: pair[1].span)
    slices = {declared.name: declared for declared in program.slices}
    implied: list[Implied] = []
    for clause in program.clauses:
        if not _is_about_chain(clause.require):
            continue
        for name in (name for name in clause.slices if name in slices):
            for proof, bounds in usable:
                if not lies_inside(program, slices[name], slices[proof.slice], timeout_ms):
                    continue
                if _follows(clause, name, bounds, timeout_ms):
                    implied.append(_implied(clause, name, proof, bounds))
                    break
    return tuple(implied)


def _usable(program: Program, proof: ProvedDrift) -> RowBounds | None:
    """Return the bounds that follow from a proof; None if the bound chain does not apply to it."""
    if proof.block != LOGITS_BLOCK or is_encoder(program.model.architecture):
        return None
    if proof.region not in _OF_EVERY_ROW:
        return None
    if all(declared.name != proof.slice for declared in program.slices):
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


def _follows(clause: Clause, name: str, bounds: RowBounds, timeout_ms: int) -> bool:
    """Return whether z3 finds a violation without the bounds but none within them.

    Return False for contradictory bounds.
    """
    if _violation(clause, name, bounds.known, timeout_ms) is not Outcome.UNSAT:
        return False
    if _violation(clause, name, {}, timeout_ms) is Outcome.UNSAT:
        return False
    parts = [interval(term, bounds.known) for term in terms_of(clause.require)]
    return all(p.low is None or p.high is None or p.low <= p.high for p in parts)


def _violation(
    clause: Clause, name: str, known: Mapping[str, Interval], timeout_ms: int
) -> Outcome:
    translator = Translator(context=z3.Context(), known=known)
    goal = translator.negation(clause.require, name)
    solver = Solver(translator.context, timeout_ms)
    solver.add(translator.facts())
    return solver.decide(goal)


def _is_about_chain(formula: Formula) -> bool:
    """Return whether the formula compares measured quantities, and nothing else."""
    if any(isinstance(term, Norm) for term in terms_of(formula)):
        return False
    return all(isinstance(part, Compare | Not | Connective) for part in walk(formula))


# --- the result ----------------------------------------------------------------------------------


def _implied(clause: Clause, name: str, proof: ProvedDrift, bounds: RowBounds) -> Implied:
    stated = dict.fromkeys(c for o in obligations_of(clause, name) for c in o.comparisons)
    shown = tuple(found for c in stated if (found := _bound(c, bounds.known)) is not None)
    metrics = dict.fromkeys(metric for c in stated for metric in _metrics(c))
    used = tuple(metric for metric in metrics if metric in bounds.known)
    return Implied(
        clause_id=clause.id,
        slice=name,
        by=proof.clause_id,
        proof_slice=proof.slice,
        norm=proof.norm,
        norm_bound=float(proof.bound),
        span=bounds.span,
        temperature=bounds.temperature,
        bounds=shown,
        steps=derivation(clause, name, proof, bounds, used, shown),
        assumptions=_assumptions(name, used),
    )


def _bound(comparison: Comparison, known: Mapping[str, Interval]) -> ImpliedBound | None:
    """Return the bound of a quantity that decides a comparison; None if there is none."""
    quantity, upper = comparison.quantity, comparison.op in ("<=", "<")
    metrics = dict.fromkeys(_metrics(comparison))
    if isinstance(quantity, NoFlip | HasFields) or not any(metric in known for metric in metrics):
        return None
    where = interval(quantity, known)
    end = where.high if upper else where.low
    if end is None or comparison.op == "==":
        return None
    compound = len(metrics) > 1 or any(isinstance(part, Arith) for part in subterms(quantity))
    return ImpliedBound(
        comparison, outward(end, up=upper), None if compound else next(iter(metrics))
    )


def _metrics(comparison: Comparison) -> Iterator[str]:
    if isinstance(comparison.quantity, NoFlip | HasFields):
        return iter(())
    parts = subterms(comparison.quantity)
    return (canonical(part.name) for part in parts if isinstance(part, Metric))


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
