"""`kcdsl explain CLAUSE`: the table of backends and the part that is out of reach of each."""

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
    "N-KL": ("p99(kl) <= 0.02", "empirical", {"smt": "p99(kl)", "interval": "p99(kl)"}),
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
        },
    ),
    "R-LAT": (
        "p95(latency) <= 2 s",
        "empirical",
        {"smt": "latency", "interval": "p95(latency)"},
    ),
    "O-TRACE": (
        "has(trace, [rng_seed])",
        "empirical",
        {"smt": "has(trace, [rng_seed])", "interval": "has(trace, [rng_seed])"},
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lines = [f"  {name}: {{require: {t[0]}, level: L2}}\n" for name, t in CLAUSES.items()]
    (tmp_path / "contract.yaml").write_text(HEAD + "".join(lines), encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("name", CLAUSES)
def test_each_backend_with_the_part_out_of_its_reach(
    cli: Cli, folder: Path, follows: Callable[..., None], name: str
) -> None:
    ran = cli("explain", name, "--format", "json", cwd=folder)
    assert ran.code == 0
    document = json.loads(ran.stdout)
    follows(document)
    assert document["backend"] == CLAUSES[name][1]
    blamed = {b["backend"]: b["blame"]["text"] for b in document["backends"] if b["blame"]}
    assert blamed == CLAUSES[name][2]
    assert [b["backend"] for b in document["backends"] if b["covers"]] == [CLAUSES[name][1]]


def test_the_table_and_the_carets(cli: Cli, folder: Path) -> None:
    ran = cli("explain", "R-LAT", "contract.yaml", cwd=folder)
    lines = ran.stdout.splitlines()
    assert "backend   empirical" in lines
    at = lines.index("out of reach of smt: the bound chain derives nothing about latency")
    assert lines[at + 1].strip() == "--> contract.yaml:12:24"
    source, carets = lines[at + 3], lines[at + 4]
    assert source[carets.index("^") : carets.rindex("^") + 1] == "latency"


def test_carets_inside_a_block_scalar(cli: Cli, folder: Path) -> None:
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


def test_an_unknown_clause(cli: Cli, folder: Path) -> None:
    ran = cli("explain", "N-KX", cwd=folder)
    assert ran.code == 2
    assert "KC471" in ran.stderr
    assert "did you mean `N-KL`?" in ran.stderr


def test_a_contract_in_error(cli: Cli, folder: Path) -> None:
    (folder / "contract.yaml").write_text(HEAD + "  A: {require: p99(k) <= 1, level: L2}\n")
    ran = cli("explain", "A", cwd=folder)
    assert ran.code == 2
    assert "KC203" in ran.stderr
