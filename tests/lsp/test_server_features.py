"""Every feature over the protocol, with non-ASCII text before the cursor."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from tests.support.editor import EMACS, HEAD, NEOVIM, VSCODE, Editor, Start

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEXT = HEAD.replace("long:", "lang:") + (
    "tables:\n"
    "  tau: {unit: nats, rows: [{where: length <= 128, value: 0.01}], otherwise: 0.05}\n"
    "clauses:\n"
    "  # Schranken für 🜁\n"
    '  N-KL: {slices: ["all", lang], require: "p99(kl) <= table(tau)", level: L2}  # 🜁\n'
    "  N-ATTN:\n"
    '    # "ä🜁": {x: [y]}\n'
    "    require: >-\n"
    "      forall x in ball(lang, 1e-3):\n"
    "        norm_inf(drift(attn_0, x)) <= 0.05\n"
    "    evidence: proof\n"
    "    level: L3\n"
    "  R: {require: p95(latency) <= 250 ms, budget: 5% of windows, level: L1}\n"
    "  O: {level: L2, require: \"has(trace, ['🜁ä', rng_seed])\"}\n"
)
BOTH = pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])


async def prepared(start: Start, encoding: str, text: str = TEXT, editor: str = VSCODE) -> Editor:
    """Return a session in which the text is open."""
    session = await start(editor, encoding)
    session.open(text)
    return session


def uri_of(session: Editor) -> str:
    return (session.folder / "c.kc.yaml").as_uri()


def at(session: Editor, piece: str, into: int = 0, text: str = TEXT) -> lsp.Position:
    """Return the position a few characters into a piece of the text."""
    return session.position(text, text.index(piece) + into)


async def hovered(session: Editor, piece: str, into: int = 0, text: str = TEXT) -> lsp.Hover:
    found = await session.client.text_document_hover_async(
        lsp.HoverParams(session.document(uri_of(session)), at(session, piece, into, text))
    )
    assert found is not None
    return found


def shown(found: lsp.Hover) -> str:
    assert isinstance(found.contents, lsp.MarkupContent)
    assert found.contents.kind == lsp.MarkupKind.Markdown
    return found.contents.value


# --- hover ---------------------------------------------------------------------------------------


@BOTH
async def test_hover_over_a_metric(start: Start, encoding: str) -> None:
    session = await prepared(start, encoding)
    found = await hovered(session, "kl) <=")
    assert found.range == session.range(TEXT, "kl")
    assert "Real[nats] per token" in shown(found)
    assert "better: lower" in shown(found)
    assert "decided by `empirical`" in shown(found)


@BOTH
async def test_hover_inside_a_folded_scalar(start: Start, encoding: str) -> None:
    session = await prepared(start, encoding)
    found = await hovered(session, "attn_0", 2)
    assert found.range == session.range(TEXT, "attn_0")
    assert "attention of layer 0" in shown(found)
    assert "`ball(lang, 1e-3)`" in shown(await hovered(session, "x)) <="))
    assert "length > 128" in shown(await hovered(session, "lang, 1e-3"))


async def test_hover_over_yaml(start: Start) -> None:
    session = await prepared(start, "utf-16")
    assert "numerical clause, level L2" in shown(await hovered(session, "N-KL"))
    assert "then `fallback`, by the escalation policy" in shown(await hovered(session, "N-ATTN"))
    assert "Predicate" in shown(await hovered(session, "where"))
    assert "nats" in shown(await hovered(session, "tau:"))


async def test_hover_works_in_an_incomplete_document(start: Start) -> None:
    session = await prepared(start, "utf-16")
    broken = TEXT.replace("p95(latency) <= 250 ms", '"p95(latency')
    session.replace(uri_of(session), broken)
    found = await hovered(session, "attn_0", 2, broken)
    assert found.range == session.range(broken, "attn_0")
    worse = "model: {a: [\n" + TEXT.replace("model: {checkpoint", "modal: {checkpoint")
    session.replace(uri_of(session), worse)
    assert (await hovered(session, "attn_0", 2, worse)).range == session.range(worse, "attn_0")


async def test_hover_over_a_suppressed_code(start: Start) -> None:
    text = TEXT.replace("  # Schranken", "  # kcdsl: ignore[KC208] für")
    session = await prepared(start, "utf-16", text)
    found = await hovered(session, "KC208", 2, text)
    assert found.range == session.range(text, "KC208")
    assert shown(found).startswith("**KC208**")


async def test_hover_shows_the_last_verdict(start: Start) -> None:
    session = await start(VSCODE)
    report = {
        "schema": "kcdsl.report/3",
        "contract": {"name": "demo", "version": "1.0.0", "digest": "sha256:00"},
        "clauses": [
            {"clause": "N-KL", "slice": "all", "verdict": "held", "value": 0.5, "unit": "nat"}
        ],
    }
    (session.folder / "out").mkdir()
    (session.folder / "out" / "report.json").write_text(json.dumps(report))
    session.open(TEXT)
    text = shown(await hovered(session, "N-KL"))
    assert "✓ held on `all`" in text
    assert "stale: the contract has changed since" in text


# --- completion ----------------------------------------------------------------------------------


async def completed(session: Editor, text: str) -> dict[str, lsp.CompletionItem]:
    """Return the completions at the sign ¦ of a text, by their labels."""
    offset = text.index("¦")
    plain = text.replace("¦", "")
    session.replace(uri_of(session), plain)
    found = await session.client.text_document_completion_async(
        lsp.CompletionParams(session.document(uri_of(session)), session.position(plain, offset))
    )
    assert isinstance(found, lsp.CompletionList)
    items = sorted(found.items, key=lambda item: item.sort_text or item.label)
    return {item.label: item for item in items}


@BOTH
async def test_completion_of_metrics_replaces_the_word(start: Start, encoding: str) -> None:
    session = await prepared(start, encoding)
    text = HEAD + 'clauses:\n  # ä🜁\n  "N": {family: N, require: "p99(k¦) <= 1", level: L2}\n'
    found = await completed(session, text)
    edit = found["kl"].text_edit
    assert isinstance(edit, lsp.TextEdit)
    assert session.edited(text.replace("¦", ""), [edit]) == text.replace("k¦", "kl")
    assert "log_ratio" in found
    assert "throughput" not in found
    assert "all" not in found


async def test_completion_depends_on_the_scope(start: Start) -> None:
    session = await prepared(start, "utf-16")
    clause = 'clauses:\n  N: {{require: "{}", level: L2}}\n'
    slices = await completed(session, HEAD + clause.format("forall x in points(¦"))
    assert list(slices) == ["all", "long"]
    blocks = await completed(session, HEAD + clause.format("forall x in points(all): span(drift(¦"))
    assert "attn_0" in blocks
    variables = await completed(
        session, HEAD + clause.format("forall vector in points(all): no_flip(model, ¦")
    )
    assert list(variables) == ["vector"]
    units = await completed(session, HEAD + clause.format("p95(latency) <= 250 ¦"))
    assert {"ms", "s"} <= set(units)
    assert "GiB" not in units
    signs = await completed(session, HEAD + clause.format("mean(top1_overlap) ¦"))
    assert next(iter(signs)) == ">="


@pytest.mark.parametrize(
    "scalar", ["p99(¦", '"p99(¦"', "'p99(¦'", "|\n      p99(¦", ">-\n      p99(¦", '"p99(¦']
)
async def test_completion_in_every_scalar_style(start: Start, scalar: str) -> None:
    session = await prepared(start, "utf-16")
    found = await completed(
        session, f"{HEAD}clauses:\n  N:\n    require: {scalar}\n    level: L2\n"
    )
    assert "kl" in found


async def test_completion_of_yaml(start: Start) -> None:
    session = await prepared(start, "utf-16")
    keys = await completed(session, HEAD + "clauses:\n  N:\n    require: p99(kl) <= 1\n    ¦\n")
    assert "level" in keys
    assert "require" not in keys
    assert "metric" not in keys
    levels = await completed(session, HEAD + "clauses:\n  N: {require: p99(kl) <= 1, level: ¦}\n")
    assert list(levels) == ["L1", "L2", "L3"]
    actions = await completed(session, HEAD + "escalation:\n  L1: ¦\n")
    assert "importance_correct" in actions
    presets = await completed(session, HEAD.replace("torch-sdpa-flash", "¦"))
    assert "flash-attention-2" in presets
    adapters = await completed(session, HEAD.replace("run: torch.eager", "run: ¦"))
    assert "torch.sdpa.math" in adapters


@pytest.mark.full
async def test_snippets_are_sent_only_to_clients_that_support_them(start: Start) -> None:
    text = HEAD + "clauses:\n  N:\n    require: ¦\n    level: L2\n"
    rich = (await completed(await prepared(start, "utf-16"), text))["forall"]
    assert rich.insert_text_format == lsp.InsertTextFormat.Snippet
    assert isinstance(rich.text_edit, lsp.TextEdit)
    assert "${1:x}" in rich.text_edit.new_text
    plain = (await completed(await prepared(start, "utf-32", editor=EMACS), text))["forall"]
    assert plain.insert_text_format == lsp.InsertTextFormat.PlainText
    assert isinstance(plain.text_edit, lsp.TextEdit)
    assert "$" not in plain.text_edit.new_text
    assert plain.documentation == "The statement holds for every input of the region."


# --- names ---------------------------------------------------------------------------------------


@BOTH
async def test_definition_and_references(start: Start, encoding: str) -> None:
    session = await prepared(start, encoding)
    uri = uri_of(session)
    found = await session.client.text_document_definition_async(
        lsp.DefinitionParams(session.document(uri), at(session, "lang, 1e-3", 1))
    )
    assert isinstance(found, Iterable)
    assert list(found) == [lsp.Location(uri, session.range(TEXT, "lang"))]
    context = lsp.ReferenceContext(include_declaration=True)
    uses = await session.client.text_document_references_async(
        lsp.ReferenceParams(context, session.document(uri), at(session, "lang", 1))
    )
    assert [u.range for u in uses or ()] == [session.range(TEXT, "lang", n) for n in range(3)]


async def test_definition_of_a_library_name(start: Start) -> None:
    session = await start(VSCODE, "utf-16")
    library = "kcdsl: 1 # 🜁\nlibrary: fleet\nversion: 1.0.0\ndata: p.jsonl\nslices:\n  tail: {}\n"
    (session.folder / "fleet.kc.yaml").write_text(library, encoding="utf-8")
    text = HEAD.replace(
        "data: p", "imports:\n  - {file: fleet.kc.yaml, slices: {end: tail}}\ndata: p"
    )
    text += "clauses:\n  N: {require: p99(kl) <= 1, slices: [end], level: L2}\n"
    uri = session.open(text)

    async def definition(piece: str) -> list[lsp.Location]:
        found = await session.client.text_document_definition_async(
            lsp.DefinitionParams(session.document(uri), at(session, piece, 1, text))
        )
        return list(found)  # type: ignore[arg-type]

    target = (session.folder / "fleet.kc.yaml").as_uri()
    assert await definition("end]") == [lsp.Location(uri, session.range(text, "end"))]
    assert await definition("tail") == [lsp.Location(target, session.range(library, "tail"))]


@BOTH
async def test_rename(start: Start, encoding: str) -> None:
    session = await prepared(start, encoding)
    uri = uri_of(session)
    place = at(session, "lang, 1e-3", 1)
    ready = await session.client.text_document_prepare_rename_async(
        lsp.PrepareRenameParams(session.document(uri), place)
    )
    assert isinstance(ready, lsp.PrepareRenamePlaceholder)
    assert ready.placeholder == "lang"
    edit = await session.client.text_document_rename_async(
        lsp.RenameParams(session.document(uri), place, "tail")
    )
    assert edit is not None
    assert edit.document_changes is not None
    (change,) = edit.document_changes
    assert isinstance(change, lsp.TextDocumentEdit)
    assert change.text_document.version == 1
    result = session.edited(TEXT, list(change.edits))  # type: ignore[arg-type]
    assert result == TEXT.replace("lang", "tail")


async def test_rename_that_changes_the_meaning_is_refused(start: Start) -> None:
    session = await prepared(start, "utf-16")
    uri = uri_of(session)
    for piece, name in (("lang", "all"), ("x in ball", "kl"), ("lang", "in"), ("kl)", "tv")):
        params = lsp.RenameParams(session.document(uri), at(session, piece), name)
        with pytest.raises(JsonRpcException):
            await session.client.text_document_rename_async(params)
    with pytest.raises(JsonRpcException, match="no name here"):
        await session.client.text_document_prepare_rename_async(
            lsp.PrepareRenameParams(session.document(uri), at(session, "level: L3", 7))
        )


# --- the whole document --------------------------------------------------------------------------


@BOTH
async def test_symbols(start: Start, encoding: str) -> None:
    session = await prepared(start, encoding)
    found = await session.client.text_document_document_symbol_async(
        lsp.DocumentSymbolParams(session.document(uri_of(session)))
    )
    tree = {symbol.name: symbol for symbol in found or ()}
    clauses = tree["clauses"]
    assert isinstance(clauses, lsp.DocumentSymbol)
    assert [(c.name, c.detail) for c in clauses.children or ()] == [
        ("N-KL", "p99(kl) <= table(tau)"),
        ("N-ATTN", "forall x in ball(lang, 1e-3): norm_inf(drift(attn_0, x)) <= 0.05"),
        ("R", "p95(latency) <= 250 ms"),
        ("O", "has(trace, ['🜁ä', rng_seed])"),
    ]
    last = list(clauses.children or ())[-1]
    assert last.selection_range == session.range(TEXT, "O")
    line = "O: {level: L2, require: \"has(trace, ['🜁ä', rng_seed])\"}"
    assert last.range == session.range(TEXT, line)


async def test_formatting(start: Start) -> None:
    messy = HEAD + "clauses:\n  # ä🜁\n  N:   { require:   p99( kl )<=0.020,   level: L2 }\n"
    session = await prepared(start, "utf-16", messy)
    document, options = session.document(uri_of(session)), lsp.FormattingOptions(2, True)
    edits = await session.client.text_document_formatting_async(
        lsp.DocumentFormattingParams(document, options)
    )
    result = session.edited(messy, list(edits or ()))
    assert "N: {require: p99(kl) <= 0.020, level: L2}" in result
    assert "# ä🜁" in result
    session.replace(uri_of(session), result)
    again = await session.client.text_document_formatting_async(
        lsp.DocumentFormattingParams(document, options)
    )
    assert list(again or ()) == []


@BOTH
async def test_semantic_tokens(start: Start, encoding: str) -> None:
    session = await prepared(start, encoding)
    provider = session.capabilities.semantic_tokens_provider
    assert isinstance(provider, lsp.SemanticTokensOptions)
    found = await session.client.text_document_semantic_tokens_full_async(
        lsp.SemanticTokensParams(session.document(uri_of(session)))
    )
    assert found is not None
    named = decoded(session, list(found.data), provider.legend)
    assert named["p99"] == "function"
    assert named["kl"] == "variable"
    assert named["x"] == "parameter"
    assert named["lang"] == "namespace"
    assert named["tau"] == "type"
    assert named["attn_0"] == "class"
    assert named["ms"] == "enumMember"
    assert named["rng_seed"] == "property"
    assert named["'🜁ä'"] == "string"
    assert named["forall"] == "keyword"


def decoded(session: Editor, data: list[int], legend: lsp.SemanticTokensLegend) -> dict[str, str]:
    """Return the texts of tokens with their types."""
    lines, found = TEXT.split("\n"), {}
    line = character = 0
    for at in range(0, len(data), 5):
        down, right, length, kind, _ = data[at : at + 5]
        line, character = line + down, right if down else character + right
        text = lines[line]
        start = next(n for n in range(len(text) + 1) if session.units(text[:n]) == character)
        end = next(n for n in range(len(text) + 1) if session.units(text[start:n]) == length)
        found[text[start:end]] = legend.token_types[kind]
    return found


async def test_inlay_hints(start: Start) -> None:
    session = await prepared(start, "utf-16")
    found = await session.client.text_document_inlay_hint_async(
        lsp.InlayHintParams(session.document(uri_of(session)), session.whole(TEXT))
    )
    hints = {(h.position.line, h.label) for h in found or ()}
    kl, attn = at(session, "N-KL").line, at(session, "N-ATTN").line
    assert (kl, ": nats over requests") in hints
    assert (kl, " → empirical") in hints
    assert (kl, " → higher_precision") in hints
    assert (attn, " → interval") in hints
    assert (at(session, "p95").line, " on all") in hints
    few = await session.client.text_document_inlay_hint_async(
        lsp.InlayHintParams(session.document(uri_of(session)), session.range(TEXT, "N-KL: {"))
    )
    assert {h.position.line for h in few or ()} == {kl}


# --- actions and commands ------------------------------------------------------------------------


async def acted(
    session: Editor, where: lsp.Range, only: list[lsp.CodeActionKind | str] | None = None
) -> dict[str, lsp.CodeAction]:
    found = await session.client.text_document_code_action_async(
        lsp.CodeActionParams(
            session.document(uri_of(session)),
            where,
            lsp.CodeActionContext([], only=only),
        )
    )
    return {action.title: action for action in found or ()}  # type: ignore[misc]


def applied(session: Editor, text: str, action: lsp.CodeAction) -> str:
    assert action.edit is not None
    if action.edit.changes is not None:
        (edits,) = action.edit.changes.values()
        return session.edited(text, list(edits))
    assert action.edit.document_changes is not None
    (change,) = action.edit.document_changes
    assert isinstance(change, lsp.TextDocumentEdit)
    return session.edited(text, list(change.edits))  # type: ignore[arg-type]


@pytest.mark.sample(1)
@pytest.mark.parametrize("editor", [VSCODE, NEOVIM])
async def test_quick_fixes_and_suppressions(start: Start, editor: str) -> None:
    wrong = TEXT.replace("table(tau)", "table(tua)")
    session = await prepared(start, "utf-16", wrong, editor)
    guess = (await acted(session, session.range(wrong, "tua")))["write `tau` (a guess)"]
    assert applied(session, wrong, guess) == TEXT
    assert not guess.is_preferred
    (diagnostic,) = guess.diagnostics or ()
    assert diagnostic.range == session.range(wrong, "tua")
    text = HEAD + "clauses:\n  # ä🜁\n  N: {level: L2, require: \"has(trace, ['🜁', rng_sead])\"}\n"
    session.replace(uri_of(session), text)
    found = await acted(session, session.range(text, "rng_sead"))
    accepted = applied(session, text, found["suppress KC208 with a reason"])
    assert accepted == text.replace("  N:", "  # kcdsl: ignore[KC208] \n  N:")
    session.replace(uri_of(session), accepted.replace("KC208] ", "KC208] it is new"))
    assert "KC208" not in [d.code for d in await session.findings(uri_of(session))]
    # The client of these tests takes an action with a command for a bare command.
    assert "explain KC208: doubtful name" in found
    page = await session.client.workspace_execute_command_async(
        lsp.ExecuteCommandParams("kcdsl.explain", arguments=["KC208"])
    )
    assert str(page).startswith("**KC208**")
    shown_page = [d.uri for d in session.client.shown_documents]
    told = [m.message for m in session.client.messages]
    assert any("KC208" in text for text in (*shown_page, *told))


async def test_fix_all(start: Start) -> None:
    text = HEAD + (
        "clauses:\n"
        "  - {id: N-1, metric: p99_kl, threshold: 0.02, delta: 0, level: L2}\n"
        "  - {id: N-2, require: forall x in points(all): no_flip(model, x), level: L2}\n"
    )
    session = await prepared(start, "utf-16", text)
    quoted = 'require: "forall x in points(all): no_flip(model, x)", level: L2}'
    fix = (await acted(session, session.range(text, "no_flip")))["put it in quotation marks"]
    assert fix.is_preferred
    assert quoted in applied(session, text, fix)
    every = await acted(session, session.whole(text), [lsp.CodeActionKind.SourceFixAll])
    assert list(every) == ["fix everything that is safe to fix"]
    assert quoted in applied(session, text, every["fix everything that is safe to fix"])


@pytest.mark.full
async def test_code_lens_runs_the_verification_of_a_clause(start: Start) -> None:
    session = await start(VSCODE, "utf-16")
    (session.folder / "c.kc.yaml").write_text(TEXT, encoding="utf-8")
    uri = session.open(TEXT)
    found = await session.client.text_document_code_lens_async(
        lsp.CodeLensParams(session.document(uri))
    )
    lenses = {lens.range.start.line: lens.command for lens in found or ()}
    command = lenses[at(session, "N-ATTN").line]
    assert command is not None
    assert (command.title, command.command) == ("verify this clause", "kcdsl.verify")
    measured = lenses[at(session, "N-KL").line]
    assert measured is not None
    assert measured.command == "kcdsl.evaluate"
    answer = await session.client.workspace_execute_command_async(
        lsp.ExecuteCommandParams(command.command, arguments=command.arguments)
    )
    # There is no checkpoint, so that the process can only say so.
    status = answer["status"] if isinstance(answer, dict) else answer.status  # type: ignore[union-attr]
    assert status == 2
    assert any("N-ATTN" in message.message for message in session.client.messages)
    session.replace(uri, TEXT + "# not saved\n")
    with pytest.raises(JsonRpcException, match="save"):
        await session.client.workspace_execute_command_async(
            lsp.ExecuteCommandParams(command.command, arguments=command.arguments)
        )


# --- robustness ----------------------------------------------------------------------------------


async def test_requests_without_a_target_get_empty_answers(start: Start) -> None:
    session = await start(VSCODE, "utf-16")
    unknown = lsp.TextDocumentIdentifier("file:///nowhere/at/all.kc.yaml")
    place = lsp.Position(100, 100)
    assert await session.client.text_document_hover_async(lsp.HoverParams(unknown, place)) is None
    session.change_unknown(unknown.uri)
    for text in (
        "",
        "\n",
        "[",
        "a: b: c",
        "\x00",
        "- - -",
        "kcdsl: 1\n",
        "clauses: {N: {require: (",
    ):
        uri = session.open(text, "odd.kc.yaml")
        document = session.document(uri)
        await session.findings(uri)
        await session.client.text_document_hover_async(lsp.HoverParams(document, place))
        await session.client.text_document_completion_async(lsp.CompletionParams(document, place))
        await session.client.text_document_document_symbol_async(lsp.DocumentSymbolParams(document))
        await session.client.text_document_semantic_tokens_full_async(
            lsp.SemanticTokensParams(document)
        )
        session.close(uri)
    assert session.client.log_messages == []


async def test_server_continues_after_a_cancelled_request(start: Start) -> None:
    session = await prepared(start, "utf-16", TEXT)
    document = session.document(uri_of(session))
    waiting = [
        asyncio.ensure_future(
            session.client.text_document_hover_async(lsp.HoverParams(document, lsp.Position(n, 3)))
        )
        for n in range(30)
    ]
    await asyncio.sleep(0)
    for number in list(session.client.protocol._request_futures)[10:]:
        session.client.cancel_request(lsp.CancelParams(number))
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert len(answers) == 30
    assert (await hovered(session, "kl) <=")).range == session.range(TEXT, "kl")


async def test_untitled_document_is_checked(start: Start) -> None:
    session = await start(VSCODE, "utf-16")
    item = lsp.TextDocumentItem(
        "untitled:Untitled-1", "kernel-contract", 1, TEXT.replace("kl", "q")
    )
    session.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
    assert "KC203" in [d.code for d in await session.published(item.uri, 1)]
    session.close(item.uri)
