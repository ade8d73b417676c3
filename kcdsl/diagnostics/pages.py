"""Pages to read: of a code, `pages/KC….md`, the only place of its text, and of the manual.

A page of a code is Markdown: a heading `# KC203: unknown metric`, a first paragraph that says what
it does, then sections. Fenced blocks are examples, which tests run; `tests/support/pages.py` says
how they are written. A block `file NAME` is the text of a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from kcdsl.diagnostics.codes import Code

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=\.)\s+")
MANUAL = ("tutorials", "how-to", "reference", "explanation", "proofs")
"""The folders of the manual, below docs/ in the sources and below `manual/` in the wheel."""
_PAGE_LINK = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)*(?:[\w-]+/)*(KC[0-9]{3}|[a-z0-9-]+)\.md(?:#[\w-]*)?\)"
)
_LANGUAGES = {"py": "python", "yaml": "yaml", "toml": "toml", "json": "json"}
"""The languages of files by their suffixes."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its whole text and its summary, which is the first paragraph."""

    text: str

    @property
    def summary(self) -> str:
        """Return the first paragraph in one line."""
        paragraphs = filter(None, map(str.strip, self.text.partition("\n")[2].split("\n\n")))
        return " ".join(next(paragraphs, "").split())

    @property
    def first_sentence(self) -> str:
        """Return the first sentence of the summary."""
        return _SENTENCE_END.split(self.summary, maxsplit=1)[0]

    @property
    def markdown(self) -> str:
        """Return the page as Markdown for readers: without what only tests need, with the names of
        files before their text."""
        return with_examples(_PAGE_LINK.sub(_cited, self.text))

    @property
    def plain(self) -> str:
        """Return the page as plain text: examples are indented, marks left out."""
        text = FENCE.sub(_indented, _PAGE_LINK.sub(_cited, self.text)).rstrip("\n") + "\n"
        return re.sub(r"^#+ ", "", text, flags=re.MULTILINE).replace("**", "")


def page(code: Code) -> Page:
    """Return the page of a code."""
    return Page((files("kcdsl.diagnostics") / "pages" / f"{code.id}.md").read_text("utf-8"))


def manual_page(name: str) -> Page | None:
    """Return the page of the manual whose file has a name; None where there is none."""
    file = _manual().get(name)
    return None if file is None else Page(file.read_text("utf-8"))


def manual_pages() -> tuple[str, ...]:
    """Return the names of the pages of the manual."""
    return tuple(_manual())


@cache
def _manual() -> dict[str, Path]:
    """Return the files of the manual by their names: those of the wheel, or of the sources."""
    package = Path(__file__).resolve().parents[1]
    root, sources = package / "manual", package.parent
    if not root.is_dir() and (sources / "mkdocs.yml").is_file():
        root = sources / "docs"
    return {file.stem: file for folder in MANUAL for file in sorted((root / folder).glob("*.md"))}


def with_examples(text: str) -> str:
    """Return Markdown for readers: without what only tests need, the names of files before their
    text."""
    return FENCE.sub(_readable, text).rstrip("\n") + "\n"


def place(code: Code) -> str | None:
    """Return the URI of the page of a code; None where it lies in no folder."""
    file = files("kcdsl.diagnostics") / "pages" / f"{code.id}.md"
    return file.as_uri() if isinstance(file, Path) and file.is_file() else None


def _cited(link: re.Match[str]) -> str:
    """Return a link to another page as the command that prints it; other links stay."""
    text, name = link[1], link[2]
    if name in {text, text.strip("`")}:
        return text
    if not name.startswith("KC") and name not in _manual():
        return link[0]
    command = f"`kcdsl explain {name}`"
    return command if text.endswith(f"{name}.md") else f"{text} ({command})"


def _readable(fence: re.Match[str]) -> str:
    language, _, name = fence[1].strip().partition(" ")
    if language != "file":
        return f"```{language}\n{fence[2]}```"
    language = _LANGUAGES.get(name.rpartition(".")[2], "text")
    return f"`{name.strip()}`:\n\n```{language}\n{fence[2]}```"


def _indented(fence: re.Match[str]) -> str:
    language, _, name = fence[1].strip().partition(" ")
    lines = [f"    {line}".rstrip() for line in fence[2].splitlines()]
    return "\n".join([*([f"{name.strip()}:\n"] if language == "file" else []), *lines])
