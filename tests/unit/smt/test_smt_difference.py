"""Differences of contracts that involve units, budgets and whole contracts."""

from __future__ import annotations

from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.ir.kernels import KernelRef, LogProbabilities, Recording, Service
from kcdsl.ir.terms import Arith, Budget, Clause, HasFields, Level
from kcdsl.verdict.studies.difference import (
    ClauseDifference,
    ClauseStatus,
    Extent,
    Relation,
    together,
)
from kcdsl_backends.smt import BACKEND

Build = Any


def upper(build: Build, id: str, statistic: Any, limit: str, **more: Any) -> Clause:
    clause: Clause = build.clause(id, build.compare(statistic, "<=", limit))
    return replace(clause, **more)


def budget(rate: str, unit: str = "requests") -> Budget:
    return Budget(Fraction(rate), unit)


def compare(build: Build, old: list[Clause], new: list[Clause]) -> dict[str, ClauseDifference]:
    found = BACKEND.difference(build.program(*old), build.program(*new))
    return {item.id: item for item in found.clauses}


def relation(build: Build, old: list[Clause], new: list[Clause]) -> Relation:
    return BACKEND.difference(build.program(*old), build.program(*new)).relation


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("0.01", "0.05", Relation.WEAKER),
        ("0.05", "0.01", Relation.STRICTER),
        ("0", None, Relation.EQUAL),
        (None, "0", Relation.EQUAL),
        (None, "0.01", Relation.WEAKER),
        ("0.01", None, Relation.STRICTER),
    ],
)
def test_differences_of_budgets(
    build: Build, old: str | None, new: str | None, expected: Relation
) -> None:
    maximum = build.stat("max", "kl")
    first, second = (
        upper(build, "A", maximum, "1", budget=None if rate is None else budget(rate))
        for rate in (old, new)
    )
    assert relation(build, [first], [second]) is expected


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("kl", Relation.INCOMPARABLE),
        ("greedy_divergence_step", Relation.EQUAL),
        ("rbo10", Relation.EQUAL),
        ("logit_linf", Relation.EQUAL),
        ("hidden_l2", Relation.EQUAL),
    ],
)
def test_temperature_alters_clauses_about_distributions_alone(
    build: Build, metric: str, expected: Relation
) -> None:
    old = build.program(build.clause("A", build.compare(build.stat("mean", metric), ">=", "1")))
    new = replace(old, constants=replace(old.constants, temperature=Fraction(2)))
    (found,) = BACKEND.difference(old, new).clauses
    assert found.relation is expected


@pytest.mark.parametrize("op", ["<=", "<"])
def test_percentile_counts_requests_in_a_difference(build: Build, op: str) -> None:
    tail = build.clause("A", build.compare(build.p(99, "kl"), op, "1"))
    counted = build.clause("A", build.compare(build.stat("max", "kl"), op, "1"))
    for rate, expected in (
        ("0.01", Relation.EQUAL),
        ("0.005", Relation.STRICTER),
        ("0.02", Relation.WEAKER),
    ):
        new = replace(counted, budget=budget(rate))
        assert relation(build, [tail], [new]) is expected
    windows = replace(counted, budget=budget("0.01", "windows"))
    assert relation(build, [tail], [windows]) is Relation.INCOMPARABLE


def test_lower_bound_of_a_percentile_is_not_a_request_count(build: Build) -> None:
    tail = build.clause("A", build.compare(build.p(99, "kl"), ">=", "1"))
    counted = build.clause("A", build.compare(build.stat("max", "kl"), ">=", "1"))
    new = replace(counted, budget=budget("0.01"))
    assert relation(build, [tail], [new]) is Relation.INCOMPARABLE


def test_witness_share_equals_the_new_budget(build: Build) -> None:
    maximum = build.stat("max", "kl")
    old = upper(build, "A", maximum, "1", budget=budget("0.01"))
    new = upper(build, "A", maximum, "1", budget=budget("0.05"))
    cap = upper(build, "B", maximum, "1.5", budget=budget("0"))
    witness = compare(build, [old], [new, cap])["A"].witness
    assert witness is not None
    assert witness.of == "5% of the requests of the slice all"
    assert witness.extent is Extent.CONTRACT
    (value,) = witness.values
    assert 1 < Fraction(value.exact) <= Fraction(3, 2)


def test_summed_budgets_give_no_witness(build: Build) -> None:
    low, high = build.stat("min", "kl"), build.stat("max", "kl")
    width = build.clause("C", build.compare(Arith("-", high, low), "<=", "1"))
    a = replace(build.clause("A", build.compare(low, ">=", "1")), budget=budget("0.03"))
    b = replace(build.clause("B", build.compare(high, "<=", "2")), budget=budget("0.03"))
    c = replace(width, budget=budget("0.05"))
    found = compare(build, [a, b, c], [a, b])["C"]
    assert (found.relation, found.witness) == (Relation.WEAKER, None)
    affordable = replace(width, budget=budget("0.06"))
    assert compare(build, [a, b, affordable], [a, b])["C"].implied_by == ("A", "B")


def test_slice_level_clauses_have_no_request_witness(build: Build) -> None:
    """Values of requests are no witness for a clause about the whole slice, and vice versa."""
    old = upper(build, "A", build.stat("mean", "kl"), "1")
    new = replace(old, budget=budget("0.5", "windows"))
    found = compare(build, [old], [new])["A"]
    assert (found.relation, found.witness) == (Relation.INCOMPARABLE, None)


def test_witness_names_the_evaluated_clauses(build: Build) -> None:
    old = upper(build, "A", build.stat("mean", "kl"), "1")
    other = upper(build, "B", build.stat("max", "kl"), "2", budget=budget("0.5", "windows"))
    apart = upper(build, "C", build.stat("max", "hidden_l2"), "2", budget=budget("0.5", "windows"))
    for kept, extent in ((other, Extent.UNIT), (apart, Extent.CONTRACT)):
        witness = compare(build, [old, kept], [kept])["A"].witness
        assert witness is not None
        assert (witness.extent, witness.unit) == (extent, "slices")


def test_removing_an_implied_clause_changes_nothing(build: Build) -> None:
    strict = upper(build, "A", build.stat("max", "kl"), "1")
    loose = upper(build, "B", build.p(99, "kl"), "2")
    found = compare(build, [strict, loose], [strict])["B"]
    assert (found.status, found.relation, found.implied_by) == (
        ClauseStatus.REMOVED, Relation.EQUAL, ("A",),
    )  # fmt: skip
    assert relation(build, [strict, loose], [strict]) is Relation.EQUAL


def test_clause_of_a_lower_level_is_no_substitute(build: Build) -> None:
    strict = upper(build, "A", build.stat("max", "kl"), "1", level=Level.L1)
    loose = upper(build, "B", build.p(99, "kl"), "2")
    found = compare(build, [strict, loose], [strict])["B"]
    assert (found.relation, found.implied_by) == (Relation.WEAKER, ())
    assert found.because == ("A still demands it, with other consequences",)


def test_slice_without_data_is_not_one_of_the_default_data(build: Build) -> None:
    old = build.program(upper(build, "A", build.p(99, "kl"), "1"))
    new = replace(old, data=None)
    for first, second in ((old, new), (new, old)):
        assert BACKEND.difference(first, second).relation is Relation.INCOMPARABLE


def test_optional_record_fields(build: Build) -> None:
    old = build.clause("A", HasFields(("rng_seed", "build_fingerprint")))
    new = build.clause("A", HasFields(("rng_seed",)))
    found = compare(build, [old], [new])["A"]
    assert found.relation is Relation.WEAKER
    assert found.witness is not None
    assert found.witness.lacking == ("build_fingerprint",)


_LOGS = LogProbabilities("raw")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"run": "torch.eager"}, "run"),
        ({"checkpoint": "quantised"}, "checkpoint"),
        ({"folder": "other"}, "folder"),
        ({"service": Service("http://localhost:1", _LOGS)}, "service.url"),
        ({"service": Service("http://localhost:1", _LOGS, concurrency=2)}, "service.concurrency"),
        ({"recording": Recording("verl", (("mask", "m"),), _LOGS)}, "recording.columns.mask"),
        ({"recording": Recording(logprobs=_LOGS)}, "recording.logprobs.values"),
        ({"numerics": (("compute", "bfloat16"),)}, "compute"),
    ],
)
def test_every_part_of_a_kernel_is_compared(
    build: Build, changes: dict[str, Any], named: str
) -> None:
    old = build.program(upper(build, "A", build.stat("max", "kl"), "1"))
    new = replace(old, infer=replace(old.infer, **changes))
    found = BACKEND.difference(old, new)
    assert found.relation is Relation.INCOMPARABLE
    assert f"kernel infer {named}" in {change.name for change in found.changes}
    assert BACKEND.difference(new, new).relation is Relation.EQUAL


def test_every_field_of_a_kernel_is_compared() -> None:
    """A new field must be compared too: add it to the cases above."""
    known = {"run", "numerics", "span", "folder", "service", "recording", "checkpoint"}
    assert {each.name for each in fields(KernelRef)} == known


def test_blocks_of_an_onnx_file_are_compared(build: Build) -> None:
    old = build.program(upper(build, "A", build.stat("max", "kl"), "1"))
    new = replace(old, model=replace(old.model, blocks=(("attn_0", "x", "y"),)))
    found = BACKEND.difference(old, new)
    assert found.relation is Relation.INCOMPARABLE
    assert [change.name for change in found.changes] == ["model block attn_0"]


def test_relations_of_whole_contracts() -> None:
    equal, stricter, weaker = Relation.EQUAL, Relation.STRICTER, Relation.WEAKER
    undecided, incomparable = Relation.UNDECIDED, Relation.INCOMPARABLE
    for parts, whole in (
        ((), equal),
        ((equal, stricter), stricter),
        ((equal, weaker), weaker),
        ((weaker, stricter), incomparable),
        ((undecided, stricter), undecided),
        ((undecided, equal), undecided),
        ((undecided, weaker), incomparable),
        ((incomparable, stricter), incomparable),
    ):
        assert together(parts) is whole
