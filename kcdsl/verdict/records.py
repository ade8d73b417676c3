"""Frozen records as plain JSON data.

Numbers that are not finite are written as null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from enum import Enum
from fractions import Fraction
from typing import Any, ClassVar

from kcdsl.diagnostics.render.terminal import json_text
from kcdsl_certs.encoding.reals import real_text


class Record:
    """A frozen dataclass whose JSON object has its fields, and the properties in `derived`."""

    __slots__ = ()
    derived: ClassVar[tuple[str, ...]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        own: Any = self
        names = (*(field.name for field in fields(own)), *self.derived)
        return {name: plain(getattr(self, name)) for name in names}


class DocumentRecord(Record):
    """A record that is a complete JSON document with the name of its schema."""

    __slots__ = ()
    schema: ClassVar[str]

    def to_json(self) -> dict[str, Any]:
        """Return the document as plain data."""
        return {"schema": self.schema, **Record.to_json(self)}

    def dumps(self) -> str:
        """Return the document as text."""
        return json_text(self.to_json(), allow_nan=False)


def plain(value: Any) -> Any:
    """Return plain data: exact numbers as text, tuples as lists, enumerations as their values."""
    match value:
        case Record():
            return value.to_json()
        case float():
            return number(value)
        case Fraction():
            return real_text(value)
        case Enum():
            return value.value
        case Mapping():
            return {key: plain(item) for key, item in value.items()}
        case tuple() | list():
            return [plain(item) for item in value]
        case _:
            return value


def number(value: float | None) -> float | None:
    """Return a value for JSON: null where it is missing or not finite."""
    return None if value is None or not math.isfinite(value) else float(value)
