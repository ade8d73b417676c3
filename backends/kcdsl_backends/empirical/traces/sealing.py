"""The seal of a trace: the digest of its bytes, inside its own footer.

The digest covers every byte of the file, with zeros in its own place. It stands in the key-value
metadata of the Parquet footer, where a reader finds it without trusting the rest of the file. It
shows damage and careless changes; it is no signature, since whoever changes a trace on purpose can
seal it again.
"""

from __future__ import annotations

import hashlib
import re

KEY = "kcdsl.digest"
UNSEALED = "sha256:" + "0" * 64
_SEAL = re.compile(rb"kcdsl\.digest[^\x20-\x7e]\x47sha256:([0-9a-f]{64})")
"""The key, then of the value: its tag and its length, 71, as the footer encodes them."""


def sealed(data: bytes) -> bytes:
    """Return a file that was written with `UNSEALED`, with its digest; raises ValueError."""
    found = _SEAL.search(data)
    if found is None or found[1] != b"0" * 64:
        raise ValueError("there is no place for the digest")
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[: found.start(1)] + digest + data[found.end(1) :]


def seal_of(data: bytes) -> str | None:
    """Return the digest that a file states of itself, None where it states none or several."""
    found = _SEAL.findall(data)
    return found[0].decode() if len(found) == 1 else None


def is_intact(data: bytes) -> bool:
    """Say whether a file has the digest that it states."""
    found = _SEAL.search(data)
    if found is None or seal_of(data) is None:
        return False
    digest = hashlib.sha256(data[: found.start(1)])
    digest.update(b"0" * 64)
    digest.update(data[found.end(1) :])
    return digest.hexdigest().encode() == found[1]
