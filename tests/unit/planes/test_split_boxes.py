"""Split boxes of ReLU networks: bounds, trees and counterexamples, in both programs."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.linear.constraints import LinearConstraint
from kcdsl_backends.drift.linear.paired import OutputRows, PairedLayer, PairedNetwork
from kcdsl_backends.drift.linear.splitting import LEAF, SplitDecision, decide, split
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.linear_bounds import splits
from kcdsl_certs.recheck.linear_bounds.constraints import Halfspace, Layer, replay
from kcdsl_certs.recheck.linear_bounds.splits import (
    Leaves,
    paired,
    recheck_split,
)
from tests.support.pretend_device import pretend_device

Network = list[tuple[torch.Tensor, torch.Tensor]]
SIZES = (3, 7, 6, 2)
LOW, HIGH = [Fraction(-1)] * 3, [Fraction(1), Fraction(1, 3), Fraction(1)]


def network(seed: int, sizes: tuple[int, ...] = SIZES, scale: float = 1.0) -> Network:
    """Return random float32 layers."""
    made = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(b, a, generator=made) * scale / a**0.5,
            torch.randn(b, generator=made) * scale / 4,
        )
        for a, b in pairwise(sizes)
    ]


def near(one: Network, seed: int, share: float = 0.02) -> Network:
    """Return a copy whose numbers differ by a share of their size."""
    made = torch.Generator().manual_seed(seed)
    return [
        (w * (1 + share * torch.randn(w.shape, generator=made)), b * (1 + share)) for w, b in one
    ]


def plain(networks: list[Network]) -> list[list[Layer]]:
    """Return networks as the checker's type."""
    return [[(w.numpy(), b.numpy()) for w, b in one] for one in networks]


def values(networks: list[Network], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return first outputs and differences in float64."""
    found = []
    for one in networks:
        h = x
        for k, (w, b) in enumerate(one):
            h = h @ w.double().T + b.double()
            h = h if k == len(one) - 1 else h.clamp_min(0)
        found.append(h)
    return found[0], found[-1] - found[0]


def apart(limit: Fraction, outputs: int = 2) -> list[list[LinearConstraint]]:
    """Return the condition that an output of two networks differs by at least a limit."""
    found = []
    for k in range(outputs):
        for sign in (1.0, -1.0):
            own = tuple(sign * (j == k) for j in range(outputs))
            found.append(
                [LinearConstraint((0.0,) * 3, own, tuple(-v for v in own), -limit)],
            )
    return found


def facts(unsafe: list[list[LinearConstraint]]) -> list[list[Halfspace]]:
    """Return constraints as the checker's type."""
    return [[(c.inputs, c.first, c.second, c.limit) for c in group] for group in unsafe]


def largest(networks: list[Network]) -> float:
    """Return the largest difference over many inputs."""
    made = torch.Generator().manual_seed(7)
    low, high = (torch.tensor([float(v) for v in end]).double() for end in (LOW, HIGH))
    x = low + (high - low) * torch.rand(20000, 3, generator=made, dtype=torch.float64)
    return float(values(networks, x)[1].abs().max())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("radius", [0.0, 0.1, 2.0])
def test_bounds_of_both_programs_hold_on_samples(seed: int, radius: float) -> None:
    scale = (1.0, 1e5, 1e-5)[seed]
    first = network(seed, scale=scale)
    pair = [first, near(first, seed, (0.02, 1e-7, 1.0)[seed])]
    made = torch.Generator().manual_seed(seed)
    middle = torch.randn(4, 3, generator=made, dtype=torch.float64)
    low, high = middle - radius, middle + radius
    rows = [torch.randn(5, n, generator=made, dtype=torch.float64) for n in (3, 2, 2)]
    layers = tuple(PairedLayer.of(a, b) for a, b in zip(*pair, strict=True))
    hidden = PairedNetwork(layers).above(low, high, OutputRows(*rows))[2]
    found, _, _ = PairedNetwork(layers).above(low, high, OutputRows(*rows), hidden)
    leaves = Leaves.of(paired(plain(pair)), low.numpy(), high.numpy())
    again = leaves.most(2, rows[1].numpy(), rows[2].numpy(), rows[0].numpy())
    # both programs follow the same rules; intersection with the first pass only narrows boxes
    assert np.all(found.numpy() <= again + 1e-9 * (1 + np.abs(again)))
    share = torch.rand(500, 1, 3, generator=made, dtype=torch.float64)
    share[:8, 0] = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    x = low + (high - low) * share
    f, drift = values(pair, x)
    exact = x @ rows[0].T + f @ rows[1].T + drift @ rows[2].T
    slack = 1e-14 * float(exact.abs().max())  # of the float64 runs
    assert bool((exact.amax(0) <= found + slack).all())
    assert np.all(exact.amax(0).numpy() <= again + slack)


def test_bounds_at_a_point_contain_the_exact_value() -> None:
    """Large numbers that cancel: the bound of a point box covers all roundings."""
    one = network(3, scale=2.0**20)
    pair = [one, near(one, 4, 2.0**-22)]
    x = torch.tensor([[0.1, -0.7, 0.3]], dtype=torch.float64)
    corners = [Fraction(v) for v in x[0].tolist()]
    layers = tuple(PairedLayer.of(a, b) for a, b in zip(*pair, strict=True))
    eye = torch.eye(2, dtype=torch.float64)
    rows = OutputRows(torch.zeros(2, 3).double(), torch.zeros_like(eye), eye)
    most = PairedNetwork(layers).above(x, x, rows)[0][0].tolist()
    for k, bound in enumerate(most):
        first, second = ([0.0, 0.0] for _ in range(2))
        first[k], second[k] = 1.0, -1.0  # f - g <= -c: the difference is at least c
        above = [[((0.0,) * 3, first, second, -Fraction(bound))]]
        close = [[((0.0,) * 3, first, second, 2**24 - Fraction(bound))]]  # f is about 2^60
        assert not replay(plain(pair), corners, corners, above, corners)
        assert replay(plain(pair), corners, corners, close, corners)


@pytest.fixture(scope="module")
def pair() -> list[Network]:
    one = network(1)
    return [one, near(one, 2)]


@pytest.fixture(scope="module")
def proved(pair: list[Network]) -> tuple[SplitDecision, Fraction]:
    """Return a proof that needs many boxes, and its limit."""
    limit = Fraction(largest(pair)) * Fraction(5, 4)
    return decide(pair, LOW, HIGH, apart(limit), 60.0), limit


def test_tree_is_rechecked(pair: list[Network], proved: tuple[SplitDecision, Fraction]) -> None:
    found, limit = proved
    assert found.verdict == "proved"
    assert found.tree is not None
    assert found.tree.leaves > 3
    again = recheck_split(plain(pair), LOW, HIGH, facts(apart(limit)), found.tree.data)
    assert again == found.tree.leaves


def test_tree_of_another_problem_is_rejected(
    pair: list[Network], proved: tuple[SplitDecision, Fraction]
) -> None:
    found, limit = proved
    assert found.tree is not None
    data, facts_of = found.tree.data, facts(apart(limit))
    less = facts(apart(Fraction(largest(pair))))
    leaf = LEAF.to_bytes(2, "little")
    for tree, known, reason in (
        (data, less, "claim/too-small"),
        (data[:-2], facts_of, "document/splits"),
        (data + leaf, facts_of, "document/splits"),
        (data[:-1], facts_of, "document/splits"),
        (b"\x03\x00" + leaf + leaf, facts_of, "document/splits"),
        (b"", facts_of, "document/splits"),
        (data, [*facts_of, []], "document/splits"),
        (data, [], "document/splits"),
    ):
        with pytest.raises(Rejected) as rejected:
            recheck_split(plain(pair), LOW, HIGH, known, tree)
        assert rejected.value.reason == reason
    other = [pair[0], near(pair[0], 9, 0.5)]
    with pytest.raises(Rejected):
        recheck_split(plain(other), LOW, HIGH, facts_of, data)


def test_counterexample_is_exact(pair: list[Network]) -> None:
    limit = Fraction(largest(pair)) * Fraction(9, 10)
    found = decide(pair, LOW, HIGH, apart(limit), 60.0)
    assert found.verdict == "counterexample"
    assert found.point is not None
    known = facts(apart(limit))
    assert replay(plain(pair), LOW, HIGH, known, found.point)
    beside = (found.point[0] + 3, *found.point[1:])
    assert not replay(plain(pair), LOW, HIGH, known, beside)
    more = facts(apart(limit * 4))
    assert not replay(plain(pair), LOW, HIGH, more, found.point)


def test_conjunction_about_one_network() -> None:
    """|x| as two ReLUs: at the limit the closed constraint is satisfiable, beyond it not."""
    one: list[Network] = [
        [(torch.tensor([[1.0], [-1.0]]), torch.zeros(2)), (torch.ones(1, 2), torch.zeros(1))]
    ]
    low, high = [Fraction(-1)], [Fraction(2)]

    def asked(least: str, side: str) -> SplitDecision:
        # |x| >= least, and x <= side
        return decide(
            one,
            low,
            high,
            [
                [
                    LinearConstraint((0.0,), (-1.0,), (), -Fraction(least)),
                    LinearConstraint((1.0,), (0.0,), (), Fraction(side)),
                ]
            ],
            20.0,
        )

    assert asked("2.001", "2").verdict == "proved"
    assert asked("1.001", "1").verdict == "proved"
    assert asked("1", "1").verdict != "proved"
    assert asked("1.5", "2").verdict == "counterexample"


def test_zero_time_limit_is_inconclusive(pair: list[Network]) -> None:
    limit = Fraction(largest(pair)) * Fraction(11, 10)
    found = decide(pair, LOW, HIGH, apart(limit), -1.0)
    assert (found.verdict, found.tree, found.point) == ("unknown", None, None)


def test_mismatched_networks_are_refused(pair: list[Network]) -> None:
    unsafe = apart(Fraction(1))
    for networks, low, constraints in (
        ([], LOW, unsafe),
        ([pair[0], network(5, (3, 7, 5, 2))], LOW, unsafe),
        (pair, LOW[:2], unsafe),
        (pair, [Fraction(2)] * 3, unsafe),
        (pair, LOW, []),
        (pair, LOW, [[]]),
        (pair[:1], LOW, unsafe),
        (pair, LOW, [[replace(unsafe[0][0], inputs=())]]),
    ):
        with pytest.raises(ValueError, match="network"):
            decide(networks, low, HIGH, constraints, 1.0)


@pytest.mark.full
def test_search_on_a_device_gives_a_tree(
    pair: list[Network], proved: tuple[SplitDecision, Fraction]
) -> None:
    _, limit = proved
    with pretend_device():
        again = decide(pair, LOW, HIGH, apart(limit), 60.0, "cuda")
    assert again.verdict == "proved"
    assert again.tree is not None
    known = facts(apart(limit))
    assert recheck_split(plain(pair), LOW, HIGH, known, again.tree.data) == again.tree.leaves


def test_checker_uses_bounds_of_enclosing_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear bounds of a part may be looser at a ReLU than those of the enclosing box."""
    networks = [network(0, (3, 10, 10, 10, 1), 2.0)]
    networks.append(near(networks[0], 0))
    unsafe = apart(Fraction(1.5 * largest(networks)), 1)
    found = split(networks, LOW, HIGH, unsafe, most=300)
    assert found.tree is not None
    monkeypatch.setattr(splits, "_DEEPER", 0)
    given = plain(networks), LOW, HIGH, facts(unsafe), found.tree.data
    assert recheck_split(*given) == found.tree.leaves
    monkeypatch.setattr(splits, "_AROUND", 1)
    with pytest.raises(Rejected, match="claim/too-small"):
        recheck_split(*given)


def test_deep_trees_do_not_exceed_the_recursion_limit() -> None:
    """A tree of consecutive cuts is deeper than the recursion limit."""
    networks = [network(0), near(network(0), 1)]
    tree = np.array([*[0] * 3000, *[LEAF] * 3001], "<u2").tobytes()
    with pytest.raises(Rejected, match="claim/too-small"):
        recheck_split(plain(networks), LOW, HIGH, facts(apart(Fraction(1, 10**6))), tree)
