"""The blame of a clause is there exactly where a fragment does not hold it."""

from __future__ import annotations

from pathlib import Path

from kcdsl.check.compile import compile_contract
from kcdsl.diagnostics.model import Sink
from kcdsl.ir.fragment import fragment_of
from kcdsl.ir.terms import Clause
from kcdsl.route.blame import why_outside, why_uncovered
from kcdsl.route.catalogue import Fragment, catalogue


def clauses(repository: Path) -> list[Clause]:
    found: list[Clause] = []
    for folder in ("grammar/corpus/accepted", "examples"):
        for path in sorted((repository / folder).rglob("*.yaml")):
            program, sink = compile_contract(path)
            assert isinstance(sink, Sink)
            found += program.clauses if program is not None else ()
    assert len(found) > 30
    return found


def test_blame_is_there_exactly_where_the_fragment_does_not_fit(repository: Path) -> None:
    for clause in clauses(repository):
        for fragment in Fragment:
            blame = why_outside(clause, fragment)
            assert (blame is None) == (fragment_of(clause) is fragment), (clause.id, fragment)


def test_the_place_is_a_part_of_the_requirement(repository: Path) -> None:
    for clause in clauses(repository):
        for spec in catalogue():
            blame = why_uncovered(clause, spec.fragments)
            assert (blame is None) == (fragment_of(clause) in spec.fragments)
            if blame is not None:
                assert blame.reason
                assert blame.span.start < blame.span.end
