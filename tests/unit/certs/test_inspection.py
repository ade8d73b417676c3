"""Inspecting a certificate never reports a better result than a check."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kcdsl_certs.encoding.strict import parse_time
from kcdsl_certs.signatures import Trust, bundle_bytes, read_policy, sign, trust
from kcdsl_certs.statement import Predicate, Scope, payload_bytes
from kcdsl_certs.verification.inspection import NEEDS_ARTEFACTS, NO_KEY, inspect
from kcdsl_certs.verification.report import STEPS

VECTORS = Path("certs/vectors")
INDEX = json.loads((VECTORS / "index.json").read_text())["vectors"]
NOW = datetime(2026, 12, 1, tzinfo=UTC)
ALONE = (*STEPS[:7], "validity")
"""Steps that need only the certificate, the policy and the time."""


def trusting(*names: str, threshold: int | None = None, revocations: Sequence[str] = ()) -> Trust:
    """Return a policy that trusts these keys of the vectors."""
    files = [VECTORS / name for name in revocations]
    keys = [VECTORS / name for name in names]
    return trust(None, keys=keys, threshold=threshold, revocations=files)


def seen(vector: dict[str, Any]) -> Any:
    """Return the inspection of a vector under its options."""
    options = vector["options"]
    revocations = options.get("revocations", ())
    found = trusting(*options["keys"], threshold=options.get("threshold"), revocations=revocations)
    moment = parse_time(options["at"])
    bundle = (VECTORS / vector["file"]).read_bytes()
    return inspect(bundle, found, moment, stage=options.get("stage"))


@pytest.mark.parametrize("vector", INDEX, ids=lambda vector: vector["file"])
def test_inspection_refuses_or_omits_what_a_check_refuses(vector: dict[str, Any]) -> None:
    found = seen(vector)
    reasons = {check.reason for check in found.refusals}
    if vector["expect"] == "valid":
        assert reasons == set()
        assert found.authentic is True
        return
    open_or_failed = {check.name for check in (*found.refusals, *found.left_out)}
    assert vector["step"] in open_or_failed
    if vector["step"] in ALONE:
        assert vector["reason"] in reasons
    if vector["step"] in STEPS[:7]:
        assert found.authentic is False


def test_every_standalone_step_has_failing_vectors() -> None:
    steps = {v["step"] for v in INDEX if v["expect"] != "valid"}
    assert {"bundle", "encoding", "signatures", "threshold", "payload", "validity"} <= steps
    contradicting = [v for v in INDEX if v["step"] == "clauses" and seen(v).refusals]
    assert len(contradicting) > 10


def test_content_without_keys_is_marked_unverified() -> None:
    found = inspect((VECTORS / "valid.cert.json").read_bytes(), None, NOW)
    assert found.authentic is None
    assert isinstance(found.body, Predicate)
    assert found.body.triple.contract.id == "vectors"
    reasons = {check.name: check.reason for check in found.left_out}
    assert reasons["signatures"] == reasons["threshold"] == reasons["stage"] == NO_KEY
    assert reasons["components"] == NEEDS_ARTEFACTS
    assert [s.problem for s in found.signatures] == ["not verified"]
    late = inspect(
        (VECTORS / "expired.cert.json").read_bytes(), None, datetime(2030, 1, 1, tzinfo=UTC)
    )
    assert [check.reason for check in late.refusals] == ["validity/expired"]


def test_causes_of_signature_failures_are_distinguished() -> None:
    bundle = (VECTORS / "valid.cert.json").read_bytes()
    other = inspect(bundle, trusting("b.pub"), NOW)
    assert other.authentic is False
    assert isinstance(other.body, Predicate)
    assert other.signatures[0].key is None
    assert "made by no trusted key" in other.signatures[0].problem
    assert {c.reason for c in other.left_out} == {"step/earlier-failed"}
    bundle = (VECTORS / "revoked-key.cert.json").read_bytes()
    revoked = inspect(bundle, trusting("b.pub", revocations=["revoked-key.toml"]), NOW)
    assert revoked.authentic is False
    assert revoked.signatures[0].problem == "the key was revoked"


def test_key_that_may_not_sign_the_stage_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "a.pub"
    key.write_bytes((VECTORS / "a.pub").read_bytes())
    policy = tmp_path / "policy.toml"
    policy.write_text('trusted-keys = [{path = "a.pub", stages = ["canary"]}]\n')
    found = inspect((VECTORS / "valid.cert.json").read_bytes(), trust(read_policy(policy)), NOW)
    assert [check.reason for check in found.refusals] == ["stage/key-not-allowed"]


def test_missing_required_kernel_part_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.pub").write_bytes((VECTORS / "a.pub").read_bytes())
    policy = tmp_path / "policy.toml"
    policy.write_text('trusted-keys = ["a.pub"]\nrequired-kernel-parts = ["gpu"]\n')
    found = inspect((VECTORS / "valid.cert.json").read_bytes(), trust(read_policy(policy)), NOW)
    assert [check.reason for check in found.refusals] == ["triple/kernel-part-missing"]


def test_other_stage_is_refused_with_and_without_keys() -> None:
    bundle = (VECTORS / "valid.cert.json").read_bytes()
    for known in (None, trusting("a.pub")):
        found = inspect(bundle, known, NOW, stage="full")
        assert [check.reason for check in found.refusals] == ["stage/mismatch"]


def test_stated_failure_is_refused() -> None:
    vector = next(v for v in INDEX if v["file"] == "failed.cert.json")
    assert "clause/not-passed" in {check.reason for check in seen(vector).refusals}


def test_damaged_bytes_never_raise_an_exception() -> None:
    whole = (VECTORS / "valid.cert.json").read_bytes()
    payload = json.loads(whole)["dsseEnvelope"]["payload"]
    text = base64.b64decode(payload)
    for place in range(0, len(text), 97):
        for changed in (
            text[:place],
            text[:place] + b"\xff" + text[place + 1 :],
            text[:place] + b"1e9" + text[place + 1 :],
        ):
            made = json.loads(whole)
            made["dsseEnvelope"]["payload"] = base64.b64encode(changed).decode()
            bundle = json.dumps(made).encode()
            for known in (None, trusting("a.pub")):
                found = inspect(bundle, known, NOW)
                assert found.authentic is not True
                assert found.body is None or found.statement is not None
                assert "internal/error" not in {check.reason for check in found.refusals}
    for place in range(0, len(whole), 211):
        assert inspect(whole[:place], None, NOW).authentic is False


def test_payloads_of_another_type_are_refused_without_keys() -> None:
    made = json.loads((VECTORS / "valid.cert.json").read_bytes())
    made["dsseEnvelope"]["payloadType"] = "application/json"
    found = inspect(json.dumps(made).encode(), None, NOW)
    assert "payload/type" in {check.reason for check in found.refusals}


def test_certificates_that_cover_nothing_are_refused(
    body: Predicate, certify: Callable[..., bytes]
) -> None:
    empty = replace(body, clauses=(), scope=Scope(False, ()), evidence=())
    found = inspect(certify(empty), None, NOW)
    assert "clause/nothing-covered" in {check.reason for check in found.refusals}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda s: s["subject"].append(s["subject"][0]), "subject/count"),
        (lambda s: s["subject"][0].update(digest={"sha512": "0" * 128}), "subject/no-sha256"),
        (lambda s: s["subject"][0].update(digest={"sha256": "0" * 64}), "subject/mismatch"),
        (lambda s: s.update(predicateType="https://example.com/p"), "statement/predicate-type"),
        (lambda s: s["predicate"]["clauses"].pop(), "clause/missing"),
    ],
    ids=["two subjects", "no sha256", "another triple", "another type", "a missing result"],
)
def test_inconsistent_statements_are_refused_without_keys(
    change: Callable[[Any], object], reason: str, body: Predicate, golden: ModuleType
) -> None:
    statement = json.loads(payload_bytes(body))
    change(statement)
    text = json.dumps(statement, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    bundle = bundle_bytes(sign(text.encode(), [golden.KEY_A]), "x")
    assert reason in {check.reason for check in inspect(bundle, None, NOW).refusals}
