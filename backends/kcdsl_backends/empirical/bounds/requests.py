"""Certified bounds of the metrics of single requests, and their comparison with measured values.

A bound of the drift of the logits, token by token, holds for every run of kernels with the claimed
numerics. The bound chain (docs/proofs/bound-chain.md) turns it into a bound of every divergence at
every position. A measured value must lie below its bound: else a kernel does not compute as it
claims, or the bound is wrong, and no measurement can be trusted (KC625).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from kcdsl import inequalities
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.inequalities import excess
from kcdsl.verdict.quantities import quantity, stated
from kcdsl_backends.empirical.table.evidence import Array, BlockComparison, RequestRun, SamplingUnit
from kcdsl_backends.empirical.table.requirements import norm_name
from kcdsl_backends.requests import Request

LOWER_BOUNDS = frozenset({"top1_overlap", "jaccard1", "stable_fraction"})
"""Metrics that are bounded from below; all others are bounded from above."""
MAGNITUDES = frozenset({"log_ratio", "k1"})
"""Signed metrics whose magnitude is bounded."""
RELATIVE, ABSOLUTE = 1e-5, 1e-12
"""Tolerances for the rounding of a measured value beyond its bound: ten times those that
docs/reference/metrics.md states of the fused pass."""


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """Bounds of infer - train, float64 of the shape of the outputs; or the `reason` for none."""

    low: Array
    high: Array
    reason: str | None = None

    def meet(self, other: RequestBounds) -> RequestBounds:
        """Return the intersection with other bounds. Raises AssertionError if it is empty."""
        low, high = np.maximum(self.low, other.low), np.minimum(self.high, other.high)
        if not bool((low <= high).all()):
            raise AssertionError("two certified bounds of one drift exclude each other")
        return RequestBounds(low, high)


class ModelBound(Protocol):
    """Bounds the drift of the whole model on one request."""

    @property
    def numerics(self) -> Mapping[str, str]:
        """Return the claimed numerics of both kernels in words: `train` and `infer`."""
        ...

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the names of the domains, the cheapest first and the sharpest last."""
        ...

    def cost(self, request: Request, domain: int) -> float:
        """Return the expected seconds of `bound`."""
        ...

    def bound(self, request: Request, domain: int) -> RequestBounds:
        """Return the certified bounds of a request in one of the domains."""
        ...


Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Certificates:
    """One unit for every request: bounds, or the reason why there are none. `domains` names, for
    every request with bounds, the sharpest domain that they come from."""

    units: dict[str, SamplingUnit] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)


def certify(
    model: ModelBound,
    requests: Sequence[Request],
    *,
    seconds: float,
    temperature: Fraction,
    encoder: bool,
    clock: Clock,
    progress: Callable[[int, int], None],
) -> Certificates:
    """Bound requests until `seconds` are spent: those of least cost first, and all of them in the
    cheapest domain before any in a sharper one, unless there is time for all in the sharpest.

    A bound that would not end in time is not begun. Bounds of several domains are intersected.
    """
    search = _Search(model, clock, clock() + seconds, seconds)
    order = sorted(requests, key=lambda r: (r.length, r.key))
    levels = range(len(model.domains))
    if sum(model.cost(request, levels[-1]) for request in order) <= seconds:
        levels = levels[-1:]
    for turn, level in enumerate(levels):
        slower: float | None = None
        for done, request in enumerate(order, 1):
            slower = search.bound(request, level, slower)
            progress(turn * len(order) + done, len(levels) * len(order))
    found = Certificates(domains=search.domains)
    for request in order:
        box = search.boxes.get(request.key)
        if box is None:
            why = search.reasons[request.key]
            found.units[request.key] = SamplingUnit(request.key, request.length, failure=why)
        else:
            values = state_bounds(box) if encoder else logit_bounds(box, temperature)
            found.units[request.key] = SamplingUnit(request.key, request.length, values)
    return found


@dataclass(slots=True)
class _Search:
    """The bounds found so far; `deadline` is a time of `clock`."""

    model: ModelBound
    clock: Clock
    deadline: float
    seconds: float
    boxes: dict[str, RequestBounds] = field(default_factory=dict)
    domains: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def bound(self, request: Request, level: int, slower: float | None) -> float | None:
        """Bound a request if that ends in time; return the largest ratio of actual to expected
        time.

        `slower` is the ratio returned for the request before in the same domain; None before any.
        """
        key, cost = request.key, self.model.cost(request, level)
        before = self.clock()
        left, expected = self.deadline - before, cost * (1.0 if slower is None else slower)
        if expected > left:
            self.reasons[key] = (
                f"it would take about {quantity(float(f'{expected:.2g}'), 's', 2)}, and "
                f"{quantity(max(left, 0), 's', 2)} of {stated(self.seconds, 's')} are left"
            )
            return slower
        box = self.model.bound(request, level)
        if box.reason is not None:
            self.reasons[key] = box.reason
        else:
            known = self.boxes.get(key)
            self.boxes[key] = box if known is None else known.meet(box)
            self.domains[key] = self.model.domains[level]
        took = (self.clock() - before) / max(cost, 1e-9)
        return took if slower is None else max(slower, took)


def state_bounds(box: RequestBounds) -> dict[str, Array]:
    """Return bounds of the drift of hidden states [T, D], one for each position."""
    size = np.maximum(np.abs(box.low), np.abs(box.high))
    return {"hidden_linf": size.max(axis=1), "hidden_l2": _row_norms(size)}


def logit_bounds(box: RequestBounds, temperature: Fraction) -> dict[str, Array]:
    """Return bounds of every metric that the drift of the logits [T, V] bounds, one for each
    position. Each holds for every training policy, since none is read.
    """
    rows = [_row(low, high, temperature) for low, high in zip(box.low, box.high, strict=True)]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _row(low: Array, high: Array, temperature: Fraction) -> dict[str, float]:
    intervals = list(zip(low.tolist(), high.tolist(), strict=True))
    s = inequalities.span_from_intervals(intervals, temperature)
    size = np.maximum(np.abs(low), np.abs(high))
    length = float(_row_norms(size[None])[0])
    kl, chi2, tv = (inequalities.bound(name, s) for name in ("kl", "chi2", "tv"))
    return {
        "logit_linf": float(size.max()),
        "logit_span": math.nextafter(float(high.max()) - float(low.min()), math.inf),
        "logit_l2": length,
        "logit_l2_centered": length,
        "kl": kl,
        "kl_infer_train": kl,
        "jeffreys": inequalities.jeffreys(s),
        "js": inequalities.js(s),
        "tv": tv,
        "hellinger2": inequalities.hellinger2(s),
        "chi2_train_infer": chi2,
        "chi2_infer_train": chi2,
        "log_ratio_linf": s,
        "renyi_inf": s,
        "prob_absdiff": tv,
        "binary_tv": tv,
        **_of_one_token(s),
    }


def _of_one_token(s: float) -> dict[str, float]:
    """Return bounds of functions of ln w at a token, |ln w| <= s: each is largest where w = e^s."""
    more = inequalities.bias_free_clip(s)  # e^s - 1
    return {
        "log_ratio": s,
        "k1": s,
        "k2": _up(s * s / 2),
        "k3": _up(excess(s)),
        "w_log_w": inequalities.w_log_w(s),
        "w_log_w_minus": _up((1 + more) * excess(-s)),
        "tv_is": _up(more / 2),
        "importance_ratio": _up(1 + more),
        "mult_prob_error": _up(1 + more),
        "is_variance_inflation": _up((1 + more) * (1 + more)),
        "chi2_token": _up(more * (2 + more)),
        "chi2_is": _up(more * more),
    }


def _row_norms(size: Array) -> Array:
    found: Array = np.sqrt((size * size).sum(axis=1)) * (1 + 2.0**-40)
    return found


def _up(value: float) -> float:
    return value * (1 + 2.0**-40)


def agreement_bounds(margins: Array, unit: SamplingUnit) -> dict[str, Array]:
    """Return bounds of the metrics of the most likely token, one for each position.

    The token cannot change where the margin of the training kernel exceeds the bound of the span.
    """
    stable = (margins > unit.values["logit_span"]).astype(np.float64)
    return {
        "top1_overlap": stable,
        "jaccard1": stable,
        "top1_flip": 1.0 - stable,
        "stable_fraction": (margins > 2 * unit.values["logit_linf"]).astype(np.float64),
    }


def check_measured(key: str, measured: Mapping[str, Array], certified: SamplingUnit) -> None:
    """Raise Refusal (KC625) if a measured value is beyond its bound or is not a number."""
    for name in sorted(measured.keys() & certified.values.keys()):
        limit, value = certified.values[name], measured[name]
        if limit.shape != value.shape:
            raise refuse(
                codes.ABOVE_CERTIFIED,
                f"{name}, request {key}: {limit.size} certified bounds for {value.size} values",
                help="report it: the request was bounded for another length than it has; "
                "--bound-seconds 0 leaves these bounds out",
            )
        if name in MAGNITUDES:
            value = np.abs(value)
        slack = RELATIVE * np.abs(limit) + ABSOLUTE
        inside = value >= limit - slack if name in LOWER_BOUNDS else value <= limit + slack
        if bool(inside.all()):
            continue
        row = int(np.flatnonzero(~inside)[0])
        side = "below" if name in LOWER_BOUNDS else "above"
        raise refuse(
            codes.ABOVE_CERTIFIED,
            f"{name}, request {key}: the measured {value[row]:.6g} of token {row} is {side} the "
            f"certified {limit[row]:.6g}",
            notes=(f"{int((~inside).sum())} of {value.size} positions are beyond their bound",),
            help="a kernel does not compute as its numerics claim, or the bound is wrong; "
            "correct the numerics of the kernels, or report the contract and the checkpoint",
        )


# --- bounding ------------------------------------------------------------------------------------


def compared_name(block: str) -> str:
    """Return the name of the pair (largest measured drift, largest certified drift) of a block."""
    return f"compared[{block}]"


def certified_units(
    model: ModelBound | None,
    requests: Sequence[Request],
    runs: Mapping[str, RequestRun],
    comparisons: Mapping[str, Sequence[BlockComparison]],
    *,
    seconds: float,
    temperature: Fraction,
    encoder: bool,
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Clock = time.monotonic,
) -> tuple[dict[str, SamplingUnit], dict[str, Any]]:
    """Return the bounds of every request that ran, and the description of their numerics.

    `model` bounds the whole model within `seconds`, None for no such bounds; `comparisons` holds
    the comparisons by block. Raises Refusal (KC625) if a measured value is beyond its bound.
    """
    certificates = Certificates()
    if model is not None and seconds > 0:
        certificates = certify(
            model,
            [r for r in requests if runs[r.key].unit.failure is None],
            seconds=seconds,
            temperature=temperature,
            encoder=encoder,
            clock=clock,
            progress=progress,
        )
    found = certificates.units
    for key, unit in found.items():
        measured = runs[key].unit.values
        if "margin" in measured and "logit_span" in unit.values:
            agreement = agreement_bounds(measured["margin"], unit)
            found[key] = replace(unit, values={**unit.values, **agreement})
        check_measured(key, measured, found[key])
    for block, compared in comparisons.items():
        for item in compared:
            unit = found.setdefault(item.request, SamplingUnit(item.request, 0))
            values: dict[str, Array] = {
                compared_name(block): np.array([item.measured, item.certified]),
                norm_name(block, "inf"): np.array([item.certified]),
                norm_name(block, "span"): np.array([2.0 * item.certified]),
            }
            found[item.request] = replace(unit, values={**unit.values, **values})
    return found, _description(model, seconds, certificates)


def _description(model: ModelBound | None, seconds: float, found: Certificates) -> dict[str, Any]:
    """Return the numerics that the bounds hold for, and which domain bounded which requests."""
    if model is None:
        return {"reason": "no certified bounds of the whole model were sought"}
    about: dict[str, Any] = {"numerics": dict(model.numerics), "seconds": seconds}
    if seconds <= 0:
        about["reason"] = "no time was given to bounds of the whole model"
    by_domain = {
        words: [key for key, own in found.domains.items() if own == words]
        for words in model.domains
    }
    about["domains"] = {words: keys for words, keys in by_domain.items() if keys}
    return about
