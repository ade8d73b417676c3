"""Find the key that signs a certificate."""

from __future__ import annotations

import os
from pathlib import Path

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import FILE_MISSING, UNREADABLE_KEY
from kcdsl_certs.keys import SigningKey, load_private
from kcdsl_certs.reject import Reject

DEFAULT_KEY = "kcdsl.key"
PASSWORD_VARIABLE = "KCDSL_KEY_PASSWORD"


def signing_key(given: str | None, base: Path) -> SigningKey | None:
    """Return the key named on the command line, else `kcdsl.key` beside the contract, else None.

    The password of an encrypted key is read from the environment variable KCDSL_KEY_PASSWORD.
    Raises Refusal for a key that is named but missing, and for one that cannot be read.
    """
    path = Path(given) if given is not None else base / DEFAULT_KEY
    if not path.is_file():
        if given is None:
            return None
        raise refuse(
            FILE_MISSING, f"there is no key {path}", help=f"make one: kcdsl keygen -o {path}"
        )
    password = os.environ.get(PASSWORD_VARIABLE)
    try:
        return load_private(path.read_bytes(), password.encode() if password else None)
    except Reject as error:
        raise refuse(
            UNREADABLE_KEY,
            f"{path} is no usable private key: {error.detail} ({error.reason})",
            help=f"a password is taken from {PASSWORD_VARIABLE}; `kcdsl keygen` makes a new key",
        ) from error
    except OSError as error:
        raise refuse(FILE_MISSING, f"{path} cannot be read: {error.strerror}") from error
