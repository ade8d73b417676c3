"""Clause results."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from operator import itemgetter
from typing import Any

from kcdsl_certs.encoding.reals import Rounding
from kcdsl_certs.encoding.records import (
    COUNT,
    DIGEST,
    OBJECT,
    PLAIN_NAME,
    REAL,
    TEXT,
    Record,
    RecordField,
    many,
    measured,
    member,
    one_of,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement.quantities import QUANTITY, REGION, Quantity, Region


class Verdict(StrEnum):
    """The verdict of a certificate on a clause."""

    PASSED = "PASSED"
    FAILED = "FAILED"
    INCONCLUSIVE = "INCONCLUSIVE"


class Evidence(StrEnum):
    """The kinds of evidence, strongest first."""

    PROOF = "proof"
    PROOF_REAL = "proof-real"
    PROBABILISTIC = "probabilistic"
    CENSUS = "census"
    SAMPLE = "sample"

    @property
    def is_proof(self) -> bool:
        """Return whether the claim is about every input of a region."""
        return self in (Evidence.PROOF, Evidence.PROOF_REAL, Evidence.PROBABILISTIC)

    def is_at_least(self, other: Evidence) -> bool:
        """Return whether this kind is as strong as `other` or stronger."""
        order = list(Evidence)
        return order.index(self) <= order.index(other)


WIDEST = Fraction(1, 2)
"""The largest weight ball of a result."""
UPPER, LOWER = ("<=", "<"), (">=", ">")
OPERATORS = (*UPPER, *LOWER, "==")
IMPLIED = "bound-chain/1"
DOMAINS = frozenset({"affine", "interval", "planes", "splits"})
"""Proof domains of the cases of a proof, or of their links."""


@dataclass(frozen=True, slots=True)
class ProofReference:
    """A proof object, identified by its digest; `path` is its location (a plain file name)."""

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
    `value` is the measured quantity. Of `n` units, named `counted`, `exceed` violated the
    comparison; a budget None means hard.
    `weights` ρ: the proof holds for every θ' with |θ' - θ| ≤ ρ|θ|; None: only for θ.
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
        """Return the block whose drift or order it bounds; None for other results."""
        return self.quantity.block

    @property
    def label(self) -> str:
        """Return the name used in messages."""
        return self.id if self.slice is None else f"{self.id} [{self.slice}]"

    @property
    def is_hard(self) -> bool:
        """Return whether no exceedance is allowed."""
        return self.budget is None or self.budget == 0

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats; absent fields are left out."""
        return _RECORDS[self.op in LOWER].write(self)

    @staticmethod
    def from_json(value: Any, place: str) -> CertifiedClause:
        """Read the record of `to_json`; unknown fields are refused."""
        return _RECORDS[OBJECT.read(value, place).get("op") in LOWER].read(value, place)


def _clause(**found: Any) -> CertifiedClause:
    digest, path = found.pop("proof_digest"), found.pop("proof_path")
    if (digest is None) != (path is None):
        raise Rejected("statement/malformed", f"{found['obligation']} names half a proof")
    proof = None if digest is None else ProofReference(digest, path)
    return CertifiedClause(proof=proof, **found)


_KERNELS = Record(
    lambda train, infer: (train, infer),
    RecordField("train", DIGEST, get=itemgetter(0)),
    RecordField("infer", DIGEST, get=itemgetter(1)),
)


def _record(bound: Rounding) -> Record[CertifiedClause]:
    """Return the record of a result with this rounding direction of the bound."""
    optional = [
        *(RecordField(name, TEXT, absent=None) for name in ("slice", "counted", "scope", "reason")),
        *(RecordField(name, COUNT, absent=None) for name in ("n", "exceed")),
        *(RecordField(name, REAL, absent=None) for name in ("value", "budget", "alpha", "weights")),
    ]
    return Record(
        _clause,
        *(RecordField(name, TEXT) for name in ("obligation", "id", "unit", "method")),
        RecordField("quantity", QUANTITY),
        RecordField("op", one_of(OPERATORS)),
        RecordField("tau", REAL),
        RecordField("evidence", member(Evidence)),
        RecordField("verdict", member(Verdict)),
        *optional,
        RecordField("region", REGION, absent=None),
        RecordField("sliceDigest", DIGEST, "slice_digest", None),
        RecordField("numerics", _KERNELS.codec, absent=None),
        RecordField("bound", measured(bound), absent=None),
        RecordField("low", measured("down"), absent=None),
        RecordField("high", measured("up"), absent=None),
        RecordField(
            "proofDigest", DIGEST, "proof_digest", None, lambda c: c.proof and c.proof.digest
        ),
        RecordField(
            "proofPath", PLAIN_NAME, "proof_path", None, lambda c: c.proof and c.proof.path
        ),
        RecordField("impliedBy", TEXT, "implied_by", None),
        RecordField("assumptions", many(TEXT), absent=()),
    )


_RECORDS = {False: _record("up"), True: _record("down")}
"""Records by whether the bound is a lower bound."""


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
