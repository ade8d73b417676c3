"""The report document, its schema, its exit code and its display."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from docs.site.report_picture import draw
from kcdsl.exits import Exit
from kcdsl.verdict.html import page
from kcdsl.verdict.model import InvalidEvidence, Violated, worst
from kcdsl.verdict.quantities import quantity
from kcdsl.verdict.report import Report
from kcdsl.verdict.result import Certified, MeasuredPercentiles, NoiseFloor, ResultContext
from kcdsl.verdict.text.report import print_report
from tests.support.reports import ROW, VERDICTS, report, report_schema


def shown(document: Report) -> str:
    stream = io.StringIO()
    print_report(document, stream)
    return stream.getvalue()


@pytest.mark.parametrize("verdicts", list(itertools.product(VERDICTS, repeat=2)))
def test_violation_takes_precedence_in_the_exit_code(verdicts: tuple[Any, Any]) -> None:
    order = [Exit.VIOLATED, Exit.COULD_NOT_RUN, Exit.INCONCLUSIVE, Exit.HELD]
    single = [Exit.HELD, Exit.VIOLATED, Exit.INCONCLUSIVE, Exit.COULD_NOT_RUN]
    wanted = min((single[VERDICTS.index(v)] for v in verdicts), key=order.index)
    rows = [replace(ROW, verdict=v) for v in verdicts]
    assert report(*rows).exit is wanted


def test_report_without_clauses_is_never_a_pass() -> None:
    assert report().exit is Exit.COULD_NOT_RUN


def test_report_document_follows_its_published_schema() -> None:
    rows = [replace(ROW, verdict=v, deviation=math.inf, value=math.nan) for v in VERDICTS]
    document = json.loads(report(*rows).dumps())
    jsonschema.Draft202012Validator.check_schema(report_schema())
    jsonschema.validate(document, report_schema())
    assert document["schema"] == "kcdsl.report/3"
    assert document["clauses"][0]["value"] is None
    assert document["clauses"][0]["deviation"] is None
    assert document["health"]["deviation"] is None
    assert document["slices"][0]["statistics"]["kl"]["worst"] is None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "extra": 1}, report_schema())


def test_printed_report_fits_and_is_complete() -> None:
    rows = [replace(ROW, verdict=v, clause=f"N-{i}") for i, v in enumerate(VERDICTS)]
    text = shown(report(*rows))
    assert max(map(len, text.splitlines())) <= 100
    for word in (
        "✓ held",
        "✗ violated",
        "? inconclusive",
        "! invalid",
        "p99(kl) <= 0.02",
        "worst at rows.jsonl:17, token 3: 0.4",
        "there are no values",
        "attn_0",
        "2e+04",
        "temperature_fit failed",
        "N-TV on all follows once N-DRIFT is proved",
        "tv <= 0.025",
        "not decided here: N-DRIFT",
        "note: something to know",
        "fallback",
        "weights fp8_e4m3",
    ):
        assert word in text, word
    assert "\x1b" not in text


def test_long_names_do_not_widen_the_table() -> None:
    row = replace(ROW, clause="N-" + "X" * 80, slice="s" * 80, metric="p99(kl)" * 10)
    text = shown(report(row))
    assert max(map(len, text.splitlines())) <= 100


def test_markup_in_names_is_printed_literally() -> None:
    row = replace(ROW, verdict=InvalidEvidence("[red]not markup[/red]"))
    assert "[red]not markup[/red]" in shown(report(row))


def test_brackets_in_a_requirement_are_printed() -> None:
    row = replace(
        ROW,
        threshold=1.0,
        metric="coverage(rng_seed)",
        counted="records",
        requirement="has(trace, [rng_seed])",
        clause="O-[b]",
        slice="[i]",
    )
    text = shown(report(row))
    assert "has(trace, [rng_seed])" in text
    assert "O-[b] L2" in text
    assert "[i]" in text


def test_missing_fields_are_listed() -> None:
    row = replace(ROW, verdict=Violated({"records": ["a", "b"]}))
    assert "without the fields: a, b" in shown(report(row))


def test_picture_is_an_svg_of_the_same_report() -> None:
    picture = draw(report(ROW).to_json())
    assert picture.startswith("<svg")
    assert "url(http" not in picture
    assert "@font-face" not in picture
    assert "N-KL" in picture


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (2.5, "s", "2.5 s"),
        (1.5e9, "B", "1.5 GB"),
        (2e6, "B", "2 MB"),
        (0.995, "ratio", "99.5%"),
        (1e-6, "ratio", "1e-06"),
        (0.0, "ratio", "0%"),
        (36281.4, "tok/s", "36281 tok/s"),
        (1.234e-8, "nat", "1.23e-08"),
        (None, "1", "–"),
        (math.nan, "1", "–"),
        (math.inf, "1", "–"),
    ],
)
def test_quantities_are_printed_in_readable_units(
    value: float | None, unit: str, text: str
) -> None:
    assert quantity(value, unit) == text


@pytest.mark.parametrize("columns", ["40", "60", "80", "100", "160"])
def test_numbers_are_not_truncated_on_a_narrow_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("NO_COLOR", "1")
    context = ResultContext(
        MeasuredPercentiles(1.23e-10, 4.56e-10, 7.89e-10),
        Certified(None, 1, 48, 0.000123, "there is no time left"),
        NoiseFloor(9.87e-11, 8),
    )
    stream = Terminal()
    row = replace(ROW, value=0.0200001, threshold=0.02, context=context, verdict=VERDICTS[1])
    print_report(report(row), stream)
    text = re.sub(r"\x1b\[[0-9;]*m", "", stream.getvalue())
    for number in (
        "0.0200001",
        "1.23e-10",
        "4.56e-10",
        "7.89e-10",
        "0.000123",
        "9.87e-11",
        "0/48",
        "<= 0.02",
    ):
        assert number in text, number
    assert not re.search(r"\d…", text)


def test_values_near_their_threshold_are_printed_distinguishably() -> None:
    row = replace(
        ROW,
        unit="ratio",
        op=">=",
        metric="mean(top1_overlap)",
        requirement="mean(top1_overlap) >= 99.999%",
        threshold=0.99999,
        value=0.999985,
        verdict=Violated({}),
    )
    text = shown(report(row))
    assert "mean(top1_overlap) >= 99.999%" in " ".join(text.split())
    assert "99.9985%" in text
    assert "100%" not in text
    assert "99.9985% instead of &gt;= 99.999%" in page(json.loads(report(row).dumps()))


def test_unknown_verdicts_have_no_worst() -> None:
    assert worst(()) == "invalid_evidence"
    with pytest.raises(ValueError, match="no verdict: passed"):
        worst(("held", "passed"))
