"""Consistency of contracts: contradictions are named exactly, without false alarms."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.diagnostics import Diagnostic, Severity
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.terms import (
    Abs,
    AllOf,
    AnyOf,
    Arith,
    Budget,
    Clause,
    Compare,
    Connective,
    FieldTest,
    HasFields,
    Metric,
    NoFlip,
    NoneOf,
    Not,
    Number,
    Slice,
    Term,
)
from kcdsl.logic.smtlib import implication
from kcdsl_backends.smt import BACKEND
from kcdsl_backends.smt.solver import Outcome, Solver, emptiness, implies
from tests.support.contracts import ask_z3

Build = Any


def found(program: Any, **options: Any) -> list[tuple[str, str]]:
    return [(d.code.id, d.message) for d in consistent(program, **options)]


def consistent(program: Any, **options: Any) -> list[Diagnostic]:
    """Return the findings against a contract, except redundancy, which has its own tests."""
    wanted = {"KC410", "KC411", "KC412", "KC413", "KC414"}
    return [d for d in BACKEND.consistency(program, **options) if d.code.id in wanted]


def ids(diagnostics: list[Diagnostic]) -> list[str]:
    return [d.code.id for d in diagnostics]


# --- contradictions ------------------------------------------------------------------------------


def test_contradictory_pair_is_named_with_positions(build: Build) -> None:
    program = build.program(
        build.clause("A", build.compare(build.p(99, "kl"), "<=", "0.5")),
        build.clause("B", build.compare(build.p(50, "tv"), ">=", "0.3")),
        build.clause("C", build.compare(build.p(99, "tv"), "<=", "0.1")),
        build.clause("D", build.compare(build.stat("mean", "top1_overlap"), ">=", "0.9")),
    )
    source = SourceFile("contract.yaml", "x" * 200)
    (diagnostic,) = consistent(program, source=source)
    assert diagnostic.code.id == "KC410"
    assert diagnostic.message == "B and C cannot both hold on the slice all"
    assert diagnostic.severity is Severity.ERROR
    assert diagnostic.source is source
    assert diagnostic.span == program.clauses[2].span
    assert [(label.span, label.text) for label in diagnostic.labels] == [
        (program.clauses[1].span, "B requires text of B")
    ]


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (("quantile", 50), ("quantile", 99)),
        (("quantile", 90), ("max", None)),
        (("mean", None), ("max", None)),
        (("min", None), ("mean", None)),
        (("min", None), ("quantile", 50)),
    ],
)
def test_order_of_statistics_of_one_metric_is_used(build: Build, low: Any, high: Any) -> None:
    def statistic(kind: str, percent: int | None) -> Term:
        return build.p(percent, "logit_l2") if percent else build.stat(kind, "logit_l2")

    above = build.clause("A", build.compare(statistic(*low), ">=", "0.3"))
    below = build.clause("B", build.compare(statistic(*high), "<=", "0.1"))
    assert found(build.program(above, below)) == [
        ("KC410", "A and B cannot both hold on the slice all")
    ]
    fine = build.clause("A", build.compare(statistic(*low), "<=", "0.1"))
    also = build.clause("B", build.compare(statistic(*high), ">=", "0.3"))
    assert found(build.program(fine, also)) == []


def test_mean_and_median_have_no_assumed_order(build: Build) -> None:
    high_mean = build.clause("A", build.compare(build.stat("mean", "kl"), ">=", "0.3"))
    low_median = build.clause("B", build.compare(build.p(50, "kl"), "<=", "0.1"))
    assert found(build.program(high_mean, low_median)) == []


def test_different_slices_do_not_contradict(build: Build) -> None:
    low = build.clause("A", build.compare(build.p(99, "tv"), "<=", "0.1"), ["all"])
    high = build.clause("B", build.compare(build.p(50, "tv"), ">=", "0.3"), ["long", "other"])
    assert found(build.program(low, high)) == []


def test_maximum_of_a_slice_bounds_nested_slices(build: Build) -> None:
    low = build.clause("A", build.compare(build.stat("max", "tv"), "<=", "0.1"), ["all"])
    high = build.clause("B", build.compare(build.stat("max", "tv"), ">=", "0.3"), ["long"])
    assert found(build.program(low, high)) == [
        ("KC410", "A and B cannot both hold on the slices all, long")
    ]
    elsewhere = replace(high, slices=("other",))
    assert found(build.program(low, elsewhere)) == []
    turned = (replace(low, slices=("long",)), replace(high, slices=("all",)))
    assert found(build.program(*turned)) == []


def test_jointly_contradictory_triple_is_named(build: Build) -> None:
    total = Arith("+", build.stat("mean", "kl"), build.stat("mean", "logit_l2"))
    program = build.program(
        build.clause("A", build.compare(build.stat("mean", "kl"), "<=", "1")),
        build.clause("B", build.compare(build.stat("mean", "logit_l2"), "<=", "1")),
        build.clause("C", build.compare(total, ">=", "2.2")),
        build.clause("D", build.compare(build.stat("max", "kl"), "<=", "9")),
    )
    assert found(program) == [("KC410", "A, B and C cannot all hold together on the slice all")]


def test_all_pairs_with_a_common_clause_are_named(build: Build) -> None:
    program = build.program(
        build.clause("A", build.compare(build.stat("mean", "kl"), "<=", "0.1"), ["all", "long"]),
        build.clause("B", build.compare(build.stat("mean", "kl"), "<=", "0.2"), ["all"]),
        build.clause("C", build.compare(build.stat("mean", "kl"), ">=", "0.3"), ["all", "long"]),
    )
    assert sorted(found(program)) == [
        ("KC410", "A and C cannot both hold on the slices all, long"),
        ("KC410", "B and C cannot both hold on the slice all"),
    ]


def test_pointwise_metric_inequalities_are_used(build: Build) -> None:
    def pair(small: Term, low: str, large: Term, high: str) -> list[tuple[str, str]]:
        return found(
            build.program(
                build.clause("A", build.compare(small, ">=", low)),
                build.clause("B", build.compare(large, "<=", high)),
            )
        )

    p = build.p
    assert len(pair(p(99, "tv"), "0.26", p(99, "logit_span"), "1")) == 1
    assert pair(p(99, "tv"), "0.24", p(99, "logit_span"), "1") == []
    assert pair(p(99, "tv"), "0.26", p(95, "logit_span"), "1") == []
    assert len(pair(p(50, "logit_linf"), "2", p(50, "logit_l2"), "1")) == 1
    magnitude = build.stat("max", Abs(Metric("log_ratio")))
    assert len(pair(magnitude, "2", build.stat("max", "logit_span"), "1")) == 1
    assert len(pair(build.stat("max", "log_ratio"), "2", magnitude, "1")) == 1


def test_exact_fractions_decide_ties(build: Build) -> None:
    third = Arith("*", build.stat("mean", "kl"), Number(Fraction(3)))
    equal = build.clause("A", build.compare(third, "==", "1"))
    below = build.clause("B", Compare("<", build.stat("mean", "kl"), Number(Fraction(1, 3))))
    at = build.clause("B", Compare("<=", build.stat("mean", "kl"), Number(Fraction(1, 3))))
    assert len(found(build.program(equal, below))) == 1
    assert found(build.program(equal, at)) == []


def test_consistency_of_trace_fields_and_connectives(build: Build) -> None:
    some = build.clause("A", HasFields(("seed", "digest")), [])
    none = build.clause("B", Not(HasFields(("seed",))), [])
    assert found(build.program(some, none)) == [("KC410", "A and B cannot both hold")]
    kl = build.compare(build.stat("mean", "kl"), "<=", "0.1")
    tv = build.compare(build.stat("mean", "tv"), "<=", "0.1")
    if_then = build.clause("A", Connective("implies", (kl, tv)))
    refuted = build.clause("B", Connective("and", (kl, Not(tv))))
    either = build.clause("C", Connective("or", (Not(kl), tv)))
    assert found(build.program(if_then, refuted)) == [
        ("KC410", "A and B cannot both hold on the slice all")
    ]
    assert found(build.program(if_then, either)) == []


# --- budgets -------------------------------------------------------------------------------------


def with_budget(clause: Clause, rate: str, unit: str) -> Clause:
    return replace(clause, budget=Budget(Fraction(rate), unit))


def test_budgets_weaken_clauses_and_units_are_separate(build: Build) -> None:
    low = build.clause("A", build.compare(build.stat("max", "tv"), "<=", "0.1"))
    high = build.clause("B", build.compare(build.stat("max", "tv"), ">=", "0.3"))
    clash = [("KC410", "A and B cannot both hold on the slice all")]
    windows = "windows"
    assert found(build.program(low, high)) == clash
    assert found(build.program(with_budget(low, "0.01", windows), high)) == []
    assert (
        found(build.program(with_budget(low, "0.01", windows), with_budget(high, "0.2", windows)))
        == clash
    )
    assert (
        found(build.program(with_budget(low, "0.5", windows), with_budget(high, "0.5", windows)))
        == []
    )
    assert (
        found(build.program(with_budget(low, "0.1", windows), with_budget(high, "0.1", "requests")))
        == []
    )
    assert (
        found(build.program(with_budget(low, "1", windows), with_budget(high, "0", windows))) == []
    )


# --- single clauses ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "op", "value"),
    [("tv", "<=", "-0.1"), ("tv", ">", "1"), ("kl", "<", "0"), ("top1_overlap", ">=", "1.01"),
     ("embedding_cosine", "<", "-1"), ("w_log_w", "<=", "-0.4")],
)  # fmt: skip
def test_unsatisfiable_clause_is_reported(build: Build, metric: str, op: str, value: str) -> None:
    program = build.program(build.clause("A", build.compare(build.stat("mean", metric), op, value)))
    (diagnostic,) = consistent(program)
    assert (diagnostic.code.id, diagnostic.severity) == ("KC411", Severity.ERROR)
    assert diagnostic.message == "A can never hold on the slice all"


@pytest.mark.parametrize(
    ("metric", "op", "value"),
    [("tv", "<=", "1"), ("kl", ">=", "0"), ("top1_overlap", "<", "1.01"), ("w_log_w", ">=", "-1")],
)
def test_clause_that_always_holds_is_a_warning(
    build: Build, metric: str, op: str, value: str
) -> None:
    program = build.program(build.clause("A", build.compare(build.stat("mean", metric), op, value)))
    (diagnostic,) = consistent(program)
    assert (diagnostic.code.id, diagnostic.severity) == ("KC413", Severity.WARNING)


def test_tautology_is_redundant(build: Build) -> None:
    kl = build.compare(build.stat("mean", "kl"), "<=", "0.1")
    assert [
        c for c, _ in found(build.program(build.clause("A", Connective("or", (kl, Not(kl))))))
    ] == ["KC413"]
    assert [
        c for c, _ in found(build.program(build.clause("A", Connective("and", (kl, Not(kl))))))
    ] == ["KC411"]


def test_unregistered_metrics_have_no_range(build: Build) -> None:
    assert found(build.program(build.clause("A", build.compare(Metric("own"), "<=", "-5")))) == []
    low = build.clause("A", build.compare(Metric("own"), "<=", "-5"))
    high = build.clause("B", build.compare(Metric("own"), ">=", "-4"))
    assert len(found(build.program(low, high))) == 1


# --- quantified clauses --------------------------------------------------------------------------


def test_universal_clauses_apply_to_a_common_input(build: Build) -> None:
    below = build.every(build.compare(build.drift("attn_0"), "<=", "0.1"), build.region("all"))
    above = build.every(build.compare(build.drift("attn_0"), ">=", "0.2"), build.region("all"))
    a, b = build.clause("A", below, []), build.clause("B", above, [])
    assert found(build.program(a, b)) == [("KC410", "A and B cannot both hold")]
    other_block = build.every(build.compare(build.drift("mlp_0"), ">=", "0.2"), build.region("all"))
    assert found(build.program(a, build.clause("B", other_block, []))) == []
    other_slice = build.every(
        build.compare(build.drift("attn_0"), ">=", "0.2"), build.region("other")
    )
    assert found(build.program(a, build.clause("B", other_slice, []))) == []


def test_nested_region_inherits_universal_claims(build: Build) -> None:
    limit = build.compare(build.drift("attn_0"), "<=", "0.1")
    excess = build.compare(build.drift("attn_0"), ">", "0.1")
    ball, points = build.region("all", "ball", "0.001"), build.region("long")
    a = build.clause("A", build.every(limit, ball), [])
    b = build.clause("B", build.every(excess, points), [])
    assert len(found(build.program(a, b))) == 1
    assert len(found(build.program(b, a))) == 1
    inner = build.clause("A", build.every(limit, build.region("long")), [])
    outer = build.clause("B", build.every(excess, build.region("all"), "exists"), [])
    assert found(build.program(inner, outer)) == []


def test_existential_witness_satisfies_universal_clauses(build: Build) -> None:
    limit = build.compare(build.drift("attn_0"), "<=", "0.1")
    excess = build.compare(build.drift("attn_0"), ">", "0.1")
    every = build.clause("A", build.every(limit, build.region()), [])
    some = build.clause("B", build.every(excess, build.region(), "exists"), [])
    assert len(found(build.program(every, some))) == 1
    denied = build.clause("B", Not(build.every(limit, build.region())), [])
    assert found(build.program(some, denied)) == []
    two = build.every(build.compare(build.drift("attn_0"), "<=", "0.05"), build.region(), "exists")
    assert found(build.program(some, build.clause("C", two, []))) == []


def test_drift_quantifies_over_every_admitted_run(build: Build) -> None:
    # Some runs may drift by 0.05 and others by 0.2, so neither holds: no contradiction.
    limit = build.compare(build.drift("attn_0"), "<=", "0.1")
    a = build.clause("A", build.every(Not(limit), build.region()), [])
    low = build.compare(build.drift("attn_0"), ">=", "0.15")
    b = build.clause("B", build.every(Not(low), build.region()), [])
    assert found(build.program(a, b)) == []
    assert (
        len(found(build.program(a, build.clause("C", build.every(limit, build.region()), [])))) == 1
    )


def test_inequalities_of_norms_are_used(build: Build) -> None:
    def pair(small: str, low: str, large: str, high: str) -> int:
        a = build.every(build.compare(build.drift("head", small), ">=", low), build.region())
        b = build.every(build.compare(build.drift("head", large), "<=", high), build.region())
        return len(found(build.program(build.clause("A", a, []), build.clause("B", b, []))))

    assert pair("inf", "2", "2", "1") == 1
    assert pair("span", "2.1", "inf", "1") == 1
    assert pair("span", "1.9", "inf", "1") == 0
    assert pair("span", "1.42", "2", "1") == 1
    assert pair("span", "1.41", "2", "1") == 0


def test_negative_norms_and_flips(build: Build) -> None:
    never = build.every(build.compare(build.drift("head"), "<", "0"), build.region())
    assert [c for c, _ in found(build.program(build.clause("A", never, [])))] == ["KC411"]
    always = build.every(build.compare(build.drift("head"), ">=", "0"), build.region())
    assert [c for c, _ in found(build.program(build.clause("A", always, [])))] == ["KC413"]
    stable = build.clause("A", build.every(NoFlip("model", "x"), build.region("all")), [])
    flips = build.clause("B", build.every(Not(NoFlip("model", "x")), build.region("long")), [])
    assert len(found(build.program(stable, flips))) == 1
    other_k = build.clause("B", build.every(Not(NoFlip("model", "x", 5)), build.region("long")), [])
    assert found(build.program(stable, other_k)) == []


# --- slices --------------------------------------------------------------------------------------


def test_unsatisfiable_slice_is_reported(build: Build) -> None:
    apart = AllOf((FieldTest("length", ">", Fraction(9)), FieldTest("length", "<", Fraction(9))))
    program = build.program(slices=(Slice("all"), Slice("none", where=apart)))
    (diagnostic,) = consistent(program)
    assert (diagnostic.code.id, diagnostic.severity) == ("KC412", Severity.ERROR)
    assert "'none'" in diagnostic.message


def test_satisfiability_of_predicates() -> None:
    def test(field: str, op: str, value: str | int | bool) -> FieldTest:
        exact = value if isinstance(value, (str, bool)) else Fraction(value)
        return FieldTest(field, op, exact)

    def is_empty(*parts: Any) -> bool:
        return emptiness(AllOf(parts), 2000) is Outcome.UNSAT

    assert is_empty(test("c", "==", "a"), test("c", "==", "b"))
    assert is_empty(test("c", "==", "a"), NoneOf(test("c", "==", "a")))
    assert is_empty(test("n", ">", 3), test("n", "==", "three"))
    assert is_empty(test("flag", "==", True), test("flag", "==", False))
    assert is_empty(test("c", "<", "a"), test("c", ">", "b"))
    assert is_empty(AnyOf(()))
    assert not is_empty()
    assert not is_empty(test("n", ">", 3), test("n", "<", 4))
    assert not is_empty(test("c", "!=", "a"), test("c", "!=", "b"))
    assert not is_empty(test("c", "==", "a"), test("n", "==", "b"))
    assert not is_empty(test("flag", "==", True), test("flag", "==", 1))
    assert implies(test("n", ">", 128), test("n", ">", 64), 2000)
    assert not implies(test("n", ">", 64), test("n", ">", 128), 2000)
    assert implies(AllOf((test("n", ">", 64), test("c", "==", "a"))), test("c", "==", "a"), 2000)
    assert implies(test("c", "==", "a"), AnyOf((test("c", "==", "a"), test("c", "==", "b"))), 2000)
    assert implies(test("n", ">", 64), AllOf(), 2000)
    assert not implies(AllOf(), test("n", ">", 64), 2000)
    # A field that is absent or of another type is neither above nor below.
    assert not implies(NoneOf(test("n", ">", 64)), test("n", "<=", 64), 2000)
    assert not implies(test("c", "!=", "a"), NoneOf(test("c", "==", 1)), 2000)
    assert not implies(NoneOf(test("c", "==", "a")), test("c", "!=", "a"), 2000)


# --- what the solver leaves open -----------------------------------------------------------------


def hard(build: Build) -> Clause:
    """Return a clause of high degree that takes z3 far longer than a few milliseconds."""
    u = [build.stat("mean", f"u{i}") for i in range(7)]

    def power(term: Term, n: int) -> Term:
        result = term
        for _ in range(n - 1):
            result = Arith("*", result, term)
        return result

    total: Term = Number(Fraction(0))
    for i, term in enumerate(u):
        product = Arith("*", power(term, 5), power(u[(i + 1) % 7], 3))
        total = Arith("+", total, Arith("-", product, Arith("*", term, u[(i + 3) % 7])))
    second = Arith("+", power(u[0], 7), Arith("*", u[1], power(u[2], 5)))
    parts = (
        build.compare(total, "==", "17"),
        Compare("==", second, Arith("*", u[3], power(u[4], 4))),
        Compare("==", Arith("*", power(u[5], 3), u[0]), Arith("+", power(u[6], 4), u[1])),
    )
    return build.clause("H", Connective("and", parts))


def test_timeout_is_reported_and_the_rest_is_checked(build: Build) -> None:
    low = build.clause("A", build.compare(build.stat("mean", "kl"), "<=", "0.1"))
    high = build.clause("B", build.compare(build.stat("mean", "kl"), ">=", "0.3"))
    diagnostics = consistent(build.program(low, hard(build), high), timeout_ms=20)
    assert sorted(ids(diagnostics)) == ["KC410", "KC414"]
    open_question = next(d for d in diagnostics if d.code.id == "KC414")
    assert open_question.severity is Severity.WARNING
    assert "H" in open_question.message


def test_unknown_is_never_reported_as_consistent(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Solver, "_check", lambda *_: (Outcome.UNKNOWN, ()))
    kinds = AnyOf((FieldTest("tag", "==", "a"), FieldTest("tag", "==", Fraction(1))))
    program = build.program(
        build.clause("A", build.compare(build.stat("mean", "kl"), "<=", "0.1"), ("mixed",)),
        slices=(Slice("mixed", where=kinds),),
    )
    diagnostics = consistent(program)
    assert ids(diagnostics) == ["KC414", "KC414"]
    assert "slice 'mixed'" in diagnostics[0].message
    assert "A" in diagnostics[1].message
    plain = replace(program, slices=(Slice("mixed"),))  # has requests, whatever a solver says
    assert ids(consistent(plain)) == ["KC414"]


def test_unknown_about_the_whole_contract_is_reported(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Solver.decide_all

    def decide_all(self: Solver, names: Any) -> tuple[Outcome, frozenset[str]]:
        asked = list(names)
        return (Outcome.UNKNOWN, frozenset()) if len(asked) > 1 else original(self, asked)

    monkeypatch.setattr(Solver, "decide_all", decide_all)
    program = build.program(
        build.clause("A", build.compare(build.stat("mean", "kl"), "<=", "0.1")),
        build.clause("B", build.compare(build.stat("mean", "tv"), "<=", "0.1")),
    )
    (diagnostic,) = consistent(program)
    assert diagnostic.code.id == "KC414"
    assert "A and B" in diagnostic.message


def test_timeout_must_be_positive(build: Build) -> None:
    with pytest.raises(ValueError, match="positive"):
        BACKEND.consistency(build.program(), timeout_ms=0)


def test_empty_contract_has_no_findings(build: Build) -> None:
    assert found(build.program()) == []


def test_backend_module_imports_no_solver() -> None:
    code = (
        "import sys; from kcdsl_backends.smt import BACKEND; "
        "sys.exit('z3 was imported' if 'z3' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_catalogue_loads_this_backend() -> None:
    from kcdsl_backends import CATALOGUE

    spec = next(spec for spec in CATALOGUE if spec.name == "smt")
    assert spec.load() is BACKEND


def test_findings_name_the_axioms_used(build: Build) -> None:
    low = build.clause("A", build.compare(build.stat("min", "kl"), ">=", "0.3"))
    high = build.clause("B", build.compare(build.p(95, "kl"), "<=", "0.2"))
    (found,) = consistent(build.program(low, high))
    assert found.code.id == "KC410"
    assert found.notes == ("because min(kl) <= p95(kl): no percentile is below the minimum",)
    both = build.clause("C", Connective("and", (low.require, high.require)))
    (found,) = consistent(build.program(both))
    assert (found.code.id, len(found.notes)) == ("KC411", 1)
    order = Compare("<=", build.p(50, "kl"), build.stat("max", "kl"))
    (found,) = consistent(build.program(build.clause("D", order)))
    assert found.code.id == "KC413"
    assert found.notes == ("because p50(kl) <= max(kl): no percentile is above the maximum",)


@pytest.mark.parametrize(("op", "limit"), [("-", "0"), ("/", "1")])
def test_subtracted_percentile_uses_the_opposite_tokens(build: Build, op: str, limit: str) -> None:
    """The largest token of each request minus its smallest is not always zero."""
    median = build.p(50, "kl")
    clause = build.clause("A", build.compare(Arith(op, median, median), "<=", limit))
    assert consistent(build.program(clause)) == []
    mean = build.stat("mean", "kl")  # has no sides
    plain = build.clause("A", build.compare(Arith("-", mean, mean), "<=", "0"))
    assert ids(consistent(build.program(plain))) == ["KC413"]


@pytest.mark.parametrize("op", ["*", "/"])
def test_negative_factor_reverses_the_harmful_tokens(build: Build, op: str) -> None:
    """p99(kl) * -1 >= -t means p99(kl) <= t, in z3's translation and in the exported script."""
    tail, minus = build.p(99, "kl"), Number(Fraction(-1))
    turned = build.clause("A", build.compare(Arith(op, tail, minus), ">=", "-0.01"))
    plain = build.clause("B", build.compare(tail, "<=", "0.01"))
    for one, other in ((turned, plain), (plain, turned)):
        program = build.program(one, other)
        assert ask_z3(implication(program, other.id)) == "unsat"
        found = {d.code.id for d in BACKEND.consistency(program)}
        assert found == {d.code.id for d in BACKEND.consistency(build.program(plain, again(plain)))}
        assert found


def again(clause: Clause) -> Clause:
    """Return the same clause under another name."""
    return replace(clause, id="C")
