"""Static scales in contracts: numbers, lists and mappings by linear, stored exactly."""

from __future__ import annotations

import pytest

from kcdsl.check.compile import analyse
from kcdsl.check.stored import load_bytes
from kcdsl.diagnostics.codes import NUMERICS, WRONG_KIND
from kcdsl.diagnostics.model import Diagnostic, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest, document
from kcdsl.ir.terms import Program
from kcdsl.model.presets import resolve

CONTRACT = """\
kcdsl: 1
contract: example
version: 1.0.0
model: {{checkpoint: model.safetensors, architecture: llama}}
data: requests.jsonl
kernels:
  train: {{run: torch.eager}}
  infer:
    run: torch.scaled_mm
    numerics:
      weights: {{format: fp8_e4m3, scale: per_tensor}}
      activations:
        format: {format}
        scale: static
        {scales}
slices: {{all: {{}}}}
clauses: {{A: {{require: max(kl) <= 1, level: L1}}}}
"""


def analysed(scales: str, format: str = "fp8_e4m3") -> tuple[Program | None, list[Diagnostic], str]:
    text = CONTRACT.format(scales=scales, format=format)
    sink = Sink()
    return analyse(SourceFile("contract.yaml", text), sink).program, list(sink), text


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ("input_scale: 0.0235", {"*": ["0x1.8106240000000p-6"]}),
        ("input_scale: 3", {"*": ["0x1.8000000000000p+1"]}),
        ("input_scale: 1.5e-3", {"*": ["0x1.89374c0000000p-10"]}),
        ("input_scale: [0.5, 0.25]", {"*": ["0x1.0000000000000p-1", "0x1.0000000000000p-2"]}),
        (
            'input_scale: {"*": 1, model.layers.0.mlp.up_proj: [2, 4], a.b: 0.5}',
            {
                "*": ["0x1.0000000000000p+0"],
                "a.b": ["0x1.0000000000000p-1"],
                "model.layers.0.mlp.up_proj": ["0x1.0000000000000p+1", "0x1.0000000000000p+2"],
            },
        ),
    ],
)
def test_scales_are_compiled_into_the_numerics(scales: str, expected: dict[str, list[str]]) -> None:
    program, found, _ = analysed(scales)
    assert found == []
    assert program is not None
    again = load_bytes(document(program))
    for each in (program, again):
        assert resolve(each.infer).to_json()["activations"]["input_scale"] == expected
    assert digest(again) == digest(program)


@pytest.mark.parametrize(
    ("scales", "code", "at"),
    [
        ("input_scale: 0", NUMERICS, "0"),
        ("input_scale: much", NUMERICS, "much"),
        ("input_scale: {model.a: 1e99}", NUMERICS, "1e99"),
        ("input_scale: true", WRONG_KIND, "true"),
        ("input_scale:", WRONG_KIND, None),
        ("input_scale: [[1]]", WRONG_KIND, "[[1]]"),
        ("input_scale: {a: [1, [2]]}", WRONG_KIND, "[1, [2]]"),
        ("input_scale: 1\n        input_zero_point: 3", NUMERICS, None),
        ("input_zero_point: 3", NUMERICS, None),
    ],
)
def test_errors_are_reported_at_their_position(scales: str, code: object, at: str | None) -> None:
    _, found, text = analysed(scales)
    assert found
    (diagnostic,) = found
    assert diagnostic.code is code
    assert diagnostic.span is not None
    if at is not None:
        assert text[diagnostic.span.start : diagnostic.span.end] == at
