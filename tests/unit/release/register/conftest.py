"""Registers for tests: the same tests run on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kcdsl.release.register import Register
from tests.support.postgres import Server, postgres
from tests.support.registers import clock


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """Return a server of PostgreSQL."""
    with postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.programs)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a location for a new register: a path, or the URL of an empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "register.db")
    server: Server = request.getfixturevalue("postgres_server")
    return server.database()


@pytest.fixture
def register(place: str) -> Iterator[Register]:
    """Return an empty register."""
    with Register.open(place, create=True, clock=clock) as opened:
        yield opened
