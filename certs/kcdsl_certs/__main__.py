"""The stand-alone checker: `python -m kcdsl_certs check CERT --expect FILE --key PUB …`.

Exit codes: 0 the certificate is valid, 2 the check could not run, 4 the certificate is invalid.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    from kcdsl_certs.encoding.isolation import isolate

    isolate()  # before anything of another package is imported

import argparse
import dataclasses
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from kcdsl_certs.encoding.files import open_regular, plain_path
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import parse_time, strict_load
from kcdsl_certs.signatures import LARGEST_BUNDLE, read_policy, trust
from kcdsl_certs.statement import STAGES, Checkpoint, Expectation, build_manifest
from kcdsl_certs.statement.manifest import storage_manifest
from kcdsl_certs.statement.triple import INFER_CHECKPOINT
from kcdsl_certs.verification.proofs import PresentProofs, ProofChecker, Rechecker
from kcdsl_certs.verification.recount import Data
from kcdsl_certs.verification.report import Combined, Report, refused
from kcdsl_certs.verification.transfers import Earlier
from kcdsl_certs.verification.verify import verify

VALID, COULD_NOT_RUN, INVALID = 0, 2, 4
_LARGEST_EXPECTATION = 64 * 1024 * 1024


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stand-alone checker; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        report = _check(options)
    except Rejected as error:
        print(_printable(f"error: {error}"), file=sys.stderr)
        return COULD_NOT_RUN
    except OSError as error:
        print(_printable(f"error: {error.filename}: {error.strerror or error}"), file=sys.stderr)
        return COULD_NOT_RUN
    if options.format == "json":
        print(json.dumps(report.to_json(), indent=2, ensure_ascii=False))
    else:
        print("\n".join(_table(name, part) for name, part in report.reports))
        if report.coverage is not None:
            said = f"coverage  {report.coverage.outcome.value}  {report.coverage.detail}"
            print(_printable(said).rstrip())
        if report.accepted:
            for text in report.assumptions:
                print(f"assumed: {text if text.isprintable() else ascii(text)}")
        print(_printable(f"trust: {report.trust}"))
        print(report.verdict)
        if report.accepted and options.signature_only:
            print("checked: only the signed statement, no proof and no evidence file")
    return VALID if report.accepted else INVALID


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kcdsl_certs", description="Check kernel certificates, standing alone."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser("check", help="verify certificates")
    check.add_argument("certificates", type=Path, nargs="+", metavar="CERT")
    check.add_argument(
        "--expect",
        type=Path,
        required=True,
        metavar="FILE",
        help="the expectation, written by `kcdsl check --write-expectation`",
    )
    check.add_argument(
        "--checkpoint",
        type=Path,
        required=True,
        metavar="PATH",
        help="the weights to deploy, compared by their hash",
    )
    check.add_argument(
        "--base",
        type=Path,
        metavar="PATH",
        help="the earlier weights of a weights transfer",
    )
    check.add_argument(
        "--infer-checkpoint",
        type=Path,
        metavar="PATH",
        help="the weights of the inference kernel, if they are separate",
    )
    check.add_argument(
        "--policy",
        type=Path,
        metavar="FILE",
        help="trust policy: keys, their permissions, and revocations",
    )
    check.add_argument(
        "--key",
        type=Path,
        action="append",
        default=[],
        metavar="PUB",
        help="a trusted public key; only these keys of the policy are trusted, within its limits",
    )
    check.add_argument(
        "--threshold", type=int, metavar="N", help="number of distinct keys that must have signed"
    )
    check.add_argument(
        "--revocations",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="list of revoked certificates and keys",
    )
    check.add_argument("--stage", choices=STAGES, help="the stage to check for")
    check.add_argument(
        "--minimum-sequence",
        type=int,
        metavar="N",
        help="refuse certificates with a lower sequence number",
    )
    check.add_argument("--at", metavar="TIME", help="check as of this time (…Z) instead of now")
    check.add_argument(
        "--complete", action="store_true", help="require every clause of the contract"
    )
    check.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help="base folder of the contract's data files; coverage is counted again",
    )
    check.add_argument("--recheck", action="store_true", help="re-derive every proof")
    check.add_argument(
        "--signature-only",
        action="store_true",
        help="check only the signed statement, without its proof and evidence files",
    )
    check.add_argument(
        "--refuse-suppressions",
        action="store_true",
        help="refuse contracts with findings that comments accept",
    )
    check.add_argument("--format", choices=("text", "json"), default="text", help="output format")
    return parser


def _check(options: argparse.Namespace) -> Combined:
    if options.signature_only and (options.recheck or options.complete):
        detail = "--signature-only skips the steps that --recheck and --complete require"
        raise Rejected("options/contradict", detail)
    if options.recheck and find_spec("numpy") is None:
        raise Rejected("recheck/no-numpy", "--recheck needs numpy: pip install numpy")
    bundles = [_read(path) for path in options.certificates]
    with open_regular(options.expect, "expectation/malformed") as file:
        document = file.read(_LARGEST_EXPECTATION + 1)
    try:
        expectation = Expectation.from_json(strict_load(document, _LARGEST_EXPECTATION))
    except Rejected as error:
        raise Rejected("expectation/malformed", f"{options.expect}: {error}") from None
    trusted = trust(
        None if options.policy is None else read_policy(options.policy),
        "--policy",
        keys=options.key,
        threshold=options.threshold,
        revocations=options.revocations,
    )
    rules = trusted.rules
    if options.refuse_suppressions:
        rules = dataclasses.replace(rules, refuse_suppressions=True)
    moment = datetime.now(UTC) if options.at is None else parse_time(options.at)
    try:
        manifest, read = build_manifest(plain_path(options.checkpoint)), None
        if options.infer_checkpoint is not None:
            read = storage_manifest(plain_path(options.infer_checkpoint))
    except Rejected as error:
        refusal = refused("components", error)
        refusals = tuple((path.name, refusal) for path in options.certificates)
        return Combined(refusals, options.complete, trusted)
    companions = dict(expectation.triple.checkpoint.companions)
    if INFER_CHECKPOINT in companions:
        if read is None:
            detail = "the contract's inference kernel has one: --infer-checkpoint PATH"
            raise Rejected("options/infer-checkpoint", detail)
        companions[INFER_CHECKPOINT] = read.digest
    checkpoint = Checkpoint.of(options.checkpoint.name, manifest, companions)
    several = len(bundles) > 1

    def run(path: Path, bundle: bytes) -> Report:
        proofs: ProofChecker | None = PresentProofs(path.parent)
        if options.recheck:
            proofs = Rechecker(path.parent, options.checkpoint, options.infer_checkpoint)
        elif options.signature_only:
            proofs = None
        return verify(
            bundle,
            trusted=rules,
            expected_triple=dataclasses.replace(expectation.triple, checkpoint=checkpoint),
            clock=lambda: moment,
            required_clauses=expectation.clauses,
            stage=options.stage,
            minimum_sequence=options.minimum_sequence,
            proofs=proofs,
            partial=several or not options.complete,
            expected_inputs=expectation.inputs,
            signature_only=options.signature_only,
            evidence=None if options.signature_only else path.parent,
            data=None if options.data is None else _beside(options.data),
            slices=expectation.slices,
            strict=options.complete,
            earlier=None
            if options.base is None
            else Earlier(path.parent, options.base, options.checkpoint, options.recheck),
        )

    pairs = zip(options.certificates, bundles, strict=True)
    reports = tuple((path.name, run(path, bundle)) for path, bundle in pairs)
    return Combined(reports, options.complete, trusted)


def _beside(folder: Path) -> Data:
    """Return what finds data files below a folder, and none elsewhere."""

    def find(name: str) -> Path | None:
        inner = PurePosixPath(name)
        return None if inner.is_absolute() or ".." in inner.parts else folder / inner

    return find


def _read(path: Path) -> bytes:
    with open_regular(path, "bundle/malformed") as file:
        return file.read(LARGEST_BUNDLE + 1)


def _table(name: str, report: Report) -> str:
    width = max(len(c.name) for c in report.checks)
    lines = [f"certificate {name}: {report.verdict}"]
    for check in report.checks:
        text = ": ".join(part for part in (check.reason, check.detail) if part)
        lines.append(f"  {check.name:<{width}}  {check.outcome.value:<7}  {text}".rstrip())
    return "\n".join(_printable(line) for line in lines)


def _printable(line: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in line)


if __name__ == "__main__":
    sys.exit(main())
