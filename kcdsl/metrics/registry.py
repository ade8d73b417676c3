"""The registry of metrics: those built in, and those that a user declares.

A *pointwise* metric has one value per counted unit (token, request or window) and needs a
statistic; an *aggregate* metric is one number per window. The direction says which values are
good; a *signed* metric is bounded through `abs(...)` only. Built-in metrics are defined by family
in the other modules of this package; a user's own are declared in Python files and come with a
`Registry`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from kcdsl.ir.terms import Program, UserMetric
from kcdsl.metrics import policies, rollouts, runs, sampled
from kcdsl.metrics.definition import LOGS, RATIO_LOG, Counted, MetricDefinition
from kcdsl.units import UNITS

METRICS: dict[str, MetricDefinition] = {
    d.name: d for family in (policies, sampled, rollouts, runs) for d in family.DEFINITIONS
}
"""Canonical name -> definition of the metrics that are built in."""
MEASURES: Mapping[str, MetricDefinition] = {m.name: m for m in METRICS.values() if not m.absent}
"""The metrics that a forward pass of both kernels provides."""
RECORDED: Mapping[str, MetricDefinition] = {m.name: m for m in METRICS.values() if m.absent}
"""The metrics that only recorded runs provide."""
UNMEASURED: Mapping[str, str] = {m.name: m.absent for m in RECORDED.values()}
"""Metrics that a forward pass of both kernels does not provide, with the reason."""
DRAWN = frozenset(
    m.name for m in METRICS.values() if m.per == "token" and m.reads in ((RATIO_LOG,), LOGS)
)
"""Metrics with a value per sampled token."""


class RecordMetric(NamedTuple):
    """A parsed metric name of the record form; `unit` is that of its threshold."""

    statistic: str
    metric: str
    magnitude: bool = False
    q: Fraction | None = None
    unit: str | None = None


_PERCENTILE = re.compile(r"p([1-9][0-9]?)_(.+)")
_WORDS = ("mean", "max", "min", "rate")
PREFIX = re.compile(r"(?:p[1-9][0-9]?|mean|max|min|rate|abs)_")
"""Prefixes of names of the record form; names of metrics do not have them."""
_UNIT_SUFFIXES = {
    "_" + unit.replace("/", "_").lower(): unit
    for unit in UNITS
    if unit not in {"%", "1", "ratio", "tok"}
}
"""Suffixes of names of the record form."""


def _nothing() -> Mapping[str, MetricDefinition]:
    return {}


@dataclass(frozen=True, slots=True)
class Registry:
    """The metrics that a contract may name: those built in, the user's `own`, and `more`.

    `more` is called only for a name that is neither; it returns the metrics of installed packages,
    always the same.
    """

    own: Mapping[str, MetricDefinition] = field(default_factory=dict)
    more: Callable[[], Mapping[str, MetricDefinition]] = _nothing

    def find(self, name: str) -> MetricDefinition | None:
        """Return the definition of a name."""
        found = METRICS.get(name) or self.own.get(name)
        return found if found is not None else self.more().get(name)

    def known(self, name: str) -> bool:
        """Return whether a name is a metric, without searching installed packages."""
        return name in METRICS or name in self.own

    def __getitem__(self, name: str) -> MetricDefinition:
        found = self.find(name)
        if found is None:
            raise KeyError(name)
        return found

    def names(self) -> tuple[str, ...]:
        """Return every name of a metric, the user's own included."""
        return (*METRICS, *dict.fromkeys((*self.own, *self.more())))

    def definitions(self) -> Iterator[MetricDefinition]:
        """Yield every definition once, those built in first."""
        yield from METRICS.values()
        yield from {**self.more(), **self.own}.values()

    def find_record(self, name: str) -> RecordMetric | None:
        """Resolve a metric name of the record form, such as `p99_kl` or `mean_abs_log_ratio`.

        A name is an optional statistic (`p95_`, `mean_`, `max_`), an optional `abs_`, a metric
        and an optional unit suffix. An overlap without a statistic means its mean.
        """
        statistic, q, rest = "", None, name
        percentile = _PERCENTILE.fullmatch(name)
        if percentile is not None:
            statistic, q, rest = "quantile", Fraction(int(percentile[1]), 100), percentile[2]
        else:
            for word in _WORDS:
                if name.startswith(word + "_"):
                    statistic, rest = word, name.removeprefix(word + "_")
        magnitude = rest.startswith("abs_")
        rest = rest.removeprefix("abs_")
        definition, unit = self._with_unit(rest)
        if definition is None:
            return None
        if not statistic:
            if definition.kind == "aggregate":
                statistic = "aggregate"
            elif definition.name.endswith("_overlap") and definition.function is None:
                statistic = "mean"
            else:
                return None
        return RecordMetric(statistic, definition.name, magnitude, q, unit)

    def _with_unit(self, name: str) -> tuple[MetricDefinition | None, str | None]:
        """Return the metric of a name with an optional unit of its dimension, and the unit."""
        definition = self.find(name)
        if definition is not None:
            return definition, None
        for suffix, unit in _UNIT_SUFFIXES.items():
            if name.endswith(suffix):
                definition = self.find(name.removesuffix(suffix))
                if definition is not None and definition.dimension == UNITS[unit].dimension:
                    return definition, unit
        return None, None


BUILT_IN = Registry()
"""The built-in metrics only."""


def find_metric(name: str) -> MetricDefinition | None:
    """Return the definition of a built-in metric."""
    return BUILT_IN.find(name)


# --- the user's metrics in programs --------------------------------------------------------------


def user_metric(definition: MetricDefinition) -> UserMetric:
    """Return the part of a user's metric that a program stores: its meaning and typing."""
    assert definition.function is not None
    assert definition.unit is not None
    return UserMetric(
        definition.name,
        definition.function,
        definition.family,
        definition.counted,
        definition.better,
        definition.unit,
        str(definition.dimension),
        tuple(sorted(definition.statistics)),
        definition.needs,
        definition.signed,
        definition.lower,
        definition.upper,
    )


def registry_of(program: Program) -> Registry:
    """Return the registry of the metrics in a program, without reading files."""
    return Registry({metric.name: _definition(metric) for metric in program.metrics})


def _definition(metric: UserMetric) -> MetricDefinition:
    counted: Counted = "request" if metric.counted == "request" else "token"
    sampled = "sampled" in metric.needs
    return MetricDefinition(
        metric.name,
        UNITS[metric.unit].dimension,
        "",
        metric.function,
        family=metric.family,
        counted=counted,
        better="higher" if metric.better == "higher" else "lower",
        statistics=frozenset(metric.statistics),
        needs=metric.needs,
        signed=metric.signed,
        lower=metric.lower,
        upper=metric.upper,
        tier="C" if sampled else "A",
        noisy=sampled,
        unit=metric.unit,
        function=metric.function,
    )


RECORD_NAMES: tuple[str, ...] = (
    "p50_logit_l2",
    "p95_logit_l2",
    "p99_logit_l2",
    "mean_kl",
    "p99_kl",
    "top1_overlap",
    "top5_overlap",
    "top10_overlap",
    "mean_abs_log_ratio",
    "mean_w_log_w",
    "ece_gap",
    "p95_latency_ms",
    "p99_latency_ms",
    "peak_memory_mb",
    "throughput_tok_s",
    "reward_delta",
)
"""The names of the record form that are listed in messages."""
