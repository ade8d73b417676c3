"""Splitting a value among players: alone, left out, Shapley, and interactions of pairs.

A coalition is a bit mask over the players; a game knows the values of some coalitions. Each split
is a linear function of these values with rational coefficients, so that it is exact, sums up, and
can be resampled.

Shapley (1953) averages what a player adds over all orders in which the players may join. Where
some coalitions have no value, the average is over the orders that pass only through those that
have one, as for games under precedence constraints (Faigle and Kern 1992); it still sums up, and
with all coalitions it is Shapley's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import factorial

Coefficients = Mapping[int, Fraction]
"""What a number is of the values of coalitions: the sum of coefficient times value."""


@dataclass(frozen=True, slots=True)
class Split:
    """How the value of all players is split among `players` of them, given known coalitions.

    `orders` of `all_orders` pass through known coalitions only. Without any, nothing can be split
    and `shares` is empty.
    """

    players: int
    orders: int
    all_orders: int
    shares: tuple[Coefficients, ...]

    @property
    def whole(self) -> bool:
        """Say whether every order counted: then the shares are Shapley's."""
        return self.orders == self.all_orders


def split(players: int, known: Iterable[int]) -> Split:
    """Return the shares of all players, given the coalitions whose values are known."""
    runs = frozenset(known)
    full = (1 << players) - 1
    before = _paths_from_nothing(players, runs)
    after = _paths_to_all(players, runs)
    orders = before.get(full, 0)
    if orders == 0:
        return Split(players, 0, factorial(players), ())
    shares: list[dict[int, Fraction]] = []
    for player in range(players):
        own: dict[int, Fraction] = {}
        for mask in sorted(runs):
            joined = mask | 1 << player
            if joined == mask or joined not in runs:
                continue
            weight = Fraction(before.get(mask, 0) * after.get(joined, 0), orders)
            if weight:
                own[joined] = own.get(joined, Fraction(0)) + weight
                own[mask] = own.get(mask, Fraction(0)) - weight
        shares.append(own)
    return Split(players, orders, factorial(players), tuple(shares))


def alone(player: int, known: Iterable[int]) -> Coefficients | None:
    """Return v({i}) - v(nothing); None where one of them is not known."""
    return _difference(1 << player, 0, frozenset(known))


def left_out(player: int, players: int, known: Iterable[int]) -> Coefficients | None:
    """Return v(all) - v(all without i); None where one of them is not known."""
    full = (1 << players) - 1
    return _difference(full, full & ~(1 << player), frozenset(known))


def interaction(first: int, second: int, players: int, known: Iterable[int]) -> Coefficients | None:
    """Return the Shapley interaction index of two players (Grabisch and Roubens 1999).

    It is what the pair adds beyond the sum of what each adds, averaged over what the others do: 0
    where effects add up. None where a coalition is not known.
    """
    runs = frozenset(known)
    pair = 1 << first | 1 << second
    others = [p for p in range(players) if p not in (first, second)]
    found: dict[int, Fraction] = {}
    for size in range(len(others) + 1):
        weight = Fraction(factorial(size) * factorial(players - size - 2), factorial(players - 1))
        for chosen in combinations(others, size):
            base = sum(1 << p for p in chosen)
            for mask, sign in (
                (base | pair, 1),
                (base | 1 << first, -1),
                (base | 1 << second, -1),
                (base, 1),
            ):
                if mask not in runs:
                    return None
                found[mask] = found.get(mask, Fraction(0)) + sign * weight
    return found


def apply(coefficients: Coefficients, values: Mapping[int, float]) -> Fraction:
    """Return the exact number that coefficients make of finite values."""
    return sum(
        (factor * Fraction(values[mask]) for mask, factor in coefficients.items()), Fraction(0)
    )


def merged(mask: int, groups: tuple[tuple[int, ...], ...]) -> int | None:
    """Return a coalition as one of groups of players; None where a group is only partly in it."""
    found = 0
    for index, group in enumerate(groups):
        inside = [bool(mask >> player & 1) for player in group]
        if all(inside):
            found |= 1 << index
        elif any(inside):
            return None
    return found


def _difference(first: int, second: int, runs: frozenset[int]) -> Coefficients | None:
    if first not in runs or second not in runs:
        return None
    return {first: Fraction(1), second: Fraction(-1)}


def _paths_from_nothing(players: int, runs: frozenset[int]) -> dict[int, int]:
    """Return in how many orders each known coalition can be reached through known ones."""
    paths = {0: 1} if 0 in runs else {}
    for mask in sorted(runs - {0}):  # every coalition comes after those inside it
        before = (mask & ~(1 << p) for p in range(players) if mask >> p & 1)
        count = sum(paths.get(inner, 0) for inner in before)
        if count:
            paths[mask] = count
    return paths


def _paths_to_all(players: int, runs: frozenset[int]) -> dict[int, int]:
    """Return in how many orders the others can join each known coalition."""
    full = (1 << players) - 1
    mirrored = frozenset(full & ~mask for mask in runs)
    return {full & ~m: count for m, count in _paths_from_nothing(players, mirrored).items()}
