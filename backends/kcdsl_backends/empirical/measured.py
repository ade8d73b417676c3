"""What was measured: values per request and per timed run, grouped by slice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.metrics import MetricDefinition
from kcdsl_backends.empirical.metrics.calibration import Confidences
from kcdsl_backends.empirical.metrics.measures import MEASURES
from kcdsl_backends.empirical.reduced import Reduced

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Unit:
    """One request, or one timed run of a request: a sampling unit.

    `values` holds, per metric, one value per token or a single one. `failure` says why a request
    has no values.
    """

    key: str
    tokens: int
    values: Mapping[str, Array] = field(default_factory=dict)
    confidences: Confidences | None = None
    failure: str | None = None
    problems: Mapping[str, str] = field(default_factory=dict)
    """Why a metric has no values here although the request has others."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one request gave: its unit, and the digests of the tensors at the audit points."""

    unit: Unit
    seed: int
    digests: Mapping[str, str]
    nonfinite: int

    @property
    def replay_signature(self) -> str:
        """Return the sha256 over the digests at all audit points."""
        lines = "\n".join(f"{name}={self.digests[name]}" for name in sorted(self.digests))
        return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Timing:
    """All timed runs in order; per request, (equal, made) repeats; the peak memory in bytes."""

    runs: tuple[Unit, ...] = ()
    repeats: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    peak_memory: float | None = None


@dataclass(frozen=True, slots=True)
class SliceData:
    """The units of one slice.

    `requests`: one unit per row. `runs`: one unit per timed run, in the order they ran.
    `repeats` counts (equal in every run, repeated) requests; `peak_memory` is in bytes, None if
    not measured.
    """

    name: str
    requests: tuple[Unit, ...]
    runs: tuple[Unit, ...] = ()
    repeats: tuple[int, int] | None = None
    peak_memory: float | None = None
    records: tuple[Mapping[str, Any], ...] = ()
    """The trace records of the requests."""
    measures: Mapping[str, MetricDefinition] = field(default_factory=lambda: MEASURES)
    """How each metric is measured, the user's own included."""
    reduced: Reduced | None = None
    """The requests of a token table, instead of `requests`."""
    unit: str = "request"
    """What one of `requests` is called: "prompt" where a unit is all rollouts of one."""

    @property
    def size(self) -> int:
        """Return the number of requests."""
        return len(self.requests) if self.reduced is None else len(self.reduced)
