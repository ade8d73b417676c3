"""Evaluate a contract: collect evidence, then decide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kcdsl.verdict.report import Report
from kcdsl_backends.empirical.collection import collect
from kcdsl_backends.empirical.collection.context import KernelContext, Progress
from kcdsl_backends.empirical.decision.report import conclude
from kcdsl_backends.empirical.table.evidence import EvidenceTable
from kcdsl_backends.empirical.table.rows import records


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The collected evidence and the decision."""

    evidence: EvidenceTable
    report: Report

    @property
    def traces(self) -> tuple[dict[str, Any], ...]:
        """Return one trace record per request."""
        return tuple(records(self.evidence).values())


def evaluate(
    setting: KernelContext, progress: Progress = lambda stage, done, total: None
) -> Evaluation:
    """Run both kernels on the slices of a contract and decide its empirical clauses.

    Raises Refusal as `collect` and `conclude` do.
    """
    evidence = collect(setting, progress)
    return Evaluation(evidence, conclude(evidence))
