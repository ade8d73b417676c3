"""The evaluator benchmark measures what its page shows."""

from __future__ import annotations

import pytest

from bench import evaluator_tier_a
from bench.common import shown_in


def test_page_shows_every_figure_of_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluator_tier_a, "POSITIONS", 130)
    monkeypatch.setattr(evaluator_tier_a, "VOCABULARY", 300)
    monkeypatch.setattr(evaluator_tier_a, "ROUNDS", 1)
    figures = evaluator_tier_a.tier_a_figures()
    table = evaluator_tier_a.tier_a_table(figures)
    shown = shown_in("reference/metrics.md", "evaluator")
    names = [[line.split("|")[1] for line in text.splitlines()] for text in (table, shown)]
    assert names[0] == names[1]
    assert [f.limit for f in figures if f.limit is not None] == [4.0, 4.0, 4.0, 2.0]
    assert all(f.value > 0 for f in figures if "memory" not in f.name)
