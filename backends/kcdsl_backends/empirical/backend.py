"""The `empirical` backend of the catalogue: loads and evaluates what a contract names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from kcdsl.ir.terms import Program
from kcdsl.verdict.report import Report
from kcdsl.verdict.studies.causes import Effect, Place
from kcdsl.verdict.studies.comparison import RunComparison
from kcdsl_backends.empirical.collection import collect
from kcdsl_backends.empirical.collection.context import KernelContext, Progress
from kcdsl_backends.empirical.collection.inputs import prepare
from kcdsl_backends.empirical.collection.parallel import ParallelPlan, Recipe
from kcdsl_backends.empirical.collection.recordings import RolloutContext
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.questions.pairs import (
    compare_runs,
    effects_of,
    refuse_other_requests,
)
from kcdsl_backends.empirical.questions.replay import evidence_for, same_functions
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint
from kcdsl_backends.empirical.table.evidence import EvidenceTable
from kcdsl_backends.empirical.table.rows import records
from kcdsl_backends.empirical.table.trace import Trace, read_trace, trace_bytes
from kcdsl_backends.process import stdout_to_stderr


class EmpiricalBackend:
    """Decides statistical, runtime and trace clauses by running both kernels."""

    name = "empirical"

    prepare = staticmethod(stdout_to_stderr(prepare))

    @stdout_to_stderr
    def gather(
        self,
        context: KernelContext | RolloutContext,
        progress: Progress,
        checkpoint: RunCheckpoint | None = None,
        spread: ParallelPlan | None = None,
    ) -> EvidenceTable:
        """Fill the evidence table, from local kernels as `spread` plans. Raises Refusal, also if a
        drift is above its certified bound."""
        return collect(context, progress, checkpoint, spread)

    def spread(
        self,
        program: Program,
        base: Path,
        *,
        device: str,
        slices: Sequence[str],
        seed: int,
        engine: str,
        jobs: int | None,
    ) -> ParallelPlan | None:
        """Return the plan of parallel runs; None for this process alone, and for kernels that are
        behind a server or recorded."""
        kernels = (program.train, program.infer)
        if any(k.service is not None or k.recording is not None for k in kernels):
            return None
        if engine == "processes" and jobs in (None, 1):
            return None
        threads = torch.get_num_threads()
        recipe = Recipe(program, base.resolve(), device, tuple(slices), seed, threads)
        return ParallelPlan(recipe, engine, jobs)

    def recording(
        self, path: Path
    ) -> tuple[str, frozenset[str], tuple[dict[str, Any], ...]] | None:
        """Return the format of a file of recorded rollouts, the roles of its columns, and the texts
        of each row that slices may test; None for rows of requests."""
        from kcdsl_backends.empirical.sources.rollouts.layouts import recognised

        return recognised(path)

    def checkpoint(self, path: Path, *, fresh: bool, tell: Callable[[str], None]) -> RunCheckpoint:
        """Return the run checkpoint from which a killed evaluation continues."""
        return RunCheckpoint(path, fresh, tell)

    def conclude(self, evidence: EvidenceTable) -> Report:
        """Decide every clause; raises Refusal if there is none to decide."""
        return conclude(evidence)

    def records(self, evidence: EvidenceTable) -> tuple[dict[str, Any], ...]:
        """Return the trace record of every request."""
        return tuple(records(evidence).values())

    def write_trace(self, evidence: EvidenceTable, report: Report) -> bytes:
        """Return the evidence and the report on it as the bytes of a trace."""
        return trace_bytes(evidence, report.to_json())

    def read_trace(self, path: Path) -> Trace:
        """Return the content of a trace; raises Refusal if it cannot be relied upon."""
        return read_trace(path)

    def compare(
        self,
        incumbent: Path,
        candidate: Path,
        history: Mapping[str, Mapping[str, Any]],
        references: Mapping[str, Mapping[str, Any]],
        untrusted: Mapping[str, str],
    ) -> RunComparison:
        """Compare the traces of two evaluations on the same requests, unit by unit, with reports of
        earlier runs and of reference builds.

        Raises Refusal (KC630 to KC632) for unreliable traces, and for different requests.
        """
        return compare_runs(
            read_trace(incumbent).evidence,
            read_trace(candidate).evidence,
            history=history,
            references=references,
            untrusted=untrusted,
        )

    def refuse_other_requests(self, one: EvidenceTable, two: EvidenceTable) -> None:
        """Refuse (KC632) runs that are not about the same requests at one temperature."""
        refuse_other_requests(one, two)

    def effects(self, runs: Mapping[Place, EvidenceTable]) -> tuple[Effect, ...]:
        """Return the effects of a change of the checkpoint, of the kernels, and of both."""
        return effects_of(runs)

    def under(self, program: Program, base: Path, trace: Trace) -> EvidenceTable:
        """Return the evidence of a trace for a changed contract in the folder `base`.

        Raises Refusal (KC632) if it reads values that the trace does not have.
        """
        same_functions(program, base, trace.evidence)
        return evidence_for(program, trace)

    @stdout_to_stderr
    def experiment(
        self,
        kind: str,
        program: Program,
        base: Path,
        folder: Path,
        *,
        devices: Sequence[str] = (),
        only: Sequence[str] = (),
        lengths: Sequence[int] = (),
        batches: Sequence[int] = (),
        concurrency: Sequence[int] = (),
        seconds: float = 5.0,
        **wishes: Any,
    ) -> dict[str, Any]:
        """Return the document "kcdsl.experiment/1" of `kind` "e1" or "e2".

        Further arguments are those of `run_single` and `run_grid`.
        """
        from kcdsl_backends.empirical.questions.conditions import Axes, run_grid
        from kcdsl_backends.empirical.questions.variants import run_single

        where = (self.prepare, program, base, folder)
        if kind == "e1":
            device = devices[0] if devices else "cpu"
            return run_single(*where, device=device, only=only, seconds=seconds, **wishes)
        return run_grid(*where, axes=Axes.of(devices, lengths, batches, concurrency), **wishes)

    def aggregate(
        self,
        paths: Sequence[str | Path],
        program: Program | None,
        *,
        limits: Sequence[tuple[str, str, Fraction]] = (),
        percentiles: Sequence[Fraction] = (),
        progress: Progress = lambda stage, done, total: None,
        **wishes: Any,
    ) -> dict[str, Any]:
        """Return the document "kcdsl.aggregate/2" of token tables; see `questions.aggregate`.

        `limits` are (metric, operator, value); further arguments are those of `Wish`.
        """
        from kcdsl_backends.empirical.questions.aggregate import aggregate, options_of

        return aggregate(paths, program, options_of(limits, percentiles, **wishes), progress)


BACKEND = EmpiricalBackend()
