"""The blame of a clause exists exactly where it does not fit a fragment."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl.diagnostics.model import Severity, Sink
from kcdsl.ir.terms import Clause
from kcdsl.route.catalogue import Fragment, catalogue
from kcdsl.route.fragments import classify, why_uncovered
from tests.support.compiling import compile_contract


def clauses(repository: Path) -> list[Clause]:
    found: list[Clause] = []
    for folder in ("grammar/corpus/accepted", "examples"):
        for path in sorted((repository / folder).rglob("*.yaml")):
            program, sink = compile_contract(path)
            assert isinstance(sink, Sink)
            found += program.clauses if program is not None else ()
    assert len(found) > 30
    return found


def test_blame_exists_exactly_if_the_fragment_does_not_fit(repository: Path) -> None:
    for clause in clauses(repository):
        for fragment in Fragment:
            blame = why_uncovered(clause, {fragment})
            assert (blame is None) == (classify(clause).fragment is fragment), (clause.id, fragment)


@pytest.mark.full
def test_blame_position_is_inside_the_requirement(repository: Path) -> None:
    for clause in clauses(repository):
        for spec in catalogue():
            blame = why_uncovered(clause, spec.fragments)
            assert (blame is None) == (classify(clause).fragment in spec.fragments)
            if blame is not None:
                assert blame.reason
                assert blame.span.start < blame.span.end


@pytest.mark.parametrize(
    ("clause", "blamed"),
    [
        (
            'require: "forall x in points(all): span(drift(attn_0, x)) <= 1", evidence: proof',
            "drift(attn_0, x)",
        ),
        (
            'require: "forall x in points(all): no_flip(model, x)", evidence: proof',
            "no_flip(model, x)",
        ),
    ],
)
def test_nearest_fragment_concerns_the_same_quantities(
    tmp_path: Path, clause: str, blamed: str
) -> None:
    path = tmp_path / "c.kc.yaml"
    path.write_text(
        "kcdsl: 1\ncontract: c\nversion: 1.0.0\n"
        "model: {checkpoint: m, architecture: llama}\n"
        "kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}\n"
        f"slices: {{all: {{}}}}\nclauses:\n  A: {{{clause}, level: L1}}\n",
        encoding="utf-8",
    )
    program, _ = compile_contract(path)
    assert program is not None
    measuring = {Fragment.STATISTICAL, Fragment.TRACE_FIELDS}
    blame = why_uncovered(program.clauses[0], measuring)
    assert blame is not None
    assert path.read_text("utf-8")[blame.span.start : blame.span.end] == blamed
    assert "a measurement sees a few" in blame.reason


_ON_A = "(forall x in points(a): norm_inf(measured_drift(attn_0, x)) <= 1)"
_ON_B = "(forall y in points(b): norm_inf(measured_drift(mlp_0, y)) <= 1)"


@pytest.mark.parametrize(
    ("requirement", "more", "outside"),
    [
        (f"{_ON_A} or {_ON_B}", "", True),
        (f"not ({_ON_A} and {_ON_B})", "", True),
        (f"{_ON_A} implies {_ON_B}", "", True),
        (f"{_ON_A} or mean(kl) <= 1", "", True),
        (f"{_ON_A} or mean(kl) <= 1", "slices: [b], ", True),
        (f"{_ON_A} and mean(kl) <= 1", "budget: 5% of requests, ", True),
        (f"{_ON_A} or mean(kl) <= 1", "slices: [a], ", False),
        (f"{_ON_A} and {_ON_B}", "", False),
        (f"{_ON_A} and mean(kl) <= 1", "slices: [b], ", False),
        (f"not {_ON_A}", "", False),
    ],
)
def test_disjunction_across_slices_has_no_backend(
    tmp_path: Path, requirement: str, more: str, outside: bool
) -> None:
    """Slices are decided one by one: each alternative might hold only on the other slice."""
    path = tmp_path / "c.kc.yaml"
    path.write_text(
        "kcdsl: 1\ncontract: c\nversion: 1.0.0\ndata: rows.jsonl\n"
        "model: {checkpoint: m, architecture: llama}\n"
        "kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}\n"
        "slices: {all: {}, a: {where: length > 3}, b: {where: length <= 3}}\n"
        f'clauses:\n  A: {{require: "{requirement}", {more}override: direction, level: L1}}\n',
        encoding="utf-8",
    )
    program, sink = compile_contract(path)
    assert (program is None) is outside
    errors = [found.code.id for found in sink.found if found.severity is Severity.ERROR]
    assert errors == (["KC401"] if outside else [])
