"""The cost estimate that decides for which blocks linear bounds run by default."""

from __future__ import annotations

import numpy as np
import pytest

from kcdsl_backends.drift import linear_bounds as worth
from tests.support import proofs
from tests.support.plane_blocks import feed_forward
from tests.support.prover import block


def test_independent_rows_cost_as_much_as_one() -> None:
    rng = np.random.default_rng(0)
    one, many = (worth.cost(block(feed_forward(rng, rows=rows))) for rows in (1, 8))
    assert many == 8 * one


def test_attention_costs_more_than_its_rows() -> None:
    rng = np.random.default_rng(0)
    one, many = (worth.cost(block(proofs.attention(rng, rows=rows))) for rows in (4, 16))
    assert many > 8 * one


def test_elements_are_counted_through_all_preceding_linears() -> None:
    graph = feed_forward(np.random.default_rng(0), rows=1, width=6, inner=10)
    read, output = 2 * 10 * (1 + 6 * 10), 2 * 6 * (1 + 2 * 6 * 10)
    assert worth.cost(block(graph)) == read + output


def test_cheap_blocks_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = block(feed_forward(np.random.default_rng(0)))
    assert worth.cheap(graph)
    monkeypatch.setattr(worth, "MOST", worth.cost(graph) - 1)
    assert not worth.cheap(graph)
