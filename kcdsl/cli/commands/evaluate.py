"""`kcdsl evaluate`: run both kernels on the slices and decide the empirical clauses."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.commands.verify import recording
from kcdsl.cli.common import switch, value, values
from kcdsl.cli.common.contracts import Contract, read_contract, refuse_foreign_code, results_folder
from kcdsl.cli.common.options import (
    Certifies,
    Device,
    Engine,
    Looks,
    RunsCode,
    choose_device,
    contract_argument,
    device_option,
    engine_option,
    jobs_option,
    json_option,
    not_negative,
    output_option,
    positive,
    seed_option,
    slice_option,
)
from kcdsl.cli.common.output import (
    REPORT_FORMATS,
    Output,
    clause_places,
    outputs,
    progress_bars,
    report_in,
    say,
)
from kcdsl.cli.common.plugins import measuring_backend, solver_if_installed
from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.diagnostics import Suppressed
    from kcdsl.ir.terms import Program
    from kcdsl.model.files import Artefacts
    from kcdsl.release.requirements import Fingerprints
    from kcdsl.source.writing import NewFile
    from kcdsl.verdict.report import ImpliedClause, Report
    from kcdsl_certs.signatures import SigningKey

_UNCERTIFIED = "both kernels are recorded, so nothing ran the checkpoint"


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(Looks, RunsCode, Certifies):
    """Run both kernels on the slices and decide the measured clauses."""

    contract: str | None = contract_argument()
    slices: tuple[str, ...] = slice_option()
    device: Device = device_option()
    seed: int = seed_option()
    seconds: float = value("S", "how long runs may be timed", 20.0, read=positive)
    bound_seconds: float = value(
        "S",
        "how long the drift of the whole model may be bounded; 0: not at all",
        10.0,
        read=not_negative,
    )
    fresh: bool = switch("run every request again, whatever a killed run left")
    format: tuple[str, ...] = values(
        "FORMAT[=FILE]",
        f"print as, or write to a file: {', '.join(REPORT_FORMATS)} (default: text)",
        words=lambda: REPORT_FORMATS,
    )
    json: bool = json_option("print the report as JSON")
    output: str | None = output_option(
        "DIR",
        "folder of report, traces, fingerprints and certificate or statement (default: out beside "
        "the contract)",
    )
    jobs: int | None = jobs_option("requests", "1")
    engine: Engine = engine_option("requests")
    svg: str | None = value("FILE", "write the printed report as a picture")

    def run(self) -> Exit:
        """Evaluate, write the files, print the report."""
        from kcdsl.model.files import Artefacts
        from kcdsl.release.signing import Target, written_as
        from kcdsl.source.files import in_contract
        from kcdsl.source.writing import refuse_targets

        alone = [Output("json", None)] if self.json else []
        wanted = outputs(self.format, REPORT_FORMATS, "text", alone)
        contract = read_contract(self.contract)
        program, base = contract.program, contract.base
        refuse_foreign_code(contract, allowed=self.allow_code)
        keys = _keys_for(program, self.sign)
        device = choose_device(self.device)
        # What no certificate can name is refused before hours of measuring.
        files = Artefacts.of(base)
        unnamed = _unnamed(program, files, bool(keys))
        folder = results_folder(self.output, contract.path)
        stem = folder / "evaluate"
        refuse_targets(self._targets(folder, wanted, written_as(stem, bool(keys))), made=(folder,))
        target = Target.of(stem, keys)
        backend = measuring_backend()
        kept = backend.checkpoint(folder / "evaluate.journal", fresh=self.fresh, tell=_tell)
        with closing(kept) as checkpoint:
            with in_contract(contract.path), progress_bars() as progress:
                setting = backend.prepare(
                    program,
                    base,
                    device=device,
                    slices=self.slices,
                    seed=self.seed,
                    seconds=self.seconds,
                    looks=self.looks_taken,
                    bound_seconds=self.bound_seconds,
                    progress=progress,
                    **recording(backend.prepare, program, files),
                )
                spread = backend.spread(
                    program,
                    base,
                    device=device,
                    slices=self.slices,
                    seed=self.seed,
                    engine=self.engine.value,
                    jobs=self.jobs,
                )
                with _dropped_if_refused(checkpoint):
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
                stated, why = self._certificate(contract, files, report, made, keys)
            texts = {output: _in_format(output.format, report, contract) for output in wanted}
            asked = {output.file: text for output, text in texts.items() if output.file}
            written = self._write(folder, report, made, (target.path, stated), asked)
            checkpoint.remove()
        for output, text in texts.items():
            if output == Output("text", None):
                from kcdsl.verdict.text.report import print_report

                print_report(report, sys.stdout)  # in the colours and the width of a terminal
            elif output.file is None:
                sys.stdout.write(text)
        for name in written:
            say(f"wrote {name}")
        if stated is None:
            print(f"not certified: {why}", file=sys.stderr)
        target.tell(stated is not None)
        return report.exit

    def _targets(self, folder: Path, wanted: Sequence[Output], target: Path) -> list[Path]:
        """Return every file that the evaluation is to write."""
        names = ["trace.parquet", "trace.jsonl", "kernels.json", "report.html", "report.json"]
        asked = [output.file for output in wanted if output.file is not None]
        asked += [] if self.svg is None else [Path(self.svg)]
        return [*(folder / name for name in (*names, target.name)), *asked]

    def _certificate(
        self,
        contract: Contract,
        files: Artefacts,
        report: Report,
        made: Mapping[str, NewFile],
        keys: Sequence[SigningKey],
    ) -> tuple[bytes | None, str]:
        """Return the certificate, or its statement, or why there is none where no key is to
        sign."""
        from kcdsl.release.issue import issue, resting_on
        from kcdsl.release.results import certified_clauses

        try:
            stated = issue(
                program=contract.program,
                base=files,
                clauses=certified_clauses(contract.program, files, report),
                keys=keys,
                fingerprints=_fingerprints(report),
                stage=self.stage.value,
                lifetime=self.lifetime,
                suppressed=contract.accepted,
                assumptions=tuple(filter(None, (report.model.get("program"),))),
                evidence=resting_on({role: (file.path, file.data) for role, file in made.items()}),
                loaded=files.digests,
            )
        except Refusal as refusal:
            if keys or refusal.diagnostics[0].code is not codes.CANNOT_CERTIFY:
                raise
            return None, refusal.diagnostics[0].message
        return stated, ""

    def _write(
        self,
        folder: Path,
        report: Report,
        evidence: Mapping[str, NewFile],
        stated: tuple[Path, bytes | None],
        asked: Mapping[Path, str],
    ) -> list[str]:
        """Write all files of the evaluation, all or none, the report last; return their names."""
        from kcdsl.source.writing import NewFile, make_folder, result, write_together
        from kcdsl.verdict.html import page

        make_folder(folder)
        files = [file for role, file in evidence.items() if role != "report"]
        target, data = stated
        if data is not None:
            files.append(result(target, data))
        if self.svg is not None:
            from kcdsl.verdict.text.report import svg

            files.append(NewFile(Path(self.svg), svg(report).encode(), 0o644))
        files += [NewFile(file, text.encode(), 0o644) for file, text in asked.items()]
        files.append(result(folder / "report.html", page(report.to_json()).encode()))
        files.append(evidence["report"])
        write_together(files, replace=True)
        return [str(file.path) for file in files]


def _unread(program: Program) -> bool:
    """Say whether both kernels are recorded: a certificate would name weights that nothing read."""
    return program.train.recording is not None and program.infer.recording is not None


def _keys_for(program: Program, named: Sequence[str]) -> tuple[SigningKey, ...]:
    """Return the keys that sign the certificate; refuse any that are named for recorded kernels."""
    from kcdsl.release.signing import signing_keys

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
    from kcdsl.release.artefacts import refuse_untrusted

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
def _dropped_if_refused(checkpoint: Any) -> Iterator[None]:
    """Remove the run checkpoint of an evaluation that would be refused by whoever repeats it."""
    again = {codes.ABOVE_CERTIFIED, codes.NOTHING_TO_EVALUATE, codes.METRIC_OUT_OF_REACH}
    try:
        yield
    except Refusal as refusal:
        if again & {found.code for found in refusal.diagnostics}:
            checkpoint.remove()
        raise


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def implied_clauses(program: Program) -> tuple[ImpliedClause, ...]:
    """Return the clauses that would follow from drift clauses, were those proved at their limit."""
    from kcdsl.inequalities import round_up
    from kcdsl.route.goals import goals
    from kcdsl.verdict.outcome import ProvedDrift
    from kcdsl.verdict.report import ImpliedClause

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
    """Return what a report says of accepted findings."""
    return tuple(
        f"{item.diagnostic.code} is accepted in line {item.line} of the contract: {item.reason}"
        for item in suppressed
    )


def _fingerprints(report: Report) -> Fingerprints:
    """Return what identifies the kernels that ran, with the device they ran on."""
    return {side: report.kernels[side]["fingerprint"] for side in ("train", "infer")}


def _in_format(format: str, report: Report, contract: Contract) -> str:
    """Return the report in a format."""
    if format == "text":
        from io import StringIO

        from kcdsl.verdict.text.report import print_report

        stream = StringIO()
        print_report(report, stream)
        return stream.getvalue()
    source, places = clause_places(contract.path, contract.program)
    document = report.to_json()
    return report_in(format, document, command="kcdsl evaluate", source=source, places=places)


def _evidence(
    folder: Path, report: Report, trace: bytes, records: Any, resumed: bytes
) -> dict[str, NewFile]:
    """Return the files that the results rest on, by what a certificate calls them; `resumed` is
    what was taken over from the run checkpoint of an earlier one."""
    import json

    from kcdsl.release.requirements import kernels_document
    from kcdsl.source.writing import result

    lines = (json.dumps(r, allow_nan=False, separators=(",", ":")) + "\n" for r in records)
    found = {
        "trace": result(folder / "trace.parquet", trace),
        "records": result(folder / "trace.jsonl", "".join(lines).encode()),
        "kernels": result(folder / "kernels.json", kernels_document(_fingerprints(report))),
    }
    if resumed:
        found["journal"] = result(folder / "resumed.journal", resumed)
    return {**found, "report": result(folder / "report.json", report.dumps().encode())}
