"""Pages of reports, and a browser that shows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kcdsl.verdict.html import page
from kcdsl_backends.empirical.decision.report import conclude
from tests.support.browser import Browser, browser
from tests.support.evidence import clause, evidence

ENCODER = (clause("N-H", "quantile", "hidden_linf", "1/50", q="99/100"),)
ATTRIBUTION: dict[str, Any] = {
    "schema": "kcdsl.attribution/1",
    "metric": "kl",
    "statistic": "mean",
    "unit": "nat",
    "total": 1e-3,
    "sources": [
        {
            "name": name,
            "alone": alone,
            "left_out": alone,
            "shapley": share,
            "envelope": envelope,
            "can_explain": able,
        }
        for name, alone, share, envelope, able in (
            ("operator", 7e-4, 6e-4, 5e-2, True),
            ("precision", 5e-4, 5e-4, None, None),
            ("batch", -1e-4, -1e-4, 1e-6, False),
        )
    ],
    "layers": [
        {"block": "attn_0", "drift": 0.0, "gain": 0.0},
        {"block": "mlp_0", "drift": 2e-3, "gain": 4e-4},
    ],
    "first_block": "mlp_0",
    "candidates": [
        {"source": "operator", "share": 0.6, "evidence": ["alone it gives 70 %"], "remedies": []}
    ],
}


def documents() -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """Return reports of every kind of page, each with an attribution or None."""
    passing = (clause("N-KL", "max", "kl", "10"),)
    few = (clause("N-KL", "quantile", "kl", "1/2", q="99/100", sample=True),)
    own = evidence(passing)
    runs = {
        key: replace(run, unit=replace(run.unit, values={"kl": run.unit.values["kl"]}))
        for key, run in own.runs.items()
    }
    own = replace(own, runs=runs)
    return {
        "violated": (conclude(evidence()).to_json(), ATTRIBUTION),
        "held": (conclude(evidence(passing)).to_json(), None),
        "open": (conclude(evidence(few, count=5)).to_json(), None),
        "encoder": (conclude(evidence(ENCODER, encoder=True)).to_json(), None),
        "one metric": (conclude(own).to_json(), None),
        "nothing": (conclude(evidence(passing, count=0)).to_json(), None),
    }


@pytest.fixture(scope="session")
def shown_pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the files of pages of every kind."""
    folder = tmp_path_factory.mktemp("pages")
    found = {}
    for name, (document, attribution) in documents().items():
        found[name] = folder / f"{name.replace(' ', '-')}.html"
        found[name].write_text(page(document, attribution), encoding="utf-8")
    return found


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a running browser."""
    with browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture
def attribution() -> dict[str, Any]:
    """Return an attribution document."""
    return ATTRIBUTION
