"""Bounds of programs of networks enclose their exact values (docs/reference/vnnlib.md)."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

from kcdsl.diagnostics.spans import SourceFile
from kcdsl.model.onnx.files import read_onnx
from kcdsl_backends.vnnlib import bounds
from kcdsl_backends.vnnlib.bounds import NodeBox, Plane, enclosed, linear_lower, sum_ends
from kcdsl_backends.vnnlib.evaluation import Point
from kcdsl_backends.vnnlib.problem import query_problem
from kcdsl_backends.vnnlib.query import parse_query
from tests.support.networks import KINDS, box, declared, moved, perceptron, saved

pytestmark = pytest.mark.full


def check(seed: int, folder: Path) -> None:
    """Compare bounds of a random pair on random boxes with exact values at points of them."""
    generator = np.random.default_rng(seed)
    plain = ("Relu", "LeakyRelu", "Abs")
    kinds = tuple(str(k) for k in generator.choice(KINDS, size=3)) if seed % 2 else plain
    n, m = (int(k) for k in generator.integers(1, 4, size=2))
    hidden = [int(k) for k in generator.integers(2, 6, size=generator.integers(1, 4))]
    one = perceptron(generator, (n, *hidden, m), kinds)
    two = moved(one, generator, float(generator.choice([0, 1e-3, 0.1])))
    files = {
        name: read_onnx(saved(model, folder / f"{name}.onnx"))
        for name, model in (("N", one), ("M", two))
    }
    equal = " ".join(f"(== X[0,{i}] U[0,{i}])" for i in range(n))
    text = (
        "(vnnlib-version <2.0>)"
        + declared("N", "X", "Y", n, m)
        + declared("M", "U", "V", n, m, "(isomorphic-to N)")
        + box("X", n, -1.0, 1.0)
        + f"(assert (and {equal}))(assert (> (- Y[0,0] V[0,0]) 0.1))"
        + f"(assert (> (* Y[0,0] V[0,{m - 1}] X[0,0]) 0.3))"
    )
    problem = query_problem(parse_query(SourceFile("q", text)), files)
    middle = generator.uniform(-1, 1, (4, n))
    radius = generator.choice([1e-9, 0.01, 0.3, 1.0], size=(4, 1))
    low, high = np.maximum(middle - radius, -1), np.minimum(middle + radius, 1)
    boxes = enclosed(problem.program, low, high)
    least, ends = linear_lower(boxes, problem.sums), sum_ends(boxes, problem.sums)
    for i in range(len(low)):
        x = np.clip(low[i] + (high[i] - low[i]) * generator.random(n), low[i], high[i])
        if i % 2:
            x = np.where(generator.random(n) < 0.5, low[i], high[i])
        point = Point.at(problem.program, [Fraction(v) for v in x])
        for name, model in (("Y", one), ("V", two)):
            (wanted,) = ReferenceEvaluator(model).run(None, {"x": x[None].astype(np.float32)})
            assert np.allclose(point.near(problem.tensors[name]), wanted[0], atol=2e-4, rtol=1e-3)
        there = sum_ends(point.boxes, problem.sums)
        exact = point.exactly(problem.sums)
        for j in range(problem.sums.size):
            value = Fraction(there.hi[0, j]) if exact is None else exact[j]
            assert value >= Fraction(least[i, j])
            assert value >= Fraction(ends.lo[i, j])
            assert exact is None or value <= Fraction(ends.hi[i, j])


@pytest.mark.parametrize("seed", range(16))
def test_vnnlib_bounds_enclose_exact_values(seed: int, tmp_path: Path) -> None:
    check(seed, tmp_path)


def _low_plane(plane: Callable[..., Any]) -> Callable[..., Any]:
    def made(*given: Any) -> Any:
        below, above = plane(*given)
        return below, Plane(above.slopes, above.offset - 0.05)

    return made


def _narrow(ends: NodeBox) -> NodeBox:
    return NodeBox(ends.lo, ends.hi - 0.02 * np.abs(ends.hi))


@pytest.mark.parametrize("planted", [
    "_relu_planes", "_difference_planes", "_product_planes", "_square_planes", "relu", "difference"
])  # fmt: skip
def test_planted_defects_are_found(
    planted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if planted.endswith("planes"):
        monkeypatch.setattr(bounds, planted, _low_plane(getattr(bounds, planted)))
    else:
        rule = bounds.KINDS[planted]
        defect = {**bounds.KINDS, planted: lambda block, ends: _narrow(rule(block, ends))}
        monkeypatch.setattr(bounds, "KINDS", defect)
    with pytest.raises(AssertionError):
        checks(40, tmp_path)


def checks(count: int, folder: Path) -> None:
    for seed in range(count):
        check(seed, folder)
