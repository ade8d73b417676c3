"""Findings of the checks of a contract, merged into diagnostics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kcdsl.diagnostics import Diagnostic, Label, Severity
from kcdsl.diagnostics.codes import (
    ALWAYS_HOLDS,
    CONTRADICTION,
    NEVER_HOLDS,
    REDUNDANT_CLAUSE,
    SOLVER_UNDECIDED,
    Code,
)
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.ir.terms import Clause
from kcdsl_backends.smt.claims import Claim

_WARNINGS = (ALWAYS_HOLDS, SOLVER_UNDECIDED)
_HELP = {
    CONTRADICTION: "loosen one of them, or apply them to different slices",
    NEVER_HOLDS: "correct its thresholds",
    ALWAYS_HOLDS: "tighten its threshold or drop it",
}
_LISTED = 5


@dataclass(frozen=True, slots=True)
class Implication:
    """A claim, premises that imply it, and the axioms used."""

    claim: Claim
    premises: tuple[Claim, ...]
    reasons: tuple[str, ...]


@dataclass(slots=True)
class Findings:
    """Collects findings; the same clauses on several slices make one diagnostic."""

    source: SourceFile | None
    _plain: list[Diagnostic] = field(default_factory=list)
    _found: dict[tuple[Code, tuple[str, ...]], list[Claim]] = field(default_factory=dict)
    _reasons: dict[tuple[Code, tuple[str, ...]], dict[str, None]] = field(default_factory=dict)
    _open: list[Claim] = field(default_factory=list)
    _last: list[Diagnostic] = field(default_factory=list)

    def add_plain(
        self,
        code: Code,
        message: str,
        span: Span,
        *,
        severity: Severity = Severity.WARNING,
        labels: tuple[Label, ...] = (),
        notes: tuple[str, ...] = (),
        help: str | None = None,
    ) -> None:
        """Add a finding that concerns no claim."""
        found = Diagnostic(code, message, self.source, span, labels, notes, help, severity)
        (self._last if code is REDUNDANT_CLAUSE else self._plain).append(found)

    def add(self, code: Code, claims: Sequence[Claim], reasons: Sequence[str] = ()) -> None:
        """Add a finding about claims with the axioms that it uses."""
        ordered = sorted(claims, key=lambda claim: claim.index)
        ids = tuple(dict.fromkeys(claim.clause.id for claim in ordered))
        self._found.setdefault((code, ids), []).extend(ordered)
        self._reasons.setdefault((code, ids), {}).update(dict.fromkeys(reasons))

    def undecided(self, claims: Sequence[Claim]) -> None:
        """Add claims with an undecided question."""
        self._open.extend(claims)

    def redundant(self, clause: Clause, every: bool, found: Sequence[Implication]) -> None:
        """Add the finding that a clause follows from others, on all slices (`every`) or some."""
        premises = {p.clause.id: p.clause for item in found for p in item.premises}
        own = premises.pop(clause.id, None) is not None
        slices = tuple(dict.fromkeys(item.claim.slice for item in found if item.claim.slice))
        names = list(premises) + (["its other slices"] if own and premises else [])
        by = listed(names) if names else "what it requires of its other slices"
        where = "" if every or not slices else on_slices(slices)
        notes = tuple(dict.fromkeys(reason for item in found for reason in item.reasons))
        self.add_plain(
            REDUNDANT_CLAUSE,
            f"{clause.id} follows{where} from {by}",
            clause.span,
            severity=Severity.WARNING if every else Severity.NOTE,
            labels=tuple(_required(premise) for premise in premises.values()),
            notes=tuple(f"because {note}" for note in notes),
            help=f"drop {clause.id}: no kernel violates it and keeps {by}"
            if every
            else "leave out the slices on which it follows",
        )

    def diagnostics(self) -> Iterator[Diagnostic]:
        """Yield the findings: those without claims first, then those about clauses in order."""
        yield from self._plain
        for (code, ids), claims in self._found.items():
            clauses = {claim.clause.id: claim.clause for claim in claims}
            slices = tuple(dict.fromkeys(claim.slice for claim in claims if claim.slice))
            yield Diagnostic(
                code,
                _message(code, ids, slices),
                self.source,
                clauses[ids[-1]].span,
                labels=tuple(_required(clauses[name]) for name in ids[:-1]),
                notes=tuple(f"because {why}" for why in self._reasons[code, ids]),
                help=_HELP.get(code),
                severity=Severity.WARNING if code in _WARNINGS else Severity.ERROR,
            )
        yield from self._last
        if self._open:
            yield self._undecided()

    def _undecided(self) -> Diagnostic:
        clauses = {claim.clause.id: claim.clause for claim in self._open}
        first = next(iter(clauses.values()))
        slices = tuple(dict.fromkeys(claim.slice for claim in self._open if claim.slice))
        names = list(clauses)
        if len(names) > _LISTED:
            names = [*names[:_LISTED], f"{len(names) - _LISTED} more"]
        verb = "agrees" if len(names) == 1 else "agree"
        return Diagnostic(
            SOLVER_UNDECIDED,
            f"whether {listed(names)} {verb} with the rest{on_slices(slices)} was not decided in "
            "the time allowed",
            self.source,
            first.span,
            help="raise --timeout, or split the requirement",
            severity=Severity.WARNING,
        )


def _required(clause: Clause) -> Label:
    return Label(clause.span, f"{clause.id} requires {clause.text or 'this'}")


def on_slices(slices: Sequence[str]) -> str:
    """Return " on the slice a", " on the slices a, b", or nothing."""
    if not slices:
        return ""
    return f" on the slice{'s' if len(slices) > 1 else ''} {', '.join(slices)}"


def listed(names: Sequence[str]) -> str:
    """Return names in words: "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _message(code: Code, ids: Sequence[str], slices: Sequence[str]) -> str:
    names, where = listed(ids), on_slices(slices)
    if code is CONTRADICTION:
        both = {1: "cannot hold on overlapping slices", 2: "cannot both hold"}
        return f"{names} {both.get(len(ids), 'cannot all hold together')}{where}"
    if code is NEVER_HOLDS:
        return f"{names} can never hold{where}"
    return f"{names} holds{where} whatever the kernels do"
