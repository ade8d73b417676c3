"""Credentials of registries from the configuration files of docker and podman."""

from __future__ import annotations

import base64
import binascii
import json
import os
from pathlib import Path
from typing import Any

from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import FILE_MISSING, USAGE
from kcdsl.source.files import open_regular

_LARGEST = 4 * 2**20


def credentials(host: str) -> str | None:
    """Return the base64 credentials of a host in the configuration of docker or podman.

    Raises Refusal where a credential helper is configured, because no program is run here.
    """
    named = os.environ.get("REGISTRY_AUTH_FILE")
    folder = os.environ.get("DOCKER_CONFIG")
    usual = Path(folder) if folder else Path.home() / ".docker"
    path = Path(named) if named else usual / "config.json"
    try:
        with open_regular(path) as file:
            document = json.loads(file.read(_LARGEST))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise refuse(
            FILE_MISSING,
            f"the credentials in {path} cannot be read",
            help="log in to the registry again",
        ) from error
    known: Any = document if isinstance(document, dict) else {}
    entry = _entry(known.get("auths"), host)
    found = entry.get("auth") if isinstance(entry, dict) else None
    if isinstance(found, str) and found:
        try:
            base64.b64decode(found, validate=True)
        except binascii.Error as error:
            raise refuse(
                FILE_MISSING,
                f"{path}: `auth` of {host} is no base64",
                help="log in to the registry again",
            ) from error
        return found
    helper = _entry(known.get("credHelpers"), host) or known.get("credsStore")
    if isinstance(helper, str) and helper:
        raise refuse(
            USAGE,
            f"a program keeps the credentials of {host}, docker-credential-{helper[:40]}, and this"
            " command runs none",
            help=f"write them to a file of their own and name it: REGISTRY_AUTH_FILE=FILE, with"
            f' {{"auths": {{"{host}": {{"auth": "…"}}}}}}',
        )
    return None


def _entry(table: Any, host: str) -> Any:
    return table.get(host) if isinstance(table, dict) else None
