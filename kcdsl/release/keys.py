"""Key files and the passwords that open them."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_PASSWORD, UNREADABLE_KEY
from kcdsl.diagnostics.render.terminal import printable
from kcdsl_certs.keys import SigningKey, load_private
from kcdsl_certs.rejected import Rejected

PASSWORD_VARIABLE = "KCDSL_KEY_PASSWORD"
_LARGEST_KEY = 64 * 1024


def read_private_key(path: Path) -> SigningKey:
    """Read a private key; raises Refusal where that fails.

    The password of an encrypted key is taken from the environment variable KCDSL_KEY_PASSWORD.
    """
    password = os.environ.get(PASSWORD_VARIABLE)
    try:
        return load_private(_read(path), password.encode("utf-8") if password else None)
    except Rejected as error:
        raise refuse(
            UNREADABLE_KEY,
            f"{path} is no usable private key: {error.detail} ({error.reason})",
            help=f"a password is taken from {PASSWORD_VARIABLE}; `kcdsl keygen` makes a new key",
        ) from error


def password_from(variable: str) -> bytes:
    """Return the password in an environment variable; raises Refusal where it is empty."""
    value = os.environ.get(variable, "")
    if not value:
        raise refuse(
            NO_PASSWORD,
            f"the environment variable {variable} is not set or empty",
            help=f"put the password into {variable}, or leave --password-env out",
        )
    return value.encode("utf-8")


def _read(path: Path) -> bytes:
    """Return what the file of a private key holds; say where others may read it as well."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as stream:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise refuse(UNREADABLE_KEY, f"{path} is no regular file")
            data = stream.read(_LARGEST_KEY + 1)
    except FileNotFoundError as error:
        raise refuse(
            UNREADABLE_KEY, f"there is no key {path}", help="`kcdsl keygen` makes a key pair"
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a file"
        raise refuse(UNREADABLE_KEY, f"{path} cannot be read: {reason}") from error
    if os.name == "posix" and mode & 0o077:
        shown = f"{printable(str(path))} (mode {stat.S_IMODE(mode):04o})"
        print(f"warning: others may read the private key {shown}: chmod 600", file=sys.stderr)
    return data
