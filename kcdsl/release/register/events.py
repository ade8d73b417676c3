"""The events of a register: a hash chain of canonical documents."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any

from kcdsl_certs.encoding.records import (
    COUNT,
    DIGEST,
    OBJECT,
    TIME,
    Record,
    RecordField,
    constant,
    member,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import canonical_json, strict_load

SCHEMA = "kcdsl.register-event/1"
LARGEST_EVENT = 4 * 1024 * 1024
BEFORE_FIRST = "0" * 64
"""The predecessor hash of the first event."""


class EventKind(StrEnum):
    """The kind of an event."""

    REGISTER = "register"
    TRIPLE = "triple"
    CERTIFICATE = "certificate"
    RUN = "run"
    RUN_MARK = "run-mark"
    PROMOTION = "promotion"
    REVOCATION = "revocation"


@dataclass(frozen=True, slots=True)
class Event:
    """One entry of the chain. `data` is JSON data without floats and secrets."""

    number: int
    time: datetime
    previous: str
    kind: EventKind
    data: Mapping[str, Any]

    @property
    def body(self) -> bytes:
        """Return the RFC 8785 bytes, which are stored and hashed."""
        return canonical_json(_EVENT.write(self))

    @property
    def hash(self) -> str:
        """Return the sha256 (hex) of the body."""
        return hash_of(self.body)


def hash_of(body: bytes) -> str:
    """Return the sha256 (hex) of the body of an event."""
    return hashlib.sha256(body).hexdigest()


def parse_event(body: bytes) -> Event:
    """Read the body of an event strictly; raises Rejected unless the bytes are canonical."""
    event = _EVENT.read(strict_load(body, LARGEST_EVENT), "event")
    if event.body != body:
        raise Rejected("chain/canonical", "the bytes are not the canonical form of the event")
    return event


_EVENT: Record[Event] = Record(
    lambda schema, **found: Event(**found),
    RecordField("schema", constant(SCHEMA), get=lambda event: SCHEMA),
    RecordField("number", COUNT),
    RecordField("time", TIME),
    RecordField("previous", DIGEST),
    RecordField("kind", member(EventKind)),
    RecordField("data", OBJECT),
)
