"""`kcdsl replay`: run a counterexample again, or conclude again from the trace of an evaluation."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.cli.common import argument, value
from kcdsl.cli.common.contracts import read_contract, refuse_foreign_code
from kcdsl.cli.common.groups import RunsCode
from kcdsl.cli.common.options import Device, choose_device, device_option, json_option
from kcdsl.cli.common.output import print_json, say
from kcdsl.cli.common.plugins import measuring_backend, replaying_backend
from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.render.terminal import one_line
from kcdsl.exits import Exit

if TYPE_CHECKING:
    from kcdsl.ir.terms import Program
    from kcdsl.verdict.counterexample import Replayed
    from kcdsl.verdict.report import Report

_SHOWN = 12
"""How many differences of a report are listed."""


@dataclass(frozen=True, kw_only=True)
class Replay(RunsCode):
    """Run a counterexample again, or decide every clause again from a trace."""

    file: str = argument(
        "FILE", "a counterexample that `kcdsl verify` wrote, or trace.parquet of `kcdsl evaluate`"
    )
    contract: str | None = value(
        "CONTRACT", "of a counterexample (default: the one here); for a trace, a changed contract"
    )
    checkpoint: str | None = value(
        "FILE", "the weights of a counterexample, instead of those the contract names"
    )
    device: Device = device_option(Device.CPU)
    json: bool = json_option()

    def run(self) -> Exit:
        """Replay; what is not reproduced is refused (2).

        A counterexample: 1 its run breaks its clause, 3 it does not. A trace: as the evaluation
        did.
        """
        file = Path(self.file)
        return self._trace(file) if _is_trace(file) else self._counterexample(file)

    def _counterexample(self, file: Path) -> Exit:
        from kcdsl.source.files import in_contract
        from kcdsl.verdict.counterexample import read_counterexample

        document = read_counterexample(file)
        contract = read_contract(self.contract)
        refuse_foreign_code(contract, allowed=self.allow_code, metrics=False)
        device = choose_device(self.device)
        backend = replaying_backend()
        with in_contract(contract.path):
            replayed: Replayed = backend.replay(
                contract.program,
                contract.base,
                document,
                device=device,
                checkpoint=self.checkpoint,
            )
        if self.json:
            print_json(_document(file, document, replayed), allow_nan=False)
        else:
            _print(contract.program, document, replayed)
        if replayed.moved > 0:
            print(
                f"note: the region is {replayed.moved:.2g} away from the activations that this "
                "machine computes",
                file=sys.stderr,
            )
        return replayed.exit

    def _trace(self, file: Path) -> Exit:
        """Conclude from a trace; raises Refusal (KC633) where the report was another."""
        if self.checkpoint is not None:
            raise refuse(
                codes.USAGE,
                "--checkpoint is for counterexamples: a trace is replayed without any weights",
            )
        backend = measuring_backend()
        trace = backend.read_trace(file)
        if self.contract is not None:
            own = json.loads(backend.conclude(trace.evidence).dumps())
            _compare(trace.report, own, f"the report that {file} records")
            report = _under(backend, trace, self.contract)
            said = f"concluded under {self.contract}, on the evidence of {file}"
        else:
            report = backend.conclude(trace.evidence)
            said = _reproduced(file, report, trace.report)
        if self.json:
            sys.stdout.write(report.dumps())
            say(said)
        else:
            from kcdsl.verdict.text.report import print_report

            print_report(report, sys.stdout)
            print(one_line(said))
        return report.exit


# --- counterexamples -----------------------------------------------------------------------------


def _document(file: Path, document: Mapping[str, Any], found: Replayed) -> dict[str, Any]:
    from kcdsl.verdict.counterexample import REPLAY_SCHEMA

    return {
        "schema": REPLAY_SCHEMA,
        "counterexample": str(file),
        "clause": document["clause"],
        "case": document["case"]["name"],
        "limit": document["limit"],
        "value": found.value,
        "claimed": float.fromhex(document["attained"]["value"]),
        "exact": found.exact,
        "train": found.train,
        "infer": found.infer,
        "drift": found.infer - found.train,
        "row": list(found.row),
        "column": found.column,
        "symbols": found.symbols,
        "ordered_sums": found.ordered,
        "region_moved": found.moved,
        "violated": found.refutes,
        "exit": int(found.exit),
    }


def _print(program: Program, document: Mapping[str, Any], found: Replayed) -> None:
    from kcdsl.diagnostics.render.terminal import printable
    from kcdsl.ir.printer import region_text
    from kcdsl.route.goals import goals
    from kcdsl.verdict.text.goals import functional_of

    goal = next(g for g in goals(program) if g.clause.id == document["clause"])
    limit = document["limit"]
    claimed = float.fromhex(document["attained"]["value"])
    same = "bit for bit" if found.exact else f"{claimed!r} was claimed: within roundings"
    parts = [f"{found.symbols} rounding symbols"]
    if found.ordered:
        parts.append(f"{found.ordered} sums in concrete orders")
    lines = {
        "clause": f"{document['clause']}: {functional_of(goal)} {limit['op']} "
        f"{float(goal.threshold or 0):g}, x in {region_text(goal.region)}",
        "case": f"{document['case']['name']}, {len(document['case']['tokens'])} tokens",
        "run": ", ".join(parts),
        "place": f"row {list(found.row)}, feature {found.column}",
        "training": repr(found.train),
        "inference": repr(found.infer),
        "drift": repr(found.infer - found.train),
        "value": f"{found.value!r} ({same})",
    }
    for name, text in lines.items():
        print(f"{name:<10} {printable(text)}")
    print(
        "✗ violated: an admitted run of both kernels exceeds the limit"
        if found.refutes
        else "? the run is admitted and does not exceed the limit"
    )


# --- traces --------------------------------------------------------------------------------------


def _is_trace(file: Path) -> bool:
    """Say whether a file begins or ends as Parquet files do; raises Refusal where there is none."""
    from kcdsl.source.files import open_file, read_bytes

    mark = b"PAR1"
    if read_bytes(file, len(mark)) == mark:
        return True
    with open_file(file) as stream:
        size = stream.seek(0, 2)
        stream.seek(max(0, size - len(mark)))
        return stream.read() == mark


def _under(backend: Any, trace: Any, given: str) -> Report:
    """Return what the evidence says of a changed contract."""
    from kcdsl.cli.commands.evaluate import accepted_findings, implied_clauses
    from kcdsl.source.files import in_contract

    contract = read_contract(given)
    with in_contract(contract.path):
        evidence = replace(
            backend.under(contract.program, contract.base, trace),
            implied=implied_clauses(contract.program),
            accepted=accepted_findings(contract.accepted),
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
    _compare(_read_object(beside), found, str(beside))
    return f"reproduced: bit for bit, as in {beside}"


def _read_object(path: Path) -> Mapping[str, Any]:
    from kcdsl.source.files import read_bytes

    try:
        document = json.loads(read_bytes(path))
    except (ValueError, RecursionError):
        document = None
    return document if isinstance(document, dict) else {}


def _compare(recorded: Mapping[str, Any], found: Mapping[str, Any], name: str) -> None:
    from kcdsl.verdict.report import differences

    texts = differences(recorded, found)
    if texts:
        more = (f"and {len(texts) - _SHOWN} more",) if len(texts) > _SHOWN else ()
        raise refuse(
            codes.NOT_REPRODUCED,
            f"{name} is not what follows from the trace",
            notes=(*texts[:_SHOWN], *more),
            help="evaluate again; versions are in `environment` of the report",
        )
