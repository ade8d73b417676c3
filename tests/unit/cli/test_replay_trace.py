"""`kcdsl replay TRACE`, and resumption of killed evaluations."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from kcdsl.api import evaluation
from kcdsl.model.architectures.llama import build
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint, _frames
from tests.support.commands import run_here

CONFIG = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
CONTRACT = """\
kcdsl: 1
contract: small
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama, config: config.json, tokenizer: bytes}
kernels:
  train: {run: torch.eager, numerics: {preset: torch-eager}}
  infer: {run: torch.eager, numerics: {preset: torch-eager, compute: bfloat16}}
data: prompts.jsonl
slices: {all: {}, long: {where: length >= 6}}
tables:
  limits:
    unit: nats
    rows: [{where: length <= 6, value: 1}]
    otherwise: 2
clauses:
  Z-KL: {require: p99(kl) <= 1e-12, slices: [all, long], level: L2}
  A-TV: {require: "0.5 >= max(tv) and mean(kl) <= 1", slices: [all], level: L1}
  K3: {require: mean(k3) <= 1, slices: [all], level: L2}
  T: {require: max(kl) <= table(limits), slices: [all], level: L2}
  O: {require: "has(trace, [rng_seed, build_fingerprint])", slices: [all], level: L3}
"""
EVALUATE = ("evaluate", "--bound-seconds", "0")
"""Without bounds under a time limit, which may reach further in another run."""
ROWS = ("hello", "world", "a longer prompt", "another one", "short", "the end", "twelve", "x y z")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a contract, and the results of an uninterrupted evaluation in `out`."""
    folder = tmp_path_factory.mktemp("traced")
    torch.manual_seed(5)
    state = {
        name: torch.randn_like(p) * 0.2 + ("norm" in name)
        for name, p in build(CONFIG).named_parameters()
    }
    save_file(state, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rows = ({"id": f"p{i}", "text": text} for i, text in enumerate(ROWS))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "contract.yaml").write_text(CONTRACT)
    ran = run_here(*EVALUATE, cwd=folder)
    assert ran.code == 1, ran.stderr
    assert "resumed" not in ran.stderr
    assert not (folder / "out" / "evaluate.run-checkpoint").exists()
    return folder


@pytest.fixture
def elsewhere(made: Path, tmp_path: Path) -> Path:
    """Return the trace alone, in another folder."""
    (tmp_path / "moved.parquet").write_bytes((made / "out" / "trace.parquet").read_bytes())
    return tmp_path


# --- replay --------------------------------------------------------------------------------------


@pytest.mark.full
def test_trace_alone_reproduces_the_report_bitwise(cli: Any, made: Path, elsewhere: Path) -> None:
    """Without contract, model and kernels."""
    ran = cli("replay", "moved.parquet", "--format", "json", cwd=elsewhere)
    assert ran.code == 1
    assert ran.stdout == (made / "out" / "report.json").read_text()
    assert ran.stderr == "reproduced: bit for bit\n"
    shown = cli("replay", "moved.parquet", cwd=elsewhere)
    assert shown.code == 1
    assert "Z-KL" in shown.stdout
    assert shown.stdout.endswith("reproduced: bit for bit\n")


def test_trace_is_identified_by_its_content(cli: Any, elsewhere: Path) -> None:
    (elsewhere / "moved.parquet").rename(elsewhere / "example.json")
    assert cli("replay", "example.json", cwd=elsewhere).code == 1
    (elsewhere / "none.parquet").write_text("{}")
    assert "KC660" in cli("replay", "none.parquet", cwd=elsewhere).stderr
    assert cli("replay", "absent.parquet", cwd=elsewhere).code == 2


def test_report_beside_a_trace_must_agree(cli: Any, made: Path, elsewhere: Path) -> None:
    beside = elsewhere / "report.json"
    beside.write_bytes((made / "out" / "report.json").read_bytes())
    ran = cli("replay", "moved.parquet", cwd=elsewhere)
    assert (ran.code, ran.stdout.splitlines()[-1]) == (
        1,
        "reproduced: bit for bit, as in report.json",
    )
    report = json.loads(beside.read_text())
    report["clauses"][1]["verdict"] = "held"
    report["health"]["score"] = 1.0
    beside.write_text(json.dumps(report))
    ran = cli("replay", "moved.parquet", cwd=elsewhere)
    assert ran.code == 2
    assert "KC633" in ran.stderr
    name = report["clauses"][1]["clause"]
    assert f"{name} on {report['clauses'][1]['slice']}: verdict is" in ran.stderr
    assert "the section health differs" in ran.stderr
    beside.write_text("{")
    assert cli("replay", "moved.parquet", cwd=elsewhere).code == 2


def test_deviating_conclusions_are_refused(
    cli: Any, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version with a changed estimator would reach such conclusions."""
    monkeypatch.setattr(
        "kcdsl_backends.empirical.decision.results.nearest_double", lambda value: 0.5
    )
    ran = cli("replay", "moved.parquet", cwd=elsewhere)
    assert ran.code == 2
    assert "KC633" in ran.stderr
    assert "value is 0.5, and" in ran.stderr
    assert "reproduced" not in ran.stdout
    (elsewhere / "contract.yaml").write_text(CONTRACT.replace("1e-12", "1"))
    ran = cli("replay", "moved.parquet", "--contract", "contract.yaml", cwd=elsewhere)
    assert ran.code == 2, "what the estimators of today say of it, they would say of a change too"
    assert "KC633" in ran.stderr
    assert ran.stdout == ""


def test_changed_contract_is_decided_on_the_same_evidence(
    cli: Any, made: Path, elsewhere: Path
) -> None:
    changed = CONTRACT.replace("1e-12", "1").replace("version: 1.0.0", "version: 1.1.0")
    (elsewhere / "contract.yaml").write_text(changed)
    arguments = ("replay", "moved.parquet", "--contract", "contract.yaml")
    ran = cli(*arguments, "--format", "json", cwd=elsewhere)
    assert ran.code == 3
    report = json.loads(ran.stdout)
    assert report["verdict"] == "inconclusive"
    assert {row["verdict"] for row in report["clauses"] if row["clause"] != "K3"} == {"held"}
    assert report["contract"]["version"] == "1.1.0"
    old = json.loads((made / "out" / "report.json").read_text())
    assert [row["value"] for row in report["clauses"]] == [row["value"] for row in old["clauses"]]
    (elsewhere / "contract.yaml").write_text(changed.replace("mean(k3)", "mean(jeffreys)"))
    ran = cli(*arguments, cwd=elsewhere)
    assert ran.code == 2
    assert "KC632" in ran.stderr
    assert "`jeffreys`, which was not measured" in ran.stderr


def test_damaged_trace_is_refused(cli: Any, elsewhere: Path) -> None:
    path = elsewhere / "moved.parquet"
    data = path.read_bytes()
    for damaged in (data[:-1], data[:-400], data[:200] + b"\0" + data[201:], data + data):
        path.write_bytes(damaged)
        ran = cli("replay", "moved.parquet", cwd=elsewhere)
        assert ran.code == 2
        assert ran.stdout == ""
        assert "KC630" in ran.stderr or "KC631" in ran.stderr


def test_counterexample_options_are_refused_for_traces(cli: Any, elsewhere: Path) -> None:
    ran = cli("replay", "moved.parquet", "--checkpoint", "m.safetensors", cwd=elsewhere)
    assert ran.code == 2
    assert "KC901" in ran.stderr


def test_trace_records_the_run(made: Path, follows: Any) -> None:
    table = pq.read_table(made / "out" / "trace.parquet")
    header = json.loads(table.schema.metadata[b"kcdsl.trace"])
    rows = table.filter(pq.filters_to_expression([("kind", "=", "request")])).to_pylist()
    assert header["schema"] == "kcdsl.trace/3"
    follows(header)
    follows(header["report"])
    assert len(rows) == len(ROWS)
    assert [len(row["tokens"]) for row in rows] == [len(row["metrics"]["kl"]) for row in rows]
    assert header["kernels"]["infer"]["fingerprint"]["run"] == "torch.eager"
    assert header["sampling_params"] == {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    assert all(row["replay_signature"].startswith("sha256:") for row in rows)


# --- interrupted runs ----------------------------------------------------------------------------

KILLING = """
import os, signal, sys

from kcdsl.cli import main
from kcdsl_backends.empirical import backend
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint

moment, count = sys.argv[1], int(sys.argv[2])
left = [count]


def ends():
    left[0] -= 1
    return left[0] < 0


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


if moment == "record":
    write = os.write

    def half(file, data):
        if ends():
            write(file, data[: len(data) // 2])
            kill()
        return write(file, data)

    os.write = half
elif moment == "between":
    keep = RunCheckpoint.keep_run

    def kept(self, request, run):
        if ends():
            kill()
        keep(self, request, run)

    RunCheckpoint.keep_run = kept
elif moment == "concluding":
    backend.conclude = lambda evidence: kill()
elif moment == "replacing":
    replace = os.replace

    def replaced(*paths):
        if ends():
            kill()
        replace(*paths)

    os.replace = replaced
raise SystemExit(main(sys.argv[3:]))
"""
MOMENTS = [
    ("record", 1), ("record", 5), ("between", 3), ("concluding", 0), ("replacing", 2),
    *(pytest.param(*moment, marks=pytest.mark.slow) for moment in (
        ("record", 0), ("record", 9), ("between", 0), ("between", 7), ("replacing", 0),
    )),
]  # fmt: skip


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Return a folder with the same contract and no results."""
    copied(made, tmp_path)
    return tmp_path


def copied(made: Path, folder: Path) -> None:
    for name in ("model.safetensors", "config.json", "prompts.jsonl", "contract.yaml"):
        (folder / name).write_bytes((made / name).read_bytes())


def killed(folder: Path, moment: str, count: int) -> None:
    command = [sys.executable, "-c", KILLING, moment, str(count), *EVALUATE]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL, ran.stderr


def unresumed(report: Path) -> dict[str, Any]:
    """Return a report without the note about requests of an earlier run."""
    document: dict[str, Any] = json.loads(report.read_text())
    document["notes"] = [n for n in document["notes"] if not n.startswith("resumed: ")]
    return document


def requests_in(checkpoint: Path) -> int:
    return sum(kind == b"R" for kind, *_ in _frames(checkpoint.read_bytes()))


@pytest.mark.full
@pytest.mark.parametrize(("moment", "count"), MOMENTS)
def test_killed_run_leaves_no_partial_result_and_resumes(
    cli: Any, made: Path, folder: Path, moment: str, count: int
) -> None:
    killed(folder, moment, count)
    out = folder / "out"
    done = requests_in(out / "evaluate.run-checkpoint")
    reference = {p.name: p.read_bytes() for p in (made / "out").iterdir()}
    for path in out.iterdir():  # existing results are complete
        if path.name in reference:
            assert path.name != "report.json"
            assert len(path.read_bytes()) == len(reference[path.name])
    ran = cli(*EVALUATE, cwd=folder)
    assert ran.code == 1
    said = f"resumed: {done} of {len(ROWS)} requests"
    assert (said in ran.stderr) == (done > 0)
    assert unresumed(out / "report.json") == unresumed(made / "out" / "report.json")
    assert (out / "trace.jsonl").read_bytes() == reference["trace.jsonl"]
    assert ((out / "trace.parquet").read_bytes() == reference["trace.parquet"]) == (done == 0)
    assert cli("replay", out / "trace.parquet").code == 1
    assert not (out / "evaluate.run-checkpoint").exists()
    notes = json.loads((out / "report.json").read_text())["notes"]
    assert (f"{said} are of an earlier run, from its checkpoint" in notes) == (done > 0)
    assert (out / "resumed.run-checkpoint").exists() == (done > 0)


@pytest.mark.full
def test_kill_from_outside_at_any_time(cli: Any, made: Path, folder: Path) -> None:
    command = [sys.executable, "-m", "kcdsl", *EVALUATE]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    checkpoint = folder / "out" / "evaluate.run-checkpoint"
    while process.poll() is None and not (checkpoint.exists() and requests_in(checkpoint) >= 2):
        time.sleep(0.005)
    process.kill()
    process.communicate()
    assert process.returncode in (-signal.SIGKILL, 1)
    assert cli(*EVALUATE, cwd=folder).code == 1
    assert unresumed(folder / "out" / "report.json") == unresumed(made / "out" / "report.json")


@pytest.fixture(scope="module")
def begun(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder where an evaluation was killed after three requests."""
    path = tmp_path_factory.mktemp("begun")
    copied(made, path)
    killed(path, "between", 3)
    return path


@pytest.mark.full
def test_fresh_option_runs_every_request_again(
    cli: Any, made: Path, begun: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(begun, tmp_path / "fresh")
    ran = cli(*EVALUATE, "--fresh", cwd=folder)
    assert ran.code == 1
    assert "resumed" not in ran.stderr
    written = (folder / "out" / "report.json").read_bytes()
    assert written == (made / "out" / "report.json").read_bytes()


@pytest.mark.full
def test_other_seed_restarts_the_evaluation(cli: Any, begun: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(begun, tmp_path / "seeded")
    assert "resumed" not in cli(*EVALUATE, "--seed", "1", cwd=folder).stderr


def test_interrupted_run_says_that_the_command_goes_on(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunCheckpoint, "keep_run", interrupted)
        ran = cli(*EVALUATE, "-o", "made", cwd=folder)
    assert ran.code == 130
    checkpoint = Path("made", "evaluate.run-checkpoint")
    assert f"the same command goes on from {checkpoint}" in ran.stderr
    assert (folder / checkpoint).is_file()


@pytest.mark.full
def test_measurements_are_kept_if_results_cannot_be_written(
    cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the JUnit file exists when the evaluation begins, and not at its end."""
    (folder / "there").mkdir()
    write = evaluation._write

    def late(*given: Any) -> list[str]:
        (folder / "there").rmdir()
        return write(*given)

    with monkeypatch.context() as patched:
        patched.setattr(evaluation, "_write", late)
        ran = cli(*EVALUATE, "-o", "made", "--format", "junit=there/x.xml", cwd=folder)
    assert ran.code == 2
    assert "there is no folder there" in ran.stderr
    assert [path.name for path in (folder / "made").iterdir()] == ["evaluate.run-checkpoint"]
    again = cli(*EVALUATE, "-o", "made", cwd=folder)
    assert f"resumed: {len(ROWS)} of {len(ROWS)} requests" in again.stderr


def test_replay_help_describes_the_command(cli: Any) -> None:
    assert "--fresh" in cli("evaluate", "--help").stdout
    assert "trace.parquet" in cli("replay", "--help").stdout
