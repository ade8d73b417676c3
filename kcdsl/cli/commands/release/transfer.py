"""`kcdsl transfer`: transfer the results of a certificate to later weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.api.backends import formal_backend
from kcdsl.api.contract import Contract, read_contract, refuse_foreign_code
from kcdsl.cli.common import argument, switch, value
from kcdsl.cli.common.execution import CodeOptions, SigningOptions
from kcdsl.cli.common.options import (
    KERNELS,
    RECHECK,
    OutputFormat,
    TrustOptions,
    fingerprints_in,
    format_option,
    output_option,
)
from kcdsl.cli.common.output import print_json
from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import CANNOT_TRANSFER
from kcdsl.diagnostics.render.terminal import one_line, printable
from kcdsl.exits import Exit
from kcdsl.source.files import in_contract

if TYPE_CHECKING:
    from kcdsl.release.transfer import Regions, TransferPlan
    from kcdsl_certs.signatures import SigningKey
    from kcdsl_certs.statement import Triple
    from kcdsl_certs.verification.report import Report


@dataclass(frozen=True, kw_only=True)
class TransferCommand(TrustOptions, CodeOptions, SigningOptions):
    """Transfer the results of a certificate to later weights, by comparing the weights."""

    certificate: str = argument("CERT", "a certificate of `kcdsl verify`")
    checkpoint: str = argument("CHECKPOINT", "the later weights, to which results are transferred")
    contract: str | None = value("CONTRACT", "the contract in force")
    base: str | None = value(
        "FILE", "the weights of the certificate, if they differ from those of the contract"
    )
    recheck: bool = switch(RECHECK)
    kernels: str | None = value("FILE", KERNELS)
    output: str | None = output_option(
        "FILE", "beside CERT (default: CERT with .transfer.json, or .transfer.statement.json)"
    )
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Write the transfer: 0 if every result is transferred, 3 if any is not, 4 if the
        certificate itself is not valid."""
        from kcdsl.api.certificates import read_certificate
        from kcdsl.model.files import Artefacts
        from kcdsl.release.signing import refuse_other_signers, signing_keys, tell_unsigned
        from kcdsl.release.transfer import plan
        from kcdsl.source.output import write_bytes
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
            _refused(report, path, self.format is OutputFormat.JSON)
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
        _show(found, target if found.carried else None, self.format is OutputFormat.JSON)
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
        """Return the report on the earlier certificate, and the triple of the later one."""
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
    """Return a function of the cases of a clause with the later weights, which loads the model on
    first use."""
    from kcdsl.route.goals import goals

    def regions(clause: str) -> Any:
        chosen = [goal for goal in goals(contract.program) if goal.clause.id == clause]
        if not chosen:
            raise _cannot(f"the contract has no clause {clause!r} about every input of a region")
        backend: Any = formal_backend("interval", around_weights=True)
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
    print(one_line(f"{path} is not valid, so nothing of it is transferred"))


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
        why = "follows from a result that is transferred"
        if item.weights is not None and item.moved is not None:
            why = f"{item.tensor} moved most, by {item.moved:.3g} of {real_text(item.weights)}"
        rows.append((_label(item), Text("✓ transferred", style="green"), why))
    for left in found.left:
        place = "" if left.element is None else f"{left.tensor}{list(left.element)}: "
        where = "" if left.block is None else f"{left.block}: "
        why = f"{where}{place}{left.detail}"
        rows.append((_label(left), Text("✗ not transferred", style="yellow"), why))
    print_on(sys.stdout, table(("clause", "", "why"), rows, pad_edge=False, padding=(0, 1)))
    blocks = sorted({item.block for item in found.left if item.block is not None})
    if blocks:
        again = " ".join(f"--block {block}" for block in blocks)
        print_on(sys.stdout, Text(f"with the later weights: kcdsl verify {again}"), soft_wrap=True)
    if target is not None:
        print_on(sys.stdout, Text(f"transfer: {target}"), soft_wrap=True)


def _label(item: Any) -> str:
    return str(item.id) if item.slice is None else f"{item.id} [{item.slice}]"
