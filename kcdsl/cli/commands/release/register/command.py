"""The command `kcdsl register` and its actions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.cli.commands.release.register.text import event_line, plain, print_audit, rows_of
from kcdsl.cli.common import argument, choice, switch, value, values
from kcdsl.cli.common.options import (
    OutputFormat,
    TrustOptions,
    format_option,
    output_option,
    register_option,
    register_place,
    whole,
)
from kcdsl.cli.common.output import print_json, write_text
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import NOT_RECORDED, USAGE
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.release.register import CertificateStatus, Register
    from kcdsl_certs.signatures import TrustPolicy
    from kcdsl_certs.statement import RegisterHead


class RegisterAction(StrEnum):
    """The actions of `kcdsl register`."""

    INIT = "init"
    ADD = "add"
    LOG = "log"
    SHOW = "show"
    SLOTS = "slots"
    REVOKE = "revoke"
    MARK = "mark"
    HEAD = "head"
    CHECK = "check"
    UPGRADE = "upgrade"


class RevokedSubject(StrEnum):
    """The kind of revoked subject."""

    CERTIFICATE = "certificate"
    KEY = "key"


ARGUMENTS: Mapping[RegisterAction, tuple[int, int | None]] = {
    RegisterAction.INIT: (0, 0),
    RegisterAction.ADD: (1, None),
    RegisterAction.LOG: (0, 0),
    RegisterAction.SHOW: (1, None),
    RegisterAction.SLOTS: (0, None),
    RegisterAction.REVOKE: (1, None),
    RegisterAction.MARK: (1, None),
    RegisterAction.HEAD: (0, 0),
    RegisterAction.CHECK: (0, 0),
    RegisterAction.UPGRADE: (0, 0),
}
"""The least and the largest number of arguments of each action."""
OPTIONS: Mapping[str, tuple[RegisterAction, ...]] = {
    "since": (RegisterAction.LOG,),
    "reason": (RegisterAction.REVOKE, RegisterAction.MARK),
    "trusted": (RegisterAction.MARK,),
    "kind": (RegisterAction.REVOKE,),
    "sign": (RegisterAction.HEAD,),
    "output": (RegisterAction.HEAD,),
    "head": (RegisterAction.CHECK,),
    "policy": (RegisterAction.ADD, RegisterAction.CHECK),
    "key": (RegisterAction.ADD, RegisterAction.CHECK),
    "threshold": (RegisterAction.ADD, RegisterAction.CHECK),
    "revocations": (RegisterAction.ADD, RegisterAction.CHECK),
}
"""The actions that accept an option, by its field."""


@dataclass(frozen=True, kw_only=True)
class RegisterCommand(TrustOptions):
    """Manage a register of certificates: record, revoke, list and audit."""

    action: RegisterAction = choice(
        RegisterAction,
        "make a register, add certificates, list events, show certificates or slots, revoke, "
        "mark runs as untrusted, print or sign the head, audit the record, or bring the tables up "
        "to date",
        positional="",
    )
    names: tuple[str, ...] = argument(
        "ARG",
        "certificates of `add`, identities of `show`, `revoke` and `mark`, slots of `slots`",
        "*",
    )
    register: str | None = register_option("to use")
    since: int = value("N", "log: only the events after this one", 0, read=whole(0))
    reason: str | None = value("TEXT", "revoke, mark: the reason, shown in the log")
    trusted: bool = switch("mark: the runs are trusted again")
    kind: RevokedSubject = choice(
        RevokedSubject,
        "revoke: whether ARG is the identity of a certificate or the fingerprint of a key",
        RevokedSubject.CERTIFICATE,
    )
    sign: tuple[str, ...] = values("KEY", "head: sign it with this private key; repeatable")
    output: str | None = output_option("FILE", "head: the file for the signed head")
    head: tuple[str, ...] = values(
        "FILE", "check: a signed head that the register must extend; repeatable"
    )
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Run one action: 1 where an audit finds a defect, 2 where the action cannot be done."""
        least, most = ARGUMENTS[self.action]
        if len(self.names) < least or (most is not None and len(self.names) > most):
            wanted = "no argument" if most == 0 else "an argument"
            raise refuse(
                USAGE,
                f"`kcdsl register {self.action}` takes {wanted}",
                help="`kcdsl register --help` says what each action takes",
            )
        defaults = {name: option.default for name, option in type(self).options()}
        for name, actions in OPTIONS.items():
            if self.action not in actions and getattr(self, name) != defaults[name]:
                raise refuse(
                    USAGE,
                    f"`kcdsl register {self.action}` does not take --{name}",
                    help=f"it is for {', '.join(actions)}",
                )
        return _RUN[self.action](self, register_place(self.register))


def _init(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.release.register import Register

    with Register.open(place, create=True) as register:
        _tell_head(command, register.head())
    return Exit.HELD


def _upgrade(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.release.register import Register

    before, after = Register.upgrade(place)
    with Register.open(place) as register:
        head = register.head()
    if command.format is not OutputFormat.JSON:
        print(f"tables {after}" if before == after else f"tables {before}, now {after}")
    _tell_head(command, head)
    return Exit.HELD


def _tell_head(command: RegisterCommand, head: RegisterHead) -> None:
    from kcdsl.release.register.audit import head_json

    if command.format is OutputFormat.JSON:
        print_json({"schema": "kcdsl.register-head/1", "head": head_json(head)})
        return
    print(f"register  sha256:{head.register}")
    print(f"head      event {head.number}, sha256:{head.hash}")


def _add(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.api.certificates import read_certificate
    from kcdsl.release.register import Register

    bundles = [read_certificate(Path(name)) for name in command.names]
    trusted = command.trust_for(Path()).rules
    with Register.open(place) as register:
        found = register.record_certificates(bundles, trusted)
        _tell(command, [register.status_of(each.identity) for each in found])
    return Exit.HELD


def _show(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.release.register import Register, Standing

    with Register.open(place) as register:
        found = [register.status_of(_identity(name)) for name in command.names]
        for status in found:
            if status.certificate is None and status.standing is Standing.UNKNOWN:
                raise refuse(
                    NOT_RECORDED,
                    f"the register has no certificate sha256:{status.identity}",
                    help="`kcdsl register log` lists what it has",
                )
        _tell(command, found)
    return Exit.HELD


def _identity(name: str) -> str:
    return name.removeprefix("sha256:").lower()


def _tell(command: RegisterCommand, found: Sequence[CertificateStatus]) -> None:
    if command.format is OutputFormat.JSON:
        document = [
            {
                "identity": status.identity,
                "standing": status.standing.value,
                "detail": status.detail,
                "by": status.by,
                "event": None if status.certificate is None else status.certificate.number,
                "certificate": None if status.certificate is None else status.certificate.to_json(),
            }
            for status in found
        ]
        print_json({"schema": "kcdsl.register-certificates/1", "certificates": document})
        return
    from kcdsl.verdict.text.console import print_on, table

    for status in found:
        shown = table(("", ""), rows_of(status), pad_edge=False, padding=(0, 1), show_header=False)
        print_on(sys.stdout, shown)


def _slots(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.release.register import Register
    from kcdsl_certs.encoding.strict import time_text

    with Register.open(place) as register:
        found = [
            slot
            for slot in ([register.slot(n) for n in command.names] or register.slots())
            if slot.version > 0
        ]
        decisions = {slot.name: register.promotions(slot=slot.name) for slot in found}
    if command.format is OutputFormat.JSON:
        document = [
            {
                **slot.to_json(),
                "decisions": [
                    {**each.to_json(), "event": each.number, "time": time_text(each.at)}
                    for each in decisions[slot.name]
                    if each.at is not None
                ],
            }
            for slot in found
        ]
        print_json({"schema": "kcdsl.register-slots/1", "slots": document})
        return Exit.HELD
    from kcdsl.verdict.text.console import print_on, table

    rows = [
        (
            slot.name,
            str(slot.version),
            "nothing" if slot.triple is None else f"sha256:{slot.triple[:16]}…",
            slot.stage or "",
            f"{decisions[slot.name][-1].state}, sha256:{decisions[slot.name][-1].candidate[:16]}…",
        )
        for slot in found
    ]
    print_on(sys.stdout, table(("slot", "version", "live", "stage", "last decision"), rows))
    return Exit.HELD


def _revoke(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.release.register import Register, Revoked

    if command.reason is None:
        raise refuse(USAGE, "a revocation has a reason", help="give it: --reason TEXT")
    with Register.open(place) as register:
        for name in command.names:
            kind = Revoked(command.kind.value)
            found = register.revoke(_identity(name), command.reason, kind=kind)
            if command.format is not OutputFormat.JSON:
                print(one_line(f"revoked {kind} sha256:{found.subject}, event {found.number}"))
        if command.format is OutputFormat.JSON:
            _tell_head(command, register.head())
    return Exit.HELD


def _mark(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.release.register import Register

    if command.reason is None:
        raise refuse(USAGE, "a mark has a reason", help="give it: --reason TEXT")
    with Register.open(place) as register:
        for name in command.names:
            identity = _identity(name)
            found = register.mark_run(identity, trusted=command.trusted, reason=command.reason)
            if command.format is not OutputFormat.JSON:
                said = "trusted" if found.trusted else "not trusted"
                print(one_line(f"run sha256:{found.identity}: {said}"))
        if command.format is OutputFormat.JSON:
            _tell_head(command, register.head())
    return Exit.HELD


def _log(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.release.register import Register
    from kcdsl.release.register.audit import head_json

    with Register.open(place) as register:
        if command.format is OutputFormat.JSON:
            head = register.head()
            document = [plain(event) for event in register.events(command.since)]
            shown = {"head": head_json(head), "events": document}
            print_json({"schema": "kcdsl.register-log/1", **shown})
            return Exit.HELD
        _print_log(command, register)
    return Exit.HELD


def _print_log(command: RegisterCommand, register: Register) -> None:
    from kcdsl_certs.encoding.strict import time_text

    for event in register.events(command.since):
        begin = f"{event.number:>5}  {time_text(event.time)}  {event.kind.value:<11}"
        print(one_line(f"{begin}  {event_line(event)}"))


def _head(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.release.register import Register
    from kcdsl.release.signing import signing_keys

    keys = signing_keys(command.sign)
    if bool(keys) != (command.output is not None):
        raise refuse(
            USAGE,
            "a signed head is written to a file",
            help="name key and file: --sign KEY -o FILE",
        )
    with Register.open(place) as register:
        head = register.head()
        signed = register.sign_head(keys, head) if keys else None
    if signed is not None and command.output is not None:
        write_text(signed.decode(), command.output)
        if command.format is not OutputFormat.JSON:
            print(one_line(f"signed head: {command.output}"))
    _tell_head(command, head)
    return Exit.HELD


def _check(command: RegisterCommand, place: str) -> Exit:
    from kcdsl.api.certificates import read_certificate
    from kcdsl.release.register import Register

    heads = [read_certificate(Path(name)) for name in command.head]
    with Register.open(place) as register:
        found = register.check(heads, _trusted(command))
    if command.format is OutputFormat.JSON:
        print_json(found.to_json())
    else:
        print_audit(found)
    return Exit.HELD if found.is_sound else Exit.VIOLATED


def _trusted(command: RegisterCommand) -> TrustPolicy | None:
    """Return the trust policy of an audit; None where no keys and no signed heads are given."""
    from kcdsl.release.signing import has_policy

    named = command.head or command.key or command.policy or command.revocations or has_policy()
    asked = named or command.threshold is not None
    return command.trust_for(Path()).rules if asked else None


_RUN: Mapping[RegisterAction, Callable[[RegisterCommand, str], Exit]] = {
    RegisterAction.INIT: _init,
    RegisterAction.ADD: _add,
    RegisterAction.LOG: _log,
    RegisterAction.SHOW: _show,
    RegisterAction.SLOTS: _slots,
    RegisterAction.REVOKE: _revoke,
    RegisterAction.MARK: _mark,
    RegisterAction.HEAD: _head,
    RegisterAction.CHECK: _check,
    RegisterAction.UPGRADE: _upgrade,
}
