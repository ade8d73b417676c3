"""The columns of recordings by role and format, and the split of whole sequences into prompt and
sampled tokens.

Users override the columns of single roles. Formats with prompt and sampled tokens in one sequence
are read row by row: each function returns the columns of the sampled tokens, without padding, and
the prompt as a separate column. Layouts were read from the sources of NeMo-RL 7ea279a, prime-rl
559b447, SkyRL a956457 and slime 624b824.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.kernels import ROLES
from kcdsl_backends.empirical.sources.rollouts.rows import FileRows, read_rows

# --- columns -------------------------------------------------------------------------------------


_OWN = {role: role for role in ROLES}
_VERL = {
    "group": "uid",
    "prompt": "prompts",
    "tokens": "responses",
    "whole_attention": "attention_mask",
    "mask": "response_mask",
    "infer_logs": "rollout_log_probs",
    "train_logs": "old_log_probs",
    "advantages": "advantages",
    "infer_reward": "token_level_scores",
    "infer_version": "min_global_steps",
    "infer_version_last": "max_global_steps",
    "train_routes": "train_routed_experts",
    "infer_routes": "routed_experts",
}
_TRL = {
    "prompt": "prompt_ids",
    "prompt_attention": "prompt_mask",
    "tokens": "completion_ids",
    "attention": "completion_mask",
    "mask": "tool_mask",
    "infer_logs": "sampling_per_token_logps",
    "train_logs": "old_per_token_logps",
    "advantages": "advantages",
    "infer_reward": "rewards",
}
_CUT_PROMPT = {"prompt": "prompt, cut from the sequence"}
_NEMO_RL = {
    **_CUT_PROMPT,
    "tokens": "token_ids",
    "mask": "token_loss_mask",
    "infer_logs": "generation_logprobs",
    "train_logs": "prev_logprobs",
    "advantages": "advantages",
    "infer_reward": "rewards",
}
_PRIME_RL = {
    **_CUT_PROMPT,
    "tokens": "token_ids",
    "mask": "loss_mask",
    "infer_logs": "inference_logprobs",
    "train_logs": "trainer_logprobs",
    "advantages": "advantages",
}
_SKYRL = {
    **_CUT_PROMPT,
    "tokens": "sequences",
    "mask": "loss_mask",
    "infer_logs": "rollout_logprobs",
    "train_logs": "action_log_probs",
    "advantages": "advantages",
}
_SLIME = {
    **_CUT_PROMPT,
    "group": "group_index",
    "tokens": "tokens",
    "mask": "loss_mask",
    "infer_logs": "rollout_log_probs",
    "train_logs": "log_probs",
    "advantages": "advantages",
    "infer_kept": "rollout_top_p_token_ids",
}
FORMATS: Mapping[str, Mapping[str, str]] = {
    "rows": _OWN,
    "verl": _VERL,
    "trl": _TRL,
    "nemo-rl": _NEMO_RL,
    "prime-rl": _PRIME_RL,
    "skyrl": _SKYRL,
    "slime": _SLIME,
}
"""The column of each role by format. `rows` is ours: columns are named as roles."""

PADDED: Mapping[str, tuple[str, ...]] = {
    "verl": ("whole_attention", "attention", "mask"),
    "trl": ("attention", "whole_attention"),
}
"""Formats that pad sampled tokens, with the roles of which one is required to find the padding: the
mask of TRL counts it."""

TEXT_DUMPS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "verl": (("input", "output", "score"), "`trainer.rollout_data_dir` hold texts and scores"),
    "trl": (("prompt", "completion"), "`log_completions` hold texts, rewards and advantages"),
}
"""Dumps of texts, recognised by their columns, with a description of their content."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The columns of a recording by role, and the roles that are required."""

    columns: Mapping[str, str]
    demanded: frozenset[str]
    """Roles for which the contract names a column; a missing one is an error."""


def mapped(format: str, overrides: Mapping[str, str]) -> Mapped:
    """Return the columns of a format, with the user's overrides. Columns of padded formats that
    the trainer does not write, such as `infer_kept`, are named as their roles."""
    own = {role: role for role in ROLES if role.startswith(("train_", "infer_"))}
    added = own if format in PADDED else {}
    return Mapped({**added, **FORMATS[format], **overrides}, frozenset(overrides))


OF_TEXT_DUMPS = "write the batch itself, with its tokens: `kcdsl explain rollouts`"


def text_dump(format: str, present: Collection[str]) -> str | None:
    """Return why a file of these columns is a dump of texts; None if it is not."""
    known = TEXT_DUMPS.get(format)
    if known is None or not set(known[0]) <= set(present):
        return None
    return f"the files of {known[1]} only, no tokens and no log-probabilities"


def recognised(
    path: Path,
) -> tuple[str, frozenset[str], tuple[dict[str, Any], ...]] | None:
    """Return the format of a recording, the roles of its columns, and the texts of each row; None
    if no format has sampled tokens with log-probabilities. Refuse a file as `read_rows`."""
    rows = read_rows(path, path.name)
    best = max(FORMATS, key=lambda name: len(_roles(name, rows)))
    roles = _roles(best, rows)
    if "tokens" not in roles or not roles & {"train_logs", "infer_logs"}:
        for name in TEXT_DUMPS:
            why = text_dump(name, rows.columns)
            if why is not None:
                raise refuse(
                    codes.ROLLOUT_COLUMN,
                    f"{rows.name}: {why}",
                    help=OF_TEXT_DUMPS,
                )
        return None
    plain = [n for n in rows.columns if n not in FORMATS[best].values()]
    texts = [n for n in plain if all(isinstance(cell, str) for cell in rows.columns[n])]
    fields = tuple({n: rows.columns[n][i] for n in texts} for i in range(rows.count))
    return best, roles, fields


def _roles(format: str, rows: FileRows) -> frozenset[str]:
    found = frozenset(role for role, name in FORMATS[format].items() if name in rows.columns)
    return found | {"prompt"} if "tokens" in found and format in _LAYOUTS else found


# --- whole sequences -----------------------------------------------------------------------------


_CUT = ("mask", "train_logs", "infer_logs", "advantages")
_Row = Callable[[FileRows, int, Mapping[str, str]], dict[str, Any]]


def cut(rows: FileRows, format: str, mapped: Mapped) -> FileRows:
    """Return the rows of a format of whole sequences with prompt and sampled tokens separated.

    Rows of other formats stay as they are. Raises Refusal for columns that the layout needs and the
    file lacks, and for lengths that do not fit.
    """
    if format not in _LAYOUTS:
        return rows
    if format in _RENAMED:
        rows = _RENAMED[format](rows)
    needed, read = _LAYOUTS[format]
    names = mapped.columns
    for name in (names["tokens"], *needed):
        if name not in rows.columns:
            raise refuse(
                codes.ROLLOUT_COLUMN,
                f"{rows.name} has no column `{name}`, which rows of {format} have",
                notes=(f"it has {', '.join(sorted(rows.columns)) or 'none'}",),
                help="`kcdsl explain rollouts` names the files that hold log-probabilities",
            )
    found = [read(rows, row, names) for row in range(rows.count)]
    columns: dict[str, Sequence[Any]] = dict(rows.columns)
    for name in dict.fromkeys(key for cells in found for key in cells):
        columns[name] = [cells.get(name) for cells in found]
    return replace(rows, columns=columns)


def _sliced(
    rows: FileRows, row: int, names: Mapping[str, str], start: int, end: int, width: int
) -> dict[str, Any]:
    """Return the columns of tokens from start to end; each must have `width` values."""
    found = {}
    for role in _CUT:
        name = names.get(role, "")
        if name not in rows.columns:
            continue
        if role == "advantages" and rows.single(row, name):
            continue
        cell = rows.listed(row, name)
        if len(cell) != width:
            raise rows.refusal(row, name, f"{len(cell)} values for {width} tokens")
        found[name] = cell[start:end]
    return found


def _prompt_and_tokens(
    names: Mapping[str, str], ids: Sequence[int] | NDArray[Any], start: int
) -> dict[str, Any]:
    return {names["prompt"]: list(ids[:start]), names["tokens"]: list(ids[start:])}


def _leading_uncounted(flags: NDArray[np.bool_]) -> int:
    """Return the number of tokens before the first that counts."""
    first = np.flatnonzero(flags)
    return int(first[0]) if first.size else flags.size


# --- NeMo-RL: train_data_step{N}.jsonl -----------------------------------------------------------


def _unwrapped(rows: FileRows) -> FileRows:
    """Take each cell out of its list of one: a line is a batch of one row."""
    columns: dict[str, Sequence[Any]] = {}
    for name, cells in rows.columns.items():
        found = []
        for row, cell in enumerate(cells):
            if name != "idx" and cell is not None:
                if not isinstance(cell, list) or len(cell) != 1:
                    raise rows.refusal(row, name, "no list of one, which NeMo-RL writes")
                cell = cell[0]
            found.append(cell)
        columns[name] = found
    if "filtered_rewards" in columns:  # then `rewards` are those of rows before the filter
        columns["rewards"] = columns.pop("filtered_rewards")
    return replace(rows, columns=columns)


def _nemo_rl(rows: FileRows, row: int, names: Mapping[str, str]) -> dict[str, Any]:
    whole = rows.listed(row, names["tokens"])
    length = int(rows.whole(row, "input_lengths", 0))
    flags = rows.flags(row, names["mask"])
    if length > len(whole) or flags.size != len(whole):
        what = f"{len(whole)} tokens for a length of {length} and a mask of {flags.size}"
        raise rows.refusal(row, names["tokens"], what)
    start = min(_leading_uncounted(flags), length)
    found = _sliced(rows, row, names, start, length, len(whole))
    counts = True
    if "sample_loss_mask" in rows.columns:
        stated = rows.cell(row, "sample_loss_mask")
        if stated not in (0, 1):
            raise rows.refusal(row, "sample_loss_mask", "must hold 0 or 1")
        counts = stated == 1
    mask = flags[start:length] if counts else np.zeros(length - start, dtype=bool)
    return {**found, **_prompt_and_tokens(names, whole[:length], start), names["mask"]: mask}


# --- prime-rl: token_exports/step_{N}/rank_{R}.jsonl ---------------------------------------------


def _prime_rl(rows: FileRows, row: int, names: Mapping[str, str]) -> dict[str, Any]:
    whole = rows.listed(row, names["tokens"])
    flags = rows.flags(row, names["mask"])
    if flags.size != len(whole):
        raise rows.refusal(row, names["mask"], f"{flags.size} values for {len(whole)} tokens")
    start = _leading_uncounted(flags)
    found = _sliced(rows, row, names, start, len(whole), len(whole))
    for role in ("train_logs", "infer_logs"):  # null stands for values that are not finite
        if names[role] in found:
            found[names[role]] = [math.nan if v is None else v for v in found[names[role]]]
    weights: Sequence[Any] | NDArray[Any] = ()
    if "rl_weights" in rows.columns and rows.columns["rl_weights"][row] is not None:
        weights = rows.listed(row, "rl_weights")
        if len(weights) != len(whole):
            what = f"{len(weights)} values for {len(whole)} tokens"
            raise rows.refusal(row, "rl_weights", what)
        if not all(w is None or isinstance(w, int | float | np.number) for w in weights):
            raise rows.refusal(row, "rl_weights", "holds something else than numbers")
    mask = flags[start:]
    if any(w is not None for w in weights):
        # tokens of other losses were not sampled by the inference kernel
        mask = mask & np.array([w is not None and w != 0 for w in weights[start:]], dtype=bool)
    return {**found, **_prompt_and_tokens(names, whole, start), names["mask"]: mask}


# --- SkyRL: columns of TrainingInputBatch --------------------------------------------------------


def _skyrl(rows: FileRows, row: int, names: Mapping[str, str]) -> dict[str, Any]:
    whole = np.asarray(rows.whole(row, names["tokens"], 1))
    attended, drawn = rows.flags(row, "attention_mask"), rows.flags(row, "response_mask")
    count = int(drawn.sum())
    ordered = all(not bool((flags[:-1] & ~flags[1:]).any()) for flags in (attended, drawn))
    if attended.size != whole.size or not ordered or count > int(attended.sum()):
        what = "padding stands in front of a sequence, and sampled tokens at its end"
        raise rows.refusal(row, "attention_mask", f"does not fit `{names['tokens']}`: {what}")
    found = _sliced(rows, row, names, drawn.size - count, drawn.size, drawn.size)
    ids = whole[attended]
    return {**found, **_prompt_and_tokens(names, ids.tolist(), ids.size - count)}


# --- slime: samples of debug dumps ---------------------------------------------------------------


_SINGULAR = {"loss_masks": "loss_mask", "response_lengths": "response_length"}


def _as_samples(rows: FileRows) -> FileRows:
    """Rename columns of the training dump to those of the rollout dump."""
    columns = dict(rows.columns)
    for name, other in _SINGULAR.items():
        if name in columns and other not in columns:
            columns[other] = columns.pop(name)
    return replace(rows, columns=columns)


def _slime(rows: FileRows, row: int, names: Mapping[str, str]) -> dict[str, Any]:
    whole = rows.listed(row, names["tokens"])
    length = int(rows.whole(row, "response_length", 0))
    if length > len(whole):
        raise rows.refusal(row, "response_length", f"{length} of {len(whole)} tokens")
    absent = {
        name: cells[row]
        for role in _CUT
        if (name := names.get(role, "")) in rows.columns
        and (cells := rows.columns[name])[row] is None
    }
    if names["mask"] in absent:  # no mask: all count
        mask: Any = np.ones(length, dtype=bool)
        rest = {role: name for role, name in names.items() if role != "mask"}
        found = _sliced(rows, row, rest, 0, length, length)
    else:
        found = _sliced(rows, row, names, 0, length, length)
        mask = found.get(names["mask"], np.ones(length, dtype=bool))
    found |= _kept(rows, row, names["infer_kept"], length)
    if "remove_sample" in rows.columns and rows.columns["remove_sample"][row] is True:
        mask = np.zeros(length, dtype=bool)
    return {**found, **_prompt_and_tokens(names, whole, len(whole) - length), names["mask"]: mask}


def _kept(rows: FileRows, row: int, name: str, length: int) -> dict[str, Any]:
    """Return the kept ids of each token: flat in the dump, with offsets [length + 1]."""
    offsets = "rollout_top_p_token_offsets"
    if name not in rows.columns or offsets not in rows.columns:
        return {}
    ids, ends = rows.whole(row, name, 1), rows.whole(row, offsets, 1)
    if ends.size != length + 1 or ends[0] != 0 or ends[-1] != ids.size or (np.diff(ends) < 0).any():
        raise rows.refusal(row, offsets, f"does not cut {ids.size} ids for {length} tokens")
    return {name: np.split(ids, ends[1:-1]) if length else []}


_LAYOUTS: Mapping[str, tuple[tuple[str, ...], _Row]] = {
    "nemo-rl": (("input_lengths", "token_loss_mask"), _nemo_rl),
    "prime-rl": (("loss_mask",), _prime_rl),
    "skyrl": (("attention_mask", "response_mask"), _skyrl),
    "slime": (("response_length",), _slime),
}
_RENAMED: Mapping[str, Callable[[FileRows], FileRows]] = {
    "nemo-rl": _unwrapped,
    "slime": _as_samples,
}
