"""Premises: the drift clauses from which the bound chain could derive a clause."""

from __future__ import annotations

from collections import defaultdict

from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.fragment import CHAIN_METRICS
from kcdsl.ir.predicates import implies
from kcdsl.ir.terms import (
    Abs,
    AllOf,
    Clause,
    Compare,
    Metric,
    Norm,
    Program,
    Quantified,
    Slice,
    Statistic,
)

_LOGITS_BLOCK = "model"
WITHOUT_LOGITS = frozenset({"bert"})
"""Architectures whose block `model` gives states, from which the bound chain derives nothing."""


class Premises:
    """The clauses of a program that bound the drift of logits (block `model`), by what they cover.

    Each clause of the program is looked at once, when this is made, and each pair of slices at most
    once. What `of` does then depends on the clause it is asked about and on the number of premises,
    not on the other clauses.
    """

    def __init__(self, program: Program) -> None:
        """Take the premises of a program."""
        self._program = program
        self._slices = {item.name: item for item in program.slices}
        self._names: list[str] = []
        self._on: dict[str, set[int]] = defaultdict(set)
        self._known: dict[str, frozenset[int]] = {}
        if program.model.architecture in WITHOUT_LOGITS:
            return
        for clause in program.clauses:
            covered = _covered(clause)
            if covered:
                for name in covered:
                    self._on[name].add(len(self._names))
                self._names.append(clause.id)

    def of(self, clause: Clause) -> tuple[str, ...]:
        """Return the names of the premises of a clause, in the order of the program.

        Each slice of the clause follows by itself, so each needs a premise on a slice that may
        contain it; where one has none, nothing is returned. What is returned are candidates, and
        only the derivation decides.
        """
        if not self._names or not _derivable(clause):
            return ()
        found = [self._covering(name) for name in clause.slices]
        if not all(found):
            return ()
        return tuple(self._names[number] for number in sorted(frozenset().union(*found)))

    def _covering(self, name: str) -> frozenset[int]:
        if name not in self._known:
            outer = (numbers for on, numbers in self._on.items() if self._may_contain(on, name))
            self._known[name] = frozenset().union(*outer)
        return self._known[name]

    def _may_contain(self, outer: str, inner: str) -> bool:
        """Say whether no request is known that is in one slice and not in the other."""
        if outer == inner:
            return True
        a, b = self._slices.get(inner), self._slices.get(outer)
        if a is None or b is None or self._data(a) != self._data(b):
            return False
        return b.where == AllOf() or implies(a.where, b.where) is not False

    def _data(self, item: Slice) -> str | None:
        return item.data or self._program.data


def _derivable(clause: Clause) -> bool:
    """Say whether the bound chain derives statements about all metrics of a clause."""
    terms = tuple(terms_of(clause.require))
    statistics = [term for term in terms if isinstance(term, Statistic)]
    names = {term.name for term in terms if isinstance(term, Metric)}
    if not statistics or not names <= CHAIN_METRICS:
        return False
    return "log_ratio" not in names or all(isinstance(s.of, Abs) for s in statistics)


def _covered(clause: Clause) -> set[str]:
    """Return the slices on which a clause bounds the drift of logits."""
    return {
        part.region.slice
        for part in walk(clause.require)
        if isinstance(part, Quantified) and _bounds_logits(part)
    }


def _bounds_logits(part: Quantified) -> bool:
    return part.quantifier == "forall" and any(
        isinstance(inner, Compare)
        and isinstance(inner.left, Norm)
        and not inner.left.of.measured
        and inner.op in {"<=", "<"}
        and inner.left.of.block == _LOGITS_BLOCK
        for inner in walk(part.body)
    )
