"""`kcdsl attach` and `kcdsl check oci://`: certificates of images in registries."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from kcdsl.ir.terms import Program
from kcdsl.release.issue import issue
from kcdsl.release.oci import transport
from kcdsl.release.results import proof_reference
from kcdsl_certs.encoding.strict import canonical_json
from kcdsl_certs.signatures import (
    SigningKey,
    bundle_bytes,
    decode,
    generate,
    parse_bundle,
    sign,
)
from kcdsl_certs.statement import (
    EvidenceFile,
    Predicate,
    Transfer,
    TransferredResult,
    Verdict,
    certificate_id,
    transfer_bytes,
)
from kcdsl_certs.verification.admission import read_statement
from tests.support.registries import NAME, FakeRegistry, artefacts, digest_of, serving
from tests.support.release_scenes import NOW, results

Cli = Callable[..., Any]
pytestmark = pytest.mark.usefixtures("while_valid")


@pytest.fixture(params=[True, False], ids=["referrers API", "fallback tag"])
def registry(request: pytest.FixtureRequest) -> Iterator[FakeRegistry]:
    """Serve a registry with the referrers API, and one without it."""
    with serving(FakeRegistry(lists_referrers=request.param)) as served:
        yield served


def test_attached_certificate_is_checked_like_the_file(
    registry: FakeRegistry,
    attach: Any,
    check: Any,
    cli: Cli,
    folder: Path,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    image = registry.image()
    ran = attach(image)
    assert ran.code == 0, ran.stderr
    (digest,) = artefacts(registry)
    assert f"attached as oci://{registry.host}/{NAME}@{digest}" in ran.stdout.splitlines()[-1]
    there = json.loads(check(image, "--format", "json").stdout)
    here = json.loads(
        cli("check", certificate, "--key", "kcdsl.key.pub", "--format", "json", cwd=folder).stdout
    )
    assert there["verdict"] == here["verdict"] == "valid"
    assert there["certificate"] == here["certificate"]
    steps = [
        [(s["name"], s["outcome"], s["reason"]) for s in one["checks"]] for one in (there, here)
    ]
    assert steps[0] == steps[1]
    alone = check(f"{registry.host}/{NAME}@{digest}")
    assert alone.code == 0, alone.stdout + alone.stderr
    assert list(scratch.iterdir()) == []


def test_second_attachment_is_idempotent(registry: FakeRegistry, attach: Any) -> None:
    image = registry.image()
    assert attach(image).code == 0
    before = dict(registry.documents)
    registry.requests.clear()
    ran = attach(image)
    assert ran.code == 0
    assert ": 0 bytes sent" in ran.stdout
    assert registry.sent("POST") == []
    assert registry.documents == before


def test_interrupted_attachment_is_completed(
    registry: FakeRegistry, attach: Any, check: Any
) -> None:
    image = registry.image()
    assert attach(image).code == 0
    missing = next(iter(registry.blobs))
    held = dict(registry.blobs)
    del registry.blobs[missing]
    registry.requests.clear()
    assert attach(image).code == 0
    assert registry.blobs == held
    assert len(registry.sent("POST")) == 1
    assert check(image).code == 0


def test_untrusted_artefacts_are_ignored(
    registry: FakeRegistry, attach: Any, check: Any, folder: Path, certificate: Path
) -> None:
    image = registry.image()
    other = folder / "other"
    shutil.copytree(certificate.parent, other)
    document = json.loads(certificate.read_bytes())
    document["dsseEnvelope"]["signatures"][0]["sig"] = "AA=="
    (other / certificate.name).write_text(json.dumps(document))
    assert attach(image, other / certificate.name).code == 0
    assert check(image).code == 4  # only artefacts without a trusted signature
    assert attach(image).code == 0
    ran = check(image, "--format", "json")
    assert ran.code == 0, ran.stdout
    assert json.loads(ran.stdout)["certificate"]  # that of one


def test_files_of_untrusted_certificates_are_not_read(
    plain: FakeRegistry, attach: Any, check: Any, folder: Path
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    (folder / "kcdsl.key.pub").write_bytes(generate().public.pem)
    plain.requests.clear()
    ran = check(image)
    assert ran.code == 4
    assert "signature/none-trusted" in ran.stdout
    assert len([path for path in plain.sent("GET") if "/blobs/" in path]) == 1


def test_artefact_of_another_image_is_ignored(plain: FakeRegistry, attach: Any, check: Any) -> None:
    image = plain.image()
    assert attach(image).code == 0
    data = json.dumps({"schemaVersion": 2, "mediaType": "x", "config": {}}).encode()
    plain.documents[digest_of(data)] = ("x", data)
    about = plain.referrers(image.rpartition("@")[2])
    plain.changed = lambda path, data: about if path == "referrers" else data
    ran = check(f"{plain.host}/{NAME}@{digest_of(data)}")
    assert ran.code == 2
    assert "error[KC601]" in ran.stderr
    assert "no certificate is attached" in ran.stderr


@pytest.mark.parametrize("part", ["manifests/", "blobs/"])
@pytest.mark.parametrize("how", ["another", "shorter", "longer"])
def test_content_with_a_wrong_digest_is_refused(
    plain: FakeRegistry, attach: Any, check: Any, part: str, how: str
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    change: Callable[[bytes], bytes] = {
        "another": lambda data: data[:-1] + b" ",
        "shorter": lambda data: data[:-1],
        "longer": lambda data: data + b" ",
    }[how]
    plain.changed = lambda path, data: change(data) if path.startswith(part) else data
    ran = check(image)
    assert ran.code == 2
    assert "error[KC655]" in ran.stderr


def test_oversized_answers_are_not_read_completely(
    plain: FakeRegistry, attach: Any, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    monkeypatch.setattr(transport, "LARGEST_DOCUMENT", 100)
    ran = check(image)
    assert ran.code == 2
    assert "it sent more than 100 bytes" in ran.stderr


@pytest.mark.parametrize("target", ["file:///etc/hostname?", "ftp://localhost", "data:,"])
def test_redirects_to_other_kinds_of_address_are_refused(
    plain: FakeRegistry, attach: Any, check: Any, target: str
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    plain.redirect = target
    ran = check(image)
    assert ran.code == 2
    assert "error[KC655]" in ran.stderr
    assert "it redirects to" in ran.stderr


def test_credentials_are_sent_to_the_registry_only(
    plain: FakeRegistry, attach: Any, check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = plain.image()
    plain.token = "secret"
    ran = attach(image)
    assert ran.code == 2
    assert "wants other credentials" in ran.stderr
    known = {"auths": {plain.host: {"auth": "dXNlcjpwYXNz"}}}
    (tmp_path / "auth.json").write_text(json.dumps(known))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    assert attach(image).code == 0
    with serving(FakeRegistry(blobs=plain.blobs)) as store:
        plain.redirect = f"http://{store.host}"
        assert check(image).code == 0
        assert store.requests
        assert {given for _, _, given in store.requests} == {""}
        plain.redirect, plain.place = "", f"http://{store.host}/v2/{NAME}/blobs/uploads/1"
        plain.blobs = {}
        ran = attach(image)
        assert ran.code == 2
        assert "it sends its client to" in ran.stderr
        assert store.sent("PUT") == []


def test_credential_helpers_are_not_run(
    plain: FakeRegistry, attach: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = plain.image()
    plain.token = "secret"
    (tmp_path / "auth.json").write_text(json.dumps({"credsStore": "desktop"}))
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
    ran = attach(image)
    assert ran.code == 2
    assert "docker-credential-desktop" in ran.stderr


@pytest.mark.parametrize(
    "image",
    [
        "localhost:5000/llm/tiny:latest",
        "llm/tiny@sha256:" + "ab" * 32,
        "localhost:5000@sha256:" + "ab" * 32,
        "localhost:5000/../tiny@sha256:" + "ab" * 32,
        "localhost:5000/llm/tiny@sha512:" + "ab" * 64,
    ],
)
@pytest.mark.usefixtures("certificate")
def test_image_reference_needs_registry_and_digest(check: Any, image: str) -> None:
    ran = check(image)
    assert ran.code == 2
    assert "is no NAME@sha256:DIGEST" in ran.stderr or "names no registry" in ran.stderr


@pytest.mark.usefixtures("certificate")
def test_unreachable_registry_is_named(check: Any) -> None:
    ran = check("localhost:1/llm/tiny@sha256:" + "ab" * 32)
    assert ran.code == 2
    assert "error[KC654]" in ran.stderr
    assert "--plain-http" in ran.stderr


def test_invalid_certificate_is_not_attached(
    plain: FakeRegistry, attach: Any, certificate: Path
) -> None:
    image = plain.image()
    proof = next(certificate.parent.glob("*.proof.json"))
    proof.write_bytes(proof.read_bytes() + b" ")
    ran = attach(image)
    assert ran.code == 2
    assert "proof/digest-mismatch" in ran.stderr
    assert plain.sent("POST") == []


def test_superseded_certificate_is_skipped_and_failed_one_is_not(
    plain: FakeRegistry,
    attach: Any,
    check: Any,
    folder: Path,
    certificate: Path,
    program: Program,
    proof: bytes,
    key: SigningKey,
    evidence: tuple[EvidenceFile, ...],
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    payload = decode(parse_bundle(certificate.read_bytes())).payload
    found = results(program, folder, proof_reference("N-ATTN-0", proof))
    failed = [replace(found[0], verdict=Verdict.INCONCLUSIVE), *found[1:]]
    for clauses, gone, code, count in (
        (found, certificate_id(payload), 0, 1),
        (failed, None, 4, 2),
    ):
        bundle = issue(
            program=program,
            base=folder,
            clauses=clauses,
            keys=[key],
            clock=lambda: NOW,
            sequence=2_000_000_000,
            supersedes=gone,
            evidence=evidence,
        )
        other = certificate.with_name(f"later{count}.cert.json")
        other.write_bytes(bundle)
        assert attach(image, other).code == 0
        ran = check(image, "--format", "json")
        assert ran.code == code, ran.stdout
        assert len(json.loads(ran.stdout).get("certificates", [0])) == count


def test_signed_statement_of_another_kind_is_not_skipped(
    plain: FakeRegistry, attach: Any, check: Any, certificate: Path, key: SigningKey
) -> None:
    image = plain.image()
    assert attach(image).code == 0
    (own,) = artefacts(plain)
    payload = json.loads(decode(parse_bundle(certificate.read_bytes())).payload)
    other = canonical_json({**payload, "predicateType": "urn:kcdsl:of-a-later-version"})
    bundle = bundle_bytes(sign(other, [key]), key.public.hint)
    plain.blobs[digest_of(bundle)] = bundle
    kind, data = plain.documents[own]
    artefact = json.loads(data)
    artefact["layers"][0] |= {"digest": digest_of(bundle), "size": len(bundle)}
    changed = json.dumps(artefact).encode()
    plain.documents[digest_of(changed)] = (kind, changed)
    ran = check(image)
    assert ran.code == 4
    assert "statement/key-not-allowed" in ran.stdout


@pytest.fixture
def issued(
    folder: Path,
    certificate: Path,
    program: Program,
    proof: bytes,
    key: SigningKey,
    evidence: tuple[EvidenceFile, ...],
) -> Callable[..., Path]:
    """Return a function that issues a second certificate."""

    def run(
        sequence: int,
        *,
        failed: bool = False,
        part: slice = slice(None),
        signer: SigningKey = key,
        **options: Any,
    ) -> Path:
        found = results(program, folder, proof_reference("N-ATTN-0", proof))
        if failed:
            found[0] = replace(found[0], verdict=Verdict.INCONCLUSIVE)
        path = certificate.with_name(f"{sequence}.cert.json")
        given: dict[str, Any] = {"clock": lambda: NOW, "sequence": sequence, "evidence": evidence}
        bundle = issue(
            program=program, base=folder, clauses=found[part], keys=[signer], **given | options
        )
        path.write_bytes(bundle)
        return path

    return run


LATER, LATEST = 2_000_000_000, 2_000_000_001
SHORT = {"lifetime": timedelta(hours=1)}


@pytest.mark.parametrize("earlier", [{"failed": True}, SHORT, {"part": slice(1)}])
def test_restated_certificate_no_longer_counts(
    plain: FakeRegistry,
    attach: Any,
    check: Any,
    issued: Any,
    earlier: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    image = plain.image()
    with monkeypatch.context() as then:
        then.setattr("kcdsl.release.issue.utc_now", lambda: NOW)
        assert attach(image, issued(LATER, **earlier)).code == 0
    assert check(image).code == (0 if "part" in earlier else 4)
    assert attach(image, issued(LATEST)).code == 0
    ran = check(image, "--format", "json")
    assert ran.code == 0, ran.stdout
    assert "certificates" not in json.loads(ran.stdout)


@pytest.mark.parametrize(
    "later",
    [{"stage": "shadow"}, {"part": slice(1, None)}, {"sequence": LATER - 1}, {"failed": True}],
    ids=["another stage", "less", "earlier", "failed as well"],
)
def test_failure_counts_until_it_is_completely_restated(
    plain: FakeRegistry, attach: Any, check: Any, issued: Any, later: dict[str, Any]
) -> None:
    image = plain.image()
    assert attach(image, issued(LATER, failed=True)).code == 0
    assert attach(image, issued(**({"sequence": LATEST} | later))).code == 0
    ran = check(image)
    assert ran.code == 4
    assert "clause/" in ran.stdout


def test_superseded_certificate_restates_nothing(
    plain: FakeRegistry, attach: Any, check: Any, issued: Any
) -> None:
    """Otherwise a failure would disappear without a result that replaces it."""
    image = plain.image()
    assert attach(image, issued(LATER, failed=True)).code == 0
    whole = issued(LATEST)
    assert attach(image, whole).code == 0
    assert check(image).code == 0
    gone = certificate_id(decode(parse_bundle(whole.read_bytes())).payload)
    less = issued(LATEST + 1, part=slice(1, None), supersedes=gone)
    assert attach(image, less).code == 0
    assert check(image).code == 4


def test_untrusted_certificate_restates_nothing(
    plain: FakeRegistry, attach: Any, check: Any, issued: Any
) -> None:
    image = plain.image()
    assert attach(image, issued(LATER, failed=True)).code == 0
    assert attach(image, issued(LATEST, signer=generate())).code == 0
    assert check(image).code == 4


@pytest.mark.parametrize("why", ["revoked key", "revoked certificate", "key of another stage"])
def test_certificate_that_a_check_refuses_hides_no_failure(
    plain: FakeRegistry, attach: Any, cli: Cli, issued: Any, folder: Path, why: str
) -> None:
    """It is of another stage than the requested one, so that it is not checked itself."""
    image, other = plain.image(), generate()
    (folder / "other.pub").write_bytes(other.public.pem)
    assert attach(image, issued(LATER)).code == 0
    failed = issued(LATEST, failed=True)
    assert attach(image, failed).code == 0
    gone = certificate_id(decode(parse_bundle(failed.read_bytes())).payload)
    hiding = issued(LATEST + 1, stage="shadow", signer=other, supersedes=gone)
    assert attach(image, hiding).code == 0
    own = certificate_id(decode(parse_bundle(hiding.read_bytes())).payload)
    stages = '{path = "other.pub", stages = ["offline-ci"]}'
    named, revoked = {
        "revoked key": ('"other.pub"', f'revoked-keys = ["{other.public.fingerprint}"]'),
        "revoked certificate": ('"other.pub"', f'revoked-certificates = ["{own}"]'),
        "key of another stage": (stages, ""),
    }[why]
    policy = folder / "policy.toml"
    policy.write_text(f'trusted-keys = ["kcdsl.key.pub", {named}]\n{revoked}\n')
    words = ("--stage", "offline-ci", "--plain-http", "--policy", policy)
    ran = cli("check", f"oci://{image}", *words, cwd=folder)
    assert ran.code == 4, ran.stdout
    assert "clause/" in ran.stdout
    policy.write_text('trusted-keys = ["kcdsl.key.pub", "other.pub"]\n')
    assert cli("check", f"oci://{image}", *words, cwd=folder).code == 0


def test_evidence_file_may_have_any_name(
    plain: FakeRegistry, attach: Any, check: Any, issued: Any, evidence: tuple[EvidenceFile, ...]
) -> None:
    image, path = plain.image(), issued(LATER)
    (path.parent / evidence[0].path).rename(path.parent / "certificate.json")
    renamed = replace(evidence[0], path="certificate.json")
    assert attach(image, issued(LATER, evidence=(renamed, *evidence[1:]))).code == 0
    ran = check(image)
    assert ran.code == 0, ran.stdout


def test_transfer_reads_files_of_its_base_certificate_only(
    plain: FakeRegistry, attach: Any, check: Any, certificate: Path, key: SigningKey
) -> None:
    payload = decode(parse_bundle(certificate.read_bytes())).payload
    body = read_statement(payload)
    assert isinstance(body, Predicate)
    transfer = Transfer(
        body.triple,
        certificate_id(payload),
        certificate.name,
        body.stage,
        body.issued_at,
        body.valid_until,
        body.sequence + 1,
        (TransferredResult("N-ATTN-0", "all"),),
        (),
        body.evaluator,
    )
    path = certificate.with_name("moved.json")
    path.write_bytes(bundle_bytes(sign(transfer_bytes(transfer), [key]), key.public.hint))
    image = plain.image()
    ran = attach(image, path)
    assert ran.code == 0, ran.stderr
    changed_payload = json.loads(payload)
    changed_payload["predicate"]["sequence"] += 1
    other = bundle_bytes(sign(canonical_json(changed_payload), [generate()]), "another")
    reads = []
    for base in (certificate.read_bytes(), other):
        (own,) = artefacts(plain)
        kind, data = plain.documents.pop(own)
        artefact = json.loads(data)
        (layer,) = (
            each for each in artefact["layers"] if certificate.name in each["annotations"].values()
        )
        layer |= {"digest": digest_of(base), "size": len(base)}
        plain.blobs[digest_of(base)] = base
        changed = json.dumps(artefact).encode()
        plain.documents[digest_of(changed)] = (kind, changed)
        plain.requests.clear()
        assert check(image).code == 4
        reads.append(len([p for p in plain.sent("GET") if "/blobs/" in p]))
    assert reads[0] > 2  # the transfer, its certificate, and the files of that
    assert reads[1] == 2


@pytest.mark.parametrize("failed", [False, True])
def test_requested_stage_counts_alone(
    plain: FakeRegistry, attach: Any, check: Any, issued: Any, failed: bool
) -> None:
    image = plain.image()
    assert attach(image, issued(LATER, failed=failed)).code == 0
    assert attach(image, issued(LATEST, stage="shadow")).code == 0
    assert check(image, "--stage", "shadow").code == 0
    assert check(image, "--stage", "offline-ci").code == (4 if failed else 0)
    assert check(image).code == (4 if failed else 0)
    ran = check(image, "--stage", "canary")
    assert ran.code == 4
    assert "stage/mismatch" in ran.stdout


def test_unreadable_artefacts_are_reported_for_any_stage(
    plain: FakeRegistry, attach: Any, check: Any, issued: Any, key: SigningKey
) -> None:
    image, path = plain.image(), issued(LATEST, stage="shadow")
    assert attach(image, path).code == 0
    (own,) = artefacts(plain)
    payload = json.loads(decode(parse_bundle(path.read_bytes())).payload)
    other = canonical_json({**payload, "predicateType": "urn:kcdsl:of-a-later-version"})
    bundle = bundle_bytes(sign(other, [key]), key.public.hint)
    plain.blobs[digest_of(bundle)] = bundle
    kind, data = plain.documents[own]
    artefact = json.loads(data)
    artefact["layers"][0] |= {"digest": digest_of(bundle), "size": len(bundle)}
    changed = json.dumps(artefact).encode()
    plain.documents[digest_of(changed)] = (kind, changed)
    assert check(image, "--stage", "shadow").code == 4
