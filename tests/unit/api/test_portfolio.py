"""Portfolio of backends: order, first decision, time limit, contradictions."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kcdsl.api.portfolio import decide_together
from kcdsl.diagnostics import Refusal, codes, refuse
from kcdsl.ir.terms import EvidenceKind
from kcdsl.route.catalogue import BackendSpec, Fragment
from kcdsl.route.goals import Goal, goals
from kcdsl.verdict.model import (
    Evidence,
    Held,
    Inconclusive,
    InvalidEvidence,
    Verdict,
    Violated,
    verdict_name,
)
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from tests.support.small_models import write_contract, write_model

if TYPE_CHECKING:
    from tests.conftest import Cli

DRIFT = frozenset({Fragment.UNIVERSAL_DRIFT})
BOTH = DRIFT | {Fragment.UNIVERSAL_FLIP}
OPEN = Inconclusive("too hard")


@dataclass
class Fake:
    """A backend with one answer; `calls` counts the goals it received."""

    verdict: Verdict
    bound: float = 1.0
    attack: float | None = None
    calls: list[int] = field(default_factory=list)
    limits: list[float | None] = field(default_factory=list)
    alpha: str | None = None


def offer(name: str, fake: Fake, **more: Any) -> tuple[BackendSpec, Any]:
    more = {"fragments": DRIFT, **more}
    spec = BackendSpec(name, more.pop("target", f"kcdsl_backends.{name}:BACKEND"), **more)
    return spec, lambda seconds: (name, fake, seconds)


def ask(backend: Any, asked: Any, seconds: float | None) -> list[GoalOutcome]:
    name, fake, given = backend
    assert given == seconds
    fake.calls.append(len(asked))
    fake.limits.append(seconds)
    case = CaseOutcome("a", 1, fake.bound, fake.attack, alpha=fake.alpha)
    evidence = Evidence(EvidenceKind.PROOF)
    return [GoalOutcome(goal, fake.verdict, evidence, name, (case,), 0.0, 0) for goal in asked]


@pytest.fixture(scope="module")
def goal(tmp_path_factory: pytest.TempPathFactory) -> Goal:
    folder = tmp_path_factory.mktemp("contract")
    write_model(folder)
    text = "forall x in points(all): norm_inf(drift(mlp_0, x)) <= 0.5"
    (found,) = goals(write_contract(folder, text, evidence="proof-real"))
    return found


def decided(goal: Goal, *offers: Any, seconds: float | None = None) -> GoalOutcome:
    (found,) = decide_together(offers, [goal], ask, seconds)
    return found


@pytest.mark.parametrize("verdict", [Held(), Violated(), InvalidEvidence("no rows")])
def test_no_backend_runs_after_a_decision(goal: Goal, verdict: Verdict) -> None:
    second = Fake(Held())
    found = decided(goal, offer("one", Fake(verdict)), offer("two", second))
    assert found.verdict == verdict
    assert found.backend == "one"
    assert found.notes == ("N-0: decided by one",)
    assert not second.calls


def test_later_backend_decides_what_the_first_leaves_open(goal: Goal) -> None:
    first, second, third = Fake(OPEN, bound=0.6), Fake(Held(), bound=0.4), Fake(Held())
    offers = [offer("one", first), offer("two", second), offer("three", third)]
    found = decided(goal, *offers)
    assert (found.backend, found.bound) == ("two", 0.4)
    assert found.notes == ("N-0: decided by two; one: inconclusive, too hard",)
    assert (first.calls, second.calls, third.calls) == ([1], [1], [])


def test_smallest_bound_is_reported_without_a_decision(goal: Goal) -> None:
    offers = [offer("one", Fake(OPEN, bound=0.9)), offer("two", Fake(OPEN, bound=0.6))]
    found = decided(goal, *offers)
    assert (found.backend, verdict_name(found.verdict)) == ("two", "inconclusive")
    assert found.notes == ("N-0: decided by no backend; one: inconclusive, too hard",)


@pytest.mark.parametrize(
    ("one", "two", "told"),
    [
        (Fake(OPEN, attack=0.45), Fake(Held(), bound=0.4), "two bounds the drift by 0.4"),
        (Fake(OPEN, bound=0.4), Fake(OPEN, attack=0.45), "one bounds the drift by 0.4"),
        (Fake(OPEN, bound=0.4), Fake(Violated(), attack=0.6), "one bounds the drift by 0.4"),
    ],
)
def test_contradictory_answers_end_the_command(goal: Goal, one: Fake, two: Fake, told: str) -> None:
    with pytest.raises(Refusal) as refusal:
        decided(goal, offer("one", one), offer("two", two))
    (found,) = refusal.value.diagnostics
    assert found.code == codes.BACKENDS_DISAGREE
    assert told in found.message


def test_probabilistic_bounds_and_unverified_runs_do_not_contradict(goal: Goal) -> None:
    likely = Fake(OPEN, bound=0.4, alpha="1e-9")
    decided(goal, offer("one", likely), offer("two", Fake(Held(), bound=0.45, attack=0.42)))
    foreign = offer("two", Fake(OPEN, bound=0.6, attack=0.55), target="elsewhere:BACKEND")
    decided(goal, offer("one", Fake(OPEN, bound=0.51)), foreign)


def test_unproved_foreign_bound_is_ignored(goal: Goal) -> None:
    """It is neither reported in place of a derived bound, nor in contradiction with a run."""
    lying = offer("liar", Fake(OPEN, bound=-1.0), target="elsewhere:BACKEND")
    found = decided(goal, lying, offer("one", Fake(OPEN, bound=0.6, attack=0.55)))
    assert (found.backend, found.bound) == ("one", 0.6)
    assert decided(goal, lying).backend == "liar"


def test_skipped_backends_state_the_reason(goal: Goal) -> None:
    proof = replace(goal.clause, evidence=EvidenceKind.PROOF)
    demanding = replace(goal, obligation=replace(goal.obligation, clause=proof))
    first, second = Fake(OPEN), Fake(Held())
    real = offer("two", second, real_arithmetic=True)
    found = decided(demanding, offer("one", first), real)
    assert "two: not tried, the clause does not admit `evidence: proof-real`" in found.notes[0]
    flip = replace(goal, functional="no_flip", threshold=None)
    found = decided(flip, offer("one", Fake(OPEN), fragments=BOTH), offer("two", second))
    assert "two: not tried, does not decide the order of logits" in found.notes[0]
    around = replace(goal, weights=Fraction(1, 1024))
    both = offer("one", Fake(OPEN), around_weights=True), offer("two", second)
    found = decided(around, *both)
    assert "two: not tried, decides for the weights of the checkpoint alone" in found.notes[0]
    assert not second.calls
    with pytest.raises(Refusal, match="no installed backend decides N-0"):
        decided(around, offer("two", second))


def test_failing_foreign_backend_decides_nothing(goal: Goal) -> None:
    """Refusals by other backends, or about the subject itself, end the command."""

    def refusing(backend: Any, asked: Any, seconds: float | None) -> list[GoalOutcome]:
        if backend[0] == "mine":
            raise refuse(backend[1].code, "it raised", help="leave it out")
        return ask(backend, asked, seconds)

    @dataclass
    class Failing(Fake):
        code: codes.Code = codes.NO_BACKEND

    def mine(code: codes.Code, target: str) -> Any:
        return offer("mine", Failing(Held(), bound=-1.0, code=code), target=target)

    failing, second = mine(codes.NO_BACKEND, "elsewhere:BACKEND"), Fake(Held(), bound=0.4)
    (found,) = decide_together([failing, offer("two", second)], [goal], refusing, None)
    assert (found.backend, found.bound, second.calls) == ("two", 0.4, [1])
    assert found.notes == ("N-0: decided by two; mine: failed, it raised",)
    with pytest.raises(Refusal, match="no installed backend decides N-0") as refusal:
        decide_together([failing], [goal], refusing, None)
    assert refusal.value.diagnostics[0].notes == ("mine: failed, it raised",)
    own = mine(codes.NO_BACKEND, "kcdsl_backends.mine:BACKEND")
    for bad in (own, mine(codes.FILE_MISSING, "elsewhere:BACKEND")):
        with pytest.raises(Refusal, match="it raised"):
            decide_together([bad, offer("two", second)], [goal], refusing, None)


def test_answers_belong_to_their_goals_in_any_order(goal: Goal) -> None:
    other = replace(goal, obligation=replace(goal.obligation, number=1))

    def turned(backend: Any, asked: Any, seconds: float | None) -> list[GoalOutcome]:
        return ask(backend, asked, seconds)[::-1]

    goals = [goal, other]
    found = decide_together([offer("one", Fake(Held(), bound=0.4))], goals, turned, None)
    assert [outcome.goal for outcome in found] == goals


def test_time_limit_is_shared(goal: Goal, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 0.0, 4.0, 11.0))
    monkeypatch.setattr("kcdsl.api.portfolio.time.monotonic", lambda: next(clock))
    first, second, third = Fake(OPEN), Fake(OPEN), Fake(OPEN)
    offers = [offer("one", first), offer("two", second), offer("three", third)]
    found = decided(goal, *offers, seconds=10.0)
    assert (first.limits, second.limits, third.limits) == ([10.0], [6.0], [])
    assert "three: not tried, the time limit had passed" in found.notes[0]


@pytest.mark.full
def test_auto_runs_all_backends_in_order(tmp_path: Path, cli: Cli) -> None:
    write_model(tmp_path, rows=[{"id": "a", "text": "hello"}])
    text = "forall x in points(all): norm_inf(drift(mlp_0, x)) <= "
    write_contract(tmp_path, text + "1", text + "0", evidence="proof-real")
    ran = cli("verify", "--backend", "auto", "--format", "json", "--cache", "off", cwd=tmp_path)
    easy, hard = json.loads(ran.stdout)["goals"]
    assert (easy["verdict"], easy["backend"]) == ("held", "interval")
    assert hard["verdict"] in ("violated", "inconclusive")
    assert ran.code in (1, 3)
    refused = cli("verify", "--backend", "auto", "--chain", cwd=tmp_path)
    assert "KC402" in refused.stderr
