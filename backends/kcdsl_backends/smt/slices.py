"""Slices and levels: empty or equal slices, and conflicts of levels and actions.

Two clauses about one quantity on overlapping slices conflict if they have the same bound with
different levels or actions, or if the looser bound has the higher level. Two intended patterns are
not reported: a higher level for a slice that lies inside the other, and several bounds with rising
levels on one slice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from kcdsl.diagnostics import Label, Severity
from kcdsl.diagnostics.codes import (
    CONFLICTING_LEVELS,
    EMPTY_SLICE,
    EQUAL_SLICES,
    INVERTED_ACTIONS,
    RADIUS_ZERO,
    SOLVER_UNDECIDED,
    UNUSED_SLICE,
)
from kcdsl.ir.canonical import normal_formula
from kcdsl.ir.escalation import kind
from kcdsl.ir.formulas import walk
from kcdsl.ir.predicates import Inside, Undecided, Value, find_case, is_empty
from kcdsl.ir.printer import region_text
from kcdsl.ir.terms import (
    AllOf,
    Budget,
    Clause,
    Compare,
    Family,
    Number,
    Predicate,
    Program,
    Quantified,
    RegionKind,
    Slice,
    Term,
)
from kcdsl_backends.smt.claims import LEVELS, action_of
from kcdsl_backends.smt.findings import Findings
from kcdsl_backends.smt.solver import Clock, Outcome, emptiness
from kcdsl_certs.encoding.reals import real_text

WHOLE_FIELDS = ("length",)
"""Fields of requests whose values are integers >= 1."""


def check_slices(
    program: Program, inside: Inside, clock: Clock, findings: Findings
) -> frozenset[str]:
    """Report slices that are empty, unused or equal; return the names of the empty ones."""
    empty = _check_empty(program, clock, findings)
    used = {name for clause in program.clauses for name in clause.slices}
    used |= {
        part.region.slice
        for clause in program.clauses
        for part in walk(clause.require)
        if isinstance(part, Quantified)
    }
    for declared in program.slices:
        if declared.name not in used and program.clauses:
            findings.add_plain(
                UNUSED_SLICE,
                f"no clause uses the slice {declared.name!r}",
                declared.span,
                help="name it in a clause, or drop it",
            )
    _check_equal([s for s in program.slices if s.name not in empty], inside, findings)
    return empty


def _check_empty(program: Program, clock: Clock, findings: Findings) -> frozenset[str]:
    empty = set()
    for declared in program.slices:
        shown = is_empty(declared.where) is False  # a request is known, no solver is needed
        match Outcome.SAT if shown else emptiness(declared.where, clock):
            case Outcome.UNSAT:
                empty.add(declared.name)
                findings.add_plain(
                    EMPTY_SLICE,
                    f"no request can belong to the slice {declared.name!r}",
                    declared.span,
                    severity=Severity.ERROR,
                    help="its tests of `where` exclude each other; drop or correct one",
                )
            case Outcome.UNKNOWN:
                findings.add_plain(
                    SOLVER_UNDECIDED,
                    f"whether a request can belong to the slice {declared.name!r} is open",
                    declared.span,
                    help="raise --timeout",
                )
            case Outcome.SAT:
                pass
    return frozenset(empty)


def _check_equal(slices: list[Slice], inside: Inside, findings: Findings) -> None:
    firsts: list[Slice] = []
    for declared in slices:
        same = next(
            (
                other
                for other in firsts
                if inside(declared.name, other.name) and inside(other.name, declared.name)
            ),
            None,
        )
        if same is None:
            firsts.append(declared)
            continue
        findings.add_plain(
            EQUAL_SLICES,
            f"the slices {same.name!r} and {declared.name!r} have the same requests",
            declared.span,
            severity=Severity.NOTE,
            labels=(Label(same.span, "the same requests"),),
            help="use one of them, unless the two names say different things",
        )


def check_regions(program: Program, findings: Findings) -> None:
    """Report balls of radius 0, which are points."""
    for clause in program.clauses:
        for part in walk(clause.require):
            if not isinstance(part, Quantified):
                continue
            region = part.region
            if region.kind is RegionKind.BALL and region.radius == 0:
                findings.add_plain(
                    RADIUS_ZERO,
                    f"{clause.id}: {region_text(region)} is points({region.slice})",
                    region.span,
                    severity=Severity.NOTE,
                    help=f"write points({region.slice}), or a radius above 0",
                )


# --- requests in several slices ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Overlap:
    """An answer whether two slices share requests, and a shared request if one is known."""

    overlaps: bool
    request: Mapping[str, Value] | None = None

    def __str__(self) -> str:
        return request_text(self.request or {})


def overlap(program: Program, a: Slice, b: Slice, clock: Clock) -> Overlap:
    """Return whether two slices overlap; no overlap is claimed if that is undecided."""
    if (a.data or program.data) != (b.data or program.data):
        return Overlap(False)
    both = AllOf((a.where, b.where))
    try:
        case = find_case(both, WHOLE_FIELDS)
    except Undecided:
        return Overlap(emptiness(both, clock) is Outcome.SAT)
    return Overlap(case is not None, case)


def example(where: Predicate) -> Mapping[str, Value] | None:
    """Return a request that satisfies a predicate; None if none is found."""
    try:
        return find_case(where, WHOLE_FIELDS)
    except Undecided:
        return None


def request_text(request: Mapping[str, Value]) -> str:
    """Return the fields of a request as YAML text."""
    fields = ", ".join(f"{name}: {_value(value)}" for name, value in sorted(request.items()))
    return f"{{{fields}}}" if fields else "any request"


def _value(value: Value) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case Fraction():
            return real_text(value)
        case _:
            return json.dumps(value, ensure_ascii=False)


# --- levels and actions ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Bound:
    """A clause that bounds one quantity by a number, on one slice."""

    clause: Clause
    slice: str
    op: str
    number: Number
    action: str | None

    @property
    def rank(self) -> int:
        return LEVELS.index(self.clause.level)

    def looser(self, other: _Bound) -> bool:
        """Return whether this bound allows more than another of the same direction."""
        if self.op[0] == "<":
            return self.number.value > other.number.value
        return self.number.value < other.number.value


def check_levels(program: Program, inside: Inside, clock: Clock, findings: Findings) -> None:
    """Report bounds of one quantity whose levels conflict on requests that belong to both."""
    known: dict[tuple[str, str], Overlap] = {}
    declared = {s.name: s for s in program.slices}

    def shared(a: str, b: str) -> Overlap:
        if (a, b) not in known:
            known[a, b] = overlap(program, declared[a], declared[b], clock)
        return known[a, b]

    reported: set[frozenset[str]] = set()
    for group in _groups(program):
        for a, b in _pairs(group):
            ids = frozenset({a.clause.id, b.clause.id})
            if ids in reported or a.slice not in declared or b.slice not in declared:
                continue
            words = _conflict(a, b, inside)
            if words is None or not shared(a.slice, b.slice).overlaps:
                continue
            reported.add(ids)
            first, second = (a, b) if a.clause.span <= b.clause.span else (b, a)
            request = shared(a.slice, b.slice)
            findings.add_plain(
                CONFLICTING_LEVELS,
                f"{first.clause.id} on {first.slice} and {second.clause.id} on {second.slice} "
                f"give two answers for requests in both: {words}",
                second.clause.span,
                labels=(Label(first.clause.span, f"{first.clause.level}, {first.action}"),),
                notes=() if request.request is None else (f"a request in both: {request}",),
                help="let the slices exclude each other, or give both clauses one level and action",
            )


def _groups(program: Program) -> Iterator[list[_Bound]]:
    """Yield the bounds on the same quantity, one for each slice, number, level and action."""
    found: dict[tuple[Term, str, Budget | None], dict[object, _Bound]] = defaultdict(dict)
    for clause in program.clauses:
        formula = normal_formula(clause.require)
        if not isinstance(formula, Compare) or not isinstance(formula.right, Number):
            continue
        if formula.op == "==":
            continue
        for name in clause.slices:
            action = action_of(program, clause)
            bound = _Bound(clause, name, formula.op, formula.right, action)
            key = (formula.left, formula.op[0], clause.budget)
            same = (name, formula.op, formula.right.value, clause.level, action)
            found[key].setdefault(same, bound)
    return (list(group.values()) for group in found.values() if len(group) > 1)


def _pairs(group: list[_Bound]) -> Iterator[tuple[_Bound, _Bound]]:
    by_slice: dict[str, list[_Bound]] = defaultdict(list)
    for bound in group:
        by_slice[bound.slice].append(bound)
    names = list(by_slice)
    for n, first in enumerate(names):
        for second in names[n + 1 :]:
            for a in by_slice[first]:
                for b in by_slice[second]:
                    if a.clause.id != b.clause.id:
                        yield a, b


def _conflict(a: _Bound, b: _Bound, inside: Inside) -> str | None:
    """Describe the conflict of two bounds on overlapping slices; None if they have none."""
    a_in_b, b_in_a = inside(a.slice, b.slice), inside(b.slice, a.slice)
    for looser, tighter in ((a, b), (b, a)):
        if looser.looser(tighter) and looser.rank > tighter.rank:
            if a_in_b and b_in_a:
                return None
            return (
                f"the looser bound of {looser.clause.id} has the higher level, "
                f"{looser.clause.level} against {tighter.clause.level}"
            )
    if (a.op, a.number.value) != (b.op, b.number.value):
        return None
    if a.rank == b.rank and a.action == b.action:
        return None
    special = (a, b) if a_in_b else (b, a)
    if a_in_b != b_in_a and special[0].rank > special[1].rank:
        return None
    return (
        f"the same bound means {a.clause.level}, {a.action} in {a.clause.id} and "
        f"{b.clause.level}, {b.action} in {b.clause.id}"
    )


def check_actions(program: Program, findings: Findings) -> None:
    """Report a clause whose action is milder than that of a clause of a lower level.

    One of the two must state its own action, and the milder one must not be milder than the policy,
    which is a finding of its own.
    """
    by_family: dict[Family, list[Clause]] = defaultdict(list)
    for clause in program.clauses:
        by_family[clause.family].append(clause)
    for clauses in by_family.values():
        severest: dict[int, tuple[int, Clause]] = {}
        for clause in clauses:
            action, rank = action_of(program, clause), LEVELS.index(clause.level)
            if action is not None and kind(action) > severest.get(rank, (-1, clause))[0]:
                severest[rank] = kind(action), clause
        for clause in clauses:
            _check_action(program, clause, severest, findings)


def _check_action(
    program: Program, clause: Clause, severest: dict[int, tuple[int, Clause]], findings: Findings
) -> None:
    action, rank = action_of(program, clause), LEVELS.index(clause.level)
    if action is None or _is_below_policy(program, clause):
        return
    lower = [severest[n] for n in range(rank) if n in severest]
    other = max(lower, key=lambda found: found[0], default=None)
    if other is None or other[0] <= kind(action):
        return
    below = other[1]
    if clause.action is None and below.action is None:
        return
    findings.add_plain(
        INVERTED_ACTIONS,
        f"{clause.id} is {clause.level} and leads to {action}, milder than "
        f"{action_of(program, below)} of {below.id}, which is {below.level}",
        clause.span,
        labels=(Label(below.span, f"{below.level}, {action_of(program, below)}"),),
        help="give the higher level an action that is at least as severe",
    )


def _is_below_policy(program: Program, clause: Clause) -> bool:
    if clause.action is None:
        return False
    try:
        policy = program.escalation.action(clause.family, clause.level)
    except KeyError:
        return False
    return kind(clause.action) < kind(policy)
