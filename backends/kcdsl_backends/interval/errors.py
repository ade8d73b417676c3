"""Why the interval domain gives no bound."""

from __future__ import annotations

import torch
from torch import Tensor

from kcdsl.model.formats import Format
from kcdsl.model.graph import Node


class NoBound(Exception):
    """No finite bound exists for this node; never to be read as a small one."""

    def __init__(self, node: str, reason: str) -> None:
        self.node = node
        self.reason = reason
        super().__init__(f"{node}: {reason}")


def refuse_written(node: Node) -> None:
    """Refuse an operation that is written out.

    Raises:
        NoBound: it is.
    """
    if node.attrs.get("form", "fused") != "fused":
        raise NoBound(node.name, f"there is no rule for a {node.op} written out")


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
