"""Formatting keeps the meaning and every comment, and is idempotent."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Refusal, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.format import edits, format_text
from kcdsl.ir.canonical import digest
from kcdsl.source.comments import find_comments
from kcdsl.source.files import read_source
from kcdsl.source.yaml_nodes import parse_yaml
from tests.support.styles import Writer


def formatted(text: str) -> str:
    sink = Sink()
    result = format_text(SourceFile("c.kc.yaml", text), sink)
    assert result is not None, (text, [d.message for d in sink])
    return result


def meaning(text: str) -> tuple[str | None, list[str]]:
    """Return the digest and the codes of findings; missing quotes are a matter of layout."""
    sink = Sink()
    program = analyse(SourceFile("c.kc.yaml", text), sink).program
    codes = sorted(str(d.code) for d in sink if str(d.code) != "KC015")
    return (None if program is None else digest(program)), codes


def comments(text: str) -> list[str]:
    source = SourceFile("c", text)
    root = parse_yaml(source, Sink())
    assert root is not None
    return [c.text for c in find_comments(source, root)]


@pytest.mark.full
@given(st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_generated_documents_keep_their_meaning(seed: int) -> None:
    writer = Writer(seed)
    text = writer.text()
    once = formatted(text)
    assert formatted(once) == once
    assert meaning(once) == meaning(text)
    assert meaning(once)[0] is not None, meaning(once)
    for note in writer.notes:
        assert once.count(f"{note.rstrip()}\n") == 1, note
    assert not [line for line in once.splitlines() if line != line.rstrip()]
    assert "\r" not in once
    assert "\n\n\n" not in once


@pytest.mark.full
def test_corpus_and_examples_keep_their_meaning(repository: Path) -> None:
    seen = 0
    for folder in ("grammar/corpus", "examples"):
        for path in sorted((repository / folder).rglob("*.yaml")):
            try:
                source = read_source(path)
            except Refusal:  # no text: the corpus has files that are not UTF-8
                continue
            sink = Sink()
            once = format_text(source, sink)
            if once is None:
                assert not [d for d in sink if str(d.code) == "KC701"], path
                continue
            seen += 1
            assert formatted(once) == once, path
            assert meaning(once) == meaning(source.text), path
            assert comments(once) == comments(source.text), path
    assert seen > 100


X = "x" * 48
"""Two of these are too wide for a line."""


def test_invalid_yaml_is_unchanged() -> None:
    sink = Sink()
    assert format_text(SourceFile("c", "a: [1\n"), sink) is None
    assert [str(d.code) for d in sink] == ["KC001"]


@pytest.mark.full
@given(st.integers(0, 10**9))
@settings(max_examples=60, deadline=None)
def test_edits_transform_one_text_into_the_other(seed: int) -> None:
    old = Writer(seed).text()
    new = formatted(old)
    text = old
    for edit in reversed(edits(old, new)):
        text = text[: edit.span.start] + edit.text + text[edit.span.end :]
    assert text == new


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("a:   1", "a: 1\n"),
        ("\ufeffa: 1\r\nb: 2\r\n", "a: 1\nb: 2\n"),
        ("a:\n    b:   {c: 1,d: [1,2]}\n", "a:\n  b: {c: 1, d: [1, 2]}\n"),
        (
            "clauses:\n  A: {require: p99( kl )<=0.02}\n",
            "clauses:\n  A: {require: p99(kl) <= 0.02}\n",
        ),
        (
            "clauses:\n  A: {require: quantile(0.9, kl) <= 1}\n",
            'clauses:\n  A: {require: "quantile(0.9, kl) <= 1"}\n',
        ),
        ("a: 1   # why\n", "a: 1  # why\n"),
        ("a:\n  # one\n\n\n  # two\n  b: 1\n", "a:\n  # one\n\n  # two\n  b: 1\n"),
        ("a: |+\n   x\n\nb: 1\n", "a: |+\n  x\n\nb: 1\n"),
        ("a: >+\n\n     \n", "a: >+\n\n\n"),
        ("? > # c\n  a\n: 1\n", '# c\n"a\\n": 1\n'),
        ("a: 1\n?\n: 2\n", "a: 1\nnull: 2\n"),
        # A comment behind a bracket speaks of the whole.
        (f"a: {{b: {X}, c: {X}}} # d\n", f"a:  # d\n  b: {X}\n  c: {X}\n"),
        (f"- {{b: {X}, c: {X}}} # d\n", f"# d\n- b: {X}\n  c: {X}\n"),
        (f"- [{X}, {X}] # d\n", f"# d\n-\n  - {X}\n  - {X}\n"),
        ("a: {b: 1, # c\n  d: 2} # e\n", "a:\n  b: 1  # c\n  d: 2  # e\n"),
        # An expression of several lines is one line if that fits, and else stays broken.
        ("require: a<=1\n  and b<=2 # c\n", "require: a <= 1 and b <= 2  # c\n"),
        (f"require: {X}<=1\n    and {X}<=2 # c\n", f"require: {X} <= 1\n  and {X} <= 2  # c\n"),
        (f"where: '{X}<=1\n\n  or {X}==''z'''\n", f"where: '{X} <= 1\n  or {X} == ''z'''\n"),
        (f'where: "{X}\\x20<\n\n  \\"{X}\\""\n', f'where: "{X} <\n  \\"{X}\\""\n'),
        (f'where: {X}\n    in ["{X}"]\n', f'where: {X}\n  in ["{X}"]\n'),
        (f"a: {{where: '{X} <=\n   {X}'}}\n", f"a:\n  where: '{X} <=\n    {X}'\n"),
        # The levels of an expression in a block scalar stay.
        (
            "where: |\n    (a<=1\n          and (\n            b<=1))\n",
            "where: |\n  (a <= 1\n    and (\n      b <= 1))\n",
        ),
    ],
)
def test_layouts_of_single_constructs(given: str, wanted: str) -> None:
    assert formatted(given) == wanted
    assert formatted(wanted) == wanted
