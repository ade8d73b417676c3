"""Scales of 128 channels: runs stay inside the boxes of both programs, which agree.

Blocks of the other property tests are narrower than one group; these have two groups and a part of
one.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.model.numerics.formats import LAYOUTS
from kcdsl.model.presets import resolve
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine.adjoint import Adjoint
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.ops.quantised import inputs as prover
from kcdsl_certs.recheck.affine.adjoint import Adjoint as CheckedAdjoint
from kcdsl_certs.recheck.affine_walk import drift
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.quantisers import quantised
from kcdsl_certs.recheck.interval.state import numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from kcdsl_certs.recheck.numerics.specification import parse_kernel
from kcdsl_certs.recheck.ops.linear import quantised_inputs as checker
from kcdsl_certs.recheck.ops.linear.quantised_inputs import quantisation
from tests.support import kernels, proofs
from tests.support.prover import block, parameters
from tests.support.rationals.cells import Cells
from tests.support.rationals.linear import _quantisation
from tests.support.rationals.quantisers import quantised as exactly

N = proofs.numerics
ROWS, WIDTH, OUT = 3, 300, 20
FULL = N("float32", "nearest")
KERNELS: dict[str, Any] = {
    "fp8 blocks, nearest": N(
        "bfloat16",
        "nearest",
        weights=("fp8_e4m3", "block_128"),
        activations=("fp8_e4m3", "group_128"),
    ),
    "fp8 blocks, any, matrix unit": N(
        "bfloat16",
        "any",
        weights=("fp8_e4m3", "block_128"),
        activations=("fp8_e4m3", "group_128"),
        tensor_core=resolve(
            {"preset": "fp8-w8a8-blocks", "tensor_core": "hopper_fp8_promoted"}
        ).to_json()["tensor_core"],
    ),
    "int8, groups of both": N(
        "float32", "nearest", weights=("int8", "group_128"), activations=("int8", "group_128")
    ),
    "int8 full": N(
        "float32",
        "nearest",
        weights=("int8_full", "group_128"),
        activations=("int8_full", "group_128"),
    ),
    "uint8": N("float32", "nearest", activations=("uint8", "group_128")),
    "uint8, any": N("float32", "any", activations=("uint8", "group_128")),
}
MODES = ("random", "signs", "up", "down")


def linear(rng: np.random.Generator) -> Any:
    g = proofs.Graph((ROWS, WIDTH))
    x = g.add("input", [], (ROWS, WIDTH))
    sizes = np.exp(rng.uniform(-2, 2, WIDTH))
    w = g.param("w.weight", rng.standard_normal((OUT, WIDTH)) * sizes / WIDTH**0.5)
    g.add("linear", [x, w], (ROWS, OUT))
    return g


@pytest.mark.sample(4)
@pytest.mark.parametrize("radius", [0.0, 2.0**-10])
@pytest.mark.parametrize("name", KERNELS)
def test_runs_stay_within_the_boxes_of_both_programs(
    tmp_path: Path, name: str, radius: float
) -> None:
    rng = np.random.default_rng([list(KERNELS).index(name), int(radius * 1024)])
    graph, record = linear(rng), KERNELS[name]
    size = np.repeat([4.0, 0.5, 0.0625], 128)[:WIDTH]
    centre = np.rint(rng.standard_normal((ROWS, WIDTH)) * size * 2**12) / 2**12
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    document = proofs.document(graph, FULL, record, sha256, centre, radius)
    proof = parse(proofs.dump(document))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    problem = BlockProblem(block(graph), parameters(graph, FULL), parameters(graph, record))
    point, spread = torch.from_numpy(centre), torch.full((1, 1), radius, dtype=torch.float64)
    found = problem.bound(point, spread).output.drift
    forms = affine_forms(problem.graph, problem.train, problem.infer, point, spread).box()
    with np.errstate(all="ignore"):
        derived = {n.name: numeric(v) for n, v in propagate(scene)}[graph.output].d
        walked = drift(scene).output
    for mine, other, apart in ((found, derived, 1e-6), (forms, walked, 2.0**-8)):
        wide = apart * (mine.hi - mine.lo).numpy() + 1e-12
        assert (np.abs(mine.lo.numpy() - other.lo) <= wide).all()
        assert (np.abs(mine.hi.numpy() - other.hi) <= wide).all()
    if not radius and record["casts"] == "nearest" and record["compute"] == "float32":
        assert float((forms.hi - forms.lo).amax()) < 0.03 * float(forms.mag().amax())
    for trial in range(8):
        x = centre + radius * rng.choice([-1.0, 0.0, 1.0, 0.5], centre.shape)
        runs = []
        for numerics, kernel in ((FULL, scene.train), (record, scene.infer)):
            run = kernels.Run(numerics, np.random.default_rng(trial), MODES[trial % 4])
            values = kernels.simulate(
                graph,
                run,
                x,
                lambda key, k=kernel: scene.parameters.plain(key, k),
                lambda key, k=kernel: scene.parameters.linear(key, k),
            )
            runs.append(values[graph.output])
        moved = runs[1] - runs[0]
        for box in (found, forms):
            assert (box.lo.numpy() - 1e-12 <= moved).all()
            assert (moved <= box.hi.numpy() + 1e-12).all()


def test_simulator_quantises_group_by_group() -> None:
    """The simulated run of an attack follows the formulas, and is a run of the numerics."""
    rng = np.random.default_rng(7)
    for name, record in KERNELS.items():
        if record["casts"] == "any":
            continue
        graph = linear(rng)
        x = rng.standard_normal((ROWS, WIDTH)).astype(np.float32).astype(np.float64)
        infer = parameters(graph, record)
        simulated = Simulator(block(graph), infer.numerics, infer)
        run = kernels.Run(record, rng, "random")
        seen = simulated._quantised(simulated.graph.nodes[-1], torch.from_numpy(x), None)
        assert np.array_equal(seen.numpy(), run.quantised(x, "w.weight")), name


@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8", "int8_full", "uint8"])
def test_float64_boxes_enclose_rational_ones(kind: str) -> None:
    rng = np.random.default_rng(9)
    kernel = parse_kernel(N("float32", "nearest", activations=(kind, "group_128")), "kernel")
    for wide in (0.0, 2.0**-12):
        centre = np.rint(rng.standard_normal((1, WIDTH)) * 2**14) / 2**14
        x = Box(centre - wide, centre + wide)
        value, error = quantised(kernel, x, quantisation(kernel, x))
        cells = Cells((1, WIDTH), tuple(_pairs(x)))
        exact, _ = exactly(kernel, cells, _quantisation(kernel, cells, ""), "")
        for lo, hi, pair in zip(value.lo[0], value.hi[0], exact.pairs, strict=True):
            # up to the last digits, which the slack of a hull covers
            assert lo <= float(pair[0]) + 1e-14 <= float(pair[1]) + 1e-14 <= hi + 2e-14
            assert hi - lo <= float(pair[1] - pair[0]) * (1 + 1e-9) + 1e-12
        assert (np.abs(error.hi) <= 2 * quantisation(kernel, x)).all()


def _pairs(x: Box) -> list[tuple[Fraction, Fraction]]:
    return [(Fraction(a), Fraction(b)) for a, b in zip(x.lo[0], x.hi[0], strict=True)]


@pytest.mark.parametrize("window", [(0, 300), (0, 128), (100, 130), (128, 300), (256, 257)])
@pytest.mark.parametrize("scale", ["per_token", "group_128", "per_tensor"])
def test_functionals_are_summed_group_by_group(scale: str, window: tuple[int, int]) -> None:
    """Sums over elements with a common scale, and back to the leading ones, on any window."""
    rng = np.random.default_rng(13)
    weights = rng.standard_normal((ROWS, WIDTH))
    values = rng.standard_normal((2, 2, window[1] - window[0]))
    dense = np.zeros((2, ROWS, WIDTH))
    dense[:, 1:3, slice(*window)] = values
    groups = np.arange(WIDTH) // (128 if scale == "group_128" else WIDTH)
    sums = np.stack(
        [(dense * weights)[..., groups == g].sum(-1) for g in range(groups[-1] + 1)], -1
    )
    if scale == "per_tensor":
        sums = sums.sum((1, 2), keepdims=True)
    mine = Adjoint(torch.from_numpy(values), ((1, 3), window), (ROWS, WIDTH))
    weighed = replace(mine, values=mine.values * torch.from_numpy(weights[1:3, slice(*window)]))
    gathered = prover._gathered(weighed, LAYOUTS[scale])
    assert np.allclose(gathered.dense().values.numpy(), sums)
    other = CheckedAdjoint(values, (1, window[0]))
    theirs = checker._gathered(weights, scale)(other)
    assert theirs is not None
    again = np.zeros(sums.shape)
    again[(slice(None), *theirs.window)] = theirs.values
    assert np.allclose(again, sums)
    spread = sums if scale == "per_tensor" else sums[..., groups]
    back = prover._given_back(gathered, torch.from_numpy(weights), LAYOUTS[scale]).dense()
    assert np.allclose(back.values.numpy(), spread * weights)
    returned = checker._given_back(theirs, weights, scale)
    again = np.zeros(dense.shape)
    again[(slice(None), *returned.window)] = returned.values
    assert np.allclose(again, spread * weights)
