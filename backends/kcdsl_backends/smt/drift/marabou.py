"""Marabou as a solver for the questions of z3: linear constraints and case splits of ReLU."""

from __future__ import annotations

import math
from functools import cache
from importlib.metadata import version
from itertools import chain
from typing import Any

from kcdsl_backends.real_arithmetic.backend import RealBackend
from kcdsl_backends.smt.drift.backend import LinearSolver
from kcdsl_backends.smt.drift.forms import Inequality
from kcdsl_backends.smt.drift.search import DriftElement
from kcdsl_backends.smt.solver import Outcome


@cache
def _library() -> tuple[Any, Any]:
    """Import Marabou without its warnings about missing parsers."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from maraboupy import Marabou, MarabouCore
    return Marabou, MarabouCore


def _name() -> str:
    return f"Marabou {version('maraboupy')}"


class MarabouQuestion:
    """A query for Marabou from the facts of one target; codes are not restricted to integers."""

    def __init__(self, target: DriftElement) -> None:
        rows = [row for fact in target.facts for case in fact.cases for row in case]
        numbers = [(*row.coefs, row.constant) for row in (*rows, target.core)]
        self._finite = all(map(math.isfinite, chain.from_iterable(numbers)))
        used = {i for fact in target.facts for i in fact.symbols} | set(target.core.symbols)
        self._places = {symbol: place for place, symbol in enumerate(sorted(used))}
        self._target = target

    def reaches(self, threshold: float, seconds: float) -> Outcome:
        """Return whether the element reaches a threshold; if so, store values that reach it."""
        marabou, core = _library()
        if seconds < 1 or not self._finite:  # Marabou has whole seconds, and accepts NaN
            return Outcome.UNKNOWN
        target, query = self._target, core.InputQuery()
        query.setNumberOfVariables(len(self._places))
        for place in self._places.values():
            query.setLowerBound(place, -1.0)
            query.setUpperBound(place, 1.0)
        for fact in target.facts:
            cases = [[self._row(one) for one in case] for case in fact.cases]
            if len(cases) > 1:
                core.addDisjunctionConstraint(query, cases)
                continue
            for one in cases[0]:
                query.addEquation(one)
        reached = tuple(-c for c in target.core.coefs)
        least = math.nextafter(threshold - target.rest, -math.inf)
        query.addEquation(self._row(Inequality(target.core.symbols, reached, least)))
        options = marabou.createOptions(
            verbosity=0, timeoutInSeconds=int(min(seconds, 10**6)), numWorkers=1
        )
        try:
            answer, values, _ = core.solve(query, options, "")
        except RuntimeError:  # raised by Marabou, e.g. for a basis that it cannot factorise
            return Outcome.UNKNOWN
        if answer == "sat":
            target.values = {symbol: values[place] for symbol, place in self._places.items()}
            target.low = max(target.low, target.attained())
            return Outcome.SAT
        return Outcome.UNSAT if answer == "unsat" else Outcome.UNKNOWN

    def _row(self, one: Inequality) -> Any:
        """Return Σ coefs·ε <= -constant, scaled by a power of two to largest magnitude about 1,
        since tolerances of Marabou are absolute."""
        _, core = _library()
        largest = max(map(abs, (*one.coefs, one.constant)), default=0.0)
        scale = 2.0 ** -min(max(math.frexp(largest)[1], -900), 900) if largest else 1.0
        found = core.Equation(core.Equation.LE)
        for symbol, value in zip(one.symbols, one.coefs, strict=True):
            found.addAddend(value * scale, self._places[symbol])
        found.setScalar(-one.constant * scale)
        return found


BACKEND = RealBackend(
    "marabou",
    _name,
    "{solver} answers `unsat` in float64 and within its tolerances, which nothing derives again",
    LinearSolver("Marabou", _name, MarabouQuestion).bounded,
)
