"""The reference evaluator: the meaning of each construct, and undefined results."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kcdsl.ir import terms as ir
from tests.support.semantics.evaluation import Truth, answers, evaluate, truth_of, windows
from tests.support.semantics.interpretations import Measured, Pair, Unit, World
from tests.support.semantics.norms import Root, difference, keeps_first, less, norm, root


def _support(name: str) -> Any:
    path = Path(__file__).parents[2] / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"evaluate_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


made = _support("contracts")

F = Fraction
ALL = (ir.Slice("all"),)
KL = ir.Metric("kl")


def unit(key: str, *values: Measured, **fields: Any) -> Unit:
    """Return a request with values of kl, one per token."""
    return Unit(key, fields, {"kl": values} if values else {}, {"rng_seed": "7"})


def world(*units: Unit, **more: Any) -> World:
    return World({"data.jsonl": units}, **more)


def stat(kind: str, of: ir.Term = KL, q: str | None = None) -> ir.Statistic:
    return ir.Statistic(kind, of, None if q is None else F(q))


def at_most(term: ir.Term, limit: str, op: str = "<=") -> ir.Compare:
    return ir.Compare(op, term, ir.Number(F(limit)))


def truth(formula: ir.Formula, *units: Unit, **more: Any) -> Truth:
    return truth_of(formula, units, world(*units, **more)).truth


# --- statistics ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("term", "value"),
    [
        (stat("mean"), "13/4"),  # of every token
        (stat("max"), "8"),
        (stat("min"), "1"),
        (stat("quantile", q="1/2"), "4"),  # of the worst token of each request: 4, 8
        (stat("quantile", q="51/100"), "8"),
        (stat("mean", ir.Arith("*", ir.Number(F(2)), KL)), "13/2"),
        (stat("mean", ir.Abs(ir.Arith("-", KL, ir.Number(F(3))))), "7/4"),
        (ir.Arith("/", stat("max"), stat("min")), "8"),
        (ir.Abs(ir.Arith("-", stat("min"), stat("max"))), "7"),
    ],
)
def test_statistics_of_units(term: ir.Term, value: str) -> None:
    units = (unit("a", F(1), F(4), F(1), F(2), F(2), F(4), F(4)), unit("b", F(8)))
    assert truth(at_most(term, value, "=="), *units) is Truth.TRUE
    assert truth(at_most(term, value, "<"), *units) is Truth.FALSE


def test_worst_token_depends_on_the_harmful_direction() -> None:
    """A lower bound uses the smallest token of each request; negation reverses it."""
    units = (unit("a", F(1), F(9)), unit("b", F(2), F(3)))
    median = stat("quantile", q="1/2")
    assert truth(at_most(median, "3", "=="), *units) is Truth.TRUE
    assert truth(at_most(median, "1", ">="), *units) is Truth.TRUE
    assert truth(at_most(median, "2", ">="), *units) is Truth.FALSE
    assert truth(ir.Not(at_most(median, "1", ">")), *units) is Truth.FALSE


def test_all_readings_are_tried_if_a_sign_decides_the_worst_token() -> None:
    """Medians are 3 by the largest and 1 by the smallest tokens, of the second metric 2 and -4."""
    units = [
        Unit(key, {}, {"kl": (F(a), F(b)), "ln_w": (F(c), F(d))}, {})
        for key, a, b, c, d in (("a", 1, 9, -4, 2), ("b", 2, 3, -1, 5))
    ]
    kl, other = stat("quantile", q="1/2"), stat("quantile", ir.Metric("ln_w"), q="1/2")
    minus, half = ir.Number(F(-1)), ir.Number(F(1, 2))
    for term in (ir.Arith("*", minus, kl), ir.Arith("*", kl, minus), ir.Arith("/", kl, minus)):
        assert truth(at_most(term, "-3", ">="), *units) is Truth.TRUE
        assert truth(at_most(term, "-2", ">="), *units) is Truth.FALSE
        assert truth(at_most(term, "-1"), *units) is Truth.TRUE
        assert truth(at_most(term, "-2"), *units) is Truth.FALSE
    assert truth(at_most(ir.Arith("*", half, kl), "3/2"), *units) is Truth.TRUE
    assert truth(at_most(ir.Abs(other), "4"), *units) is Truth.TRUE
    assert truth(at_most(ir.Abs(other), "3"), *units) is Truth.FALSE
    assert truth(at_most(ir.Abs(other), "1/100", ">="), *units) is Truth.FALSE  # 0 lies between
    product = ir.Arith("*", kl, other)  # 3·2 and 3·-4 are the ends
    assert truth(at_most(product, "6"), *units) is Truth.TRUE
    assert truth(at_most(product, "5"), *units) is Truth.FALSE
    assert truth(at_most(product, "-12", ">="), *units) is Truth.TRUE
    assert truth(at_most(product, "-11", ">="), *units) is Truth.FALSE


@pytest.mark.parametrize(
    ("percent", "n", "above"), [(99, 100, 1), (99, 99, 0), (50, 7, 3), (90, 19, 1)]
)
def test_percentile_counts_values_above_the_threshold(percent: int, n: int, above: int) -> None:
    term = stat("quantile", q=f"{percent}/100")
    for more, expected in ((0, Truth.TRUE), (1, Truth.FALSE)):
        values = [F(2)] * (above + more) + [F(1)] * (n - above - more)
        units = [unit(f"r{i}", v) for i, v in enumerate(values)]
        assert truth(at_most(term, "1"), *units) is expected


def test_rate_requires_zeros_and_ones() -> None:
    rate = stat("rate")
    assert truth(at_most(rate, "1/2", "=="), unit("a", F(1)), unit("b", F(0))) is Truth.TRUE
    assert truth(at_most(rate, "1"), unit("a", F(1, 2))) is Truth.UNDEFINED


def test_aggregates_and_timed_runs() -> None:
    runs = tuple(Unit("a", {}, {"latency": (F(n),)}) for n in (1, 2, 3))
    latency = stat("mean", ir.Metric("latency"))
    given = world(unit("a", F(1)), timed=runs, aggregate=lambda name, units: F(len(units)))
    base = made.program(
        ir.Clause("L", ir.Family.RUNTIME, at_most(latency, "2", "=="), ir.Level.L1, ("all",)),
        ir.Clause(
            "T",
            ir.Family.RUNTIME,
            at_most(stat("aggregate", ir.Metric("throughput")), "3", "=="),
            ir.Level.L1,
            ("all",),
        ),
        slices=ALL,
    )
    assert evaluate(base, given) is Truth.TRUE


# --- never true ----------------------------------------------------------------------------------


ALWAYS = at_most(stat("mean"), "1000")


@pytest.mark.parametrize(
    ("formula", "units"),
    [
        (ALWAYS, ()),
        (ALWAYS, (unit("a"),)),
        (ALWAYS, (unit("a", F(1)), unit("b"))),
        (ALWAYS, (unit("a", F(1), None),)),
        (ir.Not(ALWAYS), (unit("a", None),)),
        (ir.Connective("or", (at_most(stat("max"), "9"), ir.Not(ALWAYS))), (unit("a", None),)),
        (at_most(ir.Arith("/", stat("max"), stat("min")), "9"), (unit("a", F(0)),)),
        (
            ir.Connective("or", (ALWAYS, at_most(ir.Arith("/", stat("max"), stat("min")), "9"))),
            (unit("a", F(0)),),
        ),
        (ir.HasFields(("rng_seed",)), ()),
        (ir.HasFields(("rng_seed",)), (Unit("a"),)),
        (at_most(stat("mean", ir.Metric("tv")), "1"), (unit("a", F(1)),)),
    ],
)
def test_undefined_statements_are_neither_true_nor_false(
    formula: ir.Formula, units: tuple[Unit, ...]
) -> None:
    assert truth(formula, *units) is Truth.UNDEFINED


@pytest.mark.parametrize("value", [None, "", [], {}])
def test_empty_field_counts_as_missing(value: object) -> None:
    units = (unit("a", F(1)), Unit("b", record={"rng_seed": value}))
    assert truth(ir.HasFields(("rng_seed",)), *units) is Truth.FALSE


def test_program_without_clauses_does_not_hold() -> None:
    assert evaluate(made.program(slices=ALL), world(unit("a", F(1)))) is Truth.UNDEFINED


def test_false_wins_over_undefined_in_a_program() -> None:
    def clause(name: str, formula: ir.Formula) -> ir.Clause:
        return ir.Clause(name, ir.Family.NUMERICAL, formula, ir.Level.L1, ("all",))

    good, bad = clause("G", ALWAYS), clause("B", at_most(stat("max"), "0"))
    none = clause("N", at_most(stat("mean", ir.Metric("tv")), "1"))
    given = world(unit("a", F(1)))
    assert evaluate(made.program(good, slices=ALL), given) is Truth.TRUE
    assert evaluate(made.program(good, none, slices=ALL), given) is Truth.UNDEFINED
    assert evaluate(made.program(good, none, bad, slices=ALL), given) is Truth.FALSE


# --- slices, budgets, tables ---------------------------------------------------------------------


LONG = ir.FieldTest("length", ">", F(10))


def clause(formula: ir.Formula, *slices: str, budget: ir.Budget | None = None) -> ir.Clause:
    return ir.Clause("A", ir.Family.NUMERICAL, formula, ir.Level.L1, slices, budget)


def test_slice_contains_the_requests_of_its_predicate() -> None:
    units = (unit("a", F(9), length=F(1)), unit("b", F(1), length=F(11)))
    slices = (ir.Slice("all"), ir.Slice("long", where=LONG), ir.Slice("none", where=ir.AnyOf()))
    base = made.program(clause(at_most(stat("max"), "1"), "all", "long", "none"), slices=slices)
    found = {name: answer.truth for (_, name), answer in answers(base, world(*units)).items()}
    assert found == {"all": Truth.FALSE, "long": Truth.TRUE, "none": Truth.UNDEFINED}


@pytest.mark.parametrize("fields", [{}, {"length": "11"}, {"length": True}])
def test_untestable_request_makes_the_slice_undefined(fields: dict[str, Any]) -> None:
    units = (unit("a", F(1), length=F(11)), unit("b", F(1), **fields))
    base = made.program(clause(ALWAYS, "long"), slices=(ir.Slice("long", where=LONG),))
    ((_, answer),) = answers(base, world(*units)).items()
    assert answer.truth is Truth.UNDEFINED
    assert answer.reason == "the request b cannot be tested by its length"


@pytest.mark.parametrize(
    ("rate", "unit_name", "expected"),
    [
        ("1/5", "requests", Truth.TRUE),
        ("1/6", "requests", Truth.FALSE),
        ("1/2", "windows", Truth.TRUE),
        ("2/5", "windows", Truth.FALSE),
    ],
)
def test_budget_allows_a_share_of_units(rate: str, unit_name: str, expected: Truth) -> None:
    """One of five requests violates; of the windows (2 and 3 requests) one of two."""
    units = [unit(f"r{i}", F(9 if i == 4 else 1)) for i in range(5)]
    given = clause(at_most(stat("max"), "1"), "all", budget=ir.Budget(F(rate), unit_name))
    assert evaluate(made.program(given, slices=ALL), world(*units, window=2)) is expected


def test_unit_without_a_value_makes_a_budget_undefined() -> None:
    units = [unit(f"r{i}", F(1) if i else None) for i in range(100)]
    given = clause(at_most(stat("max"), "1"), "all", budget=ir.Budget(F(1, 2), "requests"))
    assert evaluate(made.program(given, slices=ALL), world(*units)) is Truth.UNDEFINED


def test_windows_are_cut_in_order_and_a_short_rest_joins_the_last() -> None:
    units = [unit(str(i)) for i in range(7)]
    assert [len(w) for w in windows(units, 3)] == [3, 4]
    assert [len(w) for w in windows(units[:2], 3)] == [2]
    assert windows([], 3) == []


def test_table_selects_the_threshold_by_bucket() -> None:
    """`max(m) <= table(t)` means `m <= t(request)` for every request."""
    rows = (
        ir.TableRow(ir.FieldTest("length", "<=", F(10)), F(1)),
        ir.TableRow(ir.FieldTest("length", "<=", F(20)), F(2)),
    )
    limits = {5: F(1), 15: F(2), 25: F(3)}
    formula = ir.Compare("<=", stat("max"), ir.TableValue("limits"))
    for values in ((1, 2, 3), (1, 2, 4), (2, 2, 3), (1, 3, 3)):
        units = [unit(f"r{n}", F(v), length=F(n)) for n, v in zip(limits, values, strict=True)]
        table = ir.ThresholdTable("limits", "1", rows, F(3))
        base = replace(made.program(clause(formula, "all"), slices=ALL), tables=(table,))
        kept = all(v <= limit for v, limit in zip(values, limits.values(), strict=True))
        assert evaluate(base, world(*units)) is (Truth.TRUE if kept else Truth.FALSE)
        closed = replace(base, tables=(replace(table, otherwise=None),))
        assert evaluate(closed, world(*units)) is not Truth.TRUE
        inside = [u for u in units if u.key != "r25"]
        assert evaluate(closed, world(*inside)) is (
            Truth.TRUE if values[0] <= 1 and values[1] <= 2 else Truth.FALSE
        )


# --- runs ----------------------------------------------------------------------------------------


def pair(*infer: str, train: tuple[str, ...] = ("0", "0", "0")) -> Pair:
    return Pair((tuple(map(F, train)),), (tuple(map(F, infer)),))


def drift(kind: str = "inf", measured: bool = False) -> ir.Norm:
    return ir.Norm(kind, ir.Drift("attn_0", "x", measured))


def every(body: ir.Formula, kind: str = "points", radius: int = 0) -> ir.Quantified:
    return ir.Quantified("forall", "x", ir.Region(ir.RegionKind(kind), "all", F(radius)), body)


def test_drift_quantifies_over_admitted_runs_and_inputs() -> None:
    units = (unit("a", F(1)), unit("b", F(1)))
    admitted = {
        ("attn_0", "a"): (pair("1", "0", "0"), pair("0", "-2", "0")),
        ("attn_0", "b"): (pair("0", "0", "1"),),
    }

    def kept(limit: str, op: str = "<=", **more: Any) -> Truth:
        claim = every(at_most(drift(), limit, op))
        return truth(claim, *units, admitted=admitted, **more)

    assert (kept("2"), kept("19/10"), kept("2", "<")) == (Truth.TRUE, Truth.FALSE, Truth.FALSE)
    assert (kept("1", ">="), kept("1", ">")) == (Truth.TRUE, Truth.FALSE)
    one = {("attn_0", "a"): admitted["attn_0", "a"]}
    assert truth(every(at_most(drift(), "9")), *units, admitted=one) is Truth.UNDEFINED
    assert truth(every(at_most(drift(), "9")), admitted=admitted) is Truth.UNDEFINED


def test_ball_contains_more_than_its_rows() -> None:
    ball = ir.Region(ir.RegionKind.BALL, "all", F(1))
    admitted = {("attn_0", "a"): (pair("1", "0", "0"),), ("attn_0", "near"): (pair("3", "0", "0"),)}
    given = {"admitted": admitted, "inputs": {ball: ("near",)}}
    claim = at_most(drift(), "2")
    assert truth(every(claim), unit("a", F(1)), **given) is Truth.TRUE
    assert truth(every(claim, "ball", 1), unit("a", F(1)), **given) is Truth.FALSE


def test_observed_drift_is_that_of_the_measured_run() -> None:
    units = (unit("a", F(1)), unit("b", F(1)))
    observed = {("attn_0", "a"): pair("3", "4", "0"), ("attn_0", "b"): pair("0", "0", "1")}
    claim = every(at_most(drift("2", True), "5"))
    assert truth(claim, *units, observed=observed) is Truth.TRUE
    some = replace(every(at_most(drift("2", True), "1")), quantifier="exists")
    assert truth(some, *units, observed=observed) is Truth.TRUE
    assert truth(replace(some, quantifier="forall"), *units, observed=observed) is Truth.FALSE
    assert truth(claim, *units, observed={}) is Truth.UNDEFINED


@pytest.mark.parametrize(
    ("train", "infer", "k", "kept"),
    [
        ("321", "321", 1, True),
        ("321", "231", 1, False),
        ("321", "231", 2, True),
        ("321", "331", 1, False),  # a tie counts as a change
        ("331", "331", 1, False),
        ("331", "331", 2, True),
        ("321", "123", 3, True),
    ],
)
def test_no_flip_compares_top_k_sets(train: str, infer: str, k: int, kept: bool) -> None:
    assert keeps_first(Pair((tuple(map(F, train)),), (tuple(map(F, infer)),)), k) is kept


def test_no_flip_with_k_beyond_the_row_is_undefined() -> None:
    units, runs = (unit("a", F(1)),), {("model", "a"): (pair("1", "2", "3"),)}
    claim = every(ir.NoFlip("model", "x", 4))
    assert truth(claim, *units, admitted=runs) is Truth.UNDEFINED


def test_norms_are_exact() -> None:
    two_rows = ((F(3), F(-4)), (F(1), F(1)))
    assert (norm("inf", two_rows), norm("2", two_rows), norm("span", two_rows)) == (
        F(4),
        F(5),
        F(7),
    )
    assert norm("2", ((F(1), F(1)),)) == Root(F(2))
    assert root(F(9, 4)) == F(3, 2)
    half, more = F(141421356, 10**8), F(141421357, 10**8)
    numbers: list[Fraction | Root] = [
        F(-2),
        F(1),
        half,
        Root(F(2)),
        more,
        F(3, 2),
        Root(F(3)),
        F(2),
    ]
    for i, small in enumerate(numbers):
        assert [less(small, large) for large in numbers] == [i < j for j in range(len(numbers))]
    assert difference(pair("1", "2", "3", train=("1", "1", "1"))) == ((F(0), F(1), F(2)),)


@pytest.mark.parametrize(
    "runs",
    [
        Pair((), ()),
        Pair(((),), ((),)),
        Pair(((F(1),),), ((None,),)),
        Pair(((F(1),),), ((F(1), F(2)),)),
    ],
)
def test_runs_without_values_are_undefined(runs: Pair) -> None:
    units, admitted = (unit("a", F(1)),), {("attn_0", "a"): (runs,)}
    assert truth(every(at_most(drift(), "9")), *units, admitted=admitted) is Truth.UNDEFINED
