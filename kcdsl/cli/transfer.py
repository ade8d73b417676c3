"""`kcdsl transfer`: state for later weights what was proved in a region around earlier ones."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.foreign import add_allow_code, refuse_foreign_code
from kcdsl.diagnostics.render.terminal import json_for_terminals, one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.ir.terms import Program
    from kcdsl.release.transfer import Plan, Regions
    from kcdsl_certs.report import Report
    from kcdsl_certs.triple import Triple

HELP = "carry the results of a certificate over to later weights, by comparing the weights"
SCHEMA = "kcdsl.transfer/1"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    from kcdsl.cli.signatures import add_sign_option, add_trust_options

    parser.add_argument("certificate", metavar="CERT", help="a certificate of `kcdsl verify`")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="the later weights")
    parser.add_argument("--contract", metavar="CONTRACT", help="the contract in force")
    parser.add_argument(
        "--base",
        metavar="FILE",
        help="the weights of the certificate, if not those that the contract names",
    )
    add_trust_options(parser)
    parser.add_argument(
        "--recheck", action="store_true", help="re-derive every proof by the independent checker"
    )
    parser.add_argument(
        "--kernels",
        metavar="FILE",
        help="kernel fingerprints, the kernels.json of `kcdsl evaluate`, instead of those of this "
        "machine",
    )
    add_allow_code(parser)
    add_sign_option(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="beside CERT (default: CERT with .transfer.json, or .transfer.statement.json)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> Exit:
    """Write the transfer: 0 if every result goes over, 3 if some or all stay behind, 4 if the
    certificate itself is not valid."""
    from kcdsl.cli.check import read_certificate
    from kcdsl.cli.discover import find_contract
    from kcdsl.model.files import Artefacts
    from kcdsl.release.signing import refuse_other_signers, signing_keys, tell_unsigned
    from kcdsl.release.transfer import plan
    from kcdsl.source.files import in_contract
    from kcdsl.source.writing import write_bytes
    from kcdsl_certs.rejected import Rejected
    from kcdsl_certs.transferring import Weights

    path = Path(arguments.certificate)
    keys = signing_keys(arguments.sign)
    bundle, target = read_certificate(path), _target(path, arguments.output, bool(keys))
    if keys:
        refuse_other_signers(target, keys)
    contract = find_contract(arguments.contract, Path())
    base = contract.resolve().parent
    program = _compile(contract)
    refuse_foreign_code(program, contract, arguments, metrics=False)
    named = arguments.base
    earlier = Artefacts.of(base).locate(program.model.checkpoint) if named is None else Path(named)
    later = Path(arguments.checkpoint)
    report, triple = _verified(arguments, program, base, bundle, earlier, later)
    if not report.accepted or report.predicate is None or report.certificate is None:
        _refused(report, path, arguments.json)
        return Exit.CERTIFICATE_INVALID
    try:
        with in_contract(contract):
            weights = Weights(earlier, later)
            weights.refuse_others(report.predicate.triple, triple)
            regions = _regions(program, base, later)
            found = plan(report.predicate, path.parent, weights, regions)
    except Rejected as error:
        raise _cannot(f"{error.detail} ({error.reason})") from error
    if found.carried:
        data = _signed(report, path, triple, found, keys)
        write_bytes(target, data, own_name=arguments.output is None)
    _show(found, target if found.carried else None, arguments.json)
    if found.carried and not keys:
        tell_unsigned(target)
    return Exit.HELD if found.carried and not found.left else Exit.INCONCLUSIVE


def _compile(contract: Path) -> Program:
    from kcdsl.check.compile import load_program

    return load_program(contract)


def _target(certificate: Path, output: str | None, signed: bool) -> Path:
    stem = certificate.name.removesuffix(".json").removesuffix(".cert")
    usual = certificate.with_name(f"{stem}.transfer.{'json' if signed else 'statement.json'}")
    if output is None:
        return usual
    target = Path(output)
    if target.resolve().parent != certificate.resolve().parent:
        raise _cannot(
            "a transfer lies beside the certificate that it names, and its proofs",
            help=f"name a file in {certificate.parent}, such as {usual}",
        )
    if target.resolve() == certificate.resolve():
        raise _cannot("the transfer would replace the certificate", help="name another file")
    return target


def _cannot(message: str, help: str | None = None) -> Exception:
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import CANNOT_TRANSFER

    way_out = help or "verify the contract with the later weights: kcdsl verify"
    return refuse(CANNOT_TRANSFER, message, help=way_out)


def _verified(
    arguments: argparse.Namespace,
    program: Program,
    base: Path,
    bundle: bytes,
    earlier: Path,
    later: Path,
) -> tuple[Report, Triple]:
    """Return what the checks of the earlier certificate say, and the triple of the later one."""
    from datetime import UTC, datetime

    from kcdsl.release.kernels import read_kernels
    from kcdsl.release.triple import build_expectation
    from kcdsl.release.trust import trusted
    from kcdsl_certs.envelope import decode, parse_bundle
    from kcdsl_certs.proofs import PresentProofs, ProofChecker, Rechecker
    from kcdsl_certs.rejected import Rejected
    from kcdsl_certs.report import refused
    from kcdsl_certs.transferring import earlier_triple
    from kcdsl_certs.verify import verify

    folder = Path(arguments.certificate).parent
    kernels = None if arguments.kernels is None else read_kernels(Path(arguments.kernels))
    expected = build_expectation(program, base, fingerprints=kernels, checkpoint=later)
    trust = trusted(arguments, base)
    try:
        triple = earlier_triple(decode(parse_bundle(bundle)).payload, expected.triple, earlier)
    except Rejected as error:
        return refused("components", error), expected.triple
    checker: ProofChecker = PresentProofs(folder)
    if arguments.recheck:
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


def _regions(program: Program, base: Path, later: Path) -> Regions:
    """Return what makes the cases of a clause with the later weights; the model is loaded once it
    is needed."""
    from kcdsl.cli.verify import formal_backend
    from kcdsl.route.goals import goals

    def regions(clause: str) -> Any:
        chosen = [goal for goal in goals(program) if goal.clause.id == clause]
        if not chosen:
            raise _cannot(f"the contract has no clause {clause!r} about every input of a region")
        backend = formal_backend("interval", around_weights=True)
        return backend.regions(program, base, chosen[:1], checkpoint=later)[0]

    return regions


def _signed(report: Report, path: Path, triple: Triple, found: Plan, keys: Any) -> bytes:
    from kcdsl.release.issue import utc_now
    from kcdsl.release.transfer import transfer_of
    from kcdsl_certs.envelope import bundle_bytes, sign
    from kcdsl_certs.transfer import transfer_bytes

    assert report.predicate is not None
    assert report.certificate is not None
    issued = utc_now().replace(microsecond=0)
    body = transfer_of(report.predicate, report.certificate, path.name, triple, found, issued)
    payload = transfer_bytes(body)
    return bundle_bytes(sign(payload, keys), keys[0].public.hint) if keys else payload


def _refused(report: Report, path: Path, as_json: bool) -> None:
    if as_json:
        print(json_for_terminals(json.dumps(report.to_json(), indent=2, ensure_ascii=False)))
        return
    from kcdsl.diagnostics.render.terminal import printable

    for check in report.checks:
        if check.reason in report.reasons:
            print(printable(f"{path}: {check.name}: {check.detail} ({check.reason})"))
    print(one_line(f"{path} is not valid, so nothing of it goes over"))


def _show(found: Plan, target: Path | None, as_json: bool) -> None:
    if as_json:
        document = {
            "schema": SCHEMA,
            "transfer": None if target is None else str(target),
            "carried": [item.to_json() for item in found.carried],
            "left": [item.to_json() for item in found.left],
        }
        print(json_for_terminals(json.dumps(document, indent=2, ensure_ascii=False)))
        return
    from rich.table import Table
    from rich.text import Text

    from kcdsl.verdict.console import print_on
    from kcdsl_certs.reals import real_text

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    for heading in ("clause", "", "why"):
        table.add_column(heading, overflow="fold")
    for item in found.carried:
        why = "follows from a result that goes over"
        if item.weights is not None and item.moved is not None:
            why = f"{item.tensor} moved most, by {item.moved:.3g} of {real_text(item.weights)}"
        table.add_row(_label(item), Text("✓ goes over", style="green"), Text(why))
    for left in found.left:
        place = "" if left.element is None else f"{left.tensor}{list(left.element)}: "
        where = "" if left.block is None else f"{left.block}: "
        why = f"{where}{place}{left.detail}"
        table.add_row(_label(left), Text("✗ stays behind", style="yellow"), Text(why))
    print_on(sys.stdout, table)
    blocks = sorted({item.block for item in found.left if item.block is not None})
    if blocks:
        again = " ".join(f"--block {block}" for block in blocks)
        print_on(sys.stdout, Text(f"with the later weights: kcdsl verify {again}"), soft_wrap=True)
    if target is not None:
        print_on(sys.stdout, Text(f"transfer: {target}"), soft_wrap=True)


def _label(item: Any) -> str:
    return str(item.id) if item.slice is None else f"{item.id} [{item.slice}]"
