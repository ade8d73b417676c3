"""`kcdsl fleet`: join the certificates of many kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.api.contract import read_contract
from kcdsl.cli.common import argument, value, values
from kcdsl.cli.common.options import OutputFormat, TrustOptions, format_option, output_option
from kcdsl.cli.common.output import print_json
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.api.fleet import FleetReading
    from kcdsl_certs.signatures import SigningKey


@dataclass(frozen=True, kw_only=True)
class FleetCommand(TrustOptions):
    """List the kernels of a fleet that agree under a contract, by the certificates of their
    pairs."""

    certificates: tuple[str, ...] = argument(
        "CERT", "certificates, each of one kernel as training and one as inference kernel", "+"
    )
    contracts: tuple[str, ...] = values(
        "CONTRACT",
        "a contract of the fleet, repeatable; they differ only in their kernels (default: the "
        "one here)",
        name="contract",
    )
    classes: tuple[str, ...] = values(
        "FILE", "certificate of a class to derive again, repeatable", name="class"
    )
    sign: tuple[str, ...] = values("KEY", "private key to sign each class with, repeatable")
    output: str | None = output_option(
        "DIR", "folder for the certificates of --sign, class-1.cert.json and so on", "."
    )
    at: str | None = value("TIME", "read as of this time, 2026-11-30T12:00:00Z")
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Compare: 0 all kernels agree, 1 two of them disagree, 3 a pair is not decided, 4 the
        certificate of a class is not valid."""
        from kcdsl.api.certificates import moment_of
        from kcdsl.api.fleet import checked_class, fleet_of
        from kcdsl.release.signing import signing_keys

        moment = moment_of(self.at)
        contracts = [read_contract(name) for name in self.contracts or (None,)]
        trust = self.trust_for(contracts[0].base)
        files = [Path(name) for name in self.certificates]
        keys = signing_keys(self.sign)
        reading = fleet_of(contracts, files, trust, moment)
        checked = tuple(checked_class(Path(name), reading, trust, moment) for name in self.classes)
        found = replace(reading.fleet, checked=checked)
        if keys:
            self._write_classes(reading, keys, moment)
        if self.format is OutputFormat.JSON:
            print_json(found.to_json())
        else:
            from kcdsl.verdict.text.fleet import print_fleet

            print_fleet(found, sys.stdout)
        return found.exit

    def _write_classes(
        self, reading: FleetReading, keys: Sequence[SigningKey], moment: datetime
    ) -> None:
        """Sign each class of two or more kernels in a separate file; write all files or none."""
        from kcdsl.api.fleet import class_statements
        from kcdsl.source.output import NewFile, make_folder, write_together
        from kcdsl_certs.signatures import bundle_bytes, sign
        from kcdsl_certs.statement import class_bytes

        folder = Path(self.output or ".")
        files = [
            NewFile(
                folder / f"class-{number}.cert.json",
                bundle_bytes(sign(class_bytes(one), keys), keys[0].public.hint),
                0o644,
            )
            for number, one in enumerate(class_statements(reading, moment), 1)
        ]
        make_folder(folder)
        write_together(files, replace=False)
        for file in files:
            print(one_line(f"wrote {file.path}"), file=sys.stderr)
