"""The secret of this user on this machine, by which what a run kept is known to be its own.

It says that a record was written here by this user, and by nobody who can write to the folder of
the record alone. Whoever can read the secret, or run as the user, can write such records.
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
    """Return the secret, made when it is first asked for.

    It lies in `kcdsl/records.key` of $XDG_STATE_HOME or ~/.local/state, readable by the user alone.
    Where it cannot be kept there, it is one of this process alone.
    """
    try:
        return _kept(_folder() / "records.key")
    except OSError:
        return _OF_THIS_PROCESS


def sealed(*parts: bytes) -> bytes:
    """Return the authentication code of parts in their order, 32 bytes."""
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


def _kept(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError):
        return _own(path)
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
    return _own(path)


def _own(path: Path) -> bytes:
    """Return a secret that nobody else can read or write; raises OSError for any other file."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o077):
            raise PermissionError(f"{path} is not of this user alone")
        data = file.read(SIZE + 1)
    if len(data) != SIZE:
        raise OSError(f"{path} is no secret")
    return data
