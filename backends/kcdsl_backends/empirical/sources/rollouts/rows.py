"""A recording as columns of cells: which column plays which role, and how a cell is read.

Whatever is not what its role asks for is refused with its file, row and column; nothing is
repaired, nothing is filled in. Users override the columns of single roles.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.codes import Code
from kcdsl.diagnostics.model import Refusal
from kcdsl.ir.kernels import ROLES


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a file: `columns` hold one cell per row, None for null."""

    name: str
    sha256: str
    count: int
    columns: Mapping[str, Sequence[Any]]
    word: str = "row"
    """How a row is called: "line" where people count lines."""
    numbers: Sequence[int] | None = None
    """The number of each row as people count, where it is not 1, 2, 3."""

    def number(self, row: int) -> int:
        """Return the number of a row as people count."""
        return row + 1 if self.numbers is None else self.numbers[row]

    def place(self, row: int) -> str:
        """Return where a row stands, such as "rollouts.jsonl, line 7"."""
        return f"{self.name}, {self.word} {self.number(row)}"

    def refusal(
        self, row: int, column: str, what: str, help: str | None = None, code: Code | None = None
    ) -> Refusal:
        """Return the refusal of one cell."""
        return refuse(
            code or codes.MALFORMED_ROLLOUT,
            f"{self.place(row)}, column `{column}`: {what}",
            help=help or "mend the row, or leave it out of the recording",
        )

    def cell(self, row: int, column: str) -> Any:
        """Return a cell; raises Refusal for null."""
        found = self.columns[column][row]
        if found is None:
            raise self.refusal(row, column, "null")
        return found

    # --- what roles ask for ----------------------------------------------------------------------

    def array(self, row: int, column: str, dimensions: int) -> NDArray[np.float64]:
        """Return a cell as float64 numbers of so many dimensions; NaN may be among them.

        Raises Refusal for null, ragged lists and what is no number.
        """
        found = self.cell(row, column)
        if isinstance(found, np.ndarray) and found.dtype.kind in "fiu":
            numbers = found
        else:
            bad = _no_number(found)
            if bad is not None:
                raise self.refusal(row, column, f"{bad[1]} at position {bad[0]}")
            try:
                numbers = np.asarray(found)
            except (ValueError, TypeError, OverflowError):
                raise self.refusal(row, column, "the lists differ in length") from None
        if numbers.size == 0 and numbers.ndim <= dimensions:
            numbers = np.zeros((0,) * dimensions)
        if numbers.dtype.kind not in "fiu":
            raise self.refusal(
                row, column, "holds something else than numbers, or numbers beyond 64 bits"
            )
        if numbers.ndim != dimensions:
            shape = "a number" if dimensions == 0 else f"a list of {dimensions} dimensions"
            raise self.refusal(row, column, f"must be {shape}, not {numbers.ndim}-dimensional")
        return numbers.astype(np.float64)

    def finite(self, row: int, column: str, dimensions: int) -> NDArray[np.float64]:
        """Return a cell as finite numbers; raises Refusal for NaN and infinities too."""
        numbers = self.array(row, column, dimensions)
        bad = np.argwhere(~np.isfinite(numbers))
        if bad.size or (dimensions == 0 and not np.isfinite(numbers)):
            where = "" if dimensions == 0 else f" at position {', '.join(map(str, bad[0]))}"
            raise self.refusal(row, column, f"{_shown(numbers, bad)}{where} is not finite")
        return numbers

    def whole(self, row: int, column: str, dimensions: int) -> NDArray[np.int64]:
        """Return a cell as whole numbers from 0 on, below 2^53."""
        numbers = self.finite(row, column, dimensions)
        bad = np.argwhere((numbers != np.floor(numbers)) | (numbers < 0) | (numbers >= 2**53))
        if bad.size:
            at = ", ".join(map(str, bad[0]))
            raise self.refusal(row, column, f"{_shown(numbers, bad)} at position {at} is no id")
        found: NDArray[np.int64] = numbers.astype(np.int64)
        return found

    def flags(self, row: int, column: str) -> NDArray[np.bool_]:
        """Return a cell as a list of 0 and 1 (or booleans)."""
        found = self.cell(row, column)
        if isinstance(found, np.ndarray) and found.dtype.kind == "b" and found.ndim == 1:
            return found
        if isinstance(found, list) and found and all(isinstance(f, bool) for f in found):
            return np.array(found)
        numbers = self.finite(row, column, 1)
        if not bool(np.isin(numbers, (0.0, 1.0)).all()):
            raise self.refusal(row, column, "must hold 0 and 1 only")
        flags: NDArray[np.bool_] = numbers == 1.0
        return flags

    def text(self, row: int, column: str) -> str:
        """Return a cell as text; a whole number is taken as its digits."""
        found = self.cell(row, column)
        if isinstance(found, np.integer | int) and not isinstance(found, bool):
            return str(int(found))
        if not isinstance(found, str):
            raise self.refusal(row, column, "must be a text")
        return found


def _no_number(value: Any) -> tuple[str, str] | None:
    """Return the place, such as "3, 0", and the word of the first item of nested lists that would
    become a number without being one: null, or a truth value."""
    if not isinstance(value, list | tuple):
        return None
    for i, item in enumerate(value):
        if item is None or isinstance(item, bool):
            return str(i), "null" if item is None else f"the truth value {str(item).lower()}"
        inner = _no_number(item)
        if inner is not None:
            return f"{i}, {inner[0]}", inner[1]
    return None


def _shown(numbers: NDArray[np.float64], bad: NDArray[np.intp]) -> str:
    return f"{float(numbers[tuple(bad[0])]) if bad.size else float(numbers):g}"


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
FORMATS: Mapping[str, Mapping[str, str]] = {"rows": _OWN, "verl": _VERL, "trl": _TRL}
"""The column of each role by format. `rows` is ours: columns are named as roles."""

TEXT_DUMPS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "verl": (
        ("input", "output", "score"),
        "the files of `trainer.rollout_data_dir` hold texts and scores only, no tokens and no "
        "log-probabilities; write the batch itself (docs/rollouts.md)",
    ),
    "trl": (
        ("prompt", "completion"),
        "the files of `log_completions` hold texts, rewards and advantages only, no tokens and no "
        "log-probabilities; write the batch itself (docs/rollouts.md)",
    ),
}
"""Dumps of texts, known by their columns, with what they do not hold."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """The columns of a recording by role, as far as it has them, and those that must be there."""

    columns: Mapping[str, str]
    demanded: frozenset[str]
    """Roles that the contract names a column for: one that is absent is an error."""


def mapped(format: str, overrides: Mapping[str, str]) -> Mapped:
    """Return the columns of a format with those that the user names in their place."""
    return Mapped({**FORMATS[format], **overrides}, frozenset(overrides))


def text_dump(format: str, present: Collection[str]) -> str | None:
    """Return why a file of these columns is a dump of texts, None where it is not."""
    known = TEXT_DUMPS.get(format)
    if known is None or not set(known[0]) <= set(present):
        return None
    return known[1]
