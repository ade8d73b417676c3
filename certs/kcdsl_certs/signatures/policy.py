"""The trust policy of a verifier: keys and their permissions, validity limits, and revocations.

It is never read from the folder of a contract or certificate: an author must not set the policy.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from kcdsl_certs.encoding.files import read_limited
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.encoding.strict import parse_time, time_text
from kcdsl_certs.signatures.keys import (
    PublicKey,
    Rules,
    TrustedKey,
    TrustPolicy,
    load_public,
)
from kcdsl_certs.statement import (
    KERNEL_CLASS_TYPE,
    PARTS,
    PREDICATE_TYPE,
    REGISTER_HEAD_TYPE,
    STAGES,
    TRANSFER_TYPE,
)

ROLES = {
    "certificate": PREDICATE_TYPE,
    "transfer": TRANSFER_TYPE,
    "register": REGISTER_HEAD_TYPE,
    "class": KERNEL_CLASS_TYPE,
}
_USUAL = ("certificate", "transfer")
"""The roles of a key whose policy names none: heads and classes are signed by keys that are meant
for them."""
_LARGEST = 4 * 1024 * 1024
_LARGEST_KEY = 64 * 1024
_REVOKED = ("revoked-certificates", "revoked-keys")
_PARTS = ("relaxed-kernel-parts", "required-kernel-parts")
_OPTIONS = (*_PARTS, "trusted-keys", "threshold", "max-validity", "refuse-suppressions", *_REVOKED)
_OF_A_KEY = ("path", "sha256", "roles", "stages", "valid-from", "valid-until")
_DAYS = re.compile(r"[1-9]\d{0,4}d", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Policy(Rules):
    """The content of a policy file; `sha256` is the digest of its bytes."""

    path: Path = Path()
    sha256: str = ""


@dataclass(frozen=True, slots=True)
class Trust:
    """The trust settings of a check, and their origin.

    `source` is the origin of the policy (an option, a variable, the user's configuration); None if
    only keys were given. `outside` has the names of keys that the policy does not list.
    """

    rules: TrustPolicy
    source: str | None = None
    policy: Policy | None = None
    outside: tuple[str, ...] = ()
    revocations: tuple[Path, ...] = ()

    def __str__(self) -> str:
        origin = "keys named by --key; no policy"
        if self.policy is not None:
            origin = f"policy {self.policy.path} ({self.source})"
        if self.policy is not None and self.outside:
            origin += f", which does not list {', '.join(self.outside)}"
        rules = self.rules
        limits = [
            f"{rules.threshold} of {len(rules.keys)} key(s) must sign",
            f"valid for at most {rules.max_validity.days} days",
        ]
        revoked = len(rules.revoked_certificates) + len(rules.revoked_keys)
        if revoked:
            limits.append(f"{revoked} revocation(s)")
        for word, parts in (
            ("may differ in", rules.relaxed_parts),
            ("must state", rules.required_parts),
        ):
            if parts:
                limits.append(f"kernels {word} {', '.join(sorted(parts))}")
        return f"{origin}: {', '.join(limits)}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, the field `trust` of a report."""
        rules, policy = self.rules, self.policy
        return {
            "source": self.source or "--key",
            "policy": None
            if policy is None
            else {"file": str(policy.path), "sha256": policy.sha256},
            "threshold": rules.threshold,
            "maxValidityDays": rules.max_validity.days,
            "refuseSuppressions": rules.refuse_suppressions,
            "relaxedKernelParts": sorted(rules.relaxed_parts),
            "requiredKernelParts": sorted(rules.required_parts),
            "keys": [
                _key_json(key, policy is not None and key in policy.keys) for key in rules.keys
            ],
            "revocations": {
                "files": [str(path) for path in self.revocations],
                "certificates": len(rules.revoked_certificates),
                "keys": len(rules.revoked_keys),
            },
        }


def _key_json(key: TrustedKey, listed: bool) -> dict[str, Any]:
    ends = {"validFrom": key.valid_from, "validUntil": key.valid_until}
    return {
        "name": key.name,
        "sha256": key.key.fingerprint,
        "listed": listed,
        "roles": sorted(name for name, kind in ROLES.items() if kind in key.predicate_types),
        "stages": None if key.stages is None else sorted(key.stages),
        **{name: None if end is None else time_text(end) for name, end in ends.items()},
    }


def trust(
    policy: Policy | None,
    source: str | None = None,
    *,
    keys: Sequence[Path] = (),
    threshold: int | None = None,
    revocations: Sequence[Path] = (),
) -> Trust:
    """Return the trust settings of a check.

    `keys` selects among those of the policy; each keeps its limits in the policy, and a key that
    the policy does not list has the general limits. `threshold` may raise that of the policy.
    `revocations` are files with further revocations. Raises Rejected.
    """
    base = policy or Policy()
    listed = {record.key.spki: record for record in base.keys}
    chosen, outside = base.keys, []
    if keys:
        chosen = ()
        for path in keys:
            key = load_key(path)
            record = listed.get(key.spki)
            if record is None:
                record = TrustedKey(str(path), key, frozenset(ROLES.values()))
                outside.append(record.name)
            chosen = (*chosen, record)
    if not chosen:
        raise Rejected("policy/no-key", "no key is trusted, so no certificate can be")
    if threshold is not None and policy is not None and threshold < base.threshold:
        raise Rejected(
            "policy/threshold",
            f"--threshold {threshold} is below the {base.threshold} that the policy demands",
        )
    certificates, revoked = base.revoked_certificates, base.revoked_keys
    for path in revocations:
        more = read_revocations(path)
        certificates, revoked = certificates | more[0], revoked | more[1]
    stated = {field.name: getattr(base, field.name) for field in dataclasses.fields(Rules)}
    stated |= {"keys": chosen, "revoked_certificates": certificates, "revoked_keys": revoked}
    if threshold is not None:
        stated["threshold"] = threshold
    rules = TrustPolicy(**stated)
    return Trust(rules, source, policy, tuple(outside), tuple(revocations))


def read_policy(path: Path) -> Policy:
    """Read a policy (TOML), paths in it relative to its folder; raises Rejected."""
    with _naming(path):
        table, digest = _table(path)
        _refuse_unknown(table, _OPTIONS)
        keys = table.get("trusted-keys", [])
        if not isinstance(keys, list):
            raise Rejected("policy/malformed", "`trusted-keys` is a list of paths and tables")
        stated: dict[str, Any] = {"keys": tuple(_key(entry, path.parent) for entry in keys)}
        if "threshold" in table:
            stated["threshold"] = _count(table["threshold"])
        if "max-validity" in table:
            stated["max_validity"] = _days(table["max-validity"])
        if "refuse-suppressions" in table:
            strict = stated["refuse_suppressions"] = table["refuse-suppressions"]
            if not isinstance(strict, bool):
                raise Rejected("policy/malformed", "`refuse-suppressions` is true or false")
        stated["revoked_certificates"], stated["revoked_keys"] = _revocations(table)
        for name in _PARTS:
            key = name.replace("-kernel-", "_").replace("-", "_")
            stated[key] = frozenset(_words(table, name, PARTS) or ())
        return Policy(**stated, path=path, sha256=digest)


def read_revocations(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """Read the revoked certificates and keys of a file with these two lists; raises Rejected."""
    with _naming(path):
        table, _ = _table(path)
        _refuse_unknown(table, _REVOKED)
        if not table:
            raise Rejected("policy/malformed", f"it has none of {', '.join(_REVOKED)}")
        return _revocations(table)


def load_key(path: Path) -> PublicKey:
    """Read a public key; raises Rejected."""
    with _naming(path):
        return load_public(read_limited(path, _LARGEST_KEY))


class _naming:
    """Adds the name of a file to rejections."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Rejected):
            raise Rejected(error.reason, f"{self.path}: {error.detail}") from None


def _table(path: Path) -> tuple[dict[str, Any], str]:
    import tomllib

    data = read_limited(path, _LARGEST)
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also for integers with too many digits
        raise Rejected("policy/malformed", f"no TOML: {error}") from None
    return _dashed(table), hashlib.sha256(data).hexdigest()


def _dashed(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table with `_` in names replaced by `-`."""
    names = [name.replace("_", "-") for name in table]
    for name in names:
        if names.count(name) > 1:
            raise Rejected("policy/malformed", f"`{name}` is written twice, with `-` and with `_`")
    return dict(zip(names, table.values(), strict=True))


def _refuse_unknown(table: dict[str, Any], known: Sequence[str]) -> None:
    for name in sorted(table.keys() - set(known)):
        from difflib import get_close_matches

        close = get_close_matches(name, known, n=1)
        way_out = f"did you mean `{close[0]}`?" if close else f"known are {', '.join(known)}"
        raise Rejected("policy/unknown", f"there is no `{name}`; {way_out}")


def _key(entry: Any, folder: Path) -> TrustedKey:
    record = {"path": entry} if isinstance(entry, str) else entry
    if not isinstance(record, dict) or not isinstance(record.get("path"), str):
        raise Rejected("policy/malformed", "a trusted key is a path or a table with `path`")
    record = _dashed(record)
    _refuse_unknown(record, _OF_A_KEY)
    key = load_key(folder / record["path"])
    if "sha256" in record and _fingerprint(record["sha256"]) != key.fingerprint:
        raise Rejected("policy/other-key", f"{record['path']} is not the key of `sha256`")
    roles = frozenset(ROLES[name] for name in _words(record, "roles", ROLES) or _USUAL)
    stages = _words(record, "stages", STAGES)
    return TrustedKey(
        record["path"],
        key,
        roles,
        None if stages is None else frozenset(stages),
        _moment(record, "valid-from"),
        _moment(record, "valid-until"),
    )


def _words(record: dict[str, Any], name: str, known: Any) -> list[str] | None:
    if name not in record:
        return None
    words = record[name]
    known_words = isinstance(words, list) and all(isinstance(w, str) and w in known for w in words)
    if not isinstance(words, list) or not words or not known_words:
        raise Rejected("policy/malformed", f"`{name}` is a list with any of {', '.join(known)}")
    return words


def _moment(record: dict[str, Any], name: str) -> datetime | None:
    if name not in record:
        return None
    try:
        return parse_time(str(record[name]))
    except Rejected as error:
        raise Rejected("policy/malformed", f"`{name}`: {error.detail}") from None


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise Rejected("policy/malformed", "`threshold` is an integer")
    if value < 1:
        raise Rejected("policy/threshold", f"a threshold of {value} accepts anything")
    return value


def _days(value: Any) -> timedelta:
    if not isinstance(value, str) or _DAYS.fullmatch(value) is None:
        raise Rejected("policy/malformed", '`max-validity` is a number of days, such as "180d"')
    return timedelta(days=int(value[:-1]))


def _revocations(table: dict[str, Any]) -> tuple[frozenset[str], frozenset[str]]:
    certificates, keys = (frozenset(_digests(table, name)) for name in _REVOKED)
    return certificates, keys


def _digests(table: dict[str, Any], name: str) -> Iterator[str]:
    values = table.get(name, [])
    if not isinstance(values, list):
        raise Rejected("policy/malformed", f"`{name}` is a list of sha256 digests")
    for value in values:
        yield _fingerprint(value)


def _fingerprint(value: Any) -> str:
    """Return a sha256 as hex, given as hex or base64 (the hint of a key)."""
    if isinstance(value, str):
        text = value.removeprefix("sha256:")
        if _HEX.fullmatch(text.lower()) is not None:
            return text.lower()
        try:
            raw = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            raw = b""
        if len(raw) == 32:
            return raw.hex()
    raise Rejected("policy/malformed", f"{value!r} is no sha256, in hex or in base64")
