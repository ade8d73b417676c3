"""A page of facts, tables and lists under one headline: certificates and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kcdsl.verdict.html.page import rendered


@dataclass(frozen=True, slots=True)
class SheetCell:
    """One cell of a table: its text, further text in small print, and the colour of a verdict."""

    text: str
    small: str = ""
    colour: str = ""
    number: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """One section: names with values, a table, and lines."""

    title: str
    lead: str = ""
    pairs: Sequence[tuple[str, str]] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[SheetCell]] = ()
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Sheet:
    """A page. `colour` is the name of a verdict, and `sign` its sign for readers without colour."""

    title: str
    headline: str
    colour: str
    sign: str
    parts: Sequence[Part]
    about: Sequence[str] = ()
    facts: Sequence[tuple[str, str]] = ()
    foot: str = ""


def document_page(sheet: Sheet) -> str:
    """Return the page; all text is escaped and free of terminal control characters."""
    return rendered("document.html.j2", sheet=sheet) + "\n"
