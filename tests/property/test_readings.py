"""Kernels that round a result separately for each reader, or recompute it for some.

Every domain of both programs encloses all readings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl_backends.attack import attack
from kcdsl_backends.attack.simulation import Simulator
from kcdsl_backends.attack.versions import MOST, versions
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.drift.boxes.rounding import several
from kcdsl_backends.drift.boxes.state import Kernels
from kcdsl_backends.drift.interval import propagate
from kcdsl_backends.drift.linear_bounds import linear_bounds as drift_of_planes
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine_walk import drift
from kcdsl_certs.recheck.bounds_walk import derive
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from kcdsl_certs.recheck.interval_walk import enclosed
from tests.support import proofs
from tests.support.prover import block, parameters

N = proofs.numerics
EXACT = N("float64", "any", accumulate="float64")
KERNELS = {
    "float32": N("float32", "any"),
    "bfloat16": N("bfloat16", "any"),
    "float16 toward zero": N("float16", "any_toward_zero"),
    "bfloat16 in any direction": N("bfloat16", "any_direction"),
}
ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
ONCE, NORMS = ("linear",), ("rms_norm", "layer_norm")
ROWS, WIDTH, EPS = 2, 4, 1e-3
Path_ = tuple[Hashable, ...]


@dataclass
class Unfolded:
    """A run with separate rounding of every reading; `lean` draws from [-1, 1] or [0, 1]."""

    graph: Any
    record: Any
    rng: np.random.Generator
    x: np.ndarray
    known: dict[Hashable, np.ndarray] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], np.ndarray]) -> np.ndarray:
        if key not in self.known:
            self.known[key] = make()
        return self.known[key]

    def cast(self, value: np.ndarray) -> np.ndarray:
        """Round a reading, or some of its elements, or none."""
        u, casts = ROUNDOFF[self.record["compute"]] * (1 - 2.0**-20), self.record["casts"]
        lean = self.rng.choice([-1.0, 0.0, 1.0], value.shape)
        if casts == "any_toward_zero":
            return np.asarray(value * (1 - 2 * u * np.abs(lean)))
        return np.asarray(value * (1 + (2 * u if casts == "any_direction" else u) * lean))

    def stored(self, name: str) -> np.ndarray:
        return self.value(name, (("stored", name),))

    def value(self, name: str, path: Path_) -> np.ndarray:
        node = next(node for node in self.graph.nodes if node["name"] == name)
        op = node["op"]
        if op == "param":
            return self.once(name, lambda: self.parameter(node))
        if op == "input":
            return self.once(name, lambda: self.x if self.fine else self.cast(self.x))
        if op in ONCE:
            exact = self.once((name, "exact"), lambda: self.linear(node))
            return self.once((name, of_one_norm(path)), lambda: self.cast(exact))
        return self.once((name, path), lambda: self.computed(node, path))

    @property
    def fine(self) -> bool:
        return ROUNDOFF[self.record["compute"]] <= 2.0**-24

    def parameter(self, node: Any) -> np.ndarray:
        value = self.graph.tensors[node["attrs"]["key"]].astype(np.float64)
        return (
            value if self.form is None else torch.from_numpy(value).to(self.form).double().numpy()
        )

    @property
    def form(self) -> torch.dtype | None:
        return {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(self.record["compute"])

    def factor(self, node: Any) -> float:
        """Return a factor unchanged or rounded to the format; each reading chooses separately."""
        exact = float.fromhex(node["attrs"]["factor"])
        if self.form is None or self.rng.random() < 0.5:
            return exact
        return float(torch.tensor(exact).to(self.form))

    def linear(self, node: Any) -> np.ndarray:
        x, weight = self.stored(node["inputs"][0]), self.value(node["inputs"][1], ())
        return np.asarray(x @ weight.T)

    def computed(self, node: Any, path: Path_) -> np.ndarray:
        name, op, inputs = node["name"], node["op"], node["inputs"]
        if op in NORMS:
            return self.cast(self.norm(node, path))
        read = [self.value(one, (*path, (name, i))) for i, one in enumerate(inputs)]
        match op:
            case "add":
                found = read[0] + read[1]
            case "sub":
                found = read[0] - read[1]
            case "mul":
                found = read[0] * read[1]
            case "scale":
                found = read[0] * self.factor(node)
            case "tanh":
                found = np.tanh(read[0])
            case "gelu":
                found = read[0] * 0.5 * (1 + np.vectorize(math.erf)(read[0] / math.sqrt(2)))
            case "relu":
                return np.maximum(read[0], 0.0)
            case "neg":
                return np.asarray(-read[0])
            case _:
                raise AssertionError(op)
        return self.cast(found)

    def norm(self, node: Any, path: Path_) -> np.ndarray:
        rows = self.value(node["inputs"][0], ((node["name"], "rows"),))
        again = self.value(node["inputs"][0], (*path, (node["name"], "again")))
        mean = rows.mean(-1, keepdims=True) if node["op"] == "layer_norm" else 0.0
        root = 1 / np.sqrt(((rows - mean) ** 2).mean(-1, keepdims=True) + EPS)
        return np.asarray((again - mean) * root * self.value(node["inputs"][1], ()))


def of_one_norm(path: Path_) -> Path_:
    """Return the path of a reading of a value computed once: all readings by one norm are equal."""
    for place in reversed(range(len(path))):
        match path[place]:
            case (norm, "rows" | "again"):
                return ((norm, "rows"), *path[place + 1 :])
    return path


def random_graph(rng: np.random.Generator, ops: list[str]) -> Any:
    """Return random operations on earlier results, which have several readers."""
    g, shape = proofs.Graph((ROWS, WIDTH)), (ROWS, WIDTH)
    known = [g.add("input", [], shape)]
    known.append(g.add("add", [known[0], g.param("w", rng.standard_normal(shape))], shape))
    for place, op in enumerate(ops):
        one, two = (known[max(1, len(known) - 1 - int(rng.integers(3)))] for _ in range(2))
        match op:
            case "add" | "sub" | "mul":
                name = g.add(op, [one, two], shape)
            case "scale":
                name = g.add(op, [one], shape, factor=float(rng.uniform(0.5, 2.0)))
            case "linear":
                weight = rng.standard_normal((WIDTH, WIDTH)) / 2
                name = g.add(op, [one, g.param(f"w{place}", weight)], shape)
            case "rms_norm" | "layer_norm":
                inputs = [one, g.param(f"g{place}", 1 + 0.1 * rng.standard_normal(WIDTH))]
                name = g.add(op, inputs, shape, eps=EPS)
            case _:
                name = g.add(op, [one], shape)
        known.append(name)
    return g


def shared_once(rng: np.random.Generator) -> Any:
    """Return the difference of a sum and its stored value: x + w - I(x + w)."""
    g, shape = proofs.Graph((ROWS, WIDTH)), (ROWS, WIDTH)
    x = g.add("input", [], shape)
    y = g.add("add", [x, g.param("w", rng.standard_normal(shape))], shape)
    again = g.add("linear", [y, g.param("one", np.eye(WIDTH))], shape)
    g.add("sub", [again, y], shape)
    return g


EVERY = ["add", "sub", "mul", "scale", "tanh", "gelu", "relu", "neg", "linear", "rms_norm"]
EVERY = [*EVERY, "layer_norm"]


def graphs(seed: int) -> Any:
    rng = np.random.default_rng(seed)
    if seed == 0:
        return shared_once(rng)
    return random_graph(rng, [str(op) for op in rng.choice(EVERY, 3 + seed % 6)])


def boxes(folder: Path, graph: Any, record: Any, centre: np.ndarray, radius: float) -> Any:
    """Yield the box of the drift by every domain of both programs, where it has a bound."""
    train, infer = parameters(graph, EXACT), parameters(graph, record)
    at = torch.from_numpy(centre), torch.full((1, 1), radius, dtype=torch.float64)
    kernels = Kernels.of(train, infer)
    domains: dict[str, Callable[[], Any]] = {
        "interval": lambda: propagate(block(graph), kernels, *at).output.drift,
        "affine": lambda: affine_forms(block(graph), train, infer, *at).box(),
        "planes": lambda: drift_of_planes(block(graph), kernels, *at).box,
    }
    for name, domain in domains.items():
        try:
            found = domain()
        except NoBound:
            continue
        yield name, found.lo.numpy(), found.hi.numpy()
    path = folder / "model.safetensors"
    sha256 = proofs.write_safetensors(path, graph.tensors)
    proof = parse(proofs.dump(proofs.document(graph, EXACT, record, sha256, centre, radius)))
    scene = Derivation(proof, read(path).tensors).problem(proof.cases[0])
    checked: dict[str, Callable[[], Any]] = {
        "checked interval": lambda: enclosed(scene).output,
        "checked affine": lambda: drift(scene).output,
        "checked planes": lambda: derive(scene).output,
    }
    for name, domain in checked.items():
        found = unless_boundless(domain)
        if found is not None:
            box = getattr(found, "d", found)
            yield name, box.lo, box.hi


def unless_boundless(domain: Callable[[], Any]) -> Any:
    try:
        return domain()
    except Rejected as rejection:
        if not rejection.reason.startswith("bound/"):
            raise
        return None


def simulator(graph: Any, record: Any) -> Simulator:
    stored = parameters(graph, record)
    return Simulator(block(graph), stored.numerics, stored)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("seed", range(24))
def test_separately_rounded_readings_are_within_the_bounds(
    tmp_path: Path, seed: int, kernel: str
) -> None:
    graph, record = graphs(seed), KERNELS[kernel]
    rng = np.random.default_rng([seed, list(KERNELS).index(kernel)])
    centre = rng.standard_normal((ROWS, WIDTH)).astype(np.float32).astype(np.float64)
    radius = 0.0 if seed % 2 else 2.0**-10
    found = list(boxes(tmp_path, graph, record, centre, radius))
    for trial in range(60):
        x = centre + radius * rng.choice([-1.0, 1.0], centre.shape)
        exact = Unfolded(graph, {"compute": "float32", "casts": "any"}, rng, x)
        exact.cast = lambda value: value  # type: ignore[method-assign]
        wanted = exact.stored(graph.output)
        run = Unfolded(graph, record, rng, x)
        moved = run.stored(graph.output) - wanted
        slack = 1e-13 * (1 + np.abs(wanted).max())
        for name, lo, hi in found:
            assert (lo - slack <= moved).all(), (name, trial)
            assert (moved <= hi + slack).all(), (name, trial)
    simulated = simulator(graph, EXACT), simulator(graph, record)
    at = torch.from_numpy(centre), torch.full((1, 1), radius, dtype=torch.float64)
    attained = attack(*simulated, "inf", *at, candidates=1, rounds=4, restarts=0).value
    for name, lo, hi in found:
        assert attained <= max(-lo.min(), hi.max()) + 1e-13, name


@pytest.mark.parametrize("seed", range(24))
def test_simulated_run_covers_readings_of_an_unfolded_run(seed: int) -> None:
    graph = graphs(seed)
    run = Unfolded(graph, KERNELS["bfloat16"], np.random.default_rng(0), np.ones((ROWS, WIDTH)))
    run.stored(graph.output)
    simulated = block(graph)
    made = [v.node.name for v in versions(simulated, several(simulated), lambda node: True)]
    counted: dict[str, int] = {}
    for key in run.known:
        if isinstance(key, tuple) and key[1] != "exact":
            counted[key[0]] = counted.get(key[0], 0) + 1
    assert counted
    for name, count in counted.items():
        assert min(count, MOST) <= made.count(name) <= count, name


def of_rows(op: str) -> Any:
    """Return a norm of a sum of nearly equal numbers: x + w has two readings."""
    g, shape = proofs.Graph((ROWS, WIDTH)), (ROWS, WIDTH)
    x = g.add("input", [], shape)
    w = np.array([[3.0, 1.0, 1.0, 1.0], [1.0, 1.0, 2.0, 1.0]])
    y = g.add("add", [x, g.param("w", w)], shape)
    g.add(op, [y, g.param("g", np.ones(WIDTH))], shape, eps=EPS)
    return g


def recomputed() -> Any:
    """Return z - I z for z = 0.75 (x + w), which is recomputed for its second reader."""
    g, shape = proofs.Graph((ROWS, WIDTH)), (ROWS, WIDTH)
    x = g.add("input", [], shape)
    y = g.add("add", [x, g.param("w", np.ones(shape))], shape)
    z = g.add("scale", [y], shape, factor=0.75)
    g.add("sub", [z, g.add("linear", [z, g.param("one", np.eye(WIDTH))], shape)], shape)
    return g


GRAPHS: dict[str, tuple[Any, float]] = {
    "rms_norm": (of_rows("rms_norm"), 0.95),
    # its mean and its root use one reading, which the bounds do not exploit
    "layer_norm": (of_rows("layer_norm"), 0.75),
    "recomputed": (recomputed(), 0.95),
}
"""Graphs, and the share of the smallest bound that an attack attains."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("form", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", GRAPHS)
def test_attack_rounds_every_reading_separately(tmp_path: Path, name: str, form: str) -> None:
    """It comes close to the bounds, unlike one rounding of x + w for all readers."""
    (graph, share), record = GRAPHS[name], N(form, "any")
    centre = np.zeros((ROWS, WIDTH))
    zero = torch.zeros((1, 1), dtype=torch.float64)
    kernels = simulator(graph, EXACT), simulator(graph, record)
    run = attack(*kernels, "inf", torch.from_numpy(centre), zero)
    least = min(
        max(-lo.min(), hi.max()) for _, lo, hi in boxes(tmp_path, graph, record, centre, 0.0)
    )
    assert share * least < run.value <= least


def test_shared_sum_has_separate_roundings(tmp_path: Path) -> None:
    """With one rounding for all readers, x + w - I(x + w) would be nearly zero."""
    graph, rng = graphs(0), np.random.default_rng(0)
    centre = rng.standard_normal((ROWS, WIDTH)).astype(np.float32).astype(np.float64)
    least = ROUNDOFF["bfloat16"] * np.abs(centre + graph.tensors["w"]).max()
    found = list(boxes(tmp_path, graph, KERNELS["bfloat16"], centre, 0.0))
    assert len(found) == 6
    for name, lo, hi in found:
        assert max(-lo.min(), hi.max()) >= 2 * least, name
