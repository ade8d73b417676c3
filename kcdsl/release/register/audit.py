"""The audit of a register: its hash chain, derived tables, bundles, and signed heads."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, create_engine, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from kcdsl.release.register.admission import entry_of
from kcdsl.release.register.events import BEFORE_FIRST, Event, EventKind, hash_of, parse_event
from kcdsl.release.register.projections import apply
from kcdsl.release.register.records import CERTIFICATE
from kcdsl.release.register.schema import (
    PROJECTIONS,
    bundles,
    events,
    head,
    metadata,
    trigger_names,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import time_text
from kcdsl_certs.signatures import TrustPolicy, decode, parse_bundle, signers
from kcdsl_certs.statement import RegisterHead
from kcdsl_certs.verification.admission import read_statement
from kcdsl_certs.verification.authentication import authentic_head

SCHEMA = "kcdsl.register-check/1"
MOST_DEFECTS = 100
_BATCH = 1000


@dataclass(frozen=True, slots=True)
class AuditDefect:
    """A defect: a stable reason, and the number of its event."""

    reason: str
    detail: str
    number: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"reason": self.reason, "detail": self.detail, "event": self.number}


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit; the register is sound if `defects` is empty.

    `heads` are the compared signed heads, `unverified` counts certificates that no trusted key
    signed: without trusted keys, all. The first 100 defects are kept.
    """

    last: RegisterHead | None
    certificates: int
    unverified: int
    heads: tuple[RegisterHead, ...]
    defects: tuple[AuditDefect, ...]

    @property
    def is_sound(self) -> bool:
        """Return whether there are no defects."""
        return not self.defects

    def to_json(self) -> dict[str, Any]:
        """Return the document `kcdsl.register-check/1`."""
        return {
            "schema": SCHEMA,
            "sound": self.is_sound,
            "head": None if self.last is None else head_json(self.last),
            "certificates": self.certificates,
            "unverified": self.unverified,
            "heads": [head_json(each) for each in self.heads],
            "defects": [defect.to_json() for defect in self.defects],
        }


def head_json(found: RegisterHead) -> dict[str, Any]:
    """Return a head as plain data."""
    return {
        "register": found.register,
        "number": found.number,
        "hash": found.hash,
        "time": time_text(found.at),
    }


@dataclass(slots=True)
class _Found:
    """The state of an audit while it follows the chain."""

    defects: list[AuditDefect] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    """The hashes of the events at signed heads, by number."""
    last: RegisterHead | None = None
    bundles: set[str] = field(default_factory=set)
    certificates: int = 0
    unverified: int = 0
    rebuilt: bool = True
    """Whether every event so far could be applied to the rebuilt tables."""

    def add(self, reason: str, detail: str, number: int | None = None) -> None:
        if len(self.defects) < MOST_DEFECTS:
            self.defects.append(AuditDefect(reason, detail, number))


def audit(
    connection: Connection,
    heads: Sequence[bytes],
    trusted: TrustPolicy | None,
    moment: datetime,
) -> Audit:
    """Check everything that is recorded, in one snapshot of the register.

    Each of `heads` must be signed by keys of `trusted` and be the head of a prefix of the chain.
    Without `trusted`, no signature is verified, and there may be no heads. Nothing is written.
    """
    found = _Found()
    signed = list(_signed_heads(found, heads, trusted, moment))
    found.hashes = {each.number: "" for each in signed}
    _integrity(connection, found)
    with tempfile.TemporaryDirectory() as folder:
        again = create_engine(f"sqlite:///{Path(folder, 'again.db')}")
        try:
            with again.begin() as tables:
                tables.execute(text("PRAGMA synchronous=OFF"))  # a scratch file
                metadata.create_all(tables)
                _rows_of(connection, tables, found, trusted)
        finally:
            again.dispose()
    _stray_bundles(connection, found)
    _triggers(connection, found)
    for each in signed:
        _prefix(each, found)
    counts = (found.certificates, found.unverified)
    return Audit(found.last, *counts, tuple(signed), tuple(found.defects))


def _rows_of(
    connection: Connection, tables: Connection, found: _Found, trusted: TrustPolicy | None
) -> None:
    try:
        _chain(connection, tables, found, trusted)
        _head(connection, found)
        for table in PROJECTIONS if found.rebuilt else ():
            _compare(connection, tables, table, found)
    except (TypeError, ValueError, AttributeError) as error:  # SQLite columns accept any type
        found.rebuilt = False
        found.add("database/type", f"a column holds a value of another type: {error}")


# --- the chain ------------------------------------------------------------------------------------


def _chain(
    connection: Connection, tables: Connection, found: _Found, trusted: TrustPolicy | None
) -> None:
    previous, number, register = BEFORE_FIRST, 0, ""
    for row in _rows(connection):
        number += 1
        if row.number != number:
            found.add("chain/number", f"event {row.number} follows event {number - 1}", row.number)
            number = row.number
        body = bytes(row.body)
        own = hash_of(body)
        if own != row.hash:
            found.add("chain/hash", "its body does not match its hash", number)
        try:
            event = parse_event(body)
        except Rejected as error:
            found.add("chain/event", f"{error.detail} ({error.reason})", number)
            found.rebuilt = False
            previous = own
            continue
        if event.previous != previous:
            found.add("chain/previous", "the event before it was another one", number)
        stated = (event.number, event.kind.value, time_text(event.time), event.previous)
        if stated != (row.number, row.kind, row.time, row.previous):
            found.add("chain/column", "its columns differ from its body", number)
        if number == 1:
            register = own
        if (event.kind is EventKind.REGISTER) != (number == 1):
            found.add("chain/event", "a register begins with its first event alone", number)
        if found.last is not None and event.time < found.last.at:
            found.add("chain/time", "it is earlier than the event before it", number)
        if number in found.hashes:
            found.hashes[number] = own
        _rebuild(tables, event, found)
        if event.kind is EventKind.CERTIFICATE:
            _bundle(connection, event, found, trusted)
        previous = own
        found.last = RegisterHead(register, number, own, event.time)
    if found.last is None:
        found.add("chain/empty", "it has no event that can be read")


def _rows(connection: Connection) -> Iterator[Any]:
    since: int | None = None
    while True:
        wanted = select(events).order_by(events.c.number).limit(_BATCH)
        if since is not None:
            wanted = wanted.where(events.c.number > since)
        batch = connection.execute(wanted).all()
        yield from batch
        if len(batch) < _BATCH:
            return
        since = batch[-1].number


def _rebuild(tables: Connection, event: Event, found: _Found) -> None:
    if not found.rebuilt:
        return
    try:
        apply(tables, event)
    except Rejected as error:
        found.add("chain/event", f"{error.detail} ({error.reason})", event.number)
        found.rebuilt = False
    except SQLAlchemyError as error:
        detail = f"it contradicts an earlier event: {getattr(error, 'orig', error)}"
        found.add("chain/event", detail, event.number)
        found.rebuilt = False


def _head(connection: Connection, found: _Found) -> None:
    rows = connection.execute(select(head)).all()
    last = found.last
    if len(rows) != 1 or last is None:
        found.add("head/missing", f"there are {len(rows)} heads, not one")
        return
    (row,) = rows
    if (row.number, row.hash) != (last.number, last.hash):
        found.add("head/mismatch", f"the head is event {row.number}, the last is {last.number}")
    elif (row.id, row.register, row.time) != (1, last.register, time_text(last.at)):
        found.add("head/mismatch", "the head states another register or time")


def _compare(connection: Connection, tables: Connection, table: Table, found: _Found) -> None:
    """Compare a table, row by row in the order of events, with the rebuilt one."""
    ordered = select(table).order_by(table.c.event)
    stored = connection.execution_options(yield_per=_BATCH).execute(ordered)
    wanted = tables.execution_options(yield_per=_BATCH).execute(ordered)
    for one, other in zip_longest(stored, wanted):
        if one is None or other is None or tuple(one) != tuple(other):
            number = (one or other).event
            detail = f"{table.name} holds another row than follows from the events"
            found.add(f"projection/{table.name}", detail, number)
            return


# --- bundles --------------------------------------------------------------------------------------


def _bundle(
    connection: Connection, event: Event, found: _Found, trusted: TrustPolicy | None
) -> None:
    found.certificates += 1
    try:
        stated = CERTIFICATE.read(event.data, "data")
    except Rejected:
        return  # reported by `_rebuild`
    found.bundles.add(stated.bundle)
    wanted = select(bundles.c.content).where(bundles.c.digest == stated.bundle)
    content = connection.execute(wanted).scalar_one_or_none()
    if content is None:
        found.add("bundle/missing", f"there is no bundle sha256:{stated.bundle}", event.number)
        return
    data = bytes(content)
    if hash_of(data) != stated.bundle:
        found.add("bundle/digest", f"sha256:{stated.bundle} has changed", event.number)
        return
    try:
        envelope = decode(parse_bundle(data))
        body = read_statement(envelope.payload)
    except Rejected as error:
        found.add("bundle/content", f"{error.detail} ({error.reason})", event.number)
        return
    said = entry_of(data, envelope.payload, body, stated.signers, stated.threshold)
    if said != replace(stated, number=0):
        found.add("bundle/content", "the event says something else than its bundle", event.number)
    if trusted is None:
        found.unverified += 1
        return
    by = {key.key.fingerprint for key in signers(envelope, trusted.keys)}
    known = {key.key.fingerprint for key in trusted.keys}
    if not known.intersection(stated.signers) <= by:
        found.add("bundle/signature", "a key that it names did not sign it", event.number)
    elif not by:
        found.unverified += 1


def _stray_bundles(connection: Connection, found: _Found) -> None:
    if not found.rebuilt:
        return
    count = connection.execute(select(func.count()).select_from(bundles)).scalar_one()
    if count != len(found.bundles) and not any(
        defect.reason == "bundle/missing" for defect in found.defects
    ):
        found.add("bundle/stray", f"there are {count} bundles, {len(found.bundles)} are recorded")


# --- the database ---------------------------------------------------------------------------------


def _integrity(connection: Connection, found: _Found) -> None:
    if connection.dialect.name != "sqlite":
        return
    said = connection.execute(text("PRAGMA integrity_check(10)")).scalars().all()
    if said != ["ok"]:
        found.add("database/integrity", "; ".join(map(str, said))[:500])


def _triggers(connection: Connection, found: _Found) -> None:
    if connection.dialect.name == "sqlite":
        query = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
    else:
        query = "SELECT tgname FROM pg_trigger WHERE NOT tgisinternal AND tgenabled IN ('O', 'A')"
    present = set(connection.execute(text(query)).scalars())
    missing = sorted(trigger_names(connection.dialect.name) - present)
    if missing:
        found.add("trigger/missing", f"rows could be changed unnoticed: {', '.join(missing)}")


# --- heads ----------------------------------------------------------------------------------------


def _signed_heads(
    found: _Found, heads: Sequence[bytes], trusted: TrustPolicy | None, moment: datetime
) -> Iterator[RegisterHead]:
    for number, bundle in enumerate(heads, 1):
        try:
            if trusted is None:
                raise Rejected("policy/no-key", "no key is trusted, so no head can be")
            yield authentic_head(bundle, trusted, moment)
        except Rejected as error:
            found.add(error.reason, f"signed head {number}: {error.detail}")


def _prefix(signed: RegisterHead, found: _Found) -> None:
    last = found.last
    if last is None:
        return
    if signed.register != last.register:
        found.add("head/other-register", "a signed head is of another register", signed.number)
    elif signed.number > last.number:
        detail = f"event {signed.number} was signed, the register ends with {last.number}"
        found.add("head/ahead", detail, signed.number)
    elif found.hashes[signed.number] != signed.hash:
        found.add("head/not-prefix", "another event was signed under this number", signed.number)
