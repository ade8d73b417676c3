"""The checker's linear bounds alone: sound on runs, with no term missing."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.drift.boxes import Box as ProverBox
from kcdsl_backends.drift.linear.tape import ReluChange
from kcdsl_backends.drift.ops import softmax as attention
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.linear_bounds.tape import Polygon
from kcdsl_certs.recheck.ops.attention import softmax
from tests.support import proofs
from tests.support.grids import by_turns
from tests.support.mutation.bases import claimed
from tests.support.mutation.trials import exceeded
from tests.support.plane_blocks import RULES

N = proofs.numerics
ZERO = Fraction(0)
Floats = np.ndarray
PAIRS = {
    "float32 / bfloat16": (N("float32"), N("bfloat16")),
    "bfloat16 nearest / fp8": (
        N("bfloat16", "nearest", scores="float32"),
        N("float32", weights=("fp8_e4m3", "per_channel"), activations=("fp8_e4m3", "per_token")),
    ),
}


@pytest.mark.sample(6)
@by_turns(rule=RULES, pair=PAIRS, radius=[0.0, 2.0**-4])
def test_runs_are_within_the_derived_bounds(
    tmp_path: Path, rule: str, pair: str, radius: float
) -> None:
    """Values and drifts of every node, to the last bit of the derived bounds."""
    rng = np.random.default_rng([list(RULES).index(rule), list(PAIRS).index(pair)])
    graph = RULES[rule](rng)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    ids, centre = None, np.zeros(1)
    if graph.input_shape is None:
        ids = next(node["attrs"]["ids"] for node in graph.nodes if node["op"] == "embedding")
    else:
        centre = rng.standard_normal(graph.input_shape).astype(np.float32).astype(np.float64)
    document = proofs.document(graph, *PAIRS[pair], sha256, centre, radius, ids=ids)
    document["cases"][0]["domain"] = "planes"
    document = claimed(document, path)
    assert recheck(proofs.dump(document), path).ok
    assert exceeded(document, path, runs=12) == ""


# --- ReLU, in rational arithmetic -----------------------------------------------------------------


def corners(
    base: tuple[Fraction, ...], moved: tuple[Fraction, ...], result: tuple[Fraction, ...]
) -> list[tuple[Fraction, Fraction]]:
    """Return all corners of the pieces into which n = 0 and n + D = 0 cut a polygon."""
    lines = [(1, 0, c) for c in (*base, ZERO)]
    lines += [(0, 1, c) for c in moved]
    lines += [(1, 1, c) for c in (*result, ZERO)]
    found = []
    for (a, b, c), (p, q, r) in product(lines, lines):
        det = a * q - b * p
        if det == 0:
            continue
        n, d = Fraction(c * q - b * r, det), Fraction(a * r - c * p, det)
        if (
            base[0] <= n <= base[1]
            and moved[0] <= d <= moved[1]
            and result[0] <= n + d <= result[1]
        ):
            found.append((n, d))
    return found


def dyadic(rng: np.random.Generator, *shape: int) -> Floats:
    return np.rint(rng.standard_normal(shape) * 64) / 64


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("who", ["prover", "checker"])
def test_relu_bounds_touch_the_change_exactly(who: str, sign: float) -> None:
    rng = np.random.default_rng(17)
    count = 60
    n, d = dyadic(rng, 3, count), dyadic(rng, 3, count) / 2
    ends = [np.stack([v.min(axis=0), v.max(axis=0)]) for v in (n, d, n + d)]
    a, b = dyadic(rng, count), dyadic(rng, count)
    if who == "checker":
        c, error = Polygon(*(Box(*e) for e in ends)).raised_by(a, b, sign)
    else:
        boxes = (ProverBox(*(torch.from_numpy(v) for v in e)) for e in ends)
        made = ReluChange(*boxes).heights(torch.from_numpy(a), torch.from_numpy(b), sign)
        c, error = (v.numpy() for v in made)
    for k in range(count):
        base, moved, result = (tuple(Fraction(float(v)) for v in e[:, k]) for e in ends)
        slopes = Fraction(float(a[k])), Fraction(float(b[k]))
        rest = [
            int(sign) * (max(x + y, ZERO) - max(x, ZERO) - slopes[0] * x - slopes[1] * y)
            for x, y in corners(base, moved, result)
        ]
        most = int(sign) * Fraction(float(c[k])) + Fraction(float(error[k]))
        assert most >= max(rest)
        assert error[k] < 1e-12


# --- softmax --------------------------------------------------------------------------------------


def by_prover(low: Floats, high: Floats, place: Floats) -> Floats:
    box = ProverBox(torch.from_numpy(low), torch.from_numpy(high))
    return attention._on_the_way(box, torch.from_numpy(place)).numpy()


def by_checker(low: Floats, high: Floats, place: Floats) -> Floats:
    return softmax.on_the_way(Box(low, high), place)


@pytest.mark.parametrize("bound", [by_prover, by_checker])
def test_scores_between_the_two_kernels_are_covered(bound: Callable[..., Any]) -> None:
    """Also where the box of a drift is not centred at the midpoint drift."""
    rng = np.random.default_rng(2)
    ends = np.sort(rng.standard_normal((2, 200)), axis=0)
    place = rng.standard_normal(200)
    found = bound(ends[0], ends[1], place)
    reached = np.zeros(200)
    for _ in range(200):
        delta = rng.uniform(ends[0], ends[1])
        delta = np.where(rng.random(200) < 0.5, delta, ends[int(rng.random() < 0.5)])
        step = np.abs(rng.choice([0.0, 1.0, rng.random()]) * delta - place)
        assert (step <= found + 1e-15).all()
        reached = np.maximum(reached, step)
    assert (reached >= found - 1e-12).all()
