"""The page as text: foreign text is escaped, and nothing is loaded from elsewhere."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from kcdsl.verdict.html import page
from kcdsl.verdict.html.page import heatmap
from kcdsl.verdict.html.svg import labels, powers, ticks
from kcdsl.verdict.messages import brief, findings, how_far
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.decision.report import conclude
from tests.support.evidence import clause, evidence

ATTACK = "\"><script>alert(1)</script><img src=x onerror=alert(2)>'&{{7*7}}"


class Elements(HTMLParser):
    """Collects the elements of a page, and their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.found}


def with_markup(value: Any, text: str) -> Any:
    """Return a document with markup added to every free text."""
    if isinstance(value, dict):
        return {name: with_markup(part, text) for name, part in value.items()}
    if isinstance(value, list):
        return [with_markup(part, text) for part in value]
    return value + text if isinstance(value, str) else value


FIXED = ("verdict", "unit", "op", "level", "evidence", "outcome", "scale", "better", "by", "of")


def kept(document: Any, original: Any) -> Any:
    """Restore texts that are not free: words from a fixed set."""
    if isinstance(document, dict):
        return {
            name: original[name] if name in FIXED else kept(part, original[name])
            for name, part in document.items()
        }
    if isinstance(document, list):
        return [kept(a, b) for a, b in zip(document, original, strict=True)]
    return document


def test_markup_in_any_text_of_a_report_is_escaped(attribution: Any) -> None:
    original = conclude(evidence()).to_json()
    foreign = kept(with_markup(copy.deepcopy(original), ATTACK), original)
    source = kept(with_markup(copy.deepcopy(attribution), ATTACK), attribution)
    sound = Elements(page(original, attribution))
    found = Elements(page(foreign, source))
    assert found.names == sound.names
    assert not {"script", "img", "iframe", "object", "embed"} & found.names
    assert len(found.found) == len(sound.found)
    for _, attributes in found.found:
        assert not [name for name in attributes if name.startswith("on")]
    assert "{{7*7}}" in page(foreign)  # a template in a name is text, too
    assert ">49<" not in page(foreign)


def test_markup_in_names_is_escaped() -> None:
    found = evidence(
        (clause(ATTACK, "max", "kl", "1/1000000"),), name=ATTACK, ids=dict.fromkeys([3], ATTACK)
    )
    text = page(conclude(found).to_json())
    assert "<script>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_commands_in_backticks_are_code_with_escaped_markup() -> None:
    report = conclude(evidence()).to_json()
    report["deferred"] = {
        "N-1": "`kcdsl verify` decides it",
        "N-2": "one ` alone",
        "N-3": "`<img src=x>`",
    }
    text = page(report, None)
    assert "<code>kcdsl verify</code> decides it" in text
    assert "<dd>one ` alone</dd>" in text
    assert "<code>&lt;img src=x&gt;</code>" in text
    assert text.count("`") == 1


def test_page_contains_no_external_address(attribution: Any) -> None:
    text = page(conclude(evidence()).to_json(), attribution)
    assert re.findall(r"https?:|//[a-z]|@import|url\(", text) == []
    loading = [
        (tag, attributes)
        for tag, attributes in Elements(text).found
        if {"src", "srcset", "action", "poster"} & attributes.keys()
        or (tag == "link" and attributes.get("href") != "data:,")
    ]
    assert loading == []
    assert "default-src 'none'" in text


def test_page_states_the_method_of_whole_model_bounds() -> None:
    document = conclude(evidence()).to_json()
    for row in document["clauses"]:
        context = {"measured": {"p50": 1e-6, "p99": 1e-6, "worst": 1e-6}}
        row["context"] = {**context, "certified": None, "noise_floor": None}
    assert "bound of the whole model" not in page(document)
    document["bounding"] = {"domains": {"affine forms": ["a", "b"], "fewer passes": ["c"]}}
    text = page(document)
    assert "Requests with a bound of the whole model: 2 by affine forms, 1 by fewer passes." in text


def test_page_is_deterministic() -> None:
    document = conclude(evidence()).to_json()
    assert page(document) == page(copy.deepcopy(document))


def test_reports_of_earlier_versions_have_a_page() -> None:
    document = conclude(evidence()).to_json()
    for name in ("charts", "warnings", "bounding"):
        del document[name]
    for row in document["clauses"]:
        del row["context"]
    text = page(document)
    assert "The contract is violated" in text
    assert "<svg" not in text


@pytest.mark.parametrize("verdict", ["held", "violated", "inconclusive", "invalid_evidence"])
def test_only_a_held_contract_has_the_style_of_held(verdict: str) -> None:
    document = conclude(evidence((clause("N-KL", "max", "kl", "10"),))).to_json()
    document["verdict"] = verdict
    for row in document["clauses"]:
        row["verdict"], row["reason"] = verdict, "why"
    text = page(document)
    header = text[text.index("<header") : text.index("</header>")]
    assert f"v-{verdict}" in header
    assert ("holds" in header) is (verdict == "held")
    assert ("✓" in header) is (verdict == "held")
    named = text.count('<p class="name">')
    assert named == (0 if verdict == "held" else len(document["clauses"]))
    cells = re.findall(r'<td class="v-(\w+)', text)
    assert set(cells) == {verdict}


def test_undecided_clause_does_not_lead_with_its_share() -> None:
    (row,) = conclude(evidence((clause("N-KL", "max", "kl", "10"),))).to_json()["clauses"]
    firsts = {}
    for verdict in ("held", "violated", "inconclusive", "invalid_evidence"):
        (cell,) = heatmap([{**row, "verdict": verdict}]).rows[0].cells
        assert cell is not None
        firsts[verdict] = cell.large
        assert "100%" in f"{cell.large} {cell.small}"
    assert firsts == {
        "held": "100%",
        "violated": "100%",
        "inconclusive": "not decided",
        "invalid_evidence": "invalid evidence",
    }


def test_shared_reason_is_one_finding_that_names_all_results() -> None:
    check = Precheck("temperature_fit", "failed", "T = 0.7 explains it", 0.7, blocking=True)
    document = conclude(evidence(prechecks=(check,))).to_json()
    (found,) = findings(document)
    assert "temperature_fit" in found["far"]
    assert found["action"] == "higher precision, fallback"
    named = [(of["clause"], slice_) for of in found["of"] for slice_ in of["slices"]]
    assert sorted(named) == sorted((r["clause"], r["slice"]) for r in document["clauses"])
    text = page(document)
    assert "<strong>N-KL</strong> on <strong>all</strong>, <strong>short</strong>" in text
    assert text.count('<li class="finding') == 1


def test_heat_map_shows_the_worst_part_of_a_conjunction() -> None:
    (row,) = conclude(evidence((clause("N-KL", "max", "kl", "10"),))).to_json()["clauses"]
    worse = {**row, "verdict": "violated", "exceedance": {**row["exceedance"], "k": 1, "rate": 0.5}}
    (line,) = heatmap([row, worse]).rows
    (cell,) = line.cells
    assert cell is not None
    assert (cell.verdict, cell.share) == ("violated", "50.0%")


def test_share_of_100_percent_is_shown_only_if_exact() -> None:
    (row,) = conclude(evidence((clause("N-KL", "max", "kl", "10"),))).to_json()["clauses"]
    for rate, shown in ((0.0, "100%"), (1e-9, "99.9%"), (1.0, "0%"), (1 - 1e-9, "0.1%")):
        one = {**row, "exceedance": {**row["exceedance"], "rate": rate}}
        (cell,) = heatmap([one]).rows[0].cells
        assert cell is not None
        assert cell.share == shown


def test_distance_from_the_threshold_is_stated() -> None:
    rows = {r["clause"]: r for r in conclude(evidence()).to_json()["clauses"]}
    assert re.fullmatch(
        r"0\.00\d+ nat instead of <= 0\.001 nat, \d\.\d+ times the limit", how_far(rows["N-KL"])
    )
    assert re.fullmatch(
        r"[\d.]+ % \(\d+ of \d+\) of the requests are beyond, 5% of requests may be",
        how_far(rows["N-TV"]),
    )


def test_axis_ticks_are_round_distinct_and_inside() -> None:
    assert ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert ticks(2, 2) == [2]
    assert powers(1e-9, 1e-3) == pytest.approx([10.0**n for n in range(-9, -2)])
    for low, high in ((3e-5, 4e-3), (2.1e-3, 4.9e-3), (1.1, 1.3), (0.999999, 1.0)):
        found = powers(low, high)
        assert len(found) > 1
        assert all(low <= value <= high * (1 + 1e-9) for value in found)
        assert len(set(labels(found))) == len(found)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (1.2e-6, "1.2e-6"),
        (12345.0, "1.23e4"),
        (1.0, "1"),
        (-2e-9, "-2e-9"),
    ],
)
def test_numbers_are_formatted_briefly(value: float, text: str) -> None:
    assert brief(value) == text
