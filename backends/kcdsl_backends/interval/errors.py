"""Why the interval domain gives no bound."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kcdsl.model.formats import Format
from kcdsl.model.graph import Node
from kcdsl.model.numerics import Numerics, narrower


class NoBound(Exception):
    """No finite bound exists for this node; never to be read as a small one."""

    def __init__(self, node: str, reason: str) -> None:
        self.node = node
        self.reason = reason
        super().__init__(f"{node}: {reason}")


def refuse_wide(nodes: Mapping[str, Node], node: Node, numerics: Numerics) -> None:
    """Refuse a sum or product of which an operand has a format that the result does not hold.

    Raises:
        NoBound: naming the operand.
    """
    name = narrower(nodes, node, numerics)
    if name is not None:
        raise NoBound(node.name, f"{name} has a format that the result does not hold: cast it")


def refuse_overflow(node: str, size: Tensor, form: Format, which: str = "") -> None:
    """Refuse magnitudes that may exceed the largest finite number of a format, or that are NaN.

    `which` says what the elements are of, where that is not the result of the node.

    Raises:
        NoBound: with the element that is largest.
    """
    if bool((size <= form.largest).all()):
        return
    raise overflow(node, size, f"{which} may exceed {form.largest:g} ({form.name})")


def refuse_unbounded_sums(node: str, error: Tensor, form: Format) -> None:
    """Refuse sums whose error in the format of the accumulator has no bound.

    Raises:
        NoBound: with the first such element.
    """
    if bool(torch.isfinite(error).all()):
        return
    limit = f"{form.largest:g} ({form.name})"
    raise overflow(
        node, error, f" is a sum that may exceed {limit}, or has too many roundings for that format"
    )


def overflow(node: str, size: Tensor, what: str) -> NoBound:
    """Return that an overflow is reachable, at the element where `size` is largest."""
    flat = int(torch.nan_to_num(size, nan=torch.inf).argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(flat), size.shape)]
    return NoBound(node, f"overflow reachable: element {index}{what}")
