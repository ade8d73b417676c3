"""`kcdsl verify` on a small random model: every verdict, every way to go wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from safetensors.torch import load_file, save_file

from tests.support.small_models import write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.sdpa.flash, numerics: {preset: torch-sdpa-flash, compute: %s}}
data: prompts.jsonl
slices:
  all: {}
  absent: {where: 'category == "absent"'}
clauses:
%s
"""
SCHEMA = resources.files("kcdsl.verdict") / "verify.schema.json"
HELD = "forall x in points(all): norm_inf(drift(attn_0, x)) <= 0.01"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with weights, prompts and no contract."""
    rows = [{"id": f"p{i}", "text": t, "category": "chat"} for i, t in enumerate(("hello", "a b"))]
    write_model(tmp_path, rows=rows)
    return tmp_path


Write = Callable[..., Path]


@pytest.fixture
def write(folder: Path) -> Write:
    """Return a function that writes a contract with the given requirements."""

    def contract(*requirements: str, compute: str = "float32") -> Path:
        clauses = "\n".join(
            f"  N-{i}: {{require: {json.dumps(text)}, level: L2}}"
            for i, text in enumerate(requirements)
        )
        path = folder / "contract.yaml"
        path.write_text(CONTRACT % (compute, clauses))
        return path

    return contract


def goals(stdout: str) -> list[dict[str, Any]]:
    document = json.loads(stdout)
    assert document["schema"] == "kcdsl.verify/1"
    jsonschema.validate(document, json.loads(SCHEMA.read_text(encoding="utf-8")))
    found = document["goals"]
    assert isinstance(found, list)
    return found


def test_a_drift_below_its_limit_is_proved(cli: Any, write: Write, folder: Path) -> None:
    write(HELD)
    ran = cli("verify", "--block", "attn_0", "--json", cwd=folder)
    assert ran.code == 0
    (goal,) = goals(ran.stdout)
    assert goal["verdict"] == "held"
    assert goal["evidence"]["kind"] == "proof"
    assert 0 < goal["attack"] <= goal["bound"] <= 0.01
    assert goal["tightness"] == pytest.approx(goal["bound"] / goal["attack"])
    assert len(goal["cases"]) == 2
    assert "not signed" in ran.stderr
    assert cli("keygen", "-o", folder / "kcdsl.key").code == 0
    unsigned = cli("check", goal["certificate"], "--json", cwd=folder)
    assert unsigned.code == 4
    assert "bundle/signatures" in unsigned.stdout


def test_a_limit_below_a_concrete_run_is_violated(cli: Any, write: Write, folder: Path) -> None:
    write(HELD.replace("0.01", "1e-9"))
    ran = cli("verify", "--json", cwd=folder)
    assert ran.code == 1
    (goal,) = goals(ran.stdout)
    assert goal["verdict"] == "violated"
    assert goal["counterexample"]["value"] > 1e-9
    assert goal["counterexample"]["case"] in ("p0", "p1")


def test_a_limit_between_both_is_inconclusive(cli: Any, write: Write, folder: Path) -> None:
    write(HELD.replace("0.01", "1e-9"))
    (goal,) = goals(cli("verify", "--json", cwd=folder).stdout)
    middle = (goal["attack"] * goal["bound"]) ** 0.5
    write(HELD.replace("0.01", repr(middle)))
    ran = cli("verify", cwd=folder)
    assert ran.code == 3
    assert "inconclusive" in ran.stdout
    assert "exceeds the threshold" in ran.stdout


def test_without_a_bound_nothing_is_claimed(cli: Any, write: Write, folder: Path) -> None:
    """The whole model in bfloat16: intervals give up, and say where."""
    write("forall x in points(all): norm_inf(drift(model, x)) <= 1000", compute="bfloat16")
    ran = cli("verify", "--attack", "off", "--json", cwd=folder)
    (goal,) = goals(ran.stdout)
    assert goal["attack"] is None
    if goal["bound"] is None:
        assert (ran.code, goal["verdict"]) == (3, "inconclusive")
        assert goal["reason"]
    else:
        assert goal["verdict"] == ("held" if goal["bound"] <= 1000 else "inconclusive")


def test_an_empty_slice_is_no_evidence(cli: Any, write: Write, folder: Path) -> None:
    write(HELD.replace("points(all)", "points(absent)"))
    ran = cli("verify", "--json", cwd=folder)
    assert ran.code == 2
    (goal,) = goals(ran.stdout)
    assert goal["verdict"] == "invalid_evidence"
    assert goal["bound"] is None


def test_regions_and_functionals(cli: Any, write: Write, folder: Path) -> None:
    """Ball and hull hold more than the points; l2 and span are related to inf as they must be."""
    write(
        "forall x in points(all): norm_inf(drift(attn_0, x)) <= 10",
        "forall x in ball(all, 1e-3): norm_inf(drift(attn_0, x)) <= 10",
        "forall x in hull(all, 0.01): norm_inf(drift(attn_0, x)) <= 10000",
        "forall x in points(all): norm_2(drift(attn_0, x)) <= 10",
        "forall x in points(all): span(drift(attn_0, x)) <= 10",
        "forall x in points(all): no_flip(head, x)",
    )
    ran = cli("verify", "--attack", "off", "--json", cwd=folder)
    point, ball, hull, two, span, flip = goals(ran.stdout)
    assert point["bound"] < ball["bound"] < hull["bound"]
    assert point["bound"] <= two["bound"] <= 4 * point["bound"] * (1 + 1e-6)
    assert point["bound"] <= span["bound"] <= 2 * point["bound"] * (1 + 1e-6)
    assert flip["verdict"] in ("held", "inconclusive")
    assert ran.code in (0, 3)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--block", "attn_7"), "KC470", "attn_0"),
        (("--clause", "N-9"), "KC471", "N-0"),
        (("--backend", "crown"), "KC402", "interval"),
        (("--backend", "empirical"), "KC402", "empirical"),
    ],
)
def test_a_wrong_selection_is_refused(
    cli: Any, write: Write, folder: Path, arguments: tuple[str, ...], code: str, words: str
) -> None:
    write(HELD)
    ran = cli("verify", *arguments, cwd=folder)
    assert ran.code == 2
    assert code in ran.stderr
    assert words in ran.stderr
    assert ran.stdout == ""


def test_bad_files_are_refused_and_leave_nothing(cli: Any, write: Write, folder: Path) -> None:
    write(HELD)
    key = folder / "kcdsl.key"
    assert cli("keygen", "-o", key).code == 0
    before = sorted(p.name for p in folder.iterdir())

    def refused(code: str) -> None:
        ran = cli("verify", cwd=folder)
        assert (ran.code, code in ran.stderr) == (2, True), ran.stderr
        assert "Traceback" not in ran.stderr
        assert sorted(p.name for p in folder.iterdir()) == before

    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    save_file(weights | {name: weights[name] * float("nan")}, folder / "model.safetensors")
    refused("KC452")
    save_file(weights | {name: weights[name][:1].clone()}, folder / "model.safetensors")
    refused("KC45")
    save_file(weights, folder / "model.safetensors")
    key.write_text("not a key")
    refused("KC6")
    write(HELD.replace("attn_0", "attn_3"))
    refused("KC")


def test_an_unknown_block_of_the_model_is_named(cli: Any, write: Write, folder: Path) -> None:
    write(HELD.replace("attn_0", "attn_3"))
    ran = cli("verify", cwd=folder)
    assert ran.code == 2
    assert "attn_3" in ran.stderr
    assert "attn_0" in ran.stderr


def test_contradicting_clauses_are_refused_first(cli: Any, write: Write, folder: Path) -> None:
    path = write(HELD)
    path.write_text(
        path.read_text()
        + "  N-A: {require: p99(kl) <= 0.01 nats, slices: [all], level: L2}\n"
        + "  N-B: {require: p50(kl) >= 0.5 nats, slices: [all], level: L2}\n"
    )
    ran = cli("verify", cwd=folder)
    assert ran.code == 2
    assert "KC" in ran.stderr


def test_certificate_and_proof_are_written_together(cli: Any, write: Write, folder: Path) -> None:
    write(HELD)
    assert cli("keygen", "-o", folder / "kcdsl.key").code == 0
    ran = cli("verify", "--block", "attn_0", cwd=folder)
    assert ran.code == 0
    names = sorted(p.name for p in (folder / "out").iterdir())
    assert names == ["N-0.proof.json", "verify-attn_0.cert.json"]
    checked = cli("check", folder / "out" / "verify-attn_0.cert.json", "--recheck", cwd=folder)
    assert checked.code == 0, checked.stdout


def test_numerics_that_no_adapter_keeps_are_named(cli: Any, write: Write, folder: Path) -> None:
    """A specification finer than the program is proved as stated, and said to be only a claim."""
    path = write(HELD)
    path.write_text(
        path.read_text().replace(
            "compute: float32}}", "compute: float32, attention: {exp_ulps: 1}}}"
        )
    )
    ran = cli("verify", "--json", cwd=folder)
    assert ran.code == 0
    (goal,) = goals(ran.stdout)
    assert any("never run here" in text for text in goal["evidence"]["assumptions"])
    assert "never run here" in cli("verify", cwd=folder).stderr
