"""Clauses that follow from a proved drift: what the bound chain takes and gives."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from kcdsl.ir.obligations import Comparison
from kcdsl.ir.terms import RegionKind


@dataclass(frozen=True, slots=True)
class ProvedDrift:
    """A proved statement: for all x in region(slice): norm(drift(block, x)) <= bound.

    `norm` is "inf", "2" or "span", of each row; `bound` is the certified number, which may be far
    below the clause's threshold. `temperature` is that of the contract.
    """

    clause_id: str
    block: str
    slice: str
    region: RegionKind
    norm: str
    bound: float
    temperature: Fraction = Fraction(1)


@dataclass(frozen=True, slots=True)
class ImpliedBound:
    """One comparison of an implied clause, and the bound that decides it.

    For <= and < `bound` is an upper bound of the quantity, for >= and > a lower one. `metric` is
    the metric inside the quantity, None where it is compound.
    """

    comparison: Comparison
    bound: float
    metric: str | None

    @property
    def quantity(self) -> str:
        """Return the quantity as the language writes it."""
        return self.comparison.text

    @property
    def decides(self) -> bool:
        """Say whether the bound settles the comparison (one alternative of an `or` may not)."""
        return self.comparison.op != "==" and self.comparison.admits(Fraction(self.bound))


@dataclass(frozen=True, slots=True)
class Implied:
    """A clause that holds on a slice because a drift was proved.

    `span` bounds max dz - min dz of the logits (before the division by the temperature), rounded
    up: with the temperature and the contract's constants it is all a checker needs to recompute
    every number. `steps` is the chain for people, `assumptions` what it rests on beside the proof.
    """

    clause_id: str
    slice: str
    by: str
    proof_slice: str
    norm: str
    norm_bound: float
    span: float
    temperature: Fraction
    bounds: tuple[ImpliedBound, ...]
    steps: tuple[str, ...]
    assumptions: tuple[str, ...]
