"""Tables of a register: created by migrations, opened, and refused if of another kind."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text

from kcdsl.diagnostics import Refusal
from kcdsl.diagnostics.codes import (
    NO_PACKAGE,
    REGISTER_BUSY,
    REGISTER_MISSING,
    REGISTER_SCHEMA,
    USAGE,
)
from kcdsl.release.register import Register, database, queries, schema
from kcdsl.release.register.database import MIGRATIONS, Location, RegisterDatabase
from tests.support.registers import TRUSTED, certified, clock, recorded, triple


def code_of(refusal: pytest.ExceptionInfo[Refusal]) -> object:
    return refusal.value.diagnostics[0].code


def opened(place: str) -> RegisterDatabase:
    Register.open(place, create=True, clock=clock).close()
    return RegisterDatabase(Location.of(place), create=False)


def stamp(place: str, revision: str) -> None:
    own = opened(place)
    with own.writing() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :it"), {"it": revision})
    own.close()


def test_migrations_create_the_tables_of_the_program(place: str) -> None:
    own = opened(place)
    with own.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    own.close()


def test_program_lists_every_revision() -> None:
    config = Config()
    config.set_main_option("script_location", MIGRATIONS)
    scripts = ScriptDirectory.from_config(config)
    found = [script.revision for script in scripts.walk_revisions()]
    assert found[0] == schema.REVISION
    assert list(database._KNOWN) == found[::-1]


def test_newer_register_is_refused(place: str) -> None:
    stamp(place, "9999")
    with pytest.raises(Refusal, match="9999") as refused:
        Register.open(place)
    assert code_of(refused) is REGISTER_SCHEMA
    with pytest.raises(Refusal, match="9999") as again:
        Register.upgrade(place)
    assert code_of(again) is REGISTER_SCHEMA


def test_older_register_is_refused_until_upgraded(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        older.setattr(database, "REVISION", "0001")
        with Register.open(place, create=True, clock=clock) as register:
            recorded(register, certified(triple()), TRUSTED)
            before = register.head()
    with pytest.raises(Refusal, match="older") as refused:
        Register.open(place)
    assert code_of(refused) is REGISTER_SCHEMA
    assert Register.upgrade(place) == ("0001", "0002")
    assert Register.upgrade(place) == ("0002", "0002")
    own = RegisterDatabase(Location.of(place), create=False)
    with own.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
    own.close()
    with Register.open(place, clock=clock) as register:
        assert register.head() == before
        assert register.check(trusted=TRUSTED).is_sound


def test_later_failure_is_found_by_an_index(place: str) -> None:
    """Passed certificates are not scanned, however many are newer."""
    index = "ix_certificates_not_passed"
    values = {"triple": "0" * 64, "stage": "canary", "sequence": 1, "identity": "0" * 64}
    own = opened(place)
    with own.reading() as connection:
        query = queries._NEWER.compile(connection.engine)
        assert "verdict != 'PASSED'" in str(query)
        if own.is_sqlite:
            given = query.construct_params(values)
            about = tuple(given[name] for name in query.positiontup or ())
            found = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {query}", about).all()
            assert f"USING INDEX {index} (triple=? AND stage=? AND sequence>?)" in str(found)
        else:
            wanted = "SELECT indexdef FROM pg_indexes WHERE indexname = :name"
            said = connection.execute(text(wanted), {"name": index}).scalar_one()
            assert "(triple, stage, sequence) WHERE" in said
            assert "'PASSED'" in said
    own.close()


def test_database_without_a_register_is_refused(place: str) -> None:
    if not place.startswith("postgresql"):
        sqlite3.connect(place).close()
    with pytest.raises(Refusal) as refused:
        Register.open(place)
    assert code_of(refused) is REGISTER_MISSING
    with pytest.raises(Refusal) as again:
        Register.upgrade(place)
    assert code_of(again) is REGISTER_MISSING


def test_creating_a_register_twice_changes_nothing(place: str) -> None:
    with Register.open(place, create=True, clock=clock) as register:
        first = register.head()
    with Register.open(place, create=True, clock=clock) as register:
        assert register.head() == first


def test_register_that_another_process_creates_meanwhile_is_kept(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Register.open(place, create=True, clock=clock) as register:
        first = register.head()
    real, seen = RegisterDatabase.revision, list[str | None]()

    def late(self: RegisterDatabase) -> str | None:
        seen.append(real(self))
        return None if len(seen) == 1 else seen[-1]

    monkeypatch.setattr(RegisterDatabase, "revision", late)
    with Register.open(place, create=True, clock=clock) as register:
        assert register.head() == first
    assert len(seen) == 2


def test_writer_that_waits_too_long_is_refused(place: str) -> None:
    own = opened(place)
    with (
        own.writing(),
        Register.open(place, wait=0.1) as register,
        pytest.raises(Refusal) as refused,
    ):
        register.record_triple(triple())
    assert code_of(refused) is REGISTER_BUSY
    own.close()


def test_readers_do_not_wait_for_a_writer(place: str) -> None:
    own = opened(place)
    with own.writing(), Register.open(place, wait=0.1) as register:
        assert register.head().number == 1
    own.close()


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("postgresql://user:secret@host/database", USAGE),
        ("postgresql://user@host/database?password=secret", USAGE),
        ("postgresql://user@host/database?sslmode=require&PassWord=secret", USAGE),
        ("postgresql://user@host/database?sslpassword=secret", USAGE),
        ("postgresql://user@host/database?passfile=/secret", USAGE),
        ("postgresql://user@host/database?dbname=password%3Dsecret", USAGE),
        ("postgresql://user@host/database?options=-csecret", USAGE),
        ("mysql://host/database", USAGE),
        ("https://host/register", USAGE),
        ("sqlite://", USAGE),
        ("://", USAGE),
        ("", REGISTER_MISSING),
        (".", REGISTER_MISSING),
        ("no/such/folder/register.db", REGISTER_MISSING),
        ("sqlite:///no-such.db", REGISTER_MISSING),
        ("postgresql://kcdsl@/database?host=/no/such/folder", REGISTER_MISSING),
    ],
)
def test_invalid_register_location_is_refused(
    place: str, code: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal) as refused:
        Register.open(place)
    assert code_of(refused) is code
    assert "secret" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_postgresql_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(Refusal) as refused:
        Register.open("postgresql://host/database")
    assert code_of(refused) is NO_PACKAGE


def test_commands_without_a_register_do_not_import_sqlalchemy(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "import kcdsl.api.certificates, kcdsl.cli.commands.release.check\n"
        "import kcdsl.cli.commands.release.register\n"
        "assert not {'sqlalchemy', 'alembic', 'psycopg'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=False)
    assert done.returncode == 0
