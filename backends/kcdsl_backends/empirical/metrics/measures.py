"""The functions of metrics, by the arrays that they read.

`kcdsl.metrics` defines the metrics; a definition names its function and the arrays it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
from torch import Tensor

from kcdsl.metrics import MEASURES, METRICS, RECORDED, MetricDefinition
from kcdsl.metrics.definition import ABSOLUTE_MEAN, LOGS, RATIO_LOG, STATES, TOPS
from kcdsl_backends.empirical.statistics.estimates import Array, NotMeasurable


@cache
def function_of(metric: MetricDefinition) -> Callable[..., Any]:
    """Return the function of a metric's arrays; raise KeyError if it has none."""
    if callable(metric.entry):
        return metric.entry
    module, colon, name = metric.entry.partition(":")
    if not colon:
        raise KeyError(metric.name)
    found: Callable[..., Any] = getattr(import_module(f"{__package__}.{module}"), name)
    return found


def _functions_of(reads: tuple[str, ...], per: str) -> Mapping[str, Callable[..., Any]]:
    """Return the functions that read these arrays and give one value per token, request or
    slice."""
    return {m.name: function_of(m) for m in METRICS.values() if m.reads == reads and m.per == per}


SAMPLED_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = _functions_of((RATIO_LOG,), "token")
"""Functions of ln w [N] at tokens sampled from the inference kernel."""
PROBABILITY_FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = _functions_of(
    LOGS, "token"
)
"""Functions of ln p and ln q [N] at tokens sampled from the inference kernel."""
SEQUENCE_FUNCTIONS: Mapping[str, Callable[[Array], float]] = _functions_of((RATIO_LOG,), "request")
"""Functions of ln w [N] of one sequence."""
SEQUENCE_LOG_FUNCTIONS: Mapping[str, Callable[[Array, Array], float]] = _functions_of(
    LOGS, "request"
)
"""Functions of ln p and ln q [N] of one sequence."""
STATE_FUNCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    **_functions_of(STATES, "token"),
    **_functions_of(STATES, "request"),
}
"""Functions of the last hidden states [T, D] of both kernels."""
LIST_METRICS: Mapping[str, tuple[Callable[..., Array], int]] = {
    name: (function, METRICS[name].depth) for name, function in _functions_of(TOPS, "token").items()
}
"""Functions of two lists [N, k] of the likeliest tokens, with the depth that they read."""
TEXT_FUNCTIONS: Mapping[str, tuple[str, Callable[[Array], float]]] = {
    m.name: (m.reads[0], function_of(m))
    for m in MEASURES.values()
    if m.per == "request" and len(m.reads) == 1 and m.reads[0] in MEASURES
}
"""Metrics of whole requests: the metric of positions that each is computed from, and the
function."""


@dataclass(frozen=True, slots=True)
class SliceMetric:
    """One number of a slice as a function of arrays of its requests."""

    inputs: tuple[str, ...]
    function: Callable[..., float]

    def of(self, requests: Sequence[Sequence[Array]]) -> float:
        """Return the value of requests, each given by its arrays in the order of `inputs`.

        Raises NotMeasurable if they have none.
        """
        if not requests:
            raise NotMeasurable("there are no values")
        return self.function(*(np.concatenate(parts) for parts in zip(*requests, strict=True)))


def _aggregates(metrics: Mapping[str, MetricDefinition]) -> Mapping[str, SliceMetric]:
    return {
        m.name: SliceMetric(m.reads, function_of(m))
        for m in metrics.values()
        if m.per == "slice" and m.reads and m.entry not in ("", ABSOLUTE_MEAN)
    }


AGGREGATES = _aggregates(MEASURES)
"""Numbers of a slice that are computed from arrays of a forward pass of each request."""
RECORDED_AGGREGATES = _aggregates(RECORDED)
"""Numbers of a slice that are computed from the recorded arrays of its requests."""


def _magnitudes(entry: str) -> Mapping[str, tuple[str, tuple[float | None, float | None]]]:
    return {
        m.name: (m.reads[0], (None if m.high is None else -m.high, m.high))
        for m in METRICS.values()
        if m.entry == entry
    }


MAGNITUDES = _magnitudes(ABSOLUTE_MEAN)
"""Absolute values of means of recorded arrays: the array, and the range of its values."""
SCORE_GAPS = _magnitudes("policies:magnitude_of_mean")
"""The same for arrays of a forward pass."""


def gradient_function(advantage_max: float, score_norm_max: float) -> Callable[[Array], Array]:
    """Return the bound 2 A_max G TV of the gradient bias as a function of total variations."""
    return lambda tv: 2 * (advantage_max * score_norm_max) * tv


def unit_of(measure: MetricDefinition | None) -> str:
    """Return the unit of a metric's values."""
    return "1" if measure is None else str(measure.dimension)
