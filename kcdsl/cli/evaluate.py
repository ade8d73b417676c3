"""`kcdsl evaluate`: run both kernels on the slices and decide the empirical clauses."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.foreign import add_allow_code, refuse_foreign_code
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kcdsl.cli.report_formats import Output
    from kcdsl.diagnostics import Suppressed
    from kcdsl.ir.terms import Program
    from kcdsl.model.files import Artefacts
    from kcdsl.release.triple import Fingerprints
    from kcdsl.source.writing import NewFile
    from kcdsl.verdict.report import ImpliedClause, Report
    from kcdsl_certs.keys import SigningKey

HELP = "run both kernels on the slices and decide the measured clauses"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kcdsl.cli.devices import CHOICES
    from kcdsl.cli.execution import add_workers
    from kcdsl.cli.looks import add_looks
    from kcdsl.cli.numbers import not_negative, positive, seed
    from kcdsl.cli.report_formats import add_formats
    from kcdsl.cli.signatures import add_signing_options

    parser.add_argument("contract", nargs="?", metavar="CONTRACT", help="default: the one here")
    parser.add_argument("--slice", action="append", metavar="NAME", help="only this slice")
    parser.add_argument(
        "--device", choices=CHOICES, default="auto", help="default: cuda where there is one"
    )
    parser.add_argument(
        "--seed", type=seed, default=0, metavar="N", help="of sampling and resampling"
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        default=20.0,
        metavar="S",
        help="how long runs may be timed (default: 20)",
    )
    parser.add_argument(
        "--bound-seconds",
        type=not_negative,
        default=10.0,
        metavar="S",
        help="how long the drift of the whole model may be bounded (default: 10; 0: not at all)",
    )
    add_looks(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="run every request again, whatever a killed run left"
    )
    add_formats(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="folder of report, traces, fingerprints and certificate or statement (default: out "
        "beside the contract)",
    )
    add_workers(parser, "requests")
    add_allow_code(parser)
    parser.add_argument("--svg", metavar="FILE", help="write the printed report as a picture")
    add_signing_options(parser)


def run(arguments: argparse.Namespace) -> Exit:
    """Run the command: evaluate, write the files, print the report."""
    from dataclasses import replace

    from kcdsl.check.compile import load_contract
    from kcdsl.cli.devices import choose_device
    from kcdsl.cli.discover import find_contract, results_folder
    from kcdsl.cli.progress import progress_bars
    from kcdsl.cli.report_formats import outputs
    from kcdsl.cli.verify import recording
    from kcdsl.model.files import Artefacts
    from kcdsl.release.signing import refuse_other_signers, tell_unsigned, written_as
    from kcdsl.source.files import in_contract
    from kcdsl.source.writing import refuse_targets

    wanted = outputs(arguments.format, json=arguments.json)
    path = find_contract(arguments.contract, Path())
    (program, suppressed), base = load_contract(path), path.resolve().parent
    refuse_foreign_code(program, path, arguments)
    keys = _keys_for(program, arguments.sign)
    device = choose_device(arguments.device)
    # What no certificate can name is refused before hours of measuring.
    files = Artefacts.of(base)
    unnamed = _unnamed(program, files, bool(keys))
    folder = results_folder(arguments.output, path)
    target = written_as(folder / "evaluate", bool(keys))
    refuse_targets(_targets(folder, wanted, arguments.svg, target), made=(folder,))
    replaced = bool(keys) and refuse_other_signers(target, keys)
    backend = measuring_backend()
    kept = backend.journal(folder / "evaluate.journal", fresh=arguments.fresh, tell=_tell)
    with closing(kept) as journal:
        with in_contract(path), progress_bars() as progress:
            setting = backend.prepare(
                program,
                base,
                device=device,
                slices=tuple(arguments.slice or ()),
                seed=arguments.seed,
                seconds=arguments.seconds,
                looks=None if arguments.anytime else arguments.looks,
                bound_seconds=arguments.bound_seconds,
                progress=progress,
                **recording(backend.prepare, program, files),
            )
            spread = backend.spread(
                program,
                base,
                device=device,
                slices=tuple(arguments.slice or ()),
                seed=arguments.seed,
                engine=arguments.engine,
                jobs=arguments.jobs,
            )
            with _dropped_if_refused(journal):
                evidence = replace(
                    backend.gather(setting, progress, journal, spread),
                    implied=implied_clauses(program),
                    accepted=accepted_findings(suppressed),
                )
                report: Report = backend.conclude(evidence)
        trace = backend.write_trace(evidence, report)
        made = _evidence_files(folder, report, trace, backend.records(evidence), journal.resumed)
        stated, why = None, unnamed or ""
        if unnamed is None:
            stated, why = _certificate(program, files, report, made, suppressed, keys, arguments)
        texts = _in_formats(wanted, report, path, program)
        extra = [(file, text) for (_, file), text in texts.items() if file is not None]
        written = _write(folder, report, made, (target, stated), arguments.svg, extra)
        journal.remove()
    for (format, file), text in texts.items():
        if format == "text" and file is None:
            from kcdsl.verdict.render import print_report

            print_report(report, sys.stdout)
        elif file is None:
            sys.stdout.write(text)
    for name in written:
        print(one_line(f"wrote {name}"), file=sys.stderr)
    if stated is None:
        print(f"not certified: {why}", file=sys.stderr)
    if not keys:
        tell_unsigned(target, stated is not None)
    elif replaced:
        print(one_line(f"note: {target} replaces an earlier one by the same keys"), file=sys.stderr)
    return report.exit


def _targets(folder: Path, wanted: Sequence[Output], svg: str | None, target: Path) -> list[Path]:
    """Return every file that the evaluation is to write."""
    names = ["trace.parquet", "trace.jsonl", "kernels.json", "report.html", "report.json"]
    names.append(target.name)
    asked = [output.file for output in wanted if output.file is not None]
    return [*(folder / name for name in names), *asked, *([] if svg is None else [Path(svg)])]


_UNCERTIFIED = "both kernels are recorded, so nothing ran the checkpoint"


def _unread(program: Program) -> bool:
    """Say whether both kernels are recorded: a certificate would name weights that nothing read."""
    return program.train.recording is not None and program.infer.recording is not None


def _keys_for(program: Program, named: Sequence[str]) -> tuple[SigningKey, ...]:
    """Return the keys that sign the certificate; refuse any that are named for recorded kernels."""
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import CANNOT_CERTIFY
    from kcdsl.release.signing import signing_keys

    if named and _unread(program):
        raise refuse(
            CANNOT_CERTIFY,
            f"{_UNCERTIFIED} that a certificate would name",
            help="evaluate without --sign, or let the training kernel run",
        )
    return signing_keys(named)


def _unnamed(program: Program, files: Artefacts, signing: bool) -> str | None:
    """Return why no certificate can name what is read, None if one can; where keys are to sign,
    that is refused."""
    from kcdsl.diagnostics import Refusal
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
def _dropped_if_refused(journal: Any) -> Iterator[None]:
    """Remove the journal of an evaluation that would be refused again, whoever repeats it."""
    from kcdsl.diagnostics import Refusal, codes

    again = {codes.ABOVE_CERTIFIED, codes.NOTHING_TO_EVALUATE, codes.METRIC_OUT_OF_REACH}
    try:
        yield
    except Refusal as refusal:
        if again & {found.code for found in refusal.diagnostics}:
            journal.remove()
        raise


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def measuring_backend() -> Any:
    """Return the backend that measures; refuse where what it needs is not installed."""
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_BACKEND
    from kcdsl.route.catalogue import Fragment, catalogue

    able = [s for s in catalogue() if Fragment.STATISTICAL in s.fragments]
    for spec in able:
        if not spec.missing():
            return spec.load()
    lacking = ", ".join(sorted({name for spec in able for name in spec.missing()}))
    raise refuse(
        NO_BACKEND,
        f"no installed backend measures: {lacking} missing" if lacking else "no backend measures",
        help="`kcdsl doctor` says how to install what is missing",
    )


def implied_clauses(program: Program) -> tuple[ImpliedClause, ...]:
    """Return the clauses that would follow from drift clauses, were those proved at their limit."""
    import math

    from kcdsl.route.catalogue import catalogue
    from kcdsl.route.goals import goals
    from kcdsl.verdict.implied import ProvedDrift
    from kcdsl.verdict.report import ImpliedClause

    premises = tuple(
        ProvedDrift(
            clause_id=goal.clause.id,
            block=goal.block,
            slice=goal.region.slice,
            region=goal.region.kind,
            norm=goal.functional,
            bound=math.nextafter(float(goal.threshold), math.inf),
            temperature=program.constants.temperature,
        )
        for goal in goals(program)
        if goal.threshold is not None
    )
    for spec in catalogue():
        if spec.name == "smt" and not spec.missing() and premises:
            return tuple(
                ImpliedClause(item.clause_id, item.slice, item.by, tuple(item.steps))
                for item in spec.load().derive(program, premises)
            )
    return ()


def accepted_findings(suppressed: Sequence[Suppressed]) -> tuple[str, ...]:
    """Return what a report says of accepted findings."""
    return tuple(
        f"{item.diagnostic.code} is accepted in line {item.line} of the contract: {item.reason}"
        for item in suppressed
    )


def _certificate(
    program: Program,
    files: Artefacts,
    report: Report,
    made: Mapping[str, NewFile],
    suppressed: Sequence[Suppressed],
    keys: Sequence[SigningKey],
    arguments: argparse.Namespace,
) -> tuple[bytes | None, str]:
    """Return the certificate, or its statement, or why there is none where no key is to sign."""
    from kcdsl.diagnostics import Refusal
    from kcdsl.diagnostics.codes import CANNOT_CERTIFY
    from kcdsl.release.issue import issue, resting_on
    from kcdsl.release.measured import certified_clauses

    try:
        stated = issue(
            program=program,
            base=files,
            clauses=certified_clauses(program, files, report),
            keys=keys,
            fingerprints=_fingerprints(report),
            stage=arguments.stage,
            lifetime=arguments.valid_for,
            suppressed=suppressed,
            assumptions=tuple(filter(None, (report.model.get("program"),))),
            evidence=resting_on({role: (file.path, file.data) for role, file in made.items()}),
            loaded=files.digests,
        )
    except Refusal as refusal:
        if keys or refusal.diagnostics[0].code is not CANNOT_CERTIFY:
            raise
        return None, refusal.diagnostics[0].message
    return stated, ""


def _fingerprints(report: Report) -> Fingerprints:
    """Return what identifies the kernels that ran, with the device they ran on."""
    return {side: report.kernels[side]["fingerprint"] for side in ("train", "infer")}


def _in_formats(
    wanted: Sequence[Output], report: Report, path: Path, program: Program
) -> dict[tuple[str, Path | None], str]:
    """Return the report in every format that is asked for."""
    import io

    from kcdsl.cli.report_formats import contract_places, document_in
    from kcdsl.verdict.render import print_report

    found: dict[tuple[str, Path | None], str] = {}
    for output in wanted:
        if output.format == "text":
            stream = io.StringIO()
            print_report(report, stream)
            found["text", output.file] = stream.getvalue()
            continue
        source, places = contract_places(path, program)
        found[output.format, output.file] = document_in(
            output.format,
            report.to_json(),
            command="kcdsl evaluate",
            source=source,
            places=places,
        )
    return found


def _evidence_files(
    folder: Path, report: Report, trace: bytes, records: Any, resumed: bytes
) -> dict[str, NewFile]:
    """Return the files that the results rest on, by what a certificate calls them; `resumed` is
    what was taken over from the journal of an earlier run."""
    import json

    from kcdsl.release.kernels import kernels_document
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


def _write(
    folder: Path,
    report: Report,
    evidence: Mapping[str, NewFile],
    stated: tuple[Path, bytes | None],
    svg: str | None,
    extra: Sequence[tuple[Path, str]] = (),
) -> list[str]:
    """Write all files of the evaluation, all or none, the report last; return their names."""
    from kcdsl.source.writing import NewFile, make_folder, result, write_together
    from kcdsl.verdict.html import page

    make_folder(folder)
    files = [file for role, file in evidence.items() if role != "report"]
    target, data = stated
    if data is not None:
        files.append(result(target, data))
    if svg is not None:
        from kcdsl.verdict.render import svg as picture

        files.append(NewFile(Path(svg), picture(report).encode(), 0o644))
    files += [NewFile(file, text.encode(), 0o644) for file, text in extra]
    files.append(result(folder / "report.html", page(report.to_json()).encode()))
    files.append(evidence["report"])
    write_together(files, replace=True)
    return [str(file.path) for file in files]
