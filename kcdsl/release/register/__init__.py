"""The register: a log of certificates, runs and promotions, and the live triples.

Events are appended and never changed; each has the hash of its predecessor. All other tables are
derived from them. `Register.open` opens a register in an SQLite file or in PostgreSQL.
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
