"""What a server decides of a contract: clauses about drawn tokens, each row of them a sample."""

from __future__ import annotations

from collections.abc import Sequence

from kcdsl.diagnostics import codes, refuse
from kcdsl.ir.buckets import expand_tables
from kcdsl.ir.terms import Clause
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.clauses import measured_norms, metrics_of
from kcdsl_backends.empirical.conclusion import PROOFS, split
from kcdsl_backends.empirical.diagnoses.model import outcome
from kcdsl_backends.empirical.diagnoses.semantics import Recorded, recorded_prechecks
from kcdsl_backends.empirical.diagnoses.weights import weights_checksum
from kcdsl_backends.empirical.evidence import Evidence
from kcdsl_backends.empirical.gathering import Progress, distinct, kernels_record
from kcdsl_backends.empirical.measured import Run, Unit
from kcdsl_backends.empirical.metrics.sampled import request_seed
from kcdsl_backends.empirical.rollouts.needs import NEEDS
from kcdsl_backends.empirical.rollouts.record import Semantics
from kcdsl_backends.empirical.rollouts.units import Group, run_of
from kcdsl_backends.empirical.servers.gathering import Gathered, gather_rollouts
from kcdsl_backends.empirical.servers.kernel import ServerKernel
from kcdsl_backends.empirical.setting import Setting
from kcdsl_backends.empirical.user_metrics import measures_of
from kcdsl_backends.requests import Request

SUMMARY = frozenset({"k1", "k3", "importance_ratio", "log_ratio", "log_ratio_linf", "tv_is"})
"""The usual drifts of drawn tokens."""
_LISTS = frozenset({"train_top_ids", "train_top_logs", "infer_top_ids", "infer_top_logs"})
_LOGS = frozenset({"prompt", "tokens", "train_logs", "infer_logs"})


def gather_served(
    setting: Setting, server: ServerKernel, progress: Progress = lambda stage, done, total: None
) -> Evidence:
    """Let a server draw after every request of the slices, and measure what it drew.

    Raises Refusal for a contract without clauses that this can decide, for a metric that needs more
    than drawn tokens and the likeliest ones, and where the server cannot be relied upon.
    """
    program = expand_tables(setting.program)
    clauses, _ = split(program, frozenset(setting.slices))
    check_reach(setting, server, clauses)
    metrics = SUMMARY | {name for clause in clauses for name in metrics_of(clause.require)}
    requests = distinct(setting)
    found = gather_rollouts(
        server,
        setting.train,
        requests,
        setting.seed,
        lambda done, total: progress("server and training kernel", done, total),
    )
    runs = {r.key: _run(r, found, metrics, setting.seed) for r in requests}
    return Evidence(
        program=setting.program,
        requests=requests,
        runs=runs,
        slices={name: tuple(r.key for r in rows) for name, rows in setting.slices.items()},
        measured=frozenset(metrics),
        encoder=setting.encoder,
        contract=setting.contract,
        model=setting.model,
        kernels=kernels_record(setting),
        data=tuple(
            {"name": file.name, "sha256": file.sha256, "rows": len(file.requests)}
            for file in setting.files.values()
        ),
        environment=setting.environment,
        prechecks=_prechecks(setting, server, requests, found),
        spoiled=setting.spoiled,
        notes=(
            "the server shows neither its weights nor its blocks: no digest and no certified bound"
            " stands beside what it drew",
        ),
        seed=setting.seed,
        looks=setting.looks,
    )


def check_reach(setting: Setting, server: ServerKernel, clauses: Sequence[Clause]) -> None:
    """Refuse a clause whose metric needs more than the server gives; name it and its tier."""
    measures = measures_of(setting.program)
    given = _LOGS | (_LISTS if server.tier == "B" else frozenset())
    for clause in clauses:
        if clause.evidence in PROOFS:
            continue
        if measured_norms(clause.require):
            raise _beyond(clause, "measured drift of a block", "blocks are not shown")
        for name in sorted(metrics_of(clause.require)):
            needs = NEEDS.get(name)
            if needs is not None and given.issuperset(needs):
                continue
            tier = measures[name].tier if name in measures else "A"
            lists = needs is not None and _LISTS.intersection(needs)
            why = "`top` of its `logprobs` is 0" if lists else "it draws tokens, and shows no more"
            raise _beyond(clause, f"`{name}` of tier {tier}", why)


def _beyond(clause: Clause, what: str, why: str) -> Exception:
    return refuse(
        codes.METRIC_OUT_OF_REACH,
        f"the clause `{clause.id}` reads {what}, which a server does not give: {why}",
        help="metrics of drawn tokens, such as mean(k3) or p99(tv_is): docs/adapters.md",
    )


def _run(request: Request, found: Gathered, metrics: frozenset[str], seed: int) -> Run:
    own = request_seed(seed, request.key)
    failure = found.failures.get(request.key)
    if failure is not None:
        return Run(Unit(request.key, request.length, failure=failure), own, {}, 0)
    return run_of(Group(request, (found.rollouts[request.key],)), metrics, own)


def _prechecks(
    setting: Setting, server: ServerKernel, requests: Sequence[Request], found: Gathered
) -> tuple[Precheck, ...]:
    temperature = float(setting.program.constants.temperature)
    checks = recorded_prechecks(
        Recorded(
            tuple(found.rollouts.values()),
            temperature,
            {name: len(rows) for name, rows in setting.slices.items()},
            Semantics("processed", server.semantics.temperature),
            server.semantics,
            found.policies,
            recomputed=True,
        )
    )
    return (
        weights_checksum({**setting.weights, **setting.changed_weights()}),
        _answered(requests, found),
        *checks,
    )


def _answered(requests: Sequence[Request], found: Gathered) -> Precheck:
    """Every request must have a usable answer: those that failed are not like the others."""
    failed = [r for r in requests if r.key in found.failures]
    detail = f"{len(failed)} of {len(requests)} requests have no usable answer"
    if failed:
        detail += f"; first {failed[0].key}: {found.failures[failed[0].key]}"
    return outcome("answers", not failed, detail, float(len(failed)))
