"""Certificates, runs, promotions and revocations in a register."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest

from kcdsl.diagnostics import Refusal, codes
from kcdsl.release.register import (
    Certificate,
    Promotion,
    PromotionReason,
    PromotionState,
    Register,
    Revoked,
    Run,
    Slot,
    Stale,
    Standing,
    chain,
)
from kcdsl_certs.statement import Verdict
from tests.support.registers import (
    CONTRACT,
    NOW,
    TRUSTED,
    bundle,
    certified,
    predicate,
    recorded,
    triple,
    trusted,
)
from tests.support.vectors.golden import KEY_A, KEY_B

SLOT = "chat/canary"
ONE, TWO, THREE = triple("one"), triple("two"), triple("three")


def record(register: Register, about: object = ONE, **fields: object) -> Certificate:
    return recorded(register, certified(about, **fields), TRUSTED)  # type: ignore[arg-type]


def decision(
    candidate: Certificate,
    incumbent: str | None = None,
    state: PromotionState = PromotionState.PROMOTED,
    **fields: object,
) -> Promotion:
    given = {"certificates": (candidate.identity,), **fields}
    return Promotion(
        SLOT,
        candidate.triple,
        incumbent,
        CONTRACT.digest,
        "canary",
        state,
        **given,  # type: ignore[arg-type]
    )


# --- certificates ---------------------------------------------------------------------------------


def test_certificate_is_stored_with_its_bundle_and_triple(register: Register) -> None:
    data = certified(ONE)
    found = recorded(register, data, TRUSTED)
    assert register.certificate(found.identity) == found
    assert register.bundle(found.identity) == data
    assert register.triple(found.triple) == ONE
    assert found.signers == (KEY_A.public.fingerprint,)
    assert [event.kind for event in register.events()] == ["register", "triple", "certificate"]


def test_certificate_is_recorded_once(register: Register) -> None:
    first = record(register)
    again = bundle(predicate(ONE), KEY_A, KEY_B)
    assert recorded(register, again, trusted(KEY_A, KEY_B)) == first
    assert register.head().number == 3


@pytest.mark.parametrize(
    ("data", "policy", "reason"),
    [
        (certified(ONE, KEY_B), TRUSTED, "signature/none-trusted"),
        (certified(ONE), trusted(KEY_A, KEY_B, threshold=2), "signature/threshold"),
        (certified(ONE), trusted(KEY_A, revoked=[KEY_A.public.fingerprint]), "key-revoked"),
        (certified(ONE), trusted(KEY_A, stages=frozenset({"full"})), "stage/key-not-allowed"),
        (certified(ONE)[:-3], TRUSTED, "json/"),
        (certified(ONE, issued=NOW + timedelta(seconds=1)), TRUSTED, "validity/not-yet"),
        (certified(ONE, lifetime=timedelta(0)), TRUSTED, "validity/empty"),
    ],
)
def test_invalid_certificates_are_not_recorded(
    register: Register, data: bytes, policy: object, reason: str
) -> None:
    before = register.head()
    with pytest.raises(Refusal, match=reason):
        recorded(register, data, policy)  # type: ignore[arg-type]
    assert register.head() == before


def test_contradictory_certificate_is_not_recorded(
    register: Register,
) -> None:
    body = predicate(ONE, verdict=Verdict.FAILED)
    lie = replace(body, clauses=(replace(body.clauses[0], verdict=Verdict.PASSED),))
    with pytest.raises(Refusal, match="verdict"):
        recorded(register, bundle(lie), TRUSTED)


def test_triple_stage_and_sequence_are_unique(register: Register) -> None:
    record(register, sequence=7)
    with pytest.raises(Refusal, match="sequence 7"):
        record(register, sequence=7, verdict=Verdict.FAILED)
    record(register, sequence=7, stage="canary")
    record(register, TWO, sequence=7)
    assert len(register.certificates()) == 3


def test_several_certificates_are_recorded_atomically(register: Register) -> None:
    good, taken = certified(ONE), certified(ONE, verdict=Verdict.FAILED)
    with pytest.raises(Refusal):
        register.record_certificates([good, taken], TRUSTED)
    assert register.certificates() == ()
    assert register.head().number == 1
    assert len(register.record_certificates([good, certified(TWO)], TRUSTED)) == 2


# --- standing -------------------------------------------------------------------------------------


def test_unrecorded_certificate_has_standing_unknown(register: Register) -> None:
    assert register.status_of("0" * 64).standing is Standing.UNKNOWN


def test_certificate_is_in_force_within_its_validity(register: Register) -> None:
    found = record(register)
    assert register.status_of(found.identity).in_force
    ended = found.valid_until
    assert register.status_of(found.identity, ended).standing is Standing.OUTSIDE_VALIDITY
    early = found.issued_at - timedelta(seconds=1)
    assert register.status_of(found.identity, early).standing is Standing.OUTSIDE_VALIDITY


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.INCONCLUSIVE])
def test_older_pass_does_not_count_after_a_newer_non_pass(
    register: Register, verdict: Verdict
) -> None:
    old = record(register, sequence=1)
    failed = record(register, sequence=2, verdict=verdict)
    status = register.status_of(old.identity)
    assert (status.standing, status.by) == (Standing.SUPERSEDED, failed.identity)
    new = record(register, sequence=3)
    assert register.status_of(new.identity).in_force
    assert register.status_of(old.identity).standing is Standing.SUPERSEDED


def test_order_is_by_sequence_and_not_by_recording(register: Register) -> None:
    record(register, sequence=2, verdict=Verdict.FAILED)
    late = record(register, sequence=1)
    assert register.status_of(late.identity).standing is Standing.SUPERSEDED


def test_results_of_another_stage_or_triple_do_not_count(register: Register) -> None:
    old = record(register, sequence=1)
    record(register, sequence=2, stage="canary", verdict=Verdict.FAILED)
    record(register, TWO, sequence=2, verdict=Verdict.FAILED)
    record(register, sequence=2)
    assert register.status_of(old.identity).in_force


def test_certificate_is_superseded_by_declaration(register: Register) -> None:
    old = record(register)
    new = record(register, TWO, supersedes=old.identity)
    status = register.status_of(old.identity)
    assert (status.standing, status.by) == (Standing.SUPERSEDED, new.identity)


@pytest.mark.parametrize("stage", ["offline-ci", "canary"])
def test_failure_counts_even_if_superseded(register: Register, stage: str) -> None:
    old = record(register, sequence=1)
    named = old.identity
    if stage == "offline-ci":
        record(register, sequence=2, supersedes=named)
        failed = record(register, sequence=3, verdict=Verdict.FAILED)
    else:
        failed = record(register, stage=stage, verdict=Verdict.FAILED, supersedes=named)
        record(register, TWO, supersedes=named)
    assert register.status_of(named).by == failed.identity


def test_revoked_failure_still_counts_against_older_passes(register: Register) -> None:
    old = record(register, sequence=1)
    failed = record(register, sequence=2, verdict=Verdict.FAILED)
    register.revoke(failed.identity, "issued by mistake")
    assert register.status_of(old.identity).standing is Standing.SUPERSEDED


# --- revocations ----------------------------------------------------------------------------------


def test_revoked_certificate_is_never_in_force(register: Register) -> None:
    found = record(register)
    first = register.revoke(found.identity, "wrong data")
    assert register.revoke(found.identity, "again") == first
    for moment in (found.issued_at, NOW, found.valid_until):
        assert register.status_of(found.identity, moment).standing is Standing.REVOKED
    assert register.revocations() == (first,)


def test_certificate_can_be_revoked_before_it_is_recorded(register: Register) -> None:
    data = predicate(ONE)
    with_it = record(register)
    register.revoke("f" * 64, "seen elsewhere")
    assert register.status_of("f" * 64).standing is Standing.REVOKED
    assert register.status_of(with_it.identity).in_force
    assert data.sequence == 1


def test_certificates_lose_force_with_their_required_keys(register: Register) -> None:
    alone = record(register)
    both = recorded(register, certified(TWO, KEY_A, KEY_B), trusted(KEY_A, KEY_B, threshold=1))
    two = recorded(register, certified(THREE, KEY_A, KEY_B), trusted(KEY_A, KEY_B, threshold=2))
    register.revoke(KEY_A.public.fingerprint, "lost", kind=Revoked.KEY)
    assert register.status_of(alone.identity).standing is Standing.REVOKED
    assert register.status_of(two.identity).standing is Standing.REVOKED
    assert register.status_of(both.identity).in_force
    register.revoke(KEY_B.public.fingerprint, "lost", kind=Revoked.KEY)
    assert register.status_of(both.identity).standing is Standing.REVOKED


@pytest.mark.parametrize("subject", ["", "12", "F" * 64, "sha256:" + "f" * 64])
def test_invalid_digest_is_not_revoked(register: Register, subject: str) -> None:
    with pytest.raises(Refusal):
        register.revoke(subject, "odd")


@pytest.mark.parametrize("reason", ["bytes \udcff", "x" * 30_000], ids=["no text", "too long"])
def test_unencodable_reason_is_refused_without_damage(register: Register, reason: str) -> None:
    """A command line may contain bytes that are not UTF-8."""
    register.record_triple(ONE)
    run = register.record_run(Run("evaluate", ONE.digest, "shadow", "1" * 64, "2" * 64))
    for call in (
        lambda: register.revoke("f" * 64, reason),
        lambda: register.mark_run(run.identity, trusted=False, reason=reason),
    ):
        with pytest.raises(Refusal) as caught:
            call()
        assert caught.value.diagnostics[0].code is codes.NOT_RECORDED
    assert register.check().is_sound


def test_too_large_entry_is_refused_without_damage(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "LARGEST_EVENT", 2000)
    with pytest.raises(Refusal, match="at most 2000 are recorded") as caught:
        register.revoke("f" * 64, "x" * 2000)
    assert caught.value.diagnostics[0].code is codes.NOT_RECORDED
    assert register.revocations() == ()
    assert register.check().is_sound


# --- runs -----------------------------------------------------------------------------------------


def test_run_is_recorded_once_and_can_be_marked(register: Register) -> None:
    register.record_triple(ONE)
    run = Run("evaluate", ONE.digest, "shadow", "1" * 64, "2" * 64)
    kept = register.record_run(run)
    assert register.record_run(run) == kept
    assert register.runs(trusted=True) == (kept,)
    marked = register.mark_run(kept.identity, trusted=False, reason="noisy host")
    assert (marked.trusted, marked.reason) == (False, "noisy host")
    assert register.runs(triple=ONE.digest, trusted=True) == ()
    assert register.runs(triple=ONE.digest, stage="shadow") == (marked,)
    assert register.run(kept.identity) == marked


def test_run_needs_its_triple_and_digests(register: Register) -> None:
    run = Run("evaluate", ONE.digest, "shadow", "1" * 64)
    with pytest.raises(Refusal, match="triple"):
        register.record_run(run)
    register.record_triple(ONE)
    for wrong in (replace(run, report="x"), replace(run, stage="prod"), replace(run, kind="?")):
        with pytest.raises(Refusal):
            register.record_run(wrong)
    with pytest.raises(Refusal, match="no run"):
        register.mark_run("0" * 64, trusted=False, reason="unknown")
    assert register.runs() == ()


# --- promotions -----------------------------------------------------------------------------------


def test_promotion_updates_the_slot(register: Register) -> None:
    one = record(register)
    assert register.slot(SLOT) == Slot(SLOT)
    slot = register.promote(SLOT, 0, decision(one))
    assert (slot.version, slot.triple, slot.stage) == (1, one.triple, "canary")
    assert slot.certificates == (one.identity,)
    assert register.slot(SLOT) == slot
    assert register.slots() == (slot,)
    (kept,) = register.promotions(slot=SLOT)
    assert (kept.number, kept.version, kept.at) == (slot.promotion, 1, NOW)


def test_stale_writer_is_refused_with_the_live_triple(register: Register) -> None:
    one, two = record(register), record(register, TWO)
    live = register.promote(SLOT, 0, decision(one))
    with pytest.raises(Stale) as stale:
        register.promote(SLOT, 0, decision(two))
    assert stale.value.slot == live
    with pytest.raises(Stale) as other:  # the version is right, but the incumbent is another
        register.promote(SLOT, 1, decision(two, "f" * 64))
    assert other.value.slot == live
    assert register.slot(SLOT) == live
    assert len(register.promotions()) == 1


def test_decisions_without_a_move_make_others_stale(register: Register) -> None:
    one, two = record(register), record(register, TWO)
    register.promote(SLOT, 0, decision(one))
    why = (PromotionReason("N-KL", "p99 is 0.1", "long", {"p99": "0.1", "limit": "0.02"}),)
    frozen = decision(two, one.triple, PromotionState.FROZEN, reasons=why, certificates=())
    slot = register.promote(SLOT, 1, frozen)
    assert (slot.version, slot.triple, slot.certificates) == (2, one.triple, (one.identity,))
    with pytest.raises(Stale):
        register.promote(SLOT, 1, decision(two, one.triple))
    assert register.promotions(candidate=two.triple)[0].reasons == why


def test_rollback_returns_to_the_incumbent(register: Register) -> None:
    one, two = record(register), record(register, TWO)
    register.promote(SLOT, 0, decision(one))
    register.promote(SLOT, 1, decision(two, one.triple))
    back = decision(two, one.triple, PromotionState.ROLLED_BACK, certificates=())
    assert register.promote(SLOT, 2, back).triple == one.triple


def test_rollback_to_a_never_live_triple_is_refused(register: Register) -> None:
    one, two, three = record(register), record(register, TWO), record(register, THREE)
    register.promote(SLOT, 0, decision(one))
    register.promote(SLOT, 1, decision(two, one.triple))
    back = decision(two, three.triple, PromotionState.ROLLED_BACK, certificates=())
    with pytest.raises(Refusal, match="never live"):
        register.promote(SLOT, 2, back)


def test_rollback_without_an_incumbent_empties_the_slot(register: Register) -> None:
    one = record(register)
    register.promote(SLOT, 0, decision(one))
    back = decision(one, None, PromotionState.ROLLED_BACK, certificates=())
    assert register.promote(SLOT, 1, back).triple is None


def test_promotion_needs_certificates_in_force(register: Register) -> None:
    one, two = record(register, sequence=1), record(register, TWO)
    with pytest.raises(Refusal, match="without a certificate"):
        register.promote(SLOT, 0, decision(one, certificates=()))
    with pytest.raises(Refusal, match="another triple"):
        register.promote(SLOT, 0, decision(one, certificates=(two.identity,)))
    with pytest.raises(Refusal, match="unknown"):
        register.promote(SLOT, 0, decision(one, certificates=("e" * 64,)))
    failed = record(register, sequence=2, verdict=Verdict.FAILED)
    with pytest.raises(Refusal, match="FAILED"):
        register.promote(SLOT, 0, decision(failed))
    with pytest.raises(Refusal, match="superseded"):
        register.promote(SLOT, 0, decision(one))
    register.revoke(two.identity, "wrong")
    with pytest.raises(Refusal, match="revoked"):
        register.promote(SLOT, 0, decision(two))
    assert register.slot(SLOT).version == 0


def test_promotion_needs_recorded_contract_and_triples(register: Register) -> None:
    one = record(register)
    with pytest.raises(Refusal, match="contract"):
        register.promote(SLOT, 0, replace(decision(one), contract="a" * 64))
    unknown = replace(decision(one), candidate="b" * 64)
    with pytest.raises(Refusal, match="no triple"):
        register.promote(SLOT, 0, unknown)
    with pytest.raises(Refusal, match="slot"):
        register.promote("Not A Slot", 0, decision(one))


# --- events ---------------------------------------------------------------------------------------


def test_events_are_canonical_and_chained(register: Register) -> None:
    one = record(register)
    register.promote(SLOT, 0, decision(one))
    events = list(register.events())
    assert [event.number for event in events] == [1, 2, 3, 4]
    for before, after in pairwise(events):
        assert after.previous == before.hash
    assert list(register.events(since=2)) == events[2:]
    head = register.head()
    assert (head.number, head.hash, head.register) == (4, events[3].hash, events[0].hash)


def test_events_follow_the_published_schema(register: Register, follows: object) -> None:
    one = record(register)
    register.promote(SLOT, 0, decision(one, reasons=(PromotionReason("N-KL", "held"),)))
    register.revoke(one.identity, "wrong")
    run = register.record_run(Run("verify", one.triple, "offline-ci", "1" * 64))
    register.mark_run(run.identity, trusted=False, reason="noise")
    for event in register.events():
        follows(json.loads(event.body))  # type: ignore[operator]


def test_event_times_are_monotone_if_the_clock_goes_back(place: str) -> None:
    moments = iter([NOW, NOW, NOW - timedelta(days=1)])
    with Register.open(place, create=True, clock=lambda: next(moments)) as register:
        register.record_triple(ONE)
        register.record_triple(TWO)
        assert [event.time for event in register.events()] == [NOW] * 3


def test_event_of_a_fast_clock_ends_no_certificate(place: str) -> None:
    with Register.open(place, create=True, clock=lambda: NOW) as register:
        one = record(register)
        with Register.open(place, clock=lambda: NOW + timedelta(days=3650)) as ahead:
            ahead.record_triple(TWO)
            with pytest.raises(Refusal):
                ahead.promote(SLOT, 0, decision(one))
        register.promote(SLOT, 0, decision(one))
        assert [event.time for event in register.events()][-1] > NOW + timedelta(days=3000)
