"""The drift of a whole model on one request, bounded by affine forms for the claimed numerics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from kcdsl.diagnostics.model import Refusal
from kcdsl.model.numerics import Numerics
from kcdsl_backends.certifier.workshop import Workshop, claim_margin
from kcdsl_backends.empirical.certified import Box
from kcdsl_backends.interval.box import up
from kcdsl_backends.interval.errors import NoBound
from kcdsl_backends.requests import Request
from kcdsl_backends.threads import threads_for

BLOCK = "model"
_PER_SECOND = 5e8
"""Multiplications a second that a first estimate assumes: a slow core."""
_EMPTY = np.empty((0, 0))


@dataclass(frozen=True, slots=True)
class AffineBound:
    """Bounds the block `model` request by request; graphs and weights are kept in the workshop."""

    shop: Workshop
    train_runs: str
    infer_runs: str

    @property
    def numerics(self) -> Mapping[str, str]:
        """Return in words what both kernels claim."""
        return {
            "train": _in_words(self.train_runs, self.shop.train),
            "infer": _in_words(self.infer_runs, self.shop.infer),
        }

    def cost(self, request: Request) -> float:
        """Return the expected seconds: a pass back through all weights for every output."""
        model = self.shop.model
        shapes = [tensor.shape for tensor in model.checkpoint.tensors.values()]
        widest = max((size for shape in shapes for size in shape), default=1)
        weights = sum(prod(shape) for shape in shapes)
        outputs = request.length * widest
        return 2.0 * outputs * weights * request.length / _PER_SECOND

    def bound(self, request: Request) -> Box:
        """Return the bounds of infer - train for every output of the request."""
        try:
            problem = self.shop.problem(BLOCK, request.tokens)
            margin = claim_margin(self.shop.train, self.shop.infer, problem.graph)
            radius = torch.zeros(1, 1, dtype=torch.float64, device=self.shop.device)
            with threads_for(problem.size):
                found = problem.affine(None, radius).box
        except NoBound as no:
            return Box(_EMPTY, _EMPTY, str(no))
        except Refusal as refused:
            return Box(_EMPTY, _EMPTY, refused.diagnostics[0].message)
        wider = found.widen(up(found.mag() * (margin - 1.0)))
        return Box(wider.lo.cpu().numpy(), wider.hi.cpu().numpy())


def _in_words(run: str, numerics: Numerics) -> str:
    return f"{run} {numerics.compute}"
