"""The certified column of one row: every number recomputable from s, T and stated constants."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

from kcdsl.chain import bounds
from kcdsl.chain.box import BoxBound, Rule, bound_box
from kcdsl.chain.exact import ExactRow
from kcdsl.chain.rank import stable_under_intervals, stable_under_span
from kcdsl.chain.rounding import (
    ChainDomainError,
    require_finite,
    require_nonnegative,
    require_temperature,
    round_up,
)
from kcdsl.verdict.model import InvalidEvidence


@dataclass(frozen=True, slots=True)
class CertifiedRow:
    """Bounds for one next-token distribution. All are upper bounds but `ess`.

    `reward`, `grad_bias` and `top1_stable` are None where the constants or the row they need were
    not given. `tv_rule` and `kl_rule` say whether the bound is generic or uses p.
    """

    s: float
    temperature: Fraction
    tv: float
    kl: float
    jeffreys: float
    chi2: float
    ess: float
    js: float
    hellinger2: float
    abs_log_ratio: float
    w_log_w: float
    bias_free_clip: float
    reward: float | None = None
    grad_bias: float | None = None
    top1_stable: bool | None = None
    tv_rule: Rule = "generic"
    kl_rule: Rule = "generic"


def certified_row(
    *,
    s: float | None = None,
    intervals: Sequence[tuple[float, float]] | None = None,
    temperature: float | Fraction = 1,
    p: Sequence[float] | None = None,
    logits: Sequence[float] | None = None,
    osc: float | None = None,
    amax: float | None = None,
    g: float | None = None,
) -> CertifiedRow | InvalidEvidence:
    """Return every bound of the chain for one row, or why there is none.

    Exactly one of `s` (a bound on span(dz)/T) and `intervals` ([lo_i, hi_i] for each dz_i, in
    logits) is given. `p` [V] is the training distribution, `logits` [V] the training logits; they
    sharpen `tv` and `kl`, and decide `top1_stable`. `osc` is max R - min R, `amax` and `g` bound
    the advantage and the score norm. NaN, infinities, T <= 0, V < 2, misaligned and contradictory
    input give InvalidEvidence, never a number.
    """
    try:
        return _certified(s, intervals, temperature, p, logits, osc, amax, g)
    except ChainDomainError as error:
        return InvalidEvidence(str(error))


def _certified(
    s: float | None,
    intervals: Sequence[tuple[float, float]] | None,
    temperature: float | Fraction,
    p: Sequence[float] | None,
    logits: Sequence[float] | None,
    osc: float | None,
    amax: float | None,
    g: float | None,
) -> CertifiedRow:
    exact_temperature = require_temperature(temperature)
    if (s is None) == (intervals is None):
        raise ChainDomainError("give either s or the intervals of the drift")
    if intervals is not None:
        reach = bounds.span_from_intervals(intervals, exact_temperature)
    else:
        reach = require_nonnegative(math.nan if s is None else s, "s")
    lengths = {len(row) for row in (p, logits, intervals) if row is not None}
    if len(lengths) > 1:
        raise ChainDomainError(f"misaligned rows of {sorted(lengths)} classes")
    if (amax is None) != (g is None):
        raise ChainDomainError("the gradient bias needs both the advantage and the score norm")
    tv, kl = _box("tv", p, reach), _box("kl", p, reach)
    tight = tv.value
    return CertifiedRow(
        s=reach,
        temperature=exact_temperature,
        tv=tight,
        kl=kl.value,
        jeffreys=bounds.jeffreys(reach),
        chi2=bounds.chi2(reach),
        ess=bounds.ess(reach),
        js=bounds.js(reach),
        hellinger2=bounds.hellinger2(reach),
        abs_log_ratio=bounds.abs_log_ratio(reach),
        w_log_w=bounds.w_log_w(reach),
        bias_free_clip=bounds.bias_free_clip(reach),
        reward=None if osc is None else _product(osc, tight),
        grad_bias=None if amax is None or g is None else _product(amax, g, 2.0 * tight),
        top1_stable=_top1_stable(reach, intervals, exact_temperature, p, logits),
        tv_rule=tv.rule,
        kl_rule=kl.rule,
    )


def _box(name: str, p: Sequence[float] | None, s: float) -> BoxBound:
    if p is None:
        return BoxBound(bounds.bound(name, s), "generic")
    # s/2 is exact unless it underflows; the next float covers that.
    half = s / 2.0 if s > 1e-300 or s == 0.0 else math.nextafter(s / 2.0, math.inf)
    box = bound_box(name, p, half)
    generic = bounds.bound(name, s)
    return box if box.value < generic else BoxBound(generic, "generic")


def _product(*factors: float) -> float:
    value = 1.0
    for factor in factors:
        value *= require_nonnegative(factor, "a constant of the chain")
        value = math.nextafter(value, math.inf) if value > 0.0 else value
    if value == 0.0 and all(factor > 0.0 for factor in factors):
        return 5e-324
    return value


def _top1_stable(
    s: float,
    intervals: Sequence[tuple[float, float]] | None,
    temperature: Fraction,
    p: Sequence[float] | None,
    logits: Sequence[float] | None,
) -> bool | None:
    if logits is not None and intervals is not None:
        return stable_under_intervals(logits, intervals)
    if logits is not None:
        return stable_under_span(logits, round_up(Fraction(s) * temperature))
    if p is not None:
        first, second = sorted(require_finite(p, "p", at_least=2))[:-3:-1]
        if second <= 0.0:
            return first > 0.0
        return math.log(first / second) * (1.0 - 1e-12) - 1e-15 > s
    return None


_MEASURED = tuple(
    f.name for f in fields(CertifiedRow) if f.name in {g.name for g in fields(ExactRow)}
)


def measured_beyond_certified(
    certified: CertifiedRow, measured: ExactRow, *, relative: float = 1e-9, absolute: float = 1e-12
) -> tuple[str, ...]:
    """Return the quantities whose measured value lies beyond the certified bound.

    The slack covers the rounding of the measurement. Anything returned is a defect of the proof,
    of the kernels' claimed numerics or of the measurement: the run must stop. A measured NaN is
    returned too.
    """
    beyond = []
    for name in _MEASURED:
        value, limit = getattr(measured, name), getattr(certified, name)
        if name == "ess":
            inside = value >= limit * (1.0 - relative) - absolute
        else:
            inside = value <= limit * (1.0 + relative) + absolute
        if not inside:
            beyond.append(name)
    return tuple(beyond)


def tightness(certified: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Return certified / measured for each common name; +inf where nothing was measured but 0."""
    return {
        name: math.inf if measured[name] == 0.0 else certified[name] / measured[name]
        for name in certified
        if name in measured
    }
