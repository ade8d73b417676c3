"""The one exception of this package: a rejection with a stable reason code."""

from __future__ import annotations


class Rejected(Exception):
    """Reject an input. Deliberately not a ValueError, so that no parser swallows it.

    `reason` is stable and meant for tests and programs ("json/duplicate-key"); `detail` is for
    people.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)

    def at(self, place: str) -> Rejected:
        """Return the same rejection with a place before its detail."""
        return Rejected(self.reason, f"{place}: {self.detail}")
