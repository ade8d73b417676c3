"""Collection: load the inputs of a contract, and fill the evidence table from its sources."""

from __future__ import annotations

from kcdsl.ir.tables import expand_tables
from kcdsl_backends.empirical.collection.context import (
    Context,
    KernelContext,
    Progress,
    Workers,
)
from kcdsl_backends.empirical.collection.kernels import KernelSource
from kcdsl_backends.empirical.collection.recordings import RolloutContext
from kcdsl_backends.empirical.collection.rollouts import RolloutSource
from kcdsl_backends.empirical.collection.servers import ServerSource
from kcdsl_backends.empirical.sources.servers.kernel import ServerKernel
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint
from kcdsl_backends.empirical.table.evidence import EvidenceTable
from kcdsl_backends.empirical.table.requirements import split


def collect(
    context: Context,
    progress: Progress = lambda stage, done, total: None,
    checkpoint: RunCheckpoint | None = None,
    spread: Workers | None = None,
) -> EvidenceTable:
    """Fill the evidence table with the values that the clauses of a contract read on its slices.

    Results in `checkpoint` are not measured again; `spread` runs requests of local kernels in other
    processes. Raises Refusal for a contract without clauses that measurements decide, and for a
    metric that the source cannot supply, before anything is measured.
    """
    source = source_of(context, checkpoint, spread)
    clauses, _ = split(expand_tables(context.program), frozenset(source.slices))
    source.check(clauses)
    return source.fill(clauses, progress)


def source_of(
    context: Context, checkpoint: RunCheckpoint | None = None, spread: Workers | None = None
) -> KernelSource | ServerSource | RolloutSource:
    """Return the source that a context was loaded for."""
    match context:
        case RolloutContext():
            return RolloutSource(context)
        case KernelContext(infer=ServerKernel() as server):
            return ServerSource(context, server)
        case KernelContext():
            return KernelSource(context, checkpoint, spread)
    raise TypeError(f"no source of a {type(context).__name__}")
