"""Certificates: their check (signature, triple, freshness, coverage) and their differences."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from kcdsl.api.contract import PathLike, read_contract, refuse_values, several
from kcdsl.api.results import Progress, TableResult, no_progress
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import BAD_TIME, FILE_MISSING, NO_PACKAGE, USAGE
from kcdsl.model.files import Artefacts
from kcdsl.release import OCI
from kcdsl.release.artefacts import ArtefactRefused, input_at_hand
from kcdsl.release.requirements import build_expectation, read_kernels
from kcdsl.release.signing import trusted, trusted_if_any
from kcdsl.source.config import load_config
from kcdsl.source.files import excerpt, open_regular, read_bytes
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import parse_time
from kcdsl_certs.signatures import LARGEST_BUNDLE
from kcdsl_certs.statement import Expectation, Predicate
from kcdsl_certs.statement.certificate import STATEMENT_TYPE
from kcdsl_certs.verification.inspection import inspect
from kcdsl_certs.verification.report import Combined, refused
from kcdsl_certs.verification.verify import verify

if TYPE_CHECKING:
    from typing import Unpack

    from kcdsl.release.promotion.gate import Gate
    from kcdsl.verdict.studies.certificate_difference import CertificateDifference
    from kcdsl_certs.signatures import Trust
    from kcdsl_certs.verification.inspection import Inspection
    from kcdsl_certs.verification.report import Check, Report
    from kcdsl_certs.verification.transfers import Earlier

_WHICH = "name what `kcdsl sign`, or `--sign` of verify and evaluate, wrote: *.cert.json"


@dataclass(frozen=True, slots=True, repr=False)
class CheckResult(TableResult):
    """The results of checking certificates, step by step."""

    combined: Combined

    @property
    def says(self) -> str:
        """Return whether the certificates are valid, and why not."""
        return "valid" if self.valid else f"invalid: {', '.join(self.reasons)}"

    @property
    def valid(self) -> bool:
        """Return whether every certificate is valid and no demanded result is missing."""
        return self.combined.accepted

    def __bool__(self) -> bool:
        return self.valid

    @property
    def reasons(self) -> tuple[str, ...]:
        """Return the reasons why certificates are not valid, each once."""
        found = [reason for _, report in self.combined.reports for reason in report.reasons]
        coverage = self.combined.coverage
        if coverage is not None and not self.valid:
            found.append(coverage.reason)
        return tuple(dict.fromkeys(reason for reason in found if reason))

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.check/2`."""
        return self.combined.to_json()

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each step of each certificate."""
        return [
            {
                "certificate": name,
                "step": step.name,
                "outcome": step.outcome.value,
                "reason": step.reason,
                "detail": step.detail,
            }
            for name, report in self.combined.reports
            for step in report.checks
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """Settings of a check; each field is the option of `kcdsl check` of its name."""

    key: Sequence[PathLike] = ()
    contract: PathLike | None = None
    recheck: bool = False
    complete: bool = False
    signature_only: bool = False
    policy: PathLike | None = None
    threshold: int | None = None
    revocations: Sequence[PathLike] = ()
    kernels: PathLike | None = None
    checkpoint: PathLike | None = None
    infer_checkpoint: PathLike | None = None
    base: PathLike | None = None
    stage: str | None = None
    minimum_sequence: int | None = None
    at: str | None = None
    plain_http: bool = False
    register: PathLike | None = None
    """A path or a URL; the default is that of the user's own configuration, if any."""
    promoting: bool = False
    """Whether `kcdsl promote` checks: evidence that is absent is refused, as `complete` does, and
    the register, which records the certificates afterwards, is not asked before."""
    expected: Callable[[Expectation], None] | None = None
    """Called with the expectation before certificates are read."""
    progress: Callable[[], AbstractContextManager[Progress]] = no_progress
    """Displays the progress of hashing the checkpoint."""

    def __post_init__(self) -> None:
        refuse_values(self)


class Checks(TypedDict, total=False):
    """Keyword arguments of `check`: the options of `kcdsl check`."""

    contract: PathLike | None
    recheck: bool
    complete: bool
    signature_only: bool
    policy: PathLike | None
    threshold: int | None
    revocations: Sequence[PathLike]
    kernels: PathLike | None
    checkpoint: PathLike | None
    infer_checkpoint: PathLike | None
    base: PathLike | None
    stage: str | None
    minimum_sequence: int | None
    at: str | None
    plain_http: bool
    register: PathLike | None


def check(
    certificates: PathLike | Sequence[PathLike],
    *,
    key: PathLike | Sequence[PathLike] = (),
    **options: Unpack[Checks],
) -> CheckResult:
    """Verify certificates about one triple, as `kcdsl check` with the options of these names.

    `contract` is the contract in force, by default that of the current folder. Raises Refusal for
    unreadable files; the result is false if a certificate is not valid.
    """
    options["revocations"] = several(options.get("revocations", ()))
    named = several(certificates)
    for each in named:
        if not isinstance(each, str | os.PathLike):
            help = f"name its file, such as the `path` of a result; {_WHICH}"
            raise refuse(USAGE, f"the certificate is {each!r}", help=help)
    return check_certificates(named, CheckSettings(key=several(key), **options))


def check_certificates(certificates: Sequence[PathLike], settings: CheckSettings) -> CheckResult:
    """Verify certificates about one triple; raises Refusal for unreadable files.

    A name that begins with `oci://` is an image: the certificates attached to it are pulled from
    its registry into a temporary folder.
    """
    with ExitStack() as folders:
        return _checked(certificates, settings, folders)


def _checked(
    certificates: Sequence[PathLike], settings: CheckSettings, folders: ExitStack
) -> CheckResult:
    if not certificates:
        raise refuse(USAGE, "no certificate is named", help="name at least one")
    if settings.signature_only and (settings.recheck or settings.complete):
        raise refuse(
            USAGE,
            "--signature-only skips the steps that --recheck and --complete require",
            help="leave it out, or leave them out",
        )
    if settings.recheck:
        _refuse_without_numpy()
    names = [os.fspath(name) for name in certificates]
    local = {name: read_certificate(Path(name)) for name in names if not name.startswith(OCI)}
    moment = moment_of(settings.at)
    contract = read_contract(None if settings.contract is None else os.fspath(settings.contract))
    keys = tuple(os.fspath(path) for path in settings.key)
    revoked = tuple(os.fspath(path) for path in settings.revocations)
    policy = None if settings.policy is None else os.fspath(settings.policy)
    trust = trusted(policy, keys, settings.threshold, revoked, contract.base)
    files, model = Artefacts.of(contract.base), contract.program.model
    given = settings.checkpoint
    checkpoint = files.locate(model.checkpoint) if given is None else Path(given)
    own = settings.infer_checkpoint
    if own is not None and model.served is None:
        raise refuse(
            USAGE,
            "--infer-checkpoint is for contracts whose inference kernel has a checkpoint",
            help="leave it out; --checkpoint replaces the weights of both kernels",
        )
    named = None if model.served is None or own is not None else files.find_weights(model.served)
    served = named if own is None else Path(own)
    kernels = None if settings.kernels is None else read_kernels(Path(settings.kernels))
    found = [
        each
        for name in names
        for each in (
            [(name, Path(name), local[name])]
            if name in local
            else _pulled(name, folders, trust, moment, settings)
        )
    ]
    try:
        with settings.progress() as told:
            expectation = build_expectation(
                *(contract.program, files),
                fingerprints=kernels,
                checkpoint=checkpoint,
                served=served,
                told=lambda done, total: told("MiB hashed", done >> 20, total >> 20),
            )
    except ArtefactRefused as error:
        refusal = refused("components", Rejected(error.reason, error.detail))
        refusals = tuple((name, refusal) for name, _, _ in found)
        return CheckResult(Combined(refusals, settings.complete, trust))
    if settings.expected is not None:
        settings.expected(expectation)
    in_part = len(found) > 1 or not settings.complete
    at_hand = _AtHand(settings, files, expectation, trust, moment, checkpoint, served, in_part)
    reports = [(name, at_hand.report(path, bundle)) for name, path, bundle in found]
    place = settings.register
    if place is None and not settings.promoting:
        place = load_config(contract.base).register_place
    if place is not None:
        bundles = [bundle for _, _, bundle in found]
        reports = _in_register(place, reports, bundles, trust, moment)
    return CheckResult(Combined(tuple(reports), settings.complete, trust))


def _in_register(
    place: PathLike,
    reports: Sequence[tuple[str, Report]],
    bundles: Sequence[bytes],
    trust: Trust,
    moment: datetime,
) -> list[tuple[str, Report]]:
    """Return the reports with the register step."""
    from kcdsl.release.register import Register
    from kcdsl.release.register.step import with_register

    with Register.open(place) as register:
        return [
            (name, with_register(report, bundle, register, trust.rules, moment))
            for (name, report), bundle in zip(reports, bundles, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class RegisterAnswers:
    """Answers of a register about a certificate: the step of a check, and the gates of its triple,
    by slot."""

    check: Check
    gates: tuple[Gate, ...]


def recorded_in(
    place: PathLike,
    bundle: bytes,
    seen: Inspection,
    trust: Trust | None,
    moment: datetime,
    stage: str | None = None,
) -> RegisterAnswers:
    """Return what a register says of an inspected certificate; the stage is that of the certificate
    where none is given. Raises Refusal where the register cannot be read."""
    from kcdsl.release.promotion.gate import answers
    from kcdsl.release.register import Register
    from kcdsl.release.register.step import register_check

    rules, body = None if trust is None else trust.rules, seen.body
    with Register.open(place) as register:
        check = register_check(seen.identity, bundle, register, rules, moment)
        if body is None:
            return RegisterAnswers(check, ())
        gates = answers(register, stage or body.stage, body.triple.digest, moment)
        return RegisterAnswers(check, gates)


@dataclass(frozen=True, slots=True)
class _AtHand:
    """The inputs of a check: expectation, trust and time."""

    settings: CheckSettings
    files: Artefacts
    expectation: Expectation
    trust: Trust
    moment: datetime
    checkpoint: Path
    served: Path | None
    in_part: bool

    def report(self, path: Path, bundle: bytes) -> Report:
        """Return the report of checking one certificate."""
        from kcdsl_certs.verification.proofs import PresentProofs, ProofChecker, Rechecker

        settings, expectation = self.settings, self.expectation
        proofs: ProofChecker | None = PresentProofs(path.parent)
        if settings.recheck:
            proofs = Rechecker(path.parent, self.checkpoint, self.served)
        elif settings.signature_only:
            proofs = None
        return verify(
            bundle,
            trusted=self.trust.rules,
            expected_triple=expectation.triple,
            clock=lambda: self.moment,
            required_clauses=expectation.clauses,
            stage=settings.stage,
            minimum_sequence=settings.minimum_sequence,
            proofs=proofs,
            partial=self.in_part,
            expected_inputs=expectation.inputs,
            signature_only=settings.signature_only,
            evidence=None if settings.signature_only else path.parent,
            data=None if settings.signature_only else partial(input_at_hand, self.files),
            slices=expectation.slices,
            strict=settings.complete or settings.promoting,
            earlier=self._earlier(path.parent),
        )

    def _earlier(self, folder: Path) -> Earlier | None:
        """Return the earlier certificate of a weights transfer."""
        if self.settings.base is None:
            return None
        from kcdsl_certs.verification.transfers import Earlier

        base = Path(self.settings.base)
        return Earlier(folder, base, self.checkpoint, self.settings.recheck)


def _pulled(
    name: str, folders: ExitStack, trust: Trust, moment: datetime, settings: CheckSettings
) -> list[tuple[str, Path, bytes]]:
    """Return name, file and bytes of the certificates that are attached to an image."""
    from tempfile import TemporaryDirectory

    from kcdsl.release.oci import Repository, pull

    registry = Repository.of(name, plain_http=settings.plain_http)
    own = Path(folders.enter_context(TemporaryDirectory()))
    pulled = pull(registry, own, trust.rules, moment, settings.stage)
    return [(each.name, each.path, read_certificate(each.path)) for each in pulled]


def are_certificates(*paths: Path) -> bool:
    """Return whether files are certificates, by their content; refuse a mixture."""
    found = [b'"dsseEnvelope"' in read_bytes(path, 4096) for path in paths]
    if any(found) and not all(found):
        raise refuse(
            USAGE,
            "a certificate is compared with another certificate",
            help="name two contracts, or two certificates",
        )
    return all(found)


def differing(old: Path, new: Path) -> CertificateDifference:
    """Return the difference of two certificates, under the policy of the user; raises Refusal for
    other or unreadable files."""
    from kcdsl.verdict.studies.certificate_difference import compare_certificates
    from kcdsl.verdict.studies.certificate_view import certificate_view

    trust, moment = trusted_if_any(None, (), None, ()), datetime.now(UTC)
    found = []
    for path in (old, new):
        seen = inspect(read_certificate(path), trust, moment)
        if not isinstance(seen.body, Predicate):
            why = "it is a weights transfer"
            if seen.body is None:
                why = "; ".join(f"{c.detail} ({c.reason})" for c in seen.refusals)
            raise refuse(
                FILE_MISSING,
                f"{path} cannot be compared: {why}",
                help="name two certificates of `kcdsl verify` or `kcdsl evaluate`",
            )
        found.append((certificate_view(str(path), seen, trust, moment), seen))
    return compare_certificates(found[0], found[1])


def _refuse_without_numpy() -> None:
    """Refuse a re-derivation that cannot run, instead of reporting an invalid certificate."""
    from importlib.util import find_spec

    if find_spec("numpy") is None:
        raise refuse(
            NO_PACKAGE, "--recheck needs numpy, which is not installed", help="pip install numpy"
        )


def read_certificate(path: Path) -> bytes:
    """Return the bytes of a certificate; refuse one that cannot be read, a statement, and another
    document of kcdsl."""
    try:
        with open_regular(path) as stream:
            data = stream.read(LARGEST_BUNDLE + 1)
    except OSError as error:
        raise refuse(
            FILE_MISSING,
            f"the certificate {path} cannot be read: {error.strerror}",
            help=_WHICH,
        ) from error
    document = _document(data)
    if document.get("_type") == STATEMENT_TYPE:
        raise refuse(
            USAGE,
            f"{path} is a statement that is not signed",
            help=f"`kcdsl sign {path} --key KEY` makes a certificate of it",
        )
    schema = document.get("schema")
    if isinstance(schema, str) and schema.startswith("kcdsl."):
        raise refuse(
            USAGE,
            f"{path} is the document {excerpt(schema)}, no certificate",
            help=_WHICH,
        )
    return data


def _document(data: bytes) -> dict[str, Any]:
    """Return a JSON object with `_type` or `schema`, which a certificate has in base64 alone; empty
    for other data."""
    if b'"_type"' not in data and b'"schema"' not in data:
        return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def moment_of(text: str | None) -> datetime:
    """Return the time of `--at`, by default now; raises Refusal for an invalid time."""
    if text is None:
        return datetime.now(UTC)
    try:
        return parse_time(text)
    except Rejected as error:
        raise refuse(
            BAD_TIME, f"--at: {error.detail}", help="write it as 2026-11-30T12:00:00Z"
        ) from error
