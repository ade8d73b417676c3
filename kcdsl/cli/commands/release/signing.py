"""`kcdsl keygen`, `sign`, `show`, `companions` and `attach`: make keys, sign statements, read and
hand on certificates.

These commands do not run or import code of a statement's contract.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.cli.common import Command, argument, choice, switch, value, values
from kcdsl.cli.common.options import (
    KERNELS,
    PLAIN_HTTP,
    OutputFormat,
    Stage,
    TrustOptions,
    format_option,
    output_option,
    register_option,
)
from kcdsl.cli.common.output import print_json, say, write_text
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import CANNOT_SIGN, INPUT_OUTPUT, USAGE
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl_certs.signatures import Envelope, SigningKey
    from kcdsl_certs.verification.admission import Admitted


class KeyKind(StrEnum):
    """The algorithms of signatures, by the names of `kcdsl_certs.signatures.keys.Algorithm`."""

    ECDSA_P256 = "ecdsa-p256"
    ED25519 = "ed25519"


@dataclass(frozen=True, kw_only=True)
class KeygenCommand(Command):
    """Make a key pair for signing certificates."""

    output: str = output_option("FILE", "the private key; the public one is FILE.pub", "kcdsl.key")
    algorithm: KeyKind = choice(
        KeyKind,
        "signature algorithm; every verifier of DSSE envelopes accepts ecdsa-p256",
        KeyKind.ECDSA_P256,
    )
    password_env: str | None = value(
        "VAR", "encrypt the private key with the password in this environment variable"
    )
    force: bool = switch("replace an existing key")

    def run(self) -> Exit:
        """Write both files or none; only the owner can read the private one."""
        from kcdsl.release.signing import password_from
        from kcdsl.source.output import NewFile, make_folder, write_together
        from kcdsl_certs.signatures import Algorithm, generate

        password = None if self.password_env is None else password_from(self.password_env)
        key = generate(Algorithm(self.algorithm.value))
        private = Path(self.output)
        public = private.with_name(private.name + ".pub")
        for path in (private, public):
            if path.is_symlink():
                raise refuse(INPUT_OUTPUT, f"{path} is a link", help="name the file itself")
        make_folder(private.parent)
        write_together(
            [
                NewFile(private, key.to_pem(password), 0o600),
                NewFile(public, key.public.pem, 0o644),
            ],
            replace=self.force,
        )
        print(one_line(f"private key  {private}  (keep it secret, out of version control)"))
        print(one_line(f"public key   {public}  ({key.public.algorithm}, hint {key.public.hint})"))
        return Exit.HELD


@dataclass(frozen=True, kw_only=True)
class SignCommand(Command):
    """Show and sign the statement of a certificate; nothing of its contract is run."""

    statement: str = argument(
        "STATEMENT", "a statement written by verify, evaluate or transfer; with --add a certificate"
    )
    key: tuple[str, ...] = values(
        "KEY", "private key, repeatable; without one the statement is only shown"
    )
    add: bool = switch("add signatures to a signed certificate")
    output: str | None = output_option(
        "FILE",
        "the certificate, in the folder of STATEMENT (default: STATEMENT with .cert.json; with "
        "--add: the certificate itself)",
    )

    def run(self) -> Exit:
        """Show the statement and sign it; refuse (2) a statement that a checker would reject."""
        from kcdsl.release.signing import (
            cannot_sign,
            certificate_of,
            refuse_other_signers,
            signing_keys,
        )
        from kcdsl.source.output import write_bytes
        from kcdsl_certs.encoding.rejected import Rejected
        from kcdsl_certs.signatures import bundle_bytes, sign
        from kcdsl_certs.verification.admission import admit

        path = Path(self.statement)
        keys = signing_keys(self.key)
        target = path if self.add else certificate_of(path)
        if self.output is not None:
            target = _beside(Path(self.output), path)
        try:
            payload, before = _read(path, self.add)
            admitted = admit(payload, path.parent, datetime.now(UTC))
        except Rejected as error:
            raise cannot_sign(error, path) from error
        _show(admitted, before)
        if not keys:
            print("nothing was signed: name a key, --key KEY", file=sys.stderr)
            return Exit.HELD
        envelope = sign(payload, keys)
        hint = keys[0].public.hint
        if before is not None:
            _refuse_signed(before, keys, path)
            envelope = replace(before, signatures=(*before.signatures, *envelope.signatures))
        if (before is None or target != path) and refuse_other_signers(target, keys):
            say(f"note: {target} replaces an earlier one by the same keys")
        chosen = self.output is None and not self.add
        write_bytes(target, bundle_bytes(envelope, hint), own_name=chosen)
        print(one_line(f"certificate: {target}"))
        return Exit.HELD


def _beside(target: Path, statement: Path) -> Path:
    """Return the file to write; a certificate must be beside its proofs."""
    if target.resolve().parent != statement.resolve().parent:
        raise refuse(
            CANNOT_SIGN,
            "a certificate lies in the folder of its statement, with the proofs that it names",
            help=f"name a file in {statement.parent}",
        )
    return target


def _read(path: Path, add: bool) -> tuple[bytes, Envelope | None]:
    """Return the statement, and its envelope if signatures are added."""
    from kcdsl.release.signing import read_envelope
    from kcdsl_certs.encoding.files import read_limited
    from kcdsl_certs.encoding.rejected import Rejected
    from kcdsl_certs.signatures import PAYLOAD_TYPE
    from kcdsl_certs.statement import LARGEST_PAYLOAD

    if not add:
        payload = read_limited(path, LARGEST_PAYLOAD)
        if b'"dsseEnvelope"' in payload[:4096]:
            raise Rejected("statement/signed", "it is a certificate; --add adds a signature to one")
        return payload, None
    envelope = read_envelope(path)
    if envelope.payload_type != PAYLOAD_TYPE:
        raise Rejected("payload/type", f"{envelope.payload_type!r}")
    return envelope.payload, envelope


def _refuse_signed(before: Envelope, keys: Sequence[SigningKey], path: Path) -> None:
    """Refuse a key that has already signed, since a key counts once."""
    from kcdsl_certs.signatures import MOST_SIGNATURES, pae

    message = pae(before.payload_type, before.payload)
    for key in keys:
        if any(key.public.verifies(old.value, message) for old in before.signatures):
            raise refuse(
                CANNOT_SIGN,
                f"{path} carries a signature of {key.public.hint} already",
                help="one key counts once, however often it signs; name another",
            )
    if len(before.signatures) + len(keys) > MOST_SIGNATURES:
        raise refuse(
            CANNOT_SIGN,
            f"a certificate has at most {MOST_SIGNATURES} signatures",
            help="sign the statement anew, with the keys that count",
        )


def _show(admitted: Admitted, before: Envelope | None) -> None:
    from kcdsl.verdict.text.console import print_on, table

    rows = [(name, " ".join(text.split())) for name, text in _rows(admitted)]
    for signature in () if before is None else before.signatures:
        claimed = signature.keyid or "without a hint"
        rows.append(("signature", f"named {claimed}; not checked here"))
    shown = table(("", ""), rows, pad_edge=False, padding=(0, 1), show_header=False)
    print_on(sys.stdout, shown)


def _rows(admitted: Admitted) -> Iterator[tuple[str, str]]:
    """Yield the signed content that a person can judge."""
    from kcdsl_certs.encoding.strict import time_text
    from kcdsl_certs.statement import Predicate, certificate_id

    body = admitted.body
    triple = body.triple
    yield "identity", f"sha256:{certificate_id(admitted.payload)}"
    yield "kind", "certificate" if isinstance(body, Predicate) else "weights transfer"
    contract = triple.contract
    yield "contract", f"{contract.id} {contract.version} (sha256:{contract.digest})"
    yield "checkpoint", f"{triple.checkpoint.name} (sha256:{triple.checkpoint.digest})"
    yield "training kernel", f"{triple.train.name} (sha256:{triple.train.digest})"
    yield "inference kernel", f"{triple.infer.name} (sha256:{triple.infer.digest})"
    yield "stage", body.stage
    yield "valid", f"from {time_text(body.issued_at)} until {time_text(body.valid_until)}"
    yield "sequence", str(body.sequence)
    if isinstance(body, Predicate):
        whole = "the whole contract" if body.scope.complete else "a part of the contract"
        yield "verdict", f"{body.verdict}, of {whole}"
        if body.contract_source is not None:
            yield "contract text", f"sha256:{body.contract_source}"
        for clause in body.clauses:
            yield clause.label, f"{clause.verdict}, {clause.evidence} by {clause.method}"
        for file in body.inputs:
            yield "input", f"{file.name} (sha256:{file.sha256})"
        for accepted in body.suppressions:
            yield "accepted finding", f"{accepted.code}: {accepted.reason}"
    else:
        yield "earlier", f"{body.path} (sha256:{body.base})"
        for item in body.carried:
            yield item.id if item.slice is None else f"{item.id} [{item.slice}]", "transferred"
    for text in body.assumptions:
        yield "assumes", text


# --- show -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShowCommand(TrustOptions):
    """Show a certificate in readable form: claims, evidence, signers, and the result of a check."""

    certificate: str = argument("CERT", "a certificate or a weights transfer, by any signer")
    stage: Stage | None = choice(Stage, "the stage to check for")
    at: str | None = value("TIME", "read as of this time, 2026-11-30T12:00:00Z")
    register: str | None = register_option("with its standing, and the answers of the gate")
    html: str | None = value(
        "FILE", "write a page that needs no other file, and print nothing", writes=True
    )
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Show it: 0 signed by trusted keys, 3 no trusted keys were given, 4 a check would reject
        it. Files beside it are not read, so 0 does not mean that a check passes."""
        from kcdsl.api.certificates import moment_of, read_certificate, recorded_in
        from kcdsl.release.signing import trusted_if_any
        from kcdsl.source.config import load_config
        from kcdsl.verdict.studies.certificate_view import certificate_view
        from kcdsl_certs.verification.inspection import inspect

        bundle, moment = read_certificate(Path(self.certificate)), moment_of(self.at)
        trust = trusted_if_any(self.policy, self.key, self.threshold, self.revocations)
        seen = inspect(bundle, trust, moment, stage=self.stage)
        check, gates = None, None
        place = self.register or load_config(Path()).register_place
        if place is not None:
            found = recorded_in(place, bundle, seen, trust, moment, self.stage)
            check, gates = found.check, tuple(gate.to_json() for gate in found.gates)
        view = certificate_view(self.certificate, seen, trust, moment, recorded=check, gates=gates)
        if self.html is not None:
            from kcdsl.verdict.html.certificate import certificate_page

            write_text(certificate_page(view), self.html)
            say(f"wrote {self.html}")
            say(view.headline[1])
        if self.format is OutputFormat.JSON:
            print_json(view.to_json())
        elif self.html is None:
            from kcdsl.verdict.text.certificates import print_certificate

            print_certificate(view, sys.stdout)
        return view.exit


# --- companions -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CompanionsCommand(TrustOptions):
    """Check certificates and attest the result for an image, in formats that other tools verify."""

    certificates: tuple[str, ...] = argument("CERT", "certificates of one triple and stage", "+")
    image: str | None = value(
        "NAME@sha256:DIGEST", "the image or artefact that holds the triple, by its manifest digest"
    )
    sign: tuple[str, ...] = values(
        "KEY", "private key, repeatable; each signs every companion in a separate file"
    )
    contract: str | None = value("CONTRACT", "the contract in force")
    recheck: bool = switch("re-derive every proof with the independent checker")
    kernels: str | None = value("FILE", KERNELS)
    checkpoint: str | None = value("FILE", "the weights, instead of those the contract names")
    infer_checkpoint: str | None = value(
        "FILE", "the weights of the inference kernel, if the contract names separate ones"
    )
    stage: Stage | None = choice(Stage, "the stage to check for")
    register: str | None = register_option("where each certificate must be in force")
    output: str | None = output_option("DIR", "folder for the companions (default: beside CERT)")

    def run(self) -> Exit:
        """Write every companion: 0 written, 4 a certificate is invalid or the contract not covered;
        nothing is signed then."""
        from kcdsl.api.certificates import CheckSettings, check_certificates
        from kcdsl.cli.commands.release.check import print_report
        from kcdsl.release.companions import Image, ValidCertificates, companion_files
        from kcdsl.release.issue import utc_now
        from kcdsl.release.signing import signing_keys
        from kcdsl.source.output import make_folder, write_together

        if self.image is None:
            raise refuse(
                USAGE, "companions are about an image", help="name it: --image NAME@sha256:DIGEST"
            )
        image = Image.of(self.image)
        if not self.sign:
            raise refuse(USAGE, "companions are signed", help="name a private key: --sign KEY")
        keys = signing_keys(self.sign)
        settings = self.settings(CheckSettings, complete=True)
        checked = check_certificates(self.certificates, settings).combined
        if not checked.accepted:
            print_report(checked)
            return Exit.CERTIFICATE_INVALID
        moment = utc_now().replace(microsecond=0)
        certified = ValidCertificates.of(checked, moment, rechecked=self.recheck)
        first = Path(self.certificates[0])
        stem = first.name.removesuffix(".json").removesuffix(".cert")
        folder = first.parent if self.output is None else Path(self.output)
        files = companion_files(folder / stem, image, certified, keys)
        make_folder(folder)
        write_together(files, replace=True)
        print(one_line(f"valid, and stated about {image.name}@sha256:{image.sha256}"))
        print(f"levels: {' '.join(certified.levels)}")
        for file in files:
            print(one_line(f"wrote {file.path}"))
        return Exit.HELD


# --- attach ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AttachCommand(Command):
    """Attach certificates, with the files that they name, to an image in an OCI registry."""

    certificates: tuple[str, ...] = argument(
        "CERT", "certificates, attached with the files that they name", "+"
    )
    image: str = argument("HOST/NAME@sha256:DIGEST", "the image, by its manifest digest")
    plain_http: bool = switch(PLAIN_HTTP)

    def run(self) -> Exit:
        """Attach every certificate: 0 where the registry lists them all. Existing blobs are not
        sent again, so repeating the command completes an interrupted upload."""
        from kcdsl.release.issue import utc_now
        from kcdsl.release.oci import Repository, attach

        registry = Repository.of(self.image, plain_http=self.plain_http)
        for name in self.certificates:
            own, sent = attach(Path(name), registry, utc_now())
            print(one_line(f"{name}: {sent} bytes sent"))
            print(one_line(f"attached as oci://{registry.image.name}@{own.digest}"))
        return Exit.HELD
