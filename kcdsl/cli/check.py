"""`kcdsl check`: strict verification of a certificate against what is about to be deployed."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.diagnostics.render.terminal import json_for_terminals
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from rich.table import Table

    from kcdsl.ir.terms import Program
    from kcdsl_certs.combined import Combined
    from kcdsl_certs.report import Report

HELP = "verify signature, triple, freshness and coverage of a certificate"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from kcdsl.cli.signatures import STAGES, add_trust_options

    parser.add_argument(
        "certificates", nargs="+", metavar="CERT", help="certificates about one triple"
    )
    parser.add_argument("--contract", metavar="CONTRACT", help="the contract in force")
    add_trust_options(parser)
    parser.add_argument(
        "--recheck", action="store_true", help="re-derive every proof by the independent checker"
    )
    parser.add_argument(
        "--signature-only",
        action="store_true",
        help="look at the signed statement alone: not at proofs and evidence beside it",
    )
    parser.add_argument(
        "--complete",
        action="store_true",
        help="demand every clause of the contract, not only what the certificates cover",
    )
    parser.add_argument(
        "--kernels",
        metavar="FILE",
        help="kernel fingerprints, the kernels.json of `kcdsl evaluate`, instead of those of this "
        "machine",
    )
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="the weights, instead of those the contract names"
    )
    parser.add_argument(
        "--base",
        metavar="FILE",
        help="the earlier weights, with which those of a weights transfer are compared",
    )
    parser.add_argument("--stage", choices=STAGES, help="the stage that is asked for")
    parser.add_argument(
        "--minimum-sequence", type=int, metavar="N", help="refuse certificates before this one"
    )
    parser.add_argument("--at", metavar="TIME", help="check as of this time, 2026-11-30T12:00:00Z")
    parser.add_argument(
        "--write-expectation",
        metavar="FILE",
        help="also write what is expected, for `python -m kcdsl_certs check --expect FILE`",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(arguments: argparse.Namespace) -> Exit:
    """Check certificates: 0 valid, 4 invalid; what could not be read is refused (2)."""
    report = _report(arguments)
    if arguments.json:
        print(json_for_terminals(json.dumps(report.to_json(), indent=2, ensure_ascii=False)))
    else:
        _print(report)
        if arguments.signature_only and report.accepted:
            print("looked at: the signed statement alone, no proof and no evidence beside it")
    return Exit.HELD if report.accepted else Exit.CERTIFICATE_INVALID


def _report(arguments: argparse.Namespace) -> Combined:
    from kcdsl.cli.discover import find_contract
    from kcdsl.model.files import Artefacts
    from kcdsl.release.artefacts import ArtefactRefused, input_at_hand
    from kcdsl.release.kernels import read_kernels
    from kcdsl.release.triple import build_expectation
    from kcdsl.release.trust import trusted
    from kcdsl.source.writing import write_bytes
    from kcdsl_certs.combined import Combined
    from kcdsl_certs.proofs import PresentProofs, ProofChecker, Rechecker
    from kcdsl_certs.rejected import Rejected
    from kcdsl_certs.report import refused
    from kcdsl_certs.transferring import Earlier
    from kcdsl_certs.verify import verify

    if arguments.signature_only and (arguments.recheck or arguments.complete):
        raise _contradiction()
    if arguments.recheck:
        _refuse_without_numpy()
    paths = [Path(name) for name in arguments.certificates]
    bundles = [read_certificate(path) for path in paths]
    moment = _moment(arguments.at)
    contract = find_contract(arguments.contract, Path())
    base = contract.resolve().parent
    program = _compile(contract)
    trust = trusted(arguments, base)
    given = None if arguments.checkpoint is None else Path(arguments.checkpoint)
    files = Artefacts.of(base)
    checkpoint = files.locate(program.model.checkpoint) if given is None else given
    kernels = None if arguments.kernels is None else read_kernels(Path(arguments.kernels))
    try:
        expectation = build_expectation(program, files, fingerprints=kernels, checkpoint=checkpoint)
    except ArtefactRefused as error:
        refusal = refused("components", Rejected(error.reason, error.detail))
        refusals = tuple((str(path), refusal) for path in paths)
        return Combined(refusals, arguments.complete, trust)
    if arguments.write_expectation is not None:
        document = (
            json_for_terminals(json.dumps(expectation.to_json(), indent=1, ensure_ascii=False))
            + "\n"
        )
        write_bytes(Path(arguments.write_expectation), document.encode("utf-8"))

    def run(path: Path, bundle: bytes) -> Report:
        proofs: ProofChecker | None = PresentProofs(path.parent)
        if arguments.recheck:
            proofs = Rechecker(path.parent, checkpoint)
        elif arguments.signature_only:
            proofs = None
        return verify(
            bundle,
            trusted=trust.rules,
            expected_triple=expectation.triple,
            clock=lambda: moment,
            required_clauses=expectation.clauses,
            stage=arguments.stage,
            minimum_sequence=arguments.minimum_sequence,
            proofs=proofs,
            partial=len(paths) > 1 or not arguments.complete,
            expected_inputs=expectation.inputs,
            signature_only=arguments.signature_only,
            evidence=None if arguments.signature_only else path.parent,
            data=None if arguments.signature_only else partial(input_at_hand, files),
            slices=expectation.slices,
            strict=arguments.complete,
            earlier=None
            if arguments.base is None
            else Earlier(path.parent, Path(arguments.base), checkpoint, arguments.recheck),
        )

    reports = tuple((str(p), run(p, b)) for p, b in zip(paths, bundles, strict=True))
    return Combined(reports, arguments.complete, trust)


def _contradiction() -> Exception:
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import USAGE

    return refuse(
        USAGE,
        "--signature-only looks at nothing that --recheck and --complete demand",
        help="leave it out, or leave them out",
    )


def _refuse_without_numpy() -> None:
    """Refuse a re-derivation that cannot run, instead of calling the certificate invalid."""
    from importlib.util import find_spec

    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import NO_PACKAGE

    if find_spec("numpy") is None:
        raise refuse(
            NO_PACKAGE, "--recheck needs numpy, which is not installed", help="pip install numpy"
        )


def _compile(contract: Path) -> Program:
    from kcdsl.check.compile import load_program

    return load_program(contract)


def read_certificate(path: Path) -> bytes:
    """Return the bytes of a certificate; refuse one that cannot be read."""
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import FILE_MISSING
    from kcdsl.source.files import open_regular
    from kcdsl_certs.envelope import LARGEST_BUNDLE

    try:
        with open_regular(path) as stream:
            return stream.read(LARGEST_BUNDLE + 1)
    except OSError as error:
        raise refuse(
            FILE_MISSING, f"the certificate {path} cannot be read: {error.strerror}"
        ) from error


def _moment(text: str | None) -> datetime:
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import BAD_TIME
    from kcdsl_certs.rejected import Rejected
    from kcdsl_certs.strict import parse_time

    if text is None:
        return datetime.now(UTC)
    try:
        return parse_time(text)
    except Rejected as error:
        raise refuse(BAD_TIME, f"--at: {error.detail}") from error


def _print(combined: Combined) -> None:
    from rich.text import Text

    from kcdsl.verdict.console import print_on

    reasons: list[str] = []
    for name, report in combined.reports:
        print_on(sys.stdout, _table(report, name))
        reasons.extend(report.reasons)
    if combined.coverage is not None and combined.coverage.reason == "clause/missing":
        reasons.append(combined.coverage.reason)
    if combined.accepted:
        for text in combined.assumptions:
            print_on(sys.stdout, Text(f"assumed: {' '.join(text.split())}"))
    if combined.trust is not None:
        print_on(sys.stdout, Text(f"trust: {combined.trust}"), soft_wrap=True)
    style = "bold green" if combined.accepted else "bold red"
    why = f": {', '.join(dict.fromkeys(reasons))}" if reasons else ""
    print_on(sys.stdout, Text.assemble((combined.verdict, style), why))
    if all(report.accepted for _, report in combined.reports) and combined.outside:
        print_on(sys.stdout, Text(f"not covered: {', '.join(combined.outside)}"))


def _table(report: Report, name: str) -> Table:
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "failed": "bold red", "not_run": "dim"}
    table = Table(title=Text(f"certificate {name}"), title_justify="left", show_lines=False)
    for heading in ("step", "outcome", "reason", "detail"):
        table.add_column(heading, overflow="fold")
    for check in report.checks:
        outcome = check.outcome.value
        table.add_row(
            check.name,
            Text(outcome.replace("_", " "), style=styles[outcome]),
            Text(check.reason),
            Text(check.detail),
        )
    return table
