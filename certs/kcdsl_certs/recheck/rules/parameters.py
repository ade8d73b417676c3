"""Parameters as states: known numbers, or all near those of the checkpoint."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck import box, nearby
from kcdsl_certs.recheck.box import Floats
from kcdsl_certs.recheck.rules.state import Scene, State


def known(t: Floats, i: Floats) -> State:
    """Return the state of numbers that are known exactly."""
    t_box, i_box = box.exact(t), box.exact(i)
    if np.array_equal(t, i):
        return State(t_box, i_box, box.exact(np.zeros(t.shape)))
    return State(t_box, i_box, box.sub(i_box, t_box))


def held(scene: Scene, key: str, *, linear: bool) -> State:
    """Return what both kernels store of a checkpoint tensor, as a linear weight or plain.

    Where the region is also one around the weights: of every θ' in it.

    Raises:
        Rejected: "parameter/…".
    """
    stored = scene.parameters
    if not scene.rho:
        get = stored.linear if linear else stored.plain
        return known(get(key, scene.train), get(key, scene.infer))
    kernels = scene.train, scene.infer
    if linear:
        kernels = scene.train.serving(key), scene.infer.serving(key)
    return State(*nearby.both(stored.singles(key), scene.rho, kernels, linear, key))


def rows(table: State, ids: NDArray[np.int64]) -> State:
    """Return rows of a table."""
    t, i, d = (part.map(lambda v: v[ids]) for part in (table.t, table.i, table.d))
    return State(t, i, d)
