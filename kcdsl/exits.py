"""The exit codes of every command. They are frozen: a code never changes its meaning."""

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes of `kcdsl` commands."""

    HELD = 0
    """Everything that was required holds (for tools: done, nothing found)."""
    VIOLATED = 1
    """A clause is violated, or a checker has findings."""
    COULD_NOT_RUN = 2
    """Usage, input or output error, a contract that does not compile, or invalid evidence."""
    INCONCLUSIVE = 3
    """Nothing is violated, but at least one required clause could not be decided."""
    CERTIFICATE_INVALID = 4
    """A certificate is forged, stale, untrusted or does not match what is deployed."""


INTERRUPTED = 130
"""The process status of a command that was interrupted from the keyboard, as shells expect it."""
