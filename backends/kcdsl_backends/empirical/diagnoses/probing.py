"""Running both kernels, and the reference, on the requests that diagnoses read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kcdsl.diagnostics.model import Refusal
from kcdsl_backends.empirical.diagnoses.distances import size
from kcdsl_backends.empirical.diagnoses.model import POSITIONS, PROBES, Forward, Probe
from kcdsl_backends.empirical.diagnoses.reference import Reference
from kcdsl_backends.empirical.sources.kernels.run import Kernel, tensor_digest
from kcdsl_backends.requests import Request


def chosen(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Return the requests that are probed: the first of at least 16 tokens, else the longest."""
    return tuple(sorted(requests, key=lambda r: min(r.length, 16), reverse=True)[:PROBES])


def forwards(train: Kernel, infer: Kernel, encoder: bool) -> tuple[Forward, Forward]:
    """Return what is probed of each kernel: its states where the model has no logits."""
    return (train.hidden, infer.hidden) if encoder else (train.logits, infer.logits)


def probe(
    request: Request,
    train: Kernel,
    infer: Kernel,
    encoder: bool,
    reference: Reference | None = None,
) -> Probe | None:
    """Run both kernels twice on a request; None where one of them fails."""
    outputs, equal, wobble = [], [], []
    for forward in forwards(train, infer, encoder):
        try:
            with torch.no_grad():
                first, second = forward(request.tokens), forward(request.tokens)
        except (RuntimeError, ValueError, Refusal):
            return None
        one, two = (o[:POSITIONS].to("cpu", torch.float64, copy=True) for o in (first, second))
        same = tensor_digest(first) == tensor_digest(second)
        outputs.append(one)
        equal.append(same)
        wobble.append(0.0 if same or one.shape != two.shape else size(one, two, states=encoder))
    known = None if reference is None else _reference(request, reference)
    gold, claimed = (None, None) if known is None else (known[0], (known[1], known[2]))
    if gold is not None and gold.shape != outputs[0].shape:
        gold, claimed = None, None
    return Probe(
        request,
        outputs[0],
        outputs[1],
        (equal[0], equal[1]),
        (wobble[0], wobble[1]),
        gold,
        claimed,
    )


def _reference(request: Request, reference: Reference) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the output without roundings and as each side claims; None where one cannot run."""
    try:
        gold, train, infer = (
            reference.run(claim, request.tokens)
            for claim in (None, reference.train, reference.infer)
        )
    except (Exception, SystemExit):  # a user's module may raise anything in another format
        return None
    return gold, train, infer
