"""One bound for every length: runs of any number of rows are within it, in both programs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.model.numerics import Attention
from kcdsl_backends.drift.boxes import Box as ProverBox
from kcdsl_backends.drift.ops import softmax as prover_rules
from kcdsl_certs.recheck import recheck
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.graphs.any_length import marks_of
from kcdsl_certs.recheck.interval.box import Box as CheckerBox
from kcdsl_certs.recheck.interval.state import DriftProblem, Mask, Probabilities, State, numeric
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import propagate
from kcdsl_certs.recheck.ops.attention import context as checker_rules
from kcdsl_certs.recheck.ops.attention import probabilities
from kcdsl_certs.recheck.ops.table import POINTWISE
from tests.support import kernels, proofs, sequences
from tests.support.grids import by_turns

N = proofs.numerics
LONGEST = 300
LENGTHS = (1, 2, 17, 300)
MODES = (("random", "random"), ("signs", "signs"), ("up", "down"), ("down", "up"))
PAIRS = {
    "float32": (N("float32", "any"), N("float32", "any", style="fused", tile=16)),
    "bfloat16 nearest, fused": (
        N("float32", "nearest"),
        N("bfloat16", "nearest", style="fused", scores="float32", tile=64),
    ),
    "bfloat16 any": (N("bfloat16", "nearest"), N("bfloat16", "any", scores="bfloat16")),
    "fp8 probabilities, fused": (
        N("float16", "any", weights=("fp8_e5m2", "per_tensor")),
        N("float16", "nearest", style="fused", scores="float32", probabilities="fp8_e4m3"),
    ),
    "fp8 probabilities, composed": (
        N("float32", "any"),
        N("float32", "nearest", probabilities="fp8_e4m3"),
    ),
    "fp8 weights and activations, one scale for all rows": (
        N("float32", "nearest"),
        N(
            "float32",
            "nearest",
            weights=("fp8_e4m3", "per_channel"),
            activations=("fp8_e4m3", "per_tensor"),
        ),
    ),
    "float16 accumulation": (
        N("float64", "any", accumulate="float64"),
        N("float32", "any", accumulate="float16"),
    ),
    "bfloat16 toward zero": (
        N("float16", "any_direction", style="fused", scores="float32", tile=64),
        N("bfloat16", "toward_zero", weights=("bfloat16", "none", "toward_zero")),
    ),
    "float16 any toward zero, fp8 probabilities": (
        N("float32", "nearest"),
        N("float16", "any_toward_zero", style="fused", probabilities="fp8_e5m2", tile=64),
    ),
}
RADII = {"point": 0.0, "narrow": 2.0**-8, "wide": 0.5}


class Given:
    """One block at two rows with its proof and the boxes of both programs."""

    def __init__(self, folder: Path, pair: str, radius: float, louder: float) -> None:
        self.seed, self.louder = [sorted(PAIRS).index(pair), int(radius * 256)], louder
        self.kernels, self.radius = PAIRS[pair], radius
        self.short, long = self.at(2), self.at(LONGEST)
        self.tables = sequences.tables_of(self.short, long)
        self.path = folder / "model.safetensors"
        sha256 = proofs.write_safetensors(self.path, self.short.tensors)
        rng = np.random.default_rng([9, *self.seed])
        self.centre = np.rint(rng.standard_normal((1, 8)) * 2**14) / 2**14
        self.document = sequences.document(
            self.short, self.tables, self.kernels, sha256, self.centre, radius, LONGEST
        )
        proof = parse(proofs.dump(self.document))
        doubles = Derivation(proof, read(self.path).tensors)
        scene = doubles.problem(proof.cases[0])
        self.parameters, self.parsed = scene.parameters, (proof.train, proof.infer)
        with np.errstate(all="ignore"):
            self.states = {
                n.name: v
                for n, v in propagate(scene)
                if n.op != "constant" and not isinstance(v, Mask)
            }
        self.marks = marks_of(proof.graphs[self.short.digest], POINTWISE)

    def at(self, rows: int) -> Any:
        return sequences.decoder(np.random.default_rng(self.seed), rows, louder=self.louder)

    def output_of_the_prover(self) -> tuple[float, float]:
        """Return the largest size and drift of the output in the backend."""
        problem = sequences.problem(self.short, self.tables, self.kernels, LONGEST)
        radius = torch.full((1, 1), self.radius, dtype=torch.float64)
        bounds = problem.bound(torch.from_numpy(self.centre), radius)
        return bounds.witness[self.short.output]

    def run(self, rows: int, kind: str, trial: int, rng: np.random.Generator) -> list[Any]:
        graph = self.at(rows)
        graph.constants["mask"] = sequences.masks(rng, rows)[kind]
        corner = rng.choice([-1.0, 1.0], (rows, 8))
        inside = np.rint(rng.uniform(-1, 1, (rows, 8)) * 512) / 512
        # all rows at one corner, every row at its own, and between
        x = self.centre + self.radius * [np.repeat(corner[:1], rows, 0), corner, inside][trial % 3]
        found = []
        for record, kernel, mode in zip(self.kernels, self.parsed, MODES[trial % 4], strict=True):
            run = kernels.Run(record, np.random.default_rng(rng.integers(2**32)), mode)
            values = kernels.simulate(
                graph,
                run,
                x,
                lambda key, k=kernel: self.parameters.plain(key, k),
                lambda key, k=kernel: self.parameters.linear(key, k),
            )
            found.append(values)
        return found

    def left(self, found: list[Any]) -> list[str]:
        """Return the nodes with a number outside the boxes that cover every row."""
        outside = []
        for name, state in self.states.items():
            t, i = found[0][name], found[1][name]
            one = tuple(slice(0, 1) if mark else slice(None) for mark in self.marks[name])
            boxed = numeric(state)
            slack = 2.0**-46 * np.maximum(np.abs(t), np.abs(i)).max()
            for box, value in ((boxed.t, t), (boxed.i, i), (boxed.d, i - t)):
                inside = (box.lo[one] - slack <= value) & (value <= box.hi[one] + slack)
                if not inside.all():
                    outside.append(name)
        return outside


def given(folder: Path, pair: str, radius: float, louder: float = 1.0) -> Given:
    return Given(folder, pair, radius, louder)


@pytest.mark.sample(1)
@by_turns(pair=PAIRS, radius=RADII, louder=[1.0, 8.0])
def test_runs_of_any_length_are_within_the_bounds(
    tmp_path: Path, pair: str, radius: str, louder: float
) -> None:
    here = given(tmp_path, pair, RADII[radius], louder)
    rng = np.random.default_rng([4, *here.seed])
    size, drift = here.output_of_the_prover()
    for trial, (rows, kind) in enumerate(
        (rows, kind) for rows in LENGTHS for kind in ("causal", "all", "sliding", "padded")
    ):
        found = here.run(rows, kind, trial, rng)
        assert here.left(found) == [], (rows, kind, trial)
        t, i = (values[here.short.output] for values in found)
        assert np.abs(i - t).max() <= drift
        assert np.abs(t).max() <= size


@pytest.mark.sample(12)
@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("pair", PAIRS)
def test_both_programs_find_the_same_bound_for_any_length(
    tmp_path: Path, pair: str, radius: str
) -> None:
    """Up to the margin of claims: an end at a boundary of a format may round either way."""
    here = given(tmp_path, pair, RADII[radius])
    size, drift = here.output_of_the_prover()
    state = numeric(here.states[here.short.output])
    again = float(np.abs(np.stack([state.d.lo, state.d.hi])).max())
    assert again == pytest.approx(drift, rel=2.0**-10)
    assert float(np.abs(np.stack([state.t.lo, state.t.hi])).max()) == pytest.approx(
        size, rel=2.0**-10
    )


def test_only_rounding_grows_with_the_length() -> None:
    """From 3 to 300 rows the bound with exact sums is constant.

    With float32 sums, the rounding of 300 terms is about as large as all other errors.
    """
    exact = N("float64", "any", accumulate="float64")
    coarse = N("float64", "any", accumulate="float64", weights=("fp8_e4m3", "per_channel"))
    for pair, most in (((exact, coarse), 1.0001), (PAIRS["float32"], 5.0)):
        found = []
        for longest in (3, 300):
            short, long = (sequences.decoder(np.random.default_rng(3), n) for n in (2, longest))
            # positions are left out, as more of them contain more rotations
            tables = {n: np.ones_like(a) for n, a in sequences.tables_of(short, long).items()}
            problem = sequences.problem(short, tables, pair, longest)
            centre = torch.full((1, 8), 0.25, dtype=torch.float64)
            radius = torch.full((1, 1), 2.0**-6, dtype=torch.float64)
            found.append(problem.bound(centre, radius).witness[short.output][1])
        assert found[0] <= found[1] <= found[0] * most


# --- the caps, attained ---------------------------------------------------------------------------


def scene_of(longest: int, record: Any) -> DriftProblem:
    """Return a scene of one softmax and its context product, for the checker's rules alone."""
    graph = attention_alone(2)
    document = sequences.document(
        graph, {}, (record, record), "0" * 64, np.zeros((1, 3)), 1.0, longest
    )
    proof = parse(proofs.dump(document))
    return Derivation(proof, {}).problem(proof.cases[0])


def attention_alone(rows: int) -> Any:
    """Return softmax(x xᵀ) x."""
    g = proofs.Graph((rows, 3))
    x = g.add("input", [], (rows, 3))
    k = g.permute(x, [1, 0])
    s = g.add("matmul", [x, k], (rows, rows), role="scores")
    p = g.add("softmax", [s], (rows, rows), role="probabilities")
    g.add("matmul", [p, x], (rows, 3), role="context")
    return g


EXACT = N("float64", "nearest", accumulate="float64")


def extremes(columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores and their drift, within ±1, that change a row as much as possible."""
    half = max(1, columns // 2)
    drift = np.where(np.arange(columns) < half, 1.0, -1.0)
    # half of the weight before and half of it after: odds e^-R/2 and e^R/2
    top = np.where(np.arange(columns) < half, -1.0, 0.0)
    top[half:] += math.log(half / max(1, columns - half)) if columns > half else 0.0
    return top, drift


def softmax(s: np.ndarray) -> np.ndarray:
    e = np.exp(s - s.max())
    return np.asarray(e / e.sum())


def moved_and_cap(variation: float, columns: int) -> tuple[float, float]:
    """Return the change of Σ p v at the extremes, v = ±1, and the cap."""
    s, d = extremes(columns)
    value = np.where(d > 0, 1.0, -1.0)
    return float(abs((softmax(s + d) - softmax(s)) @ value)), 2 * variation


def variation_of(record: Any) -> float:
    """Return the checker's total variation for scores that drift within ±1."""
    scene = scene_of(64, record)
    nodes = {node.op: node for node in scene.block.nodes}
    shape = (2, 2)
    full = np.full(shape, 1.0)
    wide = CheckerBox(-4 * full, 4 * full)
    state = State(wide, wide, CheckerBox(-full, full))
    found = checker_rules.probabilities_at_any_length(scene, nodes["softmax"], [state], 64)
    assert isinstance(found, Probabilities)
    return float(found.variation.max())


@pytest.mark.parametrize("columns", [2, 3, 17, 64])
def test_cap_of_a_row_is_attained_and_never_exceeded(columns: int) -> None:
    moved, cap = moved_and_cap(variation_of(EXACT), columns)
    assert moved <= cap
    assert columns == 3 or moved > 0.99 * cap


# --- planted bugs ---------------------------------------------------------------------------------


def test_too_small_cap_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    tanh = np.tanh
    monkeypatch.setattr(np, "tanh", lambda x: tanh(x / 2))
    moved, cap = moved_and_cap(variation_of(EXACT), 64)
    assert moved > cap


@pytest.mark.full
def test_missing_roundings_of_columns_are_detected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 300 probabilities of 1/300 is rounded on the coarse grid of float8."""
    rng = np.random.default_rng(1)
    right = given(tmp_path, "fp8 probabilities, composed", RADII["point"], louder=0.0)
    assert right.left(right.run(300, "all", 0, rng)) == []
    whole = checker_rules._misplaced
    monkeypatch.setattr(checker_rules, "_misplaced", lambda k, theta, n: whole(k, theta, 1))
    here = given(tmp_path, "fp8 probabilities, composed", RADII["point"], louder=0.0)
    left = [here.left(here.run(300, "all", trial, rng)) for trial in range(4)]
    assert any(left)


def exact_theta(record: Any, columns: int, side: str) -> float:
    """Return Θ of a row with `columns` columns from the rules for one length."""
    from kcdsl_backends.drift.boxes.rounding import Rounding
    from kcdsl_backends.drift.ops import softmax as one_length
    from tests.support import prover

    ones = np.ones((1, columns))
    if side == "checker":
        kernel = scene_of(2, record).train
        scores = CheckerBox(-ones, ones)
        return float(
            probabilities.relative_rounding(kernel, scores, np.ones((1, columns), bool)).max()
        )
    rounding = Rounding(prover.numerics(record))
    box = ProverBox(torch.from_numpy(-ones), torch.from_numpy(ones))
    return float(one_length.relative_error(box, None, rounding, columns).max())


def theta_at_any_length(record: Any, longest: int, side: str) -> float:
    """Return Θ in the rules for any length, derived from Σ|computed p - p|."""
    shape = np.ones((2, 2))
    if side == "checker":
        scene = scene_of(longest, record)
        nodes = {node.op: node for node in scene.block.nodes}
        box = CheckerBox(-shape, shape)
        state = State(box, box, CheckerBox(0 * shape, 0 * shape))
        found = checker_rules.probabilities_at_any_length(scene, nodes["softmax"], [state], longest)
        assert found.total is not None
        return float(found.total[0].max())
    problem = sequences.problem(attention_alone(2), {}, (record, record), longest)
    from kcdsl_backends.drift.boxes.state import State as ProverState
    from kcdsl_backends.drift.boxes.state import Step

    node = next(n for n in problem.graph.nodes if n.op == "softmax")
    one = ProverBox(torch.from_numpy(-shape), torch.from_numpy(shape))
    none = ProverBox(torch.from_numpy(0 * shape), torch.from_numpy(0 * shape))
    known = {node.inputs[0]: ProverState(one, one, none)}
    nodes_of = {n.name: n for n in problem.graph.nodes}
    step = Step(node, problem.kernels(), nodes_of, known, frozenset())
    assert problem.rows is not None
    softmax = prover_rules.softmax_at_any_length(step, problem.rows)
    assert softmax is not None
    assert softmax.sums is not None
    return float(softmax.sums[0].max())


@pytest.mark.parametrize("side", ["checker", "prover"])
@pytest.mark.parametrize("tile", [1, 16, 128])
def test_roundings_of_a_row_are_those_of_the_longest_row(tile: int, side: str) -> None:
    record = N("float32", "nearest", style="fused", tile=tile)
    most = theta_at_any_length(record, 300, side)
    for columns in (1, 2, 17, 129, 300):
        assert exact_theta(record, columns, side) <= most
    assert most <= 1.01 * exact_theta(record, 300, side) + 301 * 2.0**-120 + 2.0**-23


@pytest.mark.parametrize("side", ["checker", "prover"])
def test_wrong_number_of_tiles_is_detected(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = N("float32", "nearest", style="fused", tile=16)
    before = exact_theta(record, 300, side)
    if side == "checker":
        theta = probabilities.relative_rounding
        monkeypatch.setattr(
            probabilities,
            "relative_rounding",
            lambda k, s, a, n=None, own=None: theta(k, s, a, 16 if n else None, own),
        )
    else:
        monkeypatch.setattr(Attention, "tiles", lambda self, columns: 1)
    assert theta_at_any_length(record, 300, side) < before


def test_unknown_mask_is_covered_by_the_full_one(tmp_path: Path) -> None:
    """The visible part of the mask does not change the bound: any mask is covered."""
    here = given(tmp_path, "float32", RADII["narrow"])
    outcome = recheck(proofs.dump(here.document), here.path)
    assert outcome.ok, outcome
    here.short.constants["mask"] = np.ones((2, 2), dtype=bool)
    other = sequences.document(
        here.short,
        here.tables,
        here.kernels,
        here.document["checkpoint"]["sha256"],
        here.centre,
        here.radius,
        LONGEST,
    )
    again = recheck(proofs.dump(other), here.path)
    assert again.ok, again
    assert again.bound == outcome.bound
