"""Why the interval domain gives no bound."""

from __future__ import annotations


class NoBound(Exception):
    """No finite bound exists for this node; never to be read as a small one."""

    def __init__(self, node: str, reason: str) -> None:
        self.node = node
        self.reason = reason
        super().__init__(f"{node}: {reason}")
