"""The exception of a violated property."""

from __future__ import annotations


class Broken(Exception):
    """Raised where a property is violated."""


def expect(true: bool, what: str) -> None:
    """Raise Broken unless a condition holds; the text before a colon names the defect."""
    if not true:
        raise Broken(what)
