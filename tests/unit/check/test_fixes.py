"""Fixes remove their finding, and `fix` never makes a document worse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kcdsl.check.compile import Analysis, analyse
from kcdsl.check.fixes import edited, fix
from kcdsl.diagnostics.codes import DATA_ABSENT, find
from kcdsl.diagnostics.model import Diagnostic, Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest, library_digest
from kcdsl.source.files import read_source
from tests.support import hostile
from tests.support.pages import blocks, completed, names, stand_in

HEAD = """kcdsl: 1
contract: c
version: 1.0.0
model: {checkpoint: m.safetensors, architecture: llama}
kernels: {train: {run: torch.eager}, infer: {run: torch.sdpa}}
data: d.jsonl
slices: {all: {}}
clauses:
"""


def lined(clauses: str, *, unsafe: bool = False) -> tuple[str, list[str]]:
    """Return the clauses after the fixes, and the remaining codes."""
    result = fix(SourceFile("c", HEAD + clauses), None, unsafe=unsafe)
    return result.source.text.removeprefix(HEAD), [str(d.code) for d in result.left]


def documents(repository: Path, folder: Path) -> Iterator[tuple[str, SourceFile, Path]]:
    """Yield every intentionally wrong document of the pages of codes and the corpus."""
    stand_in(folder)
    for name in names():
        code = find(name)
        assert code is not None
        for number, block in enumerate(blocks(code.page.text)):
            if block.language == "yaml" and block.kind == "bad":
                yield f"{name} {number}", SourceFile("contract.yaml", completed(block.text)), folder
    for path in sorted((repository / "grammar" / "corpus" / "rejected").glob("*.yaml")):
        yield path.name, read_source(path), path.parent


def examined(source: SourceFile, folder: Path) -> tuple[list[Diagnostic], Analysis]:
    """Return the findings of a text, except for absent files, and its meaning."""
    sink = Sink()
    analysis = analyse(source, sink, folder)
    return [d for d in sink if d.code != DATA_ABSENT], analysis


def weight(found: list[Diagnostic]) -> tuple[int, int]:
    """Return the measure that fixes decrease: the number of errors, then of findings."""
    return sum(d.severity is Severity.ERROR for d in found), len(found)


def meaning(analysis: Analysis) -> str | None:
    if analysis.library is not None:
        return library_digest(analysis.library)
    return None if analysis.program is None else digest(analysis.program)


@pytest.mark.full
def test_each_fix_reduces_findings_and_safe_fixes_keep_meaning(
    repository: Path, tmp_path: Path
) -> None:
    safe = unsafe = meant = 0
    for name, source, folder in documents(repository, tmp_path):
        before, analysis = examined(source, folder)
        for diagnostic in before:
            if diagnostic.fix is None or diagnostic.source != source:
                continue
            text = edited(source.text, diagnostic.fix.edits)
            assert text != source.text, (name, diagnostic)
            after, changed = examined(SourceFile(source.name, text), folder)
            assert weight(after) < weight(before), (name, diagnostic, after)
            same = (diagnostic.code, diagnostic.message)
            assert same not in [(d.code, d.message) for d in after], (name, diagnostic)
            if diagnostic.fix.safe:
                safe += 1
                meant += analysis.program is not None
                assert meaning(analysis) in {None, meaning(changed)}, (name, diagnostic)
            else:
                unsafe += 1
    assert safe > 20
    assert unsafe > 50
    assert meant > 2


@pytest.mark.full
def test_all_fixes_combine(repository: Path, tmp_path: Path) -> None:
    for name, source, folder in documents(repository, tmp_path):
        before, analysis = examined(source, folder)
        for unsafe in (False, True):
            result = fix(source, folder, unsafe=unsafe)
            left = [d for d in result.left if d.code != DATA_ABSENT]
            assert weight(left) < weight(before) or not result.applied, name
            again = fix(result.source, folder, unsafe=unsafe)
            assert (again.source.text, again.applied) == (result.source.text, 0), name
            if not unsafe:
                assert meaning(analysis) in {None, meaning(result.analysis)}, name


def test_fix_that_reveals_as_many_errors_is_undone() -> None:
    clauses = "  A: {require: '0.001 <= p99(kl) <= 1', level: L2}\n"
    result = fix(SourceFile("c", HEAD + clauses), None)
    assert result.source.text == HEAD + clauses
    assert (result.applied, [str(d.code) for d in result.refused]) == (0, ["KC207"])


def test_fix_may_reveal_a_hidden_finding() -> None:
    clauses = "  A: {require: 'p99(klx) ≤ 1', level: L2}\n"
    mended, left = lined(clauses)
    assert mended == clauses.replace("≤", "<=")
    assert left == ["KC203"]
    assert lined(clauses, unsafe=True)[1] == []
    two = "  A: {require: 'p99(klx) + p99(tvx) ≤ 1', level: L2}\n"
    assert lined(two) == (two, ["KC010"])  # one error would become two


def test_fix_that_removes_a_comment_is_unsafe() -> None:
    table = "  tau: {unit: nats, rows: [{where: length <= 128, value: 0.01}], otherwise: 0.05}"
    clauses = "  A: {require: p99(kl) <= 1, level: L2}\n"
    plain = f"{clauses}tables:\n{table}\n"
    assert lined(plain) == (clauses, [])
    commented = f"{clauses}tables:\n{table}  # the limits of the last release\n"
    assert lined(commented) == (commented, ["KC232"])
    assert lined(commented, unsafe=True) == (clauses, [])


def test_harmful_fix_does_not_stop_the_others() -> None:
    clauses = (
        "  A: {require: '0.001 <= p99(kl) <= 1', level: L2}\n"
        "  B: {require: 'p99(kl) ≤ 1', level: L2}\n"
    )
    mended, left = lined(clauses)
    assert mended == clauses.replace("≤", "<=")
    assert left == ["KC207"]


@pytest.mark.parametrize(
    ("clauses", "wanted"),
    [
        ("  A: {require: 'p99(kl) ≤ 1 && max(tv) <= 5%', level: L2}\n",
         "  A: {require: 'p99(kl) <= 1 and max(tv) <= 5%', level: L2}\n"),
        ("  A: {require: quantile(0.9, kl) <= 1, level: L2}\n",
         '  A: {require: "quantile(0.9, kl) <= 1", level: L2}\n'),
    ],
)  # fmt: skip
def test_safe_fixes(clauses: str, wanted: str) -> None:
    assert lined(clauses) == (wanted, [])


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("requir: p99(kl) <= 1", "require: p99(kl) <= 1"),
        ("metrc: p99_kl, threshold: 1", "metric: p99_kl, threshold: 1"),
    ],
)
def test_misspelt_field_is_one_error(wrong: str, right: str) -> None:
    clauses = f"  A: {{{wrong}, level: L2}}\n"
    assert lined(clauses) == (clauses, ["KC101"])
    assert lined(clauses, unsafe=True) == (clauses.replace(wrong, right), [])


def test_guesses_are_unsafe() -> None:
    clauses = "  A: {require: p99(kll) <= 1, level: L2}\n"
    assert lined(clauses) == (clauses, ["KC203"])
    assert lined(clauses, unsafe=True) == (clauses.replace("kll", "kl"), [])


def test_repaired_yaml_may_have_other_findings() -> None:
    text = completed("clauses:\n\tA:\n\t\trequire: p99(klx) <= 1\n\t\tlevell: L2\n")
    mended = fix(SourceFile("c.kc.yaml", text), None, unsafe=True)
    assert mended.analysis.root is not None
    assert mended.applied > 0
    assert "\t" not in mended.source.text
    assert fix(SourceFile("c.kc.yaml", text), None).source.text == text


@pytest.mark.full
def test_large_texts_are_parsed_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    text, read = hostile.CONTRACTS["comments that accept"], 0

    def counting(source: SourceFile, sink: Sink, folder: Path | None) -> Analysis:
        nonlocal read
        read += len(source.text)
        return analyse(source, sink, folder)

    monkeypatch.setattr("kcdsl.check.fixes.analyse", counting)
    assert fix(SourceFile("c", text), None).left
    assert read < 6 * len(text)
