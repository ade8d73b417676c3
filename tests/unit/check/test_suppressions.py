"""Comments that accept findings: warnings and notes with a reason, never errors, never in vain."""

from __future__ import annotations

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.fixing import fix
from kcdsl.diagnostics.model import Sink
from kcdsl.source.text import SourceFile

HEAD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
clauses:
"""
TRACE = '  O: {require: "has(trace, [rng_sed])", level: L3}'


def checked(clauses: str) -> tuple[list[str], Analysis]:
    sink = Sink()
    analysis = analyse(SourceFile("c", HEAD + clauses + "\n"), sink)
    return [str(d.code) for d in sink], analysis


def test_the_finding_is_there_without_a_comment() -> None:
    assert checked(TRACE)[0] == ["KC208"]


def test_behind_the_line_and_above_it() -> None:
    for clauses in (
        f"{TRACE}  # kcdsl: ignore[KC208] our own field",
        f"  # kcdsl: ignore[KC208] our own field\n\n  # more\n{TRACE}",
    ):
        codes, analysis = checked(clauses)
        assert codes == []
        assert [(str(s.diagnostic.code), s.reason) for s in analysis.suppressed] == [
            ("KC208", "our own field")
        ]
        assert analysis.program is not None


def test_a_comment_without_a_reason_accepts_nothing() -> None:
    assert checked(f"{TRACE}  # kcdsl: ignore[KC208]")[0] == ["KC208", "KC904"]
    assert checked(f"{TRACE}  # kcdsl: ignore because")[0] == ["KC208", "KC904"]
    assert checked(f"{TRACE}  # kcdsl: ignore[KC987] because")[0] == ["KC208", "KC904"]


def test_an_unused_comment_is_found_and_its_fix_removes_it() -> None:
    clauses = "  A: {require: p99(kl) <= 1, level: L2}  # kcdsl: ignore[KC208] old\n"
    assert checked(clauses)[0] == ["KC900"]
    result = fix(SourceFile("c", HEAD + clauses), None)
    assert result.source.text == HEAD + "  A: {require: p99(kl) <= 1, level: L2}\n"
    alone = "  # kcdsl: ignore[KC208] old\n  A: {require: p99(kl) <= 1, level: L2}\n"
    assert fix(SourceFile("c", HEAD + alone), None).source.text == HEAD + alone.split("\n", 1)[1]


def test_one_unused_code_of_two() -> None:
    codes, analysis = checked(f"{TRACE}  # kcdsl: ignore[KC208, KC507] ours")
    assert codes == ["KC900"]
    assert len(analysis.suppressed) == 1


def test_errors_cannot_be_accepted() -> None:
    codes, analysis = checked("  A: {require: p99(kx) <= 1, level: L2}  # kcdsl: ignore[KC203] no")
    assert sorted(codes) == ["KC203", "KC900"]
    assert analysis.program is None
    assert analysis.suppressed == ()


def test_text_that_looks_like_a_comment_is_none() -> None:
    clauses = (
        '  A: {require: p99(kl) <= 1, level: L2}\n  "B # kcdsl: ignore[KC208] x": {level: L1}\n'
    )
    assert "KC900" not in checked(clauses)[0]
    assert "KC904" not in checked(clauses)[0]
