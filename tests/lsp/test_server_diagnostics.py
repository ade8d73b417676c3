"""Diagnostics over the protocol: pushed and pulled, in every encoding, for several editors."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from lsprotocol import types as lsp

from tests.support.editor import EDITORS, EMACS, HEAD, VSCODE, Start

pytestmark = pytest.mark.asyncio(loop_scope="session")

BAD = HEAD + 'clauses:\n  N: {"level": L2, family: N, "slices": [all], "require": "p99(klx)<=1"}\n'
# Two, three and four bytes of UTF-8; the last is two units of UTF-16.
ODD = HEAD + "clauses:\n  N:\n    level: L2\n    require: 'has(trace, [\"äöü€🜁\", rng_sead])'\n"


@pytest.mark.sample(1)
@pytest.mark.parametrize("pulls", [False, True])
@pytest.mark.parametrize("editor", EDITORS)
async def test_unknown_metric_is_marked(start: Start, editor: str, pulls: bool) -> None:
    session = await start(editor, pulls=pulls)
    uri = session.open(BAD)
    (found,) = [d for d in await session.findings(uri) if d.code == "KC203"]
    assert found.range == session.range(BAD, "klx")
    assert found.severity == lsp.DiagnosticSeverity.Error
    assert found.source == "kcdsl"
    assert "klx" in found.message


@pytest.mark.sample(1)
@pytest.mark.parametrize("pulls", [False, True])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
async def test_columns_follow_the_negotiated_encoding(
    start: Start, encoding: str, pulls: bool
) -> None:
    session = await start(VSCODE, encoding, pulls)
    assert session.encoding == encoding
    uri = session.open(ODD)
    (found,) = [d for d in await session.findings(uri) if d.code == "KC208"]
    assert found.range == session.range(ODD, "rng_sead")
    columns = {"utf-8": 43, "utf-16": 36, "utf-32": 35}
    assert found.range.start.character == columns[encoding]


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
async def test_crlf_and_byte_order_mark_are_supported(start: Start, encoding: str) -> None:
    session = await start(VSCODE, encoding)
    text = "\ufeff" + ODD.replace("\n", "\r\n")
    uri = session.open(text)
    (found,) = [d for d in await session.findings(uri) if d.code == "KC208"]
    assert found.range == session.range(text, "rng_sead")


async def test_positions_inside_a_folded_scalar(start: Start) -> None:
    session = await start(VSCODE, "utf-16")
    text = HEAD + "clauses:\n  N:\n    level: L2\n    require: >-\n      p99(kl) <= 0.02\n"
    text += "      and p99(klx) <= 1\n"
    uri = session.open(text)
    (found,) = [d for d in await session.findings(uri) if d.code == "KC203"]
    assert found.range == session.range(text, "klx")


async def test_fixing_or_closing_a_document_clears_findings(start: Start) -> None:
    session = await start()
    uri = session.open(BAD)
    assert "KC203" in [d.code for d in await session.findings(uri)]
    version = session.change(
        uri, lsp.TextDocumentContentChangePartial(session.range(BAD, "klx"), "kl")
    )
    assert "KC203" not in [d.code for d in await session.published(uri, version)]
    session.close(uri)
    assert await session.published(uri, None) == []


async def test_published_versions_never_decrease(start: Start) -> None:
    session = await start()
    uri = session.open(BAD)
    for number in range(20):
        last = session.replace(uri, BAD + "#" * number)
    await session.published(uri, last)
    await asyncio.sleep(0.1)
    versions = [p.version for p in session.notified[uri] if p.version is not None]
    assert versions == sorted(versions)
    assert versions[-1] == last
    assert len(versions) < 20


@pytest.mark.full
async def test_pulling_client_gets_no_pushed_diagnostics(start: Start) -> None:
    session = await start(VSCODE, pulls=True)
    uri = session.open(BAD)
    await session.pull(uri)
    await asyncio.sleep(0.1)
    assert uri not in session.notified


@pytest.mark.full
async def test_second_pull_reports_unchanged(start: Start) -> None:
    session = await start(VSCODE, pulls=True)
    uri = session.open(BAD)
    first = await session.pull(uri)
    again = await session.pull(uri, first.result_id)
    assert isinstance(again, lsp.RelatedUnchangedDocumentDiagnosticReport)
    assert again.result_id == first.result_id
    session.replace(uri, BAD.replace("klx", "kly"))
    other = await session.pull(uri, first.result_id)
    assert isinstance(other, lsp.RelatedFullDocumentDiagnosticReport)
    assert other.result_id != first.result_id


async def test_findings_carry_code_source_and_related_places(start: Start) -> None:
    session = await start()
    text = HEAD + "clauses:\n  N: {require: p99(kl) <= 1, level: L2, level: L1}\n"
    text += "tables:\n  idle: {unit: nats, rows: [{where: length > 1, value: 1}], otherwise: 2}\n"
    uri = session.open(text)
    found = {d.code: d for d in await session.findings(uri)}
    twice = found["KC002"]
    assert twice.related_information is not None
    (related,) = twice.related_information
    assert related.message == "first here"
    assert related.location == lsp.Location(uri, session.range(text, "level"))
    assert "\nhelp: " in twice.message


async def test_unused_definitions_are_tagged_and_have_a_fix(start: Start) -> None:
    session = await start()
    text = HEAD + "tables:\n  idle:\n    unit: nats\n    rows: [{where: length > 1, value: 1}]\n"
    text += "    otherwise: 2\nclauses:\n  N: {require: p99(kl) <= 1, level: L2}\n"
    uri = session.open(text)
    (idle,) = [d for d in await session.findings(uri) if d.range == session.range(text, "idle")]
    assert list(idle.tags or ()) == [lsp.DiagnosticTag.Unnecessary]
    assert idle.severity == lsp.DiagnosticSeverity.Warning
    assert idle.data is not None
    edits = [
        lsp.TextEdit(
            lsp.Range(lsp.Position(**e["range"]["start"]), lsp.Position(**e["range"]["end"])),
            e["newText"],
        )
        for e in idle.data["edits"]
    ]
    assert idle.data["title"] == "remove `idle`"
    assert session.edited(text, edits) == HEAD + text[text.index("clauses:") :]


async def test_finding_links_to_the_page_of_its_code(start: Start) -> None:
    session = await start()
    text = HEAD.replace("data: prompts", "imports: [{file: nowhere.kc.yaml}]\ndata: prompts")
    uri = session.open(text + "clauses:\n  N: {require: p99(kl) <= 1, level: L2}\n")
    linked = [d for d in await session.findings(uri) if d.code_description is not None]
    assert linked
    for item in linked:
        assert item.code_description is not None
        page = Path(unquote(urlsplit(item.code_description.href).path))
        assert page.name == f"{item.code}.md"
        assert page.read_text(encoding="utf-8").startswith(f"# {item.code}")


async def test_several_errors_are_reported_while_typing(start: Start) -> None:
    session = await start()
    text = HEAD + 'clauses:\n  A:\n    require: "p99(kl <= 1\n    level: L2\n'
    text += "  B: {require: p99(klx) <= 1, level: L2}\n"
    uri = session.open(text)
    codes = [d.code for d in await session.findings(uri)]
    assert "KC001" in codes
    assert "KC203" in codes


async def test_open_library_replaces_its_file(start: Start) -> None:
    session = await start()
    library = "kcdsl: 1\nlibrary: fleet\nversion: 1.0.0\ndata: p.jsonl\nslices:\n  tail: {}\n"
    (session.folder / "fleet.kc.yaml").write_text(library.replace("tail", "other"))
    text = HEAD.replace("data: p", "imports:\n  - {file: fleet.kc.yaml, slices: [tail]}\ndata: p")
    text += "clauses:\n  N: {require: p99(kl) <= 1, slices: [tail], level: L2}\n"
    uri = session.open(text)
    (missing,) = [d for d in await session.findings(uri) if d.range == session.range(text, "tail")]
    assert "has no slice `tail`" in missing.message
    session.open(library, "fleet.kc.yaml")
    async with asyncio.timeout(10):
        while any("has no slice" in d.message for d in session.notified[uri][-1].diagnostics):
            await asyncio.sleep(0.01)


@pytest.mark.full
async def test_emacs_session_counts_code_points(start: Start) -> None:
    assert (await start(EMACS)).encoding == "utf-32"
