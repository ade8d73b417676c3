"""Planted mistakes that diagnoses miss or misname, and false alarms on clean runs."""

from __future__ import annotations

import time

from bench.common import Better, Figure
from tests.support.planted_bugs import CLEAN, PLANTED, clean_run, named, planted_run


def diagnosis_figures() -> list[Figure]:
    """Run every planted mistake and every clean pair."""
    wrong = [
        bug for bug, planted in PLANTED.items() if named(planted_run(bug)) != (planted.diagnosis,)
    ]
    start = time.perf_counter()
    suspected = [run for run in range(len(CLEAN)) if named(clean_run(run))]
    each = (time.perf_counter() - start) / len(CLEAN)
    kinds = len({planted.diagnosis for planted in PLANTED.values()})
    lower = Better.LOWER
    return [
        Figure(
            "planted bugs missed or misnamed",
            float(len(wrong)),
            lower,
            0.0,
            f"of {len(PLANTED)} around real kernels of the tiny model, {kinds} diagnoses"
            + (f"; wrong: {', '.join(wrong)}" if wrong else ""),
        ),
        Figure(
            f"false diagnoses on {len(CLEAN)} clean runs",
            float(len(suspected)),
            lower,
            0.0,
            "ten pairs of numerics, five sets of 12 prompts",
        ),
        Figure(
            "seconds of a clean run",
            each,
            lower,
            None,
            "kernels loaded, 12 requests, every precondition",
        ),
    ]
