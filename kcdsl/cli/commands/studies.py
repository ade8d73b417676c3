"""Commands for analyses: `kcdsl plan`, `attribute`, `aggregate`, `experiment`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcdsl.api.backends import attributor, choose_device, measuring_backend, planner
from kcdsl.api.contract import read_contract, refuse_foreign_code, results_folder
from kcdsl.cli.common import argument, choice, switch, value, values
from kcdsl.cli.common.execution import CodeOptions, Device, Looks, device_option
from kcdsl.cli.common.options import (
    KERNELS,
    OutputFormat,
    Stage,
    contract_argument,
    count,
    fingerprints_in,
    format_option,
    gigabytes,
    output_option,
    percentile,
    positive,
    probability,
    seed_option,
    slice_option,
    thread_count,
)
from kcdsl.cli.common.options import requirement as read_requirement
from kcdsl.cli.common.output import progress_bars, say, write_text
from kcdsl.diagnostics import refuse
from kcdsl.diagnostics.codes import BAD_TIME, UNKNOWN_SLICE, USAGE
from kcdsl.diagnostics.render.terminal import json_text
from kcdsl.diagnostics.report import refuse_unknown
from kcdsl.exits import Exit
from kcdsl.source.files import in_contract

if TYPE_CHECKING:
    from kcdsl.ir.terms import Program
    from kcdsl.release.promotion import Period
    from kcdsl.verdict.studies.attribution import Attribution
    from kcdsl.verdict.studies.plan import Plan as Planned


# --- plan ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanCommand(Looks):
    """Estimate how many requests are needed to decide the clauses."""

    contract: str | None = contract_argument()
    slices: tuple[str, ...] = slice_option()
    power: float = value(
        "P",
        "statistical power: probability of confirming a clause that holds",
        0.8,
        read=probability,
    )
    prior: str | None = value(
        "FILE",
        "trace.parquet of an earlier evaluation, for rates, spread and reachable thresholds",
    )
    format: OutputFormat = format_option()

    def run(self) -> Exit:
        """Plan: nothing is measured and nothing is written."""
        contract = read_contract(self.contract)
        known = [s.name for s in contract.program.slices]
        refuse_unknown(self.slices, known, UNKNOWN_SLICE, "the contract has no slice", "slices")
        plan = planner()
        with in_contract(contract.path):
            found: Planned = plan(
                contract.program,
                contract.base,
                looks=self.looks_taken,
                power=self.power,
                prior=None if self.prior is None else Path(self.prior),
                slices=self.slices,
            )
        if self.format is OutputFormat.JSON:
            sys.stdout.write(found.dumps())
        else:
            from kcdsl.verdict.text.studies import print_plan

            print_plan(found, sys.stdout)
        return Exit.HELD


# --- attribute -----------------------------------------------------------------------------------


class DriftStatistic(StrEnum):
    """The statistic of the attributed drift."""

    MEAN = "mean"
    P50 = "p50"
    P90 = "p90"
    P95 = "p95"
    P99 = "p99"
    MAX = "max"


@dataclass(frozen=True, kw_only=True)
class AttributeCommand(CodeOptions):
    """Split the drift among its sources and blocks."""

    contract: str | None = contract_argument()
    metric: str | None = value(
        "NAME", "the metric to attribute (default: kl; for encoders hidden_l2)"
    )
    statistic: DriftStatistic = choice(
        DriftStatistic,
        "statistic of the metric: mean over tokens, or over the worst token of each request",
        DriftStatistic.MEAN,
    )
    slice: str | None = value("NAME", "only this slice")
    batch: int = value("N", "batch size of the inference kernel", 4, read=count)
    no_bounds: bool = switch("do not use certified bounds to exclude causes")
    device: Device = device_option()
    seed: int = seed_option()
    format: OutputFormat = format_option()
    output: str | None = output_option(
        "DIR", "folder for attribution.json (default: out beside the contract)"
    )

    def run(self) -> Exit:
        """Attribute, write the document, print the result."""
        from kcdsl.source.output import make_folder, result, write_together

        contract = read_contract(self.contract)
        refuse_foreign_code(contract, allowed=self.allow_code)
        folder = results_folder(self.output, contract.path)
        device = choose_device(self.device)
        attribute = attributor()
        with in_contract(contract.path), progress_bars() as progress:
            found: Attribution = attribute(
                contract.program,
                contract.base,
                device=device,
                metric=self.metric,
                statistic=self.statistic.value,
                slice_name=self.slice,
                batch=self.batch,
                bounds=not self.no_bounds,
                seed=self.seed,
                progress=progress,
            )
        make_folder(folder)
        file = result(folder / "attribution.json", found.dumps().encode())
        write_together([file], replace=True)
        if self.format is OutputFormat.JSON:
            sys.stdout.write(found.dumps())
        else:
            from kcdsl.verdict.text.attribution import print_attribution

            print_attribution(found, sys.stdout)
        say(f"wrote {file.path}")
        return found.exit


# --- aggregate -----------------------------------------------------------------------------------

_TABLES = ("duckdb", "pyarrow")
"""The packages of aggregation and experiments besides those of the backend."""


@dataclass(frozen=True, kw_only=True)
class AggregateCommand(Looks):
    """Count logged tokens by slice, and decide a contract on them."""

    tables: tuple[str, ...] = argument(
        "TABLE",
        "Parquet files, or folders of them: one row per token, with a column `request`",
        "+",
    )
    contract: str | None = value("CONTRACT", "decide its clauses on the tables")
    slices: tuple[str, ...] = slice_option()
    metric: tuple[str, ...] = values("NAME", "only this column")
    limit: tuple[tuple[str, str, Fraction], ...] = values(
        "REQUIREMENT",
        "count tokens that violate this requirement, such as 'kl <= 0.05'",
        read=read_requirement,
    )
    percentile: tuple[Fraction, ...] = values(
        "P", "percentile to compute, such as 99.9 (default: 50, 95 and 99)", read=percentile
    )
    seed: int = seed_option("resampling")
    memory: int | None = value(
        "GIB", "memory limit (default: half of the free memory)", read=gigabytes
    )
    threads: int | None = value("N", "number of threads (default: all cores)", read=thread_count)
    spill: str | None = value(
        "DIR", "parent of the temporary folder for data that exceeds the memory limit"
    )
    stage: Stage | None = choice(
        Stage, "treat the tables as a window of traffic at this stage, for `kcdsl promote`"
    )
    since: str | None = value(
        "TIME", "when the window began, 2026-11-30T12:00:00Z (with --stage)", name="from"
    )
    until: str | None = value("TIME", "when the window ended (with --stage)")
    kernels: str | None = value("FILE", KERNELS + " (with --stage)")
    sql: bool = switch("also print the SQL queries")
    format: OutputFormat = format_option()
    output: str | None = output_option("FILE", "write the result as JSON")

    def run(self) -> Exit:
        """Aggregate: the exit code is that of the clauses; 0 without a contract."""
        from kcdsl.check.compile import load_program

        path = None if self.contract is None else Path(self.contract)
        program = None if path is None else load_program(path)
        window = self._window(program, path)
        backend = measuring_backend(*_TABLES)
        with in_contract(path or Path("contract.yaml")), progress_bars() as progress:
            document = backend.aggregate(
                list(self.tables),
                program,
                slices=self.slices,
                metrics=self.metric,
                limits=self.limit,
                percentiles=self.percentile,
                seed=self.seed,
                looks=self.looks_taken,
                memory=self.memory,
                threads=self.threads,
                spill=None if self.spill is None else Path(self.spill),
                content=self.stage is not None,
                progress=progress,
            )
        text = json_text({**document, **window}, allow_nan=False)
        if self.output is not None:
            write_text(text, self.output)
        if self.format is OutputFormat.JSON:
            sys.stdout.write(text)
        else:
            from kcdsl.verdict.text.studies import print_aggregate

            print_aggregate(document, sys.stdout, queries=self.sql)
        if self.output is not None:
            say(f"wrote {self.output}")
        return Exit(document["exit"])

    def _window(self, program: Program | None, path: Path | None) -> dict[str, Any]:
        """Return the identification of the window; empty without --stage. Raises Refusal."""
        given = {"from": self.since, "until": self.until, "kernels": self.kernels}
        if self.stage is None:
            stray = next((name for name, found in given.items() if found is not None), None)
            if stray is not None:
                raise refuse(USAGE, f"--{stray} needs --stage", help="name its stage")
            return {}
        if program is None or path is None or self.since is None or self.until is None:
            raise refuse(
                USAGE,
                "--stage needs the contract and the time: --contract, --from and --until",
                help="a window states the triple and the time of its tables",
            )
        if self.slices:
            raise refuse(USAGE, "a window has all slices", help="leave --slice out")
        from kcdsl.release.promotion.documents import window_of
        from kcdsl.release.requirements import build_triple

        with in_contract(path):
            triple = build_triple(
                program, path.resolve().parent, fingerprints=fingerprints_in(self.kernels)
            )
        return {"window": window_of(triple, self.stage, period(self.since, self.until))}


def period(since: str, until: str) -> Period:
    """Return the time of a window; raises Refusal (KC647)."""
    from kcdsl.release.promotion import Period
    from kcdsl_certs.encoding.rejected import Rejected
    from kcdsl_certs.encoding.strict import parse_time

    try:
        found = Period(parse_time(since), parse_time(until))
    except Rejected as error:
        raise refuse(
            BAD_TIME,
            f"--from or --until: {error.detail}",
            help="write times as 2026-11-30T12:00:00Z",
        ) from error
    if found.end <= found.start:
        raise refuse(
            BAD_TIME,
            f"the window ends at {until} and begins at {since}",
            help="name an end behind the beginning",
        )
    return found


# --- experiment ----------------------------------------------------------------------------------


class ExperimentKind(StrEnum):
    """The kinds of experiments."""

    E1 = "e1"
    E2 = "e2"


@dataclass(frozen=True, kw_only=True)
class ExperimentCommand(CodeOptions):
    """Sweep kernels, batches, lengths and streams under one contract."""

    kind: ExperimentKind = choice(
        ExperimentKind,
        "e1: one change of the inference kernel at a time; e2: device, length, batch and "
        "concurrent streams",
        positional="",
    )
    contract: str | None = contract_argument()
    only: tuple[str, ...] = values("NAME", "e1: a variant, or a factor; may be repeated")
    device: tuple[Device, ...] = choice(
        (Device.CPU, Device.CUDA),
        "e1: where kernels run (default: cpu); e2: may be repeated (default: cpu and cuda)",
        (),
        many=True,
    )
    length: tuple[int, ...] = values(
        "L", "e2: sequence lengths in tokens (default: 16, 32, 64, 128)", read=count
    )
    batch: tuple[int, ...] = values("B", "e2: batch sizes (default: 1, 2, 4, 8)", read=count)
    concurrency: tuple[int, ...] = values(
        "C", "e2: concurrent batches (default: 1, 2, 4)", read=count
    )
    seed: int = seed_option("token sampling")
    seconds: float = value("S", "e1: time limit for timing one variant", 5.0, read=positive)
    fresh: bool = switch("measure existing cells again")
    format: OutputFormat = format_option()
    output: str | None = output_option(
        "DIR", "folder for the results (default: out/e1 or out/e2 beside the contract)"
    )

    def run(self) -> Exit:
        """Run the experiment: write cells as they are measured, and the rest at the end."""
        from kcdsl.source.output import make_folder, result, write_together
        from kcdsl.verdict.html.experiment import experiment_page

        self._refuse_options_of_the_other()
        kind, contract = self.kind, read_contract(self.contract)
        refuse_foreign_code(contract, allowed=self.allow_code)
        folder = results_folder(self.output, contract.path, kind)
        if not self.output:
            results_folder(None, contract.path, kind, "cells")
        backend = measuring_backend(*_TABLES)
        with in_contract(contract.path), progress_bars() as progress:
            document = backend.experiment(
                kind.value,
                contract.program,
                contract.base,
                folder,
                devices=tuple(device.value for device in self.device),
                only=self.only,
                lengths=self.length,
                batches=self.batch,
                concurrency=self.concurrency,
                seed=self.seed,
                seconds=self.seconds,
                fresh=self.fresh,
                progress=progress,
            )
        text = json_text(document, allow_nan=False)
        files = [
            result(folder / f"{kind}.json", text.encode()),
            result(folder / f"{kind}.html", experiment_page(document).encode()),
        ]
        make_folder(folder)
        write_together(files, replace=True)
        if self.format is OutputFormat.JSON:
            sys.stdout.write(text)
        else:
            from kcdsl.verdict.text.studies import print_experiment

            print_experiment(document, sys.stdout)
        for file in files:
            say(f"wrote {file.path}")
        return Exit.HELD

    def _refuse_options_of_the_other(self) -> None:
        """Refuse options of the other experiment, which would have no effect."""
        first = self.kind is ExperimentKind.E1
        for name in ("length", "batch", "concurrency") if first else ("only",):
            if getattr(self, name):
                other = ExperimentKind.E2 if first else ExperimentKind.E1
                raise refuse(USAGE, f"--{name} is for {other}", help=f"`kcdsl experiment {other}`")
        if first and len(self.device) > 1:
            raise refuse(USAGE, "e1 runs on one device", help="give --device once")
