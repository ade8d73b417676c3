"""Edits of libraries and the documents that import them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from lsprotocol import types as lsp

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import library_digest
from tests.support.editor import HEAD, Editor, Start

pytestmark = pytest.mark.asyncio(loop_scope="session")

LIBRARY = (
    "kcdsl: 1\nlibrary: fleet  # 🜁\nversion: 1.0.0\ndata: p.jsonl\n"
    "slices: {tail: {where: length > 8}, head: {where: length < 8}}\n"
    "tables:\n  tau: {unit: nats, rows: [{where: length > 9, value: 1}], otherwise: 2}\n"
)
CLAUSE = "clauses:\n  N: {{require: p99(kl) <= {}, slices: [{}], level: L2}}\n"


def digest_of(text: str, folder: Path | None = None) -> str:
    library = analyse(SourceFile("x", text), Sink(), folder).library
    assert library is not None
    return library_digest(library)


def errors(text: str, folder: Path) -> list[str]:
    sink = Sink()
    analyse(SourceFile(str(folder / "c.kc.yaml"), text), sink, folder)
    return [found.message for found in sink if found.severity is Severity.ERROR]


def importing(
    what: str, clause: str, file: str = "fleet.kc.yaml", digest: str = digest_of(LIBRARY)
) -> str:
    return HEAD.replace(
        "data: p", f"imports:\n  - {{file: {file}, digest: '{digest}', {what}}}\ndata: p"
    ) + (clause)


def serious(found: Iterable[lsp.Diagnostic]) -> list[str]:
    """Return the messages of errors and warnings."""
    worst = (lsp.DiagnosticSeverity.Error, lsp.DiagnosticSeverity.Warning)
    return [d.message for d in found if d.severity in worst]


async def until(session: Editor, uri: str, words: str, there: bool) -> None:
    """Wait until the last findings of a document contain a text, or no longer contain it."""
    async with asyncio.timeout(15):
        while True:
            last = session.notified.get(uri, [])[-1:]
            if last and any(words in d.message for d in last[0].diagnostics) is there:
                return
            await asyncio.sleep(0.01)


@pytest.mark.full
async def test_edit_of_a_library_rechecks_its_importers(start: Start) -> None:
    session = await start()
    (session.folder / "fleet.kc.yaml").write_text(LIBRARY)
    text = importing("slices: {end: tail}", CLAUSE.format("1", "end"))
    uri = session.open(text)
    assert serious(await session.findings(uri)) == []
    library = session.open(LIBRARY, "fleet.kc.yaml")
    session.replace(library, LIBRARY.replace("tail", "rest"))
    await until(session, uri, "has no slice `tail`", there=True)
    session.replace(library, LIBRARY.replace("> 8", "> 7"))
    await until(session, uri, "digest", there=True)
    session.close(library)
    await until(session, uri, "digest", there=False)
    assert serious(session.notified[uri][-1].diagnostics) == []


@pytest.mark.full
async def test_edit_of_an_indirect_library_rechecks_importers(start: Start) -> None:
    session = await start()
    middle = (
        "kcdsl: 1\nlibrary: middle\nversion: 1.0.0\nimports:\n"
        f"  - {{file: fleet.kc.yaml, digest: '{digest_of(LIBRARY)}', slices: [tail]}}\n"
    )
    (session.folder / "fleet.kc.yaml").write_text(LIBRARY)
    (session.folder / "middle.kc.yaml").write_text(middle)
    digest = digest_of(middle, session.folder)
    text = importing("slices: [tail]", CLAUSE.format("1", "tail"), "middle.kc.yaml", digest)
    uri = session.open(text)
    assert serious(await session.findings(uri)) == []
    library = session.open(LIBRARY, "fleet.kc.yaml")
    session.replace(library, LIBRARY.replace("> 8", "> 7"))
    await until(session, uri, "middle.kc.yaml has errors", there=True)
    session.replace(library, LIBRARY)
    await until(session, uri, "middle.kc.yaml has errors", there=False)
