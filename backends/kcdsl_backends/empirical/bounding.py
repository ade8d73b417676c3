"""The certified column: bounds of blocks and of the whole model, request by request."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kcdsl_backends.empirical.certified import (
    Certificates,
    Clock,
    agreement_bounds,
    certify,
    check_measured,
)
from kcdsl_backends.empirical.clauses import norm_name
from kcdsl_backends.empirical.crosscheck import Comparison
from kcdsl_backends.empirical.measured import Array, Run, Unit
from kcdsl_backends.empirical.setting import Setting
from kcdsl_backends.requests import Request


def compared_name(block: str) -> str:
    """Return the name under which the largest measured and certified drift of a block stand."""
    return f"compared[{block}]"


def certified_units(
    setting: Setting,
    requests: Sequence[Request],
    runs: Mapping[str, Run],
    comparisons: Mapping[str, Sequence[Comparison]],
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Clock = time.monotonic,
) -> tuple[dict[str, Unit], dict[str, Any]]:
    """Return the bounds of every request that ran, and of which numerics they speak.

    `comparisons` holds what was compared of each block. Raises Refusal (KC625) where a measured
    value lies above its bound.
    """
    usable = [r for r in requests if runs[r.key].unit.failure is None]
    certificates = _of_model(setting, usable, runs, progress, clock)
    found = certificates.units
    for block, compared in comparisons.items():
        for item in compared:
            unit = found.setdefault(item.request, Unit(item.request, 0))
            values: dict[str, Array] = {
                compared_name(block): np.array([item.measured, item.certified]),
                norm_name(block, "inf"): np.array([item.certified]),
                norm_name(block, "span"): np.array([2.0 * item.certified]),
            }
            found[item.request] = replace(unit, values={**unit.values, **values})
    return found, _about(setting, certificates)


def _of_model(
    setting: Setting,
    requests: Sequence[Request],
    runs: Mapping[str, Run],
    progress: Callable[[int, int], None],
    clock: Clock,
) -> Certificates:
    model = setting.bound_model
    if model is None or setting.bound_seconds <= 0:
        return Certificates()
    found = certify(
        model,
        requests,
        seconds=setting.bound_seconds,
        temperature=setting.program.constants.temperature,
        encoder=setting.encoder,
        clock=clock,
        progress=progress,
    )
    for key, unit in found.units.items():
        measured = runs[key].unit.values
        if "margin" in measured and "logit_span" in unit.values:
            agreement = agreement_bounds(measured["margin"], unit)
            unit = replace(unit, values={**unit.values, **agreement})
            found.units[key] = unit
        check_measured(key, measured, unit)
    return found


def _about(setting: Setting, found: Certificates) -> dict[str, Any]:
    """Return of which numerics the bounds speak, and which domain bounded which requests."""
    model = setting.bound_model
    if model is None:
        return {"reason": "no certified bounds of the whole model were sought"}
    about: dict[str, Any] = {"numerics": dict(model.numerics), "seconds": setting.bound_seconds}
    if setting.bound_seconds <= 0:
        about["reason"] = "no time was given to bounds of the whole model"
    by_domain = {
        words: [key for key, own in found.domains.items() if own == words]
        for words in model.domains
    }
    about["domains"] = {words: keys for words, keys in by_domain.items() if keys}
    return about
