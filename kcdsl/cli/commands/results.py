"""`kcdsl report`, `compare`, `status` and `replay`: show, compare, join and repeat earlier
results."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.api.backends import choose_device, measuring_backend, replaying_backend
from kcdsl.api.contract import Contract, read_contract, refuse_foreign_code
from kcdsl.cli.common import Command, argument, choice, value, values
from kcdsl.cli.common.execution import CodeOptions, Device, device_option
from kcdsl.cli.common.options import (
    KERNELS,
    OutputFormat,
    contract_argument,
    fingerprints_in,
    format_option,
    output_option,
    register_option,
)
from kcdsl.cli.common.output import (
    REPORT_FORMATS,
    clause_places,
    print_json,
    report_in,
    say,
    write_text,
)
from kcdsl.diagnostics import codes, refuse
from kcdsl.diagnostics.codes import FILE_MISSING
from kcdsl.diagnostics.render.terminal import one_line, printable
from kcdsl.exits import Exit
from kcdsl.source.config import load_config
from kcdsl.source.files import in_contract, is_parquet, read_bytes
from kcdsl.verdict.model import EXITS, SHOWN

if TYPE_CHECKING:
    from rich.table import Table

    from kcdsl.diagnostics.spans import SourceFile, Span
    from kcdsl.ir.terms import Program
    from kcdsl.verdict.counterexample import Replayed
    from kcdsl.verdict.report import Report as Concluded
    from kcdsl.verdict.studies.comparison import RunComparison
    from kcdsl.verdict.studies.convergence import Convergence
    from kcdsl_certs.statement import Expectation, Predicate


_UNCHECKED = (
    "neither signatures nor proofs are checked here; `kcdsl check --recheck --complete` checks both"
)


@dataclass(frozen=True, kw_only=True)
class ReportCommand(Command):
    """Render a report again, as a page or in another format."""

    report: str = argument("REPORT", "report.json of `kcdsl evaluate`")
    attribution: str | None = value("FILE", "JSON of `kcdsl attribute`, shown on the page")
    format: str = choice(
        [name for name in REPORT_FORMATS if name != "text"], "output format", "html"
    )
    contract: str | None = value(
        "CONTRACT", "contract with the positions of clauses, for junit, github and sarif"
    )
    output: str | None = output_option("FILE", "output file (default: standard output)")

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
            why = str(error) or type(error).__name__
            if attribution is not None:
                why = f"it or {self.attribution}: {why}"
            raise unusable(file, why) from None
        write_text(text, self.output)
        if self.output is not None:
            say(f"wrote {self.output}")
        return Exit(document["exit"])


def _malformed() -> tuple[type[Exception], ...]:
    """Return the exceptions that a malformed document raises while it is shown."""
    from jinja2 import UndefinedError

    wrong = (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError)
    return (*wrong, UndefinedError)


# --- compare -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CompareCommand(Command):
    """Compare a candidate with the incumbent on the same requests, unit by unit."""

    incumbent: str = argument("INCUMBENT", "trace.parquet of the evaluation of the version in use")
    candidate: str = argument(
        "CANDIDATE", "trace.parquet of the evaluation of its possible replacement"
    )
    history: tuple[str, ...] = values(
        "REPORT", "report.json of an earlier run, repeatable, for the normal range of values"
    )
    reference: tuple[str, ...] = values(
        "REPORT",
        "report.json of two reference builds on the candidate's checkpoint, repeatable, for the "
        "noise floors of thresholds",
    )
    untrusted: tuple[str, ...] = values(
        "REPORT", "ignore this report, identified by its content; repeatable"
    )
    register: str | None = register_option("with the marks of untrusted runs")
    html: str | None = value(
        "FILE", "write a page that needs no other file, and print nothing", writes=True
    )
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Compare: 0 nothing was shown to be worse, 1 something was or lies outside its band on the
        side that harms, 3 nothing could be compared or evidence is invalid; nothing is run."""
        from kcdsl.verdict.report import read_report, unusable

        backend = measuring_backend("pyarrow")
        read = {
            name: read_report(Path(name))
            for name in dict.fromkeys((*self.history, *self.reference, *self.untrusted))
        }
        try:
            found: RunComparison = backend.compare(
                Path(self.incumbent),
                Path(self.candidate),
                {name: read[name] for name in dict.fromkeys(self.history)},
                {name: read[name] for name in dict.fromkeys(self.reference)},
                self._untrusted(read),
            )
        except _malformed() as error:
            if not read:
                raise
            why = str(error) or type(error).__name__
            raise unusable(Path(next(iter(read))), f"it or another report: {why}") from None
        if self.html is not None:
            from kcdsl.verdict.html.comparison import comparison_page

            write_text(comparison_page(found), self.html)
            say(f"wrote {self.html}")
        if self.format is OutputFormat.JSON:
            print_json(found.to_json())
        elif self.html is None:
            from kcdsl.verdict.text.comparison import print_comparison

            print_comparison(found, sys.stdout)
        return EXITS[found.verdict]

    def _untrusted(self, read: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
        """Return the ignored reports: those given as untrusted, and those whose run a register does
        not trust."""
        import hashlib

        named = [read[name] for name in self.untrusted]
        found = {name: "named by --untrusted" for name, one in read.items() if one in named}
        place = load_config(Path()).register_place if self.register is None else self.register
        if place is None or not read:
            return found
        from kcdsl.release.promotion.recorded import untrusted_reports
        from kcdsl.release.register import Register

        reports = {
            name: (hashlib.sha256(read_bytes(Path(name))).hexdigest(), one)
            for name, one in read.items()
        }
        with Register.open(place) as register:
            return untrusted_reports(register, reports) | found


# --- status --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StatusCommand(Command):
    """Combine proofs and measurements into a verdict on the whole contract."""

    contract: str | None = contract_argument()
    files: tuple[str, ...] = values(
        "FILE",
        "statement or certificate, repeatable (default: those in the folder out beside CONTRACT)",
        name="from",
    )
    kernels: str | None = value("FILE", KERNELS)
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Join results: 0 C-convergent, 1 violated, 3 not decided; signatures are not looked
        at."""
        from kcdsl.release.artefacts import ArtefactRefused
        from kcdsl.release.requirements import build_expectation

        contract = read_contract(self.contract)
        named = [Path(name) for name in self.files]
        files = named or _written(contract.path.parent / "out")
        kinds = contract.program.train, contract.program.infer
        if not files and all(kernel.recording is not None for kernel in kinds):
            raise refuse(
                codes.CANNOT_CERTIFY,
                "both kernels are recorded, so there are no certificates to combine",
                help="what `kcdsl evaluate` decides is the verdict on such a contract",
            )
        kernels = fingerprints_in(self.kernels)
        try:
            expectation = build_expectation(contract.program, contract.base, fingerprints=kernels)
        except ArtefactRefused as error:
            raise refuse(
                FILE_MISSING,
                f"{error.detail} ({error.reason})",
                help="restore the files that the contract names, then ask again",
            ) from error
        found = _join(contract, expectation, files)
        if self.format is OutputFormat.JSON:
            print_json(found.to_json())
        else:
            _print(found)
        return found.exit


def _written(folder: Path) -> list[Path]:
    """Return the files of verify and evaluate; a certificate replaces its statement."""
    from kcdsl.release.signing import CERTIFICATE, STATEMENT

    return sorted([*folder.glob(f"*{CERTIFICATE}"), *folder.glob(f"*{STATEMENT}")])


def _join(contract: Contract, expectation: Expectation, files: Sequence[Path]) -> Convergence:
    from kcdsl.verdict.studies.convergence import join
    from kcdsl_certs.encoding.rejected import Rejected

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
    """Return the predicate of a statement about this triple; raises Rejected for any other."""
    from kcdsl.model.files import Artefacts
    from kcdsl.release.artefacts import input_at_hand
    from kcdsl.release.signing import CERTIFICATE, read_envelope
    from kcdsl_certs.encoding.files import read_limited
    from kcdsl_certs.encoding.rejected import Rejected
    from kcdsl_certs.statement import LARGEST_PAYLOAD, Predicate
    from kcdsl_certs.verification.admission import admit
    from kcdsl_certs.verification.coverage import check_stated
    from kcdsl_certs.verification.evidence import EvidenceFiles
    from kcdsl_certs.verification.verify import check_components, check_evidence, check_recount

    signed = file.name.endswith(CERTIFICATE)
    payload = read_envelope(file).payload if signed else read_limited(file, LARGEST_PAYLOAD)
    body = admit(payload, file.parent, datetime.now(UTC)).body
    if not isinstance(body, Predicate):
        raise Rejected("statement/transfer", "it carries a certificate over to other weights")
    at_hand = partial(input_at_hand, Artefacts.of(base))
    check_components(body, expectation.triple, expectation.inputs, at_hand, strict=True)
    check_stated(body, body.verdict, expectation.clauses)
    beside = EvidenceFiles(file.parent)
    check_evidence(body, beside, strict=True)
    check_recount(body, beside, at_hand, expectation.slices, strict=True)
    return body


def _print(found: Convergence) -> None:
    from rich.text import Text

    from kcdsl.verdict.studies.convergence import MISSING
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


# --- replay ---------------------------------------------------------------------------------------


_SHOWN = 12
"""How many differences of a report are listed."""


@dataclass(frozen=True, kw_only=True)
class ReplayCommand(CodeOptions):
    """Run a counterexample again, or decide every clause again from a trace."""

    file: str = argument(
        "FILE", "a counterexample of `kcdsl verify`, or trace.parquet of `kcdsl evaluate`"
    )
    contract: str | None = value(
        "CONTRACT",
        "contract of a counterexample (default: the one here), or a changed contract for a trace",
    )
    checkpoint: str | None = value(
        "FILE", "the weights of a counterexample, instead of those the contract names"
    )
    device: Device = device_option(Device.CPU)
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Replay; refuse (2) a result that is not reproduced.

        A counterexample: 1 its run breaks its clause, 3 it does not. A trace: as the evaluation
        did.
        """
        file = Path(self.file)
        return self._trace(file) if is_parquet(file) else self._counterexample(file)

    def _counterexample(self, file: Path) -> Exit:
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
        if self.format is OutputFormat.JSON:
            print_json(_run_document(file, document, replayed), allow_nan=False)
        else:
            _print_run(contract.program, document, replayed)
        if replayed.moved > 0:
            print(
                f"note: the region is {replayed.moved:.2g} away from the activations that this "
                "machine computes",
                file=sys.stderr,
            )
        return replayed.exit

    def _trace(self, file: Path) -> Exit:
        """Decide again from a trace; raises Refusal (KC633) where the report differs."""
        if self.checkpoint is not None:
            raise refuse(
                codes.USAGE,
                "--checkpoint is for counterexamples: a trace is replayed without any weights",
                help="leave it out",
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
        if self.format is OutputFormat.JSON:
            sys.stdout.write(report.dumps())
            say(said)
        else:
            from kcdsl.verdict.text.report import print_report

            print_report(report, sys.stdout)
            print(one_line(said))
        return report.exit


# --- counterexamples -----------------------------------------------------------------------------


def _run_document(file: Path, document: Mapping[str, Any], found: Replayed) -> dict[str, Any]:
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


def _print_run(program: Program, document: Mapping[str, Any], found: Replayed) -> None:
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


def _under(backend: Any, trace: Any, given: str) -> Concluded:
    """Return the conclusion of the evidence for a changed contract."""
    from kcdsl.api.evaluation import accepted_findings, implied_clauses

    contract = read_contract(given)
    with in_contract(contract.path):
        evidence = replace(
            backend.under(contract.program, contract.base, trace),
            implied=implied_clauses(contract.program),
            accepted=accepted_findings(contract.accepted),
        )
        report: Concluded = backend.conclude(evidence)
    return report


def _reproduced(file: Path, report: Concluded, recorded: Mapping[str, Any]) -> str:
    """Return that the report equals the recorded one, and the report beside the trace if any."""
    found = json.loads(report.dumps())
    _compare(recorded, found, f"the report that {file} records")
    beside = file.with_name("report.json")
    if not beside.is_file():
        return "reproduced: bit for bit"
    _compare(_read_object(beside), found, str(beside))
    return f"reproduced: bit for bit, as in {beside}"


def _read_object(path: Path) -> Mapping[str, Any]:
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
            f"{name} does not follow from the trace",
            notes=(*texts[:_SHOWN], *more),
            help="evaluate again; versions are in `environment` of the report",
        )
