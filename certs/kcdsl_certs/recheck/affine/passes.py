"""Which reverse passes a proof was made with (section 1).

They are hints: any pass may be made and any left out. Without hints all are made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kcdsl_certs.recheck.box import Bools
from kcdsl_certs.recheck.document import Pass


@dataclass(frozen=True, slots=True)
class Passes:
    """Rows by pass; None where a proof names none."""

    rows: Mapping[Pass, tuple[int, ...]] | None

    def of(self, named: Pass, shape: tuple[int, ...]) -> Bools:
        """Return for which rows of a node of this shape a pass is to be made, [..., 1]."""
        if self.rows is None:
            return np.ones((*shape[:-1], 1), dtype=np.bool_)
        chosen = np.zeros((*shape[:-1], 1), dtype=np.bool_)
        runs = self.rows.get(named, ())
        for start, stop in zip(runs[::2], runs[1::2], strict=True):
            chosen.reshape(-1)[start:stop] = True
        return chosen
