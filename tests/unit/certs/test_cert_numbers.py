"""Exact reals, outward rounding, binomial tails, and verdicts that numbers support."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from kcdsl_certs.encoding.reals import (
    Measured,
    Rounding,
    decimal_text,
    parse_hex,
    parse_real,
    real_text,
)
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.statement import (
    CertifiedClause,
    Evidence,
    ProofReference,
    Quantity,
    Region,
    Verdict,
    admissible,
    certifies,
    check_verdict,
    lower_tail,
    overall,
)
from tests.support.quantities import margin, metric, norm, share, statistic

_FINITE = st.floats(allow_nan=False, allow_infinity=False)


@given(st.fractions())
def test_exact_numbers_survive_a_round_trip(value: Fraction) -> None:
    assert parse_real(real_text(value)) == value


@pytest.mark.parametrize(
    "text", [f"1/{2**7000}", f"-{3**4000}/{2**1200}", f"{3**5000}e999", "1e-999"]
)
def test_every_number_that_is_read_can_be_written(text: str) -> None:
    """Python refuses to write integers of more than 4,300 digits."""
    assert Fraction(real_text(parse_real(text))) == parse_real(text)


@given(_FINITE, st.sampled_from(["up", "down", "nearest"]))
def test_measured_numbers_are_rounded_outwards(value: float, rounding: Rounding) -> None:
    record = Measured(value, rounding).to_json()
    again = Measured.from_json(record, rounding)
    assert again.value == value
    shown = Fraction(record["decimal"])
    if rounding == "up":
        assert shown >= Fraction(value)
    if rounding == "down":
        assert shown <= Fraction(value)
    assert abs(shown - Fraction(value)) <= abs(Fraction(value)) / 10**5


@pytest.mark.parametrize("exact", [0.5, None, ["0x1.0000000000000p-1"], {}])
def test_exact_value_of_a_measured_number_is_text(exact: Any) -> None:
    with pytest.raises(Rejected, match="number/malformed: a hexadecimal float is text"):
        Measured.from_json({"decimal": "0.5", "hex": exact}, "up")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_not_evidence(value: float) -> None:
    with pytest.raises(Rejected, match="number/not-finite"):
        Measured(value, "up")


@pytest.mark.parametrize(
    "text",
    [
        "", " 1", "1 ", "+1", "01", "1.", ".5", "1e1000", "1E5", "nan", "inf", "0x1p3", "1/0",
        "1_0", "１", "0/3", "1/-2", "--1", "0x1.0p+1024", "0x1.00p+0", "-0x0.0p+0", "1" * 3000,
        "0.1\n",
    ],
)  # fmt: skip
def test_invalid_numbers_are_refused(text: str) -> None:
    with pytest.raises(Rejected):
        parse_real(text)


def test_hex_floats_are_canonical() -> None:
    assert parse_hex((0.05).hex()) == 0.05
    assert parse_hex("0x0.0000000000001p-1022") == 5e-324
    assert parse_real((0.05).hex()) != parse_real("0.05")
    for text in ("0x1.8p+0", "0x1.80000000000000p+0", "0X1.8000000000000p+0", "-0x0.0p+0"):
        with pytest.raises(Rejected):
            parse_hex(text)


def test_printed_decimals_are_rounded() -> None:
    assert decimal_text(0.05, "up") == "0.0500001"
    assert decimal_text(0.05, "nearest") == "0.05"
    assert decimal_text(-0.0, "down") == "0"
    assert decimal_text(1.0, "up") == "1"
    assert decimal_text(1e300, "nearest") == "1e+300"
    assert decimal_text(1e300, "up") == "1.00001e+300"


@pytest.mark.parametrize(("k", "n"), [(0, 1), (0, 59), (3, 100), (50, 1000), (611, 120_000)])
@pytest.mark.parametrize("rate", [Fraction(1, 100), Fraction(1, 20), Fraction(1, 3)])
def test_binomial_tails_agree_with_another_implementation(k: int, n: int, rate: Fraction) -> None:
    expected = binomtest(k, n, float(rate), alternative="less").pvalue
    assert float(lower_tail(k, n, rate)) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_units_needed_for_zero_failures_equal_the_tables() -> None:
    alpha = Fraction(1, 20)
    for rate, n in ((Fraction(1, 20), 59), (Fraction(1, 100), 299), (Fraction(1, 1000), 2995)):
        assert certifies(0, n, rate, alpha)
        assert not certifies(0, n - 1, rate, alpha)
    assert not certifies(10, 100, Fraction(1, 10), Fraction(1, 2))
    assert certifies(611, 120_000, Fraction(1, 100), alpha)


@given(st.integers(1, 60), st.data())
def test_certified_rate_is_wrong_with_probability_at_most_alpha(
    n: int, data: st.DataObject
) -> None:
    """At the limit rate itself, the chance of certifying is at most alpha (exact sum)."""
    rate = data.draw(st.fractions(Fraction(1, 50), Fraction(1, 2), max_denominator=50))
    alpha = Fraction(1, 20)
    chance = sum(
        math.comb(n, k) * rate**k * (1 - rate) ** (n - k)
        for k in range(n + 1)
        if certifies(k, n, rate, alpha)
    )
    assert chance <= alpha


@pytest.mark.parametrize(
    ("k", "n", "rate"), [(-1, 5, "1/2"), (6, 5, "1/2"), (1, 5, "0"), (1, 5, "1"), (0, 10**8, "1/2")]
)
def test_impossible_counts_are_refused(k: int, n: int, rate: str) -> None:
    with pytest.raises(Rejected, match="clause/counts"):
        lower_tail(k, n, Fraction(rate))


_PROOF = ProofReference("0" * 64, "x.proof.json")


def _clause(**changes: Any) -> CertifiedClause:
    stated: dict[str, Any] = {
        "obligation": "C/all/0",
        "id": "C",
        "unit": "1",
        "quantity": statistic("mean", "q"),
        "op": "<=",
        "tau": Fraction(1, 2),
        "evidence": Evidence.CENSUS,
        "method": "census/1",
        "verdict": Verdict.PASSED,
        "slice": "all",
        "slice_digest": "0" * 64,
        "n": 10,
    }
    return CertifiedClause(**{**stated, **changes})


_PROVED: dict[str, Any] = {
    "evidence": Evidence.PROOF, "proof": _PROOF, "n": None, "method": "affine+interval/1",
    "quantity": norm("inf", "attn_0"),
}  # fmt: skip
_CHANCE: dict[str, Any] = {
    **_PROVED, "evidence": Evidence.PROBABILISTIC, "bound": 0.1, "alpha": Fraction(1, 20),
    "assumptions": ("independent roundings",),
}  # fmt: skip
_SUM = Quantity("arithmetic", "+", (statistic("max", "a"), Quantity("number", value=Fraction(1))))
_P95 = statistic("quantile", "latency", "0.95")
_P99, _P100 = (statistic("quantile", "kl", q) for q in ("0.99", "1"))
_MAX, _EACH = statistic("max", "kl"), metric("kl")


def _of_mean(part: Quantity) -> Quantity:
    return Quantity("statistic", "mean", (part,))


_OF_EVERY_RUN = (
    norm("inf", "attn_0"),
    margin("attn_0"),
    Quantity("abs", of=(norm("2", "attn_0"),)),
    _of_mean(norm("span", "attn_0")),
)
_TIMED: dict[str, Any] = {
    "quantity": _P95,
    "bound": 0.1,
    "assumptions": ("a",),
}
_TRACED: dict[str, Any] = {**_TIMED, "quantity": share("rng_seed")}
_SAMPLED: dict[str, Any] = {
    "evidence": Evidence.SAMPLE, "method": "clopper-pearson/1", "alpha": Fraction(1, 20),
}  # fmt: skip
_BELOW: dict[str, Any] = {**_SAMPLED, "value": Fraction("0.1"), "high": 0.2}
_RATE: dict[str, Any] = {**_SAMPLED, "budget": Fraction(1, 10)}


@pytest.mark.parametrize(
    ("changes", "admitted"),
    [
        ({**_PROVED, "bound": 0.5}, "PASSED INCONCLUSIVE"),
        ({**_PROVED, "bound": 0.5, "op": "<"}, "INCONCLUSIVE"),
        (_CHANCE, "PASSED INCONCLUSIVE"),
        ({**_PROVED, "bound": math.nextafter(0.5, 1)}, "INCONCLUSIVE"),
        ({**_PROVED}, "INCONCLUSIVE"),
        ({**_PROVED, "low": 0.6}, "FAILED"),
        ({**_PROVED, "bound": 0.7, "low": 0.6}, "FAILED"),
        ({**_PROVED, "bound": 0.7, "low": 0.5}, "INCONCLUSIVE"),
        ({**_PROVED, "bound": 0.6, "op": ">="}, "PASSED INCONCLUSIVE"),
        ({**_PROVED, "bound": 0.4, "op": ">="}, "INCONCLUSIVE"),
        ({**_PROVED, "high": 0.4, "op": ">="}, "FAILED"),
        ({**_PROVED, "bound": 0.5, "op": "=="}, "INCONCLUSIVE"),
        ({"value": Fraction("0.5")}, "PASSED INCONCLUSIVE"),
        ({"value": Fraction("0.6")}, "FAILED"),
        ({"value": Fraction("0.5"), "n": 0}, "INCONCLUSIVE"),
        ({"value": Fraction("0.5"), "n": None}, "INCONCLUSIVE"),
        ({}, "INCONCLUSIVE"),
        ({"exceed": 0}, "PASSED INCONCLUSIVE"),
        ({"exceed": 1}, "FAILED"),
        ({"value": Fraction("0.5"), "budget": Fraction(0)}, "PASSED INCONCLUSIVE"),
        ({"exceed": 1, "budget": Fraction(1, 10)}, "PASSED INCONCLUSIVE"),
        ({"exceed": 2, "budget": Fraction(1, 10)}, "FAILED"),
        ({"value": Fraction("0.1"), "budget": Fraction(1, 10)}, "INCONCLUSIVE"),
        ({"value": Fraction("0.1"), "exceed": 1, "quantity": _EACH}, "FAILED"),
        ({"value": Fraction("0.1"), "exceed": 1, "quantity": _MAX}, "FAILED"),
        ({"value": Fraction("0.1"), "exceed": 1}, "PASSED INCONCLUSIVE"),
        ({**_BELOW, "method": "one-sided-limits/1"}, "PASSED INCONCLUSIVE"),
        ({**_BELOW, "method": "attack/1"}, "INCONCLUSIVE"),
        ({**_BELOW, "method": "attack/1", "value": Fraction("0.6")}, "FAILED INCONCLUSIVE"),
        *(
            ({**kind, "quantity": quantity}, admitted)
            for quantity in _OF_EVERY_RUN
            for kind, admitted in (
                ({"value": Fraction("0.1")}, "INCONCLUSIVE"),
                ({"exceed": 0}, "INCONCLUSIVE"),
                ({"value": Fraction("0.6")}, "FAILED"),
                ({"exceed": 0, "budget": Fraction(1, 10)}, "INCONCLUSIVE"),
                ({**_SAMPLED, "value": Fraction("0.1"), "high": 0.2}, "INCONCLUSIVE"),
                ({**_SAMPLED, "budget": Fraction(1, 10), "exceed": 0, "n": 29}, "INCONCLUSIVE"),
                ({**_SAMPLED, "value": Fraction("0.6")}, "FAILED INCONCLUSIVE"),
            )
        ),
        (
            {"value": Fraction("0.1"), "quantity": norm("inf", "attn_0", True)},
            "PASSED INCONCLUSIVE",
        ),
        ({**_BELOW, "quantity": _of_mean(_MAX)}, "INCONCLUSIVE"),
        ({**_BELOW, "quantity": _of_mean(share("seed"))}, "INCONCLUSIVE"),
        ({**_BELOW, "quantity": _of_mean(Quantity("abs", of=(_EACH,)))}, "PASSED INCONCLUSIVE"),
        ({**_SAMPLED, "value": Fraction("0.1")}, "INCONCLUSIVE"),
        ({**_SAMPLED, "value": Fraction("0.1"), "budget": Fraction(0)}, "INCONCLUSIVE"),
        ({**_SAMPLED, "value": Fraction("0.6")}, "FAILED INCONCLUSIVE"),
        ({**_SAMPLED, "exceed": 1, "quantity": statistic("max", "kl")}, "FAILED INCONCLUSIVE"),
        ({**_SAMPLED, "value": Fraction("0.1"), "high": 0.5}, "PASSED INCONCLUSIVE"),
        ({**_SAMPLED, "value": Fraction("0.1"), "high": 0.51}, "INCONCLUSIVE"),
        ({**_SAMPLED, "value": Fraction("0.1"), "high": 0.2, "alpha": None}, "INCONCLUSIVE"),
        ({**_SAMPLED, "value": Fraction("0.1"), "low": 0.0}, "INCONCLUSIVE"),
        ({**_SAMPLED, "high": 0.2}, "INCONCLUSIVE"),
        ({**_SAMPLED, "value": Fraction("0.9"), "low": 0.6, "op": ">="}, "PASSED INCONCLUSIVE"),
        ({**_SAMPLED, "value": Fraction("0.9"), "low": 0.4, "op": ">="}, "INCONCLUSIVE"),
        (
            {**_SAMPLED, "value": Fraction("0.1"), "high": 0.2, "quantity": statistic("max", "kl")},
            "INCONCLUSIVE",
        ),
        (
            {**_SAMPLED, "value": Fraction(1, 10), "high": 0.2, "quantity": metric("kl")},
            "INCONCLUSIVE",
        ),
        (
            {
                **_SAMPLED,
                "value": Fraction("0.1"),
                "high": 0.2,
                "quantity": statistic("quantile", "kl", "1"),
            },
            "INCONCLUSIVE",
        ),
        ({**_BELOW, "quantity": _SUM}, "INCONCLUSIVE"),
        (
            {
                **_SAMPLED,
                "value": Fraction("0.1"),
                "high": 0.2,
                "quantity": statistic("quantile", "kl", "0.99"),
            },
            "PASSED INCONCLUSIVE",
        ),
        ({**_SAMPLED, "value": Fraction("0.1"), "high": 0.2, "op": "=="}, "FAILED INCONCLUSIVE"),
        ({**_RATE, "exceed": 0, "n": 29}, "PASSED INCONCLUSIVE"),
        ({**_RATE, "exceed": 0, "n": 28}, "INCONCLUSIVE"),
        ({**_RATE, "exceed": 9, "n": 100}, "INCONCLUSIVE"),
        ({**_RATE, "exceed": 11, "n": 100}, "FAILED INCONCLUSIVE"),
        ({**_RATE, "exceed": 0, "n": 29, "method": "one-sided-limits/1"}, "INCONCLUSIVE"),
        ({**_RATE, "exceed": 0, "n": 29, "alpha": None}, "INCONCLUSIVE"),
        ({**_RATE, "exceed": None, "n": 29}, "INCONCLUSIVE"),
    ],
)
def test_verdicts_follow_from_numbers(changes: dict[str, Any], admitted: str) -> None:
    clause = _clause(**changes)
    assert {v.value for v in admissible(clause)} == set(admitted.split())
    for verdict in Verdict:
        stated = dataclasses.replace(clause, verdict=verdict)
        if verdict in admitted.split():
            check_verdict(stated)
        else:
            with pytest.raises(Rejected) as caught:
                check_verdict(stated)
            assert caught.value.reason in {
                "clause/verdict-contradicts-numbers",
                "clause/evidence-overstated",
            }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"exceed": 11}, "clause/counts"),
        ({"budget": Fraction(1)}, "clause/budget"),
        ({"budget": Fraction(-1, 10)}, "clause/budget"),
        ({**_PROVED, "bound": 0.1, "budget": Fraction(1, 10)}, "clause/budget"),
        ({**_PROVED, "proof": None}, "clause/proof-missing"),
        (
            {
                "evidence": Evidence.PROBABILISTIC,
                "bound": 0.1,
                "assumptions": ("independent roundings",),
            },
            "clause/proof-missing",
        ),
        ({**_PROVED, "evidence": Evidence.PROBABILISTIC}, "clause/assumption-unnamed"),
        ({**_PROVED, "evidence": Evidence.PROOF_REAL}, "clause/assumption-unnamed"),
        *(
            ({**_PROVED, **what, "evidence": kind, "proof": proof}, reason)
            for kind in (Evidence.PROOF, Evidence.PROOF_REAL, Evidence.PROBABILISTIC)
            for what in (_TIMED, _TRACED)
            for proof, reason in ((None, "clause/proof-missing"), (_PROOF, "clause/evidence-kind"))
        ),
        ({**_PROVED, "implied_by": "N"}, "clause/evidence-kind"),
        ({"value": Fraction("0.1"), "proof": _PROOF}, "clause/evidence-kind"),
        ({"value": Fraction("0.1"), "implied_by": "N"}, "clause/evidence-kind"),
        ({"value": Fraction("0.1"), "method": "census/2"}, "clause/method"),
        ({"value": Fraction("0.1"), "method": "interval/1"}, "clause/method"),
        ({**_RATE, "exceed": 0, "n": 29, "method": "eyeballing/1"}, "clause/method"),
        *(
            ({**_PROVED, "bound": 0.1, "method": method}, "clause/method")
            for method in (
                "census/1",
                "bound-chain/1",
                "chain/1",
                "interval+affine/1",
                "affine+affine/1",
                "affine/2",
                "/1",
                "+/1",
                "affine+/1",
                "interval/1/1",
            )
        ),
        (
            {**_PROVED, "bound": 0.1, "proof": None, "implied_by": "N", "method": "affine/1"},
            "clause/method",
        ),
        ({**_PROVED, "bound": 0.1, "low": 0.2}, "clause/attack-beyond-bound"),
        ({**_PROVED, "bound": 0.6, "high": 0.55, "op": ">="}, "clause/attack-beyond-bound"),
        ({"value": Fraction("0.1"), "slice_digest": None}, "clause/census-not-pinned"),
        ({**_RATE, "exceed": 0, "n": 29, "alpha": Fraction(1, 4)}, "clause/alpha"),
        ({**_PROVED, "bound": 0.1, "alpha": Fraction(1, 20)}, "clause/alpha"),
        *(
            ({**_CHANCE, "alpha": alpha}, "clause/alpha")
            for alpha in (None, Fraction(0), Fraction(-1, 20), Fraction(1, 19), Fraction(1))
        ),
        ({**_SAMPLED, "value": Fraction("0.2"), "high": 0.1}, "clause/limit"),
        ({**_SAMPLED, "value": Fraction("0.6"), "low": 0.7, "op": ">="}, "clause/limit"),
    ],
)
def test_contradictory_records_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(Rejected) as caught:
        admissible(_clause(**changes))
    assert caught.value.reason == reason


def test_overall_verdict_is_the_worst() -> None:
    made = {v: _clause(verdict=v) for v in Verdict}
    assert overall(()) is Verdict.INCONCLUSIVE
    assert overall((made[Verdict.PASSED],)) is Verdict.PASSED
    assert overall((made[Verdict.PASSED], made[Verdict.INCONCLUSIVE])) is Verdict.INCONCLUSIVE
    assert overall(tuple(made.values())) is Verdict.FAILED


def test_result_with_every_field_survives_a_round_trip() -> None:
    clause = _clause(
        region=Region("ball", "all", Fraction(1, 1000)), numerics=("1" * 64, "2" * 64), bound=0.3,
        value=Fraction(1, 4), low=0.2, high=0.3, counted="requests", exceed=0,
        budget=Fraction(1, 3), alpha=Fraction(1, 20), proof=_PROOF, implied_by="N",
        assumptions=("a",), scope="s", reason="r",
    )  # fmt: skip
    assert CertifiedClause.from_json(clause.to_json(), "c") == clause
