"""Going on where an earlier process of the same evaluation was killed.

What a request gave is taken over if everything that decides it is the same: the contract, the
model, both kernels, the tokens of all requests, the seed, what is measured, versions and device.
As a last check the first request is run again, and must give the bits that it gave.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

from kcdsl.ir.canonical import digest
from kcdsl_backends.empirical.journal import Journal
from kcdsl_backends.empirical.measured import Run
from kcdsl_backends.empirical.run import Plan, run_request
from kcdsl_backends.empirical.setting import Setting
from kcdsl_backends.empirical.traces import rows
from kcdsl_backends.requests import Request


def resume(
    journal: Journal, setting: Setting, plan: Plan, requests: Sequence[Request]
) -> frozenset[str]:
    """Open the journal; return the keys of the requests that need not be run again.

    Raises Refusal where the journal cannot be written.
    """
    key = key_of(setting, plan, requests)
    journal.open(key)
    known = [request for request in requests if journal.run(request) is not None]
    if not known:
        return frozenset()
    first = known[0]
    before = journal.run(first)
    again = run_request(first, setting.train, setting.infer, plan, setting.block_input)
    if before is None or _outcome(again) != _outcome(before):
        journal.restart(key, f"the request {first.key} gives other bits than it gave before")
        return frozenset()
    journal.tell(f"resumed: {len(known)} of {len(requests)} requests")
    return frozenset(request.key for request in known)


def _outcome(run: Run) -> tuple[object, ...]:
    return run.replay_signature, run.seed, run.unit.failure


def key_of(setting: Setting, plan: Plan, requests: Sequence[Request]) -> str:
    """Return the digest of everything that decides what the requests give."""
    decisive = {
        "contract": digest(setting.program),
        "model": dict(setting.model),
        "weights": dict(setting.weights),
        "kernels": dict(setting.digests),
        "requests": [[request.key, list(request.tokens)] for request in requests],
        "fields": _digest([rows.fields_text(request.fields) for request in requests]),
        "metrics": sorted(plan.metrics),
        "norms": sorted(plan.norms),
        "user": [[user.metric.name, user.sha256] for user in plan.user],
        "temperature": plan.temperature,
        "seed": plan.seed,
        "certified": setting.certify is not None,
        "environment": dict(setting.environment),
        "numpy": np.__version__,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    return _digest(decisive)


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
