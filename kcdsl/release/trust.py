"""Which keys are trusted."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def trust_policy(given: Sequence[str], threshold: int | None, folder: Path) -> TrustPolicy:
    """Return the trusted keys and the threshold.

    `given` (paths) wins; then `trusted_keys` of the nearest kcdsl.toml or of `[tool.kcdsl]` in the
    nearest pyproject.toml, upwards from the contract's `folder`; then `kcdsl.key.pub` in it. An
    entry of `trusted_keys` is a path, or a table with `path` and any of `stages`, `valid_from`,
    `valid_until`. Raises Refusal where no key is found or one is not usable.
    """
    origin, table = _configuration(folder)
    if given:
        keys = [_trusted(Path(path)) for path in given]
    elif (entries := table.get("trusted_keys")) is not None:
        keys = [_configured(entry, origin) for entry in _entries(entries, origin)]
    elif (folder / PUBLIC_KEY).is_file():
        keys = [_trusted(folder / PUBLIC_KEY)]
    else:
        keys = []
    if not keys:
        raise refuse(
            NO_TRUSTED_KEY,
            "no key is trusted, so no certificate can be",
            help=f"pass --key PUB, list trusted_keys under [tool.kcdsl], or put {PUBLIC_KEY} "
            f"into {folder}",
        )
    wanted = table.get("threshold", 1) if threshold is None else threshold
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise refuse(BAD_CONFIGURATION, f"{origin}: `threshold` is not an integer")
    try:
        return TrustPolicy(tuple(keys), wanted)
    except Reject as error:
        raise refuse(TRUST_POLICY, error.detail) from error


def _trusted(path: Path, **limits: Any) -> TrustedKey:
    return TrustedKey(path.name, read_public_key(path), frozenset({PREDICATE_TYPE}), **limits)


def _entries(value: Any, origin: Path) -> list[Any]:
    if not isinstance(value, list):
        raise refuse(BAD_CONFIGURATION, f"{origin}: `trusted_keys` is not a list")
    return value


def _configured(entry: Any, origin: Path) -> TrustedKey:
    if isinstance(entry, str):
        return _trusted(origin.parent / entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise refuse(BAD_CONFIGURATION, f"{origin}: a trusted key is a path or a table with `path`")
    unknown = sorted(entry.keys() - {"path", "stages", "valid_from", "valid_until"})
    if unknown:
        raise refuse(BAD_CONFIGURATION, f"{origin}: a trusted key has no {', '.join(unknown)}")
    limits: dict[str, Any] = {}
    if "stages" in entry:
        stages = entry["stages"]
        if not isinstance(stages, list) or not all(stage in STAGES for stage in stages):
            raise refuse(BAD_CONFIGURATION, f"{origin}: stages are among {', '.join(STAGES)}")
        limits["stages"] = frozenset(stages)
    for name in ("valid_from", "valid_until"):
        if name in entry:
            try:
                limits[name] = parse_time(str(entry[name]))
            except Reject as error:
                raise refuse(BAD_CONFIGURATION, f"{origin}: {name}: {error.detail}") from error
    return _trusted(origin.parent / entry["path"], **limits)


def _configuration(folder: Path) -> tuple[Path, Mapping[str, Any]]:
    """Return the nearest kcdsl section and its file; an empty one where there is none."""
    for file, section in _candidates(folder.resolve()):
        try:
            table: Any = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise refuse(BAD_CONFIGURATION, f"{file} is not valid TOML: {error}") from error
        for key in section:
            table = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict) and table:
            return file, table
    return folder, {}


def _candidates(folder: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    for place in (folder, *folder.parents):
        for name, section in (("kcdsl.toml", ()), ("pyproject.toml", ("tool", "kcdsl"))):
            if (place / name).is_file():
                yield place / name, section
