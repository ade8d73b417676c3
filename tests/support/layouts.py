"""Texts written as YAML scalars of every style, with the source position of each character.

The writer records where it put each character, so its result is an oracle that shares no code with
the parser under test. Folds are the one exception: the source line break of a decoded one is not
specified, so all candidates are returned.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

STYLES = ("plain", "'", '"', "|", ">")
SHORT = {
    "\a": "a", "\b": "b", "\t": "t", "\n": "n", "\v": "v", "\f": "f", "\r": "r",
    "\x1b": "e", " ": " ", '"': '"', "/": "/", "\\": "\\", "\x85": "N", "\xa0": "_",
    "\u2028": "L", "\u2029": "P",
}  # fmt: skip
"""The short escapes of YAML 1.2, section 5.7, except that of NUL, which is refused."""


@dataclass(slots=True)
class Written:
    """Source text, with the candidate positions of each decoded character."""

    source: str = ""
    places: list[frozenset[tuple[int, int]]] = field(default_factory=list)

    def decoded(self, source: str) -> None:
        """Append the source text of one character."""
        start = len(self.source)
        self.source += source
        self.places.append(frozenset({(start, len(self.source))}))

    def silent(self, source: str) -> None:
        """Append source text that is not part of the value."""
        self.source += source

    def moved(self, by: int) -> list[frozenset[tuple[int, int]]]:
        """Return the positions in a file in which the text begins at an offset."""
        return [frozenset((a + by, b + by) for a, b in each) for each in self.places]


@dataclass(frozen=True, slots=True)
class Where:
    """The context of a scalar: column of its parent (-1 at the top), line ends, brackets.

    Also whether it is on one line (a key) and whether it is last in the file.
    """

    parent: int
    eol: str
    flow: bool = False
    one_line: bool = False
    last: bool = False


def write(random: Random, text: str, style: str, where: Where) -> Written | None:
    """Write a text as a random scalar of a style; None where that style cannot represent it."""
    match style:
        case "plain":
            return _plain(random, text, where)
        case "'":
            return _single(random, text, where)
        case '"':
            return _double(random, text, where)
        case _:
            return None if where.flow or where.one_line else _block(random, text, style, where)


def _raw(char: str) -> bool:
    """Return whether YAML permits a character unescaped on one line."""
    code = ord(char)
    printable = 0x20 <= code <= 0x7E or 0xA0 <= code <= 0xD7FF or 0xE000 <= code <= 0xFFFD
    return char == "\t" or ((printable or code > 0xFFFF) and char not in "\u2028\u2029\ufeff")


def _white(random: Random) -> str:
    return "".join(random.choice(" \t") for _ in range(random.choice([0, 0, 1, 2])))


def _fold(
    random: Random, out: Written, breaks: int, where: Where, lead: int, *, tabs: bool
) -> None:
    """Write a fold of some decoded line breaks, or of a space where there are none."""
    found = []
    out.silent(_white(random))
    for number in range(breaks + 1):
        if number:
            out.silent(_white(random) if tabs else " " * random.randint(0, lead))
        start = len(out.source)
        out.silent(where.eol)
        found.append((start, len(out.source)))
    extra = breaks > 0
    for number in range(max(breaks, 1)):
        # The n breaks of the value may be any of the n + 1 of the source, in their order.
        out.places.append(frozenset({found[number], found[number + extra]}))
    out.silent(" " * (lead + random.choice([0, 0, 1, 5])) + random.choice(["", "", "\t"]))


def _folding(
    random: Random, text: str, where: Where, out: Written, character: Callable[[str], None]
) -> bool:
    """Write a text with line breaks and some spaces folded; False where a fold loses blanks."""
    lead, at = max(where.parent, 0) + 1 + random.choice([0, 1, 3]), 0
    tabs = out.source != ""
    while at < len(text):
        char = text[at]
        stop = at
        while stop < len(text) and text[stop] == "\n":
            stop += 1
        before, after = text[at - 1 : at], text[max(stop, at + 1) :][:1]
        apart = before not in {" ", "\t", "", "\n"} and after not in {" ", "\t", "", "\n"}
        if stop > at:
            if where.one_line or not apart:
                return False
            _fold(random, out, stop - at, where, lead, tabs=tabs)
            at = stop
        elif char == " " and apart and not where.one_line and random.random() < 0.3:
            _fold(random, out, 0, where, lead, tabs=tabs)
            at += 1
        else:
            character(char)
            at += 1
    return True


def _plain(random: Random, text: str, where: Where) -> Written | None:
    """Write a plain scalar that begins with a letter, so that YAML reads a string."""
    if not text or not text[0].isalpha() or text[-1] in " \t\n:" or "\t" in text:
        return None
    if not all(_raw(char) or char == "\n" for char in text):
        return None
    if any(sign in text for sign in (": ", ":\n", " #", "\n#")):
        return None
    if where.flow and any(char in ",[]{}?:" for char in text):
        return None
    if text.lower() in {"yes", "no", "on", "off", "true", "false", "null"}:
        return None
    out = Written()
    return out if _folding(random, text, where, out, out.decoded) else None


def _single(random: Random, text: str, where: Where) -> Written | None:
    if not all(_raw(char) or char == "\n" for char in text):
        return None
    out = Written()
    out.silent("'")
    fits = _folding(
        random, text, where, out, lambda char: out.decoded("''" if char == "'" else char)
    )
    out.silent("'")
    return out if fits else None


def _escapes(char: str) -> list[str]:
    code = ord(char)
    found = [f"\\U{code:08x}", f"\\U{code:08X}"]
    if code <= 0xFFFF:
        found.append(f"\\u{code:04x}")
    if code <= 0xFF:
        found.append(f"\\x{code:02X}")
    if char in SHORT:
        found += [f"\\{SHORT[char]}"] * 3
    if char == "\t":
        found.append("\\\t")
    return found


def _double(random: Random, text: str, where: Where) -> Written:
    out = Written()
    out.silent('"')
    often = random.choice([0.0, 0.05, 0.5])
    lead, at, solid, after_line = max(where.parent, 0) + 1, 0, False, False
    # `solid`: the last character is not white space, which a fold would remove
    while at < len(text):
        char = text[at]
        stop = at
        while stop < len(text) and text[stop] == "\n":
            stop += 1
        after = text[max(stop, at + 1) :][:1]
        may_fold = solid and not where.one_line and after not in {"", " ", "\t", "\n"}
        if may_fold and (stop > at or char == " ") and random.random() < 0.4:
            _fold(random, out, stop - at, where, lead, tabs=True)
            at, solid, after_line = max(stop, at + 1), True, True
            continue
        if not where.one_line and random.random() < 0.06:
            out.silent("\\" + where.eol + " " * (lead + random.choice([0, 2])) + _white(random))
            solid, after_line = True, True
        white = char in " \t"
        hidden = char in '"\\\n' or not _raw(char) or (white and after_line)
        if hidden or random.random() < often:
            out.decoded(random.choice(_escapes(char)))
            solid = True
        else:
            out.decoded(char)
            solid = not white
        after_line = False
        at += 1
    out.silent('"')
    return out


def _block(random: Random, text: str, style: str, where: Where) -> Written | None:
    if not all(_raw(char) or char == "\n" for char in text):
        return None
    body = text.rstrip("\n")
    ends = len(text) - len(body)
    depth = random.randint(1, 9)
    indent = max(where.parent, 0) + depth
    lines = body.split("\n") if body else []
    opening = next((n for n, line in enumerate(lines) if line.strip(" ")), len(lines))
    deceptive = any(line[:1] in {" ", "\t"} for line in lines[: opening + 1])
    explicit = deceptive or random.random() < 0.3
    chomp = "+" if ends > 1 or (ends and not body) else random.choice(["", "+"])
    if not ends:
        chomp = "-" if body else random.choice(["", "-"])
    signs = [str(depth) if explicit else "", chomp]
    random.shuffle(signs)
    out = Written()
    out.silent(style + "".join(signs) + random.choice(["", "  ", " # why: |", "\t# é"]) + where.eol)
    _body(random, out, body, indent, where.eol, folds=style == ">")
    for number in range(ends):
        if number or not body:
            out.silent(_spaces(random, indent))
        out.decoded(where.eol)
    if body and not ends and not (where.last and random.random() < 0.5):
        out.silent(where.eol)
    if chomp != "+" and out.source.endswith(where.eol):
        for _ in range(random.choice([0, 0, 1, 3])):
            out.silent(_spaces(random, indent) + where.eol)
    return out


def _spaces(random: Random, most: int) -> str:
    return " " * random.choice([0, 0, random.randint(0, most)])


def _body(random: Random, out: Written, body: str, indent: int, eol: str, *, folds: bool) -> None:
    """Write the lines of a block scalar.

    In a folded scalar, two lines that begin with a letter or sign are separated by one break more
    than the value has; other lines by as many.
    """
    before = False
    for run in re.finditer(r"(\n*)([^\n]+)", body):
        line = run[2]
        is_text = folds and line[0] not in " \t"
        extra = bool(run[1]) and before and is_text
        breaks = []
        for number in range(len(run[1]) + extra):
            if number or not run.start():
                out.silent(_spaces(random, indent))
            start = len(out.source)
            out.silent(eol)
            breaks.append((start, len(out.source)))
        for number in range(len(run[1])):
            out.places.append(frozenset({breaks[number], breaks[number + extra]}))
        out.silent(" " * indent)
        for at, char in enumerate(line):
            parts = 0 < at < len(line) - 1 and line[at + 1] not in " \t"
            if char == " " and parts and is_text and random.random() < 0.3:
                out.decoded(eol)
                out.silent(" " * indent)
            else:
                out.decoded(char)
        before = is_text


@dataclass(frozen=True, slots=True)
class Document:
    """A document with a scalar at a place in it."""

    source: str
    style: str
    start: int
    end: int
    places: list[frozenset[tuple[int, int]]]


def document(random: Random, text: str, style: str) -> Document | None:
    """Return a random document with a text in a style; None where the style cannot represent it."""
    eol = random.choice(["\n", "\n", "\r\n"])
    notes = ["", eol, f"# é 𝒳: |{eol}", f"{eol}  # a 'b{eol}"]
    source = random.choice(["", "", "\ufeff"]) + random.choice(notes)
    source += random.choice(["", "", f"---{eol}", f"--- # c{eol}", f"%YAML 1.1{eol}---{eol}"])
    column = 0
    levels: list[tuple[int, str]] = []
    for number in range(random.choice([0, 1, 1, 2, 3, 5, 9])):
        begun = bool(levels) and source.endswith("-") and random.random() < 0.5
        if begun:
            source += " " * random.choice([1, 1, 3])
            column = _column(source)
        elif levels:
            source += eol
            column += random.randint(1, 4)
        is_mapping = random.random() < 0.6
        if not begun:
            source += random.choice(notes)
            if random.random() < 0.3:
                entry = f"before{number}: 'x'" if is_mapping else "- [x, 'y']"
                source += " " * column + entry + random.choice(["", "  # c"]) + eol
            source += " " * column
        source += random.choice(["k", "é 𝒳", "'a b'", '"\\x41"']) + ":" if is_mapping else "-"
        levels.append((column, f"after{number}: 1" if is_mapping else "- z"))
    parent = column if levels else -1
    where = Where(parent, eol, last=random.random() < 0.2)
    opening, closing = "", ""
    match random.choice(["value", "value", "value", "flow", "key"]):
        case "flow":
            opening, closing = random.choice(
                [("{a: 1, k: ", "}"), ("[x, ", ", y]"), ("[{k: ", "}]")]
            )
            where = replace(where, flow=True, last=False)
        case "key" if style not in {"|", ">"}:
            closing = ": 1"
            where = replace(where, one_line=True, last=False)
    written = write(random, text, style, where)
    if written is None:
        return None
    if levels and ((where.one_line and not source.endswith("-")) or _elsewhere(random, style)):
        source += eol + " " * (column + random.randint(1, 4))
    elif levels:
        source += " " * random.choice([1, 1, 3])
    source += opening + random.choice(["", "", "", "&a1 ", "!!str ", "!<x,y> &b-c "])
    start = len(source)
    source += written.source
    end = len(source)
    if not where.last:
        if not source.endswith("\n") or style not in {"|", ">"}:
            source += closing + random.choice(["", "  # c: 'd"]) + eol
        for deep, entry in reversed(levels):
            if random.random() < 0.4:
                source += " " * deep + entry + eol
    return Document(source, style, start, end, written.moved(start))


def _elsewhere(random: Random, style: str) -> bool:
    """Return whether a value stands on the line below its key."""
    return style not in {"|", ">"} and random.random() < 0.2


def _column(source: str) -> int:
    return len(source.rsplit("\n", 1)[-1].lstrip("\ufeff"))
