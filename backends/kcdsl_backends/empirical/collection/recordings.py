"""The inputs of an evaluation of recordings: files, rows of slices, the scoring kernel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.kernels import LogProbabilities
from kcdsl.ir.tables import Gap
from kcdsl.ir.terms import Program, Slice
from kcdsl.model.files import Artefacts, companion
from kcdsl.model.fingerprint import fingerprint_digest
from kcdsl.source.files import shown
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.collection.context import (
    Context,
    KernelContext,
    Progress,
    spoiled_slices,
)
from kcdsl_backends.empirical.diagnoses.model import not_applicable
from kcdsl_backends.empirical.sources.kernels import Kernel
from kcdsl_backends.empirical.sources.rollouts.kept import kept_of, mean_kept, restricted
from kcdsl_backends.empirical.sources.rollouts.layouts import mapped
from kcdsl_backends.empirical.sources.rollouts.logits import load_recorded_logits
from kcdsl_backends.empirical.sources.rollouts.prompts import groups_of
from kcdsl_backends.empirical.sources.rollouts.reader import RecordedRollouts, assemble
from kcdsl_backends.empirical.sources.rollouts.record import Rollout, Semantics
from kcdsl_backends.empirical.sources.rollouts.rows import FileRows, read_rows
from kcdsl_backends.empirical.table.requirements import holds_logits
from kcdsl_backends.requests import Request, RequestFile, requests_of, select


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext(Context):
    """All inputs of an evaluation of recordings.

    `rows` are the rollouts of each slice, buckets of tables included; `train` the kernel that
    scores the tokens, None if its log-probabilities are recorded too.
    """

    recordings: Mapping[str, RecordedRollouts]
    rows: Mapping[str, tuple[Rollout, ...]]
    data_of: Mapping[str, str]
    train: Kernel | None
    train_semantics: Semantics | None
    device: str = "cpu"
    left_out: int = 0
    kept: bool = False
    """Whether both sides are policies on the tokens that the sampler kept."""
    notes: tuple[str, ...] = ()


def semantics_of(stated: LogProbabilities | None) -> Semantics | None:
    """Return the stated semantics of recorded log-probabilities."""
    return None if stated is None else Semantics.of(stated)


def stated_vocabulary(program: Program, base: Path | Artefacts) -> int | None:
    """Return the vocabulary size of the model's configuration; None if there is no file, as a
    recording needs no model."""
    named, files = program.model.config, Artefacts.of(base)
    if named is None:
        return None
    try:
        found = json.loads(files.read(files.find(named), companion("config")).decode("utf-8"))
        size = found.get("vocab_size")
    except Refusal as refusal:
        if refusal.diagnostics[0].code is codes.FILE_MISSING:
            return None
        raise
    except (ValueError, RecursionError, AttributeError):
        return None
    return size if isinstance(size, int) and not isinstance(size, bool) else None


# --- loading -------------------------------------------------------------------------------------


def load_recordings(
    program: Program, files: Artefacts, names: Sequence[str], vocabulary: int | None
) -> dict[str, RecordedRollouts]:
    """Read the recordings of a contract, by their names in it."""
    train, infer = program.train.recording, program.infer.recording
    assert infer is not None
    columns = dict(infer.columns)
    if train is not None:
        columns.update(train.columns)
    plan = mapped(infer.format, columns)
    if train is None:  # the training kernel runs: recorded values of train are not its own
        left = ("train_logs", "train_top_ids", "train_top_logs")
        plan = replace(
            plan, columns={role: name for role, name in plan.columns.items() if role not in left}
        )
    return {
        name: assemble(
            _rows(files, name),
            plan,
            infer.format,
            None if train is None else semantics_of(train.logprobs),
            semantics_of(infer.logprobs),
            vocabulary,
        )
        for name in dict.fromkeys(names)
    }


def _rows(files: Artefacts, name: str) -> FileRows:
    found = read_rows(files.find(name), name)
    files.record(name, found.sha256)
    return found


def prepare_recorded(
    artefacts: Artefacts,
    chosen: Sequence[Slice],
    missed: Sequence[Gap],
    data_of: Mapping[str, str],
    *,
    train: Kernel | None,
    vocabulary: int | None,
    progress: Progress,
    program: Program,
    **settings: Any,
) -> RolloutContext:
    """Read the recordings of the chosen slices and of the gaps of tables.

    `data_of` names the file of each slice; `settings` are further fields of `RolloutContext`.
    """
    recordings = load_recordings(program, artefacts, list(data_of.values()), vocabulary)
    progress("load", 2, 3)
    files = {name: _as_requests(found) for name, found in recordings.items()}
    by_key = {
        name: {f"{name}:{r.key}": r for r in found.rollouts} for name, found in recordings.items()
    }
    rows = {
        s.name: tuple(by_key[data_of[s.name]][q.key] for q in select(files[data_of[s.name]], s))
        for s in chosen
    }
    spoiled = spoiled_slices(
        (gap, select(files[data_of[gap.slice.name]], gap.slice)) for gap in missed
    )
    every = {id(r): r for found in rows.values() for r in found}
    idle = sum(not counts(r) for r in every.values())
    if idle:  # such a row has no value; trainers write it for truncated samples
        rows = {name: tuple(r for r in found if counts(r)) for name, found in rows.items()}
    progress("load", 3, 3)
    recorded = program.train.recording
    semantics = None if recorded is None else semantics_of(recorded.logprobs)
    if train is not None:
        semantics = Semantics("processed", float(program.constants.temperature))
    replayed = _on_kept_tokens(rows, semantics, program, runs=train is not None)
    notes = () if train is not None else (NOTHING_RAN,)
    if replayed is not None:
        rows, semantics, note = replayed
        notes = (*notes, note)
    if idle:
        notes = (*notes, f"{idle} rollouts count no token and were left out")
    return RolloutContext(
        program=program,
        recordings=recordings,
        rows=rows,
        data_of=data_of,
        spoiled=spoiled,
        train=train,
        train_semantics=semantics,
        kept=replayed is not None,
        left_out=idle,
        notes=notes,
        **settings,
    )


def _on_kept_tokens(
    rows: Mapping[str, tuple[Rollout, ...]],
    semantics: Semantics | None,
    program: Program,
    *,
    runs: bool,
) -> tuple[dict[str, tuple[Rollout, ...]], Semantics, str] | None:
    """Return the rollouts with the training side on the tokens that the sampler kept.

    None if the sampler did not truncate, if the training side is of another law, and if the kept
    tokens of a rollout, or their mass in recorded values, are not known.
    """
    infer = program.infer.recording
    stated = None if infer is None else semantics_of(infer.logprobs)
    if (
        stated is None
        or semantics is None
        or stated.values != "processed"
        or not stated.law.filters
    ):
        return None
    own = semantics.law.filters == stated.law.filters  # applied by the trainer
    if (semantics.law.filters and not own) or semantics.law.temperature != stated.law.temperature:
        return None
    every = {id(r): r for found in rows.values() for r in found}
    kept = {key: sets for key, r in every.items() if (sets := kept_of(r)) is not None}
    if len(kept) < len(every) or not every:
        return None
    found = every if runs or own else {}
    if not found:
        for key, rollout in every.items():
            other = restricted(rollout, kept[key])
            if other is None:
                return None
            found[key] = other
    note = (
        f"the sampler cut tokens off ({stated.law.filters}): both sides are compared on those that"
        f" it kept, {mean_kept(list(kept.values())):.3g} on average; what train has outside of them"
        " is in no ratio"
    )
    return {name: tuple(found[id(r)] for r in rs) for name, rs in rows.items()}, stated, note


def _as_requests(found: RecordedRollouts) -> RequestFile:
    """Return rows as requests, on which the predicates of slices are tested."""
    requests = tuple(
        Request(
            f"{found.name}:{r.key}",
            r.key,
            r.prompt + r.tokens,
            {key: value for key, value in r.fields.items() if not key.startswith("role:")},
            number,
        )
        for r, number in zip(found.rollouts, found.numbers, strict=True)
    )
    return RequestFile(found.name, found.sha256, requests)


def units_available(program: Program, base: Path) -> dict[str, int | None]:
    """Return the number of sampling units of each slice; None if its recording is missing."""
    found: dict[str, int | None] = {}
    files = Artefacts.of(base)
    vocabulary = stated_vocabulary(program, files)
    for slice_ in program.slices:
        name = slice_.data if slice_.data is not None else program.data
        if name is None or not _is_here(files, name):
            found[slice_.name] = None
            continue
        recording = load_recordings(program, files, [name], vocabulary)[name]
        by_key = {f"{name}:{r.key}": r for r in recording.rollouts}
        rows = [by_key[q.key] for q in select(_as_requests(recording), slice_)]
        usable = [r for r in rows if counts(r)]
        found[slice_.name] = len(groups_of(name, recording.rollouts, usable))
    return found


def _is_here(files: Artefacts, name: str) -> bool:
    try:
        files.find(name)
    except Refusal as refusal:
        if refusal.diagnostics[0].code is codes.FILE_MISSING:
            return False
        raise
    return True


def counts(rollout: Rollout) -> bool:
    """Return whether a rollout has a value: rows of which no token counts are left out."""
    return not rollout.tokens or rollout.counted > 0


NOTHING_RAN = (
    "both kernels are recorded: the checkpoint was not read, and nothing here says that it ran"
)


def prepare_logits(
    artefacts: Artefacts,
    chosen: Sequence[Slice],
    missed: Sequence[Gap],
    data_of: Mapping[str, str],
    vocabulary: int | None,
    *,
    program: Program,
    **settings: Any,
) -> KernelContext:
    """Read the requests and both recordings; `settings` are further fields of `KernelContext`.

    Requests must have tokens, since no tokenizer is loaded.
    """

    def check_tokens(tokens: Sequence[int]) -> None:
        wrong = next((t for t in tokens if vocabulary is not None and t >= vocabulary), None)
        if wrong is not None:
            raise refuse(
                codes.SEQUENCE,
                f"token {wrong} is out of the vocabulary of {vocabulary}",
                help="tokenise the requests with the tokenizer of the model that was recorded",
            )

    names = dict.fromkeys(data_of.values())
    files = {name: requests_of(artefacts, name, None, check_tokens) for name in names}
    slices = {s.name: select(files[data_of[s.name]], s) for s in chosen}
    distinct = list({r.key: r for rows in slices.values() for r in rows}.values())
    train, infer = (
        load_recorded_logits(kernel, artefacts, distinct)
        for kernel in (program.train, program.infer)
    )
    if train.path.samefile(infer.path):
        raise refuse(
            codes.ROLLOUT_FILE,
            f"both kernels name the recording {shown(train.path)}, which is of one kernel",
            help="record the logits of each kernel in a file of its own",
        )
    return KernelContext(
        program=program,
        train=train,
        infer=infer,
        block_input=_no_block,
        files=files,
        slices=slices,
        encoder=False,
        blocks=frozenset(),
        weights={},
        digests={
            side: fingerprint_digest(kernel.fingerprint())
            for side, kernel in (("train", train), ("infer", infer))
        },
        device=torch.device("cpu"),
        certify=None,
        spoiled=spoiled_slices(
            (gap, select(files[data_of[gap.slice.name]], gap.slice)) for gap in missed
        ),
        **settings,
    )


def _no_block(request: Request, block: str) -> Tensor:
    raise refuse(
        codes.METRIC_OUT_OF_REACH,
        f"a recording has no block {block}",
        help="name kernels that run here to measure the drift of a block, or leave the clause out",
    )


def recorded_sides(program: Program) -> int:
    """Return the number of kernels that are recordings of whole logits."""
    return sum(holds_logits(side) for side in (program.train, program.infer))


def of_recordings(program: Program, prechecks: Sequence[Precheck]) -> tuple[Precheck, ...]:
    """Return prechecks with those that recorded logits cannot decide not applicable.

    A recording is not run twice, holds no weights, and takes no batches.
    """
    recorded, whys = recorded_sides(program), dict[str, str]()
    if recorded:
        whys["batch_invariance"] = "a recording takes no batches"
        whys["self_determinism"] = "a recording is read twice, not run twice"
    if recorded == 2:
        whys["weights_checksum"] = "a recording of logits holds no weights"
    return tuple(
        not_applicable(check.name, whys[check.name]) if check.name in whys else check
        for check in prechecks
    )
