"""The aggregation benchmark measures two queries and reports differences."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import evaluator_aggregation
from kcdsl_backends.empirical.sources.tokens.database import Tokens


def test_small_table_produces_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator_aggregation, "ROUNDS", 1)
    ratio, each = evaluator_aggregation.aggregation_figures(20_000)
    assert ratio.limit == 1.3
    assert ratio.value > 0
    assert each.limit is None
    assert "20,000 rows, 48 slices, 20 files" in ratio.conditions


def test_differing_answers_are_an_error() -> None:
    wanted = [("a", 3, 1, 0, [0.1, 0.2, 0.3])]
    same = {("a", "kl"): Tokens(3, 3, (1, 0), (0.1, 0.2, 0.3))}
    evaluator_aggregation._compare(wanted, same)
    for other in (Tokens(3, 3, (1, 1), (0.1, 0.2, 0.3)), Tokens(3, 3, (1, 0), (0.1, 0.2, 0.4))):
        with pytest.raises(ValueError, match="the answers differ on a"):
            evaluator_aggregation._compare(wanted, {("a", "kl"): other})
    with pytest.raises(ValueError, match="0 slices for 1"):
        evaluator_aggregation._compare(wanted, {})


def test_page_states_the_limit_of_the_figure(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "aggregation.md").read_text(encoding="utf-8")
    assert f"| {evaluator_aggregation.LIMIT:g} |" in page
