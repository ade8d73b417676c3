"""Random modules equal their graphs, or are refused: a sample of `make bench-lowering`."""

from __future__ import annotations

import pytest

from bench.lowering import LARGEST_RATIO, Campaign, apart
from kcdsl.model.lowering import block_graph
from tests.support.random_modules import STEPS, random_module

SEEDS = (10085, 10223, 10268, 10381, 10480, 10593, *range(5000, 5018))
"""Seeds; the first ones have nearly constant rows before a norm."""


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_random_modules_equal_their_graphs() -> None:
    campaign = Campaign()
    for seed in SEEDS:
        campaign.take(seed)
    assert (campaign.wrong, campaign.differ, campaign.crashed) == ([], [], [])
    assert campaign.traced >= len(SEEDS) / 2


def test_seed_determines_the_module() -> None:
    one, two = random_module(7), random_module(7)
    assert (one.steps, one.rows, one.width) == (two.steps, two.rows, two.width)
    assert {name for seed in range(60) for name in random_module(seed).steps} == set(STEPS)


def test_campaign_detects_a_different_graph() -> None:
    """A graph with other numbers counts as wrong, and so does one with another type."""
    variant = next(v for v in map(random_module, range(100)) if v.steps == ("activation",))
    other = next(
        v
        for v in map(random_module, range(1000))
        if v.steps == ("scalar",) and (v.rows, v.width) == (variant.rows, variant.width)
    )
    graph = block_graph(other.model(), "part", other.rows)
    assert apart(variant, graph, ("float32",)) > LARGEST_RATIO
