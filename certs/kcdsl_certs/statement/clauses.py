"""Clause results, and which verdicts their own numbers admit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any, TypeVar

from kcdsl_certs.reals import Measured, Rounding, parse_real, real_text
from kcdsl_certs.rejected import Rejected
from kcdsl_certs.statement.quantities import Quantity, Region
from kcdsl_certs.strict import Fields, plain_name

_Member = TypeVar("_Member", bound=StrEnum)


class Verdict(StrEnum):
    """What a certificate says about a clause."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    INCONCLUSIVE = "INCONCLUSIVE"


class Evidence(StrEnum):
    """What a verdict rests on, strongest first."""

    PROOF = "proof"
    PROOF_REAL = "proof-real"
    PROBABILISTIC = "probabilistic"
    CENSUS = "census"
    SAMPLE = "sample"

    @property
    def is_proof(self) -> bool:
        """Say whether the claim is about every input of a region."""
        return self in (Evidence.PROOF, Evidence.PROOF_REAL, Evidence.PROBABILISTIC)

    def is_at_least(self, other: Evidence) -> bool:
        """Say whether this kind is as strong as `other` or stronger."""
        order = list(Evidence)
        return order.index(self) <= order.index(other)


WIDEST = Fraction(1, 2)
"""The largest region around the weights that a result may speak of."""
UPPER, LOWER = ("<=", "<"), (">=", ">")
OPERATORS = (*UPPER, *LOWER, "==")
IMPLIED = "bound-chain/1"
DOMAINS = frozenset({"affine", "interval", "planes"})
"""In which a case of a proof, or a link of one, is derived."""


@dataclass(frozen=True, slots=True)
class ProofReference:
    """A proof object: the digest decides, `path` says where to look (relative, a plain name)."""

    digest: str
    path: str


@dataclass(frozen=True, slots=True)
class CertifiedClause:
    """The result of one comparison `quantity op tau` of one obligation.

    `obligation` is its identifier: a clause on one slice, which for a conjunction has one
    obligation for each part. `tau` and the numbers are in the base unit `unit` (1, ratio, nat, s,
    B, tok/s). `tau`, `value`, `budget` and `alpha` are exact; `bound`, `low` and `high` are doubles
    that were rounded outwards. For `<=` and `<`, `bound` is a certified upper bound and `low` a
    value that a concrete run reached; for `>=` and `>`, `bound` is a lower bound and `high` a value
    reached. In a sampled result `low` and `high` are one-sided confidence limits at level `alpha`.
    `value` is the measured quantity itself. `n` units, called `counted`, were looked at, `exceed`
    of them violated the comparison; a budget None means hard.
    `weights` ρ says that the proof holds for every θ' with |θ' - θ| ≤ ρ|θ|; None: for θ alone.
    """

    obligation: str
    id: str
    quantity: Quantity
    op: str
    tau: Fraction
    unit: str
    evidence: Evidence
    method: str
    verdict: Verdict
    slice: str | None = None
    slice_digest: str | None = None
    region: Region | None = None
    numerics: tuple[str, str] | None = None
    bound: float | None = None
    value: Fraction | None = None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    counted: str | None = None
    exceed: int | None = None
    budget: Fraction | None = None
    alpha: Fraction | None = None
    proof: ProofReference | None = None
    implied_by: str | None = None
    assumptions: tuple[str, ...] = ()
    scope: str | None = None
    reason: str | None = None
    weights: Fraction | None = None

    @property
    def block(self) -> str | None:
        """Return the block of which it bounds the drift or the order; None for other results."""
        return self.quantity.block

    @property
    def label(self) -> str:
        """Return the name used in messages."""
        return self.id if self.slice is None else f"{self.id} [{self.slice}]"

    @property
    def is_hard(self) -> bool:
        """Say whether no exceedance is allowed."""
        return self.budget is None or self.budget == 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats; absent fields are left out."""
        record: dict[str, Any] = {
            "obligation": self.obligation,
            "id": self.id,
            "quantity": self.quantity.to_json(),
            "op": self.op,
            "tau": real_text(self.tau),
            "unit": self.unit,
            "evidence": self.evidence.value,
            "method": self.method,
            "verdict": self.verdict.value,
        }
        for name in ("slice", "n", "counted", "exceed", "scope", "reason"):
            value = getattr(self, name)
            if value is not None:
                record[name] = value
        if self.region is not None:
            record["region"] = self.region.to_json()
        if self.slice_digest is not None:
            record["sliceDigest"] = {"sha256": self.slice_digest}
        if self.numerics is not None:
            train, infer = self.numerics
            record["numerics"] = {"train": {"sha256": train}, "infer": {"sha256": infer}}
        for name in ("bound", "low", "high"):
            number = getattr(self, name)
            if number is not None:
                record[name] = Measured(number, _rounding(name, self.op)).to_json()
        for name in ("value", "budget", "alpha", "weights"):
            exact = getattr(self, name)
            if exact is not None:
                record[name] = real_text(exact)
        if self.proof is not None:
            record["proofDigest"] = {"sha256": self.proof.digest}
            record["proofPath"] = self.proof.path
        if self.implied_by is not None:
            record["impliedBy"] = self.implied_by
        if self.assumptions:
            record["assumptions"] = list(self.assumptions)
        return record

    @staticmethod
    def from_json(value: Any, place: str) -> CertifiedClause:
        """Read the record of `to_json`; unknown fields are refused."""
        fields = Fields.of(value, place)
        op = fields.text("op")
        if op not in OPERATORS:
            raise Rejected("statement/malformed", f"{place}.op is {op!r}")
        clause = CertifiedClause(
            obligation=fields.text("obligation"),
            id=fields.text("id"),
            quantity=Quantity.from_json(fields.raw("quantity"), f"{place}.quantity"),
            op=op,
            tau=parse_real(fields.text("tau")),
            unit=fields.text("unit"),
            evidence=_member(Evidence, fields.text("evidence"), place),
            method=fields.text("method"),
            verdict=_member(Verdict, fields.text("verdict"), place),
            slice=fields.text_or_none("slice"),
            slice_digest=fields.sha256_or_none("sliceDigest"),
            region=Region.from_json(fields.raw("region"), f"{place}.region")
            if "region" in fields.record
            else None,
            numerics=_numerics(fields),
            bound=_measured(fields, "bound", op),
            value=_exact(fields, "value"),
            low=_measured(fields, "low", op),
            high=_measured(fields, "high", op),
            n=fields.integer_or_none("n"),
            counted=fields.text_or_none("counted"),
            exceed=fields.integer_or_none("exceed"),
            budget=_exact(fields, "budget"),
            alpha=_exact(fields, "alpha"),
            proof=_proof(fields, place),
            implied_by=fields.text_or_none("impliedBy"),
            assumptions=fields.texts("assumptions") if "assumptions" in fields.record else (),
            scope=fields.text_or_none("scope"),
            reason=fields.text_or_none("reason"),
            weights=_exact(fields, "weights"),
        )
        fields.done()
        return clause


def _rounding(name: str, op: str) -> Rounding:
    if name == "bound":
        return "down" if op in LOWER else "up"
    return "down" if name == "low" else "up"


def _measured(fields: Fields, name: str, op: str) -> float | None:
    record = fields.raw(name)
    if name not in fields.record:
        return None
    return Measured.from_json(record, _rounding(name, op)).value


def _exact(fields: Fields, name: str) -> Fraction | None:
    text = fields.text_or_none(name)
    return None if text is None else parse_real(text)


def _numerics(fields: Fields) -> tuple[str, str] | None:
    if "numerics" not in fields.record:
        return None
    inner = fields.inner("numerics")
    pair = (inner.sha256("train"), inner.sha256("infer"))
    inner.done()
    return pair


def _proof(fields: Fields, place: str) -> ProofReference | None:
    digest, path = fields.sha256_or_none("proofDigest"), fields.text_or_none("proofPath")
    if digest is None and path is None:
        return None
    if digest is None or path is None:
        raise Rejected("statement/malformed", f"{place} names half a proof")
    return ProofReference(digest, plain_name(path, f"{place}.proofPath"))


def _member(kind: type[_Member], text: str, place: str) -> _Member:
    try:
        return kind(text)
    except ValueError:
        raise Rejected("statement/malformed", f"{place}: {text!r} is no {kind.__name__}") from None


def holds(left: Any, op: str, right: Any) -> bool:
    """Decide `left op right` exactly."""
    match op:
        case "<=":
            return bool(left <= right)
        case "<":
            return bool(left < right)
        case ">=":
            return bool(left >= right)
        case ">":
            return bool(left > right)
        case "==":
            return bool(left == right)
        case _:
            raise Rejected("statement/malformed", f"{op!r} is no comparison")
