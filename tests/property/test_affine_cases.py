"""Rows in cases: grid points of scores and probabilities, one by one, in both programs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.model.numerics.formats import FORMATS
from kcdsl_backends.attack import attack
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.drift.affine import cases as prover
from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.boxes import Box as ProverBox
from kcdsl_certs.recheck.affine import cases as checker
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.affine_walk import pair as derive
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.box import Box
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.numerics.formats import FORMATS as CHECKED
from tests.support import kernels, proofs
from tests.support.grids import by_turns
from tests.support.prover import block, parameters

N = proofs.numerics
Floats = np.ndarray
FULL = N("float32", "any")
KERNELS: dict[str, Any] = {
    "bfloat16": N("bfloat16", "nearest", scores="bfloat16", probabilities="bfloat16"),
    "bfloat16, coarse sums": N(
        "bfloat16",
        "nearest",
        accumulate="float16",
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "float16, fp8 probabilities": N(
        "float16", "nearest", scores="float16", probabilities="fp8_e4m3"
    ),
    "fp8 per token": N(
        "bfloat16",
        "nearest",
        weights=("fp8_e4m3", "per_channel"),
        activations=("fp8_e4m3", "per_token"),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "int8 per tensor": N(
        "bfloat16",
        "nearest",
        activations=("int8", "per_tensor"),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "int8 full per token": N(
        "bfloat16",
        "nearest",
        activations=("int8_full", "per_token"),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "uint8 per tensor": N(
        "bfloat16",
        "nearest",
        activations=("uint8", "per_tensor"),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "uint8 per token": N(
        "bfloat16",
        "nearest",
        activations=("uint8", "per_token"),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "fp8 static": N(
        "bfloat16",
        "nearest",
        weights=("fp8_e4m3", "per_channel"),
        activations=proofs.static("fp8_e4m3", {"*": 0.01, "q": 0.0078125, "o": 0.02}),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "uint8 static": N(
        "bfloat16",
        "nearest",
        activations=proofs.static("uint8", 0.04, 120),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "int8 static, by channel": N(
        "bfloat16",
        "nearest",
        activations=proofs.static("int8", [0.04 + 0.001 * i for i in range(16)]),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "int8 full static": N(
        "bfloat16",
        "nearest",
        activations=proofs.static("int8_full", 0.04),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "mx": N(
        "bfloat16",
        "nearest",
        weights=("fp8_e4m3", "mx"),
        activations=("fp8_e4m3", "mx"),
        scores="bfloat16",
        probabilities="bfloat16",
    ),
    "bfloat16 toward zero": N(
        "bfloat16", "toward_zero", scores="bfloat16", probabilities="bfloat16"
    ),
    "float16 toward zero, fp8 probabilities": N(
        "float16", "toward_zero", scores="float16", probabilities="fp8_e4m3"
    ),
}
ROWS, HEADS, SIZE = 5, 2, 8
WIDTH = HEADS * SIZE
MODES = ("random", "signs", "up", "down")


@pytest.fixture(autouse=True)
def passes_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make both programs run the same passes, on which the steps depend."""
    monkeypatch.setattr("kcdsl_backends.drift.affine_forms.coarsest", lambda *_: 0.0)


def attention(rng: np.random.Generator) -> Any:
    """Return attention directly on the input, as in MiniLM, without a mask."""
    g = proofs.Graph((ROWS, WIDTH))
    x = g.add("input", [], (ROWS, WIDTH))
    proofs.unmasked_attention(g, x, rng, ROWS, HEADS, SIZE)
    return g


def output(
    graph: Any,
    record: Any,
    kernel: Any,
    stored: Any,
    x: Floats,
    rng: np.random.Generator,
    mode: str,
) -> Floats:
    """Return what a kernel computes, its roundings drawn as the mode says."""
    run = kernels.Run(record, np.random.default_rng(rng.integers(2**32)), mode)
    values = kernels.simulate(
        graph,
        run,
        x,
        lambda key: stored.plain(key, kernel),
        lambda key: stored.linear(key, kernel),
    )
    return values[graph.output]


@pytest.mark.sample(1)
@by_turns(name=KERNELS, radius=[0.0, 2.0**-12, 2.0**-8], seed=range(2))
def test_runs_are_within_the_cases_of_both_programs(
    tmp_path: Path, name: str, seed: int, radius: float
) -> None:
    """The box of the drift, and functionals of rows; runs are simulated independently."""
    rng = np.random.default_rng([list(KERNELS).index(name), seed, int(radius * 2**12)])
    graph, record = attention(rng), KERNELS[name]
    centre = np.rint(rng.standard_normal(graph.input_shape) * 2**10) / 2**10
    built, full, coarse = block(graph), parameters(graph, FULL), parameters(graph, record)
    spread = torch.full((1, 1), radius, dtype=torch.float64)
    mine = affine_forms(built, full, coarse, torch.from_numpy(centre), spread)
    found = mine.box()
    path = tmp_path / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, FULL, record, sha256, centre, radius)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    with np.errstate(all="ignore"):
        theirs = derive(scene)
        derived = theirs.output()
    low, high = found.lo.numpy(), found.hi.numpy()
    slack = 2.0**-40 + 2.0**-20 * np.abs(high - low)
    assert (derived.lo >= low - slack).all()
    assert (derived.hi <= high + slack).all()
    context = next(node.name for node in built.nodes if node.role == "context")
    assert mine.infer.tape.entries[mine.infer.computed[context]].together is not None
    runs = []
    for trial in range(12):
        moves = [np.zeros(centre.shape), rng.choice([-1.0, 1.0], centre.shape)]
        x = centre + radius * moves[trial % 2]
        mode = MODES[trial % 4]
        outputs = [
            output(graph, one, kernel, scene.parameters, x, rng, mode)
            for kernel, one in ((scene.train, FULL), (scene.infer, record))
        ]
        runs.append(outputs[1] - outputs[0])
    pushed = attack(
        Simulator(built, full.numerics, full),
        Simulator(built, coarse.numerics, coarse),
        "inf",
        torch.from_numpy(centre),
        spread,
        candidates=3,
    )
    assert pushed.value <= float(found.mag().max())
    functionals = torch.from_numpy(rng.standard_normal((5, WIDTH)))
    for row in range(ROWS):
        adjoint = ProverAdjoint(functionals[:, None], ((row, row + 1), (0, WIDTH)), (ROWS, WIDTH))
        ours, others = mine.errors(adjoint), theirs.errors((row,), functionals.numpy())
        for known, errors in (
            (mine.known.lo[row].numpy(), Box(ours.lo.numpy(), ours.hi.numpy())),
            (theirs.apart.lo[row], others),
        ):
            for drift in runs:
                seen = (drift[row] - known) @ functionals.numpy().T
                assert (seen >= errors.lo - 2.0**-40).all()
                assert (seen <= errors.hi + 2.0**-40).all()
    for drift in runs:
        assert (drift >= low - 2.0**-44).all()
        assert (drift <= high + 2.0**-44).all()


@pytest.mark.parametrize("form", ["fp8_e4m3", "fp8_e5m2"])
def test_neighbouring_values_are_enumerated(form: str) -> None:
    """Exhaustively, in both programs."""
    codes = torch.arange(256, dtype=torch.uint8)
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[form]
    grid = codes.view(dtype).double()
    grid = torch.from_numpy(np.unique(grid[torch.isfinite(grid)].numpy()))
    low, high = torch.meshgrid(grid, grid, indexing="ij")
    ordered = low < high
    neighbours = torch.arange(len(grid))[None] - torch.arange(len(grid))[:, None] == 1
    two = prover.Ends.of(low, high, FORMATS[form]).two
    assert bool((two[ordered] == neighbours[ordered]).all())
    other = checker.Ends(low.numpy(), high.numpy(), CHECKED[form]).two
    assert (other == two.numpy()).all()


def ends(rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Return grid points of fp8_e4m3, equal, neighbours or farther apart."""
    form = FORMATS["fp8_e4m3"]
    low = np.rint(rng.uniform(8, 16, (2, 3, 6))) / 16
    return low, low + rng.integers(0, 3, low.shape) * 2.0 ** (-form.precision)


@pytest.mark.parametrize("most", [1, 2, 6])
def test_every_choice_belongs_to_a_case(most: int) -> None:
    for seed in range(20):
        rng = np.random.default_rng(seed)
        low, high = ends(rng)
        worth = rng.random((2, 1, 6))
        below, above = (torch.from_numpy(side)[None] for side in (low, high))
        mine = prover.split(
            prover.Ends.of(below, above, FORMATS["fp8_e4m3"]), torch.from_numpy(worth), most
        )
        theirs = checker.chosen(
            checker.Ends(low[None], high[None], CHECKED["fp8_e4m3"]), worth, most
        )
        assert len(theirs.lo) == len(mine.low) <= 2**most
        for _ in range(20):
            value = np.where(rng.random(low.shape) < 0.5, low, high)
            for lo, hi in ((mine.low.numpy(), mine.high.numpy()), (theirs.lo, theirs.hi)):
                inside = ((lo <= value) & (value <= hi)).all(axis=-1)
                assert inside.any(axis=0).all()
        narrow = (mine.high - mine.low).sum((0, 2, 3)).numpy()
        assert np.allclose(narrow, (theirs.hi - theirs.lo).sum(axis=(0, 2, 3)))


def test_functionals_of_cases_are_sound() -> None:
    """Compared with every combination of cases, on windows of whole blocks and parts of them."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        one, two = rng.standard_normal((2, 3, 2, 4))
        low, high = np.minimum(one, two), np.maximum(one, two)
        start = int(rng.integers(0, 3))
        stop = int(rng.integers(start + 1, 5))
        values = rng.standard_normal((2, 2, stop - start))
        whole = np.zeros((2, 2, 4))
        whole[..., start:stop] = values
        most, least = np.zeros(2), np.zeros(2)
        for row, part in product(range(2), range(2)):
            where = slice(2 * part, 2 * part + 2)
            alpha = whole[:, row, where][:, None]
            lo, hi = low[:, row, where][None], high[:, row, where][None]
            most += np.where(alpha > 0, alpha * hi, alpha * lo).sum(-1).max(-1)
            least += np.where(alpha > 0, alpha * lo, alpha * hi).sum(-1).min(-1)
        below, above = (torch.from_numpy(side) for side in (low, high))
        window = ((0, 2), (start, stop))
        mine = prover.Cases(below, above, 2).between(
            ProverAdjoint(torch.from_numpy(values), window, (2, 4))
        )
        theirs = checker.Cases(low, high, 2).between(Adjoint(values, (0, start)))
        for a, b in ((mine[0].numpy(), mine[1].numpy()), theirs):
            assert (np.abs(a - least) <= 1e-9).all()
            assert (np.abs(b - most) <= 1e-9).all()
            assert (a <= least).all()
            assert (b >= most).all()


def test_data_movement_keeps_blocks_or_drops_cases() -> None:
    low = torch.arange(24.0, dtype=torch.float64).reshape(1, 2, 3, 4)
    found = prover.Cases(low, low, 4)
    other = checker.Cases(low.numpy(), low.numpy(), 4)
    assert found.permuted([2, 1, 0]) is None
    assert other.turned([2, 1, 0]) is None
    assert found.reshaped((4, 6)) is None
    assert other.shaped((4, 6)) is None
    moved, turned = found.permuted([1, 0, 2]), other.turned([1, 0, 2])
    assert moved is not None
    assert turned is not None
    last, shaped = moved.reshaped((3, 8)), turned.shaped((3, 8))
    assert last is not None
    assert shaped is not None
    expected = low[0].permute(1, 0, 2).reshape(3, 8)
    assert bool((last.low[0] == expected).all())
    assert (shaped.lo[0] == expected.numpy()).all()


def test_impossible_case_stays_within_the_ends() -> None:
    form = FORMATS["bfloat16"]
    low, high = torch.tensor([1.0]).double(), torch.tensor([1.25]).double()
    far = torch.tensor([[4.0]]).double()
    within = prover.Ends.of(low, high, form).within(ProverBox(far, far))
    other = checker.Ends(low.numpy(), high.numpy(), CHECKED["bfloat16"]).within(
        Box(far.numpy(), far.numpy())
    )
    for a, b in ((within.low.item(), within.high.item()), (other.lo.item(), other.hi.item())):
        assert 1.0 <= a <= b <= 1.25
