"""Running both kernels of a contract, deciding its measured clauses, and writing the report."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.api.backends import choose_device, measuring_backend, solver_if_installed
from kcdsl.api.contract import (
    Contract,
    PathLike,
    refuse_foreign_code,
    refuse_values,
    results_folder,
)
from kcdsl.api.results import Progress, TableResult, discard_message, no_progress, offered
from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.exits import Exit
from kcdsl.inequalities import round_up
from kcdsl.model.files import Artefacts
from kcdsl.release.artefacts import refuse_untrusted
from kcdsl.release.issue import evidence_entries, issue
from kcdsl.release.requirements import kernels_document
from kcdsl.release.results import certified_clauses
from kcdsl.release.signing import Target, signing_keys, written_as
from kcdsl.route.goals import goals
from kcdsl.source.files import in_contract
from kcdsl.source.output import NewFile, make_folder, refuse_targets, result, write_together
from kcdsl.verdict.outcome import ProvedDrift
from kcdsl.verdict.report import ImpliedClause, Report

if TYPE_CHECKING:
    from kcdsl.diagnostics import Suppressed
    from kcdsl.ir.terms import Program
    from kcdsl.release.requirements import Fingerprints
    from kcdsl_certs.signatures import SigningKey

_UNCERTIFIED = "both kernels are recorded, so nothing ran the checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateSettings:
    """Settings of an evaluation; each field is the option of `kcdsl evaluate` of its name.

    `more` are further files with their content for a report; they are written with the others.
    """

    slices: Sequence[str] = ()
    device: str = "auto"
    seed: int = 0
    seconds: float = 20.0
    bound_seconds: float = 10.0
    fresh: bool = False
    looks: int | None = 1
    jobs: int | None = None
    engine: str = "processes"
    output: PathLike | None = None
    sign: Sequence[PathLike] = ()
    stage: str = "offline-ci"
    lifetime: timedelta = field(default_factory=lambda: timedelta(days=90))
    allow_code: bool = False
    more: Sequence[tuple[Path, Callable[[Report], bytes]]] = ()
    progress: Callable[[], AbstractContextManager[Progress]] = no_progress
    tell: Callable[[str], None] = discard_message

    def __post_init__(self) -> None:
        refuse_values(self)


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation(TableResult):
    """The report of an evaluation, and the files that were written."""

    report: Report
    files: tuple[str, ...]
    target: Target
    uncertified: str | None
    """Why there is no certificate or statement; None where there is one."""

    @property
    def says(self) -> str:
        """Return the verdict and the action."""
        return f"{self.report.verdict}, action {self.report.action}"

    @property
    def exit(self) -> Exit:
        """Return the exit code of the command."""
        return self.report.exit

    @property
    def held(self) -> bool:
        """Return whether every decided clause holds."""
        return self.exit is Exit.HELD

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.report/3`."""
        return self.report.to_json()

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each clause on each slice."""
        names = ("clause", "level", "slice", "requirement", "value", "low", "high", "threshold")
        return [
            {name: row[name] for name in (*names, "unit", "n", "evidence", "verdict", "reason")}
            for row in self.to_json()["clauses"]
        ]

    @offered
    def _repr_html_(self) -> str:
        from html import escape

        from kcdsl.verdict.html import page

        whole = escape(page(self.to_json()), quote=True)
        return f'<iframe srcdoc="{whole}" width="100%" height="640"></iframe>'


def measured(
    contract: Contract, settings: EvaluateSettings, program: Program | None = None
) -> Report:
    """Return the report of an evaluation of a contract, or of `program` in its place, without
    writing files. Raises Refusal."""
    evidence = gathered(contract, settings, program)
    with in_contract(contract.path):
        report: Report = measuring_backend().conclude(evidence)
    return report


def gathered(
    contract: Contract,
    settings: EvaluateSettings,
    program: Program | None = None,
    files: Artefacts | None = None,
) -> Any:
    """Return the evidence table of a contract, or of `program` in its place; nothing is written.

    `files` are the files that may be read. Raises Refusal.
    """
    program = contract.program if program is None else program
    refuse_foreign_code(contract, allowed=settings.allow_code)
    backend, device = measuring_backend(), choose_device(settings.device)
    with in_contract(contract.path), settings.progress() as progress:
        setting = backend.prepare(
            program,
            contract.base,
            device=device,
            slices=settings.slices,
            seed=settings.seed,
            seconds=settings.seconds,
            looks=settings.looks,
            bound_seconds=settings.bound_seconds,
            progress=progress,
            artefacts=files,
        )
        return backend.gather(setting, progress)


def evaluate(contract: Contract, settings: EvaluateSettings) -> Evaluation:
    """Run both kernels, decide the measured clauses and write the files of the evaluation together;
    raises Refusal."""
    program, base = contract.program, contract.base
    refuse_foreign_code(contract, allowed=settings.allow_code)
    keys = _keys_for(program, settings.sign)
    device = choose_device(settings.device)
    # Files that no certificate can name are refused before the measurement.
    files = Artefacts.of(base)
    unnamed = _unnamed(program, files, bool(keys))
    folder = results_folder(settings.output, contract.path)
    stem = folder / "evaluate"
    refuse_targets(_targets(settings, folder, written_as(stem, bool(keys))), made=(folder,))
    target = Target.of(stem, keys, program.name)
    backend = measuring_backend()
    kept = backend.checkpoint(
        folder / "evaluate.run-checkpoint", fresh=settings.fresh, tell=settings.tell
    )
    with closing(kept) as checkpoint:
        with in_contract(contract.path), settings.progress() as progress:
            setting = backend.prepare(
                program,
                base,
                device=device,
                slices=settings.slices,
                seed=settings.seed,
                seconds=settings.seconds,
                looks=settings.looks,
                bound_seconds=settings.bound_seconds,
                progress=progress,
                artefacts=files,
            )
            spread = backend.spread(
                program,
                base,
                device=device,
                slices=settings.slices,
                seed=settings.seed,
                engine=settings.engine,
                jobs=settings.jobs,
            )
            with _dropped_if_refused(checkpoint, settings.tell):
                evidence = replace(
                    backend.gather(setting, progress, checkpoint, spread),
                    implied=implied_clauses(program),
                    accepted=accepted_findings(contract.accepted),
                )
                report: Report = backend.conclude(evidence)
        trace = backend.write_trace(evidence, report)
        made = _evidence(folder, report, trace, backend.records(evidence), checkpoint.resumed)
        stated, why = None, unnamed or ""
        if unnamed is None:
            stated, why = _certificate(settings, contract, files, report, made, keys)
        written = _write(settings, folder, report, made, (target.path, stated))
        checkpoint.remove()
    return Evaluation(report, tuple(written), target, why if stated is None else None)


def _targets(settings: EvaluateSettings, folder: Path, target: Path) -> list[Path]:
    """Return every file that the evaluation is to write."""
    names = ["trace.parquet", "trace.jsonl", "kernels.json", "report.html", "report.json"]
    return [
        *(folder / name for name in (*names, target.name)),
        *(file for file, _ in settings.more),
    ]


def _certificate(
    settings: EvaluateSettings,
    contract: Contract,
    files: Artefacts,
    report: Report,
    made: Mapping[str, NewFile],
    keys: Sequence[SigningKey],
) -> tuple[bytes | None, str]:
    """Return the certificate, or its statement, or why there is none where no key is to
    sign."""
    try:
        stated = issue(
            program=contract.program,
            base=files,
            clauses=certified_clauses(contract.program, files, report),
            keys=keys,
            fingerprints=_fingerprints(report),
            stage=settings.stage,
            lifetime=settings.lifetime,
            suppressed=contract.accepted,
            source=contract.source,
            assumptions=tuple(filter(None, (report.model.get("program"),))),
            evidence=evidence_entries(
                {role: (file.path, file.data) for role, file in made.items()}
            ),
            loaded=files.digests,
        )
    except Refusal as refusal:
        if keys or refusal.diagnostics[0].code is not codes.CANNOT_CERTIFY:
            raise
        return None, refusal.diagnostics[0].message
    return stated, ""


def _write(
    settings: EvaluateSettings,
    folder: Path,
    report: Report,
    evidence: Mapping[str, NewFile],
    stated: tuple[Path, bytes | None],
) -> list[str]:
    """Write all files of the evaluation, all or none, the report last; return their names."""
    from kcdsl.verdict.html import page

    make_folder(folder)
    files = [file for role, file in evidence.items() if role != "report"]
    target, data = stated
    if data is not None:
        files.append(result(target, data))
    for file, content in settings.more:
        files.append(NewFile(file, content(report), 0o644))
    files.append(result(folder / "report.html", page(report.to_json()).encode()))
    files.append(evidence["report"])
    write_together(files, replace=True)
    return [str(file.path) for file in files]


def _unread(program: Program) -> bool:
    """Return whether both kernels are recorded: a certificate would name weights that nothing
    read."""
    return program.train.recording is not None and program.infer.recording is not None


def _keys_for(program: Program, named: Sequence[PathLike]) -> tuple[SigningKey, ...]:
    """Return the keys that sign the certificate; refuse any that are named for recorded kernels."""
    if named and _unread(program):
        raise refuse(
            codes.CANNOT_CERTIFY,
            f"{_UNCERTIFIED} that a certificate would name",
            help="evaluate without --sign, or let the training kernel run",
        )
    return signing_keys(named)


def _unnamed(program: Program, files: Artefacts, signing: bool) -> str | None:
    """Return why no certificate can name what is read, None if one can; where keys are to sign,
    that is refused."""
    if _unread(program):
        return _UNCERTIFIED
    try:
        refuse_untrusted(program, files)
    except Refusal as refusal:
        if signing:
            raise
        return refusal.diagnostics[0].message
    return None


@contextmanager
def _dropped_if_refused(checkpoint: Any, tell: Callable[[str], None]) -> Iterator[None]:
    """Remove the run checkpoint of an evaluation that would be refused again when repeated; say
    that one which was interrupted can go on."""
    again = {codes.ABOVE_CERTIFIED, codes.NOTHING_TO_EVALUATE, codes.METRIC_OUT_OF_REACH}
    try:
        yield
    except Refusal as refusal:
        if again & {found.code for found in refusal.diagnostics}:
            checkpoint.remove()
        raise
    except KeyboardInterrupt:
        if checkpoint.path.is_file():
            tell(f"the same command goes on from {checkpoint.path}")
        raise


def implied_clauses(program: Program) -> tuple[ImpliedClause, ...]:
    """Return the clauses that would follow if the drift clauses were proved at their limits."""
    premises = tuple(
        ProvedDrift(
            clause_id=goal.clause.id,
            block=goal.block,
            slice=goal.region.slice,
            region=goal.region.kind,
            norm=goal.functional,
            bound=round_up(goal.threshold),
            temperature=program.constants.temperature,
        )
        for goal in goals(program)
        if goal.threshold is not None
    )
    smt = solver_if_installed() if premises else None
    if smt is None:
        return ()
    return tuple(
        ImpliedClause(item.clause_id, item.slice, item.by, tuple(item.steps))
        for item in smt.derive(program, premises)
    )


def accepted_findings(suppressed: Sequence[Suppressed]) -> tuple[str, ...]:
    """Return the accepted findings as text for a report."""
    return tuple(
        f"{item.diagnostic.code} is accepted in line {item.line} of the contract: {item.reason}"
        for item in suppressed
    )


def _fingerprints(report: Report) -> Fingerprints:
    """Return the fingerprints of the kernels that ran, with their device."""
    return {side: report.kernels[side]["fingerprint"] for side in ("train", "infer")}


def _evidence(
    folder: Path, report: Report, trace: bytes, records: Any, resumed: bytes
) -> dict[str, NewFile]:
    """Return the evidence files of the results, by their names in a certificate; `resumed` is the
    part taken from a run checkpoint."""
    lines = (json.dumps(r, allow_nan=False, separators=(",", ":")) + "\n" for r in records)
    found = {
        "trace": result(folder / "trace.parquet", trace),
        "records": result(folder / "trace.jsonl", "".join(lines).encode()),
        "kernels": result(folder / "kernels.json", kernels_document(_fingerprints(report))),
    }
    if resumed:
        found["run-checkpoint"] = result(folder / "resumed.run-checkpoint", resumed)
    return {**found, "report": result(folder / "report.json", report.dumps().encode())}
