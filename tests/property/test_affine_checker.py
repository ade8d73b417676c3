"""The checker's affine forms compared with simulated runs: every node, every kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine.form import Form, Walk
from kcdsl_certs.recheck.affine_walk import drift, walk
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import kernels, proofs
from tests.support.affine_rules import RULES
from tests.support.grids import by_turns

N = proofs.numerics
Derived = TypeVar("Derived")
KERNELS = {
    "float32 any": N("float32", "any"),
    "float32 any, fused": N("float32", "any", style="fused"),
    "float32 nearest, fused": N("float32", "nearest", style="fused"),
    "tfloat32-like scores": N("float32", "nearest", scores="bfloat16"),
    "bfloat16 nearest": N("bfloat16", "nearest", scores="bfloat16"),
    "bfloat16 any": N("bfloat16", "any"),
    "bfloat16 any, fused": N("bfloat16", "any", style="fused", scores="float32"),
    "float16 nearest, fused": N("float16", "nearest", style="fused", scores="float32"),
    "float16 any": N("float16", "any"),
    "fp8 weights, nearest": N("bfloat16", "nearest", weights=("fp8_e4m3", "per_channel")),
    "fp8 weights and activations": N(
        "bfloat16", "any", weights=("fp8_e4m3", "block_128"), activations=("fp8_e4m3", "per_token")
    ),
    "mx, nearest": N(
        "float32", "nearest", weights=("fp8_e4m3", "mx"), activations=("fp8_e4m3", "mx")
    ),
    "fp8 nearest, per token": N(
        "bfloat16",
        "nearest",
        weights=("fp8_e4m3", "per_channel"),
        activations=("fp8_e4m3", "per_token"),
    ),
    "int8 nearest, per tensor": N(
        "float32", "nearest", weights=("int8", "per_channel"), activations=("int8", "per_tensor")
    ),
    "int8, uint8": N(
        "float32", "any", weights=("int8", "per_channel"), activations=("uint8", "per_token")
    ),
    "fp8 probabilities": N(
        "float16", "nearest", style="fused", scores="float32", probabilities="fp8_e4m3"
    ),
    "fp8 probabilities, composed": N("bfloat16", "nearest", probabilities="fp8_e4m3"),
    "float64": N("float64", "any", accumulate="float64"),
    "float16 accumulation": N("float16", "any", accumulate="float16", scores="float32"),
    "int8 full nearest": N(
        "float32",
        "nearest",
        weights=("int8_full", "per_channel"),
        activations=("int8_full", "per_token"),
    ),
    "uint8 nearest": N("float32", "nearest", activations=("uint8", "per_tensor")),
    "fp8 static": N(
        "bfloat16",
        "nearest",
        weights=("fp8_e4m3", "per_channel"),
        activations=proofs.static("fp8_e4m3", 0.1),
    ),
    "uint8 static, any": N("float32", "any", activations=proofs.static("uint8", 0.3, 127)),
    "bfloat16 toward zero": N("bfloat16", "toward_zero", scores="bfloat16"),
    "float16 toward zero, fused": N(
        "float16", "toward_zero", style="fused", weights=("float16", "none", "toward_zero")
    ),
    "bfloat16 any toward zero": N("bfloat16", "any_toward_zero"),
    "float16 any direction, fused": N("float16", "any_direction", style="fused"),
}
BLOCKS = ("attention", "encoder", "gelu", "silu", "tanh", "piecewise")
MODES = ("random", "signs", "up", "down")
# Coarse kernels behind a norm, or with large regions, may have no bound; these must have one.
FINE = ("float32 any", "float32 any, fused", "float32 nearest, fused", "float64")


def encoder(rng: np.random.Generator, rows: int = 4, heads: int = 2, size: int = 3) -> Any:
    """Return attention directly on the input without a mask, residual, layer norm, gelu MLP."""
    width = heads * size
    g = proofs.Graph((rows, width))
    x = g.add("input", [], (rows, width))
    h = g.add("add", [x, proofs.unmasked_attention(g, x, rng, rows, heads, size)], (rows, width))
    one = g.param("norm.weight", 1 + 0.1 * rng.standard_normal(width))
    zero = g.param("norm.bias", 0.1 * rng.standard_normal(width))
    h = g.add("layer_norm", [h, one, zero], (rows, width), eps=1e-5)
    up = g.param("up.weight", rng.standard_normal((2 * width, width)) / width**0.5)
    y = g.add("gelu", [g.add("linear", [h, up], (rows, 2 * width))], (rows, 2 * width))
    down = g.param("down.weight", rng.standard_normal((width, 2 * width)) / (2 * width) ** 0.5)
    y = g.add("add", [h, g.add("linear", [y, down], (rows, width))], (rows, width))
    g.add("layer_norm", [y, one, zero], (rows, width), eps=1e-5)
    return g


def build(block: str, rng: np.random.Generator) -> Any:
    if block == "attention":
        return proofs.attention(rng)
    if block == "encoder":
        return encoder(rng)
    return proofs.piecewise(rng) if block == "piecewise" else proofs.mlp(rng, block)


def scene_of(
    folder: Path, graph: Any, train: Any, infer: Any, centre: np.ndarray, radius: float
) -> Any:
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, train, infer, sha256, centre, radius)))
    return Derivation(proof, read(path).tensors).problem(proof.cases[0])


def point(rng: np.random.Generator, centre: np.ndarray, radius: float, trial: int) -> np.ndarray:
    moves = [
        np.zeros(centre.shape),
        rng.choice([-1.0, 1.0], centre.shape),
        np.rint(rng.uniform(-1, 1, centre.shape) * 512) / 512,
    ]
    return centre + radius * moves[trial % 3]


def simulated(
    graph: Any, record: Any, kernel: Any, parameters: Any, x: np.ndarray, seed: int, mode: str
) -> dict[str, np.ndarray]:
    run = kernels.Run(record, np.random.default_rng(seed), mode)
    return dict(
        kernels.simulate(
            graph,
            run,
            x,
            lambda key: parameters.plain(key, kernel),
            lambda key: parameters.linear(key, kernel),
        )
    )


def unless_boundless(derive: Callable[[], Derived]) -> Derived | None:
    """Return the derived value, or None where no bound is reported."""
    try:
        return derive()
    except Rejected as rejection:
        if rejection.reason != "bound/not-finite":
            raise
        return None


def stored_forms(found: Walk) -> list[tuple[str, Form]]:
    """Return the forms of the stored values of every node."""
    names = [name for name in found.forms if name not in found.named]
    forms = [(name, found.forms[found.reading(name)]) for name in names]
    return [(name, form) for name, form in forms if isinstance(form, Form)]


def check_forms(found: Walk, values: dict[str, np.ndarray]) -> None:
    """Assert that every node is within the error bound of its reference."""
    for name, form in stored_forms(found):
        error = np.abs(values[name] - form.reference)
        slack = 2.0**-46 * np.abs(values[name]).max()
        assert (error <= form.error_bound + slack).all(), name


def check_functionals(
    found: Walk, values: dict[str, np.ndarray], x: np.ndarray, rng: np.random.Generator
) -> None:
    """Assert that random functionals of random nodes are within their reverse pass."""
    centre = found.problem.centre
    assert centre is not None
    for name, form in stored_forms(found):
        if form.place is None:
            continue
        weights = rng.standard_normal((3, *form.shape)) * (rng.random((3, *form.shape)) < 0.5)
        row = tuple(int(rng.integers(n)) for n in form.shape[:-1])
        weights[0] = 0.0
        weights[(0, *row)] = rng.standard_normal(form.shape[-1])
        window = weights[(slice(0, 1), *(slice(k, k + 1) for k in row))]
        whole = Adjoint(weights[1:], (0,) * len(form.shape))
        for adjoint in (whole, Adjoint(window, (*row, 0))):
            bound = found.tape.bound(form.place, adjoint)
            part = (values[name] - form.reference)[adjoint.window]
            seen = (adjoint.values * part).reshape(adjoint.batch, -1).sum(-1)
            if bound.input is not None:
                moved = (x - centre)[bound.input.window]
                seen = seen - (bound.input.values * moved).reshape(adjoint.batch, -1).sum(-1)
            slack = 2.0**-44 * np.abs(values[name]).max() * np.abs(weights).sum()
            assert (np.abs(seen - bound.centre) <= bound.radius + slack).all(), name


@pytest.mark.sample(2)
@by_turns(block=BLOCKS, name=KERNELS, radius=[0.0, 2.0**-8])
def test_runs_are_within_their_forms(tmp_path: Path, block: str, name: str, radius: float) -> None:
    which = [BLOCKS.index(block), list(KERNELS).index(name), int(radius * 1024)]
    rng = np.random.default_rng(which)
    graph, record = build(block, rng), KERNELS[name]
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**14) / 2**14
    scene = scene_of(tmp_path, graph, record, record, centre, radius)
    with np.errstate(all="ignore"):
        found = unless_boundless(lambda: walk(scene, scene.train))
        if found is None:
            assert name not in FINE
            return
        for trial in range(8):
            x = point(rng, centre, radius, trial)
            seed, mode = int(rng.integers(2**32)), MODES[trial % 4]
            values = simulated(graph, record, scene.train, scene.parameters, x, seed, mode)
            check_forms(found, values)
            check_functionals(found, values, x, rng)


PAIRS = [
    ("float32 any", "float32 any, fused"),
    ("float32 any", "bfloat16 nearest"),
    ("bfloat16 nearest", "bfloat16 any"),
    ("float32 nearest, fused", "fp8 weights, nearest"),
    ("float32 any", "fp8 probabilities"),
    ("float16 any", "float16 nearest, fused"),
    ("float32 nearest, fused", "int8, uint8"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize("radius", [0.0, 2.0**-12])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("block", BLOCKS)
def test_drift_of_runs_is_within_the_bound(
    tmp_path: Path, block: str, pair: tuple[str, str], radius: float
) -> None:
    rng = np.random.default_rng([BLOCKS.index(block), PAIRS.index(pair), int(radius * 2**14)])
    graph = build(block, rng)
    train, infer = (KERNELS[name] for name in pair)
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**14) / 2**14
    scene = scene_of(tmp_path, graph, train, infer, centre, radius)
    with np.errstate(all="ignore"):
        found = unless_boundless(lambda: drift(scene).output)
    if found is None:
        return
    output = found
    for trial in range(8):
        x = point(rng, centre, radius, trial)
        seeds = rng.integers(2**32, size=2)
        t = simulated(graph, train, scene.train, scene.parameters, x, seeds[0], MODES[trial % 4])[
            graph.output
        ]
        i = simulated(
            graph, infer, scene.infer, scene.parameters, x, seeds[1], MODES[trial // 4 + 1]
        )[graph.output]
        slack = 2.0**-46 * np.maximum(np.abs(t), np.abs(i)).max()
        assert (output.lo - slack <= i - t).all()
        assert (i - t <= output.hi + slack).all()


EXACT = KERNELS["float64"]
# Rules whose remainder of second order is bounded tightly, for any size of the region.
CLOSE = ("relu", "tanh", "gelu", "silu", "mul", "linear", "rope", "moves")


@pytest.mark.sample(4)
@pytest.mark.parametrize("radius", [2.0**-12, 2.0**-5, 0.25])
@pytest.mark.parametrize("rule", RULES)
def test_inputs_of_the_region_are_within_the_bounds(
    tmp_path: Path, rule: str, radius: float
) -> None:
    """In float64 only the remainders of second order matter; inputs follow their gradient."""
    rng = np.random.default_rng([list(RULES).index(rule), int(radius * 4096)])
    graph = RULES[rule](rng)
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
    scene = scene_of(tmp_path, graph, EXACT, EXACT, centre, radius)
    with np.errstate(all="ignore"):
        found = unless_boundless(lambda: walk(scene, scene.train))
    if found is None:
        assert radius == 0.25, "a small region always has a bound"
        return
    form = found.forms[graph.output]
    assert isinstance(form, Form)
    assert form.place is not None

    def error(x: np.ndarray) -> np.ndarray:
        values = simulated(graph, EXACT, scene.train, scene.parameters, x, 1, "random")
        return np.asarray(values[graph.output] - form.reference)

    region, closest = found.tape.region, 0.0
    assert region is not None
    for trial in range(6):
        adjoint = functional(form.shape, trial, rng)
        bound = found.tape.bound(form.place, adjoint)
        moved = 0.0 if bound.input is None else bound.input.sizes(region)[0]
        low = bound.centre[0] - bound.radius[0] - moved
        high = bound.centre[0] + bound.radius[0] + moved
        slack = 2.0**-40 * np.abs(adjoint.values).sum() * (1 + np.abs(form.reference).max())
        for x in climb(error, adjoint, centre, radius, rng):
            e = error(x)
            assert (np.abs(e) <= form.error_bound + slack).all()
            assert low - slack <= reading(e, adjoint) <= high + slack
            closest = max(closest, reading(e, adjoint) / high)
    least = 0.9 if radius <= 2.0**-12 else 0.8 if rule in CLOSE else 0.03
    assert closest > least, "bounds that are far off show little"


def functional(shape: tuple[int, ...], trial: int, rng: np.random.Generator) -> Adjoint:
    """Return a functional of one element (either sign), of one row, or of everything."""
    row = tuple(int(rng.integers(n)) for n in shape[:-1])
    ones = (1,) * len(row)
    match trial % 3:
        case 0:
            place = (*row, int(rng.integers(shape[-1])))
            return Adjoint(np.full((1, *ones, 1), 1.0 if trial < 3 else -1.0), place)
        case 1:
            return Adjoint(rng.standard_normal((1, *ones, shape[-1])), (*row, 0))
    return Adjoint(rng.standard_normal((1, *shape)), (0,) * len(shape))


def reading(error: np.ndarray, adjoint: Adjoint) -> float:
    return float((adjoint.values[0] * error[adjoint.window]).sum())


def climb(
    error: Callable[[np.ndarray], np.ndarray],
    adjoint: Adjoint,
    centre: np.ndarray,
    radius: float,
    rng: np.random.Generator,
) -> list[np.ndarray]:
    """Return corners of the region in gradient directions, from the midpoint and from a corner."""
    found, step = [], radius * 2.0**-8
    x = centre
    for start in range(2):
        for _ in range(2):
            gradient = np.zeros(centre.size)
            base = reading(error(x), adjoint)
            for k in range(centre.size):
                moved = x.copy()
                moved.flat[k] += step if x.flat[k] <= centre.flat[k] else -step
                rise = reading(error(moved), adjoint) - base
                gradient[k] = rise * np.sign(moved.flat[k] - x.flat[k])
            x = centre + radius * np.sign(gradient).reshape(centre.shape)
            found.append(x)
        x = centre + radius * rng.choice([-1.0, 1.0], centre.shape)
        if start == 0:
            found.append(x)
    return found


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_difference_of_a_norm_and_its_tangent_is_of_second_order(tmp_path: Path, op: str) -> None:
    """norm(x) - Jx drifts in second order only: the factor of J must not see the difference."""
    rng, width, radius = np.random.default_rng(3), 6, 2.0**-4
    centre = np.rint(rng.standard_normal((1, width)) * 2**10) / 2**10
    c = centre - centre.mean() if op == "layer_norm" else centre
    y = c / np.sqrt((c * c).mean())
    tangent = (np.eye(width) - y.T @ y / width) / np.sqrt((c * c).mean())
    if op == "layer_norm":
        tangent = tangent - tangent.mean(axis=1, keepdims=True)
    graph = proofs.Graph((1, width))
    x = graph.add("input", [], (1, width))
    moved = graph.add("linear", [x, graph.param("tangent", tangent)], (1, width))
    graph.add("sub", [graph.add(op, [x], (1, width), eps=1e-9), moved], (1, width))
    scene = scene_of(tmp_path, graph, EXACT, EXACT, centre, radius)
    found = walk(scene, scene.train)
    form = found.forms[graph.output]
    assert isinstance(form, Form)
    assert form.place is not None
    run = (graph, EXACT, scene.train, scene.parameters)

    def error(x: np.ndarray) -> np.ndarray:
        return np.asarray(simulated(*run, x, 1, "random")[graph.output] - form.reference)

    closest = 0.0
    for trial in range(2 * width):
        values = np.full((1, 1, 1), 1.0 if trial % 2 else -1.0)
        adjoint = Adjoint(values, (0, trial // 2))
        bound = found.tape.bound(form.place, adjoint).magnitude(found.tape.region)[0]
        seen = max(reading(error(x), adjoint) for x in climb(error, adjoint, centre, radius, rng))
        assert seen <= bound
        closest = max(closest, seen / bound)
    assert closest > 0.3
