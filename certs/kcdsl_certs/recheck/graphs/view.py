"""The map of elements of a view: reshape, ranges, order, sizes, and shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kcdsl_certs.recheck.graphs.graph import MOST_DIMENSIONS, Node
from kcdsl_certs.recheck.graphs.reading import integer
from kcdsl_certs.rejected import Rejected

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class View:
    """An operand of shape `before`, read as `split`, of which the `ranges` are taken, in another
    `order` of dimensions, repeated to `sizes` and read as `shape`.

    `ranges` has start, stop and step for each dimension of `split`.
    """

    before: Shape
    split: Shape
    ranges: tuple[tuple[int, int, int], ...]
    order: tuple[int, ...]
    sizes: Shape
    shape: Shape

    @classmethod
    def of(cls, node: Node, before: Shape) -> View:
        """Return the view of a node.

        Raises:
            Rejected: "graph/field" or "graph/shape".
        """
        attrs = node.attrs.exactly("split", optional=("ranges", "order", "sizes"))
        split = attrs.integers("split", 1)
        ranges = tuple((0, size, 1) for size in split)
        order = tuple(range(len(split)))
        if len(split) > MOST_DIMENSIONS or math.prod(split) != math.prod(before):
            raise Rejected("graph/shape", f"{list(split)[:10]} is no shape of the operand")
        if attrs.has("ranges"):
            ranges = tuple(_range(item) for item in attrs.items("ranges"))
            if len(ranges) != len(split):
                raise attrs.fail("'ranges' must have one for each dimension")
        if any(stop > size for (_, stop, _), size in zip(ranges, split, strict=True)):
            raise attrs.fail("'ranges' end beyond the dimensions")
        if attrs.has("order"):
            order = attrs.integers("order", 0)
            if sorted(order) != list(range(len(split))):
                raise attrs.fail("'order' must be an order of the dimensions")
        found = cls(before, split, ranges, order, (), node.shape)
        sizes = attrs.integers("sizes", 1) if attrs.has("sizes") else found.turned
        if len(sizes) != len(split) or any(
            size not in (1, many) for size, many in zip(found.turned, sizes, strict=True)
        ):
            raise Rejected("graph/shape", "'sizes' are not those of copies of the elements")
        if math.prod(sizes) != math.prod(node.shape):
            raise Rejected("graph/shape", "'sizes' do not fit the shape of the node")
        found = cls(before, split, ranges, order, sizes, node.shape)
        if found.takes_all and order == tuple(range(len(split))) and split != node.shape:
            raise Rejected("graph/shape", "'split' of a reshape must be the shape of the node")
        return found

    @property
    def turned(self) -> Shape:
        """Return the shape before elements are repeated."""
        return tuple(len(range(*self.ranges[axis])) for axis in self.order)

    @property
    def copies(self) -> int:
        """Return how often each element that is taken stands in the result."""
        return math.prod(self.sizes) // math.prod(self.turned)

    @property
    def takes_all(self) -> bool:
        """Say whether every element stands once in the result."""
        whole = tuple((0, size, 1) for size in self.split)
        return self.ranges == whole and self.sizes == self.turned

    def moved(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the elements where they go."""
        taken = values.reshape(self.split)[tuple(slice(*each) for each in self.ranges)]
        repeated = np.broadcast_to(taken.transpose(self.order), self.sizes)
        return np.ascontiguousarray(repeated).reshape(self.shape)


def _range(value: object) -> tuple[int, int, int]:
    wrong = Rejected("graph/field", "'ranges' must be lists of start, stop and step")
    if not isinstance(value, list) or len(value) != 3:
        raise wrong
    start, stop, step = integer(value[0], 0, wrong), value[1], integer(value[2], 1, wrong)
    return start, integer(stop, start + 1, wrong), step
