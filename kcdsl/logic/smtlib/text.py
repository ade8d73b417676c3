"""SMT-LIB syntax: symbols, numbers, strings, connectives."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

TRUE, FALSE = "true", "false"

_LARGEST_CHARACTER = 0x2FFFF
"""The largest character of SMT-LIB 2.6."""


@dataclass(slots=True)
class Symbols:
    """Assigns a unique, readable symbol to each meaning."""

    _given: dict[Hashable, str] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    def symbol(self, meaning: Hashable, name: str) -> str:
        """Return the quoted symbol of a meaning; `name` is the preferred name."""
        if meaning not in self._given:
            plain = _printable(name)
            chosen, count = plain, 1
            while chosen in self._taken:
                count += 1
                chosen = f"{plain} ({count})"
            self._taken.add(chosen)
            self._given[meaning] = f"|{chosen}|"
        return self._given[meaning]


def _printable(name: str) -> str:
    """Return a valid quoted-symbol text: printable ASCII without `|` and backslash."""
    return "".join(c if " " <= c <= "~" and c not in "|\\" else f"{{{ord(c):x}}}" for c in name)


def real(value: Fraction) -> str:
    """Return an exact constant of the sort Real."""
    if value < 0:
        return f"(- {real(-value)})"
    if value.denominator == 1:
        return f"{value.numerator}.0"
    return f"(/ {value.numerator}.0 {value.denominator}.0)"


def text(value: str) -> str:
    """Return a constant of the sort String. Different texts give different constants.

    A character beyond the range of SMT-LIB is written by its number, as \\U10ffff., and in a text
    that holds one, or that holds \\U by itself, every backslash is doubled.
    """
    if "\\U" in value or any(ord(c) > _LARGEST_CHARACTER for c in value):
        doubled = value.replace("\\", "\\\\")
        value = "".join(f"\\U{ord(c):x}." if ord(c) > _LARGEST_CHARACTER else c for c in doubled)
    return '"' + "".join(_character(c) for c in value) + '"'


def _character(c: str) -> str:
    if c == '"':
        return '""'
    if " " <= c <= "~" and c != "\\":
        return c
    return f"\\u{{{ord(c):x}}}"


def comment(value: str, prefix: str = "; ") -> str:
    """Return comment lines."""
    return "\n".join(f"{prefix}{line}".rstrip() for line in value.splitlines() or [""])


def conjunction(parts: Iterable[str]) -> str:
    """Return `(and …)`, simplified where there is nothing or one thing to join."""
    found = tuple(part for part in dict.fromkeys(parts) if part != TRUE)
    if FALSE in found:
        return FALSE
    if len(found) < 2:
        return found[0] if found else TRUE
    return f"(and {' '.join(found)})"


def disjunction(parts: Iterable[str]) -> str:
    """Return `(or …)`, simplified where there is nothing or one thing to join."""
    found = tuple(part for part in dict.fromkeys(parts) if part != FALSE)
    if TRUE in found:
        return TRUE
    if len(found) < 2:
        return found[0] if found else FALSE
    return f"(or {' '.join(found)})"


def negation(part: str) -> str:
    """Return `(not …)`."""
    return {TRUE: FALSE, FALSE: TRUE}.get(part, f"(not {part})")


def named(formula: str, symbol: str) -> str:
    """Return a named assertion."""
    return f"(assert (! {formula} :named {symbol}))"


def declare(symbol: str, sort: str) -> str:
    """Return the declaration of a constant."""
    return f"(declare-const {symbol} {sort})"


class TextAlgebra:
    """Expressions as SMT-LIB text (`kcdsl.logic.algebra.Algebra`)."""

    def real(self, value: Fraction) -> str:
        return real(value)

    def arithmetic(self, op: str, left: str, right: str) -> str:
        return f"({op} {left} {right})"

    def negative(self, of: str) -> str:
        return f"(- {of})"

    def compare(self, op: str, left: str, right: str) -> str:
        return f"({'=' if op == '==' else op} {left} {right})"

    def choose(self, test: str, first: str, second: str) -> str:
        return f"(ite {test} {first} {second})"

    def every(self, parts: Sequence[str]) -> str:
        return conjunction(parts)

    def some(self, parts: Sequence[str]) -> str:
        return disjunction(parts)

    def implies(self, premise: str, conclusion: str) -> str:
        return f"(=> {premise} {conclusion})"

    def same(self, left: str, right: str) -> bool:
        return left == right


WRITTEN = TextAlgebra()
