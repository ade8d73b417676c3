"""Evidence of a stage as values: certificates, reports of evaluations, windows of traffic."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum


class DocumentKind(StrEnum):
    """What a document of evidence is, in the order in which a look takes them: a report has counts
    that the certificate of the same evaluation leaves out."""

    REPORT = "report"
    CERTIFICATE = "certificate"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class ObligationResult:
    """What a document says of one obligation.

    `verdict` is one of those of `kcdsl.verdict.model`; `evidence` the kind it rests on, such as
    "census". `k` of `n` units were beyond; both None where no unit was counted.
    """

    verdict: str
    evidence: str
    k: int | None = None
    n: int | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Period:
    """The time from `start` (inclusive) to `end` (exclusive)."""

    start: datetime
    end: datetime


@dataclass(frozen=True, slots=True)
class EvidenceDocument:
    """A document that was read and is about the candidate.

    Args:
        kind: what it is.
        name: its file, for people.
        identity: the sha256 of its content, of a certificate that of its payload.
        parts: the sha256 of the rows of the tables that it counts, of each and of all together, and
            those of a sketch of its requests with their values, by which a second copy is
            recognised.
        ids: a sketch of the ids of its requests. Within a candidate and a slot a request counts
            once, also where each document has other rows of it.
        requests_of: the sha256 of the files whose requests were measured. Within a stability window
            samples of the same requests count once for each obligation, however often they are
            measured.
        results: by obligation.
        looks: over how many evaluations its sampled results without counts share the error.
        period: when the traffic of a window was served.
        requests: how many requests of each slice a window has.
        valid_until: when a certificate ends.
        valid: whether a certificate passed its check. One that states a failure is a true record,
            and shows nothing.
    """

    kind: DocumentKind
    name: str
    identity: str
    parts: frozenset[str]
    results: Mapping[str, ObligationResult]
    requests_of: frozenset[str] = frozenset()
    looks: int = 1
    period: Period | None = None
    requests: Mapping[str, int] = field(default_factory=dict)
    ids: frozenset[str] = frozenset()
    valid_until: datetime | None = None
    valid: bool = True

    @property
    def label(self) -> str:
        """Return what reasons call it, which a register keeps: the last part of its name, with
        what no terminal prints as escapes, and its digest."""
        shown = (
            c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
            for c in os.path.basename(self.name)
        )
        return f"{''.join(shown)} (sha256:{self.identity[:12]})"


def printable(name: str | os.PathLike[str]) -> str:
    """Return the name of a file as text that a register can keep: bytes that are no UTF-8 are
    written as escapes."""
    return os.fspath(name).encode("utf-8", "backslashreplace").decode("utf-8")


def merged(periods: Iterable[Period]) -> tuple[Period, ...]:
    """Return the same time without overlaps, in order."""
    found: list[Period] = []
    for one in sorted(periods, key=lambda period: (period.start, period.end)):
        if found and one.start <= found[-1].end:
            found[-1] = Period(found[-1].start, max(found[-1].end, one.end))
        else:
            found.append(one)
    return tuple(found)


def duration(periods: Iterable[Period]) -> timedelta:
    """Return how long some periods are together; time that several cover counts once."""
    return sum((one.end - one.start for one in merged(periods)), timedelta())
