"""The well-known fields of trace records."""

from __future__ import annotations

from kcdsl.check.report import nearest

TRACE_FIELDS: tuple[str, ...] = (
    "build_fingerprint",
    "request_shape",
    "rng_seed",
    "sampling_params",
    "replay_signature",
)
"""The payload that replay and attribution need; a contract may require others as well."""


def doubtful(name: str) -> str | None:
    """Return the well-known field that `name` is probably a misspelling of, or None."""
    return None if name in TRACE_FIELDS else nearest(name, TRACE_FIELDS)
