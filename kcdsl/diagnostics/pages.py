"""The page of a code: the only place of its text, with its bad and its good example.

A page is Markdown: a heading `# KC203: unknown metric`, a first paragraph that says what it does,
then sections. Fenced blocks are examples: `yaml bad at="…"` and `yaml good` are contracts, whose
missing sections a base contract supplies; `file NAME` writes a file, and `console bad` and
`console good` hold commands with what they print.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

from kcdsl.diagnostics.codes import Code

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_AT = re.compile(r'at="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, whether it is `bad`, `good` or neither, its text. `at` is the
    text that the finding of a bad contract covers; `name` is that of a file."""

    language: str
    kind: str
    text: str
    at: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A page: heading, summary (its first paragraph), whole text, blocks in their order."""

    heading: str
    summary: str
    text: str
    blocks: tuple[Block, ...]

    @property
    def sections(self) -> tuple[str, ...]:
        """Return the headings of its sections."""
        prose = _FENCE.sub("", self.text)
        return tuple(line[3:].strip() for line in prose.splitlines() if line.startswith("## "))


def page(code: Code) -> Page | None:
    """Return the page of a code; None where it has none."""
    file = files("kcdsl.diagnostics") / "pages" / f"{code.id}.md"
    return parse(file.read_text(encoding="utf-8")) if file.is_file() else None


def names() -> tuple[str, ...]:
    """Return the codes that have a page."""
    found = (item.name for item in (files("kcdsl.diagnostics") / "pages").iterdir())
    return tuple(sorted(name.removesuffix(".md") for name in found if name.endswith(".md")))


def parse(text: str) -> Page:
    """Read a page."""
    heading, _, rest = text.partition("\n")
    paragraphs = [part.strip() for part in rest.split("\n\n") if part.strip()]
    summary = " ".join(paragraphs[0].split()) if paragraphs else ""
    return Page(heading.removeprefix("#").strip(), summary, text, tuple(_blocks(text)))


def _blocks(text: str) -> Iterator[Block]:
    for fence in _FENCE.finditer(text):
        info, body = fence[1].strip(), fence[2]
        language, _, rest = info.partition(" ")
        at = _AT.search(rest)
        words = rest.split()
        kind = words[0] if words and words[0] in {"bad", "good"} else ""
        name = rest.strip() if language == "file" else None
        shown = None if at is None else at[1].replace('\\"', '"').replace("\\n", "\n")
        yield Block(language, kind, body, shown, name)
