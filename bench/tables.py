"""Generator of tables in documents and of the contract schema from definitions in the code.

`python -m bench.tables` writes the tables of metrics and the names of architectures and adapters; a
test checks that they are current.
"""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path

from kcdsl.metrics import LN_2_UP, METRICS, MetricDefinition
from kcdsl.metrics.definition import ABSOLUTE_MEAN
from kcdsl.model import registry
from kcdsl.model.adapters import ADAPTERS

ROOT = Path(__file__).resolve().parents[1]
_ORDER = ("mean", "rate", "max", "min", "quantile")


def function_of(metric: MetricDefinition) -> str:
    """Return the location of the function of a metric as text."""
    if callable(metric.entry):
        return f"`{metric.entry.__module__}`"
    module, colon, name = metric.entry.partition(":")
    if colon:
        return f"`metrics.{module}.{name}`"
    return "the mean" if metric.entry == ABSOLUTE_MEAN else "the evaluator"


def _measured(metric: MetricDefinition) -> tuple[str, ...]:
    return (
        f"`{metric.name}`",
        metric.formula,
        metric.tier,
        metric.bias.replace("_", " "),
        metric.estimates,
        metric.better,
        str(metric.dimension),
        ", ".join(metric.needs),
        function_of(metric),
    )


def _end(value: Fraction | None, infinite: str) -> str:
    if value is None:
        return infinite
    return "ln 2" if value == LN_2_UP else str(value)


def _stated(metric: MetricDefinition) -> tuple[str, ...]:
    statistics = [s for s in _ORDER if s in metric.statistics]
    if "aggregate" in metric.statistics:
        statistics.insert(0, "alone")
    if metric.signed:
        statistics.append("through `abs`")
    dimension = str(metric.dimension)
    return (
        f"`{metric.name}`",
        metric.family.value,
        metric.counted,
        metric.better,
        "nats" if dimension == "nat" else dimension,
        f"[{_end(metric.lower, '-∞')}, {_end(metric.upper, '∞')}]",
        ", ".join(statistics),
        ", ".join(metric.needs),
        metric.summary,
    )


TABLES = {
    "docs/reference/metrics.md": (
        "| metric | formula | tier | bias | estimates | better | unit | from | function |",
        _measured,
    ),
    "grammar/README.md": (
        "| metric | family | one per | better | dimension | range | statistics | from | what |",
        _stated,
    ),
}
"""For each document, the header of its table and the function for the cells of a metric."""


SCHEMA = "grammar/kcdsl_grammar/contract.schema.json"
REFERENCE = "grammar/README.md"
NAMES = {"architecture": registry.names(), "run": tuple(ADAPTERS)}
"""Registered names by the contract field that uses them."""
DOCUMENTS = (*TABLES, SCHEMA)


def fresh(document: str, text: str) -> str:
    """Return the text of a document with tables from the current definitions.

    Raises ValueError if the document has no place for them.
    """
    if document in TABLES:
        text = _with_table(document, text)
    if document == REFERENCE:
        for field, names in NAMES.items():
            listed = ", ".join(f"`{name}`" for name in names)
            marks = rf"(<!-- {field} -->).*?(<!-- end -->)"
            text = _replaced(document, marks, rf"\g<1>{listed}\g<2>", text)
    if document == SCHEMA:
        for field, names in NAMES.items():
            pattern = rf'("{field}": \{{[^{{}}]*"enum": )\[[^\]]*\]'
            text = _replaced(document, pattern, rf"\g<1>{json.dumps(names)}", text)
    return text


def _replaced(document: str, pattern: str, new: str, text: str) -> str:
    found, count = re.subn(pattern, new, text)
    if count != 1:
        raise ValueError(f"{document} has {count} places for {pattern}")
    return found


def _with_table(document: str, text: str) -> str:
    header, cells = TABLES[document]
    before, found, rest = text.partition(header + "\n")
    if not found:
        raise ValueError(f"{document} has no table {header}")
    lines = rest.splitlines(keepends=True)
    end = next(n for n, line in enumerate(lines) if not line.startswith("|"))
    rows = (
        "| " + " | ".join(cell.replace("|", "\\|") for cell in cells(metric)) + " |\n"
        for metric in METRICS.values()
    )
    return before + found + lines[0] + "".join(rows) + "".join(lines[end:])


def main() -> None:
    """Write the documents."""
    for document in DOCUMENTS:
        path = ROOT / document
        path.write_text(fresh(document, path.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
