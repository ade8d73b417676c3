"""Untrusted files: only regular ones, read without blocking and with a size limit."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path

from kcdsl_certs.encoding.rejected import Rejected


def shown(name: str) -> str:
    """Return a name safe for printing."""
    return name if name.isprintable() else ascii(name)


def open_regular(path: Path, reason: str, *, links: bool = True) -> BufferedReader:
    """Open a regular file to read; raises Rejected with `reason` for a pipe, a device or a folder.

    It does not block. With `links` false a symbolic link is refused as `checkpoint/symlink`.
    Raises OSError where the file cannot be opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    if not links:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and not links:
            raise Rejected("checkpoint/symlink", f"{shown(path.name)} is a symbolic link") from None
        if os.path.isdir(path):
            raise Rejected(reason, f"{shown(path.name)} is no regular file") from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    raise Rejected(reason, f"{shown(path.name)} is no regular file")


def read_limited(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file; raises Rejected for others and above the limit."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Rejected("file/not-regular", "it is no regular file")
            data = stream.read(limit + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a file"
        raise Rejected("file/unreadable", f"it cannot be read: {reason}") from None
    if len(data) > limit:
        raise Rejected("file/size", f"it has more than {limit} bytes")
    return data


def plain_path(path: Path) -> Path:
    """Return a path with links and `..` in its folders resolved; the last component is not
    resolved."""
    if path.name in ("", ".", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name
