"""Linear constraints on inputs and outputs of ReLU networks, and whether they hold at a point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from torch import Tensor

Layers = Sequence[tuple[Tensor, Tensor]]
"""Weight [out, in] and bias [out] of every linear, of at most float64; ReLU between them."""


@dataclass(frozen=True, slots=True)
class LinearConstraint:
    """inputs · x + first · f(x) + second · g(x) <= limit.

    Args:
        inputs, first, second: coefficients, float64; second is empty where there is one network.
    """

    inputs: tuple[float, ...]
    first: tuple[float, ...]
    second: tuple[float, ...]
    limit: Fraction


def holds_at(
    networks: Sequence[Layers],
    point: Sequence[Fraction],
    unsafe: Sequence[Sequence[LinearConstraint]],
) -> bool:
    """Return whether all constraints of some conjunction hold at an input, in exact arithmetic."""
    outputs = [_exact_run(network, point) for network in networks]
    second = outputs[1] if len(outputs) == 2 else []

    def met(one: LinearConstraint) -> bool:
        terms = [(one.inputs, point), (one.first, outputs[0]), (one.second, second)]
        value = sum(
            (Fraction(c) * v for part, values in terms for c, v in zip(part, values, strict=True)),
            Fraction(0),
        )
        return value <= one.limit

    return any(all(met(one) for one in group) for group in unsafe)


def _exact_run(network: Layers, point: Sequence[Fraction]) -> list[Fraction]:
    """Return the outputs of a network in exact arithmetic: integers over a common denominator."""
    below = math.lcm(*(value.denominator for value in point))
    values = np.array([int(value * below) for value in point], dtype=object)
    for number, (weight, bias) in enumerate(network):
        weights = [[Fraction(v) for v in row] for row in weight.double().tolist()]
        biases = [Fraction(v) for v in bias.double().tolist()]
        scale = max(v.denominator for row in (*weights, biases) for v in row)
        matrix = np.array([[int(v * scale) for v in row] for row in weights], dtype=object)
        known = np.array([int(v * scale) * below for v in biases], dtype=object)
        values, below = matrix @ values + known, below * scale
        if number < len(network) - 1:
            values = np.array([max(v, 0) for v in values], dtype=object)
    return [Fraction(int(v), below) for v in values]


def run(network: Layers, x: Tensor) -> Tensor:
    """Return the outputs of a network for inputs [B, inputs], in the format of the inputs."""
    for number, (weight, bias) in enumerate(network):
        x = x @ weight.T + bias
        x = x if number == len(network) - 1 else x.clamp_min(0)
    return x
