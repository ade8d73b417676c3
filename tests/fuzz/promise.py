"""The error by which a check of a document says that something does not hold."""

from __future__ import annotations


class Broken(Exception):
    """Raised where something does not hold."""


def expect(true: bool, what: str) -> None:
    """Raise Broken unless something holds; the text before a colon names the defect."""
    if not true:
        raise Broken(what)
