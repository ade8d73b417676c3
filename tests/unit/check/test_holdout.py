"""Held-out clauses gate releases and are hidden from trainers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.check.stored import from_json
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest, to_json
from kcdsl.ir.terms import Program
from kcdsl.ir.training import for_training, training_document

TEXT = """\
kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: everyone.jsonl
slices:
  all: {}
  shown: {data: shown.jsonl}
  hidden: {data: secret.jsonl, where: 'topic == "secret"'}
tables:
  t: {unit: nats, rows: [{where: length > 9, value: 0.0123}], otherwise: 0.05}
clauses:
  A: {require: p99(kl) <= 0.02, slices: [shown], level: L2}
  H-1: {require: p99(kl) <= table(t), slices: [hidden, shown], level: L2, holdout: true}
  H-2: {require: "forall x in points(all): no_flip(model, x)", level: L3, holdout: true}
"""


def compiled(text: str) -> Program:
    """Return the program of a valid contract."""
    sink = Sink()
    program = compile_source(SourceFile("x", text), sink)
    assert program is not None, [d.message for d in sink]
    return program


def test_holdout_changes_the_digest() -> None:
    program = compiled(TEXT)
    assert [c.id for c in program.clauses if c.holdout] == ["H-1", "H-2"]
    assert digest(compiled(TEXT.replace(", holdout: true", ""))) != digest(program)
    stated = TEXT.replace(
        "slices: [shown], level: L2}", "slices: [shown], level: L2, holdout: false}"
    )
    assert stated != TEXT
    assert digest(compiled(stated)) == digest(program)
    assert [c.holdout for c in from_json(to_json(program)).clauses] == [False, True, True]


def test_both_forms_accept_holdout() -> None:
    record = TEXT.replace("require: p99(kl) <= table(t)", "metric: p99_kl, threshold: table(t)")
    assert digest(compiled(record)) == digest(compiled(TEXT))


def test_training_output_omits_held_out_clauses(follows: Callable[..., None]) -> None:
    program = compiled(TEXT)
    data = training_document(program)
    for word in (b"H-1", b"H-2", b"hidden", b"secret", b"everyone", b"no_flip", b"123/"):
        assert word not in data
    document = json.loads(data)
    follows(document)
    follows(document["program"])
    assert document["withheld"] == {"clauses": 2, "slices": 2, "tables": 1, "metrics": 0}
    assert document["full"] == {"digest": digest(program)}
    shown, _ = for_training(program)
    assert document["program"]["digest"] == digest(shown) != digest(program)
    assert digest(from_json(document["program"])) == digest(shown)


def test_held_out_table_with_the_name_of_a_shown_metric_is_omitted() -> None:
    named = TEXT.replace("  t: {unit", "  kl: {unit").replace("table(t)", "table(kl)")
    shown, withheld = for_training(compiled(named))
    assert (shown.tables, withheld.tables) == ((), 1)


def test_contract_without_held_out_clauses_is_shown_completely() -> None:
    program = compiled(TEXT.replace(", holdout: true", ""))
    shown, withheld = for_training(program)
    assert digest(shown) == digest(program)
    assert str(withheld) == "nothing"


@pytest.mark.parametrize("value", ["yes", '"true"', "1", "[true]", "maybe"])
def test_holdout_accepts_only_booleans(value: str) -> None:
    sink = Sink()
    text = TEXT.replace("holdout: true", f"holdout: {value}", 1)
    assert compile_source(SourceFile("x", text), sink) is None
    assert [d.code.id for d in sink] in (["KC103"], ["KC007"])


def test_command_omits_held_out_clauses_for_training(cli: Any, tmp_path: Path) -> None:
    path = tmp_path / "contract.yaml"
    path.write_text(TEXT)
    ran = cli("compile", path)
    assert "H-1 (held out)" in ran.stdout
    ran = cli("compile", path, "--emit", "ir", "--for", "training")
    assert ran.code == 0
    assert json.loads(ran.stdout)["withheld"]["clauses"] == 2
    assert "left out for training: 2 clauses, 2 slices, 1 table" in ran.stderr
    ran = cli("compile", path, "--for", "training")
    assert "H-1" not in ran.stdout
    assert "H-1" not in ran.stderr
    assert cli("compile", path, "--emit", "ir", "--for", "fun").code == 2
