"""The SMT-LIB export: meaning, syntax, and the axioms it uses."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kcdsl.check.compile import load_program
from kcdsl.ir import terms as ir
from kcdsl.logic.relations import Interval, domination, interval, ordered
from kcdsl.logic.smtlib import consistency, implication, text
from kcdsl.logic.smtlib.assumptions import assumptions
from kcdsl.logic.smtlib.script import claims_of
from kcdsl.logic.smtlib.text import Symbols
from kcdsl.logic.smtlib.theory import MeasuredTerm, Theory
from tests.support import contracts as made
from tests.support.semantics.store import Store

if TYPE_CHECKING:
    from tests.conftest import Cli

REPOSITORY = Path(__file__).resolve().parents[3]
GOLDEN = Path(__file__).parent / "exports"
EXAMPLES = {
    "tiny-lm": "examples/tiny_lm/contract.yaml",
    "minilm": "examples/minilm/contract.yaml",
    "tables": "grammar/corpus/accepted/tables.kc.yaml",
}


F = Fraction
KL = ir.Metric("kl")


def stat(kind: str, of: ir.Term = KL, q: str | None = None) -> ir.Statistic:
    return ir.Statistic(kind, of, None if q is None else F(q))


def clause(formula: ir.Formula, name: str = "A", budget: str | None = None) -> ir.Clause:
    allowed = None if budget is None else ir.Budget(F(budget), "requests")
    return ir.Clause(name, ir.Family.NUMERICAL, formula, ir.Level.L1, ("all",), allowed)


def at_most(term: ir.Term, limit: str, op: str = "<=") -> ir.Compare:
    return ir.Compare(op, term, ir.Number(F(limit)))


def answer(*clauses: ir.Clause) -> str:
    script = consistency(made.program(*clauses))
    (found,) = {made.ask_z3(script), made.ask_cvc5(script)}
    return str(found)


# --- scripts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "path"), EXAMPLES.items(), ids=list(EXAMPLES))
def test_export_of_the_examples(name: str, path: str) -> None:
    """To accept a change: `kcdsl compile PATH --emit smtlib -o tests/unit/ir/exports/NAME.smt2`."""
    script = consistency(load_program(REPOSITORY / path))
    assert script == (GOLDEN / f"{name}.smt2").read_text(encoding="utf-8")


def test_wording_of_clauses_appears_in_comments_only() -> None:
    program = made.Contracts(3).program(4)
    again = replace(program, clauses=tuple(replace(c, text="as written") for c in program.clauses))
    told = re.compile(r"^; C-.*$", re.MULTILINE)
    assert told.sub("", consistency(program)) == told.sub("", consistency(again))
    assert "as written" in consistency(again)


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ((None, None), "unsat"),
        ((None, "1/100"), "sat"),
        (("1/100", "1/100"), "unsat"),
        (("1/2", "1/2"), "sat"),  # half of the requests may satisfy one, half the other
        (("1/2", "49/100"), "unsat"),
        ((None, "1"), "sat"),
    ],
)
def test_contradictions_with_budgets(budgets: tuple[str | None, ...], expected: str) -> None:
    first = clause(at_most(stat("max"), "1"), "A", budgets[0])
    second = clause(at_most(stat("max"), "2", ">="), "B", budgets[1])
    assert answer(first, second) == expected


def test_budget_of_100_percent_demands_nothing() -> None:
    assert claims_of(made.program(clause(at_most(stat("max"), "1"), "A", "1"))) == ()


def test_empty_slice_is_a_contradiction() -> None:
    where = ir.AllOf((ir.FieldTest("n", "<", F(1)), ir.FieldTest("n", ">", F(1))))
    program = replace(made.program(), slices=(ir.Slice("none", where=where),))
    assert made.ask_z3(consistency(program)) == made.ask_cvc5(consistency(program)) == "unsat"


def test_division_by_zero_satisfies_no_clause() -> None:
    share = at_most(ir.Arith("/", stat("max"), stat("min")), "5")
    zero = clause(at_most(stat("min"), "0"), "B")
    assert answer(clause(share)) == "sat"
    assert answer(clause(share), zero) == "unsat"
    assert answer(clause(ir.Not(share)), zero) == "unsat"
    other = ir.Connective("or", (share, at_most(stat("max"), "9")))
    assert answer(clause(other), zero) == "unsat"


def test_implication_of_clauses() -> None:
    strict, loose = clause(at_most(stat("max"), "1")), clause(at_most(stat("mean"), "2"), "B")
    program = made.program(strict, loose)
    assert made.ask_z3(implication(program, "B")) == "unsat"
    assert made.ask_z3(implication(program, "A")) == "sat"
    with pytest.raises(KeyError):
        implication(program, "C")


@pytest.mark.parametrize(
    ("others", "budget", "expected"),
    [
        (("1/100",), "5/100", "unsat"),
        (("5/100",), "5/100", "unsat"),
        (("5/100",), "1/100", "sat"),  # four of a hundred may violate it and satisfy the other
        (("5/100",), "0", "sat"),
        (("0",), "0", "unsat"),
        (("1/100",), "1", "unsat"),  # it demands nothing
        (("99/100",), "99/100", "unsat"),
        (("1",), "99/100", "sat"),
    ],
)
def test_implication_within_budgets(others: tuple[str, ...], budget: str, expected: str) -> None:
    same = at_most(stat("max"), "1")
    premises = [clause(same, f"A-{n}", rate) for n, rate in enumerate(others)]
    script = implication(made.program(*premises, clause(same, "B", budget)), "B")
    assert made.ask_z3(script) == made.ask_cvc5(script) == expected


@pytest.mark.parametrize(
    ("low", "high", "budget", "expected"),
    [
        ("2/100", "3/100", "5/100", "unsat"),
        ("3/100", "3/100", "5/100", "sat"),  # three of a hundred may violate each: six violate it
        ("0", "5/100", "5/100", "unsat"),
    ],
)
def test_budgets_of_joint_premises_add_up(low: str, high: str, budget: str, expected: str) -> None:
    width = ir.Arith("-", stat("max"), stat("min"))
    program = made.program(
        clause(at_most(stat("min"), "1", ">="), "A", low),
        clause(at_most(stat("max"), "2"), "B", high),
        clause(at_most(width, "1"), "C", budget),
    )
    script = implication(program, "C")
    assert made.ask_z3(script) == made.ask_cvc5(script) == expected


def test_clauses_without_budget_join_every_group() -> None:
    tight = [clause(at_most(stat("min"), n), f"A-{n}", "3/100") for n in ("7", "1")]
    free = clause(at_most(stat("max"), "2"), "B", "0")
    other = clause(
        ir.Connective("and", (at_most(stat("min"), "1"), at_most(stat("max"), "3"))), "C", "5/100"
    )
    script = implication(made.program(*tight, free, other), "C")
    assert made.ask_z3(script) == made.ask_cvc5(script) == "unsat"


def test_universal_claims_bound_the_largest_drift() -> None:
    def claim(name: str, kind: str, slice_name: str, limit: str, radius: str) -> ir.Clause:
        region = ir.Region(ir.RegionKind.BALL, slice_name, F(radius))
        norm = ir.Norm(kind, ir.Drift("attn_0", "x"))
        formula = ir.Quantified("forall", "x", region, at_most(norm, limit))
        return ir.Clause(name, ir.Family.NUMERICAL, formula, ir.Level.L1)

    wide = claim("A", "inf", "all", "1", "1")
    for kind, slice_name, limit, radius, follows in (
        ("inf", "long", "1", "1", True),
        ("inf", "long", "1", "1/2", True),
        ("inf", "long", "1", "2", False),
        ("inf", "long", "9/10", "1", False),
        ("span", "all", "2", "1", True),
        ("span", "all", "19/10", "1", False),
        ("2", "all", "9", "1", False),
    ):
        program = made.program(wide, claim("B", kind, slice_name, limit, radius))
        expected = "unsat" if follows else "sat"
        assert made.ask_z3(implication(program, "B")) == expected, (kind, slice_name, radius)
        assert made.ask_cvc5(implication(program, "B")) == expected


# --- writing -------------------------------------------------------------------------------------


HOSTILE = (
    "|",
    "\\",
    "a|b",
    "a\\b",
    'a"b',
    "ä",
    "𝒳",
    "\n",
    "\\u{41}",
    "\\U10ffff.",
    "and",
    " ",
    "A",
)


def test_any_name_and_text_is_exported() -> None:
    symbols = Symbols()
    given = [symbols.symbol(("name", name), name) for name in HOSTILE]
    assert len(set(given)) == len(HOSTILE)
    lines = ["(set-logic ALL)"]
    for symbol, value in zip(given, HOSTILE, strict=True):
        name = f"|of {symbol[1:]}"
        lines += [text.declare(name, "String"), f"(assert (= {name} {text.text(value)}))"]
    differ = " ".join(f"|of {symbol[1:]}" for symbol in given)
    script = "\n".join([*lines, f"(assert (distinct {differ}))", "(check-sat)"])
    assert made.ask_z3(script) == made.ask_cvc5(script) == "sat"
    assert made.ask_z3(script.replace("distinct", "=")) == "unsat"


def test_escaped_characters_stay_distinct() -> None:
    texts = ("\U0010ffff", "\\U10ffff.", "\\\U0010ffff", "\\\\U10ffff.", "\\\\\U0010ffff")
    assert len({text.text(value) for value in texts}) == len(texts)


def test_both_solvers_parse_hostile_contracts() -> None:
    where = ir.AnyOf(tuple(ir.FieldTest("let", "==", value) for value in HOSTILE))
    mixed = ir.AnyOf((ir.FieldTest("par", "!=", True), ir.FieldTest("par", "!=", "x")))
    slices = (ir.Slice("forall", where=where), ir.Slice('a|b\\"', where=mixed))
    clauses = tuple(
        ir.Clause(
            f"assert {n} |\\",
            ir.Family.NUMERICAL,
            at_most(stat("max"), "1"),
            ir.Level.L1,
            (s.name,),
            text="one\n(check-sat)\rtwo\u2028three\x85(exit)",
        )
        for n, s in enumerate(slices)
    )
    script = consistency(replace(made.program(*clauses), slices=slices, name="a\n(exit)"))
    assert made.ask_z3(script) == made.ask_cvc5(script) == "sat"
    assert script.count("\n(check-sat)") == 1
    assert "\n(exit)" not in script


@pytest.mark.parametrize(
    ("value", "written"),
    [("1/50", "(/ 1.0 50.0)"), ("-3", "(- 3.0)"), ("0", "0.0"), ("-1/3", "(- (/ 1.0 3.0))")],
)
def test_exported_numbers_are_exact(value: str, written: str) -> None:
    assert text.real(F(value)) == written


# --- facts ---------------------------------------------------------------------------------------


STATISTICS = (
    stat("min"),
    stat("mean"),
    stat("max"),
    stat("quantile", q="1/2"),
    stat("quantile", q="9/10"),
    stat("quantile", q="99/100"),
)


def test_script_states_the_orders_of_the_axioms() -> None:
    """The script states neighbours only; their transitive closure is every order."""
    theory, store = Theory(lambda a, b: a == b), Store()
    for term in STATISTICS:
        theory.holds(at_most(term, "1"), "all")
    facts = [fact for fact, _ in assumptions(theory, None, {})]
    symbols: dict[ir.Term, str] = {
        quantity.term: symbol
        for quantity, symbol in theory.constants.items()
        if isinstance(quantity, MeasuredTerm)
    }
    for a, b in permutations(STATISTICS, 2):
        small, large = (symbols[store.term(term)] for term in (a, b))
        script = made.smt_script(theory, *facts, f"(< {large} {small})")
        assert made.ask_z3(script) == ("unsat" if ordered(a, b) else "sat"), (a.kind, b.kind)


def test_axioms_hold_in_every_world() -> None:
    for seed in range(20):
        worlds = made.Worlds(seed)
        worlds.tokens = 3
        unit = worlds.unit(0)
        measured = {
            name: [v for v in values if v is not None] for name, values in unit.values.items()
        }
        for (name, values), (other, more) in permutations(measured.items(), 2):
            one: ir.Term = ir.Metric(name)
            factor = domination(one, ir.Metric(other), F(1))
            if factor is not None:
                assert all(v <= factor * w for v, w in zip(values, more, strict=True))
            found = interval(one)
            assert all(found.low is None or found.low <= v for v in values)
            assert all(found.high is None or v <= found.high for v in values)


def test_user_metric_is_bounded_by_its_range() -> None:
    metric = ir.UserMetric(
        "toxicity",
        "m:f",
        ir.Family.STATISTICAL,
        "request",
        "lower",
        "1",
        "1",
        ("mean",),
        (),
        lower=F(0),
        upper=F(1),
    )
    over = clause(at_most(stat("mean", ir.Metric("toxicity")), "2", ">="))
    program = made.program(over)
    assert made.ask_z3(consistency(program)) == "sat"
    assert made.ask_z3(consistency(replace(program, metrics=(metric,)))) == "unsat"


def test_bounds_narrow_a_range() -> None:
    assert interval(stat("mean"), {"kl": Interval(None, F(2))}) == Interval(F(0), F(2))


# --- the command ---------------------------------------------------------------------------------


def test_command_writes_a_script(cli: Cli, repository: Path, tmp_path: Path) -> None:
    contract = repository / "examples" / "tiny_lm" / "contract.yaml"
    ran = cli("compile", contract, "--emit", "smtlib")
    assert ran.code == 0
    assert ran.stdout == (GOLDEN / "tiny-lm.smt2").read_text(encoding="utf-8")
    ran = cli("compile", contract, "--emit", "smtlib", "-o", tmp_path / "q.smt2")
    assert (ran.code, ran.stdout) == (0, "")
    assert (tmp_path / "q.smt2").read_text(encoding="utf-8").endswith("(check-sat)\n")


def test_command_decides_implication(cli: Cli, repository: Path) -> None:
    contract = repository / "examples" / "tiny_lm" / "contract.yaml"
    ran = cli("compile", contract, "--follows", "N-ATTN-0")
    assert ran.code == 0
    assert made.ask_z3(ran.stdout) == made.ask_cvc5(ran.stdout) == "sat"
    ran = cli("compile", contract, "--follows", "N-NONE")
    assert ran.code == 2
    assert "KC471" in ran.stderr
    assert ran.stdout == ""


@pytest.mark.parametrize(("op", "limit"), [("-", "0"), ("/", "1")])
def test_subtracted_term_uses_its_opposite_tokens(op: str, limit: str) -> None:
    median, mean = stat("quantile", q="1/2"), stat("mean")
    program = made.program(clause(at_most(ir.Arith(op, median, median), limit)))
    assert made.ask_z3(implication(program, "A")) == "sat"
    program = made.program(clause(at_most(ir.Arith("-", mean, mean), "0")))
    assert made.ask_z3(implication(program, "A")) == "unsat"
