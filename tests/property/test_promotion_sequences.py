"""In any sequence of events no stage is skipped, and a failed triple does not serve.

A slot is simulated beside the pure state machine: looks at evidence of three triples, revocations,
expiring certificates, runs marked as untrusted.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kcdsl.ir.terms import Level
from kcdsl.release.promotion import (
    CANARY,
    FULL,
    OFFLINE,
    CandidateState,
    DocumentKind,
    EvidenceDocument,
    ObligationResult,
    PromotionOutcome,
    PromotionStep,
    StagedCandidate,
    UnusableEvidence,
    enter,
    gathered,
    without,
)
from kcdsl.release.promotion.gate import GateAnswer, judge
from kcdsl_certs.statement import STAGES
from tests.support.promotions import HELD, HOUR, START, certificate, counts, demand, look, window

MILD, RATE = demand("MILD", level=Level.L1), demand("RATE", level=Level.L2)
EVERY = demand("EVERY", level=Level.L3, allowed=Fraction(0))
DEMANDS = (MILD, RATE, EVERY)
BROKEN = ObligationResult("violated", "census", 1, 1)
BEYOND = counts(5000, 20_000)
TRIPLES = ("a" * 64, "b" * 64, "c" * 64)
triples, stages = st.sampled_from(TRIPLES), st.sampled_from(STAGES)
FAILURES = (PromotionOutcome.BLOCKED, PromotionOutcome.FROZEN, PromotionOutcome.ROLLED_BACK)


class SlotMachine(RuleBasedStateMachine):
    """A slot as `kcdsl.api.promotion` keeps it, and the tracked state of each triple."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.made = START, 0
        self.live: str | None = None
        self.promoted: list[str] = []
        self.candidates: dict[str, StagedCandidate] = {}
        self.counted: dict[str, set[str]] = {one: set() for one in TRIPLES}
        self.gone: set[str] = set()
        self.ended: set[str] = set()
        self.passed: dict[str, list[str]] = {one: [] for one in TRIPLES}
        self.failed: set[str] = set()

    # --- events -----------------------------------------------------------------------------------

    @rule(triple=triples, stage=stages)
    def pass_it(self, triple: str, stage: str) -> None:
        """Give evidence that passes."""
        self._look(triple, stage, self._signed(), self._traffic())

    @rule(triple=triples)
    def pass_all(self, triple: str) -> None:
        """Give evidence that passes, stage by stage."""
        for stage in STAGES:
            self._look(triple, stage, self._signed(), self._traffic())

    @rule(triple=triples, stage=stages, signed=st.booleans())
    def give_half(self, triple: str, stage: str, signed: bool) -> None:
        """Give a certificate without traffic, or traffic without a certificate."""
        self._look(triple, stage, self._signed() if signed else self._traffic())

    @rule(triple=triples, stage=stages, which=st.sampled_from(DEMANDS), signed=st.booleans())
    def violate(self, triple: str, stage: str, which: object, signed: bool) -> None:
        """Give evidence of a violated clause, beside evidence of a held one."""
        assert which in DEMANDS
        name = next(one.obligation for one in DEMANDS if one is which)
        if signed:
            bad = certificate(self._name(), {name: BROKEN}, valid=False)
            self._look(triple, stage, bad, self._traffic())
        else:
            result = BROKEN if name == EVERY.obligation else BEYOND
            self._look(triple, stage, self._signed(), self._traffic({name: result}))

    @rule(triple=triples, stage=stages)
    def spoil(self, triple: str, stage: str) -> None:
        """Give traffic with a NaN."""
        bad = {RATE.obligation: ObligationResult("invalid_evidence", "census")}
        self._look(triple, stage, self._signed(), self._traffic(bad))

    @rule(triple=triples, stage=stages, revoked=st.booleans())
    def withdraw(self, triple: str, stage: str, revoked: bool) -> None:
        """Revoke the certificate of a stage, or let it expire."""
        if triple in self.candidates:
            signed = self.candidates[triple].certificates.get(stage, ())
            (self.gone if revoked else self.ended).update(signed)

    @precondition(lambda self: self.live is not None)
    @rule(stage=stages, revoked=st.booleans())
    def withdraw_what_is_live(self, stage: str, revoked: bool) -> None:
        """Revoke a certificate of a stage of the live triple, or let it expire."""
        assert self.live is not None
        self.withdraw(self.live, stage, revoked)

    @precondition(lambda self: self.live is not None)
    @rule(stage=stages, signed=st.booleans())
    def violate_what_is_live(self, stage: str, signed: bool) -> None:
        """Give evidence that the live triple violates a clause of L3."""
        assert self.live is not None
        self.violate(self.live, stage, EVERY, signed)

    @rule(triple=triples)
    def distrust(self, triple: str) -> None:
        """Mark the run of the last certificate of the present stage."""
        known = self.candidates.get(triple)
        if known is not None:
            last = {*known.certificates.get(known.stage, ())[-1:]}
            self.candidates[triple] = without(known, last, last, self.now)

    # --- the slot ---------------------------------------------------------------------------------

    def _name(self) -> str:
        self.made += 1
        return f"document {self.made}"

    def _signed(self) -> EvidenceDocument:
        return certificate(self._name(), {one.obligation: HELD for one in DEMANDS})

    def _traffic(self, changes: Mapping[str, ObligationResult] | None = None) -> EvidenceDocument:
        good = {one.obligation: counts(0, 20_000) for one in (MILD, RATE)}
        return window(self._name(), {**good, **(changes or {})}, start=self.now, requests=20_000)

    def _look(self, triple: str, stage: str, *documents: EvidenceDocument) -> None:
        """Do as `kcdsl promote` does: enter the stage, take a step, record the result."""
        self.now += HOUR
        previous = self.candidates.get(triple)
        entered = enter(previous, triple, self.live, stage, self.now, self._withdrawn(previous))
        stopped = isinstance(entered, UnusableEvidence)
        candidate = entered.refutable if isinstance(entered, UnusableEvidence) else entered
        if candidate is None:
            return
        found = self._step(candidate, documents, stopped=stopped)
        after = found.candidate
        if stopped and found.outcome is not PromotionOutcome.ROLLED_BACK:
            traffic = [one for one in documents if one.kind is DocumentKind.WINDOW]
            found = self._step(candidate, traffic, stopped=True)
            assert previous is not None
            after = gathered(previous, found.candidate)
            assert (after.stage, after.state) == (previous.stage, previous.state)
            assert (after.certificates, after.shown) == (previous.certificates, previous.shown)
        self.counted[triple] |= {*found.counted}
        self.candidates[triple] = after
        self._tell(previous, found, triple, stage)

    def _step(
        self, candidate: StagedCandidate, documents: object, *, stopped: bool
    ) -> PromotionStep:
        assert isinstance(documents, (tuple, list))
        return look(
            candidate,
            DEMANDS,
            *documents,
            counted=self.counted[candidate.triple],
            now=self.now,
            ended=self.gone | self.ended,
            live=self.live == candidate.triple,
            stopped=stopped,
        )

    def _withdrawn(self, known: StagedCandidate | None) -> dict[str, str]:
        signed = () if known is None else known.certificates.values()
        return {one: "revoked" for each in signed for one in each if one in self.gone}

    def _serves(self, triple: str, live: str | None) -> bool:
        """Return whether the gate is open at `full`."""
        known = self.candidates[triple]
        answer, _ = judge(known, live, FULL, self._withdrawn(known), self.gone | self.ended)
        return answer is GateAnswer.SUCCESSFUL

    def _rests_on(self, triple: str) -> set[str]:
        return {one for each in self.candidates[triple].certificates.values() for one in each}

    def _tell(
        self, previous: StagedCandidate | None, found: PromotionStep, triple: str, stage: str
    ) -> None:
        """Track the result of a look, and update the slot."""
        candidate, passed = self.candidates[triple], self.passed[triple]
        if previous is not None and previous.attempt != candidate.attempt:
            passed.clear()
        match found.outcome:
            case PromotionOutcome.ADVANCED:
                assert stage == STAGES[len(passed)], "a stage was left out or repeated"
                assert candidate.stage == STAGES[len(passed) + 1]
                passed.append(stage)
                if stage == CANARY:
                    assert passed == [*STAGES[:3]]
                    self.failed.discard(triple)
                    self.live = triple
                    self.promoted.append(triple)
            case PromotionOutcome.ROLLED_BACK if self.live == triple:
                self.failed.add(triple)
                earlier = [one for one in reversed(self.promoted) if one != triple]
                self.live = next((one for one in earlier if self._serves(one, one)), None)
                assert self.live not in self.failed, "a rollback to what had failed"
                if self.live is not None:
                    known = self.candidates[self.live]
                    assert known.state is CandidateState.ACTIVE
                    assert not self._rests_on(self.live) & self.gone, "it was withdrawn"
                    assert not {*known.signed(FULL)} <= self.ended | self.gone
            case outcome if outcome in FAILURES and (candidate.state is not CandidateState.ACTIVE):
                self.failed.add(triple)
            case _:
                pass

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def what_failed_does_not_serve(self) -> None:
        """Check that a gate is open at `full` only for the live triple, and not after a failure."""
        for triple in self.candidates:
            if self._serves(triple, self.live):
                assert triple == self.live
                assert triple not in self.failed
                assert self.candidates[triple].state is CandidateState.ACTIVE
                assert self.passed[triple] == [*STAGES[:3]]
                assert not self._rests_on(triple) & self.gone

    @invariant()
    def what_was_rolled_back_is_not_live(self) -> None:
        """Check that a live triple was promoted, and not rolled back since."""
        if self.live is not None:
            assert self.live in self.promoted
            assert self.candidates[self.live].state is not CandidateState.ROLLED_BACK

    @invariant()
    def certificates_of_all_earlier_stages_are_there(self) -> None:
        """Check that an active candidate has a certificate of every earlier stage."""
        for known in self.candidates.values():
            if known.state is CandidateState.ACTIVE:
                for stage in STAGES[: STAGES.index(known.stage)]:
                    assert known.certificates.get(stage)


def test_some_sequence_reaches_an_open_gate() -> None:
    """The invariants above are not vacuous."""
    slot = SlotMachine()
    for triple in TRIPLES[:2]:
        slot.pass_all(triple)
        assert slot.live == triple
        assert slot._serves(triple, triple)
    slot.violate(TRIPLES[1], FULL, EVERY, signed=False)
    assert slot.live == TRIPLES[0]
    slot.violate(TRIPLES[0], OFFLINE, EVERY, signed=True)
    assert {slot.live} == {None}


@pytest.mark.parametrize(
    ("examples", "steps"), [(100, 25), pytest.param(300, 60, marks=pytest.mark.full)]
)
def test_random_sequences_of_events_keep_the_invariants(examples: int, steps: int) -> None:
    few = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(SlotMachine, settings=few)
