"""Certified bounds of the metrics of single requests, beside what was measured of them.

A bound of the drift of the logits, token by token, holds for every run of kernels with the claimed
numerics. The bound chain (docs/bound-chain.md) makes of it a bound of every divergence at every
position. What was measured must lie below: else a kernel does not compute as it claims, or the
bound is wrong, and nothing that was measured can be trusted (KC625).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import numpy as np

from kcdsl.chain import bounds, certified_row
from kcdsl.chain.exact import excess
from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.verdict.model import InvalidEvidence
from kcdsl_backends.empirical.measured import Array, Unit
from kcdsl_backends.requests import Request

LOWER_BOUNDS = frozenset({"top1_overlap"})
"""Metrics of which the bound is a lower one; all others are bounded from above."""
MAGNITUDES = frozenset({"log_ratio"})
"""Signed metrics whose size is bounded."""
RELATIVE, ABSOLUTE = 1e-5, 1e-12
"""How far the rounding of a measurement may lie beyond a bound: what docs/metrics.md states of the
fused pass, ten times."""


@dataclass(frozen=True, slots=True)
class Box:
    """Bounds of infer - train, float64 of the shape of the outputs; or `reason`, why none."""

    low: Array
    high: Array
    reason: str | None = None


class ModelBound(Protocol):
    """Bounds the drift of the whole model on one request."""

    @property
    def numerics(self) -> Mapping[str, str]:
        """Return in words what both kernels claim: `train` and `infer`."""
        ...

    def cost(self, request: Request) -> float:
        """Return the expected seconds of `bound`."""
        ...

    def bound(self, request: Request) -> Box:
        """Return the certified bounds of a request."""
        ...


Clock = Callable[[], float]


def certify(
    model: ModelBound,
    requests: Sequence[Request],
    *,
    seconds: float,
    temperature: Fraction,
    encoder: bool,
    clock: Clock,
    progress: Callable[[int, int], None],
) -> dict[str, Unit]:
    """Bound requests, those of least cost first, until `seconds` are spent.

    What would not end in time is not begun. Every request has a unit: with values, or with the
    reason why there are none.
    """
    found: dict[str, Unit] = {}
    start, slower = clock(), 1.0
    order = sorted(requests, key=lambda r: (r.length, r.key))
    for done, request in enumerate(order, 1):
        left, expected = seconds - (clock() - start), slower * model.cost(request)
        if expected > left:
            why = (
                f"it would take about {expected:.2g} s, and {max(left, 0):.2g} s of {seconds:g} s "
                "are left"
            )
            found[request.key] = Unit(request.key, request.length, failure=why)
            continue
        before = clock()
        box = model.bound(request)
        slower = max(slower, (clock() - before) / max(model.cost(request), 1e-9))
        if box.reason is not None:
            found[request.key] = Unit(request.key, request.length, failure=box.reason)
        else:
            values = state_bounds(box) if encoder else logit_bounds(box, temperature)
            found[request.key] = Unit(request.key, request.length, values)
        progress(done, len(order))
    return found


def state_bounds(box: Box) -> dict[str, Array]:
    """Return bounds of the drift of hidden states [T, D], one for each position."""
    size = np.maximum(np.abs(box.low), np.abs(box.high))
    return {"hidden_linf": size.max(axis=1), "hidden_l2": _length(size)}


def logit_bounds(box: Box, temperature: Fraction) -> dict[str, Array]:
    """Return bounds of every metric that the drift of the logits [T, V] bounds, one for each
    position. Each holds for every training policy, since none is read.
    """
    rows = [_row(low, high, temperature) for low, high in zip(box.low, box.high, strict=True)]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _row(low: Array, high: Array, temperature: Fraction) -> dict[str, float]:
    intervals = list(zip(low.tolist(), high.tolist(), strict=True))
    found = certified_row(intervals=intervals, temperature=temperature)
    if isinstance(found, InvalidEvidence):
        raise ValueError(found.reason)
    size = np.maximum(np.abs(low), np.abs(high))
    s, length = found.s, float(_length(size[None])[0])
    return {
        "logit_linf": float(size.max()),
        "logit_span": math.nextafter(float(high.max()) - float(low.min()), math.inf),
        "logit_l2": length,
        "logit_l2_centered": length,
        "kl": found.kl,
        "kl_infer_train": found.kl,
        "jeffreys": found.jeffreys,
        "js": found.js,
        "tv": found.tv,
        "hellinger2": found.hellinger2,
        "chi2_train_infer": found.chi2,
        "chi2_infer_train": found.chi2,
        "log_ratio_linf": s,
        "renyi_inf": s,
        "log_ratio": s,
        "k3": _up(excess(s)),
        "tv_is": _up(bounds.bias_free_clip(s) / 2),
        "prob_absdiff": found.tv,
    }


def _length(size: Array) -> Array:
    found: Array = np.sqrt((size * size).sum(axis=1)) * (1 + 2.0**-40)
    return found


def _up(value: float) -> float:
    return value * (1 + 2.0**-40)


def stable_positions(margins: Array, unit: Unit) -> Array:
    """Return 1 where no drift within the bounds changes the most likely token, else 0.

    The margin of the training kernel must exceed the bound of the span; `logit_span` of `unit`.
    """
    return (margins > unit.values["logit_span"]).astype(np.float64)


def check_measured(key: str, measured: Mapping[str, Array], certified: Unit) -> None:
    """Refuse (KC625) where a measured value lies above its bound, or is not a number."""
    for name in sorted(measured.keys() & certified.values.keys()):
        limit, value = certified.values[name], measured[name]
        if limit.shape != value.shape:
            raise refuse(
                codes.ABOVE_CERTIFIED,
                f"{name}, request {key}: {limit.size} certified bounds for {value.size} values",
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
