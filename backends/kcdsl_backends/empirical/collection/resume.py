"""Resumption of a run that ended early, and the digests of everything that decides its values.

Results of requests are reused if everything that decides them is the same: the contract, the model,
both kernels, the tokens of all requests, the seed, the metrics, the files of a user's functions and
model, versions and device. As a last check the first request is run again, and must give the same
bits: outputs, and all values computed from them. Two processes give the same bits if all digests
(`decisive`) are equal, so workers may run requests elsewhere.

Answers of a server are reused if the contract, the prompts and the seed are the same, and the
server is the same: it states the same identity, and draws the same bits after the *witness*, the
longest prompt, which is sent alone at the beginning of every evaluation. A nondeterministic server
cannot be recognised, so its answers are never reused.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch

from kcdsl.ir.canonical import digest
from kcdsl.model.files import Artefacts, companion, file_digest
from kcdsl.model.own_code import compiled_files, imported_code
from kcdsl.source.files import is_file
from kcdsl_backends.empirical.collection.context import KernelContext
from kcdsl_backends.empirical.metrics.sampled import request_seed
from kcdsl_backends.empirical.sources.kernels import MeasurementPlan
from kcdsl_backends.empirical.sources.kernels.run import run_request
from kcdsl_backends.empirical.sources.servers.kernel import (
    Answer,
    Continuation,
    ServerKernel,
    Silence,
    UnusableReply,
    answer_of,
    differences,
    from_bytes,
    to_bytes,
)
from kcdsl_backends.empirical.table import rows
from kcdsl_backends.empirical.table.checkpoint import RunCheckpoint
from kcdsl_backends.empirical.table.evidence import RequestRun
from kcdsl_backends.requests import Request
from kcdsl_certs.statement.triple import INFER_CHECKPOINT


def resume(
    checkpoint: RunCheckpoint,
    context: KernelContext,
    plan: MeasurementPlan,
    requests: Sequence[Request],
) -> dict[str, RequestRun]:
    """Open the run checkpoint; return the results that can be reused.

    Raises Refusal if the run checkpoint cannot be written.
    """
    key = key_of(context, plan, requests)
    checkpoint.open(key)
    found = [(request, run) for request in requests if (run := checkpoint.run(request)) is not None]
    if not found:
        return {}
    if not taken_over_code(checkpoint, context.artefacts):
        checkpoint.restart(key, "own code that was imported then has changed since")
        return {}
    first, before = found[0]
    again = run_request(first, context.train, context.infer, plan, context.block_input)
    if _outcome(again) != _outcome(before):
        checkpoint.restart(key, f"the request {first.key} gives other bits than it gave before")
        return {}
    checkpoint.take_over(len(found), len(requests))
    return {request.key: run for request, run in found}


_CODE = "own code"
"""The name of the note in a run checkpoint with the contract's own imported modules."""


@dataclass(slots=True)
class OwnCode:
    """Records the contract's own modules that requests import, here and in workers, in the files of
    the command and in the checkpoint, before results are stored."""

    files: Artefacts | None
    checkpoint: RunCheckpoint | None
    _seen: int = 0
    _kept: dict[str, tuple[str, str]] = field(default_factory=dict)

    def imported(self, code: Mapping[str, tuple[str, str]]) -> None:
        """Record the modules that a worker imported."""
        if self.files is not None:
            self.files.record_code(code)

    def keep(self) -> None:
        """Record the modules imported here; store them in the run checkpoint if there are new
        ones."""
        if self.files is None:
            return
        if compiled_files() != self._seen:
            self._seen = compiled_files()
            imported_code(self.files)
        if self.checkpoint is not None and self.files.code != self._kept:
            self._kept = dict(self.files.code)
            self.checkpoint.keep_note(_CODE, json.dumps(self._kept).encode())


def taken_over_code(checkpoint: RunCheckpoint, files: Artefacts | None) -> bool:
    """Record the own modules that an earlier run imported; return whether they are unchanged."""
    note = checkpoint.note(_CODE)
    if note is None or files is None:
        return True
    code = {path: (name, sha256) for path, (name, sha256) in json.loads(note).items()}
    for path, (_, sha256) in code.items():
        if not is_file(Path(path)) or file_digest(Path(path)) != sha256:
            return False
    files.record_code(code)
    return True


def _outcome(run: RequestRun) -> tuple[object, ...]:
    """Return all results of a run, so that equal outcomes are equal bits."""
    unit = run.unit
    return (
        run.replay_signature,
        run.seed,
        run.nonfinite,
        unit.failure,
        dict(unit.problems),
        {
            name: np.asarray(values, dtype=np.float64).tobytes()
            for name, values in unit.values.items()
        },
    )


def _own_checkpoint_digest(context: KernelContext) -> str | None:
    """Return the digest of the inference kernel's own checkpoint; None if it has none."""
    files = context.artefacts
    return None if files is None else files.digests.get(companion(INFER_CHECKPOINT))


def key_of(context: KernelContext, plan: MeasurementPlan, requests: Sequence[Request]) -> str:
    """Return the digest of everything that decides the results of requests and checks."""
    module, _, _ = (context.program.model.module or "").partition(":")
    return digest_of(
        {
            **decisive(context, plan, requests),
            "certified": context.certify is not None,
            "functions beside": [sources(user.function.__module__) for user in plan.user],
            "module": sources(module),
        }
    )


def sources(name: str) -> dict[str, str]:
    """Return the digests of the files that were imported from the folder of a user's module, or of
    its package, since its callees decide values too."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None:
        return {}
    root = Path(file).resolve().parents[name.count(".")]
    paths = {
        Path(found).resolve()
        for other in list(sys.modules.values())
        if (found := getattr(other, "__dict__", {}).get("__file__")) is not None
    }
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(paths)
        if path.is_relative_to(root) and "site-packages" not in path.parts and path.is_file()
    }


# --- decisive ------------------------------------------------------------------------------------


def decisive(
    context: KernelContext, plan: MeasurementPlan, requests: Sequence[Request]
) -> dict[str, str]:
    """Return the digests of everything that decides results of requests, by the name of the
    part."""
    parts = {
        "contract": digest(context.program),
        "model": [
            {name: value for name, value in context.model.items() if name != "program"},
            dict(context.weights),
            _own_checkpoint_digest(context),
        ],
        "kernels": dict(context.digests),
        "requests": [
            [request.key, list(request.tokens), rows.fields_text(request.fields)]
            for request in requests
        ],
        "metrics": [sorted(plan.metrics), sorted(plan.norms), sorted(plan.context)],
        "functions": [[user.metric.name, user.sha256] for user in plan.user],
        "temperature": plan.temperature,
        "seed": plan.seed,
        "versions": [dict(context.environment), np.__version__],
        "processor": [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
    }
    return {name: digest_of(part) for name, part in parts.items()}


def digest_of(value: object) -> str:
    """Return the sha256 of plain JSON data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# --- resuming ------------------------------------------------------------------------------------


_SERVER, _WITNESS = "server", "witness"
"""Names of notes in the run checkpoint; those of answers are from `_name`."""


@dataclass(slots=True)
class Kept:
    """Stored answers, by the key of their request, and the checkpoint for further ones."""

    checkpoint: RunCheckpoint | None = None
    answers: dict[str, Answer] = field(default_factory=dict)
    _lock: Any = field(default_factory=Lock)

    def keep(self, request: Request, answer: Answer) -> None:
        """Store an answer; thread-safe. Raises Refusal if it cannot be written."""
        if isinstance(answer, Silence):
            return
        with self._lock:
            if self.checkpoint is not None:
                self.checkpoint.keep_note(_name(request), to_bytes(answer))

    def close(self) -> None:
        """Store no further answers: late ones may arrive after the run checkpoint is closed."""
        with self._lock:
            self.checkpoint = None


def resume_served(
    checkpoint: RunCheckpoint,
    context: KernelContext,
    server: ServerKernel,
    requests: Sequence[Request],
) -> Kept:
    """Open the run checkpoint; return the answers that can be reused.

    Raises Refusal if the run checkpoint cannot be written, and if the server does not answer.
    """
    key = served_key(context, server, requests)
    checkpoint.open(key)
    if not requests:
        return Kept(checkpoint)
    witness = _witness(server, requests, context.seed)
    now = {_SERVER: _identity(server), _WITNESS: to_bytes(witness)}
    before = {name: checkpoint.note(name) for name in now}
    found = {r.key: checkpoint.note(_name(r)) for r in requests}
    kept = {name: note for name, note in found.items() if note is not None}
    another = _why_another(before, now, isinstance(witness, Continuation))
    if another is not None and kept:
        checkpoint.restart(key, another)
    if another is not None:
        for name, note in now.items():
            checkpoint.keep_note(name, note)
        return Kept(checkpoint)
    if kept:
        checkpoint.take_over(len(kept), len(requests))
    return Kept(checkpoint, {k: from_bytes(note, server.semantics) for k, note in kept.items()})


def served_key(context: KernelContext, server: ServerKernel, requests: Sequence[Request]) -> str:
    """Return the digest of everything that decides the requests to a server."""
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
    """Return the name of the note with the answer to a request, for any id."""
    return f"answer {json.dumps(request.key)}"


def _identity(server: ServerKernel) -> bytes:
    said = {**server.fingerprint()["server"], "prompts": server.prompts}
    return json.dumps(said, sort_keys=True).encode()


def _witness(
    server: ServerKernel, requests: Sequence[Request], seed: int
) -> Continuation | UnusableReply:
    """Return the server's answer to the longest prompt, sent alone."""
    longest = max(requests, key=lambda request: request.length)
    answer = answer_of(server, longest.tokens, request_seed(seed, f"{_WITNESS} {longest.key}"))
    if isinstance(answer, Silence):
        raise answer.refusal
    return answer


def _why_another(
    before: Mapping[str, bytes | None], now: Mapping[str, bytes], usable: bool
) -> str | None:
    """Return why it is not certain that the server is the same; None if it is."""
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
