"""Evidence from a server: it draws after each prompt, the training kernel scores what it drew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from kcdsl.diagnostics import Refusal
from kcdsl_backends.empirical.metrics.sampled import request_seed
from kcdsl_backends.empirical.rollouts.record import Rollout, problem_of
from kcdsl_backends.empirical.rollouts.scoring import Policy, score
from kcdsl_backends.empirical.run import Kernel
from kcdsl_backends.empirical.servers.answers import Answer, Silence, answer_of
from kcdsl_backends.empirical.servers.asking import in_order
from kcdsl_backends.empirical.servers.kernel import Continuation, ServerKernel
from kcdsl_backends.empirical.servers.resuming import Kept
from kcdsl_backends.requests import Request

FAILURES = 3
"""So many requests one after the other that the server does not answer, and it is given up."""
KEPT = 2**22
"""So many logits of the training kernel are kept, of the first requests, for diagnoses."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """What each request gave: its rollout, or why it has none; and policies for diagnoses."""

    rollouts: dict[str, Rollout]
    failures: dict[str, str]
    policies: tuple[Policy, ...]


def gather_rollouts(
    server: ServerKernel,
    train: Kernel,
    requests: Sequence[Request],
    seed: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    kept: Kept | None = None,
) -> Gathered:
    """Let the server draw after each request, and the training kernel score it.

    So many requests are before the server at a time as the contract says; what they give stands in
    their own order. `kept` has the answers that need not be asked for.

    Raises Refusal where the server no longer answers, and where it is another one in the end than
    it was at first: then nothing of what it said belongs together.
    """
    kept = kept or Kept()
    found = Gathered({}, {}, ())
    policies: list[Policy] = []
    silent = room = 0

    def ask(request: Request) -> Answer:
        answer = answer_of(server, request.tokens, request_seed(seed, request.key))
        kept.keep(request, answer)
        return answer

    known = {at: kept.answers[r.key] for at, r in enumerate(requests) if r.key in kept.answers}
    with closing(in_order(requests, ask, server.service.concurrency, known)) as answers:
        for done, (request, answer) in enumerate(zip(requests, answers, strict=True), 1):
            silent = silent + 1 if isinstance(answer, Silence) else 0
            if isinstance(answer, Silence) and silent == FAILURES:
                raise answer.refusal
            try:
                rollout, policy = _scored(server, train, request, answer)
                found.rollouts[request.key] = rollout
                if policy is not None and room < KEPT:
                    policies.append(policy)
                    room += policy.logits.numel()
            except Refusal as refusal:
                first = refusal.diagnostics[0]
                found.failures[request.key] = f"{first.code}: {first.message}"
            except (RuntimeError, ValueError) as error:
                found.failures[request.key] = str(error) or type(error).__name__
            progress(done, len(requests))
    server.check_unchanged()
    return Gathered(found.rollouts, found.failures, tuple(policies))


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
