"""Float64 errors of linear bounds in the checker: unrounded kernels, one with coarser weights.

With formats of 400 bits, linear bounds cover only the checker's own rounding and remainders of
second order. The exact deviation and drift must lie inside at every node, and so must every
functional of both; at a point these bounds must be small.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.bounds_walk import walk
from kcdsl_certs.recheck.interval.state import DriftProblem
from kcdsl_certs.recheck.linear_bounds.context import Context
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch
from tests.support import proofs
from tests.support.ball import numbers, runs
from tests.support.ball.bounds import Setting
from tests.support.ball.points import corner
from tests.support.ball.unrounded import round_nothing
from tests.support.plane_blocks import RULES

Floats = np.ndarray
TRAIN = proofs.numerics("float64", "nearest", accumulate="float64", exp_ulps=0)
INFER = proofs.numerics(
    "float64", "nearest", accumulate="float64", exp_ulps=0, weights=("fp8_e4m3", "per_channel")
)
READ = sorted(set(RULES) - {"embedding"})  # operations directly on an input


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_nothing(monkeypatch)


def exactly(graph: Any, scene: DriftProblem, x: Floats) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of both kernels at every node."""
    found = []
    for record, kernel in ((TRAIN, scene.train), (INFER, scene.infer)):

        def plain(key: str, kernel: Any = kernel) -> Floats:
            return np.asarray(scene.parameters.plain(key, kernel))

        def linear(key: str, kernel: Any = kernel) -> Floats:
            return np.asarray(scene.parameters.linear(key, kernel))

        found.append(runs.run(graph, record, x, plain, linear, 0, "up", exact=True))
    return found[0], found[1]


def inside(course: Context, name: str, e: Any, d: Any, rng: np.random.Generator) -> None:
    """Fail unless deviation and drift of a node, and functionals of both, are within bounds."""
    entry = course.tape.entries[course.places[name]]
    for what, value, box in (("e", e, entry.e), ("D", d, entry.d)):
        where = numbers.outside(value, box.lo, box.hi)
        assert not where, (name, what, where)
    for share in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        weights = [part * rng.standard_normal((4, *e.shape)) for part in share]
        a, b = (Adjoint(w, (0,) * e.ndim) if w.any() else None for w in weights)
        low, high = course.tape.between(course.places[name], FunctionalBatch(a, b))
        for k in range(4):
            ours = [numbers.balls(w[k]) * part for w, part in zip(weights, (e, d), strict=True)]
            seen = ours[0].sum() + ours[1].sum()
            assert not seen < numbers.arb(float(low[k])), (name, share)
            assert not seen > numbers.arb(float(high[k])), (name, share)


@pytest.mark.sample(3)
@pytest.mark.parametrize("radius", [0.0, 2.0**-14])
@pytest.mark.parametrize("rule", READ)
def test_exact_deviations_and_drifts_are_within_linear_bounds(
    tmp_path: Path, rule: str, radius: float
) -> None:
    rng = np.random.default_rng([READ.index(rule), int(radius * 2**14)])
    graph = RULES[rule](rng)
    centre = rng.standard_normal(graph.input_shape)
    scene = Setting(graph, TRAIN, INFER, centre, radius).problem(tmp_path)
    with np.errstate(all="ignore"):
        course = walk(scene)
    compared = 0
    for x in (corner(centre, radius, rng) for _ in range(2)):
        t, i = exactly(graph, scene, x)
        for name, place in course.places.items():
            if name not in t:
                continue
            entry = course.tape.entries[place]
            e = numbers.balls(t[name]) - numbers.balls(entry.reference)
            inside(course, name, e, numbers.balls(i[name]) - numbers.balls(t[name]), rng)
            compared += 1
            if radius == 0:
                size = 1 + float(np.abs(entry.reference).max())
                assert (entry.e.hi - entry.e.lo).max() <= 2.0**-30 * size, name
    assert compared > 0
