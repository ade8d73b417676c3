"""Readers of recordings: equal rollouts from every format, and refusals with a position."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from kcdsl.diagnostics.model import Refusal
from kcdsl_backends.empirical.sources.rollouts.layouts import FORMATS, mapped
from kcdsl_backends.empirical.sources.rollouts.reader import RecordedRollouts, assemble
from kcdsl_backends.empirical.sources.rollouts.record import Rollout, Semantics, Side
from kcdsl_backends.empirical.sources.rollouts.rows import read_rows
from tests.support import recordings

RAW = Semantics("raw")
DUMPS = Path(__file__).parents[2] / "support" / "dumps"


def rollouts() -> list[Rollout]:
    """Return three rollouts of different lengths, two of one prompt."""
    found = []
    for i, (prompt, tokens) in enumerate(
        [((5, 6, 7), (1, 2, 3)), ((5, 6, 7), (4, 2)), ((8,), (3,))]
    ):
        train = np.array([-0.5 - 0.1 * i - 0.01 * t for t in range(len(tokens))])
        mask = np.array([t != 1 for t in range(len(tokens))])
        found.append(
            Rollout(f"r{i}", prompt, tokens, mask, Side(train, RAW), Side(train + 0.01, RAW))
        )
    return found


def read(
    path: Path, format: str = "rows", vocabulary: int | None = None, **columns: str
) -> RecordedRollouts:
    return assemble(
        read_rows(path, path.name), mapped(format, columns), format, RAW, RAW, vocabulary
    )


def same(a: Rollout, b: Rollout) -> bool:
    """Return whether two rollouts have equal tokens, masks and log-probabilities."""
    assert a.train is not None
    assert a.infer is not None
    assert b.train is not None
    assert b.infer is not None
    return (
        (a.prompt, a.tokens, a.mask.tolist()) == (b.prompt, b.tokens, b.mask.tolist())
        and np.array_equal(a.train.logs, b.train.logs)
        and np.array_equal(a.infer.logs, b.infer.logs)
    )


# --- formats -------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("format", ["rows", "verl", "trl"])
def test_each_format_gives_equal_rollouts(tmp_path: Path, format: str, suffix: str) -> None:
    given = rollouts()
    table = (
        recordings.columns(given) if format == "rows" else recordings.trainer_columns(given, format)
    )
    path = tmp_path / f"dump{suffix}"
    recordings.write(path, table)
    found = read(path, format)
    assert all(same(a, b) for a, b in zip(given, found.rollouts, strict=True))
    assert [r.place.split()[0] for r in found.rollouts] == (
        ["line"] * 3 if suffix == ".jsonl" else ["row"] * 3
    )


@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_padded_batches_are_read_from_tensors(tmp_path: Path, trainer: str) -> None:
    given = rollouts()
    table = recordings.trainer_columns(given, trainer)
    table.pop("uid", None)
    tensors = {
        name: torch.tensor(np.array(cells)).to(
            torch.bfloat16 if name == "advantages" else torch.tensor(np.array(cells)).dtype
        )
        for name, cells in {**table, "advantages": [[1.5] * 6] * 3}.items()
    }
    path = tmp_path / "batch.safetensors"
    save_file(tensors, path)
    found = read(path, trainer)
    assert all(same(a, b) for a, b in zip(given, found.rollouts, strict=True))
    assert [r.arrays["advantages"].tolist() for r in found.rollouts] == [
        [1.5] * 3,
        [1.5] * 2,
        [1.5],
    ]


def test_renamed_columns_are_mapped_by_name(tmp_path: Path) -> None:
    table = recordings.columns(rollouts())
    table["own"] = table.pop("infer_logs")
    path = tmp_path / "rows.parquet"
    recordings.write(path, table)
    found = read(path, infer_logs="own")
    assert same(found.rollouts[1], rollouts()[1])
    assert "infer_logs" in found.roles


def test_missing_column_is_refused_with_the_existing_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    recordings.write(path, recordings.columns(rollouts()))
    with pytest.raises(Refusal) as refused:
        read(path, advantages="adv")
    found = refused.value.diagnostics[0]
    assert found.code.id == "KC667"
    assert "no column `adv` (advantages)" in found.message
    assert "infer_logs" in found.notes[0]


@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_dumps_of_texts_name_missing_columns(trainer: str) -> None:
    path = DUMPS / {"verl": "verl_step_3.jsonl", "trl": "completions_00003.parquet"}[trainer]
    with pytest.raises(Refusal) as refused:
        read(path, trainer)
    found = refused.value.diagnostics[0]
    assert found.code.id == "KC667"
    assert "no tokens and no log-probabilities" in found.message


@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_example_dumps_are_read(trainer: str) -> None:
    found = read(DUMPS / f"{trainer}_batch.parquet", trainer)
    assert len(found.rollouts) == 4
    assert all(r.train is not None and r.infer is not None for r in found.rollouts)
    assert len({r.unit for r in found.rollouts}) == 2
    tools = found.rollouts[0]
    assert tools.counted < len(tools.tokens)


def test_roles_of_formats_are_known() -> None:
    for roles in FORMATS.values():
        assert set(roles) <= set(FORMATS["rows"])


# --- refusals ------------------------------------------------------------------------------------

Change = Callable[[dict[str, list[Any]]], Any]


def _set(column: str, row: int, value: Any) -> Change:
    def change(table: dict[str, list[Any]]) -> None:
        table[column][row] = value

    return change


def _at(column: str, row: int, place: int, value: Any) -> Change:
    def change(table: dict[str, list[Any]]) -> None:
        table[column][row] = list(table[column][row])
        table[column][row][place] = value

    return change


MALFORMED: Mapping[str, tuple[str, Change, str]] = {
    "logs longer than tokens": (
        "KC664",
        _set("infer_logs", 1, [-1.0] * 3),
        "3 values for 2 tokens",
    ),
    "mask shorter": ("KC664", _set("mask", 0, [1, 1]), "2 values for 3 tokens"),
    "mask of other numbers": ("KC664", _set("mask", 0, [1, 2, 0]), "0 and 1 only"),
    "null cell": ("KC664", _set("train_logs", 2, None), "null"),
    "null inside": ("KC664", _at("train_logs", 1, 1, None), "null at position 1"),
    "NaN": ("KC664", _at("train_logs", 0, 2, math.nan), "nan at position 2"),
    "infinite": ("KC664", _at("infer_logs", 0, 2, math.inf), "inf at position 2"),
    "impossible token": ("KC664", _at("infer_logs", 0, 2, -math.inf), "probability 0"),
    "what engines write for it": ("KC664", _at("infer_logs", 0, 2, -9999.0), "probability 0"),
    "no softmax": ("KC664", _at("train_logs", 0, 2, -1e308), "-1e+308 at position 2 is no log"),
    "truth value": ("KC664", _at("train_logs", 0, 2, False), "the truth value false at position 2"),
    "truth value for an id": ("KC664", _at("tokens", 0, 0, True), "the truth value true"),
    "id beyond 64 bits": ("KC664", _at("tokens", 0, 0, 2**70), "numbers beyond 64 bits"),
    "probability above one": ("KC664", _at("infer_logs", 1, 0, 0.01), "0.01 at position 0"),
    "negative id": ("KC664", _at("tokens", 1, 0, -3), "-3 at position 0 is no id"),
    "id of no vocabulary": ("KC664", _at("tokens", 1, 0, 99), "99 at position 0 is no token id"),
    "id with a fraction": ("KC664", _at("prompt", 1, 0, 1.5), "1.5 at position 0"),
    "same id twice": ("KC621", _set("id", 2, "r0"), "'r0' was given in line 1"),
    "text for numbers": ("KC664", _set("train_logs", 1, ["a", "b"]), "something else than numbers"),
    "nested": ("KC664", _set("train_logs", 1, [[-1.0], [-1.0]]), "not 2-dimensional"),
    "number for a prompt": ("KC664", _set("prompt", 1, 5), "must be a list"),
    "truth value for tokens": ("KC664", _set("tokens", 1, True), "must be a list"),
    "ragged": ("KC664", _set("train_logs", 1, [[-1.0], [-1.0, -2.0]]), "differ in length"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_rows_are_refused_with_their_position(tmp_path: Path, name: str) -> None:
    code, change, message = MALFORMED[name]
    table = recordings.columns(rollouts())
    change(table)
    path = tmp_path / "rows.jsonl"
    recordings.write(path, table)
    with pytest.raises(Refusal) as refused:
        read(path, vocabulary=16)
    found = refused.value.diagnostics[0]
    assert found.code.id == code
    assert message in found.message
    assert found.message.startswith("rows.jsonl, line ")
    assert "column `" in found.message
    assert found.help


@pytest.mark.parametrize("name", ["NaN", "infinite", "null inside", "null cell", "negative id"])
def test_malformed_parquet_rows_are_refused_with_their_position(tmp_path: Path, name: str) -> None:
    code, change, message = MALFORMED[name]
    table = recordings.columns(rollouts())
    change(table)
    path = tmp_path / "rows.parquet"
    recordings.write(path, table)
    with pytest.raises(Refusal, match="row ") as refused:
        read(path)
    assert refused.value.diagnostics[0].code.id == code
    assert message in refused.value.diagnostics[0].message


def test_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    column = pa.array([[1, 2]])
    pq.write_table(pa.Table.from_arrays([column, column], names=["tokens", "tokens"]), path)
    with pytest.raises(Refusal, match="two columns have one name"):
        read(path)


@pytest.mark.parametrize(
    "ids", [[0, [1, 2]], [2**64 - 1], [2**70], [-1], [0.5], [None], ["a"], [[0]], 3, None]
)
def test_kept_tokens_that_are_no_ids_are_refused(tmp_path: Path, ids: Any) -> None:
    table = recordings.columns(rollouts())
    kept = [[[token] for token in tokens] for tokens in table["tokens"]]
    path = tmp_path / "rows.jsonl"
    recordings.write(path, {**table, "infer_kept": kept})
    assert all("infer_kept" in rollout.arrays for rollout in read(path).rollouts)
    kept[1][0] = ids
    recordings.write(path, {**table, "infer_kept": kept})
    with pytest.raises(
        Refusal, match=r"line 2, column `infer_kept`: must hold a list of token ids"
    ):
        read(path)


def test_lone_surrogate_in_a_row_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    recordings.write(path, {**recordings.columns(rollouts()), "train_version": ["\ud800"] * 3})
    with pytest.raises(Refusal, match=r"rows\.jsonl, line 1: .*half a surrogate pair"):
        read(path)


def test_masked_token_may_have_nan(tmp_path: Path) -> None:
    """Trainers store NaN at tokens of tools, which are masked."""
    table = recordings.columns(rollouts())
    table["infer_logs"][0][1] = math.nan
    path = tmp_path / "rows.jsonl"
    recordings.write(path, table)
    found = read(path)
    delta = found.rollouts[0].delta()
    assert delta is not None
    assert np.isfinite(delta).all()


def test_prompt_counted_as_sampled_is_refused(tmp_path: Path) -> None:
    given = rollouts()
    table = recordings.columns(given)
    for i, r in enumerate(given):
        table["tokens"][i] = [*r.prompt, *r.tokens]
        for column in ("train_logs", "infer_logs"):
            table[column][i] = [-0.1] * len(r.prompt) + table[column][i]
        table["mask"][i] = [1] * len(r.prompt) + table["mask"][i]
    path = tmp_path / "rows.jsonl"
    table["prompt"][2], table["tokens"][2] = [8, 9], [8, 9, 3]
    table["train_logs"][2] = table["infer_logs"][2] = [-0.1] * 3
    table["mask"][2] = [1] * 3
    recordings.write(path, table)
    with pytest.raises(Refusal, match="begin with the prompt"):
        read(path)
    table["mask"] = [[0] * len(p) + [1] * (len(t) - len(p)) for p, t in
                     zip(table["prompt"], table["tokens"], strict=True)]  # fmt: skip
    recordings.write(path, table)
    assert [r.counted for r in read(path).rollouts] == [3, 2, 1]


@pytest.mark.parametrize(("log", "refused"), [(-3.0, True), (-0.1, False)])
def test_improbable_repetition_of_the_prompt_is_refused(
    tmp_path: Path, log: float, refused: bool
) -> None:
    """A text that repeats its prompt occurs now and then; twelve unlikely tokens do not."""
    rows = [
        {"prompt": [*range(12)], "tokens": [*range(12), 3], "infer_logs": [log] * 13},
        {"prompt": [9, 9, 8], "tokens": [1, 2], "infer_logs": [-1.0, -2.0]},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    if not refused:
        assert len(read(path).rollouts) == 2
        return
    with pytest.raises(Refusal, match="begin with the prompt"):
        read(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "has no rows"),
        ("cut.jsonl", b'{"id": "a", "tok', "line 1: not a JSON object"),
        (
            "mark.jsonl",
            b'\xef\xbb\xbf{"id": "a"}\n',
            "line 1: the file begins with a byte order mark",
        ),
        ("list.jsonl", b"[1, 2]\n", "a row is a JSON object, not list"),
        ("twice.jsonl", b'{"id": "a", "id": "b"}\n', "'id' is given twice"),
        ("bytes.jsonl", b'{"id": "\xff"}\n', "cannot be read"),
        ("cut.parquet", b"PAR1", "cannot be read"),
        ("cut.safetensors", b"\x00", "cannot be read"),
        ("batch.pkl", b"\x80\x04.", "is a pickle, which may run any code"),
        ("rows.csv", b"a,b\n", "recordings are .jsonl"),
    ],
)
def test_truncated_files_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(Refusal) as refused:
        read_rows(path, name)
    found = refused.value.diagnostics[0]
    assert message in found.message
    assert found.help


def test_parquet_file_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "none.parquet"
    pq.write_table(pa.table({"tokens": pa.array([], pa.list_(pa.int64()))}), path)
    with pytest.raises(Refusal, match="has no rows"):
        read_rows(path, path.name)


@pytest.mark.parametrize("shape", [[0, 2**70], [2**40, 0]])
def test_empty_tensors_are_refused(tmp_path: Path, shape: list[int]) -> None:
    path = tmp_path / "batch.safetensors"
    stored = {"tokens": {"dtype": "I64", "shape": shape, "data_offsets": [0, 0]}}
    header = json.dumps(stored).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(Refusal, match="cannot be read"):
        read_rows(path, path.name)


def test_tensors_with_different_row_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "batch.safetensors"
    save_file({"responses": torch.zeros(2, 3), "response_mask": torch.zeros(3, 3)}, path)
    with pytest.raises(Refusal, match="different numbers of rows: response_mask has 3"):
        read_rows(path, path.name)


def test_padding_side_is_respected(tmp_path: Path) -> None:
    table = recordings.trainer_columns(rollouts(), "verl")
    path = tmp_path / "batch.jsonl"
    whole = np.array(table["attention_mask"])
    whole[1, 5:8] = [0, 1, 1]
    recordings.write(path, {**table, "attention_mask": list(whole)})
    with pytest.raises(Refusal, match="padding in front of sampled tokens"):
        read(path, "verl")
    whole = np.array(table["attention_mask"])
    whole[0, 2:5] = [1, 0, 1]
    recordings.write(path, {**table, "attention_mask": list(whole)})
    with pytest.raises(Refusal, match="padding behind a prompt"):
        read(path, "verl")


@pytest.mark.parametrize("trainer", ["verl", "trl"])
def test_padding_must_be_distinguishable_from_sampled_tokens(tmp_path: Path, trainer: str) -> None:
    """Padding has log-probabilities of 0 on both sides, which is a zero drift."""
    table = recordings.trainer_columns(rollouts(), trainer)
    masks = {"verl": ("attention_mask", "response_mask"), "trl": ("completion_mask",)}[trainer]
    table = {name: cells for name, cells in table.items() if name not in masks}
    recordings.write(tmp_path / "batch.jsonl", table)
    with pytest.raises(Refusal, match="padding cannot be told") as refused:
        read(tmp_path / "batch.jsonl", trainer)
    assert all(name in str(refused.value) for name in masks)


def test_empty_lines_keep_line_numbers(tmp_path: Path) -> None:
    rows = [json.dumps({"id": i, "tokens": [1], "infer_logs": [-0.1]}) for i in range(2)]
    path = tmp_path / "rows.jsonl"
    path.write_text(f"\n{rows[0]}\n\n{rows[1]}\n")
    assert [r.place for r in read(path).rollouts] == ["line 2", "line 4"]
