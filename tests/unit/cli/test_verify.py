"""`kcdsl verify` on a small random model: every verdict and error path."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from safetensors.torch import load_file, save_file

from kcdsl.api import verification
from kcdsl_certs.verification.proofs import SOME_MARGIN
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
    """Return a folder with weights and prompts, without a contract."""
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
    assert document["schema"] == "kcdsl.verify/2"
    jsonschema.validate(document, json.loads(SCHEMA.read_text(encoding="utf-8")))
    found = document["goals"]
    assert isinstance(found, list)
    return found


def test_drift_below_its_limit_is_proved(cli: Any, write: Write, folder: Path) -> None:
    write(HELD)
    ran = cli("verify", "--block", "attn_0", "--format", "json", cwd=folder)
    assert ran.code == 0
    (goal,) = goals(ran.stdout)
    assert goal["verdict"] == "held"
    assert goal["evidence"]["kind"] == "proof"
    assert 0 < goal["attack"] <= goal["bound"] <= 0.01
    assert goal["tightness"] == pytest.approx(goal["bound"] / goal["attack"])
    assert len(goal["cases"]) == 2
    statement = goal["certificate"]
    assert statement == "out/verify-attn_0.statement.json"
    assert f"not signed: kcdsl sign {statement}" in ran.stderr
    assert cli("keygen", "-o", folder / "kcdsl.key").code == 0
    unsigned = cli("check", statement, "--key", "kcdsl.key.pub", "--format", "json", cwd=folder)
    assert unsigned.code == 2
    assert "is a statement that is not signed" in unsigned.stderr
    signed = cli("sign", statement, "--key", "kcdsl.key", cwd=folder)
    assert signed.code == 0, signed.stderr
    words = ("out/verify-attn_0.cert.json", "--key", "kcdsl.key.pub")
    assert cli("check", *words, cwd=folder).code == 0


def test_limit_below_a_concrete_run_is_violated(cli: Any, write: Write, folder: Path) -> None:
    write(HELD.replace("0.01", "1e-9"))
    ran = cli("verify", "--format", "json", cwd=folder)
    assert ran.code == 1
    (goal,) = goals(ran.stdout)
    assert goal["verdict"] == "violated"
    assert goal["counterexample"]["value"] > 1e-9
    assert goal["counterexample"]["case"] in ("p0", "p1")
    assert 0 < goal["counterexample"]["value"] < 0.9 * goal["attack"]
    told = cli("verify", cwd=folder).stdout
    assert "each sum of this run has one order;" in told
    assert f"{goal['attack']:.3g} leaves orders free" in told


@pytest.mark.full
def test_limit_between_attack_and_bound_is_inconclusive(
    cli: Any, write: Write, folder: Path
) -> None:
    write(HELD.replace("0.01", "1e-9"))
    (goal,) = goals(cli("verify", "--format", "json", cwd=folder).stdout)
    middle = (goal["attack"] * goal["bound"]) ** 0.5
    write(HELD.replace("0.01", repr(middle)))
    ran = cli("verify", cwd=folder)
    assert ran.code == 3
    assert "inconclusive" in ran.stdout
    assert "exceeds the threshold" in ran.stdout


@pytest.mark.full
def test_missing_bound_is_inconclusive_with_its_position(
    cli: Any, write: Write, folder: Path
) -> None:
    """The whole model in bfloat16: intervals overflow at a named operation."""
    write("forall x in points(all): norm_inf(drift(model, x)) <= 1000", compute="bfloat16")
    ran = cli("verify", "--attack", "off", "--format", "json", cwd=folder)
    (goal,) = goals(ran.stdout)
    assert goal["attack"] is None
    if goal["bound"] is None:
        assert (ran.code, goal["verdict"]) == (3, "inconclusive")
        assert goal["reason"]
    else:
        assert goal["verdict"] == ("held" if goal["bound"] <= 1000 else "inconclusive")


def test_empty_slice_is_not_evidence(cli: Any, write: Write, folder: Path) -> None:
    write(HELD.replace("points(all)", "points(absent)"))
    ran = cli("verify", "--format", "json", cwd=folder)
    assert ran.code == 2
    (goal,) = goals(ran.stdout)
    assert goal["verdict"] == "invalid_evidence"
    assert goal["bound"] is None


@pytest.mark.full
def test_bounds_of_regions_and_functionals_are_ordered(
    cli: Any, write: Write, folder: Path
) -> None:
    """Ball and hull contain the points; l2 and span relate to inf as the norms do."""
    write(
        "forall x in points(all): norm_inf(drift(attn_0, x)) <= 10",
        "forall x in ball(all, 1e-3): norm_inf(drift(attn_0, x)) <= 10",
        "forall x in hull(all, 0.01): norm_inf(drift(attn_0, x)) <= 10000",
        "forall x in points(all): norm_2(drift(attn_0, x)) <= 10",
        "forall x in points(all): span(drift(attn_0, x)) <= 10",
        "forall x in points(all): no_flip(head, x)",
    )
    ran = cli("verify", "--attack", "off", "--format", "json", cwd=folder)
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
def test_unknown_selection_is_refused(
    cli: Any, write: Write, folder: Path, arguments: tuple[str, ...], code: str, words: str
) -> None:
    write(HELD)
    ran = cli("verify", *arguments, cwd=folder)
    assert ran.code == 2
    assert code in ran.stderr
    assert words in ran.stderr
    assert ran.stdout == ""


def test_invalid_files_are_refused_and_nothing_is_written(
    cli: Any, write: Write, folder: Path
) -> None:
    write(HELD)
    key = folder / "kcdsl.key"
    assert cli("keygen", "-o", key).code == 0
    before = sorted(p.name for p in folder.iterdir())

    def refused(code: str) -> None:
        ran = cli("verify", "--sign", "kcdsl.key", cwd=folder)
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


def test_unknown_block_is_named(cli: Any, write: Write, folder: Path) -> None:
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


@pytest.mark.full
def test_certificate_and_proof_are_written_together(cli: Any, write: Write, folder: Path) -> None:
    write(HELD)
    assert cli("keygen", "-o", folder / "kcdsl.key").code == 0
    ran = cli("verify", "--block", "attn_0", "--sign", "kcdsl.key", cwd=folder)
    assert ran.code == 0
    names = sorted(p.name for p in (folder / "out").iterdir())
    assert names == ["N-0.proof.json", "verify-attn_0.cert.json"]
    words = ("out/verify-attn_0.cert.json", "--recheck", "--key", "kcdsl.key.pub")
    checked = cli("check", *words, cwd=folder)
    assert checked.code == 0, checked.stdout


@pytest.mark.full
def test_numerics_without_an_adapter_are_named(cli: Any, write: Write, folder: Path) -> None:
    """Numerics finer than the adapter's are proved as stated, and marked as a claim."""
    path = write(HELD)
    path.write_text(
        path.read_text().replace(
            "compute: float32}}", "compute: float32, attention: {exp_ulps: 1}}}"
        )
    )
    ran = cli("verify", "--format", "json", cwd=folder)
    assert ran.code == 0
    (goal,) = goals(ran.stdout)
    assert any("never run here" in text for text in goal["evidence"]["assumptions"])
    assert "never run here" in cli("verify", cwd=folder).stderr


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors", "the checkpoint changed"),
        ("config.json", "the config of the checkpoint changed"),
        ("prompts.jsonl", "prompts.jsonl changed"),
    ],
)
def test_files_changed_during_verification_get_no_certificate(
    cli: Any,
    write: Write,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    words: str,
) -> None:
    """Training overwrites the checkpoint while it is being proved."""
    write(HELD)
    decide = verification._decide

    def overtaken(*given: Any) -> Any:
        outcomes = decide(*given)
        content = bytearray((folder / name).read_bytes())
        if name.endswith(".safetensors"):
            content[-1] ^= 1
        (folder / name).write_bytes(content + b"\n" * ("json" in name))
        return outcomes

    monkeypatch.setattr(verification, "_decide", overtaken)
    ran = cli("verify", "--attack", "off", cwd=folder)
    assert ran.code == 2
    assert "KC608" in ran.stderr
    assert words in ran.stderr
    assert not (folder / "out").exists()


def test_checkpoint_that_cannot_be_certified_is_refused_early(
    cli: Any, write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(HELD)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    (folder / "model.safetensors").symlink_to("weights.safetensors")
    monkeypatch.setattr(verification, "_decide", lambda *given: pytest.fail("hours of proving"))
    ran = cli("verify", cwd=folder)
    assert (ran.code, "KC648" in ran.stderr) == (2, True)


def test_certificate_of_no_flip_states_only_the_order(cli: Any, write: Write, folder: Path) -> None:
    """The margin is displayed only; a proof shows that the order does not flip."""
    write("forall x in points(all): no_flip(head, x, 3)")
    cli("keygen", "-o", folder / "kcdsl.key")
    ran = cli("verify", "--format", "json", "--sign", "kcdsl.key", cwd=folder)
    (goal,) = goals(ran.stdout)
    assert (ran.code, goal["verdict"]) == (0, "held")
    assert goal["margin"] == min(case["margin"] for case in goal["cases"]) > 0
    bundle = json.loads((folder / "out" / "verify.cert.json").read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    (result,) = statement["predicate"]["clauses"]
    assert result["verdict"] == "PASSED"
    assert float.fromhex(result["bound"]["hex"]) == SOME_MARGIN
    words = ("out/verify.cert.json", "--recheck", "--key", "kcdsl.key.pub")
    checked = cli("check", *words, cwd=folder)
    assert checked.code == 0, checked.stdout
    assert "margin" in cli("verify", cwd=folder).stdout


@pytest.mark.full
def test_request_names_are_escaped_in_output(cli: Any, write: Write, folder: Path) -> None:
    rows = [{"id": "a\x1b[2Jb\u202ec", "text": "hello"}]
    (folder / "prompts.jsonl").write_text(json.dumps(rows[0]) + "\n")
    middle = HELD.replace("0.01", "1e-9")
    write(middle, middle.replace("norm_inf", "norm_2").replace("1e-9", "1e-5"))
    told = cli("verify", cwd=folder)
    (folder / "out" / "N-0.counterexample.json").stat()
    told_again = cli("replay", folder / "out" / "N-0.counterexample.json", cwd=folder)
    chained = cli("verify", "--chain", "--attack", "off", cwd=folder)
    assert (told.code, told_again.code, chained.code) == (1, 1, 3)
    for ran in (told, told_again, chained):
        assert "a\N{REPLACEMENT CHARACTER}[2Jb" in ran.stdout
        assert not {"\x1b", "\u202e"} & set(ran.stdout + ran.stderr)


@pytest.mark.parametrize("place", ["a file", "below a file", "read only"])
def test_unwritable_folder_is_refused_before_the_work(
    cli: Any, write: Write, folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    write(HELD)
    (folder / "taken").write_text("")
    output = {"a file": "taken", "below a file": "taken/out", "read only": "other/out"}[place]
    (folder / "other").mkdir(mode=0o555)
    if place == "read only":
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != folder / "other")
    monkeypatch.setattr(verification, "_decide", lambda *given: pytest.fail("hours of proving"))
    ran = cli("verify", "-o", output, cwd=folder)
    assert (ran.code, "KC602" in ran.stderr) == (2, True)


@pytest.mark.full
def test_narrow_terminal_shows_every_column(write: Write, folder: Path) -> None:
    write(HELD)
    ours, theirs = pty.openpty()
    entry = "import sys; from kcdsl.cli import main; sys.exit(main(sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", entry, "verify", "--attack", "off", "--cache", "off"],
        cwd=folder,
        env={**os.environ, "COLUMNS": "40", "NO_COLOR": "1", "TERM": "dumb"},
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        timeout=120,
        check=False,
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # a terminal without a writer
        while part := os.read(ours, 4096):
            shown += part
    os.close(ours)
    assert ran.returncode == 0
    assert "norm_inf(drift(" in shown.decode()
