"""Files of NeMo-RL, prime-rl, SkyRL and slime in their published layouts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kcdsl.diagnostics import Refusal
from kcdsl_backends.empirical.sources.rollouts.layouts import mapped
from kcdsl_backends.empirical.sources.rollouts.reader import assemble
from kcdsl_backends.empirical.sources.rollouts.record import Rollout, Semantics
from kcdsl_backends.empirical.sources.rollouts.rows import read_rows

RAW = Semantics("raw")
ROWS: tuple[dict[str, Any], ...] = (
    {"prompt": [5, 6], "tokens": [1, 2, 9, 4], "mask": [1, 1, 0, 1],
     "train": [-0.5, -1.25, -3.0, -2.0], "infer": [-0.5, -1.0, 0.0, -2.25], "adv": 0.5},
    {"prompt": [5, 6, 7], "tokens": [3, 1], "mask": [1, 1],
     "train": [-0.75, -0.25], "infer": [-1.0, -0.25], "adv": -0.5},
)  # fmt: skip


def _padded(values: Sequence[Any], width: int, fill: Any = 0) -> list[Any]:
    return [*values, *[fill] * (width - len(values))]


def nemo_rl(row: Mapping[str, Any], number: int = 0, **more: Any) -> dict[str, Any]:
    """Return a line of train_data_step{N}.jsonl: each value in a list of one, right-padded."""
    before, n, width = len(row["prompt"]), len(row["prompt"]) + len(row["tokens"]), 8
    spread = {name: _padded([0] * before + row[name], width) for name in ("mask", "train", "infer")}
    return {
        "content": ["text"],
        "rewards": [1.0],
        "input_lengths": [n],
        "token_ids": [_padded(row["prompt"] + row["tokens"], width, 151643)],
        "token_loss_mask": [spread["mask"]],
        "sample_loss_mask": [1.0],
        "advantages": [[row["adv"]] * width],
        "generation_logprobs": [spread["infer"]],
        "prev_logprobs": [spread["train"]],
        "idx": number,
        **more,
    }


def prime_rl(row: Mapping[str, Any], number: int = 0, **more: Any) -> dict[str, Any]:
    """Return a line of token_exports/step_{N}/rank_{R}.jsonl."""
    before = [0.0] * len(row["prompt"])
    ids = row["prompt"] + row["tokens"]
    nothing = [None] * len(ids)
    return {
        "schema_version": 1, "step": 3, "rank": 0, "micro_step": 0,
        "micro_sequence_idx": number, "export_sequence_idx": number, "env_name": "gsm8k",
        "token_ids": ids,
        "position_ids": list(range(len(ids))),
        "loss_mask": [False] * len(before) + [bool(m) for m in row["mask"]],
        "advantages": [row["adv"]] * len(ids),
        "inference_logprobs": before + row["infer"],
        "trainer_logprobs": [-11.9, *before[1:]] + row["train"],
        "entropy": [0.1] * len(ids),
        "mismatch_kl": nothing, "log_importance_ratio": nothing, "importance_ratio": nothing,
        "prob_delta": nothing, "is_masked": nothing, "is_masked_high": nothing,
        "is_masked_low": nothing, "rl_weights": nothing, "ce_weights": nothing,
        "ref_kl_weights": nothing,
        **more,
    }  # fmt: skip


def skyrl(row: Mapping[str, Any], number: int = 0, **more: Any) -> dict[str, Any]:
    """Return a row of TrainingInputBatch: left-padded, with sampled tokens at the end."""
    ids, wide, drawn = row["prompt"] + row["tokens"], 7, 5
    front = [0] * (drawn - len(row["tokens"]))
    return {
        "sequences": [151643] * (wide - len(ids)) + ids,
        "attention_mask": [0] * (wide - len(ids)) + [1] * len(ids),
        "response_mask": front + [1] * len(row["tokens"]),
        "loss_mask": [float(m) for m in front + row["mask"]],
        "rollout_logprobs": [0.0 * f for f in front] + row["infer"],
        "action_log_probs": [-9.0 for _ in front] + row["train"],
        "advantages": [0.0 for _ in front] + [row["adv"]] * len(row["tokens"]),
        **more,
    }


def slime(row: Mapping[str, Any], number: int = 0, **more: Any) -> dict[str, Any]:
    """Return a sample of the training dump: plural names, tokens of prompt and response."""
    return {
        "data_parallel_rank": 0, "sample_index": number, "rollout_position": number,
        "tokens": row["prompt"] + row["tokens"],
        "response_lengths": len(row["tokens"]), "rewards": 1.0, "truncated": 0,
        "loss_masks": row["mask"], "rollout_log_probs": row["infer"], "log_probs": row["train"],
        "advantages": [row["adv"]] * len(row["tokens"]),
        **more,
    }  # fmt: skip


WRITERS = {"nemo-rl": nemo_rl, "prime-rl": prime_rl, "skyrl": skyrl, "slime": slime}


def _read(folder: Path, format: str, lines: Sequence[Mapping[str, Any]]) -> tuple[Rollout, ...]:
    path = folder / "batch.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    rows = read_rows(path, path.name)
    return assemble(rows, mapped(format, {}), format, RAW, RAW, 200_000).rollouts


@pytest.mark.parametrize("format", WRITERS)
def test_published_layouts_are_read(tmp_path: Path, format: str) -> None:
    lines = [WRITERS[format](row, i) for i, row in enumerate(ROWS)]
    for found, row in zip(_read(tmp_path, format, lines), ROWS, strict=True):
        assert (list(found.prompt), list(found.tokens)) == (row["prompt"], row["tokens"])
        assert found.mask.tolist() == [bool(m) for m in row["mask"]]
        assert found.train is not None
        assert found.infer is not None
        counted = found.mask
        assert found.train.logs[counted].tolist() == np.array(row["train"])[counted].tolist()
        assert found.infer.logs[counted].tolist() == np.array(row["infer"])[counted].tolist()
        assert set(found.arrays["advantages"].tolist()) == {row["adv"]}


def test_skyrl_batch_is_read_from_parquet(tmp_path: Path) -> None:
    columns = {name: [skyrl(row)[name] for row in ROWS] for name in skyrl(ROWS[0])}
    pq.write_table(pa.table(columns), tmp_path / "batch.parquet")
    rows = read_rows(tmp_path / "batch.parquet", "batch.parquet")
    found = assemble(rows, mapped("skyrl", {}), "skyrl", RAW, RAW).rollouts
    assert [list(r.tokens) for r in found] == [row["tokens"] for row in ROWS]


def test_tokens_masked_by_a_trainer_do_not_count(tmp_path: Path) -> None:
    (dropped,) = _read(tmp_path, "nemo-rl", [nemo_rl(ROWS[0], sample_loss_mask=[0.0])])
    assert dropped.counted == 0
    (removed,) = _read(tmp_path, "slime", [slime(ROWS[0], remove_sample=True)])
    assert removed.counted == 0
    (every,) = _read(tmp_path, "slime", [slime(ROWS[1], loss_masks=None)])
    assert every.counted == 2
    weights = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0]
    (mixed,) = _read(tmp_path, "prime-rl", [prime_rl(ROWS[0], rl_weights=weights)])
    assert mixed.mask.tolist() == [True, False, False, True]
    filtered = nemo_rl(ROWS[0], rewards=[0.0], filtered_rewards=[1.0])
    assert _read(tmp_path, "nemo-rl", [filtered])[0].numbers["infer_reward"] == 1.0


@pytest.mark.parametrize(
    ("format", "line", "word"),
    [
        ("nemo-rl", nemo_rl(ROWS[0], token_ids=[5, 6, 1]), "no list of one"),
        ("nemo-rl", nemo_rl(ROWS[0], input_lengths=[9]), "for a length of 9"),
        ("nemo-rl", nemo_rl(ROWS[0], prev_logprobs=[[0.0]]), "1 values for 8 tokens"),
        ("nemo-rl", nemo_rl(ROWS[0], input_lengths=[1.5]), "1.5 is no whole number"),
        ("nemo-rl", nemo_rl(ROWS[0], token_ids=[5]), "must be a list"),
        ("nemo-rl", nemo_rl(ROWS[0], prev_logprobs=[-1.0]), "must be a list"),
        ("nemo-rl", nemo_rl(ROWS[0], sample_loss_mask=[0.5]), "0 or 1"),
        ("nemo-rl", {"content": ["a"], "rewards": [1.0], "idx": 0}, "no column `token_ids`"),
        ("prime-rl", prime_rl(ROWS[1], trainer_logprobs=[0.0] * 3 + [None, -0.25]), "nan"),
        ("prime-rl", prime_rl(ROWS[1], loss_mask=[True]), "1 values for 5 tokens"),
        ("prime-rl", prime_rl(ROWS[1], rl_weights=[1.0]), "1 values for 5 tokens"),
        ("prime-rl", prime_rl(ROWS[1], rl_weights=1.0), "must be a list"),
        ("prime-rl", prime_rl(ROWS[1], rl_weights=["1"] * 5), "something else than numbers"),
        ("skyrl", skyrl(ROWS[0], attention_mask=[1, 1, 1, 1, 1, 1, 0]), "in front of a sequence"),
        ("slime", slime(ROWS[0], response_lengths=7), "7 of 6 tokens"),
        ("slime", slime(ROWS[0], response_lengths=3.5), "3.5 is no whole number"),
        ("slime", slime(ROWS[0], tokens=5), "must be a list"),
        ("slime", slime(ROWS[0], log_probs=[-1.0]), "1 values for 4 tokens"),
        ("slime", slime(ROWS[0], log_probs=None), "null"),
    ],
)
def test_rows_of_another_layout_are_refused(
    tmp_path: Path, format: str, line: Mapping[str, Any], word: str
) -> None:
    with pytest.raises(Refusal) as error:
        _read(tmp_path, format, [line])
    assert word in str(error.value)


@pytest.mark.parametrize("name", ["global_step_3_training_input.pkl", "3.pt"])
def test_pickles_of_trainers_are_refused_with_help(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04cos\nsystem\n")
    with pytest.raises(Refusal) as error:
        read_rows(tmp_path / name, name)
    (told,) = error.value.diagnostics
    assert "is a pickle" in told.message
    assert "`kcdsl explain rollouts` has the lines for verl, SkyRL and slime" in (told.help or "")


def test_candidate_sets_of_slime_are_split_by_offsets(tmp_path: Path) -> None:
    kept: dict[str, Any] = {
        "rollout_top_p_token_ids": [1, 8, 2, 4, 7],
        "rollout_top_p_token_offsets": [0, 2, 3, 3, 5],
    }
    (found,) = _read(tmp_path, "slime", [slime(ROWS[0], **kept)])
    assert found.arrays["infer_kept"].tolist() == [1, 8, 2, 4, 7]
    assert found.arrays["infer_kept_ends"].tolist() == [2, 3, 3, 5]
    with pytest.raises(Refusal, match="does not cut 5 ids for 4 tokens"):
        _read(tmp_path, "slime", [slime(ROWS[0], **kept | {"rollout_top_p_token_offsets": [0, 5]})])


def test_a_padded_batch_may_have_columns_of_its_own(tmp_path: Path) -> None:
    row = {
        "prompts": [0, 5], "responses": [1, 2, 0], "attention_mask": [0, 1, 1, 1, 0],
        "response_mask": [1, 1, 0], "rollout_log_probs": [-0.5, -1.0, 0.0],
        "old_log_probs": [-0.5, -1.25, 0.0], "infer_kept": [[1, 8], [2], []],
    }  # fmt: skip
    (found,) = _read(tmp_path, "verl", [row])
    assert found.arrays["infer_kept"].tolist() == [1, 8, 2]
    assert found.arrays["infer_kept_ends"].tolist() == [2, 3]
