"""Alignment: do both kernels answer for the same positions?"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.distances import mean, total_variation
from kcdsl_backends.empirical.diagnoses.model import (
    SMALLEST,
    Probe,
    Repair,
    not_applicable,
    outcome,
)
from kcdsl_backends.empirical.table.units import Unit

SHIFTS = (-1, 0, 1)
_SHORTEST = 4


def token_equality(units: Sequence[Unit], probes: Sequence[Probe]) -> Precheck:
    """Both kernels must answer for the same tokens: one row of output per token, on both sides."""
    name = "token_equality"
    for p in probes:
        if p.train.shape != p.infer.shape:
            shapes = f"{tuple(p.train.shape)} and {tuple(p.infer.shape)}"
            return outcome(name, False, f"{p.request.key}: outputs of shapes {shapes}")
    if units and not probes:
        return not_applicable(name, "no request could be run")
    tokens = sum(unit.tokens for unit in units)
    return outcome(name, bool(units), f"{tokens} tokens of {len(units)} requests")


def alignment_shift(probes: Sequence[Probe], temperature: float) -> Repair:
    """Is the inference output off by one position? Compare the policies at -1, 0 and +1."""
    name = "alignment_shift"
    long = [p for p in probes if p.train.shape[0] >= _SHORTEST]
    if not long:
        return Repair(name, f"no request with {_SHORTEST} tokens", None)
    gaps = {shift: _gap(long, shift, temperature) for shift in SHIFTS}
    here, best = gaps[0], min(gaps, key=lambda shift: gaps[shift])
    shown = ", ".join(f"{shift:+d}: {gap:.3g}" for shift, gap in gaps.items())
    left = gaps[best] / here if best != 0 and here > SMALLEST else 1.0
    return Repair(name, f"mean total variation at shift {shown}", left, float(best))


def _gap(probes: Sequence[Probe], shift: int, temperature: float) -> float:
    """Return the mean distance of row t of train from row t + shift of infer."""
    parts = []
    for p in probes:
        rows = torch.arange(1, p.train.shape[0] - 1)
        parts.append(total_variation(p.train[rows], p.infer[rows + shift], temperature))
    return mean(parts)
