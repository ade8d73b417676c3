"""Sequences: exhaustive trees, growth with length, and honesty about bounds that say nothing."""

from __future__ import annotations

import math
import random
from itertools import pairwise, product

import pytest

from kcdsl.chain import ChainDomainError
from kcdsl.chain.sequence import (
    SequenceTv,
    abs_log_ratio_of_steps,
    kl_of_steps,
    reward_of_sequence,
    tv_of_sequence,
    tv_of_steps,
    tv_of_summed_kl,
)

Tree = dict[tuple[int, ...], tuple[list[float], list[float]]]


def random_tree(rng: random.Random, v: int, length: int) -> Tree:
    """Return p and q after every history of fewer than `length` tokens."""
    tree: Tree = {}
    spread = rng.choice([0.01, 0.1, 0.5])
    for depth in range(length):
        for history in product(range(v), repeat=depth):
            p = [rng.expovariate(1.0) + 0.05 for _ in range(v)]
            q = [a * math.exp(rng.uniform(-spread, spread)) for a in p]
            tree[history] = ([a / sum(p) for a in p], [b / sum(q) for b in q])
    return tree


def laws(tree: Tree, v: int, length: int) -> list[tuple[float, float]]:
    found = []
    for leaf in product(range(v), repeat=length):
        p = math.prod(tree[leaf[:t]][0][leaf[t]] for t in range(length))
        q = math.prod(tree[leaf[:t]][1][leaf[t]] for t in range(length))
        found.append((p, q))
    return found


@pytest.mark.parametrize(("v", "length"), [(2, 1), (2, 5), (3, 2), (3, 4), (3, 5)])
def test_exhaustive_trees_stay_below_every_composition(v: int, length: int) -> None:
    rng = random.Random(100 * v + length)
    for _ in range(12):
        tree = random_tree(rng, v, length)
        leaves = laws(tree, v, length)
        tv = 0.5 * sum(abs(p - q) for p, q in leaves)
        kl = sum(p * math.log(p / q) for p, q in leaves)
        steps = [
            [pair for history, pair in tree.items() if len(history) == t] for t in range(length)
        ]
        tv_steps = [max(0.5 * sum(map(_gap, *pair)) for pair in step) for step in steps]
        kl_steps = [max(sum(map(_kl_term, *pair)) for pair in step) for step in steps]
        log_steps = [max(max(map(_log_gap, *pair)) for pair in step) for step in steps]
        slack = 1e-12
        assert tv <= tv_of_sequence(max(tv_steps), length).value + slack
        assert tv <= tv_of_steps(tv_steps).value + slack
        assert tv <= tv_of_summed_kl([max(k, 0.0) for k in kl_steps]).value + slack
        assert kl <= kl_of_steps([max(k, 0.0) for k in kl_steps]) + slack
        worst = max(abs(math.log(p / q)) for p, q in leaves)
        assert worst <= abs_log_ratio_of_steps(log_steps) + slack
        reward = [rng.uniform(-1, 3) for _ in leaves]
        drift = abs(sum((p - q) * r for (p, q), r in zip(leaves, reward, strict=True)))
        bound = reward_of_sequence(max(reward) - min(reward), tv_of_steps(tv_steps))
        assert drift <= bound + slack


def _gap(p: float, q: float) -> float:
    return abs(p - q)


def _kl_term(p: float, q: float) -> float:
    return p * math.log(p / q)


def _log_gap(p: float, q: float) -> float:
    return abs(math.log(p / q))


@pytest.mark.parametrize("tau", [1e-12, 1e-3, 0.3])
def test_the_bound_grows_with_the_length_and_stays_below_the_sum(tau: float) -> None:
    values = [tv_of_sequence(tau, length).value for length in range(1, 200)]
    assert all(a <= b for a, b in pairwise(values))
    assert all(v <= n * tau * (1 + 1e-10) + 1e-320 for n, v in enumerate(values, start=1))
    assert values[0] == pytest.approx(tau)


def test_a_bound_of_one_is_called_vacuous() -> None:
    assert tv_of_sequence(0.5, 4096).vacuous
    assert tv_of_sequence(1.0, 1).vacuous
    assert tv_of_steps([0.1, 1.0]).vacuous
    assert not tv_of_sequence(1e-3, 100).vacuous
    assert not tv_of_sequence(0.0, 10**9).vacuous


def test_the_result_says_length_and_composition() -> None:
    assert tv_of_sequence(0.0, 7) == SequenceTv(0.0, 7, "coupling")
    assert tv_of_summed_kl([1e-4, 2e-4]).composition == "chain-rule"
    assert tv_of_summed_kl([1e-4, 2e-4]).length == 2


def test_what_is_no_evidence_is_refused() -> None:
    for wrong in (math.nan, -0.1, math.inf):
        with pytest.raises(ChainDomainError):
            tv_of_sequence(wrong, 2)
        for of_steps in (tv_of_steps, tv_of_summed_kl, kl_of_steps, abs_log_ratio_of_steps):
            with pytest.raises(ChainDomainError):
                of_steps([0.1, wrong])
    for of_steps in (tv_of_steps, tv_of_summed_kl, kl_of_steps, abs_log_ratio_of_steps):
        with pytest.raises(ChainDomainError):
            of_steps([])
    for length in (0, -1, True):
        with pytest.raises(ChainDomainError):
            tv_of_sequence(0.1, length)
