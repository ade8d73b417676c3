"""A contract over a family of kernels: pairwise agreement and its classes (`kcdsl fleet`).

Plain frozen data, JSON with the schema "kcdsl.fleet/1" (`fleet.schema.json`) and nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kcdsl.exits import Exit
from kcdsl.verdict.records import DocumentRecord, Record
from kcdsl.verdict.studies.convergence import Convergence

MOST_KERNELS = 24
"""The largest number of kernels of a fleet: there are up to 3^(n/3) maximal cliques."""
Agreement = Literal["agree", "disagree", "open"]


@dataclass(frozen=True, slots=True)
class FleetKernel(Record):
    """One kernel: a letter for the matrix, its name, a hint, and the digest of its fingerprint."""

    label: str
    name: str
    digest: str


@dataclass(frozen=True, slots=True)
class Direction(Record):
    """One kernel as inference kernel and another as training kernel: the verdict of the whole
    contract, its certificates, and the first clauses that do not hold."""

    train: str
    infer: str
    verdict: str
    certificates: tuple[str, ...]
    reasons: tuple[str, ...]

    @classmethod
    def of(
        cls, train: str, infer: str, found: Convergence | None, identities: Sequence[str]
    ) -> Direction:
        """Return a direction; it is undecided where `found` is None."""
        if found is None:
            return cls(train, infer, "inconclusive", (), ("no certificate is about it",))
        reasons = tuple(_reason(row) for row in found.rows if row.verdict != "held")
        return cls(train, infer, found.verdict, tuple(identities), reasons)


def _reason(row: Any) -> str:
    where = row.clause if row.slice is None else f"{row.clause} on {row.slice}"
    why = f": {row.reason}" if row.reason else ""
    return f"{where} is {row.verdict}{why}"


@dataclass(frozen=True, slots=True)
class KernelPair(Record):
    """Two kernels by their labels. They agree where the contract holds in both directions, and
    disagree where it is violated in one."""

    derived: ClassVar[tuple[str, ...]] = ("agreement",)

    one: str
    two: str
    directions: tuple[Direction, Direction]

    @property
    def agreement(self) -> Agreement:
        """Return whether they agree; open where a direction is undecided and none is violated."""
        verdicts = {direction.verdict for direction in self.directions}
        if verdicts == {"held"}:
            return "agree"
        return "disagree" if "violated" in verdicts else "open"


@dataclass(frozen=True, slots=True)
class KernelClass(Record):
    """A maximal set of kernels that agree pairwise, with the certificates of the pairs."""

    members: tuple[str, ...]
    digests: tuple[str, ...]
    certificates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CheckedClass(Record):
    """A certificate of a class, and the reason if it is not accepted."""

    derived: ClassVar[tuple[str, ...]] = ("accepted",)

    file: str
    members: tuple[str, ...]
    reason: str = ""
    detail: str = ""

    @property
    def accepted(self) -> bool:
        """Return whether trusted keys signed it, and the certificates of its pairs show it."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class Fleet(DocumentRecord):
    """All kernels, the agreement of every pair, and the classes. `unused` names ignored
    certificates, with reasons; `without` names contracts without a valid certificate, whose
    kernels may be missing here."""

    schema: ClassVar[str] = "kcdsl.fleet/1"
    derived: ClassVar[tuple[str, ...]] = ("classes", "exit")

    contract: Mapping[str, str]
    checkpoint: str
    kernels: tuple[FleetKernel, ...]
    pairs: tuple[KernelPair, ...]
    unused: Mapping[str, str]
    checked: tuple[CheckedClass, ...] = ()
    without: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[KernelClass, ...]:
        """Return the maximal sets of kernels that agree pairwise (maximal cliques).

        Agreement within limits is not transitive, so a kernel may be in several classes. Every
        pair in a class was decided directly, not through a third kernel.
        """
        labels = [kernel.label for kernel in self.kernels]
        neighbours: dict[str, set[str]] = {label: set() for label in labels}
        for pair in self.pairs:
            if pair.agreement == "agree":
                neighbours[pair.one].add(pair.two)
                neighbours[pair.two].add(pair.one)
        found = sorted(_cliques(set(), set(labels), set(), neighbours), key=_largest_first)
        return tuple(self._class(members) for members in found)

    def _class(self, members: tuple[str, ...]) -> KernelClass:
        digests = {kernel.label: kernel.digest for kernel in self.kernels}
        used = [
            identity
            for pair in self.pairs
            if {pair.one, pair.two} <= set(members)
            for direction in pair.directions
            for identity in direction.certificates
        ]
        return KernelClass(members, tuple(digests[m] for m in members), tuple(dict.fromkeys(used)))

    def pair(self, one: str, two: str) -> KernelPair:
        """Return the pair of two labels, in either order."""
        return next(pair for pair in self.pairs if {pair.one, pair.two} == {one, two})

    @property
    def exit(self) -> Exit:
        """Return 4 if a class is not accepted; else 1 if any two kernels disagree, 0 if all agree
        and each contract has a certificate, and 3 otherwise."""
        if not all(one.accepted for one in self.checked):
            return Exit.CERTIFICATE_INVALID
        states = {pair.agreement for pair in self.pairs}
        if "disagree" in states:
            return Exit.VIOLATED
        return Exit.HELD if states == {"agree"} and not self.without else Exit.INCONCLUSIVE


def _cliques(
    clique: set[str], candidates: set[str], done: set[str], neighbours: Mapping[str, set[str]]
) -> Iterator[tuple[str, ...]]:
    """Yield the maximal cliques (Bron and Kerbosch 1973, with a pivot)."""
    if not candidates and not done:
        yield tuple(sorted(clique, key=_place))
        return
    pivot = max(candidates | done, key=lambda label: (len(neighbours[label] & candidates), label))
    for label in sorted(candidates - neighbours[pivot], key=_place):
        near = neighbours[label]
        yield from _cliques(clique | {label}, candidates & near, done & near, neighbours)
        candidates = candidates - {label}
        done = done | {label}


def _place(label: str) -> int:
    return int(label[1:])


def _largest_first(members: tuple[str, ...]) -> tuple[int, tuple[int, ...]]:
    return -len(members), tuple(map(_place, members))


# --- for people -----------------------------------------------------------------------------------


_MOST_REASONS = 3
NOTE = (
    "every pair of a class was decided in both directions; agreement is not transitive, so a"
    " kernel may be in several classes"
)
UNCHECKED = (
    "signed results were read; proofs and evidence were not checked: run `kcdsl check` on each "
    "certificate"
)


def reasons(found: Fleet) -> list[str]:
    """Return the reasons why pairs do not agree, for each direction, and contracts without a
    certificate."""
    lines = [f"{contract}: no certificate about it counts" for contract in found.without]
    for pair in found.pairs:
        for direction in pair.directions:
            if direction.verdict == "held":
                continue
            shown = "; ".join(direction.reasons[:_MOST_REASONS])
            if len(direction.reasons) > _MOST_REASONS:
                shown += f"; and {len(direction.reasons) - _MOST_REASONS} more"
            lines.append(f"{direction.infer} against {direction.train}: {shown}")
    return lines
