"""Resumption of a run that ended early, and the digests of everything that decides its values.

Results of requests are reused if everything that decides them is the same: the contract, the model,
both kernels, the tokens of all requests, the seed, the metrics, the files of a user's functions and
model, versions and device. As a last check the first request is run again, and must give the same
bits: outputs, and all values computed from them. Two processes give the same bits if all digests
(`input_digests`) are equal, so workers may run requests elsewhere.

Answers of a server are asked for again: the second run could not show that they are of the same
server.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from kcdsl.ir.canonical import digest
from kcdsl.model.files import Artefacts, companion, file_digest
from kcdsl.model.own_code import compiled_files, imported_code
from kcdsl.source.files import is_file
from kcdsl_backends.empirical.collection.context import KernelContext
from kcdsl_backends.empirical.sources.kernels import MeasurementPlan
from kcdsl_backends.empirical.sources.kernels.run import run_request
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
    if not recorded_code_unchanged(checkpoint, context.artefacts):
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


def recorded_code_unchanged(checkpoint: RunCheckpoint, files: Artefacts | None) -> bool:
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
            **input_digests(context, plan, requests),
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


# --- input digests -------------------------------------------------------------------------------


def input_digests(
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
