"""How the outcomes of goals are shown: JSON for programs, a table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kcdsl.ir.printer import formula_text, region_text, term_text
from kcdsl.ir.terms import Clause, Drift, EvidenceKind, NoFlip, Norm
from kcdsl.model.numerics import Numerics
from kcdsl.route.goals import Goal
from kcdsl.verdict.model import Inconclusive, InvalidEvidence, verdict_name
from kcdsl.verdict.outcome import CaseOutcome, GoalOutcome
from kcdsl_certs.reals import real_text

if TYPE_CHECKING:
    from rich.table import Table

VERIFY_SCHEMA = "kcdsl.verify/2"
_SHOWN = {
    "held": ("✓ held", "green"),
    "violated": ("✗ violated", "red"),
    "inconclusive": ("? inconclusive", "yellow"),
    "invalid_evidence": ("! invalid evidence", "magenta"),
}


def functional_text(outcome: GoalOutcome) -> str:
    """Return the functional of a goal as the contract writes it."""
    return functional_of(outcome.goal)


def functional_of(goal: Goal) -> str:
    """Return the functional of a goal as the contract writes it."""
    if goal.functional == "no_flip":
        return formula_text(NoFlip(goal.block, "x", goal.k))
    return term_text(Norm(goal.functional, Drift(goal.block, "x")))


def goal_json(
    outcome: GoalOutcome, numerics: Mapping[str, Numerics], certificate: str | None
) -> dict[str, Any]:
    """Return one element of `goals` of `verify --json` (kcdsl/verdict/verify.schema.json)."""
    goal, verdict = outcome.goal, outcome.verdict
    reason = verdict.reason if isinstance(verdict, Inconclusive | InvalidEvidence) else None
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
        "functional": functional_text(outcome),
        "threshold": threshold,
        "exact": {"threshold": None if goal.threshold is None else real_text(goal.threshold)},
        **outcome.numbers(),
        **({"margin": _finite(outcome.margin)} if goal.functional == "no_flip" else {}),
        "verdict": verdict_name(verdict),
        "reason": reason,
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
                "bound": case.bound if math.isfinite(case.bound) else None,
                "attack": case.attack,
                "stable": case.stable,
                "reason": case.reason,
                **({"margin": _finite(case.margin)} if goal.functional == "no_flip" else {}),
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


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _links_json(case: CaseOutcome) -> dict[str, Any]:
    """Return the links of a chain as JSON; nothing for a case that was proved as one."""
    if not case.links:
        return {}
    return {
        "links": [
            {
                "name": link.name,
                "bound": link.bound if math.isfinite(link.bound) else None,
                "attack": link.attack,
                "cached": link.cached,
            }
            for link in case.links
        ]
    }


def chain_table(outcome: GoalOutcome) -> Table | None:
    """Return the terminal table of the chain with the largest bound; None without a chain.

    `ratio` is bound / attack behind each link, `growth` what the ratio is multiplied with there:
    the link with the largest growth is the one that loses.
    """
    from rich.table import Table
    from rich.text import Text

    chains = [case for case in outcome.cases if case.links]
    if not chains:
        return None
    case = max(chains, key=lambda case: case.bound)
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column(Text(f"{outcome.goal.clause.id}, {case.name}: link"), no_wrap=True)
    for name in ("bound", "attack", "ratio", "growth"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    before: float | None = None
    for link in case.links:
        ratio = link.bound / link.attack if link.attack else None
        growth = ratio / before if ratio is not None and before else None
        numbers = (link.bound, link.attack, ratio, growth)
        known = "known" if link.cached else ""
        table.add_row(Text(link.name), *map(number_text, numbers), known)
        before = ratio
    return table


def _name(clause: Clause) -> str:
    return f"{clause.id}\nheld out" if clause.holdout else clause.id


def number_text(value: float | None) -> str:
    """Return a number for a table cell; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.3g}"


def _goal_lines(outcome: GoalOutcome) -> list[str]:
    """Return what a goal says, a line for each part of its region, and the margin of an order."""
    goal, margin = outcome.goal, _finite(outcome.margin)
    lines = [functional_text(outcome), f"x in {region_text(goal.region)}"]
    lines += [f"states within {real_text(goal.states)}"] if goal.states else []
    lines += [f"weights within {real_text(goal.weights)}"] if goal.weights else []
    return lines + ([] if margin is None else [f"margin {number_text(margin)}"])


def goal_table(outcomes: Sequence[GoalOutcome]) -> Table:
    """Return the terminal table of `kcdsl verify`; `ratio` is bound / attack."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="bold")
    table.add_column("clause", no_wrap=True)
    table.add_column("goal", overflow="fold")
    for name in ("bound", "limit", "attack", "ratio", "n", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for outcome in outcomes:
        word, colour = _SHOWN[verdict_name(outcome.verdict)]
        if outcome.evidence.kind is EvidenceKind.PROBABILISTIC:
            word = f"{word}\nprobabilistic"
        limit = None if outcome.goal.threshold is None else float(outcome.goal.threshold)
        table.add_row(
            _name(outcome.goal.clause),
            "\n".join(_goal_lines(outcome)),
            number_text(outcome.bound),
            number_text(limit),
            number_text(outcome.attack),
            number_text(outcome.tightness),
            str(len(outcome.cases)),
            f"{outcome.seconds:.2f}",
            Text(word, style=colour),
        )
    return table
