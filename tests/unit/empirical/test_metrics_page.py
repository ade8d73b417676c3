"""Tables of metrics in the documentation equal the definitions, whose functions exist."""

from __future__ import annotations

import pytest

from bench.tables import DOCUMENTS, ROOT, fresh
from kcdsl.metrics import METRICS
from kcdsl.metrics.definition import ABSOLUTE_MEAN
from kcdsl_backends.empirical.metrics.measures import function_of


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documented_tables_equal_the_definitions(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    assert text == fresh(document, text), "run python -m bench.tables"


def test_document_without_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no table"):
        fresh("docs/reference/metrics.md", "nothing")


@pytest.mark.parametrize("name", METRICS)
def test_function_of_each_metric_exists_and_is_described(name: str) -> None:
    metric = METRICS[name]
    assert metric.formula
    if metric.entry in ("", ABSOLUTE_MEAN):
        with pytest.raises(KeyError):
            function_of(metric)
    else:
        function = function_of(metric)
        while hasattr(function, "func"):  # the depth of a list is bound
            function = function.func
        assert callable(metric.entry) or function.__doc__
