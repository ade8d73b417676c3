"""Softmax, in every domain (section 5)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl.model.numerics.formats import FORMATS
from kcdsl_backends.drift.affine.adjoint import Adjoint, Window, at
from kcdsl_backends.drift.affine.cases import SCORES, choices, split
from kcdsl_backends.drift.affine.error_bounds import deviations
from kcdsl_backends.drift.affine.kernel import KernelRun, Private
from kcdsl_backends.drift.affine.result_rounding import Result, round_result, stored_format
from kcdsl_backends.drift.affine.tape import PASS, Adjoints, TapeEntry
from kcdsl_backends.drift.boxes import (
    EPS,
    SAFE,
    Box,
    NoBound,
    down,
    exclusive_max,
    exclusive_sums,
    gamma,
    refuse_overflow,
    up,
)
from kcdsl_backends.drift.boxes.rounding import Apart, Rounding
from kcdsl_backends.drift.boxes.state import Rows, SoftmaxState, Step, settle
from kcdsl_backends.drift.linear import LinearPart, LinearRun, linear_deviations
from kcdsl_backends.drift.linear.tape import LINEAR_PASS, Functional, LinearEntry, Noise, Source
from kcdsl_backends.drift.ops.operation import Operation

_FAR = 700.0
"""Beyond this score drift a probability is taken to be 0 or 1 instead of forming exp."""
_NEAR = 2.0**-40
"""More than the relative error of an extremum's place."""


def interval_softmax(step: Step) -> SoftmaxState:
    """Bound the masked softmax of the scores over the last dimension."""
    scores, name = step.operand(0), step.node.name
    mask = step.kernels.mask(step.operand_node(1)) if len(step.node.inputs) > 1 else None
    mask = None if mask is None else mask.expand(step.node.shape)
    if mask is not None and not bool(mask.any(-1).all()):
        raise NoBound(name, "a row of the attention mask admits no column")
    train, infer = probabilities(scores.train, mask), probabilities(scores.infer, mask)
    drift = _drift(train, scores.drift, mask)
    exact = settle(name, train, infer, drift)
    rounding_train = _rounding(scores.train, exact.train, mask, step.kernels.train, scores.apart[0])
    rounding_infer = _rounding(scores.infer, exact.infer, mask, step.kernels.infer, scores.apart[1])
    return SoftmaxState(
        exact,
        _variation(scores.drift, exact.drift, mask),
        rounding_train,
        rounding_infer,
        mask,
        apart=(
            _width(exact.train, rounding_train, step.kernels.train),
            _width(exact.infer, rounding_infer, step.kernels.infer),
        ),
    )


def _width(box: Box, rounding: Tensor, kernel: Rounding) -> Apart:
    """Return how far readings of probabilities in a box may differ from each other."""
    return up(box.hi - box.lo + rounding, 2) if kernel.free else None


def _zero_outside(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else torch.where(mask, x, torch.zeros_like(x))


def _fill(x: Tensor, mask: Tensor | None, value: float) -> Tensor:
    return x if mask is None else torch.where(mask, x, torch.full_like(x, value))


def probabilities(scores: Box, mask: Tensor | None) -> Box:
    """Return the range of p_i = 1 / (1 + Σ_{j≠i} exp(s_j - s_i)) on a box of scores."""
    lo, hi = _fill(scores.lo, mask, -torch.inf), _fill(scores.hi, mask, -torch.inf)
    top = hi.amax(-1, keepdim=True)
    columns = scores.shape[-1]
    farthest = _fill(top - scores.lo, mask, 0.0).amax(-1, keepdim=True).clamp(0, 800)
    relative = up((farthest + columns + 64) * (4 * EPS))
    least = (torch.exp(lo - top) * (1 - relative)).clamp_min(0)
    most = _zero_outside(torch.exp(hi - top) * (1 + relative) + 1e-300, mask)
    above = most / (most + exclusive_sums(least) * (1 - relative))
    below = least / (least + exclusive_sums(most) * (1 + relative) + 1e-300)
    return Box(
        _zero_outside((below * (1 - 8 * EPS) - 1e-300).clamp_min(0), mask),
        _zero_outside((above * (1 + 8 * EPS)).clamp_max(1), mask),
    )


def _moved(p: Tensor, t: Tensor) -> Tensor:
    """Return p' - p = p(1 - p) expm1(t) / ((1 - p) + p exp(t)) for |t| <= 700."""
    t = t.clamp(-_FAR, _FAR)
    return p * (1 - p) * torch.expm1(t) / ((1 - p) + p * torch.exp(t))


def _drift(p: Box, scores: Box, mask: Tensor | None) -> Box:
    """Return the range of p' - p when the scores drift inside a box.

    logit(p'_i) = logit(p_i) + t_i with t_i between d_i - max_{j≠i} d_j and d_i - min_{j≠i} d_j.
    """
    high, low = _fill(scores.hi, mask, -torch.inf), _fill(-scores.lo, mask, -torch.inf)
    most_others, least_others = exclusive_max(high), -exclusive_max(low)
    alone = torch.isinf(most_others)
    t_lo = torch.where(alone, torch.zeros_like(most_others), down(scores.lo - most_others))
    t_hi = torch.where(alone, torch.zeros_like(most_others), up(scores.hi - least_others))
    t_lo, t_hi = torch.minimum(t_lo, t_hi), torch.maximum(t_lo, t_hi)

    def extreme(t: Tensor) -> Tensor:
        """Return f(p, t) at its extremum in p, tanh(t/4); 0 if no p of the box attains it.

        f(p°, t) itself would lose 1 - p°: close to 1, p° rounds to 1.
        """
        place = 1 / (1 + torch.exp((t / 2).clamp(-_FAR, _FAR)))
        attained = (p.lo <= place * (1 + _NEAR)) & (place * (1 - _NEAR) <= p.hi)
        return torch.where(attained, torch.tanh(t / 4), torch.zeros_like(t))

    hi = torch.maximum(_moved(p.lo, t_hi), _moved(p.hi, t_hi))
    lo = torch.minimum(_moved(p.lo, t_lo), _moved(p.hi, t_lo))
    hi = torch.where(t_hi >= 0, torch.maximum(hi, extreme(t_hi)), hi)
    lo = torch.where(t_lo <= 0, torch.minimum(lo, extreme(t_lo)), lo)
    hi = torch.where(t_hi > _FAR, 1 - p.lo, hi)
    lo = torch.where(t_lo < -_FAR, -p.hi, lo)
    slack = 1.0 + 256 * EPS
    hi = torch.where(hi >= 0, hi * slack, hi / slack) + 1e-300
    lo = torch.where(lo <= 0, lo * slack, lo / slack) - 1e-300
    zero = torch.where(alone, 0.0, 1.0).to(hi.dtype)
    return Box(_zero_outside(lo * zero, mask), _zero_outside(hi * zero, mask))


def _variation(scores: Box, probabilities: Box, mask: Tensor | None) -> Tensor:
    """Return a bound of the total variation of every row: min(tanh(R/4), half the l1 norm)."""
    span = up(
        _fill(scores.hi, mask, -torch.inf).amax(-1) - _fill(scores.lo, mask, torch.inf).amin(-1)
    )
    cap = torch.tanh(span / 4) * (1 + 32 * EPS)
    l1 = probabilities.mag().sum(-1) * (0.5 * (1 + 2 * gamma(scores.shape[-1] + 4)))
    return up(torch.minimum(cap, l1) + 1e-300, 2)


def softmax_at_any_length(step: Step, rows: Rows) -> SoftmaxState | None:
    """Bound the softmax over any columns, up to the longest, whose scores lie in one box; None for
    a softmax that is not over columns of the sequence.

    Probabilities are bounded by 0 <= p <= 1 and a row sum of 1 only; their drift and the total
    variation of the row are at most tanh(R/4), R the range of the score drift.
    """
    if len(rows.axes[step.node.name]) != 2:
        return None
    scores, kernels, longest = step.operand(0), step.kernels, rows.longest
    if len(step.node.inputs) > 1 and not bool(kernels.mask(step.operand_node(1)).any(-1).all()):
        raise NoBound(step.node.name, "a row of the attention mask admits no column")
    span = up(scores.drift.hi.amax(-1) - scores.drift.lo.amin(-1))
    variation = up(torch.tanh(span / 4) * (1 + 32 * EPS) + 1e-300, 2).clamp_max(1)
    zero = torch.zeros_like(scores.drift.lo)
    whole = Box(zero, zero + 1)
    drift = Box.around(variation.unsqueeze(-1).expand(zero.shape))
    rounded = [
        relative_error(box, None, kernel, longest, apart)
        for box, kernel, apart in (
            (scores.train, kernels.train, scores.apart[0]),
            (scores.infer, kernels.infer, scores.apart[1]),
        )
    ]
    one = torch.ones_like(rounded[0])
    single, sums = (
        [
            stored_error(theta, one, kernel, columns)
            for theta, kernel in zip(rounded, (kernels.train, kernels.infer), strict=True)
        ]
        for columns in (1, longest)
    )
    return SoftmaxState(
        settle(step.node.name, whole, whole, drift),
        variation,
        single[0].expand(zero.shape),
        single[1].expand(zero.shape),
        None,
        (sums[0], sums[1]),
        (_width(whole, single[0], kernels.train), _width(whole, single[1], kernels.infer)),
    )


def log_error(columns: int, argument: Tensor, kernel: Rounding) -> Tensor:
    """Return Λ: a bound of the error of the logarithm of a computed probability (section 5).

    `argument` bounds the size of the numbers that are rounded before exp is applied.
    """
    attention = kernel.numerics.attention
    tiles = attention.tiles(columns)
    u = kernel.u_function
    exp_error = 2 * attention.exp_ulps * u
    exp_log = exp_error / (1 - exp_error)
    one = u / (1 - u)
    total = 2 * tiles * (u * argument + exp_log + one) + (columns + 8) * one
    stored = FORMATS[attention.probabilities]
    if attention.fused and stored.coarse:
        u_stored = kernel.unit(stored)
        lost = (1 + u_stored) * columns * kernel.faint(stored)
        if lost >= 1:
            return torch.full_like(argument, torch.inf)
        total = total + u_stored / (1 - u_stored) + lost / (1 - lost)
    return up(total, 4)


def _rounding(
    scores: Box, p: Box, mask: Tensor | None, kernel: Rounding, apart: Apart = None
) -> Tensor:
    """Return B: a bound of the distance of a computed and stored probability from the softmax."""
    theta = relative_error(scores, mask, kernel, scores.shape[-1], apart)
    return _zero_outside(stored_error(theta, p.hi, kernel), mask)


def relative_error(
    scores: Box, mask: Tensor | None, kernel: Rounding, columns: int, apart: Apart = None
) -> Tensor:
    """Return Θ [..., rows, 1]: the relative error of a probability before it is stored.

    `apart` bounds the distance of readings of a score from their common score: the readings in the
    sum of a row and in the numerator may differ by twice as much.
    """
    spread = up(
        _fill(scores.hi, mask, -torch.inf).amax(-1, keepdim=True)
        - _fill(scores.lo, mask, torch.inf).amin(-1, keepdim=True)
    )
    argument = spread
    if kernel.numerics.attention.fused:
        largest = _fill(scores.mag(), mask, 0.0).amax(-1, keepdim=True)
        argument = up(spread + 2 * largest, 2)
    log = log_error(columns, argument, kernel)
    if apart is not None:
        log = up(log + 2 * _fill(apart, mask, 0.0).amax(-1, keepdim=True), 2)
    return up(torch.expm1(log) * (1 + 32 * EPS), 2)


def stored_error(theta: Tensor, size: Tensor, kernel: Rounding, columns: int = 1) -> Tensor:
    """Return a bound of the error of this many computed and stored probabilities, `size` in all."""
    stored = FORMATS[kernel.numerics.attention.probabilities]
    faint = columns * 2.0**-120
    formed = size * (1 + theta) + faint
    error = theta * size + faint + kernel.unit(stored) * formed + columns * kernel.faint(stored)
    return up(error, 8)


FARTHEST = 30.0
"""Beyond this score drift nothing is known of a softmax but that it lies between 0 and 1."""
_LOST = 2.0**-900
"""More than what becomes, after the largest drift, of a probability that float64 lost."""


def affine_softmax(run: KernelRun, node: Node) -> None:
    """Append the masked softmax of the scores over the last dimension: numerator, projection.

    Raises:
        NoBound: a row without columns, or a score drift beyond `FARTHEST`.
    """
    index, scores = run.entry(node, 0)
    mask = _mask(run, node, scores)
    p, trust = _softmax(scores.reference, mask)
    columns = p.shape[-1]
    c = (scores.error_bound + (p * scores.error_bound).sum(-1, keepdim=True)) * SAFE
    several = mask & (mask.sum(-1, keepdim=True) > 1)  # one column alone has the probability 1
    read = several.expand(p.shape)
    for floor in run.tape.floors:
        c = torch.where(several, c, 0.0)
        curved = (p * c.square()).sum(-1, keepdim=True)
        needed = ~(c.amax(-1, keepdim=True) <= math.sqrt(run.negligible))
        needed &= ~(curved <= run.small(node, torch.zeros_like(curved)))
        if run.passing(node, index, "deviations", needed, floor):
            c = torch.minimum(c, deviations(run.tape, index, p, needed, floor, read))
    usual = (p * scores.error_bound).sum(-1, keepdim=True)
    # for e minus its mean by the exact probabilities
    c = torch.where(several, c + 4 * trust * (scores.error_bound + usual), 0.0)
    if not bool((c < FARTHEST).all()):
        raise NoBound(node.name, f"a score may drift by more than {FARTHEST:g}")
    low, high = _exponential_remainder(p, c, trust)
    numerator, admitted = p * (c + _rise(c)), _Admitted.by(mask)
    radius = p * (high - low) / 2 + 4 * trust * numerator + gamma(PASS) * p * scores.error_bound
    first = run.tape.add(
        TapeEntry(
            f"{node.name}/numerator",
            torch.zeros_like(p),
            (numerator + radius) * SAFE,
            lambda a: [(index, admitted.read(a.times(p)))],
            p * (low + high) / 2,
            radius * SAFE,
        )
    )
    moved = _largest_change(p, c, trust)
    gathered = numerator + p * numerator.sum(-1, keepdim=True)
    lost = 2 * trust * run.tape.entries[first].error_bound.sum(-1, keepdim=True)
    own = 4 * trust * (p + gathered) + gamma(columns + PASS) * gathered + _LOST

    def project(a: Adjoint) -> Adjoints:
        window = admitted.around(a)
        values, weights = a.on(window), p[at(window)]
        mean = (values * weights).sum(-1, keepdim=True)
        return [(first, Adjoint(values - mean, window, a.shape))]

    high = torch.minimum(((p + moved) * SAFE), torch.ones_like(p))
    again = run.again(node, 0)
    wide = scores.error_bound if again is None else (scores.error_bound + again) * SAFE
    box = Box(scores.reference - wide, scores.reference + wide)
    if not run.rounding.numerics.attention.fused:
        theta = _theta(run, box, mask, again)
        inside = torch.where(mask, theta * high + 2.0**-120, 0.0)
        place = round_result(run, node, Result(p, project, moved, (own + inside) * SAFE))
        _forbid(run, place, mask)
        _balance(run, place, lost)
        _choose(run, place, scores, mask, inside)
        return
    total = Box(torch.zeros_like(high), high)
    rounding = (_rounding(box, total, mask, run.rounding, again) + own) * SAFE
    entry = TapeEntry(node.name, p, (moved + rounding) * SAFE, project, None, rounding)
    refuse_overflow(node.name, entry.size, stored_format(run, node))
    if node.name in run.several:
        run.keep(node, rounding)
        entry = replace(entry, radius=torch.zeros_like(rounding))
    run.computed[node.name] = run.tape.add(entry)
    _forbid(run, run.computed[node.name], mask)
    _balance(run, run.computed[node.name], lost)


def _excess(p: Tensor, c: Tensor, trust: Tensor) -> Tensor:
    """Bound Z - 1 [..., 1], Z = Σ p e^t for |t| <= c with Σ p t = 0: e^t - (1 + λ) t is greatest at
    an end, for every λ; with one c for all, the best λ makes Z <= cosh c."""
    rise, fall = _rise(c), _fall(c)
    least = (p * rise).sum(-1, keepdim=True)
    for usual in ((p * c).sum(-1, keepdim=True), (p * c.square()).sum(-1, keepdim=True).sqrt()):
        tilt = (torch.sinh(usual) - usual) / (usual + 2.0**-500)
        ends = torch.maximum(rise - tilt * c, fall + tilt * c)
        least = torch.minimum(least, (p * ends).sum(-1, keepdim=True))
    return least.clamp_min(0) * (1 + 4 * trust) * SAFE + 2.0**-50 * (p * c).sum(-1, keepdim=True)


def _exponential_remainder(p: Tensor, c: Tensor, trust: Tensor) -> tuple[Tensor, Tensor]:
    """Bound (e^t - 1)/Z - t for |t| <= c and 1 <= Z <= 1 + excess, element by element.

    It is greatest at an end of t, at Z = 1 or the greatest Z, and least where e^t is that Z.
    """
    excess = _excess(p, c, trust)
    kappa = (excess / (1 + excess) * SAFE).clamp_max(1)
    deepest = (-torch.log1p(-kappa) - kappa).clamp_min(0) + 2.0**-46 * kappa
    high = torch.maximum(_rise(c), _fall(c) - kappa * torch.expm1(-c))
    return -torch.minimum(deepest, kappa * c) * SAFE, high * SAFE


def _largest_change(p: Tensor, c: Tensor, trust: Tensor) -> Tensor:
    """Bound the distance of each probability from p if |t| <= c and Σ p t = 0.

    Given one t, the others sum to at least (1 - p) e^(-p t/(1 - p)) (Jensen).
    """
    excess, others = _excess(p, c, trust), exclusive_sums(p)
    most, rest = others * (1 + 4 * trust), others * (1 - 4 * trust)
    shrunk = torch.where(rest > 0, torch.exp(-c / rest) * (1 - 2.0**-40), 0.0)
    rises = most * -torch.expm1(-c / most) / (p * (1 - 4 * trust) + rest * shrunk)
    rises = torch.minimum(rises.nan_to_num(nan=torch.inf), torch.expm1(c))
    falls = torch.exp(-c) * (excess / (1 + excess)) - torch.expm1(-c)
    found = p * torch.maximum(rises, falls) * (1 + 16 * trust) * SAFE * SAFE
    return torch.minimum(found + _LOST, torch.ones_like(p))


def _forbid(run: KernelRun, place: int, mask: Tensor) -> None:
    """Set the errors of the probabilities of masked columns to zero: these are 0 in any format."""
    entry, parts = run.tape.entries[place], run.tape.entries[place].roundings
    assert entry.radius is not None
    nothing = torch.zeros_like(entry.radius)
    run.tape.entries[place] = replace(
        entry,
        error_bound=torch.where(mask, entry.error_bound, nothing),
        radius=torch.where(mask, entry.radius, nothing),
        roundings=None if parts is None else parts.where(mask, nothing),
    )
    private = run.private.get(entry.name)
    if private is not None:
        run.private[entry.name] = Private(torch.where(mask, private.error_bound, nothing))


def _balance(run: KernelRun, place: int, lost: Tensor) -> None:
    """Store a bound of the error of the sum of a row of probabilities: from rounding, plus `lost`,
    as the float64 numbers of the projection sum to 1 only approximately."""
    entry = run.tape.entries[place]
    if entry.name in run.private:
        return
    if entry.kept and entry.centre is None and entry.radius is not None:
        balance = (entry.radius.sum(-1, keepdim=True) + lost) * SAFE
        run.tape.entries[place] = replace(entry, balance=balance)


def _mask(run: KernelRun, node: Node, scores: TapeEntry) -> Tensor:
    if len(node.inputs) < 2:
        return torch.ones(scores.shape, dtype=torch.bool, device=scores.reference.device)
    mask = run.parameters.mask(run.source(node, 1)).expand(scores.shape)
    if not bool(mask.any(-1).all()):
        raise NoBound(node.name, "a row of the attention mask admits no column")
    return mask


@dataclass(frozen=True, slots=True)
class _Admitted:
    """The range of columns that a mask admits in any head, for each row of the last two dimensions;
    the probabilities of all others are zero."""

    columns: int
    starts: list[int]
    stops: list[int]

    @staticmethod
    def by(mask: Tensor) -> _Admitted:
        """Return the columns that a mask [..., rows, columns] admits."""
        some = mask.reshape(-1, *mask.shape[-2:]).any(0)
        places = torch.arange(mask.shape[-1], device=mask.device)
        starts = torch.where(some, places, mask.shape[-1]).amin(-1).tolist()
        stops = (torch.where(some, places, -1).amax(-1) + 1).tolist()
        return _Admitted(mask.shape[-1], starts, stops)

    def read(self, a: Adjoint) -> Adjoint:
        """Return functionals of one row without the columns that are zero."""
        if not a.one_row:
            return a
        row, (start, stop) = a.window[-2][0], a.window[-1]
        least = min(max(start, self.starts[row]), stop)
        most = max(least, min(stop, self.stops[row]))
        values = a.values[..., least - start : most - start]
        return Adjoint(values, (*a.window[:-1], (least, most)), a.shape)

    def around(self, a: Adjoint) -> Window:
        """Return a window around the functionals' own; for one row, with all admitted columns."""
        if not a.one_row:
            return (*a.window[:-1], (0, self.columns))
        row, (start, stop) = a.window[-2][0], a.window[-1]
        return (*a.window[:-1], (min(start, self.starts[row]), max(stop, self.stops[row])))


def _theta(run: KernelRun, scores: Box, mask: Tensor, again: Apart) -> Tensor:
    """Return Θ of a composed softmax: a relative error bound of a computed probability.

    `again`: the numerator and the sum of a row may use separate readings of a score.
    """
    high = torch.where(mask, scores.hi, -torch.inf).amax(-1, keepdim=True)
    low = torch.where(mask, scores.lo, torch.inf).amin(-1, keepdim=True)
    log = log_error(scores.shape[-1], up(high - low), run.rounding)
    if again is not None:
        most = torch.where(mask, again, 0.0).amax(-1, keepdim=True)
        log = (log + again + most) * SAFE
    return torch.expm1(log) * SAFE


def linear_softmax(run: LinearRun, node: Node) -> None:
    """Append the masked softmax over the last dimension: its numerator, and the projection.

    The drift is ∫ J(p_τ) Δs dτ along the line from one kernel's scores to the other's, with J(p) d
    = p∘(d - p·d), and ΣΔp = 0.
    """
    scores, state = run.operand(node, 0), run.known[node.name]
    if not isinstance(state, SoftmaxState):
        raise AssertionError("the interval domain keeps a softmax and its rounding apart")
    shape = scores.reference.shape
    mask = torch.ones(shape, dtype=torch.bool, device=scores.reference.device)
    mask = mask if state.mask is None else state.mask.expand(shape)
    step, _ = scores.drift.midpoint()
    p, trust = _softmax(scores.reference, mask)
    q, _ = _softmax(scores.reference + step / 2, mask)
    e = _within(linear_deviations(run.tape, scores.index, p, "deviation"), mask)
    d = _within(linear_deviations(run.tape, scores.index, q, "drift"), mask)
    # the scores go from those of q by e - step/2 to e + Δ - step/2, centred by q as all is
    e_for_q = _within(linear_deviations(run.tape, scores.index, q, "deviation"), mask)
    half = torch.where(mask, step / 2, 0.0)
    half = torch.where(mask, half - (q * half).sum(-1, keepdim=True), 0.0)
    lost = 2.0**-48 * (half.abs() + step.abs().amax(-1, keepdim=True)) * shape[-1]
    around = (e_for_q.mag() + _on_the_way(d, half) + lost) * SAFE
    for error_bound in (e.mag(), around):
        if not bool((error_bound < FARTHEST).all()):
            raise NoBound(node.name, f"a score may change by more than {FARTHEST:g}")
    e_centre, e_radius = _from_point(p, e, trust)
    d_radius = _from_box(q, d.mag(), around, trust)
    inexact = gamma(LINEAR_PASS)
    first = run.tape.add(
        LinearEntry(
            f"{node.name}/numerator",
            torch.zeros_like(p),
            Box.around((p * e.mag() + e_centre.abs() + e_radius) * SAFE),
            Box.around((q * d.mag() + d_radius) * SAFE),
            lambda f: [(scores.index, _scaled(f, p, q))],
            Noise(
                (e_radius + (inexact + 4 * trust) * _largest_of(scores.deviation)) * SAFE,
                (d_radius + (inexact + 4 * trust) * _largest_of(scores.drift)) * SAFE,
                e_centre,
                None,
            ),
        )
    )
    numerator = run.tape.entries[first]
    columns = shape[-1]

    def project(part: Adjoint | None, weights: Tensor) -> Adjoint | None:
        if part is None:
            return None
        window = (*part.window[:-1], (0, columns))
        values, along = part.on(window), weights[at(window)]
        return Adjoint(values - (values * along).sum(-1, keepdim=True), window, part.shape)

    def vjp(f: Functional) -> list[Source]:
        return [(first, Functional(project(f.deviation, p), project(f.drift, q)))]

    def own(box: Box, weights: Tensor) -> Tensor:
        gathered = box.mag() + weights * box.mag().sum(-1, keepdim=True)
        return ((4 * trust + gamma(columns + LINEAR_PASS)) * gathered + _LOST) * SAFE

    zero = torch.zeros_like(p)
    rounding_train = (state.rounding_train + 4 * trust * p).expand(shape)
    rounding = (state.rounding_train + state.rounding_infer).expand(shape)
    run.append(
        node,
        p,
        vjp,
        LinearPart(zero, (own(numerator.deviation, p) + rounding_train) * SAFE),
        LinearPart(zero, (own(numerator.drift, q) + rounding) * SAFE),
    )


def _on_the_way(d: Box, half: Tensor) -> Tensor:
    """Bound |τ·δ - half| for δ in a box and τ from 0 to 1: it is largest at one of the ends."""
    farthest = torch.maximum((d.hi - half).abs(), (d.lo - half).abs())
    return torch.maximum(half.abs(), farthest)


def _largest_of(box: Box) -> Tensor:
    """Return the largest magnitude of every row, for the error of a sum of probabilities."""
    return box.mag().amax(-1, keepdim=True).expand(box.shape)


def _scaled(f: Functional, p: Tensor, q: Tensor) -> Functional:
    return Functional(
        None if f.deviation is None else f.deviation.times(p),
        None if f.drift is None else f.drift.times(q),
    )


def _within(box: Box, mask: Tensor) -> Box:
    zero = torch.zeros_like(box.lo)
    return Box(torch.where(mask, box.lo, zero), torch.where(mask, box.hi, zero))


def _softmax(scores: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax in float64 and its relative error [..., 1]: exp to 4 ulp, of a rounded
    argument."""
    allowed = scores.masked_fill(~mask, -torch.inf)
    top = allowed.amax(-1, keepdim=True)
    spread = torch.where(mask, top - allowed, 0.0).amax(-1, keepdim=True).clamp_max(800)
    return allowed.softmax(-1), 2.0**-52 * (scores.shape[-1] + 16 + 4 * spread)


def _rise(c: Tensor) -> Tensor:
    """Return e^c - 1 - c, rounded up."""
    return (torch.expm1(c) * (1 + 2.0**-48) - c).clamp_min(0) + 2.0**-47 * c


def _fall(c: Tensor) -> Tensor:
    """Return e^-c - 1 + c, rounded up."""
    return (torch.expm1(-c) * (1 - 2.0**-48) + c).clamp_min(0) + 2.0**-47 * c


def _largest(p: Tensor, c: Tensor, trust: Tensor) -> tuple[Tensor, Tensor]:
    """Return Z̄ >= Σ p e^t for |t| <= c with Σ p t = 0, and how far that sum may be from 0."""
    off = 4 * (trust * p * c).sum(-1, keepdim=True) * SAFE
    return 1 + (p * _rise(c)).sum(-1, keepdim=True) * SAFE + off, off


def _from_point(p: Tensor, t: Box, trust: Tensor) -> tuple[Tensor, Tensor]:
    """Bound p_i(e^t_i/Z - 1 - t_i): centre and radius. Σ p t = 0 up to the error of p."""
    c = t.mag()
    rise = _rise(c)
    largest, off = _largest(p, c, trust)
    kappa = torch.maximum(1 - 1 / largest, off / (1 - off)) * SAFE + 2.0**-52
    grown = c + rise
    return p * rise / 2, (p * (rise / 2 + (kappa + 4 * trust) * (grown + 1)) + _LOST) * SAFE


def _from_box(q: Tensor, moved: Tensor, around: Tensor, trust: Tensor) -> Tensor:
    """Bound p(d_i - p·d) - q(d_i - q·d) for p = q e^w/Z, |w| <= around, |d - q·d| <= moved."""
    largest, off = _largest(q, around, trust)
    least = torch.exp(-around) / largest * (1 - 2.0**-45) * (1 - off)
    away = q * torch.maximum(torch.expm1(around) * (1 + 4 * off), 1 - least) * SAFE + _LOST
    high = torch.minimum(q * torch.exp(around) * (1 + 4 * off) * SAFE + _LOST, torch.ones_like(q))
    away = torch.minimum(away, torch.ones_like(q)) + 4 * trust * q
    return (away * moved + high * (away * moved).sum(-1, keepdim=True)) * SAFE


def _choose(run: KernelRun, place: int, scores: TapeEntry, mask: Tensor, error: Tensor) -> None:
    """Store the probabilities in each case of the scores, for scores known by steps."""
    entry = run.tape.entries[place]
    if entry.ends is None:
        return
    low, high = (
        scores.reference - scores.error_bound * SAFE,
        scores.reference + scores.error_bound * SAFE,
    )
    box = Box(low[None], high[None])
    if scores.ends is not None:
        steps = replace(scores.ends, low=scores.ends.low[None], high=scores.ends.high[None])
        steps = split(steps, entry.reference, min(SCORES, choices(entry.shape)))
        box = Box(steps.low, steps.high)
    formed = probabilities(box, mask).widen(error)
    run.tape.entries[place] = replace(entry, choices=entry.ends.within(formed))


OPERATIONS = {
    "softmax": Operation(
        *(interval_softmax, affine_softmax, linear_softmax, (0,)),
        any_length=softmax_at_any_length,
    )
}
