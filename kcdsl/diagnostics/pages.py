"""The page of a code: the only place of its text, with its bad and its good example.

A page is Markdown: a heading `# KC203: unknown metric`, a first paragraph that says what it does,
then sections. Fenced blocks are examples, which tests run:

- `yaml bad at="…"` and `yaml good` are contracts; a base contract supplies sections they lack.
  `at` is the text that the finding covers;
- `file NAME` writes a file, `python` is run where files of bytes are needed (`python bad` ends with
  a refusal), and `console bad` and `console good` hold commands with what they print: lines
  `$ kcdsl …`, or `$ NAME=VALUE kcdsl …` for a variable of the environment;
- `varies="…"` is a pattern of what differs from run to run; blanks do not count there;
- `planted="module.name=expression"` shows a defect or a lack that no input has: what `name` gives
  is replaced by the value of the expression while the commands run.

In what a command prints, `…` stands for any text in its line, and for any lines where it stands
alone. The folder `tiny_lm` is that of `examples/tiny_lm`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from kcdsl.diagnostics.codes import Code

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OPTION = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SENTENCE_END = re.compile(r"(?<=\.)\s+")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block: its language, its kind (such as `bad` or `good`), its text.

    `at` is the text that the finding of a bad contract covers, `varies` a pattern of what differs
    from run to run, `planted` the defect that it shows, and `name` that of a file. The whole block,
    fences included, stands at `start` to `end` of the page.
    """

    language: str
    kind: str
    text: str
    at: str | None = None
    name: str | None = None
    varies: str | None = None
    planted: str | None = None
    start: int = 0
    end: int = 0


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

    @property
    def markdown(self) -> str:
        """Return the page as Markdown for readers: without what only tests need, with the names of
        files before their text."""
        return self._with_blocks(_readable)

    @property
    def plain(self) -> str:
        """Return the page as plain text: examples are indented, marks left out."""
        text = self._with_blocks(_indented)
        return re.sub(r"^#+ ", "", text, flags=re.MULTILINE).replace("**", "")

    def _with_blocks(self, shown: Callable[[Block], str]) -> str:
        parts, last = [], 0
        for block in self.blocks:
            parts += [self.text[last : block.start], shown(block)]
            last = block.end
        return "".join([*parts, self.text[last:]]).rstrip("\n") + "\n"


def page(code: Code) -> Page:
    """Return the page of a code."""
    file = files("kcdsl.diagnostics") / "pages" / f"{code.id}.md"
    return parse(file.read_text(encoding="utf-8"))


def place(code: Code) -> str | None:
    """Return the URI of the page of a code; None where it lies in no folder."""
    file = files("kcdsl.diagnostics") / "pages" / f"{code.id}.md"
    return file.as_uri() if isinstance(file, Path) and file.is_file() else None


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


def first_sentence(text: str) -> str:
    """Return the first sentence of a paragraph."""
    return _SENTENCE_END.split(text, maxsplit=1)[0]


def _blocks(text: str) -> Iterator[Block]:
    for fence in _FENCE.finditer(text):
        language, _, rest = fence[1].strip().partition(" ")
        options = {
            name: value.replace('\\"', '"').replace("\\n", "\n")
            for name, value in _OPTION.findall(rest)
        }
        words = rest.split()
        kind = words[0] if words and words[0] in {"bad", "good", "roughly"} else ""
        yield Block(
            language,
            kind,
            fence[2],
            options.get("at"),
            rest.strip() if language == "file" else None,
            options.get("varies"),
            options.get("planted"),
            fence.start(),
            fence.end(),
        )


def _readable(block: Block) -> str:
    language = _language(block)
    before = f"`{block.name}`:\n\n" if block.name else ""
    return f"{before}```{language}\n{block.text}```"


def _indented(block: Block) -> str:
    lines = [f"    {line}".rstrip() for line in block.text.splitlines()]
    return "\n".join([f"{block.name}:\n" if block.name else "", *lines]).lstrip("\n")


def _language(block: Block) -> str:
    match block.language, (block.name or "").rpartition(".")[2]:
        case "file", "yaml" | "toml" | "json" as suffix:
            return suffix
        case "file", "py":
            return "python"
        case "file", _:
            return "text"
        case language, _:
            return language
