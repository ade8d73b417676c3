"""Assemble the Markdown of the manual in build/manual: `python -m docs.site.assemble`.

Beside the pages of docs/ it has those from elsewhere in the repository, the sources that pages link
to, references made from the code, and KaTeX. Links stay as they are in the repository, relative to
the file that has them; here they become links of the site. Any generator of sites can do the rest.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from docs.site import reference
from kcdsl.diagnostics.pages import with_examples

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
TARGET = ROOT / "build" / "manual"
ELSEWHERE = {
    "grammar/README.md": "reference/language.md",
    "certs/README.md": "reference/certificate.md",
    "backends/README.md": "reference/backends.md",
    "backends/template/README.md": "how-to/backend-template.md",
    "SECURITY.md": "explanation/security.md",
    "CONTRIBUTING.md": "development/contributing.md",
    "CHANGELOG.md": "development/changelog.md",
    "changelog.d/README.md": "development/fragments.md",
    "grammar/editors/vscode/README.md": "how-to/vscode.md",
}
"""Pages outside docs/, and where the manual has them; examples and codes follow by pattern."""
MODULES = SITE / "node_modules"
ASSETS = {
    "katex.min.js": MODULES / "katex/dist/katex.min.js",
    "katex.min.css": MODULES / "katex/dist/katex.min.css",
    "iframe-worker.js": MODULES / "iframe-worker/shim/index.js",
    "math.js": SITE / "math.js",
    "site.css": SITE / "site.css",
}
LINK = re.compile(
    r"^```.*?^```$|(!?\[(?:`[^`\n]*`|[^\]\n]|\n(?!\n))*\]\()([^)\s]+)\)|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)
"""A link, before and with its target; or an example or a code span, in which there is none."""
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
LANGUAGES = {"py": "python", "yml": "yaml", "kc": "yaml", "patch": "diff", "steps": "sh"}


def main() -> None:
    """Write the pages and the files of the manual."""
    shutil.rmtree(TARGET, ignore_errors=True)
    places = dict(pages())
    sources = {path: f"source/{path}.md" for path in sorted(linked_sources(places))}
    places |= sources
    for path, place in places.items():
        text = source_page(path) if path in sources else page(path, place, places)
        write(place, text)
    shutil.copytree(ROOT / "docs" / "images", TARGET / "images")
    for name, file in ASSETS.items():
        text = file.read_text(encoding="utf-8")
        if name == "katex.min.css":  # the other formats are for browsers of the last decade
            text = re.sub(r",url\([^)]*\.(?:woff|ttf)\) format\([^)]*\)", "", text)
        write(f"assets/kcdsl/{name}", text)
    fonts = TARGET / "assets" / "kcdsl" / "fonts"
    fonts.mkdir()
    for file in sorted((MODULES / "katex/dist/fonts").glob("*.woff2")):
        shutil.copy(file, fonts)


def write(place: str, text: str) -> None:
    """Write a file of the manual."""
    path = TARGET / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def page(path: str, place: str, places: Mapping[str, str]) -> str:
    """Return the text of a page for the manual: links of the site, examples without test marks."""
    text = linked((ROOT / path).read_text(encoding="utf-8"), path, places)
    if place in reference.GENERATED:
        text += reference.GENERATED[place]()
    text = re.sub(r"-->\n(?=\|)", "-->\n\n", text)
    return with_examples(unescaped(text))


def unescaped(text: str) -> str:
    """Return a text without backslashes before bars in code of tables, which GitHub needs alone."""
    row = re.compile(r"^\|.*$", re.MULTILINE)
    code = re.compile(r"`[^`\n]+`")
    return row.sub(lambda line: code.sub(lambda c: c[0].replace("\\|", "|"), line[0]), text)


# --- pages and links -----------------------------------------------------------------------------


def pages() -> Iterator[tuple[str, str]]:
    """Yield the pages of the repository with their places in the manual."""
    for path in sorted(ROOT.glob("docs/**/*.md")):
        if SITE not in path.parents:
            yield path.relative_to(ROOT).as_posix(), path.relative_to(ROOT / "docs").as_posix()
    yield from ELSEWHERE.items()
    for path in sorted(ROOT.glob("examples/*/README.md")):
        yield path.relative_to(ROOT).as_posix(), f"examples/{path.parent.name}.md"
    for path in sorted((ROOT / "kcdsl" / "diagnostics" / "pages").glob("*.md")):
        yield path.relative_to(ROOT).as_posix(), f"reference/codes/{path.name}"


def linked_sources(places: Mapping[str, str]) -> set[str]:
    """Return the files of the repository that pages link to and that are no pages."""
    found = set()
    for source in places:
        text = (ROOT / source).read_text(encoding="utf-8")
        for _, target in filter(all, LINK.findall(text)):
            path = of_repository(target, source)
            suffix = "" if path is None else path.rpartition(".")[2]
            text_file = path and path not in places and suffix not in {"png", "svg", "md"}
            if path and text_file and (ROOT / path).is_file():
                found.add(path)
    return found


def of_repository(target: str, source: str) -> str | None:
    """Return the path from the root of what a link in a file means; None of another site."""
    if re.match(r"[a-z]+:|#", target):
        return None
    path = os.path.normpath(os.path.join(os.path.dirname(source), target.partition("#")[0]))
    readme = f"{path}/README.md"
    return readme if (ROOT / readme).is_file() else path


def linked(markdown: str, source: str, places: Mapping[str, str]) -> str:
    """Return a text with links of the site; what has no place there becomes plain text."""

    folder = os.path.dirname(places[source])

    def replaced(link: re.Match[str]) -> str:
        path = of_repository(link[2], source) if link[2] else None
        if path is None:
            return link[0]
        if path == "README.md":
            path = "docs/README.md"
        _, hash, anchor = link[2].partition("#")
        if path.startswith("docs/images/"):
            place = path.removeprefix("docs/")
        elif path in places:
            place = places[path]
            if place.startswith("source/") and not anchor:
                line = definition(path, link[1][:-2].strip("[]`"))
                hash, anchor = ("#", f"__codelineno-0-{line}") if line else ("", "")
        else:
            return link[1][1:-2]
        return f"{link[1]}{os.path.relpath(place, folder or '.')}{hash}{anchor})"

    return LINK.sub(replaced, markdown)


# --- sources -------------------------------------------------------------------------------------


def definition(path: str, name: str) -> int | None:
    """Return the line where a file defines a name such as `Class.method`, or None."""
    text = (ROOT / path).read_text(encoding="utf-8")
    at = 0
    for part in name.split("."):
        found = re.compile(rf"^\s*(?:def|class) {part}\b|^{part}\b *[:=]", re.M).search(text, at)
        if not part.isidentifier() or found is None:
            return None
        at = found.end()
    return text.count("\n", 0, at) + 1


def source_page(path: str) -> str:
    """Return the page of a file: its text, before that of a schema a table of its fields."""
    text = (ROOT / path).read_text(encoding="utf-8")
    above = (
        unescaped(reference.schema_table(json.loads(text))) if path.endswith(".schema.json") else ""
    )
    suffix = path.rpartition(".")[2]
    language = LANGUAGES.get(suffix, suffix if "." in path else "text")
    return f'{HIDDEN}# {path}\n\n{above}``````{language} linenums="1"\n{text}\n``````\n'


if __name__ == "__main__":
    main()
