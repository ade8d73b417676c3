"""From values to verdicts: census and sample, hard and soft clauses, invalid evidence."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kcdsl.ir.obligations import obligations_of
from kcdsl.ir.printer import term_text
from kcdsl.ir.terms import (
    Arith,
    Compare,
    Connective,
    Drift,
    EvidenceKind,
    HasFields,
    Level,
    Metric,
    Norm,
    Not,
    Number,
    Quantified,
    Region,
    RegionKind,
    Statistic,
)
from kcdsl.verdict.model import Held, Inconclusive, InvalidEvidence, Violated, verdict_name
from kcdsl_backends.empirical.decision.results import decide_clause
from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData
from kcdsl_backends.empirical.table.requirements import obstacle, windows


def decided(lab: Any, clause: Any, data: SliceData, **more: Any) -> Any:
    return decide_clause(clause, lab.program(clause), data, seed=0, **more)


def test_census_compares_the_exact_value(lab: Any) -> None:
    data = lab.slice_data({"kl": [[0.0, i / 100] for i in range(1, 101)]})
    held = decided(lab, lab.clause(lab.statistic("quantile", "kl", "99/100"), limit="99/100"), data)
    assert isinstance(held.verdict, Held)
    assert (held.value, held.n, held.evidence) == (0.99, 100, "census")
    assert held.high is None
    assert held.low is not None
    assert held.low < 0.99
    assert held.exceedance is not None
    assert (held.exceedance.k, held.exceedance.n, held.exceedance.of) == (1, 100, "requests")


def test_threshold_is_compared_exactly(lab: Any) -> None:
    """0.1 in float64 is slightly above one tenth."""
    data = lab.slice_data({"kl": [[0.1]]})
    clause = lab.clause(lab.statistic("max", "kl"), limit="1/10")
    assert isinstance(decided(lab, clause, data).verdict, Violated)


def test_comparison_of_two_terms_uses_their_difference(lab: Any) -> None:
    """The obligation of `mean(tv) <= mean(kl)` is about their difference and 0."""
    data = lab.slice_data({"tv": [[0.25], [0.5]] * 20, "kl": [[0.5], [1.0]] * 20})
    tv, kl = lab.statistic("mean", "tv"), lab.statistic("mean", "kl")
    clause = lab.clause(Compare("<=", tv, kl))
    held = decided(lab, clause, data)
    assert (held.value, held.threshold) == (0.375, 0.75)
    assert held.exact_value == Fraction(-3, 8)
    turned = decided(lab, lab.clause(Compare("<=", kl, tv)), data)
    assert isinstance(turned.verdict, Violated)
    assert turned.exact_value == Fraction(3, 8)


def test_sample_has_no_limits_for_a_difference(lab: Any) -> None:
    data = lab.slice_data({"tv": [[0.25]] * 40, "kl": [[0.5]] * 40})
    terms = (lab.statistic("mean", name) for name in ("tv", "kl"))
    sampled = lab.clause(Compare("<=", *terms), evidence=EvidenceKind.SAMPLE)
    assert decided(lab, sampled, data).exact_value is None


@pytest.mark.parametrize(
    ("name", "value", "possible"),
    [
        ("kl", -1e-3, False),
        ("kl", -1e-7, True),
        ("tv", 1.001, False),
        ("tv", 1.0000005, True),
        ("log_ratio", -5.0, True),
        ("logit_cosine", -1.5, False),
    ],
)
@pytest.mark.parametrize("kind", ["max", "min", "p50", "combined"])
def test_value_outside_the_range_of_its_metric_is_invalid(
    lab: Any, kind: str, name: str, value: float, possible: bool
) -> None:
    """The sign was wrong, or the estimator cancels; p50 would not reveal it."""
    data = lab.slice_data({name: [[0.5], [0.5], [value]]})
    term = lab.statistic("quantile", name, "1/2")
    if kind == "combined":
        term = Statistic("max", Arith("+", Metric(name), Number(Fraction(1))))
    elif kind != "p50":
        term = lab.statistic(kind, name)
    verdict = decided(
        lab, lab.clause(term, limit="100", evidence=EvidenceKind.CENSUS), data
    ).verdict
    assert not isinstance(verdict, Held) or possible
    if not possible:
        assert isinstance(verdict, InvalidEvidence)
        assert f"the value {value:g} lies outside of its range" in verdict.reason


@pytest.mark.parametrize(("value", "held"), [(0.6, True), (0.5999, False), (0.55, False)])
def test_impossible_shares_are_not_rounded(lab: Any, value: float, held: bool) -> None:
    data = lab.slice_data({"top5_overlap": [[1.0, value], [1.0]]})
    clause = lab.clause(lab.statistic("min", "top5_overlap"), ">=", "3/5")
    assert isinstance(decided(lab, clause, data).verdict, Held if held else Violated)


@pytest.mark.parametrize("kind", ["min", "mean"])
def test_share_of_five_tokens_meets_its_own_threshold(lab: Any, kind: str) -> None:
    """3/5 in float64 is less than three fifths."""
    data = lab.slice_data({"top5_overlap": [[0.6, 0.6, 0.6]] * 7})
    term = lab.statistic(kind, "top5_overlap")
    assert isinstance(decided(lab, lab.clause(term, ">=", "3/5"), data).verdict, Held)
    above = lab.clause(term, ">=", "600000001/1000000000")
    assert isinstance(decided(lab, above, data).verdict, Violated)


def test_request_is_represented_by_its_worst_token(lab: Any) -> None:
    data = lab.slice_data({"kl": [[0.0] * 99 + [5.0]] + [[0.0] * 100] * 9})
    median = decided(lab, lab.clause(lab.statistic("quantile", "kl", "1/2")), data)
    tail = decided(lab, lab.clause(lab.statistic("quantile", "kl", "99/100")), data)
    assert isinstance(median.verdict, Held)
    assert isinstance(tail.verdict, Violated)
    assert tail.verdict.counterexample["request"] == "r0"
    assert tail.verdict.counterexample["token"] == 99


def test_lower_bound_uses_the_smallest_values(lab: Any) -> None:
    data = lab.slice_data({"top1_overlap": [[1.0, 1.0]] * 9 + [[0.0, 1.0]]})
    clause = lab.clause(lab.statistic("min", "top1_overlap"), ">=", "1")
    found = decided(lab, clause, data)
    assert isinstance(found.verdict, Violated)
    assert found.verdict.counterexample["request"] == "r9"
    mean = decided(lab, lab.clause(lab.statistic("mean", "top1_overlap"), ">=", "19/20"), data)
    assert isinstance(mean.verdict, Held)
    assert mean.value == 0.95


def test_sample_is_decided_on_the_worse_limit(lab: Any) -> None:
    values = [[v] for v in np.random.default_rng(0).exponential(size=200)]
    data = lab.slice_data({"kl": values})

    def verdict(limit: str, n: int = 200) -> str:
        clause = lab.clause(lab.statistic("mean", "kl"), limit=limit, evidence=EvidenceKind.SAMPLE)
        return verdict_name(decided(lab, clause, SliceData("all", data.requests[:n])).verdict)

    assert verdict("2") == "held"
    assert verdict("1/2") == "violated"
    assert verdict("102/100") == "inconclusive"
    assert verdict("2", n=5) == "inconclusive"


def test_sample_cannot_certify_a_maximum(lab: Any) -> None:
    data = lab.slice_data({"kl": [[0.0]] * 1000})
    clause = lab.clause(lab.statistic("max", "kl"), evidence=EvidenceKind.SAMPLE)
    assert isinstance(decided(lab, clause, data).verdict, Inconclusive)


def test_budget_counts_requests(lab: Any) -> None:
    data = lab.slice_data({"kl": [[2.0]] * 3 + [[0.0]] * 97})

    def verdict(budget: str, **more: Any) -> str:
        clause = lab.clause(lab.statistic("max", "kl"), budget=(budget, "requests"), **more)
        return verdict_name(decided(lab, clause, data).verdict)

    assert verdict("3/100") == "held"
    assert verdict("29/1000") == "violated"
    assert verdict("3/100", evidence=EvidenceKind.SAMPLE) == "inconclusive"
    assert verdict("1/10", evidence=EvidenceKind.SAMPLE) == "held"
    assert verdict("1/1000", evidence=EvidenceKind.SAMPLE) == "violated"


def test_paper_defect_3_budget_of_windows_counts_windows(lab: Any) -> None:
    bad, good = [[2.0]], [[0.0]]
    data = lab.slice_data({"kl": bad * 16 + good * 48})
    term = lab.statistic("quantile", "kl", "99/100")
    found = decided(lab, lab.clause(term, budget=("1/4", "windows")), data)
    assert isinstance(found.verdict, Held)
    assert found.exceedance is not None
    assert (found.exceedance.k, found.exceedance.n, found.exceedance.of) == (1, 4, "windows")
    assert isinstance(
        decided(lab, lab.clause(term, budget=("1/5", "windows")), data).verdict, Violated
    )


@pytest.mark.parametrize(("name", "op"), [("peak_memory", "<="), ("determinism", ">=")])
@pytest.mark.parametrize("evidence", [None, EvidenceKind.SAMPLE])
def test_slice_level_value_is_not_a_value_per_window(
    lab: Any, name: str, op: str, evidence: EvidenceKind | None
) -> None:
    """Counted window by window, one peak of memory would count as many held windows."""
    runs = tuple(SamplingUnit(f"r{i}", 1, {"latency": np.array([0.1])}) for i in range(640))
    measured = {"runs": runs, "repeats": (640, 640), "peak_memory": 1.0}
    data = lab.slice_data({"kl": [[0.0]] * 640}, **measured)
    clause = lab.clause(Metric(name), op, "1", budget=("1/10", "windows"), evidence=evidence)
    row = decided(lab, clause, data)
    assert isinstance(row.verdict, InvalidEvidence)
    assert "a single one of the windows has no value" in row.verdict.reason
    alone = decided(lab, lab.clause(Metric(name), op, "1", evidence=evidence), data)
    assert not isinstance(alone.verdict, InvalidEvidence)


def test_windows_partition_the_units() -> None:
    units = [SamplingUnit(str(i), 1) for i in range(40)]
    found = windows(units, 16)
    assert [len(w) for w in found] == [16, 24]
    assert [u for w in found for u in w] == units
    assert [len(w) for w in windows(units[:5], 16)] == [5]


@pytest.mark.parametrize(
    "values",
    [
        *([], [[math.nan]], [[math.inf]], [[-math.inf]], [[0.0], [math.nan]], [[0.0], []]),
        [[0.0, math.inf]],  # infinite on the harmless side of a lower bound
    ],
)
@pytest.mark.parametrize(
    ("kind", "q", "op"),
    [
        ("mean", None, "<="),
        ("max", None, "<="),
        ("min", None, ">="),
        ("quantile", "99/100", "<="),
        ("quantile", "1/2", ">="),
        ("aggregate", None, "<="),
    ],
)
@pytest.mark.parametrize("budget", [None, ("1/2", "requests"), ("1/2", "windows")])
@pytest.mark.parametrize("evidence", [None, EvidenceKind.SAMPLE])
def test_empty_and_non_finite_values_never_pass(
    lab: Any, values: Any, kind: str, q: str | None, op: str, budget: Any, evidence: Any
) -> None:
    units = tuple(
        SamplingUnit(f"r{i}", 1, {"kl": np.array(row, dtype=np.float64)})
        for i, row in enumerate(values)
    )
    limit = "1000" if op == "<=" else "-1000"
    clause = lab.clause(lab.statistic(kind, "kl", q), op, limit, budget=budget, evidence=evidence)
    found = decided(lab, clause, SliceData("all", units))
    assert isinstance(found.verdict, InvalidEvidence)
    assert found.verdict.reason
    assert found.deviation == math.inf
    assert found.action == "higher_precision"


def test_missing_metrics_and_failed_requests_never_pass(lab: Any) -> None:
    clause = lab.clause(lab.statistic("mean", "kl"))
    missing = SliceData("all", (SamplingUnit("a", 3, {"tv": np.zeros(3)}),))
    failed = SliceData("all", (SamplingUnit("a", 3, {"kl": np.zeros(3)}, failure="out of memory"),))
    for data, word in ((missing, "no values"), (failed, "out of memory")):
        found = decided(lab, clause, data)
        assert isinstance(found.verdict, InvalidEvidence)
        assert word in found.verdict.reason


@pytest.mark.parametrize("name", ["reward_delta", "refusal_flip", "json_parse_gap", "no_such"])
def test_metrics_that_are_not_measured_here_never_pass(lab: Any, name: str) -> None:
    data = lab.slice_data({"kl": [[0.0]] * 10})
    found = decided(lab, lab.clause(lab.statistic("aggregate", name)), data)
    assert isinstance(found.verdict, InvalidEvidence)


def test_failed_precondition_blocks_even_a_good_value(lab: Any) -> None:
    data = lab.slice_data({"kl": [[0.0]] * 10})
    found = decided(lab, lab.clause(lab.statistic("mean", "kl")), data, blocked="weights differ")
    assert found.verdict == InvalidEvidence("weights differ")


def test_measurements_cannot_prove_but_can_violate(lab: Any) -> None:
    data = lab.slice_data({"kl": [[0.5]] * 10})
    good = lab.clause(lab.statistic("max", "kl"), evidence=EvidenceKind.PROOF)
    bad = lab.clause(lab.statistic("max", "kl"), limit="1/4", evidence=EvidenceKind.PROOF)
    assert isinstance(decided(lab, good, data).verdict, Inconclusive)
    assert isinstance(decided(lab, bad, data).verdict, Violated)


def test_times_and_sampled_tokens_are_never_a_census(lab: Any) -> None:
    data = lab.slice_data({"log_ratio": [[0.0, 1e-9]] * 4})
    term = lab.statistic("mean", "log_ratio", magnitude=True)
    found = decided(lab, lab.clause(term, evidence=EvidenceKind.CENSUS), data)
    assert isinstance(found.verdict, Inconclusive)
    assert found.evidence == "sample"


def test_latency_counts_requests(lab: Any) -> None:
    data = SliceData("all", (), _timed_twice([0.001 * i for i in range(1, 101)]))
    term = lab.statistic("quantile", "latency", "95/100")
    found = decided(lab, lab.clause(term, limit="1/10"), data)
    assert isinstance(found.verdict, Held)
    assert (found.value, found.high, found.counted) == (0.095, 0.099, "requests")
    assert isinstance(decided(lab, lab.clause(term, limit="97/1000"), data).verdict, Inconclusive)
    speed = decided(lab, lab.clause(lab.statistic("aggregate", "throughput"), ">=", "100"), data)
    assert isinstance(speed.verdict, Held)
    assert speed.value == pytest.approx(1000 / 5.05)


def _timed_twice(seconds: list[float]) -> tuple[SamplingUnit, ...]:
    """Return two runs of each request, in rounds."""
    return tuple(
        SamplingUnit(f"r{i}", 10, {"latency": np.array([found])})
        for _ in range(2)
        for i, found in enumerate(seconds)
    )


@pytest.mark.parametrize("lost", [0, 1, 98, 99])
def test_missing_timing_never_passes(lab: Any, lost: int) -> None:
    """For either choice of the run that represents its request."""
    runs = list(_timed_twice([0.01] * 50))
    runs[lost] = replace(runs[lost], values={"latency": np.array([math.nan])})
    data = SliceData("all", (), tuple(runs))
    for term, op, limit in (
        (lab.statistic("quantile", "latency", "1/2"), "<=", "1"),
        (lab.statistic("aggregate", "throughput"), ">=", "1"),
    ):
        assert isinstance(decided(lab, lab.clause(term, op, limit), data).verdict, InvalidEvidence)


def test_slice_wide_runtime_metrics(lab: Any) -> None:
    units = tuple(SamplingUnit(str(i), 1, failure="no" if i == 0 else None) for i in range(10))
    data = SliceData("all", units, repeats=(19, 20), peak_memory=1e9)

    def verdict(name: str, op: str, limit: str) -> str:
        clause = lab.clause(lab.statistic("aggregate", name), op, limit)
        return verdict_name(decided(lab, clause, data).verdict)

    assert verdict("failure_rate", "<=", "1/10") == "held"
    assert verdict("failure_rate", "<=", "9/100") == "violated"
    assert verdict("determinism", ">=", "95/100") == "held"
    assert verdict("determinism", ">=", "1") == "violated"
    assert verdict("peak_memory", "<=", "1000000000") == "held"
    empty = SliceData("all", units)
    for name in ("determinism", "peak_memory"):
        clause = lab.clause(lab.statistic("aggregate", name), ">=", "0")
        assert isinstance(decided(lab, clause, empty).verdict, InvalidEvidence)


def test_trace_clauses_need_every_field_in_every_record(lab: Any) -> None:
    units = tuple(SamplingUnit(str(i), 1) for i in range(3))
    clause = lab.clause(HasFields(("rng_seed", "replay_signature")))
    good = {"request": "a", "rng_seed": 0, "replay_signature": "x"}

    def found(*records: Any) -> Any:
        return decided(lab, clause, SliceData("all", units, records=records))

    assert isinstance(found(good, good, good).verdict, Held)
    spoiled: list[dict[str, Any]] = [
        {}, {"rng_seed": None}, {"replay_signature": ""}, {"replay_signature": []},
    ]  # fmt: skip
    for lacking in spoiled:
        bad = {**good, **lacking} if lacking else {"request": "b"}
        result = found(good, bad, good)
        assert isinstance(result.verdict, Violated)
        assert result.deviation == pytest.approx(1 / 3)
    assert isinstance(found(good, good).verdict, InvalidEvidence)
    assert isinstance(found().verdict, InvalidEvidence)


def test_negations_reverse_the_harmful_tail(lab: Any) -> None:
    data = lab.slice_data({"kl": [[0.0, 3.0]] * 5, "tv": [[0.1]] * 5})
    over = Compare("<=", lab.statistic("max", "kl"), Number(Fraction(1)))
    fine = Compare("<=", lab.statistic("max", "tv"), Number(Fraction(1)))
    not_above = Not(Compare(">", lab.statistic("quantile", "kl", "1/2"), Number(Fraction(1))))
    for formula, wanted in (
        (Connective("and", (over, fine)), "violated"),
        (Connective("or", (over, fine)), "held"),
        (Connective("implies", (over, fine)), "held"),
        (Connective("implies", (fine, over)), "violated"),
        (Not(over), "held"),
        (not_above, "violated"),
    ):
        assert verdict_name(decided(lab, lab.clause(formula), data).verdict) == wanted
    clause = lab.clause(Connective("and", (over, fine)))
    found = obligations_of(clause, "all")
    assert [each.part.require for each in found] == [over, fine]
    assert [each.id for each in found] == [f"{clause.id}/all/0", f"{clause.id}/all/1"]


def test_measured_drift_quantifies_over_the_rows(lab: Any) -> None:
    norm = Norm("inf", Drift("attn_0", "x", measured=True))
    body = Compare("<=", norm, Number(Fraction(1)))
    points = Region(RegionKind.POINTS, "all")
    data = lab.slice_data({"measured_drift[attn_0].inf": [[0.1, 0.5], [0.2, 2.0]]})
    forall = lab.clause(Quantified("forall", "x", points, body))
    exists = lab.clause(Quantified("exists", "x", points, body))
    found = decided(lab, forall, data)
    assert isinstance(found.verdict, Violated)
    assert found.value == 2.0
    assert found.verdict.counterexample["request"] == "r1"
    assert isinstance(decided(lab, exists, data).verdict, Held)
    assert term_text(norm) == "norm_inf(measured_drift(attn_0, x))"


def test_claims_about_regions_are_left_to_proofs(lab: Any) -> None:
    norm = Norm("inf", Drift("attn_0", "x"))
    body = Compare("<=", norm, Number(Fraction(1)))
    points, ball = Region(RegionKind.POINTS, "all"), Region(RegionKind.BALL, "all", Fraction(1))
    assert "verify" in str(obstacle(lab.clause(Quantified("forall", "x", points, body))))
    measured = Compare("<=", Norm("2", Drift("attn_0", "x", True)), Number(Fraction(1)))
    assert obstacle(lab.clause(Quantified("forall", "x", points, measured))) is None
    assert "ball" in str(obstacle(lab.clause(Quantified("forall", "x", ball, measured))))


def test_arithmetic_of_estimates_propagates_limits(lab: Any) -> None:
    data = lab.slice_data({"kl": [[v] for v in np.linspace(0, 1, 100)]})
    spread = Arith(
        "-", lab.statistic("quantile", "kl", "9/10"), lab.statistic("quantile", "kl", "1/10")
    )
    formula = Compare("<=", spread, Number(Fraction(9, 10)))
    found = decided(lab, lab.clause(formula), data)
    assert isinstance(found.verdict, Held)
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high


def test_rate_accepts_only_zeros_and_ones(lab: Any) -> None:
    data = lab.slice_data({"top1_overlap": [[1.0]] * 9 + [[0.0]], "kl": [[0.5]] * 10})
    found = decided(lab, lab.clause(lab.statistic("rate", "top1_overlap"), ">=", "9/10"), data)
    assert isinstance(found.verdict, Held)
    assert found.low == pytest.approx(0.606, abs=1e-3)
    missed = decided(lab, lab.clause(lab.statistic("rate", "top1_overlap"), ">=", "19/20"), data)
    assert isinstance(missed.verdict, Violated)
    assert isinstance(
        decided(lab, lab.clause(lab.statistic("rate", "kl")), data).verdict, InvalidEvidence
    )


def test_action_comes_from_the_clause_or_the_policy(lab: Any) -> None:
    data = lab.slice_data({"kl": [[5.0]]})
    own = lab.clause(lab.statistic("max", "kl"), action="rollback")
    policy = lab.clause(lab.statistic("max", "kl"), level=Level.L3)
    assert decided(lab, own, data).action == "rollback"
    assert decided(lab, policy, data).action == "fallback"
    fine = lab.clause(lab.statistic("max", "kl"), limit="10")
    assert decided(lab, fine, data).action is None


def test_deviation_of_a_soft_clause_uses_its_budget(lab: Any) -> None:
    data = lab.slice_data({"kl": [[2.0]] * 4 + [[0.0]] * 96})
    soft = lab.clause(lab.statistic("max", "kl"), budget=("2/100", "requests"))
    hard = lab.clause(Metric("kl"))
    assert decided(lab, soft, data).deviation == pytest.approx(0.02 / 0.98)
    assert decided(lab, hard, data).deviation == pytest.approx(1.0)
