"""What a bound on the drift of one row of logits says about each metric of that row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from kcdsl import inequalities
from kcdsl.inequalities import round_up
from kcdsl.ir.terms import Constants
from kcdsl_backends.smt.intervals import Interval


@dataclass(frozen=True, slots=True)
class Premises:
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


def premises(norm: str, bound: float, constants: Constants) -> Premises:
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
    return Premises(norm, bound, width, s, constants.temperature, known)
