"""`kcdsl evaluate` on small random models: verdicts, files, certificates, error paths."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.api import evaluation
from tests.support.reports import report_schema
from tests.support.small_models import DECODER, ENCODER, write_model

CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: %s, config: config.json, tokenizer: bytes}
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
KL = "{require: p99(kl) <= 1e-3, slices: [all], level: L2}"
TRACE = "{require: 'has(trace, [build_fingerprint, replay_signature])', slices: [all], level: L3}"
ROWS = [{"id": f"p{i}", "text": t, "category": "chat"} for i, t in enumerate(("hello", "world"))]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a model, its prompts and a contract; it returns the folder."""

    def contract(
        *clauses: str,
        compute: str = "float32",
        architecture: str = "llama",
        rows: list[dict[str, Any]] | None = None,
    ) -> Path:
        config = DECODER if architecture == "llama" else ENCODER
        write_model(tmp_path, config=config, rows=ROWS if rows is None else rows)
        numbered = "\n".join(f"  C-{i}: {text}" for i, text in enumerate(clauses))
        (tmp_path / "contract.yaml").write_text(CONTRACT % (architecture, compute, numbered))
        return tmp_path

    return contract


def document(stdout: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stdout)
    jsonschema.validate(found, report_schema())
    return found


@pytest.mark.full
def test_contract_holds(cli: Any, write: Write, follows: Any) -> None:
    folder = write(KL, TRACE)
    ran = cli("evaluate", cwd=folder)
    assert ran.code == 0
    assert "✓ held" in ran.stdout
    assert "attn_0" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 100
    assert "report.json" in ran.stderr
    report = document((folder / "out" / "report.json").read_text())
    assert [c["verdict"] for c in report["clauses"]] == ["held", "held"]
    check = report["crosschecks"][0]
    assert 0 < check["measured"] <= check["certified"]
    traces = [json.loads(t) for t in (folder / "out" / "trace.jsonl").read_text().splitlines()]
    for trace in traces:
        follows(trace)
    assert [t["request"] for t in traces] == ["prompts.jsonl:p0", "prompts.jsonl:p1"]
    assert report["kernels"]["infer"]["digest"] == traces[0]["build_fingerprint"]
    assert not (folder / "out" / "evaluate.cert.json").exists()


@pytest.mark.full
def test_report_and_certificate_list_suppressed_findings(cli: Any, write: Write) -> None:
    folder = write(f"{KL}  # kcdsl: ignore[KC415] promised to another team")
    ran = cli("evaluate", cwd=folder)
    assert ran.code == 0
    report = document((folder / "out" / "report.json").read_text())
    said = "KC415 is accepted in line 13 of the contract: promised to another team"
    assert said in report["notes"]
    assert said in " ".join(ran.stdout.split())
    statement = json.loads((folder / "out" / "evaluate.statement.json").read_text())
    predicate = statement["predicate"]
    assert predicate["suppressions"] == [{"code": "KC415", "reason": "promised to another team"}]


@pytest.mark.full
def test_outputs_by_json_format_and_folder(cli: Any, write: Write) -> None:
    folder = write(KL)
    ran = cli(
        "evaluate",
        "--format=json",
        "-o",
        "made/here",
        "--format",
        "junit=report.xml",
        cwd=folder,
    )
    assert ran.code == 0
    report = document(ran.stdout)
    assert report == json.loads((folder / "made" / "here" / "report.json").read_text())
    assert (folder / "report.xml").read_text().startswith("<?xml")


def test_coarse_kernel_violates_and_the_report_names_positions(cli: Any, write: Write) -> None:
    folder = write("{require: max(kl) <= 1e-9, slices: [all], level: L3}", compute="bfloat16")
    ran = cli("evaluate", "--format", "json", cwd=folder)
    assert ran.code == 1
    report = document(ran.stdout)
    row = report["clauses"][0]
    assert row["verdict"] == "violated"
    assert row["counterexample"]["request"].startswith("prompts.jsonl:p")
    assert row["exceedance"]["k"] == 2
    assert report["action"] == "fallback"
    assert report["crosschecks"][0]["tightness"] > 1


@pytest.mark.full
def test_sample_of_two_requests_is_inconclusive(cli: Any, write: Write) -> None:
    folder = write("{require: p99(kl) <= 1, slices: [all], level: L2, evidence: sample}")
    ran = cli("evaluate", cwd=folder)
    assert ran.code == 3
    assert "? inconclusive" in ran.stdout


def test_empty_slice_is_not_a_pass(cli: Any, write: Write) -> None:
    ran = cli("evaluate", cwd=write("{require: p99(kl) <= 1, slices: [absent], level: L2}"))
    assert ran.code == 2
    assert "! invalid" in ran.stdout


@pytest.mark.full
def test_encoder_is_evaluated_on_its_states(cli: Any, write: Write) -> None:
    folder = write(
        "{require: max(hidden_l2) <= 1, slices: [all], level: L2}",
        "{require: min(embedding_cosine) >= 0.99, slices: [all], level: L3}",
        architecture="bert",
    )
    ran = cli("evaluate", "--format", "json", cwd=folder)
    assert ran.code == 0
    assert document(ran.stdout)["model"]["encoder"]
    folder = write(KL, architecture="bert")
    ran = cli("evaluate", cwd=folder)
    assert ran.code == 2
    assert "KC624" in ran.stderr
    assert "hidden_l2" in ran.stderr


def test_certificate_is_written_and_passes_its_check(cli: Any, write: Write) -> None:
    folder = write(KL, TRACE)
    assert cli("keygen", "-o", folder / "kcdsl.key").code == 0
    ran = cli("evaluate", "--sign", "kcdsl.key", cwd=folder)
    assert ran.code == 0
    path = folder / "out" / "evaluate.cert.json"
    payload = base64.b64decode(json.loads(path.read_text())["dsseEnvelope"]["payload"])
    predicate = json.loads(payload)["predicate"]
    text = (folder / "contract.yaml").read_bytes()
    assert predicate["contractSource"] == {"sha256": hashlib.sha256(text).hexdigest()}
    clauses = predicate["clauses"]
    assert [(c["id"], c["evidence"], c["verdict"]) for c in clauses] == [
        ("C-0", "census", "PASSED"),
        ("C-1", "census", "PASSED"),
    ]
    assert cli("check", path, "--key", "kcdsl.key.pub", cwd=folder).code == 0
    weights = load_file(folder / "model.safetensors")
    save_file({k: v + 1e-3 for k, v in weights.items()}, folder / "model.safetensors")
    assert cli("check", path, "--key", "kcdsl.key.pub", cwd=folder).code == 4


GATE = """
import sys
for name in ("torch", "numpy", "z3", "safetensors", "scipy", "kcdsl.model.fingerprint"):
    sys.modules[name] = None  # importing it raises ImportError
from kcdsl.cli import main
sys.exit(main(sys.argv[1:]))
"""


def gate(folder: Path, *words: str) -> int:
    """Run `kcdsl check` without the packages that run kernels."""
    key = ("--key", "kcdsl.key.pub")
    command = [sys.executable, "-c", GATE, "check", "out/evaluate.cert.json", *key, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode


@pytest.mark.full
def test_release_gate_checks_against_recorded_fingerprints(
    cli: Any, write: Write, follows: Any
) -> None:
    folder = write(KL)
    cli("keygen", "-o", folder / "kcdsl.key")
    assert cli("evaluate", "--sign", "kcdsl.key", cwd=folder).code == 0
    recorded = folder / "out" / "kernels.json"
    kernels = json.loads(recorded.read_text())
    follows(kernels)
    report = json.loads((folder / "out" / "report.json").read_text())
    for side in ("train", "infer"):
        assert kernels[side] == report["kernels"][side]["fingerprint"]
    assert gate(folder) == 2
    assert gate(folder, "--kernels", "out/kernels.json") == 0
    kernels["infer"]["device"] = "other"
    recorded.write_text(json.dumps(kernels))
    assert gate(folder, "--kernels", "out/kernels.json") == 4
    spoiled: tuple[Any, ...] = (
        {**kernels, "schema": "kcdsl.kernels/2"},
        {**kernels, "more": {}},
        {**kernels, "train": None},
        {side: kernels[side] for side in ("train", "infer")},
        [],
    )
    for document in spoiled:
        recorded.write_text(json.dumps(document))
        words = ("out/evaluate.cert.json", "--key", "kcdsl.key.pub", "--kernels", recorded)
        ran = cli("check", *words, cwd=folder)
        assert (ran.code, "KC646" in ran.stderr) == (2, True)


@pytest.mark.gpu
def test_certificate_binds_the_device(cli: Any, write: Write) -> None:
    folder = write("{require: p99(kl) <= 1, slices: [all], level: L2}")
    cli("keygen", "-o", folder / "kcdsl.key")
    words = ("--device", "cuda", "--sign", "kcdsl.key")
    assert cli("evaluate", *words, cwd=folder).code == 0
    path = folder / "out" / "evaluate.cert.json"
    assert json.loads((folder / "out" / "kernels.json").read_text())["infer"]["device"] == "cuda"
    key = ("--key", "kcdsl.key.pub")
    assert cli("check", path, *key, cwd=folder).code == 4
    kernels = folder / "out" / "kernels.json"
    assert cli("check", path, *key, "--kernels", kernels, cwd=folder).code == 0


@pytest.mark.full
def test_violation_is_certified_as_failed(cli: Any, write: Write) -> None:
    folder = write("{require: max(kl) <= 1e-9, slices: [all], level: L3}", compute="bfloat16")
    cli("keygen", "-o", folder / "own.key")
    assert cli("evaluate", "--sign", "own.key", cwd=folder).code == 1
    path = folder / "out" / "evaluate.cert.json"
    payload = base64.b64decode(json.loads(path.read_text())["dsseEnvelope"]["payload"])
    assert json.loads(payload)["predicate"]["clauses"][0]["verdict"] == "FAILED"
    assert cli("check", path, "--key", "own.key.pub", cwd=folder).code == 4


@pytest.mark.full
def test_files_changed_during_evaluation_get_no_certificate(
    cli: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training overwrites the checkpoint while it is evaluated."""
    folder = write(KL)
    cli("keygen", "-o", folder / "kcdsl.key")
    certificate = evaluation._certificate

    def overtaken(*given: Any) -> tuple[bytes | None, str]:
        content = bytearray((folder / "model.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "model.safetensors").write_bytes(content)
        return certificate(*given)

    monkeypatch.setattr(evaluation, "_certificate", overtaken)
    ran = cli("evaluate", "--sign", "kcdsl.key", cwd=folder)
    assert ran.code == 2
    assert "KC608" in ran.stderr
    assert "the checkpoint changed" in ran.stderr
    assert not (folder / "out" / "evaluate.cert.json").exists()
    assert not (folder / "out" / "report.json").exists()


@pytest.mark.full
def test_conjunction_has_a_row_and_a_result_per_part(cli: Any, write: Write) -> None:
    folder = write("{require: p99(kl) <= 1 and mean(tv) <= 1e-12, slices: [all], level: L2}")
    ran = cli("evaluate", "--format", "json", cwd=folder)
    assert ran.code == 1
    rows = document(ran.stdout)["clauses"]
    assert [(r["clause"], r["metric"], r["verdict"]) for r in rows] == [
        ("C-0", "p99(kl)", "held"),
        ("C-0", "mean(tv)", "violated"),
    ]
    statement = json.loads((folder / "out" / "evaluate.statement.json").read_text())
    verdicts = [c["verdict"] for c in statement["predicate"]["clauses"]]
    assert verdicts == ["PASSED", "FAILED"]


@pytest.mark.full
def test_consequences_of_a_drift_clause_are_shown(cli: Any, write: Write) -> None:
    folder = write(
        "{require: 'forall x in points(all): norm_inf(drift(model, x)) <= 1e-3', level: L2}",
        "{require: max(tv) <= 0.01, slices: [all], level: L2}",
    )
    ran = cli("evaluate", "--format", "json", cwd=folder)
    assert ran.code == 0
    report = document(ran.stdout)
    assert report["deferred"]["C-0"]
    assert [(i["clause"], i["by"]) for i in report["implied"]] == [("C-1", "C-0")]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--slice", "al"], "KC202", "did you mean `all`"),
        (["--sign", "none.key"], "KC640", "none.key"),
        (["--device", "cuda"], "KC472", "CUDA"),
        (["nowhere.yaml"], "KC601", "nowhere.yaml"),
    ],
)
def test_unsatisfiable_options_are_refused(
    cli: Any, write: Write, arguments: list[str], code: str, said: str
) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        arguments, code = ["--slice", "al"], "KC202"
        said = "did you mean `all`"
    folder = write(KL)
    ran = cli("evaluate", *arguments, cwd=folder)
    assert ran.code == 2
    assert said in ran.stderr
    assert code in ran.stderr
    assert "Traceback" not in ran.stderr
    assert not (folder / "out").exists()


@pytest.mark.parametrize("option", [["--seed", "-1"], ["--seed", "x"], ["--seconds", "0"]])
def test_out_of_range_numbers_are_usage_errors(cli: Any, write: Write, option: list[str]) -> None:
    assert cli("evaluate", *option, cwd=write(KL)).code == 2


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda f: (f / "prompts.jsonl").unlink(), "KC601"),
        (lambda f: (f / "prompts.jsonl").write_text('{"id": "a"}\n'), "KC620"),
        (lambda f: (f / "prompts.jsonl").write_text('{"id": "a", "text": "x"}\n'), "KC622"),
        (
            lambda f: (f / "prompts.jsonl").write_text(
                '{"id": "a", "text": "' + "x" * 40 + '", "category": "c"}\n'
            ),
            "KC460",
        ),
        (lambda f: (f / "model.safetensors").write_bytes(b"broken"), "KC4"),
        (lambda f: (f / "model.safetensors").unlink(), "KC601"),
    ],
)
def test_invalid_inputs_are_diagnosed_and_nothing_is_written(
    cli: Any, write: Write, spoil: Callable[[Path], Any], code: str
) -> None:
    folder = write(KL, "{require: p99(kl) <= 1, slices: [absent], level: L2}")
    spoil(folder)
    ran = cli("evaluate", cwd=folder)
    assert ran.code == 2
    assert code in ran.stderr
    assert "Traceback" not in ran.stderr
    assert ran.stdout == ""
    assert not (folder / "out").exists()


def test_contract_without_empirical_clauses_is_not_a_pass(cli: Any, write: Write) -> None:
    ran = cli(
        "evaluate",
        cwd=write(
            "{require: 'forall x in points(all): norm_inf(drift(attn_0, x)) <= 1', level: L2}"
        ),
    )
    assert ran.code == 2
    assert "KC623" in ran.stderr


def test_bound_below_the_measurement_aborts_without_files(
    cli: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    import numpy as np

    from kcdsl_backends.certifier.statements import problems as certified

    def wrong(model: Any, block: str, x: Any, *rest: Any) -> certified.CertifiedDrift:
        return certified.CertifiedDrift(0.0, np.zeros(tuple(x.shape)))

    monkeypatch.setattr(certified, "certified_block_drift", wrong)
    folder = write(KL, compute="bfloat16")
    ran = cli("evaluate", cwd=folder)
    assert ran.code == 2
    assert "KC625" in ran.stderr
    assert "held" not in ran.stdout
    assert not (folder / "out").exists()


@pytest.mark.full
def test_requests_too_large_to_bound_are_reported(
    cli: Any, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kcdsl_backends.certifier.statements import problems as certified

    bound = certified.certified_block_drift
    sizes: list[int] = []
    """Twelve tokens have scores of 4 x 12 x 12 numbers."""

    def small(
        model: Any, block: str, x: Any, train: Any, infer: Any, problem_factory: Any = None
    ) -> certified.CertifiedDrift:
        sizes.append(len(x))
        return bound(model, block, x, train, infer, problem_factory)

    monkeypatch.setattr(certified, "certified_block_drift", small)
    monkeypatch.setattr(certified, "LARGEST", 300)
    rows = [*ROWS, {"id": "long", "text": "twelve bytes", "category": "chat"}]
    ran = cli("evaluate", "--format", "json", cwd=write(KL, compute="bfloat16", rows=rows))
    assert sorted(sizes) == [5, 5, 12]
    found = document(ran.stdout)
    assert [note for note in found["notes"] if "have no certified bound" in note] == [
        "attn_0: 1 of 3 requests have no certified bound to be compared with: too long, or too "
        "coarse"
    ]
    (check,) = found["crosschecks"]
    assert (check["requests"], check["certified"]) == (3, None)
    assert check["tightness"] > 1


def test_unwritable_folder_leaves_no_files(cli: Any, write: Write) -> None:
    folder = write(KL)
    (folder / "out").write_text("a file where the folder should be")
    ran = cli("evaluate", cwd=folder)
    assert ran.code == 2
    assert "Traceback" not in ran.stderr
    ran = cli("evaluate", "-o", "made", "--format", "junit=no/such/folder.xml", cwd=folder)
    assert ran.code == 2
    assert not (folder / "made").exists()


def test_evaluate_help_describes_the_command(cli: Any) -> None:
    ran = cli("evaluate", "--help")
    assert ran.code == 0
    assert "--slice" in ran.stdout


@pytest.mark.full
def test_page_and_other_formats_are_written_beside_the_report(cli: Any, write: Write) -> None:
    folder = write("{require: max(kl) <= 1e-9, slices: [all], level: L2}", compute="bfloat16")
    ran = cli(
        *("evaluate", "--seconds", "0.1", "--bound-seconds", "0"),
        *("--format", "junit=checks.xml", "--format", "sarif=out/checks.sarif"),
        *("--format", "github"),
        cwd=folder,
    )
    assert ran.code == 1
    assert "::error file=contract.yaml,line=13," in ran.stdout
    assert ran.stdout.count("\n") == 1
    assert "KC671" in (folder / "checks.xml").read_text()
    assert "KC671" in (folder / "out" / "checks.sarif").read_text()
    page = (folder / "out" / "report.html").read_text()
    assert "The contract is violated" in page
    again = cli("report", folder / "out" / "report.json")
    assert again.stdout == page + "\n"


@pytest.mark.parametrize("words", [("pdf",), ("junit=",), ("json", "github")])
def test_unknown_formats_are_refused_before_the_run(
    cli: Any, write: Write, words: tuple[str, ...]
) -> None:
    folder = write(f"{KL}")
    ran = cli("evaluate", *(part for word in words for part in ("--format", word)), cwd=folder)
    assert (ran.code, ran.stdout) == (2, "")
    assert not (folder / "out").exists()


@pytest.mark.full
def test_whole_requests_are_bounded_within_the_time_limit(cli: Any, write: Write) -> None:
    folder = write("{require: max(kl) <= 1e-3, slices: [all], level: L2}")
    ran = cli("evaluate", "--bound-seconds", "120", "--format", "json", cwd=folder)
    found = document(ran.stdout)
    certified = found["clauses"][0]["context"]["certified"]
    assert (certified["requests"], certified["of"], certified["reason"]) == (2, 2, None)
    assert certified["value"] >= found["clauses"][0]["value"]
    assert found["bounding"]["numerics"]["infer"] == "torch.sdpa.flash float32"
