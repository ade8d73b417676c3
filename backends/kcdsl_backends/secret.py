"""The user's secret on this machine, which authenticates records of earlier runs.

A valid code shows that this user wrote a record on this machine, and not someone with mere write
access to its folder. Anyone who can read the secret or act as the user can write such records.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from kcdsl.source.files import user_place

SIZE = 32


def user_secret() -> bytes:
    """Return the secret; create it on first use.

    It is stored in `kcdsl/records.key` of $XDG_STATE_HOME or ~/.local/state, readable by the user
    alone. If that is impossible, the secret is valid in this process only.
    """
    try:
        return _stored_secret(_folder() / "records.key")
    except OSError:
        return _OF_THIS_PROCESS


def sealed(*parts: bytes) -> bytes:
    """Return the authentication code (32 bytes) of a sequence of parts."""
    code = hmac.new(user_secret(), digestmod="sha256")
    for part in parts:
        code.update(len(part).to_bytes(8, "little") + part)
    return code.digest()


_OF_THIS_PROCESS = secrets.token_bytes(SIZE)


def _folder() -> Path:
    base = user_place("XDG_STATE_HOME", ".local", "state")
    if base is None:
        raise FileNotFoundError("the user has no home")
    return base / "kcdsl"


def _stored_secret(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return _read_secret(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(SIZE))
    try:
        os.link(temporary, path)  # another process may have been first
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return _read_secret(path)


def _read_secret(path: Path) -> bytes:
    """Read a secret; raise OSError unless only the user can read and write the file."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o077):
            raise PermissionError(f"{path} is not of this user alone")
        data = file.read(SIZE + 1)
    if len(data) != SIZE:
        raise OSError(f"{path} is no secret")
    return data
