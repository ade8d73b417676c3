"""Rollouts from the rows of a recording: without padding, every column checked against the others.

Batches pad prompts in front and sampled tokens at the end. Padding is removed; of the remaining
tokens only those inside the mask count, the others are context. Groups of rollouts with one prompt
are joined, so that a group name for each row does not make each row a unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kcdsl.diagnostics import codes, refuse
from kcdsl_backends.empirical.sources.rollouts.kept import problem_of_kept
from kcdsl_backends.empirical.sources.rollouts.layouts import (
    OF_TEXT_DUMPS,
    PADDED,
    Mapped,
    cut,
    text_dump,
)
from kcdsl_backends.empirical.sources.rollouts.record import (
    ROUNDING,
    Rollout,
    Semantics,
    Side,
    TopLogs,
    problem_of,
)
from kcdsl_backends.empirical.sources.rollouts.rows import FileRows

Array = NDArray[np.float64]

_Scalar = TypeVar("_Scalar", bound=np.generic)

_BY_CHANCE = -20.0
"""ln of the probability above which sampled tokens may begin with their prompt by chance."""
_NUMBERS = ("arrived",)
_SUMMED = ("train_reward", "infer_reward")
_FLAGS = ("train_refused", "infer_refused")
_TEXTS = ("train_text", "infer_text", "reference")
_PLAIN = ("train_version", "infer_version", "infer_version_last")
_PER_TOKEN = {"stamps": 1, "train_routes": 3, "infer_routes": 3, "train_router_scores": 3}
_IDS = frozenset({"train_routes", "infer_routes"})
_VECTORS = ("train_gradient", "infer_gradient", "cache")


@dataclass(frozen=True, slots=True)
class RecordedRollouts:
    """The rollouts of a file, and the roles of its columns."""

    name: str
    sha256: str
    rollouts: tuple[Rollout, ...]
    roles: frozenset[str]
    numbers: tuple[int, ...]
    """The number of each rollout's row, from 1."""
    joined: int = 0
    """Number of groups that were joined with another, since they share a prompt."""


def assemble(
    rows: FileRows,
    mapped: Mapped,
    format: str,
    train: Semantics | None,
    infer: Semantics | None,
    vocabulary: int | None = None,
) -> RecordedRollouts:
    """Return the rollouts of a recording.

    `train` and `infer` are the semantics of each side's log-probabilities. Raises Refusal for a
    column that the contract names and the file lacks, a dump of texts, lengths that differ, ids out
    of range, null, NaN, +inf, probabilities above 1, duplicate ids, and a prompt that is counted as
    sampled.
    """
    rows = cut(rows, format, mapped)
    have = {role: name for role, name in mapped.columns.items() if name in rows.columns}
    for role in sorted(mapped.demanded - set(have)):
        raise _lacking(rows, role, mapped.columns[role])
    if "tokens" not in have:
        why = text_dump(format, rows.columns)
        if why is not None:
            raise refuse(
                codes.ROLLOUT_COLUMN,
                f"{rows.name}: {why}",
                help=OF_TEXT_DUMPS,
            )
        if any(role.endswith(("_logs", "_ids")) for role in have):
            raise _lacking(rows, "tokens", mapped.columns["tokens"])
    padding_roles = PADDED.get(format, ())
    if padding_roles and "tokens" in have and have.keys().isdisjoint(padding_roles):
        names = " or ".join(f"`{mapped.columns.get(role, role)}`" for role in padding_roles)
        raise refuse(
            codes.ROLLOUT_COLUMN,
            f"{rows.name} has no column {names}, so padding cannot be told from sampled tokens",
            notes=(f"it has {', '.join(sorted(rows.columns))}",),
            help="write it, or lists without padding, and leave `format` out",
        )
    reader = _Reader(rows, have, train, infer, vocabulary)
    seen: dict[str, int] = {}
    found = []
    for row in range(rows.count):
        rollout = reader.rollout(row)
        if rollout.key in seen:
            raise rows.refusal(
                row,
                have.get("id", "id"),
                f"the id {rollout.key!r} was given in {rows.word} {rows.number(seen[rollout.key])}"
                " already",
                "give each row an id of its own",
                codes.DUPLICATE_REQUEST,
            )
        seen[rollout.key] = row
        found.append(rollout)
    _refuse_counted_prompts(rows, have, found)
    numbers = tuple(rows.number(i) for i in range(rows.count))
    rollouts, groups = joined(found)
    return RecordedRollouts(rows.name, rows.sha256, rollouts, frozenset(have), numbers, groups)


def _lacking(rows: FileRows, role: str, column: str) -> Exception:
    return refuse(
        codes.ROLLOUT_COLUMN,
        f"{rows.name} has no column `{column}` ({role})",
        notes=(f"it has {', '.join(sorted(rows.columns)) or 'none'}",),
        help=f"name the column in the kernel: columns: {{{role}: NAME}}",
    )


def _refuse_counted_prompts(rows: FileRows, have: Mapping[str, str], found: list[Rollout]) -> None:
    """Refuse a file in which the sampled tokens of every row begin with its prompt and count, and a
    row in which such tokens are too unlikely to have been sampled."""
    with_prompt = [r for r in found if len(r.prompt) >= 2]
    inside = [
        r
        for r in with_prompt
        if r.tokens[: len(r.prompt)] == r.prompt and bool(r.mask[: len(r.prompt)].all())
    ]
    unlikely = [r for r in inside if _chance_of_prompt(r) < _BY_CHANCE - math.log(len(found))]
    if len(inside) == len(with_prompt) and len({r.prompt for r in with_prompt}) > 1:
        unlikely = inside
    if unlikely:
        raise rows.refusal(
            found.index(unlikely[0]),
            have["tokens"],
            "the sampled tokens begin with the prompt, and the mask counts it",
            "leave the prompt out of `tokens` and of the log-probabilities, or mask it with 0",
        )


def _chance_of_prompt(rollout: Rollout) -> float:
    """Return ln of the probability of sampling the prompt again; 0 if it is not known."""
    if rollout.infer is None:
        return 0.0
    return float(rollout.infer.logs[: len(rollout.prompt)].sum())


@dataclass(frozen=True, slots=True)
class _Reader:
    """Converts single rows to rollouts."""

    rows: FileRows
    have: Mapping[str, str]
    train: Semantics | None
    infer: Semantics | None
    vocabulary: int | None

    def rollout(self, row: int) -> Rollout:
        """Return the rollout of a row; raises Refusal with its place."""
        wide, before = self._widths(row)
        keep, kept = self._attention(row, before, wide)
        prompt = self._ids(row, "prompt")[kept] if "prompt" in self.have else _nothing()
        tokens = self._ids(row, "tokens")[keep] if "tokens" in self.have else _nothing()
        mask = self._mask(row, wide, keep)
        arrays = {r: self._per_token(row, r, wide)[keep] for r in _PER_TOKEN if r in self.have}
        for role in _VECTORS:
            if role in self.have:
                arrays[role] = self.rows.finite(row, self.have[role], 1)
        if "advantages" in self.have:
            arrays["advantages"] = self._advantages(row, wide, keep)
        if "infer_kept" in self.have:
            arrays |= self._kept(row, wide, keep)
        found = Rollout(
            self._key(row),
            tuple(prompt.tolist()),
            tuple(tokens.tolist()),
            mask,
            self._side(row, "train", self.train, wide, keep),
            self._side(row, "infer", self.infer, wide, keep),
            self._numbers(row),
            self._fields(row, int(mask.sum())),
            arrays,
            self.rows.text(row, self.have["group"]) if "group" in self.have else None,
            f"{self.rows.word} {self.rows.number(row)}",
            self.rows.number(row),
        )
        wrong = problem_of(found, self.vocabulary)
        if wrong is not None:
            column, what = wrong
            raise self.rows.refusal(row, self.have.get(column, column), what)
        unkept = problem_of_kept(found, self.vocabulary)
        if unkept is not None:
            raise self.rows.refusal(row, self.have["infer_kept"], unkept)
        return found

    def _widths(self, row: int) -> tuple[int, int]:
        """Return the numbers of tokens and prompt tokens of a row, padding included."""
        wide, before = (
            len(self.rows.listed(row, self.have[role])) if role in self.have else 0
            for role in ("tokens", "prompt")
        )
        return wide, before

    def _attention(
        self, row: int, before: int, wide: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return the masks of tokens and of prompt tokens that are not padding."""
        sizes = {"prompt_attention": before, "attention": wide}
        found = {role: np.ones(size, dtype=bool) for role, size in sizes.items()}
        named = dict.fromkeys(sizes, "")
        column = self.have.get("whole_attention")
        if column is not None:
            whole = self.rows.flags(row, column)
            if whole.size != before + wide:
                what = f"{whole.size} values for {before} + {wide} tokens"
                raise self.rows.refusal(row, column, what)
            found = {"prompt_attention": whole[:before], "attention": whole[before:]}
            named = dict.fromkeys(sizes, column)
        for role, size in sizes.items():
            if role in self.have:
                named[role] = self.have[role]
                flags = self.rows.flags(row, self.have[role])
                found[role] = self._sized(row, self.have[role], flags, size)
        keep, kept = found["attention"], found["prompt_attention"]
        if bool((keep[1:] & ~keep[:-1]).any()):
            what = "padding in front of sampled tokens, or a hole among them"
            raise self.rows.refusal(row, named["attention"], what)
        if bool((kept[:-1] & ~kept[1:]).any()):
            what = "padding behind a prompt, or a hole in it"
            raise self.rows.refusal(row, named["prompt_attention"], what)
        return keep, kept

    def _mask(self, row: int, wide: int, keep: NDArray[np.bool_]) -> NDArray[np.bool_]:
        column = self.have.get("mask")
        if column is None:
            return np.ones(int(keep.sum()), dtype=bool)
        return self._sized(row, column, self.rows.flags(row, column), wide)[keep]

    def _sized(self, row: int, column: str, found: NDArray[_Scalar], wide: int) -> NDArray[_Scalar]:
        if found.shape[0] != wide:
            raise self.rows.refusal(row, column, f"{found.shape[0]} values for {wide} tokens")
        return found

    def _ids(self, row: int, role: str) -> NDArray[np.int64]:
        return self.rows.whole(row, self.have[role], 1)

    def _per_token(self, row: int, role: str, wide: int) -> NDArray[Any]:
        column, dimensions = self.have[role], _PER_TOKEN[role]
        read: Callable[[int, str, int], NDArray[Any]] = (
            self.rows.whole if role in _IDS else self.rows.finite
        )
        return self._sized(row, column, read(row, column, dimensions), wide)

    def _kept(self, row: int, wide: int, keep: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
        """Return the concatenated ids that the sampler kept, and the end of each position in
        them."""
        column = self.have["infer_kept"]
        cell = self.rows.listed(row, column)
        if len(cell) != wide:
            raise self.rows.refusal(row, column, f"{len(cell)} values for {wide} tokens")
        parts = [_nothing()]
        for ids in (ids for ids, there in zip(cell, keep, strict=True) if there):
            found = _token_ids(ids)
            if found is None:
                raise self.rows.refusal(row, column, "must hold a list of token ids for each token")
            parts.append(found)
        ends = np.cumsum([ids.size for ids in parts[1:]], dtype=np.int64)
        flat = np.concatenate(parts)
        return {"infer_kept": flat, "infer_kept_ends": ends}

    def _advantages(self, row: int, wide: int, keep: NDArray[np.bool_]) -> Array:
        column = self.have["advantages"]
        single = self.rows.single(row, column)
        found = self.rows.finite(row, column, 0 if single else 1)
        if single:
            return np.full(int(keep.sum()), float(found))
        return self._sized(row, column, found, wide)[keep]

    def _side(
        self, row: int, side: str, semantics: Semantics | None, wide: int, keep: NDArray[np.bool_]
    ) -> Side | None:
        column = self.have.get(f"{side}_logs")
        if column is None:
            return None
        logs = self._sized(row, column, self.rows.array(row, column, 1), wide)
        return Side(_below_zero(logs[keep]), semantics, self._top(row, side, wide, keep))

    def _top(self, row: int, side: str, wide: int, keep: NDArray[np.bool_]) -> TopLogs | None:
        names = [self.have.get(f"{side}_top_{part}") for part in ("ids", "logs")]
        if names[0] is None or names[1] is None:
            return None
        ids = self.rows.whole(row, names[0], 2)
        logs = self.rows.array(row, names[1], 2)
        if ids.shape != logs.shape or ids.shape[0] != wide:
            what = f"lists of shapes {ids.shape} and {logs.shape} for {wide} tokens"
            raise self.rows.refusal(row, names[1], what)
        ids, logs = ids[keep], _below_zero(logs[keep])
        order = np.lexsort((ids, -logs), axis=-1)
        return TopLogs(np.take_along_axis(ids, order, 1), np.take_along_axis(logs, order, 1))

    def _key(self, row: int) -> str:
        column = self.have.get("id")
        return str(self.rows.number(row)) if column is None else self.rows.text(row, column)

    def _numbers(self, row: int) -> dict[str, float]:
        found = {
            r: float(self.rows.finite(row, self.have[r], 0)) for r in _NUMBERS if r in self.have
        }
        for role in _SUMMED:
            if role in self.have:
                single = self.rows.single(row, self.have[role])
                values = self.rows.finite(row, self.have[role], 0 if single else 1)
                found[role] = float(values.sum())
        for role in _FLAGS:
            if role in self.have:
                cell = self.rows.cell(row, self.have[role])
                value = float(cell) if isinstance(cell, bool | np.bool_) else None
                if value is None:
                    value = float(self.rows.finite(row, self.have[role], 0))
                if value not in (0.0, 1.0):
                    raise self.rows.refusal(row, self.have[role], f"{value:g} is neither 0 nor 1")
                found[role] = value
        return found

    def _fields(self, row: int, counted: int) -> dict[str, Any]:
        """Return texts and versions by role, and every plain column that slices may test."""
        plain = {
            name: value
            for name, cells in self.rows.columns.items()
            if (value := _testable(cells[row])) is not None
        }
        plain.setdefault("length", Fraction(counted))
        roles: dict[str, Any] = {}
        for role in _TEXTS:
            if role in self.have:
                roles[role] = self.rows.text(row, self.have[role])
        for role in _PLAIN:
            if role in self.have:
                roles[role] = str(self.rows.cell(row, self.have[role]))
        if "schema" in self.have:
            roles["schema"] = self.rows.cell(row, self.have["schema"])
        return {**plain, **{f"role:{role}": value for role, value in roles.items()}}


def _nothing() -> NDArray[np.int64]:
    return np.zeros(0, dtype=np.int64)


def _token_ids(cell: Any) -> NDArray[np.int64] | None:
    """Return a list of token ids; None for anything else."""
    try:
        found = np.asarray(cell)
    except ValueError:  # lists of several lengths
        return None
    if found.ndim != 1 or found.size == 0:
        return _nothing() if found.ndim == 1 else None
    fits = found.dtype.kind in "iu" and int(found.min()) >= 0 and int(found.max()) < 2**53
    return found.astype(np.int64) if fits else None


def _below_zero(logs: Array) -> Array:
    """Return ln-probabilities with those that rounding put above 0 set to 0."""
    return np.where((logs > 0) & (logs <= ROUNDING), 0.0, logs)


def _testable(cell: Any) -> str | bool | Fraction | None:
    """Return a cell as a value that slices can test; None for null, lists, NaN and infinities."""
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, str | bool):
        return cell
    if isinstance(cell, int | Decimal):
        return Fraction(cell)
    if isinstance(cell, float) and np.isfinite(cell):
        return Fraction(Decimal(repr(cell)))
    return None


# --- order of recorded rows --------------------------------------------------------------------


def joined(rollouts: Sequence[Rollout]) -> tuple[tuple[Rollout, ...], int]:
    """Return the rollouts with groups joined that share a prompt, and the number of joined groups.

    Joined groups, also those linked through a third, take the name of one of them. Rollouts without
    a group, and those without a prompt, stay as they are.
    """
    into: dict[str, str] = {}

    def first(name: str) -> str:
        while into.setdefault(name, name) != name:
            into[name] = name = into[into[name]]
        return name

    seen: dict[tuple[int, ...], str] = {}
    for rollout in rollouts:
        if rollout.group is None:
            continue
        own = first(rollout.group)
        if rollout.prompt:
            into[own] = first(seen.setdefault(rollout.prompt, own))
    found = tuple(r if r.group is None else replace(r, group=first(r.group)) for r in rollouts)
    return found, sum(name != first(name) for name in list(into))
