"""What affine forms of both kernels say of the next-token distributions of one input.

Softmax does not change if all logits of a row move together. So a row is described by differences
from the column that is largest without roundings: for the training kernel z_j - z_top; for the
drift by three boxes, each best somewhere: of z_j - z_top, of deviations from the mean, and of the
z_j themselves. The bound chain (docs/bound-chain.md) takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from kcdsl.chain import CertifiedRow, certified_row, sharpest
from kcdsl.verdict.model import InvalidEvidence
from kcdsl_backends.affine.functionals import contrasts, deviations
from kcdsl_backends.affine.order import Values
from kcdsl_backends.affine.pair import Both
from kcdsl_backends.affine.reaches import rows
from kcdsl_backends.interval.box import Box, up


def certified_rows(
    pair: Both,
    temperature: float | Fraction = 1,
    *,
    factor: float = 1.0,
    osc: float | None = None,
    amax: float | None = None,
    g: float | None = None,
) -> Iterator[CertifiedRow | InvalidEvidence]:
    """Yield the bounds of the chain for every row of the output, in order.

    They hold for every run of both kernels, for every input of the region.

    Args:
        pair: both kernels of a block whose output are logits [..., V].
        temperature: of the softmax, on both sides.
        factor: by how much the widths of all boxes are enlarged.
        osc, amax, g: constants of the reward and of the gradient; see `certified_row`.
    """
    train = Values(pair.train, pair.output, factor)
    whole = pair.box()
    for row in rows(pair.shape):
        reference = train.reference[row]
        every = torch.arange(reference.numel(), device=reference.device)
        top = reference.argmax().expand_as(every)
        zero = every == top
        boxes = _ends(train.differences(row, every, top), zero)
        drifts = (
            _ends(_wider(contrasts(pair, row, every, top), factor), zero),
            _ends(_wider(deviations(pair, row), factor)),
            _ends(_wider(Box(whole.lo[row], whole.hi[row]), factor)),
        )
        found: list[CertifiedRow] = []
        for intervals in drifts:
            one = certified_row(
                intervals=intervals,
                logit_intervals=boxes,
                temperature=temperature,
                osc=osc,
                amax=amax,
                g=g,
            )
            if isinstance(one, InvalidEvidence):
                yield one
                break
            found.append(one)
        else:
            yield sharpest(found)


def _wider(box: Box, factor: float) -> Box:
    return box.widen(up((factor - 1.0) * (box.hi - box.lo), 2))


def _ends(box: Box, zero: Tensor | None = None) -> list[tuple[float, float]]:
    """Return the ends of the box; 0 where a column is compared with itself."""
    if zero is not None:
        nothing = torch.zeros_like(box.lo)
        box = Box(torch.where(zero, nothing, box.lo), torch.where(zero, nothing, box.hi))
    return list(zip(box.lo.tolist(), box.hi.tolist(), strict=True))
