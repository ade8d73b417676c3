"""The database of a register: SQLite in a file, or PostgreSQL by its URL.

Appends are serialised: in SQLite by BEGIN IMMEDIATE, in PostgreSQL by a lock on the only row of
`head`. A commit returns after the data is on disk.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, inspect, select, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import (
    ArgumentError,
    DatabaseError,
    DisconnectionError,
    NoSuchModuleError,
    SQLAlchemyError,
)
from sqlalchemy.exc import TimeoutError as NoFreeConnection
from sqlalchemy.pool import QueuePool

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import (
    INPUT_OUTPUT,
    NO_PACKAGE,
    REGISTER_BUSY,
    REGISTER_DAMAGED,
    REGISTER_MISSING,
    REGISTER_SCHEMA,
    USAGE,
)
from kcdsl.release.register.schema import REVISION, head

WAIT = 60.0
"""The default time in seconds that a writer waits for other writers."""
MIGRATIONS = "kcdsl.release.register:migrations"
_WRITES = "kcdsl_writes"
_KNOWN = ("0001", REVISION)
"""The known revisions, oldest first."""
_OPTIONS = frozenset(
    {
        "application_name",
        "channel_binding",
        "connect_timeout",
        "gssencmode",
        "host",
        "hostaddr",
        "port",
        "sslcert",
        "sslcrl",
        "sslkey",
        "sslmode",
        "sslrootcert",
        "target_session_attrs",
        "user",
    }
)
"""Options of libpq that the URL of a register may have: none is a password, or names a file of
passwords."""
STOPPED = 60.0
"""Seconds after which PostgreSQL ends an idle transaction: that of a stopped process or a lost
machine would block all other writers."""
_OF_THE_SERVER = ("08", "22P05", "25", "42501", "53", "54", "57", "58")
"""SQL states of server problems: connection, encoding, read-only or ended transaction, privilege,
resources, limits, shutdown, I/O error."""
_CONFLICTS = ("40001", "40P01")
"""SQL states of a conflict with another transaction, or on a standby."""
_LOCK = 0x6B6364736C
"""The advisory lock of PostgreSQL for creating and upgrading a register."""


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a register. `shown` is safe to print: it has no password."""

    url: URL
    path: Path | None
    shown: str

    @classmethod
    def of(cls, place: str | os.PathLike[str]) -> Location:
        """Read a path, `sqlite:///PATH` or `postgresql://…`; raises Refusal for anything else."""
        written = os.fspath(place)
        if "://" not in written:
            return cls._file(Path(written))
        try:
            url = make_url(written)
        except (ArgumentError, ValueError):
            raise _no_register(written.partition("://")[0]) from None
        if url.password is not None:
            raise refuse(
                USAGE,
                "the URL of a register holds a password, which others can read",
                help="leave it out; libpq reads PGPASSWORD, PGPASSFILE and ~/.pgpass",
            )
        if url.drivername == "sqlite" and url.database and not url.host:
            return cls._file(Path(url.database))
        if url.drivername in {"postgresql", "postgres", "postgresql+psycopg"}:
            unknown = sorted(url.query.keys() - _OPTIONS)
            if unknown:
                raise refuse(
                    USAGE,
                    f"the URL of a register has the option {unknown[0][:40]!a}",
                    help=f"options are {', '.join(sorted(_OPTIONS))}; for a password, "
                    "libpq reads PGPASSWORD, PGPASSFILE and ~/.pgpass",
                )
            own = url.set(drivername="postgresql+psycopg")
            return cls(own, None, url.render_as_string())
        raise _no_register(url.drivername)

    @classmethod
    def _file(cls, path: Path) -> Location:
        return cls(URL.create("sqlite", database=str(path)), path, str(path))


def _no_register(kind: str) -> Refusal:
    return refuse(
        USAGE,
        f"{kind[:40]!r} is no kind of register",
        help="name a file, sqlite:///FILE, or postgresql://HOST/DATABASE",
    )


class RegisterDatabase:
    """Connections to one register."""

    def __init__(self, location: Location, *, create: bool, wait: float = WAIT) -> None:
        self.location = location
        self._wait = wait
        self._engine = _engine(location, create, wait)

    @property
    def is_sqlite(self) -> bool:
        """Return whether it is an SQLite file."""
        return self.location.path is not None

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yield a read-only connection with a snapshot of the register."""
        with self._translating(), self._engine.connect() as plain:
            options: dict[str, Any] = {}
            if not self.is_sqlite:
                options = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
            connection = plain.execution_options(**options)
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Yield the only connection that may append; its writes are committed together or not at
        all."""
        with self._translating(), self._engine.connect() as plain:
            connection = plain.execution_options(**self._of_writers)
            with connection.begin():
                if not self.is_sqlite:
                    limit = f"SET LOCAL idle_in_transaction_session_timeout = {STOPPED * 1000:.0f}"
                    connection.exec_driver_sql(limit)
                    connection.execute(select(head.c.id).with_for_update()).all()
                yield connection

    @contextmanager
    def defining(self) -> Iterator[Connection]:
        """Yield the only connection that may create or change tables, in one transaction."""
        with self._translating():
            if self.is_sqlite:  # outside any transaction; the setting is stored in the file
                with self._engine.connect() as own:
                    raw: Any = own.connection.dbapi_connection
                    raw.execute("PRAGMA journal_mode=WAL")
            with self._engine.connect() as plain:
                connection = plain.execution_options(**self._of_writers)
                with connection.begin():
                    if not self.is_sqlite:
                        connection.execute(text("SELECT pg_advisory_xact_lock(:n)"), {"n": _LOCK})
                    yield connection

    @property
    def _of_writers(self) -> dict[str, Any]:
        """Return the options of a write transaction. After it has the lock, it must read what
        others committed before, whatever the default isolation level is."""
        found: dict[str, Any] = {_WRITES: True}
        return found if self.is_sqlite else found | {"isolation_level": "READ COMMITTED"}

    def revision(self) -> str | None:
        """Return the revision of the tables; None where there is no register."""
        with self.reading() as connection:
            return revision_of(connection)

    def refuse_other_revision(self, *, older: bool = False) -> None:
        """Refuse a database that is no register, or has tables of another program version.

        With `older`, tables that can be upgraded are accepted.
        """
        found = self.revision()
        where = self.location.shown
        if found == REVISION or (older and found in _KNOWN):
            return
        if found is None:
            raise refuse(
                REGISTER_MISSING,
                f"there is no register in {where}",
                help=f"`kcdsl register init --register {where}` makes one",
            )
        if found in _KNOWN:
            raise refuse(
                REGISTER_SCHEMA,
                f"the register {where} has the older tables {found}, not {REVISION}",
                help=f"`kcdsl register upgrade --register {where}` changes them",
            )
        raise refuse(
            REGISTER_SCHEMA,
            f"the register {where} has tables {found[:40]!a}, which this program does not know",
            help="use the newer version of kcdsl that made them",
        )

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error) as error:
            raise self._refusal(error) from error
        except UnicodeDecodeError as error:  # error messages of SQLite quote damaged data
            raise refuse(
                REGISTER_DAMAGED,
                f"the register {self.location.shown} cannot be used: it has bytes that are no text",
                help="restore it from a copy; nothing was written",
            ) from error

    def _refusal(self, error: SQLAlchemyError | sqlite3.Error) -> Refusal:
        where = self.location.shown
        cause: BaseException | None = error if isinstance(error, sqlite3.Error) else None
        if isinstance(error, DatabaseError):
            cause = error.orig
        said = " ".join(str(cause or error).split())[:300]
        in_conflict = getattr(cause, "sqlstate", None) in _CONFLICTS
        if in_conflict or isinstance(error, NoFreeConnection):
            return refuse(
                REGISTER_BUSY,
                f"others use the register {where} at the same time: {said}",
                help="run the command again; nothing was written",
            )
        if _is_busy(cause):
            return refuse(
                REGISTER_BUSY,
                f"others held the register {where} for {self._wait:g} s",
                help="run the command again; nothing was written",
            )
        if not self.is_sqlite and (cause is None or getattr(cause, "sqlstate", None) is None):
            return refuse(
                REGISTER_MISSING,
                f"the register {where} cannot be reached: {said}",
                help="check the URL, the server, and the password in ~/.pgpass",
            )
        if _kind(cause) == sqlite3.SQLITE_CANTOPEN:
            return refuse(
                REGISTER_MISSING,
                f"the register {where} cannot be opened: {said}",
                help="its folder must be there and writable, also for those who only read: SQLite"
                " keeps files beside it",
            )
        if _kind(cause) in {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY}:
            return refuse(
                INPUT_OUTPUT,
                f"the disk cannot store the register {where}: {said}",
                help="make room, or let this user write there; nothing was written",
            )
        if str(getattr(cause, "sqlstate", "")).startswith(_OF_THE_SERVER):
            return refuse(
                INPUT_OUTPUT,
                f"the server of the register {where} refused the operation: {said}",
                help="it lacks room, is read-only or stopping, the user lacks a right, or its "
                "encoding is not UTF8",
            )
        return refuse(
            REGISTER_DAMAGED,
            f"the register {where} cannot be used: {said}",
            help="`kcdsl register check` says what is wrong; nothing was written",
        )


def _is_busy(cause: BaseException | None) -> bool:
    if _kind(cause) in {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}:
        return True
    return getattr(cause, "sqlstate", None) == "55P03"  # lock_not_available


def _kind(cause: BaseException | None) -> int:
    """Return the primary result code of SQLite; 0 for other errors."""
    return getattr(cause, "sqlite_errorcode", 0) & 0xFF if cause is not None else 0


def upgrade(connection: Connection) -> None:
    """Create or upgrade the tables, in the transaction of the connection."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", MIGRATIONS)
    config.attributes["connection"] = connection
    command.upgrade(config, REVISION)


def revision_of(connection: Connection) -> str | None:
    """Return the revision of the tables; None where there are none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalars().all()
    return str(found[0]) if len(found) == 1 else None


def _engine(location: Location, create: bool, wait: float) -> Engine:
    if location.path is not None:
        return _sqlite(location.path, location.shown, create, wait)
    settings = f"-c lock_timeout={int(wait * 1000)} -c synchronous_commit=on"
    try:
        return create_engine(
            location.url,
            connect_args={
                "options": settings,
                "connect_timeout": int(WAIT),
                "client_encoding": "utf8",  # whatever the encoding of the database is
            },
            pool_pre_ping=True,  # a restart of the server ends connections that are kept
        )
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise refuse(
            NO_PACKAGE,
            "a register in PostgreSQL needs psycopg, which is not installed",
            help="pip install 'kcdsl[postgres]'",
        ) from error


_COMPUTED = """
SELECT m.name FROM sqlite_master AS m
WHERE m.type = 'view' OR m.sql LIKE 'CREATE VIRTUAL%'
   OR (m.type = 'table'
       AND EXISTS (SELECT 1 FROM pragma_table_xinfo(m.name) AS c WHERE c.hidden <> 0))
LIMIT 1
"""


def _refuse_computed(raw: sqlite3.Connection, shown: str) -> None:
    """Refuse a file with views or computed columns, whose queries might never end."""
    try:
        found = raw.execute(_COMPUTED).fetchall()
    except (sqlite3.Error, UnicodeDecodeError):
        return  # reported by the reader of the tables
    if found:
        raise refuse(
            REGISTER_DAMAGED,
            f"the register {shown} computes {str(found[0][0])[:40]!a}, which no register does",
            help="restore it from a copy; nothing was written",
        )


def _file_at(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file at a path; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _sqlite(path: Path, shown: str, create: bool, wait: float) -> Engine:
    if not create and not path.is_file():
        raise refuse(
            REGISTER_MISSING,
            f"there is no register {shown}",
            help=f"`kcdsl register init --register {shown}` makes one",
        )
    path = path.absolute()
    uri = f"{path.as_uri()}?mode={'rwc' if create else 'rw'}"

    def connect() -> sqlite3.Connection:
        # `begin` below starts transactions explicitly.
        return sqlite3.connect(
            uri, uri=True, timeout=wait, isolation_level=None, check_same_thread=False
        )

    engine = create_engine("sqlite+pysqlite://", creator=connect, poolclass=QueuePool)

    @event.listens_for(engine, "checkout")
    def look(raw: Any, record: Any, proxy: Any) -> None:
        # A connection still reads the old bytes of a file that was removed or replaced.
        found = _file_at(path)
        if found is None or record.info["file"] != found:
            raise DisconnectionError

    @event.listens_for(engine, "connect")
    def configure(raw: Any, record: Any) -> None:
        record.info["file"] = _file_at(path)
        for setting in ("synchronous=FULL", "foreign_keys=ON", "trusted_schema=OFF"):
            raw.execute(f"PRAGMA {setting}")
        _refuse_computed(raw, shown)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
