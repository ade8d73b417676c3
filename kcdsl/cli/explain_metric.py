"""`kcdsl explain METRIC`: what editors show of a metric."""

from __future__ import annotations

import sys

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import USAGE
from kcdsl.metrics import BUILT_IN, MetricDefinition, Registry


def metric_named(name: str, registry: Registry = BUILT_IN) -> MetricDefinition | None:
    """Return the metric of a name, also of one of the record form such as `p99_kl`."""
    found = registry.find(name)
    if found is not None:
        return found
    record = registry.find_record(name)
    return None if record is None else registry.find(record.metric)


def show_metric(metric: MetricDefinition, format: str) -> None:
    """Print a metric: set for a terminal, as plain text for anything else. Refuse JSON."""
    from kcdsl.lsp.words import describe_metric

    if format == "json":
        help = "leave --format out; docs/metrics.md has the table of all metrics"
        raise refuse(USAGE, "a metric is not explained as JSON", help=help)
    text = describe_metric(metric)
    if format == "markdown":
        print(text)
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        print(text.replace("**", "").replace("`", ""))
