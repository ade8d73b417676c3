"""Composition over the steps of a sequence. A per-token bound is never extended silently.

P_L and Q_L are the laws of continuations of length L. The per-step premise is meant for *every*
history that can occur, not for the histories of one recorded sequence alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kcdsl.chain import bounds
from kcdsl.chain.rounding import (
    ChainDomainError,
    outward_up,
    require_finite,
    require_nonnegative,
)

Composition = Literal["coupling", "chain-rule"]


@dataclass(frozen=True, slots=True)
class SequenceTv:
    """A bound on TV(P_L, Q_L), the length L, and how the steps were composed.

    "coupling" is 1 - prod(1 - tau_t); "chain-rule" is the TV of the summed KL. A bound of 1 says
    nothing: it is `vacuous`.
    """

    value: float
    length: int
    composition: Composition

    @property
    def vacuous(self) -> bool:
        """Say whether the bound has reached 1."""
        return self.value >= 1.0


def tv_of_sequence(per_step_tv: float, length: int) -> SequenceTv:
    """Bound TV(P_L, Q_L) by 1 - (1 - tau)^L for TV <= tau at every step after every history."""
    tau = require_nonnegative(per_step_tv, "the total variation of a step")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise ChainDomainError(f"the length is {length!r}; it must be an integer >= 1")
    if tau == 0.0:
        return SequenceTv(0.0, length, "coupling")
    if tau >= 1.0:
        return SequenceTv(1.0, length, "coupling")
    value = -math.expm1(length * math.log1p(-tau))
    return SequenceTv(min(1.0, outward_up(value)), length, "coupling")


def tv_of_steps(per_step_tv: Iterable[float]) -> SequenceTv:
    """Bound TV(P_L, Q_L) by 1 - prod(1 - tau_t) for step bounds tau_t that may differ."""
    steps = require_finite(per_step_tv, "the total variation of a step", at_least=1)
    if min(steps) < 0.0:
        raise ChainDomainError(f"a total variation of {min(steps)!r}")
    if max(steps) == 0.0:
        return SequenceTv(0.0, len(steps), "coupling")
    if max(steps) >= 1.0:
        return SequenceTv(1.0, len(steps), "coupling")
    value = -math.expm1(math.fsum(math.log1p(-tau) for tau in steps))
    return SequenceTv(min(1.0, outward_up(value)), len(steps), "coupling")


def tv_of_summed_kl(per_step_kl: Iterable[float]) -> SequenceTv:
    """Bound TV(P_L, Q_L) through KL(P_L||Q_L) = sum of the expected step KL (chain rule)."""
    steps = require_finite(per_step_kl, "the KL divergence of a step", at_least=1)
    return SequenceTv(bounds.tv_from_kl(kl_of_steps(steps)), len(steps), "chain-rule")


def kl_of_steps(per_step_kl: Iterable[float]) -> float:
    """Bound KL(P_L||Q_L) by the sum of the step bounds."""
    steps = require_finite(per_step_kl, "the KL divergence of a step", at_least=1)
    return _sum_up(steps, "a KL divergence")


def abs_log_ratio_of_steps(spans: Iterable[float]) -> float:
    """Bound |ln(P_L(y)/Q_L(y))| of every continuation y by the sum of the step spans s_t."""
    steps = require_finite(spans, "the span of a step", at_least=1)
    return _sum_up(steps, "a span")


def reward_of_sequence(osc: float, sequence: SequenceTv) -> float:
    """Bound |E_P R - E_Q R| of a sequence reward by osc(R) TV(P_L, Q_L)."""
    width = require_nonnegative(osc, "osc(R)")
    product = width * sequence.value
    return math.nextafter(product, math.inf) if product > 0.0 else product


def _sum_up(values: list[float], what: str) -> float:
    if min(values) < 0.0:
        raise ChainDomainError(f"{what} of {min(values)!r}")
    total = math.fsum(values)
    return math.nextafter(total, math.inf) if total > 0.0 else 0.0
