"""Does a kernel give the same bits twice?"""

from __future__ import annotations

from collections.abc import Sequence

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import SIDES, Probe, not_applicable, outcome


def self_determinism(probes: Sequence[Probe]) -> Precheck:
    """A kernel run twice should give the same bits; otherwise its noise is part of every drift."""
    name = "self_determinism"
    if not probes:
        return not_applicable(name, "no request could be run")
    sides = {side: sum(not p.equal[i] for p in probes) for i, side in enumerate(SIDES)}
    rate = sum(sides.values()) / (2 * len(probes))
    detail = ", ".join(f"{side} {n} of {len(probes)} differ" for side, n in sides.items())
    return outcome(name, rate == 0, detail, rate)
