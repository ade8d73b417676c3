"""`kcdsl check`, `fleet` and `transfer`: verify certificates, join those of many kernels, carry
results over to later weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.api.backends import formal_backend
from kcdsl.api.contract import Contract, read_contract, refuse_foreign_code
from kcdsl.cli.common import argument, choice, switch, value, values
from kcdsl.cli.common.options import (
    KERNELS,
    PLAIN_HTTP,
    RunsCode,
    Signs,
    Stage,
    Trusts,
    fingerprints_in,
    json_option,
    output_option,
    register_option,
)
from kcdsl.cli.common.output import deliver, long_progress, print_json
from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import CANNOT_TRANSFER
from kcdsl.diagnostics.render.terminal import json_text, one_line, printable
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from rich.table import Table

    from kcdsl.api.fleet import FleetReading
    from kcdsl.release.transfer import Regions, TransferPlan
    from kcdsl_certs.signatures import SigningKey
    from kcdsl_certs.statement import Expectation, Triple
    from kcdsl_certs.verification.report import Combined, Report


RECHECK = "re-derive every proof by the independent checker"
OTHER_KERNELS = (
    "the kernels of this machine were compared; for those of another machine or a server, name the"
    "\nkernels.json of `kcdsl evaluate` there by --kernels"
)


@dataclass(frozen=True, kw_only=True)
class CheckCommand(Trusts):
    """Verify signature, triple, freshness and coverage of a certificate."""

    certificates: tuple[str, ...] = argument(
        "CERT",
        "certificates about one triple, or oci://HOST/NAME@sha256:DIGEST for those that are"
        " attached to an image",
        "+",
    )
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
    infer_checkpoint: str | None = value(
        "FILE", "the weights of the inference kernel, where the contract names some of its own"
    )
    base: str | None = value(
        "FILE", "the earlier weights, with which those of a weights transfer are compared"
    )
    stage: Stage | None = choice(Stage, "the stage that is asked for")
    minimum_sequence: int | None = value("N", "refuse certificates before this one", read=int)
    at: str | None = value("TIME", "check as of this time, 2026-11-30T12:00:00Z")
    plain_http: bool = switch(PLAIN_HTTP)
    register: str | None = register_option("in which each certificate must be in force")
    write_expectation: str | None = value(
        "FILE",
        "also write what is expected, for `python -m kcdsl_certs check --expect FILE`",
    )
    json: bool = json_option("print the report as JSON")

    def run(self) -> Exit:
        """Check certificates: 0 valid, 4 invalid; what could not be read is refused (2)."""
        from kcdsl.api.checking import CheckSettings, check_certificates

        settings = CheckSettings(
            key=self.key,
            contract=self.contract,
            recheck=self.recheck,
            complete=self.complete,
            signature_only=self.signature_only,
            policy=self.policy,
            threshold=self.threshold,
            revocations=self.revocations,
            kernels=self.kernels,
            checkpoint=self.checkpoint,
            infer_checkpoint=self.infer_checkpoint,
            base=self.base,
            stage=self.stage,
            minimum_sequence=self.minimum_sequence,
            at=self.at,
            plain_http=self.plain_http,
            register=self.register,
            expected=self._write_expectation,
            progress=long_progress,
        )
        report = check_certificates(self.certificates, settings).combined
        if self.json:
            print_json(report.to_json())
        else:
            print_report(report)
            refused = (reason for _, one in report.reports for reason in one.reasons)
            if self.kernels is None and any("/kernel-" in reason for reason in refused):
                print(OTHER_KERNELS)
            if self.signature_only and report.accepted:
                print("looked at: the signed statement alone, no proof and no evidence beside it")
        return Exit.HELD if report.accepted else Exit.CERTIFICATE_INVALID

    def _write_expectation(self, expectation: Expectation) -> None:
        if self.write_expectation is not None:
            deliver(json_text(expectation.to_json(), indent=1), self.write_expectation)


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


# --- fleet ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class FleetCommand(Trusts):
    """Say which kernels of a fleet agree under a contract, from certificates of pairs of them."""

    certificates: tuple[str, ...] = argument(
        "CERT", "certificates, each of one kernel as training and one as inference kernel", "+"
    )
    contracts: tuple[str, ...] = values(
        "CONTRACT",
        "a contract of the fleet, repeatable: they differ in their kernels alone (default: the one"
        " here)",
        name="contract",
    )
    classes: tuple[str, ...] = values(
        "FILE", "the certificate of a class, repeatable: derive it again", name="class"
    )
    sign: tuple[str, ...] = values("KEY", "private key, repeatable, that signs each class")
    output: str | None = output_option(
        "DIR", "where --sign writes class-1.cert.json and so on", "."
    )
    at: str | None = value("TIME", "read as of this time, 2026-11-30T12:00:00Z")
    html: str | None = value("FILE", "write a page that needs no other file, and print nothing")
    json: bool = json_option()

    def run(self) -> Exit:
        """Compare: 0 all kernels agree, 1 two of them disagree, 3 a pair is not decided, 4 the
        certificate of a class is not valid."""
        from kcdsl.api.checking import moment_of
        from kcdsl.api.fleet import checked_class, fleet_of
        from kcdsl.release.signing import signing_keys

        moment = moment_of(self.at)
        contracts = [read_contract(name) for name in self.contracts or (None,)]
        trust = self.trust_for(contracts[0].base)
        files = [Path(name) for name in self.certificates]
        keys = signing_keys(self.sign)
        reading = fleet_of(contracts, files, trust, moment)
        checked = tuple(checked_class(Path(name), reading, trust, moment) for name in self.classes)
        found = replace(reading.fleet, checked=checked)
        if keys:
            self._write_classes(reading, keys, moment)
        if self.html is not None:
            from kcdsl.verdict.html.fleet import fleet_page

            deliver(fleet_page(found), self.html)
            print(one_line(f"wrote {self.html}"), file=sys.stderr)
        if self.json:
            print_json(found.to_json())
        elif self.html is None:
            from kcdsl.verdict.text.fleet import print_fleet

            print_fleet(found, sys.stdout)
        return found.exit

    def _write_classes(
        self, reading: FleetReading, keys: Sequence[SigningKey], moment: datetime
    ) -> None:
        """Sign each class of two or more kernels in a file of its own; all are written or none."""
        from kcdsl.api.fleet import class_statements
        from kcdsl.source.writing import NewFile, make_folder, write_together
        from kcdsl_certs.signatures import bundle_bytes, sign
        from kcdsl_certs.statement import class_bytes

        folder = Path(self.output or ".")
        files = [
            NewFile(
                folder / f"class-{number}.cert.json",
                bundle_bytes(sign(class_bytes(one), keys), keys[0].public.hint),
                0o644,
            )
            for number, one in enumerate(class_statements(reading, moment), 1)
        ]
        make_folder(folder)
        write_together(files, replace=False)
        for file in files:
            print(one_line(f"wrote {file.path}"), file=sys.stderr)


# --- transfer -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TransferCommand(Trusts, RunsCode, Signs):
    """Carry the results of a certificate over to later weights, by comparing the weights."""

    certificate: str = argument("CERT", "a certificate of `kcdsl verify`")
    checkpoint: str = argument("CHECKPOINT", "the later weights")
    contract: str | None = value("CONTRACT", "the contract in force")
    base: str | None = value(
        "FILE", "the weights of the certificate, if not those that the contract names"
    )
    recheck: bool = switch(RECHECK)
    kernels: str | None = value("FILE", KERNELS)
    output: str | None = output_option(
        "FILE", "beside CERT (default: CERT with .transfer.json, or .transfer.statement.json)"
    )
    json: bool = json_option()

    def run(self) -> Exit:
        """Write the transfer: 0 if every result goes over, 3 if some or all stay behind, 4 if the
        certificate itself is not valid."""
        from kcdsl.api.checking import read_certificate
        from kcdsl.model.files import Artefacts
        from kcdsl.release.signing import refuse_other_signers, signing_keys, tell_unsigned
        from kcdsl.release.transfer import plan
        from kcdsl.source.files import in_contract
        from kcdsl.source.writing import write_bytes
        from kcdsl_certs.encoding.rejected import Rejected
        from kcdsl_certs.verification.transfers import Weights

        path = Path(self.certificate)
        keys = signing_keys(self.sign)
        bundle, target = read_certificate(path), self._target(path, bool(keys))
        if keys:
            refuse_other_signers(target, keys)
        contract = read_contract(self.contract)
        refuse_foreign_code(contract, allowed=self.allow_code, metrics=False)
        named = contract.program.model.checkpoint
        files = Artefacts.of(contract.base)
        earlier = files.locate(named) if self.base is None else Path(self.base)
        later = Path(self.checkpoint)
        report, triple = self._verified(contract, bundle, earlier, later)
        if not report.accepted or report.predicate is None or report.certificate is None:
            _refused(report, path, self.json)
            return Exit.CERTIFICATE_INVALID
        try:
            with in_contract(contract.path):
                weights = Weights(earlier, later)
                weights.refuse_others(report.predicate.triple, triple)
                regions = _regions(contract, later)
                found = plan(report.predicate, path.parent, weights, regions)
        except Rejected as error:
            raise _cannot(f"{error.detail} ({error.reason})") from error
        if found.carried:
            data = _signed(report, path, triple, found, keys)
            write_bytes(target, data, own_name=self.output is None)
        _show(found, target if found.carried else None, self.json)
        if found.carried and not keys:
            tell_unsigned(target)
        return Exit.HELD if found.carried and not found.left else Exit.INCONCLUSIVE

    def _target(self, certificate: Path, signed: bool) -> Path:
        stem = certificate.name.removesuffix(".json").removesuffix(".cert")
        usual = certificate.with_name(f"{stem}.transfer.{'json' if signed else 'statement.json'}")
        if self.output is None:
            return usual
        target = Path(self.output)
        if target.resolve().parent != certificate.resolve().parent:
            raise _cannot(
                "a transfer lies beside the certificate that it names, and its proofs",
                help=f"name a file in {certificate.parent}, such as {usual}",
            )
        if target.resolve() == certificate.resolve():
            raise _cannot("the transfer would replace the certificate", help="name another file")
        return target

    def _verified(
        self, contract: Contract, bundle: bytes, earlier: Path, later: Path
    ) -> tuple[Report, Triple]:
        """Return what the checks of the earlier certificate say, and the triple of the later
        one."""

        from kcdsl.release.requirements import build_expectation
        from kcdsl_certs.encoding.rejected import Rejected
        from kcdsl_certs.signatures import decode, parse_bundle
        from kcdsl_certs.verification.proofs import PresentProofs, ProofChecker, Rechecker
        from kcdsl_certs.verification.report import refused
        from kcdsl_certs.verification.transfers import earlier_triple
        from kcdsl_certs.verification.verify import verify

        folder = Path(self.certificate).parent
        kernels = fingerprints_in(self.kernels)
        expected = build_expectation(
            contract.program, contract.base, fingerprints=kernels, checkpoint=later
        )
        trust = self.trust_for(contract.base)
        try:
            triple = earlier_triple(decode(parse_bundle(bundle)).payload, expected.triple, earlier)
        except Rejected as error:
            return refused("components", error), expected.triple
        checker: ProofChecker = PresentProofs(folder)
        if self.recheck:
            checker = Rechecker(folder, earlier)
        report = verify(
            bundle,
            trusted=trust.rules,
            expected_triple=triple,
            clock=lambda: datetime.now(UTC),
            required_clauses=expected.clauses,
            proofs=checker,
            partial=True,
            expected_inputs=expected.inputs,
        )
        return report, expected.triple


def _cannot(message: str, help: str | None = None) -> Refusal:
    way_out = help or "verify the contract with the later weights: kcdsl verify"
    return refuse(CANNOT_TRANSFER, message, help=way_out)


def _regions(contract: Contract, later: Path) -> Regions:
    """Return what makes the cases of a clause with the later weights; the model is loaded once it
    is needed."""
    from kcdsl.route.goals import goals

    def regions(clause: str) -> Any:
        chosen = [goal for goal in goals(contract.program) if goal.clause.id == clause]
        if not chosen:
            raise _cannot(f"the contract has no clause {clause!r} about every input of a region")
        backend = formal_backend("interval", around_weights=True)
        return backend.regions(contract.program, contract.base, chosen[:1], checkpoint=later)[0]

    return regions


def _signed(
    report: Report, path: Path, triple: Triple, found: TransferPlan, keys: Sequence[SigningKey]
) -> bytes:
    from kcdsl.release.issue import utc_now
    from kcdsl.release.transfer import transfer_of
    from kcdsl_certs.signatures import bundle_bytes, sign
    from kcdsl_certs.statement import transfer_bytes

    assert report.predicate is not None
    assert report.certificate is not None
    issued = utc_now().replace(microsecond=0)
    body = transfer_of(report.predicate, report.certificate, path.name, triple, found, issued)
    payload = transfer_bytes(body)
    return bundle_bytes(sign(payload, keys), keys[0].public.hint) if keys else payload


def _refused(report: Report, path: Path, as_json: bool) -> None:
    if as_json:
        print_json(report.to_json())
        return
    for check in report.checks:
        if check.reason in report.reasons:
            print(printable(f"{path}: {check.name}: {check.detail} ({check.reason})"))
    print(one_line(f"{path} is not valid, so nothing of it goes over"))


def _show(found: TransferPlan, target: Path | None, as_json: bool) -> None:
    if as_json:
        document = {
            "schema": "kcdsl.transfer/1",
            "transfer": None if target is None else str(target),
            "carried": [item.to_json() for item in found.carried],
            "left": [item.to_json() for item in found.left],
        }
        print_json(document)
        return
    from rich.text import Text

    from kcdsl.verdict.text.console import print_on, table
    from kcdsl_certs.encoding.reals import real_text

    rows = []
    for item in found.carried:
        why = "follows from a result that goes over"
        if item.weights is not None and item.moved is not None:
            why = f"{item.tensor} moved most, by {item.moved:.3g} of {real_text(item.weights)}"
        rows.append((_label(item), Text("✓ goes over", style="green"), why))
    for left in found.left:
        place = "" if left.element is None else f"{left.tensor}{list(left.element)}: "
        where = "" if left.block is None else f"{left.block}: "
        why = f"{where}{place}{left.detail}"
        rows.append((_label(left), Text("✗ stays behind", style="yellow"), why))
    print_on(sys.stdout, table(("clause", "", "why"), rows, pad_edge=False, padding=(0, 1)))
    blocks = sorted({item.block for item in found.left if item.block is not None})
    if blocks:
        again = " ".join(f"--block {block}" for block in blocks)
        print_on(sys.stdout, Text(f"with the later weights: kcdsl verify {again}"), soft_wrap=True)
    if target is not None:
        print_on(sys.stdout, Text(f"transfer: {target}"), soft_wrap=True)


def _label(item: Any) -> str:
    return str(item.id) if item.slice is None else f"{item.id} [{item.slice}]"
