"""Points of a ball that exact arithmetic finds inside it."""

from __future__ import annotations

import numpy as np

from tests.support.ball.bounds import Floats


def corner(centre: Floats, radius: float, rng: np.random.Generator) -> Floats:
    """Return a corner of {x: |x - centre| <= radius}; a sum in float64 may be rounded out of it."""
    signs = rng.choice([-1.0, 1.0], np.shape(centre))
    return np.asarray(np.nextafter(centre + radius * signs, centre))
