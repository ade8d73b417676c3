"""Slices: which can have no request, which nobody uses, which are equal, which overlap.

A request that lies in two slices is shown by its fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from kcdsl.diagnostics import Label, Severity
from kcdsl.diagnostics.codes import (
    EMPTY_SLICE,
    EQUAL_SLICES,
    RADIUS_ZERO,
    SOLVER_UNDECIDED,
    UNUSED_SLICE,
)
from kcdsl.ir.formulas import walk
from kcdsl.ir.predicates import Inside, Undecided, Value, find_case, is_empty
from kcdsl.ir.printer import region_text
from kcdsl.ir.terms import AllOf, Predicate, Program, Quantified, RegionKind, Slice
from kcdsl_backends.smt.findings import Findings
from kcdsl_backends.smt.predicates import emptiness
from kcdsl_backends.smt.solving import Clock, Outcome
from kcdsl_certs.reals import real_text

WHOLE_FIELDS = ("length",)
"""Fields of requests that hold whole numbers from 1 on."""


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
                f"no clause speaks of the slice {declared.name!r}",
                declared.span,
                help="name it in a clause, or drop it",
            )
    _check_equal([s for s in program.slices if s.name not in empty], inside, findings)
    return empty


def _check_empty(program: Program, clock: Clock, findings: Findings) -> frozenset[str]:
    empty = set()
    for declared in program.slices:
        shown = is_empty(declared.where) is False  # there is a request, no solver is needed
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
    """Note balls of radius 0: they are points."""
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
    """Whether two slices share requests, and one that they share, where one is known."""

    overlaps: bool
    request: Mapping[str, Value] | None = None

    def __str__(self) -> str:
        """Return the request in words."""
        return request_text(self.request or {})


def overlap(program: Program, a: Slice, b: Slice, clock: Clock) -> Overlap:
    """Look for a request in both slices; where that is open, none is claimed."""
    if (a.data or program.data) != (b.data or program.data):
        return Overlap(False)
    both = AllOf((a.where, b.where))
    try:
        case = find_case(both, WHOLE_FIELDS)
    except Undecided:
        return Overlap(emptiness(both, clock) is Outcome.SAT)
    return Overlap(case is not None, case)


def example(where: Predicate) -> Mapping[str, Value] | None:
    """Return a request that satisfies a predicate; None where none is found."""
    try:
        return find_case(where, WHOLE_FIELDS)
    except Undecided:
        return None


def request_text(request: Mapping[str, Value]) -> str:
    """Return the fields of a request as one writes them."""
    fields = ", ".join(f"{name}: {_value(value)}" for name, value in sorted(request.items()))
    return f"{{{fields}}}" if fields else "any request"


def _value(value: Value) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case Fraction():
            return real_text(value)
        case _:
            import json

            return json.dumps(value, ensure_ascii=False)
