"""How much of a run its records can show again (tier F)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kcdsl_backends.empirical.metrics.evidence import Unmeasured

Records = Sequence[Mapping[str, Any]]


def coverage(records: Records, fields: Sequence[str]) -> Mapping[str, tuple[int, int]]:
    """Return (records with the field, records) for each required field; null is no value."""
    _some(records)
    if not fields:
        raise Unmeasured("no field is required")
    return {f: (sum(r.get(f) is not None for r in records), len(records)) for f in fields}


def complete(records: Records, fields: Sequence[str]) -> tuple[int, int]:
    """Return (records with every required field, records)."""
    coverage(records, fields)
    return sum(all(r.get(f) is not None for f in fields) for r in records), len(records)


def equal_fingerprints(records: Records, field: str, expected: str) -> tuple[int, int]:
    """Return (records whose fingerprint is the expected one, records); a missing one is not."""
    _some(records)
    return sum(r.get(field) == expected for r in records), len(records)


def replayed(records: Records, again: Mapping[str, str]) -> tuple[int, int]:
    """Return (requests whose replay signature came out again, requests).

    `again` holds the signatures of the second run by request. A request without a signature on
    either side does not match. Raises Unmeasured where a request stands in the records twice.
    """
    _some(records)
    names = [r.get("request") for r in records]
    if len(set(names)) != len(names):
        raise Unmeasured("a request has two records")
    matches = sum(
        r.get("replay_signature") is not None
        and r.get("replay_signature") == again.get(str(r.get("request")))
        for r in records
    )
    return matches, len(records)


def _some(records: Records) -> None:
    if not records:
        raise Unmeasured("there are no records")
