"""An audit finds every change that was made to a register outside the program."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import update

from kcdsl.diagnostics import Refusal, codes
from kcdsl.release.register import Promotion, PromotionState, Register, Revocation, Revoked
from kcdsl.release.register.chain import Chain, head_in, insert_event
from kcdsl.release.register.database import Location, RegisterDatabase
from kcdsl.release.register.events import Event, EventKind, hash_of
from kcdsl.release.register.projections import MARK, text_of
from kcdsl.release.register.schema import head
from kcdsl_certs.encoding.strict import canonical_json, time_text
from kcdsl_certs.signatures import bundle_bytes, sign
from kcdsl_certs.statement import Verdict, head_bytes
from tests.support.postgres import Server
from tests.support.registers import (
    CONTRACT,
    FILLED,
    LAST,
    NOW,
    TRUSTED,
    certified,
    clock,
    fill,
    recorded,
    triple,
    trusted,
)
from tests.support.vectors.golden import KEY_A, KEY_B, KEY_C

ALL = trusted(KEY_A, KEY_B, KEY_C)


@contextmanager
def unguarded(place: str) -> Iterator[Callable[..., Any]]:
    """Yield a function that runs SQL without the triggers, which are restored at the end."""
    if place.startswith("postgresql"):
        with psycopg.connect(place) as connection:
            tables = ("events", "bundles")
            for table in tables:
                connection.execute(f"ALTER TABLE {table} DISABLE TRIGGER ALL".encode())
            yield lambda text, *values: connection.execute(text.replace("?", "%s").encode(), values)
            for table in tables:
                connection.execute(f"ALTER TABLE {table} ENABLE TRIGGER ALL".encode())
        return
    raw = sqlite3.connect(place)
    triggers = raw.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    for name, _ in triggers:
        raw.execute(f"DROP TRIGGER {name}")
    yield lambda text, *values: raw.execute(text, values)
    for _, text in triggers:
        raw.execute(text)
    raw.commit()
    raw.close()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a filled register in a file, which tests copy."""
    path = tmp_path_factory.mktemp("register") / "filled.db"
    with Register.open(path, create=True, clock=clock) as register:
        fill(register)
    return path


@pytest.fixture(scope="session")
def postgres_template(postgres_server: Server) -> str:
    """Return a filled register in a database, which tests copy."""
    url = postgres_server.database()
    with Register.open(url, create=True, clock=clock) as register:
        fill(register)
    return url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.programs)])
def filled(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the location of a filled register that a test may damage."""
    if request.param == "sqlite":
        found = shutil.copy(request.getfixturevalue("sqlite_template"), tmp_path / "filled.db")
        return str(found)
    server: Server = request.getfixturevalue("postgres_server")
    return server.database(request.getfixturevalue("postgres_template"))


def reasons(place: str, *heads: bytes) -> set[str]:
    with Register.open(place, clock=clock) as register:
        found = register.check(heads, ALL)
    return {defect.reason for defect in found.defects}


Change = Callable[[Callable[..., Any]], object]


def _body(run: Callable[..., Any], number: int) -> dict[str, Any]:
    found = run("SELECT body FROM events WHERE number = ?", number).fetchone()
    return dict(json.loads(bytes(found[0])))


def test_register_with_every_kind_of_event_is_valid(
    filled: str, follows: Callable[..., None]
) -> None:
    with Register.open(filled, clock=clock) as register:
        kinds = {event.kind.value for event in register.events()}
        audit = register.check(trusted=trusted(KEY_A))
        without_keys = register.check()
    assert len(kinds) == 7
    assert (without_keys.is_sound, without_keys.unverified) == (True, 4)
    assert (audit.is_sound, audit.certificates, audit.unverified) == (True, 4, 1)
    follows(audit.to_json())


# --- the chain ------------------------------------------------------------------------------------


def _rewritten(number: int, change: Callable[[dict[str, Any]], None], *, rehash: bool) -> Change:
    """Change the body of an event, and with `rehash` its hash and, if it is the last, the head."""

    def apply(run: Callable[..., Any]) -> None:
        document = _body(run, number)
        change(document)
        body = canonical_json(document)
        run("UPDATE events SET body = ? WHERE number = ?", body, number)
        if rehash:
            run("UPDATE events SET hash = ? WHERE number = ?", hash_of(body), number)
            run("UPDATE head SET hash = ? WHERE number = ?", hash_of(body), number)

    return apply


def _verdict(document: dict[str, Any]) -> None:
    document["data"]["verdict"] = "PASSED"


def _reason(document: dict[str, Any]) -> None:
    document["data"]["reason"] = "another"


CHAIN: dict[str, tuple[Change, str]] = {
    "a body": (_rewritten(6, _verdict, rehash=False), "chain/hash"),
    "a body and its hash": (_rewritten(6, _verdict, rehash=True), "chain/previous"),
    "the last body": (_rewritten(LAST, _reason, rehash=False), "chain/hash"),
    "a removed event": (lambda run: run("DELETE FROM events WHERE number = 7"), "chain/number"),
    "a removed last event": (
        lambda run: run("DELETE FROM events WHERE number = ?", LAST),
        "head/mismatch",
    ),
    "no event": (lambda run: run("DELETE FROM events"), "chain/empty"),
    "exchanged events": (
        lambda run: [
            run("UPDATE events SET number = ? WHERE number = ?", new, old)
            for old, new in ((7, 99), (8, 7), (99, 8))
        ],
        "chain/previous",
    ),
    "a kind": (lambda run: run("UPDATE events SET kind = 'run' WHERE number = 3"), "chain/column"),
    "a time": (
        lambda run: run("UPDATE events SET time = '2020-01-01T00:00:00Z' WHERE number = 3"),
        "chain/column",
    ),
    "a previous hash": (
        lambda run: run("UPDATE events SET previous = ? WHERE number = 3", "0" * 64),
        "chain/column",
    ),
    "a spelling": (
        lambda run: run(
            "UPDATE events SET body = ? WHERE number = ?",
            json.dumps(_body(run, LAST), indent=1).encode(),
            LAST,
        ),
        "chain/event",
    ),
    "the number of the head": (lambda run: run("UPDATE head SET number = 9"), "head/mismatch"),
    "the hash of the head": (
        lambda run: run("UPDATE head SET hash = ?", "0" * 64),
        "head/mismatch",
    ),
    "the register of the head": (
        lambda run: run("UPDATE head SET register = ?", "0" * 64),
        "head/mismatch",
    ),
    "no head": (lambda run: run("DELETE FROM head"), "head/missing"),
}


@pytest.mark.parametrize("name", CHAIN)
def test_changed_chain_is_found(filled: str, name: str) -> None:
    change, reason = CHAIN[name]
    with unguarded(filled) as run:
        change(run)
    assert reason in reasons(filled)


# --- projections and bundles ----------------------------------------------------------------------


FOLLOWS: dict[str, tuple[str, str]] = {
    "a forgotten failure": ("DELETE FROM certificates WHERE verdict = 'FAILED'", "certificates"),
    "a better verdict": (
        "UPDATE certificates SET verdict = 'PASSED' WHERE verdict = 'FAILED'",
        "certificates",
    ),
    "another sequence": (
        "UPDATE certificates SET sequence = 77 WHERE sequence = 2",
        "certificates",
    ),
    "a lost revocation": ("DELETE FROM revocations WHERE kind = 'certificate'", "revocations"),
    "another revoked key": (
        "UPDATE revocations SET subject = '" + "9" * 64 + "' WHERE kind = 'key'",
        "revocations",
    ),
    "another live triple": ("UPDATE slots SET triple = NULL", "slots"),
    "another version": ("UPDATE slots SET version = 1", "slots"),
    "a trusted run": ("UPDATE runs SET trusted = (1 = 1)", "runs"),
    "a lost decision": ("DELETE FROM promotions WHERE state = 'rolled-back'", "promotions"),
    "another decision": (
        "UPDATE promotions SET state = 'promoted' WHERE state = 'rolled-back'",
        "promotions",
    ),
    "another contract": ("UPDATE triples SET contract = '" + "9" * 64 + "'", "triples"),
}


@pytest.mark.parametrize("name", FOLLOWS)
def test_table_that_contradicts_the_events_is_found(filled: str, name: str) -> None:
    text, table = FOLLOWS[name]
    with unguarded(filled) as run:
        run(text)
    assert reasons(filled) == {f"projection/{table}"}


def _answers(register: Register) -> None:
    """Read everything that checks, gates and promotions read."""
    for name in ("one", "two"):
        about = triple(name).digest
        register.refuse_changed(about)
        assert register.triple(about) is not None
        register.runs(triple=about, trusted=False)
    register.runs(trusted=True)
    register.promotions(slot=FILLED)
    register.slot(FILLED)


HIDES = {
    **{name: text for name, (text, _) in FOLLOWS.items()},
    "a live triple that was rolled back": (
        "UPDATE slots SET record = replace(record, '"
        + triple("one").digest
        + "', '"
        + triple("two").digest
        + "'), triple = '"
        + triple("two").digest
        + "'"
    ),
    "a failure of another stage": (
        "UPDATE certificates SET stage = 'full' WHERE verdict = 'FAILED'"
    ),
    "another event": "UPDATE revocations SET event = 99 WHERE kind = 'key'",
    "a slot of before": "DELETE FROM slots",
}


@pytest.mark.parametrize("name", HIDES)
def test_changed_table_is_detected_on_reading(filled: str, name: str) -> None:
    """A failure hidden by a table alone is detected without an audit."""
    with Register.open(filled, clock=clock) as register:
        _answers(register)
    with unguarded(filled) as run:
        run(HIDES[name])
    with Register.open(filled, clock=clock) as register, pytest.raises(Refusal) as caught:
        _answers(register)
    assert caught.value.diagnostics[0].code is codes.REGISTER_DAMAGED


_HELD = Promotion(
    FILLED, triple("two").digest, None, CONTRACT.digest, "canary", PromotionState.HELD
)


def _refused(place: str, use: Callable[[Register], object], words: str) -> None:
    with Register.open(place, clock=clock) as register, pytest.raises(Refusal) as caught:
        use(register)
    (found,) = caught.value.diagnostics
    assert found.code is codes.REGISTER_DAMAGED
    assert words in found.message


@pytest.mark.parametrize("last", [PromotionState.PROMOTED, PromotionState.HELD])
def test_slot_with_a_triple_of_an_earlier_decision_is_refused(
    register: Register, place: str, last: PromotionState
) -> None:
    """The record is that of the first decision, with the version and the event of the last."""
    one, two, three = (recorded(register, certified(triple(n))) for n in ("one", "two", "three"))
    first = Promotion(
        FILLED, one.triple, None, CONTRACT.digest, "canary", PromotionState.PROMOTED,
        certificates=(one.identity,),
    )  # fmt: skip
    live = register.promote(FILLED, 0, first)
    moved = replace(first, candidate=two.triple, incumbent=one.triple, certificates=(two.identity,))
    after = register.promote(FILLED, 1, moved)
    if last is PromotionState.HELD:
        third = replace(moved, candidate=three.triple, incumbent=two.triple, state=last)
        after = register.promote(FILLED, 2, replace(third, certificates=()))
    forged = text_of(replace(live, version=after.version).to_json())
    with unguarded(place) as run:
        run("UPDATE slots SET record = ?, triple = ?", forged, one.triple)
    _refused(place, lambda register: register.slot(FILLED), "not as its decisions left it")


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE promotions SET record = '[]'",
        "UPDATE promotions SET record = replace(record, '" + "6" * 64 + "', '" + "5" * 64 + "')",
        f"UPDATE promotions SET slot = '{FILLED}'",
        "DELETE FROM promotions",
    ],
)
def test_changed_decision_does_not_hide_counted_traffic(
    register: Register, place: str, change: str
) -> None:
    one, elsewhere = triple("one"), "chat/other"
    register.record_triple(one)
    register.promote(
        elsewhere, 0, replace(_HELD, slot=elsewhere, candidate=one.digest, evidence=("6" * 64,))
    )
    with unguarded(place) as run:
        run(change)
    with pytest.raises(Refusal, match="was counted for") as caught:
        register.refuse_counted(FILLED, one.digest, ["6" * 64])
    assert caught.value.diagnostics[0].code is codes.PROMOTION_EVIDENCE


@pytest.mark.parametrize("table", ["certificates", "runs", "promotions", "slots", "revocations"])
def test_changed_entry_is_found(filled: str, table: str) -> None:
    with unguarded(filled) as run:
        number, text = run(f"SELECT event, record FROM {table} ORDER BY event").fetchone()
        changed = text.replace('"sha256":"', '"sha256":"0', 1)
        assert changed != text
        run(f"UPDATE {table} SET record = ? WHERE event = ?", changed, number)
    assert reasons(filled) == {f"projection/{table}"}


def test_changed_missing_and_stray_bundles_are_found(filled: str) -> None:
    with Register.open(filled, clock=clock) as register:
        first = register.certificates()[0]
    with unguarded(filled) as run:
        run("UPDATE bundles SET content = ? WHERE digest = ?", b"{}", first.bundle)
    assert reasons(filled) == {"bundle/digest"}
    _refused(filled, lambda register: register.bundle(first.identity), "is not as recorded")
    with unguarded(filled) as run:
        run("DELETE FROM bundles WHERE digest = ?", first.bundle)
    assert reasons(filled) == {"bundle/missing"}
    _refused(filled, lambda register: register.bundle(first.identity), "is not as recorded")


def test_bundle_without_an_event_is_found(filled: str) -> None:
    with unguarded(filled) as run:
        run("INSERT INTO bundles (digest, content) VALUES (?, ?)", hash_of(b"{}"), b"{}")
    assert reasons(filled) == {"bundle/stray"}


def _forge(place: str, data: bytes, **changes: Any) -> None:
    """Append a well-chained event about a bundle, bypassing the conditions of the program."""
    from kcdsl.release.register.admission import entry_of
    from kcdsl_certs.signatures import decode, parse_bundle
    from kcdsl_certs.verification.admission import read_statement

    payload = decode(parse_bundle(data)).payload
    entry = entry_of(data, payload, read_statement(payload), (KEY_A.public.fingerprint,), 1)
    database = RegisterDatabase(Location.of(place), create=False)
    with database.writing() as connection:
        from sqlalchemy import insert

        from kcdsl.release.register.schema import bundles

        connection.execute(insert(bundles).values(digest=entry.bundle, content=data))
        chain = Chain(connection, clock())
        chain.append(EventKind.CERTIFICATE, replace(entry, **changes).to_json())
        chain.close()
    database.close()


def test_event_about_an_unsigned_bundle_is_found(filled: str) -> None:
    _forge(filled, certified(triple("one"), KEY_C, sequence=50))
    assert reasons(filled) == {"bundle/signature"}


def test_event_that_claims_more_than_its_bundle_is_found(filled: str) -> None:
    failed = certified(triple("one"), sequence=50, verdict=Verdict.FAILED)
    _forge(filled, failed, verdict=Verdict.PASSED)
    assert reasons(filled) == {"bundle/content"}


def _append_unchecked(
    place: str, kind: EventKind, data: dict[str, Any], time: datetime = NOW
) -> None:
    """Append a chained event that no table follows."""
    database = RegisterDatabase(Location.of(place), create=False)
    with database.writing() as connection:
        last = head_in(connection)
        event = Event(last.number + 1, time, last.hash, kind, data)
        insert_event(connection, event)
        now = {"number": event.number, "hash": event.hash, "time": time_text(time)}
        connection.execute(update(head).values(now))
    database.close()


IMPOSSIBLE: dict[str, tuple[EventKind, dict[str, Any], datetime, set[str]]] = {
    "a second beginning": (
        EventKind.REGISTER,
        {"id": "0" * 32},
        NOW,
        {"a register begins with its first event alone", "a register begins once (chain/event)"},
    ),
    "a mark of an unknown run": (
        EventKind.RUN_MARK,
        MARK.write({"run": "0" * 64, "trusted": True, "reason": "good"}),
        NOW,
        {f"the run {'0' * 64} was not recorded before (chain/event)"},
    ),
    "a decision about a later version": (
        EventKind.PROMOTION,
        replace(_HELD, incumbent=triple("one").digest, version=9).to_json(),
        NOW,
        {f"{FILLED} has version 3, the decision is about 8 (slot/stale)"},
    ),
    "an earlier time": (
        EventKind.REVOCATION,
        Revocation(Revoked.KEY, "7" * 64, "lost").to_json(),
        NOW - timedelta(seconds=1),
        {"it is earlier than the event before it"},
    ),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_event_is_found(filled: str, name: str) -> None:
    kind, data, time, details = IMPOSSIBLE[name]
    _append_unchecked(filled, kind, data, time)
    with Register.open(filled, clock=clock) as register:
        found = register.check(trusted=ALL)
    assert details <= {defect.detail for defect in found.defects if defect.number == LAST + 1}


def test_first_event_of_another_kind_is_found(register: Register, place: str) -> None:
    one = triple("one")

    def replaced(document: dict[str, Any]) -> None:
        document.update(kind="triple", data=one.to_json())

    with unguarded(place) as run:
        _rewritten(1, replaced, rehash=True)(run)
        run("UPDATE events SET kind = 'triple'")
        run("UPDATE head SET register = hash")
        row = (one.digest, 1, one.contract.digest, text_of(one.to_json()))
        run("INSERT INTO triples (digest, event, contract, triple) VALUES (?, ?, ?, ?)", *row)
    assert reasons(place) == {"chain/event"}


# --- heads ----------------------------------------------------------------------------------------


def test_signed_head_of_a_register_without_events_is_compared_with_none(filled: str) -> None:
    with Register.open(filled, clock=clock) as register:
        signed = register.sign_head([KEY_A])
    with unguarded(filled) as run:
        run("DELETE FROM events")
    assert "chain/empty" in reasons(filled, signed)


def test_register_without_a_head_is_refused(filled: str) -> None:
    with unguarded(filled) as run:
        run("DELETE FROM head")
    with Register.open(filled, clock=clock) as register:
        for use in (register.head, lambda: register.revoke("7" * 64, "lost")):
            with pytest.raises(Refusal, match="no head") as caught:
                use()
            assert caught.value.diagnostics[0].code is codes.REGISTER_DAMAGED


def test_head_that_changes_during_an_append_is_refused(filled: str) -> None:
    database = RegisterDatabase(Location.of(filled), create=False)

    def append() -> None:
        with database.writing() as connection:
            chain = Chain(connection, clock())
            chain.append(EventKind.REVOCATION, Revocation(Revoked.KEY, "7" * 64, "lost").to_json())
            connection.execute(update(head).values(hash="0" * 64))
            chain.close()

    with pytest.raises(Refusal, match="changed during an append"):
        append()
    database.close()
    assert reasons(filled) == set()


def test_extended_register_agrees_with_its_signed_heads(filled: str) -> None:
    with Register.open(filled, clock=clock) as register:
        first = register.sign_head([KEY_A])
        register.revoke("7" * 64, "later")
        second = register.sign_head([KEY_A, KEY_B])
    assert reasons(filled, first, second) == set()


def test_signed_head_reveals_a_truncated_register(filled: str) -> None:
    with Register.open(filled, clock=clock) as register:
        signed = register.sign_head([KEY_A])
        last = list(register.events())[-2]
    with unguarded(filled) as run:
        run("DELETE FROM events WHERE number = ?", LAST)
        run("DELETE FROM revocations WHERE kind = 'key'")
        run("UPDATE head SET number = 14, hash = ?", last.hash)
    assert reasons(filled) == set()  # only the head reveals it
    assert reasons(filled, signed) == {"head/ahead"}


def test_signed_head_reveals_a_rewritten_register(filled: str) -> None:
    with Register.open(filled, clock=clock) as register:
        signed = register.sign_head([KEY_A])
    change = _rewritten(LAST, _reason, rehash=True)
    with unguarded(filled) as run:
        change(run)
        (record,) = run("SELECT record FROM revocations WHERE kind = 'key'").fetchone()
        again = record.replace("lost", "another")
        run("UPDATE revocations SET record = ? WHERE kind = 'key'", again)
    assert reasons(filled) == set()
    assert reasons(filled, signed) == {"head/not-prefix"}


def test_signed_head_reveals_another_register(filled: str, tmp_path: Path) -> None:
    with Register.open(tmp_path / "other.db", create=True, clock=clock) as other:
        fill(other)
        signed = other.sign_head([KEY_A])
    assert reasons(filled, signed) == {"head/other-register"}


@pytest.mark.parametrize(
    ("signed_by", "policy", "reason"),
    [
        (KEY_B, trusted(KEY_A), "signature/none-trusted"),
        (KEY_A, None, "policy/no-key"),
        (KEY_A, trusted(KEY_A, revoked=[KEY_A.public.fingerprint]), "signature/key-revoked"),
        (KEY_A, trusted(KEY_A, KEY_B, threshold=2), "signature/threshold"),
    ],
)
def test_untrusted_head_is_not_evidence(
    register: Register, signed_by: Any, policy: Any, reason: str
) -> None:
    signed = register.sign_head([signed_by])
    audit = register.check([signed], policy)
    assert {defect.reason for defect in audit.defects} == {reason}
    assert audit.heads == ()


def test_heads_and_certificates_are_not_interchangeable(register: Register) -> None:
    audit = register.check([certified(triple("one"))], TRUSTED)
    assert {defect.reason for defect in audit.defects} == {"statement/predicate-type"}
    with pytest.raises(Refusal, match="predicate-type"):
        recorded(register, register.sign_head([KEY_A]), TRUSTED)


@pytest.mark.parametrize("number", [0, -1, 2**60])
def test_head_of_an_empty_register_is_rejected(register: Register, number: int) -> None:
    odd = replace(register.head(), number=number)
    try:
        signed = bundle_bytes(sign(head_bytes(odd), [KEY_A]), KEY_A.public.hint)
    except Exception:
        return  # it cannot be written
    assert register.check([signed], TRUSTED).defects


# --- guards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "UPDATE events SET kind = 'run'",
        "DELETE FROM events",
        "UPDATE bundles SET content = digest",
        "DELETE FROM bundles WHERE digest = (SELECT MIN(digest) FROM bundles)",
        "TRUNCATE events",
        "INSERT OR REPLACE INTO events SELECT number, 'run', time, previous, hash, body "
        "FROM events WHERE number = 3",
        "INSERT OR REPLACE INTO events SELECT 16, kind, time, previous, hash, body FROM events "
        "WHERE number = 3",
        "INSERT OR REPLACE INTO bundles SELECT digest, digest FROM bundles",
    ],
)
def test_database_refuses_changes_of_events_and_bundles(filled: str, text: str) -> None:
    if filled.startswith("postgresql"):
        if "OR REPLACE" in text:
            text = text.replace("INSERT OR REPLACE", "INSERT")  # by unique keys
        with psycopg.connect(filled) as connection, pytest.raises(psycopg.Error):
            connection.execute(text.replace("content = digest", "content = ''").encode())
    else:
        raw = sqlite3.connect(filled)
        with pytest.raises(sqlite3.DatabaseError):
            raw.execute(text)
        raw.close()
    assert reasons(filled) == set()


def test_missing_triggers_are_found(filled: str) -> None:
    if filled.startswith("postgresql"):
        with psycopg.connect(filled) as connection:
            connection.execute("ALTER TABLE events DISABLE TRIGGER ALL")
    else:
        raw = sqlite3.connect(filled)
        raw.execute("DROP TRIGGER events_no_DELETE")
        raw.close()
    assert reasons(filled) == {"trigger/missing"}


# --- files of SQLite ------------------------------------------------------------------------------


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    "text",
    [
        "UPDATE events SET body = 'text' WHERE number = 3",
        "UPDATE events SET number = 'x' WHERE number = 15",
        "UPDATE certificates SET event = 'x' WHERE sequence = 2",
        "UPDATE head SET number = 'x'",
    ],
)
def test_values_of_wrong_types_are_found(filled: str, text: str) -> None:
    with unguarded(filled) as run:
        run(text)
    assert reasons(filled)


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
def test_entry_that_is_no_text_is_refused(filled: str) -> None:
    with unguarded(filled) as run:
        run("UPDATE slots SET record = CAST(record AS BLOB)")
    _refused(filled, lambda register: register.slot(FILLED), "an entry is no text")


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
def test_exchanged_indices_are_found(filled: str) -> None:
    """An index with the pages of another one hides a later failure."""
    names = ("ix_certificates_not_passed", "ix_certificates_supersedes")
    with unguarded(filled) as run:
        wanted = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        pages = [run(wanted, name).fetchone()[0] for name in names]
        run("PRAGMA writable_schema = ON")
        for name, page in zip(names, reversed(pages), strict=True):
            run("UPDATE sqlite_master SET rootpage = ? WHERE name = ?", page, name)
    assert "database/integrity" in reasons(filled)


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
def test_read_only_file_is_not_reported_as_damage(filled: str) -> None:
    """By the version of its format, which SQLite reads and does not write."""
    path = Path(filled)
    data = bytearray(path.read_bytes())
    data[18] = 3
    path.write_bytes(data)
    with Register.open(filled, clock=clock) as register:
        assert register.head().number == LAST
        with pytest.raises(Refusal, match="cannot store the register") as caught:
            register.revoke("7" * 64, "lost")
    assert caught.value.diagnostics[0].code is codes.INPUT_OUTPUT


@pytest.mark.parametrize("filled", ["sqlite"], indirect=True)
def test_truncated_or_foreign_file_is_refused(filled: str) -> None:
    path = Path(filled)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(Refusal, match=r"register|used"):
        assert reasons(filled) == set()
    path.write_bytes(b"no database" * 500)
    with pytest.raises(Refusal):
        reasons(filled)


def test_damaged_table_definition_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.db"
    Register.open(path, create=True, clock=clock).close()
    data = path.read_bytes()
    changed = data.replace(b"CREATE TABLE events", b"CREATE T\xefBLE events")
    assert changed != data
    path.write_bytes(changed)
    with pytest.raises(Refusal, match="cannot be used"):
        Register.open(path, clock=clock)
