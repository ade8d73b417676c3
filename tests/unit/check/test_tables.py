"""Tables of thresholds: each request has one value, and the meaning of clauses with a table."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest
from kcdsl.ir.predicates import Undecided, find_case, holds
from kcdsl.ir.tables import buckets, expand_tables, gaps
from kcdsl.ir.terms import (
    AllOf,
    AnyOf,
    Compare,
    FieldTest,
    NoneOf,
    Number,
    Program,
    Quantified,
    TableValue,
)
from kcdsl.route.catalogue import Fragment
from kcdsl.route.fragments import classify

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices:
  all: {}
  long: {where: length > 128}
  chat: {where: 'category == "chat"'}
"""
BY_LENGTH = """tables:
  t: {unit: nats, rows: [{where: length <= 128, value: 0.01}], otherwise: 0.05}
"""
USE = "clauses: {A: {require: p99(kl) <= table(t), slices: [all, long, chat], level: L2}}\n"


def findings(text: str) -> list[Diagnostic]:
    """Return what is found in a contract with these sections."""
    sink = Sink()
    compile_source(SourceFile("x", HEAD + text), sink)
    return list(sink)


def compiled(text: str) -> Program:
    """Return the program of a contract with these sections."""
    sink = Sink()
    program = compile_source(SourceFile("x", HEAD + text), sink)
    assert program is not None, [d.message for d in sink]
    return program


def marked(text: str, found: Diagnostic) -> str:
    """Return the source text covered by a finding."""
    assert found.span is not None
    return (HEAD + text)[found.span.start : found.span.end]


# --- every request has exactly one value ---------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "otherwise", "expected"),
    [
        (["length <= 128", "length > 128"], False, None),
        (["length <= 128", "length >= 129"], False, None),  # lengths are integers
        (["length < 1", "length >= 1"], False, "KC406"),
        (["length <= 128"], True, None),
        (["length <= 128"], False, "KC405"),
        (["length <= 128", "length > 128"], True, "KC406"),
        (["score <= 0.5", "score >= 0.6"], False, "KC405"),  # other numbers are not
        (["score <= 0.5", "score > 0.5"], False, None),
        (["flag == true", "flag == false"], False, None),
        (["flag == true", "not (flag == true)"], False, None),
        (['tier == "a"', 'tier == "b"'], False, "KC405"),
        (['tier == "a"', 'tier != "a"'], False, None),
        (["length > 9", "length > 100"], True, "KC406"),
        (["length > 100", "length > 9"], True, None),
        (["length > 9 and length < 9"], True, "KC406"),
        (['length > 9 implies tier == "a"', "length > 9"], False, None),
        (["length == 1", "length != 1"], False, None),
        ([" or ".join(f"f{i} == true" for i in range(20))], False, "KC405"),  # undecided
        ([" or ".join(f"f{i} == true" for i in range(20))], True, None),
    ],
)
def test_tables_must_be_total(rows: list[str], otherwise: bool, expected: str | None) -> None:
    text = "tables:\n  t:\n    unit: nats\n    rows:\n"
    text += "".join(f"      - {{where: '{row}', value: 0.01}}\n" for row in rows)
    text += "    otherwise: 0.05\n" if otherwise else ""
    found = [d.code.id for d in findings(text + USE)]
    assert found == ([] if expected is None else [expected])


def test_gap_is_shown_by_an_example_request() -> None:
    text = BY_LENGTH.replace(", otherwise: 0.05", "") + USE
    (found,) = findings(text)
    assert found.message == "`t` has no value for a request with length = 129"
    assert marked(text, found) == "t"


def test_fix_removes_an_unreachable_otherwise() -> None:
    text = BY_LENGTH.replace("value: 0.01}]", "value: 0.01}, {where: length > 128, value: 1}]")
    (found,) = findings(text + USE)
    assert found.code.id == "KC406"
    assert found.fix is not None
    (edit,) = found.fix.edits
    whole = HEAD + text + USE
    mended = whole[: edit.span.start] + edit.text + whole[edit.span.end :]
    assert findings(mended.removeprefix(HEAD)) == []


def test_unused_table_is_a_warning_and_not_compiled() -> None:
    with_table = BY_LENGTH + "clauses: {A: {require: p99(kl) <= 0.01, level: L2}}\n"
    (found,) = findings(with_table)
    assert (found.code.id, str(found.severity)) == ("KC232", "warning")
    assert found.fix is not None
    (edit,) = found.fix.edits
    whole = HEAD + with_table
    without = whole[: edit.span.start] + edit.text + whole[edit.span.end :]
    assert findings(without.removeprefix(HEAD)) == []
    assert digest(compiled(with_table)) == digest(compiled(without.removeprefix(HEAD)))


def test_error_in_a_table_gives_one_finding() -> None:
    text = BY_LENGTH.replace("length <= 128", "length <=") + USE
    assert [d.code.id for d in findings(text)] == ["KC010"]


def test_unknown_table_has_a_fix() -> None:
    (found,) = findings(BY_LENGTH + USE.replace("table(t)", "table(T)") + "")[:1]
    assert found.code.id == "KC231"
    assert found.fix is not None
    assert found.fix.edits[0].text == "t"


# --- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unit", "value", "seconds"),
    [
        ("ms", "20", Fraction(1, 50)),
        ("s", "20 ms", Fraction(1, 50)),
        ("ms", "0.02 s", Fraction(1, 50)),
        ("s", "0.02", Fraction(1, 50)),
        ("min", "2", Fraction(120)),
    ],
)
def test_values_are_exact_and_in_base_units(unit: str, value: str, seconds: Fraction) -> None:
    program = compiled(
        f"tables: {{t: {{unit: {unit}, rows: [{{where: length > 9, value: {value}}}], "
        f"otherwise: {value}}}}}\n"
        "clauses: {A: {require: p95(latency) <= table(t), level: L1}}\n"
    )
    (table,) = program.tables
    assert (table.dimension, table.otherwise) == ("s", seconds)
    assert table.rows[0].value == seconds


def test_table_must_be_the_right_operand_in_both_forms() -> None:
    forms = [
        "require: p99(kl) <= table(t)",
        "require: table(t) >= p99(kl)",
        "metric: p99_kl, threshold: table(t)",
        "metric: p99_kl, threshold: ' table ( t ) '",
    ]
    digests = {
        digest(compiled(BY_LENGTH + f"clauses: {{A: {{{form}, level: L2}}}}\n")) for form in forms
    }
    assert len(digests) == 1
    (clause,) = compiled(BY_LENGTH + f"clauses: {{A: {{{forms[1]}, level: L2}}}}\n").clauses
    assert isinstance(clause.require, Compare)
    assert clause.require.right == TableValue("t", "nat")


def test_each_value_is_checked_against_the_metric() -> None:
    table = "tables: {t: {unit: ratio, rows: [{where: length > 9, value: 2}], otherwise: 0.1}}\n"
    text = table + "clauses: {A: {require: max(tv) <= table(t), level: L2}}\n"
    assert [d.code.id for d in findings(text)] == ["KC404"]


# --- meaning -------------------------------------------------------------------------------------


def test_clause_expands_bucket_by_bucket() -> None:
    program = compiled(BY_LENGTH + USE)
    whole = expand_tables(program)
    assert whole.tables == ()
    assert [c.id for c in whole.clauses] == ["A", "A"]
    first, second = whole.clauses
    # No request of `long` is short, so there is no obligation for it.
    assert first.slices == ("all[t: length <= 128]", "chat[t: length <= 128]")
    assert second.slices == ("all[t: otherwise]", "long[t: otherwise]", "chat[t: otherwise]")
    for clause, value in ((first, Fraction(1, 100)), (second, Fraction(1, 20))):
        assert isinstance(clause.require, Compare)
        assert clause.require.right == Number(value, "nat")
    short = FieldTest("length", "<=", Fraction(128))
    chat = FieldTest("category", "==", "chat")
    assert whole.slice("all[t: length <= 128]").where == short
    assert whole.slice("chat[t: length <= 128]").where == AllOf((chat, short))
    assert whole.slice("chat[t: otherwise]").where == AllOf((chat, NoneOf(short)))
    assert expand_tables(whole) is whole
    assert {s.name for s in program.slices} <= {s.name for s in whole.slices}


def test_first_matching_row_applies() -> None:
    program = compiled(
        "tables: {t: {unit: nats, rows: [{where: 'category == \"chat\"', value: 1}, "
        "{where: length > 9, value: 2}], otherwise: 3}}\n" + USE
    )
    first, second, third = buckets(program.tables[0])
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"category": "chat", "length": Fraction(10)}, first),
        ({"category": "chat", "length": Fraction(9)}, first),
        ({"category": "code", "length": Fraction(10)}, second),
        ({"category": "code", "length": Fraction(9)}, third),
    ]
    for case, expected in cases:
        assert [b for b in (first, second, third) if holds(b.where, case)] == [expected]


def test_requests_without_a_row_are_a_gap() -> None:
    rows = "rows: [{where: length <= 128, value: 0.01}, {where: length >= 129, value: 1}]"
    text = BY_LENGTH.replace("rows: [{where: length <= 128, value: 0.01}], otherwise: 0.05", rows)
    program = compiled(text + USE)
    found = {gap.whole: gap for gap in gaps(program)}
    assert set(found) == {"all", "long", "chat"}
    assert holds(found["all"].slice.where, {"length": Fraction(257, 2)})
    assert not holds(found["all"].slice.where, {"length": Fraction(128)})
    assert found["all"].spoils == ("all[t: length <= 128]", "all[t: length >= 129]")
    assert gaps(compiled(BY_LENGTH + USE)) == ()


def test_unsatisfiable_slice_keeps_every_bucket() -> None:
    """Otherwise a clause about it would have no obligation, and hold."""
    program = compiled(
        BY_LENGTH + "clauses: {A: {require: p99(kl) <= table(t), slices: [all], level: L2}}\n"
    )
    empty = AllOf((FieldTest("length", ">", Fraction(9)), FieldTest("length", "<", Fraction(9))))
    nothing = replace(program, slices=(replace(program.slice("all"), where=empty),))
    assert len(expand_tables(nothing).clauses) == 2


def test_observed_drift_takes_a_table_and_proofs_do_not() -> None:
    table = BY_LENGTH.replace("nats", "1")
    seen = "forall y in points(chat): norm_2(measured_drift(attn_0, y)) <= table(t)"
    program = compiled(table + f"clauses: {{A: {{require: '{seen}', level: L2}}}}\n")
    assert classify(program.clauses[0]).fragment is Fragment.STATISTICAL
    regions = [
        c.require.region.slice
        for c in expand_tables(program).clauses
        if isinstance(c.require, Quantified)
    ]
    assert regions == ["chat[t: length <= 128]", "chat[t: otherwise]"]
    text = table + f"clauses: {{A: {{require: '{seen.replace('measured_', '')}', level: L2}}}}\n"
    found = [d for d in findings(text) if d.code.id == "KC401"]
    assert [marked(text, d) for d in found] == ["table(t)"]


# --- which requests there can be -----------------------------------------------------------------


def test_example_requests_are_found_if_any_exist() -> None:
    above, below = FieldTest("n", ">", Fraction(1)), FieldTest("n", "<", Fraction(2))
    between = find_case(AllOf((above, below)))
    assert between is not None
    assert Fraction(1) < Fraction(between["n"]) < Fraction(2)
    assert find_case(AllOf((above, below)), ("n",)) is None
    assert find_case(AllOf((above, NoneOf(above)))) is None
    assert find_case(AnyOf(())) is None
    assert find_case(AllOf(())) == {}
    other = find_case(AllOf((FieldTest("s", "!=", "other"), FieldTest("s", "!=", "x"))))
    assert other is not None
    assert other["s"] not in {"other", "x"}


def test_undecided_totality_is_reported() -> None:
    for value in ("x", True):
        with pytest.raises(Undecided):
            find_case(FieldTest("a", "<", value))
    with pytest.raises(Undecided):
        find_case(AnyOf((FieldTest("a", "==", "x"), FieldTest("a", "==", Fraction(1)))))
    with pytest.raises(Undecided):
        find_case(AllOf(tuple(FieldTest(f"f{i}", "==", True) for i in range(20))))
