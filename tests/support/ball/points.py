"""Points of a ball, verified in exact arithmetic to lie inside it."""

from __future__ import annotations

import numpy as np

from tests.support.ball.bounds import Floats


def corner(centre: Floats, radius: float, rng: np.random.Generator) -> Floats:
    """Return a corner of {x: |x - centre| <= radius}, moved inside where float64 rounds it out."""
    signs = rng.choice([-1.0, 1.0], np.shape(centre))
    return np.asarray(np.nextafter(centre + radius * signs, centre))
