"""docs/metrics.md says of every metric what the registries say, and names only what exists."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from kcdsl.metrics import METRICS
from kcdsl_backends.empirical.metrics.measures import MEASURES
from kcdsl_backends.empirical.metrics.recorded import RECORDED
from tests.support.metrics_page import HEADER, module_of, rows

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "metrics.md").read_text("utf-8")


def lines_after(header: str) -> list[str]:
    _, _, rest = PAGE.partition(header + "\n")
    found = []
    for line in rest.splitlines()[1:]:
        if not line.startswith("|"):
            break
        found.append(line)
    return found


def test_the_table_is_that_of_the_registries() -> None:
    assert lines_after(HEADER) == rows()
    assert len(rows()) == len(METRICS) == len(MEASURES) + len(RECORDED)


def test_the_modules_of_metrics_exist() -> None:
    for name in METRICS:
        import_module(f"kcdsl_backends.empirical.{module_of(name)}")


def test_the_functions_without_a_name_in_the_language_exist_and_are_described() -> None:
    listed = [re.match(r"\| `([\w.]+)`", line) for line in lines_after("| function | gives |")]
    assert len(listed) >= 15
    for found in listed:
        assert found is not None
        module, _, function = found[1].rpartition(".")
        described = getattr(import_module(f"kcdsl_backends.empirical.{module}"), function)
        assert described.__doc__, found[1]
