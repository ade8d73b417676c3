"""Documentation pages: those of codes, `pages/KC….md`, the only source of their text, and of the
manual.

A page of a code is Markdown: a heading `# KC203: unknown metric`, a first paragraph with its
meaning, then sections. Fenced blocks are examples, which tests run; `tests/support/pages.py`
describes their form. A block `file NAME` is the text of a file.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

from kcdsl.diagnostics.codes import Code

FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(r"(?<=\.)\s+")
MANUAL = ("tutorials", "how-to", "reference", "explanation", "proofs")
"""The folders of the manual, below docs/ in the sources and below `manual/` in the wheel."""
FURTHER: Mapping[str, str] = {
    "backends": "backends/README.md",
    "certs": "certs/README.md",
    "grammar": "grammar/README.md",
    "security": "SECURITY.md",
}
"""Pages of the manual beside docs/: their names, also of the files in `manual/` of the wheel, and
their files in the sources."""
_CODES = "kcdsl/diagnostics/pages"
_LINK = re.compile(
    r"^```.*?^```$|!?\[((?:`[^`\n]*`|[^\]\n]|\n(?!\n))*)\]\((?![a-z]+:)([^)\s]+)\)|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)
"""A link inside the repository, its text and its target; or an example or a code span, in which
there is none."""
_LANGUAGES = {"py": "python", "yaml": "yaml", "toml": "toml", "json": "json"}
"""The languages of files by their suffixes."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its whole text, its summary, which is the first paragraph, and its folder in the
    sources, from which its links start."""

    text: str
    folder: str = _CODES

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
        """Return the page as Markdown for readers: without annotations for tests, with the names of
        files before their text."""
        return with_examples(self._cited())

    @property
    def plain(self) -> str:
        """Return the page as plain text: with indented examples, without markup."""
        text = FENCE.sub(_indented, self._cited()).rstrip("\n") + "\n"
        return re.sub(r"^#+ ", "", text, flags=re.MULTILINE).replace("**", "")

    def _cited(self) -> str:
        """Return the text with links to pages replaced by the commands that print them, and other
        links by the paths of their files in the sources."""
        return _LINK.sub(lambda link: _citation(link, self.folder), self.text)


def page(code: Code) -> Page:
    """Return the page of a code."""
    return Page((files("kcdsl.diagnostics") / "pages" / f"{code.id}.md").read_text("utf-8"))


def manual_page(name: str) -> Page | None:
    """Return the page of the manual with this file name; None if there is none."""
    file = _manual().get(name)
    if file is None:
        return None
    folder = posixpath.dirname(FURTHER[name]) if name in FURTHER else f"docs/{file.parent.name}"
    return Page(file.read_text("utf-8"), folder)


def manual_pages() -> tuple[str, ...]:
    """Return the names of the pages of the manual."""
    return tuple(_manual())


@cache
def _manual() -> dict[str, Path]:
    """Return the files of the manual by their names: those of the wheel, or of the sources."""
    package = Path(__file__).resolve().parents[1]
    root, sources = package / "manual", package.parent
    further = {name: root / f"{name}.md" for name in FURTHER}
    if not root.is_dir() and (sources / "mkdocs.yml").is_file():
        root, further = sources / "docs", {n: sources / path for n, path in FURTHER.items()}
    pages = {file.stem: file for folder in MANUAL for file in sorted((root / folder).glob("*.md"))}
    return pages | {name: file for name, file in further.items() if file.is_file()}


def with_examples(text: str) -> str:
    """Return Markdown for readers: without annotations for tests, with the names of files before
    their text."""
    return FENCE.sub(_readable, text).rstrip("\n") + "\n"


def place(code: Code) -> str | None:
    """Return the URI of the page of a code; None if it is not in a folder."""
    file = files("kcdsl.diagnostics") / "pages" / f"{code.id}.md"
    return file.as_uri() if isinstance(file, Path) and file.is_file() else None


def _citation(link: re.Match[str], folder: str) -> str:
    """Return the text that replaces a link of a page."""
    text, target = link[1], link[2]
    if target is None:
        return link[0]
    file = target.partition("#")[0]
    if not file:
        return text
    path = posixpath.normpath(posixpath.join(folder, file))
    name = _name(path)
    if name is None:
        return text if text.strip("`") == path else f"{text} (`{path}`)"
    if text.strip("`") == name:
        return text
    command = f"`kcdsl explain {name}`"
    return command if text.endswith((f"{name}.md", path)) else f"{text} ({command})"


def _name(path: str) -> str | None:
    """Return the name of the page at a path of the sources; None if there is no page."""
    folder, _, file = path.rpartition("/")
    stem = file.removesuffix(".md")
    named = {further: name for name, further in FURTHER.items()}.get(path)
    if folder == _CODES:
        return stem
    known = folder.startswith("docs/") and folder.removeprefix("docs/") in MANUAL and stem != file
    return named or (stem if known and stem in _manual() else None)


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
