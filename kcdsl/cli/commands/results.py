"""`kcdsl report` and `kcdsl status`: show what earlier runs wrote, without running anything."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.cli.common import Command, argument, choice, value, values
from kcdsl.cli.common.contracts import Contract, read_contract
from kcdsl.cli.common.options import (
    KERNELS,
    contract_argument,
    fingerprints_in,
    json_option,
    output_option,
)
from kcdsl.cli.common.output import (
    REPORT_FORMATS,
    clause_places,
    deliver,
    print_json,
    report_in,
    say,
)
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from rich.table import Table

    from kcdsl.diagnostics.spans import SourceFile, Span
    from kcdsl.verdict.convergence import Convergence
    from kcdsl_certs.statement import Expectation, Predicate

_UNCHECKED = (
    "neither signatures nor proofs are checked here; `kcdsl check --recheck --complete` checks both"
)


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """Write the page of a report again, or show it in another format."""

    report: str = argument("REPORT", "report.json of `kcdsl evaluate`")
    attribution: str | None = value("FILE", "JSON of `kcdsl attribute`, shown on the page")
    format: str = choice(
        [name for name in REPORT_FORMATS if name != "text"], "form of the report", "html"
    )
    contract: str | None = value("CONTRACT", "places of clauses for junit, github and sarif")
    output: str | None = output_option("FILE", "where to write it (default: standard output)")

    def run(self) -> Exit:
        """Show the report; the exit code is that of its verdict."""
        from kcdsl.verdict.report import read_attribution, read_report, unusable

        file = Path(self.report)
        document = read_report(file)
        attribution = None
        if self.attribution is not None:
            attribution = read_attribution(Path(self.attribution))
        source: SourceFile | None = None
        places: Mapping[str, Span] = {}
        if self.contract is not None:
            contract = read_contract(self.contract)
            source, places = clause_places(contract.path, contract.program)
        try:
            text = report_in(
                self.format,
                document,
                command="kcdsl report",
                source=source,
                places=places,
                attribution=attribution,
            )
        except _malformed() as error:
            raise unusable(file, str(error) or type(error).__name__) from None
        deliver(text, self.output)
        if self.output is not None:
            say(f"wrote {self.output}")
        return Exit(document["exit"])


def _malformed() -> tuple[type[Exception], ...]:
    """Return what a document of another shape raises while it is shown."""
    from jinja2 import UndefinedError

    wrong = (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError)
    return (*wrong, UndefinedError)


# --- status --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Status(Command):
    """Join proofs and measurements: does the kernel pair keep the whole contract?"""

    contract: str | None = contract_argument()
    files: tuple[str, ...] = values(
        "FILE",
        "statement or certificate, repeatable (default: those in the folder out beside CONTRACT)",
        name="from",
    )
    kernels: str | None = value("FILE", KERNELS)
    json: bool = json_option()

    def run(self) -> Exit:
        """Join results: 0 C-convergent, 1 violated, 3 not decided; signatures are not looked
        at."""
        from kcdsl.diagnostics import refuse
        from kcdsl.diagnostics.codes import FILE_MISSING
        from kcdsl.release.artefacts import ArtefactRefused
        from kcdsl.release.triple import build_expectation

        contract = read_contract(self.contract)
        named = [Path(name) for name in self.files]
        files = named or _written(contract.path.parent / "out")
        kernels = fingerprints_in(self.kernels)
        try:
            expectation = build_expectation(contract.program, contract.base, fingerprints=kernels)
        except ArtefactRefused as error:
            raise refuse(FILE_MISSING, f"{error.detail} ({error.reason})") from error
        found = _join(contract, expectation, files)
        if self.json:
            print_json(found.to_json())
        else:
            _print(found)
        return found.exit


def _written(folder: Path) -> list[Path]:
    """Return what verify and evaluate wrote; a certificate stands for its statement."""
    from kcdsl.release.signing import CERTIFICATE, STATEMENT

    return sorted([*folder.glob(f"*{CERTIFICATE}"), *folder.glob(f"*{STATEMENT}")])


def _join(contract: Contract, expectation: Expectation, files: Sequence[Path]) -> Convergence:
    from kcdsl.verdict.convergence import join
    from kcdsl_certs.rejected import Rejected

    read: dict[str, Predicate] = {}
    unused: dict[str, str] = {}
    for file in files:
        try:
            read[str(file)] = _read(file, expectation, contract.base)
        except Rejected as error:
            unused[str(file)] = f"{error.detail} ({error.reason})"
    about = expectation.triple.contract
    named = {"name": about.id, "version": about.version, "digest": about.digest}
    return join(contract.program, named, expectation.clauses, read, unused)


def _read(file: Path, expectation: Expectation, base: Path) -> Predicate:
    """Return what a statement says about this triple; raises Rejected where it says nothing."""
    from datetime import UTC, datetime

    from kcdsl.model.files import Artefacts
    from kcdsl.release.artefacts import input_at_hand
    from kcdsl.release.signing import CERTIFICATE, read_envelope
    from kcdsl_certs.files import read_limited
    from kcdsl_certs.rejected import Rejected
    from kcdsl_certs.statement import LARGEST_PAYLOAD, Predicate
    from kcdsl_certs.verification.admission import admit
    from kcdsl_certs.verification.coverage import check_stated
    from kcdsl_certs.verification.evidence import Evidence
    from kcdsl_certs.verification.verify import check_components, check_evidence, check_recount

    signed = file.name.endswith(CERTIFICATE)
    payload = read_envelope(file).payload if signed else read_limited(file, LARGEST_PAYLOAD)
    body = admit(payload, file.parent, datetime.now(UTC)).body
    if not isinstance(body, Predicate):
        raise Rejected("statement/transfer", "it carries a certificate over to other weights")
    at_hand = partial(input_at_hand, Artefacts.of(base))
    check_components(body, expectation.triple, expectation.inputs, at_hand, strict=True)
    check_stated(body, body.verdict, expectation.clauses)
    beside = Evidence(file.parent)
    check_evidence(body, beside, strict=True)
    check_recount(body, beside, at_hand, expectation.slices, strict=True)
    return body


def _print(found: Convergence) -> None:
    from rich.text import Text

    from kcdsl.verdict.convergence import MISSING
    from kcdsl.verdict.text.console import print_on

    print_on(sys.stdout, _table(found))
    missing = []
    for row in found.rows:
        where = row.clause if row.slice is None else f"{row.clause} on {row.slice}"
        if row.reason == MISSING:
            missing.append(where)
        elif row.reason is not None:
            print_on(sys.stdout, Text(f"  {where}: {row.reason}"))
    if missing:
        print_on(sys.stdout, Text(f"  {MISSING} about {', '.join(missing)}"))
    for file, why in found.unused.items():
        print_on(sys.stdout, Text(f"not used: {file}: {why}"))
    words: Mapping[bool | None, tuple[str, str]] = {
        True: ("C-convergent: every clause of the contract holds", "bold green"),
        False: ("not C-convergent: the contract is violated", "bold red"),
        None: ("not shown to be C-convergent: clauses are not decided", "bold yellow"),
    }
    print_on(sys.stdout, Text(*words[found.convergent]))
    print_on(sys.stdout, Text(_UNCHECKED))


def _table(found: Convergence) -> Table:
    from rich.text import Text

    from kcdsl.verdict.model import SHOWN
    from kcdsl.verdict.text.console import table

    rows = (
        (
            f"{row.clause} {row.level}",
            ("hard" if row.hard else f"soft, {row.budget}") + ", held out" * row.holdout,
            row.slice or "",
            "; ".join(row.evidence),
            Text(*SHOWN[row.verdict]),
        )
        for row in found.rows
    )
    return table(("clause", "kind", "slice", "evidence", "verdict"), rows)
