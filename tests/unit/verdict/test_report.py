"""The report document, its schema, its exit code and how it is shown."""

from __future__ import annotations

import io
import itertools
import json
import math
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from kcdsl.exits import Exit
from kcdsl.verdict.health import Health
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Verdict, Violated
from kcdsl.verdict.quantities import quantity
from kcdsl.verdict.render import print_report, svg
from kcdsl.verdict.report import (
    ClauseResult,
    CrossCheck,
    Estimator,
    ExceedanceCount,
    ImpliedClause,
    Precheck,
    Report,
    SliceSummary,
    report_schema,
)

VERDICTS: tuple[Verdict, ...] = (
    Held(),
    Violated({"request": "rows.jsonl:17", "token": 3, "worst": 0.4, "value": 0.4}),
    Inconclusive("the threshold lies between the limits"),
    InvalidEvidence("there are no values"),
)
ROW = ClauseResult(
    clause="N-KL",
    family="numerical",
    level="L2",
    slice="all",
    requirement="p99(kl) <= 0.02",
    metric="p99(kl)",
    unit="nat",
    op="<=",
    value=0.01,
    low=0.005,
    high=None,
    n=48,
    counted="requests",
    threshold=0.02,
    verdict=Held(),
    evidence="census",
    confidence=0.95,
    exceedance=ExceedanceCount(0, 48, "requests", 0.0, 0.06),
    estimators=(Estimator("A", "sum p (e^d - 1 - d)", "exact", "token", "lower"),),
)
KERNEL = {
    "run": "torch.eager",
    "digest": "sha256:" + "a" * 64,
    "fingerprint": {"numerics": {"compute": "bfloat16", "weights": {"format": "fp8_e4m3"}}},
}


def report(*rows: ClauseResult, **changes: Any) -> Report:
    base = Report(
        contract={"name": "demo", "version": "1.0.0", "digest": "sha256:" + "b" * 64},
        model={
            "checkpoint": "model.safetensors",
            "sha256": "c" * 64,
            "architecture": "llama",
            "encoder": False,
        },
        kernels={"train": KERNEL, "infer": KERNEL},
        data=({"name": "rows.jsonl", "sha256": "d" * 64, "rows": 48},),
        environment={
            "kcdsl": "0.1.0",
            "python": "3.11",
            "torch": "2.8",
            "device": "cpu",
            "hardware": "x86_64",
            "seed": 0,
            "confidence": 0.95,
            "unit": "request",
        },
        clauses=rows,
        slices=(
            SliceSummary(
                "all",
                48,
                900,
                {"kl": {"mean": 1e-9, "p50": 1e-8, "p95": 1e-7, "p99": 1e-6, "worst": math.nan}},
            ),
        ),
        prechecks=(
            Precheck("finite", "passed", "48 requests", 0.0),
            Precheck("temperature_fit", "failed", "T = 0.700 leaves 0 of 0.1 nats", 0.7),
        ),
        crosschecks=(CrossCheck("attn_0", 48, 1e-7, 2e-3, 2e4, "rows.jsonl:3"),),
        implied=(ImpliedClause("N-TV", "all", "N-DRIFT", ("span <= 0.1", "tv <= 0.025")),),
        deferred={"N-DRIFT": "speaks of every admissible run"},
        health=Health(math.inf, "fallback"),
        action="fallback",
        notes=("something to know",),
    )
    return replace(base, **changes)


def shown(document: Report) -> str:
    stream = io.StringIO()
    print_report(document, stream)
    return stream.getvalue()


@pytest.mark.parametrize("verdicts", list(itertools.product(VERDICTS, repeat=2)))
def test_the_exit_names_a_violation_before_anything_weaker(verdicts: tuple[Any, Any]) -> None:
    order = [Exit.VIOLATED, Exit.COULD_NOT_RUN, Exit.INCONCLUSIVE, Exit.HELD]
    single = [Exit.HELD, Exit.VIOLATED, Exit.INCONCLUSIVE, Exit.COULD_NOT_RUN]
    wanted = min((single[VERDICTS.index(v)] for v in verdicts), key=order.index)
    rows = [replace(ROW, verdict=v) for v in verdicts]
    assert report(*rows).exit is wanted


def test_a_report_without_clauses_is_never_a_pass() -> None:
    assert report().exit is Exit.COULD_NOT_RUN


def test_the_document_follows_its_published_schema() -> None:
    rows = [replace(ROW, verdict=v, deviation=math.inf, value=math.nan) for v in VERDICTS]
    document = json.loads(report(*rows).dumps())
    jsonschema.Draft202012Validator.check_schema(report_schema())
    jsonschema.validate(document, report_schema())
    assert document["schema"] == "kcdsl.report/1"
    assert document["clauses"][0]["value"] is None
    assert document["clauses"][0]["deviation"] is None
    assert document["health"]["deviation"] is None
    assert document["slices"][0]["statistics"]["kl"]["worst"] is None
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**document, "extra": 1}, report_schema())


def test_the_printed_report_fits_and_names_everything() -> None:
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


def test_markup_in_names_is_printed_as_it_is() -> None:
    row = replace(ROW, verdict=InvalidEvidence("[red]not markup[/red]"))
    assert "[red]not markup[/red]" in shown(report(row))


def test_brackets_of_a_requirement_are_kept() -> None:
    row = replace(
        ROW,
        threshold=1.0,
        metric="coverage(rng_seed)",
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


def test_the_picture_is_an_svg_of_the_same_report() -> None:
    picture = svg(report(ROW))
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
def test_quantities_have_the_units_of_people(value: float | None, unit: str, text: str) -> None:
    assert quantity(value, unit) == text
