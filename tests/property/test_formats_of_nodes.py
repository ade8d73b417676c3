"""Formats of nodes, casts and Python numbers, on random graphs.

Runs of PyTorch's eager kernels and simulated runs lie inside the bounds of every domain of both
programs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kcdsl_backends.attack.simulation import Overflowed
from kcdsl_backends.certifier.statements.problems import BlockProblem
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.drift.linear_bounds import linear_bounds as planes_drift
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.derivation import Derivation
from kcdsl_certs.recheck.documents.document import parse
from kcdsl_certs.recheck.interval.tensors import read
from tests.support import eager, proofs
from tests.support.prover import block, parameters
from tests.support.rationals.exact import Rational

N = proofs.numerics
DOMAINS = ("interval", "affine", "planes")
MAGNITUDES = (1e-40, 1e-20, 1e-6, 0.01, 1.0, 1.0, 1.0, 10.0, 1e3, 1e8)
ZERO = torch.zeros(1, 1, dtype=torch.float64)
Pair = tuple[Any, Any]


def boxes(graph: Any, pair: Pair, x: np.ndarray) -> dict[str, Box]:
    """Return the box of the output's drift in every domain that has one."""
    problem, centre = _problem(graph, pair), torch.from_numpy(x)
    found: dict[str, Box] = {}
    for name in DOMAINS:
        try:
            match name:
                case "interval":
                    found[name] = problem.bound(centre, ZERO).output.drift
                case "affine":
                    found[name] = problem.forms(centre, ZERO).box()
                case _:
                    found[name] = planes_drift(problem.graph, problem.kernels(), centre, ZERO).box
        except NoBound:
            continue
    return found


def _problem(graph: Any, pair: Pair) -> BlockProblem:
    train, infer = (parameters(graph, record) for record in pair)
    return BlockProblem(block(graph), train, infer)


def checked(graph: Any, pair: Pair, x: np.ndarray, folder: Path) -> dict[str, float | None]:
    """Return the bound of every domain and of the exact tier in the checker; None for no bound."""
    sha256 = proofs.write_safetensors(folder / "model.safetensors", graph.tensors)
    tensors = read(folder / "model.safetensors").tensors
    found: dict[str, float | None] = {}
    for name in (*DOMAINS, "exact"):
        document = proofs.document(graph, *pair, sha256, x, 0.0)
        document["cases"][0]["domain"] = "interval" if name == "exact" else name
        proof = parse(proofs.dump(document))
        tier = Rational(proof, tensors) if name == "exact" else Derivation(proof, tensors)
        try:
            found[name] = tier.derive(proof.cases[0])[0]
        except Rejected as rejection:
            if not rejection.reason.startswith(("bound/", "rule/")):
                raise
            found[name] = None
    return found


def random_problem(seed: int) -> tuple[Any, Pair, tuple[str, str], np.ndarray]:
    """Return a graph, the numerics of both kernels, their formats, and an input."""
    rng = np.random.default_rng(seed)
    rows, width = int(rng.integers(1, 4)), int(rng.choice([2, 4, 6, 16]))
    graph = eager.random_graph(rng, rows, width, int(rng.integers(2, 7)))
    size = float(rng.choice(MAGNITUDES))
    x = (rng.standard_normal((rows, width)) * size).astype(np.float32).astype(np.float64)
    formats = str(rng.choice(eager.FORMATS)), str(rng.choice(eager.FORMATS))
    casts = str(rng.choice(["any", "nearest"])), str(rng.choice(["any", "nearest"]))
    return graph, (N(formats[0], casts[0]), N(formats[1], casts[1])), formats, x


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 72, 12))
def test_eager_and_simulated_runs_stay_within_the_bounds(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 12):
        graph, pair, formats, x = random_problem(seed)
        found, again = boxes(graph, pair, x), checked(graph, pair, x, tmp_path)
        real = [eager.run(graph, form, x)[graph.output].double() for form in formats]
        for drift in [real[1] - real[0], *_simulated(graph, pair, x, seed)]:
            for name, box in found.items():
                assert bool(torch.isfinite(drift).all()), (seed, name)
                inside = (box.lo <= drift + 1e-300) & (drift - 1e-300 <= box.hi)
                assert bool(inside.all()), (seed, name, formats)
                assert float(drift.abs().amax()) <= (again[name] or np.inf), (seed, name)
        for name, box in found.items():
            mine, theirs = float(box.mag().amax()), again[name]
            assert theirs is not None, (seed, name)
            assert theirs <= mine * (1 + 2.0**-10) + 2.0**-300, (seed, name)


def _simulated(graph: Any, pair: Pair, x: np.ndarray, seed: int) -> list[Tensor]:
    """Return drifts of admitted runs with every rounding at its limit."""
    generator, found = torch.Generator().manual_seed(seed), []
    for _ in range(2):
        outputs = []
        for simulator in _problem(graph, pair).simulators():
            symbols = {
                name: torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
                for name, shape in simulator.symbol_shapes().items()
            }
            try:
                outputs.append(simulator.run(torch.from_numpy(x), symbols))
            except Overflowed:
                break
        if len(outputs) == 2:
            found.append(outputs[1] - outputs[0])
    return found


def one(op: str, format: str = "", **attrs: Any) -> Any:
    """Return a graph of one operation on two rows."""
    graph = proofs.Graph((2, 64))
    graph.add(op, [graph.add("input", [], (2, 64))], (2, 64), "", format, **attrs)
    return graph


OPERATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "shift": lambda x, number: x + number,
    "scale": lambda x, number: x * number,
    "divide": lambda x, number: x / number,
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("casts", ["any", "nearest"])
@pytest.mark.parametrize("form", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("op", "name"), [("shift", "offset"), ("scale", "factor"), ("divide", "divisor")]
)
def test_python_number_may_be_rounded_first_or_not(
    casts: str, form: str, op: str, name: str, tmp_path: Path
) -> None:
    """Neither format represents -3.3; both represent a quarter, which has no error."""
    rng = np.random.default_rng(5)
    x = torch.from_numpy(rng.standard_normal((2, 64))).to(getattr(torch, form))
    start, pair = x.double().numpy(), (N("float64", accumulate="float64"), N(form, casts))
    widths = []
    for number in (-3.3, 0.25):
        attrs: dict[str, Any] = {name: number}
        graph = one(op, **attrs)
        found, again = boxes(graph, pair, start), checked(graph, pair, start, tmp_path)
        assert set(found) == set(DOMAINS)
        exact = eager.run(graph, "float64", start)[graph.output]
        rounded = float(torch.tensor(number, dtype=x.dtype))
        for taken in (number, rounded):
            run = OPERATIONS[op](x.double(), taken).to(x.dtype).double()
            for name_, box in found.items():
                assert bool(((box.lo <= run - exact) & (run - exact <= box.hi)).all()), name_
                assert float((run - exact).abs().amax()) <= (again[name_] or np.inf)
        widths.append(float(found["interval"].mag().amax()))
        if number == 0.25 and casts == "nearest":
            error = float((run - exact).abs().amax())
            assert widths[-1] <= error * (1 + 2.0**-20) + 2.0**-40


def test_unrepresentable_python_number_has_no_bound(tmp_path: Path) -> None:
    x = np.ones((2, 64))
    numbers: tuple[tuple[str, dict[str, Any]], ...] = (
        ("shift", {"offset": 1e5}),
        ("scale", {"factor": -1e5}),
        ("divide", {"divisor": 1e-9}),
    )
    for op, attrs in numbers:
        pair = N("float32"), N("float16")
        graph = one(op, **attrs)
        assert boxes(graph, pair, x) == {}
        assert set(checked(graph, pair, x, tmp_path).values()) == {None}


@pytest.mark.parametrize("casts", ["any", "nearest"])
def test_only_narrowing_casts_round(casts: str, tmp_path: Path) -> None:
    x = np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32).astype(np.float64)
    wide, narrow = N("float32", casts), N("bfloat16", casts)
    for pair, format, lost in (
        ((wide, wide), "float32", False),
        ((wide, wide), "", False),
        ((wide, wide), "float64", False),
        ((wide, wide), "bfloat16", casts == "any"),
        ((narrow, narrow), "float32", casts == "any"),  # the input is stored in bfloat16
        ((N("float64", accumulate="float64"), narrow), "float32", True),
    ):
        graph = one("cast", format)
        found, again = boxes(graph, pair, x), checked(graph, pair, x, tmp_path)
        assert len(found) == 3
        for name, box in found.items():
            assert (float(box.mag().amax()) > 1e-12) is lost, (name, format)
            assert (again[name] or 0.0) <= float(box.mag().amax()) * (1 + 2.0**-10) + 1e-290


def test_pinned_format_precedes_that_of_the_kernel(tmp_path: Path) -> None:
    """float32 in a float64 kernel is rounded to float32; a pinned constant is not rounded again."""
    x = np.random.default_rng(2).standard_normal((2, 8)).astype(np.float32).astype(np.float64)
    pair = N("float64", "nearest", accumulate="float64"), N("bfloat16", "nearest")
    graph = proofs.Graph((2, 8))
    start = graph.add("input", [], (2, 8))
    table = graph.constant("table", np.full((1, 8), 0.1, dtype=np.float32), "float32")
    wide = graph.add("cast", [start], (2, 8), "", "float32")
    graph.add("mul", [wide, table], (2, 8), "", "float32")
    found, again = boxes(graph, pair, x), checked(graph, pair, x, tmp_path)
    real = [eager.run(graph, form, x)[graph.output].double() for form in ("float64", "bfloat16")]
    drift = real[1] - real[0]
    for name, box in found.items():
        assert bool(((box.lo <= drift) & (drift <= box.hi)).all()), name
        assert float(box.mag().amax()) <= float(drift.abs().amax()) * (1 + 2.0**-10), name
        assert (again[name] or 0.0) <= float(box.mag().amax()) * (1 + 2.0**-10)


@pytest.mark.parametrize("op", ["add", "sub", "mul"])
def test_operand_of_a_wider_format_has_no_bound(op: str, tmp_path: Path) -> None:
    """PyTorch rounds a zero-dimensional tensor in sums, but not in products."""
    graph = proofs.Graph((2, 8))
    x = graph.add("input", [], (2, 8))
    table = graph.constant("table", np.full((2, 8), 0.1, dtype=np.float32), "float32")
    graph.add(op, [x, graph.add("neg", [table], (2, 8))], (2, 8))
    for form, known in (("bfloat16", 0), ("float32", 3)):
        pair = N("float32"), N(form)
        assert len(boxes(graph, pair, np.ones((2, 8)))) == known
        again = checked(graph, pair, np.ones((2, 8)), tmp_path)
        assert {value is not None for value in again.values()} == {known > 0}


def norm(op: str, eps: float, names: tuple[str, ...], format: str = "") -> Any:
    """Return a norm composed of these parts."""
    graph = proofs.Graph((2, 64))
    x = graph.add("input", [], (2, 64))
    x = graph.add("cast", [x], (2, 64), "", format) if format else x
    parts = [[name, format] for name in names]
    graph.add(op, [x], (2, 64), "", format, eps=eps, form="written", parts=parts)
    return graph


SQUARES = ("square", "mean", "shift", "root", "normed")


@pytest.mark.parametrize("size", [300.0, 1e-6])
def test_overflowing_float16_squares_have_no_bound(size: float, tmp_path: Path) -> None:
    """Those of 300 are infinite, those of 1e-6 are zero, and eps is rounded to zero as well."""
    x = np.random.default_rng(3).standard_normal((2, 64)) * size
    graph = norm("rms_norm", 1e-9, SQUARES)
    for compute, known in (("float16", 0), ("float32", 3)):
        pair = N("float32"), N(compute)
        assert len(boxes(graph, pair, x)) == known
        again = checked(graph, pair, x, tmp_path)
        assert {again[name] is not None for name in DOMAINS} == {known > 0}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(6))
def test_composed_norms_stay_within_tight_bounds(seed: int, tmp_path: Path) -> None:
    """Whole blocks of rows against float64; every part of every composition is rounded."""
    rng = np.random.default_rng(seed)
    x = ((rng.standard_normal((2, 64)) + seed % 3) * 2.0).astype(np.float32).astype(np.float64)
    exact = N("float64", accumulate="float64")
    for op, spreads in (("rms_norm", (("square", "mean"),)), ("layer_norm", eager.SPREADS)):
        for spread in spreads:
            for root in eager.ROOTS:
                graph = norm(op, 1e-5, (*spread, "shift", *root))
                for form, casts in (("bfloat16", "any"), ("float16", "nearest")):
                    pair = exact, N(form, casts)
                    found, again = boxes(graph, pair, x), checked(graph, pair, x, tmp_path)
                    first, second = (
                        eager.run(graph, name, x)[graph.output].double()
                        for name in ("float64", form)
                    )
                    worst = float((second - first).abs().amax())
                    for name in DOMAINS:
                        box, most = found[name], again[name] or 0.0
                        inside = (box.lo <= second - first) & (second - first <= box.hi)
                        assert bool(inside.all()), (name, spread, root)
                        assert worst <= most <= float(box.mag().amax()) * (1 + 2.0**-10)
                        assert most <= 16 * worst, (name, spread, root)
                        if name == "interval":  # the programs agree on the errors
                            assert most >= float(box.mag().amax()) * (1 - 2.0**-10)


def test_stored_sigmoid_includes_its_rounding(tmp_path: Path) -> None:
    x = np.random.default_rng(4).standard_normal((2, 64)).astype(np.float32).astype(np.float64)
    widths = {}
    for form in ("fused", "written"):
        graph = one("silu", form=form)
        pair = N("float64", accumulate="float64"), N("float16")
        found, again = boxes(graph, pair, x), checked(graph, pair, x, tmp_path)
        run = eager.run(graph, "float16", x)[graph.output].double()
        drift = run - eager.run(graph, "float64", x)[graph.output]
        for name in DOMAINS:
            assert bool(((found[name].lo <= drift) & (drift <= found[name].hi)).all())
            assert float(drift.abs().amax()) <= (again[name] or 0.0)
        widths[form] = float(found["interval"].mag().amax())
    assert 1.3 < widths["written"] / widths["fused"] < 2


def test_fused_attention_refuses_a_coarser_format(tmp_path: Path) -> None:
    graph = proofs.Graph((4, 4))
    x = graph.add("input", [], (4, 4))
    scores = graph.add("matmul", [x, x], (4, 4), "scores", "bfloat16")
    graph.add("softmax", [scores], (4, 4), "probabilities")
    pair = N("float32", style="fused"), N("float32", style="fused")
    assert boxes(graph, pair, np.ones((4, 4))) == {}
    assert set(checked(graph, pair, np.ones((4, 4)), tmp_path).values()) == {None}
