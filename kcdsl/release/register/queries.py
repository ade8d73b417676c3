"""Queries of a register: entries by their keys, and the standing of a certificate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, Row, Select, bindparam, literal, select, union_all

from kcdsl.release.register.projections import read_record
from kcdsl.release.register.records import (
    CERTIFICATE,
    DIGESTS,
    PROMOTION,
    REVOCATION,
    RUN,
    SLOT,
    Certificate,
    CertificateStatus,
    Promotion,
    Revocation,
    Revoked,
    Run,
    Slot,
    Standing,
)
from kcdsl.release.register.schema import (
    NOT_PASSED,
    certificates,
    promotions,
    revocations,
    runs,
    slots,
    triples,
)
from kcdsl_certs.encoding.strict import parse_time, strict_load
from kcdsl_certs.statement import Triple, Verdict

_LARGEST = 4 * 1024 * 1024
_BY_IDENTITY = select(certificates).where(certificates.c.identity == bindparam("identity"))
_REVOKED = select(revocations).where(
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
_NEWER = select(_BOTH).order_by(_BOTH.c.place).limit(1)
"""The newest that failed, else the one that says that it supersedes: one query, one round trip."""


def certificate_in(connection: Connection, identity: str) -> Certificate | None:
    """Return a certificate by its identity."""
    row = connection.execute(_BY_IDENTITY, {"identity": identity}).first()
    return None if row is None else _certificate(row)


def _certificate(row: Row[Any]) -> Certificate:
    return replace(read_record(CERTIFICATE, row.record), number=row.event)


def certificates_in(
    connection: Connection, triple: str | None, stage: str | None
) -> Iterator[Certificate]:
    """Yield certificates, in the order in which they were recorded."""
    wanted = _filtered(select(certificates), certificates.c, triple=triple, stage=stage)
    yield from map(_certificate, connection.execute(wanted.order_by(certificates.c.event)))


def _filtered(query: Select[Any], columns: Any, **wanted: str | None) -> Select[Any]:
    for name, found in wanted.items():
        if found is not None:
            query = query.where(getattr(columns, name) == found)
    return query


def triple_in(connection: Connection, digest: str) -> Triple | None:
    """Return a triple by its digest, with the names and fingerprints that it was recorded with."""
    row = connection.execute(select(triples.c.triple).where(triples.c.digest == digest)).first()
    if row is None:
        return None
    return Triple.from_json(strict_load(row.triple.encode("utf-8"), _LARGEST))


def triples_in(connection: Connection) -> Iterator[Triple]:
    """Yield triples, in the order in which they were recorded."""
    for text in connection.execute(select(triples.c.triple).order_by(triples.c.event)).scalars():
        yield Triple.from_json(strict_load(text.encode("utf-8"), _LARGEST))


def run_in(connection: Connection, identity: str) -> Run | None:
    """Return a run by its identity."""
    row = connection.execute(select(runs).where(runs.c.identity == identity)).first()
    return None if row is None else replace(read_record(RUN, row.record), number=row.event)


def runs_in(
    connection: Connection, triple: str | None, stage: str | None, trusted: bool | None
) -> Iterator[Run]:
    """Yield runs, in the order in which they were recorded."""
    wanted = _filtered(select(runs), runs.c, triple=triple, stage=stage)
    if trusted is not None:
        wanted = wanted.where(runs.c.trusted == trusted)
    for row in connection.execute(wanted.order_by(runs.c.event)):
        yield replace(read_record(RUN, row.record), number=row.event)


def promotions_in(
    connection: Connection, slot: str | None, candidate: str | None
) -> Iterator[Promotion]:
    """Yield decisions, in the order in which they were recorded."""
    wanted = _filtered(select(promotions), promotions.c, slot=slot, candidate=candidate)
    for row in connection.execute(wanted.order_by(promotions.c.event)):
        yield replace(read_record(PROMOTION, row.record), number=row.event, at=parse_time(row.time))


def evidence_elsewhere(
    connection: Connection, slot: str, candidate: str
) -> Iterator[tuple[str, str, frozenset[str]]]:
    """Yield slot, candidate and digests of evidence of each decision about another candidate, or in
    another slot."""
    other = (promotions.c.slot != slot) | (promotions.c.candidate != candidate)
    wanted = select(promotions.c.slot, promotions.c.candidate, promotions.c.record).where(other)
    for row in connection.execute(wanted.order_by(promotions.c.event)):
        record = strict_load(row.record.encode("utf-8"), _LARGEST)
        yield row.slot, row.candidate, frozenset(DIGESTS.read(record.get("evidence"), "evidence"))


def slots_in(connection: Connection) -> Iterator[Slot]:
    """Yield every slot, by name."""
    for row in connection.execute(select(slots.c.record)):
        yield read_record(SLOT, row.record)


def revocations_in(connection: Connection) -> Iterator[Revocation]:
    """Yield revocations, in the order in which they were recorded."""
    for row in connection.execute(select(revocations).order_by(revocations.c.event)):
        yield replace(read_record(REVOCATION, row.record), number=row.event)


def revocation_in(connection: Connection, kind: Revoked, subject: str) -> Revocation | None:
    """Return the revocation of a certificate or a key."""
    wanted = (revocations.c.kind == kind.value) & (revocations.c.subject == subject)
    row = connection.execute(select(revocations).where(wanted)).first()
    return None if row is None else replace(read_record(REVOCATION, row.record), number=row.event)


# --- standing -------------------------------------------------------------------------------------


def status_in(connection: Connection, identity: str, moment: datetime) -> CertificateStatus:
    """Return what is recorded about a certificate; `moment` is compared with its validity alone.

    Whatever is recorded counts, whenever that was. A newer result that did not pass counts even
    where it was revoked: only a newer certificate that passes replaces it.
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
    found = (read_record(REVOCATION, row.record) for row in rows)
    return {(each.kind, each.subject): each for each in found}


def _superseding(connection: Connection, found: Certificate) -> Certificate | None:
    """Return the newest of the same triple and stage that did not pass, else one that says so: a
    failure counts whatever else supersedes the certificate."""
    after = {"triple": found.triple, "stage": found.stage, "sequence": found.sequence}
    row = connection.execute(_NEWER, {**after, "identity": found.identity}).first()
    return None if row is None else _certificate(row)
