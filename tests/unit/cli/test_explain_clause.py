"""`kcdsl explain CLAUSE`: the backends, and the part of the clause that each one lacks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Cli

HEAD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
clauses:
"""
CLAUSES = {
    "N-KL": (
        "p99(kl) <= 0.02",
        "empirical",
        dict.fromkeys(("smt", "interval", "lirpa", "marabou", "z3"), "p99(kl)"),
    ),
    "N-DRIFT": (
        '"forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.1"',
        "interval",
        {
            "smt": "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.1",
            "empirical": "drift(attn_0, x)",
        },
    ),
    "N-FLIP": (
        '"forall x in points(all): no_flip(model, x)"',
        "interval",
        {
            "smt": "forall x in points(all): no_flip(model, x)",
            "empirical": "no_flip(model, x)",
            "lirpa": "no_flip(model, x)",
            "marabou": "no_flip(model, x)",
            "z3": "no_flip(model, x)",
        },
    ),
    "R-LAT": (
        "p95(latency) <= 2 s",
        "empirical",
        {"smt": "latency", **dict.fromkeys(("interval", "lirpa", "marabou", "z3"), "p95(latency)")},
    ),
    "O-TRACE": (
        "has(trace, [rng_seed])",
        "empirical",
        dict.fromkeys(("smt", "interval", "lirpa", "marabou", "z3"), "has(trace, [rng_seed])"),
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [f"  {name}: {{require: {t[0]}, level: L2}}\n" for name, t in CLAUSES.items()]
    (tmp_path / "contract.yaml").write_text(HEAD + "".join(lines), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", CLAUSES)
def test_each_backend_names_its_unsupported_part(
    cli: Cli, folder: Path, follows: Callable[..., None], name: str
) -> None:
    ran = cli("explain", name, "--format", "json", cwd=folder)
    assert ran.code == 0
    document = json.loads(ran.stdout)
    follows(document)
    assert document["backend"] == CLAUSES[name][1]
    blamed = {b["backend"]: b["blame"]["text"] for b in document["backends"] if b["blame"]}
    assert blamed == CLAUSES[name][2]
    also = ["lirpa", "marabou", "z3"] if name == "N-DRIFT" else []
    covering = [b["backend"] for b in document["backends"] if b["covers"]]
    assert covering == [CLAUSES[name][1], *also]


def test_table_and_carets_of_a_clause(cli: Cli, folder: Path) -> None:
    ran = cli("explain", "R-LAT", "contract.yaml", cwd=folder)
    lines = ran.stdout.splitlines()
    assert "backend   empirical" in lines
    at = lines.index("out of reach of smt: the bound chain derives nothing about latency")
    assert lines[at + 1].strip() == "--> contract.yaml:12:24"
    source, carets = lines[at + 3], lines[at + 4]
    assert source[carets.index("^") : carets.rindex("^") + 1] == "latency"


def test_carets_in_a_block_scalar(cli: Cli, folder: Path) -> None:
    text = HEAD + (
        "  N-DRIFT:\n    require: >-\n      forall x in points(all):\n"
        "        norm_inf(drift(attn_0, x))\n        <= 0.1\n    level: L2\n"
    )
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    ran = cli("explain", "N-DRIFT", cwd=folder)
    lines = ran.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("out of reach of empirical"))
    source, carets = lines[at + 3], lines[at + 4]
    assert source[carets.index("^") : carets.rindex("^") + 1] == "drift(attn_0, x)"


def test_implied_clause_without_a_premise_has_no_backend(cli: Cli, folder: Path) -> None:
    text = HEAD + "  A: {require: mean(kl) <= 1e-3, level: L2, evidence: proof}\n"
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    document = json.loads(cli("explain", "A", "--format", "json", cwd=folder).stdout)
    assert document["backend"] is None
    by_name = {b["backend"]: b for b in document["backends"]}
    assert not any(b["covers"] for b in by_name.values())
    assert by_name["smt"]["reason"] == "no drift clause on the block model could imply it"
    assert {b["blame"]["text"] for b in by_name.values()} == {"mean(kl)"}


@pytest.mark.parametrize(
    ("require", "blamed"),
    [
        (
            "exists x in points(all): norm_inf(drift(attn_0, x)) <= 1",
            "exists x in points(all): norm_inf(drift(attn_0, x)) <= 1",
        ),
        (
            "forall x in points(all): norm_inf(drift(attn_0, x)) + 1 <= 2",
            "norm_inf(drift(attn_0, x)) + 1",
        ),
        (
            "forall x in points(all): no_flip(model, x) or no_flip(head, x)",
            "no_flip(model, x) or no_flip(head, x)",
        ),
    ],
)
def test_clause_that_no_backend_supports(cli: Cli, folder: Path, require: str, blamed: str) -> None:
    text = HEAD + f'  A: {{require: "{require}", level: L2}}\n  B: {{level: L1}}\n'
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    ran = cli("explain", "A", "--format", "json", cwd=folder)
    assert ran.code == 0
    assert ran.stderr == "the contract has 2 errors: `kcdsl lint` shows them\n"
    document = json.loads(ran.stdout)
    assert document["fragment"] == "outside"
    assert document["backend"] is None
    assert not any(b["covers"] for b in document["backends"])
    texts = {b["backend"]: b["blame"]["text"] for b in document["backends"]}
    assert texts["interval"] == blamed
    assert texts["empirical"] in {"drift(attn_0, x)", "no_flip(model, x)"}


def test_clause_in_error_shows_only_its_errors(cli: Cli, folder: Path) -> None:
    text = (
        HEAD + "  A: {require: p99(k) <= 1, level: L2}\n  B: {require: p99(kx) <= 1, level: L2}\n"
    )
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    ran = cli("explain", "A", cwd=folder)
    assert ran.code == 2
    assert "`k`" in ran.stderr
    assert "`kx`" not in ran.stderr


def test_error_in_the_head_of_a_contract(cli: Cli, folder: Path) -> None:
    text = HEAD.replace("contract: c\n", "")
    text += "  A: {require: p99(kl) <= 1, level: L2}\n"
    (folder / "contract.yaml").write_text(text, encoding="utf-8")
    ran = cli("explain", "A", cwd=folder)
    assert (ran.code, ran.stdout) == (2, "")
    assert "`contract`" in ran.stderr


def test_unknown_clause_is_refused(cli: Cli, folder: Path) -> None:
    ran = cli("explain", "N-KX", cwd=folder)
    assert ran.code == 2
    assert "KC471" in ran.stderr
    assert "did you mean `N-KL`?" in ran.stderr


def test_contract_in_error_is_refused(cli: Cli, folder: Path) -> None:
    (folder / "contract.yaml").write_text(HEAD + "  A: {require: p99(k) <= 1, level: L2}\n")
    ran = cli("explain", "A", cwd=folder)
    assert ran.code == 2
    assert "KC203" in ran.stderr
