"""A group of claims in one solver, ready to be asked about any of them together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from kcdsl.ir.predicates import Inside
from kcdsl.ir.terms import Program
from kcdsl.logic.relations import Interval
from kcdsl_backends.smt.axioms import Fact
from kcdsl_backends.smt.claims import Claim, division, same_slice
from kcdsl_backends.smt.solver import Clock, Expression, Outcome, Solver
from kcdsl_backends.smt.translation import Translator


def translator_for(program: Program, inside: Inside, clock: Clock, unit: str = "") -> Translator:
    """Return a translator that knows the constants, slices and own metrics of a program."""
    temperature = program.constants.temperature
    return Translator(
        temperature=temperature if temperature > 0 else None,
        inside=same_slice if unit else inside,
        division=division(program, clock),
        known={m.name: Interval(m.lower, m.upper) for m in program.metrics},
        by_request=frozenset(m.name for m in program.metrics if m.counted == "request"),
        one_request=unit == "requests",
    )


@dataclass(slots=True)
class Session:
    """Claims about one kind of unit, and the solver that holds them."""

    program: Program
    claims: Sequence[Claim]
    inside: Inside
    clock: Clock
    unit: str = ""
    translator: Translator = field(init=False)
    solver: Solver = field(init=False)
    facts: list[Fact] = field(init=False)
    holds: dict[str, Expression] = field(default_factory=dict)
    fails: dict[str, Expression] = field(default_factory=dict)
    explainer: Solver | None = None

    def __post_init__(self) -> None:
        self.translator = translator_for(self.program, self.inside, self.clock, self.unit)
        for claim in self.claims:
            self.translator.announce(claim.clause.require, claim.site)
            self.translator.announce_negation(claim.clause.require, claim.site)
        self.solver = Solver(self.translator.context, self.clock)
        for claim in self.claims:
            asked = (claim.clause.require, claim.slice, claim.site)
            self.holds[claim.name] = self.translator.requirement(*asked)
            self.fails[claim.name] = self.translator.negation(*asked)
        self.facts = list(self.translator.assumptions())
        self.solver.add(fact.expression for fact in self.facts)
        for claim in self.claims:
            self.solver.name(claim.name, self.holds[claim.name])
            self.solver.name(f"not {claim.name}", self.fails[claim.name])

    def together(self, claims: Iterable[Claim]) -> tuple[Outcome, frozenset[str]]:
        """Ask whether claims can hold at once; if not, name those that it takes."""
        return self.solver.decide_all(claim.name for claim in claims)

    def can_fail(self, claim: Claim) -> Outcome:
        """Ask whether anything speaks against a claim."""
        return self.solver.decide_all([f"not {claim.name}"])[0]

    def without(self, claim: Claim, premises: Collection[Claim]) -> tuple[Outcome, frozenset[str]]:
        """Ask whether a claim can fail where premises hold; if not, name those that it takes."""
        names = [f"not {claim.name}", *(premise.name for premise in premises)]
        outcome, core = self.solver.decide_all(names)
        return outcome, core - {f"not {claim.name}"}

    def reasons(self, claim: Claim, premises: Iterable[Claim]) -> tuple[str, ...]:
        """Return the facts that it takes for premises to imply a claim, each needed."""
        return self.because([f"not {claim.name}", *(premise.name for premise in premises)])

    def because(self, given: Sequence[str]) -> tuple[str, ...]:
        """Return the facts that it takes for what was named to be impossible, each needed."""
        solver = self._explainer()
        names = [f"fact-{n}" for n in range(len(self.facts))]
        outcome, core = solver.decide_all(given)
        if outcome is Outcome.UNSAT:
            return ()
        outcome, core = solver.decide_all([*given, *names])
        if outcome is not Outcome.UNSAT:
            return ()
        kept = [name for name in names if name in core]
        for name in list(kept):
            rest = [other for other in kept if other != name]
            if solver.decide_all([*given, *rest])[0] is Outcome.UNSAT:
                kept = rest
        return tuple(dict.fromkeys(self.facts[int(name[5:])].reason for name in kept))

    def _explainer(self) -> Solver:
        """Return a solver in which every fact has a name."""
        if self.explainer is None:
            self.explainer = Solver(self.translator.context, self.clock)
            for n, fact in enumerate(self.facts):
                self.explainer.name(f"fact-{n}", fact.expression)
            for claim in self.claims:
                self.explainer.name(claim.name, self.holds[claim.name])
                self.explainer.name(f"not {claim.name}", self.fails[claim.name])
        return self.explainer


def minimal(session: Session, claims: Sequence[Claim], claim: Claim | None = None) -> list[Claim]:
    """Shrink an unsatisfiable set, or the premises of a claim, until every member is needed."""
    core = list(claims)
    for member in list(core):
        rest = [other for other in core if other is not member]
        outcome = (session.together(rest) if claim is None else session.without(claim, rest))[0]
        if outcome is Outcome.UNSAT:
            core = rest
    return core
