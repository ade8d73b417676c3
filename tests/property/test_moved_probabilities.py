"""Probabilities with large drifts of scores, and products of rotated heads.

No choice of errors leaves the bounds of either program, and some come close.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.affine_run import affine_run
from kcdsl_backends.drift.ops.bilinear import TurnedHeads, bilinear_remainder, turned_heads
from kcdsl_backends.drift.ops.softmax import _exponential_remainder, _largest_change
from kcdsl_certs.recheck.ops.attention.softmax import _largest_change as _largest_change_checked
from kcdsl_certs.recheck.ops.attention.softmax import _remainder_bounds
from tests.support import proofs
from tests.support.affine_rules import RULES
from tests.support.prover import block, parameters

TRUST = 2.0**-46
Floats = np.ndarray


def centred(t: Floats, p: Floats) -> Floats:
    """Return t with its positive or its negative part scaled down, so that Σ p t = 0."""
    up, down = (
        (p * t.clip(min=0)).sum(-1, keepdims=True),
        -(p * t.clip(max=0)).sum(-1, keepdims=True),
    )
    least = np.minimum(up, down)
    with np.errstate(divide="ignore", invalid="ignore"):
        rise, fall = np.where(up > 0, least / up, 0.0), np.where(down > 0, least / down, 0.0)
    return np.where(t > 0, t * rise, t * fall)


def moves(p: Floats, c: Floats, rng: np.random.Generator) -> Floats:
    """Return t [n, columns], |t| <= c and Σ p t = 0: at ends, and one against all others."""
    n = p.shape[-1]
    ends = rng.choice([-1.0, 1.0], size=(64, n)) * c
    inner = rng.uniform(-1, 1, size=(16, n)) * c
    ends[32:, 0] = np.linspace(0, 1, 32) * c[0]  # one between, where the others make Z large
    single = np.concatenate([sign * (2 * np.eye(n) - 1) * c for sign in (1, -1)])
    one = np.eye(n) * c
    mean = (p * c)[:, None] / (1 - p)[:, None]
    against = np.where(np.eye(n) > 0, one, -mean)  # others at their mean, where they reach it
    against = against[(np.abs(against) <= c * (1 + 1e-12)).all(-1)]
    return centred(np.concatenate([ends, inner, single, against, -against]), p)


def test_probabilities_stay_within_the_bounds_of_both_programs() -> None:
    rng = np.random.default_rng(3)
    nearest = {"low": 0.0, "high": 0.0, "probability": 0.0}
    for size in (1e-4, 0.3, 1.0, 8.0):
        for columns, spread in ((2, 0.2), (3, 2.0), (8, 0.2), (8, 1.0), (8, 4.0)):
            weights = np.exp(spread * rng.standard_normal(columns))
            p = weights / weights.sum()
            c = size * (rng.uniform(0.5, 1, columns) if columns == 3 else np.ones(columns))
            t = moves(p, c, rng)
            z = (p * np.exp(t)).sum(-1, keepdims=True)
            beside = np.expm1(t) / z - t
            probability = np.abs(p * np.exp(t) / z - p)
            with np.errstate(all="ignore"):
                below, above = _remainder_bounds(p[None], c[None], np.full((1, columns), TRUST))
                apart = _largest_change_checked(p[None], c[None], np.full((1, columns), TRUST))
            row, reach = torch.from_numpy(p)[None], torch.from_numpy(c)[None]
            trust = torch.full((1, 1), TRUST, dtype=torch.float64)
            low, high = _exponential_remainder(row, reach, trust)
            far = _largest_change(row, reach, trust)
            for lower, upper, farthest in (
                (-below, above, apart),
                (low.numpy(), high.numpy(), far.numpy()),
            ):
                slack = 1e-15 * (1 + size)
                assert (beside >= lower - slack).all()
                assert (beside <= upper + slack).all()
                assert (probability <= farthest + slack).all()
                if size >= 0.3 and size <= 1:
                    found = (beside / lower).max(), (beside / upper).max()
                    for name, value in zip(
                        nearest, (*found, (probability / farthest).max()), strict=True
                    ):
                        nearest[name] = max(nearest[name], float(value))
            assert np.allclose(low.numpy(), -below, rtol=1e-6, atol=1e-13)
            assert np.allclose(high.numpy(), above, rtol=1e-6, atol=1e-13)
            assert np.allclose(far.numpy(), apart, rtol=1e-6, atol=1e-13)
    assert nearest["low"] > 0.4
    assert nearest["high"] > 0.9
    assert nearest["probability"] > 0.95


def errors(heads: TurnedHeads, rng: np.random.Generator) -> torch.Tensor:
    """Return e [heads, T, d] as large as rotated heads may be, in directions of their weights."""
    x = heads.below.error_bound
    _, _, right = torch.linalg.svd(heads.below.weight[0])
    signs = torch.from_numpy(rng.choice([-1.0, 1.0], size=x.shape))
    signs = torch.sign(right[0]) * signs[:, :1] if rng.random() < 0.5 else signs
    own, added = (
        torch.from_numpy(rng.choice([-1.0, 1.0], size=each.shape)) * each
        for each in (heads.below.own, heads.turn.own)
    )
    straight = (x * signs) @ heads.below.weight.mT + own
    first, second = straight.chunk(2, -1)
    turned = torch.cat([-second, first], -1) * heads.turn.sin
    return (straight * heads.turn.cos + turned + added)[list(heads.groups)]


def scaled(heads: TurnedHeads, share: float) -> TurnedHeads:
    """Return heads with a share of their part from x."""
    below = replace(heads.below, error_bound=heads.below.error_bound * share, ellipsoids={})
    return replace(heads, below=below)


@pytest.mark.parametrize(
    "rule",
    [
        "scores of turned keys",
        pytest.param("scores of turned and shared keys", marks=pytest.mark.full),
    ],
)
def test_products_of_rotated_errors_are_within_the_bound(rule: str) -> None:
    rng = np.random.default_rng(5)
    graph = RULES[rule](rng)
    centre = torch.from_numpy(np.rint(rng.standard_normal(graph.input_shape) * 8) / 8)
    spread = torch.full((1, 1), 2.0**-6, dtype=torch.float64)
    record = proofs.numerics("bfloat16", "any")
    run = affine_run(block(graph), parameters(graph, record), centre, spread, 2.0**-24)
    node = next(node for node in block(graph).nodes if node.role == "scores")
    query, key = turned_heads(run, node, 0), turned_heads(run, node, 1, transposed=True)
    assert query is not None
    assert key is not None
    for shares in ((1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):  # of what comes from x
        one, other = (scaled(part, by) for part, by in zip((query, key), shares, strict=True))
        bound, nearest = bilinear_remainder(one, other), 0.0
        for _ in range(60):
            product = (errors(one, rng) @ errors(other, rng).mT).abs()
            assert bool((product <= bound * (1 + 1e-12)).all())
            nearest = max(nearest, float((product / bound).max()))
        assert nearest > 0.2
