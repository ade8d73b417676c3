"""`kcdsl sign`: sign a statement in a process that runs and imports nothing of its contract."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kcdsl_certs.admission import Admitted
    from kcdsl_certs.envelope import Envelope
    from kcdsl_certs.keys import SigningKey

HELP = "show and sign the statement of a certificate; nothing of its contract is run"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "statement",
        metavar="STATEMENT",
        help="written by verify, evaluate or transfer; with --add a certificate",
    )
    parser.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="KEY",
        help="private key, repeatable; without one the statement is shown alone",
    )
    parser.add_argument(
        "--add", action="store_true", help="add signatures to a certificate that has some"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the certificate, in the folder of STATEMENT (default: STATEMENT with .cert.json; "
        "with --add: the certificate itself)",
    )


def run(arguments: argparse.Namespace) -> Exit:
    """Show what the statement says and sign it; what a checker would refuse is refused (2)."""
    from kcdsl.release.signing import (
        cannot_sign,
        certificate_of,
        refuse_other_signers,
        signing_keys,
    )
    from kcdsl.source.writing import write_bytes
    from kcdsl_certs.admission import admit
    from kcdsl_certs.envelope import bundle_bytes, sign
    from kcdsl_certs.rejected import Rejected

    path = Path(arguments.statement)
    keys = signing_keys(arguments.key)
    target = path if arguments.add else certificate_of(path)
    if arguments.output is not None:
        target = _beside(Path(arguments.output), path)
    try:
        payload, before = _read(path, arguments.add)
        admitted = admit(payload, path.parent, datetime.now(UTC))
    except Rejected as error:
        raise cannot_sign(error, path) from error
    _show(admitted, before)
    if not keys:
        print("nothing was signed: name a key, --key KEY", file=sys.stderr)
        return Exit.HELD
    envelope = sign(payload, keys)
    hint = keys[0].public.hint
    if before is not None:
        _refuse_signed(before, keys, path)
        envelope, hint = _joined(before, envelope), before.signatures[0].keyid or hint
    if before is None or target != path:
        replaced = refuse_other_signers(target, keys)
        if replaced:
            print(
                one_line(f"note: {target} replaces an earlier one by the same keys"),
                file=sys.stderr,
            )
    chosen = arguments.output is None and not arguments.add
    write_bytes(target, bundle_bytes(envelope, hint), own_name=chosen)
    print(one_line(f"certificate: {target}"))
    return Exit.HELD


def _beside(target: Path, statement: Path) -> Path:
    """Return the file to be written; a certificate lies beside the proofs that it names."""
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import CANNOT_SIGN

    if target.resolve().parent != statement.resolve().parent:
        raise refuse(
            CANNOT_SIGN,
            "a certificate lies in the folder of its statement, with the proofs that it names",
            help=f"name a file in {statement.parent}",
        )
    return target


def _read(path: Path, add: bool) -> tuple[bytes, Envelope | None]:
    """Return the statement, and the envelope that it lies in where signatures are added."""
    from kcdsl.release.signing import read_envelope
    from kcdsl_certs.envelope import PAYLOAD_TYPE
    from kcdsl_certs.policy import read_limited
    from kcdsl_certs.rejected import Rejected
    from kcdsl_certs.statement import LARGEST_PAYLOAD

    if not add:
        payload = read_limited(path, LARGEST_PAYLOAD)
        if b'"dsseEnvelope"' in payload[:4096]:
            raise Rejected("statement/signed", "it is a certificate; --add adds a signature to one")
        return payload, None
    envelope = read_envelope(path)
    if envelope.payload_type != PAYLOAD_TYPE:
        raise Rejected("payload/type", f"{envelope.payload_type!r}")
    return envelope.payload, envelope


def _refuse_signed(before: Envelope, keys: Sequence[SigningKey], path: Path) -> None:
    """Refuse a key that has signed already: one key counts once."""
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import CANNOT_SIGN
    from kcdsl_certs.envelope import MOST_SIGNATURES, pae

    message = pae(before.payload_type, before.payload)
    for key in keys:
        if any(key.public.verifies(old.value, message) for old in before.signatures):
            raise refuse(
                CANNOT_SIGN,
                f"{path} carries a signature of {key.public.hint} already",
                help="one key counts once, however often it signs; name another",
            )
    if len(before.signatures) + len(keys) > MOST_SIGNATURES:
        raise refuse(
            CANNOT_SIGN,
            f"a certificate has at most {MOST_SIGNATURES} signatures",
            help="sign the statement anew, with the keys that count",
        )


def _joined(before: Envelope, after: Envelope) -> Envelope:
    from dataclasses import replace

    return replace(before, signatures=(*before.signatures, *after.signatures))


def _show(admitted: Admitted, before: Envelope | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from kcdsl.verdict.console import print_on

    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=False)
    for _ in range(2):
        table.add_column(overflow="fold")
    for name, text in _rows(admitted):
        table.add_row(Text(name), Text(" ".join(text.split())))
    for signature in () if before is None else before.signatures:
        claimed = signature.keyid or "without a hint"
        table.add_row(Text("signature"), Text(f"claims to be of {claimed}; not checked here"))
    print_on(sys.stdout, table)


def _rows(admitted: Admitted) -> Iterator[tuple[str, str]]:
    """Yield all that is signed and that a person can judge."""
    from kcdsl_certs.statement import Predicate, certificate_id
    from kcdsl_certs.strict import time_text

    body = admitted.body
    triple = body.triple
    yield "identity", f"sha256:{certificate_id(admitted.payload)}"
    yield "kind", "certificate" if isinstance(body, Predicate) else "weights transfer"
    contract = triple.contract
    yield "contract", f"{contract.id} {contract.version} (sha256:{contract.digest})"
    yield "checkpoint", f"{triple.checkpoint.name} (sha256:{triple.checkpoint.digest})"
    yield "training kernel", f"{triple.train.name} (sha256:{triple.train.digest})"
    yield "inference kernel", f"{triple.infer.name} (sha256:{triple.infer.digest})"
    yield "stage", body.stage
    yield "valid", f"from {time_text(body.issued_at)} until {time_text(body.valid_until)}"
    yield "sequence", str(body.sequence)
    if isinstance(body, Predicate):
        whole = "the whole contract" if body.scope.complete else "a part of the contract"
        yield "verdict", f"{body.verdict}, of {whole}"
        for clause in body.clauses:
            yield clause.label, f"{clause.verdict}, {clause.evidence} by {clause.method}"
        for file in body.inputs:
            yield "input", f"{file.name} (sha256:{file.sha256})"
        for accepted in body.suppressions:
            yield "accepted finding", f"{accepted.code}: {accepted.reason}"
    else:
        yield "earlier", f"{body.path} (sha256:{body.base})"
        for item in body.carried:
            yield item.id if item.slice is None else f"{item.id} [{item.slice}]", "goes over"
    for text in body.assumptions:
        yield "assumes", text
