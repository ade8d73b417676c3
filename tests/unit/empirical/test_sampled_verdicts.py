"""Clauses on samples: shown rates, needed units, many looks, many clauses, two-sided clauses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kcdsl.ir.kernels import LogProbabilities, Recording, Service
from kcdsl.ir.obligations import obligations_of
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Clause,
    Compare,
    Connective,
    EvidenceKind,
    Family,
    HasFields,
    Metric,
    Number,
    Quantified,
    Region,
    RegionKind,
)
from kcdsl.verdict.model import Held, Inconclusive, verdict_name
from kcdsl_backends.empirical.decision.results import DecisionCase, decide_all, decide_clause
from kcdsl_backends.empirical.statistics import estimates, planning, rates
from kcdsl_backends.empirical.statistics.estimates import ONE_LOOK
from kcdsl_backends.empirical.table.evidence import SamplingUnit, SliceData
from kcdsl_backends.empirical.table.requirements import allowed_rate, is_mean

SAMPLE = EvidenceKind.SAMPLE
P99 = ("quantile", "kl", "99/100")


def column(values: Iterable[float]) -> dict[str, list[list[float]]]:
    return {"kl": [[v] for v in values]}


def decided(lab: Any, clause: Any, data: Any, looks: int | None = 1) -> Any:
    confidence = estimates.confidence_over(looks)
    return decide_clause(clause, lab.program(clause), data, seed=0, confidence=confidence)


# --- what n shows --------------------------------------------------------------------------------


def test_hard_clause_states_the_shown_rate(lab: Any) -> None:
    """0 of 100: below 1 - 0.05^(1/100) = 2.951 %, rounded up; no number of units suffices."""
    clause = lab.clause(lab.statistic("max", "kl"), evidence=SAMPLE)
    row = decided(lab, clause, lab.slice_data(column([0.0] * 100)))
    assert isinstance(row.verdict, Inconclusive)
    assert row.shown is not None
    assert (row.shown.k, row.shown.n, row.shown.of) == (0, 100, "requests")
    assert row.shown.rate == pytest.approx(1 - 0.05 ** (1 / 100), rel=1e-9)
    assert row.verdict.reason == (
        "0 of 100 requests beyond: the rate is below 2.96 % at 95 %; "
        "a sample cannot show a rate of zero; a proof or a census can"
    )
    assert row.needed is None


def test_percentile_states_the_needed_units(lab: Any) -> None:
    clause = lab.clause(lab.statistic(*P99), evidence=SAMPLE)
    row = decided(lab, clause, lab.slice_data(column([0.0] * 120)))
    assert isinstance(row.verdict, Inconclusive)
    assert row.needed == 299
    assert "299 without any would show at most 1 %" in row.verdict.reason
    enough = decided(lab, clause, lab.slice_data(column([0.0] * 299)))
    assert isinstance(enough.verdict, Held)
    assert enough.needed is None
    assert enough.shown is not None
    assert enough.shown.text == "0 of 299 requests beyond: the rate is below 0.997 % at 95 %"


def test_needed_units_assume_the_present_rate(lab: Any) -> None:
    soft = lab.clause(lab.statistic("max", "kl"), budget=("1/20", "requests"), evidence=SAMPLE)
    row = decided(lab, soft, lab.slice_data(column([2.0] * 3 + [0.0] * 97)))
    assert row.needed == planning.units_at_rate(Fraction(1, 20), Fraction(3, 100))
    assert row.needed is not None
    assert f"about {row.needed} like these, or 59 without any" in row.verdict.reason
    worse = decided(lab, soft, lab.slice_data(column([2.0] * 6 + [0.0] * 94)))
    assert isinstance(worse.verdict, Inconclusive)
    assert worse.needed is None
    assert "no number of units like these shows at most 5 %" in worse.verdict.reason


def test_mean_states_the_approximate_number_of_needed_requests(lab: Any) -> None:
    """With the threshold halfway to the limit, about four times the requests."""
    values = np.random.default_rng(0).exponential(size=100)
    mean, data = lab.statistic("mean", "kl"), lab.slice_data(column(values))
    found = decided(lab, lab.clause(mean, limit="5", evidence=SAMPLE), data)
    half = str(Fraction((found.value + found.high) / 2))
    row = decided(lab, lab.clause(mean, limit=half, evidence=SAMPLE), data)
    assert isinstance(row.verdict, Inconclusive)
    assert row.shown is None
    assert row.needed == 400
    assert "about 400 would decide it" in row.verdict.reason
    beyond = decided(lab, lab.clause(mean, limit=str(Fraction(found.value)), evidence=SAMPLE), data)
    assert isinstance(beyond.verdict, Inconclusive)
    assert beyond.needed is None


def test_mean_outside_its_range_is_invalid(lab: Any) -> None:
    """Limits are clipped to the range of a metric, which would turn such a value into a pass."""
    clause = lab.clause(lab.statistic("mean", "kl"), limit="1", evidence=SAMPLE)
    values = -1 - np.random.default_rng(0).exponential(size=50)
    row = decided(lab, clause, lab.slice_data(column(values)))
    assert verdict_name(row.verdict) == "invalid_evidence"


def test_census_states_its_rows_and_no_rate(lab: Any) -> None:
    row = decided(lab, lab.clause(lab.statistic("max", "kl")), lab.slice_data(column([0.0] * 9)))
    assert isinstance(row.verdict, Held)
    assert (row.shown, row.needed) == (None, None)


def test_blocked_clause_shows_no_rate(lab: Any) -> None:
    clause = lab.clause(lab.statistic(*P99), evidence=SAMPLE)
    data = lab.slice_data(column([0.0] * 300))
    row = decide_clause(clause, lab.program(clause), data, seed=0, blocked="weights differ")
    assert verdict_name(row.verdict) == "invalid_evidence"
    assert (row.shown, row.needed) == (None, None)


def test_trace_fields_of_a_sample_are_treated_as_a_maximum(lab: Any) -> None:
    clause = lab.clause(HasFields(("rng_seed",)), evidence=SAMPLE)
    data = lab.slice_data(column([0.0] * 40), records=({"rng_seed": 1},) * 40)
    row = decided(lab, clause, data)
    assert isinstance(row.verdict, Inconclusive)
    assert row.shown is not None
    assert (row.shown.k, row.shown.n, row.shown.of) == (0, 40, "records")
    census = decided(lab, lab.clause(HasFields(("rng_seed",))), data)
    assert isinstance(census.verdict, Held)
    lacking = lab.slice_data(column([0.0] * 2), records=({"rng_seed": 1}, {}))
    assert verdict_name(decided(lab, clause, lacking).verdict) == "violated"


@pytest.mark.parametrize(
    ("kind", "q", "op", "wanted"),
    [
        ("quantile", "99/100", "<=", Fraction(1, 100)),
        ("quantile", "1/100", ">=", Fraction(1, 100)),
        ("max", None, "<=", Fraction(0)),
        ("min", None, ">=", Fraction(0)),
        ("max", None, ">=", None),
        ("mean", None, "<=", None),
    ],
)
def test_allowed_share_of_a_clause(
    lab: Any, kind: str, q: str | None, op: str, wanted: Fraction | None
) -> None:
    clause = lab.clause(lab.statistic(kind, "kl", q), op, "1/50")
    assert allowed_rate(clause) == wanted
    turned = {"<=": ">=", ">=": "<="}[op]
    swapped = Compare(turned, Number(Fraction(1, 50)), lab.statistic(kind, "kl", q))
    assert allowed_rate(lab.clause(swapped)) == wanted
    assert is_mean(clause) == (kind == "mean")


def test_allowed_share_of_a_rate(lab: Any) -> None:
    """A share of requests, where each has one value; a rate over tokens is a mean."""
    of_requests = lab.clause(lab.statistic("rate", "refusal_flip"), limit="1/50")
    assert allowed_rate(of_requests) == Fraction(1, 50)
    assert not is_mean(of_requests)
    of_tokens = lab.clause(lab.statistic("rate", "top1_flip"), limit="1/50")
    assert allowed_rate(of_tokens) is None
    assert is_mean(of_tokens)
    assert allowed_rate(lab.clause(lab.statistic("rate", "refusal_flip"), ">=", "1/50")) is None
    for name, op, limit, wanted in (
        ("failure_rate", "<=", "1/50", Fraction(1, 50)),
        ("failure_rate", "<=", "0", Fraction(0)),
        ("failure_rate", ">=", "1/50", None),
        ("determinism", ">=", "9/10", Fraction(1, 10)),
        ("determinism", ">=", "1", Fraction(0)),
        ("determinism", "<=", "9/10", None),
    ):
        assert allowed_rate(lab.clause(Metric(name), op, limit)) == wanted


def test_token_flips_are_not_counted_as_requests(lab: Any) -> None:
    """2 flips of 4000 tokens in 40 requests show no rate of requests.

    The row states its limits and the needed number of requests, as for a mean.
    """
    flips = [[1.0 if i < 2 and t == 0 else 0.0 for t in range(100)] for i in range(40)]
    clause = lab.clause(lab.statistic("rate", "top1_flip"), limit="1/100", evidence=SAMPLE)
    row = decided(lab, clause, lab.slice_data({"top1_flip": flips}))
    assert row.value == 2 / 4000
    assert row.shown is None
    assert "requests beyond" not in getattr(row.verdict, "reason", "")


def test_other_forms_have_no_allowed_share(lab: Any) -> None:
    region = Region(RegionKind.POINTS, "all", Fraction(0))
    both = Compare("<=", lab.statistic("mean", "kl"), lab.statistic("mean", "tv"))
    assert allowed_rate(lab.clause(both)) is None
    assert allowed_rate(lab.clause(Compare("<=", Number(Fraction(0)), Number(Fraction(1))))) is None
    assert allowed_rate(lab.clause(HasFields(("a",)))) == 0
    inner = Compare("<=", Metric("kl"), Number(Fraction(1)))
    assert allowed_rate(lab.clause(Quantified("forall", "x", region, inner))) == 0
    assert allowed_rate(lab.clause(Quantified("exists", "x", region, inner))) is None
    product = Arith("*", lab.statistic("mean", "kl"), Number(Fraction(2)))
    assert not is_mean(lab.clause(product))


# --- looks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("looks", "fewest"), [(1, 299), (10, 528), (None, 377)])
def test_more_looks_need_more_units(lab: Any, looks: int | None, fewest: int) -> None:
    clause = lab.clause(lab.statistic(*P99), evidence=SAMPLE)
    for n, wanted in ((fewest, "held"), (fewest - 1, "inconclusive")):
        row = decided(lab, clause, lab.slice_data(column([0.0] * n)), looks)
        assert verdict_name(row.verdict) == wanted
    soft = lab.clause(lab.statistic("max", "kl"), budget=("1/100", "requests"), evidence=SAMPLE)
    row = decided(lab, soft, lab.slice_data(column([0.0] * (fewest - 1))), looks)
    assert row.needed == fewest


def test_mean_has_no_anytime_limit(lab: Any) -> None:
    values = np.random.default_rng(0).exponential(size=100)
    clause = lab.clause(lab.statistic("mean", "kl"), limit="5", evidence=SAMPLE)
    data = lab.slice_data(column(values))
    row = decided(lab, clause, data, None)
    assert isinstance(row.verdict, Inconclusive)
    assert "plan the looks" in row.verdict.reason
    assert (row.low, row.high) == (None, None)
    assert isinstance(decided(lab, clause, data, 10).verdict, Held)


@pytest.mark.full
def test_repeated_looks_keep_the_false_pass_rate(lab: Any) -> None:
    """30 looks at a true and allowed rate of 5 %: single-look limits pass far more often."""
    clause = lab.clause(lab.statistic("max", "kl"), budget=("1/20", "requests"), evidence=SAMPLE)
    generator, runs, found = np.random.default_rng(3), 60, {1: 0, 30: 0, None: 0}
    for _ in range(runs):
        beyond = 2.0 * (generator.random(900) < 0.05)
        for looks in found:
            confidence = estimates.confidence_over(looks)
            counts = [(int((beyond[:n] > 1).sum()), n) for n in range(30, 901, 30)]
            found[looks] += any(
                rates.shows_below(k, n, Fraction(1, 20), confidence) for k, n in counts
            )
        row = decided(lab, clause, lab.slice_data(column(list(beyond[:300]))), None)
        k = int((beyond[:300] > 1).sum())
        shown = rates.shows_below(k, 300, Fraction(1, 20), estimates.confidence_over(None))
        assert isinstance(row.verdict, Held) == shown
    assert found[1] > 8
    assert found[30] <= 6
    assert found[None] <= 6


def _timed(seconds: Sequence[float]) -> SliceData:
    keys = [f"r{i}" for i in range(len(seconds))]
    runs = tuple(
        SamplingUnit(key, 1, {"latency": np.array([s])})
        for key, s in zip(keys, seconds, strict=True)
    )
    return SliceData("all", tuple(SamplingUnit(key, 1) for key in keys), runs)


def _of_times(lab: Any) -> tuple[Clause, ...]:
    """Return clauses about times at a limit that one in a hundred runs exceeds."""
    return (
        lab.clause(lab.statistic("quantile", "latency", "99/100"), family=Family.RUNTIME),
        lab.clause(
            lab.statistic("max", "latency"), budget=("1/100", "requests"), family=Family.RUNTIME
        ),
    )


def test_times_of_each_look_are_a_new_sample(lab: Any) -> None:
    """Each look times the requests again, with an error of its own.

    At the limit, with 400 runs per look, one of 50 looks passed by chance in more than half of the
    evaluations, for a stated error of 5 %.
    """
    generator, passed = np.random.default_rng(4), 0
    anytime = estimates.confidence_over(None)
    for _ in range(200):
        k = generator.binomial(400, 0.01, size=50)
        passed += any(rates.shows_below(int(x), 400, Fraction(1, 100), anytime) for x in k)
    assert passed > 100
    good, bad = _timed([0.5] * 800), _timed([0.5] * 400 + [2.0] * 400)
    for clause in _of_times(lab):
        for data in (good, bad):
            row = decided(lab, clause, data, None)
            assert isinstance(row.verdict, Inconclusive)
            assert "measured anew at every look: plan the looks" in row.verdict.reason
            assert (row.high, row.shown, row.needed) == (None, None, None)
            assert row.exceedance is not None
            assert (row.exceedance.low, row.exceedance.high) == (None, None)
        assert verdict_name(decided(lab, clause, good, 2).verdict) == "held"
        assert verdict_name(decided(lab, clause, bad, 2).verdict) == "violated"


def test_run_above_a_maximum_violates_at_any_look(lab: Any) -> None:
    """For any choice of the run that represents its request."""
    clause = lab.clause(lab.statistic("max", "latency"), family=Family.RUNTIME)
    for slow in range(9):
        data = _timed([0.5] * 9)
        again = [2.0 if i == slow else 0.5 for i in range(9)]
        row = decided(lab, clause, replace(data, runs=(*data.runs, *_timed(again).runs)), None)
        assert verdict_name(row.verdict) == "violated"
        assert row.exceedance is not None
        assert (row.value, row.exceedance.k, row.exceedance.n) == (2.0, 1, 9)
    row = decided(lab, clause, _timed([0.5] * 9), None)
    assert isinstance(row.verdict, Inconclusive)


def test_server_samples_change_between_looks_and_recordings_do_not(lab: Any) -> None:
    """Equal values of a local kernel, a server, and a file with answers of a server."""
    clause = lab.clause(lab.statistic(*P99), evidence=SAMPLE)
    data = lab.slice_data(column([0.0] * 800))
    here = lab.program(clause)
    server = Service("http://localhost", LogProbabilities("raw"))
    served = replace(here, infer=replace(here.infer, service=server))
    file = replace(here, infer=replace(here.infer, recording=Recording("trl")))
    found = [
        verdict_name(
            decide_clause(
                clause, program, data, seed=0, confidence=estimates.confidence_over(None)
            ).verdict
        )
        for program in (here, served, file)
    ]
    assert found == ["held", "inconclusive", "held"]


# --- many clauses --------------------------------------------------------------------------------


def _case(clause: Clause, data: SliceData) -> DecisionCase:
    (obligation,) = obligations_of(clause, data.name)
    return DecisionCase(obligation, data)


def _family(lab: Any, beyond: Sequence[int], n: int = 400) -> list[DecisionCase]:
    """Return one sampled clause of at most 5 % for each number of requests beyond it."""
    cases = []
    for i, k in enumerate(beyond):
        clause = lab.clause(
            lab.statistic("max", "kl"), budget=("1/20", "requests"), evidence=SAMPLE, id=f"N-{i}"
        )
        cases.append(_case(clause, lab.slice_data(column([2.0] * k + [0.0] * (n - k)))))
    return cases


def verdicts(lab: Any, cases: Sequence[DecisionCase], looks: int | None = 1) -> list[str]:
    rows, _ = decide_all(cases, lab.program(*(c.obligation.part for c in cases)), 0, looks)
    return [verdict_name(row.verdict) for row in rows]


@pytest.mark.full
def test_violation_among_many_needs_stronger_evidence(lab: Any) -> None:
    """29 of 400 have a tail of 3.0 %: a violation alone, but not among twenty."""
    assert verdicts(lab, _family(lab, [29])) == ["violated"]
    cases = _family(lab, [29] + [0] * 19)
    rows, how = decide_all(cases, lab.program(*(c.obligation.part for c in cases)), 0)
    assert [verdict_name(row.verdict) for row in rows] == ["inconclusive"] + ["held"] * 19
    assert (how.sampled, how.violation_error, how.error) == (20, 0.05 / 20, 0.05)
    assert isinstance(rows[0].verdict, Inconclusive)
    assert "violated at 95 % by itself" in rows[0].verdict.reason
    assert "99.75 %" in rows[0].verdict.reason
    assert rows[0].action is None


@pytest.mark.full
def test_holm_correction_relaxes_after_each_violation(lab: Any) -> None:
    """Holm, not Bonferroni: 31 of 400 has a tail of 1.2 %, enough after three of five."""
    assert verdicts(lab, _family(lab, [31, 0, 0, 0, 0])) == ["inconclusive"] + ["held"] * 4
    assert verdicts(lab, _family(lab, [31, 60, 60, 60, 0])) == ["violated"] * 4 + ["held"]


@pytest.mark.full
def test_passes_have_no_multiplicity_correction(lab: Any) -> None:
    """11 of 400 pass at 5 % alone, and also among fifty."""
    assert verdicts(lab, _family(lab, [11])) == ["held"]
    assert verdicts(lab, _family(lab, [11] * 50)) == ["held"] * 50


def test_census_uses_no_share_of_the_error(lab: Any) -> None:
    cases = _family(lab, [29])
    census = lab.clause(lab.statistic("max", "kl"), id="N-CENSUS")
    cases += [_case(census, lab.slice_data(column([2.0, 0.0])))] * 30
    assert verdicts(lab, cases) == ["violated"] * 31
    _, how = decide_all(cases, lab.program(census), 0)
    assert how.sampled == 1


@pytest.mark.full
def test_request_above_a_maximum_violates_at_any_level(lab: Any) -> None:
    hard = lab.clause(lab.statistic("max", "kl"), evidence=SAMPLE, id="N-MAX")
    cases = [_case(hard, lab.slice_data(column([2.0] + [0.0] * 99)))]
    assert verdicts(lab, cases + _family(lab, [0] * 80))[0] == "violated"
    assert verdicts(lab, cases, None) == ["violated"]


@pytest.mark.full
def test_marginally_violated_mean_is_inconclusive_among_many(lab: Any) -> None:
    values = np.random.default_rng(1).exponential(size=100)
    mean, data = lab.statistic("mean", "kl"), lab.slice_data(column(values))
    low = decided(lab, lab.clause(mean, limit="5", evidence=SAMPLE), data).low
    just = lab.clause(mean, limit=str(Fraction(low * 0.999)), evidence=SAMPLE)
    far = lab.clause(mean, limit="1/2", evidence=SAMPLE)
    others = _family(lab, [0] * 19, 100)
    for clause, wanted in ((just, "inconclusive"), (far, "violated")):
        case = _case(clause, data)
        assert verdicts(lab, [case])[0] == "violated"
        assert verdicts(lab, [case, *others])[0] == wanted
    strict = decide_clause(far, lab.program(far), data, seed=0, violation_error=Fraction(1, 10**9))
    assert isinstance(strict.verdict, Inconclusive)


@pytest.mark.full
def test_false_alarm_rate_of_a_whole_report(lab: Any) -> None:
    """Twelve clauses exactly at their limit: uncorrected, a fifth of the reports has a violation.

    With Holm's method at most one in twenty has.
    """
    generator, runs, alone, together = np.random.default_rng(6), 100, 0, 0
    for _ in range(runs):
        k = generator.binomial(100, 0.05, size=12)
        single = [rates.shows_above(int(x), 100, Fraction(1, 20), ONE_LOOK) for x in k]
        alone += any(single)
        if any(single):
            together += "violated" in verdicts(lab, _family(lab, [int(x) for x in k], 100))
    assert alone / runs > 0.15
    assert together / runs <= 0.05 + 0.06


# --- both sides ----------------------------------------------------------------------------------


@pytest.mark.full
def test_equivalence_needs_two_one_sided_tests(lab: Any) -> None:
    """abs(mean) <= τ holds only if both limits are inside; non-significance is not enough."""
    mean = lab.statistic("mean", "log_ratio")
    inside = Connective(
        "and",
        (Compare(">=", mean, Number(Fraction(-1, 5))), Compare("<=", mean, Number(Fraction(1, 5)))),
    )
    clause = lab.clause(inside, evidence=SAMPLE)
    noise = np.random.default_rng(2).normal(size=400)

    def verdict(values: np.ndarray, clause: Any = clause) -> str:
        data = lab.slice_data({"log_ratio": [[v] for v in values]})
        return verdict_name(decided(lab, clause, data).verdict)

    magnitude = lab.clause(Abs(mean), limit="1/5", evidence=SAMPLE)
    for either in (clause, magnitude):
        assert verdict(noise, either) == "held"
        assert verdict(noise[:30], either) == "inconclusive"
        assert verdict(noise + 1, either) == "violated"
        assert verdict(noise - 1, either) == "violated"


def test_request_is_deterministic_if_all_its_repeats_are(lab: Any) -> None:
    """Repeats of one request are not separate units."""
    from kcdsl_backends.empirical.collection import collect
    from kcdsl_backends.empirical.decision.report import slice_data
    from kcdsl_backends.empirical.table.evidence import Timing

    rows = lab.requests(3)
    clause = lab.clause(lab.statistic("mean", "kl"))
    evidence = collect(lab.setting(clause, rows=rows, slices={"all": rows}))
    keys = [request.key for request in rows]
    timing = Timing((), {keys[0]: (2, 2), keys[1]: (1, 2), keys[2]: (2, 2)}, None)
    data = slice_data(replace(evidence, timing=timing))["all"]
    assert data.repeats == (2, 3)


# --- shares at their thresholds -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "limit", "value", "found"),
    [
        (">", "1/10", 0.1, "violated"),
        (">=", "1/10", 0.1, "held"),
        (">=", "3/10", 0.3, "held"),
        (">", "3/10", 0.3, "violated"),
        (">=", "3/5", float(np.float32(0.6)), "held"),
        (">", "3/5", float(np.float32(0.6)), "violated"),
    ],
)
def test_limits_of_shares_are_exact_shares(
    lab: Any, op: str, limit: str, value: float, found: str
) -> None:
    """0.1 is stored as slightly more than one tenth and 0.3 as slightly less than three."""
    term = lab.statistic("quantile", "top10_overlap", "1/10")
    clause = lab.clause(term, op, limit, evidence=SAMPLE)
    row = decided(lab, clause, lab.slice_data({"top10_overlap": [[value]] * 100}))
    assert verdict_name(row.verdict) == found
    assert row.low <= row.exact_value <= row.high


@pytest.mark.parametrize(
    ("evidence", "found"), [(None, "held"), (SAMPLE, "inconclusive")], ids=["rows", "population"]
)
@pytest.mark.parametrize("kind", ["mean", "rate"])
def test_equal_policies_on_a_sample_imply_nothing_for_others(
    lab: Any, kind: str, evidence: EvidenceKind | None, found: str
) -> None:
    """Any sampled tokens give equal values on these requests; on others they may not."""
    metric = {"mean": "k3", "rate": "ratio_above2"}[kind]
    data = lab.slice_data({metric: [[0.0, 0.0]], "log_ratio_linf": [[0.0, 0.0]]})
    clause = lab.clause(lab.statistic(kind, metric), limit="1/1000000000", evidence=evidence)
    assert verdict_name(decided(lab, clause, data).verdict) == found
