"""Display of the outcomes of goals: JSON for programs, a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from kcdsl.ir.printer import formula_text, region_text, term_text
from kcdsl.ir.terms import Drift, EvidenceKind, NoFlip, Norm
from kcdsl.model.numerics import Numerics
from kcdsl.route.goals import Goal
from kcdsl.verdict.model import SHOWN, verdict_name
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl.verdict.quantities import quantity
from kcdsl.verdict.records import number
from kcdsl.verdict.result import reason
from kcdsl.verdict.text.console import table
from kcdsl_certs.encoding.reals import real_text

VERIFY_SCHEMA = "kcdsl.verify/2"


def functional_of(goal: Goal) -> str:
    """Return the functional of a goal as the contract writes it."""
    if goal.functional == "no_flip":
        return formula_text(NoFlip(goal.block, "x", goal.k))
    return term_text(Norm(goal.functional, Drift(goal.block, "x")))


def goal_json(
    outcome: GoalOutcome, numerics: Mapping[str, Numerics], certificate: str | None
) -> dict[str, Any]:
    """Return one element of `goals` of kcdsl/verdict/verify.schema.json."""
    goal, verdict = outcome.goal, outcome.verdict
    threshold = None if goal.threshold is None else float(goal.threshold)
    return {
        "obligation": goal.obligation.id,
        "clause": goal.clause.id,
        "holdout": goal.clause.holdout,
        "block": goal.block,
        "slice": goal.region.slice,
        "region": region_text(goal.region),
        **({"weights": real_text(goal.weights)} if goal.weights else {}),
        **({"states": real_text(goal.states)} if goal.states else {}),
        **({} if goal.alpha is None else {"alpha": real_text(goal.alpha)}),
        "numerics": {side: spec.to_json() for side, spec in numerics.items()},
        "functional": functional_of(goal),
        "threshold": threshold,
        "exact": {"threshold": None if goal.threshold is None else real_text(goal.threshold)},
        **outcome.numbers(),
        **({"margin": number(outcome.margin)} if goal.functional == "no_flip" else {}),
        "verdict": verdict_name(verdict),
        "reason": reason(verdict),
        "counterexample": getattr(verdict, "counterexample", None),
        "evidence": {
            "kind": outcome.evidence.kind.value,
            "n": outcome.evidence.n,
            "confirmed": outcome.confirmed,
            "assumptions": list(outcome.evidence.assumptions),
        },
        "backend": outcome.backend,
        "cases": [
            {
                "name": case.name,
                "length": case.length,
                "bound": number(case.bound),
                "attack": case.attack,
                "stable": case.stable,
                "reason": case.reason,
                **({"margin": number(case.margin)} if goal.functional == "no_flip" else {}),
                **({} if case.alpha is None else {"alpha": case.alpha}),
                **_links_json(case),
            }
            for case in outcome.cases
        ],
        "cached": outcome.cached,
        "seconds": round(outcome.seconds, 6),
        "peak_bytes": outcome.peak_bytes,
        "certificate": certificate,
    }


def _links_json(case: CaseOutcome) -> dict[str, Any]:
    """Return the links of a chain as JSON; empty for a case without a chain."""
    links = [asdict(link) | {"bound": number(link.bound)} for link in case.links]
    return {"links": links} if links else {}


def chain_table(outcome: GoalOutcome) -> Table | None:
    """Return the terminal table of the chain with the largest bound; None without a chain.

    `ratio` is bound / attack after each link, `growth` the factor by which the ratio grows there:
    the link with the largest growth loses the most precision.
    """
    chains = [case for case in outcome.cases if case.links]
    if not chains:
        return None
    case = max(chains, key=lambda case: case.bound)
    rows: list[tuple[str, ...]] = []
    before: float | None = None
    for link in case.links:
        ratio = link.bound / link.attack if link.attack else None
        growth = ratio / before if ratio is not None and before else None
        numbers = (quantity(x, "1") for x in (link.bound, link.attack, ratio, growth))
        rows.append((link.name, *numbers, "known" if link.cached else ""))
        before = ratio
    head = Column(Text(f"{outcome.goal.clause.id}, {case.name}: stage"), no_wrap=True)
    names = (head, ">bound", ">attack", ">ratio", ">growth", Column("", no_wrap=True))
    return table(names, rows, pad_edge=False, padding=(0, 1))


def _goal_lines(outcome: GoalOutcome) -> list[str]:
    """Return the lines of a goal: its statement, each part of its region, and its margin."""
    goal, margin = outcome.goal, number(outcome.margin)
    lines = [functional_of(goal), f"x in {region_text(goal.region)}"]
    lines += [f"states within {real_text(goal.states)}"] if goal.states else []
    lines += [f"weights within {real_text(goal.weights)}"] if goal.weights else []
    return lines + ([] if margin is None else [f"margin {quantity(margin, '1')}"])


def goal_table(outcomes: Sequence[GoalOutcome]) -> Table:
    """Return the terminal table of `kcdsl verify`; `ratio` is bound / attack."""
    numbers = (">bound", ">limit", ">attack", ">ratio", ">n", ">seconds")
    names = (Column("clause", no_wrap=True), "goal", *numbers, Column("verdict", no_wrap=True))
    return table(names, map(_goal_cells, outcomes), pad_edge=False, padding=(0, 1))


def _goal_cells(outcome: GoalOutcome) -> Iterator[str | Text]:
    goal = outcome.goal
    limit = None if goal.threshold is None else float(goal.threshold)
    yield f"{goal.clause.id}\nheld out" if goal.clause.holdout else goal.clause.id
    yield "\n".join(_goal_lines(outcome))
    for value in (outcome.bound, limit, outcome.attack, outcome.tightness):
        yield quantity(value, "1")
    yield str(len(outcome.cases))
    yield f"{outcome.seconds:.2f}"
    word, colour = SHOWN[verdict_name(outcome.verdict)]
    chance = outcome.evidence.kind is EvidenceKind.PROBABILISTIC
    yield Text(f"{word}\nprobabilistic" if chance else word, style=colour)
