"""Companions of a certificate: statements about an OCI image in formats that other tools verify.

The subject of a certificate is a triple, which registries cannot look up. The only subject of a
companion is the manifest digest of an image, and its predicate repeats the result of a check. Its
signer vouches that the image contains the checkpoint and the kernels.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kcdsl import __version__
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import CANNOT_SIGN, USAGE
from kcdsl.release import OCI
from kcdsl.release.image_policies import cue_policy, rego_policy
from kcdsl.source.output import NewFile, result
from kcdsl_certs.encoding.strict import canonical_json, time_text
from kcdsl_certs.signatures import (
    Envelope,
    SigningKey,
    bundle_bytes,
    envelope_bytes,
    sign,
)
from kcdsl_certs.statement import STATEMENT_TYPE, Predicate
from kcdsl_certs.verification.report import Combined

IMAGE_TYPE = "urn:kcdsl:attestation:certified-image:v0.1"
VSA_TYPE = "https://slsa.dev/verification_summary/v1"
SVR_TYPE = "https://in-toto.io/attestation/svr/v0.2"
VERIFIER = "urn:kcdsl:verifier:v1"
KEPT = "KCDSL_CONTRACT_KEPT"
RECHECKED = "KCDSL_PROOFS_RECHECKED"
NON_CLAIMS = (
    "Nothing here shows that the image holds the checkpoint and the kernels of the certificates: "
    "the signer says so.",
)
_IMAGE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?(/[a-z0-9]+([._-]+[a-z0-9]+)*)+"
    r"|[a-z0-9]+([._-]+[a-z0-9]+)*)@sha256:(?P<digest>[0-9a-f]{64})",
    re.ASCII,
)
_LONGEST_IMAGE = 512


@dataclass(frozen=True, slots=True)
class Image:
    """An OCI artefact by its name and the sha256 of its manifest; never by a tag."""

    name: str
    sha256: str

    @classmethod
    def of(cls, text: str, what: str = "--image") -> Image:
        """Read `NAME@sha256:DIGEST`; raises Refusal for anything else, a tag included."""
        found = _IMAGE.fullmatch(text) if len(text) <= _LONGEST_IMAGE else None
        if found is None:
            raise refuse(
                USAGE,
                f"{what} {text[:80]!a} is no NAME@sha256:DIGEST",
                help="name the digest of the manifest and no tag, which could be moved: "
                "registry.example/llm/model@sha256:…",
            )
        return cls(found["name"], found["digest"])

    @property
    def uri(self) -> str:
        """Return the image as a URI, the `resourceUri` of a verification summary."""
        return f"{OCI}{self.name}@sha256:{self.sha256}"


@dataclass(frozen=True, slots=True)
class ValidCertificates:
    """Certificates of one stage that passed a check together, by file and identifier."""

    certificates: tuple[tuple[str, Predicate], ...]
    levels: tuple[str, ...]
    moment: datetime

    @classmethod
    def of(cls, checked: Combined, moment: datetime, *, rechecked: bool) -> ValidCertificates:
        """Return the certificates of an accepted check of the whole contract; raises Refusal for a
        weights transfer and for certificates of several stages."""
        if not (checked.accepted and checked.complete):
            raise ValueError("companions state what a check of the whole contract accepted")
        found: list[tuple[str, Predicate]] = []
        for name, report in checked.reports:
            if report.predicate is None or report.certificate is None:
                raise refuse(
                    CANNOT_SIGN,
                    f"{name} is a weights transfer, which companions do not state",
                    help="verify the contract with the later weights: kcdsl verify",
                )
            found.append((report.certificate, report.predicate))
        stages = sorted({body.stage for _, body in found})
        if len(stages) > 1:
            raise refuse(
                CANNOT_SIGN,
                f"the certificates are of several stages: {', '.join(stages)}",
                help="name certificates of one stage",
            )
        proved = any(clause.evidence.is_proof for _, body in found for clause in body.clauses)
        levels = (KEPT, f"KCDSL_STAGE_{stages[0].upper().replace('-', '_')}")
        return cls(tuple(found), (*levels, RECHECKED) if rechecked and proved else levels, moment)

    @property
    def first(self) -> Predicate:
        """Return the body of the first certificate; all have its stage and contract."""
        return self.certificates[0][1]

    @property
    def valid_until(self) -> datetime:
        """Return the earliest end of validity."""
        return min(body.valid_until for _, body in self.certificates)

    @property
    def policy(self) -> dict[str, Any]:
        """Return the contract as a resource descriptor, against which the image was verified."""
        contract = self.first.triple.contract
        uri = f"urn:kcdsl:contract:{contract.id}:{contract.version}"
        return {"uri": uri, "digest": {"sha256": contract.digest}}


def image_statement(image: Image, certified: ValidCertificates) -> bytes:
    """Return the statement of an image with kcdsl's own predicate type."""
    contract = certified.first.triple.contract
    certificates = [
        {
            "digest": {"sha256": identity},
            "triple": {"sha256": body.triple.digest},
            "sequence": body.sequence,
            "issuedAt": time_text(body.issued_at),
            "validUntil": time_text(body.valid_until),
        }
        for identity, body in certified.certificates
    ]
    body = {
        "verdict": "PASSED",
        "contract": {
            "id": contract.id,
            "version": contract.version,
            "digest": {"sha256": contract.digest},
        },
        "stage": certified.first.stage,
        "levels": list(certified.levels),
        "certificates": certificates,
        "issuedAt": time_text(certified.moment),
        "validUntil": time_text(certified.valid_until),
        "verifier": {"id": VERIFIER, "version": __version__},
        "nonClaims": list(NON_CLAIMS),
    }
    return _statement(image, IMAGE_TYPE, body)


def summary_statement(image: Image, certified: ValidCertificates) -> bytes:
    """Return the SLSA verification summary (VSA v1) of an image; it has no time of expiry."""
    body = {
        "verifier": {"id": VERIFIER, "version": {"kcdsl": __version__}},
        "timeVerified": time_text(certified.moment),
        "resourceUri": image.uri,
        "policy": certified.policy,
        "inputAttestations": [
            {"uri": "urn:kcdsl:certificate", "digest": {"sha256": identity}}
            for identity, _ in certified.certificates
        ],
        "verificationResult": "PASSED",
        "verifiedLevels": list(certified.levels),
    }
    return _statement(image, VSA_TYPE, body)


def result_statement(image: Image, certified: ValidCertificates) -> bytes:
    """Return the in-toto simple verification result (SVR v0.2) of an image."""
    body = {
        "verifier": {"id": VERIFIER, "policies": [certified.policy]},
        "timeCreated": time_text(certified.moment),
        "properties": list(certified.levels),
    }
    return _statement(image, SVR_TYPE, body)


def _statement(image: Image, kind: str, body: dict[str, Any]) -> bytes:
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": image.name, "digest": {"sha256": image.sha256}}],
            "predicateType": kind,
            "predicate": body,
        }
    )


def companion_files(
    stem: Path, image: Image, certified: ValidCertificates, keys: Sequence[SigningKey]
) -> tuple[NewFile, ...]:
    """Return every companion, signed by each key in a separate file, and the policies.

    A Sigstore bundle has one signature; several keys give several bundles. `stem` is the path
    without a suffix.
    """
    return tuple(
        result(stem.with_name(stem.name + ending), data)
        for ending, data in _parts(image, certified, keys)
    )


def _parts(
    image: Image, certified: ValidCertificates, keys: Sequence[SigningKey]
) -> Iterator[tuple[str, bytes]]:
    for key in keys:
        mark = key.public.fingerprint[:8]

        def envelope(payload: bytes, key: SigningKey = key) -> Envelope:
            return sign(payload, [key])

        stated = envelope(image_statement(image, certified))
        found = envelope(result_statement(image, certified))
        yield f".{mark}.image.sigstore.json", bundle_bytes(stated, key.public.hint)
        yield f".{mark}.image.att", envelope_bytes(stated)
        yield f".{mark}.vsa.json", envelope_bytes(envelope(summary_statement(image, certified)))
        yield f".{mark}.svr.sigstore.json", bundle_bytes(found, key.public.hint)
    contract, stage = certified.first.triple.contract, certified.first.stage
    yield ".policy.rego", rego_policy(IMAGE_TYPE, contract.digest, stage, certified.levels)
    yield ".policy.cue", cue_policy(IMAGE_TYPE, contract.digest, stage, certified.levels)
