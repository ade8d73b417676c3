"""Which keys are trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kcdsl.check.report import suggest
from kcdsl.config import Origin, load_config
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import (
    BAD_CONFIGURATION,
    NO_TRUSTED_KEY,
    TRUST_POLICY,
)
from kcdsl.release.keys import PUBLIC_KEY, read_public_key
from kcdsl_certs.keys import TrustedKey, TrustPolicy
from kcdsl_certs.reject import Reject
from kcdsl_certs.statement import PREDICATE_TYPE, STAGES
from kcdsl_certs.strict import parse_time
from kcdsl_certs.transfer import TRANSFER_TYPE

_FIELDS = ("path", "stages", "valid_from", "valid_until")


def trust_policy(given: Sequence[str], threshold: int | None, folder: Path) -> TrustPolicy:
    """Return the trusted keys and the threshold.

    `given` (paths) wins; then `trusted_keys` of the configuration of the contract's `folder` (see
    `kcdsl.config`); then `kcdsl.key.pub` in it. An entry of `trusted_keys` is a path, or a table
    with `path` and any of `stages`, `valid_from`, `valid_until`. Raises Refusal where no key is
    found or one is not usable.
    """
    config = load_config(folder)
    if given:
        keys = [_trusted(Path(path)) for path in given]
    elif config.trusted_keys is not None:
        origin = config.origin("trusted-keys")
        keys = [_configured(entry, origin) for entry in config.trusted_keys]
    elif (folder / PUBLIC_KEY).is_file():
        keys = [_trusted(folder / PUBLIC_KEY)]
    else:
        keys = []
    if not keys:
        raise refuse(
            NO_TRUSTED_KEY,
            "no key is trusted, so no certificate can be",
            help="pass --key PUB, list trusted-keys in the configuration, or put "
            f"{PUBLIC_KEY} beside the contract",
        )
    wanted = config.threshold if threshold is None else threshold
    try:
        return TrustPolicy(tuple(keys), wanted)
    except Reject as error:
        raise refuse(
            TRUST_POLICY,
            error.detail,
            help="the threshold lies between 1 and the number of distinct keys; repeat --key",
        ) from error


def _trusted(path: Path, **limits: Any) -> TrustedKey:
    kinds = frozenset({PREDICATE_TYPE, TRANSFER_TYPE})
    return TrustedKey(path.name, read_public_key(path), kinds, **limits)


def _configured(entry: str | Mapping[str, Any], origin: Origin) -> TrustedKey:
    if isinstance(entry, str):
        return _trusted(origin.folder / entry)
    if not isinstance(entry.get("path"), str):
        raise refuse(BAD_CONFIGURATION, f"{origin}: a trusted key is a path or a table with `path`")
    for name in sorted(entry.keys() - set(_FIELDS)):
        message = f"{origin}: a trusted key has no `{name}`"
        raise refuse(BAD_CONFIGURATION, message, help=suggest(name, _FIELDS))
    limits: dict[str, Any] = {}
    if "stages" in entry:
        stages = entry["stages"]
        if not isinstance(stages, list):
            raise refuse(BAD_CONFIGURATION, f"{origin}: `stages` is a list of {', '.join(STAGES)}")
        for name in (str(stage) for stage in stages if stage not in STAGES):
            message = f"{origin}: there is no stage `{name}`"
            raise refuse(BAD_CONFIGURATION, message, help=suggest(name, STAGES))
        limits["stages"] = frozenset(stages)
    for name in ("valid_from", "valid_until"):
        if name in entry:
            try:
                limits[name] = parse_time(str(entry[name]))
            except Reject as error:
                raise refuse(BAD_CONFIGURATION, f"{origin}: {name}: {error.detail}") from error
    return _trusted(origin.folder / entry["path"], **limits)
