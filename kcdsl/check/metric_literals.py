"""Reading the literals of a declaration `@metric(...)`; nothing is evaluated but literals."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from kcdsl.diagnostics.report import suggest
from kcdsl.source.numbers import exact

Report = Callable[[ast.expr, str, str | None], None]
"""Told the node, what is wrong, and the way out."""


class LiteralReader:
    """Reads literals; the first that is none makes `failed` true."""

    def __init__(self, values: Mapping[str, ast.expr], report: Report) -> None:
        self._report = report
        self._values = values
        self.failed = False

    def _literal(self, name: str, wanted: str, test: Callable[[Any], bool]) -> Any:
        node = self._values.get(name)
        value: Any = None
        if node is not None:
            try:
                value = ast.literal_eval(node)
            except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
                message = f"`{name}` is not a literal, and no Python is run to find its value"
                self._refuse(node, message, f"write {wanted}")
                return None
            if not test(value):
                self._refuse(node, f"`{name}` takes {wanted}")
                return None
        return value

    def _refuse(self, node: ast.expr, message: str, help: str | None = None) -> None:
        self.failed = True
        self._report(node, message, help)

    def text(self, name: str) -> str | None:
        """Return a text; None where it is absent, None, or no text."""
        found: str | None = self._literal(
            name, "a text", lambda v: v is None or (isinstance(v, str) and v.strip() != "")
        )
        return found

    def truth(self, name: str) -> bool:
        """Return a truth value."""
        return bool(self._literal(name, "True or False", lambda v: isinstance(v, bool)))

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """Return one of the allowed texts; "" after an error."""
        found = self._literal(name, "a text", lambda v: isinstance(v, str))
        if found is None:
            self.failed = True
            return ""
        if found not in allowed:
            message = f"`{name}` cannot be `{found}`"
            self._refuse(self._values[name], message, suggest(found, allowed))
        return str(found)

    def choices(self, name: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
        """Return a list of allowed texts, each once; () after an error."""
        found = self._literal(
            name,
            "a list of texts",
            lambda v: isinstance(v, list | tuple) and all(isinstance(item, str) for item in v),
        )
        if found is None:
            self.failed = True
            return ()
        node = self._values[name]
        for item in found:
            if item not in allowed:
                self._refuse(node, f"`{name}` cannot hold `{item}`", suggest(item, allowed))
                return ()
        if not found or len(set(found)) < len(found):
            self._refuse(node, f"`{name}` {'names one twice' if found else 'is empty'}")
        return tuple(found)

    def number(self, name: str) -> Fraction | None:
        """Return an exact number; None where it is absent, None, or no number."""
        found = self._literal(
            name,
            "a number",
            lambda v: v is None or (isinstance(v, int | float) and not isinstance(v, bool)),
        )
        if found is None:
            return None
        value = exact(repr(found))
        if value is None:
            self._refuse(self._values[name], f"`{name}` is too large, too small or not finite")
        return value
