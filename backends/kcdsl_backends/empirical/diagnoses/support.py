"""Do sampled ratios average to one?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import not_applicable, outcome
from kcdsl_backends.empirical.table.units import Array

_ERRORS = 5
"""Standard errors from which on a mean is not 1. Of no more tokens than the square of it none can
lie so far, whatever they are, by the inequality of Cauchy and Schwarz."""

_SQUARED = 1e100
"""Ratios above this are scaled down before they are squared."""


def support_check(ratios: Sequence[Array]) -> Precheck:
    """Sampled ratios must average to one; otherwise q misses mass of p, or the sides are swapped.

    The tolerance is `_ERRORS` standard errors: over requests or over tokens, whichever is larger.
    Each token is drawn by itself from a policy under which E w = 1, so the squares of w - 1
    estimate its variance, also where there are too few requests to say anything.
    """
    name = "support_check"
    tokens = sum(r.size for r in ratios)
    if not tokens:
        return not_applicable(name, "no clause reads sampled tokens")
    largest = float(np.max([r.max() for r in ratios if r.size]))
    if not math.isfinite(largest):
        said = "beyond float64" if largest == math.inf else f"{largest:g}"
        return outcome(name, False, f"the largest w is {said}", largest)
    scale = largest if largest > _SQUARED else 1.0
    scaled = [r / scale for r in ratios]
    sums = np.array([math.fsum(r) for r in scaled])
    sizes = np.array([float(r.size) for r in ratios])
    mean = math.fsum(sums) / tokens
    residual = sums - mean * sizes
    squares = math.fsum(float(((r - 1 / scale) ** 2).sum()) for r in scaled)
    error = math.sqrt(max(math.fsum(residual**2), squares)) / tokens
    good = abs(mean - 1 / scale) <= _ERRORS * error + 1e-6 / scale
    mean, error = mean * scale, error * scale
    if good and tokens <= _ERRORS**2:
        return not_applicable(name, f"{tokens} tokens are too few to show that a mean is not 1")
    return outcome(name, good, f"mean w = {mean:.9g}, standard error {error:.2g}", mean)
