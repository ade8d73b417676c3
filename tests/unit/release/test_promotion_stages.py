"""Demands and reactions of each stage: families × levels × stages."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from pathlib import Path

import pytest

from kcdsl.check.compile import load_program
from kcdsl.ir.escalation import ACTIONS, FAMILY_DEFAULTS
from kcdsl.ir.terms import Family, Level, Program
from kcdsl.release.promotion import (
    CANARY,
    FULL,
    OFFLINE,
    SHADOW,
    CandidateState,
    DemandedObligation,
    ObligationResult,
    PromotionOutcome,
    Reaction,
    demanded_obligations,
    reaction,
)
from kcdsl_backends.empirical.questions.looks import RULES
from kcdsl_certs.statement import STAGES
from tests.support.promotions import HELD, at, certificate, counts, demand, look, window

N, S, R = Family.NUMERICAL, Family.STATISTICAL, Family.RUNTIME
TRACE = Family.OBSERVABILITY
BLOCKED, FROZEN, BACK = (
    PromotionOutcome.BLOCKED,
    PromotionOutcome.FROZEN,
    PromotionOutcome.ROLLED_BACK,
)
# Written by hand, family by family: at offline-ci, shadow, canary, full.
REACTIONS: dict[
    tuple[Family, Level],
    tuple[PromotionOutcome, PromotionOutcome, PromotionOutcome, PromotionOutcome],
] = {
    (N, Level.L1): (BLOCKED, BLOCKED, BLOCKED, BLOCKED),
    (N, Level.L2): (BLOCKED, FROZEN, FROZEN, FROZEN),
    (N, Level.L3): (BLOCKED, BACK, BACK, BACK),
    (S, Level.L1): (BLOCKED, BLOCKED, BLOCKED, BLOCKED),
    (S, Level.L2): (BLOCKED, FROZEN, FROZEN, FROZEN),
    (S, Level.L3): (BLOCKED, BACK, BACK, BACK),
    (R, Level.L1): (BLOCKED, BLOCKED, BLOCKED, BLOCKED),
    (R, Level.L2): (BLOCKED, FROZEN, FROZEN, FROZEN),
    (R, Level.L3): (BLOCKED, BACK, BACK, BACK),
    (TRACE, Level.L1): (BLOCKED, BLOCKED, BLOCKED, BLOCKED),
    (TRACE, Level.L2): (BLOCKED, FROZEN, FROZEN, FROZEN),
    (TRACE, Level.L3): (BLOCKED, BACK, BACK, BACK),
}
# family, hard, repeatable: the stages that demand it.
DUE: dict[tuple[Family, bool, bool], frozenset[str]] = {
    (N, True, True): frozenset({OFFLINE, CANARY, FULL}),
    (N, True, False): frozenset(STAGES),
    (N, False, True): frozenset(STAGES),
    (N, False, False): frozenset({SHADOW, CANARY, FULL}),
    (S, True, True): frozenset(STAGES),
    (S, True, False): frozenset(STAGES),
    (S, False, True): frozenset(STAGES),
    (S, False, False): frozenset({SHADOW, CANARY, FULL}),
    (R, True, True): frozenset({OFFLINE, CANARY, FULL}),
    (R, True, False): frozenset({OFFLINE, CANARY, FULL}),
    (R, False, True): frozenset({CANARY, FULL}),
    (R, False, False): frozenset({CANARY, FULL}),
    (TRACE, True, True): frozenset(STAGES),
    (TRACE, True, False): frozenset(STAGES),
    (TRACE, False, True): frozenset(STAGES),
    (TRACE, False, False): frozenset({SHADOW, CANARY, FULL}),
}


@pytest.mark.parametrize("by", ["certificate", "window"])
@pytest.mark.parametrize(("family", "level"), list(product(Family, Level)))
def test_every_stage_reacts_to_every_family_and_level(
    family: Family, level: Level, by: str
) -> None:
    action = FAMILY_DEFAULTS[family, level]
    for stage, wanted in zip(STAGES, REACTIONS[family, level], strict=True):
        one = demand(family=family, level=level, action=action, allowed=Fraction(0))
        broken = {
            one.obligation: ObligationResult("violated", "census", 1, 100, "0.4 instead of <= 0.1")
        }
        document = (
            certificate("c", broken, valid=False) if by == "certificate" else window("w", broken)
        )
        step = look(at(stage), [one], document)
        assert step.outcome is wanted, stage
        assert step.rows[0].status == "violated"
        assert "0.4 instead of <= 0.1" in step.rows[0].reason
        assert step.candidate.stage == stage
        assert (
            step.candidate.state
            is {
                PromotionOutcome.FROZEN: CandidateState.FROZEN,
                PromotionOutcome.ROLLED_BACK: CandidateState.ROLLED_BACK,
                PromotionOutcome.BLOCKED: CandidateState.BLOCKED
                if stage == OFFLINE
                else CandidateState.ACTIVE,
            }[wanted]
        )


@pytest.mark.parametrize(("family", "hard", "repeatable"), list(DUE))
def test_every_stage_demands_the_clauses_of_the_table(
    family: Family, hard: bool, repeatable: bool
) -> None:
    one = demand(family=family, hard=hard, repeatable=repeatable)
    assert {s for s in STAGES if one.is_due(s)} == DUE[family, hard, repeatable]


@pytest.mark.parametrize(("family", "hard", "repeatable"), list(DUE))
@pytest.mark.parametrize("stage", STAGES)
def test_clause_without_evidence_holds_its_stages(
    stage: str, family: Family, hard: bool, repeatable: bool
) -> None:
    shown = demand("OTHER")
    lacking = demand(family=family, hard=hard, repeatable=repeatable)
    traffic = window("w", {shown.obligation: counts(0, 2000)}, requests=2000)
    documents = (certificate("c", {shown.obligation: HELD}), traffic)
    step = look(at(stage), [shown, lacking], *documents[: 1 if stage == OFFLINE else 2])
    if stage in DUE[family, hard, repeatable]:
        assert step.outcome is PromotionOutcome.HELD
        assert step.rows[1].status == "open"
    else:
        assert step.outcome is PromotionOutcome.ADVANCED
        assert step.rows[1].status == "not-due"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("action", ACTIONS)
def test_action_can_only_make_a_reaction_more_severe(action: str, level: Level, stage: str) -> None:
    order = list(Reaction)
    usual = reaction(stage, level, "log")
    found = reaction(stage, level, action)
    assert order.index(found) >= order.index(usual)
    if stage != OFFLINE and action in ("fallback", "rollback"):
        assert found is Reaction.ROLL_BACK
    if stage != OFFLINE and action == "freeze":
        assert found is (Reaction.ROLL_BACK if level is Level.L3 else Reaction.FREEZE)


@pytest.mark.parametrize("level", list(Level))
@pytest.mark.parametrize("action", ACTIONS)
def test_only_a_live_triple_is_rolled_back_offline(action: str, level: Level) -> None:
    back = level is Level.L3 or action in ("fallback", "rollback")
    wanted = Reaction.ROLL_BACK if back else Reaction.BLOCK
    assert reaction(OFFLINE, level, action, live=True) is wanted
    assert reaction(OFFLINE, level, action) is Reaction.BLOCK


def test_most_severe_reaction_applies() -> None:
    mild, grave = demand("MILD", level=Level.L1), demand("GRAVE", level=Level.L3)
    broken = {d.obligation: ObligationResult("violated", "census") for d in (mild, grave)}
    step = look(at(CANARY), [mild, grave], certificate("c", broken, valid=False))
    assert step.outcome is PromotionOutcome.ROLLED_BACK


# --- demands of a contract ------------------------------------------------------------------------


@pytest.fixture
def by_name(program: Program) -> dict[str, DemandedObligation]:
    """Return the demands of the tiny contract by obligation."""
    return {one.obligation: one for one in demanded_obligations(program, RULES)}


def test_demands_equal_the_obligations_of_the_contract(
    by_name: dict[str, DemandedObligation],
) -> None:
    assert list(by_name) == [
        "N-ATTN-0/long/0", "N-KL/all/0", "N-KL/long/0", "N-BOTH/all/0", "N-BOTH/all/1",
        "R-LAT/all/0", "O-TRACE/all/0",
    ]  # fmt: skip
    kl, latency = by_name["N-KL/long/0"], by_name["R-LAT/all/0"]
    assert (kl.clause, kl.slice, kl.hard, kl.repeatable) == ("N-KL", "long", True, True)
    assert kl.allowed == Fraction(1, 100)
    assert kl.is_rate
    assert (latency.hard, latency.repeatable, latency.allowed) == (False, False, Fraction(1, 20))
    assert by_name["N-BOTH/all/0"].allowed is None
    assert by_name["N-BOTH/all/1"].allowed == 0
    assert by_name["O-TRACE/all/0"].allowed == 0
    assert by_name["O-TRACE/all/0"].reaction(CANARY) is Reaction.ROLL_BACK


def test_action_of_a_clause_precedes_the_policy(program: Program, folder: Path) -> None:
    path = folder / "contract.yaml"
    text = path.read_text(encoding="utf-8")
    old = "N-KL: {require: p99(kl) <= 0.02, slices: [all, long], level: L2}"
    assert old in text
    path.write_text(text.replace(old, f"{old[:-1]}, then: rollback}}"), encoding="utf-8")
    found = {one.obligation: one for one in demanded_obligations(load_program(path), RULES)}
    assert found["N-KL/all/0"].reaction(CANARY) is Reaction.ROLL_BACK
    assert found["N-KL/all/0"].reaction(OFFLINE) is Reaction.BLOCK
