"""Views: the operation `view` of block graphs, which moves elements and rounds nothing.

Every rearrangement of one operand (reshape, permute, expand, slice) is one map of elements, and so
are many rearrangements one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kcdsl.model.graph import Node
    from kcdsl.model.lowering.drafts import Draft

Range = tuple[int, int, int]
"""Start, stop and step along one dimension."""


@dataclass(frozen=True, slots=True)
class View:
    """x.reshape(split)[ranges].permute(order).expand(sizes).reshape(shape).

    `ranges` has one range for each dimension of `split`.
    """

    split: tuple[int, ...]
    ranges: tuple[Range, ...]
    order: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, node: Node | Draft) -> View:
        """Read the attributes of a node `view`; those left out change nothing."""
        found, attrs = cls.reshaped(node.attrs["split"]), node.attrs
        if "ranges" in attrs:
            found = found._cut(attrs["ranges"])
        if "order" in attrs:
            found = found._permuted(attrs["order"])
        sizes = tuple(attrs["sizes"]) if "sizes" in attrs else found.sizes
        return replace(found, sizes=sizes, shape=node.shape)

    @classmethod
    def reshaped(cls, shape: Sequence[int]) -> View:
        """Return the view that reads x in another shape."""
        shape = tuple(shape)
        whole = tuple((0, size, 1) for size in shape)
        return cls(shape, whole, tuple(range(len(shape))), shape, shape)

    @classmethod
    def permuted(cls, shape: Sequence[int], dims: Sequence[int]) -> View:
        """Return the view of x of this shape with its dimensions in another order."""
        return cls.reshaped(shape)._permuted([d % len(shape) for d in dims])

    @classmethod
    def expanded(cls, shape: Sequence[int], sizes: Sequence[int]) -> View:
        """Return the view of x of this shape, broadcast to `sizes`."""
        split = (1,) * (len(sizes) - len(shape)) + tuple(shape)
        return replace(cls.reshaped(split), sizes=tuple(sizes), shape=tuple(sizes))

    @classmethod
    def sliced(cls, shape: Sequence[int], dim: int, start: int, stop: int, step: int = 1) -> View:
        """Return the view of start:stop:step along one dimension of x of this shape."""
        ranges = [(0, size, 1) for size in shape]
        ranges[dim] = (start, stop, step)
        return cls.reshaped(shape)._cut(ranges)

    def _cut(self, ranges: Sequence[Sequence[int]]) -> View:
        taken = tuple(len(range(*each)) for each in ranges)
        chosen = tuple((int(a), int(b), int(c)) for a, b, c in ranges)
        return replace(self, ranges=chosen, sizes=taken, shape=taken)

    def _permuted(self, order: Sequence[int]) -> View:
        sizes = tuple(self.sizes[d] for d in order)
        return replace(self, order=tuple(order), sizes=sizes, shape=sizes)

    @property
    def turned(self) -> tuple[int, ...]:
        """Return the shape before elements are repeated."""
        return tuple(len(range(*self.ranges[d])) for d in self.order)

    @property
    def copies(self) -> int:
        """Return how often each element of x that is read stands in the result."""
        return math.prod(self.sizes) // max(1, math.prod(self.turned))

    @property
    def cuts(self) -> bool:
        """Say whether some elements of x are left out."""
        return any(each != (0, size, 1) for each, size in zip(self.ranges, self.split, strict=True))

    @property
    def keeps_order(self) -> bool:
        """Say whether the elements stay as they are, in another shape at most."""
        return self == replace(View.reshaped(self.split), shape=self.shape)

    @property
    def attrs(self) -> dict[str, Any]:
        """Return the attributes of a node; what changes nothing is left out."""
        found: dict[str, Any] = {"split": list(self.split)}
        if self.cuts:
            found["ranges"] = [list(each) for each in self.ranges]
        if self.order != tuple(range(len(self.order))):
            found["order"] = list(self.order)
        if self.sizes != self.turned:
            found["sizes"] = list(self.sizes)
        return found if len(found) > 1 else {"split": list(self.shape)}

    def after(self, first: View) -> View | None:
        """Return one view for `first` and then this one; None where there is none."""
        if first.keeps_order:
            return self
        return replace(first, shape=self.shape) if self.keeps_order else None

    @property
    def slices(self) -> tuple[slice, ...]:
        """Return the index of x in the shape `split`."""
        return tuple(slice(*each) for each in self.ranges)

    def moved(self, x: Tensor, front: int = 0) -> Tensor:
        """Return the elements of x where the view puts them.

        Args:
            x: with `front` dimensions of its own before those that the view moves.
            front: how many these are; they stay.
        """
        lead = x.shape[:front]
        whole = (slice(None),) * front
        x = x.reshape(*lead, *self.split)[(*whole, *self.slices)]
        x = x.permute(*range(front), *(front + d for d in self.order))
        return x.expand(*lead, *self.sizes).reshape(*lead, *self.shape).contiguous()
