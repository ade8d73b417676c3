"""The tables of a register. All tables but events and bundles are derived."""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    literal_column,
)

from kcdsl_certs.statement import Verdict

REVISION = "0002"
"""The alembic revision that this program reads and writes."""
metadata = MetaData()
_digest = String(64)
_name = String(128)
_word = String(32)

events = Table(
    "events",
    metadata,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", _word, nullable=False),
    Column("time", String(20), nullable=False),
    Column("previous", _digest, nullable=False),
    Column("hash", _digest, nullable=False, unique=True),
    Column("body", LargeBinary, nullable=False),
)
bundles = Table(
    "bundles",
    metadata,
    Column("digest", _digest, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)
head = Table(
    "head",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("number", BigInteger, nullable=False),
    Column("hash", _digest, nullable=False),
    Column("register", _digest, nullable=False),
    Column("time", String(20), nullable=False),
)
"""One row, which a writer locks, so that appends are serialised."""
triples = Table(
    "triples",
    metadata,
    Column("digest", _digest, primary_key=True),
    Column("event", BigInteger, nullable=False, unique=True),
    Column("contract", _digest, nullable=False),
    Column("triple", Text, nullable=False),
)
certificates = Table(
    "certificates",
    metadata,
    Column("identity", _digest, primary_key=True),
    Column("event", BigInteger, nullable=False, unique=True),
    Column("triple", _digest, nullable=False),
    Column("stage", _word, nullable=False),
    Column("sequence", BigInteger, nullable=False),
    Column("verdict", _word, nullable=False),
    Column("supersedes", _digest, index=True),
    Column("record", Text, nullable=False),
    UniqueConstraint("triple", "stage", "sequence"),
)
NOT_PASSED = certificates.c.verdict != literal_column(f"'{Verdict.PASSED.value}'")
"""Which certificates a later failure is looked for among. The word stands in the query: PostgreSQL
soon keeps one plan for all parameters, which has no index of some rows by a parameter."""
Index(
    "ix_certificates_not_passed",
    *(certificates.c.triple, certificates.c.stage, certificates.c.sequence),
    sqlite_where=NOT_PASSED,
    postgresql_where=NOT_PASSED,
)
runs = Table(
    "runs",
    metadata,
    Column("identity", _digest, primary_key=True),
    Column("event", BigInteger, nullable=False, unique=True),
    Column("triple", _digest, nullable=False, index=True),
    Column("stage", _word, nullable=False),
    Column("trusted", Boolean, nullable=False),
    Column("record", Text, nullable=False),
)
promotions = Table(
    "promotions",
    metadata,
    Column("event", BigInteger, primary_key=True, autoincrement=False),
    Column("slot", _name, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("candidate", _digest, nullable=False, index=True),
    Column("state", _word, nullable=False),
    Column("time", String(20), nullable=False),
    Column("record", Text, nullable=False),
    UniqueConstraint("slot", "version"),
)
slots = Table(
    "slots",
    metadata,
    Column("name", _name, primary_key=True),
    Column("event", BigInteger, nullable=False, unique=True),
    Column("version", BigInteger, nullable=False),
    Column("triple", _digest),
    Column("record", Text, nullable=False),
)
revocations = Table(
    "revocations",
    metadata,
    Column("event", BigInteger, primary_key=True, autoincrement=False),
    Column("kind", _word, nullable=False),
    Column("subject", _digest, nullable=False),
    Column("record", Text, nullable=False),
    UniqueConstraint("kind", "subject"),
)
PROJECTIONS = (triples, certificates, runs, promotions, slots, revocations)
"""The derived tables, in the order in which rows may be written."""
Index("ix_events_kind", events.c.kind, events.c.number)

# --- append-only ----------------------------------------------------------------------------------

APPEND_ONLY = ("events", "bundles")
_SQLITE_APPEND = """CREATE TRIGGER events_in_order BEFORE INSERT ON events
WHEN NEW.number <> (SELECT COALESCE(MAX(number), 0) + 1 FROM events)
  OR EXISTS (SELECT 1 FROM events WHERE hash = NEW.hash)
BEGIN SELECT RAISE(ABORT, 'events are appended in order'); END"""
_SQLITE_BUNDLE = """CREATE TRIGGER bundles_once BEFORE INSERT ON bundles
WHEN EXISTS (SELECT 1 FROM bundles WHERE digest = NEW.digest)
BEGIN SELECT RAISE(ABORT, 'bundles is append-only'); END"""
_SQLITE_CHANGE = """CREATE TRIGGER {table}_no_{word} BEFORE {word} ON {table}
BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"""
_POSTGRES_FUNCTION = """CREATE FUNCTION kcdsl_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"""
_POSTGRES_CHANGE = """CREATE TRIGGER {table}_append_only
BEFORE UPDATE OR DELETE OR TRUNCATE ON {table}
FOR EACH STATEMENT EXECUTE FUNCTION kcdsl_append_only()"""


def trigger_names(dialect: str) -> frozenset[str]:
    """Return the names of the triggers of a database."""
    if dialect == "postgresql":
        return frozenset(f"{table}_append_only" for table in APPEND_ONLY)
    changes = (f"{table}_no_{word}" for table in APPEND_ONLY for word in ("UPDATE", "DELETE"))
    return frozenset({"events_in_order", "bundles_once", *changes})


def triggers(dialect: str) -> tuple[str, ...]:
    """Return the statements that make a database refuse changes of events and bundles.

    In SQLite, `INSERT OR REPLACE` removes rows without firing DELETE triggers, so INSERT needs a
    trigger, too.
    """
    if dialect == "postgresql":
        return (_POSTGRES_FUNCTION, *(_POSTGRES_CHANGE.format(table=t) for t in APPEND_ONLY))
    changes = (
        _SQLITE_CHANGE.format(table=table, word=word)
        for table in APPEND_ONLY
        for word in ("UPDATE", "DELETE")
    )
    return (_SQLITE_APPEND, _SQLITE_BUNDLE, *changes)
