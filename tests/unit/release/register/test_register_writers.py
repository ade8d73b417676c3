"""Concurrent and killed writers: no lost entries, no forked chains."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from sqlalchemy.pool import QueuePool

from kcdsl.diagnostics import Refusal, codes
from kcdsl.release.register import Register
from tests.support.postgres import Server
from tests.support.register_writers import (
    forked_promotions,
    kill_writers,
    lost,
    promote_once,
    stopped_writer,
    write_together,
)
from tests.support.registers import TRUSTED, certified, clock, triple


def _together(place: str, writers: int, rounds: int) -> None:
    Register.open(place, create=True, clock=clock).close()
    written = write_together(place, writers, rounds)
    with Register.open(place, clock=clock) as register:
        assert len(written.certificates) == writers * rounds
        assert sorted(written.promoted) == list(range(1, writers * rounds + 1))
        assert lost(register, written) == []
        assert forked_promotions(register) == []
        assert register.check(trusted=TRUSTED).is_sound


@pytest.mark.full
def test_concurrent_writers_lose_nothing(place: str) -> None:
    _together(place, writers=8, rounds=2)


@pytest.mark.slow
def test_fifty_concurrent_writers_lose_nothing(place: str) -> None:
    _together(place, writers=50, rounds=4)


@pytest.mark.parametrize(
    "writers",
    [4, pytest.param(50, marks=pytest.mark.slow)],
)
def test_exactly_one_of_concurrent_promotions_succeeds(place: str, writers: int) -> None:
    with Register.open(place, create=True, clock=clock) as register:
        given = [certified(triple(str(number))) for number in range(writers)]
        candidates = register.record_certificates(given, TRUSTED)
    told = promote_once(place, candidates)
    assert told.count(True) == 1
    with Register.open(place, clock=clock) as register:
        assert register.slot("chat/full").version == 1
        assert len(register.promotions()) == 1


def _killed(place: str, kills: int, every: int) -> None:
    total = 0
    for seed in range(1, kills // every + 1):
        written = kill_writers(place, every, seed)
        with Register.open(place, create=True, clock=clock) as register:
            assert lost(register, written) == []
            assert forked_promotions(register) == []
            audit = register.check(trusted=TRUSTED)
            assert audit.is_sound, audit.defects
        total += len(written.certificates)
    assert total > 0


@pytest.mark.full
def test_killed_writers_lose_no_confirmed_entry(place: str) -> None:
    _killed(place, kills=20, every=10)


@pytest.mark.slow
def test_thousand_killed_writers_lose_nothing(place: str) -> None:
    _killed(place, kills=1000, every=100)


@pytest.mark.full
@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_interrupted_creation_can_be_repeated(place: str, tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / f"{number}.db"
        kill_writers(str(path), 1, number)
        with Register.open(path, create=True, clock=clock) as register:
            assert register.check(trusted=TRUSTED).is_sound
            assert next(register.events()).kind.value == "register"


@pytest.mark.programs
def test_writers_wait_under_any_isolation_level(postgres_server: Server) -> None:
    """A snapshot from before the lock of the head would make the second writer fail."""
    import psycopg

    place = postgres_server.database()
    with psycopg.connect(place, autocommit=True) as connection:
        connection.execute(
            f"ALTER DATABASE {connection.info.dbname}"
            " SET default_transaction_isolation = 'serializable'"
        )
    _together(place, writers=4, rounds=2)


@pytest.mark.programs
def test_connections_survive_a_server_restart(postgres_server: Server) -> None:
    """A long-running gate keeps connections, which a restart closes."""
    import psycopg

    place = postgres_server.database()
    with Register.open(place, create=True, clock=clock) as register:
        head = register.head()
        with psycopg.connect(place, autocommit=True) as connection:
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        assert register.head() == head


@pytest.mark.programs
@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("53100", codes.INPUT_OUTPUT),
        ("42501", codes.INPUT_OUTPUT),
        ("25006", codes.INPUT_OUTPUT),
        ("25P03", codes.INPUT_OUTPUT),
        ("08P01", codes.INPUT_OUTPUT),
        ("40001", codes.REGISTER_BUSY),
        ("40P01", codes.REGISTER_BUSY),
        ("XX001", codes.REGISTER_DAMAGED),
    ],
    ids=[
        *("disk full", "no right", "read-only", "idle", "connection"),
        *("conflict", "deadlock", "corrupted"),
    ],
)
def test_read_only_server_is_not_reported_as_damage(
    postgres_server: Server, state: str, code: object
) -> None:
    import psycopg

    place = postgres_server.database()
    Register.open(place, create=True, clock=clock).close()
    with psycopg.connect(place, autocommit=True) as connection:
        connection.execute(
            "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{state}'; END $$;"
            " CREATE TRIGGER no BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION no()"
        )
    with Register.open(place, clock=clock) as register, pytest.raises(Refusal) as caught:
        register.revoke("ab" * 32, "wrong data")
    assert caught.value.diagnostics[0].code is code


@pytest.mark.programs
def test_stopped_writer_does_not_block_others(
    postgres_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open connection holds the lock of the head until the server ends it."""
    from kcdsl.release.register import database

    monkeypatch.setattr(database, "STOPPED", 0.2)
    place = postgres_server.database()
    Register.open(place, create=True, clock=clock).close()
    with stopped_writer(place), Register.open(place, clock=clock) as register:
        assert register.revoke("ab" * 32, "wrong data").number == 2
        assert register.check(trusted=TRUSTED).is_sound


@pytest.mark.programs
@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_database_in_another_encoding_works_or_refuses(
    postgres_server: Server, encoding: str
) -> None:
    """Texts are not in the encoding of the server, and unencodable ones give no traceback."""
    import psycopg

    name = f"encoded_{encoding.lower()}"
    with psycopg.connect(postgres_server.url("postgres"), autocommit=True) as connection:
        locale = "LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
        connection.execute(f"CREATE DATABASE {name} ENCODING '{encoding}' {locale}".encode())
    place = postgres_server.url(name)
    with Register.open(place, create=True, clock=clock) as register:
        register.revoke("ab" * 32, "schädlich")
        if encoding == "SQL_ASCII":
            register.revoke("cd" * 32, "有害")
        else:
            with pytest.raises(Refusal) as caught:
                register.revoke("cd" * 32, "有害")
            assert caught.value.diagnostics[0].code is codes.INPUT_OUTPUT
        known = ["schädlich", "有害"][: 2 if encoding == "SQL_ASCII" else 1]
        assert [each.reason for each in register.revocations()] == known
        assert register.check(trusted=TRUSTED).is_sound


def test_more_readers_than_connections_are_not_reported_as_damage(place: str) -> None:
    """A gate answers 32 requests concurrently, and its pool has fewer connections."""
    Register.open(place, create=True, clock=clock).close()
    with Register.open(place, clock=clock) as register, ExitStack() as readers:
        pool = register._database._engine.pool
        assert isinstance(pool, QueuePool)
        pool._timeout = 0.01
        for _ in range(pool.size() + pool._max_overflow):
            readers.enter_context(register._reading())
        with pytest.raises(Refusal) as caught:
            readers.enter_context(register._reading())
        assert caught.value.diagnostics[0].code is codes.REGISTER_BUSY
