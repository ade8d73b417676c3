"""No run of two kernels on any θ' in a weight ball leaves the boxes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.model.graph import Node
from kcdsl.model.numerics.weights import linear_weight, plain_parameter
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.boxes.weight_ball import WeightBall
from kcdsl_backends.drift.functionals import drift_bound
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.affine_walk import pair
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.graphs.graph import array_digest
from kcdsl_certs.recheck.interval import weight_ball
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.interval.state import Mask, numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from tests.support import kernels, proofs, prover
from tests.support.grids import by_turns
from tests.support.rationals import nearby as rational
from tests.support.rationals.exact import recheck_exactly

RHOS = (Fraction(1, 2**20), Fraction("0.0001"), Fraction(1, 2**8), Fraction(1, 3))
STORED = (
    proofs.numerics("float32"),
    proofs.numerics("float64", accumulate="float64"),
    proofs.numerics("bfloat16"),
    proofs.numerics("float16"),
    proofs.numerics("tfloat32"),
    proofs.numerics("bfloat16", weights=("fp8_e4m3", "none")),
    proofs.numerics("float16", weights=("bfloat16", "none")),
    proofs.numerics("bfloat16", weights=("fp8_e4m3", "per_tensor")),
    proofs.numerics("bfloat16", weights=("fp8_e5m2", "per_channel")),
    proofs.numerics("float32", weights=("fp8_e4m3", "block_128")),
    proofs.numerics("float32", weights=("fp8_e4m3", "group_128")),
    proofs.numerics("float16", weights=("int8", "per_channel")),
    proofs.numerics("bfloat16", weights=("int8", "per_tensor")),
    proofs.numerics("float32", weights=("int8_full", "per_channel")),
    proofs.numerics("bfloat16", weights=("int8_full", "per_tensor")),
    proofs.numerics("bfloat16", weights=("fp8_e4m3", "mx")),
    proofs.numerics("float32", weights=("fp8_e5m2", "mx")),
    proofs.numerics("bfloat16", weights=("int8", "per_channel"), activations=("int8", "per_token")),
    proofs.numerics("bfloat16", weights=("bfloat16", "none", "toward_zero")),
    proofs.numerics("float16", weights=("fp8_e4m3", "none", "toward_zero")),
    proofs.numerics(
        "bfloat16",
        "any",
        weights=("float32", "none"),
        activations=("uint8", "per_tensor"),
    ),
)
"""Numerics with different storage of parameters."""


PAIRS = {
    "bfloat16 against float32": (
        proofs.numerics("float32", "nearest"),
        proofs.numerics("bfloat16", "nearest"),
    ),
    "free fused bfloat16 against itself": (
        proofs.numerics("bfloat16", "any", style="fused", scores="float32"),
        proofs.numerics("bfloat16", "any"),
    ),
    "fp8 weights per channel": (
        proofs.numerics("bfloat16", "nearest"),
        proofs.numerics("bfloat16", "nearest", weights=("fp8_e4m3", "per_channel")),
    ),
    "fp8 weights per tensor, fp8 activations": (
        proofs.numerics("float32", "any"),
        proofs.numerics(
            "bfloat16",
            "nearest",
            weights=("fp8_e4m3", "per_tensor"),
            activations=("fp8_e4m3", "per_token"),
        ),
    ),
    "mx against int8": (
        proofs.numerics("float32", "nearest", weights=("fp8_e4m3", "mx")),
        proofs.numerics("float16", "any", weights=("int8", "per_channel")),
    ),
    "cut off against rounded": (
        proofs.numerics("bfloat16", "any_direction"),
        proofs.numerics("bfloat16", "toward_zero", weights=("bfloat16", "none", "toward_zero")),
    ),
}


def near(rng: np.random.Generator, w: np.ndarray, rho: Fraction, how: str) -> np.ndarray:
    """Return a float32 θ' with |θ' - θ| ≤ ρ|θ| in exact arithmetic."""
    size = w.astype(np.float64)
    step = float(rho)
    match how:
        case "ends":
            by = rng.choice([-step, step], w.shape)
        case "outward":
            by = np.full(w.shape, step)
        case "one outward":
            by = np.where(np.abs(size) == np.abs(size).max(), step, -step)
        case _:
            by = rng.uniform(-step, step, w.shape)
    found = (size * (1 + by)).astype(np.float32)
    for place in np.ndindex(*w.shape):
        while abs(Fraction(float(found[place])) - Fraction(float(w[place]))) > rho * abs(
            Fraction(float(w[place]))
        ):
            found[place] = np.nextafter(found[place], np.float32(w[place]))
    return found


def some_weights(rng: np.random.Generator) -> np.ndarray:
    """Return a matrix with rows of many sizes, outliers, ties of formats, zeros, a zero row."""
    w = rng.standard_normal((6, 40)) * 2.0 ** rng.integers(-6, 3, (6, 1))
    w[1, 3] = 30.0
    w[2, :8] = np.array([1.0625, 0.40625, 0.0, -1.0, 1.00390625, -0.5, 2.0**-9, 3.0])
    w[4] = 0.0
    w[5, 1] = 2.0**-30
    return w.astype(np.float32)


def held(record: Any, w: np.ndarray, use: str) -> np.ndarray:
    store = linear_weight if use == "linear" else plain_parameter
    return store(torch.from_numpy(w), prover.numerics(record)).numpy().astype(np.float64)


def contains(box: Any, value: np.ndarray) -> bool:
    lo, hi = (np.asarray(end) for end in (box.lo, box.hi))
    return bool(((lo <= value) & (value <= hi)).all())


@pytest.mark.sample(3)
@by_turns(one_of=2, one=range(len(STORED)), rho=RHOS)
def test_stored_values_and_their_difference_are_enclosed(one: int, rho: Fraction) -> None:
    rng = np.random.default_rng([one, rho.denominator])
    w = some_weights(rng)
    tensors = {"w": torch.from_numpy(w)}
    node = Node("n", "param", (), w.shape, {"key": "w"}, "")
    partners = (STORED[0], STORED[2], STORED[(one + 3) % len(STORED)], STORED[one])
    for other in partners:
        records = STORED[one], other
        train, infer = (prover.numerics(record) for record in records)
        around = WeightBall(rho, tensors, train, infer, torch.device("cpu"))
        specs = _kernels(*records)
        for use in ("plain", "linear"):
            mine = around.held(node, linear=use == "linear")
            theirs = weight_ball.both(w.astype(np.float64), rho, specs, use == "linear", "w")
            for how in ("ends", "outward", "one outward", "inside", "ends", "inside"):
                moved = near(rng, w, rho, how)
                t, i = held(STORED[one], moved, use), held(other, moved, use)
                for boxes in ((mine.train, mine.infer, mine.difference), theirs):
                    assert contains(boxes[0], t)
                    assert contains(boxes[1], i)
                    assert contains(boxes[2], i - t)
            for one_box, two_box in zip(
                (mine.train, mine.infer, mine.difference), theirs, strict=True
            ):
                _agree(one_box, two_box, np.abs(w).max())


@pytest.mark.sample(16)
@pytest.mark.parametrize("rho", RHOS[1:])
@pytest.mark.parametrize("one", range(len(STORED)))
def test_exact_tier_agrees_on_stored_parameters(one: int, rho: Fraction) -> None:
    rng = np.random.default_rng([one, rho.denominator, 1])
    w = some_weights(rng)[:, ::5].copy()
    specs = _kernels(STORED[one], STORED[(one + 2) % len(STORED)])
    numbers = [Fraction(float(value)) for value in w.ravel()]
    for linear in (False, True):
        doubles = weight_ball.both(w.astype(np.float64), rho, specs, linear, "w")
        exact = rational.both(w.shape, numbers, rho, specs, linear)
        for how in ("ends", "outward", "inside"):
            moved = near(rng, w, rho, how)
            use = "linear" if linear else "plain"
            stored = [held(STORED[k % len(STORED)], moved, use) for k in (one, one + 2)]
            for cells, value in zip(exact, (*stored, stored[1] - stored[0]), strict=True):
                pairs = zip(cells.pairs, value.ravel(), strict=True)
                assert all(lo <= Fraction(float(v)) <= hi for (lo, hi), v in pairs)
        size = float(np.abs(w).max())
        for cells, boxed in zip(exact, doubles, strict=True):
            lows = np.array([float(lo) for lo, _ in cells.pairs]).reshape(w.shape)
            highs = np.array([float(hi) for _, hi in cells.pairs]).reshape(w.shape)
            assert (boxed.lo <= lows + 2.0**-50 * size).all()
            assert (highs - 2.0**-50 * size <= boxed.hi).all()


@pytest.mark.parametrize("kernel_pair", PAIRS)
def test_exact_tier_confirms_the_float64_tier(tmp_path: Path, kernel_pair: str) -> None:
    graph = proofs.piecewise(np.random.default_rng(8))
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = np.random.default_rng(9).standard_normal(graph.input_shape).astype(np.float32)
    document = around(proofs.document(graph, *PAIRS[kernel_pair], sha256, centre), RHOS[2])
    found = recheck(proofs.dump(document), path)
    exact = recheck_exactly(proofs.dump(document), path)
    assert found.ok, found
    assert exact.ok, exact
    bounds = float.fromhex(found.bound), float.fromhex(exact.bound)
    assert bounds[1] <= bounds[0] * (1 + 2.0**-40)
    assert bounds[0] <= bounds[1] * 1.5  # roundings to nearest may fall on either side of a step


def _kernels(train: Any, infer: Any) -> tuple[Any, Any]:
    from kcdsl_certs.recheck.numerics.specification import parse_kernel

    return parse_kernel(train, "train"), parse_kernel(infer, "infer")


def _agree(one: Box, two: Any, size: float) -> None:
    for a, b in ((one.lo, two.lo), (one.hi, two.hi)):
        assert np.abs(a.numpy() - b).max() <= 2.0**-40 * size


def test_boxes_of_stored_parameters_are_tight() -> None:
    """At small ρ most codes are certain, so the difference is known up to ρ itself."""
    rng = np.random.default_rng(3)
    w = some_weights(rng)
    node = Node("n", "param", (), w.shape, {"key": "w"}, "")
    records = proofs.numerics(), proofs.numerics(weights=("fp8_e4m3", "per_channel"))
    train, infer = (prover.numerics(record) for record in records)
    rho = Fraction(1, 2**20)
    tensors = {"w": torch.from_numpy(w)}
    moved = WeightBall(rho, tensors, train, infer, torch.device("cpu")).held(node, linear=True)
    known = held(records[1], w, "linear") - w
    width = (moved.difference.hi - moved.difference.lo).numpy()
    assert (width <= 5 * float(rho) * np.abs(w) + 2.0**-130).mean() > 0.95
    assert contains(moved.difference, known)


def test_equally_stored_parameter_has_no_drift() -> None:
    w = some_weights(np.random.default_rng(1))
    node = Node("n", "param", (), w.shape, {"key": "w"}, "")
    coarse = prover.numerics(proofs.numerics("bfloat16"))
    tensors = {"w": torch.from_numpy(w)}
    around = WeightBall(Fraction(1, 4), tensors, coarse, coarse, torch.device("cpu"))
    assert float(around.held(node, linear=False).difference.mag().max()) == 0.0
    specs = _kernels(proofs.numerics("bfloat16"), proofs.numerics("bfloat16"))
    assert not weight_ball.both(w.astype(np.float64), Fraction(1, 4), specs, True, "w")[2].hi.any()


BLOCKS = ("attention", "gelu", "silu", "piecewise")


def build(block: str, rng: np.random.Generator) -> Any:
    if block == "attention":
        return proofs.attention(rng)
    return proofs.piecewise(rng) if block == "piecewise" else proofs.mlp(rng, block)


def around(document: Any, rho: Fraction) -> Any:
    from kcdsl_certs.encoding.reals import real_text

    for case in document["cases"]:
        case["region"]["weights"] = real_text(rho)
    return document


@pytest.mark.full
@by_turns(block=BLOCKS, kernel_pair=PAIRS, rho=RHOS[1:])
def test_runs_on_later_weights_are_within_the_boxes(
    tmp_path: Path, block: str, kernel_pair: str, rho: Fraction
) -> None:
    rng = np.random.default_rng(
        [BLOCKS.index(block), list(PAIRS).index(kernel_pair), rho.denominator]
    )
    graph = build(block, rng)
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**14) / 2**14
    records = PAIRS[kernel_pair]
    document = around(proofs.document(graph, *records, sha256, centre, 0.0), rho)
    proof = parse(proofs.dump(document))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    with np.errstate(all="ignore"):
        states = {node.name: value for node, value in propagate(scene)}
    mine = _prover(graph, records, rho).bound(
        torch.from_numpy(centre), torch.zeros(1, 1, dtype=torch.float64)
    )
    boxes, sizes = _affine(_prover(graph, records, rho), scene, centre)
    assert boxes or rho > Fraction(1, 100)
    worst = 0.0
    for trial in range(12):
        how = ("ends", "inside", "outward", "one outward")[trial % 4]
        moved = {key: near(rng, w, rho, how) for key, w in graph.tensors.items()}
        later = tmp_path / "later.safetensors"
        proofs.write_safetensors(later, moved)
        digests = {
            key: array_digest("float32", w.shape, w.astype("<f4").tobytes())
            for key, w in moved.items()
        }
        parameters = Parameters(read(later).tensors, digests)
        modes = [("random", "random"), ("signs", "signs"), ("up", "down")][trial % 3]
        found = []
        for record, kernel, mode in zip(records, (proof.train, proof.infer), modes, strict=True):
            run = kernels.Run(record, np.random.default_rng(rng.integers(2**32)), mode)
            found.append(
                kernels.simulate(
                    graph,
                    run,
                    centre,
                    lambda key, k=kernel, held=parameters: held.plain(key, k),
                    lambda key, k=kernel, held=parameters: held.linear(key, k),
                )
            )
        for name, state in states.items():
            if isinstance(state, Mask):
                continue
            t, i = found[0][name], found[1][name]
            slack = 2.0**-46 * np.maximum(np.abs(t), np.abs(i)).max()
            boxed = numeric(state)
            for box, value in ((boxed.t, t), (boxed.i, i), (boxed.d, i - t)):
                assert ((box.lo - slack <= value) & (value <= box.hi + slack)).all(), (name, how)
        t, i = found[0][graph.output], found[1][graph.output]
        assert contains(mine.output.drift.widen(torch.full((), slack)), i - t)
        for what, box in boxes.items():
            assert (np.asarray(box.lo) - slack <= i - t).all(), what
            assert (i - t <= np.asarray(box.hi) + slack).all(), what
        for witness in sizes:
            for name, (value, drift) in witness.items():
                t, i = found[0][name], found[1][name]
                if t.dtype != bool:
                    assert np.abs(t).max() <= value + slack, name
                    assert np.abs(i - t).max() <= drift + slack, name
        t, i = found[0][graph.output], found[1][graph.output]
        worst = max(worst, float(np.abs(i - t).max()))
    bound = drift_bound(mine.output.drift, "inf")
    assert 0 < worst <= bound * (1 + 2.0**-40)
    checked = numeric(states[graph.output]).d
    theirs = float(np.maximum(np.abs(checked.lo), np.abs(checked.hi)).max())
    assert theirs <= bound * (1 + 2.0**-10)
    assert bound <= theirs * 1.5  # roundings to nearest may fall on either side of a step


def _affine(problem: BlockProblem, scene: Any, centre: np.ndarray) -> tuple[Any, Any]:
    """Return the boxes of the output and the sizes of all nodes by affine forms of both programs.

    Empty where the region is too wide for them.
    """
    zero = torch.zeros(1, 1, dtype=torch.float64)
    try:
        forms = problem.forms(torch.from_numpy(centre), zero)
        boxes, sizes = {"prover": forms.box()}, [forms.witness()]
    except NoBound:
        return {}, []
    with np.errstate(all="ignore"):
        both = pair(scene)
        return {**boxes, "checker": both.output()}, [*sizes, both.sizes()]


def _prover(graph: Any, records: Any, rho: Fraction) -> BlockProblem:
    train, infer = (prover.parameters(graph, record) for record in records)
    problem = BlockProblem(prover.block(graph), train, infer)
    tensors = {key: torch.from_numpy(array) for key, array in graph.tensors.items()}
    one, two = (prover.numerics(record) for record in records)
    ball = WeightBall(rho, tensors, one, two, torch.device("cpu"))
    return replace(problem, weight_ball=ball)
