"""The context of results: percentiles, certified bounds, noise floor, narrow results."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from io import StringIO

import jsonschema
import numpy as np
import pytest
from rich.console import Console

from kcdsl.ir.terms import Abs, Arith, Compare, Metric, Number, Statistic
from kcdsl.verdict.report import Report
from kcdsl.verdict.result import ClauseResult
from kcdsl.verdict.text.report import context_parts
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.table.evidence import EvidenceTable, SamplingUnit
from tests.support.evidence import clause, evidence
from tests.support.reports import report_schema


def row_of(report: Report, name: str, slice_: str = "all") -> ClauseResult:
    return next(r for r in report.clauses if r.clause == name and r.slice == slice_)


def bounded(found: EvidenceTable, factor: float) -> EvidenceTable:
    """Return evidence in which every request has bounds, `factor` times the measured values."""
    certified = {
        key: SamplingUnit(
            key, 0, {n: factor * v for n, v in run.unit.values.items() if n != "margin"}
        )
        for key, run in found.runs.items()
    }
    return replace(found, certified=certified)


def test_percentiles_count_requests_by_their_worst_token() -> None:
    found = evidence()
    worst = sorted(float(run.unit.values["kl"].max()) for run in found.runs.values())
    context = row_of(conclude(found), "N-KL").context
    assert context is not None
    assert context.measured is not None
    assert (context.measured.p50, context.measured.p99) == (worst[29], worst[59])
    assert context.measured.worst == worst[-1]


def test_worst_token_of_agreement_metrics_is_the_smallest() -> None:
    found = evidence()
    context = row_of(conclude(found), "S-TOP1").context
    assert context is not None
    assert context.measured is not None
    assert context.measured.worst == min(
        float(run.unit.values["top1_overlap"].min()) for run in found.runs.values()
    )


def test_bound_of_a_statistic_is_the_statistic_of_bounds() -> None:
    report = conclude(bounded(evidence(), 3.0))
    for name in ("N-KL", "N-MAX", "N-TV"):
        row = row_of(report, name)
        assert row.context is not None
        assert row.context.certified is not None
        assert row.value is not None
        assert row.context.certified.value == pytest.approx(3 * row.value)
        assert row.context.certified.requests == row.context.certified.of == 60


def test_maximum_needs_a_bound_of_every_request() -> None:
    found = bounded(evidence(), 3.0)
    key = next(iter(found.certified))
    found = replace(
        found, certified={**found.certified, key: SamplingUnit(key, 1, failure="no time")}
    )
    row = row_of(conclude(found), "N-MAX")
    assert row.context is not None
    certified = row.context.certified
    assert certified is not None
    assert certified.value is None
    assert (certified.requests, certified.of, certified.reason) == (59, 60, "no time")
    assert certified.partial is not None


def test_percentile_needs_bounds_of_enough_requests() -> None:
    clauses = (clause("N-HALF", "quantile", "kl", "1", q="1/2"),)
    found = bounded(evidence(clauses), 3.0)
    unbounded = {key: SamplingUnit(key, 1, failure="no time") for key in list(found.certified)[:10]}
    found = replace(found, certified={**found.certified, **unbounded})
    bounds = sorted(
        float(found.certified[key].values["kl"].max()) if key not in unbounded else np.inf
        for key in found.certified
    )
    row = row_of(conclude(found), "N-HALF")
    assert row.context is not None
    assert row.context.certified is not None
    assert row.context.certified.value == bounds[29]
    assert row.context.certified.reason is None


def test_infinite_bound_is_reported_as_none() -> None:
    found = bounded(evidence(), 3.0)
    endless = {
        key: replace(
            unit,
            values={**unit.values, "logit_linf": np.full_like(unit.values["logit_linf"], np.inf)},
        )
        for key, unit in found.certified.items()
    }
    for changed in (1, 60):
        some = {**found.certified, **dict(list(endless.items())[:changed])}
        row = row_of(conclude(replace(found, certified=some)), "N-MAX")
        assert row.context is not None
        certified = row.context.certified
        assert certified is not None
        assert certified.value is None
        assert (certified.requests, certified.of) == (60 - changed, 60)
        assert certified.reason == "some requests have no finite bound of logit_linf"


def test_bound_names_its_domains() -> None:
    found = bounded(evidence(), 3.0)
    keys = list(found.certified)
    domains = {"sharp": keys[:1], "quick": keys[1:], "unused": []}
    report = conclude(replace(found, bounding={"domains": domains}))
    row = row_of(report, "N-MAX")
    assert row.context is not None
    assert row.context.certified is not None
    assert row.context.certified.domains == ("sharp", "quick")
    jsonschema.validate(report.to_json(), report_schema())


def test_nan_noise_floor_is_omitted() -> None:
    found = evidence()
    odd = {
        key: replace(unit, values={**unit.values, "kl": np.array([np.nan, np.inf])})
        for key, unit in found.floor.items()
    }
    assert odd
    report = conclude(replace(found, floor=odd))
    row = row_of(report, "N-KL")
    assert row.context is not None
    assert row.context.noise_floor is not None
    assert row.context.noise_floor.value is None
    assert not row.context.noise_floor.above


def test_bound_of_a_magnitude_does_not_bound_the_signed_value() -> None:
    clauses = (
        clause("N-SIZE", "max", "log_ratio", "1", magnitude=True),
        clause("N-SIGNED", "max", "log_ratio", "1"),
        clause("N-LEAST", "min", "kl", "0", op=">="),
    )
    report = conclude(bounded(evidence(clauses), 3.0))
    known = {row.clause: row.context.certified for row in report.clauses if row.context is not None}
    assert known["N-SIZE"] is not None
    assert known["N-SIZE"].value is not None
    for name in ("N-SIGNED", "N-LEAST"):
        certified = known[name]
        assert certified is not None
        assert certified.value is None
        assert certified.reason == "no bound on this side is known"


def test_magnitude_of_a_mean_is_bounded_by_mean_magnitudes() -> None:
    """|mean(x)| is at most the mean of the bounds of |x|; its floor is shown too."""
    size = Abs(Statistic("mean", Metric("log_ratio"), None))
    bare = clause("N-BIAS", "mean", "log_ratio", "1")
    bias = replace(bare, require=Compare("<=", size, Number(Fraction(1))))
    found = evidence((bias, clause("N-SIZE", "max", "log_ratio", "1", magnitude=True)))
    limits = {
        key: SamplingUnit(key, 0, {"log_ratio": 3 * np.abs(run.unit.values["log_ratio"])})
        for key, run in found.runs.items()
    }
    report = conclude(replace(found, certified=limits))
    context, sizes = row_of(report, "N-BIAS").context, row_of(report, "N-SIZE").context
    assert context is not None
    assert sizes is not None
    assert context.measured == sizes.measured
    every = np.concatenate([unit.values["log_ratio"] for unit in limits.values()])
    assert context.certified is not None
    assert context.certified.value == pytest.approx(float(every.mean()), rel=1e-12)
    noise = np.concatenate([unit.values["log_ratio"] for unit in found.floor.values()])
    assert context.noise_floor is not None
    assert context.noise_floor.value == pytest.approx(abs(float(noise.mean())), rel=1e-12)


def test_sums_of_metrics_have_a_floor_and_no_bound() -> None:
    summed = Statistic("quantile", Arith("+", Metric("kl"), Metric("tv")), Fraction(1, 2))
    bare = clause("N-SUM", "mean", "kl", "1")
    found = evidence((replace(bare, require=Compare("<=", summed, Number(Fraction(1)))),))
    context = row_of(conclude(bounded(found, 3.0)), "N-SUM").context
    assert context is not None
    worst = sorted(
        float((run.unit.values["kl"] + run.unit.values["tv"]).max()) for run in found.runs.values()
    )
    assert context.measured is not None
    assert (context.measured.p50, context.measured.worst) == (worst[29], worst[-1])
    assert context.certified is not None
    assert context.certified.value is None
    assert context.certified.reason == "values made of others have no bound of their own"
    noise = sorted(
        float((unit.values["kl"] + unit.values["tv"]).max()) for unit in found.floor.values()
    )
    assert context.noise_floor is not None
    assert context.noise_floor.value == noise[3]
    lacking = {
        key: replace(unit, values={"kl": unit.values["kl"]}) for key, unit in found.floor.items()
    }
    without = row_of(conclude(replace(found, floor=lacking)), "N-SUM").context
    assert without is not None
    assert without.noise_floor is not None
    assert without.noise_floor.reason == "tv was not measured between batchings"


def test_threshold_below_the_noise_floor_is_reported() -> None:
    report = conclude(evidence())
    below = {(w.code, w.clause) for w in report.warnings}
    assert below == {("KC670", "N-RATIO")}
    row = row_of(report, "N-RATIO")
    assert row.context is not None
    assert row.context.noise_floor is not None
    assert row.context.noise_floor.above
    assert row.threshold is not None
    assert row.context.noise_floor.value is not None
    assert row.context.noise_floor.value > row.threshold
    loose = conclude(evidence((clause("N-RATIO", "max", "kl", "1"),)))
    assert loose.warnings == ()


def test_kernel_without_batches_has_no_noise_floor() -> None:
    row = row_of(conclude(evidence(floor={})), "N-KL")
    assert row.context is not None
    assert row.context.noise_floor is not None
    assert row.context.noise_floor.value is None
    assert (
        row.context.noise_floor.reason == "the training kernel was not batched, or takes no batches"
    )


NARROW = {
    "one more of 60 would break a 99th percentile": ((60, "99/100", "1"), ("few units",)),
    "with 100 one more is allowed": ((100, "99/100", "1"), ()),
    "fewer than 20": ((10, "1/2", "1"), ("few units",)),
    "30 of 60 are far from 0": ((60, "1/2", "1"), ()),
    "all beyond is far too": ((60, "99/100", "0"), ()),
}


@pytest.mark.parametrize("case", NARROW)
def test_narrow_results_are_marked(case: str) -> None:
    (count, q, limit), expected = NARROW[case]
    clauses = (clause("N-KL", "quantile", "kl", limit, q=q),)
    row = row_of(conclude(evidence(clauses, count=count)), "N-KL")
    assert row.context is not None
    assert row.context.narrow == expected


def test_value_within_a_tenth_of_its_threshold_is_near() -> None:
    found = evidence()
    worst = max(float(run.unit.values["kl"].max()) for run in found.runs.values())
    for factor, near in ((1.05, True), (0.95, True), (1.3, False), (0.5, False)):
        report = conclude(evidence((clause("N-KL", "max", "kl", repr(factor * worst)),)))
        row = row_of(report, "N-KL")
        assert row.context is not None
        assert ("near the threshold" in row.context.narrow) is near


@pytest.mark.full
def test_report_follows_its_schema_with_and_without_bounds() -> None:
    for found in (evidence(), bounded(evidence(), 3.0), evidence(count=0), evidence(floor={})):
        jsonschema.validate(conclude(found).to_json(), report_schema())


def test_census_prints_no_confidence_limit() -> None:
    import io

    from kcdsl.verdict.text.report import print_report

    report = conclude(evidence((clause("S-TOP1", "mean", "top1_overlap", "1/2", op=">="),)))
    (row,) = report.clauses
    assert row.low is not None  # for planning, about the next requests
    stream = io.StringIO()
    print_report(replace(report, slices=()), stream)
    line = next(x for x in stream.getvalue().splitlines() if x.startswith("S-TOP1"))
    assert "–" in line
    assert f"{100 * row.low:.4g}%" not in line


def table_of(report: Report) -> str:
    console = Console(file=StringIO(), width=160)
    for part in context_parts(report.to_json()):
        console.print(part)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_table_states_how_many_requests_a_bound_covers() -> None:
    """A bound of some requests is never shown as a bound of the clause."""
    found = bounded(evidence(), 3.0)
    kept = list(found.certified)[:2]
    some = {
        key: unit if key in kept else SamplingUnit(key, 1, failure="no time")
        for key, unit in found.certified.items()
    }
    domains = {"numerics": {"train": "a", "infer": "b"}, "domains": {"affine forms": kept}}
    part = conclude(replace(found, certified=some, bounding=domains))
    rows = [line for line in table_of(part).splitlines() if line.lstrip().startswith(("N-", "S-"))]
    assert rows
    assert all("[" in line for line in rows)
    (of_all,) = (line for line in rows if line.split()[:2] == ["N-MAX", "all"])
    assert " on 2/60 [" in of_all
    assert "no time" in table_of(part)
    assert "2 by affine forms" in table_of(part)
    whole = table_of(conclude(found))
    assert " on " not in whole
    assert "[" not in next(line for line in whole.splitlines() if line.lstrip().startswith("N-MAX"))
