"""Evidence from a server: it draws after each prompt, the training kernel scores what it drew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kcdsl.diagnostics import Refusal, codes
from kcdsl_backends.empirical.metrics.sampled import request_seed
from kcdsl_backends.empirical.rollouts.record import Rollout, problem_of
from kcdsl_backends.empirical.rollouts.scoring import Policy, score
from kcdsl_backends.empirical.run import Kernel
from kcdsl_backends.empirical.servers.kernel import ServerKernel
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
) -> Gathered:
    """Let the server draw after each request, and the training kernel score it.

    Raises Refusal where the server no longer answers, and where it is another one in the end than
    it was at first: then nothing of what it said belongs together.
    """
    found = Gathered({}, {}, ())
    policies: list[Policy] = []
    silent = kept = 0
    for done, request in enumerate(requests, 1):
        try:
            rollout, policy = _one(server, train, request, request_seed(seed, request.key))
            found.rollouts[request.key] = rollout
            if policy is not None and kept < KEPT:
                policies.append(policy)
                kept += policy.logits.numel()
            silent = 0
        except Refusal as refusal:
            first = refusal.diagnostics[0]
            silent = silent + 1 if first.code is codes.SERVER_UNREACHABLE else 0
            if first.code is codes.SERVER_CHANGED or silent == FAILURES:
                raise
            found.failures[request.key] = f"{first.code}: {first.message}"
        except (RuntimeError, ValueError) as error:
            found.failures[request.key] = str(error) or type(error).__name__
        progress(done, len(requests))
    server.check_unchanged()
    return Gathered(found.rollouts, found.failures, tuple(policies))


def _one(
    server: ServerKernel, train: Kernel, request: Request, seed: int
) -> tuple[Rollout, Policy | None]:
    """Return a rollout with both sides; raises ValueError for one that cannot be used."""
    drawn = server.draw(request.tokens, seed)
    rollout = Rollout(
        request.key,
        request.tokens,
        drawn.tokens,
        np.ones(len(drawn.tokens), np.bool_),
        None,
        drawn.side,
        fields=dict(request.fields),
        place=f"line {request.line}",
    )
    scored = score((rollout,), train, server.semantics.temperature)
    both = scored.rollouts[0]
    problem = problem_of(both, server.vocabulary.size)
    if problem is not None:
        raise ValueError(f"{problem[0]}: {problem[1]}")
    return both, next(iter(scored.policies), None)
