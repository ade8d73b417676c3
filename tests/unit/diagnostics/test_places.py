"""Source positions of refusals raised while a compiled contract runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl.check.compile import load_program
from kcdsl.diagnostics import Diagnostic, Refusal, refuse
from kcdsl.diagnostics.codes import KERNEL_FAILED, UNKNOWN_BLOCK
from kcdsl.diagnostics.model import at
from kcdsl.diagnostics.spans import SourceFile, Span
from kcdsl.route.goals import goals
from kcdsl.source.files import in_contract
from tests.support.commands import run_here

CONTRACT = """kcdsl: 1
contract: example
version: 1.0.0
model:
  checkpoint: package:models/model.safetensors
  architecture: llama
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: package:models/requests.jsonl
slices: {all: {}}
clauses:
  N-1: {require: "forall x in points(all): 0.1 >= norm_inf(drift(attn_0, x))", level: L2}
  N-2: {require: "forall x in points(all): norm_2(drift(mlp_0, x)) <= 0.1", level: L2}
  N-3: {require: "forall x in points(all): no_flip(head, x)", level: L2}
"""
LIBRARY = """kcdsl: 1
library: fleet
version: 1.0.0
kernels:
  # far from the beginning, so that no place here is one of the contract
  serving: {run: torch.sdpa, numerics: {preset: torch-sdpa-flash}}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return the path of a contract."""
    file = tmp_path / "contract.yaml"
    file.write_text(CONTRACT, encoding="utf-8")
    return file


def placed(path: Path, span: Span, refusal: Refusal) -> tuple[Diagnostic, ...]:
    """Return the diagnostic of a refusal raised inside both contexts."""
    with pytest.raises(Refusal) as caught, in_contract(path), at(span):
        raise refusal
    return caught.value.diagnostics


def test_refusal_without_a_position_gets_that_of_the_contract(path: Path) -> None:
    (found,) = placed(path, Span(0, 5), refuse(UNKNOWN_BLOCK, "no block"))
    assert found.source == SourceFile(str(path), CONTRACT)
    assert found.span == Span(0, 5)


def test_innermost_position_applies(path: Path) -> None:
    own = SourceFile("requests.jsonl", "{}")
    (found,) = placed(path, Span(0, 5), refuse(UNKNOWN_BLOCK, "x", source=own, span=Span(1, 2)))
    assert (found.source, found.span) == (own, Span(1, 2))
    (found,) = placed(path, Span(0, 5), refuse(UNKNOWN_BLOCK, "x", span=Span(7, 9)))
    assert found.span == Span(7, 9)
    (found,) = placed(path, Span(0, 5), refuse(UNKNOWN_BLOCK, "x", source=own))
    assert (found.source, found.span) == (own, None)


@pytest.mark.parametrize("span", [Span(0, 0), Span(3, 10_000)])
def test_stored_program_has_no_positions(path: Path, span: Span) -> None:
    (found,) = placed(path, span, refuse(KERNEL_FAILED, "x"))
    assert (found.source, found.span) == (None, None)


def test_refusal_is_reported_if_the_contract_file_is_gone(tmp_path: Path) -> None:
    (found,) = placed(tmp_path / "gone.yaml", Span(0, 5), refuse(KERNEL_FAILED, "x"))
    assert (found.code, found.source, found.span) == (KERNEL_FAILED, None, None)


def test_compiled_contract_keeps_spans(path: Path) -> None:
    program = load_program(path)

    def text(span: Span) -> str:
        return CONTRACT[span.start : span.end]

    assert text(program.model.span).startswith("checkpoint:")
    assert text(program.train.span) == "{run: torch.eager}"
    assert text(program.infer.span) == "{run: torch.sdpa}"
    drifts = [text(goal.span) for goal in goals(program)]
    assert drifts == ["drift(attn_0, x)", "drift(mlp_0, x)", "no_flip(head, x)"]


def test_imported_kernel_is_positioned_at_its_import(path: Path) -> None:
    (path.parent / "fleet.kc.yaml").write_text(LIBRARY, encoding="utf-8")
    imported = CONTRACT.replace("infer: {run: torch.sdpa}}", "infer: {run: torch.eager}}").replace(
        "kernels: {train: {run: torch.eager}, infer: {run: torch.eager}}",
        "imports:\n  - file: fleet.kc.yaml\n    kernels: {infer: serving}\n"
        "kernels: {train: {run: torch.eager}}",
    )
    path.write_text(imported, encoding="utf-8")
    assert run_here("lint", "--fix", path).code == 0
    program, text = load_program(path), path.read_text(encoding="utf-8")
    assert text[program.infer.span.start : program.infer.span.end] == "serving"
