"""No format of reports and experiments shows undecided, invalid or missing results as passed."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from docs.site.report_picture import draw
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.exits import Exit
from kcdsl.verdict.html import page
from kcdsl.verdict.html.experiment import experiment_page, maps
from kcdsl.verdict.html.page import heatmap
from kcdsl.verdict.messages import in_format
from kcdsl.verdict.model import (
    EXITS,
    SHOWN,
    SIGNS,
    WORST_FIRST,
    Held,
    Inconclusive,
    InvalidEvidence,
    Verdict,
    Violated,
    verdict_name,
)
from kcdsl.verdict.report import Report
from kcdsl.verdict.result import ClauseResult, ExceedanceCount
from kcdsl.verdict.text.report import print_report
from kcdsl.verdict.text.studies import print_experiment
from tests.support.reports import ROW, report

NAMES = ("N-A", "N-B", "S-C", "R-D")
SLICES = ("all", "safety")
verdicts: st.SearchStrategy[Verdict] = st.sampled_from(
    (
        Held(),
        Violated({"request": "rows.jsonl:17", "token": 3, "worst": 0.4}),
        Inconclusive("the limits do not decide it"),
        InvalidEvidence("there are no values"),
    )
)


@st.composite
def results(draw: st.DrawFn) -> ClauseResult:
    """Return a result in which everything but the verdict may resemble a pass."""
    n = draw(st.sampled_from((0, 1, 48)))
    k = draw(st.integers(0, n))
    counted = ExceedanceCount(k, n, "requests", None, draw(st.sampled_from((None, 0.06))))
    return replace(
        ROW,
        clause=draw(st.sampled_from(NAMES)),
        slice=draw(st.sampled_from(SLICES)),
        metric=draw(st.sampled_from(("p99(kl)", "mean(tv)"))),
        verdict=draw(verdicts),
        value=draw(st.sampled_from((None, 0.0, 0.01, 1.0))),
        n=n,
        exceedance=counted if n and draw(st.booleans()) else None,
        evidence=draw(st.sampled_from(("census", "sample"))),
        holdout=draw(st.booleans()),
    )


deferred = st.dictionaries(st.sampled_from(("D-1", "D-2")), st.just("demands a proof"))
reports = st.builds(
    lambda rows, left: report(*rows, deferred=left, prechecks=(), crosschecks=(), slices=()),
    st.lists(results(), max_size=8),
    deferred,
)


def worst_of(rows: list[str]) -> str:
    """Return the worst verdict by the order that the reference of exit codes states."""
    for name in ("violated", "invalid_evidence", "inconclusive"):
        if name in rows:
            return name
    return "held" if rows else "invalid_evidence"


def names_of(found: Report) -> list[str]:
    return [verdict_name(row.verdict) for row in found.clauses]


def contract_of(found: Report) -> tuple[SourceFile, dict[str, Span]]:
    """Return a contract with a line for each clause, decided or not, and their places."""
    words = [*NAMES, *found.deferred]
    text = "".join(f"  {word}: {{}}\n" for word in words)
    at = {word: text.index(f"{word}:") for word in words}
    source = SourceFile("contract.yaml", text)
    return source, {word: Span(start, start + len(word)) for word, start in at.items()}


@given(reports)
def test_verdict_and_exit_code_follow_the_worst_result(found: Report) -> None:
    name = worst_of(names_of(found))
    document = found.to_json()
    assert (document["verdict"], document["exit"]) == (name, int(EXITS[name]))
    assert (found.exit is Exit.HELD) is (set(names_of(found)) == {"held"})


@pytest.mark.full
@given(reports, st.sets(st.sampled_from(NAMES)))
def test_junit_passes_a_clause_only_if_all_results_hold(found: Report, unplaced: set[str]) -> None:
    source, places = contract_of(found)
    known = {name: place for name, place in places.items() if name not in unplaced}
    root = ElementTree.fromstring(
        in_format(found.to_json(), "junit", "kcdsl evaluate", source, known)
    )
    cases = {case.get("name", ""): case for case in root.iter("testcase")}
    by_clause: dict[str, set[str]] = {}
    for row in found.clauses:
        by_clause.setdefault(row.clause, set()).add(verdict_name(row.verdict))
    for name, verdict in by_clause.items():
        if name in known:
            assert (cases[name].find("failure") is None) is (verdict == {"held"})
    assert cases.keys() - {source.name} == by_clause.keys() & known.keys()
    failures = len(root.findall(".//failure"))
    assert int(root.get("failures", "")) == failures
    open_or_worse = any(name != "held" for name in names_of(found))
    assert (failures > 0) is open_or_worse


@given(reports, st.booleans())
def test_annotations_name_each_failing_result(found: Report, placed: bool) -> None:
    source, places = contract_of(found) if placed else (None, {})
    counted = Counter(names_of(found))
    bad = counted["violated"] + counted["invalid_evidence"]
    shown = {
        format: in_format(found.to_json(), format, "kcdsl evaluate", source, places)
        for format in ("github", "sarif", "concise", "text")
    }
    marks = Counter(re.findall(r"^::(\w+)", shown["github"], re.MULTILINE))
    assert (marks["error"], marks["warning"]) == (bad, counted["inconclusive"])
    (run,) = json.loads(shown["sarif"])["runs"]
    levels = Counter(result["level"] for result in run["results"])
    assert (levels["error"], levels["warning"]) == (bad, counted["inconclusive"])
    assert run["invocations"][0]["exitCode"] == int(found.exit)
    for format in ("concise", "text"):
        codes = Counter(re.findall(r"\b(?:error|warning)\[(KC67[123])\]", shown[format]))
        wanted = {
            "KC671": counted["violated"],
            "KC672": counted["invalid_evidence"],
            "KC673": counted["inconclusive"],
        }
        assert codes == Counter({code: n for code, n in wanted.items() if n})


@pytest.mark.full
@settings(max_examples=40)
@given(reports)
def test_terminal_and_picture_show_one_sign_per_verdict(
    found: Report,
) -> None:
    stream = io.StringIO()
    print_report(found, stream)
    wanted = Counter(names_of(found)) + Counter([found.verdict])  # the last line has the worst
    picture = re.sub(r"<[^>]*>", "", draw(found.to_json()))
    picture = picture.replace("&#160;", " ").replace("\xa0", " ")
    for name, (words, _) in SHOWN.items():
        assert stream.getvalue().count(words) == wanted[name], name
        assert picture.count(words) == wanted[name], name
    for name in found.deferred:
        assert f"not decided here: {name}" in stream.getvalue()


@pytest.mark.full
@settings(max_examples=60)
@given(reports)
def test_page_colours_clauses_by_their_worst_result(
    found: Report,
) -> None:
    document = found.to_json()
    text = page(document)
    by_cell: dict[tuple[str, str], list[str]] = {}
    for row in found.clauses:
        by_cell.setdefault((row.clause, row.slice), []).append(verdict_name(row.verdict))
    drawn = heatmap(document["clauses"])
    shown = {
        (row.clause, slice_): cell.verdict
        for row in drawn.rows
        for slice_, cell in zip(drawn.slices, row.cells, strict=True)
        if cell is not None
    }
    assert shown == {cell: worst_of(names) for cell, names in by_cell.items()}
    colours = Counter(re.findall(r'<td class="v-(\w+)', text))
    assert colours == Counter(shown.values())
    header = text[text.index("<header") : text.index("</header>")]
    assert ("✓" in header) is ("v-held" in header) is (found.exit is Exit.HELD)
    for name in found.deferred:
        assert f"<dt>{name}</dt>" in text


# --- experiments ---------------------------------------------------------------------------------


@st.composite
def rows_of_cells(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a row of a cell; rates may be 0 or 1 for any verdict."""
    rate = draw(st.sampled_from((None, 0.0, 0.5, 1.0)))
    return {
        "clause": draw(st.sampled_from(NAMES[:2])),
        "slice": draw(st.sampled_from(SLICES)),
        "requirement": "p99(kl) <= 1",
        "metric": draw(st.sampled_from(("p99(kl)", "mean(tv)"))),
        "op": "<=",
        "value": draw(st.sampled_from((None, 0.5))),
        "threshold": 1.0,
        "unit": "nat",
        "verdict": draw(st.sampled_from(WORST_FIRST)),
        "reason": draw(st.sampled_from((None, "few"))),
        "n": 4,
        "passed": None if rate is None else int(4 * rate),
        "rate": rate,
        "low": draw(st.sampled_from((None, 0.25))),
        "high": None,
        "narrow": draw(st.sampled_from(([], ["few units"]))),
    }


@st.composite
def experiments(draw: st.DrawFn) -> dict[str, Any]:
    """Draw an experiment, E1 or E2, with some cells that did not run."""
    kind = draw(st.sampled_from(("e1", "e2")))
    cells = []
    for at in range(draw(st.integers(1, 4))):
        spec: dict[str, Any] = {"name": f"v{at}", "factor": "none", "change": "as it is"}
        if kind == "e2":
            spec = {"device": "cpu", "length": 8, "batch": 1 + at, "concurrency": 1}
        if draw(st.booleans()):
            rows = draw(st.lists(rows_of_cells(), max_size=5))
            left = {"failed_checks": [], "deferred": draw(deferred)} if kind == "e1" else {}
            cells.append({**spec, "status": "ran", "reason": None, "rows": rows, **left})
        else:
            cells.append({**spec, "status": "not_run", "reason": "KC472: no device"})
    document: dict[str, Any] = {
        "schema": "kcdsl.experiment/1",
        "experiment": kind,
        "manifest": {
            "contract": {"name": "demo", "version": "1.0.0", "digest": "sha256:" + "b" * 64},
            "files": {},
            "seed": 0,
            "versions": {},
        },
        "cells": cells,
    }
    if kind == "e2":
        batches = [cell["batch"] for cell in cells]
        axes = {"device": ["cpu"], "length": [8], "batch": batches, "concurrency": [1]}
        document |= {"axes": axes, "deferred": draw(deferred)}
    return document


def cells_of(document: dict[str, Any]) -> dict[tuple[str, str, int], str]:
    """Return the worst verdict of each clause on a slice in each cell that ran."""
    found: dict[tuple[str, str, int], list[str]] = {}
    for at, cell in enumerate(document["cells"]):
        for row in cell.get("rows", ()):
            found.setdefault((row["clause"], row["slice"], at), []).append(row["verdict"])
    return {key: worst_of(names) for key, names in found.items()}


@pytest.mark.full
@given(experiments())
def test_experiment_shows_the_worst_part_of_every_clause(
    document: dict[str, Any],
) -> None:
    wanted = Counter(cells_of(document).values())
    stream = io.StringIO()
    print_experiment(document, stream)
    table, _, rest = stream.getvalue().partition("not run:")
    for name, sign in SIGNS.items():
        assert table.count(f"{sign}") == wanted[name], (name, table)
    missing = [cell for cell in document["cells"] if cell["status"] != "ran"]
    assert bool(missing) is bool(rest)
    text = experiment_page(document)
    if document["experiment"] == "e1":
        colours = Counter(re.findall(r'<td class="rate v-(\w+)', text))
        assert +Counter({n: c for n, c in colours.items() if n != "none"}) == wanted
    else:
        pictures = "".join(one.svg for one in maps(document))
        for name, sign in SIGNS.items():
            heads = re.findall(rf'font-weight:600">{re.escape(sign)}', pictures)
            assert len(heads) == wanted[name], name
    left = {name for cell in document["cells"] for name in cell.get("deferred", ())}
    for name in left | document.get("deferred", {}).keys():
        assert f"{name} " in text
        assert f"{name} " in stream.getvalue()


@given(experiments())
def test_colours_of_held_and_other_verdicts_differ(document: dict[str, Any]) -> None:
    if document["experiment"] != "e2":
        return
    green = []
    for one in maps(document):
        for found in re.findall(r'<title>([^<]*)</title><rect[^>]*fill="#(\w{6})"', one.svg):
            words, colour = found
            red, leaf, _ = (int(colour[i : i + 2], 16) for i in (0, 2, 4))
            green.append((leaf > red, words.startswith("held")))
    assert all(looks == holds for looks, holds in green)
