"""Key files and the passwords that open them."""

from __future__ import annotations

import os
from pathlib import Path

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NO_PASSWORD, UNREADABLE_KEY
from kcdsl_certs.keys import PublicKey, SigningKey, load_private, load_public
from kcdsl_certs.reject import Reject

PRIVATE_KEY = "kcdsl.key"
PUBLIC_KEY = "kcdsl.key.pub"
PASSWORD_VARIABLE = "KCDSL_KEY_PASSWORD"
_LARGEST_KEY = 64 * 1024


def read_public_key(path: Path) -> PublicKey:
    """Read a public key; raises Refusal where that fails."""
    try:
        return load_public(_read(path))
    except Reject as error:
        raise refuse(UNREADABLE_KEY, f"{path}: {error.detail} ({error.reason})") from error


def read_private_key(path: Path) -> SigningKey:
    """Read a private key; raises Refusal where that fails.

    The password of an encrypted key is taken from the environment variable KCDSL_KEY_PASSWORD.
    """
    password = os.environ.get(PASSWORD_VARIABLE)
    try:
        return load_private(_read(path), password.encode("utf-8") if password else None)
    except Reject as error:
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
    try:
        with path.open("rb") as stream:
            return stream.read(_LARGEST_KEY + 1)
    except FileNotFoundError as error:
        raise refuse(
            UNREADABLE_KEY, f"there is no key {path}", help="`kcdsl keygen` makes a key pair"
        ) from error
    except OSError as error:
        raise refuse(UNREADABLE_KEY, f"{path} cannot be read: {error.strerror}") from error
