"""`kcdsl verify` of rows(...): one certificate for every length, and error paths."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from kcdsl.ir.terms import Program
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl.route.goals import goals
from kcdsl_backends.certifier.statements.cases import Case, cases_of, slice_rows
from kcdsl_backends.certifier.statements.problems import ProblemFactory
from kcdsl_certs.recheck import recheck
from tests.support.small_models import write_contract, write_model

ATTENTION = "forall x in rows(all, 32): norm_inf(drift(attn_0, x)) <= %s"
MLP = "forall x in rows(all, 1000, 5%): norm_2(drift(mlp_0, x)) <= 1"
FLIP = "forall x in rows(all, 8): no_flip(head, x)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small model of 32 positions and a few prompts."""
    write_model(tmp_path)
    return tmp_path


@pytest.fixture
def verify(cli: Any, folder: Path) -> Callable[..., Any]:
    """Return a function that verifies requirements in the folder."""

    def run(*requirements: str, options: tuple[str, ...] = ()) -> Any:
        write_contract(folder, *requirements)
        return cli("verify", "--format", "json", "--cache", "off", *options, cwd=folder)

    return run


def case_of(folder: Path, program: Program) -> tuple[ProblemFactory, Case]:
    model = load_model(program.model, folder)
    factory = ProblemFactory(
        model, resolve(program.train), resolve(program.infer), torch.device("cpu")
    )
    (goal,) = goals(program)
    (case,) = cases_of(factory, goal, slice_rows(program, model, "all"))
    return factory, case


@pytest.mark.full
def test_one_certificate_covers_every_length(
    cli: Any, verify: Callable[..., Any], folder: Path, follows: Callable[..., None]
) -> None:
    assert cli("keygen", cwd=folder).code == 0
    ran = verify(ATTENTION % 0.5, MLP, options=("--sign", "kcdsl.key"))
    assert ran.code == 0, ran.stderr
    document = json.loads(ran.stdout)
    follows(document)
    for goal, longest in zip(document["goals"], (32, 1000), strict=True):
        assert goal["verdict"] == "held"
        assert 0 < goal["attack"] <= goal["bound"]
        (case,) = goal["cases"]
        assert case["name"] == f"rows-{longest}"
        assert any("at every length" in text for text in goal["evidence"]["assumptions"])
    proof = json.loads((folder / "out" / "N-0.proof.json").read_bytes())
    follows(proof)
    region = proof["cases"][0]["region"]
    assert (region["kind"], region["longest"]) == ("rows", 32)
    assert {tuple(table["shape"]) for table in region["tables"].values()} == {(32, 4)}
    words = ("out/verify.cert.json", "--recheck", "--key", "kcdsl.key.pub")
    checked = cli("check", *words, cwd=folder)
    assert checked.code == 0, checked.stdout + checked.stderr


@pytest.mark.full
def test_run_of_the_longest_request_may_violate_the_clause(
    cli: Any, verify: Callable[..., Any], folder: Path
) -> None:
    ran = verify(ATTENTION % 1e-9)
    assert ran.code == 1, ran.stderr
    (goal,) = json.loads(ran.stdout)["goals"]
    assert goal["verdict"] == "violated"
    file = goal["counterexample"]["file"]
    document = json.loads((folder / file).read_bytes())
    assert document["region"]["kind"] == "rows"
    assert document["input"]["shape"] == [5, 16]  # `hello`
    again = cli("replay", file, "--format", "json", cwd=folder)
    assert again.code == 1, again.stderr
    assert json.loads(again.stdout)["exact"]


@pytest.mark.full
def test_limit_between_bound_and_attack_is_inconclusive(verify: Callable[..., Any]) -> None:
    ran = verify(ATTENTION % 1e-3)
    assert ran.code == 3, ran.stdout
    (goal,) = json.loads(ran.stdout)["goals"]
    assert goal["verdict"] == "inconclusive"
    assert goal["attack"] <= 1e-3 < goal["bound"]


def test_no_flip_is_supported_at_any_length(verify: Callable[..., Any]) -> None:
    ran = verify(FLIP)
    assert ran.code in (0, 3), ran.stderr
    assert json.loads(ran.stdout)["goals"][0]["verdict"] in ("held", "inconclusive")


@pytest.mark.full
def test_cached_result_is_reused_for_the_same_length_only(cli: Any, folder: Path) -> None:
    def run(text: str) -> int:
        write_contract(folder, text)
        ran = cli("verify", "--format", "json", "--cache", folder / "cache", cwd=folder)
        return int(json.loads(ran.stdout)["goals"][0]["cached"])

    assert run(ATTENTION % 0.5) == 0
    assert run(ATTENTION % 0.5) == 1
    assert run((ATTENTION % 0.5).replace("32", "31")) == 0
    assert run((ATTENTION % 0.5).replace("rows(all, 32)", "hull(all)")) == 0


@pytest.mark.parametrize("longest", [33, 8193])
def test_lengths_beyond_the_position_tables_are_refused(
    longest: int, verify: Callable[..., Any]
) -> None:
    ran = verify((ATTENTION % 0.5).replace("32", str(longest)))
    assert ran.code == 2
    assert "KC474" in ran.stderr
    assert "positions" in ran.stderr
    assert ran.stdout == ""


def test_case_contains_states_up_to_its_longest_length(folder: Path) -> None:
    program = write_contract(folder, ATTENTION % 0.5)
    factory, case = case_of(folder, program)
    assert case.centre is not None
    assert case.centre.shape == (1, 16)
    states = factory.centre("attn_0", tuple(b"hello"))
    assert states is not None
    assert case.holds(states)
    assert case.holds(states[:1])
    assert case.holds(states.repeat(6, 1))
    assert not case.holds(states.repeat(7, 1))  # 35 rows
    assert not case.holds(states[:0])
    assert not case.holds(states[:, :8])
    assert not case.holds(states + 100 * case.radius)
    assert not case.holds(torch.full_like(states, np.nan))
    five = case.at_its_length
    assert (five.longest, five.holds(states), five.holds(states[:1])) == (None, True, False)


def test_digest_of_a_case_depends_on_its_length(folder: Path) -> None:
    cases = [
        case_of(folder, write_contract(folder, text))[1]
        for text in (ATTENTION % 0.5, (ATTENTION % 0.5).replace("32", "31"))
    ]
    assert cases[0].digest != cases[1].digest


@pytest.mark.full
def test_proof_for_a_shorter_length_is_refused(
    cli: Any, verify: Callable[..., Any], folder: Path
) -> None:
    """The proof of a shorter longest sequence replaces the right one."""
    assert verify((ATTENTION % 0.5).replace("32", "16")).code == 0
    short = (folder / "out" / "N-0.proof.json").read_bytes()
    assert recheck(short, folder / "model.safetensors").ok
    forged = json.loads(short)
    forged["cases"][0]["region"]["longest"] = 32
    outcome = recheck(json.dumps(forged).encode(), folder / "model.safetensors")
    assert outcome.reason == "document/region"


NETWORK = """
import torch
from torch import nn


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        y = self.linear(x)
        return y if x.shape[0] < 8 else y * 2.0


class Network(nn.Module):
    limits = (4, 64)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4, 4)
        self.branching = Branching()

    def forward(self, ids):
        return self.branching(self.embedding(ids))

    def blocks(self):
        return {"mlp_0": self.branching}


def build(config):
    return Network()
"""
BRANCHING = """\
kcdsl: 1
contract: example
version: 1.0.0
model: {checkpoint: model.safetensors, module: "network:build"}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: prompts.jsonl
slices: {all: {}}
clauses:
  N-0: {require: "forall x in rows(all, %d): norm_inf(drift(mlp_0, x)) <= 1", level: L2}
"""


@pytest.mark.full
@pytest.mark.parametrize(("longest", "code"), [(7, 0), (8, 2), (64, 2)])
def test_block_that_branches_on_its_length_is_refused(
    cli_process: Any, tmp_path: Path, longest: int, code: int
) -> None:
    weights = {"embedding.weight": torch.eye(4), "branching.linear.weight": torch.eye(4)}
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "prompts.jsonl").write_text('{"id": "a", "tokens": [0, 1]}\n')
    (tmp_path / "contract.yaml").write_text(BRANCHING % longest)
    ran = cli_process("verify", "--allow-code", "--cache", "off", cwd=tmp_path)
    assert ran.code == code, ran.stderr
    assert ("KC474" in ran.stderr) == (code == 2)
