"""Keys, signatures and trust: signing certificates, and the keys by which they are accepted."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import (
    BAD_CONFIGURATION,
    CANNOT_SIGN,
    NO_PASSWORD,
    NO_TRUSTED_KEY,
    TRUST_POLICY,
    UNREADABLE_KEY,
)
from kcdsl.diagnostics.render.terminal import printable
from kcdsl.source.config import load_config, user_folder
from kcdsl_certs.encoding.files import read_limited
from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.signatures import (
    LARGEST_BUNDLE,
    Envelope,
    Policy,
    SigningKey,
    Trust,
    decode,
    load_private,
    pae,
    parse_bundle,
    read_policy,
    trust,
)

# --- private keys ---------------------------------------------------------------------------------


PASSWORD_VARIABLE = "KCDSL_KEY_PASSWORD"
_LARGEST_KEY = 64 * 1024


def read_private_key(path: Path) -> SigningKey:
    """Read a private key; raises Refusal where that fails.

    The password of an encrypted key is taken from the environment variable KCDSL_KEY_PASSWORD.
    """
    password = os.environ.get(PASSWORD_VARIABLE)
    try:
        return load_private(_read_key(path), password.encode("utf-8") if password else None)
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


def _read_key(path: Path) -> bytes:
    """Return the content of a private key file; warn where other users can read it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as stream:
            mode = os.fstat(descriptor).st_mode
            if not stat.S_ISREG(mode):
                raise refuse(
                    UNREADABLE_KEY,
                    f"{path} is no regular file",
                    help="name the file of a private key; `kcdsl keygen` makes one",
                )
            data = stream.read(_LARGEST_KEY + 1)
        if b"BEGIN PUBLIC KEY" in data:
            raise refuse(
                UNREADABLE_KEY,
                f"{path} is a public key, and no public key signs",
                help="name the private key, the file without .pub",
            )
    except FileNotFoundError as error:
        raise refuse(
            UNREADABLE_KEY, f"there is no key {path}", help="`kcdsl keygen` makes a key pair"
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no name of a file"
        raise refuse(
            UNREADABLE_KEY,
            f"{path} cannot be read: {reason}",
            help="make the key readable for you alone (chmod 600), or name another one",
        ) from error
    if os.name == "posix" and mode & 0o077:
        shown = f"{printable(str(path))} (mode {stat.S_IMODE(mode):04o})"
        print(f"warning: others may read the private key {shown}: chmod 600", file=sys.stderr)
    return data


# --- signatures -----------------------------------------------------------------------------------


CERTIFICATE, STATEMENT = ".cert.json", ".statement.json"


def signing_keys(given: Sequence[str | os.PathLike[str]]) -> tuple[SigningKey, ...]:
    """Return the given keys; raises Refusal for a key that is missing, unusable or given twice.
    A key beside a contract is not used unless it is given."""
    keys = tuple(read_private_key(Path(name)) for name in given)
    if len({key.public.spki for key in keys}) != len(keys):
        raise refuse(CANNOT_SIGN, "one key is given twice", help="name each key once")
    return keys


def written_as(stem: Path, signed: bool) -> Path:
    """Return the file of a certificate, or of its statement, from the path without a suffix."""
    return stem.with_name(stem.name + (CERTIFICATE if signed else STATEMENT))


@dataclass(frozen=True, slots=True)
class Target:
    """The file of a certificate, or of its unsigned statement if there is no key.

    `replaces`: there is an earlier certificate of the same keys; `other` is its contract, where
    that is another one.
    """

    path: Path
    keys: tuple[SigningKey, ...]
    replaces: bool
    other: str | None = None

    @classmethod
    def of(cls, stem: Path, keys: tuple[SigningKey, ...], contract: str) -> Target:
        """Return the target of the contract of this name from the path without a suffix; raises
        Refusal where other keys signed the existing file."""
        path = written_as(stem, bool(keys))
        replaces = bool(keys) and refuse_other_signers(path, keys)
        earlier = _contract_of(path) if replaces else None
        return cls(path, keys, replaces, None if earlier == contract else earlier)

    def tell(self, written: bool = True) -> None:
        """Print to stderr the signing keys, and the replaced file."""
        if not self.keys:
            tell_unsigned(self.path, written)
        elif self.replaces:
            named = printable(str(self.path))
            whose = (
                ""
                if self.other is None
                else (f", of the contract {printable(self.other)}: -o gives each contract a folder")
            )
            print(f"note: {named} replaces an earlier one by the same keys{whose}", file=sys.stderr)


def certificate_of(statement: Path) -> Path:
    """Return the file of the signed certificate of a statement."""
    if not statement.name:
        raise refuse(
            CANNOT_SIGN,
            f"{statement} is a folder, not a statement",
            help="name the *.statement.json in it",
        )
    stem = statement.name.removesuffix(STATEMENT).removesuffix(".json")
    ending = ".json" if stem.endswith(".transfer") else CERTIFICATE
    return statement.with_name(stem + ending)


def refuse_other_signers(path: Path, keys: Sequence[SigningKey]) -> bool:
    """Return whether a certificate of these keys will be replaced; raises Refusal where another
    key has signed it, too."""
    if not os.path.lexists(path):
        return False
    try:
        envelope = read_envelope(path)
    except Rejected as error:
        raise _occupied(path, f"is no certificate ({error.reason})") from error
    message = pae(envelope.payload_type, envelope.payload)
    for signature in envelope.signatures:
        if not any(key.public.verifies(signature.value, message) for key in keys):
            raise _occupied(path, "carries the signature of another key")
    return True


def _contract_of(path: Path) -> str | None:
    """Return the name of the contract of a signed file; None where it states none."""
    try:
        triple = json.loads(read_envelope(path).payload)["predicate"]["triple"]
        return str(triple["contract"]["id"])
    except (LookupError, TypeError, ValueError, RecursionError):
        return None


def _occupied(path: Path, why: str) -> Refusal:
    return refuse(
        CANNOT_SIGN,
        f"{path} is already there and {why}",
        help="`kcdsl sign --add` adds a signature to a certificate; for another one choose another "
        "folder with -o, or remove the file",
    )


def read_envelope(path: Path) -> Envelope:
    """Read the envelope of a certificate; raises Rejected."""
    return decode(parse_bundle(read_limited(path, LARGEST_BUNDLE)))


def tell_unsigned(statement: Path, written: bool = True) -> None:
    """Print to stderr how to sign a written statement, and which files are of an earlier run."""
    if written:
        named = shlex.quote(printable(str(statement)))
        print(f"not signed: kcdsl sign {named} --key KEY", file=sys.stderr)
    older = certificate_of(statement)
    if older.is_file():
        print(f"note: {older} is of an earlier run", file=sys.stderr)


def cannot_sign(error: Rejected, path: Path) -> Refusal:
    """Return the refusal of a statement that a checker would reject."""
    return refuse(
        CANNOT_SIGN,
        f"{path}: {error.detail} ({error.reason})",
        help="name the *.statement.json of verify, evaluate or transfer, its proofs beside it; "
        "if it was changed, run that command again",
    )


# --- trust ----------------------------------------------------------------------------------------


POLICY_VARIABLE = "KCDSL_POLICY"
POLICY_FILE = "policy.toml"


def trusted(
    policy: str | None,
    keys: Sequence[str],
    threshold: int | None,
    revocations: Sequence[str],
    folder: Path,
) -> Trust:
    """Return the trust settings of a check; raises Refusal where they are empty or unusable.

    The policy is the given file, else that of the environment, else of the user's configuration.
    The configuration of the contract's `folder` can only make it stricter, about accepted findings.
    """
    try:
        found = _trust(_policy(policy), keys, threshold, revocations)
    except Rejected as error:
        raise _refused(error) from error
    if not load_config(folder).refuse_suppressions:
        return found
    return dataclasses.replace(
        found, rules=dataclasses.replace(found.rules, refuse_suppressions=True)
    )


def has_policy() -> bool:
    """Return whether the environment or the user's configuration names a policy."""
    own = user_folder()
    return POLICY_VARIABLE in os.environ or (own is not None and os.path.lexists(own / POLICY_FILE))


def trusted_if_any(
    policy: str | None, keys: Sequence[str], threshold: int | None, revocations: Sequence[str]
) -> Trust | None:
    """Return the trust settings of a reader of certificates, from the sources of `trusted` except
    a contract; None without policy and keys. Raises Refusal as `trusted` does."""
    try:
        chosen = _policy(policy)
        if chosen[1] is None and not keys and threshold is None and not revocations:
            return None
        return _trust(chosen, keys, threshold, revocations)
    except Rejected as error:
        raise _refused(error) from error


def _trust(
    chosen: tuple[str | None, Policy | None],
    keys: Sequence[str],
    threshold: int | None,
    revocations: Sequence[str],
) -> Trust:
    source, policy = chosen
    return trust(
        policy,
        source,
        keys=[Path(name) for name in keys],
        threshold=threshold,
        revocations=[Path(name) for name in revocations],
    )


def _policy(given: str | None) -> tuple[str | None, Policy | None]:
    variable = os.environ.get(POLICY_VARIABLE)
    if given is not None:
        return "--policy", read_policy(Path(given))
    if variable is not None:
        return POLICY_VARIABLE, read_policy(Path(variable))
    own = user_folder()
    if own is not None and os.path.lexists(own / POLICY_FILE):
        return "user configuration", read_policy(own / POLICY_FILE)
    return None, None


def _refused(error: Rejected) -> Refusal:
    text = f"{error.detail} ({error.reason})"
    match error.reason:
        case "policy/no-key":
            return refuse(
                NO_TRUSTED_KEY,
                error.detail,
                help="name a key, --key PUB, or a policy, --policy FILE; files beside the "
                "contract are never used",
            )
        case "policy/malformed" | "policy/unknown":
            return refuse(BAD_CONFIGURATION, text, help="`kcdsl explain certs` describes policies")
        case reason if reason.startswith("policy/"):
            return refuse(
                TRUST_POLICY,
                error.detail,
                help="the threshold lies between that of the policy and the number of distinct "
                "keys; repeat --key",
            )
        case "key/private-given":
            return refuse(UNREADABLE_KEY, text, help="name the file beside it that ends in .pub")
        case _:
            return refuse(UNREADABLE_KEY, text, help="`kcdsl keygen` makes a key pair")
