"""Fixes mend what they belong to, and `fix` leaves no text worse than it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from kcdsl.check.compile import analyse
from kcdsl.check.fixing import edited, fix
from kcdsl.diagnostics.model import Diagnostic, Severity, Sink
from kcdsl.source.files import read_source
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


def found(source: SourceFile) -> list[Diagnostic]:
    sink = Sink()
    analyse(source, sink)
    return sink.found


def lined(clauses: str, *, unsafe: bool = False) -> tuple[str, list[str]]:
    """Return the clauses after the fixes, and the codes that are left."""
    result = fix(SourceFile("c", HEAD + clauses), None, unsafe=unsafe)
    return result.source.text.removeprefix(HEAD), [str(d.code) for d in result.left]


def test_each_fix_of_the_corpus_removes_its_finding(repository: Path) -> None:
    seen = 0
    for path in sorted((repository / "grammar" / "corpus" / "rejected").glob("*.yaml")):
        try:
            source = read_source(path)
        except Exception:
            continue
        for diagnostic in found(source):
            if diagnostic.fix is None:
                continue
            seen += 1
            text = edited(source.text, list(diagnostic.fix.edits))
            left = found(SourceFile(source.name, text))
            assert not [
                d for d in left if (d.code, d.message) == (diagnostic.code, diagnostic.message)
            ], (path, diagnostic)
    assert seen > 30


def test_all_fixes_leave_no_more_errors(repository: Path) -> None:
    for path in sorted((repository / "grammar" / "corpus" / "rejected").glob("*.yaml")):
        try:
            source = read_source(path)
        except Exception:
            continue
        before = [d for d in found(source) if d.severity is Severity.ERROR]
        result = fix(source, None, unsafe=True)
        after = [d for d in result.left if d.severity is Severity.ERROR]
        assert len(after) <= len(before), path
        assert fix(result.source, None, unsafe=True).source.text == result.source.text, path


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


def test_guesses_are_unsafe() -> None:
    clauses = "  A: {require: p99(kll) <= 1, level: L2}\n"
    assert lined(clauses) == (clauses, ["KC203"])
    assert lined(clauses, unsafe=True) == (clauses.replace("kll", "kl"), [])
