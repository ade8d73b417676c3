"""The certified column of one row: every number recomputable from s, T and stated constants."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
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
from kcdsl.chain.specific import specific_row
from kcdsl.verdict.model import InvalidEvidence


@dataclass(frozen=True, slots=True)
class CertifiedRow:
    """Bounds for one next-token distribution. All are upper bounds but `ess`.

    `reward`, `grad_bias` and `top1_stable` are None where the constants or the row they need were
    not given. `tv_rule` and `kl_rule` say whether the bound is generic or uses p. `log_ratio`
    bounds ln(q/p) of every class where the training logits are known or boxed.
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
    log_ratio: tuple[tuple[float, float], ...] | None = None


def certified_row(
    *,
    s: float | None = None,
    intervals: Sequence[tuple[float, float]] | None = None,
    temperature: float | Fraction = 1,
    p: Sequence[float] | None = None,
    logits: Sequence[float] | None = None,
    logit_intervals: Sequence[tuple[float, float]] | None = None,
    osc: float | None = None,
    amax: float | None = None,
    g: float | None = None,
) -> CertifiedRow | InvalidEvidence:
    """Return every bound of the chain for one row, or why there is none.

    Exactly one of `s` (a bound on span(dz)/T) and `intervals` ([lo_i, hi_i] for each dz_i, in
    logits) is given. `p` [V] is the training distribution, which sharpens `tv` and `kl`; `logits`
    [V] are the training logits, or `logit_intervals` boxes of them, which sharpen every bound and
    decide `top1_stable`. `osc` is max R - min R, `amax` and `g` bound the advantage and the score
    norm. NaN, infinities, T <= 0, V < 2, misaligned and contradictory
    input give InvalidEvidence, never a number.
    """
    try:
        boxes = _boxes(logits, logit_intervals)
        return _certified(s, intervals, temperature, p, boxes, osc, amax, g)
    except ChainDomainError as error:
        return InvalidEvidence(str(error))


def _certified(
    s: float | None,
    intervals: Sequence[tuple[float, float]] | None,
    temperature: float | Fraction,
    p: Sequence[float] | None,
    boxes: Sequence[tuple[float, float]] | None,
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
    lengths = {len(row) for row in (p, boxes, intervals) if row is not None}
    if len(lengths) > 1:
        raise ChainDomainError(f"misaligned rows of {sorted(lengths)} classes")
    if (amax is None) != (g is None):
        raise ChainDomainError("the gradient bias needs both the advantage and the score norm")
    tv, kl = _box("tv", p, reach), _box("kl", p, reach)
    generic = CertifiedRow(
        s=reach,
        temperature=exact_temperature,
        tv=tv.value,
        kl=kl.value,
        jeffreys=bounds.jeffreys(reach),
        chi2=bounds.chi2(reach),
        ess=bounds.ess(reach),
        js=bounds.js(reach),
        hellinger2=bounds.hellinger2(reach),
        abs_log_ratio=bounds.abs_log_ratio(reach),
        w_log_w=bounds.w_log_w(reach),
        bias_free_clip=bounds.bias_free_clip(reach),
        top1_stable=_top1_stable(reach, intervals, exact_temperature, p, boxes),
        tv_rule=tv.rule,
        kl_rule=kl.rule,
    )
    row = generic if boxes is None else _by_classes(generic, boxes, intervals)
    return replace(
        row,
        reward=None if osc is None else _product(osc, row.tv),
        grad_bias=None if amax is None or g is None else _product(amax, g, 2.0 * row.tv),
    )


def sharpest(rows: Sequence[CertifiedRow]) -> CertifiedRow:
    """Return the least of every bound of rows that speak of the same two policies.

    Raises ChainDomainError for no rows, and for rows of different temperatures.
    """
    if not rows or len({row.temperature for row in rows}) > 1:
        raise ChainDomainError("no rows, or rows of different temperatures")
    by_tv = min(rows, key=lambda row: row.tv)
    by_kl = min(rows, key=lambda row: row.kl)
    stable = [row.top1_stable for row in rows if row.top1_stable is not None]
    ratios = [row.log_ratio for row in rows if row.log_ratio is not None]
    least = {
        name: min(getattr(row, name) for row in rows)
        for name in ("s", *_SHARPENED, "bias_free_clip")
    }
    return replace(
        rows[0],
        **least,
        ess=max(row.ess for row in rows),
        reward=_known_least([row.reward for row in rows]),
        grad_bias=_known_least([row.grad_bias for row in rows]),
        top1_stable=any(stable) if stable else None,
        tv_rule=by_tv.tv_rule,
        kl_rule=by_kl.kl_rule,
        log_ratio=_met(ratios) if ratios else None,
    )


def _known_least(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


def _met(
    rows: Sequence[tuple[tuple[float, float], ...]],
) -> tuple[tuple[float, float], ...]:
    if len({len(row) for row in rows}) > 1:
        raise ChainDomainError("rows of different numbers of classes")
    return tuple(
        (max(low for low, _ in ends), min(high for _, high in ends))
        for ends in zip(*rows, strict=True)
    )


def _boxes(
    logits: Sequence[float] | None, intervals: Sequence[tuple[float, float]] | None
) -> Sequence[tuple[float, float]] | None:
    if logits is not None and intervals is not None:
        raise ChainDomainError("give either the training logits or boxes of them")
    return intervals if logits is None else [(value, value) for value in logits]


def _by_classes(
    row: CertifiedRow,
    boxes: Sequence[tuple[float, float]],
    intervals: Sequence[tuple[float, float]] | None,
) -> CertifiedRow:
    """Return the row with the least of its bounds and of those class by class."""
    if intervals is None:
        if math.isinf(row.s):
            return row
        # a common shift is free: a span s in units of T is a drift within ±sT/2
        half = round_up(Fraction(row.s) * row.temperature / 2)
        intervals = [(-half, half)] * len(boxes)
    found = specific_row(boxes, intervals, row.temperature)
    return replace(
        row,
        **{name: min(getattr(row, name), getattr(found, name)) for name in _SHARPENED},
        ess=max(row.ess, found.ess),
        tv_rule="classes" if found.tv < row.tv else row.tv_rule,
        kl_rule="classes" if found.kl < row.kl else row.kl_rule,
        bias_free_clip=min(row.bias_free_clip, bounds.bias_free_clip(found.abs_log_ratio)),
        log_ratio=found.log_ratio,
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
    boxes: Sequence[tuple[float, float]] | None,
) -> bool | None:
    if boxes is not None:
        low, high = [lo for lo, _ in boxes], [hi for _, hi in boxes]
        top = max(range(len(low)), key=low.__getitem__)
        worst = [low[k] if k == top else high[k] for k in range(len(low))]
        if any(value >= worst[top] for k, value in enumerate(worst) if k != top):
            return False
        if intervals is not None:
            return stable_under_intervals(worst, intervals)
        return stable_under_span(worst, round_up(Fraction(s) * temperature))
    if p is not None:
        first, second = sorted(require_finite(p, "p", at_least=2))[:-3:-1]
        return math.log(first / max(second, _FAINT)) * (1.0 - 1e-12) - 1e-15 > s
    return None


_FAINT = 2.0**-1000
"""Probabilities below it, and those of zero, may be roundings of any that are not above it."""
_SHARPENED = (
    *("tv", "kl", "jeffreys", "chi2", "js", "hellinger2"),
    *("abs_log_ratio", "w_log_w"),
)
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
