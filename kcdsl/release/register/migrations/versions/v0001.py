"""The first tables of a register."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from kcdsl.release.register.schema import triggers

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create every table, and the triggers that make events and bundles append-only."""
    digest, name, word, time = sa.String(64), sa.String(128), sa.String(32), sa.String(20)
    op.create_table(
        "events",
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", word, nullable=False),
        sa.Column("time", time, nullable=False),
        sa.Column("previous", digest, nullable=False),
        sa.Column("hash", digest, nullable=False, unique=True),
        sa.Column("body", sa.LargeBinary, nullable=False),
    )
    op.create_index("ix_events_kind", "events", ["kind", "number"])
    op.create_table(
        "bundles",
        sa.Column("digest", digest, primary_key=True),
        sa.Column("content", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "head",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("hash", digest, nullable=False),
        sa.Column("register", digest, nullable=False),
        sa.Column("time", time, nullable=False),
    )
    op.create_table(
        "triples",
        sa.Column("digest", digest, primary_key=True),
        sa.Column("event", sa.BigInteger, nullable=False, unique=True),
        sa.Column("contract", digest, nullable=False),
        sa.Column("triple", sa.Text, nullable=False),
    )
    op.create_table(
        "certificates",
        sa.Column("identity", digest, primary_key=True),
        sa.Column("event", sa.BigInteger, nullable=False, unique=True),
        sa.Column("triple", digest, nullable=False),
        sa.Column("stage", word, nullable=False),
        sa.Column("sequence", sa.BigInteger, nullable=False),
        sa.Column("verdict", word, nullable=False),
        sa.Column("supersedes", digest, index=True),
        sa.Column("record", sa.Text, nullable=False),
        sa.UniqueConstraint("triple", "stage", "sequence"),
    )
    op.create_table(
        "runs",
        sa.Column("identity", digest, primary_key=True),
        sa.Column("event", sa.BigInteger, nullable=False, unique=True),
        sa.Column("triple", digest, nullable=False, index=True),
        sa.Column("stage", word, nullable=False),
        sa.Column("trusted", sa.Boolean, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "promotions",
        sa.Column("event", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("slot", name, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("candidate", digest, nullable=False, index=True),
        sa.Column("state", word, nullable=False),
        sa.Column("time", time, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.UniqueConstraint("slot", "version"),
    )
    op.create_table(
        "slots",
        sa.Column("name", name, primary_key=True),
        sa.Column("event", sa.BigInteger, nullable=False, unique=True),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("triple", digest),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_table(
        "revocations",
        sa.Column("event", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("kind", word, nullable=False),
        sa.Column("subject", digest, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
        sa.UniqueConstraint("kind", "subject"),
    )
    for statement in triggers(op.get_bind().dialect.name):
        op.execute(statement)
