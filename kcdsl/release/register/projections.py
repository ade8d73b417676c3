"""Tables derived from the events, and their update for each kind of event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from sqlalchemy import Connection, insert, select, update

from kcdsl.release.register.events import LARGEST_EVENT, Event, EventKind
from kcdsl.release.register.records import (
    CERTIFICATE,
    PROMOTION,
    REVOCATION,
    RUN,
    SLOT,
    Promotion,
    PromotionState,
    Run,
    Slot,
)
from kcdsl.release.register.schema import (
    certificates,
    promotions,
    revocations,
    runs,
    slots,
    triples,
)
from kcdsl_certs.encoding.records import DIGEST, FLAG, TEXT, Record, RecordField
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_json, strict_load, time_text
from kcdsl_certs.statement import Triple

_Kind = TypeVar("_Kind")
MARK: Record[dict[str, Any]] = Record(
    dict,
    RecordField("run", DIGEST, get=lambda mark: mark["run"]),
    RecordField("trusted", FLAG, get=lambda mark: mark["trusted"]),
    RecordField("reason", TEXT, get=lambda mark: mark["reason"]),
)
"""A change of the trust in a run."""


def apply(connection: Connection, event: Event) -> None:
    """Apply an event to the tables; raises Rejected where it contradicts an earlier one."""
    match event.kind:
        case EventKind.REGISTER:
            if event.number != 1:
                raise Rejected("chain/event", "a register begins once")
        case EventKind.TRIPLE:
            _triple(connection, event)
        case EventKind.CERTIFICATE:
            _certificate(connection, event)
        case EventKind.RUN:
            _run(connection, event)
        case EventKind.RUN_MARK:
            _mark(connection, event)
        case EventKind.PROMOTION:
            _promotion(connection, event)
        case EventKind.REVOCATION:
            _revocation(connection, event)


def text_of(data: Mapping[str, Any]) -> str:
    """Return JSON data as the text of a column."""
    return canonical_json(dict(data)).decode("utf-8")


def read_record(kind: Record[_Kind], column: object) -> _Kind:
    """Return the entry in the text of a column; raises Rejected."""
    if not isinstance(column, str):  # SQLite columns accept any type
        raise Rejected("database/type", "an entry is no text")
    return kind.read(strict_load(column.encode("utf-8"), LARGEST_EVENT), "record")


def _refuse_unknown_triple(connection: Connection, digest: str) -> None:
    if (
        connection.execute(select(triples.c.event).where(triples.c.digest == digest)).first()
        is None
    ):
        raise Rejected("chain/event", f"the triple sha256:{digest} was not recorded before")


def row_of(event: Event, mark: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the row that an event writes, the columns by name: of a triple, a certificate, a run
    with the last `mark` about it, a decision or a revocation. Raises Rejected for other events."""
    columns: dict[str, Any]
    text = text_of(event.data)
    match event.kind:
        case EventKind.TRIPLE:
            triple = Triple.from_json(event.data)
            contract = triple.contract.digest
            columns = {"digest": triple.digest, "contract": contract, "triple": text}
        case EventKind.CERTIFICATE:
            certificate = CERTIFICATE.read(event.data, "data")
            columns = {
                "identity": certificate.identity,
                "triple": certificate.triple,
                "stage": certificate.stage,
                "sequence": certificate.sequence,
                "verdict": certificate.verdict.value,
                "supersedes": certificate.supersedes,
                "record": text,
            }
        case EventKind.RUN:
            run = RUN.read(event.data, "data")
            columns = {"identity": run.identity, "triple": run.triple, "stage": run.stage}
            columns |= _marked(run, mark)
        case EventKind.PROMOTION:
            decided = PROMOTION.read(event.data, "data")
            columns = {
                "slot": decided.slot,
                "version": decided.version,
                "candidate": decided.candidate,
                "state": decided.state.value,
                "time": time_text(event.time),
                "record": text,
            }
        case EventKind.REVOCATION:
            revoked = REVOCATION.read(event.data, "data")
            columns = {"kind": revoked.kind.value, "subject": revoked.subject, "record": text}
        case EventKind.REGISTER | EventKind.RUN_MARK:
            raise Rejected("chain/event", f"an event of the kind {event.kind} writes no row")
    return {"event": event.number, **columns}


def _marked(run: Run, mark: Mapping[str, Any] | None) -> dict[str, Any]:
    said = {} if mark is None else {"trusted": mark["trusted"], "reason": mark["reason"]}
    document = {**run.to_json(), **said}
    return {"trusted": document["trusted"], "record": text_of(document)}


def _triple(connection: Connection, event: Event) -> None:
    connection.execute(insert(triples).values(row_of(event)))


def _certificate(connection: Connection, event: Event) -> None:
    row = row_of(event)
    _refuse_unknown_triple(connection, row["triple"])
    connection.execute(insert(certificates).values(row))


def _run(connection: Connection, event: Event) -> None:
    row = row_of(event)
    _refuse_unknown_triple(connection, row["triple"])
    connection.execute(insert(runs).values(row))


def _mark(connection: Connection, event: Event) -> None:
    mark = MARK.read(event.data, "data")
    of_run = runs.c.identity == mark["run"]
    row = connection.execute(select(runs.c.record).where(of_run)).first()
    if row is None:
        raise Rejected("chain/event", f"the run {mark['run']} was not recorded before")
    changed = _marked(read_record(RUN, row.record), mark)
    connection.execute(update(runs).where(of_run).values(changed))


def _promotion(connection: Connection, event: Event) -> None:
    found = PROMOTION.read(event.data, "data")
    for digest in filter(None, (found.candidate, found.incumbent)):
        _refuse_unknown_triple(connection, digest)
    before = slot_in(connection, found.slot)
    after = slot_after(before, found, event.number)
    connection.execute(insert(promotions).values(row_of(event)))
    row = {
        "event": event.number,
        "version": after.version,
        "triple": after.triple,
        "record": text_of(after.to_json()),
    }
    if before.version == 0:
        connection.execute(insert(slots).values(name=after.name, **row))
        return
    connection.execute(update(slots).where(slots.c.name == after.name).values(row))


def slot_after(before: Slot, promotion: Promotion, number: int) -> Slot:
    """Return the slot after a decision; raises Rejected where it was made for another state."""
    if promotion.version != before.version + 1:
        raise Rejected(
            "slot/stale",
            f"{before.name} has version {before.version}, the decision is about "
            f"{promotion.version - 1}",
        )
    admitted = {promotion.incumbent}
    if promotion.state is not PromotionState.PROMOTED:
        admitted.add(promotion.candidate)
    if before.triple not in admitted:
        live = "nothing" if before.triple is None else f"sha256:{before.triple}"
        raise Rejected("slot/stale", f"live in {before.name} is {live}, another incumbent")
    kept = (before.triple, before.stage, before.certificates, before.promotion)
    match promotion.state:
        case PromotionState.PROMOTED:
            kept = (promotion.candidate, promotion.stage, promotion.certificates, number)
        case PromotionState.ROLLED_BACK if before.triple != promotion.incumbent:
            kept = (promotion.incumbent, promotion.stage, (), number)
        case _:
            pass
    return Slot(before.name, promotion.version, *kept)


def slot_in(connection: Connection, name: str) -> Slot:
    """Return a slot, with version 0 if there was no decision about it."""
    row = connection.execute(select(slots.c.record).where(slots.c.name == name)).first()
    return Slot(name) if row is None else read_record(SLOT, row.record)


def _revocation(connection: Connection, event: Event) -> None:
    connection.execute(insert(revocations).values(row_of(event)))
