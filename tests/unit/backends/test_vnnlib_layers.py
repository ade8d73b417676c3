"""Queries about ReLU layers: recognised, decided by input splits, and compared with samples."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from kcdsl_backends.vnnlib.evaluation import Point
from kcdsl_backends.vnnlib.query import Relation
from kcdsl_backends.vnnlib.search import decide
from kcdsl_backends.vnnlib.verify import read_problem
from tests.support.networks import box, declared, model_of, moved, perceptron, saved

SIZES = (3, 12, 10, 2)
PAIR = (
    "(vnnlib-version <2.0>)\n"
    + declared("N", "X", "Y", 3, 2)
    + declared("M", "U", "V", 3, 2, "(isomorphic-to N)")
    + box("X", 3, -1.0, 1.0)
    + "(assert (and (== X[0,0] U[0,0]) (== X[0,1] U[0,1]) (== X[0,2] U[0,2])))\n"
)


def files_of(tmp_path: Path, *models: onnx.ModelProto) -> dict[str, Path]:
    names = ("N", "M")
    return {n: saved(m, tmp_path / f"{n}.onnx") for n, m in zip(names, models, strict=False)}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "query.vnnlib"
    path.write_text(text, encoding="utf-8")
    return path


def pair(seed: int, by: float = 0.02) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    generator = np.random.default_rng(seed)
    one = perceptron(generator, SIZES)
    return one, moved(one, generator, by)


def weights_of(model: onnx.ModelProto) -> list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    return [numpy_helper.to_array(one).astype(np.float64) for one in model.graph.initializer]


def apart(limit: str, relation: str = ">") -> str:
    other = {">": "<", ">=": "<="}[relation]
    drift = "(- V[0,0] Y[0,0])"
    return f"(assert (or ({relation} {drift} {limit}) ({other} {drift} -{limit})))"


def test_layers_are_read_from_a_query(tmp_path: Path) -> None:
    models = pair(0)
    problem = read_problem(written(tmp_path, PAIR + apart("0.25")), files_of(tmp_path, *models))
    assert problem.layers is not None
    for model, layers in zip(models, problem.layers.networks, strict=True):
        held = weights_of(model)
        for (weight, bias), matrix, vector in zip(layers, held[::2], held[1::2], strict=True):
            np.testing.assert_array_equal(weight, matrix.T)
            np.testing.assert_array_equal(bias, vector)
    # 4 (V0 - Y0) > 1 is 1 + 4 Y0 - 4 V0 < 0
    first = problem.layers.sums[0]
    assert (first.inputs, first.constant) == ((0.0, 0.0, 0.0), Fraction(1))
    assert first.outputs == ((4.0, 0.0), (-4.0, 0.0))


def test_residual_network_is_not_recognised_as_layers(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.eye(2, dtype=np.float32), "w")
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("Add", ["h", "x"], ["y"])]
    file = saved(model_of(nodes, [weight], [1, 2], [1, 2]), tmp_path / "n.onnx")
    text = "(vnnlib-version <2.0>)\n" + declared("N", "X", "Y", 2, 2) + box("X", 2, -1.0, 1.0)
    problem = read_problem(written(tmp_path, text + "(assert (> Y[0,0] 3.0))"), {"N": file})
    assert problem.layers is None


@pytest.mark.parametrize("asserted", [
    "(assert (> (* Y[0,0] Y[0,1]) 3.0))",  # not a sum
    "(assert (> Y[0,0] 0.12345678901234567890123))",  # no exact coefficient
])  # fmt: skip
def test_nonlinear_sums_are_not_recognised(tmp_path: Path, asserted: str) -> None:
    problem = read_problem(written(tmp_path, PAIR + asserted), files_of(tmp_path, *pair(0)))
    assert problem.layers is None


def limits(relation: Relation, tmp_path: Path, high: int = 1) -> tuple[str, Fraction]:
    """Decide whether 1 - relu(x) satisfies a relation with 0 for some x in [-1, high]."""
    nodes = [helper.make_node("Relu", ["x"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    weight = numpy_helper.from_array(np.eye(1, dtype=np.float32), "w")
    file = saved(model_of(nodes, [weight], [1, 1], [1, 1]), tmp_path / "n.onnx")
    text = "(vnnlib-version <2.0>)\n" + declared("N", "X", "Y", 1, 1) + box("X", 1, -1.0, 1.0)
    problem = read_problem(written(tmp_path, text + "(assert (>= Y[0,0] 1.0))"), {"N": file})
    assert problem.layers is not None
    found = problem.layers.decided([Fraction(-1)], [Fraction(high)], [[(0, relation)]], 1.0)
    assert found is not None
    return found.verdict, (found.point or (Fraction(0),))[0]


def test_every_relation_is_decided(tmp_path: Path) -> None:
    assert limits("<=", tmp_path) == ("counterexample", Fraction(1))
    assert limits("==", tmp_path) == ("counterexample", Fraction(1))
    verdict, x = limits("<=", tmp_path, 4)
    assert verdict == "counterexample"
    assert x > 1
    # the search meets an equation only at a corner; an equation it misses is never disproved
    verdict, x = limits("==", tmp_path, 4)
    assert (verdict, x) == ("counterexample", Fraction(1)) or verdict == "unknown"


def test_conjunction_without_inequality_is_not_decided(tmp_path: Path) -> None:
    problem = read_problem(written(tmp_path, PAIR + apart("0.25")), files_of(tmp_path, *pair(0)))
    assert problem.layers is not None
    ends = [Fraction(-1)] * 3, [Fraction(1)] * 3
    assert problem.layers.decided(*ends, [[(0, "<=")], [(0, "!=")]], 5.0) is None
    assert problem.layers.decided(*ends, [[]], 5.0) is None


@pytest.mark.full
def test_random_layers_agree_with_samples(tmp_path: Path) -> None:
    """No sample violates `unsat`; a point of `sat` satisfies the query exactly."""
    reasons = []
    for seed in range(10):
        models = pair(seed)
        files, limit = files_of(tmp_path, *models), ("0.08", "0.12", "0.2")[seed % 3]
        problem = read_problem(written(tmp_path, PAIR + apart(limit)), files)
        found = decide(problem, 60.0)
        reasons.append((found.answer, "derived again" in found.reason))
        draws = np.random.default_rng(seed).uniform(-1, 1, (4000, 3))
        outputs = []
        for model in models:
            held, x = weights_of(model), draws
            for k in range(0, len(held), 2):
                x = x @ held[k] + held[k + 1]
                x = np.maximum(x, 0.0) if k < len(held) - 2 else x
            outputs.append(x[:, 0])
        away = np.abs(outputs[1] - outputs[0]).max()
        if found.answer == "unsat":
            assert away <= float(limit) + 1e-9
        else:
            assert found.answer == "sat"
            assert found.point is not None
            point = Point.at(problem.program, found.point.x)
            near = {n: float(point.near(problem.tensors[n])[0]) for n in ("Y", "V")}
            assert abs(near["V"] - near["Y"]) > float(limit) - 1e-12
    assert ("unsat", True) in reasons
    assert {answer for answer, _ in reasons} == {"sat", "unsat"}
