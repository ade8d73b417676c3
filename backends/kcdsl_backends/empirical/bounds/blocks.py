"""Comparison of the drift measured on real kernels with its certified bound, block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kcdsl.diagnostics import codes
from kcdsl.diagnostics.model import refuse
from kcdsl.verdict.report import CrossCheck
from kcdsl_backends.empirical.sources.kernels import BlockInput, BlockProgram, block_drift
from kcdsl_backends.empirical.table.evidence import BlockComparison
from kcdsl_backends.requests import Request


class CertifiedBound(Protocol):
    """A certified bound of one block on one input."""

    @property
    def bound_inf(self) -> float:
        """Return the largest element of the bound."""
        ...

    @property
    def drift_bound(self) -> NDArray[np.float64]:
        """Return the elementwise bound of |infer - train|, float64 [T, D]."""
        ...


Certify = Callable[[str, Tensor], CertifiedBound]
"""Bound the drift of a block on the float32 input x [T, D]."""


LENGTHS, EACH = 8, 4
"""Numbers of lengths, and of requests of each, compared for a block that no clause measures."""


def compared_requests(requests: Sequence[Request]) -> list[Request]:
    """Return the requests on which a block is compared where no clause measures its drift.

    Each length needs a graph of its own, so `LENGTHS` of them are taken at even steps from the
    shortest to the longest, and the first `EACH` requests of each.
    """
    known = sorted({request.length for request in requests})
    last = len(known) - 1
    steps = min(LENGTHS, len(known))
    lengths = {known[round(i * last / max(1, steps - 1))] for i in range(steps)}
    taken: Counter[int] = Counter()
    found = []
    for request in requests:
        if request.length in lengths and taken[request.length] < EACH:
            taken[request.length] += 1
            found.append(request)
    return found


def compare_request(
    request: Request,
    block: str,
    train: BlockProgram,
    infer: BlockProgram,
    block_input: BlockInput,
    certify: Certify,
) -> BlockComparison:
    """Compare measured and certified drift of one block on its input for one request.

    Raises Refusal (KC625) if an element of the measured drift is above its certified bound or is
    not a number.
    """
    x = block_input(request, block).to(torch.float32)
    with torch.no_grad():
        measured = block_drift(train, infer, block, x).abs().numpy()
    certified = certify(block, x)
    bound = np.asarray(certified.drift_bound, dtype=np.float64)
    if bound.shape != measured.shape:
        raise refuse(
            codes.ABOVE_CERTIFIED,
            f"the certified bound of {block} has shape {bound.shape}, the measured drift "
            f"{measured.shape}",
            help="report it: the block was bounded for another shape than it has, so nothing "
            "can be concluded",
        )
    above = ~(measured <= bound)
    if bool(above.any()):
        row, column = (int(i) for i in np.argwhere(above)[0])
        raise refuse(
            codes.ABOVE_CERTIFIED,
            f"{block}, request {request.key}: the measured drift {measured[row, column]:.6g} of "
            f"token {row}, feature {column} is not below the certified {bound[row, column]:.6g}",
            notes=(f"{int(above.sum())} of {above.size} elements are above their bound",),
            help="a kernel does not compute as its numerics claim, or the bound is wrong; "
            "correct the numerics of the kernels, or report the contract and the checkpoint",
        )
    return BlockComparison(request.key, float(measured.max()), float(certified.bound_inf))


def summarise(block: str, found: Sequence[BlockComparison]) -> CrossCheck:
    """Summarise the comparisons of one block; the named request has the least slack."""
    closest = min(found, key=lambda c: c.tightness if c.tightness is not None else np.inf)
    return CrossCheck(
        block,
        len(found),
        max(c.measured for c in found),
        max(c.certified for c in found),
        closest.tightness,
        closest.request,
    )
