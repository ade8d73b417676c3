"""`kcdsl check`: strict verification of a certificate against what is about to be deployed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.cli.common import argument, choice, switch, value
from kcdsl.cli.common.contracts import read_contract
from kcdsl.cli.common.groups import Stage, Trusts
from kcdsl.cli.common.options import KERNELS, fingerprints_in, json_option
from kcdsl.cli.common.output import deliver, print_json
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import BAD_TIME, FILE_MISSING, NO_PACKAGE, USAGE
from kcdsl.diagnostics.render.terminal import json_text
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from rich.table import Table

    from kcdsl.model.files import Artefacts
    from kcdsl_certs.signatures import Trust
    from kcdsl_certs.statement import Expectation
    from kcdsl_certs.verification.report import Combined, Report

RECHECK = "re-derive every proof by the independent checker"


@dataclass(frozen=True, kw_only=True)
class Check(Trusts):
    """Verify signature, triple, freshness and coverage of a certificate."""

    certificates: tuple[str, ...] = argument("CERT", "certificates about one triple", "+")
    contract: str | None = value("CONTRACT", "the contract in force")
    recheck: bool = switch(RECHECK)
    signature_only: bool = switch(
        "look at the signed statement alone: not at proofs and evidence beside it"
    )
    complete: bool = switch(
        "demand every clause of the contract, not only what the certificates cover"
    )
    kernels: str | None = value("FILE", KERNELS)
    checkpoint: str | None = value("FILE", "the weights, instead of those the contract names")
    base: str | None = value(
        "FILE", "the earlier weights, with which those of a weights transfer are compared"
    )
    stage: Stage | None = choice(Stage, "the stage that is asked for")
    minimum_sequence: int | None = value("N", "refuse certificates before this one", read=int)
    at: str | None = value("TIME", "check as of this time, 2026-11-30T12:00:00Z")
    write_expectation: str | None = value(
        "FILE",
        "also write what is expected, for `python -m kcdsl_certs check --expect FILE`",
    )
    json: bool = json_option("print the report as JSON")

    def run(self) -> Exit:
        """Check certificates: 0 valid, 4 invalid; what could not be read is refused (2)."""
        report = self._report()
        if self.json:
            print_json(report.to_json())
        else:
            print_report(report)
            if self.signature_only and report.accepted:
                print("looked at: the signed statement alone, no proof and no evidence beside it")
        return Exit.HELD if report.accepted else Exit.CERTIFICATE_INVALID

    def _report(self) -> Combined:
        from kcdsl.model.files import Artefacts
        from kcdsl.release.artefacts import ArtefactRefused
        from kcdsl.release.triple import build_expectation
        from kcdsl_certs.rejected import Rejected
        from kcdsl_certs.verification.report import Combined, refused

        if self.signature_only and (self.recheck or self.complete):
            raise refuse(
                USAGE,
                "--signature-only looks at nothing that --recheck and --complete demand",
                help="leave it out, or leave them out",
            )
        if self.recheck:
            _refuse_without_numpy()
        paths = [Path(name) for name in self.certificates]
        bundles = [read_certificate(path) for path in paths]
        moment = _moment(self.at)
        contract = read_contract(self.contract)
        trust = self.trust_for(contract.base)
        files = Artefacts.of(contract.base)
        named = contract.program.model.checkpoint
        checkpoint = files.locate(named) if self.checkpoint is None else Path(self.checkpoint)
        kernels = fingerprints_in(self.kernels)
        try:
            expectation = build_expectation(
                contract.program, files, fingerprints=kernels, checkpoint=checkpoint
            )
        except ArtefactRefused as error:
            refusal = refused("components", Rejected(error.reason, error.detail))
            refusals = tuple((str(path), refusal) for path in paths)
            return Combined(refusals, self.complete, trust)
        if self.write_expectation is not None:
            deliver(json_text(expectation.to_json(), indent=1), self.write_expectation)
        reports = tuple(
            (str(path), self._one(path, bundle, moment, trust, expectation, files, checkpoint))
            for path, bundle in zip(paths, bundles, strict=True)
        )
        return Combined(reports, self.complete, trust)

    def _one(
        self,
        path: Path,
        bundle: bytes,
        moment: datetime,
        trust: Trust,
        expectation: Expectation,
        files: Artefacts,
        checkpoint: Path,
    ) -> Report:
        """Return what the checks of one certificate say."""
        from kcdsl.release.artefacts import input_at_hand
        from kcdsl_certs.verification.proofs import PresentProofs, ProofChecker, Rechecker
        from kcdsl_certs.verification.transfers import Earlier
        from kcdsl_certs.verification.verify import verify

        proofs: ProofChecker | None = PresentProofs(path.parent)
        if self.recheck:
            proofs = Rechecker(path.parent, checkpoint)
        elif self.signature_only:
            proofs = None
        return verify(
            bundle,
            trusted=trust.rules,
            expected_triple=expectation.triple,
            clock=lambda: moment,
            required_clauses=expectation.clauses,
            stage=self.stage,
            minimum_sequence=self.minimum_sequence,
            proofs=proofs,
            partial=len(self.certificates) > 1 or not self.complete,
            expected_inputs=expectation.inputs,
            signature_only=self.signature_only,
            evidence=None if self.signature_only else path.parent,
            data=None if self.signature_only else partial(input_at_hand, files),
            slices=expectation.slices,
            strict=self.complete,
            earlier=None
            if self.base is None
            else Earlier(path.parent, Path(self.base), checkpoint, self.recheck),
        )


def _refuse_without_numpy() -> None:
    """Refuse a re-derivation that cannot run, instead of calling the certificate invalid."""
    from importlib.util import find_spec

    if find_spec("numpy") is None:
        raise refuse(
            NO_PACKAGE, "--recheck needs numpy, which is not installed", help="pip install numpy"
        )


def read_certificate(path: Path) -> bytes:
    """Return the bytes of a certificate; refuse one that cannot be read."""
    from kcdsl.source.files import open_regular
    from kcdsl_certs.signatures import LARGEST_BUNDLE

    try:
        with open_regular(path) as stream:
            return stream.read(LARGEST_BUNDLE + 1)
    except OSError as error:
        raise refuse(
            FILE_MISSING, f"the certificate {path} cannot be read: {error.strerror}"
        ) from error


def _moment(text: str | None) -> datetime:
    from kcdsl_certs.rejected import Rejected
    from kcdsl_certs.strict import parse_time

    if text is None:
        return datetime.now(UTC)
    try:
        return parse_time(text)
    except Rejected as error:
        raise refuse(BAD_TIME, f"--at: {error.detail}") from error


def print_report(combined: Combined) -> None:
    """Print what the checks say of each certificate, and of all of them."""
    from rich.text import Text

    from kcdsl.verdict.text.console import print_on

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
