"""The built manual: links and anchors resolve, nothing loads from another host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs.site.assemble import ASSETS, linked, pages, unescaped
from tests.support.browser import browser

MOST_SECONDS = 600


class Links(HTMLParser):
    """The anchors, links and loaded resources of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.loaded: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record the anchors and links of a tag."""
        found = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := found.get(key))}
        if target := found.get("href" if tag in {"a", "link"} else "src"):
            (self.targets if tag == "a" else self.loaded).append(target)


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the manual, built as `make docs` does."""
    folder = tmp_path_factory.mktemp("site")
    for words in (["docs.site.assemble"], ["mkdocs", "build", "--strict", "-q", "-d", str(folder)]):
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=repository,
            env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
            capture_output=True,
            encoding="utf-8",
            timeout=MOST_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


def broken(site: Path, parsed: dict[Path, Links]) -> Iterator[str]:
    """Yield links and resources of pages that the site does not have."""
    anchors = {page: links.anchors | {"", "__top"} for page, links in parsed.items()}
    for page, links in parsed.items():
        for target in links.targets + links.loaded:
            parts = urlsplit(target)
            if parts.scheme in {"http", "https", "mailto"} and target in links.targets:
                continue  # a source link that a reader may follow
            place = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            fragment = unquote(parts.fragment)
            known = place.is_file() and place.is_relative_to(site)
            known &= not parts.scheme and not parts.netloc
            if not known or fragment not in anchors.get(place, {fragment}):
                yield f"{page.relative_to(site)}: {target}"


@pytest.mark.programs
def test_site_is_complete_and_loads_nothing_external(site: Path) -> None:
    parsed = {
        page: Links(page.read_text(encoding="utf-8"))
        for page in site.rglob("*.html")
        if page.name != "404.html"  # its links assume a server
    }
    assert len(parsed) > 300
    assert list(broken(site, parsed)) == []
    for sheet in site.rglob("*.css"):
        for target in re.findall(r"url\(([^)]+)\)", sheet.read_text(encoding="utf-8")):
            file = target.strip("\"'")
            assert file.startswith("data:") or (sheet.parent / file).is_file(), (sheet, target)


@pytest.mark.programs
def test_formulas_and_search_work_without_a_server(site: Path, tmp_path: Path) -> None:
    find = """(async () => {
      const box = document.querySelector(".md-search__input");
      box.focus(); box.value = "ellipsoid";
      for (const kind of ["input", "keyup"]) box.dispatchEvent(new Event(kind, {bubbles: true}));
      for (let n = 0; n < 100; n++) {
        await new Promise(done => setTimeout(done, 100));
        const found = document.querySelectorAll(".md-search-result__item").length;
        if (found) return found;
      }
      return 0;
    })()"""
    formulas = "[...document.querySelectorAll('.katex-error')].map(place => place.title)"
    with browser(tmp_path) as chromium:
        written = sorted(p for p in site.rglob("*.html") if 'class="arithmatex"' in p.read_text())
        assert len(written) > 5
        for file in written:
            page = chromium.open(file, width=1200)
            assert page.evaluate(formulas) == [], file.name
            assert page.evaluate("document.querySelectorAll('.katex').length") > 0
            assert page.complaints == []
            assert all(url.startswith(("file:", "data:")) for url in page.requested)
        assert page.evaluate(find) > 0


def test_links_are_rewritten_for_the_site() -> None:
    places = dict(pages())
    source = "docs/reference/verify.md"
    assert places["kcdsl/diagnostics/pages/KC203.md"] == "reference/codes/KC203.md"
    for text, wanted in {
        "[a](numerics.md#b)": "[a](numerics.md#b)",
        "[a](../proofs/chains.md)": "[a](../proofs/chains.md)",
        "[a](../../certs/README.md#b)": "[a](certificate.md#b)",
        "[a](../../README.md)": "[a](../README.md)",
        "![a](../images/b.svg)": "![a](../images/b.svg)",
        "[a](https://example.org/b)": "[a](https://example.org/b)",
        "[a](#b) `[c](d.md)`": "[a](#b) `[c](d.md)`",
        "[a](../../tests)": "a",
    }.items():
        assert linked(text, source, places) == wanted


def test_escaped_bars_in_table_code_are_unescaped() -> None:
    """Python-Markdown would show the backslash that GitHub needs."""
    assert unescaped("| `a\\|b` | c\\|d |\n`e\\|f`\n") == "| `a|b` | c\\|d |\n`e\\|f`\n"


def test_files_that_are_not_downloaded_are_in_the_repository() -> None:
    own = [path for path in ASSETS.values() if "node_modules" not in path.parts]
    assert len(own) == 2
    assert all(path.is_file() for path in own)
