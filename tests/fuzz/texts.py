"""Mutations of bytes and of tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from tests.fuzz.vocabulary import CHARACTERS, EVERYTHING, EXPRESSIONS, NUMBERS, YAML

Change = Callable[[bytes, bytes, Random], bytes]
"""A function that makes a document from one document and another one to borrow from."""

_TOKEN = re.compile(r"[ \t]+|\r?\n[ \t]*|[A-Za-z_]\w*|[0-9][0-9.eE]*|[<>=!]=|.", re.DOTALL)
_WORD = re.compile(r"[A-Za-z_]\w*")
_DAMAGE = (
    b"\xff", b"\xc3", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xef\xbb\xbf",
    b"\xfe\xff", b"\xe2\x80\xa8", b"\xc2\x85", b"\0", b"\r", b"\xf0\x9d\x92\xb3", b"\x80",
)  # fmt: skip


def _place(data: bytes, random: Random) -> int:
    return random.randrange(len(data) + 1)


def _range(data: bytes, random: Random) -> tuple[int, int]:
    start = _place(data, random)
    return start, min(len(data), start + random.choice((1, 1, 2, 3, 5, 10, 40, 200)))


def flip(data: bytes, _: bytes, random: Random) -> bytes:
    """Flip one bit."""
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def insert(data: bytes, _: bytes, random: Random) -> bytes:
    """Insert a byte."""
    at = _place(data, random)
    return data[:at] + bytes([random.randrange(256)]) + data[at:]


def delete(data: bytes, _: bytes, random: Random) -> bytes:
    """Delete a range."""
    start, end = _range(data, random)
    return data[:start] + data[end:]


def truncate(data: bytes, _: bytes, random: Random) -> bytes:
    """Cut off the end or the beginning."""
    at = _place(data, random)
    return data[:at] if random.random() < 0.8 else data[at:]


def splice(data: bytes, other: bytes, random: Random) -> bytes:
    """Continue with another document."""
    return data[: _place(data, random)] + other[_place(other, random) :]


def borrow(data: bytes, other: bytes, random: Random) -> bytes:
    """Replace a range by one of another document."""
    start, end = _range(data, random)
    first, last = _range(other, random)
    return data[:start] + other[first:last] + data[end:]


def damage(data: bytes, _: bytes, random: Random) -> bytes:
    """Write bytes that are invalid or special in UTF-8."""
    start, end = _range(data, random)
    return data[:start] + random.choice(_DAMAGE) + data[random.choice((start, end)) :]


def repeat(data: bytes, _: bytes, random: Random) -> bytes:
    """Repeat a range, a few times or very often."""
    start, end = _range(data, random)
    times = random.choice((2, 3, 10, 100, 2000))
    return data[:start] + data[start:end][: 40_000 // times] * times + data[end:]


def line_ends(data: bytes, _: bytes, random: Random) -> bytes:
    """Change the line ends, all or one of them."""
    new = random.choice((b"\r\n", b"\r", b"\n\n", b"\xc2\x85", b"\xe2\x80\xa8", b" \n", b"\n "))
    if random.random() < 0.5:
        return data.replace(b"\n", new)
    at = data.find(b"\n", _place(data, random))
    return data if at < 0 else data[:at] + new + data[at + 1 :]


def lines(data: bytes, other: bytes, random: Random) -> bytes:
    """Drop, duplicate, swap, move or borrow a line."""
    found, theirs = data.split(b"\n"), other.split(b"\n")
    at, to = random.randrange(len(found)), random.randrange(len(found))
    match random.randrange(5):
        case 0:
            del found[at]
        case 1:
            found.insert(to, found[at])
        case 2:
            found[at], found[to] = found[to], found[at]
        case 3:
            found[at] = random.choice((b" ", b"  ", b"\t", b"- ", b"# ")) + found[at]
        case _:
            found.insert(at, random.choice(theirs))
    return b"\n".join(found)


def tokens(data: bytes, other: bytes, random: Random) -> bytes:
    """Duplicate, drop, swap or replace a token."""
    found = _TOKEN.findall(data.decode("utf-8", "replace"))
    if not found:
        return random.choice(EVERYTHING).encode()
    at, to = random.randrange(len(found)), random.randrange(len(found))
    match random.randrange(6):
        case 0:
            found.insert(at, found[at])
        case 1:
            del found[at]
        case 2:
            found[at], found[to] = found[to], found[at]
        case 3:
            found[at] = random.choice(EVERYTHING)
        case 4:
            found.insert(at, random.choice(random.choice((YAML, CHARACTERS, NUMBERS, EXPRESSIONS))))
        case _:
            found[at] = random.choice(_TOKEN.findall(other.decode("utf-8", "replace")) or [""])
    return "".join(found).encode()


def names(data: bytes, _: bytes, random: Random) -> bytes:
    """Replace one name of the document by another."""
    text = data.decode("utf-8", "replace")
    found = list(_WORD.finditer(text))
    if not found:
        return data
    at, new = random.choice(found), random.choice(found)
    return (text[: at.start()] + new[0] + text[at.end() :]).encode()


def numbers(data: bytes, _: bytes, random: Random) -> bytes:
    """Replace a number."""
    text = data.decode("utf-8", "replace")
    found = list(re.finditer(r"[0-9][0-9.e]*", text))
    if not found:
        return data
    at = random.choice(found)
    return (text[: at.start()] + random.choice(NUMBERS) + text[at.end() :]).encode()


def nest(data: bytes, _: bytes, random: Random) -> bytes:
    """Nest deeply, or write a very long line."""
    at = _place(data, random)
    piece = random.choice(
        (b"[", b"{", b"(", b"- ", b"{a: ", b"not ", b"-", b"abs(", b"1 + ", b"x, ")
    )
    times = random.choice((3, 39, 41, 300, 5000))
    close = {b"[": b"]", b"{": b"}", b"(": b")", b"{a: ": b"}", b"abs(": b")"}.get(piece, b"")
    end = close * times if random.random() < 0.5 else b""
    return data[:at] + piece * times + end + data[at:]


BYTES: tuple[Change, ...] = (
    flip, insert, delete, truncate, splice, borrow, damage, repeat, line_ends, lines,
)  # fmt: skip
TOKENS: tuple[Change, ...] = (tokens, tokens, tokens, names, numbers, nest)
