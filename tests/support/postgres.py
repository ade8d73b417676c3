"""A PostgreSQL server in a temporary folder, reached only through a socket in that folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import psycopg


def _program(name: str) -> str:
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return str(found[-1]) if found else name


@dataclass(frozen=True, slots=True)
class Server:
    """A running server; each new database is empty."""

    folder: Path
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def url(self, name: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://kcdsl@/{name}?host={self.folder}"

    def database(self, template: str | None = None) -> str:
        """Make a database, empty or as a copy of one at a URL; return its URL."""
        name = f"register_{next(self._numbers)}"
        like = "" if template is None else f" TEMPLATE {urlsplit(template).path[1:]}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}{like}".encode())
        return self.url(name)

    def control(self, *words: str) -> None:
        """Start or stop the server, as a user other than root, which the server refuses."""
        _run("pg_ctl", "-D", str(self.folder / "data"), "-w", *words)


@contextmanager
def postgres() -> Iterator[Server]:
    """Start a server; stop and remove it at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kcdsl-postgres-"))
    server = Server(folder)
    try:
        if os.geteuid() == 0:
            shutil.chown(folder, "postgres", "postgres")
        data = str(folder / "data")
        _run("initdb", "-D", data, "-A", "trust", "-U", "kcdsl", "-E", "UTF8", "--no-sync")
        options = f"-k {folder} -c listen_addresses= -c max_connections=120"
        server.control("-l", str(folder / "log"), "-o", options, "start")
        try:
            yield server
        finally:
            server.control("-m", "immediate", "stop")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(program: str, *words: str) -> None:
    user = "postgres" if os.geteuid() == 0 else None
    done = subprocess.run(
        [_program(program), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
        cwd="/",
        check=False,
        timeout=120,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program}: {done.stderr.decode(errors='replace')}")
