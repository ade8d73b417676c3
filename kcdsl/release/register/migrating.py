"""Bringing the tables of a register to the revision of this program, by alembic."""

from __future__ import annotations

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

from kcdsl.release.register.schema import REVISION

MIGRATIONS = "kcdsl.release.register:migrations"


def upgrade(connection: Connection) -> None:
    """Make or change the tables, in the transaction of the connection."""
    config = Config()
    config.set_main_option("script_location", MIGRATIONS)
    config.attributes["connection"] = connection
    command.upgrade(config, REVISION)
