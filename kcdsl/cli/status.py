"""`kcdsl status`: one verdict about the contract from all that verify and evaluate have shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.exits import Exit

if TYPE_CHECKING:
    from rich.table import Table

    from kcdsl.ir.terms import Program
    from kcdsl.verdict.convergence import Convergence
    from kcdsl_certs.requirements import Expectation
    from kcdsl_certs.statement import Predicate

_UNCHECKED = (
    "neither signatures nor proofs are checked here; `kcdsl check --recheck --complete` checks both"
)
HELP = "join proofs and measurements: does the kernel pair keep the whole contract?"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("contract", nargs="?", metavar="CONTRACT", help="default: the one here")
    parser.add_argument(
        "--from",
        dest="files",
        action="append",
        default=[],
        metavar="FILE",
        help="statement or certificate, repeatable (default: those in the folder out beside "
        "CONTRACT)",
    )
    parser.add_argument(
        "--kernels",
        metavar="FILE",
        help="kernel fingerprints, the kernels.json of `kcdsl evaluate`, instead of those of this "
        "machine",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> Exit:
    """Join results: 0 C-convergent, 1 violated, 3 not decided; signatures are not looked at."""
    import json

    from kcdsl.check.compile import load_program
    from kcdsl.cli.discover import find_contract
    from kcdsl.diagnostics import refuse
    from kcdsl.diagnostics.codes import FILE_MISSING
    from kcdsl.release.artefacts import ArtefactRefused
    from kcdsl.release.kernels import read_kernels
    from kcdsl.release.triple import build_expectation

    path = find_contract(arguments.contract, Path())
    program, base = load_program(path), path.resolve().parent
    files = [Path(name) for name in arguments.files] or _written(path.parent / "out")
    kernels = None if arguments.kernels is None else read_kernels(Path(arguments.kernels))
    try:
        expectation = build_expectation(program, base, fingerprints=kernels)
    except ArtefactRefused as error:
        raise refuse(FILE_MISSING, f"{error.detail} ({error.reason})") from error
    found = _join(program, expectation, files, base)
    if arguments.json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        _print(found)
    return found.exit


def _written(folder: Path) -> list[Path]:
    """Return what verify and evaluate wrote; a certificate stands for its statement."""
    from kcdsl.release.signing import CERTIFICATE, STATEMENT

    return sorted([*folder.glob(f"*{CERTIFICATE}"), *folder.glob(f"*{STATEMENT}")])


def _join(
    program: Program, expectation: Expectation, files: Sequence[Path], base: Path
) -> Convergence:
    from kcdsl.verdict.convergence import join
    from kcdsl_certs.rejected import Rejected

    read: dict[str, Predicate] = {}
    unused: dict[str, str] = {}
    for file in files:
        try:
            read[str(file)] = _read(file, expectation, base)
        except Rejected as error:
            unused[str(file)] = f"{error.detail} ({error.reason})"
    contract = expectation.triple.contract
    named = {"name": contract.id, "version": contract.version, "digest": contract.digest}
    return join(program, named, expectation.clauses, read, unused)


def _read(file: Path, expectation: Expectation, base: Path) -> Predicate:
    """Return what a statement says about this triple; raises Rejected where it says nothing."""
    from datetime import UTC, datetime

    from kcdsl.model.files import Artefacts
    from kcdsl.release.artefacts import input_at_hand
    from kcdsl.release.signing import CERTIFICATE, read_envelope
    from kcdsl_certs.admission import admit
    from kcdsl_certs.coverage import check_stated
    from kcdsl_certs.evidence import Evidence
    from kcdsl_certs.policy import read_limited
    from kcdsl_certs.rejected import Rejected
    from kcdsl_certs.statement import LARGEST_PAYLOAD, Predicate
    from kcdsl_certs.verify import check_components, check_evidence, check_recount

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

    from kcdsl.verdict.console import print_on
    from kcdsl.verdict.convergence import MISSING

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
    from rich.table import Table
    from rich.text import Text

    from kcdsl.verdict.names import SHOWN

    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for heading in ("clause", "kind", "slice", "evidence", "verdict"):
        table.add_column(heading, overflow="fold")
    for row in found.rows:
        word, style = SHOWN[row.verdict]
        kind = "hard" if row.budget is None else f"soft, {row.budget}"
        cells = (
            f"{row.clause} {row.level}",
            f"{kind}, held out" if row.holdout else kind,
            row.slice or "",
            "; ".join(row.evidence),
        )
        table.add_row(*map(Text, cells), Text(word, style=style))
    return table
