"""Findings about a contract that need no run of a kernel.

Clauses with the same subject are compared: hard clauses about a slice as a whole, clauses with a
budget of requests about single requests, and with a budget of windows about single windows. At
least 1 - a - b of the units of a slice satisfy two clauses with budgets a and b; so these
contradict each other if no unit can satisfy both and a + b < 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from fractions import Fraction

from kcdsl.diagnostics import Diagnostic
from kcdsl.diagnostics.codes import ALWAYS_HOLDS, CONTRADICTION, NEVER_HOLDS
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.formulas import walk
from kcdsl.ir.tables import expand_tables, table_of
from kcdsl.ir.terms import Clause, Connective, Program
from kcdsl_backends.smt.claims import Claim, claims_of, components, covers, inclusion, lifted
from kcdsl_backends.smt.findings import Findings, Implication
from kcdsl_backends.smt.implication import implied
from kcdsl_backends.smt.slices import check_actions, check_levels, check_regions, check_slices
from kcdsl_backends.smt.solver import Clock, Outcome
from kcdsl_backends.smt.translation import SolverSession, minimal
from kcdsl_backends.smt.vacuity import check_parts, check_vacuous

Report = Callable[[str, int, int], None]
"""Progress callback: name of the stage, steps done, steps in all."""


def consistency(
    program: Program,
    timeout_ms: int = 2000,
    source: SourceFile | None = None,
    total_ms: int | None = None,
    report: Report | None = None,
) -> list[Diagnostic]:
    """Return contradictions, impossible and redundant clauses, dead parts, slices that are empty,
    unused or equal, conflicting levels, and open questions.

    `timeout_ms` limits each question to the solver, `total_ms` all of them. Undecided questions are
    reported with their own code and never count as consistent. Cores are minimal: every
    member is needed. `report` receives the progress.
    """
    clock = Clock(timeout_ms, total_ms)
    findings = Findings(source)
    check_slices(program, inclusion(program, clock), clock, findings)
    check_regions(program, findings)
    check_actions(program, findings)
    check_levels(program, inclusion(program, clock), clock, findings)
    with_tables = frozenset(clause.id for clause in program.clauses if table_of(clause))
    _Contract(
        expand_tables(program), clock, findings, report or (lambda *_: None), with_tables
    ).check()
    return list(findings.diagnostics())


class _Contract:
    """The check of all claims of a program, group by group."""

    def __init__(
        self,
        program: Program,
        clock: Clock,
        findings: Findings,
        report: Report,
        with_tables: frozenset[str],
    ) -> None:
        self.program, self.clock, self.findings, self.report = program, clock, findings, report
        self.inside = inclusion(program, clock)
        self.implied: dict[str, list[Implication]] = defaultdict(list)
        self.checked = set(with_tables)
        self.vacuous = dict.fromkeys(with_tables, False)

    def check(self) -> None:
        """Check every group, then report the clauses that follow from others."""
        found = claims_of(self.program.clauses)
        total, done = sum(map(len, found.values())), 0
        counts: dict[str, int] = defaultdict(int)
        for unit, claims in found.items():
            for claim in claims:
                counts[claim.clause.id] += 1
            extra = [] if not unit else lifted(found[""], unit, total)
            for group in components([*claims, *extra]):
                self.report("clauses", done, total)
                if not all(claim.lifted for claim in group):
                    self._group(unit, group)
                done += sum(not claim.lifted for claim in group)
        self.report("clauses", done, total)
        for clause in {c.id: c for c in self.program.clauses}.values():
            implications = self.implied.get(clause.id)
            if implications:
                every = len(implications) == counts[clause.id]
                self.findings.redundant(clause, every, implications)

    def _group(self, unit: str, claims: Sequence[Claim]) -> None:
        session = SolverSession(self.program, claims, self.inside, self.clock, unit)
        own = [claim for claim in claims if not claim.lifted]
        left = [claim for claim in own if self._is_open(session, claim)]
        consistent = self._contradictions(session, left)
        for claim in consistent:
            self._parts(claim.clause)
        premises = [*consistent, *(claim for claim in claims if claim.lifted)]
        if session.can_hold(premises)[0] is not Outcome.SAT:
            # Claims whose budgets add up to one or more may exclude each other; compare pairs.
            self._one_by_one(session, consistent, premises)
            return
        self._implied(session, premises)

    def _implied(self, session: SolverSession, claims: Sequence[Claim]) -> None:
        found = implied(
            session, claims, covers(self.program), lambda c: self.findings.undecided([c])
        )
        for item in found:
            self.implied[item.claim.clause.id].append(item)

    def _one_by_one(
        self, session: SolverSession, claims: Sequence[Claim], premises: Sequence[Claim]
    ) -> None:
        dropped: set[Claim] = set()
        for claim in reversed(claims):
            for premise in premises:
                pair = [premise, claim]
                if premise in dropped or session.can_hold(pair)[0] is not Outcome.SAT:
                    continue
                found = implied(session, pair, covers(self.program), lambda _: None)
                if any(item.claim == claim for item in found):
                    dropped.add(claim)
                    self.implied[claim.clause.id] += [i for i in found if i.claim == claim]
                    break

    def _parts(self, clause: Clause) -> None:
        """Look for dead parts, once for each clause."""
        if clause.id in self.checked:
            return
        self.checked.add(clause.id)
        if any(isinstance(part, Connective) for part in walk(clause.require)):
            check_parts(self.program, clause, self.inside, self.clock, self.findings)

    def _contradictions(self, session: SolverSession, claims: Sequence[Claim]) -> list[Claim]:
        """Report contradictions; return the claims without one member of each."""
        left = list(claims)
        while len(left) > 1:
            outcome, named = session.can_hold(left)
            match outcome:
                case Outcome.SAT:
                    break
                case Outcome.UNKNOWN:
                    self.findings.undecided(left)
                    return []
                case Outcome.UNSAT:
                    core = minimal(session, [claim for claim in left if claim.name in named])
                    self._conflict(session, core)
                    dropped = core[-1]
                    left.remove(dropped)
                    for other in left:
                        pair = [other, dropped]
                        if other not in core and session.can_hold(pair)[0] is Outcome.UNSAT:
                            self._conflict(session, pair)
        return left

    def _conflict(self, session: SolverSession, core: Sequence[Claim]) -> None:
        if sum((claim.rate for claim in core), Fraction(0)) < 1:
            reasons = session.because([claim.name for claim in core])
            self.findings.add(CONTRADICTION, core, reasons)

    def _is_open(self, session: SolverSession, claim: Claim) -> bool:
        """Return whether the claim can hold and can fail; report it otherwise."""
        match session.can_hold([claim])[0]:
            case Outcome.UNSAT:
                self.findings.add(NEVER_HOLDS, [claim], session.because([claim.name]))
                return False
            case Outcome.UNKNOWN:
                self.findings.undecided([claim])
                return False
            case Outcome.SAT:
                pass
        match session.can_fail(claim):
            case Outcome.UNSAT:
                if not self._is_vacuous(claim.clause):
                    reasons = session.because([f"not {claim.name}"])
                    self.findings.add(ALWAYS_HOLDS, [claim], reasons)
                return False
            case Outcome.UNKNOWN:
                self.findings.undecided([claim])
                return True
            case Outcome.SAT:
                return True

    def _is_vacuous(self, clause: Clause) -> bool:
        """Report why an implication holds whatever is measured, once for each clause."""
        if clause.id not in self.vacuous:
            asked = (self.program, clause, self.inside, self.clock, self.findings)
            self.vacuous[clause.id] = check_vacuous(*asked)
        return self.vacuous[clause.id]
