"""Contract-level facts that hold before any kernel runs.

Clauses are compared where they speak of the same thing: hard clauses about a slice as a whole,
clauses with a budget of requests about single requests, and with a budget of windows about single
windows. Two clauses with budgets a and b of the same unit are both kept by at least 1 - a - b of
the units; so they contradict each other if no unit can keep both and a + b < 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from kcdsl.diagnostics import Diagnostic, Label, Severity
from kcdsl.diagnostics.codes import (
    ALWAYS_HOLDS,
    CONTRADICTION,
    EMPTY_SLICE,
    NEVER_HOLDS,
    SOLVER_UNDECIDED,
    Code,
)
from kcdsl.ir.buckets import expand_tables
from kcdsl.ir.terms import Clause, Program
from kcdsl.source.text import SourceFile
from kcdsl_backends.smt.predicates import emptiness, lies_inside
from kcdsl_backends.smt.solving import Expression, Outcome, Solver
from kcdsl_backends.smt.translate import Inside, Translator


@dataclass(frozen=True, slots=True)
class _Claim:
    """One clause on one slice ("" where the clause names none)."""

    clause: Clause
    slice: str
    index: int

    @property
    def name(self) -> str:
        return f"claim-{self.index}"

    @property
    def site(self) -> str:
        return str(self.index)


def consistency(
    program: Program, timeout_ms: int = 2000, source: SourceFile | None = None
) -> list[Diagnostic]:
    """Return contradictions, impossible and redundant clauses, empty slices, open questions.

    `timeout_ms` limits each question to the solver. What the solver leaves open is reported with
    its own code and never counts as consistent. Cores are minimal: every member is needed.
    """
    report = _Report(source)
    _check_slices(program, timeout_ms, report)
    program = expand_tables(program)
    inside = _inclusion(program, timeout_ms)
    units = [None, "requests", "windows"]
    index = 0
    for unit in units:
        claims = []
        for clause in program.clauses:
            if (None if clause.budget is None else clause.budget.unit) != unit or _waived(clause):
                continue
            for name in clause.slices or ("",):
                claims.append(_Claim(clause, name, index))
                index += 1
        if claims:
            _Group(program, claims, inside, timeout_ms, report).check()
    return list(report.diagnostics())


def _waived(clause: Clause) -> bool:
    return clause.budget is not None and clause.budget.rate >= 1


def _inclusion(program: Program, timeout_ms: int) -> Inside:
    known: dict[tuple[str, str], bool] = {}
    declared = {s.name: s for s in program.slices}

    def inside(inner: str, outer: str) -> bool:
        if inner == outer:
            return True
        if inner not in declared or outer not in declared:
            return False
        key = (inner, outer)
        if key not in known:
            known[key] = lies_inside(program, declared[inner], declared[outer], timeout_ms)
        return known[key]

    return inside


def _check_slices(program: Program, timeout_ms: int, report: _Report) -> None:
    for declared in program.slices:
        match emptiness(declared.where, timeout_ms):
            case Outcome.UNSAT:
                report.add_plain(
                    Diagnostic(
                        EMPTY_SLICE,
                        f"no request can belong to the slice {declared.name!r}",
                        report.source,
                        declared.span,
                        help="its tests of `where` exclude each other; drop or correct one",
                    )
                )
            case Outcome.UNKNOWN:
                report.add_plain(
                    Diagnostic(
                        SOLVER_UNDECIDED,
                        f"whether a request can belong to the slice {declared.name!r} is open",
                        report.source,
                        declared.span,
                        severity=Severity.WARNING,
                    )
                )
            case Outcome.SAT:
                pass


class _Group:
    """The claims about one kind of unit, and the solver that holds them."""

    def __init__(
        self,
        program: Program,
        claims: Sequence[_Claim],
        inside: Inside,
        timeout_ms: int,
        report: _Report,
    ) -> None:
        self.claims = list(claims)
        self.report = report
        self.translator = Translator(
            temperature=program.constants.temperature
            if program.constants.temperature > 0
            else None,
            inside=inside,
        )
        for claim in claims:
            self.translator.announce(claim.clause.require, claim.site)
        self.solver = Solver(self.translator.context, timeout_ms)
        self.formulas: dict[_Claim, Expression] = {}
        self.negations: dict[_Claim, Expression] = {}
        for claim in claims:
            asked = (claim.clause.require, claim.slice, claim.site)
            self.formulas[claim] = self.translator.requirement(*asked)
            self.negations[claim] = self.translator.negation(*asked)
        self.solver.add(self.translator.facts())

    def check(self) -> None:
        """Report single claims first, then contradictions among those that are left."""
        left = [claim for claim in self.claims if self._is_open(claim)]
        while len(left) > 1:
            outcome, named = self._ask(left)
            match outcome:
                case Outcome.SAT:
                    return
                case Outcome.UNKNOWN:
                    self.report.undecided(left)
                    return
                case Outcome.UNSAT:
                    core = self._minimal([claim for claim in left if claim.name in named])
                    self._conflict(core)
                    dropped = core[-1]
                    left.remove(dropped)
                    for other in left:
                        if other not in core and self._decide([dropped, other]) is Outcome.UNSAT:
                            self._conflict([other, dropped])

    def _is_open(self, claim: _Claim) -> bool:
        """Say whether the claim can hold and can fail; report it otherwise."""
        match self._decide([claim]):
            case Outcome.UNSAT:
                self.report.add(NEVER_HOLDS, [claim])
                return False
            case Outcome.UNKNOWN:
                self.report.undecided([claim])
                return False
            case Outcome.SAT:
                pass
        match self.solver.decide(self.negations[claim]):
            case Outcome.UNSAT:
                self.report.add(ALWAYS_HOLDS, [claim])
                return False
            case Outcome.UNKNOWN:
                self.report.undecided([claim])
                return True
            case Outcome.SAT:
                return True

    def _minimal(self, core: list[_Claim]) -> list[_Claim]:
        """Shrink an unsatisfiable set until every member is needed."""
        for claim in list(core):
            rest = [other for other in core if other is not claim]
            if self._decide(rest) is Outcome.UNSAT:
                core = rest
        return core

    def _conflict(self, core: Sequence[_Claim]) -> None:
        budgets = (claim.clause.budget for claim in core)
        if sum((b.rate for b in budgets if b is not None), Fraction(0)) < 1:
            self.report.add(CONTRADICTION, core)

    def _decide(self, claims: Sequence[_Claim]) -> Outcome:
        return self._ask(claims)[0]

    def _ask(self, claims: Sequence[_Claim]) -> tuple[Outcome, frozenset[str]]:
        return self.solver.decide_named({claim.name: self.formulas[claim] for claim in claims})


@dataclass(slots=True)
class _Report:
    """Gathers findings; the same clauses on several slices make one diagnostic."""

    source: SourceFile | None
    _plain: list[Diagnostic] = field(default_factory=list)
    _found: dict[tuple[Code, tuple[str, ...]], list[_Claim]] = field(default_factory=dict)

    def add_plain(self, diagnostic: Diagnostic) -> None:
        """Keep a finished diagnostic."""
        self._plain.append(diagnostic)

    def add(self, code: Code, claims: Sequence[_Claim]) -> None:
        """Keep a finding about claims."""
        ordered = sorted(claims, key=lambda claim: claim.index)
        ids = tuple(dict.fromkeys(claim.clause.id for claim in ordered))
        self._found.setdefault((code, ids), []).extend(ordered)

    def undecided(self, claims: Sequence[_Claim]) -> None:
        """Keep what the solver left open."""
        self.add(SOLVER_UNDECIDED, claims)

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yield the findings, slices first, then clauses in the order of the contract."""
        yield from self._plain
        for (code, ids), claims in self._found.items():
            clauses = {claim.clause.id: claim.clause for claim in claims}
            slices = tuple(dict.fromkeys(claim.slice for claim in claims if claim.slice))
            last = clauses[ids[-1]]
            yield Diagnostic(
                code,
                _message(code, ids, slices),
                self.source,
                last.span,
                labels=tuple(
                    Label(clauses[name].span, f"{name} requires {clauses[name].text or 'this'}")
                    for name in ids[:-1]
                ),
                help=_HELP.get(code),
                severity=Severity.WARNING if code in _WARNINGS else Severity.ERROR,
            )


_WARNINGS = (ALWAYS_HOLDS, SOLVER_UNDECIDED)
_HELP = {
    CONTRADICTION: "loosen one of them, or let them speak of different slices",
    NEVER_HOLDS: "correct its thresholds",
    ALWAYS_HOLDS: "tighten its threshold or drop it",
}


def _message(code: Code, ids: Sequence[str], slices: Sequence[str]) -> str:
    names = ids[0] if len(ids) == 1 else f"{', '.join(ids[:-1])} and {ids[-1]}"
    where = ""
    if slices:
        where = f" on the slice{'s' if len(slices) > 1 else ''} {', '.join(slices)}"
    if code is CONTRADICTION:
        both = {1: "cannot hold on overlapping slices", 2: "cannot both hold"}
        return f"{names} {both.get(len(ids), 'cannot all hold together')}{where}"
    if code is NEVER_HOLDS:
        return f"{names} can never hold{where}"
    if code is ALWAYS_HOLDS:
        return f"{names} holds{where} whatever the kernels do"
    return f"whether {names} can hold{where} was not decided in the time allowed"
