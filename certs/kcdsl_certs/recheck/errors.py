"""The one way in which a check ends early."""

from __future__ import annotations


class Rejection(Exception):
    """A proof that must not be accepted.

    `reason` is a stable code such as "graph/digest"; `detail` says where and what.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def at(self, place: str) -> Rejection:
        """Return the same rejection with the place put before its detail."""
        return Rejection(self.reason, f"{place}: {self.detail}")
