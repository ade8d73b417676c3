"""Libraries and the documents that import them: edits, references and renames across files."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from kcdsl.check.compile import analyse
from kcdsl.diagnostics.model import Severity, Sink
from kcdsl.diagnostics.spans import SourceFile
from kcdsl.ir.canonical import library_digest
from tests.support.editor import HEAD, VSCODE, Editor, Start

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


def edited_files(
    session: Editor, edit: lsp.WorkspaceEdit | None, texts: dict[str, str]
) -> dict[str, str]:
    """Return the texts after an edit, those that it changes."""
    assert edit is not None
    found = {}
    for change in edit.document_changes or ():
        assert isinstance(change, lsp.TextDocumentEdit)
        name = change.text_document.uri.rpartition("/")[2]
        found[name] = session.edited(texts[name], list(change.edits))  # type: ignore[arg-type]
    return found


# --- edits ---------------------------------------------------------------------------------------


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


# --- references ----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
async def test_references_of_a_library_name(start: Start, encoding: str) -> None:
    session = await start(VSCODE, encoding)
    one = importing("slices: {end: tail}", CLAUSE.format("1", "end"))
    two = importing("slices: [tail]  # 🜁\n", "").replace("[tail]  # 🜁\n", "[tail]")
    two += CLAUSE.format("1", "tail")
    library = session.open(LIBRARY, "fleet.kc.yaml")
    first = session.open(one, "one.kc.yaml")
    second = (session.folder / "two.kc.yaml").as_uri()
    (session.folder / "two.kc.yaml").write_text(two, encoding="utf-8")
    home = lsp.Location(library, session.range(LIBRARY, "tail"))
    in_one = lsp.Location(first, session.range(one, "tail"))
    in_two = lsp.Location(second, session.range(two, "tail"))

    async def found(uri: str, place: lsp.Position, declaration: bool) -> list[lsp.Location]:
        context = lsp.ReferenceContext(declaration)
        params = lsp.ReferenceParams(context, session.document(uri), place)
        places = await session.client.text_document_references_async(params)
        return sorted(places or (), key=lambda p: p.uri)

    assert await found(library, home.range.start, True) == [home, in_one, in_two]
    assert await found(library, home.range.start, False) == [in_one, in_two]
    assert await found(first, in_one.range.start, True) == [home, in_one, in_two]


# --- renames -------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("what", "clause", "expected_what", "expected_clause"),
    [
        ("slices: {end: tail}", "end", "slices: {end: rest}", "end"),
        ("slices: [head, tail]", "head, tail", "slices: [head, rest]", "head, rest"),
        ("slices: [head]", "head", "slices: [head]", "head"),
    ],
)
async def test_renaming_a_library_name_edits_importers(
    start: Start, what: str, clause: str, expected_what: str, expected_clause: str
) -> None:
    session = await start()
    text = importing(what, CLAUSE.format("1", clause))
    (session.folder / "one.kc.yaml").write_text(text, encoding="utf-8")
    library = session.open(LIBRARY, "fleet.kc.yaml")
    place = session.range(LIBRARY, "tail").start
    edit = await session.client.text_document_rename_async(
        lsp.RenameParams(session.document(library), place, "rest")
    )
    renamed = LIBRARY.replace("tail", "rest")
    after = importing(expected_what, CLAUSE.format("1", expected_clause), digest=digest_of(renamed))
    found = edited_files(session, edit, {"fleet.kc.yaml": LIBRARY, "one.kc.yaml": text})
    assert found == {"fleet.kc.yaml": renamed, "one.kc.yaml": after}
    (session.folder / "fleet.kc.yaml").write_text(renamed, encoding="utf-8")
    assert errors(after, session.folder) == []


async def test_renaming_a_library_table_edits_its_calls(start: Start) -> None:
    session = await start()
    text = importing("tables: [tau]", CLAUSE.format("table(tau)", "all"))
    session.open(text)
    library = session.open(LIBRARY, "fleet.kc.yaml")
    edit = await session.client.text_document_rename_async(
        lsp.RenameParams(session.document(library), session.range(LIBRARY, "tau").start, "t")
    )
    found = edited_files(session, edit, {"fleet.kc.yaml": LIBRARY, "c.kc.yaml": text})
    assert "p99(kl) <= table(t)" in found["c.kc.yaml"]
    assert "tables: [t]" in found["c.kc.yaml"]


async def test_conflicting_renames_across_files_are_refused(start: Start) -> None:
    session = await start()
    library = session.open(LIBRARY, "fleet.kc.yaml")

    async def refused(words: str, name: str = "rest") -> None:
        place = session.range(LIBRARY, "tail").start
        params = lsp.RenameParams(session.document(library), place, name)
        with pytest.raises(JsonRpcException, match=words):
            await session.client.text_document_rename_async(params)

    importer = session.open(importing("slices: [tail]", CLAUSE.format("1", "tail")))
    # `long` is declared in the contract.
    await refused("would not compile with the name `long`", "long")
    session.replace(
        importer,
        "kcdsl: 1\nlibrary: middle\nversion: 1.0.0\nimports:\n"
        f"  - {{file: fleet.kc.yaml, digest: '{digest_of(LIBRARY)}', slices: [tail]}}\n",
    )
    await refused(r"the library c.kc.yaml passes the slice `tail` on")
    session.replace(library, LIBRARY.replace("unit: nats", "unit: nat"))
    await refused("c.kc.yaml imports this library, which has errors")


async def test_rename_does_not_repair_a_wrong_import_digest(start: Start) -> None:
    session = await start()
    wrong = "sha256:" + "0" * 64
    text = importing("slices: {end: tail}", CLAUSE.format("1", "end"), digest=wrong)
    session.open(text)
    library = session.open(LIBRARY, "fleet.kc.yaml")
    edit = await session.client.text_document_rename_async(
        lsp.RenameParams(session.document(library), session.range(LIBRARY, "tail").start, "rest")
    )
    found = edited_files(session, edit, {"fleet.kc.yaml": LIBRARY, "c.kc.yaml": text})
    assert found["c.kc.yaml"] == text.replace("tail", "rest")
