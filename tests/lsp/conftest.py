"""Server sessions shared by the tests of a run: starting one takes a second."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio
from pytest_lsp import LanguageClient

from tests.support.editor import VSCODE, Editor, Start, connect, disconnect

_FOLDERS = count()
_Sessions = dict[tuple[str, str | None, bool], Editor]


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def _sessions() -> AsyncIterator[tuple[_Sessions, list[LanguageClient]]]:
    clients: list[LanguageClient] = []
    yield {}, clients
    for client in clients:
        await disconnect(client)


@pytest.fixture(scope="session")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture
def start(_sessions: tuple[_Sessions, list[LanguageClient]], _root: Path) -> Iterator[Start]:
    """Return a function that starts or reuses a session, in a new folder."""
    known, clients = _sessions
    used: list[Editor] = []

    async def begin(
        editor: str = VSCODE, encoding: str | None = None, pulls: bool = False
    ) -> Editor:
        kind = editor, encoding, pulls
        if kind not in known:
            client, known[kind] = await connect(_root, *kind)
            clients.append(client)
        session = known[kind]
        session.folder = _root / f"test{next(_FOLDERS)}"
        session.folder.mkdir()
        session.client.messages.clear()
        session.client.log_messages.clear()
        used.append(session)
        return session

    yield begin
    for session in used:
        session.close_all()
