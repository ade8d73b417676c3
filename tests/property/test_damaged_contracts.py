"""Compiling any damaged contract ends with a program or with positioned diagnostics."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kcdsl.check.compile import analyse
from kcdsl.diagnostics import Sink
from kcdsl.diagnostics.render.documents import render_json
from kcdsl.diagnostics.render.full import render_full
from kcdsl.diagnostics.render.lines import render_concise
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import digest
from kcdsl.route.router import route

CORPUS = Path(__file__).resolve().parents[2] / "grammar" / "corpus"
TEXTS = [p.read_text(encoding="utf-8") for p in sorted(CORPUS.glob("*/*.kc.yaml"))]
LIBRARY = next(text for text in TEXTS if "\nlibrary:" in text)
PIECES = [
    "", " ", "\n", "\t", "\r\n", ":", ": ", "- ", "{", "}", "[", "]", "(", ")", ",", "'", '"', "#",
    "&a ", "*a", "!!x ", "|", ">-", "1e-3", "-1", ".inf", "null", "on", "0",
    "forall x in points(all): ",
    "not ", "and", "mean(kl)", "<= 1", "250 ms", "L1", "é𝒳", "\u2028", "---\n", "%", "<<: ",
]  # fmt: skip


def damaged(text: str, seed: int, cuts: int) -> str:
    """Replace a few short pieces of a text by others."""
    order = random.Random(seed)
    for _ in range(cuts):
        start = order.randrange(len(text) + 1)
        end = min(len(text), start + order.choice([0, 0, 1, 1, 2, 5, 20]))
        text = text[:start] + order.choice(PIECES) + text[end:]
    return text


@pytest.mark.full
@settings(max_examples=400)
@example(LIBRARY, 213, 1)
@given(st.sampled_from(TEXTS), st.integers(0, 2**32), st.integers(1, 4))
def test_damaged_contracts_do_not_crash_the_compiler(text: str, seed: int, cuts: int) -> None:
    source, sink = SourceFile("damaged.kc.yaml", damaged(text, seed, cuts)), Sink()
    analysis = analyse(source, sink)
    program = analysis.program
    assert (program is None and analysis.library is None) == sink.has_errors
    for diagnostic in sink:
        assert diagnostic.span is not None
        assert 0 <= diagnostic.span.start <= diagnostic.span.end <= len(source.text)
        for label in diagnostic.labels:
            assert 0 <= label.span.start <= label.span.end <= len(source.text)
    assert render_full(sink).count("\n") < 12 * (len(sink.found) + 1) + 40
    render_concise(sink)
    render_json(sink)
    if program is not None:
        assert len(digest(program)) == 64
        assert len(route(program)) == len(program.clauses)
