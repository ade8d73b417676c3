"""Which keys sign, and what becomes of statements that none signs."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kcdsl.diagnostics import Refusal, refuse
from kcdsl.diagnostics.codes import CANNOT_SIGN
from kcdsl.release.keys import read_private_key
from kcdsl_certs.envelope import LARGEST_BUNDLE, Envelope, decode, pae, parse_bundle
from kcdsl_certs.keys import SigningKey
from kcdsl_certs.policy import read_limited
from kcdsl_certs.rejected import Rejected

CERTIFICATE, STATEMENT = ".cert.json", ".statement.json"


def signing_keys(given: Sequence[str]) -> tuple[SigningKey, ...]:
    """Return the keys that are named; raises Refusal for one that is missing, unusable or given
    twice. A key that lies beside a contract signs nothing unless it is named."""
    keys = tuple(read_private_key(Path(name)) for name in given)
    if len({key.public.spki for key in keys}) != len(keys):
        raise refuse(CANNOT_SIGN, "one key is given twice", help="name each key once")
    return keys


def written_as(stem: Path, signed: bool) -> Path:
    """Return the file of a certificate, or of its statement, from the path without an ending."""
    return stem.with_name(stem.name + (CERTIFICATE if signed else STATEMENT))


def certificate_of(statement: Path) -> Path:
    """Return the file of the certificate that a statement becomes."""
    if not statement.name:
        raise refuse(CANNOT_SIGN, f"{statement} is a folder, not a statement")
    stem = statement.name.removesuffix(STATEMENT).removesuffix(".json")
    ending = ".json" if stem.endswith(".transfer") else CERTIFICATE
    return statement.with_name(stem + ending)


def refuse_other_signers(path: Path, keys: Sequence[SigningKey]) -> bool:
    """Return whether a certificate of these keys is to be replaced; raises Refusal where another
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
    """Say on stderr how a statement that was written is signed, and what is of an earlier run."""
    if written:
        print(f"not signed: kcdsl sign {statement} --key KEY", file=sys.stderr)
    older = certificate_of(statement)
    if older.is_file():
        print(f"note: {older} is of an earlier run", file=sys.stderr)


def cannot_sign(error: Rejected, path: Path) -> Refusal:
    """Return the refusal of a statement that a checker would refuse."""
    return refuse(
        CANNOT_SIGN,
        f"{path}: {error.detail} ({error.reason})",
        help="let the command that wrote it write it again; proofs lie beside it",
    )
