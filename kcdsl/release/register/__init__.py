"""The register: which certificates, runs and promotions there were, and what is live.

Events are appended and never changed; each holds the hash of the one before. Everything that is
read follows from them. `Register.open` opens one, in a file of SQLite or in PostgreSQL.
"""

from kcdsl.release.register.audit import Audit, AuditDefect
from kcdsl.release.register.events import Event, EventKind
from kcdsl.release.register.records import (
    Certificate,
    CertificateStatus,
    Promotion,
    PromotionReason,
    PromotionState,
    Revocation,
    Revoked,
    Run,
    Slot,
    Standing,
    StatementKind,
)
from kcdsl.release.register.store import Register, Stale

__all__ = [
    "Audit",
    "AuditDefect",
    "Certificate",
    "CertificateStatus",
    "Event",
    "EventKind",
    "Promotion",
    "PromotionReason",
    "PromotionState",
    "Register",
    "Revocation",
    "Revoked",
    "Run",
    "Slot",
    "Stale",
    "Standing",
    "StatementKind",
]  # fmt: skip
