"""A weights transfer: results of an earlier certificate, stated for a later checkpoint.

A result whose proof holds in a weight ball holds for every checkpoint in the ball. The statement
names the earlier certificate, the triple with the later checkpoint and, for each result, the
distance by which the weights of its proof have moved (docs/proofs/weights-region.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from fractions import Fraction
from typing import Any

from kcdsl_certs.encoding.reals import real_text
from kcdsl_certs.encoding.records import (
    COUNT,
    DIGEST,
    PLAIN_NAME,
    REAL,
    TEXT,
    Record,
    RecordField,
    many,
    measured,
    one_of,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement.certificate import (
    BODY,
    NAMED,
    TRANSFER_TYPE,
    Evaluator,
    Predicate,
    Scope,
    statement_bytes,
)
from kcdsl_certs.statement.clauses import WIDEST, CertifiedClause, Verdict
from kcdsl_certs.statement.triple import Triple

REASONS = ("no-region", "weights", "states")
"""Why a result is not transferred: its proof is of one checkpoint alone, weights that it reads have
left the region of its proof, or the states that enter the block have left that of its inputs."""


@dataclass(frozen=True, slots=True)
class TransferredResult:
    """A transferred result: `moved` bounds |θ' - θ|/|θ| of the weights that its proof reads.

    `tensor` has the element that moved most. An implied result has neither.
    """

    id: str
    slice: str | None
    weights: Fraction | None = None
    moved: float | None = None
    tensor: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return _CARRIED.write(self)


@dataclass(frozen=True, slots=True)
class ExcludedResult:
    """A result that is not transferred, with the reason; for `weights` with a tensor and
    element."""

    id: str
    slice: str | None
    reason: str
    detail: str
    block: str | None = None
    tensor: str | None = None
    element: tuple[int, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return _LEFT.write(self)


@dataclass(frozen=True, slots=True)
class Transfer:
    """The body of a weights transfer. `base` is the identifier of the earlier certificate, which is
    stored beside it under the file name `path`, with its proofs."""

    triple: Triple
    base: str
    path: str
    stage: str
    issued_at: datetime
    valid_until: datetime
    sequence: int
    carried: tuple[TransferredResult, ...]
    left: tuple[ExcludedResult, ...]
    evaluator: Evaluator
    assumptions: tuple[str, ...] = ()
    non_claims: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data without floats."""
        return _TRANSFER.write(self)


def _carried(**found: Any) -> TransferredResult:
    item = TransferredResult(**found)
    stated = [part is not None for part in (item.weights, item.moved, item.tensor)]
    if any(stated) and not all(stated):
        raise Rejected("statement/malformed", f"{item.id} states a part of how far weights moved")
    if item.weights is None or item.moved is None:
        return item
    if not (0 < item.weights <= WIDEST and 0 <= item.moved <= 1):
        detail = f"{item.id} has moved {item.moved!r} of {real_text(item.weights)}"
        raise Rejected("statement/malformed", detail)
    return item


_CARRIED = Record(
    _carried,
    *NAMED,
    RecordField("weights", REAL, absent=None),
    RecordField("moved", measured("up"), absent=None),
    RecordField("tensor", TEXT, absent=None),
)
_LEFT = Record(
    ExcludedResult,
    *NAMED,
    RecordField("reason", one_of(REASONS)),
    RecordField("detail", TEXT),
    RecordField("block", TEXT, absent=None),
    RecordField("tensor", TEXT, absent=None),
    RecordField("element", many(COUNT), absent=None),
)
_BASE: Record[dict[str, Any]] = Record(
    dict, RecordField("digest", DIGEST, "base"), RecordField("path", PLAIN_NAME)
)
_TRANSFER: Record[Transfer] = Record(
    lambda base, **found: Transfer(**base, **found),
    *BODY,
    RecordField("base", _BASE.codec, get=lambda transfer: transfer),
    RecordField("carried", many(_CARRIED.codec)),
    RecordField("left", many(_LEFT.codec)),
)


def transfer_bytes(transfer: Transfer) -> bytes:
    """Return the canonical statement."""
    return statement_bytes(TRANSFER_TYPE, transfer.triple, transfer.to_json())


def parse_transfer(value: Any) -> Transfer:
    """Read the body of a statement; unknown fields are refused."""
    transfer = _TRANSFER.read(value, "predicate")
    names = [(item.id, item.slice) for item in transfer.carried]
    names += [(item.id, item.slice) for item in transfer.left]
    if len(set(names)) != len(names):
        raise Rejected("statement/malformed", "a result is stated twice")
    if not transfer.carried:
        raise Rejected("transfer/nothing", "no result is transferred")
    return transfer


def transferred_predicate(
    base: Predicate, triple: Triple, names: Sequence[TransferredResult]
) -> Predicate:
    """Return the predicate of a certificate restricted to these results, about another triple.

    Raises Rejected `transfer/unknown`, `transfer/not-passed`, `transfer/no-region` or
    `transfer/rests-on-others` where a result can never be transferred.
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
    item: TransferredResult,
    known: dict[tuple[str, str | None], list[CertifiedClause]],
    wanted: dict[tuple[str, str | None], TransferredResult],
) -> None:
    if clause.verdict is not Verdict.PASSED:
        raise Rejected("transfer/not-passed", f"{clause.label} is {clause.verdict}")
    if clause.implied_by is not None:
        sources = {name for name in known if name[0] == clause.implied_by}
        if item.weights is not None or not sources or not sources <= wanted.keys():
            detail = f"{clause.label} follows from {clause.implied_by}, which is not transferred"
            raise Rejected("transfer/rests-on-others", detail)
        return
    if clause.proof is None or clause.weights is None:
        detail = f"{clause.label} holds for the weights of the earlier checkpoint alone"
        raise Rejected("transfer/no-region", detail)
    if item.weights != clause.weights:
        stated = "none" if item.weights is None else real_text(item.weights)
        detail = f"{clause.label} holds within {real_text(clause.weights)}, {stated} is stated"
        raise Rejected("transfer/region-mismatch", detail)
