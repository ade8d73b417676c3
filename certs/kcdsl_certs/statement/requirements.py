"""Requirements of a certificate: the comparisons of a contract as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.records import (
    DIGEST,
    RAW,
    REAL,
    TEXT,
    Codec,
    Record,
    RecordField,
    by_name,
    constant,
    many,
    member,
    one_of,
)
from kcdsl_certs.statement.clauses import OPERATORS, CertifiedClause, Evidence, Verdict
from kcdsl_certs.statement.quantities import QUANTITY, REGION, Quantity, Region
from kcdsl_certs.statement.triple import Triple

SCHEMA = "kcdsl.expectation/3"


@dataclass(frozen=True, slots=True)
class ChainTerms:
    """The inputs of the bound chain for a quantity: the metric inside it, the temperature, and
    the contract's reward_range, advantage_max and score_norm_max, if stated."""

    metric: str
    temperature: Fraction = Fraction(1)
    constants: tuple[tuple[str, Fraction], ...] = ()


@dataclass(frozen=True, slots=True)
class Comparison:
    """`quantity op tau` of an obligation, `tau` in the base unit `unit`, as the contract states it;
    `chain` where the bound chain may bound it."""

    obligation: str
    quantity: Quantity
    op: str
    tau: Fraction
    unit: str = "1"
    chain: ChainTerms | None = None

    def is_of(self, clause: CertifiedClause) -> bool:
        """Return whether the result is about this comparison of this obligation."""
        return (
            clause.obligation == self.obligation
            and clause.quantity == self.quantity
            and clause.op == self.op
            and clause.tau == self.tau
            and clause.unit == self.unit
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return _COMPARISON.write(self)

    def __str__(self) -> str:
        return f"{self.quantity} {self.op} {real_text(self.tau)} [{self.unit}]"


@dataclass(frozen=True, slots=True)
class RequiredClause:
    """A clause on one slice (None where it names none).

    The requirement holds if every comparison of one of the `alternatives` holds (disjunctive normal
    form). Without alternatives its verdict cannot be re-derived, so it is never accepted.
    `inside` names the slices that contain this one, itself included.
    """

    id: str
    slice: str | None
    alternatives: tuple[tuple[Comparison, ...], ...]
    budget: Fraction | None = None
    evidence: Evidence | None = None
    slice_digest: str | None = None
    region: Region | None = None
    inside: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Return the name used in messages."""
        return self.id if self.slice is None else f"{self.id} [{self.slice}]"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return _CLAUSE.write(self)

    @staticmethod
    def from_json(value: Any) -> RequiredClause:
        """Read the record of `to_json`."""
        return _CLAUSE.read(value, "clause")


@dataclass(frozen=True, slots=True)
class SliceSource:
    """The source of the rows of a slice.

    `data` is the name of a file in the contract, `where` the predicate in the form of a slice
    digest, `tokens` the tokenization, and `units` whether each row is one unit.
    """

    data: str
    where: Any
    tokens: str = "other"
    units: str = "rows"


@dataclass(frozen=True, slots=True)
class Expectation:
    """The expectation of a verifier: the triple about to be deployed, the clauses of the contract
    in force, the digests of its data, and the sources of its slices."""

    triple: Triple
    clauses: tuple[RequiredClause, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)
    slices: Mapping[str, SliceSource] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the document for the stand-alone checker."""
        return _EXPECTATION.write(self)

    @staticmethod
    def from_json(value: Any) -> Expectation:
        """Read the document; raises Rejected for anything else."""
        return _EXPECTATION.read(value, "expectation")


_CONSTANTS = by_name(REAL)
_CHAIN = Record(
    ChainTerms,
    RecordField("metric", TEXT),
    RecordField("temperature", REAL),
    RecordField(
        "constants",
        Codec(
            lambda pairs: _CONSTANTS.write(dict(pairs)),
            lambda value, place: tuple(_CONSTANTS.read(value, place).items()),
        ),
    ),
)
_COMPARISON = Record(
    Comparison,
    RecordField("obligation", TEXT),
    RecordField("quantity", QUANTITY),
    RecordField("op", one_of(OPERATORS)),
    RecordField("tau", REAL),
    RecordField("unit", TEXT),
    RecordField("chain", _CHAIN.codec, absent=None),
)
_CLAUSE = Record(
    RequiredClause,
    RecordField("id", TEXT),
    RecordField("alternatives", many(many(_COMPARISON.codec))),
    RecordField("slice", TEXT, absent=None),
    RecordField("region", REGION, absent=None),
    RecordField("inside", many(TEXT), absent=()),
    RecordField("sliceDigest", DIGEST, "slice_digest", None),
    RecordField("budget", REAL, absent=None),
    RecordField("evidence", member(Evidence), absent=None),
)
_SLICE = Record(
    SliceSource,
    RecordField("data", TEXT),
    RecordField("where", RAW),
    RecordField("tokens", TEXT),
    RecordField("units", TEXT),
)
_EXPECTATION = Record(
    lambda schema, **found: Expectation(**found),
    RecordField("schema", constant(SCHEMA, "expectation/malformed"), get=lambda _: SCHEMA),
    RecordField("triple", Codec(Triple.to_json, Triple.from_json)),
    RecordField("clauses", many(_CLAUSE.codec)),
    RecordField("inputs", by_name(DIGEST)),
    RecordField("slices", by_name(_SLICE.codec)),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """The reason why a required clause is not covered."""

    reason: str
    detail: str


def uncovered(
    required: RequiredClause, results: tuple[CertifiedClause, ...]
) -> tuple[Finding, ...]:
    """Return why the results of this clause on this slice do not show it; empty if they do."""
    if not results:
        return (Finding("clause/missing", f"{required.label} is not in the certificate"),)
    if not all(required.alternatives) or not required.alternatives:
        detail = f"{required.label} has a form whose verdict cannot be re-derived"
        return (Finding("clause/not-rederivable", detail),)
    comparisons = [c for part in required.alternatives for c in part]
    found: list[Finding] = []
    for result in results:
        found.extend(_mismatches(required, result, comparisons))
    if found:
        return tuple(found)
    if any(_shown(required, part, results) for part in required.alternatives):
        return ()
    return tuple(_shortfall(required, results))


def _mismatches(
    required: RequiredClause, result: CertifiedClause, comparisons: list[Comparison]
) -> list[Finding]:
    found: list[Finding] = []
    if not any(c.is_of(result) for c in comparisons):
        stated = f"{result.quantity} {result.op} {real_text(result.tau)} [{result.unit}]"
        detail = f"{required.label} states {stated}, the contract {comparisons[0]}"
        found.append(Finding("clause/threshold-mismatch", detail))
    if (result.budget or None) != (required.budget or None) and not result.evidence.is_proof:
        found.append(Finding("clause/budget-mismatch", f"{required.label} states another budget"))
    if required.evidence is not None and not result.evidence.is_at_least(required.evidence):
        detail = f"{required.label} demands {required.evidence}, it rests on {result.evidence}"
        found.append(Finding("clause/evidence-too-weak", detail))
    for name in ("slice_digest", "region"):
        wanted, stated = getattr(required, name), getattr(result, name)
        if wanted is not None and wanted != stated:
            word = name.removesuffix("_digest")
            detail = f"{required.label} is about another {word}"
            found.append(Finding(f"clause/{word}-mismatch", detail))
    return found


def _shown(
    required: RequiredClause, part: tuple[Comparison, ...], results: tuple[CertifiedClause, ...]
) -> bool:
    """Return whether every comparison has results, all of them PASSED.

    All comparisons of a clause share its budget: a unit is beyond if any of them fails, which
    separate counts do not show. With proofs, no unit is beyond.
    """
    for comparison in part:
        found = [r for r in results if comparison.is_of(r)]
        if {r.verdict for r in found} != {Verdict.PASSED}:
            return False
        if required.budget and len(part) > 1 and not all(r.evidence.is_proof for r in found):
            return False
    return bool(part)


def _shortfall(required: RequiredClause, results: tuple[CertifiedClause, ...]) -> list[Finding]:
    found: list[Finding] = []
    for comparison in required.alternatives[0]:
        verdicts = sorted({r.verdict.value for r in results if comparison.is_of(r)})
        if not verdicts:
            detail = f"{required.label}: nothing about {comparison}"
            found.append(Finding("clause/missing", detail))
        elif verdicts != ["PASSED"]:
            detail = f"{required.label} is {' and '.join(verdicts)}"
            found.append(Finding("clause/not-passed", detail))
    if not found:
        detail = f"{required.label}: no alternative is shown by what each result states"
        found.append(Finding("clause/not-passed", detail))
    return found
