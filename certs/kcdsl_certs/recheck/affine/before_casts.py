"""Reverse passes that bound the error of a result before its free cast (Rules 2.2 and 2.12). The
hints name them by the node, as the operation and as the bounded node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kcdsl_certs.encoding.rejected import Rejected
from kcdsl_certs.recheck.affine.adjoint import units
from kcdsl_certs.recheck.affine.ellipsoids import Row
from kcdsl_certs.recheck.affine.form import Walk
from kcdsl_certs.recheck.affine.reverse_passes import FEW, batch_limit, rows, surrounded
from kcdsl_certs.recheck.affine.tape import TapeEntry
from kcdsl_certs.recheck.documents.document import Pass
from kcdsl_certs.recheck.graphs.graph import Node
from kcdsl_certs.recheck.interval.box import Bools, Floats
from kcdsl_certs.recheck.interval.state import Results

LARGEST = 2**29
"""Most numbers of all ellipsoids of a node; a document that names more is refused."""


def asked(walk: Walk, name: str, kind: str, shape: tuple[int, ...]) -> tuple[Bools, Bools]:
    """Return the rows [..., 1] in which the hints name passes of a node for itself, down to the
    input and to the cut; none for the output."""
    deep, near = (walk.passes.of(Pass(name, name, kind, to), shape) for to in ("input", "cut"))
    if walk.passes.rows is None or not walk.tape.cut:
        deep, near = deep | near, np.zeros_like(near)
    if name == walk.problem.block.output:
        deep, near = np.zeros_like(deep), np.zeros_like(near)
    return deep, near


def _named(walk: Walk, node: Node) -> bool:
    """Return whether hints may name passes for the result of a node."""
    worst = walk.passes.rows is not None and walk.tape.budget is None
    return worst and not walk.kernel.stepped and node.op in ("linear", "add", "sub")


def bound_elements(walk: Walk, node: Node, entry: TapeEntry) -> Floats | None:
    """Return bounds of the error of a linear's result by unit functionals; `entry` is not on the
    tape yet. None without named passes, infinite in rows without them."""
    shape = entry.error_bound.shape
    deep, near = asked(walk, node.name, "elements", shape)
    needed = deep | near
    if not _named(walk, node) or node.op != "linear" or not needed.any():
        return None
    above, step = len(walk.tape.entries), min(FEW, batch_limit(walk))

    def bound_rows(share: Sequence[Row], results: Results) -> None:
        for first in range(0, shape[-1], step):  # the same columns of all rows in turn
            count = min(step, shape[-1] - first)
            for row in share:
                floor = 0 if deep[row].any() else walk.tape.cut
                functionals = units(shape, row, first, count)
                bound = walk.tape.bound(above, functionals, floor, formed=entry)
                columns: tuple[int | slice, ...] = (*row, slice(first, first + count))
                results[0][columns] = bound.magnitude(walk.tape.region)

    far = np.full(shape, np.inf)
    (found,) = walk.over_rows(list(rows(needed)), (far,), shape[-1], bound_rows)
    return found


def find_ellipsoids(
    walk: Walk, node: Node, place: int, shape: tuple[int, ...]
) -> tuple[Floats, Floats] | None:
    """Find the named ellipsoids around the common value of a node's readings, and make it the cut;
    return bounds of the elements, and of the norms of rows [..., 1], from the same passes."""
    deep, near = asked(walk, node.name, "ellipsoid", shape)
    needed = deep | near
    if not _named(walk, node) or not needed.any():
        return None
    if int(needed.sum()) * shape[-1] ** 2 > LARGEST:
        raise Rejected("document/passes", f"the ellipsoids of {node.name} are too large")
    some, n = list(rows(needed)), shape[-1]
    places = {row: number for number, row in enumerate(some)}

    def bound_rows(share: Sequence[Row], results: Results) -> None:
        shapes, each, norms = results
        for row in share:
            floor = 0 if deep[row].any() else walk.tape.cut
            found = surrounded(walk.tape, place, units(shape, row, 0, n), floor)
            shapes[places[row]], each[row], norms[row] = found.shape, found.each, found.norm

    far = np.full(shape, np.inf)
    wide = np.full((len(some), n, n), np.nan), far, far[..., :1].copy()
    shapes, each, norms = walk.over_rows(some, wide, n, bound_rows)
    walk.tape.surround(place, dict(zip(some, shapes, strict=True)))
    walk.tape.cut = walk.tape.settled = place
    return each, norms
