"""Certificates in OCI registries: attached to a manifest as referrers, and read by digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import ARTEFACT_REFUSED, FILE_MISSING
from kcdsl.release import OCI
from kcdsl.release.oci.repository import (
    ARTEFACT_TYPE,
    EMPTY,
    FILE_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Repository,
)
from kcdsl.release.oci.transport import CHUNK, bad_reply
from kcdsl.source.files import open_regular
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import plain_name, strict_load, time_text
from kcdsl_certs.signatures import LARGEST_BUNDLE, TrustPolicy, decode, parse_bundle, signers
from kcdsl_certs.statement import (
    LARGEST_PAYLOAD,
    PREDICATE_TYPE,
    TRANSFER_TYPE,
    Predicate,
    Transfer,
    certificate_id,
    parse_predicate,
    parse_statement,
    parse_transfer,
)
from kcdsl_certs.verification.admission import admit
from kcdsl_certs.verification.authentication import authentic, meets_threshold
from kcdsl_certs.verification.proofs import LARGEST_PROOF

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
CREATED = "org.opencontainers.image.created"


@dataclass(frozen=True, slots=True)
class Pulled:
    """A certificate that was read from a registry into its own folder."""

    name: str
    path: Path
    body: Predicate | Transfer | None
    identity: str
    """The sha256 of its statement; "" where no trusted key signed it."""
    replaces: bool = False
    """Whether it may replace others: a check accepts its signatures, and it was not revoked."""


def attach(certificate: Path, registry: Repository, moment: datetime) -> tuple[Descriptor, int]:
    """Attach a certificate, with every file that it names, to an image.

    Blobs that the registry has are not sent again, and the same certificate gives the same
    artefact, so repeating the command completes an interrupted upload.

    Returns the descriptor of the artefact, and the number of bytes sent.

    Raises:
    Refusal: it is no certificate, a file that it names is missing or has changed, or the
    registry rejects it.
    """
    with open_regular(certificate) as file:
        bundle = file.read(LARGEST_BUNDLE + 1)
    folder = certificate.parent
    try:
        body = admit(decode(parse_bundle(bundle)).payload, folder, moment).body
        names = _named(body, folder)
    except Rejected as error:
        raise refuse(
            ARTEFACT_REFUSED,
            f"{certificate}: {error.detail} ({error.reason})",
            help="attach a certificate that `kcdsl check` finds valid, with the files beside it",
        ) from error
    _, subject = registry.manifest(f"sha256:{registry.image.sha256}")
    parts = [_described(certificate, BUNDLE_TYPE, "certificate.json")]
    parts += [_described(folder / name, FILE_TYPE, name) for name in names]
    sent = 0
    registry.push(EMPTY, b"{}")
    for descriptor, path in parts:
        sent += descriptor.size if registry.push(descriptor, path) else 0
    own = registry.push_manifest(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "artifactType": ARTEFACT_TYPE,
            "config": EMPTY.to_json(),
            "layers": [descriptor.to_json() for descriptor, _ in parts],
            "subject": subject.to_json(),
            "annotations": {CREATED: time_text(body.issued_at)},
        }
    )
    return own, sent


def pull(
    registry: Repository,
    folder: Path,
    trusted: TrustPolicy,
    moment: datetime,
    stage: str | None = None,
) -> list[Pulled]:
    """Read the certificates that are attached to an image, or the certificate that is named.

    Files of a certificate are read only if a trusted key signed it. If any certificate is signed,
    unsigned ones are ignored, because anyone with write access can attach anything; so are
    certificates that one supersedes or restates whose signatures `trusted` accepts at `moment`, and
    which it does not revoke. With `stage`, certificates of other
    stages are ignored if there is one of this stage.

    Raises:
    Refusal: there is none, or the registry sends content that does not match its digest.
    """
    digest = f"sha256:{registry.image.sha256}"
    document, _ = registry.manifest(digest)
    if document.get("artifactType") == ARTEFACT_TYPE:
        return [_pulled(registry, digest, document, folder, trusted, moment)]
    found = []
    for each in registry.referrers():
        artefact, _ = registry.manifest(each.digest)
        subject = artefact.get("subject")
        about = subject.get("digest") if isinstance(subject, dict) else None
        if about == digest and artefact.get("artifactType") == ARTEFACT_TYPE:
            found.append(_pulled(registry, each.digest, artefact, folder, trusted, moment))
    if not found:
        raise refuse(
            FILE_MISSING,
            f"no certificate is attached to {registry.image.name}@{digest}",
            help="attach one: kcdsl attach CERT HOST/NAME@sha256:DIGEST",
        )
    signed = [each for each in found if each.identity]
    able = [each for each in signed if each.replaces]
    gone = {each.body.supersedes for each in able if isinstance(each.body, Predicate)}
    left = [each for each in signed if each.identity not in gone]
    bodies = [each.body for each in left if each.replaces and isinstance(each.body, Predicate)]
    kept = [each for each in left if not any(_is_anew(body, each.body) for body in bodies)]
    if any(each.body is not None and each.body.stage == stage for each in kept):
        kept = [each for each in kept if each.body is None or each.body.stage == stage]
    return kept or found


def _is_anew(later: Predicate, earlier: Predicate | Transfer | None) -> bool:
    """Return whether a certificate of the same triple and stage with a later sequence states every
    result of an earlier one again."""
    if not isinstance(earlier, Predicate) or later.sequence <= earlier.sequence:
        return False
    if (later.triple.digest, later.stage) != (earlier.triple.digest, earlier.stage):
        return False
    stated = {(clause.slice, clause.obligation) for clause in later.clauses}
    return {*earlier.scope.covers} <= {*later.scope.covers} and stated.issuperset(
        (clause.slice, clause.obligation) for clause in earlier.clauses
    )


def _pulled(
    registry: Repository,
    digest: str,
    document: Mapping[str, Any],
    folder: Path,
    trusted: TrustPolicy,
    moment: datetime,
) -> Pulled:
    """Read one artefact into a folder that is named by its digest."""
    name, where = f"{OCI}{registry.image.name}@{digest}", f"{registry.root}/manifests/{digest}"
    listed = document.get("layers")
    layers = [Descriptor.of(each, where) for each in (listed if isinstance(listed, list) else [])]
    bundles = [layer for layer in layers if layer.media_type == BUNDLE_TYPE]
    if len(bundles) != 1:
        raise bad_reply(where, f"{len(bundles)} bundles in one artefact")
    own = folder / digest.removeprefix("sha256:")
    own.mkdir()
    path = own / f"{own.name}.json"  # no other file has this name: the digest covers all names
    files = {layer.title: layer for layer in layers if layer is not bundles[0]}
    registry.blob(bundles[0], path, LARGEST_BUNDLE)
    try:
        bundle = path.read_bytes()
        envelope = decode(parse_bundle(bundle))
        if not signers(envelope, trusted.keys):
            return Pulled(name, path, None, "")
    except Rejected:  # reported by the check
        return Pulled(name, path, None, "")
    identity = certificate_id(envelope.payload)
    try:
        body = _body(envelope.payload)
    except Rejected:  # it is signed, so it is kept and the check refuses it
        return Pulled(name, path, None, identity)

    def read(names: Sequence[str]) -> None:
        for title in names:
            if title in files and not (own / title).exists():
                registry.blob(files[title], own / title, LARGEST_PROOF)

    if isinstance(body, Transfer):
        read([plain_name(body.path, "transfer")])
    with suppress(Rejected):  # a missing or wrong base of a transfer is reported by the check
        read(_named(body, own))
    return Pulled(name, path, body, identity, _accepts(trusted, bundle, body.stage, moment))


def _accepts(trusted: TrustPolicy, bundle: bytes, stage: str, moment: datetime) -> bool:
    """Return whether a check accepts the signatures of a bundle for a stage, and the policy does
    not revoke the certificate."""
    try:
        signed = authentic(bundle, trusted, moment, (PREDICATE_TYPE, TRANSFER_TYPE))
        able = tuple(key for key in signed.signers if key.stages is None or stage in key.stages)
        meets_threshold(able, trusted.threshold, "stage/key-not-allowed")
    except Rejected:
        return False
    return certificate_id(signed.payload) not in trusted.revoked_certificates


def _body(payload: bytes) -> Predicate | Transfer:
    statement = parse_statement(strict_load(payload, LARGEST_PAYLOAD))
    if statement.predicate_type == TRANSFER_TYPE:
        return parse_transfer(statement.predicate)
    return parse_predicate(statement.predicate)[0]


def _named(body: Predicate | Transfer, folder: Path) -> list[str]:
    """Return the files that a certificate names, each once, including the files of the base
    certificate of a transfer. Raises Rejected where the base cannot be read."""
    if isinstance(body, Predicate):
        proofs = [clause.proof.path for clause in body.clauses if clause.proof is not None]
        return list(dict.fromkeys([*proofs, *(file.path for file in body.evidence)]))
    try:
        with open_regular(folder / body.path) as file:
            payload = decode(parse_bundle(file.read(LARGEST_BUNDLE + 1))).payload
    except OSError as error:
        raise Rejected("transfer/base-missing", f"{body.path}: {error.strerror}") from None
    if certificate_id(payload) != body.base:
        raise Rejected("transfer/another-base", f"{body.path} is not the one that is transferred")
    base = _body(payload)
    return [body.path, *(_named(base, folder) if isinstance(base, Predicate) else [])]


def _described(path: Path, kind: str, title: str) -> tuple[Descriptor, Path]:
    found, size = hashlib.sha256(), 0
    try:
        with open_regular(path) as file:
            while chunk := file.read(CHUNK):
                found.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise refuse(
            FILE_MISSING,
            f"{path} cannot be read: {error.strerror}",
            help="make the file readable, or name another one",
        ) from error
    return Descriptor(kind, f"sha256:{found.hexdigest()}", size, title), path
