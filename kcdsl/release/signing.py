"""Which key signs."""

from __future__ import annotations

from pathlib import Path

from kcdsl.release.keys import PRIVATE_KEY, read_private_key
from kcdsl_certs.keys import SigningKey

UNSIGNED = (
    "the certificate is not signed, so no check accepts it: make a key (`kcdsl keygen` beside the "
    "contract) and run again"
)
"""What is said of a certificate that was written without a key."""


def signing_key(given: str | None, base: Path) -> SigningKey | None:
    """Return the key named on the command line, else `kcdsl.key` beside the contract, else None.

    Raises Refusal for a key that is named but missing, and for one that cannot be read.
    """
    if given is not None:
        return read_private_key(Path(given))
    beside = base / PRIVATE_KEY
    return read_private_key(beside) if beside.exists() else None
