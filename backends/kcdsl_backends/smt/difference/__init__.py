"""The differences of two contracts, clause by clause and as a whole.

A clause is at least as strict as another if it implies it: on every slice, with its budget, and
with at least its level, action and demand of evidence. z3 decides the implications of requirements
under the axioms, which hold for all kernels; the rest is compared by rank. A contract is at
least as strict as another if it implies every clause of it, by any of its clauses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kcdsl.ir.canonical import digest, normal_formula
from kcdsl.ir.terms import Clause, Program
from kcdsl.verdict.studies.difference import (
    ClauseDifference,
    ClauseStatus,
    ContractName,
    Difference,
    Extent,
    Relation,
    Witness,
    from_implications,
    together,
)
from kcdsl_backends.smt.claims import Claim, covers_between, inclusion, subjects
from kcdsl_backends.smt.difference.contracts import (
    ContextChanges,
    Merged,
    consequences,
    context_of,
    merge,
    stated,
    text_of,
)
from kcdsl_backends.smt.difference.models import Sides, witness_of
from kcdsl_backends.smt.findings import listed
from kcdsl_backends.smt.implication import Answer, Pool
from kcdsl_backends.smt.solver import Clock, Outcome

Report = Callable[[str, int, int], None]
OLD, NEW = "old", "new"
_WAIVED = ("its budget lets all units fail",)


def difference(
    old: Program,
    new: Program,
    timeout_ms: int = 2000,
    total_ms: int | None = None,
    report: Report | None = None,
) -> Difference:
    """Return how `new` differs from `old`.

    `timeout_ms` limits each question to the solver, `total_ms` all of them; an undecided question
    makes the relation undecided, never equal or stricter. `report` receives the progress.
    """
    clock = Clock(timeout_ms, total_ms)
    context = context_of(old, new)
    comparison = _Comparison(old, new, merge(old, new, clock), context, clock)
    clauses = comparison.clauses(report or (lambda stage, done, total: None))
    return Difference(
        ContractName(old.name, old.version, f"sha256:{digest(old)}"),
        ContractName(new.name, new.version, f"sha256:{digest(new)}"),
        together(
            (
                *(comparison.contribution(item) for item in clauses),
                *(change.relation for change in context.changes if change.relation is not None),
            )
        ),
        clauses,
        context.changes,
    )


@dataclass(slots=True)
class _Comparison:
    """Both programs, their clauses by name, and the solver questions about them."""

    old: Program
    new: Program
    merged: Merged
    context: ContextChanges
    clock: Clock
    pool: Pool = field(init=False)
    before: dict[str, list[Clause]] = field(init=False)
    after: dict[str, list[Clause]] = field(init=False)
    stated_old: dict[str, Clause] = field(init=False)
    stated_new: dict[str, Clause] = field(init=False)
    renamed: dict[str, str] = field(init=False)
    """New name -> old name."""
    kept: set[str] = field(default_factory=set)
    """Old clauses that the new contract implies although its clause of that name is weaker."""

    def __post_init__(self) -> None:
        self.before, self.after = _by_id(self.merged.old), _by_id(self.merged.new)
        self.stated_old = {c.id: c for c in self.old.clauses}
        self.stated_new = {c.id: c for c in self.new.clauses}
        self.renamed = self._find_renamed()
        asked = {(OLD, name) for name in self.before if not self._is_untouched(name)}
        asked |= {(NEW, name) for name in self.after if not self._is_untouched(name)}
        asked -= {(NEW, name) for name in self.renamed}
        asked -= {(OLD, name) for name in self.renamed.values()}
        sides = [(OLD, c) for c in self.merged.old] + [(NEW, c) for c in self.merged.new]
        inside = inclusion(self.merged.program, self.clock)
        self.pool = Pool(self.merged.program, sides, inside, self.clock, frozenset(asked))

    def clauses(self, report: Report) -> tuple[ClauseDifference, ...]:
        """Return the differences of new clauses in order, then of removed ones."""
        old_names = set(self.renamed.values())
        gone = [c.id for c in self.old.clauses if c.id not in self.after and c.id not in old_names]
        total, found = len(self.new.clauses) + len(gone), []
        for n, clause in enumerate(self.new.clauses):
            report("clauses", n, total)
            if clause.id in self.before:
                found.append(self._both(clause.id))
            elif clause.id in self.renamed:
                found.append(self._renamed(clause.id))
            else:
                found.append(self._added(clause.id))
        for n, name in enumerate(gone):
            report("clauses", len(self.new.clauses) + n, total)
            found.append(self._removed(name))
        report("clauses", total, total)
        return tuple(found)

    def contribution(self, item: ClauseDifference) -> Relation:
        """Return what the difference of a clause contributes to the relation of the contracts."""
        if (item.old_id or item.id) not in self.kept or item.status is not ClauseStatus.BOTH:
            return item.relation
        return Relation.EQUAL if item.relation is Relation.WEAKER else Relation.STRICTER

    # --- one clause -------------------------------------------------------------------------

    def _both(self, name: str) -> ClauseDifference:
        old, new = self.stated_old[name], self.stated_new[name]
        found = ClauseDifference(
            name, ClauseStatus.BOTH, Relation.EQUAL, name, text_of(old), text_of(new)
        )
        altering = self.context.altering(old) or self.context.altering(new)
        others = tuple(consequences(self.old, old, self.new, new))
        witness: Witness | None = None
        if altering:
            demand = Relation.INCOMPARABLE
            others = (*others, *altering)
        elif self._is_same(name):
            demand = Relation.EQUAL
        else:
            forward = self._ask(OLD, name, NEW, [name])
            backward = self._ask(NEW, name, OLD, [name])
            demand = from_implications(forward.follows, backward.follows)
            witness = self._witness(name, forward)
        told = stated(self.old, old, self.new, new, demand)
        relation = together((demand, *(c.relation for c in others if c.relation is not None)))
        found = replace(found, relation=relation, changes=(*told, *others), witness=witness)
        if altering or not relation.is_finding:
            return found
        return self._with_implication(found, name)

    def _renamed(self, name: str) -> ClauseDifference:
        old, new = self.renamed[name], self.stated_new[name]
        altering = self.context.altering(new)
        return ClauseDifference(
            name,
            ClauseStatus.RENAMED,
            Relation.INCOMPARABLE if altering else Relation.EQUAL,
            old,
            text_of(self.stated_old[old]),
            text_of(new),
            altering,
        )

    def _removed(self, name: str) -> ClauseDifference:
        old = self.stated_old[name]
        found = ClauseDifference(name, ClauseStatus.REMOVED, Relation.WEAKER, name, text_of(old))
        if _is_waived(self.before[name]):
            return replace(found, relation=Relation.EQUAL, because=_WAIVED)
        kept = self._with_implication(found, name) if not self.context.altering(old) else found
        if kept.implied_by or kept.because or kept.relation is not Relation.WEAKER:
            return kept
        return replace(kept, witness=self._witness(name, self._ask(OLD, name, NEW, [])))

    def _witness(self, name: str, alone: Answer) -> Witness | None:
        """Return values that violate a clause of OLD and satisfy all of NEW, or else only the
        clause of that name in NEW (`alone`); None if neither is found."""
        if alone.refuted is None:
            return None
        whole = self._ask(OLD, name, NEW, frozenset(self.after)).refuted
        if whole is not None:
            asked = {premise.clause.id for premise in whole.premises}
            extent = Extent.UNIT if self._related(name) - asked else Extent.CONTRACT
            if name in asked or name not in self.after:
                sides = Sides("NEW", "OLD", extent)
                found = witness_of(self.merged.program, whole, sides, frozenset({name}))
                if found is not None:
                    return found
        if not alone.refuted.premises:
            return None
        return witness_of(self.merged.program, alone.refuted, Sides("NEW", "OLD", Extent.CLAUSE))

    def _related(self, name: str) -> set[str]:
        """Return the new clauses that share subjects with an old one."""
        own = frozenset().union(*(subjects(clause) for clause in self.before[name]))
        return {
            clause.id
            for clause in self.merged.new
            if not _is_waived([clause]) and own & subjects(clause)
        }

    def _with_implication(self, found: ClauseDifference, name: str) -> ClauseDifference:
        """Add the premises if the whole new contract still implies an old clause."""
        answer = self._ask(OLD, name, NEW, None)
        if answer.follows is None and found.relation is Relation.WEAKER and not found.changes:
            return replace(found, relation=Relation.UNDECIDED)
        if not answer.follows or not self._agree(answer.premises):
            return self._with_note(found, name)
        self.kept.add(name)
        by = _names(answer.premises)
        relation = Relation.EQUAL if found.status is ClauseStatus.REMOVED else found.relation
        return replace(
            found, relation=relation, implied_by=by, because=answer.reasons, witness=None
        )

    def _with_note(self, found: ClauseDifference, name: str) -> ClauseDifference:
        """Add a note if new clauses imply the requirement with other consequences."""
        answer = self._ask(OLD, name, NEW, frozenset(self.after) - {name})
        by = _names(answer.premises)
        altering = any(self.context.altering(self.stated_new[other]) for other in by)
        if not answer.follows or not by or altering or not self._agree(answer.premises):
            return found
        verb = "demands" if len(by) == 1 else "demand"
        told = f"{listed(by)} still {verb} it, with other consequences"
        return replace(found, because=(told,))

    def _added(self, name: str) -> ClauseDifference:
        new = self.stated_new[name]
        found = ClauseDifference(
            name, ClauseStatus.ADDED, Relation.STRICTER, None, None, text_of(new)
        )
        if _is_waived(self.after[name]):
            return replace(found, relation=Relation.EQUAL, because=_WAIVED)
        if self.context.altering(new):
            return found
        answer = self._ask(NEW, name, OLD, None)
        if answer.follows and self._agree(answer.premises):
            return replace(
                found,
                relation=Relation.EQUAL,
                implied_by=_names(answer.premises),
                because=answer.reasons,
            )
        return found

    # --- questions --------------------------------------------------------------------------

    def _ask(self, side: str, name: str, others: str, ids: Collection[str] | None) -> Answer:
        """Decide whether a clause follows from clauses of the other side: those in `ids`, or all
        whose consequences cover it (None)."""
        own, other = (self.old, self.new) if side == OLD else (self.new, self.old)
        stated_by = self.stated_old if side == OLD else self.stated_new
        clause = stated_by[name]
        covers = covers_between(other, own)

        def may(premise: Clause, _: Clause) -> bool:
            return ids is not None or (
                covers(premise, clause) and not self.context.altering(premise)
            )

        return self.pool.follow(self.pool.of(side, [name]), self.pool.of(others, ids), may)

    def _agree(self, premises: Iterable[Claim]) -> bool:
        """Return whether premises are jointly satisfiable; others would imply everything."""
        by_session: dict[int, list[Claim]] = {}
        for premise in premises:
            by_session.setdefault(id(self.pool.sessions[premise]), []).append(premise)
        return all(
            self.pool.sessions[group[0]].can_hold(group)[0] is Outcome.SAT
            for group in by_session.values()
        )

    def _is_same(self, name: str) -> bool:
        """Return whether the clauses of this name in both contracts have the same normal form."""
        if name not in self.before or name not in self.after:
            return False
        return _demands(self.before[name]) == _demands(self.after[name])

    def _is_untouched(self, name: str) -> bool:
        """Return whether a clause has the same normal form and consequences in both contracts."""
        if not self._is_same(name):
            return False
        old, new = self.stated_old[name], self.stated_new[name]
        return not any(consequences(self.old, old, self.new, new))

    def _find_renamed(self) -> dict[str, str]:
        """Return new clauses that are renamed old ones, as new name -> old name."""
        gone = {
            name: _demands(clauses)
            for name, clauses in self.before.items()
            if name not in self.after
        }
        found: dict[str, str] = {}
        for name, clauses in self.after.items():
            if name in self.before:
                continue
            new, demands = self.stated_new[name], _demands(clauses)
            for old_name, old_demands in gone.items():
                old = self.stated_old[old_name]
                same = old_demands == demands
                same = same and not any(consequences(self.old, old, self.new, new))
                if same and old_name not in found.values():
                    found[name] = old_name
                    break
        return found


def _is_waived(clauses: Sequence[Clause]) -> bool:
    return all(c.budget is not None and c.budget.rate >= 1 for c in clauses)


def _by_id(clauses: Iterable[Clause]) -> dict[str, list[Clause]]:
    found: dict[str, list[Clause]] = {}
    for clause in clauses:
        found.setdefault(clause.id, []).append(clause)
    return found


def _demands(clauses: Sequence[Clause]) -> frozenset[object]:
    """Return normal form, slices and budget of clauses, for comparison."""
    return frozenset((normal_formula(c.require), frozenset(c.slices), c.budget) for c in clauses)


def _names(premises: Iterable[Claim]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(premise.clause.id for premise in premises))
