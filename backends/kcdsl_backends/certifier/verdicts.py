"""From the outcomes of cases to the verdict of a goal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kcdsl.route.goals import Goal
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.attack.runs import Attack


def verdict_of(
    goal: Goal, cases: Sequence[CaseOutcome], found: Attack | None, *, chain: bool = False
) -> Verdict:
    """Return the verdict that bounds and attacks of all cases give; no case is no evidence.

    Where a clause admits what is likely and that was not asked, as it never is of a `chain`, a run
    whose roundings were chosen refutes nothing.
    """
    if not cases:
        return InvalidEvidence("there is no case")
    for case in cases:
        if case.attack is not None and case.attack > case.bound and case.alpha is None:
            return InvalidEvidence(
                f"{case.name}: a run attains {case.attack!r}, above the bound {case.bound!r}: "
                "the verifier is wrong, or what it read was changed"
            )
        for link in case.links:
            if link.attack is not None and link.attack > link.bound:
                return InvalidEvidence(
                    f"{case.name}: behind {link.name} a run attains {link.attack!r}, above the "
                    f"bound {link.bound!r}: the verifier is wrong, or what it read was changed"
                )
    if goal.functional == "no_flip":
        return _stability(cases)
    refuted = [case for case in cases if _refutes(goal, case)]
    if found is not None and refuted:
        if goal.alpha is not None and (chain or "affine" not in (goal.domains or ("affine",))):
            return Inconclusive(
                f"{refuted[0].name}: a run exceeds the threshold, and how likely such runs are was "
                "not asked: affine forms of whole blocks say that"
            )
        return Violated(counterexample(cases, found))
    open_cases = [case for case in cases if not goal.admits(case.bound)]
    if not open_cases:
        return Held()
    worst = max(open_cases, key=lambda case: case.bound)
    if worst.reason is not None:
        return Inconclusive(f"{worst.name}: {worst.reason}")
    return Inconclusive(
        f"{worst.name}: the bound {worst.bound:.3g} exceeds the threshold, no run found does"
    )


def _refutes(goal: Goal, case: CaseOutcome) -> bool:
    """Say whether a run breaks the goal; roundings that were chosen for it do not, where it holds
    with all probability that is asked for."""
    if case.attack is None or not goal.refuted_by(case.attack):
        return False
    return case.alpha is None or not goal.admits(case.bound)


def _stability(cases: Sequence[CaseOutcome]) -> Verdict:
    unstable = [case for case in cases if not case.stable]
    if not unstable:
        return Held()
    for case in unstable:
        if case.reason is not None:
            return Inconclusive(f"{case.name}: {case.reason}")
    named = ", ".join(case.name for case in unstable[:3]) + (" …" if len(unstable) > 3 else "")
    return Inconclusive(f"a flip is not excluded for {len(unstable)} of {len(cases)}: {named}")


def counterexample(cases: Sequence[CaseOutcome], found: Attack) -> dict[str, Any]:
    """Return what is shown of the strongest attack."""
    case = max((c for c in cases if c.attack is not None), key=lambda c: c.attack or 0.0)
    if found.record is not None:
        shown: dict[str, Any] = dict(found.record["attained"])
        numbers = {name: float.fromhex(shown[name]) for name in ("value", "train", "infer")}
        return {"case": case.name, **shown, **numbers}
    return {
        "case": case.name,
        "value": found.value,
        "row": list(found.row),
        "column": found.column,
        "train": found.train_value,
        "infer": found.infer_value,
    }
