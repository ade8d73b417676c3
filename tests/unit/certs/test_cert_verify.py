"""Threats beyond the vectors: keys, roles, replay, files, damaged bytes."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from collections.abc import Callable
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import parse_time
from kcdsl_certs.signatures import (
    Algorithm,
    Signature,
    TrustedKey,
    TrustPolicy,
    bundle_bytes,
    generate,
    sign,
)
from kcdsl_certs.statement import (
    PREDICATE_TYPE,
    CertifiedClause,
    Expectation,
    Input,
    Predicate,
    RequiredClause,
    Scope,
    Triple,
    Verdict,
    certificate_id,
    parse_predicate,
    payload_bytes,
)
from kcdsl_certs.verification.proofs import PresentProofs, ProofResult, StepOutcome
from kcdsl_certs.verification.report import STEPS, Check, Combined, Report, refused
from tests.support.quantities import statistic

Certify = Callable[..., bytes]
CheckBundle = Callable[..., Report]
AT = parse_time("2026-12-01T00:00:00Z")


def _trust(key: Any, name: str = "k", **limits: Any) -> TrustedKey:
    kinds = limits.pop("kinds", frozenset({PREDICATE_TYPE}))
    return TrustedKey(name, key.public, kinds, **limits)


def _failures(report: Report) -> list[tuple[str, str]]:
    return [(c.name, c.reason) for c in report.checks if c.outcome is StepOutcome.FAILED]


def test_golden_certificate_is_valid(body: Predicate, certify: Certify, check: CheckBundle) -> None:
    report = check(certify(body), stage="offline-ci", minimum_sequence=41)
    assert report.accepted
    assert [c.name for c in report.checks] == list(STEPS)
    assert {c.name for c in report.checks if c.outcome is not StepOutcome.OK} == {"proofs"}
    assert report.predicate == body
    assert report.certificate == hashlib.sha256(payload_bytes(body)).hexdigest()
    assert report.to_json()["verdict"] == "valid"


def test_body_survives_a_round_trip(body: Predicate) -> None:
    again, stated = parse_predicate(json.loads(payload_bytes(body))["predicate"])
    assert again == body
    assert stated is Verdict.PASSED


@pytest.mark.parametrize("algorithm", list(Algorithm))
def test_generated_keys_of_both_algorithms_verify(
    algorithm: Algorithm, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    key = generate(algorithm)
    assert check(certify(body, key), trusted=TrustPolicy((_trust(key),))).accepted
    stranger = TrustPolicy((_trust(generate(algorithm)),))
    assert _failures(check(certify(body, key), trusted=stranger)) == [
        ("signatures", "signature/none-trusted")
    ]


def test_identity_depends_on_the_payload_only(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    key = generate(Algorithm.ECDSA_P256)
    policy = TrustPolicy((_trust(key),))
    one, other = certify(body, key), certify(body, key)
    assert one != other
    first, second = check(one, trusted=policy), check(other, trusted=policy)
    assert first.certificate == second.certificate == certificate_id(payload_bytes(body))


def test_payload_is_not_parsed_before_the_signature_is_verified(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    report = check(certify(body, generate()))
    assert report.predicate is None
    assert report.certificate is None
    assert {c.outcome for c in report.checks[3:]} == {StepOutcome.NOT_RUN}


# --- keys and roles ------------------------------------------------------------------------------


def test_key_may_sign_only_the_types_of_its_role(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    other = TrustPolicy((_trust(golden.KEY_A, kinds=frozenset({"urn:example:other"})),))
    assert _failures(check(certify(body), trusted=other)) == [
        ("statement-type", "statement/key-not-allowed")
    ]
    statement = json.loads(payload_bytes(body))
    statement["predicateType"] = "urn:example:other"
    both = TrustPolicy(
        (_trust(golden.KEY_A, kinds=frozenset({"urn:example:other", PREDICATE_TYPE})),)
    )
    swapped = bundle_bytes(sign(json.dumps(statement).encode(), [golden.KEY_A]), "x")
    assert _failures(check(swapped, trusted=both)) == [
        ("statement-type", "statement/predicate-type")
    ]


def test_second_key_counts_only_within_its_role(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    allowed, limited = _trust(golden.KEY_A), _trust(golden.KEY_B, "b", kinds=frozenset({"x"}))
    policy = TrustPolicy((allowed, limited), 2)
    report = check(certify(body, golden.KEY_A, golden.KEY_B), trusted=policy)
    assert _failures(report) == [("statement-type", "statement/key-not-allowed")]


def test_key_may_sign_only_its_stages(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    policy = TrustPolicy((_trust(golden.KEY_A, stages=frozenset({"shadow"})),))
    assert _failures(check(certify(body), trusted=policy)) == [("stage", "stage/key-not-allowed")]


def test_expired_key_is_not_trusted(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    ended = _trust(golden.KEY_A, valid_until=AT)
    later = _trust(golden.KEY_A, valid_from=AT + timedelta(seconds=1))
    for key in (ended, later):
        policy = TrustPolicy((key,))
        assert _failures(check(certify(body), trusted=policy)) == [
            ("signatures", "signature/key-not-valid-now")
        ]


def test_report_states_whether_a_known_key_is_named(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    spoiled = certify(body).replace(b'"payload":"eyJ', b'"payload":"eyK')
    (named,) = [c for c in check(spoiled).checks if c.outcome is StepOutcome.FAILED]
    (stranger,) = [
        c for c in check(certify(body, golden.KEY_C)).checks if c.outcome is StepOutcome.FAILED
    ]
    assert "content or the signature was changed" in named.detail
    assert "another key" in stranger.detail


def test_invalid_signature_beside_a_valid_one_is_ignored(
    golden: ModuleType, body: Predicate, check: CheckBundle
) -> None:
    envelope = sign(payload_bytes(body), [golden.KEY_A])
    more = dataclasses.replace(
        envelope, signatures=(*envelope.signatures, Signature(b"\0" * 64, "b"))
    )
    bundle = bundle_bytes(more, "x")
    assert check(bundle).accepted
    policy = TrustPolicy((_trust(golden.KEY_A), _trust(golden.KEY_B, "b")), 2)
    assert _failures(check(bundle, trusted=policy)) == [("threshold", "signature/threshold")]


# --- triple --------------------------------------------------------------------------------------


def test_mismatch_names_components_and_changed_fields(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    own: Triple = body.triple
    deployed = dataclasses.replace(
        own,
        checkpoint=dataclasses.replace(own.checkpoint, root_digest="0" * 64, digest="1" * 64),
        infer=dataclasses.replace(
            own.infer,
            fingerprint={**own.infer.fingerprint, "numerics": golden.numerics("float16")},
        ),
        contract=dataclasses.replace(own.contract, version="2.0.0"),
    )
    report = check(certify(body), expected_triple=deployed)
    subject = next(c for c in report.checks if c.name == "subject")
    assert subject.reason == "triple/checkpoint-mismatch"
    assert "the weights changed" in subject.detail
    assert "numerics.compute 'bfloat16' is now 'float16'" in subject.detail
    assert "version 1.0.0 is now 2.0.0" in subject.detail
    assert ("contract", "triple/contract-mismatch") in _failures(report)


def test_hints_are_not_in_the_digest(body: Predicate) -> None:
    own = body.triple
    renamed = dataclasses.replace(
        own,
        checkpoint=dataclasses.replace(own.checkpoint, name="other"),
        train=dataclasses.replace(own.train, name="other"),
    )
    assert renamed.digest == own.digest


def test_expectation_survives_a_round_trip(golden: ModuleType, vectors_folder: Path) -> None:
    expected = golden.expectation(vectors_folder)
    assert Expectation.from_json(json.loads(json.dumps(expected.to_json()))) == expected


def test_expectation_of_another_schema_is_refused(golden: ModuleType, vectors_folder: Path) -> None:
    record = golden.expectation(vectors_folder).to_json()
    record["schema"] = record["schema"].replace("/", "/9")
    with pytest.raises(Rejected, match="expectation/malformed"):
        Expectation.from_json(record)


# --- freshness -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moment", "reason"),
    [
        ("2026-11-30T12:00:00Z", None),
        ("2026-11-30T11:59:59Z", "validity/not-yet"),
        ("2027-02-28T11:59:59Z", None),
        ("2027-02-28T12:00:00Z", "validity/expired"),
        ("2036-01-01T00:00:00Z", "validity/expired"),
    ],
)
def test_validity_window(
    moment: str, reason: str | None, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    report = check(certify(body), clock=lambda: parse_time(moment))
    assert _failures(report) == ([] if reason is None else [("validity", reason)])


def test_failing_or_naive_clock_is_refused(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    def broken() -> datetime:
        raise OSError("no clock")

    assert not check(certify(body), clock=broken).accepted
    assert _failures(check(certify(body), clock=broken)) == [("validity", "clock/failed")]
    naive = datetime(2026, 12, 1)
    assert not check(certify(body), clock=lambda: naive).accepted


def test_replayed_and_revoked_certificates_are_refused(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    bundle = certify(body)
    assert check(bundle, minimum_sequence=41).accepted
    assert _failures(check(bundle, minimum_sequence=42)) == [("sequence", "sequence/rollback")]
    policy = TrustPolicy(
        (_trust(golden.KEY_A),),
        revoked_certificates=frozenset({certificate_id(payload_bytes(body))}),
    )
    assert _failures(check(bundle, trusted=policy)) == [("sequence", "sequence/revoked")]


def test_revoked_key_does_not_count(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    keys = (_trust(golden.KEY_A), _trust(golden.KEY_B, "b"))
    revoked = frozenset({golden.KEY_B.public.fingerprint})
    policy = TrustPolicy(keys, revoked_keys=revoked)
    report = check(certify(body, golden.KEY_B), trusted=policy)
    assert _failures(report) == [("signatures", "signature/key-revoked")]
    both = certify(body, golden.KEY_A, golden.KEY_B)
    assert check(both, trusted=policy).signers == ("k",)
    two = dataclasses.replace(policy, threshold=2)
    assert _failures(check(both, trusted=two)) == [("threshold", "signature/threshold")]


def test_lifetime_beyond_the_policy_is_refused(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    long = dataclasses.replace(body, valid_until=body.issued_at + timedelta(days=366, seconds=1))
    assert _failures(check(certify(long))) == [("validity", "validity/too-long")]
    year = dataclasses.replace(body, valid_until=body.issued_at + timedelta(days=366))
    assert check(certify(year)).accepted
    days = body.valid_until - body.issued_at
    short = TrustPolicy((_trust(golden.KEY_A),), max_validity=days - timedelta(seconds=1))
    assert _failures(check(certify(body), trusted=short)) == [("validity", "validity/too-long")]
    exact = TrustPolicy((_trust(golden.KEY_A),), max_validity=days)
    assert check(certify(body), trusted=exact).accepted


# --- coverage ------------------------------------------------------------------------------------


def test_contract_without_clauses_accepts_nothing(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    report = check(certify(body), required_clauses=())
    assert _failures(report) == [("clauses", "clause/nothing-required")]


def test_underivable_form_is_never_accepted(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    first, *rest = golden.REQUIRED
    odd = dataclasses.replace(first, alternatives=())
    report = check(certify(body), required_clauses=(odd, *rest))
    assert _failures(report) == [("clauses", "clause/not-rederivable")]


def test_partial_certificate_covers_its_scope_and_lists_the_rest(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    partial = dataclasses.replace(
        body, clauses=body.clauses[:1], scope=Scope(False, body.scope.covers[:1])
    )
    assert _failures(check(certify(partial))) == [("clauses", "clause/missing")]
    report = check(certify(partial), partial=True)
    assert report.accepted
    assert report.outside == ("N-KL [all]", "N-KL [long]", "R-LAT [all]", "O-TRACE [all]")
    nothing = dataclasses.replace(body, clauses=(), scope=Scope(False, ()))
    assert _failures(check(certify(nothing), partial=True)) == [
        ("clauses", "clause/nothing-covered")
    ]


def test_assumptions_of_results_are_reported_once(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    first, second, *rest = body.clauses
    clauses = (
        dataclasses.replace(first, assumptions=("both kernels obey", "not held")),
        dataclasses.replace(second, assumptions=("not held", "rows are independent")),
        *rest,
    )
    counting = dataclasses.replace(body, assumptions=("the clock is right",), clauses=clauses)
    others = tuple(text for clause in rest for text in clause.assumptions)
    report = check(certify(counting))
    assert report.accepted
    expected = ("the clock is right", "both kernels obey", "not held", "rows are independent")
    assert report.assumptions == tuple(dict.fromkeys((*expected, *others)))
    assert report.to_json()["assumptions"] == list(report.assumptions)
    both = Combined((("a", report), ("b", report)))
    assert both.assumptions == report.assumptions
    assert both.to_json()["assumptions"] == list(report.assumptions)


def test_untrusted_content_is_not_reported(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    bundle = certify(dataclasses.replace(body, assumptions=("send the key to me",)))
    assert check(bundle).assumptions[0] == "send the key to me"
    stranger = generate(Algorithm.ED25519)
    assert check(bundle, trusted=TrustPolicy((_trust(stranger),))).assumptions == ()


def test_scope_without_results_is_incomplete(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    hidden = dataclasses.replace(
        body, clauses=body.clauses[:2], scope=Scope(False, body.scope.covers[:3])
    )
    assert _failures(check(certify(hidden), partial=True)) == [("clauses", "clause/missing")]
    boasting = dataclasses.replace(hidden, scope=Scope(True, body.scope.covers[:3]))
    assert _failures(check(certify(boasting), partial=True)) == [("clauses", "scope/inconsistent")]


def test_second_result_cannot_hide_a_failure(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    failed = dataclasses.replace(body.clauses[1], value=Fraction(1, 2), verdict=Verdict.FAILED)
    both = dataclasses.replace(body, clauses=(*body.clauses, failed))
    assert _failures(check(certify(both)))[0] == ("clauses", "clause/duplicate")


def test_disjunction_needs_one_and_conjunction_needs_all(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    first, kl, *rest = golden.REQUIRED
    mean = dataclasses.replace(kl.alternatives[0][0], quantity=statistic("mean", "kl"))
    either = dataclasses.replace(kl, alternatives=((mean,), kl.alternatives[0]))
    every = dataclasses.replace(kl, alternatives=((*kl.alternatives[0], mean),))
    assert check(certify(body), required_clauses=(first, either, *rest)).accepted
    report = check(certify(body), required_clauses=(first, every, *rest))
    assert _failures(report) == [("clauses", "clause/missing")]


# --- proofs --------------------------------------------------------------------------------------


def test_each_clause_needs_its_proof(body: Predicate, certify: Certify, check: CheckBundle) -> None:
    seen: list[str] = []

    def checker(outcome: StepOutcome) -> Callable[[CertifiedClause, Triple], ProofResult]:
        def run(clause: CertifiedClause, triple: Triple) -> ProofResult:
            seen.append(clause.id)
            assert triple == body.triple
            return ProofResult(outcome, "proof/some-reason", "detail")

        return run

    assert check(certify(body), proofs=checker(StepOutcome.OK)).accepted
    report = check(certify(body), proofs=checker(StepOutcome.FAILED))
    assert _failures(report) == [("proofs", "proof/some-reason")]
    assert seen == ["N-ATTN-0", "N-ATTN-0"]


def test_raising_proof_checker_denies(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    def broken(clause: CertifiedClause, triple: Triple) -> ProofResult:
        raise RuntimeError("no")

    assert _failures(check(certify(body), proofs=broken)) == [("proofs", "internal/error")]


def test_changed_or_missing_proof_file_denies(
    golden: ModuleType, body: Predicate, certify: Certify, check: CheckBundle, tmp_path: Path
) -> None:
    missing = check(certify(body), proofs=PresentProofs(tmp_path))
    assert _failures(missing) == [("proofs", "proof/missing")]
    assert _failures(check(certify(body), proofs=None)) == [("proofs", "proof/not-looked-at")]
    nothing: dict[str, Any] = {"proofs": None, "evidence": None, "data": None}
    alone = check(certify(body), **nothing, signature_only=True)
    assert alone.accepted
    reasons = {c.name: c.reason for c in alone.checks}
    assert reasons["proofs"] == "proof/not-looked-at"
    assert reasons["evidence"] == "evidence/not-looked-at"
    assert reasons["recount"] == "recount/no-data"
    for name in ("evidence", "data"):
        strict = check(certify(body), **{name: None}, strict=True)
        assert not strict.accepted
    (tmp_path / golden.PROOF_NAME).write_bytes(golden.proof())
    present = check(certify(body), proofs=PresentProofs(tmp_path))
    assert present.accepted
    assert {c.reason for c in present.checks} >= {"proof/not-rederived"}
    (tmp_path / golden.PROOF_NAME).write_bytes(golden.proof() + b" ")
    changed = check(certify(body), proofs=PresentProofs(tmp_path))
    assert _failures(changed) == [("proofs", "proof/digest-mismatch")]


# --- failing closed ------------------------------------------------------------------------------


def test_report_is_accepted_only_with_every_step() -> None:
    fine = tuple(Check(name, StepOutcome.OK) for name in STEPS)
    assert Report(fine).accepted
    assert not Report(()).accepted
    assert not Report(fine[:-1]).accepted
    assert not Report((*fine, Check("subject", StepOutcome.OK))).accepted
    for index, name in enumerate(STEPS):
        for outcome in (StepOutcome.FAILED, StepOutcome.NOT_RUN):
            spoiled = (*fine[:index], Check(name, outcome), *fine[index + 1 :])
            left_out = {"sequence", "stage", "proofs", "evidence", "recount"}
            optional = name in left_out and outcome is StepOutcome.NOT_RUN
            assert Report(spoiled).accepted is optional
    assert not refused("components", Rejected("checkpoint/symlink")).accepted


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{}", b"[]", b"null", b"0", b'"x"', b"{" * 100, b"\xff" * 10, b"[" * 100_000,
        b'{"mediaType":1}', b'{"mediaType":"application/vnd.dev.sigstore.bundle.v0.3+json"}',
    ],
)  # fmt: skip
def test_arbitrary_input_is_denied_without_an_exception(raw: bytes, check: CheckBundle) -> None:
    report = check(raw)
    assert not report.accepted
    assert report.checks[0].outcome is StepOutcome.FAILED


@pytest.mark.parametrize("ways", [1, pytest.param(3, marks=pytest.mark.full)])
def test_every_byte_of_a_bundle_matters_except_hints(
    golden: ModuleType, body: Predicate, check: CheckBundle, ways: int
) -> None:
    """Flip one bit of every byte, the three bits alternating, or each of them.

    Admitted exceptions: the two hints, which are ignored (`verificationMaterial.publicKey.hint`,
    `signatures[].keyid`), the final line break among JSON blanks, and + or / in the URL-safe
    alphabet, which decodes to the same bytes.
    """
    short = dataclasses.replace(
        body, clauses=body.clauses[1:2], scope=Scope(False, (("N-KL", "all"),)), non_claims=()
    )
    required = (golden.REQUIRED[1],)
    bundle = bundle_bytes(sign(payload_bytes(short), [golden.KEY_A]), golden.KEY_A.public.hint)
    assert check(bundle, required_clauses=required, partial=True).accepted
    hints = (golden.KEY_A.public.hint.encode(), golden.KEY_A.public.keyid.encode())
    free = {
        place
        for hint in hints
        for place in range(bundle.index(hint), bundle.index(hint) + len(hint))
    }
    assert len(free) == sum(map(len, hints))
    original = _content(bundle)
    for place in range(len(bundle)):
        for turn in range(place, place + ways):
            mask = (0x01, 0x20, 0x80)[turn % 3]
            spoiled = bytearray(bundle)
            spoiled[place] ^= mask
            report = check(bytes(spoiled), required_clauses=required, partial=True)
            if report.accepted and place not in free:
                assert _content(bytes(spoiled)) == original


def _content(bundle: bytes) -> tuple[bytes, list[bytes], str]:
    inner = json.loads(bundle)["dsseEnvelope"]

    def plain(text: str) -> bytes:
        return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)

    signatures = [plain(s["sig"]) for s in inner["signatures"]]
    return plain(inner["payload"]), signatures, inner["payloadType"]


def test_every_prefix_of_a_bundle_is_denied(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    bundle = certify(body).rstrip(b"\n")
    for length in range(0, len(bundle), 7):
        assert not check(bundle[:length]).accepted


def test_signed_statement_with_a_missing_field_is_denied(
    golden: ModuleType, body: Predicate, check: CheckBundle
) -> None:
    """Remove each field in turn: only texts for display and the attack's value are optional."""
    statement = json.loads(payload_bytes(body))
    accepted: set[str] = set()

    def visit(place: Any) -> None:
        for key in list(place) if isinstance(place, dict) else range(len(place)):
            value = place[key]
            if isinstance(place, dict):
                del place[key]
                raw = json.dumps(statement, separators=(",", ":")).encode()
                if check(bundle_bytes(sign(raw, [golden.KEY_A]), "x")).accepted:
                    accepted.add(str(key))
                place[key] = value
            if isinstance(value, dict | list):
                visit(value)

    visit(statement)
    # `name` is a field of the subject.
    assert accepted == {"name", "counted", "low"}


def test_required_clauses_are_parsed_strictly() -> None:
    with pytest.raises(Rejected):
        RequiredClause.from_json({"id": "x", "alternatives": [], "odd": 1})
    with pytest.raises(Rejected):
        RequiredClause.from_json({"id": "x", "alternatives": [[{"quantity": "q"}]]})


# --- components, inputs, evidence and scope -------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "change", "reason", "detail"),
    [
        ("checkpoint", {"root_digest": "0" * 64}, "checkpoint", "the weights changed"),
        ("checkpoint", {"digest": "0" * 64}, "checkpoint", "a file was renamed"),
        ("checkpoint", {"companions": {"config": "0" * 64}}, "checkpoint", "the config changed"),
        ("contract", {"id": "other"}, "contract", "id other is now vectors"),
        ("contract", {"version": "9.9.9"}, "contract", "version 9.9.9 is now"),
        ("contract", {"digest": "0" * 64}, "contract", "digest 000000000000 is now"),
    ],
)
def test_difference_of_a_component_is_named(
    part: str,
    change: dict[str, Any],
    reason: str,
    detail: str,
    body: Predicate,
    certify: Certify,
    check: CheckBundle,
) -> None:
    other = dataclasses.replace(getattr(body.triple, part), **change)
    triple = dataclasses.replace(body.triple, **{part: other})
    report = check(certify(dataclasses.replace(body, triple=triple)))
    (failed,) = [c for c in report.checks if c.name == "components"]
    assert failed.reason == f"triple/{reason}-mismatch"
    assert detail in failed.detail
    assert not report.accepted


@pytest.mark.parametrize("role", ["train", "infer"])
def test_difference_of_a_kernel_is_named(
    role: str, body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    kernel = getattr(body.triple, role)
    other = dataclasses.replace(kernel, fingerprint={**kernel.fingerprint, "run": "other"})
    triple = dataclasses.replace(body.triple, **{role: other})
    report = check(certify(dataclasses.replace(body, triple=triple)))
    (failed,) = [c for c in report.checks if c.name == "components"]
    assert failed.reason == f"triple/kernel-{role}-mismatch"
    assert not report.accepted


def test_inputs_beyond_the_expected_ones_are_compared_with_their_files(
    body: Predicate, certify: Certify, check: CheckBundle, tmp_path: Path
) -> None:
    """An input that the contract's own code imported, for instance."""
    (tmp_path / "metric.py").write_bytes(b"changed")

    def found(name: str, content: bytes, **options: Any) -> Report:
        more = Input(name, hashlib.sha256(content).hexdigest())
        bundle = certify(dataclasses.replace(body, inputs=(*body.inputs, more)))
        return check(bundle, data=lambda name: tmp_path / name, **options)

    assert _failures(found("metric.py", b"changed")) == []
    assert _failures(found("metric.py", b"signed")) == [("components", "input/mismatch")]
    assert _failures(found("lost.py", b"signed")) == []
    absent = found("lost.py", b"signed", strict=True)
    assert ("components", "input/not-at-hand") in _failures(absent)
    twice = found(body.inputs[0].name, b"signed")
    assert _failures(twice) == [("components", "input/duplicate")]


def test_evidence_and_proofs_that_are_too_large_are_refused(
    body: Predicate, certify: Certify, check: CheckBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = certify(body)
    with monkeypatch.context() as patch:
        patch.setattr("kcdsl_certs.verification.evidence.LARGEST_DOCUMENT", 10)
        assert ("evidence", "evidence/too-large") in _failures(check(bundle))
    with monkeypatch.context() as patch:
        patch.setattr("kcdsl_certs.verification.proofs.LARGEST_PROOF", 10)
        assert ("proofs", "proof/too-large") in _failures(check(bundle))


def test_scope_names_only_clauses_of_the_contract(
    body: Predicate, certify: Certify, check: CheckBundle
) -> None:
    covers = (*body.scope.covers, ("Invented", None))
    report = check(certify(dataclasses.replace(body, scope=Scope(False, covers))), partial=True)
    assert _failures(report) == [("clauses", "scope/inconsistent")]


def _kernels(change: Callable[[Any], object]) -> tuple[str, Callable[[Any], object]]:
    return "kernels", change


def _row(place: int, **fields: object) -> tuple[str, Callable[[Any], object]]:
    return "report", lambda document: document["clauses"][place].update(fields)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (_kernels(lambda d: d["train"].update(more="1")), "evidence/kernels-mismatch"),
        (_kernels(lambda d: d["infer"].clear()), "evidence/kernels-mismatch"),
        (_kernels(lambda d: d.update(train=d["infer"])), "evidence/kernels-mismatch"),
        (_kernels(lambda d: d.update(schema="kcdsl.kernels/0")), "evidence/kernels-mismatch"),
        (_kernels(lambda d: d.pop("infer")), "evidence/kernels-mismatch"),
        (("report", lambda d: d.update(schema="kcdsl.report/0")), "evidence/report-mismatch"),
        (
            ("report", lambda d: d["contract"].update(digest="sha256:" + "0" * 64)),
            "evidence/report-mismatch",
        ),
        (("report", lambda d: d["clauses"].pop(1)), "evidence/report-mismatch"),
        (_row(0, clause="KL2"), "evidence/report-mismatch"),
        (_row(0, slice="long"), "evidence/report-mismatch"),
        (_row(0, obligation="other"), "evidence/report-mismatch"),
        (_row(0, evidence="sample"), "evidence/report-mismatch"),
        (_row(0, verdict="violated"), "evidence/report-mismatch"),
        (_row(0, verdict="inconclusive"), "evidence/report-mismatch"),
        (_row(0, n=199), "evidence/report-mismatch"),
        (_row(0, exact={"value": "0.0072"}), "evidence/report-mismatch"),
        (_row(0, exact={"value": None}), "evidence/report-mismatch"),
        (_row(0, exact=0.0071), "evidence/report-mismatch"),
        (_row(2, exceedance={"k": 5, "n": 200}), "evidence/report-mismatch"),
        (_row(2, exceedance=None), "evidence/report-mismatch"),
    ],
)
def test_evidence_about_something_else_is_refused(
    changed: tuple[str, Callable[[Any], object]],
    reason: str,
    golden: ModuleType,
    body: Predicate,
    certify: Certify,
    check: CheckBundle,
    vectors_folder: Path,
    tmp_path: Path,
) -> None:
    """Also where the changed document is the one that was signed."""
    bundle = certify(_with_document(body, vectors_folder, tmp_path, *changed))
    assert _failures(check(bundle, evidence=tmp_path)) == [("evidence", reason)]


@pytest.mark.parametrize(
    ("stated", "reported", "agree"),
    [
        ({"high": 0.0125}, {"high": 0.0125}, True),
        ({"high": 0.0125}, {"high": 0.013}, False),
        ({"high": 0.0125}, {"high": None}, False),
        ({"low": 0.0}, {"low": 0.001}, False),
        ({"high": 0.0125, "alpha": Fraction(1, 20)}, {"high": 0.0125, "confidence": 0.95}, True),
        ({"high": 0.0125, "alpha": Fraction(1, 20)}, {"high": 0.0125, "confidence": 0.9}, False),
        ({"high": 0.0125, "alpha": Fraction(1, 20)}, {"high": 0.0125}, False),
        ({"bound": 0.0125}, {"bound": 0.0125}, False),
    ],
)
def test_limits_of_a_result_are_those_of_the_report(
    stated: dict[str, Any],
    reported: dict[str, Any],
    agree: bool,
    body: Predicate,
    certify: Certify,
    check: CheckBundle,
    vectors_folder: Path,
    tmp_path: Path,
) -> None:
    """A hard statistic of a sample passes by its limit, which nothing else confirms."""
    result = dataclasses.replace(body.clauses[1], **stated)
    body = dataclasses.replace(body, clauses=(body.clauses[0], result, *body.clauses[2:]))
    bundle = certify(_with_document(body, vectors_folder, tmp_path, *_row(0, **reported)))
    expected = [] if agree else [("evidence", "evidence/report-mismatch")]
    assert _failures(check(bundle, evidence=tmp_path)) == expected


def _with_document(
    body: Predicate, source: Path, folder: Path, role: str, change: Callable[[Any], object]
) -> Predicate:
    """Copy proofs and evidence into a folder, one document changed; return the body that names
    them."""
    files = []
    for clause in body.clauses:
        if clause.proof is not None:
            (folder / clause.proof.path).write_bytes((source / clause.proof.path).read_bytes())
    for file in body.evidence:
        data = (source / file.path).read_bytes()
        if file.role == role:
            document = json.loads(data)
            change(document)
            data = json.dumps(document).encode()
        (folder / file.path).write_bytes(data)
        files.append(dataclasses.replace(file, sha256=hashlib.sha256(data).hexdigest()))
    return dataclasses.replace(body, evidence=tuple(files))
