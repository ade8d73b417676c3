"""Routing: the least backend, a reason for it, and a reason against every other."""

from __future__ import annotations

from kcdsl.check.compile import compile_source
from kcdsl.diagnostics import Sink
from kcdsl.ir.terms import Program
from kcdsl.route.catalogue import BackendSpec, Fragment, catalogue
from kcdsl.route.router import Route, route
from kcdsl.source.text import SourceFile

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}, long: {where: length > 128}, other: {data: other.jsonl}}
clauses:
"""
DRIFT = '  D: {require: "forall x in points(all): span(drift(model, x)) <= 1", level: L1}\n'
ATTN = '  D: {require: "forall x in points(all): span(drift(attn_0, x)) <= 1", level: L1}\n'


def spec(
    name: str, *fragments: Fragment, rank: int = 0, needs: tuple[str, ...] = ()
) -> BackendSpec:
    """Describe a backend that is never loaded."""
    return BackendSpec(name, "nowhere:BACKEND", frozenset(fragments), needs, rank=rank)


SMT = spec("smt", Fragment.IMPLIED)
INTERVAL = spec("interval", Fragment.UNIVERSAL_DRIFT, Fragment.UNIVERSAL_FLIP, rank=10)
EMPIRICAL = spec("empirical", Fragment.STATISTICAL, Fragment.TRACE_FIELDS, rank=20)
ALL = (SMT, INTERVAL, EMPIRICAL)


def program(clauses: str) -> Program:
    """Compile clauses that must be right."""
    sink = Sink()
    found = compile_source(SourceFile("x", HEAD + clauses), sink)
    assert found is not None, [d.message for d in sink]
    return found


def routes(clauses: str, *specs: BackendSpec, wanted: str | None = None) -> dict[str, Route]:
    """Return the routes by clause."""
    return {r.clause_id: r for r in route(program(clauses), specs, wanted)}


def test_each_fragment_finds_its_backend() -> None:
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
    assert found["P"].reason == "follows from D by the bound chain"
    assert found["P"].premises == ("D",)


def test_the_least_rank_wins_and_the_other_is_named() -> None:
    second = spec("second", Fragment.STATISTICAL, rank=5)
    found = routes("  K: {require: p99(kl) <= 1, level: L1}\n", EMPIRICAL, second)["K"]
    assert found.backend == "second"
    assert found.why_not == {"empirical": "able too, but second comes first"}


def test_missing_packages_are_a_routing_fact() -> None:
    lacking = spec("empirical", Fragment.STATISTICAL, needs=("no_such_package_here",))
    found = routes("  K: {require: p99(kl) <= 1, level: L1}\n", lacking, INTERVAL)["K"]
    assert found.backend is None
    assert found.reason == "not installed: no_such_package_here"
    assert found.why_not["empirical"] == "needs no_such_package_here, not installed"


def test_nobody() -> None:
    clause = "  K: {require: p99(kl) <= 1, level: L1}\n"
    assert routes(clause)["K"].reason == "no installed backend decides statistical"
    assert routes(clause, *ALL, wanted="nothing")["K"].reason == "no backend is called nothing"
    wrong = routes(clause, *ALL, wanted="interval")["K"]
    assert (wrong.backend, wrong.reason) == (None, "interval does not decide statistical")
    assert routes(clause, *ALL, wanted="empirical")["K"].backend == "empirical"


def test_a_proof_needs_a_drift_clause_on_the_logits() -> None:
    proved = "  P: {require: mean(kl) <= 1, level: L1, evidence: proof}\n"
    for clauses in (proved, ATTN + proved):
        found = routes(clauses, *ALL)["P"]
        assert found.backend is None
        assert found.reason == "no drift clause on the block model could imply it"
    assert routes(DRIFT + proved, *ALL)["P"].backend == "smt"


def test_premises_cover_the_slices_of_the_clause() -> None:
    def premises(slice: str) -> tuple[str, ...]:
        clause = f"  K: {{require: mean(kl) <= 1, level: L1, slices: [{slice}]}}\n"
        return routes(DRIFT + clause, *ALL)["K"].premises

    assert premises("all") == ("D",)
    assert premises("long") == ("D",)
    assert premises("other") == ()


def test_the_catalogue_is_the_default() -> None:
    names = {spec.name for spec in catalogue()}
    (found,) = route(program("  K: {require: p99(kl) <= 1, level: L1}\n"))
    assert {found.backend, *found.why_not} == names
