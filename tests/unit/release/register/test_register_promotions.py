"""Register queries of promotions, on SQLite and on PostgreSQL."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl.diagnostics import Refusal, codes
from kcdsl.release.promotion import FULL, PromotionOutcome
from kcdsl.release.promotion.gate import GateAnswer, ask
from kcdsl.release.register import Promotion, PromotionState, Register, Stale
from kcdsl_certs.signatures import decode, parse_bundle
from kcdsl_certs.statement import certificate_id
from tests.support.promotion_scenes import SLOT, Pipeline
from tests.support.promotions import digest
from tests.support.registers import certified, recorded, triple

OTHER = "chat/other"


def held(register: Register, slot: str, name: str, *evidence: str) -> Promotion:
    """Return a decision about a triple that rests on this evidence."""
    about = triple(name)
    register.record_triple(about)
    contract = about.contract.digest
    state = PromotionState.HELD
    return Promotion(slot, about.digest, None, contract, "canary", state, evidence=evidence)


def test_traffic_counts_for_one_candidate_in_one_slot_only(register: Register) -> None:
    table, report = digest("table"), digest("report")
    first = held(register, SLOT, "one", table, report)
    register.promote(SLOT, 0, first, [table])
    register.promote(SLOT, 1, first, [table])
    for slot, name in ((OTHER, "one"), (SLOT, "two")):
        again = held(register, slot, name, table, report)
        version = register.slot(slot).version
        for call in (
            lambda: register.promote(slot, version, again, [digest("new"), table]),  # noqa: B023
            lambda: register.refuse_counted(slot, again.candidate, [table]),  # noqa: B023
        ):
            with pytest.raises(Refusal) as caught:
                call()
            assert caught.value.diagnostics[0].code is codes.PROMOTION_EVIDENCE
        assert register.slot(slot).version == version
        register.promote(slot, version, again, [digest("new")])
    register.refuse_counted(SLOT, first.candidate, [digest("seen by nobody"), "%"])


def test_decision_is_recorded_in_the_state_that_it_read(register: Register, place: str) -> None:
    first, seen = held(register, SLOT, "one"), []

    def decide(state: Register) -> Promotion:
        with (
            Register.open(place, wait=0.1) as other,
            pytest.raises(Refusal) as busy,
        ):
            other.revoke("0" * 64, "meanwhile")
        assert busy.value.diagnostics[0].code is codes.REGISTER_BUSY
        seen.append((state.slot(SLOT), state.revocations()))
        return first

    before = register.slot(SLOT)
    assert register.promote(SLOT, 0, decide).version == 1
    assert seen == [(before, ())]
    with pytest.raises(Stale):
        register.promote(SLOT, 0, decide)
    assert len(seen) == 1
    with pytest.raises(AssertionError):
        register.promote(SLOT, 1, lambda state: held(state, SLOT, "two"))
    assert register.slot(SLOT).version == 1


def test_certificate_without_a_report_has_no_run(register: Register) -> None:
    assert register.run_of(recorded(register, certified(triple())).identity) is None
    assert register.run_of(digest("unknown")) is None


@pytest.mark.full
def test_triple_is_promoted_and_rolled_back(place: str, tmp_path: Path) -> None:
    old = "N-KL: {require: p99(kl) <= 0.02, slices: [all, long], level: L2}"
    pipeline = Pipeline.of(tmp_path, place)
    text = pipeline.contract.read_text(encoding="utf-8")
    pipeline.contract.write_text(text.replace(old, old.replace("L2", "L3")), encoding="utf-8")
    pipeline.until("full")
    with pipeline.register() as register:
        first = register.slot(SLOT).triple
        assert first is not None
        assert ask(register, SLOT, FULL, first, pipeline.now).answer is GateAnswer.SUCCESSFUL
    pipeline.change_weights(1.0, 3.0)
    pipeline.until("canary")
    signed, window = pipeline.certificate("canary"), pipeline.traffic("canary")
    assert pipeline.promote("canary", signed, window).step.outcome is PromotionOutcome.ADVANCED
    back = pipeline.promote("full", pipeline.traffic("full", beyond=60))
    assert (back.step.outcome, back.live) == (PromotionOutcome.ROLLED_BACK, first)
    with pipeline.register() as register:
        run = register.run_of(certificate_id(decode(parse_bundle(signed.read_bytes())).payload))
        assert run is not None
        register.mark_run(run.identity, trusted=False, reason="a shared machine")
        assert ask(register, SLOT, FULL, first, pipeline.now).answer is GateAnswer.SUCCESSFUL
        found = ask(register, SLOT, FULL, back.triple, pipeline.now)
        assert found.answer is GateAnswer.FAILED
        decided = register.promotions(slot=SLOT)[-1]
        assert decided.incumbent == first
        assert register.check().defects == ()
