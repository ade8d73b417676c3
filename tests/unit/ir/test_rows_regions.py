"""Regions of rows in stored programs, in certificates and in the solver's theory."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from kcdsl.check.compile import compile_source
from kcdsl.check.stored import from_json
from kcdsl.diagnostics import Refusal, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest, to_json
from kcdsl.ir.predicates import region_inside
from kcdsl.ir.printer import region_text
from kcdsl.ir.terms import Program, Quantified, Region, RegionKind

HEAD = """kcdsl: 1
contract: c
version: 1
model: {checkpoint: m, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
slices: {all: {}, long: {where: length > 128}}
"""


def program(region: str) -> Program:
    """Compile a contract with one clause about a region."""
    clause = f"clauses: {{A: {{require: 'forall x in {region}: no_flip(head, x)', level: L2}}}}"
    found = compile_source(SourceFile("x", HEAD + clause), Sink())
    assert found is not None
    return found


def region_of(found: Program) -> Region:
    """Return the region of the only clause."""
    formula = found.clauses[0].require
    assert isinstance(formula, Quantified)
    return formula.region


@pytest.mark.parametrize("region", ["rows(all, 512)", "rows(long, 1, 5%)", "rows(all, 1048576)"])
def test_program_survives_a_round_trip(region: str, follows: Any) -> None:
    before = program(region)
    document = json.loads(json.dumps(to_json(before)))
    follows(document)
    assert from_json(document) == before


def test_longest_sequence_is_in_the_digest() -> None:
    texts = (
        "rows(all, 512)",
        "rows(all, 513)",
        "rows(all, 512, 1%)",
        "hull(all)",
        "rows(long, 512)",
    )
    assert len({digest(program(text)) for text in texts}) == len(texts)
    assert digest(program("rows(all, 512)")) == digest(program("rows(all, 512, 0)"))


def test_format_of_other_regions_is_unchanged() -> None:
    stored = to_json(program("hull(all, 5%)"))["clauses"][0]["require"]["region"]
    assert stored == {"kind": "hull", "slice": "all", "radius": "1/20"}


@pytest.mark.parametrize(
    ("region", "change"),
    [
        ("rows(all, 512)", {"longest": None}),
        ("rows(all, 512)", {"longest": 0}),
        ("rows(all, 512)", {"longest": True}),
        ("rows(all, 512)", {"longest": "512"}),
        ("rows(all, 512)", {"longest": 2**20 + 1}),
        ("rows(all, 512)", {"kind": "hull"}),
        ("hull(all)", {"kind": "rows"}),
        ("hull(all)", {"longest": 4}),
    ],
)
def test_damaged_regions_are_refused(region: str, change: dict[str, Any]) -> None:
    document = to_json(program(region))
    document.pop("digest", None)
    assert from_json(json.loads(json.dumps(document))) == program(region)
    document["clauses"][0]["require"]["region"].update(change)
    with pytest.raises(Refusal) as refusal:
        from_json(json.loads(json.dumps(document)))
    assert refusal.value.diagnostics[0].code.id == "KC607"


@pytest.mark.parametrize(
    ("region", "text"),
    [("rows(all, 512)", "rows(all, 512)"), ("rows(long, 64, 5%)", "rows(long, 64, 0.05)")],
)
def test_certificates_name_the_longest_sequence(region: str, text: str) -> None:
    assert region_text(region_of(program(region))) == text


def test_inclusion_of_regions() -> None:
    def inside(inner: str, outer: str) -> bool:
        return region_inside(region_of(program(inner)), region_of(program(outer)), same)

    def same(inner: str, outer: str) -> bool:
        return inner == outer or outer == "all"

    assert inside("rows(all, 64)", "rows(all, 64)")
    assert inside("rows(all, 64)", "rows(all, 65)")
    assert inside("rows(long, 64)", "rows(all, 64, 1%)")
    assert not inside("rows(all, 65)", "rows(all, 64)")
    assert not inside("rows(all, 64, 1%)", "rows(all, 64)")
    assert not inside("rows(all, 64)", "rows(long, 64)")
    # a request may be longer than the longest sequence
    assert not inside("points(all)", "rows(all, 64)")
    assert not inside("hull(all)", "rows(all, 64)")
    assert not inside("rows(all, 64)", "hull(all)")
    assert not inside("rows(all, 64)", "points(all)")
    assert Region(RegionKind.ROWS, "all", Fraction(0), longest=3).longest == 3
