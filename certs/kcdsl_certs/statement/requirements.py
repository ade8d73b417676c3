"""What a certificate must cover: the comparisons of a contract as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kcdsl_certs.reals import parse_real, real_text
from kcdsl_certs.rejected import Rejected
from kcdsl_certs.statement.clauses import OPERATORS, CertifiedClause, Evidence, Verdict
from kcdsl_certs.statement.quantities import Quantity, Region
from kcdsl_certs.statement.triple import Triple
from kcdsl_certs.strict import Fields

SCHEMA = "kcdsl.expectation/3"


@dataclass(frozen=True, slots=True)
class Chain:
    """What the bound chain needs to bound a quantity: the metric inside it, the temperature, and
    those of reward_range, advantage_max and score_norm_max that the contract states."""

    metric: str
    temperature: Fraction = Fraction(1)
    constants: tuple[tuple[str, Fraction], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "metric": self.metric,
            "temperature": real_text(self.temperature),
            "constants": {name: real_text(value) for name, value in self.constants},
        }

    @staticmethod
    def from_json(fields: Fields) -> Chain:
        """Read the record of `to_json`."""
        constants = fields.inner("constants")
        chain = Chain(
            fields.text("metric"),
            parse_real(fields.text("temperature")),
            tuple((name, parse_real(constants.text(name))) for name in constants.record),
        )
        fields.done()
        return chain


@dataclass(frozen=True, slots=True)
class Comparison:
    """`quantity op tau` of an obligation, `tau` in the base unit `unit`, as the contract states it;
    `chain` where the bound chain may bound it."""

    obligation: str
    quantity: Quantity
    op: str
    tau: Fraction
    unit: str = "1"
    chain: Chain | None = None

    def is_of(self, clause: CertifiedClause) -> bool:
        """Say whether the result is about this comparison of this obligation."""
        return (
            clause.obligation == self.obligation
            and clause.quantity == self.quantity
            and clause.op == self.op
            and clause.tau == self.tau
            and clause.unit == self.unit
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        record: dict[str, Any] = {
            "obligation": self.obligation,
            "quantity": self.quantity.to_json(),
            "op": self.op,
            "tau": real_text(self.tau),
            "unit": self.unit,
        }
        if self.chain is not None:
            record["chain"] = self.chain.to_json()
        return record

    def __str__(self) -> str:
        return f"{self.quantity} {self.op} {real_text(self.tau)} [{self.unit}]"


@dataclass(frozen=True, slots=True)
class RequiredClause:
    """A clause on one slice (None where it names none).

    The requirement holds where every comparison of one of the `alternatives` does (disjunctive
    normal form). No alternatives: its verdict cannot be re-derived, so it is never accepted.
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
        record: dict[str, Any] = {
            "id": self.id,
            "alternatives": [[c.to_json() for c in part] for part in self.alternatives],
        }
        if self.slice is not None:
            record["slice"] = self.slice
        if self.region is not None:
            record["region"] = self.region.to_json()
        if self.inside:
            record["inside"] = list(self.inside)
        if self.slice_digest is not None:
            record["sliceDigest"] = {"sha256": self.slice_digest}
        if self.budget is not None:
            record["budget"] = real_text(self.budget)
        if self.evidence is not None:
            record["evidence"] = self.evidence.value
        return record

    @staticmethod
    def from_json(value: Any) -> RequiredClause:
        """Read the record of `to_json`."""
        fields = Fields.of(value, "clause")
        budget, evidence = fields.text_or_none("budget"), fields.text_or_none("evidence")
        if evidence is not None and evidence not in set(Evidence):
            raise Rejected("statement/malformed", f"{evidence!r} is no kind of evidence")
        required = RequiredClause(
            id=fields.text("id"),
            slice=fields.text_or_none("slice"),
            alternatives=tuple(
                tuple(_comparison(item) for item in part) for part in fields.items("alternatives")
            ),
            budget=None if budget is None else parse_real(budget),
            evidence=None if evidence is None else Evidence(evidence),
            slice_digest=fields.sha256_or_none("sliceDigest"),
            region=Region.from_json(fields.raw("region"), "clause.region")
            if "region" in fields.record
            else None,
            inside=fields.texts("inside") if "inside" in fields.record else (),
        )
        fields.done()
        return required


def _comparison(value: Any) -> Comparison:
    fields = Fields.of(value, "comparison")
    comparison = Comparison(
        fields.text("obligation"),
        Quantity.from_json(fields.raw("quantity"), "comparison.quantity"),
        fields.text("op"),
        parse_real(fields.text("tau")),
        fields.text("unit"),
        Chain.from_json(fields.inner("chain")) if "chain" in fields.record else None,
    )
    fields.done()
    if comparison.op not in OPERATORS:
        raise Rejected("statement/malformed", f"{comparison.op!r} is no comparison")
    return comparison


@dataclass(frozen=True, slots=True)
class SliceSource:
    """Where the rows of a slice come from.

    `data` is a file as the contract names it, `where` the predicate as a slice digest has it,
    `tokens` says how text becomes tokens, and `units` whether each row is measured by itself.
    """

    data: str
    where: Any
    tokens: str = "other"
    units: str = "rows"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "data": self.data,
            "where": self.where,
            "tokens": self.tokens,
            "units": self.units,
        }

    @staticmethod
    def from_json(value: Any) -> SliceSource:
        """Read the record of `to_json`."""
        fields = Fields.of(value, "slice")
        source = SliceSource(
            fields.text("data"), fields.raw("where"), fields.text("tokens"), fields.text("units")
        )
        fields.done()
        return source


@dataclass(frozen=True, slots=True)
class Expectation:
    """Everything a verifier knows beforehand: the triple about to be deployed, the clauses of the
    contract in force, the digests of the data that it names, and where its slices come from."""

    triple: Triple
    clauses: tuple[RequiredClause, ...]
    inputs: Mapping[str, str] = field(default_factory=dict)
    slices: Mapping[str, SliceSource] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the document that the stand-alone checker reads."""
        return {
            "schema": SCHEMA,
            "triple": self.triple.to_json(),
            "clauses": [c.to_json() for c in self.clauses],
            "inputs": {name: {"sha256": digest} for name, digest in self.inputs.items()},
            "slices": {name: source.to_json() for name, source in self.slices.items()},
        }

    @staticmethod
    def from_json(value: Any) -> Expectation:
        """Read the document; raises Rejected where it is not one."""
        fields = Fields.of(value, "expectation")
        if fields.text("schema") != SCHEMA:
            raise Rejected("expectation/malformed", f"the schema is not {SCHEMA}")
        inputs, slices = fields.inner("inputs"), fields.inner("slices")
        expectation = Expectation(
            Triple.from_json(fields.raw("triple")),
            tuple(RequiredClause.from_json(item) for item in fields.items("clauses")),
            {name: inputs.sha256(name) for name in inputs.record},
            {name: SliceSource.from_json(slices.raw(name)) for name in slices.record},
        )
        fields.done()
        return expectation


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a required clause is not covered."""

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
    """Every comparison has a result, and no result of it says anything but PASSED.

    A budget is one for all comparisons of a clause: a unit is beyond it where any of them fails,
    which counts of each by itself do not show. Proofs leave no unit beyond.
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
