"""Outputs about recorded rollouts count prompts, not requests."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CONTRACT = """\
kcdsl: 1
contract: rollouts
version: 1.0.0
model: {checkpoint: model.safetensors, architecture: llama}
kernels:
  train: {run: recorded, logprobs: {values: raw}}
  infer: {run: recorded, logprobs: {values: raw}}
data: rollouts.jsonl
slices: {all: {}}
clauses:
  N-MEAN: {require: mean(k3) <= 1, slices: [all], level: L2}
  N-RANK: {require: p50(abs(seq_log_ratio)) <= 5, slices: [all], level: L2}
  N-SOFT: {require: max(k3) <= 1, budget: 5% of requests, slices: [all], level: L2}
  N-BAD: {require: max(k3) <= 1e-9, budget: 5% of requests, slices: [all], level: L2}
"""
ROLLOUTS = """\
{"id": "a", "prompt": [5], "tokens": [1, 2], "train_logs": [-0.5, -1], "infer_logs": [-0.6, -1.1]}
{"id": "b", "prompt": [5], "tokens": [3, 1], "train_logs": [-0.9, -0.3], "infer_logs": [-1, -0.2]}
{"id": "c", "prompt": [7], "tokens": [4, 4], "train_logs": [-0.1, -0.3], "infer_logs": [-0.2, -1]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "contract.yaml").write_text(CONTRACT)
    (tmp_path / "rollouts.jsonl").write_text(ROLLOUTS)
    return tmp_path


def test_prompts_are_counted_wherever_units_are(cli: Any, folder: Path) -> None:
    formats = ("sarif", "junit", "github", "concise", "html")
    words = [word for name in formats for word in ("--format", f"{name}={name}.out")]
    ran = cli("evaluate", *words, cwd=folder)
    assert ran.code == 1
    assert "measured beside certified (prompts by their worst token)" in ran.stdout
    assert "0 of 2 prompts beyond" in ran.stdout
    assert "up to 5% of" in ran.stdout
    said = " ".join(ran.stdout.split())
    assert "too few for a limit of their mean: it takes 20; `evidence: census` in the" in said
    shown = {"text": ran.stdout}
    for name in formats:
        shown[name] = (folder / f"{name}.out").read_text()
    results = json.loads(shown["sarif"])["runs"][0]["results"]
    shown["sarif"] = "\n".join(result["message"]["text"] for result in results)
    shown["page"] = (folder / "out" / "report.html").read_text()
    for name in ("sarif", "junit", "github", "concise"):
        assert re.search(
            r"\(2 of 2\) of the prompts are beyond, 5%(25)? of prompts may be", shown[name]
        )
    assert "A bar counts prompts" in shown["page"]
    assert "2 prompts" in shown["page"]
    counted = re.compile(r"\d+ (more )?requests|of requests|each request|(the|Re)quests (by|are)")
    own = re.compile("when requests are batched otherwise|requires .*")
    for name, text in shown.items():
        assert counted.search(own.sub("", text)) is None, name

    report = json.loads((folder / "out" / "report.json").read_text())
    assert {row["counted"] for row in report["clauses"]} == {"prompts"}
    assert {row["exceedance"]["of"] for row in report["clauses"]} == {"prompts"}
    assert {row["budget"] for row in report["clauses"]} == {None, "5% of prompts"}
    assert cli("replay", "out/trace.parquet", cwd=folder).code == 1
    ran = cli("status", cwd=folder)
    assert ran.code == 2
    assert "both kernels are recorded, so there are no certificates" in ran.stderr


def test_values_of_another_file_never_replace_those_of_a_request(cli: Any, folder: Path) -> None:
    """The file `rollouts.jsonl` with the id `x.jsonl:a`, and `rollouts.jsonl:x.jsonl` with `a`."""
    text = CONTRACT.split("slices:", maxsplit=1)[0] + (
        'slices: {all: {}, other: {data: "rollouts.jsonl:x.jsonl"}}\n'
        "clauses: {N: {require: max(k3) <= 0.1, slices: [all], level: L2, evidence: census}}\n"
    )
    (folder / "contract.yaml").write_text(text)
    drifted = ROLLOUTS.splitlines()[0].replace('"a"', '"x.jsonl:a"').replace("-0.6", "-9")
    (folder / "rollouts.jsonl").write_text(drifted)
    (folder / "rollouts.jsonl:x.jsonl").write_text(ROLLOUTS.splitlines()[0])
    ran = cli("evaluate", cwd=folder)
    assert ran.code == 2
    assert "two requests have the key `rollouts.jsonl:x.jsonl:a`" in ran.stderr


def test_lost_support_blocks_metrics_of_sequences_too(cli: Any, folder: Path) -> None:
    """The mean ratio of these tokens is 0.98: mass of train is never drawn."""
    requirements = (
        *("mean(k3) <= 5", "mean(seq_k3) <= 5", "max(seq_max_abs) <= 5"),
        *("adv_weighted_bias <= 5", "ess_seq >= 10%"),
    )
    clauses = "".join(
        f"  N-{i}: {{require: {text}, slices: [all], level: L2, evidence: census}}\n"
        for i, text in enumerate(requirements)
    )
    head = CONTRACT.split("clauses:", maxsplit=1)[0]
    (folder / "contract.yaml").write_text(f"{head}clauses:\n{clauses}")
    rng, rows = np.random.default_rng(0), []
    for i in range(200):
        infer = np.log(rng.uniform(0.2, 0.6, 20))
        row = {
            "prompt": [5, i],
            "tokens": rng.integers(0, 99, 20).tolist(),
            "infer_logs": infer.tolist(),
            "train_logs": (infer + rng.normal(-0.03, 0.1, 20)).tolist(),
            "advantages": 1.0,
        }
        rows.append(json.dumps(row))
    (folder / "rollouts.jsonl").write_text("\n".join(rows))
    assert cli("evaluate", cwd=folder).code == 2
    report = json.loads((folder / "out" / "report.json").read_text())
    assert {row["verdict"] for row in report["clauses"]} == {"invalid_evidence"}
    assert {row["reason"].split(" failed")[0] for row in report["clauses"]} == {
        "precheck support_check"
    }


@pytest.mark.parametrize("with_logs", [True, False])
def test_copied_lists_show_no_agreement(cli: Any, folder: Path, with_logs: bool) -> None:
    """One side's lists of the likeliest tokens, written twice, agree whatever the kernels do."""
    head = CONTRACT.split("clauses:", maxsplit=1)[0]
    texts = {"S": "min(top1_overlap) >= 100%"} | ({"N": "mean(k3) <= 1"} if with_logs else {})
    clauses = "".join(
        f"  {name}: {{require: {text}, slices: [all], level: L2, evidence: census}}\n"
        for name, text in texts.items()
    )
    (folder / "contract.yaml").write_text(f"{head}clauses:\n{clauses}")
    rng, rows = np.random.default_rng(0), []
    for i in range(8):
        logs = np.log([[share, 1 - share] for share in rng.uniform(0.5, 0.6, 4)])
        drawn = (rng.random(4) < 0.45).astype(int)
        own = logs[np.arange(4), drawn]
        row = {"prompt": [5, i], "tokens": drawn.tolist(), "infer_logs": own.tolist()}
        row["train_logs"] = np.minimum(own + rng.normal(0, 1e-4, 4), 0.0).tolist()
        for side in ("train", "infer"):
            row[f"{side}_top_ids"] = [[0, 1]] * 4
            row[f"{side}_top_logs"] = logs.tolist()
        rows.append(json.dumps(row))
    (folder / "rollouts.jsonl").write_text("\n".join(rows))
    assert cli("evaluate", cwd=folder).code == 2
    found = json.loads((folder / "out" / "report.json").read_text())["clauses"]
    assert found[0]["reason"].startswith("precheck copied_side failed: all 32 tokens")
    stated = (folder / "contract.yaml").read_text()
    told = stated.replace("train: {run: recorded,", "train: {run: recorded, recomputed: true,")
    (folder / "contract.yaml").write_text(told)
    assert cli("evaluate", cwd=folder).code == 0


@pytest.mark.parametrize("where", ["n >= 2", "n >= 3"])
def test_failures_of_other_requests_are_not_compared(cli: Any, folder: Path, where: str) -> None:
    """Both runs have the same requests, and the slice has others of them, also as many."""
    head = CONTRACT.split("slices:", maxsplit=1)[0]
    rows = [
        {"prompt": [5, i], "n": i, "tokens": [1], "infer_logs": [-0.5], "train_logs": [-0.6]}
        for i in range(5)
    ]
    (folder / "rollouts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, test in (("one", "n < 2"), ("two", where)):
        (folder / "contract.yaml").write_text(
            f'{head}slices: {{all: {{}}, some: {{where: "{test}"}}}}\nclauses:\n'
            "  N: {require: max(k3) <= 5, slices: [all], level: L2, evidence: census}\n"
            "  R: {require: failure_rate <= 50%, slices: [some], level: L2, evidence: census}\n"
        )
        assert cli("evaluate", "-o", name, cwd=folder).code == 0
    ran = cli("compare", "one/trace.parquet", "two/trace.parquet", "--format", "json", cwd=folder)
    changes = {row["clause"]: row["change"] for row in json.loads(ran.stdout)["rows"]}
    assert changes == {"N": "unchanged", "R": "not_compared"}


def test_plan_counts_prompts(cli: Any, folder: Path) -> None:
    ran = cli("plan", cwd=folder)
    assert "57 more prompts, none of them beyond, would show it" in ran.stdout


def test_certificate_of_an_earlier_evaluation_is_named(cli: Any, folder: Path) -> None:
    """The file is kept, and is not presented as belonging to the new report."""
    assert "earlier" not in cli("evaluate", cwd=folder).stderr
    (folder / "out" / "evaluate.cert.json").write_text("{}")
    ran = cli("evaluate", cwd=folder)
    assert "out/evaluate.cert.json is of an earlier run" in ran.stderr
    assert (folder / "out" / "evaluate.cert.json").read_text() == "{}"
