"""No expression crashes the checker, and no accepted expression is typed wrongly.

Expressions are drawn in two ways: by type, so that many are accepted, and from the whole grammar,
so that most are not. Each accepted requirement must have a fragment and a family, consistent types,
and be *monotone*: without an override of directions, a metric that gets worse never makes an
unsatisfied requirement satisfied.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.expressions.names import Scope
from kcdsl.check.expressions.sorts import UNKNOWN, Real, sort_at, sort_of, sorts
from kcdsl.check.expressions.terms import term
from kcdsl.diagnostics import Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir import terms as ir
from kcdsl.ir.formulas import terms_of, walk
from kcdsl.ir.printer import print_expression
from kcdsl.metrics import METRICS, MetricDefinition
from kcdsl.route.catalogue import Fragment
from kcdsl.route.fragments import classify
from kcdsl.syntax import ast
from kcdsl.units import UNITS

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}, long: {where: length > 8}}
clauses:
  A:
    level: L1
"""

# --- expressions by sort -------------------------------------------------------------------------

_UNITS: dict[str, list[str]] = {str(u.dimension): [] for u in UNITS.values()}
for _unit in UNITS.values():
    if _unit.name != "1":
        _UNITS[str(_unit.dimension)].append(_unit.name)

values = st.sampled_from(["0.001", "0.5", "1", "2", "3", "250", "1e-3"]).map(Fraction)


def name(id: str) -> ast.Name:
    return ast.Name(id)


def call(function: str, *arguments: ast.Expression) -> ast.Call:
    return ast.Call(ast.Name(function), arguments)


@st.composite
def numbers(draw: st.DrawFn, dimension: str) -> ast.Num:
    units: list[str | None] = [] if dimension == "1" else [*_UNITS[dimension]]
    if dimension in {"1", "ratio", "nat"}:
        units += [None] * max(1, len(units))
    return ast.Num(draw(values), draw(st.sampled_from(units)))


@st.composite
def measured(draw: st.DrawFn, metric: MetricDefinition) -> ast.Expression:
    """Draw a statistic of one metric."""
    inner: ast.Expression = name(metric.name)
    if metric.signed or draw(st.integers(0, 5)) == 0:
        inner = call("abs", inner)
    if metric.kind == "aggregate":
        return inner
    kind = draw(st.sampled_from(sorted(metric.statistics)))
    if "mean" in metric.statistics and draw(st.booleans()):
        kind = "mean"
    if kind != "quantile":
        return call(kind, inner)
    ranks = {"lower": ["p50", "p90", "p95", "p99"], "higher": ["p1", "p5", "p10", "p50"]}
    named = draw(st.sampled_from([*ranks[metric.better], "quantile"]))
    if named == "quantile":
        return call("quantile", ast.Num(Fraction(draw(st.sampled_from(["0.01", "0.999"])))), inner)
    return call(named, inner)


@st.composite
def real_terms(
    draw: st.DrawFn, dimension: str, family: ir.Family | None = None, sign: int = 0, depth: int = 2
) -> ast.Expression:
    """Draw a term of a dimension, mostly well typed.

    With a `sign`, most terms get larger (1) or smaller (-1) where a metric gets worse.
    """
    if sign and draw(st.integers(0, 4)) == 0:
        sign = -sign
    better = {1: "lower", -1: "higher"}.get(sign)
    named = [
        metric
        for metric in METRICS.values()
        if str(metric.dimension) == dimension
        and family in (None, metric.family)
        and better in (None, metric.better)
    ]
    choice = draw(st.integers(0, 9 if depth else 3))
    if (choice == 3 and depth < 2) or (not named and choice <= 3):
        return draw(numbers(dimension))
    if choice <= 3:
        return draw(measured(draw(st.sampled_from(named))))
    inner = draw(real_terms(dimension, family, sign if choice < 9 else -sign, depth - 1))
    if choice <= 5:
        op = draw(st.sampled_from("+-"))
        other = draw(real_terms(dimension, family, sign if op == "+" else -sign, depth - 1))
        return ast.Binary(op, inner, other)
    if choice <= 8:
        sort = draw(st.sampled_from(["1", "ratio"]))
        factor = draw(st.one_of(numbers("1"), real_terms(sort, family, sign, 0)))
        return ast.Binary(draw(st.sampled_from("*/")), inner, factor)
    return ast.Minus(inner)


@st.composite
def comparisons(draw: st.DrawFn) -> ast.Expression:
    metric = draw(st.sampled_from(list(METRICS.values())))
    dimension = str(metric.dimension)
    family = draw(st.sampled_from([None, metric.family, metric.family]))
    sign = draw(st.sampled_from([0, *[1 if metric.better == "lower" else -1] * 3]))
    op = draw(st.sampled_from({0: ["==", "<="], 1: ["<=", "<"], -1: [">=", ">"]}[sign]))
    left = draw(real_terms(dimension, family, sign))
    right = draw(st.one_of(numbers(dimension), real_terms(dimension, family, -sign, 1)))
    return ast.ComparisonChain((op,), (left, right))


regions = st.sampled_from(
    [
        call("points", name("all")),
        call("ball", name("long"), ast.Num(Fraction(1, 100))),
        call("hull", name("all")),
        call("hull", name("all"), ast.Num(Fraction(5), "%")),
        call("rows", name("all"), ast.Num(Fraction(512))),
        call("rows", name("long"), ast.Num(Fraction(512)), ast.Num(Fraction(5), "%")),
    ]
)


@st.composite
def universals(draw: st.DrawFn) -> ast.Expression:
    block = name(draw(st.sampled_from(["attn_0", "mlp_1", "head", "model"])))
    variable = name(draw(st.sampled_from(["x", "row"])))
    body: ast.Expression = call("no_flip", block, variable)
    if draw(st.booleans()):
        drift = call(draw(st.sampled_from(["drift", "drift", "measured_drift"])), block, variable)
        norm = call(draw(st.sampled_from(["norm_inf", "norm_2", "span"])), drift)
        op = draw(st.sampled_from(["<=", "<", ">="]))
        body = ast.ComparisonChain((op,), (norm, draw(numbers("1"))))
    kind = draw(st.sampled_from(["forall", "forall", "exists"]))
    return ast.Quantifier(kind, variable, draw(regions), body)


traces = st.sampled_from([call("has", name("trace"), ast.ListOf((name("rng_seed"), name("a"))))])
statements = st.recursive(
    st.one_of(comparisons(), comparisons(), universals(), traces),
    lambda inner: st.one_of(
        inner.map(ast.Negation),
        st.tuples(inner, inner).map(lambda parts: ast.Logic("and", parts)),
        st.tuples(inner, inner).map(lambda parts: ast.Logic("or", parts)),
        st.tuples(inner, inner).map(lambda parts: ast.Logic("implies", parts)),
    ),
    max_leaves=3,
)

measurements = st.recursive(
    comparisons(),
    lambda inner: st.one_of(
        inner.map(ast.Negation),
        st.builds(lambda op, a, b: ast.Logic(op, (a, b)), st.sampled_from(["and", "or"]), inner,
                  inner),
    ),
    max_leaves=2,
)  # fmt: skip

# --- expressions of any kind ---------------------------------------------------------------------

_WORDS = ["kl", "tv", "log_ratio", "latency", "throughput", "all", "attn_0", "x", "trace", "mean",
          "top1_overlap", "p99_kl", "nothing", "length", "model"]  # fmt: skip
_CALLS = [
    "mean",
    "max",
    "min",
    "rate",
    "p99",
    "p1",
    "quantile",
    "abs",
    "norm_inf",
    "span",
    "drift",
    "measured_drift",
    "points",
    "ball",
    "hull",
    "rows",
    "no_flip",
    "has",
    "table",
    "nothing",
]
_NAMES = st.sampled_from(_WORDS).map(ast.Name)
_NUMBERS = st.builds(
    ast.Num, values, st.sampled_from([None, None, "ms", "%", "nats", "GiB", "bits"])
)
_ATOMS = st.one_of(
    _NAMES, _NUMBERS, st.just(ast.Truth(True)), st.just(ast.Text("a")), st.just(ast.ListOf(()))
)


def _compound(inner: st.SearchStrategy[ast.Expression]) -> st.SearchStrategy[ast.Expression]:
    calls = st.builds(
        lambda f, a: call(f, *a), st.sampled_from(_CALLS), st.lists(inner, min_size=1, max_size=3)
    )
    return st.one_of(
        calls,
        calls,
        st.builds(ast.Minus, inner),
        st.builds(ast.Negation, inner),
        st.builds(ast.Binary, st.sampled_from("+-*/"), inner, inner),
        st.builds(
            lambda op, a, b: ast.ComparisonChain((op,), (a, b)),
            st.sampled_from(["<=", ">=", "==", "!="]), inner, inner,
        ),
        st.builds(
            lambda op, a, b: ast.Logic(op, (a, b)),
            st.sampled_from(["and", "or", "implies"]), inner, inner,
        ),
        st.builds(lambda a, b: ast.Membership(a, ast.ListOf((b,))), inner, _NUMBERS),
        st.builds(
            lambda k, r, b: ast.Quantifier(k, name("x"), r, b),
            st.sampled_from(["forall", "exists"]), calls, inner,
        ),
    )  # fmt: skip


anything = st.recursive(_ATOMS, _compound, max_leaves=8)


# --- what holds of them --------------------------------------------------------------------------


def checked(expression: ast.Expression, more: str = "") -> tuple[Analysis, Sink]:
    """Check a contract with one clause that requires the expression."""
    text = print_expression(expression)
    source = SourceFile("x", f"{HEAD}{more}    require: >-\n      {text}\n")
    sink = Sink()
    return analyse(source, sink), sink


def consistent(analysis: Analysis, sink: Sink) -> ir.Clause | None:
    """Assert invariants of every contract; return its clause where it is accepted."""
    accepted = analysis.program is not None
    assert accepted == (not sink.has_errors)
    for diagnostic in sink:
        assert diagnostic.span is not None
        assert 0 <= diagnostic.span.start <= diagnostic.span.end <= len(analysis.source.text)
    event("accepted" if accepted else "refused")
    return analysis.program.clauses[0] if analysis.program is not None else None


def families(requirement: ir.Formula) -> set[ir.Family]:
    found = {METRICS[t.name].family for t in terms_of(requirement) if isinstance(t, ir.Metric)}
    if any(isinstance(t, ir.Norm) for t in terms_of(requirement)):
        found.add(ir.Family.NUMERICAL)
    for part in walk(requirement):
        if isinstance(part, ir.NoFlip):
            found.add(ir.Family.NUMERICAL)
        if isinstance(part, ir.HasFields):
            found.add(ir.Family.OBSERVABILITY)
    return found


@pytest.mark.full
@given(st.one_of(statements, anything), st.sampled_from(["", "    family: numerical\n"]))
def test_accepted_requirements_have_a_fragment_and_a_family(
    expression: ast.Expression, more: str
) -> None:
    analysis, sink = checked(expression, more)
    clause = consistent(analysis, sink)
    if clause is None:
        return
    assert classify(clause).fragment is not Fragment.OUTSIDE
    assert clause.family in families(clause.require)
    for part in walk(clause.require):
        if isinstance(part, ir.Compare):
            assert {type(t) for t in terms_of(part)} & {ir.Metric, ir.Norm}


@given(st.one_of(statements, anything))
def test_types_are_total_and_known_for_accepted_requirements(
    expression: ast.Expression,
) -> None:
    analysis, sink = checked(expression)
    accepted = consistent(analysis, sink) is not None
    for span, sort in sorts(expression, analysis.scope):
        assert str(sort)
        assert not (accepted and sort == UNKNOWN), print_expression(expression)
        assert span.start <= span.end
    assert sort_at(expression, analysis.scope, -1) is None


@given(st.sampled_from(["1", "ratio", "nat", "s", "B"]).flatmap(real_terms))
def test_types_agree_on_dimensions(expression: ast.Expression) -> None:
    from kcdsl.diagnostics.report import Reporter

    scope = Scope({}, {})
    typed = term(expression, scope, Reporter(SourceFile("x", ""), Sink()))
    sort = sort_of(expression, scope)
    if typed is None:
        return
    assert isinstance(sort, Real), print_expression(expression)
    assert sort.dimension == typed.dimension
    assert sort.bare == typed.bare


# --- monotone ------------------------------------------------------------------------------------

_COMPARE = {
    "<=": operator.le, "<": operator.lt, ">=": operator.ge, ">": operator.gt, "==": operator.eq,
}  # fmt: skip
Values = Mapping[str, Fraction]


def value(of: ir.Term, values: Values) -> Fraction:
    """Return the value of a term where every request has one token, the value of each statistic."""
    match of:
        case ir.Number(value=number):
            return number
        case ir.Metric(name=metric):
            return values[metric]
        case ir.Statistic(of=inner):
            return value(inner, values)
        case ir.Abs(of=inner):
            return abs(value(inner, values))
        case ir.Norm():
            return values["norm"]
        case ir.Arith(op=op, left=left, right=right):
            a, b = value(left, values), value(right, values)
            return {"+": a + b, "-": a - b, "*": a * b}[op] if op != "/" else a / b
        case _:
            raise AssertionError(of)


def holds(formula: ir.Formula, values: Values) -> bool:
    match formula:
        case ir.Compare(op=op, left=left, right=right):
            return bool(_COMPARE[op](value(left, values), value(right, values)))
        case ir.Not(of=inner):
            return not holds(inner, values)
        case ir.Connective(op="and", parts=parts):
            return all(holds(part, values) for part in parts)
        case ir.Connective(op="or", parts=parts):
            return any(holds(part, values) for part in parts)
        case ir.Quantified(body=body):
            return holds(body, values)
        case _:
            return True


def judged(formula: ir.Formula) -> bool:
    """Return whether directions are checked: without equality and override."""
    return not any(
        (isinstance(part, ir.Compare) and part.op == "==")
        or (isinstance(part, ir.Connective) and part.op == "implies")
        or isinstance(part, ir.Quantified)
        for part in walk(formula)
    )


def families_named(expression: ast.Expression) -> set[str]:
    """Return the families of the metrics in the text of an expression."""
    words = set(re.findall(r"[a-z_0-9]+", print_expression(expression)))
    return {METRICS[word].family.value for word in words & set(METRICS)}


GRID = [Fraction(n) for n in ("0", "1/5000", "1/800", "1/4", "3/5", "1", "7/4", "5/2", "4", "400")]


def steps(metric: MetricDefinition, *, magnitudes: bool = False) -> list[Fraction]:
    """Return values of a metric from good to bad.

    Over its whole range, or over one sign, since the magnitude of a signed metric grows on either
    side.
    """
    low = metric.lower if metric.lower is not None and not magnitudes else Fraction(0)
    found = [low + n for n in GRID if metric.upper is None or low + n <= metric.upper]
    return found if metric.better == "lower" else found[::-1]


@pytest.mark.full
@settings(max_examples=max(500, settings().max_examples))
@given(measurements, st.randoms(use_true_random=False))
def test_requirements_are_monotone_in_every_metric(
    expression: ast.Expression, random: Random
) -> None:
    analysis, sink = checked(expression)
    if analysis.program is None and {d.code.id for d in sink} == {"KC214"}:
        family = min(families_named(expression), default="numerical")
        analysis, sink = checked(expression, f"    family: {family}\n")
    clause = consistent(analysis, sink)
    if clause is None or any(d.severity is not Severity.NOTE for d in sink):
        return
    used = sorted({t.name for t in terms_of(clause.require) if isinstance(t, ir.Metric)})
    if not judged(clause.require):
        return
    event("judged")
    magnitudes = "abs(" in print_expression(expression)
    values = {name: steps(METRICS[name], magnitudes=magnitudes) for name in used}
    for _ in range(6):
        given = {name: random.choice(values[name]) for name in used}
        for name in used:
            met = [met_with(clause.require, {**given, name: v}) for v in values[name]]
            known = [truth for truth in met if truth is not None]
            worse = [not a and b for a, b in pairwise(known)]
            assert not any(worse), (print_expression(expression), given, name)


def met_with(requirement: ir.Formula, values: Values) -> bool | None:
    """Return whether a requirement is satisfied; None where a quotient is undefined."""
    try:
        return holds(requirement, values)
    except ZeroDivisionError:
        return None
