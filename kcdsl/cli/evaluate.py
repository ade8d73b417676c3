"""`kcdsl evaluate`: run both kernels on the slices and decide the empirical clauses."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kcdsl.diagnostics import Suppressed
    from kcdsl.ir.terms import Program
    from kcdsl.release.triple import Fingerprints
    from kcdsl.verdict.report import ImpliedClause, Report

HELP = "run both kernels on the slices and decide the measured clauses"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    from kcdsl.cli.devices import CHOICES
    from kcdsl.cli.looks import add_looks

    parser.add_argument("contract", nargs="?", metavar="CONTRACT", help="default: the one here")
    parser.add_argument("--slice", action="append", metavar="NAME", help="only this slice")
    parser.add_argument(
        "--device", choices=CHOICES, default="auto", help="default: cuda where there is one"
    )
    parser.add_argument(
        "--seed", type=_natural, default=0, metavar="N", help="of sampling and resampling"
    )
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=20.0,
        metavar="S",
        help="how long runs may be timed (default: 20)",
    )
    add_looks(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="folder of report, traces, fingerprints and certificate (default: out beside the "
        "contract)",
    )
    parser.add_argument("--svg", metavar="FILE", help="write the printed report as a picture")
    parser.add_argument(
        "--sign", metavar="KEY", help="private key (default: kcdsl.key beside the contract)"
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Run the command: evaluate, write the files, print the report."""
    from dataclasses import replace

    from kcdsl.check.compile import load_contract
    from kcdsl.cli.devices import choose_device
    from kcdsl.cli.discover import find_contract
    from kcdsl.cli.progress import progress_bars
    from kcdsl.diagnostics.places import in_contract
    from kcdsl.release.artefacts import checkpoint_manifest, locate
    from kcdsl.release.signing import signing_key

    path = find_contract(arguments.contract, Path())
    (program, suppressed), base = load_contract(path), path.resolve().parent
    key = signing_key(arguments.sign, base)
    device = choose_device(arguments.device)
    if key is not None:  # what no certificate can name is refused before hours of measuring
        checkpoint_manifest(locate(program.model.checkpoint, base))
    with in_contract(path), progress_bars() as progress:
        evaluation = _backend().evaluate(
            program,
            base,
            device=device,
            slices=tuple(arguments.slice or ()),
            seed=arguments.seed,
            seconds=arguments.seconds,
            looks=None if arguments.anytime else arguments.looks,
            progress=progress,
        )
    found: Report = evaluation.report
    notes = (*found.notes, *_accepted(suppressed))
    report = replace(found, implied=_implied(program), notes=notes)
    bundle = None if key is None else _certificate(program, base, report, suppressed, key)
    folder = Path(arguments.output) if arguments.output else path.parent / "out"
    written = _write(folder, report, evaluation.traces, bundle, arguments.svg)
    if arguments.json:
        sys.stdout.write(report.dumps())
    else:
        from kcdsl.verdict.render import print_report

        print_report(report, sys.stdout)
    for name in written:
        print(f"wrote {name}", file=sys.stderr)
    if key is None:
        print(
            "not certified: no signing key (kcdsl keygen -o kcdsl.key makes one)", file=sys.stderr
        )
    return report.exit


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be a positive number")
    return value


def _backend() -> Any:
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


def _implied(program: Program) -> tuple[ImpliedClause, ...]:
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


def _accepted(suppressed: Sequence[Suppressed]) -> list[str]:
    return [
        f"{item.diagnostic.code} is accepted in line {item.line} of the contract: {item.reason}"
        for item in suppressed
    ]


def _certificate(
    program: Program, base: Path, report: Report, suppressed: Sequence[Suppressed], key: Any
) -> bytes:
    from kcdsl.release.issue import issue
    from kcdsl.release.measured import certified_clauses

    return issue(
        program=program,
        base=base,
        clauses=certified_clauses(program, base, report),
        keys=[key],
        fingerprints=_fingerprints(report),
        suppressed=suppressed,
    )


def _fingerprints(report: Report) -> Fingerprints:
    """Return what identifies the kernels that ran, with the device they ran on."""
    return {side: report.kernels[side]["fingerprint"] for side in ("train", "infer")}


def _write(
    folder: Path, report: Report, traces: Any, bundle: bytes | None, svg: str | None
) -> list[str]:
    """Write all files of the evaluation, all or none; return their names."""
    import json

    from kcdsl.release.kernels import kernels_document
    from kcdsl.source.writing import NewFile, make_folder, write_together

    make_folder(folder)
    lines = (json.dumps(t, allow_nan=False, separators=(",", ":")) + "\n" for t in traces)
    files = [
        NewFile(folder / "report.json", report.dumps().encode(), 0o644),
        NewFile(folder / "trace.jsonl", "".join(lines).encode(), 0o644),
        NewFile(folder / "kernels.json", kernels_document(_fingerprints(report)), 0o644),
    ]
    if bundle is not None:
        files.append(NewFile(folder / "evaluate.cert.json", bundle, 0o644))
    if svg is not None:
        from kcdsl.verdict.render import svg as picture

        files.append(NewFile(Path(svg), picture(report).encode(), 0o644))
    write_together(files, replace=True)
    return [str(file.path) for file in files]
