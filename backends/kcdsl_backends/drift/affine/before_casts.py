"""Reverse passes that bound the error of a sum before its free cast (Rule 2.12)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kcdsl.model.graph import Node
from kcdsl_backends.drift.affine.error_bounds import elements, surround_rows
from kcdsl_backends.drift.affine.kernel import KernelRun
from kcdsl_backends.drift.affine.row_ellipsoids import bounded_by_length
from kcdsl_backends.drift.affine.tape import TapeEntry
from kcdsl_backends.drift.boxes import SAFE
from kcdsl_backends.drift.boxes.rounding import ONCE, reads_twice

LARGEST = 2**29
"""Most numbers in the ellipsoids of a tensor; larger ones are not made."""
FAR = 8.0
"""Ratio of a linear's error bounds to its result above which ellipsoids are made."""


def bound_before_cast(run: KernelRun, node: Node, entry: TapeEntry) -> TapeEntry:
    """Return the entry of a result before its free cast, which is not on the tape. For a linear it
    gets error bounds from reverse passes that stop at ellipsoids from before another cast, in rows
    where its bounds exceed the result itself; or from norms of its input."""
    needed = _loose(run, node, entry)
    image = bounded_by_length(run, node, entry) if bool(needed.any()) else None
    if image is not None:
        less = torch.minimum(entry.error_bound, image.elements)
        return replace(entry, error_bound=less, carried=entry.widest)
    stops = run.tape.cut == run.tape.settled
    if node.op != "linear" or not stops or not bool(needed.any()):
        return entry
    place, floor = run.tape.add(entry), run.tape.near
    if run.passing(node, place, "elements", needed, floor):
        run.tape.tighten(place, elements(run.tape, place, needed, floor))
        run.lowered.add(node.name)
    return run.tape.entries.pop()


def find_ellipsoids(run: KernelRun, node: Node, index: int) -> Tensor | None:
    """Find ellipsoids around the common value of a result's readings, if its error bounds are far
    larger than it and it leads to a norm; return bounds of the norms of rows [..., 1].

    One pass gives ellipsoid, norm and elements. Later passes may stop there.
    """
    tape, entry = run.tape, run.tape.entries[index]
    follows = any(run.computed.get(name) == tape.settled for name in node.inputs)
    times = 1.0 if follows else FAR
    loose = (follows or node.op == "linear") and bool(_loose(run, node, entry, times).any())
    numbers = entry.reference.numel() * entry.shape[-1]
    if not loose or not _leads_to_norm(run, node) or numbers > LARGEST:
        return None
    everywhere, floor = torch.ones_like(entry.error_bound[..., :1], dtype=torch.bool), tape.near
    if not run.passing(node, index, "ellipsoid", everywhere, floor):
        return None
    single, lengths = surround_rows(tape, index, everywhere, floor)
    tape.tighten(index, single)
    tape.cut = tape.settled = index
    return lengths


def read_alone(run: KernelRun, node: Node) -> bool:
    """Return whether some reader of a result has a reading of its own, with its own entry."""
    return node.name == run.graph.output or any(
        name == node.name
        and (reader.op in ONCE or reader.name not in run.several)
        and not (position == 0 and reads_twice(reader))
        for reader in run.graph.nodes
        for position, name in enumerate(reader.inputs)
    )


def of_one_reading(common: TapeEntry, formed: TapeEntry, inside: Tensor) -> TapeEntry:
    """Return the entry `formed` of one reading with the bounds of the common value of all readings;
    `inside` bounds its distance from that."""
    if common.carried is None:
        return formed
    less = torch.minimum(formed.error_bound, (common.error_bound + inside) * SAFE)
    return replace(formed, error_bound=less, carried=formed.widest)


def _loose(run: KernelRun, node: Node, entry: TapeEntry, times: float = 1.0) -> Tensor:
    """Return the rows [..., 1] of a sum whose error bounds exceed `times` its size."""
    error, size = (x.sum(-1, keepdim=True) for x in (entry.error_bound, entry.reference.abs()))
    worst, final = run.tape.chance is None, node.name == run.graph.output
    summed = node.op in ("linear", "add", "sub")
    return (error > times * size) & (run.rounding.free and worst and summed and not final)


def _leads_to_norm(run: KernelRun, node: Node) -> bool:
    """Return whether a result is read only by norms and sums."""
    readers = {reader.op for reader in run.graph.nodes if node.name in reader.inputs}
    return bool(readers) and readers <= {"rms_norm", "layer_norm", "add", "sub"}
