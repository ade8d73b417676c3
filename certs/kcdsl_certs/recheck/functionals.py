"""What is read off the output's boxes (section 7)."""

from __future__ import annotations

import math

import numpy as np

from kcdsl_certs.recheck import box
from kcdsl_certs.recheck.box import Box
from kcdsl_certs.recheck.document import Functional
from kcdsl_certs.recheck.rules.state import State
from kcdsl_certs.rejected import Rejected


def bound(functional: Functional, output: State) -> float:
    """Return an upper bound of the functional; for no_flip 0 if the top k stay, else infinity."""
    if functional.kind == "no_flip":
        return 0.0 if _stays(functional.k, output) else math.inf
    return of_drift(functional.kind, output.d)


def of_drift(kind: str, d: Box) -> float:
    """Return an upper bound of "inf", "2" or "span" of a box of drifts."""
    match kind:
        case "inf":
            found = box.magnitude(d).max()
        case "2":
            size = box.mag(d)
            found = box.up(np.sqrt((size**2).sum(axis=-1)), d.shape[-1] + 8).max()
        case _:
            found = box.add_up(d.hi.max(axis=-1), -d.lo.min(axis=-1)).max()
    return float(found)


def _stays(k: int, output: State) -> bool:
    """Return whether in every row k columns are above all others in both kernels."""
    columns = output.shape[-1]
    if k >= columns:
        raise Rejected("document/field", f"no_flip {k} needs more than {k} columns")
    chosen = np.argsort(output.t.lo, axis=-1, kind="stable")[..., columns - k :]
    inside = np.zeros(output.shape, dtype=np.bool_)
    np.put_along_axis(inside, chosen, True, axis=-1)
    return all(
        bool(
            (
                np.where(inside, part.lo, np.inf).min(axis=-1)
                > np.where(inside, -np.inf, part.hi).max(axis=-1)
            ).all()
        )
        for part in (output.t, output.i)
    )
