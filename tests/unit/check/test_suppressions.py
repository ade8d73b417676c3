"""Suppression comments: warnings and notes with a reason, never errors; unused ones are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl.check.compile import Analysis, analyse, load_contract
from kcdsl.check.fixes import fix
from kcdsl.check.suppressions import accept
from kcdsl.diagnostics import Diagnostic, Refusal, Severity
from kcdsl.diagnostics.codes import CONTRADICTION, DATA_ABSENT, REDUNDANT_CLAUSE
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile, Span

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


def test_finding_is_reported_without_a_comment() -> None:
    assert checked(TRACE)[0] == ["KC208"]


def test_comment_at_the_end_of_the_line_or_above_it() -> None:
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


def test_comment_without_a_reason_suppresses_nothing() -> None:
    assert checked(f"{TRACE}  # kcdsl: ignore[KC208]")[0] == ["KC208", "KC904"]
    assert checked(f"{TRACE}  # kcdsl: ignore because")[0] == ["KC208", "KC904"]
    assert checked(f"{TRACE}  # kcdsl: ignore[KC987] because")[0] == ["KC208", "KC904"]


def test_unused_comment_is_reported_and_its_fix_removes_it() -> None:
    clauses = "  A: {require: p99(kl) <= 1, level: L2}  # kcdsl: ignore[KC208] old\n"
    assert checked(clauses)[0] == ["KC900"]
    result = fix(SourceFile("c", HEAD + clauses), None)
    assert result.source.text == HEAD + "  A: {require: p99(kl) <= 1, level: L2}\n"
    alone = "  # kcdsl: ignore[KC208] old\n  A: {require: p99(kl) <= 1, level: L2}\n"
    assert fix(SourceFile("c", HEAD + alone), None).source.text == HEAD + alone.split("\n", 1)[1]


def test_one_of_two_codes_is_unused() -> None:
    codes, analysis = checked(f"{TRACE}  # kcdsl: ignore[KC208, KC507] ours")
    assert codes == ["KC900"]
    assert len(analysis.suppressed) == 1


def test_errors_cannot_be_suppressed() -> None:
    codes, analysis = checked("  A: {require: p99(kx) <= 1, level: L2}  # kcdsl: ignore[KC203] no")
    assert sorted(codes) == ["KC203", "KC905"]
    assert analysis.program is None
    assert analysis.suppressed == ()


def test_text_that_resembles_a_comment_is_ignored() -> None:
    clauses = (
        '  A: {require: p99(kl) <= 1, level: L2}\n  "B # kcdsl: ignore[KC208] x": {level: L1}\n'
    )
    assert "KC900" not in checked(clauses)[0]
    assert "KC904" not in checked(clauses)[0]


def test_comment_applies_to_a_whole_block_scalar() -> None:
    body = """  O:
    require: >-{comment}
      has(trace,
      [rng_sed])
    level: L3
"""
    assert checked(body.format(comment=""))[0] == ["KC208"]
    assert checked(body.format(comment="  # kcdsl: ignore[KC208] ours"))[0] == []
    above = body.format(comment="").replace(
        "    require", "    # kcdsl: ignore[KC208] ours\n    require"
    )
    assert checked(above)[0] == []
    elsewhere = body.format(comment="").replace("  O:", "  O:  # kcdsl: ignore[KC208] ours")
    assert checked(elsewhere)[0] == ["KC900", "KC208"]


def test_suppression_of_absent_files_is_never_unused(tmp_path: Path) -> None:
    text = HEAD + "  A: {require: p99(kl) <= 1, level: L2}\n"
    text = text.replace("data: d.jsonl", "data: d.jsonl  # kcdsl: ignore[KC606] made by the build")
    for present in (False, True):
        (tmp_path / "m.safetensors").touch()
        if present:
            (tmp_path / "d.jsonl").touch()
        sink = Sink()
        analysis = analyse(SourceFile("c", text), sink, tmp_path)
        assert list(sink) == []
        assert [s.diagnostic.code for s in analysis.suppressed] == (
            [] if present else [DATA_ABSENT]
        )


# --- what a solver finds -------------------------------------------------------------------------
TWO = """  A: {require: p99(kl) <= 0.01, level: L2}
  # kcdsl: ignore[KC415] a promise of its own
  B: {require: p99(kl) <= 0.02, level: L2}
"""


def solved(clauses: str, *found: Diagnostic, folder: Path | None = None) -> tuple[list[str], int]:
    """Return the remaining codes of solver findings, and the number of suppressed ones."""
    sink = Sink()
    analysis = analyse(SourceFile("c", HEAD + clauses), Sink(), folder)
    for finding in found:
        sink.add(finding)
    accepted = accept(analysis.source, analysis.root, sink, folder, solver=True)
    return [str(d.code) for d in sink], len(accepted)


def follows(clauses: str, severity: Severity = Severity.WARNING) -> Diagnostic:
    source = SourceFile("c", HEAD + clauses)
    at = source.text.index("  B:") + 2
    code = CONTRADICTION if severity is Severity.ERROR else REDUNDANT_CLAUSE
    return Diagnostic(code, "B follows from A", source, Span(at, at + 1), severity=severity)


def test_solver_suppressions_are_judged_by_the_solver() -> None:
    assert checked(TWO)[0] == []
    assert checked(TWO)[1].suppressed == ()
    assert solved(TWO, follows(TWO)) == ([], 1)
    assert solved(TWO) == (["KC900"], 0)


def test_solver_ignores_comments_about_other_findings() -> None:
    clauses = TWO.replace("KC415]", "KC415, KC208]")
    assert checked(clauses)[0] == ["KC900"]
    assert solved(clauses, follows(clauses)) == ([], 1)


def test_solver_errors_cannot_be_suppressed() -> None:
    clauses = TWO.replace("KC415", "KC410")
    assert checked(clauses)[0] == ["KC905"]
    assert solved(clauses, follows(clauses, Severity.ERROR)) == (["KC410"], 0)


def test_solver_suppressions_count_as_used_without_a_solver(tmp_path: Path) -> None:
    path = tmp_path / "contract.yaml"
    path.write_text(HEAD + TWO + f"{TRACE}  # kcdsl: ignore[KC208] our own field\n")
    program, accepted = load_contract(path)
    assert len(program.clauses) == 3
    assert [(str(s.diagnostic.code), s.reason, s.line) for s in accepted] == [
        ("KC208", "our own field", 12),
        ("KC415", "a promise of its own", 10),
    ]


# --- refused -------------------------------------------------------------------------------------


def test_configuration_can_forbid_suppressions(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").touch()
    (tmp_path / "d.jsonl").touch()
    (tmp_path / "kcdsl.toml").write_text("refuse-suppressions = true\n")
    text = HEAD + TWO + f"{TRACE}  # kcdsl: ignore[KC208] our own field\n"
    sink = Sink()
    analysis = analyse(SourceFile("c", text), sink, tmp_path)
    assert [str(d.code) for d in sink if str(d.code) != "KC234"] == ["KC906", "KC208", "KC906"]
    assert analysis.program is None
    assert analysis.suppressed == ()
    path = tmp_path / "contract.yaml"
    path.write_text(text)
    with pytest.raises(Refusal):
        load_contract(path)
    path.write_text(HEAD + "  A: {require: p99(kl) <= 0.01, level: L2}\n")
    assert load_contract(path)[1] == ()
