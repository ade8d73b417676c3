"""The texts of `kcdsl register`: certificates, events and audits, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kcdsl.diagnostics.render.terminal import counted, one_line

if TYPE_CHECKING:
    from kcdsl.release.register import Audit, CertificateStatus, Event


def rows_of(status: CertificateStatus) -> Iterator[tuple[str, str]]:
    """Yield the recorded facts about a certificate, each with its name."""
    from kcdsl_certs.encoding.strict import time_text

    yield "identity", f"sha256:{status.identity}"
    detail = f": {status.detail}" if status.detail else ""
    yield "standing", f"{status.standing}{detail}"
    if status.by is not None and status.by != status.identity:
        yield "by", f"sha256:{status.by}"
    found = status.certificate
    if found is None:
        return
    yield "verdict", found.verdict
    yield "stage", found.stage
    yield "sequence", str(found.sequence)
    yield "valid", f"from {time_text(found.issued_at)} until {time_text(found.valid_until)}"
    yield "triple", f"sha256:{found.triple}"
    for key in found.signers:
        yield "signed by", f"sha256:{key}"
    yield "recorded", f"event {found.number}"


def plain(event: Event) -> dict[str, Any]:
    """Return an event as plain data."""
    from kcdsl_certs.encoding.strict import time_text

    return {
        "number": event.number,
        "time": time_text(event.time),
        "kind": event.kind.value,
        "previous": event.previous,
        "hash": event.hash,
        "data": dict(event.data),
    }


def event_line(event: Event) -> str:
    """Return an event in one line."""
    from kcdsl.release.register import EventKind
    from kcdsl.release.register.records import RUN

    data = event.data

    def short(name: str) -> str:
        return f"sha256:{data[name]['sha256'][:16]}…"

    match event.kind:
        case EventKind.REGISTER:
            return f"begins as {data['id']}"
        case EventKind.TRIPLE:
            contract = data["contract"]
            return f"{data['checkpoint']['name']}, {contract['id']} {contract['version']}"
        case EventKind.CERTIFICATE:
            return f"sha256:{data['identity']['sha256']} {data['verdict']} {data['stage']}"
        case EventKind.RUN:
            identity = RUN.read(data, "data").identity
            return f"sha256:{identity} {data['kind']} {data['stage']}"
        case EventKind.RUN_MARK:
            trusted = "trusted" if data["trusted"] else "not trusted"
            return f"{short('run')} {trusted}: {data['reason']}"
        case EventKind.PROMOTION:
            said = f"{data['slot']} {data['version']}: {data['state']} {short('candidate')}"
            named = [f"{r['clause']}: {r['detail']}" for r in data["reasons"]]
            return "; ".join([said, *named])
        case EventKind.REVOCATION:
            return f"{data['kind']} {short('subject')}: {data['reason']}"


def print_audit(found: Audit) -> None:
    """Print the result of an audit."""
    for defect in found.defects:
        where = "" if defect.number is None else f"event {defect.number}: "
        print(one_line(f"{where}{defect.detail} ({defect.reason})"))
    if found.last is not None:
        print(f"{counted(found.last.number, 'event')}, last sha256:{found.last.hash}")
    print(counted(found.certificates, "certificate"))
    if found.unverified:
        print(f"signed by no key that is trusted here: {found.unverified}")
    for head in found.heads:
        print(f"signed head: event {head.number}")
    print("sound" if found.is_sound else "not sound")
