"""Float64 errors of linear bounds in both programs, against 200 bits and unrounded kernels.

With formats of 400 bits a bound covers only the verifier's own rounding and remainders of second
order. Deviation and drift of the exact function must lie inside at every node, and random
functionals of them inside their reverse pass, without slack; at a point these bounds must be small.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.affine.adjoint import Adjoint as ProverAdjoint
from kcdsl_backends.drift.linear.tape import Functional as ProverFunctional
from kcdsl_backends.drift.linear_bounds import linear_walk as prove
from kcdsl_certs.recheck.affine.adjoint import Adjoint
from kcdsl_certs.recheck.bounds_walk import walk as derive
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.parameters import Parameters
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.linear_bounds.tape import FunctionalBatch
from tests.support import kernels, proofs
from tests.support.ball import numbers, runs
from tests.support.ball.points import corner
from tests.support.ball.unrounded import round_nothing
from tests.support.grids import by_turns
from tests.support.mutation.blocks import decoder, encoder, gated
from tests.support.plane_blocks import RULES
from tests.support.prover import block, parameters

Floats = np.ndarray
Pair = tuple[Floats, Floats]
BLOCKS: dict[str, Any] = {**RULES, "decoder": decoder, "encoder": encoder, "gated": gated}
EXACT: dict[str, Any] = {
    "compute": "float64",
    "casts": "nearest",
    "accumulate": "float64",
    "exp_ulps": 0,
}
TRAIN = proofs.numerics(**EXACT)
COARSE = proofs.numerics(**EXACT, weights=("fp8_e4m3", "per_channel"))
FINE = proofs.numerics(**EXACT, weights=("tfloat32", "none"))


@pytest.fixture(autouse=True)
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    round_nothing(monkeypatch)


class Checker:
    """The checker's bounds of a graph on a region, node by node."""

    def __init__(
        self, graph: Any, infer: Any, centre: Floats | None, radius: float, path: Path
    ) -> None:
        sha256 = proofs.write_safetensors(path, graph.tensors)
        ids = None if centre is not None else list(IDS)
        start = np.zeros(1) if centre is None else centre
        document = proofs.document(graph, TRAIN, infer, sha256, start, radius, ids=ids)
        document["cases"][0]["domain"] = "planes"
        self.proof = parse(proofs.dump(document))
        tensors = read(path).tensors
        self.stored = Parameters(tensors, self.proof.parameters)
        with np.errstate(all="ignore"):
            self.course = derive(Derivation(self.proof, tensors).problem(self.proof.cases[0]))

    def node(self, name: str) -> tuple[Floats, Pair, Pair] | None:
        """Return the reference and the boxes of deviation and drift."""
        if name not in self.course.places:
            return None
        entry = self.course.tape.entries[self.course.places[name]]
        return entry.reference, (entry.e.lo, entry.e.hi), (entry.d.lo, entry.d.hi)

    def functionals(self, name: str, e: Floats | None, d: Floats | None) -> Pair:
        """Return bounds of functionals [B, ...] of all elements."""
        parts = (None if v is None else Adjoint(v, (0,) * (v.ndim - 1)) for v in (e, d))
        with np.errstate(all="ignore"):
            return self.course.tape.between(self.course.places[name], FunctionalBatch(*parts))


class Prover:
    """The prover's bounds of a graph on a region, node by node."""

    def __init__(self, graph: Any, infer: Any, centre: Floats | None, radius: float) -> None:
        problem = BlockProblem(block(graph), *(parameters(graph, side) for side in (TRAIN, infer)))
        where = None if centre is None else torch.from_numpy(centre)
        spread = torch.full((1, 1), radius, dtype=torch.float64)
        self.run = prove(problem.graph, problem.kernels(), where, spread)

    def node(self, name: str) -> tuple[Floats, Pair, Pair] | None:
        """Return the reference and the boxes of deviation and drift."""
        if name not in self.run.index:
            return None
        entry = self.run.tape.entries[self.run.index[name]]
        e, d = ((box.lo.numpy(), box.hi.numpy()) for box in (entry.deviation, entry.drift))
        return entry.reference.numpy(), e, d

    def functionals(self, name: str, e: Floats | None, d: Floats | None) -> Pair:
        """Return bounds of functionals [B, ...] of all elements."""
        index = self.run.index[name]
        shape = self.run.tape.entries[index].shape
        window = tuple((0, size) for size in shape)
        parts = (
            None if v is None else ProverAdjoint(torch.from_numpy(v), window, shape) for v in (e, d)
        )
        low, high = self.run.tape.bound(index, ProverFunctional(*parts))
        return low.numpy(), high.numpy()


IDS = (4, 0, 4)


def exactly(graph: Any, x: Floats | None, checker: Checker) -> tuple[dict[str, Any], ...]:
    """Return the values of every node in both kernels, with 200 bits."""
    found = []
    for kernel in (checker.proof.train, checker.proof.infer):

        def plain(key: str, kernel: Any = kernel) -> Floats:
            return np.asarray(checker.stored.plain(key, kernel))

        def linear(key: str, kernel: Any = kernel) -> Floats:
            return np.asarray(checker.stored.linear(key, kernel))

        found.append(runs.run(graph, TRAIN, x, plain, linear, 0, "up", exact=True))
    return tuple(found)


def weighed(values: Floats, weights: Floats | None) -> Any:
    if weights is None:
        return numbers.ZERO
    return (numbers.balls(weights) * values).sum()


def wanted(shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
    """Yield functionals of deviation, of drift and of both, and of one element of each."""
    some = rng.standard_normal((2, 2, *shape))
    one = np.zeros((1, *shape))
    one.flat[int(rng.integers(one.size))] = 1.0
    yield some[0], None
    yield None, some[1]
    yield some[0], some[1]
    yield one, None
    yield None, one


def nudged(graph: Any, rng: np.random.Generator, drift: int) -> None:
    """Round weights to 11 bits, and change a few by 2^drift, so that values drift by as much."""
    for key, value in graph.tensors.items():
        kept = kernels.cast(value.astype(np.float64), "tfloat32")
        few = rng.random(kept.shape) < 0.25
        moved = 2.0 ** (drift + 12) * (1 + 2.0**-12)
        graph.tensors[key] = np.where(few, moved, kept).astype(np.float32)


# In the fast tests the smallest drift and a ball, or a larger one and a ball of coarse weights.
@pytest.mark.sample(8)
@by_turns(one_of=2, rule=BLOCKS, region=[(0.0, -61), (0.0, -22), (2.0**-10, -30), (2.0**-10, None)])
def test_exact_function_is_within_the_linear_bounds(
    tmp_path: Path, rule: str, region: tuple[float, int | None]
) -> None:
    """At a point with a drift too small for effects of second order; in a ball with a small drift.

    Also in a ball with coarse weights.
    """
    radius, drift = region
    rng = np.random.default_rng([list(BLOCKS).index(rule), int(radius * 2**14)])
    graph, infer = BLOCKS[rule](rng), COARSE if drift is None else FINE
    if drift is not None:
        nudged(graph, rng, drift)
    centre = None if graph.input_shape is None else rng.standard_normal(graph.input_shape)
    checker = Checker(graph, infer, centre, radius, tmp_path / "model.safetensors")
    both: list[Checker | Prover] = [checker, Prover(graph, infer, centre, radius)]
    points = [centre]
    if centre is not None and radius:
        points += [corner(centre, radius, rng) for _ in range(2)]
    values = [exactly(graph, x, checker) for x in points]
    compared = 0
    for name in values[0][0]:
        for program in both:
            compared += inside(program, name, values, rng, small=not radius)
    assert compared > 1


def inside(
    program: Checker | Prover, name: str, values: Any, rng: np.random.Generator, small: bool
) -> bool:
    """Compare a program's bounds of a node with exact values; `small` demands tightness."""
    found = program.node(name)
    if found is None:
        return False
    reference, e, d = found
    deviations = [t[name] - numbers.balls(reference) for t, _ in values]
    drifts = [i[name] - t[name] for t, i in values]
    for seen, (lo, hi) in [(x, e) for x in deviations] + [(x, d) for x in drifts]:
        where = numbers.outside(numbers.balls(seen), lo, hi)
        assert not where, (type(program).__name__, name, where)
    for on_e, on_d in wanted(reference.shape, rng):
        low, high = program.functionals(name, on_e, on_d)
        for b in range(len(low)):
            parts = [None if v is None else v[b] for v in (on_e, on_d)]
            for u, v in zip(deviations, drifts, strict=True):
                of = weighed(u, parts[0]) + weighed(v, parts[1])
                assert not of < numbers.arb(float(low[b])), (type(program).__name__, name)
                assert not of > numbers.arb(float(high[b])), (type(program).__name__, name)
        most = 2.0**-34 * reference.size * (1 + float(np.abs(reference).max()))
        assert not small or (high - low).max() <= most, (type(program).__name__, name)
    return True


# --- how much covers what float64 loses -----------------------------------------------------------

USUAL, TINY = 1.0, 2.0**-40
LEAST: dict[str, tuple[float, float, float, float]] = {
    "add": (0.99, 1.05, 0.99, 1.05),
    "sub": (0.99, 1.55, 0.99, 1.55),
    "scale": (1.49, 1.49, 1.49, 1.49),
    "divide": (1.49, 1.49, 1.49, 1.49),
    "shift": (0.24, 0.0, 0.24, 0.0),  # its drift is that of its operand
    "view": (0.49, 0.49, 0.49, 0.49),
    "rope": (1.19, 1.19, 1.19, 1.19),
    "linear": (1.19, 1.19, 1.19, 1.19),
    "mul": (0.99, 0.99, 0.99, 0.99),
    "matmul": (1.3, 0.99, 0.12, 0.12),
    "tanh": (0.95, 0.7, 0.95, 0.9),
    "silu": (0.95, 0.8, 0.95, 0.9),
    "gelu": (0.95, 0.8, 0.95, 0.9),
    "layer_norm": (1.2, 1.1, 0.95, 0.95),
    "rms_norm": (1.2, 1.1, 0.95, 0.95),
    "numerator": (0.005, 0.01, 0.01, 0.5),
    "softmax": (2.0, 1.2, 2.0, 0.9),
}
"""The smallest ratio of the checker's bound to the prover's: of deviation and drift at usual
inputs, then of both at tiny ones. The programs bound the same roundings by different rules; an
omitted rounding, or one counted once instead of n times, is conspicuous."""


@pytest.mark.sample(8)
@pytest.mark.parametrize("size", [USUAL, TINY])
@pytest.mark.parametrize("rule", BLOCKS)
def test_both_programs_have_equally_tight_bounds(tmp_path: Path, rule: str, size: float) -> None:
    """In a ball, with a drift too small for effects of second order."""
    rng = np.random.default_rng(list(BLOCKS).index(rule))
    graph, radius = BLOCKS[rule](rng), 2.0**-30
    nudged(graph, rng, -30)
    centre = None if graph.input_shape is None else size * rng.standard_normal(graph.input_shape)
    checker = Checker(graph, FINE, centre, radius, tmp_path / "model.safetensors").course
    prover = Prover(graph, FINE, centre, radius).run.tape
    nodes = {checker.places[n["name"]]: n for n in graph.nodes if n["name"] in checker.places}
    for place, (mine, other) in enumerate(zip(checker.tape.entries, prover.entries, strict=True)):
        op = nodes[place]["op"] if place in nodes else "numerator"
        if other.noise is None or mine.relu is not None or op not in LEAST:
            continue
        if op == "view" and mine.reference.size == source_of(graph, nodes[place]):
            continue
        added = other.noise.deviation.numpy(), other.noise.drift.numpy()
        for k, box in enumerate((mine.e, mine.d)):
            own = np.broadcast_to(mine.radius[k], box.shape)
            its = np.broadcast_to(added[k], box.shape)
            kept = mine.kept[k]
            some = (its > 2.0**-200) & (its < (box.hi - box.lo) / 8)
            some = some if kept is None else some & kept
            assert (own[some] >= LEAST[op][k + 2 * (size == TINY)] * its[some]).all(), (op, k)


def source_of(graph: Any, node: Any) -> int:
    """Return how many elements the operand of a node has."""
    return next(int(np.prod(n["shape"])) for n in graph.nodes if n["name"] == node["inputs"][0])
