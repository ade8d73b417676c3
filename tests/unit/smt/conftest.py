"""Contracts built by hand for the tests of the SMT backend."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest

from kcdsl.diagnostics.spans import Span
from kcdsl.ir.terms import (
    AllOf,
    Budget,
    Clause,
    Compare,
    Constants,
    Drift,
    Escalation,
    Family,
    FieldTest,
    Formula,
    KernelRef,
    Level,
    Metric,
    ModelRef,
    Norm,
    Number,
    Program,
    Quantified,
    Region,
    RegionKind,
    Slice,
    Statistic,
    Term,
)

LONG = AllOf((FieldTest("length", ">", Fraction(128)),))
LONGER = AllOf((FieldTest("length", ">", Fraction(512)),))
SLICES = (
    Slice("all"),
    Slice("long", where=LONG),
    Slice("longer", where=LONGER),
    Slice("other", data="other.jsonl", where=LONG),
)
STATED = Constants(Fraction(1), Fraction(2), Fraction(3), Fraction(5))


class Build:
    """Short constructors of terms, clauses and programs."""

    def metric(self, name: str) -> Metric:
        return Metric(name)

    def p(self, percent: int, name: str) -> Statistic:
        return Statistic("quantile", Metric(name), Fraction(percent, 100))

    def stat(self, kind: str, of: str | Term) -> Statistic:
        return Statistic(kind, Metric(of) if isinstance(of, str) else of)

    def compare(self, left: Term, op: str, right: str) -> Compare:
        return Compare(op, left, Number(Fraction(right)))

    def drift(self, block: str, kind: str = "inf") -> Norm:
        return Norm(kind, Drift(block, "x"))

    def every(self, body: Formula, region: Region, quantifier: str = "forall") -> Quantified:
        return Quantified(quantifier, "x", region, body)

    def region(self, name: str = "all", kind: str = "points", radius: str = "0") -> Region:
        return Region(RegionKind(kind), name, Fraction(radius), Span(len(name), 99))

    def clause(
        self,
        id: str,
        require: Formula,
        slices: Sequence[str] = ("all",),
        budget: Budget | None = None,
    ) -> Clause:
        return Clause(
            id,
            Family.NUMERICAL,
            require,
            Level.L2,
            tuple(slices),
            budget,
            text=f"text of {id}",
            span=Span(ord(id[0]), ord(id[0]) + 1),
        )

    def program(
        self,
        *clauses: Clause,
        slices: tuple[Slice, ...] = SLICES,
        constants: Constants = STATED,
        architecture: str | None = "llama",
    ) -> Program:
        return Program(
            "c",
            "1",
            ModelRef("m.safetensors", architecture, None if architecture else "package:factory"),
            KernelRef("a", ()),
            KernelRef("b", ()),
            "data.jsonl",
            slices,
            clauses,
            Escalation((), ()),
            constants,
        )


@pytest.fixture(scope="session")
def build() -> Build:
    """Return the builder."""
    return Build()
