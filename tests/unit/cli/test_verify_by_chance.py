"""`kcdsl verify` of clauses with `evidence: probabilistic`: probabilities are stated."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kcdsl.route.goals import goals
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.attack.runs import Attack
from kcdsl_backends.certifier.decision import verdict_of
from tests.support.small_models import write_contract, write_model

LAYER = "forall x in points(all): norm_inf(drift(layer_0, x)) <= %s"
FLIP = "forall x in points(all): no_flip(model, x)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small model and a prompt."""
    write_model(tmp_path, prompts=("hello",))
    return tmp_path


@pytest.fixture
def verify(cli: Any, folder: Path) -> Callable[..., Any]:
    """Return a function that verifies requirements in the folder, and returns document and code."""

    def run(*requirements: str, evidence: str = "probabilistic", options: Any = ()) -> Any:
        write_contract(folder, *requirements, compute="bfloat16", evidence=evidence)
        ran = cli("verify", "--format", "json", "--cache", "off", *options, cwd=folder)
        return json.loads(ran.stdout), ran.code

    return run


@pytest.fixture
def between(verify: Callable[..., Any]) -> float:
    """Return a threshold below the worst-case bound and above the probabilistic one."""
    worst, _ = verify(LAYER % 0, evidence="proof", options=("--attack", "off"))
    likely, _ = verify(LAYER % 0, options=("--attack", "off"))
    bounds = [document["goals"][0]["bound"] for document in (worst, likely)]
    assert bounds[1] < 0.7 * bounds[0]
    return float(f"{1.01 * bounds[1]:.3g}")


@pytest.mark.full
def test_probabilistic_bound_is_marked_in_every_output(
    cli: Any, verify: Callable[..., Any], folder: Path, between: float, follows: Any
) -> None:
    assert cli("keygen", cwd=folder).code == 0
    document, code = verify(LAYER % between, options=("--sign", "kcdsl.key"))
    follows(document)
    (goal,) = document["goals"]
    assert (code, goal["verdict"], goal["alpha"]) == (0, "held", "0.000000001")
    evidence = goal["evidence"]
    assert (evidence["kind"], evidence["confirmed"]) == ("probabilistic", True)
    assert any("independent roundings" in text for text in evidence["assumptions"])
    assert {case.get("alpha") for case in goal["cases"]} == {"0.000000001"}
    proof = json.loads((folder / "out" / "N-0.proof.json").read_bytes())
    follows(proof)
    assert all(case["chance"]["alpha"] == "0.000000001" for case in proof["cases"])
    words = ("out/verify.cert.json", "--recheck", "--key", "kcdsl.key.pub")
    checked = cli("check", *words, cwd=folder)
    assert checked.code == 0, checked.stdout + checked.stderr
    table = cli("verify", "--cache", "off", "--attack", "off", cwd=folder)
    assert "probabilistic" in table.stdout


@pytest.mark.full
def test_worst_case_bound_is_preferred_where_it_suffices(verify: Callable[..., Any]) -> None:
    document, code = verify(LAYER % 1000)
    (goal,) = document["goals"]
    assert (code, goal["evidence"]["kind"]) == (0, "proof")
    assert not any("alpha" in case for case in goal["cases"])


@pytest.mark.full
def test_proof_evidence_never_uses_a_probabilistic_bound(
    verify: Callable[..., Any], between: float
) -> None:
    for evidence in ("proof", ""):
        document, code = verify(LAYER % between, evidence=evidence)
        (goal,) = document["goals"]
        assert code in (1, 3)
        assert goal["verdict"] in ("violated", "inconclusive")
        assert goal["bound"] > between
        assert "alpha" not in goal


@pytest.mark.full
def test_attack_far_above_the_limit_violates(verify: Callable[..., Any]) -> None:
    document, _ = verify(LAYER % 0.001)
    (goal,) = document["goals"]
    assert goal["tightness"] is None
    document, code = verify(LAYER % (goal["attack"] / 4))
    (goal,) = document["goals"]
    assert (code, goal["verdict"]) == (1, "violated")


def test_worst_case_run_does_not_violate_a_probabilistic_clause(folder: Path) -> None:
    """A worst-case attack may exceed a probabilistic bound without contradiction."""
    program = write_contract(folder, LAYER % 0.5, evidence="probabilistic")
    (goal,) = goals(program)
    found = Attack(0.7, (0,), 0, 0.0, 0.7)
    likely = CaseOutcome("p0", 5, 0.4, 0.7, alpha="0.000000001")
    assert isinstance(verdict_of(goal, [likely], found), Held)
    too_large = replace(likely, bound=0.6)
    assert isinstance(verdict_of(goal, [too_large], found), Violated)
    assert isinstance(verdict_of(goal, [likely, replace(likely, bound=2.0)], found), Violated)
    worst = replace(likely, alpha=None)
    assert isinstance(verdict_of(goal, [worst], found), InvalidEvidence)


@pytest.mark.full
def test_probability_option_is_used(verify: Callable[..., Any]) -> None:
    bounds = []
    for alpha in ("0.05", "1e-9", "1e-30"):
        document, _ = verify(LAYER % 0, options=("--alpha", alpha, "--attack", "off"))
        bounds.append(document["goals"][0]["bound"])
    assert bounds[0] < bounds[1] < bounds[2]


@pytest.mark.full
def test_no_flip_accepts_probabilistic_evidence(verify: Callable[..., Any]) -> None:
    document, code = verify(FLIP)
    (goal,) = document["goals"]
    assert goal["evidence"]["kind"] in ("proof", "probabilistic")
    assert code in (0, 3)


@pytest.mark.parametrize("alpha", ["0", "0.5", "1e-31", "-1e-9", "nan", "often", "1e-9 "])
def test_invalid_probability_is_refused(cli: Any, folder: Path, alpha: str) -> None:
    write_contract(folder, LAYER % 1, evidence="probabilistic")
    ran = cli("verify", f"--alpha={alpha}", cwd=folder)
    assert ran.code == 2
    assert "KC477" in ran.stderr
    assert not (folder / "out").exists()


def test_unused_probability_is_refused(cli: Any, folder: Path) -> None:
    write_contract(folder, LAYER % 1, evidence="proof")
    ran = cli("verify", "--alpha", "1e-9", cwd=folder)
    assert ran.code == 2
    assert "evidence: probabilistic" in ran.stderr


@pytest.mark.full
def test_chains_refuse_probabilistic_bounds(verify: Callable[..., Any], between: float) -> None:
    document, _ = verify(LAYER % between, options=("--chain", "--attack", "off"))
    (goal,) = document["goals"]
    assert goal["evidence"]["kind"] == "proof"
    assert goal["verdict"] == "inconclusive"


def test_attack_is_inconclusive_if_no_probable_bound_was_computed(folder: Path) -> None:
    """Chains and boxes alone compute no probable bound, so an attack above the limit is open."""
    program = write_contract(folder, LAYER % 0.5, evidence="probabilistic")
    (goal,) = goals(program)
    found, worst = Attack(0.7, (0,), 0, 0.0, 0.7), CaseOutcome("p0", 5, 0.8, 0.7)
    for asked, chain in (
        (goal, True),
        (replace(goal, domains=("interval", "planes")), False),
    ):
        verdict = verdict_of(asked, [worst], found, chain=chain)
        assert isinstance(verdict, Inconclusive)
        assert "was not bounded" in verdict.reason
        surely = replace(asked, alpha=None)
        assert isinstance(verdict_of(surely, [worst], found, chain=chain), Violated)
    for asked in (goal, replace(goal, domains=("affine",))):
        assert isinstance(verdict_of(asked, [worst], found), Violated)


@pytest.mark.full
def test_options_without_a_probable_bound_are_inconclusive(verify: Callable[..., Any]) -> None:
    document, _ = verify(LAYER % 1e-9)
    attack = document["goals"][0]["attack"]
    for options in (("--chain",), ("--domains", "interval,planes")):
        document, code = verify(LAYER % (attack / 2), options=options)
        (goal,) = document["goals"]
        assert (code, goal["verdict"], goal["counterexample"]) == (3, "inconclusive", None)


@pytest.mark.full
def test_probabilistic_result_implies_no_other_clause(cli: Any, folder: Path) -> None:
    """A bound that fails on some runs is no premise for measured clauses."""
    text = "max(tv) <= 0.999"
    for evidence, implied in (("proof", 1), ("probabilistic", 0)):
        write_contract(folder, "forall x in points(all): norm_inf(drift(model, x)) <= 9")
        path = folder / "contract.yaml"
        written = path.read_text()
        path.write_text(
            written.rstrip().replace("L2}", f"L2, evidence: {evidence}}}")
            + f'\n  M: {{require: "{text}", level: L2, evidence: proof, slices: [all]}}\n'
        )
        options = ("--format", "json", "--cache", "off", "--attack", "off", "--clause", "N-0")
        ran = cli("verify", *options, cwd=folder)
        document = json.loads(ran.stdout)
        kind = document["goals"][0]["evidence"]["kind"]
        assert len(document["implied"]) == (implied if kind == evidence else 1), ran.stderr
