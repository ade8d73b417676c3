"""The gate: decides from the register whether a triple may serve at a stage of a slot.

It is open for a candidate that is in the stage or beyond it, while all its certificates are in
force. It is closed for everything that is not recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kcdsl.exits import Exit
from kcdsl.release.promotion.candidate import CandidateState, StagedCandidate
from kcdsl.release.promotion.recorded import (
    candidate_in,
    standing_of,
    untrusted_inputs,
    untrusted_records,
    why_withdrawn,
)
from kcdsl.release.promotion.stages import FULL, OFFLINE
from kcdsl_certs.statement import STAGES, Verdict

if TYPE_CHECKING:
    from kcdsl.release.register import Certificate, Promotion, Register


class GateAnswer(StrEnum):
    """The answer, in the terms of an Argo Rollouts analysis."""

    SUCCESSFUL = "Successful"
    FAILED = "Failed"
    INCONCLUSIVE = "Inconclusive"


EXITS = {
    GateAnswer.SUCCESSFUL: Exit.HELD,
    GateAnswer.FAILED: Exit.VIOLATED,
    GateAnswer.INCONCLUSIVE: Exit.INCONCLUSIVE,
}


@dataclass(frozen=True, slots=True)
class Gate:
    """The answer about a triple at a stage of a slot.

    `known`: the register has a decision about the triple in this slot; `state` and `at` are its
    state and stage.
    """

    slot: str
    stage: str
    triple: str
    answer: GateAnswer
    reasons: tuple[str, ...]
    known: bool = False
    state: str | None = None
    at: str | None = None

    @property
    def is_open(self) -> bool:
        """Return whether the triple may serve."""
        return self.answer is GateAnswer.SUCCESSFUL

    @property
    def exit(self) -> Exit:
        """Return the exit code of `kcdsl gate`."""
        return EXITS[self.answer]

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.gate/1`."""
        return {
            "schema": "kcdsl.gate/1",
            "open": self.is_open,
            "outcome": self.answer.value,
            "exit": int(self.exit),
            "slot": self.slot,
            "stage": self.stage,
            "triple": f"sha256:{self.triple}",
            "state": self.state,
            "at": self.at,
            "reasons": list(self.reasons),
        }


def ask(register: Register, slot: str, stage: str, triple: str, now: datetime) -> Gate:
    """Return whether a triple, by its digest, may serve at a stage of a slot.

    Raises Refusal where the register was changed behind its events.
    """
    register.refuse_changed(triple)
    history = register.promotions(slot=slot, candidate=triple)
    candidate = candidate_in(history)
    if candidate is None:
        why = "the register has no decision about this triple in this slot"
        return Gate(slot, stage, triple, GateAnswer.INCONCLUSIVE, (why,))
    live = register.slot(slot).triple
    answer, reasons = _judged(register, history, candidate, live, stage, now)
    if answer is not GateAnswer.SUCCESSFUL:
        told = [f"{one.clause}{_on(one.slice)}: {one.detail}" for one in history[-1].reasons]
        reasons = (*reasons, *told)
    where = candidate.state.value, candidate.stage
    return Gate(slot, stage, triple, answer, reasons, True, *where)


def answers(register: Register, stage: str, triple: str, now: datetime) -> tuple[Gate, ...]:
    """Return the answer about a triple at a stage of every slot with a decision about it."""
    slots = {decision.slot for decision in register.promotions(candidate=triple)}
    return tuple(ask(register, slot, stage, triple, now) for slot in sorted(slots))


def fallback(register: Register, slot: str, triple: str, now: datetime) -> str | None:
    """Return the last triple that was live in a slot before this one and for which the gate is
    open; None where there is none."""
    from kcdsl.release.register import PromotionState

    decided = register.promotions(slot=slot)
    promoted = [d.candidate for d in reversed(decided) if d.state is PromotionState.PROMOTED]
    for earlier in dict.fromkeys(promoted):
        history = [each for each in decided if each.candidate == earlier]
        candidate = candidate_in(history)
        if earlier == triple or candidate is None:
            continue
        answer, _ = _judged(register, history, candidate, earlier, FULL, now)
        if answer is GateAnswer.SUCCESSFUL:
            return earlier
    return None


def _judged(
    register: Register,
    history: Sequence[Promotion],
    candidate: StagedCandidate,
    live: str | None,
    stage: str,
    now: datetime,
) -> tuple[GateAnswer, tuple[str, ...]]:
    looked_at = frozenset(one for each in history for one in each.evidence)
    withdrawn, ended = standing_of(candidate, register, now)
    _, distrusted = untrusted_inputs(untrusted_records(register, candidate.triple).why, history)
    failures = _undecided_failures(register, candidate, looked_at, now)
    found = judge(candidate, live, stage, withdrawn, ended, distrusted, failures)
    gone = _ended_results(register, candidate, ended)
    if gone and found[0] is GateAnswer.SUCCESSFUL:
        return GateAnswer.INCONCLUSIVE, gone
    return found


def _ended_results(
    register: Register, candidate: StagedCandidate, ended: Set[str]
) -> tuple[str, ...]:
    """Return the expired certificates of the last passed stage whose results are not all covered by
    certificates in force."""
    if candidate.stage == OFFLINE:
        return ()
    signed = candidate.signed(_passed(candidate))
    over = [one for one in signed if one in ended]
    if not over:
        return ()
    stated = (register.obligations_of(one) for one in signed if one not in ended)
    there = frozenset[str]().union(*stated)
    return tuple(
        f"certificate {one[:12]} ended, and no other one shows {min(lost)}"
        for one in over
        if (lost := register.obligations_of(one) - there)
    )


def _passed(candidate: StagedCandidate) -> str:
    """Return the stage whose certificates a candidate depends on."""
    return candidate.stage if candidate.stage == FULL else _before(candidate.stage)


def judge(
    candidate: StagedCandidate,
    live: str | None,
    stage: str,
    withdrawn: Mapping[str, str] = MappingProxyType({}),
    ended: Set[str] = frozenset(),
    distrusted: Mapping[str, str] = MappingProxyType({}),
    failures: Sequence[Certificate] = (),
) -> tuple[GateAnswer, tuple[str, ...]]:
    """Return whether a candidate may serve at a stage, with reasons; `live` is the live triple.

    `withdrawn` and `distrusted` map digests of its evidence to reasons why they are no longer
    accepted; `ended` names certificates that are not in force. `failures` are certificates of its
    stage that did not pass and that no decision has considered.
    """
    match candidate.state:
        case CandidateState.ROLLED_BACK | CandidateState.BLOCKED:
            return GateAnswer.FAILED, (f"it was {candidate.state} in the stage {candidate.stage}",)
        case CandidateState.FROZEN:
            return GateAnswer.INCONCLUSIVE, (f"it is frozen in the stage {candidate.stage}",)
        case CandidateState.ACTIVE:
            pass
    if withdrawn:
        return GateAnswer.FAILED, tuple(
            f"certificate {one[:12]}: {w}" for one, w in withdrawn.items()
        )
    if failures:
        failed = any(one.verdict is Verdict.FAILED for one in failures)
        return GateAnswer.FAILED if failed else GateAnswer.INCONCLUSIVE, tuple(
            f"certificate {one.identity[:12]} of the stage {one.stage} is {one.verdict}"
            for one in failures
        )
    if distrusted:
        return GateAnswer.INCONCLUSIVE, tuple(f"{one[:12]}: {w}" for one, w in distrusted.items())
    if STAGES.index(candidate.stage) < STAGES.index(stage):
        return GateAnswer.INCONCLUSIVE, (f"it is in the stage {candidate.stage}, before {stage}",)
    if candidate.stage == FULL and live != candidate.triple:
        return GateAnswer.INCONCLUSIVE, ("another triple is live in this slot",)
    if live not in (candidate.incumbent, candidate.triple):
        return GateAnswer.INCONCLUSIVE, ("another triple became live since it began",)
    if candidate.stage != OFFLINE:
        passed = _passed(candidate)
        signed = candidate.signed(passed)
        if all(one in ended for one in signed):
            return GateAnswer.INCONCLUSIVE, (f"no certificate of the stage {passed} is in force",)
    return GateAnswer.SUCCESSFUL, (f"it is {candidate.state} in the stage {candidate.stage}",)


def _undecided_failures(
    register: Register, candidate: StagedCandidate, looked_at: Set[str], now: datetime
) -> tuple[Certificate, ...]:
    """Return the failed certificates of the stage of a candidate, newest first, without those that
    a decision has considered and those older than a passed certificate in force."""
    found = []
    of_stage = register.certificates(triple=candidate.triple, stage=candidate.stage)
    for one in sorted(of_stage, key=lambda each: each.sequence, reverse=True):
        if one.verdict is not Verdict.PASSED:
            if one.identity not in looked_at:
                found.append(one)
        elif why_withdrawn(register, register.status_of(one.identity, now)) is None:
            break
    return tuple(found)


def _before(stage: str) -> str:
    return STAGES[STAGES.index(stage) - 1]


def _on(slice: str | None) -> str:
    return "" if slice is None else f" on {slice}"
