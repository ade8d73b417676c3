"""A weights transfer: results of an earlier certificate, stated for a later checkpoint.

A result whose proof holds in a region around the weights holds for every checkpoint in it. The
statement names the earlier certificate, the triple with the later checkpoint and, for each result,
how far the weights that its proof reads have moved (docs/weights-region.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fractions import Fraction
from typing import Any

from kcdsl_certs.reals import Measured, parse_real, real_text
from kcdsl_certs.rejected import Rejected
from kcdsl_certs.statement.certificate import (
    STAGES,
    STATEMENT_TYPE,
    SUBJECT_NAME,
    Evaluator,
    Predicate,
    Scope,
    named,
)
from kcdsl_certs.statement.clauses import WIDEST, CertifiedClause, Verdict
from kcdsl_certs.statement.triple import Triple
from kcdsl_certs.strict import Fields, canonical_json, parse_time, plain_name, time_text

TRANSFER_TYPE = "urn:kcdsl:attestation:weights-transfer:v0.1"
REASONS = ("no-region", "weights", "states")
"""Why a result stays behind: its proof is of one checkpoint alone, weights that it reads have left
the region of its proof, or the states that enter the block have left that of its inputs."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A result that goes over: `moved` bounds |θ' - θ|/|θ| of the weights that its proof reads.

    `tensor` holds the element that moved most. A result that follows from another one has neither.
    """

    id: str
    slice: str | None
    weights: Fraction | None = None
    moved: float | None = None
    tensor: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        record = named(self.id, self.slice)
        if self.weights is not None and self.moved is not None and self.tensor is not None:
            record["weights"] = real_text(self.weights)
            record["moved"] = Measured(self.moved, "up").to_json()
            record["tensor"] = self.tensor
        return record


@dataclass(frozen=True, slots=True)
class Left:
    """A result that stays behind, and why; for `weights` with a tensor and an element of it."""

    id: str
    slice: str | None
    reason: str
    detail: str
    block: str | None = None
    tensor: str | None = None
    element: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        record = {**named(self.id, self.slice), "reason": self.reason, "detail": self.detail}
        if self.block is not None:
            record["block"] = self.block
        if self.tensor is not None and self.element is not None:
            record["tensor"], record["element"] = self.tensor, list(self.element)
        return record


@dataclass(frozen=True, slots=True)
class Transfer:
    """The body of a weights transfer. `base` is the identity of the earlier certificate, which lies
    beside it under the plain name `path`, with its proofs."""

    triple: Triple
    base: str
    path: str
    stage: str
    issued_at: datetime
    valid_until: datetime
    sequence: int
    carried: tuple[Carried, ...]
    left: tuple[Left, ...]
    evaluator: Evaluator
    assumptions: tuple[str, ...] = ()
    non_claims: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        return {
            "triple": self.triple.to_json(),
            "base": {"digest": {"sha256": self.base}, "path": self.path},
            "stage": self.stage,
            "issuedAt": time_text(self.issued_at),
            "validUntil": time_text(self.valid_until),
            "sequence": self.sequence,
            "carried": [item.to_json() for item in self.carried],
            "left": [item.to_json() for item in self.left],
            "evaluator": {"id": self.evaluator.id, "version": self.evaluator.version},
            "assumptions": list(self.assumptions),
            "nonClaims": list(self.non_claims),
        }


def transfer_bytes(transfer: Transfer) -> bytes:
    """Return the canonical statement."""
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": SUBJECT_NAME, "digest": {"sha256": transfer.triple.digest}}],
            "predicateType": TRANSFER_TYPE,
            "predicate": transfer.to_json(),
        }
    )


def parse_transfer(value: Any) -> Transfer:
    """Read the body of a statement; unknown fields are refused."""
    fields = Fields.of(value, "predicate")
    base, evaluator = fields.inner("base"), fields.inner("evaluator")
    path, stage = plain_name(base.text("path"), "predicate.base.path"), fields.text("stage")
    if stage not in STAGES:
        raise Rejected("statement/malformed", f"predicate.stage is {stage!r}")
    transfer = Transfer(
        triple=Triple.from_json(fields.raw("triple"), "predicate.triple"),
        base=base.sha256("digest"),
        path=path,
        stage=stage,
        issued_at=parse_time(fields.text("issuedAt")),
        valid_until=parse_time(fields.text("validUntil")),
        sequence=fields.integer("sequence"),
        carried=tuple(_carried(item) for item in fields.items("carried")),
        left=tuple(_left(item) for item in fields.items("left")),
        evaluator=Evaluator(evaluator.text("id"), evaluator.text("version")),
        assumptions=fields.texts("assumptions"),
        non_claims=fields.texts("nonClaims"),
    )
    for part in (base, evaluator, fields):
        part.done()
    names = [(item.id, item.slice) for item in transfer.carried]
    names += [(item.id, item.slice) for item in transfer.left]
    if len(set(names)) != len(names):
        raise Rejected("statement/malformed", "a result goes over or stays behind twice")
    if not transfer.carried:
        raise Rejected("transfer/nothing", "no result goes over")
    return transfer


def _carried(value: Any) -> Carried:
    fields = Fields.of(value, "predicate.carried")
    name = fields.text("id"), fields.text_or_none("slice")
    if "weights" not in fields.record:
        fields.done()
        return Carried(*name)
    rho = parse_real(fields.text("weights"))
    moved = Measured.from_json(fields.raw("moved"), "up").value
    item = Carried(*name, rho, moved, fields.text("tensor"))
    fields.done()
    if not (0 < rho <= WIDEST and 0 <= moved <= 1):
        raise Rejected("statement/malformed", f"{name[0]} has moved {moved!r} of {real_text(rho)}")
    return item


def _left(value: Any) -> Left:
    fields = Fields.of(value, "predicate.left")
    item = Left(
        fields.text("id"),
        fields.text_or_none("slice"),
        fields.text("reason"),
        fields.text("detail"),
        fields.text_or_none("block"),
        fields.text_or_none("tensor"),
        _element(fields) if "element" in fields.record else None,
    )
    fields.done()
    if item.reason not in REASONS:
        raise Rejected("statement/malformed", f"{item.id} stays behind for {item.reason!r}")
    return item


def _element(fields: Fields) -> tuple[int, ...]:
    found = fields.items("element")
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in found):
        raise Rejected("statement/malformed", f"{fields.place}.element is no index")
    return tuple(found)


def carried_over(base: Predicate, triple: Triple, names: Sequence[Carried]) -> Predicate:
    """Return what a certificate says of these results, about another triple.

    Raises Rejected `transfer/unknown`, `transfer/not-passed`, `transfer/no-region` or
    `transfer/rests-on-others` where a result cannot go over, whatever the weights are.
    """
    wanted = {(item.id, item.slice): item for item in names}
    by_name: dict[tuple[str, str | None], list[CertifiedClause]] = {}
    for clause in base.clauses:
        by_name.setdefault((clause.id, clause.slice), []).append(clause)
    for name, item in wanted.items():
        if name not in by_name:
            raise Rejected("transfer/unknown", f"the earlier certificate has no {item.id}")
        for clause in by_name[name]:
            _may_go_over(clause, item, by_name, wanted)
    clauses = tuple(c for c in base.clauses if (c.id, c.slice) in wanted)
    covers = tuple(pair for pair in base.scope.covers if pair in wanted)
    complete = base.scope.complete and covers == base.scope.covers
    return replace(base, triple=triple, clauses=clauses, scope=Scope(complete, covers))


def _may_go_over(
    clause: CertifiedClause,
    item: Carried,
    known: dict[tuple[str, str | None], list[CertifiedClause]],
    wanted: dict[tuple[str, str | None], Carried],
) -> None:
    if clause.verdict is not Verdict.PASSED:
        raise Rejected("transfer/not-passed", f"{clause.label} is {clause.verdict}")
    if clause.implied_by is not None:
        sources = {name for name in known if name[0] == clause.implied_by}
        if item.weights is not None or not sources or not sources <= wanted.keys():
            detail = f"{clause.label} follows from {clause.implied_by}, which does not go over"
            raise Rejected("transfer/rests-on-others", detail)
        return
    if clause.proof is None or clause.weights is None:
        detail = f"{clause.label} holds for the weights of the earlier checkpoint alone"
        raise Rejected("transfer/no-region", detail)
    if item.weights != clause.weights:
        stated = "none" if item.weights is None else real_text(item.weights)
        detail = f"{clause.label} holds within {real_text(clause.weights)}, {stated} is stated"
        raise Rejected("transfer/region-mismatch", detail)
