"""Do sampled ratios average to one?"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kcdsl.verdict.report import Precheck
from kcdsl_backends.empirical.diagnoses.model import not_applicable, outcome
from kcdsl_backends.empirical.measured import Array


def support_check(ratios: Sequence[Array]) -> Precheck:
    """Sampled ratios must average to one; otherwise q misses mass of p, or the sides are swapped.

    The tolerance is five standard errors: over requests or over tokens, whichever is larger. Each
    token is drawn by itself from a policy under which E w = 1, so the squares of w - 1 estimate its
    variance, also where there are too few requests to say anything.
    """
    name = "support_check"
    if not ratios:
        return not_applicable(name, "no clause reads sampled tokens")
    sums = np.array([math.fsum(r) for r in ratios])
    sizes = np.array([float(r.size) for r in ratios])
    mean = math.fsum(sums) / math.fsum(sizes)
    residual = sums - mean * sizes
    squares = math.fsum(float(((r - 1) ** 2).sum()) for r in ratios)
    error = math.sqrt(max(math.fsum(residual**2), squares)) / math.fsum(sizes)
    good = math.isfinite(mean) and abs(mean - 1) <= 5 * error + 1e-6
    return outcome(name, good, f"mean w = {mean:.9g}, standard error {error:.2g}", mean)
