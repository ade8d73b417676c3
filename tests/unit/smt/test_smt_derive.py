"""Clauses implied by a proved drift: metrics on both sides of their bounds."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcdsl.inequalities import bound
from kcdsl.ir.obligations import Comparison
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Budget,
    Compare,
    Connective,
    Constants,
    Metric,
    Not,
    Number,
    RegionKind,
    Slice,
    Term,
)
from kcdsl_backends.smt import BACKEND, ImpliedBound, ProvedDrift
from kcdsl_backends.smt.axioms import number
from kcdsl_backends.smt.solver import Outcome, Solver
from kcdsl_certs.verification.bound_chain import implied_bound, span_of_norm

Build = Any

B = 1e-3
"""The proved bound on the l_inf norm; s = 2 B at T = 1."""
PROOF = ProvedDrift("N-LOGIT", "model", "all", RegionKind.POINTS, "inf", B)
S = 2 * B

ABS_LOG_RATIO = Abs(Metric("log_ratio"))
LIMITS: list[tuple[str, Term, float]] = [
    ("tv", Metric("tv"), bound("tv", S)),
    ("kl", Metric("kl"), bound("kl", S)),
    ("jeffreys", Metric("jeffreys"), bound("jeffreys", S)),
    ("abs_log_ratio", ABS_LOG_RATIO, S),
    ("log_ratio", Metric("log_ratio"), S),
    ("w_log_w", Metric("w_log_w"), bound("w_log_w", S)),
    ("reward_delta", Metric("reward_delta"), 2 * bound("tv", S)),
    ("grad_bias", Metric("grad_bias"), 2 * 3 * 5 * bound("tv", S)),
    ("logit_linf", Metric("logit_linf"), B),
    ("logit_span", Metric("logit_span"), 2 * B),
]


def derived(program: Any, *proofs: ProvedDrift) -> list[tuple[str, str]]:
    return [(i.clause_id, i.slice) for i in BACKEND.derive(program, proofs or (PROOF,))]


def at_most(build: Build, term: Term, limit: Fraction, op: str = "<=") -> Any:
    return build.clause("A", Compare(op, term, Number(limit)))


@pytest.mark.sample(20)
@pytest.mark.parametrize("statistic", ["mean", "p50", "p99", "max", "value"])
@pytest.mark.parametrize(("name", "term", "limit"), LIMITS, ids=[name for name, _, _ in LIMITS])
def test_metric_threshold_above_its_bound_is_implied_and_below_not(
    build: Build, name: str, term: Term, limit: float, statistic: str
) -> None:
    quantity = {
        "mean": build.stat("mean", term),
        "p50": replace(build.p(50, "kl"), of=term),
        "p99": replace(build.p(99, "kl"), of=term),
        "max": build.stat("max", term),
        "value": term,
    }[statistic]
    near = Fraction(limit) * (1 + Fraction(1, 10**12))
    assert derived(build.program(at_most(build, quantity, near))) == [("A", "all")]
    assert derived(build.program(at_most(build, quantity, near, "<"))) == [("A", "all")]
    below = Fraction(limit) * (1 - Fraction(1, 10**9))
    assert derived(build.program(at_most(build, quantity, below))) == []
    assert derived(build.program(at_most(build, quantity, near, ">="))) == []
    lower = derived(build.program(at_most(build, quantity, -near, ">=")))
    never_below_zero_by_definition = name not in ("log_ratio", "w_log_w")
    assert lower == ([] if never_below_zero_by_definition else [("A", "all")])


def test_lower_side_of_the_signed_ratio_is_implied(build: Build) -> None:
    for kind in ("mean", "min", "max"):
        quantity = build.stat(kind, "log_ratio")
        assert derived(build.program(at_most(build, quantity, Fraction(-S), ">="))) == [
            ("A", "all")
        ]
        assert derived(build.program(at_most(build, quantity, Fraction(-S) / 2, ">="))) == []
        assert derived(build.program(at_most(build, quantity, Fraction(-S), "<="))) == []


def test_equality_of_bound_and_threshold_is_exact(build: Build) -> None:
    limit = Fraction(bound("tv", S))
    assert derived(build.program(at_most(build, build.p(99, "tv"), limit))) == [("A", "all")]
    assert derived(build.program(at_most(build, build.p(99, "tv"), limit, "<"))) == []


def test_reversed_comparison_is_equivalent(build: Build) -> None:
    turned = build.clause("A", Compare(">=", Number(Fraction(1, 100)), build.p(99, "tv")))
    (implied,) = BACKEND.derive(build.program(turned), (PROOF,))
    assert implied.bounds[0].comparison.op == "<="
    assert implied.bounds[0].quantity == "p99(tv)"


# --- what must not follow ------------------------------------------------------------------------


def generous(build: Build, slices: tuple[str, ...] = ("all",)) -> Any:
    return build.clause("A", build.compare(build.p(99, "tv"), "<=", "0.5"), slices)


@pytest.mark.parametrize("block", ["head", "layer_0", "attn_0", "Model", ""])
def test_only_the_drift_of_the_whole_model_implies_metrics(build: Build, block: str) -> None:
    assert derived(build.program(generous(build)), replace(PROOF, block=block)) == []


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1e-9, True, None, "0.1"])
def test_negative_and_nan_bounds_prove_nothing(build: Build, wrong: Any) -> None:
    assert derived(build.program(generous(build)), replace(PROOF, bound=wrong)) == []


def test_zero_bound_proves_every_threshold(build: Build) -> None:
    exact = at_most(build, build.stat("max", "tv"), Fraction(0))
    assert derived(build.program(exact), replace(PROOF, bound=0.0)) == [("A", "all")]
    assert derived(build.program(exact), replace(PROOF, bound=5e-324)) == []


@pytest.mark.parametrize("norm", ["1", "", "fro", "no_flip"])
def test_unknown_norms_prove_nothing(build: Build, norm: str) -> None:
    assert derived(build.program(generous(build)), replace(PROOF, norm=norm)) == []


def test_proof_without_a_covering_region_proves_nothing(build: Build) -> None:
    wrong: Any = "somewhere"
    assert derived(build.program(generous(build)), replace(PROOF, region=wrong)) == []
    for kind in RegionKind:
        found = derived(build.program(generous(build)), replace(PROOF, region=kind))
        # sequences up to a longest one are not all requests of a slice
        assert found == ([] if kind is RegionKind.ROWS else [("A", "all")])


def test_encoder_has_no_implied_metrics(build: Build) -> None:
    assert derived(build.program(generous(build), architecture="bert")) == []
    assert derived(build.program(generous(build), architecture=None)) == [("A", "all")]


@pytest.mark.parametrize("name", ["top1_overlap", "top5_overlap", "ece_gap"])
def test_agreement_is_not_implied_by_distances(build: Build, name: str) -> None:
    for op, value in ((">=", "1e-9"), (">", "0"), ("<=", "0.999")):
        clause = build.clause("A", build.compare(build.stat("mean", name), op, value))
        assert derived(build.program(clause), replace(PROOF, bound=1e-300)) == []


def test_rates_are_not_implied(build: Build) -> None:
    clause = build.clause("A", build.compare(build.stat("rate", "tv"), "<=", "0.5"))
    assert derived(build.program(clause)) == []


def test_clause_that_always_holds_is_not_reported_as_implied(build: Build) -> None:
    for name, op, value in (("tv", "<=", "1"), ("kl", ">=", "0"), ("top1_overlap", ">=", "0")):
        clause = build.clause("A", build.compare(build.stat("mean", name), op, value))
        assert derived(build.program(clause)) == []


def test_norms_of_states_runtime_and_l2_are_not_implied(build: Build) -> None:
    for name in ("hidden_l2", "latency", "logit_l2", "unknown"):
        clause = build.clause("A", build.compare(build.stat("mean", name), "<=", "1e9"))
        assert derived(build.program(clause)) == []


def test_quantified_and_sliceless_clauses_are_not_implied(build: Build) -> None:
    universal = build.every(build.compare(build.drift("model"), "<=", "1"), build.region())
    assert derived(build.program(build.clause("A", universal, []))) == []
    assert derived(build.program(generous(build, ()))) == []


# --- slices --------------------------------------------------------------------------------------


def test_proof_covers_nested_slices(build: Build) -> None:
    program = build.program(generous(build, ("all", "long", "longer", "other")))
    assert derived(program) == [("A", "all"), ("A", "long"), ("A", "longer")]
    on_long = replace(PROOF, slice="long")
    assert derived(program, on_long) == [("A", "long"), ("A", "longer")]
    assert derived(program, replace(PROOF, slice="other")) == [("A", "other")]
    assert derived(program, replace(PROOF, slice="longer")) == [("A", "longer")]


def test_undeclared_slice_covers_nothing(build: Build) -> None:
    assert derived(build.program(generous(build)), replace(PROOF, slice="elsewhere")) == []
    undeclared = build.program(generous(build, ("elsewhere",)))
    assert derived(undeclared) == []
    assert derived(undeclared, replace(PROOF, slice="elsewhere")) == []


def test_explicit_and_default_data_are_the_same(build: Build) -> None:
    slices = (Slice("all"), Slice("named", data="data.jsonl"), Slice("else", data="./data.jsonl"))
    program = build.program(generous(build, ("named", "else")), slices=slices)
    assert derived(program) == [("A", "named")]


def test_tightest_sufficient_proof_is_named(build: Build) -> None:
    loose, tight = replace(PROOF, clause_id="LOOSE", bound=10.0), PROOF
    limit = Fraction(bound("kl", S)) * 2
    clause = build.clause("A", Compare("<=", build.p(99, "kl"), Number(limit)), ("all", "other"))
    elsewhere = replace(PROOF, clause_id="OTHER", slice="other", bound=1e-6)
    found = BACKEND.derive(build.program(clause), (loose, tight, elsewhere))
    assert [(i.slice, i.by) for i in found] == [("all", "N-LOGIT"), ("other", "OTHER")]


def test_l2_proof_implies_the_l2_metric(build: Build) -> None:
    l2 = replace(PROOF, norm="2")
    clause = build.clause("A", build.compare(build.p(99, "logit_l2"), "<=", "0.001001"))
    assert derived(build.program(clause), l2) == [("A", "all")]
    assert derived(build.program(clause), replace(PROOF, norm="span")) == []
    tv = at_most(
        build, build.p(99, "tv"), Fraction(bound("tv", math.sqrt(2) * B)) * Fraction("1.0001")
    )
    assert derived(build.program(tv), l2) == [("A", "all")]
    assert derived(build.program(tv), PROOF) == []


# --- temperature and constants -------------------------------------------------------------------


def test_temperature_scales_the_span(build: Build) -> None:
    cold = Constants(temperature=Fraction(1, 4))
    proof = replace(PROOF, temperature=Fraction(1, 4))
    limit = Fraction(bound("tv", 4 * S)) * Fraction("1.000001")
    assert derived(build.program(at_most(build, build.p(99, "tv"), limit), constants=cold), proof)
    tight = at_most(build, build.p(99, "tv"), Fraction(bound("tv", S)) * 2)
    assert derived(build.program(tight, constants=cold), proof) == []
    span = at_most(build, build.p(99, "logit_span"), Fraction(2 * B))
    assert derived(build.program(span, constants=cold), proof) == [("A", "all")]


@pytest.mark.parametrize("temperature", [Fraction(0), Fraction(-1)])
def test_chain_needs_a_positive_temperature(build: Build, temperature: Fraction) -> None:
    program = build.program(generous(build), constants=Constants(temperature=temperature))
    assert derived(program, replace(PROOF, temperature=temperature)) == []


def test_proof_for_another_temperature_proves_nothing(build: Build) -> None:
    assert derived(build.program(generous(build)), replace(PROOF, temperature=Fraction(2))) == []


def test_rewards_and_gradients_need_their_constants(build: Build) -> None:
    reward = build.clause("R", build.compare(build.metric("reward_delta"), "<=", "1"))
    gradient = build.clause("G", build.compare(build.metric("grad_bias"), "<=", "1"))
    assert derived(build.program(reward, gradient)) == [("R", "all"), ("G", "all")]
    none = Constants()
    half = Constants(reward_range=Fraction(-1), advantage_max=Fraction(1))
    for constants in (none, half):
        assert derived(build.program(reward, gradient, constants=constants)) == []


# --- formulas ------------------------------------------------------------------------------------


def test_implication_through_connectives_and_arithmetic(build: Build) -> None:
    tv = build.compare(build.p(99, "tv"), "<=", "0.01")
    kl = build.compare(build.stat("mean", "kl"), "<=", "0.01")
    agree = build.compare(build.stat("mean", "top1_overlap"), ">=", "0.9")
    impossible = build.compare(build.p(99, "tv"), "<=", "1e-9")

    def follows(formula: Any) -> bool:
        return bool(derived(build.program(build.clause("A", formula))))

    assert follows(Connective("and", (tv, kl)))
    assert not follows(Connective("and", (tv, agree)))
    assert not follows(Connective("and", (tv, impossible)))
    assert follows(Connective("or", (tv, agree)))
    assert follows(Connective("or", (impossible, kl)))
    assert follows(Connective("implies", (agree, tv)))
    assert not follows(Connective("implies", (tv, agree)))
    assert follows(Not(build.compare(build.p(99, "tv"), ">", "0.01")))
    total = Arith("+", build.stat("mean", "kl"), Arith("*", Number(Fraction(3)), build.p(99, "tv")))
    assert follows(build.compare(total, "<=", "0.01"))
    assert not follows(build.compare(total, "<=", "0.0014"))
    ratio = Arith("/", build.stat("mean", "kl"), Number(Fraction(1, 2)))
    assert follows(build.compare(ratio, "<=", "0.001"))
    unknown = Arith("/", build.stat("mean", "kl"), build.p(99, "tv"))
    assert not follows(build.compare(unknown, "<=", "1000"))


def test_budget_makes_a_clause_no_harder(build: Build) -> None:
    soft = replace(generous(build), budget=Budget(Fraction(1, 100), "requests"))
    assert derived(build.program(soft)) == [("A", "all")]


# --- the record ----------------------------------------------------------------------------------


def test_chain_of_inequalities_is_recorded(build: Build) -> None:
    proof = replace(PROOF, bound=0.000155)
    program = build.program(
        build.clause("A", build.compare(build.p(99, "tv"), "<=", "0.01"), ["long"])
    )
    (implied,) = BACKEND.derive(program, (proof,))
    assert implied.steps == (
        "norm_inf(drift(model, x)) <= 1.55e-4 (N-LOGIT)",
        "every row of slice long is a row of slice all",
        "span(drift(model, x)) <= 2 norm_inf <= 3.1e-4",
        "s = span/T <= 3.1e-4 (T = 1)",
        "TV <= tanh(s/4) <= 7.75e-5",
        "p99(tv) <= max(tv) <= 7.75e-5 <= 0.01",
    )
    assert implied.bounds == (
        ImpliedBound(
            Comparison(build.p(99, "tv"), "<=", Fraction(1, 100)), bound("tv", 0.00031), "tv"
        ),
    )
    assert (implied.by, implied.proof_slice, implied.span) == ("N-LOGIT", "all", 0.00031)
    assert implied.bounds[0].decides
    assert any("teacher-forced" in text for text in implied.assumptions)
    assert any("rounding of an evaluator" in text for text in implied.assumptions)
    assert any("slice long has at least one row" in text for text in implied.assumptions)


def test_chain_of_a_compound_clause_ends_with_the_clause(build: Build) -> None:
    parts = (
        build.compare(build.p(99, "tv"), "<=", "0.01"),
        build.compare(build.stat("mean", "top1_overlap"), ">=", "0.9"),
        build.compare(build.stat("mean", "log_ratio"), ">=", "-0.5"),
    )
    program = build.program(build.clause("A", Connective("or", parts)))
    (implied,) = BACKEND.derive(program, (PROOF,))
    assert implied.steps[-1] == "hence text of A"
    assert implied.steps[-2] == "mean(log_ratio) >= min(log_ratio) >= -0.002001 >= -0.5"
    assert [found.comparison.op for found in implied.bounds] == ["<=", ">="]


@pytest.mark.parametrize(("name", "term", "limit"), LIMITS[:8], ids=[n for n, _, _ in LIMITS[:8]])
@pytest.mark.parametrize("norm", ["inf", "2", "span"])
def test_checker_recomputes_every_bound_from_the_record(
    build: Build, name: str, term: Term, limit: float, norm: str
) -> None:
    t = Fraction(3, 7)
    constants = Constants(t, Fraction(1, 3), Fraction(7, 10), Fraction(1, 10))
    program = build.program(
        at_most(build, build.stat("mean", term), Fraction(1, 2)), constants=constants
    )
    proof = replace(PROOF, norm=norm, bound=0.0123, temperature=t)
    (implied,) = BACKEND.derive(program, (proof,))
    stated = {
        "reward_range": Fraction(1, 3),
        "advantage_max": Fraction(7, 10),
        "score_norm_max": Fraction(1, 10),
    }
    assert Fraction(implied.span) >= span_of_norm(norm, (0.0123).hex()) * (1 - Fraction(1, 10**40))
    for found in implied.bounds:
        metric = found.metric
        assert metric is not None
        exact = implied_bound(metric, implied.span.hex(), implied.temperature, stated)
        assert exact is not None
        assert exact <= Fraction(found.bound) <= exact * (1 + Fraction(1, 10**10))


@given(
    st.floats(1e-9, 3.0),
    st.sampled_from(["tv", "kl", "jeffreys", "w_log_w"]),
    st.fractions(Fraction(1, 10**9), 4),
)
def test_derivation_agrees_with_the_bound_function(
    build: Build, proved: float, name: str, limit: Fraction
) -> None:
    clause = build.clause("A", Compare("<=", build.stat("mean", name), Number(limit)))
    expected = Fraction(bound(name, 2 * proved)) <= limit
    trivially = name == "tv" and limit >= 1
    found = derived(build.program(clause), replace(PROOF, bound=proved))
    assert bool(found) == (expected and not trivially)


def test_undecided_clause_is_not_implied(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Solver, "_ask", lambda *_: (Outcome.UNKNOWN, frozenset()))
    assert derived(build.program(generous(build))) == []


# --- numbers -------------------------------------------------------------------------------------


@given(st.floats(0, 1e300, exclude_min=True), st.booleans())
def test_printed_numbers_are_rounded_to_the_safe_side(value: float, up: bool) -> None:
    shown = Fraction(number(value, up=up))
    assert shown >= Fraction(value) if up else shown <= Fraction(value)
    assert shown == pytest.approx(Fraction(value), rel=2e-3)


def test_printed_bound_does_not_exceed_a_threshold_it_satisfies() -> None:
    threshold = Fraction("0.0100004")
    assert number(0.01000035, within=threshold) == "0.01000035"
    assert Fraction(number(0.01, within=Fraction(0.01))) == Fraction(0.01)
    assert number(0.0) == "0"
    assert number(math.inf) == "inf"
