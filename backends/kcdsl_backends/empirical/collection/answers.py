"""Answers of a server: drawn after each prompt, kept for a resumed run, and scored.

Answers of an interrupted evaluation are taken over where the contract, the prompts and the seed are
the same, and the server is the one that gave them: it says the same of itself, and draws the same
bits after the *witness*, the longest of the prompts, which is asked alone at the beginning of every
evaluation. A server that does not repeat itself cannot be known again, so its answers are never
taken over.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from kcdsl.diagnostics import Refusal
from kcdsl.ir.canonical import digest
from kcdsl_backends.empirical.collection.context import KernelContext
from kcdsl_backends.empirical.metrics.sampled import request_seed
from kcdsl_backends.empirical.sources.kernels.run import Kernel
from kcdsl_backends.empirical.sources.rollouts.prompts import Policy, score
from kcdsl_backends.empirical.sources.rollouts.record import Rollout, problem_of
from kcdsl_backends.empirical.sources.servers.kernel import (
    Answer,
    Continuation,
    ServerKernel,
    Silence,
    Unusable,
    answer_of,
    differences,
    from_bytes,
    to_bytes,
)
from kcdsl_backends.empirical.table import rows
from kcdsl_backends.empirical.table.checkpoint import Journal
from kcdsl_backends.executors import in_order
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


# --- resuming ------------------------------------------------------------------------------------


_SERVER, _WITNESS = "server", "witness"
"""Names of notes in the journal; answers have those of `_name`."""


@dataclass(slots=True)
class Kept:
    """Answers that are at hand, by the key of their request, and where further ones are kept."""

    journal: Journal | None = None
    answers: dict[str, Answer] = field(default_factory=dict)
    _lock: Any = field(default_factory=Lock)

    def keep(self, request: Request, answer: Answer) -> None:
        """Keep an answer at once; any thread may. Raises Refusal where that cannot be written."""
        if isinstance(answer, Silence):
            return
        with self._lock:
            if self.journal is not None:
                self.journal.keep_note(_name(request), to_bytes(answer))

    def close(self) -> None:
        """Keep nothing more: answers on their way may come when the journal is closed."""
        with self._lock:
            self.journal = None


def resume_served(
    journal: Journal, context: KernelContext, server: ServerKernel, requests: Sequence[Request]
) -> Kept:
    """Open the journal; return the answers that need not be asked for again.

    Raises Refusal where the journal cannot be written, and where the server does not answer.
    """
    key = key_of(context, server, requests)
    journal.open(key)
    if not requests:
        return Kept(journal)
    witness = _witness(server, requests, context.seed)
    now = {_SERVER: _told(server), _WITNESS: to_bytes(witness)}
    before = {name: journal.note(name) for name in now}
    found = {r.key: journal.note(_name(r)) for r in requests}
    kept = {name: note for name, note in found.items() if note is not None}
    another = _another(before, now, isinstance(witness, Continuation))
    if another is not None and kept:
        journal.restart(key, another)
    if another is not None:
        for name, note in now.items():
            journal.keep_note(name, note)
        return Kept(journal)
    if kept:
        journal.take_over(len(kept), len(requests))
    return Kept(journal, {k: from_bytes(note, server.semantics) for k, note in kept.items()})


def key_of(context: KernelContext, server: ServerKernel, requests: Sequence[Request]) -> str:
    """Return the digest of everything that decides which questions are asked."""
    decisive = {
        "contract": digest(context.program),
        "model": dict(context.model),
        "vocabulary": server.vocabulary.size,
        "requests": [
            [request.key, list(request.tokens), rows.fields_text(request.fields)]
            for request in requests
        ],
        "seed": context.seed,
        "kcdsl": context.environment.get("kcdsl"),
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _name(request: Request) -> str:
    """Return the name of the note with the answer to a request, whatever its id holds."""
    return f"answer {json.dumps(request.key)}"


def _told(server: ServerKernel) -> bytes:
    said = {**server.fingerprint()["server"], "prompts": server.prompts}
    return json.dumps(said, sort_keys=True).encode()


def _witness(
    server: ServerKernel, requests: Sequence[Request], seed: int
) -> Continuation | Unusable:
    """Return what the server draws after the longest prompt, asked alone."""
    longest = max(requests, key=lambda request: request.length)
    answer = answer_of(server, longest.tokens, request_seed(seed, f"{_WITNESS} {longest.key}"))
    if isinstance(answer, Silence):
        raise answer.refusal
    return answer


def _another(
    before: Mapping[str, bytes | None], now: Mapping[str, bytes], usable: bool
) -> str | None:
    """Return why it is not certain that the same server answers now, None where it is."""
    first, witness = before[_SERVER], before[_WITNESS]
    if first is None or witness is None:
        return "what was kept does not say which server gave it"
    if first != now[_SERVER]:
        said = differences(json.loads(first), json.loads(now[_SERVER]))
        return f"the server is another one: {said}"
    if not usable:
        return "the answer by which the server would be known again cannot be used"
    if witness != now[_WITNESS]:
        return (
            "the server gives other tokens or values than before after the same prompt with the"
            " same seed: it has other settings, or does not repeat itself"
        )
    return None
