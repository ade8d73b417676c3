"""Evidence of a stage as values: certificates, reports of evaluations, windows of traffic."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum


class DocumentKind(StrEnum):
    """The kind of an evidence document, in the order in which a look processes them: a report has
    counts that the certificate of the same evaluation lacks."""

    REPORT = "report"
    CERTIFICATE = "certificate"
    WINDOW = "window"


@dataclass(frozen=True, slots=True)
class ObligationResult:
    """The result of one obligation in a document.

    `verdict` is a name of `kcdsl.verdict.model`; `evidence` is the kind of evidence, such as
    "census". `k` of `n` units were beyond; both None where no units were counted.
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
    """A document about the candidate.

    Args:
    kind: its kind.
    name: its file, for people.
    identity: the sha256 of its content, or of the payload of a certificate.
    parts: digests that identify a second copy: the sha256 of the rows of each table and of all
    tables, and of a sketch of its requests with their values.
    ids: a sketch of the ids of its requests. Within a candidate and a slot a request counts
    once, even if the documents have different rows of it.
    requests_of: the sha256 of the files whose requests were measured. Within a stability window
    samples of the same requests count once for each obligation, however often they are
    measured.
    results: the results by obligation.
    looks: the number of evaluations among which sampled results without counts share the error.
    period: the time when the traffic of a window was served.
    requests: the number of requests of a window, by slice.
    valid_until: the end of validity of a certificate.
    valid: whether a certificate passed its check. One that states a failure is not valid and
    shows no obligation.
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
        """Return its name in recorded reasons: the last part of its file name, with unprintable
        characters escaped, and its digest."""
        shown = (
            c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
            for c in os.path.basename(self.name)
        )
        return f"{''.join(shown)} (sha256:{self.identity[:12]})"


def printable(name: str | os.PathLike[str]) -> str:
    """Return the name of a file as text for the register: bytes that are no UTF-8 are escaped."""
    return os.fspath(name).encode("utf-8", "backslashreplace").decode("utf-8")


def merged(periods: Iterable[Period]) -> tuple[Period, ...]:
    """Return the union of periods as disjoint periods, in order."""
    found: list[Period] = []
    for one in sorted(periods, key=lambda period: (period.start, period.end)):
        if found and one.start <= found[-1].end:
            found[-1] = Period(found[-1].start, max(found[-1].end, one.end))
        else:
            found.append(one)
    return tuple(found)


def duration(periods: Iterable[Period]) -> timedelta:
    """Return the total length of the union of periods."""
    return sum((one.end - one.start for one in merged(periods)), timedelta())
