"""Evidence from recordings: read, score where a kernel is at hand, diagnose, measure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.buckets import Gap, expand_tables
from kcdsl.ir.kernels import KernelRef, LogProbabilities
from kcdsl.ir.terms import Clause, Program, Slice
from kcdsl.model.fingerprint import fingerprint_digest, kernel_fingerprint
from kcdsl.source.text import SourceFile
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.clauses import metrics_of
from kcdsl_backends.empirical.conclusion import PROOFS, split
from kcdsl_backends.empirical.diagnoses.semantics import Recorded, recorded_prechecks
from kcdsl_backends.empirical.evidence import Evidence
from kcdsl_backends.empirical.measured import Run, Timing, Unit
from kcdsl_backends.empirical.metrics.evidence import Unmeasured
from kcdsl_backends.empirical.rollouts.assembling import Recording, assemble
from kcdsl_backends.empirical.rollouts.columns import mapped
from kcdsl_backends.empirical.rollouts.needs import NEEDS, check_depths, check_needs
from kcdsl_backends.empirical.rollouts.readers import read_rows
from kcdsl_backends.empirical.rollouts.record import Rollout, Semantics
from kcdsl_backends.empirical.rollouts.scoring import Policy, score
from kcdsl_backends.empirical.rollouts.units import Group, groups_of, run_of, timed
from kcdsl_backends.empirical.rollouts.whole_logits import NOTHING_RAN
from kcdsl_backends.empirical.run import Kernel
from kcdsl_backends.empirical.setting import spoiled_slices
from kcdsl_backends.requests import Request, RequestFile, select

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class RecordedSetting:
    """Everything an evaluation of recordings reads.

    `rows` are the rollouts of each slice, buckets of tables included; `train` the kernel that
    scores the tokens, None where its log-probabilities are recorded too.
    """

    program: Program
    recordings: Mapping[str, Recording]
    rows: Mapping[str, tuple[Rollout, ...]]
    data_of: Mapping[str, str]
    spoiled: Mapping[str, str]
    train: Kernel | None
    train_semantics: Semantics | None
    contract: Mapping[str, str]
    model: Mapping[str, Any]
    environment: Mapping[str, Any]
    device: str = "cpu"
    seed: int = 0
    looks: int | None = 1
    left_out: int = 0
    notes: tuple[str, ...] = field(default_factory=tuple)


def semantics_of(stated: LogProbabilities | None) -> Semantics | None:
    """Return what a contract states of recorded log-probabilities."""
    if stated is None:
        return None
    return Semantics(
        "raw" if stated.values == "raw" else "processed",
        float(stated.temperature),
        float(stated.top_p),
        stated.top_k,
        float(stated.min_p),
    )


def stated_vocabulary(program: Program, base: Path) -> int | None:
    """Return the vocabulary size of the model's configuration, None where there is none to read:
    a recording needs no model."""
    named = program.model.config
    path = base / named if named is not None else None
    if path is None or not path.is_file():
        return None
    try:
        size = json.loads(path.read_text(encoding="utf-8")).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return size if isinstance(size, int) and not isinstance(size, bool) else None


# --- loading -------------------------------------------------------------------------------------


def load_recordings(
    program: Program, base: Path, names: Sequence[str], vocabulary: int | None
) -> dict[str, Recording]:
    """Read the recordings of a contract, by the names it gives them."""
    train, infer = program.train.recording, program.infer.recording
    assert infer is not None
    columns = dict(infer.columns)
    if train is not None:
        columns.update(train.columns)
    plan = mapped(infer.format, columns)
    if train is None:  # the training kernel runs: what is recorded of its logs is not its own
        left = ("train_logs", "train_top_ids", "train_top_logs")
        plan = replace(
            plan, columns={role: name for role, name in plan.columns.items() if role not in left}
        )
    return {
        name: assemble(
            read_rows(base / name, name),
            plan,
            infer.format,
            None if train is None else semantics_of(train.logprobs),
            semantics_of(infer.logprobs),
            vocabulary,
        )
        for name in dict.fromkeys(names)
    }


def prepare_recorded(
    stated: Program,
    base: Path,
    chosen: Sequence[Slice],
    missed: Sequence[Gap],
    data_of: Mapping[str, str],
    *,
    train: Kernel | None,
    vocabulary: int | None,
    progress: Progress,
    **settings: Any,
) -> RecordedSetting:
    """Read the recordings of the chosen slices and of what tables miss.

    `data_of` names the file of each slice; `settings` are further fields of `RecordedSetting`.
    """
    recordings = load_recordings(stated, base, list(data_of.values()), vocabulary)
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
    idle = sum(bool(r.tokens) and r.counted == 0 for r in every.values())
    if idle:  # such a row has no value; trainers write it for what was cut off
        rows = {
            name: tuple(r for r in found if not r.tokens or r.counted)
            for name, found in rows.items()
        }
    progress("load", 3, 3)
    recorded = stated.train.recording
    said = None if recorded is None else semantics_of(recorded.logprobs)
    if train is not None:
        said = Semantics("processed", float(stated.constants.temperature))
    notes = () if train is not None else (NOTHING_RAN,)
    if idle:
        notes = (*notes, f"{idle} rollouts count no token and were left out")
    return RecordedSetting(
        stated, recordings, rows, data_of, spoiled, train, said,
        left_out=idle, notes=notes, **settings,
    )  # fmt: skip


def _as_requests(found: Recording) -> RequestFile:
    """Return rows as requests, on which the predicates of slices are tested."""
    source = SourceFile(found.name, "\n" * (max(found.numbers, default=0) + 1))
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
    return RequestFile(found.name, found.sha256, requests, source)


def units_available(program: Program, base: Path) -> dict[str, int | None]:
    """Return how many sampling units each slice has; None where its recording is not here yet."""
    found: dict[str, int | None] = {}
    vocabulary = stated_vocabulary(program, base)
    for slice_ in program.slices:
        name = slice_.data if slice_.data is not None else program.data
        if name is None or not (base / name).is_file():
            found[slice_.name] = None
            continue
        recording = load_recordings(program, base, [name], vocabulary)[name]
        by_key = {f"{name}:{r.key}": r for r in recording.rollouts}
        rows = [by_key[q.key] for q in select(_as_requests(recording), slice_)]
        usable = [r for r in rows if _usable(r)]
        found[slice_.name] = len(groups_of(name, recording.rollouts, usable))
    return found


# --- gathering -----------------------------------------------------------------------------------


def gather_recorded(setting: RecordedSetting, progress: Progress) -> Evidence:
    """Measure recorded rollouts; the training kernel scores them where it is at hand.

    Raises Refusal where a clause reads what the recording lacks.
    """
    program = expand_tables(setting.program)
    clauses, _ = split(program, frozenset(setting.rows))
    wanted = [c for c in clauses if c.evidence not in PROOFS]
    roles, columns = _roles(setting)
    check_needs(wanted, roles, columns, [m.name for m in program.metrics])
    rows, policies = _scored(setting, progress)
    check_depths(wanted, [r for found in rows.values() for r in found])
    groups = _groups(setting, rows)
    metrics = {name for clause in wanted for name in metrics_of(clause.require)}
    metrics |= {"k3", "w_log_w_minus", "tv_is", "importance_ratio"} if _compares(metrics) else set()
    runs = _runs(groups, metrics, setting, progress)
    prechecks = _prechecks(setting, rows, groups, metrics, policies)
    distinct = {g.request.key: g for found in groups.values() for g in found}
    return Evidence(
        program=setting.program,
        requests=tuple(g.request for g in distinct.values()),
        runs=runs,
        slices={name: tuple(g.request.key for g in found) for name, found in groups.items()},
        measured=frozenset(metrics),
        encoder=False,
        contract=setting.contract,
        model=setting.model,
        kernels=_kernels(setting),
        data=tuple(
            {"name": found.name, "sha256": found.sha256, "rows": len(found.rollouts)}
            for found in setting.recordings.values()
        ),
        environment=setting.environment,
        timing=_timing(wanted, distinct.values()),
        prechecks=prechecks,
        spoiled=setting.spoiled,
        notes=(*setting.notes, *_shares(distinct.values())),
        seed=setting.seed,
        looks=setting.looks,
    )


def _roles(setting: RecordedSetting) -> tuple[frozenset[str], dict[str, str]]:
    """Return the roles that every recording has, and all names of columns."""
    found = [frozenset(r.roles) for r in setting.recordings.values()]
    roles = frozenset.intersection(*found) if found else frozenset()
    if setting.train is not None:
        lists = {"train_top_ids", "train_top_logs"} if "infer_top_ids" in roles else set()
        roles |= {"train_logs", *lists}
    infer = setting.program.infer.recording
    assert infer is not None
    train = setting.program.train.recording
    columns = mapped(infer.format, {**dict(infer.columns), **dict(train.columns if train else ())})
    return roles, dict(columns.columns)


def _compares(metrics: set[str]) -> bool:
    return any("train_logs" in NEEDS.get(name, ()) for name in metrics) or not metrics


def _scored(
    setting: RecordedSetting, progress: Progress
) -> tuple[dict[str, tuple[Rollout, ...]], tuple[Policy, ...]]:
    """Return the rollouts of each slice with both sides, and policies for diagnoses."""
    if setting.train is None:
        return dict(setting.rows), ()
    every = {id(r): r for found in setting.rows.values() for r in found}
    found = score(
        list(every.values()),
        setting.train,
        float(setting.program.constants.temperature),
        lambda done, total: progress("training kernel", done, total),
    )
    scored = dict(zip(every, found.rollouts, strict=True))
    rows = {name: tuple(scored[id(r)] for r in found) for name, found in setting.rows.items()}
    return rows, found.policies


def _groups(
    setting: RecordedSetting, rows: Mapping[str, tuple[Rollout, ...]]
) -> dict[str, tuple[Group, ...]]:
    """Return the sampling units of each slice."""
    return {
        name: groups_of(
            setting.data_of[name],
            [r for r in setting.recordings[setting.data_of[name]].rollouts if _usable(r)],
            found,
        )
        for name, found in rows.items()
    }


def _usable(rollout: Rollout) -> bool:
    return not rollout.tokens or rollout.counted > 0


def _runs(
    groups: Mapping[str, tuple[Group, ...]],
    metrics: set[str],
    setting: RecordedSetting,
    progress: Progress,
) -> dict[str, Run]:
    distinct = {g.request.key: g for found in groups.values() for g in found}
    runs = {}
    for done, (key, group) in enumerate(distinct.items(), 1):
        runs[key] = run_of(group, metrics, setting.seed)
        progress("rollouts", done, len(distinct))
    return runs


def _timing(clauses: Sequence[Clause], groups: Any) -> Timing:
    """Return one timed run for each rollout with stamps, where a clause reads times."""
    read = {name for clause in clauses for name in metrics_of(clause.require)}
    if not read & {"latency", "ttft", "tpot", "throughput"}:
        return Timing()
    runs: list[Unit] = []
    for group in groups:
        try:
            runs += timed(group)
        except Unmeasured as error:
            first = group.members[0]
            raise refuse(
                codes.MALFORMED_ROLLOUT,
                f"{group.request.key}, {first.place}: {error}",
                help="stamps are seconds of one clock, one for each sampled token",
            ) from None
    return Timing(tuple(runs))


def _prechecks(
    setting: RecordedSetting,
    rows: Mapping[str, tuple[Rollout, ...]],
    groups: Mapping[str, tuple[Group, ...]],
    metrics: set[str],
    policies: tuple[Policy, ...],
) -> tuple[Precheck, ...]:
    every = {id(r): r for found in rows.values() for r in found}
    infer, train = setting.program.infer.recording, setting.program.train.recording
    assert infer is not None
    return recorded_prechecks(
        Recorded(
            tuple(every.values()),
            float(setting.program.constants.temperature),
            {name: len(found) for name, found in groups.items()},
            setting.train_semantics,
            semantics_of(infer.logprobs),
            policies,
            train is not None and train.recomputed,
            _compares(metrics),
            setting.left_out,
        )
    )


def _kernels(setting: RecordedSetting) -> dict[str, dict[str, object]]:
    """Return what identifies both sides: a recorded one by the files that were read."""
    files = {name: found.sha256 for name, found in setting.recordings.items()}
    stated: Sequence[tuple[str, KernelRef]] = (
        ("train", setting.program.train),
        ("infer", setting.program.infer),
    )
    found: dict[str, dict[str, object]] = {}
    for side, reference in stated:
        print_ = kernel_fingerprint(reference, setting.device)
        if reference.recording is not None:
            print_ = {**print_, "recorded": dict(sorted(files.items()))}
        found[side] = {
            "run": reference.run,
            "digest": f"sha256:{fingerprint_digest(print_)}",
            "fingerprint": print_,
        }
    return found


def _shares(groups: Any) -> tuple[str, ...]:
    members = {id(m): m for group in groups for m in group.members}
    tokens = sum(len(m.tokens) for m in members.values())
    masked = tokens - sum(m.counted for m in members.values())
    units = sum(1 for _ in groups)
    said = f"{len(members)} rollouts of {units} prompts: the prompt is the unit"
    share = (
        f"; {100 * masked / tokens:.3g} % of {tokens} sampled tokens are masked" if tokens else ""
    )
    return (said + share,)
