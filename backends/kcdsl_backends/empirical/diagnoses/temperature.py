"""Temperature: was one side divided by a number that the other was not?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from kcdsl_backends.empirical.diagnoses.distances import deviation, mean, total_variation
from kcdsl_backends.empirical.diagnoses.model import SMALLEST, Probe, Repair
from kcdsl_backends.empirical.metrics.policies import kl

WIDEST = 1.5
"""Largest |ln T| that is tried."""
_LEAST = 1e-3


def temperature_fit(probes: Sequence[Probe], temperature: float) -> Repair:
    """Does one temperature on the training logits explain the drift? Report the best T.

    The best T is that of the least KL(softmax(train / T) || infer).
    """
    name = "temperature_fit"
    if not probes:
        return Repair(name, "no request could be run", None)
    train = torch.cat([p.train for p in probes])
    target = torch.log_softmax(torch.cat([p.infer for p in probes]) / temperature, -1)

    def loss(log_t: float) -> float:
        scaled = torch.log_softmax(train / (temperature * math.exp(log_t)), -1)
        return float(kl(scaled, target).mean())

    here = loss(0.0)
    if not math.isfinite(here):
        return Repair(name, "the drift is not finite", None)
    best = minimise(loss, -WIDEST, WIDEST)
    fitted, before = math.exp(best), deviation(probes, temperature)
    after = mean([total_variation(p.train / fitted, p.infer, temperature) for p in probes])
    left = after / before if before > SMALLEST and abs(best) > _LEAST else 1.0
    detail = f"T = {fitted:.3f} leaves {loss(best):.3g} of {here:.3g} nats"
    return Repair(name, detail, left, fitted)


def minimise(function: Callable[[float], float], low: float, high: float) -> float:
    """Return the minimiser of a unimodal function on [low, high] by golden sections."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    at_a, at_b = function(a), function(b)
    for _ in range(32):
        if at_a <= at_b:
            high, b, at_b = b, a, at_a
            a = high - ratio * (high - low)
            at_a = function(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + ratio * (high - low)
            at_b = function(b)
    return (low + high) / 2
