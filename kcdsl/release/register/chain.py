"""The hash chain of events, extended in one transaction."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, insert, select, update

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NOT_RECORDED, REGISTER_DAMAGED
from kcdsl.release.register.events import LARGEST_EVENT, Event, EventKind
from kcdsl.release.register.projections import apply
from kcdsl.release.register.schema import events, head
from kcdsl_certs.encoding.strict import parse_time, time_text
from kcdsl_certs.statement import RegisterHead


def head_in(connection: Connection) -> RegisterHead:
    """Return the head in the table; raises Refusal where there is none."""
    row = connection.execute(select(head)).first()
    if row is None:
        raise refuse(
            REGISTER_DAMAGED, "the register has no head", help="restore the register from a copy"
        )
    return RegisterHead(row.register, row.number, row.hash, parse_time(row.time))


class Chain:
    """Appends events to the hash chain; `close` writes the head at the end.

    The connection must be the only one that appends. Times never decrease, even if the clock of a
    writer is behind.
    """

    def __init__(self, connection: Connection, moment: datetime) -> None:
        self._connection = connection
        self._before = head_in(connection)
        self._head = self._before
        self._moment = max(moment.replace(microsecond=0), self._before.at)

    def append(self, kind: EventKind, data: Mapping[str, Any]) -> Event:
        """Append an event and update the derived tables; raises Rejected for an invalid event, and
        Refusal for one that is too large."""
        last = self._head
        event = Event(last.number + 1, self._moment, last.hash, kind, data)
        insert_event(self._connection, event)
        apply(self._connection, event)
        self._head = RegisterHead(last.register, event.number, event.hash, event.time)
        return event

    def close(self) -> None:
        """Write the new head, if any; raises Refusal where the old head has changed meanwhile."""
        new, old = self._head, self._before
        if new == old:
            return
        values = {"number": new.number, "hash": new.hash, "time": time_text(new.at)}
        same = (head.c.number == old.number) & (head.c.hash == old.hash)
        if self._connection.execute(update(head).where(same).values(values)).rowcount != 1:
            raise refuse(
                REGISTER_DAMAGED,
                "the head of the register changed during an append",
                help="run the command again; `kcdsl register check` says whether the register "
                "is whole",
            )


def insert_event(connection: Connection, event: Event) -> None:
    """Write an event unchanged; raises Refusal if it is too large."""
    body = event.body
    if len(body) > LARGEST_EVENT:
        raise refuse(
            NOT_RECORDED,
            f"a {event.kind} entry has {len(body)} bytes, at most {LARGEST_EVENT} are recorded",
            help="give less evidence at a time; in a triple, the fingerprints of the kernels are "
            "too large",
        )
    connection.execute(
        insert(events).values(
            number=event.number,
            kind=event.kind.value,
            time=time_text(event.time),
            previous=event.previous,
            hash=event.hash,
            body=body,
        )
    )


def begin(connection: Connection, event: Event) -> None:
    """Write the first event and the head of a new register."""
    insert_event(connection, event)
    first = {"id": 1, "number": 1, "hash": event.hash, "register": event.hash}
    connection.execute(insert(head).values(**first, time=time_text(event.time)))
