"""Queries of a register: entries by key, and the status of a certificate.

Each row that is read is compared with the event that wrote it, and a changed row is refused.
Removed rows are found by counts (`refuse_changed`); an audit verifies the whole chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import (
    Connection,
    FromClause,
    Row,
    Select,
    bindparam,
    func,
    literal,
    select,
    union_all,
)

from kcdsl.release.register.events import EventKind, hash_of, parse_event
from kcdsl.release.register.projections import MARK, read_record, row_of
from kcdsl.release.register.records import (
    CERTIFICATE,
    PROMOTION,
    REVOCATION,
    RUN,
    SLOT,
    Certificate,
    CertificateStatus,
    Promotion,
    PromotionState,
    Revocation,
    Revoked,
    Run,
    Slot,
    Standing,
)
from kcdsl.release.register.schema import (
    NOT_PASSED,
    certificates,
    events,
    head,
    promotions,
    revocations,
    runs,
    slots,
    triples,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import parse_time, strict_load
from kcdsl_certs.statement import Triple, Verdict

_LARGEST = 4 * 1024 * 1024


def _entries(table: FromClause) -> Select[Any]:
    """Return the query of the rows of a table, each with the event that it names."""
    said = events.c.body.label("said"), events.c.hash.label("said_hash")
    return select(table, *said).outerjoin(events, events.c.number == table.c.event)


def _confirmed(row: Row[Any], marks: Mapping[str, Mapping[str, Any]] | None = None) -> Row[Any]:
    """Return a row of `_entries`; raises Rejected unless its event says all of it."""
    body = None if row.said is None else bytes(row.said)
    if body is None or hash_of(body) != row.said_hash:
        raise Rejected("database/row", f"event {row.event} is not there as it was recorded")
    wanted = row_of(parse_event(body), None if marks is None else marks.get(row.identity))
    if any(getattr(row, name, None) != value for name, value in wanted.items()):
        raise Rejected("database/row", f"a row holds something else than event {row.event} says")
    return row


_BY_IDENTITY = _entries(certificates).where(certificates.c.identity == bindparam("identity"))
_REVOKED = _entries(revocations).where(
    revocations.c.subject.in_(bindparam("subjects", expanding=True))
)
_FAILED_LATER = (
    select(literal(0).label("place"), certificates)
    .where(
        certificates.c.triple == bindparam("triple"),
        certificates.c.stage == bindparam("stage"),
        certificates.c.sequence > bindparam("sequence"),
        NOT_PASSED,
    )
    .order_by(certificates.c.sequence.desc())
    .limit(1)
)
_SUPERSEDING = (
    select(literal(1).label("place"), certificates)
    .where(certificates.c.supersedes == bindparam("identity"))
    .order_by(certificates.c.verdict == Verdict.PASSED.value, certificates.c.event.desc())
    .limit(1)
)
_BOTH = union_all(select(_FAILED_LATER.subquery()), select(_SUPERSEDING.subquery())).subquery()
_NEWER = _entries(_BOTH).order_by(_BOTH.c.place).limit(1)
"""The newest failure, else the explicit successor, in one query."""


def certificate_in(connection: Connection, identity: str) -> Certificate | None:
    """Return a certificate by its identifier."""
    row = connection.execute(_BY_IDENTITY, {"identity": identity}).first()
    return None if row is None else _certificate(row)


def _certificate(row: Row[Any]) -> Certificate:
    return replace(read_record(CERTIFICATE, _confirmed(row).record), number=row.event)


def certificates_in(
    connection: Connection, triple: str | None, stage: str | None
) -> Iterator[Certificate]:
    """Yield certificates, in the order in which they were recorded."""
    wanted = _filtered(_entries(certificates), certificates.c, triple=triple, stage=stage)
    yield from map(_certificate, connection.execute(wanted.order_by(certificates.c.event)))


def _filtered(query: Select[Any], columns: Any, **wanted: str | None) -> Select[Any]:
    for name, found in wanted.items():
        if found is not None:
            query = query.where(getattr(columns, name) == found)
    return query


def triple_in(connection: Connection, digest: str) -> Triple | None:
    """Return a triple by its digest, with the names and fingerprints that it was recorded with."""
    row = connection.execute(_entries(triples).where(triples.c.digest == digest)).first()
    return None if row is None else _triple(row)


def _triple(row: Row[Any]) -> Triple:
    return Triple.from_json(strict_load(_confirmed(row).triple.encode("utf-8"), _LARGEST))


def triples_in(connection: Connection) -> Iterator[Triple]:
    """Yield triples, in the order in which they were recorded."""
    yield from map(_triple, connection.execute(_entries(triples).order_by(triples.c.event)))


def run_in(connection: Connection, identity: str) -> Run | None:
    """Return a run by its identity."""
    row = connection.execute(_entries(runs).where(runs.c.identity == identity)).first()
    return None if row is None else _run(row, _marks(connection))


def _run(row: Row[Any], marks: Mapping[str, Mapping[str, Any]]) -> Run:
    return replace(read_record(RUN, _confirmed(row, marks).record), number=row.event)


def _marks(connection: Connection) -> dict[str, Mapping[str, Any]]:
    """Return the last mark about each run that was marked."""
    wanted = select(events.c.body).where(events.c.kind == EventKind.RUN_MARK.value)
    found = connection.execute(wanted.order_by(events.c.number)).scalars()
    marks = (MARK.read(parse_event(bytes(body)).data, "mark") for body in found)
    return {mark["run"]: mark for mark in marks}


def runs_in(
    connection: Connection, triple: str | None, stage: str | None, trusted: bool | None
) -> Iterator[Run]:
    """Yield runs, in the order in which they were recorded."""
    marks = _marks(connection)
    wanted = _filtered(_entries(runs), runs.c, triple=triple, stage=stage)
    if trusted is not None:
        marked = [run for run, mark in marks.items() if mark["trusted"] is trusted]
        wanted = wanted.where((runs.c.trusted == trusted) | runs.c.identity.in_(marked))
    for row in connection.execute(wanted.order_by(runs.c.event)):
        yield _run(row, marks)


def promotions_in(
    connection: Connection, slot: str | None, candidate: str | None
) -> Iterator[Promotion]:
    """Yield decisions, in the order in which they were recorded."""
    wanted = _filtered(_entries(promotions), promotions.c, slot=slot, candidate=candidate)
    for row in connection.execute(wanted.order_by(promotions.c.event)):
        found = read_record(PROMOTION, _confirmed(row).record)
        yield replace(found, number=row.event, at=parse_time(row.time))


def evidence_elsewhere(
    connection: Connection, slot: str, candidate: str
) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield slot, candidate and evidence digests of each decision about another candidate or in
    another slot, as its event says; a changed row hides none."""
    wanted = select(events.c.body).where(events.c.kind == EventKind.PROMOTION.value)
    for body in connection.execute(wanted.order_by(events.c.number)).scalars():
        each = PROMOTION.read(parse_event(bytes(body)).data, "data")
        if (each.slot, each.candidate) != (slot, candidate):
            yield each.slot, each.candidate, frozenset(each.evidence)


def slots_in(connection: Connection) -> Iterator[Slot]:
    """Yield every slot, by name."""
    for row in connection.execute(_entries(slots)):
        yield _slot(connection, row)


def slot_in(connection: Connection, name: str) -> Slot:
    """Return a slot; one of version 0 where nothing was decided about it."""
    row = connection.execute(_entries(slots).where(slots.c.name == name)).first()
    version = 0 if row is None else row.version
    newer = (promotions.c.slot == name) & (promotions.c.version > version)
    if connection.execute(select(promotions.c.event).where(newer).limit(1)).first() is not None:
        raise Rejected("database/row", f"a decision about {name} came after its state")
    return Slot(name) if row is None else _slot(connection, row)


def _slot(connection: Connection, row: Row[Any]) -> Slot:
    """Return the slot in a row; raises Rejected unless its last decision, and the one that made its
    triple live, say it."""
    found = read_record(SLOT, row.record)
    columns = (row.name, row.version, row.triple)
    numbers = {row.event, found.promotion} - {0}
    wanted = _entries(promotions).where(promotions.c.event.in_(numbers))
    decided = {
        each.event: read_record(PROMOTION, _confirmed(each).record)
        for each in connection.execute(wanted)
    }
    last, made = decided.get(row.event), decided.get(found.promotion)
    if (
        columns != (found.name, found.version, found.triple)
        or last is None
        or (last.slot, last.version) != (found.name, found.version)
        or not _follows(found, last, made)
    ):
        raise Rejected("database/row", f"{row.name} is not as its decisions left it")
    return found


def _follows(slot: Slot, last: Promotion, made: Promotion | None) -> bool:
    """Return whether a slot agrees with its last decision and with `made`, which made it live."""
    if last.state is PromotionState.PROMOTED and slot.triple != last.candidate:
        return False
    if last.state is PromotionState.ROLLED_BACK and slot.triple != last.incumbent:
        return False
    if slot.triple not in (last.candidate, last.incumbent):
        return False
    if made is None:
        return (slot.triple, slot.promotion) == (None, 0)
    back = made.state is PromotionState.ROLLED_BACK
    live = (made.incumbent, ()) if back else (made.candidate, made.certificates)
    promoted = back or made.state is PromotionState.PROMOTED
    return promoted and made.slot == slot.name and live == (slot.triple, slot.certificates)


def revocations_in(connection: Connection) -> Iterator[Revocation]:
    """Yield revocations, in the order in which they were recorded."""
    for row in connection.execute(_entries(revocations).order_by(revocations.c.event)):
        yield _revocation(row)


def _revocation(row: Row[Any]) -> Revocation:
    return replace(read_record(REVOCATION, _confirmed(row).record), number=row.event)


def revocation_in(connection: Connection, kind: Revoked, subject: str) -> Revocation | None:
    """Return the revocation of a certificate or a key."""
    wanted = (revocations.c.kind == kind.value) & (revocations.c.subject == subject)
    row = connection.execute(_entries(revocations).where(wanted)).first()
    return None if row is None else _revocation(row)


# --- changes --------------------------------------------------------------------------------------

_WRITTEN = (triples, certificates, runs, promotions, revocations)
"""The tables to which an event adds one row."""


def refuse_changed(connection: Connection, triple: str) -> None:
    """Raise Rejected where rows were removed, or where a certificate of a triple or a revocation is
    not as its event says: what would hide a failure.

    It does not read the whole chain, as an audit does.
    """
    without = select(func.count()).where(
        events.c.kind.in_((EventKind.REGISTER.value, EventKind.RUN_MARK.value))
    )
    counts = [select(func.count()).select_from(table).scalar_subquery() for table in _WRITTEN]
    rows = sum(counts, without.scalar_subquery())
    last = select(func.max(events.c.number)).scalar_subquery()
    number, there, stated = connection.execute(select(last, rows, head.c.number)).one()
    if not number == there == stated:
        detail = f"{number} events and a head at {stated} have {there} rows"
        raise Rejected("database/row", detail)
    for _ in certificates_in(connection, triple, None):
        pass
    for _ in revocations_in(connection):
        pass


# --- standing -------------------------------------------------------------------------------------


def status_in(connection: Connection, identity: str, moment: datetime) -> CertificateStatus:
    """Return the status of a certificate; `moment` is only compared with its validity period.

    All recorded events count, at whatever time they were recorded. A newer failed certificate
    counts even if it was revoked: only a newer certificate that passes replaces it.
    """
    found = certificate_in(connection, identity)

    def status(standing: Standing, detail: str = "", by: str | None = None) -> CertificateStatus:
        return CertificateStatus(identity, standing, detail, by, found)

    keys = () if found is None else found.signers
    revoked = _revoked(connection, (identity, *keys))
    if (Revoked.CERTIFICATE, identity) in revoked:
        why = revoked[Revoked.CERTIFICATE, identity].reason
        return status(Standing.REVOKED, f"revoked: {why}", identity)
    if found is None:
        return status(Standing.UNKNOWN, "the register has no such certificate")
    lost = [revoked[Revoked.KEY, key] for key in keys if (Revoked.KEY, key) in revoked]
    if len(keys) - len(lost) < found.threshold:
        first = lost[0]
        detail = f"signed by the revoked key {first.subject}: {first.reason}"
        return replace(status(Standing.REVOKED, detail, first.subject), by_key=True)
    newer = _superseding(connection, found)
    if newer is not None:
        detail = f"sequence {newer.sequence} of this stage is {newer.verdict}"
        if newer.supersedes == identity:
            detail = "a newer certificate says that it supersedes this one"
        return status(Standing.SUPERSEDED, detail, newer.identity)
    if not found.issued_at <= moment < found.valid_until:
        return status(Standing.OUTSIDE_VALIDITY, "the time is outside of its validity")
    if found.base is not None:
        base = status_in(connection, found.base, moment)
        if not base.in_force:
            detail = f"the earlier certificate sha256:{found.base}: {base.detail}"
            return replace(status(base.standing, detail, base.by), by_key=base.by_key)
    return status(Standing.IN_FORCE)


def _revoked(
    connection: Connection, subjects: Sequence[str]
) -> dict[tuple[Revoked, str], Revocation]:
    rows = connection.execute(_REVOKED, {"subjects": list(subjects)})
    found = map(_revocation, rows)
    return {(each.kind, each.subject): each for each in found}


def _superseding(connection: Connection, found: Certificate) -> Certificate | None:
    """Return the newest failed certificate of the same triple and stage, or else the explicit
    successor: a failure has priority."""
    after = {"triple": found.triple, "stage": found.stage, "sequence": found.sequence}
    row = connection.execute(_NEWER, {**after, "identity": found.identity}).first()
    return None if row is None else _certificate(row)
