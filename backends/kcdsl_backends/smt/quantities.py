"""What the variables of a translation stand for."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Literal

from kcdsl.ir.printer import region_text, term_text
from kcdsl.ir.terms import Region, Statistic, Term

Side = Literal["largest", "smallest"]
LARGEST: Final[Side] = "largest"
SMALLEST: Final[Side] = "smallest"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A measured number on a slice; `kind` is that of a Statistic, or "value".

    `side` says which token stands for its request, "" where only one can.
    """

    slice: str
    kind: str
    q: Fraction | None
    of: Term
    side: Side | Literal[""] = ""

    @property
    def term(self) -> Term:
        """Return the term that is measured."""
        return self.of if self.kind == "value" else Statistic(self.kind, self.of, self.q)

    def __str__(self) -> str:
        """Return the term as the language writes it, and where it is measured."""
        return term_text(self.term) + (f" on {self.slice}" if self.slice else "")


@dataclass(frozen=True, slots=True)
class Witness:
    """An unknown input: the instance of a region, or of one existential quantifier."""

    region: Region
    site: str = ""

    def __str__(self) -> str:
        """Return the input in words."""
        return f"an input of {region_text(self.region)}"
