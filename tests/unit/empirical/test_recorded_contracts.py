"""Contracts with recorded kernels: decisions, refusals, and statements in reports."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kcdsl.metrics import UNMEASURED
from kcdsl_backends.empirical.sources.rollouts.record import Rollout
from tests.support import planted_bugs, recordings
from tests.support.recordings import BFLOAT16, FLOAT32, FP8, at

pytestmark = pytest.mark.usefixtures("shared_files")

MODEL = planted_bugs.FOLDER
RECORDED = "{run: recorded, logprobs: {values: raw}}"
EAGER = "{run: torch.eager, numerics: {compute: float32}}"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def contract(
    clauses: Mapping[str, str],
    *,
    train: str = RECORDED,
    infer: str = RECORDED,
    data: str = "rows.parquet",
    slices: str = "{all: {}}",
    checkpoint: str = "absent.safetensors",
    constants: str = "",
) -> str:
    rows = "\n".join(f"  {name}: {{{body}, level: L2}}" for name, body in clauses.items())
    return f"""kcdsl: 1
contract: recorded
version: 1.0.0
model: {{checkpoint: {checkpoint}, architecture: llama, config: {MODEL / "config.json"}}}
kernels:
  train: {train}
  infer: {infer}
data: {data}
slices: {slices}
clauses:
{rows}
{constants}"""


@pytest.fixture
def decide(cli: Any, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Evaluate a contract about rows; return the report."""

    def run(
        clauses: Mapping[str, str], table: Mapping[str, Sequence[Any]] | None = None, **more: Any
    ) -> dict[str, Any]:
        if table is not None:
            recordings.write(tmp_path / more.get("data", "rows.parquet"), table)
        path = tmp_path / "contract.yaml"
        path.write_text(contract(clauses, **more), encoding="utf-8")
        found = cli(
            "--traceback", "evaluate", str(path), "--format", "json", "-o", str(tmp_path / "out")
        )
        if not found.stdout:
            return {"refused": found.stderr, "code": found.code}
        return {**json.loads(found.stdout), "code": found.code}

    return run


def verdicts(report: Mapping[str, Any]) -> dict[str, str]:
    return {row["clause"]: row["verdict"] for row in report["clauses"]}


def many(**more: Any) -> dict[str, list[Any]]:
    """Return 64 rows with distinct prompts."""
    return alone(recordings.rollouts(**{"prompts": 64, "group": 1, **more}))


def alone(found: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Return the rows of rollouts whose prompts define the units."""
    table = recordings.columns(found)
    table.pop("group")
    return table


def with_lists(found: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Return the rows of rollouts with top-k lists of both sides."""
    table = alone(found)
    for side in ("train", "infer"):
        tops = [getattr(r, side).top for r in found]
        table[f"{side}_top_ids"] = [t.ids.tolist() for t in tops]
        table[f"{side}_top_logs"] = [t.logs.tolist() for t in tops]
    return table


# --- verdicts ------------------------------------------------------------------------------------


def test_recorded_rollouts_are_decided_without_a_model(
    decide: Callable[..., dict[str, Any]],
) -> None:
    report = decide(
        {
            "N-K3": "require: mean(k3) <= 1e-3",
            "N-MANY": "require: p90(abs(seq_log_ratio)) <= 0.5",
            "N-ESS": "require: ess_seq >= 0.5",
            "N-BAD": "require: mean(abs(log_ratio)) <= 1e-9",
        },
        many(),
    )
    found = verdicts(report)
    assert found["N-K3"] == found["N-MANY"] == found["N-ESS"] == "held"
    assert found["N-BAD"] == "violated"
    assert report["code"] == 1
    assert report["model"]["sha256"] is None
    assert any("the checkpoint was not read" in note for note in report["notes"])
    assert {row["n"] for row in report["clauses"]} == {64}
    assert {row["evidence"] for row in report["clauses"]} == {"sample"}
    recorded = report["kernels"]["infer"]["fingerprint"]["recorded"]
    assert list(recorded) == ["rows.parquet"]


@pytest.mark.full
def test_groups_are_the_units(decide: Callable[..., dict[str, Any]]) -> None:
    """64 rollouts of 16 prompts are 16 units, too few for the limit of a mean."""
    found = recordings.rollouts()
    assert len({r.prompt for r in found}) == 16
    table = recordings.columns(found)
    table.pop("group")
    report = decide({"N-K3": "require: mean(k3) <= 1e-4"}, table)
    assert report["clauses"][0]["n"] == 16
    assert verdicts(report) == {"N-K3": "inconclusive"}
    assert any("64 rollouts of 16 prompts" in note for note in report["notes"])


@pytest.mark.full
def test_groups_that_split_a_prompt_are_joined(
    decide: Callable[..., dict[str, Any]],
) -> None:
    """64 rollouts of 16 prompts with distinct group names are 16 units."""
    found = recordings.rollouts()
    table = recordings.columns(found)
    table["group"] = [f"g{i}" for i in range(len(found))]
    report = decide({"N-K3": "require: mean(k3) <= 1e-3"}, table)
    assert report["clauses"][0]["n"] == 16
    assert verdicts(report) == {"N-K3": "inconclusive"}
    assert any("48 groups share a prompt with another" in note for note in report["notes"])


@pytest.mark.full
def test_prompts_and_groups_are_joined_transitively(
    decide: Callable[..., dict[str, Any]],
) -> None:
    """a and b share a group, b and c a prompt: one unit."""
    found = recordings.rollouts(prompts=16, group=1)
    table = alone([*found, *found[1:2]])
    table["id"] = [str(i) for i in range(17)]
    table["tokens"][16] = [*found[1].tokens[:-1], 1]
    table["group"] = ["ab", "ab", *map(str, range(15))]
    report = decide({"N-K3": "require: mean(k3) <= 1"}, table)
    assert report["clauses"][0]["n"] == 15


def test_rows_without_prompt_and_group_are_not_evidence(
    decide: Callable[..., dict[str, Any]],
) -> None:
    """Without prompts and groups, four rows may all be samples of one prompt."""
    table = many()
    table.pop("prompt")
    clause = {"N-K3": "require: mean(k3) <= 1e-3"}
    report = decide(clause, table)
    assert verdicts(report) == {"N-K3": "invalid_evidence"}
    assert "sampling_units" in report["clauses"][0]["reason"]
    table["group"] = [str(i) for i in range(64)]
    assert verdicts(decide(clause, table)) == {"N-K3": "held"}


@pytest.mark.full
def test_training_kernel_scores_tokens_that_only_infer_recorded(
    decide: Callable[..., dict[str, Any]],
) -> None:
    table = many()
    clauses = {"N-K3": "require: mean(k3) <= 1e-4", "N-SEQ": "require: max(seq_k3) <= 1"}
    both = decide(clauses, table)
    table.pop("train_logs")
    scored = decide(clauses, table, train=EAGER, checkpoint=str(MODEL / "model.safetensors"))
    values = [[row["value"] for row in report["clauses"]] for report in (both, scored)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
    assert scored["model"]["sha256"] is not None
    assert not any("was not read" in note for note in scored["notes"])


@pytest.mark.full
@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_batches_of_trainers_give_equal_values(
    decide: Callable[..., dict[str, Any]], trainer: str
) -> None:
    found = recordings.rollouts(prompts=4)
    kernel = f"{{run: recorded, format: {trainer}, logprobs: {{values: raw}}}}"
    clause = {"N-K3": "require: mean(k3) <= 1", "N-W": "require: ess_frac >= 0.1"}
    ours = decide(clause, recordings.columns(found))
    theirs = decide(clause, recordings.trainer_columns(found, trainer), train=kernel, infer=kernel)
    for a, b in zip(ours["clauses"], theirs["clauses"], strict=True):
        assert a["value"] == b["value"]


def test_slices_select_by_columns(decide: Callable[..., dict[str, Any]]) -> None:
    table = many()
    table["task"] = ["math" if i % 4 else "code" for i in range(64)]
    table["difficulty"] = [i / 64 for i in range(64)]
    report = decide(
        {"N-K3": "require: mean(k3) <= 1e-3, slices: [math, hard]"},
        table,
        slices='{math: {where: \'task == "math"\'}, hard: {where: "difficulty >= 0.5"}}',
    )
    assert {row["slice"]: row["n"] for row in report["clauses"]} == {"math": 48, "hard": 32}
    missing = decide(
        {"N-K3": "require: mean(k3) <= 1, slices: [a]"}, table, slices='{a: {where: "x == 1"}}'
    )
    assert re.search(r"KC622.*, (row|line) 1: the request", missing["refused"])


def test_masked_tokens_are_reported_and_empty_rows_dropped(
    decide: Callable[..., dict[str, Any]],
) -> None:
    found = [
        replace(r, mask=np.arange(len(r.tokens)) >= (5 if i else 99))
        for i, r in enumerate(recordings.rollouts(prompts=64, group=1))
    ]
    report = decide({"N-K3": "require: mean(k3) <= 1"}, alone(found))
    assert report["clauses"][0]["n"] == 63
    assert any("1 rollouts count no token" in note for note in report["notes"])
    assert any("25 % of" in note for note in report["notes"])


@pytest.mark.full
def test_replay_gives_the_same_verdicts(
    decide: Callable[..., dict[str, Any]], cli: Any, tmp_path: Path
) -> None:
    clauses = {"N-K3": "require: mean(k3) <= 1e-4", "N-ICC": "require: icc <= 0.9"}
    first = decide(clauses, recordings.columns(recordings.rollouts()))
    trace = next((tmp_path / "out").glob("*.parquet"))
    again = cli("replay", str(trace), "--format", "json")
    rows = json.loads(again.stdout)["clauses"]
    assert rows == first["clauses"]


@pytest.mark.full
def test_plan_counts_prompts(cli: Any, tmp_path: Path) -> None:
    table = recordings.columns(recordings.rollouts(prompts=5))
    recordings.write(tmp_path / "rows.parquet", table)
    path = tmp_path / "contract.yaml"
    clauses = {"N-SEQ": "require: p90(abs(seq_log_ratio)) <= 0.5"}
    path.write_text(contract(clauses), encoding="utf-8")
    row = json.loads(cli("plan", str(path), "--format", "json").stdout)["rows"][0]
    assert (row["have"], row["evidence"], row["state"]) == (5, "sample", "too_few")


# --- invalid evidence ----------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("{run: recorded}", "logprob_semantics"),
        ("{run: recorded, logprobs: {values: processed, temperature: 0.7}}", "logprob_semantics"),
        ("{run: recorded, logprobs: {values: raw, temperature: 0.7}}", "sampling_law"),
        ("{run: recorded, logprobs: {values: processed, top_p: 0.95}}", "logprob_semantics"),
    ],
)
def test_different_semantics_are_not_reported_as_drift(
    decide: Callable[..., dict[str, Any]], kernel: str, name: str
) -> None:
    report = decide(
        {"N-K3": "require: mean(k3) <= 1", "N-SEQ": "require: max(seq_k3) <= 1"},
        many(),
        infer=kernel,
    )
    assert set(verdicts(report).values()) == {"invalid_evidence"}
    assert report["code"] == 2
    assert all(name in row["reason"] for row in report["clauses"])


@pytest.mark.full
def test_one_sided_temperature_is_diagnosed_unless_declared(
    decide: Callable[..., dict[str, Any]],
) -> None:
    wrong = many(sampled=at(0.7))
    report = decide({"N-K3": "require: mean(k3) <= 1"}, wrong)
    assert verdicts(report) == {"N-K3": "invalid_evidence"}
    assert "temperature_fit" in report["clauses"][0]["reason"]
    right = many(sampled=at(0.7), train_law=at(0.7))
    kernel = "{run: recorded, logprobs: {values: processed, temperature: 0.7}}"
    report = decide(
        {"N-K3": "require: mean(k3) <= 1"},
        right,
        train=kernel,
        infer=kernel,
        constants="constants: {temperature: 0.7}",
    )
    assert verdicts(report) == {"N-K3": "held"}


def test_copied_column_passes_only_if_declared(
    decide: Callable[..., dict[str, Any]],
) -> None:
    table = many()
    table["train_logs"] = table["infer_logs"]
    clause = {"N-K3": "require: p90(k3) <= 1e-9"}
    assert verdicts(decide(clause, table)) == {"N-K3": "invalid_evidence"}
    said = "{run: recorded, logprobs: {values: raw}, recomputed: true}"
    assert verdicts(decide(clause, table, train=said)) == {"N-K3": "held"}


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(set(UNMEASURED) - {"noise_ratio"}))
def test_missing_columns_are_refused_by_name(
    decide: Callable[..., dict[str, Any]], name: str
) -> None:
    """A table of ids and tokens alone supports no metric; each refusal names the missing column."""
    from kcdsl.metrics import METRICS

    aggregate = METRICS[name].kind == "aggregate"
    bound = f"abs({name})" if METRICS[name].signed else name
    kind = "min" if METRICS[name].better == "higher" else "max"
    op = ">=" if METRICS[name].better == "higher" else "<="
    unit = " B" if name == "kv_memory" else ""
    require = f"{bound if aggregate else f'{kind}({bound})'} {op} 0.5{unit}"
    table = {"id": ["a"], "tokens": [[1, 2]], "prompt": [[3]]}
    report = decide({"N-1": f"require: {require}"}, table)
    assert "KC624" in report["refused"], report
    assert f"reads `{name}`" in report["refused"]
    assert "no column `" in report["refused"]


def test_metrics_of_whole_logits_are_refused(decide: Callable[..., dict[str, Any]]) -> None:
    report = decide({"N-KL": "require: p99(kl) <= 1"}, many(prompts=2))
    assert "KC624" in report["refused"]
    assert "format: logits" in report["refused"]


def test_too_short_lists_are_refused(decide: Callable[..., dict[str, Any]]) -> None:
    table = with_lists(recordings.rollouts(prompts=2, top=3))
    report = decide({"S-1": "require: mean(top1_overlap) >= 0.5",
                     "N-TAIL": "require: mean(topk_tail_kl) <= 1"}, table)  # fmt: skip
    assert report["clauses"][0]["value"] > 0.9
    assert 0 <= report["clauses"][1]["value"] < 1e-3
    report = decide({"S-5": "require: mean(top5_overlap) >= 0.5"}, table)
    assert "it needs the 5 likeliest tokens, and the recording lists 3" in report["refused"]


def test_rank_metrics_at_sampled_tokens_are_a_sample(
    decide: Callable[..., dict[str, Any]], cli: Any, tmp_path: Path
) -> None:
    """A recording is a census only if the clause is about this batch alone."""
    table = with_lists(recordings.rollouts(prompts=4, group=1, top=5))
    clauses = {
        "S-1": "require: mean(top1_overlap) >= 0.5",
        "S-5": "require: p50(top5_overlap) >= 0.5",
        "S-J": "require: mean(jaccard5) >= 0.5, evidence: census",
    }
    report = decide(clauses, table)
    kinds = {"S-1": "sample", "S-5": "sample", "S-J": "census"}
    assert {row["clause"]: row["evidence"] for row in report["clauses"]} == kinds
    assert verdicts(report) == {"S-1": "inconclusive", "S-5": "inconclusive", "S-J": "held"}
    rows = json.loads(cli("plan", str(tmp_path / "contract.yaml"), "--format", "json").stdout)[
        "rows"
    ]
    assert {row["clause"]: row["evidence"] for row in rows} == kinds
    assert {row["clause"]: row["state"] for row in rows}["S-J"] == "census"


def test_batch_is_gated_on_its_own_values(decide: Callable[..., dict[str, Any]]) -> None:
    """A census decides exactly on few rows, and faults of the batch still block it."""
    table = many(prompts=3)
    clauses = {
        "N-OWN": "require: mean(abs(log_ratio)) <= 0.1, evidence: census",
        "N-MAX": "require: max(k3) <= 1e-12, evidence: census",
        "N-ANY": "require: mean(abs(log_ratio)) <= 0.1",
    }
    report = decide(clauses, table)
    assert verdicts(report) == {"N-OWN": "held", "N-MAX": "violated", "N-ANY": "inconclusive"}
    assert any("N-OWN, N-MAX: a census of these rollouts" in note for note in report["notes"])
    report = decide(clauses, table, infer="{run: recorded}")  # undeclared semantics
    assert set(verdicts(report).values()) == {"invalid_evidence"}
    masked = {**table, "mask": [[0] * len(row) for row in table["mask"]]}
    report = decide({"N-OWN": clauses["N-OWN"]}, masked)
    assert report["code"] != 0


@pytest.mark.parametrize(
    ("train", "infer", "word"),
    [
        (RECORDED, EAGER, "but not for `infer`"),
        (RECORDED, "{run: recorded, format: trl, logprobs: {values: raw}}", "are the same rows"),
        ("{run: recorded, format: logits, file: a.safetensors}", RECORDED, "whole logits"),
        (RECORDED, "{run: recorded, format: verk, logprobs: {values: raw}}", "no format `verk`"),
        (RECORDED, "{run: recorded, columns: {tokns: a}}", "has no field `tokns`"),
        (RECORDED, "{run: recorded, file: a.safetensors}", "names no `file`"),
        (RECORDED, "{run: recorded, format: logits}", "need the field `file`"),
        (EAGER, "{run: torch.sdpa, format: verl}", "does not take the field `format`"),
    ],
)
def test_incompatible_kernels_are_refused(
    decide: Callable[..., dict[str, Any]], train: str, infer: str, word: str
) -> None:
    report = decide({"N-K3": "require: mean(k3) <= 1"}, train=train, infer=infer)
    assert report["code"] == 2
    assert word in report["refused"]


def test_certificate_names_only_weights_that_were_read(
    decide: Callable[..., dict[str, Any]], cli: Any, tmp_path: Path
) -> None:
    decide({"N-K3": "require: mean(k3) <= 1"}, many(prompts=2))
    cli("keygen", "-o", str(tmp_path / "own.key"))
    refused = cli("evaluate", str(tmp_path / "contract.yaml"), "--sign", str(tmp_path / "own.key"))
    assert refused.code == 2
    assert "KC645" in refused.stderr
    assert "both kernels are recorded" in refused.stderr


@pytest.mark.full
def test_certificate_states_that_infer_was_not_run(
    decide: Callable[..., dict[str, Any]], cli: Any, tmp_path: Path
) -> None:
    """The training kernel scores recorded tokens; the certificate is about a sample of these."""
    table = many()
    table.pop("train_logs")
    decide(
        {"N-K3": "require: mean(k3) <= 1e-3"},
        table,
        train=EAGER,
        checkpoint=str(MODEL / "model.safetensors"),
    )
    statement = json.loads((tmp_path / "out" / "evaluate.statement.json").read_text("utf-8"))
    found = statement["predicate"]
    assert [row["evidence"] for row in found["clauses"]] == ["sample"]
    assert found["triple"]["kernels"]["infer"]["fingerprint"]["recorded"]
    assert any("read from a recording" in text for text in found["nonClaims"])
    joined = cli("status", str(tmp_path / "contract.yaml"))  # the recording is present, and named
    assert (joined.code, "not used" in joined.stdout) == (0, False)
    recordings.write(tmp_path / "rows.parquet", many(prompts=63))
    joined = cli("status", str(tmp_path / "contract.yaml"))
    assert joined.code == 3
    assert "another infer kernel: recorded.rows.parquet" in " ".join(joined.stdout.split())


# --- whole logits --------------------------------------------------------------------------------


def _logits(tmp_path: Path, count: int = 24) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write both kernels' logits for some prompts; return the rows and the tensors of infer."""
    texts = dict.fromkeys(r.tokens[6 : 14 + i % 5] for i, r in enumerate(planted_bugs.prompts()))
    rows: list[dict[str, Any]] = [
        {"id": f"p{i}", "tokens": list(text)} for i, text in enumerate(list(texts)[:count])
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    tensors: dict[str, dict[str, Any]] = {}
    for side, program in (("train", BFLOAT16), ("infer", FP8)):
        kernel = recordings.program(program)
        tensors[side] = {r["id"]: kernel.logits(r["tokens"]).to(torch.float32) for r in rows}
    gold = recordings.program(FLOAT32)
    for r in rows:
        tensors["train"][f"gold.{r['id']}"] = gold.logits(r["tokens"]).to(torch.float32)
    for side, found in tensors.items():
        save_file({n: t.contiguous() for n, t in found.items()}, tmp_path / f"{side}.safetensors")
    return rows, tensors["infer"]


def _recorded_logits(side: str) -> str:
    return f"{{run: recorded, format: logits, file: {side}.safetensors}}"


@pytest.mark.full
def test_recorded_logits_give_every_metric_of_tier_a(
    decide: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    _logits(tmp_path)
    clauses = {
        "N-KL": "require: p99(kl) <= 1",
        "S-TOP": "require: mean(top1_overlap) >= 0.5",
        "N-NOISE": "require: p50(noise_ratio) <= 1000",
        "N-K3": "require: mean(k3) <= 1",
    }
    kernels = {side: _recorded_logits(side) for side in ("train", "infer")}
    report = decide(clauses, data="rows.jsonl", **kernels)
    assert verdicts(report)["N-KL"] == "held", report
    train, infer = (recordings.program(p) for p in (BFLOAT16, FP8))
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    worst = []
    for r in rows:
        p, q = (torch.log_softmax(k.logits(r["tokens"]).double(), -1) for k in (train, infer))
        worst.append(float((p.exp() * (p - q)).sum(-1).max()))
    value = next(row["value"] for row in report["clauses"] if row["clause"] == "N-KL")
    assert value == pytest.approx(max(worst), rel=1e-4)
    gold = recordings.program(FLOAT32)
    errors = []
    for r in rows:
        exact, one, two = (k.logits(r["tokens"]).double() for k in (gold, train, infer))
        ratio = (two - exact).norm(dim=-1) / (one - exact).norm(dim=-1)
        errors.append(float(ratio.max()))
    noise = next(row for row in report["clauses"] if row["clause"] == "N-NOISE")
    assert noise["verdict"] == "held"
    assert noise["value"] == pytest.approx(sorted(errors)[(len(errors) + 1) // 2 - 1], rel=1e-3)
    outcomes = {check["name"]: check["outcome"] for check in report["prechecks"]}
    assert outcomes["weights_checksum"] == "not_applicable"
    assert outcomes["self_determinism"] == "not_applicable"
    assert outcomes["alignment_shift"] == "passed"


def test_shifted_logits_are_diagnosed(
    decide: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    _, infer = _logits(tmp_path)
    shifted = {name: torch.roll(t, 1, 0).contiguous() for name, t in infer.items()}
    save_file(shifted, tmp_path / "infer.safetensors")
    kernels = {side: _recorded_logits(side) for side in ("train", "infer")}
    report = decide({"N-KL": "require: p99(kl) <= 1"}, data="rows.jsonl", **kernels)
    assert verdicts(report) == {"N-KL": "invalid_evidence"}
    assert "alignment_shift" in report["clauses"][0]["reason"]


@pytest.mark.full
def test_one_side_may_run_beside_recorded_logits(
    decide: Callable[..., dict[str, Any]], cli: Any, tmp_path: Path
) -> None:
    _logits(tmp_path, 4)
    report = decide(
        {"N-KL": "require: p99(kl) <= 1"},
        data="rows.jsonl",
        train=EAGER,
        infer=_recorded_logits("infer"),
        checkpoint=str(MODEL / "model.safetensors"),
    )
    assert verdicts(report) == {"N-KL": "held"}
    assert report["model"]["sha256"] is not None
    assert "not used" not in cli("status", str(tmp_path / "contract.yaml")).stdout


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda t: {n: v for n, v in t.items() if n != "p1"}, "no logits of the request 'p1'"),
        (lambda t: {**t, "p1": t["p1"][:-1].contiguous()}, "for 9 tokens"),
        (lambda t: {**t, "p1": t["p1"].to(torch.int32)}, "is stored as I32"),
        (lambda t: {**t, "p1": t["p1"][:, :9].contiguous()}, "vocabularies of different sizes"),
        (lambda t: {**t, "gold.p1": t["p1"].half()}, "no run in float32"),
    ],
)
def test_logits_of_other_shapes_are_refused(
    decide: Callable[..., dict[str, Any]], tmp_path: Path, change: Any, word: str
) -> None:
    _, infer = _logits(tmp_path, 3)
    save_file(change(infer), tmp_path / "infer.safetensors")
    kernels = {side: _recorded_logits(side) for side in ("train", "infer")}
    report = decide({"N-KL": "require: p99(kl) <= 1"}, data="rows.jsonl", **kernels)
    assert word in report["refused"]


@pytest.mark.parametrize("linked", [False, True])
def test_one_recording_is_not_two_kernels(
    decide: Callable[..., dict[str, Any]], tmp_path: Path, linked: bool
) -> None:
    _logits(tmp_path, 3)
    if linked:
        (tmp_path / "infer.safetensors").unlink()
        (tmp_path / "infer.safetensors").symlink_to("train.safetensors")
    kernels = {"train": _recorded_logits("train"), "infer": _recorded_logits("train")}
    if linked:
        kernels["infer"] = _recorded_logits("infer")
    report = decide({"N-KL": "require: p99(kl) <= 1"}, data="rows.jsonl", **kernels)
    assert "both kernels name the recording" in report["refused"]


def test_request_is_not_the_gold_run_of_another(
    decide: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Far logits of one request, taken for a run in float32, make any error look small."""
    rows, _ = _logits(tmp_path, 2)
    rows.append({"id": "gold.p1", "tokens": [token + 1 for token in rows[1]["tokens"]]})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    infer = load_file(tmp_path / "infer.safetensors")
    save_file({**infer, "gold.p1": infer["p1"] + 100.0}, tmp_path / "infer.safetensors")
    kernels = {side: _recorded_logits(side) for side in ("train", "infer")}
    report = decide({"N-NOISE": "require: p99(noise_ratio) <= 2"}, data="rows.jsonl", **kernels)
    assert "gold.p1 is the id of a request" in report["refused"]


def test_recording_of_logits_has_no_times(
    decide: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    _logits(tmp_path, 3)
    kernels = {side: _recorded_logits(side) for side in ("train", "infer")}
    report = decide({"R-1": "require: p95(latency) <= 1 s"}, data="rows.jsonl", **kernels)
    assert "recorded logits are read, not run" in report["refused"]


# --- tokens that the sampler kept -----------------------------------------------------------------

CUT = "{run: recorded, logprobs: {values: processed, top_p: 0.9}}"
NEAR = {"N-NEAR": "require: mean(abs(log_ratio)) <= 0.05, evidence: census"}


def truncated() -> tuple[dict[str, list[Any]], list[list[list[int]]]]:
    """Return rows sampled by top-p, with the sampler's candidate set at each token."""
    nucleus = recordings.nucleus(0.9)
    found = recordings.rollouts(prompts=16, group=1, sampled=nucleus, top=256)
    kept = [
        [ids[np.isfinite(logs)].tolist() for ids, logs in zip(top.ids, top.logs, strict=True)]
        for r in found
        if r.infer is not None and (top := r.infer.top) is not None
    ]
    return with_lists(found), kept


def without(table: Mapping[str, Any], *sides: str) -> dict[str, Any]:
    return {name: v for name, v in table.items() if not name.startswith(sides)}


@pytest.mark.full
def test_truncated_sampling_is_not_drift_with_known_candidates(
    decide: Callable[..., dict[str, Any]],
) -> None:
    table, kept = truncated()
    scored = {"train": EAGER, "infer": CUT, "checkpoint": str(MODEL / "model.safetensors")}
    plain = without(table, "train_", "infer_top")
    report = decide(NEAR, plain, **scored)
    assert verdicts(report) == {"N-NEAR": "invalid_evidence"}
    assert "record them (`infer_kept`)" in json.dumps(report["prechecks"])
    report = decide(NEAR, {**plain, "infer_kept": kept}, **scored)
    assert verdicts(report) == {"N-NEAR": "held"}, report["prechecks"]
    assert any("the sampler cut tokens off (top_p 0.9)" in note for note in report["notes"])
    report = decide(NEAR, without(table, "train_"), **scored)  # the lists are all that remained
    assert verdicts(report) == {"N-NEAR": "held"}


@pytest.mark.full
def test_recorded_values_are_renormalised_by_listed_mass(
    decide: Callable[..., dict[str, Any]],
) -> None:
    table, kept = truncated()
    report = decide(NEAR, {**without(table, "infer_top"), "infer_kept": kept}, infer=CUT)
    assert verdicts(report) == {"N-NEAR": "held"}
    report = decide(
        NEAR, {**without(table, "infer_top", "train_top"), "infer_kept": kept}, infer=CUT
    )
    assert verdicts(report) == {"N-NEAR": "invalid_evidence"}
    assert "record its lists of them (`train_top_ids`" in json.dumps(report["prechecks"])


@pytest.mark.parametrize(
    ("listed", "sampled"), [(-math.inf, -math.inf), (-9999.0, -9999.0), (-5.0, -0.1)]
)
def test_kept_tokens_without_their_mass_are_invalid_evidence(
    decide: Callable[..., dict[str, Any]], listed: float, sampled: float
) -> None:
    table = {
        "prompt": [[7 + i, 8] for i in range(6)],
        "tokens": [[5]] * 6,
        "mask": [[1]] * 6,
        "train_logs": [[sampled]] * 6,
        "infer_logs": [[0.0]] * 6,
        "infer_kept": [[[5]]] * 6,
        "train_top_ids": [[[5, 6]]] * 6,
        "train_top_logs": [[[listed, -1.0]]] * 6,
    }
    report = decide(NEAR, table, infer=CUT)
    assert verdicts(report) == {"N-NEAR": "invalid_evidence"}
    assert "6 of 6 rollouts have ln-ratios that are not finite" in json.dumps(report["prechecks"])


@pytest.mark.full
def test_trainer_that_replays_candidate_sets_must_declare_it(
    decide: Callable[..., dict[str, Any]],
) -> None:
    """Both sides of one distribution are compared only if the sets are recorded: one for both."""
    table, kept = truncated()
    plain = without(table, "train_top", "infer_top")

    def inside(ids: list[int], logs: list[float], sets: list[int]) -> float:
        return math.log(sum(math.exp(logs[ids.index(token)]) for token in sets))

    mass = [
        list(map(inside, *row))
        for row in zip(table["train_top_ids"], table["train_top_logs"], kept, strict=True)
    ]
    own = [
        [v - m for v, m in zip(*row, strict=True)]
        for row in zip(table["train_logs"], mass, strict=True)
    ]
    replayed = {**plain, "train_logs": own}
    report = decide(NEAR, {**replayed, "infer_kept": kept}, train=CUT, infer=CUT)
    assert verdicts(report) == {"N-NEAR": "held"}, report["prechecks"]
    report = decide(NEAR, replayed, train=CUT, infer=CUT)
    assert verdicts(report) == {"N-NEAR": "invalid_evidence"}


def test_sampled_token_outside_its_candidates_is_refused(
    decide: Callable[..., dict[str, Any]],
) -> None:
    table, kept = truncated()
    kept[0][3] = [t for t in kept[0][3] if t != table["tokens"][0][3]] or [0, 1]
    report = decide(NEAR, {**without(table, "infer_top"), "infer_kept": kept}, infer=CUT)
    assert "was drawn, and is not among those kept" in report["refused"]
    kept[0] = kept[0][:-1]
    report = decide(NEAR, {**without(table, "infer_top"), "infer_kept": kept}, infer=CUT)
    assert "19 values for 20 tokens" in report["refused"]
