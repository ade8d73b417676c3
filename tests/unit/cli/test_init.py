"""`kcdsl init`: every drafted contract compiles without findings, and evaluates."""

from __future__ import annotations

import json
import math
import os
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Refusal
from kcdsl.draft.clauses import DraftEvidence, DraftPurpose, clauses_for
from kcdsl.draft.quantisation import serving_kernel, stored_kernel
from kcdsl.draft.rows import json_rows
from kcdsl.ir.terms import KernelRef, ModelRef
from kcdsl.model.loader import load_model
from kcdsl.model.presets import resolve
from kcdsl_backends.empirical.statistics.planning import units_for_budget
from tests.support.onnx_files import model_of, quantised_mlp, save_decoder
from tests.support.quantised import FORMATS, quantise
from tests.support.small_models import DECODER, ENCODER, write_model

EMPTY = (2).to_bytes(8, "little") + b"{}"
"""A safetensors file without tensors."""
PURPOSES = tuple(DraftPurpose)
QUICK = ("--seconds", "0.2", "--bound-seconds", "0")
TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize("line", [b'{"id"', b"\xff", b"[" * 100_000, b"1" * 5000])
def test_rows_that_are_no_objects_are_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"tokens": [1]}\n' + line)
    with pytest.raises(Refusal, match=r"rows.jsonl, line 2: ") as refused:
        json_rows(path)
    assert refused.value.diagnostics[0].help


def accepted(cli: Any, contract: Path) -> None:
    """Assert that a contract compiles and that nothing is found in it."""
    ran = cli("compile", contract)
    assert ran.code == 0, ran.stderr
    assert "warning" not in ran.stderr
    assert cli("lint", "--fail-on", "note", contract).code == 0
    assert cli("fmt", "--check", contract).code == 0


def evaluated(cli: Any, contract: Path) -> dict[str, Any]:
    ran = cli("evaluate", contract, *QUICK, "--format", "json")
    assert ran.code in (0, 1, 3), ran.stderr  # 3: too few timed runs on a busy machine
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def saved(folder: Path, kind: str, **changes: Any) -> Path:
    """Save a random model of transformers in bfloat16."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(TINY | changes))
    maker: Any = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    maker.from_config(config).to(torch.bfloat16).save_pretrained(folder / kind)
    return folder / kind


def test_contract_is_drafted_from_a_transformers_folder(cli: Any, tmp_path: Path) -> None:
    saved(tmp_path, "llama", num_key_value_heads=2)
    rows = [{"id": f"r{i}", "tokens": [5 + i, 7, 9][: i + 1]} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ran = cli("init", "llama", "--data", "rows.jsonl", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    contract = tmp_path / "contract.yaml"
    accepted(cli, contract)
    program = load_program(contract)
    assert program.model.architecture == "llama"
    assert (program.train.run, program.infer.run) == ("torch.eager", "torch.sdpa")
    assert resolve(program.train).compute == "bfloat16"
    assert {row["clause"] for row in evaluated(cli, contract)["clauses"]} == {
        *("N-KL", "S-TOP1", "R-LATENCY", "O-TRACE")
    }


@pytest.mark.parametrize(("rows", "percent"), [(59, 95), (29, 90), (14, 80), (5, 50)])
def test_draft_uses_the_percentile_that_its_rows_can_support(rows: int, percent: int) -> None:
    def latency(requests: int) -> str:
        found = clauses_for(
            DraftPurpose.RELEASE, DraftEvidence.RUN, width=None, blocks=(), long=False, named=(),
            requests=requests,
        )  # fmt: skip
        assert any(clause.id == "R-THROUGHPUT" for clause in found) == (requests >= 20)
        return next(clause.goal for clause in found if clause.id == "R-LATENCY")

    assert latency(rows) == f"p{percent}(latency)"
    assert units_for_budget(1 - Fraction(percent, 100)) == rows
    assert percent == 50 or latency(rows - 1) != latency(rows)


@pytest.mark.sample(2)
@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("config", [DECODER, ENCODER], ids=["decoder", "encoder"])
def test_every_purpose_compiles(
    cli: Any, tmp_path: Path, config: dict[str, Any], purpose: DraftPurpose
) -> None:
    write_model(tmp_path, config=config)
    (tmp_path / "prompts.jsonl").unlink()
    ran = cli("init", "--for", purpose.value, cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    accepted(cli, tmp_path / "contract.yaml")


@pytest.mark.full
@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("qwen2", {"num_key_value_heads": 2}),
        ("mistral", {"num_key_value_heads": 2, "sliding_window": 8}),
        ("bert", {}),
        ("gpt2", {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 64}),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_every_family_and_purpose_evaluates(
    cli: Any, tmp_path: Path, kind: str, changes: dict[str, Any], purpose: DraftPurpose
) -> None:
    folder = saved(tmp_path, kind, **changes)
    assert cli("init", folder, "--for", purpose.value, cwd=folder).code == 0
    accepted(cli, folder / "contract.yaml")
    assert evaluated(cli, folder / "contract.yaml")["clauses"]


def test_empty_folder_gets_a_deterministic_example(cli: Any, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        assert cli("init", cwd=tmp_path / name).code == 0
    one, two = (sorted((tmp_path / name).iterdir()) for name in ("one", "two"))
    assert [p.name for p in one] == [
        "config.json", "contract.yaml", "model.safetensors", "prompts.jsonl"
    ]  # fmt: skip
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]
    accepted(cli, tmp_path / "one" / "contract.yaml")


@pytest.mark.full
def test_example_keeps_an_existing_contract(cli: Any, tmp_path: Path) -> None:
    assert cli("init", cwd=tmp_path).code == 0
    report = evaluated(cli, tmp_path / "contract.yaml")
    assert {row["verdict"] for row in report["clauses"]} <= {"held", "inconclusive"}


def test_files_are_not_replaced_without_force(cli: Any, tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "contract.yaml").write_text("mine")
    before = (tmp_path / "prompts.jsonl").read_bytes()
    ran = cli("init", cwd=tmp_path)
    assert ran.code == 2
    assert "already there" in ran.stderr
    assert (tmp_path / "contract.yaml").read_text() == "mine"
    assert (tmp_path / "prompts.jsonl").read_bytes() == before
    assert cli("init", "--force", cwd=tmp_path).code == 0
    assert (tmp_path / "contract.yaml").read_text() != "mine"


@pytest.mark.parametrize("source", ["model", "graph", "nothing"])
def test_existing_prompts_are_used_and_never_replaced(
    cli: Any, tmp_path: Path, source: str
) -> None:
    words: tuple[str, ...] = ()
    match source:
        case "model":
            write_model(tmp_path)
        case "graph":
            save_decoder(tmp_path, "small.onnx")
            words = ("small.onnx",)
    kinds = ("mine", "mine", "other", "other")
    rows = [{"id": f"m{i}", "tokens": [1, 2 + i], "kind": kind} for i, kind in enumerate(kinds)]
    mine = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "prompts.jsonl").write_text(mine)
    for more in ((), ("--force",), ("-o", "q.yaml")):
        ran = cli("init", *words, *more, cwd=tmp_path)
        assert ran.code == 0, ran.stderr
        assert "prompts.jsonl" not in ran.stdout
        assert (tmp_path / "prompts.jsonl").read_text() == mine
        accepted(cli, tmp_path / "contract.yaml")
    for name in ("contract.yaml", "q.yaml"):
        assert 'kind == "mine"' in (tmp_path / name).read_text()


def test_second_contract_shares_the_prompts_of_the_first(cli: Any, tmp_path: Path) -> None:
    for words in ((), ("-o", "q.yaml"), ("--force",)):
        ran = cli("init", *words, cwd=tmp_path)
        assert ran.code == 0, ran.stderr
    one, two = ((tmp_path / name).read_text() for name in ("contract.yaml", "q.yaml"))
    assert one == two


def test_weights_without_a_config_are_not_replaced_by_the_example(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"mine")
    for words in ((), ("--force",)):
        ran = cli("init", *words, cwd=tmp_path)
        assert ran.code == 2
        assert "no draft replaces it" in ran.stderr
        assert os.listdir(tmp_path) == ["model.safetensors"]
        assert (tmp_path / "model.safetensors").read_bytes() == b"mine"


def test_slices_are_drafted_from_columns_of_the_data(cli: Any, tmp_path: Path) -> None:
    rows = [
        {"id": f"r{i}", "tokens": [1 + i] * (i + 2), "lang": "de" if i % 2 else "en", "n": i}
        for i in range(8)
    ]
    write_model(tmp_path, rows=rows)
    ran = cli("init", "--data", "prompts.jsonl", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    program = load_program(tmp_path / "contract.yaml")
    assert {s.name for s in program.slices} == {"all", "short", "long", "de", "en"}
    accepted(cli, tmp_path / "contract.yaml")


def test_values_of_columns_are_quoted(cli: Any, tmp_path: Path) -> None:
    values = ("it's", "plain: yes # no")
    rows = [{"id": f"r{i}", "tokens": [1, 2 + i], "of": values[i % 2]} for i in range(4)]
    write_model(tmp_path, rows=rows)
    ran = cli("init", "--data", "prompts.jsonl", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    where = [str(s.where) for s in load_program(tmp_path / "contract.yaml").slices]
    assert all(any(value in text for text in where) for value in values)


def test_rows_without_ids_are_evaluated(cli: Any, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"tokens": [1, 2 + i]} for i in range(3)]
    write_model(tmp_path, rows=[*rows, rows[0]])
    assert cli("init", "--data", "prompts.jsonl", cwd=tmp_path).code == 0
    accepted(cli, tmp_path / "contract.yaml")
    assert evaluated(cli, tmp_path / "contract.yaml")["clauses"][0]["n"] == 4


def test_rows_of_chat_messages_are_measured_only(cli: Any, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "ab" * i}], "of": ["even", "odd"][i % 2]}
        for i in range(1, 5)
    ]
    write_model(tmp_path, rows=rows)
    ran = cli("init", "--data", "prompts.jsonl", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    assert "nothing is proved about rows with `messages`" in ran.stderr
    assert "kcdsl verify --block" not in ran.stdout + ran.stderr
    program = load_program(tmp_path / "contract.yaml")
    assert {s.name for s in program.slices} == {"all", "even", "odd"}
    assert not any(clause.id.startswith("N-ATTN") for clause in program.clauses)
    accepted(cli, tmp_path / "contract.yaml")


@pytest.mark.parametrize("length", ["3", True, math.inf])
def test_lengths_of_rows_are_numeric(cli: Any, tmp_path: Path, length: Any) -> None:
    rows = [{"id": "a", "tokens": [1, 2]}, {"id": "b", "tokens": [1, 3], "length": length}]
    write_model(tmp_path, rows=rows)
    ran = cli("init", "--data", "prompts.jsonl", cwd=tmp_path)
    assert ran.code == 2
    assert "prompts.jsonl, line 2: `length`" in ran.stderr
    assert not (tmp_path / "contract.yaml").exists()


def test_folder_name_may_be_a_keyword(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "true").mkdir()
    write_model(tmp_path / "true")
    ran = cli("init", "true", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    assert load_program(tmp_path / "contract.yaml").name == "model-true"


def test_contract_is_written_beside_a_model_elsewhere(cli: Any, tmp_path: Path) -> None:
    model, here = tmp_path / "model", tmp_path / "here"
    model.mkdir()
    here.mkdir()
    write_model(model)
    (model / "prompts.jsonl").unlink()
    ran = cli("init", Path("..") / "model", cwd=here)
    assert ran.code == 0, ran.stderr
    assert os.listdir(here) == []
    accepted(cli, model / "contract.yaml")


def test_symlinks_out_of_the_folder_are_refused_with_help(cli: Any, tmp_path: Path) -> None:
    blobs, model = tmp_path / "the blobs", tmp_path / "snapshot"
    blobs.mkdir()
    model.mkdir()
    write_model(blobs)
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(blobs / name)
    ran = cli("init", cwd=model)
    assert ran.code == 0, ran.stderr
    assert f"export KCDSL_ALLOW_FOLDERS='{blobs}'" in ran.stdout
    allowed = {"KCDSL_ALLOW_FOLDERS": str(blobs)}
    ran = cli("compile", cwd=model, env=allowed)
    assert "checkpoint  sha256:" in ran.stdout


@pytest.mark.parametrize(
    ("write", "words", "said"),
    [
        ({}, ("missing",), "there is no file missing"),
        ({}, ("missing",), "`kcdsl init` alone writes a small model"),
        ({"empty/x": b""}, ("empty",), "no config.json"),
        ({"m/config.json": b"{}"}, ("m",), "neither model.safetensors"),
        ({"g.onnx": b""}, ("g.onnx",), "its operators are of version 0"),
        ({"g.onnx": b"\xff\xff"}, ("g.onnx",), "it is no ONNX file"),
        ({"g.onnx": b"", "q/x": b""}, ("g.onnx", "--quantised", "q"), "--quantised names a folder"),
        (
            {"m/config.json": b'{"model_type": [1]}', "m/model.safetensors": EMPTY},
            ("m",),
            "no model",
        ),
        ({"r.jsonl": b'{"a": 1}'}, ("r.jsonl",), "no column for infer_logs, tokens, train_logs"),
        ({"r.jsonl": b"[1]"}, ("r.jsonl",), "a row is a JSON object"),
        (
            {"r.jsonl": b'{"prompt": "a", "completion": "b"}'},
            ("r.jsonl",),
            "no tokens and no log-probabilities",
        ),
    ],
)
def test_unsupported_inputs_are_refused_with_help(
    cli: Any, tmp_path: Path, write: dict[str, bytes], words: tuple[str, ...], said: str
) -> None:
    for name, data in write.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    ran = cli("init", *words, cwd=tmp_path)
    assert ran.code == 2
    assert said in ran.stderr
    assert not (tmp_path / "contract.yaml").exists()


# --- recordings -----------------------------------------------------------------------------------


def rollouts(path: Path, *, trained: bool = True, kind: str = "rows") -> None:
    names = {
        "rows": ("prompt", "tokens", "infer_logs", "train_logs", "group"),
        "verl": ("prompts", "responses", "rollout_log_probs", "old_log_probs", "uid"),
    }[kind]
    rows = []
    for i in range(8):
        ids = [(3 * i + j) % 100 for j in range(5)]
        logs = [-1.0 - 0.1 * j - 0.01 * i for j in range(5)]
        near = [value + (0.001 if j % 2 else -0.001) for j, value in enumerate(logs)]
        row: dict[str, Any] = dict(zip(names, ([i, i + 1], ids, logs, near, f"g{i}"), strict=True))
        if not trained:
            del row[names[3]]
        if kind == "verl":
            row["attention_mask"] = [1] * 7
        rows.append({**row, "task": "math" if i % 2 else "code"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_recorded_rollouts_need_no_model(cli: Any, tmp_path: Path) -> None:
    rollouts(tmp_path / "rollouts.jsonl")
    ran = cli("init", "rollouts.jsonl", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    assert "assumed: log-probabilities are raw" in ran.stderr
    contract = tmp_path / "contract.yaml"
    program = load_program(contract)
    assert {s.name for s in program.slices} == {"all", "math", "code"}
    ran = cli("lint", contract)
    assert "warning" not in ran.stdout
    report = cli("evaluate", contract, *QUICK, "--format", "json")
    assert report.code in (0, 1, 3), report.stderr
    assert "invalid" not in {row["verdict"] for row in json.loads(report.stdout)["clauses"]}


def test_recorded_tokens_are_scored_by_the_model(cli: Any, tmp_path: Path) -> None:
    write_model(tmp_path)
    rollouts(tmp_path / "r.jsonl", trained=False)
    ran = cli("init", "--data", "r.jsonl", "--temperature", "0.7", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    program = load_program(tmp_path / "contract.yaml")
    assert program.infer.recording is not None
    assert program.train.recording is None
    assert program.data == "r.jsonl"


@pytest.mark.parametrize("scored", [False, True])
def test_the_sampling_temperature_is_that_of_the_policy(
    cli: Any, tmp_path: Path, scored: bool
) -> None:
    rollouts(tmp_path / "batch.jsonl", kind="verl")
    if scored:
        write_model(tmp_path)
    given = ["--data", "batch.jsonl"] if scored else ["batch.jsonl"]
    assert cli("init", *given, "--temperature", "0.7", cwd=tmp_path).code == 0
    assert load_program(tmp_path / "contract.yaml").constants.temperature == Fraction(7, 10)
    report = cli("evaluate", "contract.yaml", *QUICK, "--format", "json", cwd=tmp_path)
    found = {check["name"]: check["outcome"] for check in json.loads(report.stdout)["prechecks"]}
    assert found["logprob_semantics"] == "passed"


def test_layouts_of_trainers_are_recognised(cli: Any, tmp_path: Path) -> None:
    rollouts(tmp_path / "batch.jsonl", kind="verl")
    assert cli("init", "batch.jsonl", cwd=tmp_path).code == 0
    program = load_program(tmp_path / "contract.yaml")
    assert program.infer.recording is not None
    assert program.infer.recording.format == "verl"
    assert program.infer.recording.logprobs is not None
    assert program.infer.recording.logprobs.values == "processed"


# --- quantised weights ----------------------------------------------------------------------------


def eight_bits(kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, **more}


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": activations, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


LINEARS = ("lm_head.weight", "model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize(
    ("config", "run", "weights", "activations", "unmet"),
    [
        (
            compressed(eight_bits("float", "channel"), eight_bits("float", "token", dynamic=True)),
            *("torch.scaled_mm", "fp8_e4m3 per_channel", "fp8_e4m3 per_token", "lm_head"),
        ),
        (
            compressed({**eight_bits("int", "group", group_size=128), "num_bits": 4}, None),
            *("torch.sdpa", "int4_full group_128", "none none", ""),
        ),
        (
            compressed(eight_bits("float", "tensor"), eight_bits("float", "tensor", dynamic=False)),
            *("torch.sdpa", "fp8_e4m3 per_tensor", "none none", "stored scales"),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            *("torch.sdpa", "fp8_e4m3 block_128", "none none", "activations in fp8_e4m3"),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
            *("torch.sdpa", "int4_full group_128", "none none", "desc_act"),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128},
            *("torch.sdpa", "uint4 group_128", "none none", "AWQ scaled"),
        ),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            *("torch.sdpa", "fp4_e2m1 nvfp4", "none none", "activations in fp4_e2m1"),
        ),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            *("torch.sdpa", "bfloat16 none", "none none", "the method 'bitsandbytes'"),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": 128},
            *("torch.sdpa", "bfloat16 none", "none none", "blocks of 128"),
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
            *("torch.sdpa", "bfloat16 none", "none none", "without config_groups"),
        ),
        (
            compressed({**eight_bits("int", "group", group_size="x"), "num_bits": 4}, None),
            *("torch.sdpa", "bfloat16 none", "none none", "this one runs plain ones"),
        ),
    ],
    ids=[
        *("fp8", "int4", "static", "blocks", "gptq", "awq", "nvfp4", "unknown"),
        *("number of blocks", "number of groups", "word of size"),
    ],
)
def test_serving_kernel_is_chosen_by_the_quantisation(
    config: dict[str, Any], run: str, weights: str, activations: str, unmet: str
) -> None:
    kernel = serving_kernel("bfloat16", "llama", config, LINEARS)
    assert kernel.run == run
    pairs = KernelRef(kernel.run, tuple(sorted(_pairs(kernel.numerics))))
    found = resolve(pairs)
    assert f"{found.weights.format} {found.weights.scale}" == weights
    assert f"{found.activations.format} {found.activations.scale}" == activations
    assert unmet in "; ".join(kernel.unmet)
    assert bool(unmet) == bool(kernel.unmet)


def _pairs(section: dict[str, Any]) -> list[tuple[str, object]]:
    return [
        (key, tuple(sorted(_pairs(value))) if isinstance(value, dict) else value)
        for key, value in section.items()
    ]


def test_quantised_weights_beside_trained_ones(cli: Any, tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "served").mkdir()
    config = {"model_type": "llama", "quantization_config": {"quant_method": "fbgemm_fp8"}}
    (tmp_path / "served" / "config.json").write_text(json.dumps(config))
    ran = cli("init", "--quantised", "served", "--force", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    accepted(cli, tmp_path / "contract.yaml")
    assert load_program(tmp_path / "contract.yaml").infer.run == "torch.scaled_mm"


def test_the_quantised_folder_of_another_model_is_refused(cli: Any, tmp_path: Path) -> None:
    """The draft would not compile."""
    write_model(tmp_path)
    (tmp_path / "served").mkdir()
    config = {**DECODER, "hidden_size": 4096, "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "served" / "config.json").write_text(json.dumps(config))
    ran = cli("init", "--quantised", "served", cwd=tmp_path)
    assert ran.code == 2
    assert "served has hidden_size 4096, " in ran.stderr
    assert not (tmp_path / "contract.yaml").exists()


@pytest.mark.parametrize("words", [(), ("--output", "drafts/contract.yaml")], ids=str)
def test_a_configuration_of_another_model_is_refused(
    cli: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The draft would not compile; here the shapes of its tensors are others."""
    write_model(tmp_path)
    other = {**DECODER, "intermediate_size": 2 * DECODER["intermediate_size"]}
    (tmp_path / "config.json").write_text(json.dumps(other))
    ran = cli("init", *words, ".", cwd=tmp_path)
    assert ran.code == 2
    assert "error[KC454]" in ran.stderr
    assert not list(tmp_path.rglob("contract.yaml"))


def test_requests_are_a_jsonl_file(cli: Any, tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "requests.csv").write_text("text\nhello\n")
    ran = cli("init", "--data", "requests.csv", cwd=tmp_path)
    assert ran.code == 2
    assert "requests.csv: requests are a .jsonl file" in ran.stderr


def test_texts_for_a_model_without_a_tokenizer_are_refused(cli: Any, tmp_path: Path) -> None:
    """The draft would compile, and `kcdsl evaluate` would refuse its first row."""
    write_model(tmp_path, config={**DECODER, "vocab_size": 512})
    (tmp_path / "prompts.jsonl").write_text('{"text": "a b"}\n')
    ran = cli("init", cwd=tmp_path)
    assert ran.code == 2
    assert "prompts.jsonl, line 1: the row has a `text`, and . has no tokenizer.json" in ran.stderr
    assert not (tmp_path / "contract.yaml").exists()


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_quantisation_of_weights_that_are_not_quantised_is_refused(
    cli: Any, tmp_path: Path, key: str
) -> None:
    """No contract about such a config.json compiles."""
    write_model(tmp_path)
    config = {**DECODER, key: {"quant_method": "fbgemm_fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ran = cli("init", cwd=tmp_path)
    assert (ran.code, "KC455" in ran.stderr, "--quantised FOLDER" in ran.stderr) == (2, True, True)
    assert not (tmp_path / "contract.yaml").exists()


@pytest.mark.parametrize(
    "column", ["true", "false", "forall", "exists", "not", "and", "of", "Length", "length_"]
)
def test_columns_of_any_name_give_a_draft_that_compiles(
    cli: Any, tmp_path: Path, column: str
) -> None:
    write_model(tmp_path, rows=[{"tokens": [1] * (i + 1), column: "ab"[i % 2]} for i in range(4)])
    assert cli("init", cwd=tmp_path).code == 0
    accepted(cli, tmp_path / "contract.yaml")


@pytest.mark.parametrize("row", [{"length": 1e300}, {"length": 5e-324}, {"cat": "a" * 20_000}])
def test_values_beyond_the_language_give_a_draft_that_compiles(
    cli: Any, tmp_path: Path, row: dict[str, Any]
) -> None:
    rows = [{"tokens": [1, 2], **(row if i % 2 else row | {"cat": "b"})} for i in range(4)]
    write_model(tmp_path, rows=rows)
    assert cli("init", cwd=tmp_path).code == 0
    accepted(cli, tmp_path / "contract.yaml")


@pytest.mark.parametrize("name", ["a\u2028b", "a\x7fb", "\u202ea", "a\x85b"])
def test_folders_of_any_name_give_a_draft_that_compiles(
    cli: Any, tmp_path: Path, name: str
) -> None:
    (tmp_path / name).mkdir()
    write_model(tmp_path / name)
    assert cli("init", name, cwd=tmp_path).code == 0
    accepted(cli, tmp_path / "contract.yaml")
    assert all(c.isprintable() for c in (tmp_path / "contract.yaml").read_text() if c != "\n")


@pytest.mark.parametrize(
    ("config", "read"),
    [
        ({"_type": "Int4WeightOnlyConfig", "_data": {}}, True),
        (
            {
                "_type": "Int4WeightOnlyConfig",
                "_data": {"int4_packing_format": {"_type": "Int4PackingFormat", "_data": "PLAIN"}},
            },
            True,
        ),
        (
            {
                "_type": "Int4WeightOnlyConfig",
                "_data": {"int4_packing_format": "tile_packed_to_4d"},
            },
            False,
        ),
        ({"_type": "Float8DynamicActivationInt4WeightConfig", "_data": {}}, False),
    ],
)
def test_packed_int4_of_torchao_is_read_in_row_order(config: dict[str, Any], read: bool) -> None:
    given = {"quant_method": "torchao", "quant_type": {"default": config}}
    found = stored_kernel("bfloat16", "llama", given, "served", capped=False)
    assert (found is not None) == read


@pytest.mark.full
@pytest.mark.parametrize("name", FORMATS)
def test_stored_codes_are_read_unchanged(cli: Any, tmp_path: Path, name: str) -> None:
    write_model(tmp_path, config={**DECODER, "hidden_size": 32, "intermediate_size": 32})
    quantise(tmp_path, tmp_path / "served", name)
    words = ("--quantised", "served", "--data", "prompts.jsonl")
    ran = cli("init", *words, cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    accepted(cli, tmp_path / "contract.yaml")
    assert load_program(tmp_path / "contract.yaml").model.served == "served"
    evaluated(cli, tmp_path / "contract.yaml")


# --- from a folder to a signed certificate --------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_four_commands_produce_a_signed_certificate(cli: Any, tmp_path: Path, kind: str) -> None:
    more = {"num_key_value_heads": 2} if kind == "llama" else {"n_embd": 16, "n_layer": 1}
    saved(tmp_path, kind, **more, **({} if kind == "llama" else {"n_head": 4, "n_positions": 64}))
    commands = [
        ("init", kind, "--measure"),
        ("keygen",),
        ("verify", "--block", "attn_0", "--sign", "kcdsl.key"),
        ("check", "out/verify-attn_0.cert.json", "--key", "kcdsl.key.pub"),
    ]
    proved = "attn_0" in _drafted(cli, tmp_path, kind)
    if not proved:
        commands[2] = ("evaluate", "--sign", "kcdsl.key", "--seconds", "5")
        commands[3] = ("check", "out/evaluate.cert.json", "--key", "kcdsl.key.pub")
    for words in commands:
        ran = cli(*words, cwd=tmp_path)
        assert ran.code == 0 or (words[0] == "evaluate" and ran.code in (1, 3)), ran.stderr
    assert "usual" not in (tmp_path / "contract.yaml").read_text().partition("N-KL")[0]


def _drafted(cli: Any, folder: Path, kind: str) -> str:
    ran = cli("init", kind, "-o", folder / "probe.kc.yaml", cwd=folder)
    assert ran.code == 0, ran.stderr
    for name in ("probe.kc.yaml", "prompts.jsonl"):
        (folder / name).unlink()
    return str(ran.stdout)


def test_drafted_limits_are_rounded_away_from_measurements() -> None:
    from fractions import Fraction

    from kcdsl.draft.measure import _rounded

    for value in (
        Fraction(1, 3),
        Fraction(123456, 10**9),
        Fraction(98765, 1000),
        Fraction(5, 10**7),
    ):
        up, down = (Fraction(_rounded(value, up=each)) for each in (True, False))
        assert down <= value <= up <= value * Fraction(101, 100)
        assert down >= value * Fraction(99, 100)


@pytest.mark.full
def test_nemo_rl_dump_produces_a_checked_certificate(cli: Any, tmp_path: Path) -> None:
    """Draft, compile, measure, sign and check `train_data_step{N}.jsonl`, as NeMo-RL names it."""
    (tmp_path / "policy").mkdir()
    write_model(tmp_path / "policy")
    ref = ModelRef("model.safetensors", "llama", tokenizer="bytes")
    module, draw = load_model(ref, tmp_path / "policy").module, random.Random(4)
    lines = []
    for number in range(32):
        ids = [draw.randrange(1, 96) for _ in range(6)]
        for _ in range(6):
            chances = module(torch.tensor(ids))[-1].softmax(-1).tolist()
            ids += draw.choices(range(len(chances)), chances)
        logs = module(torch.tensor(ids)).log_softmax(-1)
        drawn = [float(logs[k - 1, ids[k]]) for k in range(6, 12)]
        row = {
            "content": ["text"], "rewards": [float(number % 2)], "input_lengths": [12],
            "token_ids": [[*ids, 0]], "token_loss_mask": [[0] * 6 + [1] * 6 + [0]],
            "sample_loss_mask": [1.0], "advantages": [[number % 2 - 0.5] * 13],
            "generation_logprobs": [[0.0] * 6 + drawn + [0.0]],
            "prev_logprobs": [[0.0] * 6 + drawn + [0.0]], "idx": number,
        }  # fmt: skip
        lines.append(json.dumps(row) + "\n")
    (tmp_path / "train_data_step7.jsonl").write_text("".join(lines))
    certificate = "out/evaluate.cert.json"
    for words in (
        ("init", "policy", "--data", "train_data_step7.jsonl", "--for", "rl"),
        ("compile",),
        ("keygen", "-o", "k.key"),
        ("evaluate", "--sign", "k.key"),
        ("check", certificate, "--key", "k.key.pub", "--recheck"),
    ):
        ran = cli(*words, cwd=tmp_path)
        assert ran.code == 0, f"{words}: {ran.stdout}{ran.stderr}"
    assert "format: nemo-rl" in (tmp_path / "contract.yaml").read_text()
    dump = tmp_path / "train_data_step7.jsonl"
    dump.write_text("".join(lines[:-1]))  # another batch than the certified one
    assert cli("check", certificate, "--key", "k.key.pub", cwd=tmp_path).code == 4


# --- ONNX files -----------------------------------------------------------------------------------


@pytest.mark.full
def test_contract_is_drafted_from_an_onnx_file(cli: Any, tmp_path: Path) -> None:
    save_decoder(tmp_path, "small.onnx")
    ran = cli("init", "small.onnx", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    contract = tmp_path / "contract.yaml"
    accepted(cli, contract)
    program = load_program(contract)
    wanted = (("attn_0", "embedded", "attended"), ("mlp_0", "attended", "layer"))
    assert program.model.blocks == wanted
    assert program.infer.run == "onnxruntime.file"
    assert resolve(program.infer).compute == "float32"
    assert {clause.id for clause in program.clauses} >= {"N-ATTN-0", "N-KL"}


@pytest.mark.full
def test_contract_of_an_onnx_file_is_evaluated_and_verified(cli: Any, tmp_path: Path) -> None:
    save_decoder(tmp_path, "small.onnx", beside=True)
    assert cli("init", "small.onnx", "--for", "release", cwd=tmp_path).code == 0
    found = evaluated(cli, tmp_path / "contract.yaml")
    assert {row["clause"] for row in found["clauses"]} >= {"N-KL", "N-TV"}
    assert all(row["n"] for row in found["clauses"] if row["clause"] == "N-KL")
    ran = cli("verify", "--format", "json", cwd=tmp_path)
    goals = {goal["clause"]: goal for goal in json.loads(ran.stdout)["goals"]}
    assert {"N-ATTN-0", "N-MLP-0", "N-ATTN-0-BALL"} == set(goals)
    assert all(0 < goal["attack"] <= goal["bound"] for goal in goals.values())


@pytest.mark.parametrize("form", ["uint8", "dynamic", "e4m3"])
def test_quantisers_of_an_onnx_file_become_the_inference_kernel(
    cli: Any, tmp_path: Path, form: str
) -> None:
    (tmp_path / "q.onnx").write_bytes(quantised_mlp(form)[0].SerializeToString())
    ran = cli("init", "q.onnx", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    assert "kcdsl evaluate" in ran.stdout
    contract = tmp_path / "contract.yaml"
    accepted(cli, contract)
    program = load_program(contract)
    load_model(program.model, tmp_path)  # refuses numerics other than those of the file
    own = resolve(program.infer).serving("up_read").activations
    assert own.format == {"e4m3": "fp8_e4m3"}.get(form, "uint8")
    assert {"N-MLP-0", "N-KL"} <= {clause.id for clause in program.clauses}


@pytest.mark.full
def test_limits_of_a_quantised_onnx_file_come_from_bounds(cli: Any, tmp_path: Path) -> None:
    """No wider format of the file runs, so measured clauses keep their default limits."""
    (tmp_path / "q.onnx").write_bytes(quantised_mlp("int8")[0].SerializeToString())
    ran = cli("init", "q.onnx", "--measure", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    text = " ".join((tmp_path / "contract.yaml").read_text("utf-8").replace("#", " ").split())
    assert "the bound proved for this draft" in text
    assert "it could not be measured" in text


SEQUENTIAL = """
<ir_version: 9, opset_import: ["" : 18]>
g (int64[1,4] input_ids) => (float[1,4,3] hidden)
{ states = Gather (table, input_ids) wide = MatMul (states, up) high = Relu (wide)
  hidden = MatMul (high, down) }
"""


def test_served_onnx_file_becomes_the_inference_kernel(cli: Any, tmp_path: Path) -> None:
    save_decoder(tmp_path, "small.onnx")
    (tmp_path / "q.onnx").write_bytes(quantised_mlp("int8")[0].SerializeToString())
    ran = cli("init", "small.onnx", "--quantised", "q.onnx", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    accepted(cli, tmp_path / "contract.yaml")
    program = load_program(tmp_path / "contract.yaml")
    assert (program.infer.run, program.infer.own_file) == ("onnxruntime.file", "q.onnx")
    assert "N-KL" in {clause.id for clause in program.clauses}
    (tmp_path / "contract.yaml").unlink()
    ran = cli("init", "small.onnx", "--quantised", "gone.onnx", cwd=tmp_path)
    assert ran.code == 2
    assert "gone.onnx" in ran.stderr
    assert not (tmp_path / "contract.yaml").exists()


def test_graph_without_residual_sums_is_one_block(cli: Any, tmp_path: Path) -> None:
    shapes = {"table": (9, 3), "up": (3, 5), "down": (5, 3)}
    drawn = np.random.default_rng(1)
    tensors = {n: drawn.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    model = model_of(SEQUENTIAL, tensors)
    (tmp_path / "Own Net.onnx").write_bytes(model.SerializeToString())
    ran = cli("init", "Own Net.onnx", cwd=tmp_path)
    assert ran.code == 0, ran.stderr
    accepted(cli, tmp_path / "contract.yaml")
    program = load_program(tmp_path / "contract.yaml")
    assert program.name == "own-net"
    assert program.model.blocks == (("mlp_0", "states", "hidden"),)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert {len(row["tokens"]) for row in rows} == {4}
    assert {token < 9 for row in rows for token in row["tokens"]} == {True}


def test_rows_of_an_onnx_model_have_tokens(cli: Any, tmp_path: Path) -> None:
    save_decoder(tmp_path, "small.onnx")
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "tokens": [1, 2]}\n')
    words = ("init", "small.onnx", "--data", "rows.jsonl")
    assert cli(*words, cwd=tmp_path).code == 0
    accepted(cli, tmp_path / "contract.yaml")
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "text": "hello"}\n')
    ran = cli(*words, "--force", cwd=tmp_path)
    assert ran.code == 2
    assert "has `tokens`" in ran.stderr
