"""The page in a real browser: light and dark, wide and narrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Browser, Page

pytestmark = pytest.mark.programs

FOLDER = Path(__file__).parent
CONTRAST = (FOLDER / "contrast.js").read_text(encoding="utf-8")
CHARTS = (FOLDER / "charts.js").read_text(encoding="utf-8")
KINDS = ("violated", "held", "open", "encoder", "one metric", "nothing")


@pytest.fixture(params=[(1280, False), (1280, True), (390, False), (390, True)])
def look(request: pytest.FixtureRequest) -> tuple[int, bool]:
    """Return (width, dark): desktop and phone, in both colour schemes."""
    found: tuple[int, bool] = request.param
    return found


def opened(chromium: Browser, file: Path, look: tuple[int, bool]) -> Page:
    width, dark = look
    return chromium.open(file, width=width, dark=dark)


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_loads_nothing_and_has_contrast(
    chromium: Browser, shown_pages: dict[str, Path], look: tuple[int, bool], kind: str
) -> None:
    page = opened(chromium, shown_pages[kind], look)
    assert page.complaints == []
    foreign = [url for url in page.requested if not url.startswith(("file:", "data:"))]
    assert foreign == []
    assert len([url for url in page.requested if url.startswith("file:")]) == 1
    wide, there = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= there
    contrasts = page.evaluate(CONTRAST)
    assert len(contrasts) > 40
    assert [found for found in contrasts if found[0] < 4.5] == []


def test_preferred_colour_scheme_is_followed(
    chromium: Browser, shown_pages: dict[str, Path]
) -> None:
    grounds, bars = [], []
    for dark in (False, True):
        page = opened(chromium, shown_pages["violated"], (1280, dark))
        grounds.append(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
        bars.append(page.evaluate("getComputedStyle(document.querySelector('.bar.s1')).fill"))
    assert grounds[0] != grounds[1]
    assert bars[0] != bars[1]


@pytest.mark.parametrize("kind", ["violated", "held", "encoder", "one metric"])
def test_charts_draw_inside_their_frames(
    chromium: Browser, shown_pages: dict[str, Path], kind: str
) -> None:
    page = opened(chromium, shown_pages[kind], (1280, False))
    charts: list[dict[str, Any]] = page.evaluate(CHARTS)
    assert len(charts) >= 3
    for chart in charts:
        assert chart["drawn"] > 0, chart
        assert chart["labelled"], chart
        assert chart["title"], chart
        assert chart["said"], chart
        assert chart["tables"] > 0, chart
        assert chart["outside"] == 0, chart
        assert chart["cut"] == [], chart
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids))


def test_verdict_and_violations_are_at_the_top(
    chromium: Browser, shown_pages: dict[str, Path]
) -> None:
    page = opened(chromium, shown_pages["violated"], (1280, False))
    first = page.evaluate(
        "[...document.querySelectorAll('h1, .finding')]"
        ".filter(e => e.getBoundingClientRect().top < innerHeight).map(e => e.innerText)"
    )
    assert first[0] == "The contract is violated"
    assert any("N-KL" in words and "all" in words and "times the limit" in words for words in first)


def test_page_works_with_the_keyboard_and_without_scripts(
    chromium: Browser, shown_pages: dict[str, Path]
) -> None:
    page = opened(chromium, shown_pages["violated"], (1280, False))
    assert page.evaluate("document.scripts.length") == 0
    unreachable = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter(e => e.tabIndex < 0).length"
    )
    assert unreachable == 0
    headings = page.evaluate("[...document.querySelectorAll('h1, h2')].map(e => e.tagName)")
    assert headings.count("H1") == 1
    links = page.evaluate(
        "[...document.querySelectorAll('a[href]')]"
        ".filter(a => !document.querySelector(a.getAttribute('href'))).length"
    )
    assert links == 0


def test_low_contrast_and_wide_words_are_detected(
    chromium: Browser, shown_pages: dict[str, Path], tmp_path: Path
) -> None:
    sound = shown_pages["held"].read_text(encoding="utf-8")
    faint = tmp_path / "faint.html"
    faint.write_text(sound.replace("--soft:#545b64", "--soft:#c0c4ca"), encoding="utf-8")
    page = chromium.open(faint, width=1280)
    assert [found for found in page.evaluate(CONTRAST) if found[0] < 4.5]
    wide = tmp_path / "wide.html"
    wide.write_text(
        sound.replace("</main>", "<p style='width:2000px'>wide</p></main>"), encoding="utf-8"
    )
    page = chromium.open(wide, width=390)
    assert page.evaluate("document.documentElement.scrollWidth") > 390
    loading = tmp_path / "loading.html"
    loading.write_text(
        sound.replace("img-src data:", "img-src *").replace(
            "</main>", "<img src='http://127.0.0.1:9/x.png' alt=''></main>"
        ),
        encoding="utf-8",
    )
    page = chromium.open(loading, width=390)
    assert any(url.startswith("http:") for url in page.requested)
