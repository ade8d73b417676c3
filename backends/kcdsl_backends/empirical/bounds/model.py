"""The drift of a whole model on one request, bounded by affine forms for the claimed numerics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np
import torch

from kcdsl.diagnostics.model import Refusal
from kcdsl.model.numerics import Numerics
from kcdsl_backends.certifier.statements.problems import ProblemFactory, claim_margin
from kcdsl_backends.drift.affine_forms import affine_forms
from kcdsl_backends.drift.boxes import NoBound, up
from kcdsl_backends.empirical.bounds.requests import RequestBounds
from kcdsl_backends.process import threads_for
from kcdsl_backends.requests import Request

BLOCK = "model"
_PER_SECOND = 5e8
"""Multiplications per second, of a slow core, for the first estimate of the time."""
_EMPTY = np.empty((0, 0))


@dataclass(frozen=True, slots=True)
class PassEffort:
    """The reverse passes that are made: those that are needed for kernels whose unit roundoff is
    `grain` or larger. `share` is the approximate share of the time of all passes."""

    words: str
    grain: float
    share: float


EFFORTS = (
    PassEffort("affine forms with fewer reverse passes", 2.0**-13, 0.4),
    PassEffort("affine forms", 0.0, 1.0),
)
"""Any reverse pass may be left out: the bound holds without it and is only larger."""


@dataclass(frozen=True, slots=True)
class AffineBound:
    """Bounds the block `model` request by request; graphs and weights are kept in the factory."""

    factory: ProblemFactory
    train_runs: str
    infer_runs: str
    _work: float = field(init=False)
    """Multiplications of a request of one token; they grow with the square of its length."""

    def __post_init__(self) -> None:
        """Compute the work once for all requests."""
        checkpoint = self.factory.model.checkpoint
        shapes = [checkpoint.shape(key) for key in checkpoint.tensors]
        widest = max((size for shape in shapes for size in shape), default=1)
        object.__setattr__(self, "_work", 2.0 * widest * sum(prod(shape) for shape in shapes))

    @property
    def numerics(self) -> Mapping[str, str]:
        """Return the claimed numerics of both kernels in words."""
        return {
            "train": _in_words(self.train_runs, self.factory.train),
            "infer": _in_words(self.infer_runs, self.factory.infer),
        }

    @property
    def domains(self) -> tuple[str, ...]:
        """Return the names of the domains, the cheapest first."""
        return tuple(effort.words for effort in EFFORTS)

    def cost(self, request: Request, domain: int) -> float:
        """Return the expected seconds: a reverse pass through all weights for every output."""
        return EFFORTS[domain].share * self._work * request.length**2 / _PER_SECOND

    def bound(self, request: Request, domain: int) -> RequestBounds:
        """Return the bounds of infer - train for every output of the request."""
        try:
            problem = self.factory.problem(BLOCK, request.tokens)
            margin = claim_margin(self.factory.train, self.factory.infer, problem.graph)
            radius = torch.zeros(1, 1, dtype=torch.float64, device=self.factory.device)
            with threads_for(problem.size):
                sides = problem.train, problem.infer
                found = affine_forms(
                    problem.graph, *sides, None, radius, grain=EFFORTS[domain].grain
                ).box()
        except NoBound as no:
            return RequestBounds(_EMPTY, _EMPTY, str(no))
        except Refusal as refused:
            return RequestBounds(_EMPTY, _EMPTY, refused.diagnostics[0].message)
        wider = found.widen(up(found.mag() * (margin - 1.0)))
        return RequestBounds(wider.lo.cpu().numpy(), wider.hi.cpu().numpy())


def _in_words(run: str, numerics: Numerics) -> str:
    return f"{run} {numerics.compute}"
