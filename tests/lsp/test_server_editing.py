"""Random edits over the protocol: the server has the text and reports what a full check finds."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from lsprotocol import types as lsp

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Sink
from kcdsl.diagnostics.spans import SourceFile
from tests.support.editor import HEAD, VSCODE, Editor, Start

PIECES = (
    '"', "'", "{", "}", "[", "(", ")", ": ", "\n", "\n  ", "\n  X: ", "#", " # ", "|", "- ",
    "é", "🜁", "kl", "klx", "all", "0", "%", "x", " ", "", "ms", "forall ", "slices:\n", "\t",
    "🜁ä€", "# kcdsl: ",
)  # fmt: skip
CLAUSES = """\
clauses:
  N-KL:
    require: p99(kl) <= 0.02  # é🜁
    level: L2
  N-TEXT:
    require: >-
      mean(tv)
      <= 5%
    level: L1
  S-TOP: {require: mean(top1_overlap) >= 99.5%, slices: [long], level: L3, then: rollback}
  N-WRONG: {"é🜁": 1, require: "p99(klx) <= 0.02", level: L2}
  O-TRACE: {level: L2, require: "has(trace, ['🜁', rng_sead])"}
"""


def fresh(session: Editor, text: str, path: Path) -> list[tuple[object, lsp.Range]]:
    """Return code and range of the findings of a full check."""
    sink, source = Sink(), SourceFile(str(path), text)
    analyse(source, sink, path.parent)
    return [
        (
            d.code.id,
            lsp.Range(session.position(text, d.span.start), session.position(text, d.span.end)),
        )
        for d in sink
        if d.span is not None and (d.source is None or d.source.name == source.name)
    ]


@pytest.mark.full
@pytest.mark.asyncio(loop_scope="session")
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("seed", range(4))
async def test_findings_after_edits_equal_those_of_a_full_check(
    start: Start, encoding: str, seed: int
) -> None:
    session = await start(VSCODE, encoding, pulls=True)
    rng, text = random.Random(seed), HEAD + CLAUSES
    uri = session.open(text)
    path = session.folder / "c.kc.yaml"
    for step in range(25):
        changes: list[lsp.TextDocumentContentChangeEvent] = []
        for _ in range(rng.randint(1, 3)):
            begin = rng.randrange(len(text) + 1)
            end = min(len(text), begin + rng.choice((0, 0, 1, 3, 8)))
            new = rng.choice(PIECES)
            where = lsp.Range(session.position(text, begin), session.position(text, end))
            changes.append(lsp.TextDocumentContentChangePartial(where, new))
            text = text[:begin] + new + text[end:]
        if step % 10 == 9:
            text = HEAD + CLAUSES
            changes.append(lsp.TextDocumentContentChangeWholeDocument(text))
        session.change(uri, *changes)
        found = [(d.code, d.range) for d in await session.findings(uri)]
        assert found == fresh(session, text, path), text
