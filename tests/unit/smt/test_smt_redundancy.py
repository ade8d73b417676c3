"""Redundant clauses: implied ones, their premises and axioms; non-redundant ones."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.diagnostics import Diagnostic, Severity
from kcdsl.ir.terms import (
    Abs,
    Arith,
    Budget,
    Clause,
    Connective,
    EvidenceKind,
    HasFields,
    Level,
    Metric,
    NoFlip,
    Not,
    Number,
    Slice,
    UserMetric,
)
from kcdsl_backends.smt import BACKEND

Build = Any


def redundant(program: Any) -> dict[str, Diagnostic]:
    return {d.message: d for d in BACKEND.consistency(program) if d.code.id in ("KC415", "KC410")}


def upper(build: Build, id: str, statistic: Any, limit: str, slices: Any = ("all",)) -> Clause:
    clause: Clause = build.clause(id, build.compare(statistic, "<=", limit), slices)
    return clause


def test_tighter_threshold_implies_a_looser_one(build: Build) -> None:
    a, b = (
        upper(build, "A", build.p(99, "kl"), "0.02"),
        upper(build, "B", build.p(99, "kl"), "0.05"),
    )
    (found,) = redundant(build.program(a, b)).values()
    assert found.message == "B follows from A"
    assert found.severity is Severity.WARNING
    assert found.span == b.span
    assert [(label.span, label.text) for label in found.labels] == [
        (a.span, "A requires text of A")
    ]
    assert found.notes == ("because the same quantity has a tighter threshold",)
    assert list(redundant(build.program(b, a))) == ["B follows from A"]


def test_later_of_two_equal_clauses_is_redundant(build: Build) -> None:
    a, b = (upper(build, name, build.p(99, "kl"), "0.02") for name in "AB")
    (found,) = redundant(build.program(a, b)).values()
    assert found.message == "B follows from A"
    assert found.notes == ("because the requirement is the same",)


@pytest.mark.parametrize(
    ("premise", "conclusion", "note"),
    [
        (("p", 99, "kl", "1"), ("p", 95, "kl", "1"), "percentiles of the same values"),
        (("stat", "max", "kl", "1"), ("p", 99, "kl", "1"), "no percentile is above the maximum"),
        (("stat", "max", "kl", "1"), ("stat", "mean", "kl", "1"), "a mean is no more"),
        (("p", 99, "kl", "0.02"), ("p", 99, "tv", "0.1"), "Pinsker"),
        (("p", 99, "kl", "0.02"), ("p", 50, "tv", "0.1"), "Pinsker"),
        (("stat", "mean", "kl", "0.02"), ("stat", "mean", "tv", "0.1"), "Pinsker"),
        (("p", 99, "logit_l2", "1"), ("p", 99, "logit_linf", "1"), "Euclidean"),
        (("p", 99, "logit_linf", "1"), ("p", 99, "tv", "0.463"), "TV <= tanh(s/4)"),
        (("stat", "max", "logit_span", "1"), ("stat", "mean", "kl", "0.125"), "s^2/8"),
        (("p", 99, "tv", "0.1"), ("p", 99, "hellinger2", "0.1"), "H^2 <= TV"),
    ],
)
def test_axioms_imply_and_are_named(build: Build, premise: Any, conclusion: Any, note: str) -> None:
    def term(kind: str, first: Any, second: str, _: str) -> Any:
        return build.p(first, second) if kind == "p" else build.stat(first, second)

    a = upper(build, "A", term(*premise), premise[3])
    b = upper(build, "B", term(*conclusion), conclusion[3])
    (found,) = redundant(build.program(a, b)).values()
    assert found.message == "B follows from A"
    assert any(note in shown for shown in found.notes), found.notes


@pytest.mark.parametrize(
    ("premise", "conclusion"),
    [
        (("p", 95, "kl", "1"), ("p", 99, "kl", "1")),
        (("p", 99, "kl", "1"), ("stat", "mean", "kl", "1")),
        (("stat", "mean", "kl", "1"), ("p", 50, "kl", "1")),
        (("p", 99, "kl", "0.02"), ("p", 99, "tv", "0.0999")),
        (("p", 99, "tv", "0.1"), ("p", 99, "kl", "0.02")),
        (("p", 95, "kl", "0.02"), ("p", 99, "tv", "0.1")),
        (("stat", "mean", "logit_span", "1"), ("stat", "mean", "kl", "0.125")),  # not concave
        (("p", 99, "logit_linf", "1"), ("p", 99, "tv", "0.462")),
        (("p", 99, "top10_overlap", "1"), ("p", 99, "top1_overlap", "0.99")),
        (("p", 99, "logit_linf", "1"), ("p", 99, "hidden_linf", "1")),
    ],
)
def test_unimplied_clauses_are_not_reported(build: Build, premise: Any, conclusion: Any) -> None:
    def term(kind: str, first: Any, second: str, _: str) -> Any:
        return build.p(first, second) if kind == "p" else build.stat(first, second)

    a = upper(build, "A", term(*premise), premise[3])
    b = upper(build, "B", term(*conclusion), conclusion[3])
    assert "B follows from A" not in redundant(build.program(a, b))


def test_temperature_is_part_of_the_bound_functions(build: Build) -> None:
    a = upper(build, "A", build.p(99, "logit_span"), "1")
    b = upper(build, "B", build.p(99, "tv"), "0.13")
    hot = replace(build.program().constants, temperature=Fraction(2))
    assert redundant(build.program(a, b)) == {}
    assert len(redundant(build.program(a, b, constants=hot))) == 1


def test_premises_are_minimal_and_not_redundant(build: Build) -> None:
    total = Arith("+", build.stat("mean", "kl"), build.stat("mean", "hidden_l2"))
    program = build.program(
        upper(build, "A", build.stat("mean", "kl"), "1"),
        upper(build, "B", build.stat("mean", "hidden_l2"), "1"),
        upper(build, "C", total, "2"),
        upper(build, "D", total, "3"),
        upper(build, "E", build.stat("mean", "jeffreys"), "9"),
    )
    assert list(redundant(program)) == ["C follows from A and B", "D follows from A and B"]


def test_implication_on_nested_slices(build: Build) -> None:
    every = upper(build, "A", build.stat("max", "tv"), "0.3")
    part = upper(build, "B", build.stat("max", "tv"), "0.3", ("long",))
    (found,) = redundant(build.program(every, part)).values()
    assert "every request of long is one of all" in found.notes[0]
    first, second = replace(part, id="A"), replace(every, id="B")
    assert list(redundant(build.program(first, second))) == ["A follows from B"]
    mean = upper(build, "B", build.stat("mean", "tv"), "0.3", ("long",))
    quantile = upper(build, "A", build.p(99, "tv"), "0.3")
    assert redundant(build.program(quantile, mean)) == {}
    other = upper(build, "B", build.stat("max", "tv"), "0.3", ("other",))
    assert redundant(build.program(every, other)) == {}


def test_redundancy_on_one_of_several_slices_is_a_note(build: Build) -> None:
    both = upper(build, "A", build.stat("max", "tv"), "0.3", ("all", "long"))
    (found,) = redundant(build.program(both)).values()
    assert found.severity is Severity.NOTE
    assert found.message == (
        "A follows on the slice long from what it requires of its other slices"
    )


# --- consequences --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("premise", "conclusion", "follows"),
    [
        ({"level": Level.L2}, {"level": Level.L1}, True),
        ({"level": Level.L1}, {"level": Level.L2}, False),
        ({"evidence": EvidenceKind.PROOF}, {"evidence": EvidenceKind.SAMPLE}, True),
        ({"evidence": EvidenceKind.SAMPLE}, {"evidence": EvidenceKind.PROOF}, False),
        ({}, {"evidence": EvidenceKind.SAMPLE}, False),
        ({"action": "rollback"}, {"action": "log"}, True),
        ({"action": "guard"}, {"action": "rollback"}, False),
        ({"action": "guard"}, {"action": "higher_precision"}, False),
        ({"holdout": True}, {}, False),
        ({}, {"holdout": True}, True),
    ],
)
def test_clause_with_more_consequences_is_kept(
    build: Build, premise: Any, conclusion: Any, follows: bool
) -> None:
    a = replace(upper(build, "A", build.p(99, "kl"), "0.02"), **premise)
    b = replace(upper(build, "B", build.p(99, "kl"), "0.05"), **conclusion)
    assert (list(redundant(build.program(a, b))) == ["B follows from A"]) is follows


# --- budgets -------------------------------------------------------------------------------------


def with_budget(clause: Clause, rate: str, unit: str = "requests") -> Clause:
    return replace(clause, budget=Budget(Fraction(rate), unit))


def test_budgets_of_premises_are_summed(build: Build) -> None:
    total = Arith("+", build.stat("mean", "kl"), build.stat("mean", "hidden_l2"))
    a = upper(build, "A", build.stat("mean", "kl"), "1")
    b = upper(build, "B", build.stat("mean", "hidden_l2"), "1")
    c = upper(build, "C", total, "2")
    made = [with_budget(a, "0.01"), with_budget(b, "0.02")]
    assert redundant(build.program(*made, with_budget(c, "0.02"))) == {}
    assert list(redundant(build.program(*made, with_budget(c, "0.03")))) == [
        "C follows from A and B"
    ]
    assert redundant(build.program(*made, with_budget(c, "0.03", "windows"))) == {}


def test_budgets_on_different_slices_are_not_combined(build: Build) -> None:
    every = with_budget(upper(build, "A", build.stat("max", "tv"), "0.1"), "0.01")
    part = with_budget(upper(build, "B", build.stat("max", "tv"), "0.1", ("long",)), "0.01")
    assert redundant(build.program(every, part)) == {}
    low = build.clause("B", build.compare(build.stat("max", "tv"), ">=", "0.3"), ["long"])
    assert redundant(build.program(every, with_budget(low, "0.01"))) == {}


def test_hard_bound_of_a_maximum_applies_to_each_request(build: Build) -> None:
    hard = upper(build, "A", build.stat("max", "tv"), "0.1")
    each = with_budget(upper(build, "B", build.stat("mean", "tv"), "0.1"), "0.01")
    (found,) = redundant(build.program(hard, each)).values()
    assert found.message == "B follows from A"
    assert "each of its requests" in " ".join(found.notes)
    mean = upper(build, "A", build.stat("mean", "tv"), "0.1")
    assert redundant(build.program(mean, each)) == {}


# --- other statements ----------------------------------------------------------------------------


def test_redundancy_of_regions_and_norms(build: Build) -> None:
    ball = build.region("all", "ball", "0.001")
    a = build.clause("A", build.every(build.compare(build.drift("b", "2"), "<=", "1"), ball), [])
    b = build.clause(
        "B", build.every(build.compare(build.drift("b"), "<=", "1"), build.region("long")), []
    )
    (found,) = redundant(build.program(a, b)).values()
    assert found.message == "B follows from A"
    assert "points(long) lies inside ball(all, 0.001)" in " ".join(found.notes)
    assert redundant(build.program(replace(a, id="B"), replace(b, id="A"))).keys() == {
        "A follows from B"
    }
    wide = build.clause(
        "B", build.every(build.compare(build.drift("b"), "<=", "1"), build.region("other")), []
    )
    assert redundant(build.program(a, wide)) == {}
    larger = build.region("all", "ball", "0.002")
    beyond = build.every(build.compare(build.drift("b", "2"), "<=", "1"), larger)
    wider = build.program(a, build.clause("B", beyond, []))
    assert list(redundant(wider)) == ["A follows from B"]


def test_redundancy_of_flips_and_fields(build: Build) -> None:
    a = build.clause("A", build.every(NoFlip("model", "x"), build.region("all")), [])
    b = build.clause("B", build.every(NoFlip("model", "x"), build.region("long")), [])
    assert list(redundant(build.program(a, b))) == ["B follows from A"]
    five = build.clause("B", build.every(NoFlip("model", "x", 5), build.region("all")), [])
    assert redundant(build.program(a, five)) == {}
    many = build.clause("A", HasFields(("seed", "digest")))
    one = build.clause("B", HasFields(("seed",)))
    assert list(redundant(build.program(many, one))) == ["B follows from A"]
    assert list(redundant(build.program(replace(one, id="A"), replace(many, id="B")))) == [
        "A follows from B"
    ]


def test_quantifiers_do_not_share_an_input(build: Build) -> None:
    """`A or B` at every input implies neither A at every input nor B at every input."""
    small = build.compare(build.drift("b"), "<=", "1")
    calm = build.compare(build.drift("c"), "<=", "1")
    either = build.every(Connective("or", (small, calm)), build.region())
    split = Connective("or", tuple(build.every(p, build.region()) for p in (small, calm)))
    a, b = build.clause("A", either, []), build.clause("B", split, [])
    assert list(redundant(build.program(a, b))) == ["A follows from B"]


def test_percentile_and_its_negation_use_different_tokens(build: Build) -> None:
    """`not (p99(kl) <= 0.1)` uses the smallest token of a request, so this is no tautology."""
    limit = build.compare(build.p(99, "kl"), "<=", "0.1")
    either = build.clause("A", Connective("or", (limit, Not(limit))))
    assert [d.code.id for d in BACKEND.consistency(build.program(either))].count("KC413") == 0
    mean = build.compare(build.stat("mean", "kl"), "<=", "0.1")
    surely = build.clause("A", Connective("or", (mean, Not(mean))))
    assert [d.code.id for d in BACKEND.consistency(build.program(surely))].count("KC413") == 1


def test_undefined_quotient_is_not_true(build: Build) -> None:
    share = Arith("/", build.stat("mean", "kl"), build.stat("mean", "hidden_l2"))
    either = Connective("or", (build.compare(share, "<=", "1"), build.compare(share, ">", "1")))
    always = build.clause("A", either)
    codes = [d.code.id for d in BACKEND.consistency(build.program(always))]
    assert "KC413" not in codes
    zero = upper(build, "B", build.stat("mean", "hidden_l2"), "0")
    assert list(redundant(build.program(always, zero))) == [
        "A and B cannot both hold on the slice all"
    ]


def test_mean_of_magnitudes_bounds_the_magnitude_of_the_mean(build: Build) -> None:
    a = upper(build, "A", build.stat("mean", Abs(Metric("log_ratio"))), "0.01")
    b = upper(build, "B", Abs(build.stat("mean", "log_ratio")), "0.01")
    assert list(redundant(build.program(a, b))) == ["B follows from A"]


def test_user_metrics_have_only_their_range(build: Build) -> None:
    own = UserMetric(
        "toxicity", "m:f", a_family(build), "request", "lower", "1", "1", ("mean", "quantile"), (),
        lower=Fraction(0), upper=Fraction(1),
    )  # fmt: skip
    a = upper(build, "A", build.p(99, "toxicity"), "0.5")
    b = upper(build, "B", build.p(95, "toxicity"), "0.5")
    c = upper(build, "C", build.p(50, "toxicity"), "1")
    program = replace(build.program(a, b, c, slices=(Slice("all"),)), metrics=(own,))
    found = [(d.code.id, d.message) for d in BACKEND.consistency(program)]
    assert found == [
        ("KC413", "C holds on the slice all whatever the kernels do"),
        ("KC415", "B follows from A"),
    ]
    kl = upper(build, "B", build.p(95, "kl"), "0.5")
    assert redundant(build.program(a, kl)) == {}


def a_family(build: Build) -> Any:
    return build.clause("A", build.compare(Number(Fraction(0)), "<=", "1")).family


def test_contradiction_implies_nothing(build: Build) -> None:
    a = upper(build, "A", build.stat("mean", "kl"), "0.1")
    b = build.clause("B", build.compare(build.stat("mean", "kl"), ">=", "0.3"))
    c = upper(build, "C", build.stat("mean", "hidden_l2"), "0.1")
    assert list(redundant(build.program(a, b, c))) == ["A and B cannot both hold on the slice all"]


def test_affordable_premises_are_found_among_several(build: Build) -> None:
    low, high = build.stat("min", "kl"), build.stat("max", "kl")
    clauses = [
        with_budget(build.clause("A", build.compare(low, ">=", "1")), "0.03"),
        with_budget(build.clause("B", build.compare(high, "<=", "2")), "0.03"),
        with_budget(build.clause("C", build.compare(low, ">=", "1.1")), "0.01"),
        with_budget(build.clause("D", build.compare(high, "<=", "2.1")), "0.02"),
    ]
    width = build.clause("E", build.compare(Arith("-", high, low), "<=", "1"))
    for order in (clauses, clauses[::-1], [clauses[0], clauses[3], clauses[1], clauses[2]]):
        found = list(redundant(build.program(*order, with_budget(width, "0.03"))))
        assert [m for m in found if m.startswith("E")] in (
            ["E follows from C and D"], ["E follows from D and C"],
        )  # fmt: skip
        assert not [
            m
            for m in redundant(build.program(*order, with_budget(width, "0.02")))
            if m.startswith("E")
        ]
