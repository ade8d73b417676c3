"""Replaying a trace: every clause decided again from it alone, and compared with what was said."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kcdsl.verdict.report import Report

_SHOWN = 12
"""How many differences are listed."""


def is_trace(file: Path) -> bool:
    """Say whether a file begins or ends as Parquet files do; raises Refusal where there is none."""
    from kcdsl.source.files import open_file, read_bytes

    mark = b"PAR1"
    if read_bytes(file, len(mark)) == mark:
        return True
    with open_file(file) as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - len(mark)))
        return stream.read() == mark


def replay_trace(file: Path, arguments: argparse.Namespace) -> Exit:
    """Conclude from a trace; raises Refusal (KC633) where the report was another."""
    from kcdsl.cli.evaluate import measuring_backend
    from kcdsl.diagnostics import codes, refuse

    if arguments.checkpoint is not None:
        raise refuse(
            codes.USAGE,
            "--checkpoint is for counterexamples: a trace is replayed without any weights",
        )
    backend = measuring_backend()
    trace = backend.read_trace(file)
    if arguments.contract is not None:
        own = json.loads(backend.conclude(trace.evidence).dumps())
        _compare(trace.report, own, f"the report that {file} records")
        report = _under(backend, trace, Path(arguments.contract))
        said = f"concluded under {arguments.contract}, on the evidence of {file}"
    else:
        report = backend.conclude(trace.evidence)
        said = _reproduced(file, report, trace.report)
    if arguments.json:
        sys.stdout.write(report.dumps())
        print(one_line(said), file=sys.stderr)
    else:
        from kcdsl.verdict.render import print_report

        print_report(report, sys.stdout)
        print(one_line(said))
    return report.exit


def _under(backend: Any, trace: Any, path: Path) -> Report:
    """Return what the evidence says of a changed contract."""
    from dataclasses import replace

    from kcdsl.check.compile import load_contract
    from kcdsl.cli.discover import find_contract
    from kcdsl.cli.evaluate import accepted_findings, implied_clauses
    from kcdsl.source.files import in_contract

    path = find_contract(str(path), Path())
    program, suppressed = load_contract(path)
    with in_contract(path):
        evidence = replace(
            backend.under(program, path.resolve().parent, trace),
            implied=implied_clauses(program),
            accepted=accepted_findings(suppressed),
        )
        report: Report = backend.conclude(evidence)
    return report


def _reproduced(file: Path, report: Report, recorded: Mapping[str, Any]) -> str:
    """Say that the report is what the trace records, and the report beside it if there is one."""
    found = json.loads(report.dumps())
    _compare(recorded, found, f"the report that {file} records")
    beside = file.with_name("report.json")
    if not beside.is_file():
        return "reproduced: bit for bit"
    _compare(_document(beside), found, str(beside))
    return f"reproduced: bit for bit, as in {beside}"


def _document(path: Path) -> Mapping[str, Any]:
    from kcdsl.source.files import read_bytes

    try:
        document = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        document = None
    return document if isinstance(document, dict) else {}


def _compare(recorded: Mapping[str, Any], found: Mapping[str, Any], name: str) -> None:
    from kcdsl.diagnostics import codes, refuse
    from kcdsl.verdict.reproduced import differences

    texts = differences(recorded, found)
    if texts:
        more = (f"and {len(texts) - _SHOWN} more",) if len(texts) > _SHOWN else ()
        raise refuse(
            codes.NOT_REPRODUCED,
            f"{name} is not what follows from the trace",
            notes=(*texts[:_SHOWN], *more),
            help="evaluate again; versions are in `environment` of the report",
        )
