"""The pages of `kcdsl show` and `compare` in a real browser."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kcdsl.verdict.html.certificate import certificate_page
from kcdsl.verdict.html.comparison import comparison_page
from kcdsl.verdict.studies.certificate_view import certificate_view
from kcdsl_backends.empirical.questions.pairs import compare_runs
from kcdsl_certs.verification.inspection import inspect
from tests.support.browser import Browser
from tests.support.evidence import evidence

pytestmark = pytest.mark.programs

CONTRAST = (Path(__file__).parent / "contrast.js").read_text(encoding="utf-8")
VECTORS = Path(__file__).parents[2] / "certs" / "vectors"
NOON = datetime(2026, 12, 1, 12, tzinfo=UTC)


def certificate(name: str) -> str:
    """Return the page of a test vector, with no key that is trusted."""
    path = VECTORS / f"{name}.cert.json"
    found = inspect(path.read_bytes(), None, NOON)
    return certificate_page(certificate_view(str(path), found, None, NOON))


def comparison() -> str:
    """Return the page of two runs that differ in every direction, with bands and a noise floor."""
    one, two = evidence(drift=1e-2), evidence(drift=5e-2, seed=0)
    return comparison_page(compare_runs(one, two, history={}, references={}))


PAGES: dict[str, Callable[[], str]] = {
    "show-proof": lambda: certificate("valid"),
    "show-failed": lambda: certificate("failed"),
    "show-refused": lambda: certificate("bundle-bom"),
    "compare": comparison,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the files of the pages."""
    found = {}
    for name, made in PAGES.items():
        folder = tmp_path_factory.mktemp(name)
        found[name] = folder / f"{name}.html"
        found[name].write_text(made(), encoding="utf-8")
    return found


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (1280, True), (390, False), (390, True)]
)
@pytest.mark.parametrize("name", PAGES)
def test_page_loads_nothing_logs_nothing_and_has_contrast(
    chromium: Browser, files: dict[str, Path], name: str, width: int, dark: bool
) -> None:
    page = chromium.open(files[name], width=width, dark=dark)
    assert page.complaints == []
    assert [url for url in page.requested if not url.startswith(("file:", "data:"))] == []
    wide, there = page.evaluate(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= there
    assert page.evaluate("document.scripts.length") == 0
    contrasts = page.evaluate(CONTRAST)
    assert len(contrasts) > 10
    assert [found for found in contrasts if found[0] < 4.5] == []
    unreachable = "[...document.querySelectorAll('.scroll')].filter(e => e.tabIndex < 0).length"
    assert page.evaluate(unreachable) == 0
    dead = (
        "[...document.querySelectorAll('nav a')]"
        ".filter(a => !document.querySelector(a.getAttribute('href'))).length"
    )
    assert page.evaluate(dead) == 0


@pytest.mark.parametrize("name", PAGES)
def test_cell_texts_are_neither_cut_nor_overlapping(
    chromium: Browser, files: dict[str, Path], name: str
) -> None:
    page = chromium.open(files[name], width=1280)
    cut = page.evaluate(
        """[...document.querySelectorAll("td, th, dd, dt, .pill, .facts *")].filter((e) =>
          e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline"
        ).map((e) => e.textContent.slice(0, 60))"""
    )
    assert cut == []
