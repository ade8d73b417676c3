"""Collection from a server: values of drawn tokens, each row a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from kcdsl.diagnostics import Refusal, codes
from kcdsl.ir.terms import Clause
from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.collection.context import KernelContext, Progress
from kcdsl_backends.empirical.diagnoses.model import outcome
from kcdsl_backends.empirical.diagnoses.recorded import Recorded, recorded_prechecks
from kcdsl_backends.empirical.diagnoses.weights import weights_checksum
from kcdsl_backends.empirical.metrics.sampled import request_seed
from kcdsl_backends.empirical.metrics.user import measures_of
from kcdsl_backends.empirical.sources.kernels import Kernel, timing
from kcdsl_backends.empirical.sources.rollouts.measures import NEEDS
from kcdsl_backends.empirical.sources.rollouts.prompts import PromptRollouts, run_of, score
from kcdsl_backends.empirical.sources.rollouts.record import Policy, Rollout, Semantics, problem_of
from kcdsl_backends.empirical.sources.servers.kernel import (
    Answer,
    Continuation,
    NoAnswer,
    ServerKernel,
    answer_of,
)
from kcdsl_backends.empirical.table.evidence import EvidenceTable, RequestRun, SamplingUnit, Timing
from kcdsl_backends.empirical.table.requirements import (
    PROOFS,
    is_runtime,
    measured_norms,
    metrics_of,
    unreadable,
)
from kcdsl_backends.executors import in_order
from kcdsl_backends.requests import Request

SUMMARY = frozenset({"k1", "k3", "importance_ratio", "log_ratio", "log_ratio_linf", "tv_is"})
"""The drifts of drawn tokens that are always measured."""
_LISTS = frozenset({"train_top_ids", "train_top_logs", "infer_top_ids", "infer_top_logs"})
_LOGS = frozenset({"prompt", "tokens", "train_logs", "infer_logs"})
_TIMES = frozenset({"arrived", "stamps"})
"""The columns that a streamed answer gives."""


@dataclass(frozen=True, slots=True)
class ServerSource:
    """A server that draws after every request of the slices, and the kernel that scores it."""

    context: KernelContext
    server: ServerKernel

    @property
    def slices(self) -> Collection[str]:
        """Return the names of the slices."""
        return self.context.slices

    def check(self, clauses: Sequence[Clause]) -> None:
        """Refuse a clause whose metric needs values that the server does not give; name its
        tier."""
        measures = measures_of(self.context.program)
        given = _LOGS | _TIMES | (_LISTS if self.server.tier == "B" else frozenset())
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
                why = (
                    "`top` of its `logprobs` is 0"
                    if lists
                    else "it draws tokens, and shows no more"
                )
                raise _beyond(clause, f"`{name}` of tier {tier}", why)

    def fill(self, clauses: Sequence[Clause], progress: Progress) -> EvidenceTable:
        """Draw, score, measure, and time. Raises Refusal if the server is not reliable."""
        context, requests = self.context, self.context.requests
        metrics = SUMMARY | {name for clause in clauses for name in metrics_of(clause.require)}
        found = gather_rollouts(
            self.server,
            context.train,
            requests,
            context.seed,
            lambda done, total: progress("server and training kernel", done, total),
        )
        slices = {name: _units(rows) for name, rows in context.slices.items()}
        rows = {name: tuple(unit.request for unit in own) for name, own in slices.items()}
        units = {unit.request.key: unit for own in slices.values() for unit in own}
        times = self._timing(clauses, rows, progress)
        repeated = len(requests) - len({request.tokens for request in requests})
        return context.evidence(
            rows,
            encoder=context.encoder,
            runs={key: _run(unit, found, metrics, context.seed) for key, unit in units.items()},
            measured=frozenset(metrics),
            kernels=context.kernels,
            data=context.data,
            timing=times,
            prechecks=_prechecks(context, self.server, requests, found),
            notes=(
                "the server shows neither its weights nor its blocks: its tokens have neither a"
                " digest of weights nor a certified bound",
                *([_timed_as(self.server)] if times.runs else []),
                *([f"{repeated} requests repeat a prompt and count with it"] if repeated else []),
            ),
        )

    def _timing(
        self,
        clauses: Sequence[Clause],
        slices: Mapping[str, Sequence[Request]],
        progress: Progress,
    ) -> Timing:
        server, seed = self.server, self.context.seed
        timed = [clause for clause in clauses if is_runtime(clause)]
        chosen, rounds = timing.chosen_rounds(timed, slices)
        if not chosen:
            return Timing()
        silent = 0

        def generate(request: Request, clock: timing.Clock) -> Iterator[tuple[float, int]]:
            nonlocal silent
            try:
                yield from server.stream(request.tokens, request_seed(seed, request.key), clock)
                silent = 0
            except Refusal as refusal:
                first = refusal.diagnostics[0]
                silent = silent + 1 if first.code is codes.SERVER_UNREACHABLE else 0
                if first.code is codes.SERVER_CHANGED or silent >= FAILURES:
                    raise
                raise timing.Untimed(f"{first.code}: {first.message}") from refusal

        found = timing.time_served(
            generate,
            chosen,
            rounds=rounds,
            seconds=self.context.seconds,
            at_once=server.service.concurrency,
            progress=lambda done, total: progress("timed runs", done, total),
        )
        server.check_unchanged()
        return found


def _beyond(clause: Clause, what: str, why: str) -> Refusal:
    help = "metrics of drawn tokens, such as mean(k3) or p99(tv_is): `kcdsl explain adapters`"
    return unreadable(clause, what, f"which a server does not give: {why}", help)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Requests of a slice with one prompt, as one request: several draws after a prompt measure the
    drift after this prompt alone."""

    request: Request
    members: tuple[Request, ...]


def _units(rows: Sequence[Request]) -> tuple[_Unit, ...]:
    prompts: dict[tuple[int, ...], list[Request]] = {}
    for row in rows:
        prompts.setdefault(row.tokens, []).append(row)
    return tuple(_Unit(_joined(members), tuple(members)) for members in prompts.values())


def _joined(members: Sequence[Request]) -> Request:
    """Return the request that stands for several, with the fields that all of them have."""
    first = members[0]
    if len(members) == 1:
        return first
    keys = hashlib.sha256("\n".join(m.key for m in members).encode()).hexdigest()[:12]
    more = f" and {len(members) - 1} more ({keys})"
    shared = {
        name: value
        for name, value in first.fields.items()
        if all(m.fields.get(name) == value for m in members)
    }
    return replace(first, key=first.key + more, id=first.id + more, fields=shared)


def _run(unit: _Unit, found: ServerRollouts, metrics: frozenset[str], seed: int) -> RequestRun:
    request, alone = unit.request, len(unit.members) == 1
    own = request_seed(seed, request.key) if alone else seed
    failures = [found.failures[m.key] for m in unit.members if m.key in found.failures]
    if failures:
        return RequestRun(
            SamplingUnit(request.key, request.length, failure=failures[0]), own, {}, 0
        )
    return run_of(
        PromptRollouts(request, tuple(found.rollouts[m.key] for m in unit.members)), metrics, own
    )


def _timed_as(server: ServerKernel) -> str:
    at_once = server.service.concurrency
    return (
        f"times are those of {server.service.tokens} streamed tokens after each request (fewer"
        " where the text ends or the model has no room), as they come over the network,"
        f" {at_once} {'request' if at_once == 1 else 'requests'} at a time"
    )


def _prechecks(
    context: KernelContext, server: ServerKernel, requests: Sequence[Request], found: ServerRollouts
) -> tuple[Precheck, ...]:
    temperature = float(context.program.constants.temperature)
    checks = recorded_prechecks(
        Recorded(
            tuple(found.rollouts.values()),
            temperature,
            {name: len(rows) for name, rows in context.slices.items()},
            Semantics("processed", server.semantics.temperature),
            server.semantics,
            found.policies,
            recomputed=True,
        )
    )
    return (
        weights_checksum({**context.weights, **context.changed_weights()}),
        _answered(requests, found),
        *checks,
    )


def _answered(requests: Sequence[Request], found: ServerRollouts) -> Precheck:
    """Check that every request has a usable answer: failed ones may differ from the others."""
    failed = [r for r in requests if r.key in found.failures]
    detail = f"{len(failed)} of {len(requests)} requests have no usable answer"
    if failed:
        detail += f"; first {failed[0].key}: {found.failures[failed[0].key]}"
    return outcome("answers", not failed, detail, float(len(failed)))


FAILURES = 3
"""Number of consecutive requests without an answer after which the evaluation ends."""
KEPT = 2**22
"""Number of logits of the training kernel, of the first requests, that are kept for diagnoses."""


@dataclass(frozen=True, slots=True)
class ServerRollouts:
    """The rollout of each request, or why it has none; and policies for diagnoses."""

    rollouts: dict[str, Rollout]
    failures: dict[str, str]
    policies: tuple[Policy, ...]


def gather_rollouts(
    server: ServerKernel,
    train: Kernel,
    requests: Sequence[Request],
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ServerRollouts:
    """Let the server draw after each request, and the training kernel score it.

    The contract states the number of concurrent requests; results are in the order of requests.
    Raises Refusal if the server no longer answers, and if it has changed at the end: its answers
    are then not comparable.
    """
    found = ServerRollouts({}, {}, ())
    policies: list[Policy] = []
    silent = kept_logits = 0

    def ask(request: Request) -> Answer:
        return answer_of(server, request.tokens, request_seed(seed, request.key))

    with closing(in_order(requests, ask, server.service.concurrency)) as answers:
        for done, (request, answer) in enumerate(zip(requests, answers, strict=True), 1):
            silent = silent + 1 if isinstance(answer, NoAnswer) else 0
            if isinstance(answer, NoAnswer) and silent == FAILURES:
                raise answer.refusal
            try:
                rollout, policy = _scored(server, train, request, answer)
                found.rollouts[request.key] = rollout
                if policy is not None and kept_logits < KEPT:
                    policies.append(policy)
                    kept_logits += policy.logits.numel()
            except Refusal as refusal:
                first = refusal.diagnostics[0]
                found.failures[request.key] = f"{first.code}: {first.message}"
            except (RuntimeError, ValueError) as error:
                found.failures[request.key] = str(error) or type(error).__name__
            progress(done, len(requests))
    server.check_unchanged()
    return ServerRollouts(found.rollouts, found.failures, tuple(policies))


def _scored(
    server: ServerKernel, train: Kernel, request: Request, answer: Answer
) -> tuple[Rollout, Policy | None]:
    """Return a rollout with both sides; raises ValueError for one that cannot be used."""
    if not isinstance(answer, Continuation):
        raise ValueError(answer.reason)
    rollout = Rollout(
        request.key,
        request.tokens,
        answer.tokens,
        np.ones(len(answer.tokens), np.bool_),
        None,
        answer.side,
        fields=dict(request.fields),
        place=f"line {request.line}",
    )
    scored = score((rollout,), train, server.semantics.temperature)
    both = scored.rollouts[0]
    problem = problem_of(both, server.vocabulary.size)
    if problem is not None:
        raise ValueError(f"{problem[0]}: {problem[1]}")
    return both, next(iter(scored.policies), None)
