"""What decides the values that requests give, part by part as digests.

Two processes give the same bits where all of these are the same: an evaluation may go on where an
earlier one was killed, and workers may run its requests elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch

from kcdsl.ir.canonical import digest
from kcdsl_backends.empirical.run import Plan
from kcdsl_backends.empirical.setting import Setting
from kcdsl_backends.empirical.traces import rows
from kcdsl_backends.requests import Request


def decisive(setting: Setting, plan: Plan, requests: Sequence[Request]) -> dict[str, str]:
    """Return the digest of everything that decides what requests give, by the name of the part."""
    parts = {
        "contract": digest(setting.program),
        "model": [
            {name: value for name, value in setting.model.items() if name != "program"},
            dict(setting.weights),
        ],
        "kernels": dict(setting.digests),
        "requests": [
            [request.key, list(request.tokens), rows.fields_text(request.fields)]
            for request in requests
        ],
        "metrics": [sorted(plan.metrics), sorted(plan.norms), sorted(plan.context)],
        "functions": [[user.metric.name, user.sha256] for user in plan.user],
        "temperature": plan.temperature,
        "seed": plan.seed,
        "versions": [dict(setting.environment), np.__version__],
        "processor": [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
    }
    return {name: digest_of(part) for name, part in parts.items()}


def digest_of(value: object) -> str:
    """Return the sha256 of plain JSON data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
