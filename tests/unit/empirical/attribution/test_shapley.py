"""Shapley values compared with closed forms, and with missing coalitions."""

from __future__ import annotations

from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl_backends.empirical.attribution.shapley import (
    alone,
    apply,
    left_out,
    merged,
    split,
)

VALUES = st.floats(-1e6, 1e6, allow_nan=False)


def every(players: int) -> range:
    return range(1 << players)


def shares(players: int, values: dict[int, float]) -> list[Fraction]:
    return [apply(own, values) for own in split(players, values).shares]


def by_orders(players: int, values: dict[int, float]) -> list[Fraction]:
    """Return the mean marginal over all orders without missing coalitions, by definition."""
    totals = [Fraction(0)] * players
    count = 0
    for order in permutations(range(players)):
        masks = [0]
        for player in order:
            masks.append(masks[-1] | 1 << player)
        if any(mask not in values for mask in masks):
            continue
        count += 1
        for player, before, after in zip(order, masks, masks[1:], strict=False):
            totals[player] += Fraction(values[after]) - Fraction(values[before])
    return [total / count for total in totals] if count else []


def test_additive_game_gives_each_player_its_value() -> None:
    weights = [0.5, 3.0, -1.25]
    values = {m: sum(w for i, w in enumerate(weights) if m >> i & 1) + 7.0 for m in every(3)}
    assert shares(3, values) == [Fraction(w) for w in weights]


def test_glove_game() -> None:
    """One left glove, two right ones: the textbook values (2/3, 1/6, 1/6)."""
    values = {m: float(bool(m & 1) and bool(m & 6)) for m in every(3)}
    assert shares(3, values) == [Fraction(2, 3), Fraction(1, 6), Fraction(1, 6)]


@given(st.integers(1, 4), st.data())
def test_shares_equal_the_definition_and_sum_to_the_total(
    players: int, data: st.DataObject
) -> None:
    values = {m: data.draw(VALUES) for m in every(players)}
    found = shares(players, values)
    assert found == by_orders(players, values)
    assert sum(found) == Fraction(values[(1 << players) - 1]) - Fraction(values[0])


@given(st.integers(2, 4), st.data())
def test_missing_coalitions_restrict_the_orders(players: int, data: st.DataObject) -> None:
    full = (1 << players) - 1
    kept = data.draw(st.sets(st.integers(1, full - 1)))
    values = {m: data.draw(VALUES) for m in (0, full, *sorted(kept))}
    found = split(players, values)
    expected = by_orders(players, values)
    assert [apply(own, values) for own in found.shares] == expected
    assert found.whole == (len(kept) == full - 1)
    if expected:
        assert sum(expected) == Fraction(values[full]) - Fraction(values[0])
    else:
        assert found.orders == 0


@given(st.data())
def test_dummy_gets_zero_and_symmetric_players_equal_shares(data: st.DataObject) -> None:
    base = {m: data.draw(VALUES) for m in every(2)}
    with_dummy = {m: base[m & 3] for m in every(3)}
    assert shares(3, with_dummy)[2] == 0
    by_size = [data.draw(VALUES) for _ in range(4)]
    symmetric = {m: by_size[m.bit_count()] for m in every(3)}
    assert len(set(shares(3, symmetric))) == 1


def test_values_alone_and_left_out() -> None:
    values = {0: 1.0, 1: 4.0, 2: 2.0, 3: 10.0}
    first, last = alone(0, values), left_out(0, 2, values)
    assert first is not None
    assert last is not None
    assert apply(first, values) == 3
    assert apply(last, values) == 8
    assert alone(0, {0: 0.0, 3: 1.0}) is None
    assert left_out(0, 2, {0: 0.0, 1: 1.0, 3: 1.0}) is None


def test_no_shares_without_a_complete_order() -> None:
    assert split(2, {0, 3}).shares == ()
    assert split(2, {1, 2, 3}).shares == ()
    assert split(0, {0}).shares == ()


@pytest.mark.parametrize(
    ("mask", "expected"), [(0, 0), (0b011, 0b01), (0b100, 0b10), (0b111, 0b11), (0b001, None)]
)
def test_grouped_players_join_together(mask: int, expected: int | None) -> None:
    assert merged(mask, ((0, 1), (2,))) == expected
