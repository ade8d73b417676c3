"""Bounds of auto_LiRPA lie above every run, and a missing rounding is detected."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kcdsl.diagnostics import Refusal
from kcdsl.ir.terms import ModelRef
from kcdsl.model.architecture import Model
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl.route.catalogue import catalogue
from kcdsl.route.goals import goals
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated
from kcdsl_backends.attack import attack
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_backends.drift.boxes import NoBound
from kcdsl_backends.lirpa import network
from kcdsl_backends.lirpa.backend import BACKEND, drift_box
from kcdsl_backends.lirpa.library import SCALAR, Convex, Unanswered
from kcdsl_backends.real_arithmetic import allowances
from tests.support.random_modules import random_module
from tests.support.small_models import DECODER, ENCODER, write_contract, write_model

FP8 = {"format": "fp8_e4m3", "scale": "per_channel"}
KERNELS: dict[str, dict[str, Any]] = {
    "float32": {"preset": "torch-sdpa-flash"},
    "bfloat16 any": {"preset": "torch-sdpa-flash", "compute": "bfloat16", "casts": "any"},
    "bfloat16 nearest": {"preset": "torch-eager", "compute": "bfloat16", "casts": "nearest"},
    "fp8 weights": {"preset": "torch-eager", "weights": FP8},
    "fp8": {
        "preset": "torch-eager",
        "compute": "bfloat16",
        "weights": FP8,
        "activations": {"format": "fp8_e4m3", "scale": "per_token"},
    },
}
METHODS = ("ibp", "crown", pytest.param("alpha-crown", marks=pytest.mark.full))
TOKENS = (5, 9, 77)
REAL = "forall x in points(all): norm_inf(drift(attn_0, x)) <= "


def radius_of(size: float) -> torch.Tensor:
    return torch.full((1, 1), size, dtype=torch.float64)


def factory_of(model: Model, kernel: str) -> ProblemFactory:
    train = resolve({"preset": "torch-eager"})
    return ProblemFactory(model, train, resolve(KERNELS[kernel]), torch.device("cpu"))


@pytest.fixture(scope="module", params=["llama", "bert"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder, config=DECODER if request.param == "llama" else ENCODER)
    named = ModelRef("model.safetensors", architecture=request.param, config="config.json")
    return load_model(named, folder)


def compared(
    factory: ProblemFactory, block: str, tokens: tuple[int, ...], size: float, method: str
) -> tuple[float, float]:
    """Return the bound of a method, and the drift that an attack attains."""
    problem, centre = factory.problem(block, tokens), factory.centre(block, tokens)
    bound = float(drift_box(problem, centre, radius_of(size), method).mag().amax())
    run = attack(*problem.simulators(), "inf", centre, radius_of(size), candidates=1, rounds=4)
    return bound, run.value


@pytest.mark.sample(1)
@pytest.mark.parametrize("size", [0.0, 1e-3])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("block", ["attn_0", "mlp_0"])
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_no_run_exceeds_a_bound(
    model: Model, kernel: str, block: str, method: str, size: float
) -> None:
    bound, attained = compared(factory_of(model, kernel), block, TOKENS, size, method)
    assert attained <= bound
    if method != "ibp" and size == 0.0:
        assert bound <= 8 * attained


@pytest.mark.sample(1)
@pytest.mark.parametrize("block", ["attn_0", "mlp_0"])
def test_network_without_errors_equals_the_block(model: Model, block: str) -> None:
    factory = factory_of(model, "bfloat16 any")
    problem, centre = factory.problem(block, TOKENS), factory.centre(block, TOKENS)
    made = network.DriftNetwork(problem, centre, radius_of(0.0))
    drift = made(*((entry.low + entry.high) / 2 for entry in made.entries))
    train, infer = (one.run(centre, {}) for one in problem.simulators())
    torch.testing.assert_close(drift.flatten(), (infer - train).flatten(), rtol=0, atol=1e-12)


@pytest.mark.sample(1)
@pytest.mark.parametrize("forgotten", ["linear", "softmax", "scale", "view", "entering"])
def test_attack_detects_a_missing_rounding(
    model: Model, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network without the roundings of an operation has a bound below a run.

    The exception is `view`, which rounds nothing.
    """
    honest = allowances._allowance

    def forgetful(step: Any, state: Any, side: int) -> allowances.Allowance:
        found = honest(step, state, side)
        if forgotten == "entering":
            return replace(found, entering=None)
        if step.node.op != forgotten:
            return found
        apart = None if found.apart is None else torch.zeros_like(found.apart)
        return replace(found, error=None, apart=apart)

    monkeypatch.setattr(allowances, "_allowance", forgetful)
    kernel = "fp8" if forgotten == "entering" else "bfloat16 any"
    bound, attained = compared(factory_of(model, kernel), "attn_0", TOKENS, 0.0, "crown")
    if forgotten in ("linear", "entering"):
        assert attained > bound
    if forgotten == "view":
        assert attained <= bound


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(200))
def test_no_run_of_a_random_block_exceeds_a_bound(seed: int) -> None:
    made = random_module(seed, widths=(2, 16), longest=5)
    factory = factory_of(made.model(), list(KERNELS)[seed % 3])
    tokens = tuple(n % 8 for n in range(made.rows))
    for method in ("ibp", "crown"):
        try:
            bound, attained = compared(factory, "part", tokens, (seed % 2) * 1e-3, method)
        except (NoBound, Refusal, Unanswered):
            continue
        assert attained <= bound, (seed, method, made.steps)


@pytest.mark.parametrize("name", list(SCALAR))
def test_linear_relaxations_enclose_their_function(name: str) -> None:
    """On wide and on narrow intervals; the tolerance covers the rounding of the test."""
    function, generator = SCALAR[name], torch.Generator().manual_seed(1)
    width = 10.0 ** (torch.rand(400, generator=generator) * 12 - 11).double()
    low = torch.randn(400, generator=generator, dtype=torch.float64) * 2
    if isinstance(function, Convex) and not function.rises:
        low = low.abs() + 1e-3
    high = low + width
    under, least, over, most = function.planes(low, high)
    smallest, largest = function.range(low, high)
    for share in torch.linspace(0, 1, 33, dtype=torch.float64):
        x = low + share * (high - low)
        y, room = function.value(x), 1e-13 * (1 + function.value(x).abs() + (over * x).abs())
        assert bool((under * x + least <= y + room).all())
        assert bool((y - room <= over * x + most).all())
        assert bool(((smallest <= y + room) & (y - room <= largest)).all())


# --- the backend ----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("evidence", ["proof", "proof-real"])
def test_clause_must_admit_real_arithmetic(tmp_path: Path, evidence: str) -> None:
    write_model(tmp_path, prompts=("a b",))
    program = write_contract(tmp_path, REAL + "1.0", REAL + "1e-9", evidence=evidence)
    (wide, narrow) = BACKEND.decide(program, tmp_path, goals(program))
    assert isinstance(narrow.verdict, Violated)
    assert narrow.counterexample is not None
    assert wide.evidence.kind == "proof-real"
    assert any("auto_LiRPA" in text for text in wide.evidence.assumptions)
    assert wide.proof is None
    assert isinstance(wide.verdict, Held if evidence == "proof-real" else Inconclusive)


@pytest.mark.full
def test_run_above_a_bound_is_reported_as_a_contradiction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, prompts=("a b",))
    program = write_contract(tmp_path, REAL + "1.0", evidence="proof-real")
    zero = torch.zeros(1, 3 * 16, dtype=torch.float64)
    monkeypatch.setattr("kcdsl_backends.lirpa.backend.bounds", lambda *_: (zero, zero))
    (outcome,) = BACKEND.decide(program, tmp_path, goals(program))
    assert isinstance(outcome.verdict, InvalidEvidence)
    assert "auto_LiRPA" in outcome.verdict.reason
    assert "contradicted" in outcome.verdict.reason


@pytest.mark.full
def test_certificate_needs_a_proof_object_to_pass(tmp_path: Path, cli: Any) -> None:
    write_model(tmp_path, prompts=("a b",))
    write_contract(tmp_path, REAL + "1.0", evidence="proof-real")
    ran = cli("verify", "--backend", "lirpa", "--domains", "ibp", cwd=tmp_path)
    assert ran.code == 0, ran
    statement = (tmp_path / "out/verify.statement.json").read_text()
    assert "PASSED" not in statement
    assert "proof-real evidence of the backend lirpa has no proof object" in statement


def test_default_backend_is_not_lirpa() -> None:
    names = [spec.name for spec in catalogue() if "universal-drift" in spec.fragments]
    assert names.index("interval") < names.index("lirpa")


@pytest.mark.full
@pytest.mark.parametrize("block", ["attn_0", "mlp_0"])
def test_bounds_of_minilm_blocks(block: str) -> None:
    """Intervals bound a block of 384 columns; CROWN reports the memory it would need."""
    from bench.minilm import problem_factory

    factory = problem_factory(KERNELS["bfloat16 any"])
    tokens = (101, 2023, 102)
    bound, attained = compared(factory, block, tokens, 0.0, "ibp")
    assert attained <= bound < 1e3


@pytest.mark.full
def test_import_does_not_raise_the_recursion_limit() -> None:
    """The library allows a million calls on import; nested JSON would then crash the process."""
    code = (
        "import sys; before = sys.getrecursionlimit()\n"
        "from kcdsl_backends.lirpa import library; library.version()\n"
        "assert sys.getrecursionlimit() == before, sys.getrecursionlimit()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
