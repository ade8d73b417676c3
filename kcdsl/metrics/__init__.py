"""The metrics that a contract may name: definitions as data, and their registry."""

from kcdsl.metrics.definition import (
    LN_2_UP,
    POINTWISE,
    Better,
    Bias,
    Counted,
    Kind,
    MetricDefinition,
    Tier,
)
from kcdsl.metrics.registry import (
    ALIASES,
    BUILT_IN,
    METRICS,
    PREFIX,
    RECORD_NAMES,
    RecordMetric,
    Registry,
    find_metric,
    registry_of,
    user_metric,
)

__all__ = [
    "ALIASES",
    "BUILT_IN",
    "LN_2_UP",
    "METRICS",
    "POINTWISE",
    "PREFIX",
    "RECORD_NAMES",
    "Better",
    "Bias",
    "Counted",
    "Kind",
    "MetricDefinition",
    "RecordMetric",
    "Registry",
    "Tier",
    "find_metric",
    "registry_of",
    "user_metric",
]
