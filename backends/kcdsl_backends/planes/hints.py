"""What a proof says of planes, so that its checker need not search (section 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kcdsl_backends.planes.run import Run
from kcdsl_backends.planes.search import Searched


def hints_of(run: Run, searched: Sequence[Searched]) -> dict[str, Any]:
    """Return the hints of a walk as plain data; arrays are numpy's.

    Rows of the nodes that were met with their functionals, the slopes of every ReLU at the elements
    whose sign is open, and those of single elements of the output.
    """
    met = [
        {"of": name, "unknown": unknown, "rows": rows}
        for (name, unknown), chosen in sorted(run.met.items())
        if (rows := _runs(chosen))
    ]
    slopes = []
    for entry in run.tape.entries:
        if entry.planes is None:
            continue
        at = entry.planes.bent
        values = torch.stack([slope[0][at] for slope in entry.planes.slopes()])
        slopes.append({"of": entry.name, "at": at.cpu().numpy(), "values": _single(values)})
    own = [
        {"element": one.element, "side": one.side, "values": _single(one.values)}
        for one in searched
    ]
    return {"met": met, "slopes": slopes, "searched": own}


def _runs(chosen: Tensor) -> list[int]:
    """Return rows from first to end in turn."""
    flat = np.concatenate(([False], chosen.flatten().cpu().numpy(), [False]))
    return [int(k) for k in np.flatnonzero(flat[1:] != flat[:-1])]


def _single(values: Tensor) -> np.ndarray[Any, Any]:
    return values.cpu().numpy().astype(np.float32)
