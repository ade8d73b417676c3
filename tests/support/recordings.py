"""Recordings of the tiny language model: sampled by one kernel, scored by another."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl_backends.empirical.sources.kernels.torch_kernel import TorchKernel
from kcdsl_backends.empirical.sources.rollouts.record import Rollout, Semantics, Side, TopLogs
from tests.support import planted_bugs

PROMPT, LENGTH, PROMPTS, GROUP = 12, 20, 16, 4
_AT = (6, 14, 22, 30)
"""The offset of prompts in the texts, many of which begin alike."""
Change = Callable[[Tensor], Tensor]
"""A function from logits [..., V] to those of another distribution."""
Program = tuple[str, tuple[tuple[str, Any], ...]]
"""An adapter and its numerics."""
FLOAT32: Program = ("torch.eager", (("compute", "float32"),))
BFLOAT16: Program = ("torch.eager", (("compute", "bfloat16"),))
FP8: Program = ("torch.eager", (("preset", "fp8-weights"),))


def unchanged(logits: Tensor) -> Tensor:
    """Return the distribution unchanged."""
    return logits


def at(temperature: float) -> Change:
    """Return the distribution at a temperature."""
    return lambda logits: logits / temperature


def nucleus(p: float) -> Change:
    """Return the distribution on the smallest set of tokens with a mass of at least p."""
    return lambda logits: planted_bugs.top_p(logits, p)


@cache
def program(which: Program) -> TorchKernel:
    """Return a kernel of the tiny model."""
    return planted_bugs.kernel(which[0], dict(which[1]))


@cache
def drawn(
    which: Program,
    law: Change,
    seed: int = 0,
    length: int = LENGTH,
    prompts: int = PROMPTS,
    group: int = GROUP,
) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return (prompt, tokens) of rollouts that a kernel samples from a law of its logits."""
    kernel = program(which)
    long = [
        r.tokens[at : at + PROMPT]
        for at in _AT
        for r in planted_bugs.prompts()
        if r.length >= at + PROMPT
    ]
    starts = list(dict.fromkeys(long))[:prompts]
    text = torch.tensor([start for _ in range(group) for start in starts])
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for _ in range(length):
            policy = torch.softmax(law(kernel.logits(text)[:, -1].double()), -1)
            uniform = torch.from_numpy(rng.random((len(text), 1)))
            sums = policy.cumsum(-1)
            token = torch.searchsorted(sums, uniform * sums[:, -1:], right=True)
            text = torch.cat([text, token.clamp(max=policy.shape[-1] - 1)], -1)
    return tuple((tuple(row[:PROMPT]), tuple(row[PROMPT:])) for row in text.tolist())


@cache
def _logits(which: Program, texts: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> Tensor:
    """Return a kernel's logits of every sampled token [N, T, V], before any law is applied."""
    before = len(texts[0][0])
    with torch.no_grad():
        logits = program(which).logits(torch.tensor([p + t for p, t in texts]))
    return logits[:, before - 1 : -1].double()


def side(
    which: Program,
    law: Change,
    texts: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    semantics: Semantics | None,
    top: int = 0,
) -> list[Side]:
    """Return a kernel's log-probabilities of sampled tokens under a law of its logits."""
    found = []
    with torch.no_grad():
        for start in range(0, len(texts), 64):
            part = tuple(texts[start : start + 64])
            logits = _logits(which, part)
            logs = torch.log_softmax(law(logits), -1)
            tokens = torch.tensor([t for _, t in part])
            own = logs.gather(-1, tokens[..., None])[..., 0]
            best = logs.sort(dim=-1, descending=True, stable=True) if top else None
            for i in range(len(part)):
                lists = None
                if best is not None:
                    lists = TopLogs(
                        best.indices[i, :, :top].numpy(), best.values[i, :, :top].numpy()
                    )
                found.append(Side(own[i].numpy(), semantics, lists))
    return found


RAW = Semantics("raw")


def rollouts(
    train: Program = FLOAT32,
    infer: Program = BFLOAT16,
    *,
    sampled: Change = unchanged,
    train_law: Change = unchanged,
    infer_law: Change | None = None,
    semantics: tuple[Semantics | None, Semantics | None] = (RAW, RAW),
    seed: int = 0,
    top: int = 0,
    length: int = LENGTH,
    prompts: int = PROMPTS,
    group: int = GROUP,
) -> tuple[Rollout, ...]:
    """Return rollouts that `infer` sampled from the law `sampled` of its logits.

    Each side's log-probabilities follow `train_law` and `infer_law`; the latter defaults to
    `sampled`. `semantics` is the declared meaning of the log-probabilities, true or false.
    """
    texts = drawn(infer, sampled, seed, length, prompts, group)
    own = side(infer, infer_law or sampled, texts, semantics[1], top)
    other = side(train, train_law, texts, semantics[0], top)
    return tuple(
        Rollout(
            f"r{i}", prompt, tokens, np.ones(len(tokens), dtype=bool), other[i], own[i],
            place=f"row {i + 1}",
        )
        for i, (prompt, tokens) in enumerate(texts)
    )  # fmt: skip


def with_logs(rollout: Rollout, which: str, logs: NDArray[np.float64]) -> Rollout:
    """Return a rollout with other log-probabilities of one side."""
    own = rollout.train if which == "train" else rollout.infer
    assert own is not None
    changed = replace(own, logs=logs)
    if which == "train":
        return replace(rollout, train=changed)
    return replace(rollout, infer=changed)


def padded(found: Sequence[Rollout], width: int, before: int, pad: int = 0) -> dict[str, Any]:
    """Return left-padded prompts and right-padded samples, with their columns."""
    count = len(found)
    batch: dict[str, Any] = {
        "prompts": np.full((count, before), pad),
        "responses": np.full((count, width), pad),
        "prompt_mask": np.zeros((count, before), dtype=np.int64),
        "real": np.zeros((count, width), dtype=np.int64),
        "mask": np.zeros((count, width), dtype=np.int64),
        "train": np.zeros((count, width)),
        "infer": np.zeros((count, width)),
    }
    for i, r in enumerate(found):
        p, n = len(r.prompt), len(r.tokens)
        batch["prompts"][i, before - p :] = r.prompt
        batch["prompt_mask"][i, before - p :] = 1
        batch["responses"][i, :n] = r.tokens
        batch["real"][i, :n] = 1
        batch["mask"][i, :n] = r.mask
        assert r.train is not None
        assert r.infer is not None
        batch["train"][i, :n] = r.train.logs
        batch["infer"][i, :n] = r.infer.logs
    return batch


def columns(found: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Return the columns of rollouts in the format `rows`, without padding."""
    return {
        "id": [r.key for r in found],
        "group": [str(r.prompt) for r in found],
        "prompt": [list(r.prompt) for r in found],
        "tokens": [list(r.tokens) for r in found],
        "mask": [[int(m) for m in r.mask] for r in found],
        "train_logs": [r.train.logs.tolist() for r in found if r.train is not None],
        "infer_logs": [r.infer.logs.tolist() for r in found if r.infer is not None],
    }


def trainer_columns(found: Sequence[Rollout], trainer: str) -> dict[str, list[Any]]:
    """Return the padded columns that verl or TRL store for rollouts."""
    width = max(len(r.tokens) for r in found) + 3
    batch = padded(found, width, max(len(r.prompt) for r in found) + 2)
    rows = {name: list(values) for name, values in batch.items()}
    if trainer == "verl":
        whole = np.concatenate([batch["prompt_mask"], batch["real"]], axis=1)
        return {
            "uid": [str(hash(r.prompt) % 10**8) for r in found],
            "prompts": rows["prompts"],
            "responses": rows["responses"],
            "attention_mask": list(whole),
            "response_mask": rows["mask"],
            "rollout_log_probs": rows["infer"],
            "old_log_probs": rows["train"],
        }
    return {
        "prompt_ids": rows["prompts"],
        "prompt_mask": rows["prompt_mask"],
        "completion_ids": rows["responses"],
        "completion_mask": rows["real"],
        "tool_mask": list(np.where(batch["real"] == 1, batch["mask"], 1)),
        "sampling_per_token_logps": rows["infer"],
        "old_per_token_logps": rows["train"],
    }


def write(path: Path, table: Mapping[str, Sequence[Any]]) -> None:
    """Write columns as JSONL or Parquet, by the suffix of the path."""
    if path.suffix == ".parquet":
        pq.write_table(pa.table({name: list(cells) for name, cells in table.items()}), path)
        return
    count = len(next(iter(table.values())))
    plain = {name: [_plain(cell) for cell in cells] for name, cells in table.items()}
    lines = (json.dumps({name: cells[i] for name, cells in plain.items()}) for i in range(count))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _plain(cell: Any) -> Any:
    return cell.tolist() if isinstance(cell, np.ndarray) else cell
