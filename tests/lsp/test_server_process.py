"""The server as a process: imports, exit, and the message without pygls."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcException

from kcdsl.cli.commands import settings as command
from kcdsl.lsp import answers
from kcdsl.lsp.server import build
from tests.conftest import Cli
from tests.support.editor import ENTRY, HEAD, NEOVIM, connect, disconnect

HEAVY = {"torch", "numpy", "z3", "onnx", "scipy", "safetensors", "tokenizers", "cryptography"}
TEXT = HEAD + (
    "clauses:\n"
    "  N: {require: p99(kl) <= 0.02, level: L2}\n"
    "  A: {require: 'forall x in points(all): no_flip(model, x)', level: L2}\n"
)
# The process writes its imported modules to a file when it exits.
WATCHED = (
    "import atexit, sys; atexit.register(lambda: open({!r}, 'w').write(chr(10).join(sys.modules)));"
)


@pytest.mark.full
@pytest.mark.asyncio(loop_scope="session")
async def test_no_request_imports_heavy_modules(tmp_path: Path) -> None:
    written = tmp_path / "modules"
    words = [sys.executable, "-c", WATCHED.format(str(written)) + ENTRY, "lsp"]
    client, session = await connect(tmp_path, NEOVIM, command=words)
    uri = session.open(TEXT)
    await session.findings(uri)
    document, place = session.document(uri), session.range(TEXT, "kl").start
    whole, options = session.whole(TEXT), lsp.FormattingOptions(2, True)
    await client.text_document_hover_async(lsp.HoverParams(document, place))
    await client.text_document_completion_async(lsp.CompletionParams(document, place))
    await client.text_document_formatting_async(lsp.DocumentFormattingParams(document, options))
    await client.text_document_inlay_hint_async(lsp.InlayHintParams(document, whole))
    await client.text_document_code_lens_async(lsp.CodeLensParams(document))
    renamed = lsp.RenameParams(document, session.range(TEXT, "long").start, "tail")
    await client.text_document_rename_async(renamed)
    context = lsp.CodeActionContext([])
    await client.text_document_code_action_async(lsp.CodeActionParams(document, whole, context))
    await disconnect(client)
    async with asyncio.timeout(10):
        while not written.exists() or not written.read_text():
            await asyncio.sleep(0.05)
    modules = set(written.read_text().split("\n"))
    assert "kcdsl.lsp.server" in modules
    assert modules & HEAVY == set()


def test_missing_pygls_names_the_extra(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    done = cli("lsp")
    assert done.code == 2
    assert done.stdout == ""
    assert "KC903" in done.stderr
    assert 'pip install "kcdsl[lsp]"' in done.stderr


def test_help_works_without_pygls(cli_process: Cli) -> None:
    assert cli_process("lsp", "--help").code == 0


def message(**content: Any) -> bytes:
    body = json.dumps({"jsonrpc": "2.0", **content}).encode()
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


INITIALIZE = message(
    id=1, method="initialize", params={"processId": None, "rootUri": None, "capabilities": {}}
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [(), ("--stdio",)])
def test_standard_output_carries_only_protocol_messages(words: tuple[str, ...]) -> None:
    end = message(id=2, method="shutdown") + message(method="exit")
    done = subprocess.run(
        [sys.executable, "-m", "kcdsl", "lsp", *words],
        input=INITIALIZE + message(method="initialized", params={}) + end,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    rest, ids = done.stdout, []
    while rest:
        head, _, body = rest.partition(b"\r\n\r\n")
        length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
        ids.append(json.loads(body[:length]).get("id"))
        rest = body[length:]
    assert ids == [1, 2]


@pytest.mark.full
def test_invalid_input_does_not_end_the_server() -> None:
    broken = b"Content-Length: 3\r\n\r\n{]}" + message(id=9, method="kcdsl/nothing")
    end = message(id=2, method="shutdown") + message(method="exit")
    done = subprocess.run(
        [sys.executable, "-m", "kcdsl", "lsp"],
        input=broken + INITIALIZE + end,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert b'"id": 1' in done.stdout or b'"id":1' in done.stdout
    assert b'"id": 2' in done.stdout or b'"id":2' in done.stdout


def test_server_opens_no_port(cli: Any) -> None:
    ran = cli("lsp", "--tcp=9257")
    assert ran.code == 2
    assert "`kcdsl lsp` has no option `--tcp`" in ran.stderr


@pytest.mark.asyncio(loop_scope="session")
async def test_failing_feature_is_logged_and_answered_with_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = build()
    said: list[str] = []
    monkeypatch.setattr(server, "window_log_message", lambda params: said.append(params.message))
    monkeypatch.setattr(type(server), "client_capabilities", lsp.ClientCapabilities())
    server.session.open("file:///nowhere/c.kc.yaml", 1, TEXT)

    def broken(question: answers.Question, params: object) -> None:
        raise ZeroDivisionError("planted")

    assert await server.ask("file:///nowhere/c.kc.yaml", broken, None, []) == []
    assert said == ["broken failed: ZeroDivisionError: planted"]
    assert await server.ask("file:///unknown", broken, None, "empty") == "empty"
    for uri in ("file:///nowhere/c.kc.yaml", "file:///unknown"):
        with pytest.raises(JsonRpcException):
            await server.ask(uri, broken, None, answers.NO_ANSWER)
    server.end()


def test_every_method_has_a_handler_and_an_empty_answer() -> None:
    server = build()
    registered = set(server.protocol.fm.features)
    assert set(answers.FEATURES) <= registered
    assert set(server.protocol.fm.commands) == {"kcdsl.verify", "kcdsl.evaluate", "kcdsl.explain"}
    server.end()
