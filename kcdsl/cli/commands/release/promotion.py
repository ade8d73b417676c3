"""`kcdsl promote` and `kcdsl gate`: advance a candidate; ask whether it may serve."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.cli.common import Command, argument, choice, switch, value
from kcdsl.cli.common.options import (
    KERNELS,
    OutputFormat,
    Stage,
    TrustOptions,
    contract_argument,
    fingerprints_in,
    format_option,
    register_option,
    register_place,
    whole,
)
from kcdsl.cli.common.output import print_json, say
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import INPUT_OUTPUT, USAGE
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.api.promotion import Promoted
    from kcdsl.release.promotion.gate import Gate
    from kcdsl.release.register import Register

_DURATION = re.compile(r"(\d{1,9})(s|min|h|d)", re.ASCII)
_UNITS = {"s": "seconds", "min": "minutes", "h": "hours", "d": "days"}
_AT_LEAST_NONE = whole(0)
_HOW_NAMED = {
    "slot": "--slot NAME, such as chat/production; `kcdsl register slots` lists those there are",
    "stage": f"--stage {', '.join(stage.value for stage in Stage)}",
}
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{64})", re.ASCII)


def duration(text: str) -> timedelta:
    """Return a time such as `90s`, `30min`, `24h` or `7d`."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a time such as 30min, 24h or 7d, not {text!r}")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


def digest(text: str) -> str:
    """Return a sha256 in hex."""
    found = _DIGEST.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be a sha256 digest, not {text[:80]!r}")
    return found[1]


@dataclass(frozen=True, kw_only=True)
class SlotCommand(Command):
    """A command about a slot of a register."""

    register: str | None = register_option("with the slot")
    slot: str | None = value("NAME", "the slot, such as chat/production")

    def named(self, option: str) -> str:
        """Return the value of an option that the command needs; raises Refusal."""
        found = getattr(self, option)
        if found is None:
            raise refuse(USAGE, f"--{option} is not given", help=_HOW_NAMED[option])
        return str(found)


@dataclass(frozen=True, kw_only=True)
class PromoteCommand(SlotCommand, TrustOptions):
    """Advance, hold, freeze or roll back a candidate, by the evidence of a stage."""

    evidence: tuple[str, ...] = argument(
        "EVIDENCE",
        "certificates of the stage, report.json of `kcdsl evaluate`, windows of `kcdsl aggregate"
        " --stage`",
        "*",
    )
    contract: str | None = value("CONTRACT", "the contract in force (default: the one here)")
    stage: Stage | None = choice(Stage, "the stage of the evidence")
    window: timedelta | None = value(
        "TIME", "length of a stability window (default: 24h)", read=duration
    )
    requests: int = value(
        "N", "minimum number of requests of each slice in a window", 1000, read=_AT_LEAST_NONE
    )
    recheck: bool = switch("re-derive every proof with the independent checker")
    kernels: str | None = value("FILE", KERNELS)
    checkpoint: str | None = value("FILE", "the weights, instead of those the contract names")
    infer_checkpoint: str | None = value(
        "FILE", "the weights of the inference kernel, if the contract names separate ones"
    )
    dry_run: bool = switch("record nothing")
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Promote: 0 advanced or kept, 1 blocked, frozen or rolled back, 3 held, 4 a certificate is
        not valid."""
        from kcdsl.api.certificates import CheckSettings
        from kcdsl.api.promotion import PromoteSettings, promote

        found = promote(
            self.settings(
                PromoteSettings,
                register=register_place(self.register),
                slot=self.named("slot"),
                stage=self.named("stage"),
                window=timedelta(days=1) if self.window is None else self.window,
                checks=self.settings(CheckSettings, register=None),
            )
        )
        if self.format is OutputFormat.JSON:
            print_json(found.to_json())
        else:
            _print(found)
        return found.exit


def _print(found: Promoted) -> None:
    from rich.text import Text

    from kcdsl.verdict.text.console import print_on, table

    if found.step is None:
        for name, reasons in found.invalid.items():
            print_on(sys.stdout, Text(f"not valid: {name}: {', '.join(reasons)}"), soft_wrap=True)
        print_on(sys.stdout, Text("not promoted: `kcdsl check` shows the details"))
        return
    step = found.step
    styles = {"shown": "green", "violated": "bold red", "open": "yellow", "not-due": "dim"}
    rows = (
        (
            f"{row.clause} {row.level}",
            row.slice or "",
            Text(row.status, styles[row.status]),
            row.reason,
        )
        for row in step.rows
    )
    print_on(sys.stdout, table(("clause", "slice", "status", "why"), rows))
    for text in step.lacking:
        print_on(sys.stdout, Text(f"lacking: {text}"), soft_wrap=True)
    for name, why in found.unused.items():
        print_on(sys.stdout, Text(f"not counted: {name}: {why}"), soft_wrap=True)
    for text in found.notes:
        print_on(sys.stdout, Text(f"note: {text}"), soft_wrap=True)
    candidate = step.candidate
    good = found.exit is Exit.HELD
    style = (
        "bold green" if good else "bold yellow" if found.exit is Exit.INCONCLUSIVE else "bold red"
    )
    where = f"{found.stage} -> {candidate.stage}" if found.stage != candidate.stage else found.stage
    line = f": {where}, sha256:{(found.triple or '')[:12]} in {found.slot}"
    print_on(sys.stdout, Text.assemble((step.outcome.value, style), line))
    live = "nothing" if found.live is None else f"sha256:{found.live[:12]}"
    note = "" if found.recorded else "; nothing was recorded"
    print_on(sys.stdout, Text(f"live in {found.slot}: {live}{note}"))


# --- gate -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GateCommand(SlotCommand):
    """Check whether a triple may serve at a stage of a slot; with --serve over HTTP."""

    contract: str | None = contract_argument()
    stage: Stage | None = choice(Stage, "the stage to serve at")
    triple: str | None = value(
        "DIGEST", "the triple (default: that of the contract, the weights and kernels here)",
        read=digest,
    )  # fmt: skip
    kernels: str | None = value("FILE", KERNELS)
    checkpoint: str | None = value("FILE", "the weights, instead of those the contract names")
    serve: str | None = value(
        "[HOST:]PORT", "answer over HTTP until stopped (default host: 127.0.0.1)"
    )
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Answer: 0 it may serve, 1 it must not, 3 not decided; with --serve run until stopped."""
        from kcdsl.release.register import Register

        with Register.open(register_place(self.register)) as register:
            if self.serve is not None:
                return self._serve(register, self.serve)
            gate = self._ask(register)
        if self.format is OutputFormat.JSON:
            print_json(gate.to_json())
        else:
            for text in gate.reasons:
                print(one_line(text))
            word = "open" if gate.is_open else "closed"
            print(one_line(f"{word}: sha256:{gate.triple[:12]} at {gate.stage} in {gate.slot}"))
        return gate.exit

    def _ask(self, register: Register) -> Gate:
        from kcdsl.release.issue import utc_now
        from kcdsl.release.promotion.gate import ask

        slot, stage = self.named("slot"), self.named("stage")
        triple = self.triple
        if triple is None:
            triple = self._deployed(register, slot)
        return ask(register, slot, stage, triple, utc_now())

    def _deployed(self, register: Register, slot: str) -> str:
        from kcdsl.api.contract import read_contract
        from kcdsl.release.promotion.recorded import deployed_in
        from kcdsl.release.requirements import build_triple

        contract = read_contract(self.contract)
        deployed = build_triple(
            contract.program,
            contract.base,
            fingerprints=fingerprints_in(self.kernels),
            checkpoint=None if self.checkpoint is None else Path(self.checkpoint),
        )
        return deployed_in(register, slot, deployed, (), serving=True).digest

    def _serve(self, register: Register, place: str) -> Exit:
        from kcdsl.release.issue import utc_now
        from kcdsl.release.promotion.gate_server import GateServer

        given = {"slot": self.slot, "stage": self.stage, "triple": self.triple}
        usual = {name: str(found) for name, found in given.items() if found is not None}
        host, port = address(place)
        try:
            server = GateServer((host, port), register, utc_now, usual)
        except OSError as error:
            why = error.strerror or str(error)
            raise refuse(
                INPUT_OUTPUT, f"nothing can be served at {host}:{port}: {why}", help="name another"
            ) from error
        with server:
            say(f"gate: http://{host}:{server.server_address[1]}")
            # The first process of a container ignores this signal without a handler.
            before = signal.signal(signal.SIGTERM, signal.default_int_handler)
            try:
                server.serve_forever()
            except KeyboardInterrupt:
                say("gate: stopping, after the answers that are under way")
            finally:
                signal.signal(signal.SIGTERM, before)
        return Exit.HELD


def address(place: str) -> tuple[str, int]:
    """Return host and port; raises Refusal. The default host accepts only local connections."""
    host, _, port = place.rpartition(":")
    if not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise refuse(
            USAGE, f"{place[:80]!r} is no HOST:PORT", help="such as 127.0.0.1:8080, or 8080"
        )
    return host.strip("[]") or "127.0.0.1", int(port)
