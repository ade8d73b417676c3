"""`kcdsl evaluate`: run both kernels on the slices and decide the empirical clauses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING

from kcdsl.api.contract import Contract, read_contract
from kcdsl.cli.common import switch, value, values
from kcdsl.cli.common.execution import (
    CertificateOptions,
    CodeOptions,
    Device,
    Engine,
    Looks,
    device_option,
    engine_option,
    jobs_option,
)
from kcdsl.cli.common.options import (
    contract_argument,
    not_negative,
    output_option,
    positive,
    seed_option,
    slice_option,
)
from kcdsl.cli.common.output import (
    REPORT_FORMATS,
    Output,
    clause_places,
    outputs,
    progress_bars,
    report_in,
    say,
)
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.verdict.report import Report


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand(Looks, CodeOptions, CertificateOptions):
    """Run both kernels on the slices and decide the measured clauses."""

    contract: str | None = contract_argument()
    slices: tuple[str, ...] = slice_option()
    device: Device = device_option()
    seed: int = seed_option()
    seconds: float = value("S", "time limit for timed runs", 20.0, read=positive)
    bound_seconds: float = value(
        "S",
        "time limit for bounding the drift of the whole model; 0: no bound",
        10.0,
        read=not_negative,
    )
    fresh: bool = switch("run every request again; ignore results of an interrupted run")
    format: tuple[str, ...] = values(
        "FORMAT[=FILE]",
        f"print as, or write to a file: {', '.join(REPORT_FORMATS)} (default: text)",
        words=lambda: REPORT_FORMATS,
        writes=True,
    )
    output: str | None = output_option(
        "DIR",
        "folder for report, traces, fingerprints and certificate or statement (default: out "
        "beside the contract)",
    )
    jobs: int | None = jobs_option("requests", "1")
    engine: Engine = engine_option("requests")

    def run(self) -> Exit:
        """Evaluate, write the files, print the report."""
        from kcdsl.api.evaluation import EvaluateSettings, evaluate

        wanted = outputs(self.format, REPORT_FORMATS, "text")
        contract = read_contract(self.contract)
        more: list[tuple[Path, Callable[[Report], bytes]]] = [
            (output.file, partial(_encoded, output.format, contract=contract))
            for output in wanted
            if output.file is not None
        ]
        settings = self.settings(
            EvaluateSettings,
            looks=self.looks_taken,
            more=more,
            progress=progress_bars,
            tell=_tell,
        )
        found = evaluate(contract, settings)
        for output in wanted:
            if output == Output("text", None):
                from kcdsl.verdict.text.report import print_report

                print_report(found.report, sys.stdout)  # in the colours and width of a terminal
            elif output.file is None:
                sys.stdout.write(_in_format(output.format, found.report, contract))
        for name in found.files:
            say(f"wrote {name}")
        if found.uncertified is not None:
            print(f"not certified: {found.uncertified}", file=sys.stderr)
        found.target.tell(found.uncertified is None)
        return found.exit


def _encoded(format: str, report: Report, contract: Contract) -> bytes:
    return _in_format(format, report, contract).encode()


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


def _in_format(format: str, report: Report, contract: Contract) -> str:
    """Return the report in a format."""
    if format == "text":
        from kcdsl.verdict.text.report import print_report

        stream = StringIO()
        print_report(report, stream)
        return stream.getvalue()
    source, places = clause_places(contract.path, contract.program)
    document = report.to_json()
    return report_in(format, document, command="kcdsl evaluate", source=source, places=places)
