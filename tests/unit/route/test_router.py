"""Routing: the backend of lowest rank, and a reason for each rejected one."""

from __future__ import annotations

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.predicates import implies
from kcdsl.ir.terms import Clause, Predicate, Program
from kcdsl.route import router as premises
from kcdsl.route.catalogue import BackendSpec, Fragment, catalogue
from kcdsl.route.router import Route, route

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices:
  all: {}
  long: {where: length > 128}
  longer: {where: length > 256}
  other: {data: other.jsonl}
  third: {data: third.jsonl}
clauses:
"""
DRIFT = '  D: {require: "forall x in points(all): span(drift(model, x)) <= 1", level: L1}\n'
MEASURED = "  K{}: {{require: p99(kl) <= 1, level: L1}}\n"
ATTN = '  D: {require: "forall x in points(all): span(drift(attn_0, x)) <= 1", level: L1}\n'


def spec(
    name: str, *fragments: Fragment, rank: int = 0, needs: tuple[str, ...] = ()
) -> BackendSpec:
    """Return the description of a backend that is never loaded."""
    return BackendSpec(name, "nowhere:BACKEND", frozenset(fragments), needs, rank=rank)


SMT = spec("smt", Fragment.IMPLIED)
INTERVAL = spec("interval", Fragment.UNIVERSAL_DRIFT, Fragment.UNIVERSAL_FLIP, rank=10)
EMPIRICAL = spec("empirical", Fragment.STATISTICAL, Fragment.TRACE_FIELDS, rank=20)
ALL = (SMT, INTERVAL, EMPIRICAL)


def program(clauses: str) -> Program:
    """Compile valid clauses."""
    sink = Sink()
    found = compile_source(SourceFile("x", HEAD + clauses), sink)
    assert found is not None, [d.message for d in sink]
    return found


def routes(clauses: str, *specs: BackendSpec, wanted: str | None = None) -> dict[str, Route]:
    """Return the routes by clause."""
    return {r.clause_id: r for r in route(program(clauses), specs, wanted)}


def test_each_fragment_is_routed_to_its_backend() -> None:
    found = routes(
        DRIFT + "  K: {require: p99(kl) <= 1, level: L1}\n"
        "  O: {require: [rng_seed], level: L1}\n"
        "  P: {require: mean(tv) <= 50%, level: L1, evidence: proof}\n",
        *ALL,
    )
    assert {key: r.backend for key, r in found.items()} == {
        "D": "interval",
        "K": "empirical",
        "O": "empirical",
        "P": "smt",
    }
    assert set(found["K"].why_not) == {"smt", "interval"}
    assert "measured kl" in found["K"].why_not["interval"]
    assert found["P"].reason == "may follow from D by the bound chain"
    assert found["P"].premises == ("D",)


def test_lowest_rank_wins_and_the_other_is_named() -> None:
    second = spec("second", Fragment.STATISTICAL, rank=5)
    found = routes("  K: {require: p99(kl) <= 1, level: L1}\n", EMPIRICAL, second)["K"]
    assert found.backend == "second"
    assert found.why_not == {"empirical": "able too, but second comes first"}


def test_missing_packages_are_a_reason() -> None:
    lacking = spec("empirical", Fragment.STATISTICAL, needs=("no_such_package_here",))
    found = routes("  K: {require: p99(kl) <= 1, level: L1}\n", lacking, INTERVAL)["K"]
    assert found.backend is None
    assert found.reason == "not installed: no_such_package_here"
    assert found.why_not["empirical"] == "needs no_such_package_here, not installed"


def test_clause_without_a_backend() -> None:
    clause = "  K: {require: p99(kl) <= 1, level: L1}\n"
    assert routes(clause)["K"].reason == "no installed backend decides statistical"
    assert routes(clause, *ALL, wanted="nothing")["K"].reason == "no backend is called nothing"
    wrong = routes(clause, *ALL, wanted="interval")["K"]
    assert (wrong.backend, wrong.reason) == (None, "interval does not decide statistical")
    assert routes(clause, *ALL, wanted="empirical")["K"].backend == "empirical"


def test_implied_proof_needs_a_drift_clause_on_the_logits() -> None:
    proved = "  P: {require: mean(kl) <= 1, level: L1, evidence: proof}\n"
    for clauses in (proved, ATTN + proved):
        found = routes(clauses, *ALL)["P"]
        assert found.backend is None
        assert found.reason == "no drift clause on the block model could imply it"
    assert routes(DRIFT + proved, *ALL)["P"].backend == "smt"


def test_premises_must_cover_the_slices_of_the_clause() -> None:
    def premises_on(slice: str) -> tuple[str, ...]:
        clause = f"  K: {{require: mean(kl) <= 1, level: L1, slices: [{slice}]}}\n"
        return routes(DRIFT + clause, *ALL)["K"].premises

    assert premises_on("all") == ("D",)
    assert premises_on("long") == ("D",)
    assert premises_on("other") == ()


def test_installed_catalogue_is_the_default() -> None:
    names = {spec.name for spec in catalogue()}
    (found,) = route(program("  K: {require: p99(kl) <= 1, level: L1}\n"))
    assert {found.backend, *found.why_not} == names


def test_each_clause_is_classified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def counted(clause: Clause) -> set[str]:
        looked.append(clause.id)
        return covered(clause)

    covered = premises._covered
    monkeypatch.setattr(premises, "_covered", counted)
    many = program(DRIFT + "".join(MEASURED.format(number) for number in range(60)))
    found = route(many, ALL)
    assert looked == [clause.id for clause in many.clauses]
    assert all(r.premises == ("D",) for r in found if r.clause_id != "D")


def test_each_pair_of_slices_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[object, object]] = []

    def counted(inner: Predicate, outer: Predicate) -> bool | None:
        looked.append((inner, outer))
        return implies(inner, outer)

    monkeypatch.setattr("kcdsl.route.router.implies", counted)
    on_long = "  L{}: {{require: mean(kl) <= 1, level: L1, slices: [longer]}}\n"
    clauses = _drift("D", "long") + "".join(on_long.format(number) for number in range(60))
    found = route(program(clauses), ALL)
    assert [r.premises for r in found] == [(), *[("D",)] * 60]
    assert len(looked) == 1


def _drift(name: str, slice: str, block: str = "model") -> str:
    claim = f"forall x in points({slice}): span(drift({block}, x)) <= 1"
    return f'  {name}: {{require: "{claim}", level: L1}}\n'


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ("[all]", ("ALL",)),
        ("[long]", ("ALL", "LONG")),
        ("[longer]", ("ALL", "LONG")),
        ("[other]", ("OTHER",)),
        ("[all, longer]", ("ALL", "LONG")),
        ("[long, other]", ("ALL", "LONG", "OTHER")),
        ("[third]", ()),
        ("[all, third]", ()),
    ],
)
def test_each_slice_needs_a_premise_that_contains_it(
    slices: str, expected: tuple[str, ...]
) -> None:
    drifts = (
        _drift("ALL", "all")
        + _drift("LONG", "long")
        + _drift("OTHER", "other")
        + _drift("HEAD", "all", "head")
    )
    clause = f"  K: {{require: mean(kl) <= 1, level: L1, slices: {slices}, evidence: proof}}\n"
    found = routes(drifts + clause, *ALL)["K"]
    assert found.premises == expected
    assert found.backend == ("smt" if expected else None)


def test_model_without_logits_has_no_premises() -> None:
    text = HEAD.replace("llama", "bert") + DRIFT
    text += "  P: {require: mean(tv) <= 50%, level: L1, evidence: proof}\n"
    found = compile_source(SourceFile("x", text), Sink())
    assert found is not None
    assert [(r.backend, r.premises) for r in route(found, ALL)] == [("interval", ()), (None, ())]
