"""Bounds of z3 lie above every run; a missing rounding or case is detected; cvc5 agrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kcdsl.diagnostics import Refusal
from kcdsl.model.presets import resolve
from kcdsl.route.catalogue import Execution
from kcdsl.route.goals import goals
from kcdsl.verdict.model import Held, Inconclusive, Violated
from kcdsl_backends.attack import attack
from kcdsl_backends.certifier.statements.problems import BlockProblem, ProblemFactory
from kcdsl_backends.drift.boxes import Box, NoBound
from kcdsl_backends.real_arithmetic import allowances
from kcdsl_backends.smt.drift import backend as module
from kcdsl_backends.smt.drift.backend import BACKEND, DriftGoal
from kcdsl_backends.smt.drift.encoding import Encoder
from kcdsl_backends.smt.drift.forms import Constraint, SymbolForm, System, row
from kcdsl_backends.smt.drift.search import DriftQuestion, Search, targets
from kcdsl_backends.smt.solver import Outcome
from tests.support.proofs import static
from tests.support.random_modules import model_of, random_module
from tests.support.small_models import write_contract, write_model

FP8 = {"format": "fp8_e4m3", "scale": "per_channel"}
KERNELS: dict[str, dict[str, Any]] = {
    "float32": {"preset": "torch-sdpa-flash"},
    "bfloat16 any": {"preset": "torch-sdpa-flash", "compute": "bfloat16", "casts": "any"},
    "fp8 weights": {"preset": "torch-eager", "weights": FP8},
    "fp8": {
        "preset": "torch-eager",
        "compute": "bfloat16",
        "weights": FP8,
        "activations": {"format": "fp8_e4m3", "scale": "per_token"},
    },
}
CORNER = torch.tensor([[-1.0, 1.0]], dtype=torch.float64)
"""An input near which signs of `Rectified(2, 4)` are undecided."""
REAL = "forall x in ball(all, 0.001): norm_inf(drift(attn_0, x)) <= "


class Rectified(nn.Module):
    """x + B relu(A x + a) + b, or with a rectified maximum inside."""

    def __init__(self, width: int, inner: int, *, maximum: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        shapes = (inner, width), (inner,), (width, inner), (width,)
        parts = (0.5 * torch.randn(shape, generator=generator) for shape in shapes)
        self.a, self.c, self.b, self.d = (nn.Parameter(part) for part in parts)
        self.maximum = maximum

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, width]."""
        h = torch.relu(nn.functional.linear(x, self.a, self.c))
        y = nn.functional.linear(h, self.b, self.d)
        return y + torch.relu(x - y) if self.maximum else x + y


class Linear(nn.Module):
    """W x, where the magnitudes of each row of W sum to 7/4."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[1.0, -0.75], [0.5, 1.25]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, 2]."""
        return nn.functional.linear(x, self.w)


def problem_of(
    part: nn.Module, width: int, *kernels: Mapping[str, Any]
) -> tuple[BlockProblem, torch.Tensor]:
    """Return the block under the last kernel, or under two, and the centre of a region."""
    model = model_of(part, width)
    train, infer = (resolve(one) for one in ({"preset": "torch-eager"}, *kernels)[-2:])
    factory = ProblemFactory(model, train, infer, torch.device("cpu"))
    return factory.problem("part", (1,)), torch.full((1, width), 0.125, dtype=torch.float64)


def radius_of(size: float) -> torch.Tensor:
    return torch.full((1, 1), size, dtype=torch.float64)


def bounded(
    problem: BlockProblem, centre: torch.Tensor, size: float, seconds: float = 30.0
) -> float:
    posed = DriftGoal.of(problem, centre, radius_of(size))
    Search(posed.targets, seconds).tighten()
    return float(posed.box().mag().amax())


def attained(problem: BlockProblem, centre: torch.Tensor, size: float) -> float:
    simulators = problem.simulators()
    return attack(
        *simulators, "inf", centre, radius_of(size), candidates=2, rounds=6, samples=8
    ).value


@pytest.mark.sample(1)
@pytest.mark.parametrize("maximum", [False, True])
@pytest.mark.parametrize("size", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_bound_is_above_runs_and_below_other_domains(
    kernel: str, size: float, maximum: bool
) -> None:
    problem, centre = problem_of(Rectified(3, 4, maximum=maximum), 3, KERNELS[kernel])
    bound = bounded(problem, centre, size)
    assert attained(problem, centre, size) <= bound
    interval = problem.bound(centre, radius_of(size)).output.drift
    assert bound <= float(interval.mag().amax())
    affine = problem.forms(centre, radius_of(size), None).box()
    assert bound <= float(affine.mag().amax()) * 1.02


@pytest.mark.full
def test_cases_of_relu_make_a_bound_exact() -> None:
    """The drift of rectified weights on a wide box is half of the interval bound."""
    problem, _ = problem_of(Rectified(2, 4), 2, KERNELS["fp8 weights"])
    bound, run = bounded(problem, CORNER, 1.0), attained(problem, CORNER, 1.0)
    interval = problem.bound(CORNER, radius_of(1.0)).output.drift
    assert run <= bound <= 1.05 * run
    assert bound <= 0.8 * float(interval.mag().amax())


def _without_rounding(patch: pytest.MonkeyPatch) -> None:
    honest = allowances._allowance

    def forgetful(step: Any, state: Any, side: int) -> allowances.Allowance:
        found = honest(step, state, side)
        return replace(found, error=None) if step.node.op == "linear" else found

    patch.setattr(allowances, "_allowance", forgetful)


def _without_case(patch: pytest.MonkeyPatch) -> None:
    honest = System.relu

    def forgetful(self: System, *given: Any) -> Any:
        found = honest(self, *given)
        self.facts = [
            Constraint(fact.cases[1:]) if len(fact.cases) > 1 else fact for fact in self.facts
        ]
        return found

    patch.setattr(System, "relu", forgetful)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("forget", "kernel"), [(_without_rounding, "bfloat16 any"), (_without_case, "fp8 weights")]
)
def test_run_detects_a_missing_rounding_or_case(
    monkeypatch: pytest.MonkeyPatch, forget: Callable[[pytest.MonkeyPatch], None], kernel: str
) -> None:
    problem, _ = problem_of(Rectified(2, 4), 2, KERNELS[kernel])
    run = attained(problem, CORNER, 0.5)
    forget(monkeypatch)
    assert bounded(problem, CORNER, 0.5) < run


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(120))
def test_no_run_of_a_random_block_exceeds_a_bound(seed: int) -> None:
    made = random_module(seed, widths=(2, 8), longest=3)
    train, infer = resolve({"preset": "torch-eager"}), resolve(list(KERNELS.values())[seed % 4])
    try:
        factory = ProblemFactory(made.model(), train, infer, torch.device("cpu"))
        tokens = tuple(n % 8 for n in range(made.rows))
        problem, centre = factory.problem("part", tokens), factory.centre("part", tokens)
        assert centre is not None
        size = (seed % 3) * 1e-2
        bound = bounded(problem, centre, size, 3.0)
    except (NoBound, Refusal):
        return
    assert attained(problem, centre, size) <= bound, made.steps


@pytest.mark.full
def test_codes_of_two_kernels_are_encoded_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 1/32 and 1/16: code values differ by at most 1/32, while intervals give 3/64."""
    int8, exact = {"format": "int8", "scale": "per_channel"}, 7 / 4 / 32

    def kernel(scale: float) -> dict[str, Any]:
        numerics = {"preset": "torch-eager", "casts": "nearest", "weights": int8}
        return {**numerics, "activations": static("int8", scale)}

    problem, centre = problem_of(Linear(), 2, kernel(1 / 32), kernel(1 / 16))
    run = attained(problem, centre, 0.1)
    posed = DriftGoal.of(problem, centre, radius_of(0.1))
    limit = exact * 1.02
    assert Search(posed.targets, 30.0).settle(limit) is Outcome.UNSAT
    assert 0.9 * exact <= run <= float(posed.box().mag().amax()) <= limit * 1.001
    top = max(DriftGoal.of(problem, centre, radius_of(0.1)).targets, key=lambda one: one.high)
    assert top.high > 1.4 * exact
    script = DriftQuestion(top).text(limit)
    assert "(set-logic QF_LIRA)" in script
    assert cvc5_says(script) == "unsat"
    monkeypatch.setattr(System, "codes", lambda *_: None)
    loose = DriftGoal.of(problem, centre, radius_of(0.1))
    assert Search(loose.targets, 30.0).settle(limit) is Outcome.SAT


# --- cvc5 -----------------------------------------------------------------------------------------


def cvc5_says(script: str) -> str:
    import cvc5

    solver = cvc5.Solver()
    solver.setOption("tlimit-per", "20000")
    parser = cvc5.InputParser(solver)
    parser.setStringInput(cvc5.InputLanguage.SMT_LIB_2_6, script, "goal")
    symbols = parser.getSymbolManager()
    while not (command := parser.nextCommand()).isNull():
        answer = str(command.invoke(solver, symbols)).strip()
        if answer:
            return answer
    raise AssertionError("the script asks nothing")


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", [0.5, 0.97, 1.03])
@pytest.mark.parametrize("kernel", ["bfloat16 any", "fp8 weights"])
def test_cvc5_agrees_on_every_threshold(kernel: str, share: float) -> None:
    problem, centre = problem_of(Rectified(2, 3), 2, KERNELS[kernel])
    posed = DriftGoal.of(problem, centre, radius_of(0.5))
    Search(posed.targets, 30.0).tighten()
    top = max(posed.targets, key=lambda one: one.low if share < 1 else one.high)
    threshold = top.low * share if share < 1 else top.high * share
    answer = DriftQuestion(top).reaches(threshold, 30.0)
    assert answer is (Outcome.SAT if share < 1 else Outcome.UNSAT)
    assert cvc5_says(DriftQuestion(top).text(threshold)) == str(answer.value)


# --- the backend ----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("evidence", ["proof", "proof-real"])
def test_clause_must_admit_proofs_without_a_checker(tmp_path: Path, evidence: str) -> None:
    write_model(tmp_path, prompts=("a b",))
    program = write_contract(tmp_path, REAL + "1.0", REAL + "1e-9", evidence=evidence)
    (wide, narrow) = BACKEND.decide(program, tmp_path, goals(program))
    assert isinstance(narrow.verdict, Violated)
    assert narrow.counterexample is not None
    assert any("z3 4" in text or "z3 5" in text for text in wide.evidence.assumptions)
    assert isinstance(wide.verdict, Held if evidence == "proof-real" else Inconclusive)


def test_zero_timeout_is_inconclusive(tmp_path: Path) -> None:
    write_model(tmp_path, prompts=("a b",))
    program = write_contract(tmp_path, REAL + "1e-6", evidence="proof-real")
    (found,) = BACKEND.decide(
        program, tmp_path, goals(program), attacks=False, execution=Execution(seconds=1e-9)
    )
    assert isinstance(found.verdict, Inconclusive)


def test_large_block_is_declined_before_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, prompts=("a b",))
    program = write_contract(tmp_path, REAL + "1.0", evidence="proof-real")
    monkeypatch.setattr(module, "COEFFICIENTS", 1000)
    monkeypatch.setattr(module, "Encoder", None)
    (found,) = BACKEND.decide(program, tmp_path, goals(program), attacks=False)
    assert isinstance(found.verdict, Inconclusive)
    assert "at most 1,000 are encoded" in found.verdict.reason


@pytest.mark.full
def test_explain_states_which_cases_are_small_enough(tmp_path: Path, cli: Any) -> None:
    write_model(tmp_path, prompts=("a b",))
    write_contract(tmp_path, REAL + "1e-9", evidence="proof-real")
    ran = cli("explain", "N-0", "contract.yaml", "--smtlib", "asked", cwd=tmp_path)
    assert ran.code == 0, ran
    assert "small enough for z3:" in ran.stdout
    assert "p0: yes, " in ran.stdout
    scripts = sorted((tmp_path / "asked").glob("*.smt2"))
    assert scripts
    assert cvc5_says(scripts[0].read_text()) in ("sat", "unsat")


@pytest.mark.full
def test_counterexample_is_reproduced(tmp_path: Path, cli: Any) -> None:
    write_model(tmp_path, prompts=("a b",))
    write_contract(tmp_path, REAL + "1e-8", evidence="proof-real")
    ran = cli("verify", "--backend", "z3", "--time-limit", "20", cwd=tmp_path)
    assert ran.code == 1, ran
    (document,) = (tmp_path / "out").glob("*counterexample*.json")
    again = cli("replay", document, "--contract", "contract.yaml", cwd=tmp_path)
    assert again.code == 1, again
    assert "violated" in again.stdout


def test_tiny_coefficients_are_part_of_the_slack() -> None:
    """5e-324 has no grid of 24 bits below it."""
    tiny = torch.tensor([[5e-324, -5e-324]], dtype=torch.float64)
    form = SymbolForm(torch.tensor([0.5], dtype=torch.float64), tiny, torch.zeros(1))
    found = row(form, 0)
    assert found.symbols == ()
    assert 0.5 - 1e-15 < found.constant < 0.5


class Squared(nn.Module):
    """B (tanh(A x))^2."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([[0.7, -0.4], [0.3, 0.9]]))
        self.b = nn.Parameter(torch.tensor([[1.0, -0.75], [0.5, 1.25]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, 2]."""
        h = torch.tanh(nn.functional.linear(x, self.a))
        return nn.functional.linear(h * h, self.b)


def test_square_admits_two_readings_of_its_operand() -> None:
    kernel = KERNELS["bfloat16 any"]
    problem, centre = problem_of(Squared(), 2, kernel, kernel)
    encoder = Encoder(problem, centre, radius_of(0.0))
    node = next(node for node in problem.graph.nodes if node.op == "mul")
    a, b = (encoder._operand(node, index).train for index in (0, 1))
    before = len(encoder.system.places)
    product = encoder._exact(node, encoder._operand).train
    one, two = (nn.functional.pad(f.coefs, (0, before - f.coefs.shape[-1])) for f in (a, b))
    apart = (one - two).sign()  # the readings are as far from each other as they may be
    read = [f.centre + (coefs * apart).sum(-1) for f, coefs in ((a, one), (b, two))]
    assert bool((read[0] != read[1]).all())
    linear = product.centre + (product.coefs[..., :before] * apart).sum(-1)
    least = linear - product.coefs[..., before:].abs().sum(-1) - product.error
    assert bool((least <= read[0] * read[1]).all())


def test_constant_zero_value_keeps_its_cases() -> None:
    """Without any case the constraint would be a contradiction."""
    system, zero = System(), torch.zeros(1, dtype=torch.float64)
    point, wide = Box.point(zero), Box.around(zero + 1)
    x, still = system.fresh(wide), SymbolForm.constant(zero)
    for one, change, boxes in ((still, x, (point, wide)), (x, -x, (wide, point))):
        made = system.relu(one, change, boxes, wide)
        assert len(system.facts[-2].cases) == 2
        found = Search(targets(system, made.change, wide), 10.0)
        assert found.settle(0.5) is Outcome.SAT
        (other,) = (each for each in found.found if each.low < 0.5)
        assert DriftQuestion(other).reaches(0.01, 10.0) is Outcome.UNSAT
