"""What an entry of the cache must look like before anything is made of it.

What an entry says of a bound may still be false: the checker derives every proof anew. What a proof
is about is never taken from an entry, and what stands beside a proof must be what the proof says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import CaseOutcome
from kcdsl_backends.certifier.bounding import Bounded
from kcdsl_backends.certifier.proof import Contents

SUBJECT = frozenset({"name", "graph", "region"})
"""The fields of a case in a proof that say what it is about."""


def stated_of(contents: Contents | None) -> tuple[float, dict[str, Any] | None]:
    """Return the claim of a case, and what its proof states beside what it is about."""
    if contents is None or not contents.cases:
        return 0.0, None
    (record,), (claim,) = contents.cases, contents.claims
    return claim, {k: v for k, v in record.items() if k not in SUBJECT}


def refuse_subject(stated: Any) -> None:
    """Raise ValueError where what is stated says what it is about: a true proof of another region
    shows nothing."""
    if not isinstance(stated, Mapping) or not SUBJECT.isdisjoint(stated):
        raise ValueError("the entry says what its proof is about")


def refuse_apart(goal: Goal, bounded: Any, claim: Any, stated: Any) -> None:
    """Raise ValueError unless what is said of a case has its form, and is what its proof claims."""
    if not isinstance(bounded, Bounded) or not _plain(bounded):
        raise ValueError("no bound")
    outcome = bounded.outcome
    if stated is None:
        if outcome.bound != math.inf or outcome.stable:
            raise ValueError("a bound without a proof")
        return
    refuse_subject(stated)
    said = "held" if goal.functional == "no_flip" else outcome.bound.hex()
    if type(claim) is not float or claim != outcome.bound or stated["claim"] != said:
        raise ValueError("the proof claims something else")
    if outcome.alpha != (stated["chance"]["alpha"] if "chance" in stated else None):
        raise ValueError("the proof leaves something else to chance")


def _plain(bounded: Bounded) -> bool:
    """Say whether every field of a bound has its type; runs and links are not kept with it."""
    outcome, places = bounded.outcome, bounded.places
    return (
        type(outcome) is CaseOutcome
        and type(outcome.name) is str
        and type(outcome.length) is int
        and type(outcome.bound) is float
        and outcome.attack is None
        and type(outcome.reason) in (str, type(None))
        and type(outcome.stable) in (bool, type(None))
        and type(outcome.margin) in (float, type(None))
        and outcome.links == ()
        and type(outcome.alpha) in (str, type(None))
        and type(places) is tuple
        and all(type(place) is int and place >= 0 for place in places)
    )
