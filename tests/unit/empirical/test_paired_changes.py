"""Paired changes of two runs and of a 2×2 design, compared with independent definitions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from kcdsl.api import causes
from kcdsl.ir.terms import Clause, Family, Metric, UserMetric
from kcdsl_backends.empirical.decision.aligned import linear, within_of_requests
from kcdsl_backends.empirical.questions.pairs import compare_runs
from kcdsl_backends.empirical.statistics import paired
from kcdsl_backends.empirical.statistics.estimates import NotMeasurable
from kcdsl_backends.empirical.table.evidence import EvidenceTable, SamplingUnit, SliceData
from kcdsl_backends.empirical.table.requirements import metrics_of
from tests.support.evidence import clause, evidence


def test_interaction_counts_units_by_sign_of_differences() -> None:
    rng = np.random.default_rng(3)
    runs = [rng.random(200) < share for share in (0.95, 0.9, 0.9, 0.5)]
    found = paired.change_of_shares(runs)
    signs = [(int(d) - int(c)) - (int(b) - int(a)) for a, b, c, d in zip(*runs, strict=True)]
    worse, better = sum(s < 0 for s in signs), sum(s > 0 for s in signs)
    assert (found.worse, found.better, found.n) == (worse, better, 200)
    assert found.delta == (better - worse) / 200
    test = stats.binomtest(better, worse + better, alternative="less")
    assert found.harm == pytest.approx(test.pvalue)
    assert found.low < found.delta < found.high < 0


def test_requests_that_differ_in_a_final_nul_are_units_of_their_own() -> None:
    data = SliceData("all", tuple(SamplingUnit(key, 1) for key in ("a", "a\0", "b")))
    found = within_of_requests(np.array([True, False, True]), Metric("kl"), data, [0, 1, 2])
    assert found.tolist() == [1, 0, 1]


def test_interaction_of_means_has_students_t_limits_without_skewness() -> None:
    rng = np.random.default_rng(4)
    values, apart = rng.normal(0, 1, (4, 50)), rng.normal(0, 1, 25)
    values[3] = values[2] + values[1] - values[0] + 0.3 + np.append(apart, -apart)
    parts = [linear(row, np.ones(50)) for row in values]
    found = paired.change_of_means([p[0] for p in parts], [p[1] for p in parts], upward=False)
    each = (values[3] - values[2]) - (values[1] - values[0])
    test = stats.ttest_1samp(each, 0, alternative="greater")
    limits = stats.ttest_1samp(each, 0).confidence_interval(0.95)
    assert found.delta == pytest.approx(each.mean())
    assert (found.low, found.high) == pytest.approx((limits.low, limits.high))
    assert found.harm == pytest.approx(test.pvalue)


def _false_changes(runs: int, n: int) -> list[tuple[bool, bool, bool]]:
    """Return, for skewed differences without a mean: whether a rise, a fall, and a limit on the
    wrong side were shown."""
    found = []
    for run in range(runs):
        values = np.random.default_rng(run).exponential(size=n) - 1.0
        mean, rest = linear(values, np.ones(n))
        change = paired.change_of_means([0.0, mean], [np.zeros(n), rest], upward=False)
        risen, fallen = (chance <= paired.ERROR for chance in (change.harm, change.use))
        found.append((risen, fallen, not change.low <= 0 <= change.high))
    return found


def test_skewed_differences_are_rarely_a_change() -> None:
    """Student's t law alone shows a fall in 9.2 % of these runs, and covers 0 in 92.7 %."""
    runs = 2000
    risen, fallen, missed = (
        sum(each) / runs for each in zip(*_false_changes(runs, 30), strict=True)
    )
    assert risen <= paired.ERROR
    assert fallen <= 0.07
    assert missed <= 0.06


@pytest.mark.full
def test_false_interactions_are_rare() -> None:
    rng, false = np.random.default_rng(5), 0
    for _ in range(2000):
        runs = [rng.random(60) < 0.9 for _ in range(4)]
        false += paired.change_of_shares(runs).harm <= paired.ERROR
    assert false / 2000 <= paired.ERROR


def test_stated_error_equals_that_of_the_rows() -> None:
    assert causes._ERROR == paired.ERROR


def test_zero_units_are_not_evidence() -> None:
    with pytest.raises(NotMeasurable):
        paired.change_of_shares([np.zeros(0, dtype=bool)] * 4)
    with pytest.raises(NotMeasurable):
        paired.change_of_means([0.0] * 4, [np.zeros(1)] * 4, upward=True)


# --- units are those of the verdict ---------------------------------------------------------------


def _measured(asked: Clause, name: str, values: Callable[[int], Sequence[float]]) -> EvidenceTable:
    """Return evidence of 40 requests of one metric."""
    table = evidence((asked,), count=40, certified={}, floor={}, measured=frozenset({name}))
    runs = {
        key: replace(run, unit=replace(run.unit, values={name: np.array(values(run.unit.tokens))}))
        for key, run in table.runs.items()
    }
    return replace(table, runs=runs)


@pytest.mark.parametrize(
    ("asked", "incumbent", "candidate", "change"),
    [
        # 3/5 is stored as slightly less: each request satisfies the threshold
        (
            clause("S", "min", "top5_overlap", "3/5", op=">="),
            lambda tokens: [0.6] * tokens,
            lambda tokens: [0.4] * tokens,
            "regressed",
        ),
        # a budget on a mean counts requests by their means, not by their worst tokens
        (
            clause("M", "mean", "kl", "1/10", budget="1/20"),
            lambda tokens: [0.11] + [0.0] * (tokens - 1),
            lambda tokens: [0.11] * tokens,
            "regressed",
        ),
        (
            clause("M", "mean", "kl", "1/10", budget="1/20"),
            lambda tokens: [0.01] * tokens,
            lambda tokens: [0.11] + [0.0] * (tokens - 1),
            "unchanged",
        ),
    ],
    ids=["share", "mean beyond", "mean within"],
)
def test_unit_satisfies_a_threshold_as_in_the_verdict(
    asked: Clause,
    incumbent: Callable[[int], Sequence[float]],
    candidate: Callable[[int], Sequence[float]],
    change: str,
) -> None:
    (metric,) = metrics_of(asked.require)
    one, two = (_measured(asked, metric, values) for values in (incumbent, candidate))
    (row,) = compare_runs(one, two).rows
    assert row.change == change
    kept = [rate.kept for rate in row.rates if rate is not None]
    assert row.worse is not None
    assert row.better is not None
    assert kept[0] - kept[1] == row.worse - row.better


def _constant(value: float) -> Callable[[int], Sequence[float]]:
    return lambda tokens: [value] * tokens


def test_values_of_other_constants_or_functions_are_not_compared() -> None:
    """The requirement is the same text, and its values are another quantity."""
    asked = clause("G", "mean", "grad_bias", "1")
    one, two = (_measured(asked, "grad_bias", _constant(value)) for value in (0.1, 0.2))
    (row,) = compare_runs(one, two).rows
    assert row.change == "regressed"
    constants = replace(two.program.constants, advantage_max=Fraction(2))
    (row,) = compare_runs(one, replace(two, program=replace(two.program, constants=constants))).rows
    assert (row.change, row.reason) == (
        "not_compared",
        "the runs computed it by other functions or constants",
    )


def test_values_of_an_edited_function_are_not_compared() -> None:
    asked = clause("M", "mean", "mine", "1")
    fields = ("mine", "m.py:mine", Family.STATISTICAL, "token", "lower", "1", "1", ("mean",), ())
    own = UserMetric(*fields)
    runs = []
    for value, digest in ((0.1, "a"), (0.2, "a"), (0.2, "b")):
        table = _measured(asked, "mine", _constant(value))
        record = {"name": "mine", "function": own.function, "sha256": 64 * digest}
        runs.append(
            replace(
                table,
                program=replace(table.program, metrics=(own,)),
                environment={**table.environment, "metrics": [record]},
            )
        )
    one, same, edited = runs
    (row,) = compare_runs(one, same).rows
    assert (row.change, len(compare_runs(one, same).measures)) == ("regressed", 3)  # slices
    (row,) = compare_runs(one, edited).rows
    assert (row.change, compare_runs(one, edited).measures) == ("not_compared", ())
