"""The backend `quick`: the interval domain alone, without a search for runs.

An example of a backend in a distribution of its own. Importing this module imports no tensor
library; `decide` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kcdsl.ir.terms import Program
from kcdsl.route.catalogue import BackendSpec, Fragment
from kcdsl.route.goals import Goal
from kcdsl.verdict.outcome import GoalOutcome

CATALOGUE = (
    BackendSpec(
        name="quick",
        target="quick_backend:BACKEND",
        fragments=frozenset({Fragment.UNIVERSAL_DRIFT}),
        needs=("torch", "numpy"),
        summary="the interval domain alone, without a search for runs",
        rank=90,
    ),
)


class QuickBackend:
    """The backend object that `target` names."""

    name = "quick"

    def decide(
        self, program: Program, base: Path, goals: Sequence[Goal], **options: Any
    ) -> list[GoalOutcome]:
        """Return an outcome for each goal, in order; a bound that is too large is inconclusive."""
        from kcdsl_backends.certifier.backend import BACKEND as INTERVAL

        alone = [replace(goal, domains=("interval",)) for goal in goals]
        options.pop("progress", None)
        found = INTERVAL.decide(program, base, alone, **{**options, "attacks": False})
        return [
            replace(outcome, goal=goal, backend=self.name)
            for outcome, goal in zip(found, goals, strict=True)
        ]


BACKEND = QuickBackend()
