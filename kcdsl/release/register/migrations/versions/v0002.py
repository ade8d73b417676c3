"""An index of the certificates that did not pass, for fast lookups of a later failure."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the index."""
    failed = sa.text("verdict <> 'PASSED'")
    op.create_index(
        "ix_certificates_not_passed",
        "certificates",
        ["triple", "stage", "sequence"],
        sqlite_where=failed,
        postgresql_where=failed,
    )
